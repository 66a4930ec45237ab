"""Runs the CUDA launchers on CPU tensors: their kernels are executed by ptxrun from nvcc's PTX.

The launchers of csrc/cuda/*.cu are linked to a runtime that calls back (cuda_host/fake_cudart.cpp),
so grids, workspaces and arguments are those that a GPU would get.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
from collections.abc import Iterator
from ctypes import c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ptxrun
import torch
from boltzattn.problem import Gradients, accumulate_dtype
from cuda_compile import CSRC, ROOT, compile_cuda, toolkit
from torch import Tensor

SOURCES = ("direct", "direct_backward", "transform", "project")
MOST_PIECES = 64
MOST_LEAD = 8
DTYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
OPAQUE = 4  # bool, and the int64 of seeds


class Strided(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("row", c_int64),
        ("column", c_int64),
        ("lead", c_int64 * MOST_LEAD),
        ("dtype", c_int32),
        ("whole_vectors", c_int32),
    )


class Call(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "n_q", "n_k", "rank", "dv")),
        ("scale", c_double),
        ("dropout_p", c_double),
        ("lead", c_int64 * MOST_LEAD),
        ("dims", c_int32),
        ("is_causal", c_int32),
        ("is_gaussian", c_int32),
        *(
            (name, Strided)
            for name in ("query", "key", "value", "attn_mask", "key_mask", "slopes", "seed", "out")
        ),
        ("lse", c_void_p),
        ("served", c_void_p),
        ("totals", c_void_p),
    )


class Gradient(ctypes.Structure):
    _fields_ = (
        ("call", Call),
        *(
            (name, Strided)
            for name in ("grad_out", "grad_lse", "grad_query", "grad_key", "grad_value")
        ),
        *((name, Strided) for name in ("grad_key_mask", "grad_slopes")),
        ("row_norms", c_void_p),
        ("slope_sums", c_void_p),
    )


class Projected(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "n", "columns", "outputs", "chunks")),
        *((name, Strided) for name in ("x", "weight", "bias")),
        *((name, c_void_p) for name in ("out", "parts", "extents")),
    )


@functools.cache
def modules() -> dict[str, ptxrun.Kernel]:
    """Every kernel of csrc/cuda for sm_80, by its mangled name."""
    kernels = {}
    for source in SOURCES:
        module = ptxrun.load(compile_cuda(source).ptx.read_text())
        kernels.update({name: (module, name) for name in module.kernels()})
    return kernels


@functools.cache
def launchers() -> ctypes.CDLL:
    """The launchers, linked to a runtime that calls back."""
    objects = [compile_cuda(source).object for source in SOURCES]
    host = Path(__file__).parent / "cuda_host/fake_cudart.cpp"
    library = objects[0].parent / "launchers.so"
    temporary = library.with_suffix(f".{id(library)}.so")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    includes = ["-I", str(CSRC), "-isystem", str(toolkit() / "include")]
    subprocess.run(
        [*command, *includes, str(host), *map(str, objects), "-o", str(temporary)],
        check=True,
        cwd=ROOT,
    )
    temporary.replace(library)
    loaded = ctypes.CDLL(str(library))
    loaded.call_totals_bytes.restype = c_int64
    loaded.call_project_chunks.restype = c_int64
    loaded.call_row_norms_bytes.restype = c_int64
    loaded.call_slope_sums_bytes.restype = c_int64
    return loaded


def twin(x: Tensor) -> Tensor:
    """A copy in memory of its own, with the same strides; what is broadcast is only ever read."""
    return (
        x if 0 in x.stride() else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
    )


@dataclass
class Launched:
    """A launch that can be repeated, with the kernel as it is or with another."""

    kernel: ptxrun.Kernel
    size: tuple[int, int, int]  # blocks, threads, bytes of dynamic shared memory
    words: list[list[int]]  # of each argument
    options: dict[str, Any]
    before: dict[int, Tensor]
    after: dict[int, Tensor]
    result: ptxrun.Result

    def repeat(self, kernel: ptxrun.Kernel) -> bool:
        """Whether `kernel` leaves the same bytes behind; an error if it takes 20 times as long."""
        tensors = {address: twin(x) for address, x in self.before.items()}
        arguments = [struct_argument(words, tensors) for words in self.words]
        blocks, threads, shared = self.size
        # A kernel that was damaged may run forever.
        most = 20 * self.result.instructions
        limits = {"max_steps": most, "max_total_steps": most}
        kernel.launch((blocks,), (threads,), arguments, shared, **limits, **self.options)
        return all(
            torch.equal(as_bytes(x), as_bytes(self.after[address]))
            for address, x in tensors.items()
        )


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def struct_argument(words: list[int], tensors: dict[int, Tensor]) -> ptxrun.Struct:
    """An argument of which those words that are addresses of tensors stand for these."""
    codes = "".join("P" if word in tensors else "q" for word in words)
    return ptxrun.Struct(codes, *(tensors.get(word, word) for word in words))


# Names of the kernels that have run in this process.
executed: set[str] = set()


class Machine:
    """A call's tensors and the launches made for it; with `record` they can be repeated."""

    def __init__(self, record: bool = False, **options: Any) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.launched: list[Launched] | None = [] if record else None
        self.results: list[ptxrun.Result] = []
        self.options = {
            "uninit": "report",
            "intrawarp": "barriers",
            "globalcheck": True,
            **options,
        }

    def hold(self, x: Tensor) -> int | None:
        """The address of a tensor, which is thereby known to kernels."""
        if x.numel() == 0:
            return None
        self.tensors[x.data_ptr()] = x
        return x.data_ptr()

    def workspace(self, size: int) -> int | None:
        return self.hold(torch.full((size,), 0xFF, dtype=torch.uint8))

    def _launch(self, name: str, size: tuple[int, int, int], arguments: Any) -> None:
        module, kernel_name = modules()[name]
        kernel = module.kernel(kernel_name)
        words = [
            list(ctypes.cast(arguments[i], ctypes.POINTER(c_int64 * (param.size // 8))).contents)
            for i, param in enumerate(kernel.prog.params)
        ]
        before = {a: twin(x) for a, x in self.tensors.items()} if self.launched is not None else {}
        values = [struct_argument(w, self.tensors) for w in words]
        blocks, threads, shared = size
        result = kernel.launch((blocks,), (threads,), values, smem=shared, **self.options)
        self.results.append(result)
        executed.add(name)
        if self.launched is not None:
            after = {a: twin(x) for a, x in self.tensors.items()}
            self.launched.append(Launched(kernel, size, words, self.options, before, after, result))

    @contextlib.contextmanager
    def running(self) -> Iterator[ctypes.CDLL]:
        """Within the block, launches run here."""
        failed: list[BaseException] = []

        @ctypes.CFUNCTYPE(
            None,
            ctypes.c_char_p,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_size_t,
            ctypes.POINTER(c_void_p),
        )
        def launched(name: bytes, blocks: int, threads: int, shared: int, arguments: Any) -> None:
            if failed:
                return
            try:
                self._launch(name.decode(), (blocks, threads, shared), arguments)
            except BaseException as error:  # an exception cannot pass through C
                failed.append(error)

        library = launchers()
        library.set_callback(launched)
        yield library
        if failed:
            raise failed[0]


def describe(machine: Machine, x: Tensor | None, inner: int) -> Strided:
    """What csrc/cuda/ops.cpp makes of a tensor with `inner` dimensions after the leading ones."""
    m = Strided()
    if x is None:
        return m
    m.data = machine.hold(x)
    m.dtype = DTYPES.get(x.dtype, OPAQUE)
    lead = [s for s, n in zip(x.stride(), x.shape[: x.ndim - inner], strict=False) if n != 1]
    m.lead[: len(lead)] = lead
    if inner == 2:
        m.row, m.column = x.stride()[-2:]
        vector = 16 // x.element_size()
        m.whole_vectors = (
            m.column == 1
            and x.shape[-1] % vector == 0
            and all(stride % vector == 0 for stride in (m.row, *lead))
            and x.data_ptr() % 16 == 0
        )
    return m


def column_vector(machine: Machine, x: Tensor | None) -> Strided:
    m = describe(machine, x, 1)
    if x is not None:
        m.row = x.stride(-1)
    return m


def row_vector(machine: Machine, x: Tensor | None) -> Strided:
    m = describe(machine, x, 1)
    if x is not None:
        m.column = x.stride(-1)
    return m


def make_call(
    machine: Machine,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
    out: Tensor,
    lse: Tensor,
    slopes: Tensor | None = None,
    is_gaussian: bool = False,
) -> Call:
    call = Call()
    lead = query.shape[:-2]
    call.heads = lead.numel()
    sizes = [n for n in lead if n != 1]
    call.lead[: len(sizes)] = sizes
    call.dims = len(sizes)
    call.n_q, call.rank = query.shape[-2:]
    call.n_k, call.dv = value.shape[-2:]
    call.scale, call.dropout_p, call.is_causal = scale, dropout_p, is_causal
    call.is_gaussian = is_gaussian
    call.query, call.key, call.value, call.out = (
        describe(machine, x, 2) for x in (query, key, value, out)
    )
    call.attn_mask = describe(machine, attn_mask, 2)
    call.key_mask = row_vector(machine, key_mask)
    call.slopes = describe(machine, slopes, 0)
    call.seed = describe(machine, seed if dropout_p > 0 else None, 0)
    call.lse = machine.hold(lse)
    return call


def forward(method: str, machine: Machine, *arguments: Any, **score: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) for the arguments of `boltzattn::cuda_<method>_forward`, on CPU tensors.

    `score` has `slopes` and `is_gaussian`, where they are not the usual None and False.
    """
    query, _, value = arguments[:3]
    out = query.new_full((*query.shape[:-1], value.shape[-1]), torch.nan)
    lse = query.new_full(query.shape[:-1], torch.nan, dtype=torch.float64)
    call = make_call(machine, *arguments, out, lse, **score)
    with machine.running() as library:
        if method == "direct":
            call.totals = machine.workspace(library.call_totals_bytes(ctypes.byref(call), 0))
            error = library.run_direct_forward(ctypes.byref(call))
        else:
            pieces = transform_pieces(machine, library, call, False)
            error = library.run_transform_forward(ctypes.byref(call), pieces)
    assert error == 0
    return out, lse


def transform_pieces(machine: Machine, library: ctypes.CDLL, call: Call, backward: bool) -> Any:
    """The transform's workspace, every piece a tensor of its own: its bounds are checked."""
    sizes = (c_int64 * MOST_PIECES)()
    count = library.call_transform_pieces(ctypes.byref(call), int(backward), sizes)
    pieces = (c_void_p * MOST_PIECES)(*map(machine.workspace, sizes[:count]))
    machine.report = machine.tensors[pieces[0]].view(torch.float64).view(-1, 7)
    return pieces


def backward(method: str, machine: Machine, *arguments: Any, **score: Any) -> Gradients:
    """Gradients for the arguments of `boltzattn::cuda_<method>_backward`, on CPU tensors."""
    grad_out, grad_lse, out, lse, *problem = arguments
    key_mask, slopes = problem[4], score.get("slopes")
    bias = None if key_mask is None or key_mask.dtype == torch.bool else key_mask
    sums = accumulate_dtype(problem[0].dtype)
    grads = [torch.full(x.shape, torch.nan, dtype=x.dtype) for x in problem[:3]]
    grad_bias = torch.full((0,) if bias is None else bias.shape, torch.nan, dtype=sums)
    grad_slopes = torch.full((0,) if slopes is None else slopes.shape, torch.nan).double()
    g = Gradient()
    g.call = make_call(machine, *problem, out, lse, **score)
    g.grad_out = describe(machine, grad_out, 2)
    g.grad_lse = column_vector(machine, grad_lse)
    g.grad_query, g.grad_key, g.grad_value = (describe(machine, x, 2) for x in grads)
    g.grad_key_mask = row_vector(machine, None if bias is None else grad_bias)
    g.grad_slopes = describe(machine, None if slopes is None else grad_slopes, 0)
    with machine.running() as library:
        if method == "direct":
            call = ctypes.byref(g.call)
            g.call.totals = machine.workspace(library.call_totals_bytes(call, 1))
            g.row_norms = machine.workspace(library.call_row_norms_bytes(call))
            g.slope_sums = machine.workspace(library.call_slope_sums_bytes(call))
            error = library.run_direct_backward(ctypes.byref(g))
        else:
            pieces = transform_pieces(machine, library, g.call, True)
            error = library.run_transform_backward(ctypes.byref(g), pieces)
    assert error == 0
    return Gradients(*grads, grad_bias, grad_slopes)


def project(
    machine: Machine, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, extents) for the arguments of `boltzattn::cuda_project`, on CPU tensors."""
    p = Projected()
    p.batch, p.n, p.columns = x.shape
    p.outputs = weight.shape[0]
    out = x.new_full((p.batch, p.outputs, p.n), torch.nan)
    extents = x.new_full((p.batch, p.outputs, 6), torch.nan, dtype=torch.float64)
    p.x, p.weight = describe(machine, x, 2), describe(machine, weight, 2)
    p.x.lead[0] = x.stride(0)
    p.bias = row_vector(machine, bias)
    p.out, p.extents = machine.hold(out), machine.hold(extents)
    with machine.running() as library:
        p.chunks = library.call_project_chunks(c_int64(p.n))
        p.parts = machine.workspace(p.batch * p.chunks * p.outputs * 48)
        error = library.run_project(ctypes.byref(p))
    assert error == 0
    return out, extents
