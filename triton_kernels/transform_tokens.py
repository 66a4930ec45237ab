"""The passes of a transform over tokens, in the order of their panels.

Positions of the order are cut into chunks, and chunks into the parts that lie on one panel. From
one part to the next either the chunk or the panel grows by one, so part (chunk, panel) has slot
chunk + panel of programs and of partial sums to itself, and nothing is added atomically.
docs/transform.md has the formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from boltzattn.triton_kernels.heads import (
    Head,
    Span,
    Split,
    head_of,
    inside,
    joined,
    span_of,
    start_of,
)
from boltzattn.triton_kernels.layout import (
    AT_MAX,
    AT_MIN,
    FIELDS,
    KEY_PANELS,
    QUERY_PANELS,
    is_upper,
    lagrange_weights,
    reference_key,
)

NO_END = tl.constexpr(0x7FFFFFFF)


class Tokens(NamedTuple):
    """The tokens of an axis in the order of their panels: see `sorting`."""

    counts: Any  # [heads, BINS, blocks] int32
    ends: Any
    order: Any  # [heads, n] int32
    places: Any  # [heads, n]
    scale: Split
    n: int
    blocks: int
    slots: int  # of parts
    panels: int  # at most


class Slot(NamedTuple):
    """A slot: positions [start, end) of the order, none if start >= end, lie on one panel."""

    head: Any  # its number
    number: Any
    panel: Any
    start: Any
    end: Any


class Part(NamedTuple):
    """What a program needs to work on the tokens of its slot."""

    head: Head
    row: Any  # of the layout
    order: Any  # of the head
    places: Any
    node: Any  # the first node of the panel, among those of all heads
    sums: Any  # the first row of its partial sums, among those of all heads
    columns: Span  # of the values


@triton.jit
def panel_part(tokens, head, panel, low, high, BINS: tl.constexpr):
    """Positions [from, to) of the panel's tokens within [low, high)."""
    first = (head * BINS + panel) * tokens.blocks
    start = tl.load(tokens.ends + first) - tl.load(tokens.counts + first)
    end = tl.load(tokens.ends + first + tokens.blocks - 1)
    return tl.maximum(start, low), tl.minimum(end, high)


@triton.jit
def panels_in_use(heads, head, IS_KEY: tl.constexpr):
    """How many panels an axis has; none if the head is not served."""
    panels = tl.load(heads.layout + head * FIELDS + (KEY_PANELS if IS_KEY else QUERY_PANELS))
    return tl.where(tl.load(heads.served + head) == 0, 0, panels.to(tl.int32))


