"""Tokens in the order of their panels: a counting sort, stable and without atomics on results.

`order` [heads, n] lists the tokens panel by panel, masked keys last, and `places` [heads, n] where
on their panels they lie, so that later passes read both from end to end. `ends` [heads, BINS,
blocks] holds running sums of the counts, so the tokens of a panel are order[start : end] with

    start = ends[panel, 0] - counts[panel, 0],  end = ends[panel, blocks - 1].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from boltzattn.triton_kernels.heads import head_of, inside, joined, load_vector, span_of
from boltzattn.triton_kernels.layout import FIELDS, load_axis, locate


class Block(NamedTuple):
    """A block of tokens."""

    tokens: Any
    number: Any
    panel: Any  # BINS - 1 for masked keys, BINS past the end
    place: Any
    count: Any  # [BINS] of its tokens
    at: Any  # where that stands in counts [heads, BINS, blocks]
    used: Any  # bins that can hold a token; the counts of the others are zero beforehand


@triton.jit
def load_block(
    x,
    mask,
    head,
    row,
    n,
    scale,
    IS_KEY: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The tokens of this program."""
    blocks = tl.cdiv(n, BLOCK)
    block, bins = tl.program_id(0) % blocks, tl.arange(0, BINS)
    tokens = span_of(block * BLOCK, n, BLOCK)
    axis = load_axis(row, IS_KEY)
    number = load_vector(x, head, tokens)
    panel, place = locate(number.to(tl.float64) * joined(scale), axis, IS_KEY)
    used = bins < axis.panels
    if mask is not None:
        # A float mask is 0 or -inf, or else the head would not be served.
        panel = tl.where(load_vector(mask, head, tokens) != 0, BINS - 1, panel)
        used = used | (bins == BINS - 1)
    panel = tl.where(inside(tokens), panel, BINS)
    count = tl.histogram(panel, BINS, mask=panel < BINS)
    at = (head.number * BINS + bins) * blocks + block
    return Block(tokens, number, panel, place, count, at, used)


@triton.jit
def count_kernel(
    x,
    mask,
    heads,
    n,
    scale,
    counts,  # [heads, BINS, blocks] int32, zeros; written
    IS_KEY: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many tokens of a block lie on each panel."""
    head = head_of(tl.program_id(0) // tl.cdiv(n, BLOCK), heads)
    if tl.load(heads.served + head.number) == 0:
        return
    row = heads.layout + head.number * FIELDS
    block = load_block(x, mask, head, row, n, scale, IS_KEY, BINS, BLOCK)
    tl.store(counts + block.at, block.count, block.used)


@triton.jit
def sorted_block(x, local, LEVELS: tl.constexpr):
    """x [2 ** LEVELS] in ascending order, by Batcher's bitonic network; local = 0, 1, 2, ..."""
    for level in tl.static_range(1, LEVELS + 1):
        for step in tl.static_range(level):
            bit = level - 1 - step
            other = tl.gather(x, local ^ (1 << bit), 0)
            least = ((local >> level) & 1) == ((local >> bit) & 1)
            x = tl.where(least, tl.minimum(x, other), tl.maximum(x, other))
    return x


@triton.jit
def order_kernel(
    x,
    mask,
    heads,
    n,
    scale,
    ends,
    order,  # [heads, n] int32, written
    places,  # [heads, n] in [-1, 1], written
    numbers,  # [heads, n] of x's dtype, written: queries in that order; or None
    IS_KEY: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,  # BLOCK = 2 ** LEVELS
):
    """A block is sorted on its own first: runs of tokens then go to memory as a whole."""
    head = head_of(tl.program_id(0) // tl.cdiv(n, BLOCK), heads)
    if tl.load(heads.served + head.number) == 0:
        return
    row = heads.layout + head.number * FIELDS
    block = load_block(x, mask, head, row, n, scale, IS_KEY, BINS, BLOCK)
    local = block.tokens.local
    # Where the tokens of a bin go, less where they stand in the sorted block.
    shift = tl.load(ends + block.at, block.used, other=0) - tl.cumsum(block.count, 0)
    key = sorted_block(block.panel * BLOCK + local, local, LEVELS)
    panel, source = key // BLOCK, key % BLOCK
    to = head.number * n + tl.gather(shift, tl.minimum(panel, BINS - 1), 0) + local
    tl.store(order + to, block.tokens.first + source, panel < BINS)
    place = tl.gather(block.place.to(places.dtype.element_ty), source, 0)
    tl.store(places + to, place, panel < BINS)
    if numbers is not None:
        tl.store(numbers + to, tl.gather(block.number, source, 0), panel < BINS)
