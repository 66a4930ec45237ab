"""The low-rank projection: a few numbers per token from one reading of the tokens, and the extent
(low, high, at_low, at_high, count, regular) of each, as csrc/cpu/project.h makes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from boltzattn.triton_kernels.heads import load_matrix, load_vector, strided, transposed
from boltzattn.triton_kernels.launch import cdiv, launch, on_device, project_options
from torch import Tensor

EXTENT = tl.constexpr(6)


@triton.jit
def project_kernel(
    x,  # [batch, n, width]
    weight,  # [outputs, width]
    bias,  # [outputs], or None
    numbers,  # [batch, outputs, n], written
    parts,  # [batch, outputs, blocks, EXTENT] fp64, written
    lead,
    n,
    width,
    outputs,
    BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = tl.cdiv(n, BLOCK)
    batch, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    first, output = block * BLOCK, tl.program_id(1) * BLOCK_OUT
    tokens, outs, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_K)
    alone = (1, 1, 1)
    sums = tl.zeros([BLOCK_OUT, BLOCK], tl.float32)
    for column in range(0, width, BLOCK_K):
        w = load_matrix(weight, batch * 0, alone, output, outs, outputs, column, columns, width)
        rows = load_matrix(transposed(x), batch, lead, column, columns, width, first, tokens, n)
        sums = tl.dot(w.to(DOT), rows.to(DOT), sums, input_precision=PRECISION)
    if bias is not None:
        added = load_vector(bias, batch * 0, alone, output, outs, outputs)
        sums += added.to(tl.float32)[:, None]

    inside = (outs < outputs - output)[:, None] & (tokens < n - first)[None, :]
    line = batch.to(tl.int64) * outputs + output + outs
    number = sums.to(numbers.dtype.element_ty)
    tl.store(numbers + line[:, None] * n + first + tokens[None, :], number, inside)

    # Of the numbers as they were rounded. NaN is neither low nor high, but not regular.
    exact = number.to(tl.float32)
    infinity = float("inf")
    odd = tl.sum((inside & (exact * 0 != 0)).to(tl.int32), 1)
    low = tl.min(tl.where(inside, exact, infinity), 1)
    high = tl.max(tl.where(inside, exact, -infinity), 1)
    index = tl.broadcast_to((first + tokens)[None, :], [BLOCK_OUT, BLOCK])
    to = parts + (line * blocks + block) * EXTENT
    valid = outs < outputs - output
    tl.store(to, low.to(tl.float64), valid)
    tl.store(to + 1, high.to(tl.float64), valid)
    at_low = tl.min(tl.where(inside & (exact == low[:, None]), index, n), 1)
    at_high = tl.min(tl.where(inside & (exact == high[:, None]), index, n), 1)
    tl.store(to + 2, at_low.to(tl.float64), valid)
    tl.store(to + 3, at_high.to(tl.float64), valid)
    tl.store(to + 4, tl.sum(inside.to(tl.int32), 1).to(tl.float64), valid)
    tl.store(to + 5, (odd == 0).to(tl.float64), valid)


@triton.jit
def join_kernel(parts, extents, blocks, BLOCK: tl.constexpr):
    """The extent of an output from those of its blocks, [EXTENT] fp64."""
    infinity = float("inf")
    parts += tl.program_id(0).to(tl.int64) * blocks * EXTENT
    low = tl.full([], infinity, tl.float64)
    high, at_low, at_high = -low, low, low
    count = tl.zeros([], tl.float64)
    regular = count + 1
    for first in range(0, blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        at, inside = parts + block.to(tl.int64) * EXTENT, block < blocks
        lows = tl.load(at, inside, other=infinity)
        highs = tl.load(at + 1, inside, other=-infinity)
        lower, higher = tl.min(lows, 0), tl.max(highs, 0)
        where_low = tl.load(at + 2, inside & (lows == lower), other=infinity)
        where_high = tl.load(at + 3, inside & (highs == higher), other=infinity)
        at_low = tl.where(lower < low, tl.min(where_low, 0), at_low)
        at_high = tl.where(higher > high, tl.min(where_high, 0), at_high)
        low, high = tl.minimum(low, lower), tl.maximum(high, higher)
        count += tl.sum(tl.load(at + 4, inside, other=0.0), 0)
        regular = tl.minimum(regular, tl.min(tl.load(at + 5, inside, other=1.0), 0))
    to = extents + tl.program_id(0).to(tl.int64) * EXTENT
    tl.store(to, low)
    tl.store(to + 1, high)
    tl.store(to + 2, at_low)
    tl.store(to + 3, at_high)
    tl.store(to + 4, count)
    tl.store(to + 5, regular)


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(numbers [batch, outputs, n], extents [batch, outputs, 6] fp64) of x [batch, n, width]."""
    (batch, n, width), outputs = x.shape, weight.shape[0]
    with on_device(x):
        fixed = project_options(x.dtype, outputs)
    blocks = cdiv(n, fixed["BLOCK"])
    numbers = x.new_empty(batch, outputs, n)
    parts = x.new_empty(batch, outputs, blocks, EXTENT.value, dtype=torch.float64)
    extents = x.new_empty(batch, outputs, EXTENT.value, dtype=torch.float64)
    with on_device(x):
        launch(
            project_kernel,
            (batch * blocks, cdiv(outputs, fixed["BLOCK_OUT"])),
            strided(x, 2),
            strided(weight, 2),
            strided(bias, 1),
            numbers,
            parts,
            (batch, 1, batch),
            n,
            width,
            outputs,
            **fixed,
        )
        launch(join_kernel, (batch * outputs,), parts, extents, blocks, BLOCK=128)
    return numbers, extents
