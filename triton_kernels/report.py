"""What the kernels take of a GPU, from the compiled binaries and a model of their traffic.

Registers, shared memory and spills are facts of the compiler. Bytes and operations per token are
counted from the algorithm, in sectors of 32 bytes where numbers lie scattered, and times are what
the memory and the arithmetic of a GPU would allow at best. No GPU was asked.

    python -m boltzattn.triton_kernels.report > docs/gpu-report.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from boltzattn.triton_kernels import direct, layer, transform
from boltzattn.triton_kernels.compilation import (
    TARGETS,
    Launch,
    compile_for,
    launches_for,
    occupancy,
    resources_of,
    specialisation,
)
from boltzattn.triton_kernels.launch import CHUNK
from boltzattn.triton_kernels.layout import NODES, RANGE_BLOCK
from boltzattn.triton_kernels.project import project

N, DV, DTYPE = 65536, 64, torch.bfloat16
WIDTH, OUTPUTS = 512, 2  # of the projection: a head's query and key from tokens of this width
SECTOR = 32  # bytes that memory moves at least
PANELS = 16  # in use, at ordinary temperatures
PAIR = 30  # fp32 operations of a query and a key in `direct`: score, exponential, sums
SPLIT = 3  # products of parts that make one of fp32
PARTS = ("transform forward", "transform backward", "direct", "layer", "projection")


class GPU(NamedTuple):
    """Peak bytes and operations per second, of dense bf16 matrices and of fp32, from the vendor's
    data sheets."""

    bandwidth: float
    bf16: float
    fp32: float


GPUS = {
    "A100": GPU(2.04e12, 312e12, 19.5e12),
    "H100": GPU(3.35e12, 989e12, 67e12),
    "B200": GPU(8.0e12, 2.25e15, 75e12),
}


class Work(NamedTuple):
    """Bytes of global memory and operations of matrix units per token; the core, which has no n, is
    left out."""

    bytes: float
    operations: float


def work_per_token(kernel: str, dv: int, size: int, is_key: bool = False) -> Work:
    """Of one token of the kernel's axis, for numbers of `size` bytes."""
    place = 8 if size == 4 else 4
    row, token, product = dv * size, 4 + place, 2 * NODES * dv
    partial = NODES * (place * dv + 8) / CHUNK
    table = 4 * NODES * dv / CHUNK
    counts = SECTOR * PANELS / RANGE_BLOCK
    number = 0 if is_key else size
    # A weight is two numbers of half precision; a table and a weight of fp32 are split both.
    summed = product * (SPLIT if size == 4 else 2)
    found = {
        "ranges_kernel": Work(2 * size, 0),
        "count_kernel": Work(size + counts, 0),
        "order_kernel": Work(size + counts + token + number, 0),
        "moments_kernel": Work(token + row + partial, summed),
        "reduce_kernel": Work(partial, 0),
        "evaluate_kernel": Work(token + number + row + table + SECTOR, SPLIT * product),
        "query_gradient_kernel": Work(
            token + row + table + partial + SECTOR, SPLIT * product + summed
        ),
        "key_gradient_kernel": Work(token + 2 * row + 2 * table + SECTOR, 2 * SPLIT * product),
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
    layer: list[Launch]  # what it has beside the transform
    project: list[Launch]


def launches(target: str) -> Launches:
    """What calls launch there; the direct kernels that stand behind a transform are listed once, as
    those of `direct`."""
    query = key = torch.empty(1, N, 1, dtype=DTYPE)
    value = grad_out = out = torch.empty(1, N, DV, dtype=DTYPE)
    lse = torch.empty(1, N, dtype=torch.float64)
    options = (None, None, None, 1.0, 0.0, False)
    x, weight = torch.empty(1, N, WIDTH, dtype=DTYPE), torch.empty(OUTPUTS, WIDTH, dtype=DTYPE)
    backward = grad_out, None, query, key, value, out, lse, *options
    in_layer = query[None], key[None], value, value.new_empty(1, DV, DV), None, None, None, 1.0
    return Launches(
        _without_pairs(
            launches_for(target, transform.transform_forward, query, key, value, *options)
        ),
        _without_pairs(launches_for(target, transform.transform_backward, *backward)),
        launches_for(target, direct.direct_forward, query, key, value, *options)
        + launches_for(target, direct.direct_backward, *backward),
        [
            x
            for x in launches_for(target, layer.layer_forward, *in_layer)
            if x.kernel is layer.product_kernel
        ],
        launches_for(target, project, x, weight, None),
    )


def _without_pairs(some: list[Launch]) -> list[Launch]:
    return [launch for launch in some if "BLOCK_Q" not in launch.fixed]


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A table of Markdown, line by line."""
    columns = list(columns)
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def kernels(found: Launches) -> dict[str, Launch]:
    """One launch of every specialisation, by the call it is part of and its name."""
    seen: set[str] = set()
    named: dict[str, Launch] = {}
    for part, some in zip(PARTS, found, strict=True):
        for launch in some:
            axis = {True: ", keys", False: ", queries"}.get(launch.fixed.get("IS_KEY"), "")
            key = specialisation(launch)
            if key not in seen:
                seen.add(key)
                named[f"{part}: {launch.name.removesuffix('_kernel')}{axis}"] = launch
    return named


def resources(target: str) -> dict[str, str]:
    """What each kernel takes of an architecture, in words."""
    found = {}
    for name, launch in kernels(launches(target)).items():
        taken = resources_of(compile_for(launch, target))
        share = f"{occupancy(taken, target):.0%}"
        found[name] = f"{taken.registers}, {taken.shared}, {taken.spilled}, {share}"
    return found


def passes(some: list[Launch], size: int) -> Iterator[tuple[str, Work]]:
    """The kernels of a call that have tokens to pass over, and their work per token."""
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
    """Rows of bytes, operations and times per kernel, of all, and of the least there may be."""
    total = Work(0, 0)
    for name, work in passes(some, size):
        total = Work(total.bytes + work.bytes, total.operations + work.operations)
        yield [name, f"{work.bytes:.0f}", f"{work.operations:.0f}", *times(work, N)]
    yield ["in all", f"{total.bytes:.0f}", f"{total.operations:.0f}", *times(total, N)]
    yield ["the least", f"{least.bytes:.0f}", f"{least.operations:.0f}", *times(least, N)]
    share = total.bytes / least.bytes
    yield ["ratio", f"{share:.2f}", f"{total.operations / least.operations:.2f}", "", "", ""]


def lines() -> Iterator[str]:
    """The report, line by line as it is found: compiling takes a while."""
    size = torch.empty(0, dtype=DTYPE).element_size()
    found = launches("sm_80")
    dtype = str(DTYPE).removeprefix("torch.")
    yield f"Triton kernels, {dtype}, rank 1, dv {DV}, from the compiled binaries: registers of a"
    yield "thread, bytes of shared memory of a program, bytes that a thread spills, and the share"
    yield "of a multiprocessor's threads that fit at once:"
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
    yield from ("", f"Direct forward, {N} pairs a token, {n}:", "")
    matrices = Work(2 * size * (1 + DV), 2 * DV * N)
    scalar = [f"{N * N * PAIR / gpu.fp32 * 1e6:.0f}" for gpu in GPUS.values()]
    rows = [
        ["matrices", f"{matrices.bytes}", f"{matrices.operations}", *times(matrices, N)],
        ["exponentials and the rest", "", f"{PAIR * N}", *scalar],
    ]
    yield from table(columns, rows)


def main() -> None:
    print("# What the Triton kernels take\n")
    print(
        "Written by `python -m boltzattn.triton_kernels.report`. Registers, shared memory and "
        "spills are\nwhat the compilers say. Bytes, operations and times are **modelled, not "
        "measured**: no GPU has run\nthese kernels. The CUDA kernels have a table of their own, "
        "[`gpu-report-cuda.md`](gpu-report-cuda.md).\n"
    )
    for line in lines():
        print(line, flush=True)


if __name__ == "__main__":
    main()
