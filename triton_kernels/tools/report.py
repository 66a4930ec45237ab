"""What the kernels need on a GPU, from the compiled binaries and a model of their traffic.

Registers, shared memory and spills are what the compilers report. Bytes and operations per token
are counted from the algorithm, in sectors of 32 bytes where numbers lie scattered, and times are
the least that the memory and the arithmetic units of a GPU allow. No GPU is needed.

    python -m boltzattn.triton_kernels.tools.report > docs/gpu-report.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from boltzattn.problem import LayerProblem, OutputGradients, Problem, Saved
from boltzattn.triton_kernels.direct import direct_backward, direct_forward
from boltzattn.triton_kernels.launch import CHUNK, NODES, TOKEN_BLOCK
from boltzattn.triton_kernels.layer import layer_forward, product_kernel
from boltzattn.triton_kernels.project import project
from boltzattn.triton_kernels.tools.compilation import (
    TARGETS,
    Launch,
    compile_for,
    launches_for,
    occupancy,
    resources_of,
    specialisation,
)
from boltzattn.triton_kernels.transform import transform_backward, transform_forward

N, DV, DTYPE = 65536, 64, torch.bfloat16
WIDTH, OUTPUTS = 512, 2  # of the projection: a head's query and key from tokens of this width
SECTOR = 32  # bytes: the least that memory moves
PANELS = 16  # in use, at ordinary temperatures
PAIR = 30  # fp32 operations of a query and a key in `direct`: score, exponential, sums
SPLIT = 3  # products of parts that make up one of fp32
PARTS = ("transform forward", "transform backward", "direct", "layer", "projection")


class GPU(NamedTuple):
    """Peak bytes and operations per second (dense bf16 matrices; fp32) from the data sheets."""

    bandwidth: float
    bf16: float
    fp32: float


GPUS = {
    "A100": GPU(2.04e12, 312e12, 19.5e12),
    "H100": GPU(3.35e12, 989e12, 67e12),
    "B200": GPU(8.0e12, 2.25e15, 75e12),
}


class Work(NamedTuple):
    """Bytes of global memory and operations of matrix units per token.

    The core, whose work does not depend on n, is left out.
    """

    bytes: float
    operations: float


def work_per_token(kernel: str, dv: int, size: int, is_key: bool = False) -> Work:
    """The work of one token of the kernel's axis, for numbers of `size` bytes."""
    place = 8 if size == 4 else 4
    row, token, product = dv * size, 4 + place, 2 * NODES * dv
    partial = NODES * (place * dv + 8) / CHUNK
    table = 4 * NODES * dv / CHUNK
    counts = SECTOR * PANELS / TOKEN_BLOCK
    number = 0 if is_key else size
    # A weight is two numbers of half precision; in fp32 both the table and the weight are split.
    summed = product * (SPLIT if size == 4 else 2)
    found = {
        "extents_kernel": Work(2 * size, 0),
        "count_kernel": Work(size + counts, 0),
        "order_kernel": Work(size + counts + token + number, 0),
        "moments_kernel": Work(token + row + partial, summed),
        "reduce_kernel": Work(partial, 0),
        "evaluate_kernel": Work(token + number + row + table + SECTOR, SPLIT * product),
        "query_moments_kernel": Work(
            token + row + table + partial + SECTOR, SPLIT * product + summed
        ),
        "evaluate_keys_kernel": Work(token + 2 * row + 2 * table + SECTOR, 2 * SPLIT * product),
        "project_kernel": Work(size * (WIDTH + OUTPUTS), 2 * WIDTH * OUTPUTS),
    }
    return found.get(kernel, Work(0, 0))


def least_forward_bytes(dv: int, size: int) -> int:
    """A query, a key and a value read once, an output written once."""
    return 2 * size + 2 * dv * size


def least_backward_bytes(dv: int, size: int) -> int:
    """A query, a key, a value and a gradient read once, three gradients written once."""
    return 4 * size + 3 * dv * size


def least_operations(dv: int) -> int:
    """A row on either axis times the nodes of a panel, forward."""
    return 2 * 2 * NODES * dv


class Launches(NamedTuple):
    forward: list[Launch]  # of the transform
    backward: list[Launch]
    direct: list[Launch]
    layer: list[Launch]  # what it launches besides the transform
    project: list[Launch]


