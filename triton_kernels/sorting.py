"""Tokens in the order of their panels: a counting sort, stable and without atomics on results.

`order` [heads, n] lists the tokens panel by panel, masked keys last. `ends` [heads, BINS, blocks]
holds running sums of the counts, so the tokens of a panel are order[start : end] with

    start = ends[panel, 0] - counts[panel, 0],  end = ends[panel, blocks - 1].
"""

from __future__ import annotations

import triton
import triton.language as tl
from boltzattn.triton_kernels.heads import joined, load_vector
from boltzattn.triton_kernels.layout import FIELDS, load_number, locate_keys, locate_queries


@triton.jit
def panels_of_block(
    x, mask, row, head, lead, first, local, n, scale, IS_KEY: tl.constexpr, BINS: tl.constexpr
):
    """Panels of a block of tokens; masked keys get the last bin, and what is past the end BINS."""
    index, inside = first + local, local < n - first
    number = load_number(x, head, lead, index, inside, joined(scale))
    if IS_KEY:
        panel, _ = locate_keys(number, row)
        if mask is not None:
            # A float mask is 0 or -inf, or else the head would not be served.
            masked = load_vector(mask, head, lead, first, local, n) != 0
            panel = tl.where(masked, BINS - 1, panel)
    else:
        panel, _ = locate_queries(number, row)
    return tl.where(inside, panel, BINS)


@triton.jit
def count_kernel(
    x,
    mask,
    layout,
    served,
    counts,  # [heads, BINS, blocks] int32, written
    lead,
    n,
    scale,
    IS_KEY: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(n, BLOCK)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    bins = tl.arange(0, BINS)
    at = counts + head.to(tl.int64) * BINS * blocks + bins * blocks + block
    if tl.load(served + head) == 0:
        return
    panel = panels_of_block(
        x,
        mask,
        layout + head * FIELDS,
        head,
        lead,
        block * BLOCK,
        tl.arange(0, BLOCK),
        n,
        scale,
        IS_KEY,
        BINS,
    )
    tl.store(at, tl.histogram(panel, BINS, mask=panel < BINS))


@triton.jit
def order_kernel(
    x,
    mask,
    layout,
    served,
    counts,
    ends,
    order,  # [heads, n] int32, written
    lead,
    n,
    scale,
    IS_KEY: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    blocks = tl.cdiv(n, BLOCK)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tl.load(served + head) == 0:
        return
    at = head.to(tl.int64) * BINS * blocks + tl.arange(0, BINS) * blocks + block
    start = tl.load(ends + at) - tl.load(counts + at)  # where the next token of a bin goes
    local = tl.arange(0, STEP)
    for first in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, n), STEP):
        panel = panels_of_block(
            x, mask, layout + head * FIELDS, head, lead, first, local, n, scale, IS_KEY, BINS
        )
        before = (panel[None, :] == panel[:, None]) & (local[None, :] < local[:, None])
        rank = tl.sum(before.to(tl.int32), 1)
        to = tl.gather(start, tl.minimum(panel, BINS - 1), 0) + rank
        tl.store(order + head.to(tl.int64) * n + to, first + local, panel < BINS)
        start += tl.histogram(panel, BINS, mask=panel < BINS)
