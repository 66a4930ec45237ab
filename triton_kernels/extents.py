"""Extents of queries, of keys and of what `project` makes: found block by block, then joined."""

from __future__ import annotations

import triton
import triton.language as tl
from boltzattn.transform.stages import Extent
from boltzattn.triton_kernels.heads import head_of, inside, joined, load_vector, span_of

LOW, HIGH, AT_LOW, AT_HIGH, TOKENS, REGULAR = map(tl.constexpr, range(len(Extent._fields)))
EXTENT = tl.constexpr(len(Extent._fields))
INFINITY = tl.constexpr(float("inf"))
NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def store_extent(to, extent, valid):
    for i in tl.static_range(EXTENT):
        tl.store(to + i, extent[i].to(tl.float64), valid)


@triton.jit
def find_extent(number, counts, position, AXIS: tl.constexpr):
    """The extents of the numbers that count, along an axis."""
    low = tl.min(tl.where(counts, number, INFINITY), AXIS)
    high = tl.max(tl.where(counts, number, -INFINITY), AXIS)
    is_low = counts & (number == tl.expand_dims(low, AXIS))
    is_high = counts & (number == tl.expand_dims(high, AXIS))
    return Extent(
        low,
        high,
        tl.min(tl.where(is_low, position, NOWHERE), AXIS),
        tl.min(tl.where(is_high, position, NOWHERE), AXIS),
        tl.sum(counts.to(tl.int32), AXIS),
        tl.sum((counts & (number * 0 != 0)).to(tl.int32), AXIS) == 0,
    )


@triton.jit
def join_extents(parts, blocks, BLOCK: tl.constexpr):
    """The extent of all numbers from those of their blocks, [blocks, EXTENT]."""
    low = tl.full([], INFINITY, tl.float64)
    high, at_low, at_high = -low, low, low
    tokens = tl.zeros([], tl.float64)
    regular = tokens + 1
    for first in range(0, blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        at, valid = parts + block.to(tl.int64) * EXTENT, block < blocks
        lows = tl.load(at + LOW, valid, other=INFINITY)
        highs = tl.load(at + HIGH, valid, other=-INFINITY)
        lower, higher = tl.min(lows, 0), tl.max(highs, 0)
        at_lows = tl.load(at + AT_LOW, valid & (lows == lower), other=INFINITY)
        at_highs = tl.load(at + AT_HIGH, valid & (highs == higher), other=INFINITY)
        at_low = tl.where(lower < low, tl.min(at_lows, 0), at_low)
        at_high = tl.where(higher > high, tl.min(at_highs, 0), at_high)
        low, high = tl.minimum(low, lower), tl.maximum(high, higher)
        tokens += tl.sum(tl.load(at + TOKENS, valid, other=0.0), 0)
        regular = tl.minimum(regular, tl.min(tl.load(at + REGULAR, valid, other=1.0), 0))
    return Extent(low, high, at_low, at_high, tokens, regular)


@triton.jit
def extents_kernel(query, key, key_mask, parts, lead, n_q, n_k, scale, BLOCK: tl.constexpr):
    """Extents of a block of queries and of keys: parts [heads, 2, blocks, EXTENT]."""
    blocks = tl.cdiv(tl.maximum(n_q, n_k), BLOCK)
    head, block = head_of(tl.program_id(0) // blocks, lead), tl.program_id(0) % blocks
    to = parts + (head.number * 2 * blocks + block) * EXTENT

    rows = span_of(block * BLOCK, n_q, BLOCK)
    t = load_vector(query, head, rows).to(tl.float64) * joined(scale)
    store_extent(to, find_extent(t, inside(rows), rows.first + rows.local, 0), None)

    keys = span_of(block * BLOCK, n_k, BLOCK)
    s, kept = load_vector(key, head, keys).to(tl.float64), inside(keys)
    if key_mask is not None:
        mask = load_vector(key_mask, head, keys)
        if mask.dtype == tl.uint8:
            kept = kept & (mask == 0)
        else:
            # Another number neither keeps a key nor leaves it out: the head is not served.
            mask = mask.to(tl.float32)
            s = tl.where((mask == 0) | (mask == -INFINITY), s, float("nan"))
            kept = kept & (mask != -INFINITY)
    store_extent(to + blocks * EXTENT, find_extent(s, kept, keys.first + keys.local, 0), None)