def launches(target: str) -> Launches:
    """What calls launch there.

    The direct kernels that a transform launches too are listed once, as those of `direct`.
    """
    query, value = torch.empty(1, N, 1, dtype=DTYPE), torch.empty(1, N, DV, dtype=DTYPE)
    problem = Problem(query, query, value, *[None] * 4, 1.0, 0.0, False, False)
    saved = Saved(value, torch.empty(1, N, dtype=torch.float64))
    backward = OutputGradients(value, None), saved, problem
    weight = value.new_empty(1, DV, DV)
    layer = LayerProblem(query[None], query[None], value, weight, None, None, None, None, 1.0)
    tokens = torch.empty(1, N, WIDTH, dtype=DTYPE), torch.empty(OUTPUTS, WIDTH, dtype=DTYPE)

    def of_transform(*call: Any) -> list[Launch]:
        return [x for x in launches_for(target, *call) if not x.name.startswith("direct_")]

    return Launches(
        of_transform(transform_forward, problem),
        of_transform(transform_backward, *backward),
        launches_for(target, direct_forward, problem)
        + launches_for(target, direct_backward, *backward),
        [x for x in launches_for(target, layer_forward, layer) if x.kernel is product_kernel],
        launches_for(target, project, *tokens, None),
    )


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table, line by line."""
    columns = list(columns)
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def kernels(found: Launches) -> dict[str, Launch]:
    """One launch of every specialisation, named by the call it is part of and its kernel."""
    seen: set[str] = set()
    named: dict[str, Launch] = {}
    for part, some in zip(PARTS, found, strict=True):
        for launch in some:
            axis = {True: ", keys", False: ", queries"}.get(launch.fixed.get("IS_KEY"), "")
            key = specialisation(launch)
            if key not in seen:
                seen.add(key)
                name = launch.name.removeprefix("direct_").removesuffix("_kernel")
                named[f"{part}: {name}{axis}"] = launch
    return named


def resources(target: str) -> dict[str, str]:
    """What each kernel needs on an architecture, as text."""
    found = {}
    for name, launch in kernels(launches(target)).items():
        taken = resources_of(compile_for(launch, target))
        share = f"{occupancy(taken, target):.0%}"
        found[name] = f"{taken.registers}, {taken.shared}, {taken.spilled}, {share}"
    return found


def passes(some: list[Launch], size: int) -> Iterator[tuple[str, Work]]:
    """The kernels of a call that pass over tokens, and their work per token."""
    for launch in some:
        is_key = launch.fixed.get("IS_KEY", False)
        work = work_per_token(launch.name, DV, size, is_key)
        if work.bytes:
            yield launch.name.removesuffix("_kernel"), work


def times(work: Work, tokens: int) -> list[str]:
    """The roofline of each GPU in microseconds: the slower of memory and matrix units."""
    return [
        f"{max(tokens * work.bytes / gpu.bandwidth, tokens * work.operations / gpu.bf16) * 1e6:.2f}"
        for gpu in GPUS.values()
    ]


def traffic(some: list[Launch], size: int, least: Work) -> Iterator[list[str]]:
    """Rows of bytes, operations and times: of each kernel, in all, and the least possible."""
    total = Work(0, 0)
    for name, work in passes(some, size):
        total = Work(total.bytes + work.bytes, total.operations + work.operations)
        yield [name, f"{work.bytes:.0f}", f"{work.operations:.0f}", *times(work, N)]
    yield ["in all", f"{total.bytes:.0f}", f"{total.operations:.0f}", *times(total, N)]
    yield ["the least", f"{least.bytes:.0f}", f"{least.operations:.0f}", *times(least, N)]
    share = total.bytes / least.bytes
    yield ["ratio", f"{share:.2f}", f"{total.operations / least.operations:.2f}", "", "", ""]


def lines() -> Iterator[str]:
    """The report, line by line as it is made: compiling takes a while."""
    size = torch.empty(0, dtype=DTYPE).element_size()
    found = launches("sm_80")
    dtype = str(DTYPE).removeprefix("torch.")
    yield f"Triton kernels, {dtype}, rank 1, dv {DV}, from the compiled binaries: registers per"
    yield "thread, bytes of shared memory per program, bytes that a thread spills, and the share"
    yield "of a multiprocessor's threads that can be resident:"
    yield ""
    taken = {target: resources(target) for target in TARGETS}
    rows = [[name, *(taken[target][name] for target in TARGETS)] for name in taken["sm_80"]]
    yield from table(("kernel", *TARGETS), rows)
    columns = ("kernel", "bytes", "matrix operations", *(f"{gpu}, us" for gpu in GPUS))
    n = f"n = {N}, one head; modelled, not measured"
    forward = Work(least_forward_bytes(DV, size), least_operations(DV))
    yield from ("", f"Transform forward, per token and in all at {n}:", "")
    yield from table(columns, traffic(found.forward, size, forward))
    backward = Work(least_backward_bytes(DV, size), 2 * least_operations(DV))
    yield from ("", f"Transform backward, which rebuilds the nodes first, {n}:", "")
    yield from table(columns, traffic(found.backward, size, backward))
    projection = Work(size * (WIDTH + OUTPUTS), 2 * WIDTH * OUTPUTS)
    yield from ("", f"Projection of tokens of width {WIDTH} to {OUTPUTS} numbers, {n}:", "")
    yield from table(columns, traffic(found.project, size, projection))
    yield from ("", f"Direct forward, {N} pairs per token, {n}:", "")
    matrices = Work(2 * size * (1 + DV), 2 * DV * N)
    scalar = [f"{N * N * PAIR / gpu.fp32 * 1e6:.0f}" for gpu in GPUS.values()]
    rows = [
        ["matrices", f"{matrices.bytes}", f"{matrices.operations}", *times(matrices, N)],
        ["exponentials and the rest", "", f"{PAIR * N}", *scalar],
    ]
    yield from table(columns, rows)


def main() -> None:
    print("# What the Triton kernels need\n")
    print(
        "Written by `python -m boltzattn.triton_kernels.tools.report`. Registers, shared memory "
        "and spills\nare what the compilers report. Bytes, operations and times are **modelled, "
        "not measured**: no GPU has\nrun these kernels. The CUDA kernels have their own table, "
        "[`gpu-report-cuda.md`](gpu-report-cuda.md).\n"
    )
    for line in lines():
        print(line, flush=True)


if __name__ == "__main__":
    main()
