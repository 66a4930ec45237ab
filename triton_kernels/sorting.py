"""Tokens in the order of their panels: a counting sort, stable and without atomics on results.

`order` [heads, n] lists the tokens panel by panel, masked keys last, and `places` [heads, n] where
on their panels they lie, so that later passes read both from end to end. `ends` [heads, BINS,
blocks] holds running sums of the counts, so the tokens of a panel are order[start : end] with

    start = ends[panel, 0] - counts[panel, 0],  end = ends[panel, blocks - 1].
"""

from __future__ import annotations

import triton
import triton.language as tl
from boltzattn.triton_kernels.heads import joined, load_vector
from boltzattn.triton_kernels.layout import FIELDS, load_axis, locate_tokens


@triton.jit
def panels_of_block(
    x, mask, axis, head, lead, first, local, n, scale, IS_KEY: tl.constexpr, BINS: tl.constexpr
):
    """(numbers, panels, places) of a block of tokens; masked keys get the last bin, and what is
    past the end BINS."""
    number = load_vector(x, head, lead, first, local, n)
    panel, place = locate_tokens(number.to(tl.float64) * joined(scale), axis, IS_KEY)
    if mask is not None:
        # A float mask is 0 or -inf, or else the head would not be served.
        masked = load_vector(mask, head, lead, first, local, n) != 0
        panel = tl.where(masked, BINS - 1, panel)
    return number, tl.where(local < n - first, panel, BINS), place


@triton.jit
def used_bins(axis, mask, BINS: tl.constexpr):
    """Bins that can hold a token; the counts of the others are zero beforehand."""
    used = tl.arange(0, BINS) < axis[4]
    if mask is not None:
        used = used | (tl.arange(0, BINS) == BINS - 1)
    return used


@triton.jit
def count_kernel(
    x,
    mask,
    layout,
    served,
    counts,  # [heads, BINS, blocks] int32, zeros; written
    lead,
    n,
    scale,
    IS_KEY: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(n, BLOCK)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tl.load(served + head) == 0:
        return
    axis = load_axis(layout + head * FIELDS, IS_KEY)
    _, panel, _ = panels_of_block(
        x, mask, axis, head, lead, block * BLOCK, tl.arange(0, BLOCK), n, scale, IS_KEY, BINS
    )
    at = head.to(tl.int64) * BINS * blocks + tl.arange(0, BINS) * blocks + block
    count = tl.histogram(panel, BINS, mask=panel < BINS)
    tl.store(counts + at, count, used_bins(axis, mask, BINS))


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
    layout,
    served,
    ends,
    order,  # [heads, n] int32, written
    places,  # [heads, n] in [-1, 1], written
    numbers,  # [heads, n] of x's dtype, written: queries or keys in that order; or None
    lead,
    n,
    scale,
    IS_KEY: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,  # BLOCK = 2 ** LEVELS
):
    """A block is sorted on its own first: runs of tokens then go to memory as a whole."""
    blocks = tl.cdiv(n, BLOCK)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tl.load(served + head) == 0:
        return
    axis, local = load_axis(layout + head * FIELDS, IS_KEY), tl.arange(0, BLOCK)
    number, panel, place = panels_of_block(
        x, mask, axis, head, lead, block * BLOCK, local, n, scale, IS_KEY, BINS
    )
    count = tl.histogram(panel, BINS, mask=panel < BINS)
    at = head.to(tl.int64) * BINS * blocks + tl.arange(0, BINS) * blocks + block
    end = tl.load(ends + at, used_bins(axis, mask, BINS), other=0)
    # Where the tokens of a bin go, less where they stand in the sorted block.
    shift = end - tl.cumsum(count, 0)
    key = sorted_block(panel * BLOCK + local, local, LEVELS)
    panel, source = key // BLOCK, key % BLOCK
    to = head.to(tl.int64) * n + tl.gather(shift, tl.minimum(panel, BINS - 1), 0) + local
    inside = panel < BINS
    tl.store(order + to, block * BLOCK + source, inside)
    place = tl.gather(place.to(places.dtype.element_ty), source, 0)
    tl.store(places + to, place, inside)
    if numbers is not None:
        tl.store(numbers + to, tl.gather(number, source, 0), inside)
