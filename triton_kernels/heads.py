"""Where the rows of a head lie in memory: what every kernel needs to find its numbers.

Canonical tensors have any leading shape, often with stride 0. Kernels see three leading axes, so
that batches, heads and groups of heads need no copy, and number the heads from 0. A tensor reaches
a kernel as `Strided`, a missing one as None.

Arguments of kernels are flat tuples: Triton 3.6 loses a 1 or None in a tuple within a tuple. Tuples
that hold more than `Strided` or `Lead` name those fields the same, and can stand in for them.

Offsets of heads and blocks are int64; within a block they are int32, which halves the registers
that addresses take. So strides within a head are kept below LARGEST_STRIDE.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LEADING = 3
LARGEST_STRIDE = 2**24  # times 128 rows of a block is the range of an int32


class Strided(NamedTuple):
    """A tensor and its strides; Triton compiles a stride of 1 in, so an absent axis has that."""

    pointer: Any
    outer: Any  # the three leading axes
    middle: Any
    inner: Any
    row: Any = 1
    column: Any = 1


class Lead(NamedTuple):
    """The number of heads, and the sizes of the two inner leading axes."""

    total: Any
    middle: Any
    inner: Any


class Head(NamedTuple):
    """A head: its number, and its index on each of the leading axes, int64."""

    number: Any
    outer: Any
    middle: Any
    inner: Any


class Span(NamedTuple):
    """The positions first + local of an axis with `size` positions; some may be past its end."""

    first: Any
    local: Any  # 0, 1, 2, ...
    size: Any


class Split(NamedTuple):
    """A number as the sum of two of fp32: a kernel takes no fp64 argument."""

    high: float
    low: float


def strided(x: Tensor | None, trailing: int) -> Strided | None:
    """x as kernels take it, with three leading axes before its `trailing` own; more are merged."""
    if x is None:
        return None
    if x.ndim > LEADING + trailing:
        x = x.flatten(0, x.ndim - LEADING - trailing)
    x = x[(None,) * (LEADING + trailing - x.ndim)]
    if max(map(abs, x.stride()[LEADING:]), default=0) >= LARGEST_STRIDE:
        x = x.contiguous()
    return Strided(x.view(torch.uint8) if x.dtype == torch.bool else x, *x.stride())


def lead_of(x: Tensor, trailing: int) -> Lead:
    lead = x.shape[: x.ndim - trailing]
    return Lead(math.prod(lead), *(1, 1, *lead)[-2:])


def split(x: float) -> Split:
    high = ctypes.c_float(x).value  # a tensor might be on a device, and its item a synchronisation
    return Split(high, x - high)


@triton.jit
def joined(x):
    """The fp64 number that was split."""
    return tl.cast(x.high, tl.float64) + tl.cast(x.low, tl.float64)


@triton.jit
def head_of(number, lead):
    number = tl.cast(number, tl.int64)
    outer = number // lead.inner
    return Head(number, outer // lead.middle, outer % lead.middle, number % lead.inner)


@triton.jit
def span_of(first, size, BLOCK: tl.constexpr):
    return Span(first, tl.arange(0, BLOCK), size)


@triton.jit
def inside(span):
    return span.local < span.size - span.first


@triton.jit
def start_of(x, head):
    """Pointer to the first number of a head; int64 before any product."""
    return x.pointer + (head.outer * x.outer + head.middle * x.middle + head.inner * x.inner)


@triton.jit
def transposed(x):
    """A matrix with its rows and columns exchanged."""
    return Strided(x.pointer, x.outer, x.middle, x.inner, x.column, x.row)


@triton.jit
def load_vector(x, head, rows):
    """Those numbers of a vector [*L, n], zeros past its end."""
    start = start_of(x, head) + tl.cast(rows.first, tl.int64) * x.row
    return tl.load(start + rows.local * x.row, inside(rows), other=0)


@triton.jit
def load_column(x, head, rows, column):
    """One column of those rows of a matrix [*L, n, width], in fp32."""
    start = start_of(x, head) + tl.cast(rows.first, tl.int64) * x.row
    start += tl.cast(column, tl.int64) * x.column
    return tl.load(start + rows.local * x.row, inside(rows), other=0.0).to(tl.float32)


@triton.jit
def load_matrix(x, head, rows, columns):
    """Those rows and columns of a matrix [*L, n, width], zeros outside of it."""
    start = start_of(x, head)
    start += tl.cast(rows.first, tl.int64) * x.row + tl.cast(columns.first, tl.int64) * x.column
    valid = inside(rows)[:, None] & inside(columns)[None, :]
    at = rows.local[:, None] * x.row + columns.local[None, :] * x.column
    return tl.load(start + at, valid, other=0)


@triton.jit
def store_matrix(pointer, tile, rows, columns):
    """Store a tile into those rows and columns of a contiguous [n, width]."""
    start = pointer + tl.cast(rows.first, tl.int64) * columns.size + columns.first
    valid = inside(rows)[:, None] & inside(columns)[None, :]
    at = start + rows.local[:, None] * columns.size + columns.local[None, :]
    tl.store(at, tile.to(pointer.dtype.element_ty), valid)
