"""Compiles a launch for an architecture without such a GPU, and reads what it needs.

No driver is involved. A launch is a kernel with its arguments, as `launch.launch` sees it; tensors
are needed for their dtypes and alignment only.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from boltzattn.triton_kernels.launch import cdiv, launching_by
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ARCHITECTURES = {  # as the launch tables name them
    "sm_80": "ampere",
    "sm_90": "ampere",
    "sm_100": "blackwell",
    "sm_120": "blackwell",
    "gfx942": "amd",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


def is_constant(argument: Any) -> bool:
    """Whether Triton compiles the argument in."""
    return argument is None or (type(argument) is int and argument == 1)


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, and its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    fixed: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def pointers_and_numbers(self) -> list[Any]:
        """The arguments that remain at run time, in the order of the compiled kernel."""
        left: list[Any] = []

        def visit(value: Any) -> None:
            if isinstance(value, tuple):
                for item in value:
                    visit(item)
            elif not is_constant(value):
                left.append(value)

        visit(self.args)
        return left


def source_of(launch: Launch) -> ASTSource:
    """The kernel specialised as Triton's own launcher would: None, 1 and multiples of 16."""
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list] = {}

    def type_of(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            types = [type_of(item, (*path, i)) for i, item in enumerate(value)]
            return type(value)._make(types) if hasattr(value, "_make") else tuple(types)
        if is_constant(value):
            constants[path] = value
            return "constexpr"
        if isinstance(value, Tensor):
            if value.data_ptr() % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            return _TYPES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    names = launch.kernel.arg_names
    signature = {
        name: type_of(value, (i,))
        for i, (name, value) in enumerate(zip(names, launch.args, strict=False))
    }
    for name in names[len(launch.args) :]:
        signature[name] = "constexpr"
        constants[names.index(name),] = launch.fixed[name]
    return ASTSource(launch.kernel, signature, constants, attributes)


def specialisation(launch: Launch) -> str:
    """Launches with the same text share one compiled kernel."""
    source = source_of(launch)
    fixed = sorted((name, str(value)) for name, value in launch.fixed.items())
    return f"{launch.name} {source.signature} {source.attrs} {fixed}"


def launches_for(target: str, function: Callable, *args: Any) -> list[Launch]:
    """What function(*args) would launch there; nothing runs, so its results are uninitialised."""
    launches: list[Launch] = []
    with launching_by(lambda *launch: launches.append(Launch(*launch)), ARCHITECTURES[target]):
        function(*args)
    return launches


def compile_for(launch: Launch, target: str) -> CompiledKernel:
    """The kernel as `target` would run it; the launch must come from `launches_for` that target."""
    options = {name: launch.fixed[name] for name in OPTIONS if name in launch.fixed}
    return triton.compile(source_of(launch), target=TARGETS[target], options=options)


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel needs."""

    registers: int  # per thread
    spilled: int  # bytes of stack per thread
    shared: int  # bytes
    warps: int


def resources_of(compiled: CompiledKernel) -> Resources:
    """Read from what the binary records of itself."""
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]

        def number(key: str) -> int:
            return int(re.search(rf"\.{key}:\s*(\d+)", text).group(1))

        # There, scalar registers spill into vector registers, which is not memory.
        spilled = number("private_segment_fixed_size") + 4 * number("vgpr_spill_count")
        return Resources(number("vgpr_count"), spilled, shared, warps)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        record = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (
        int(re.search(rf"{key}:(\d+)", record).group(1)) for key in ("REG", "STACK")
    )
    return Resources(registers, stack, shared, warps)


class Multiprocessor(NamedTuple):
    """What the programs on one multiprocessor (AMD: compute unit) share."""

    registers: int  # of one lane
    shared: int  # bytes
    warps: int  # at most
    programs: int  # at most
    lanes: int  # per warp
    reserved: int  # bytes of shared memory that the system takes from every program


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(65536, 164 << 10, 64, 32, 32, 1024),
    "sm_90": Multiprocessor(65536, 228 << 10, 64, 32, 32, 1024),
    "sm_100": Multiprocessor(65536, 228 << 10, 64, 32, 32, 1024),
    "sm_120": Multiprocessor(65536, 100 << 10, 48, 24, 32, 1024),
    "gfx942": Multiprocessor(131072, 64 << 10, 32, 16, 64, 0),
}


def occupancy(resources: Resources, target: str) -> float:
    """Share of a multiprocessor's warps that can be resident."""
    limits = MULTIPROCESSORS[target]
    registers_per_warp = cdiv(resources.registers, 8) * 8 * limits.lanes
    by_registers = limits.registers // (registers_per_warp * resources.warps)
    by_shared = limits.shared // max(1, resources.shared + limits.reserved)
    by_warps = limits.warps // resources.warps
    resident = min(by_registers, by_shared, by_warps, limits.programs)
    return resident * resources.warps / limits.warps
