"""What the kernels take of a GPU, from the compiled binaries and a model of their traffic.

Registers, shared memory and spills are facts of the compiler. Bytes and operations per token are
counted from the algorithm, every number once however many threads read it, and times are what the
memory and the arithmetic of a GPU would allow at best. No GPU was asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from boltzattn.triton_kernels import direct, transform
from boltzattn.triton_kernels.compilation import (
    MULTIPROCESSORS,
    TARGETS,
    Launch,
    compile_for,
    occupancy,
    resources_of,
    specialisation,
)
from boltzattn.triton_kernels.launch import CHUNK, launching_by
from boltzattn.triton_kernels.layout import NODES, RANGE_BLOCK

N, DV, DTYPE = 65536, 64, torch.bfloat16
SPLIT = 3  # tf32 products that make one of fp32


class GPU(NamedTuple):
    """Peak bytes and dense tf32 operations per second, from the vendor's data sheets."""

    bandwidth: float
    operations: float


GPUS = {
    "A100": GPU(2.04e12, 156e12),
    "H100": GPU(3.35e12, 495e12),
    "B200": GPU(8.0e12, 1.1e15),
}


class Work(NamedTuple):
    """Bytes of global memory and operations per token; the core, which has no n, is left out."""

    bytes: float
    operations: float


def work_per_token(kernel: str, dv: int, size: int, bins: int) -> Work:
    """Of one token of the kernel's axis, for numbers of `size` bytes."""
    row, index, product = dv * size, 4, 2 * NODES * dv
    partial = 8 * NODES * (dv + 1) / CHUNK
    table = 4 * NODES * dv / CHUNK
    counts = 4 * bins / RANGE_BLOCK
    return {
        "ranges_kernel": Work(2 * size, 0),
        "count_kernel": Work(size + counts, 0),
        "order_kernel": Work(size + index + 2 * counts, 0),
        "moments_kernel": Work(index + size + row + partial, product),
        "reduce_kernel": Work(partial, 0),
        "evaluate_kernel": Work(index + size + row + table + 8, product),
        "query_gradient_kernel": Work(index + size + row + table + partial + 4, 2 * product),
        "key_gradient_kernel": Work(index + size + 2 * row + 2 * table + 4, 2 * product),
    }.get(kernel, Work(0, 0))


def least_forward_bytes(dv: int, size: int) -> int:
    """A query, a key and a value read once, an output written once."""
    return 2 * size + 2 * dv * size


def _launches() -> tuple[list[Launch], list[Launch]]:
    """Those of forward, and those that backward adds."""
    query = key = torch.empty(1, N, 1, dtype=DTYPE)
    value = grad_out = out = torch.empty(1, N, DV, dtype=DTYPE)
    lse = torch.empty(1, N, dtype=torch.float64)
    options = (None, None, None, 1.0, 0.0, False)
    found: list[Launch] = []
    with launching_by(lambda *launch: found.append(Launch(*launch))):
        transform.transform_forward(query, key, value, *options)
        forward = len(found)
        transform.transform_backward(grad_out, None, query, key, value, out, lse, *options)
        direct.direct_backward(grad_out, None, query, key, value, out, lse, *options)
    seen = {specialisation(launch) for launch in found[:forward]}
    return found[:forward], [x for x in found[forward:] if specialisation(x) not in seen]


def lines() -> Iterator[str]:
    """The report, line by line as it is found: compiling takes a while."""
    size = torch.empty(0, dtype=DTYPE).element_size()
    forward, more = _launches()
    yield f"transform, {DTYPE}, dv {DV}, rank 1; a token is one query and one key"
    yield "resources, from the compiled kernels:"
    for launch in {specialisation(x): x for x in (*forward, *more)}.values():
        for target in TARGETS:
            found = resources_of(compile_for(launch, target))
            share = (
                f", occupancy {occupancy(found, target):.0%}" if target in MULTIPROCESSORS else ""
            )
            yield (
                f"  {launch.name:<22} {target:<7} {found.registers:>3} registers, "
                f"{found.shared:>6} bytes shared, {found.spilled} spilled{share}"
            )
    total = Work(0, 0)
    yield "forward, per token (modelled, not measured):"
    for launch in forward:
        if "BLOCK_Q" in launch.fixed:  # direct leaves served heads alone
            continue
        work = work_per_token(launch.name, DV, size, launch.fixed.get("BINS", 0))
        total = Work(total.bytes + work.bytes, total.operations + work.operations)
        if work.bytes:
            yield f"  {launch.name:<22} {work.bytes:6.0f} bytes, {work.operations:6.0f} operations"
    least = least_forward_bytes(DV, size)
    yield f"  in all {total.bytes:.0f} bytes, {total.bytes / least:.2f} x the least ({least})"
    yield f"roofline of forward at n = {N}, one head (modelled, not measured):"
    for name, gpu in GPUS.items():
        memory = N * total.bytes / gpu.bandwidth
        arithmetic = N * total.operations * SPLIT / gpu.operations
        yield f"  {name}: memory {memory * 1e6:.1f} us, matrix units {arithmetic * 1e6:.1f} us"
