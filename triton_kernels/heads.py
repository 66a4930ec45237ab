"""Where the rows of a head lie in memory: what every kernel needs to find its numbers.

Canonical tensors have any leading shape, often by stride 0. Kernels see three leading axes, so
that batches, heads and groups of heads need no copy, and count heads from 0 on. A tensor reaches a
kernel as the tuple (pointer, *strides), a mask that is not there as None.

Offsets of heads and blocks are int64; within a block they are int32, which halves the registers
that addresses take. So strides within a head are kept below LARGEST_STRIDE.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LEADING = 3
LARGEST_STRIDE = 2**24  # times 128 rows of a block is the range of an int32


def strided(x: Tensor | None, trailing: int) -> tuple | None:
    """x as kernels take it, with three leading axes before its `trailing` own; more are merged."""
    if x is None:
        return None
    if x.ndim > LEADING + trailing:
        x = x.flatten(0, x.ndim - LEADING - trailing)
    x = x[(None,) * (LEADING + trailing - x.ndim)]
    if max(map(abs, x.stride()[LEADING:]), default=0) >= LARGEST_STRIDE:
        x = x.contiguous()
    return (x.view(torch.uint8) if x.dtype == torch.bool else x, *x.stride())


def lead_of(x: Tensor, trailing: int) -> tuple[int, int, int]:
    """(number of heads, sizes of the two inner leading axes) of a canonical tensor."""
    lead = x.shape[: x.ndim - trailing]
    inner = (1, 1, *lead)[-2:]
    return math.prod(lead), *inner


def split(x: float) -> tuple[float, float]:
    """x as the sum of two fp32 numbers, which is all that a kernel takes."""
    high = torch.tensor(x, dtype=torch.float32).item()
    return high, x - high


@triton.jit
def joined(x):
    """The fp64 number that was split."""
    return tl.cast(x[0], tl.float64) + tl.cast(x[1], tl.float64)


@triton.jit
def head_offset(x, head, lead):
    """Offset of a head in elements; `lead` is what `lead_of` says. int64 before any product."""
    outer = head.to(tl.int64) // lead[2]
    return outer // lead[1] * x[1] + outer % lead[1] * x[2] + head.to(tl.int64) % lead[2] * x[3]


@triton.jit
def transposed(x):
    """A matrix with its rows and columns exchanged."""
    return (x[0], x[1], x[2], x[3], x[5], x[4])


@triton.jit
def load_vector(x, head, lead, first, local, n):
    """Numbers first + local of a vector [*L, n], zeros past its end."""
    start = x[0] + head_offset(x, head, lead) + tl.cast(first, tl.int64) * x[4]
    return tl.load(start + local * x[4], local < n - first, other=0)


@triton.jit
def load_column(x, head, lead, first, local, n, column):
    """One column of rows first + local of a matrix [*L, n, width], in fp32."""
    start = x[0] + head_offset(x, head, lead) + tl.cast(first, tl.int64) * x[4]
    start += tl.cast(column, tl.int64) * x[5]
    return tl.load(start + local * x[4], local < n - first, other=0.0).to(tl.float32)


@triton.jit
def load_matrix(x, head, lead, first, local, n, first_column, local_column, width):
    """Those rows and columns of a matrix [*L, n, width], zeros outside of it."""
    start = x[0] + head_offset(x, head, lead)
    start += tl.cast(first, tl.int64) * x[4] + tl.cast(first_column, tl.int64) * x[5]
    inside = (local < n - first)[:, None] & (local_column < width - first_column)[None, :]
    return tl.load(start + local[:, None] * x[4] + local_column[None, :] * x[5], inside, other=0)


@triton.jit
def store_matrix(pointer, tile, first, local, n, first_column, local_column, width):
    """The same of a contiguous [n, width]."""
    start = pointer + tl.cast(first, tl.int64) * width + first_column
    inside = (local < n - first)[:, None] & (local_column < width - first_column)[None, :]
    at = start + local[:, None] * width + local_column[None, :]
    tl.store(at, tile.to(pointer.dtype.element_ty), inside)
