"""The low-rank projection: a few numbers per token and their extents, from one reading of the
tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from boltzattn.triton_kernels.extents import EXTENT, find_extent, join_extents, store_extent
from boltzattn.triton_kernels.heads import (
    Head,
    head_of,
    inside,
    lead_of,
    load_matrix,
    load_vector,
    span_of,
    strided,
    transposed,
)
from boltzattn.triton_kernels.launch import cdiv, launch, on_device, project_options
from torch import Tensor


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
    head, block = head_of(tl.program_id(0) // blocks, lead), tl.program_id(0) % blocks
    tokens = span_of(block * BLOCK, n, BLOCK)
    rows = span_of(tl.program_id(1) * BLOCK_OUT, outputs, BLOCK_OUT)
    whole = Head(0, 0, 0, 0)  # weight and bias have no leading axes
    sums = tl.zeros([BLOCK_OUT, BLOCK], tl.float32)
    for column in range(0, width, BLOCK_K):
        columns = span_of(column, width, BLOCK_K)
        w = load_matrix(weight, whole, rows, columns).to(DOT)
        tile = load_matrix(transposed(x), head, columns, tokens).to(DOT)
        sums = tl.dot(w, tile, sums, input_precision=PRECISION)
    if bias is not None:
        sums += load_vector(bias, whole, rows).to(tl.float32)[:, None]

    valid = inside(rows)[:, None] & inside(tokens)[None, :]
    position = (tokens.first + tokens.local)[None, :]
    line = head.number * outputs + rows.first + rows.local
    number = sums.to(numbers.dtype.element_ty)
    tl.store(numbers + line[:, None] * n + position, number, valid)
    # Of the numbers as they were rounded.
    extent = find_extent(number.to(tl.float32), valid, position, 1)
    store_extent(parts + (line * blocks + block) * EXTENT, extent, inside(rows))


@triton.jit
def join_kernel(parts, extents, blocks, BLOCK: tl.constexpr):
    """The extent of an output from those of its blocks."""
    output = tl.program_id(0).to(tl.int64)
    extent = join_extents(parts + output * blocks * EXTENT, blocks, BLOCK)
    store_extent(extents + output * EXTENT, extent, None)


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(numbers [batch, outputs, n], extents [batch, outputs, 6] fp64) of x [batch, n, width]."""
    (batch, n, width), outputs = x.shape, weight.shape[0]
    with on_device(x):
        fixed = project_options(x.dtype, outputs)
        blocks = cdiv(n, fixed["BLOCK"])
        numbers = x.new_empty(batch, outputs, n)
        parts = x.new_empty(batch, outputs, blocks, EXTENT.value, dtype=torch.float64)
        extents = x.new_empty(batch, outputs, EXTENT.value, dtype=torch.float64)
        launch(
            project_kernel,
            (batch * blocks, cdiv(outputs, fixed["BLOCK_OUT"])),
            strided(x, 2),
            strided(weight, 2),
            strided(bias, 1),
            numbers,
            parts,
            lead_of(x, 2),
            n,
            width,
            outputs,
            **fixed,
        )
        launch(join_kernel, (batch * outputs,), parts, extents, blocks, BLOCK=128)
    return numbers, extents