@triton.jit
def find_slot(heads, tokens, IS_KEY: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """The slot of this program."""
    head = (tl.program_id(0) // tokens.slots).to(tl.int64)
    slot, bins = tl.program_id(0) % tokens.slots, tl.arange(0, BINS)
    panels = panels_in_use(heads, head, IS_KEY)
    panel, start, end = panels, 0, 0
    if (panels > 0) & (slot < tl.cdiv(tokens.n, CHUNK) + panels):
        last = (head * BINS + bins) * tokens.blocks + tokens.blocks - 1
        ends = tl.load(tokens.ends + last, bins < panels, other=NO_END)
        panel = tl.sum(((ends - 1) // CHUNK + bins < slot).to(tl.int32), 0)
        low = (slot - panel) * CHUNK
        if (panel < panels) & (low < tokens.n):
            start, end = panel_part(tokens, head, panel, low, low + CHUNK, BINS)
    return Slot(head, slot, panel, start, end)


@triton.jit
def open_part(slot, heads, tokens, dv, NODES: tl.constexpr, BLOCK_DV: tl.constexpr):
    """The part of a slot that has tokens; found earlier, it would cost registers and a spill."""
    return Part(
        head_of(slot.head, heads),
        heads.layout + slot.head * FIELDS,
        tokens.order + slot.head * tokens.n,
        tokens.places + slot.head * tokens.n,
        (slot.head * tokens.panels + slot.panel) * NODES,
        (slot.head * tokens.slots + slot.number) * NODES,
        span_of(tl.program_id(1) * BLOCK_DV, dv, BLOCK_DV),
    )


@triton.jit
def load_tile(part, tile, end, TILE: tl.constexpr, NODES: tl.constexpr, WORK: tl.constexpr):
    """(position, index, which of them exist, weights on the nodes) of a tile of tokens."""
    position = tile + tl.arange(0, TILE)
    valid = position < end
    index = tl.load(part.order + position, valid, other=0)
    # Tokens past the end of the part lie on other panels: 0 keeps their powers finite.
    place = tl.load(part.places + position, valid, other=0.0)
    return position, index, valid, lagrange_weights(place, NODES, WORK)


@triton.jit
def load_nodes(table, first, columns, NODES: tl.constexpr):
    """Rows [first, first + NODES) of a table [..., dv] on nodes."""
    at = tl.arange(0, NODES)[:, None] * columns.size + columns.first + columns.local[None, :]
    return tl.load(table + first * columns.size + at, inside(columns)[None, :], other=0.0)


@triton.jit
def store_nodes(table, first, columns, rows, NODES: tl.constexpr):
    at = tl.arange(0, NODES)[:, None] * columns.size + columns.first + columns.local[None, :]
    rows = rows.to(table.dtype.element_ty)
    tl.store(table + first * columns.size + at, rows, inside(columns)[None, :])


@triton.jit
def load_rows(x, head, index, valid, columns):
    """Rows of a matrix by index."""
    start = start_of(x, head) + tl.cast(columns.first, tl.int64) * x.column
    at = index.to(tl.int64)[:, None] * x.row + columns.local[None, :] * x.column
    valid = valid[:, None] & inside(columns)[None, :]
    return tl.load(start + at, valid, other=0.0)


@triton.jit
def store_rows(pointer, rows, index, valid, columns):
    """Rows of a contiguous [n, dv] by index."""
    at = index.to(tl.int64)[:, None] * columns.size + (columns.first + columns.local)[None, :]
    valid = valid[:, None] & inside(columns)[None, :]
    tl.store(pointer + at, rows.to(pointer.dtype.element_ty), valid)


@triton.jit
def sum_onto_nodes(weight, rows, sums, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """sums + weight^T rows, [NODES, BLOCK_DV] fp32.

    Rows of half precision are multiplied as they are; a weight is two numbers of that precision.
    """
    wide, rows = tl.trans(weight.to(tl.float32)), rows.to(DOT)
    if rows.dtype == tl.float32:
        return tl.dot(wide, rows, sums, input_precision=PRECISION)
    high = wide.to(DOT)
    low = (wide - high.to(tl.float32)).to(DOT)
    return tl.dot(low, rows, tl.dot(high, rows, sums))


@triton.jit
def end_value(value, head, row, is_largest, columns):
    """The value of the largest or the smallest key, [BLOCK_DV] fp32."""
    key = tl.where(is_largest, tl.load(row + AT_MAX), tl.load(row + AT_MIN)).to(tl.int64)
    start = start_of(value, head) + key * value.row
    start += tl.cast(columns.first, tl.int64) * value.column
    return tl.load(start + columns.local * value.column, inside(columns), other=0.0).to(tl.float32)


@triton.jit
def moments_kernel(
    heads,
    tokens,
    dv,
    value,
    parts,  # [heads, slots, NODES, dv] WORK, written: sums of value - end value
    part_counts,  # [heads, slots, NODES] fp64, written
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    WORK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums over the keys of a part onto the nodes of its panel."""
    slot = find_slot(heads, tokens, True, BINS, CHUNK)
    if slot.start >= slot.end:
        return
    part = open_part(slot, heads, tokens, dv, NODES, BLOCK_DV)
    head, columns = part.head, part.columns
    own = end_value(value, head, part.row, is_upper(slot.panel, part.row, True), columns)
    sums = tl.zeros([NODES, BLOCK_DV], WORK)
    total = tl.zeros([NODES], WORK)
    for tile in range(slot.start, slot.end, TILE):
        _, index, valid, weight = load_tile(part, tile, slot.end, TILE, NODES, WORK)
        weight = tl.where(valid[:, None], weight, 0.0)
        v = load_rows(value, head, index, valid, columns)
        if sums.dtype == tl.float64:
            # A tile at a time: equal values would round in step.
            tile_sums = tl.zeros([NODES, BLOCK_DV], tl.float32)
            tile_sums = sum_onto_nodes(weight, v - own[None, :], tile_sums, DOT, PRECISION)
            sums += tile_sums.to(tl.float64)
        else:
            sums = sum_onto_nodes(weight, v, sums, DOT, PRECISION)
        total += tl.sum(weight, 0)
    if sums.dtype == tl.float32:
        sums -= total[:, None] * own[None, :]
    store_nodes(parts, part.sums, columns, sums, NODES)
    if tl.program_id(1) == 0:
        tl.store(part_counts + part.sums + tl.arange(0, NODES), total.to(tl.float64))


@triton.jit
def reduce_kernel(
    heads,
    tokens,
    dv,
    parts,
    part_totals,
    sums,  # [heads, panels, NODES, dv], written
    totals,  # [heads, panels, NODES] fp64, written
    IS_KEY: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
):
    """Adds the parts of a panel in the order of the chunks."""
    head = (tl.program_id(0) // tokens.panels).to(tl.int64)
    panel = tl.program_id(0) % tokens.panels
    if panel >= panels_in_use(heads, head, IS_KEY):
        return
    start, end = panel_part(tokens, head, panel, 0, NO_END, BINS)
    nodes, columns = tl.arange(0, NODES), span_of(tl.program_id(1) * BLOCK_DV, dv, BLOCK_DV)
    sum = tl.zeros([NODES, BLOCK_DV], tl.float64)
    total = tl.zeros([NODES], tl.float64)
    if start < end:
        for chunk in range(start // CHUNK, (end - 1) // CHUNK + 1):
            part = (head * tokens.slots + chunk + panel) * NODES
            sum += load_nodes(parts, part, columns, NODES).to(tl.float64)
            total += tl.load(part_totals + part + nodes)
    node = tl.program_id(0).to(tl.int64) * NODES
    store_nodes(sums, node, columns, sum, NODES)
    if tl.program_id(1) == 0:
        tl.store(totals + node + nodes, total)


@triton.jit
def evaluate_kernel(
    heads,
    tokens,
    dv,
    numbers,
    node_out,
    log_z,
    out,  # [heads, n, dv], written
    lse,  # [heads, n] fp64, written; or None
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    WORK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """F and log Z at the queries of a part."""
    slot = find_slot(heads, tokens, False, BINS, CHUNK)
    if slot.start >= slot.end:
        return
    part = open_part(slot, heads, tokens, dv, NODES, BLOCK_DV)
    line, columns = slot.head * tokens.n, part.columns
    table = load_nodes(node_out, part.node, columns, NODES)
    log_z_nodes = tl.load(log_z + part.node + tl.arange(0, NODES)).to(WORK)
    reference = reference_key(slot.panel, part.row)
    for tile in range(slot.start, slot.end, TILE):
        position, index, valid, weight = load_tile(part, tile, slot.end, TILE, NODES, WORK)
        if lse is not None:
            if tl.program_id(1) == 0:
                number = tl.load(numbers + line + position, valid, other=0.0)
                t = number.to(tl.float64) * joined(tokens.scale)
                rest = tl.sum(weight * log_z_nodes[None, :], 1)
                tl.store(lse + line + index, t * reference + rest.to(tl.float64), valid)
        rows = tl.dot(weight.to(tl.float32), table, input_precision=PRECISION)
        store_rows(out + line * dv, rows, index, valid, columns)


@triton.jit
def query_moments_kernel(
    heads,
    tokens,
    dv,
    grad_out,
    grad_lse,
    node_slopes,
    mean_gaps,
    parts,  # [heads, slots, NODES, dv] WORK, written: sums of grad_out
    part_lse,  # [heads, slots, NODES] fp64, written: sums of grad_lse
    grad_query,  # [column blocks, heads, n] fp32, written
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    WORK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums of g onto the query nodes, and dq_i = scale (g_i . F'(t_i) + dlse_i E[s])."""
    slot = find_slot(heads, tokens, False, BINS, CHUNK)
    if slot.start >= slot.end:
        return
    part = open_part(slot, heads, tokens, dv, NODES, BLOCK_DV)
    head, columns, nodes = part.head, part.columns, tl.arange(0, NODES)
    grad_query += (tl.program_id(1).to(tl.int64) * heads.total + head.number) * tokens.n
    slopes = load_nodes(node_slopes, part.node, columns, NODES)
    gaps = tl.load(mean_gaps + part.node + nodes)
    reference = reference_key(slot.panel, part.row)
    sums = tl.zeros([NODES, BLOCK_DV], WORK)
    lse_sums = tl.zeros([NODES], tl.float64)
    for tile in range(slot.start, slot.end, TILE):
        _, index, valid, weight = load_tile(part, tile, slot.end, TILE, NODES, WORK)
        weight = tl.where(valid[:, None], weight, 0.0)
        g = load_rows(grad_out, head, index, valid, columns)
        slope = tl.dot(weight.to(tl.float32), slopes, input_precision=PRECISION)
        to_t = tl.sum(g.to(tl.float32) * slope, 1).to(tl.float64)
        if sums.dtype == tl.float64:
            tile_sums = tl.zeros([NODES, BLOCK_DV], tl.float32)
            sums += sum_onto_nodes(weight, g, tile_sums, DOT, PRECISION).to(tl.float64)
        else:
            sums = sum_onto_nodes(weight, g, sums, DOT, PRECISION)
        if grad_lse is not None:
            if tl.program_id(1) == 0:
                at = index.to(tl.int64) * grad_lse.row
                h = tl.load(start_of(grad_lse, head) + at, valid, other=0.0).to(tl.float64)
                wide = weight.to(tl.float64)
                to_t += h * (reference + tl.sum(wide * gaps[None, :], 1))
                lse_sums += tl.sum(wide * h[:, None], 0)
        tl.store(grad_query + index, (to_t * joined(tokens.scale)).to(tl.float32), valid)
    store_nodes(parts, part.sums, columns, sums, NODES)
    if tl.program_id(1) == 0:
        tl.store(part_lse + part.sums + nodes, lse_sums)


@triton.jit
def evaluate_keys_kernel(
    heads,
    tokens,
    dv,
    value,
    value_table,
    slope_table,
    rest_table,
    grad_key,  # [column blocks, heads, n] fp32, written
    grad_value,  # [heads, n, dv], written
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    WORK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv at the keys of a part, from the tables at the key nodes."""
    slot = find_slot(heads, tokens, True, BINS, CHUNK)
    if slot.start >= slot.end:
        return
    part = open_part(slot, heads, tokens, dv, NODES, BLOCK_DV)
    head, columns = part.head, part.columns
    grad_key += (tl.program_id(1).to(tl.int64) * heads.total + head.number) * tokens.n
    grad_value += head.number * tokens.n * dv
    values = load_nodes(value_table, part.node, columns, NODES)
    slopes = load_nodes(slope_table, part.node, columns, NODES)
    rests = tl.load(rest_table + part.node + tl.arange(0, NODES))
    own = end_value(value, head, part.row, is_upper(slot.panel, part.row, True), columns)
    for tile in range(slot.start, slot.end, TILE):
        _, index, valid, weight = load_tile(part, tile, slot.end, TILE, NODES, WORK)
        narrow = weight.to(tl.float32)
        v = load_rows(value, head, index, valid, columns)
        slope = tl.dot(narrow, slopes, input_precision=PRECISION)
        to_s = tl.sum((v.to(tl.float32) - own[None, :]) * slope, 1).to(tl.float64)
        if tl.program_id(1) == 0:
            to_s += tl.sum(weight.to(tl.float64) * rests[None, :], 1)
        tl.store(grad_key + index, to_s.to(tl.float32), valid)
        rows = tl.dot(narrow, values, input_precision=PRECISION)
        store_rows(grad_value, rows, index, valid, columns)
