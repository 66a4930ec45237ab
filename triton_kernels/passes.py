"""The passes of a transform over tokens, in the order of their panels.

Positions of the order are cut into chunks, and chunks into the parts that lie on one panel. From
one part to the next either the chunk or the panel grows by one, so part (chunk, panel) has slot
chunk + panel of programs and of partial sums to itself, and nothing is added atomically.
docs/transform.md has the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl
from boltzattn.triton_kernels.heads import head_offset, joined
from boltzattn.triton_kernels.layout import (
    AT_MAX,
    AT_MIN,
    FIELDS,
    KEY_PANELS,
    QUERY_PANELS,
    S_MAX,
    S_MIN,
    end_of_key_panel,
    end_of_query_panel,
    lagrange_weights,
)


@triton.jit
def panel_part(counts, ends, panel, blocks, low, high):
    """Positions [from, to) of the panel's tokens within [low, high)."""
    start = tl.load(ends + panel * blocks) - tl.load(counts + panel * blocks)
    end = tl.load(ends + panel * blocks + blocks - 1)
    return tl.maximum(start, low), tl.minimum(end, high)


@triton.jit
def part_of_slot(counts, ends, blocks, n, slot, panels, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """(panel, start, end) of a slot's part; start >= end if there is none."""
    bins = tl.arange(0, BINS)
    used = tl.where(slot < tl.cdiv(n, CHUNK) + panels, panels, 0)
    end = tl.load(ends + bins * blocks + blocks - 1, bins < used, other=0x7FFFFFFF)
    panel = tl.sum(((end - 1) // CHUNK + bins < slot).to(tl.int32), 0)
    low = (slot - panel) * CHUNK
    start, end = low, low
    if (panel < panels) & (low < n):
        start, end = panel_part(counts, ends, panel, blocks, low, low + CHUNK)
    return panel, start, end


@triton.jit
def load_tokens(order, places, position, inside):
    """(index, place) of the tokens at some positions of the order."""
    index = tl.load(order + position, inside, other=0)
    # Tokens past the end of the part lie on other panels: 0 keeps their powers finite.
    return index, tl.load(places + position, inside, other=0.0)


@triton.jit
def load_rows(x, head, lead, index, inside, column, columns, dv):
    """Rows of a matrix by index."""
    start = x[0] + head_offset(x, head, lead) + tl.cast(column, tl.int64) * x[5]
    at = index.to(tl.int64)[:, None] * x[4] + columns[None, :] * x[5]
    valid = inside[:, None] & (columns < dv - column)[None, :]
    return tl.load(start + at, valid, other=0.0)


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
def store_rows(pointer, rows, index, inside, column, columns, dv):
    """Rows of a contiguous [n, dv] by index."""
    at = index.to(tl.int64)[:, None] * dv + (column + columns)[None, :]
    valid = inside[:, None] & (columns < dv - column)[None, :]
    tl.store(pointer + at, rows.to(pointer.dtype.element_ty), valid)


@triton.jit
def end_value(value, head, lead, row, is_largest, column, columns, dv):
    """The value of the largest or the smallest key, [BLOCK_DV] fp32."""
    key = tl.where(is_largest, tl.load(row + AT_MAX), tl.load(row + AT_MIN)).to(tl.int64)
    start = value[0] + head_offset(value, head, lead) + key * value[4]
    start += tl.cast(column, tl.int64) * value[5]
    return tl.load(start + columns * value[5], columns < dv - column, other=0.0).to(tl.float32)


@triton.jit
def moments_kernel(
    value,
    layout,
    served,
    counts,
    ends,
    order,
    places,
    parts,  # [heads, slots, NODES, dv] WORK, written: sums of value - end value
    part_counts,  # [heads, slots, NODES] fp64, written
    lead,
    n,
    dv,
    blocks,
    slots,
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
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    if tl.load(served + head) == 0:
        return
    row = layout + head * FIELDS
    counts += head.to(tl.int64) * BINS * blocks
    ends += head.to(tl.int64) * BINS * blocks
    panels = tl.load(row + KEY_PANELS).to(tl.int32)
    panel, start, end = part_of_slot(counts, ends, blocks, n, slot, panels, BINS, CHUNK)
    if start >= end:
        return
    order += head.to(tl.int64) * n
    places += head.to(tl.int64) * n
    column = tl.program_id(1) * BLOCK_DV
    nodes, columns = tl.arange(0, NODES), tl.arange(0, BLOCK_DV)
    own = end_value(value, head, lead, row, end_of_key_panel(panel, row), column, columns, dv)
    sums = tl.zeros([NODES, BLOCK_DV], WORK)
    total = tl.zeros([NODES], WORK)
    for tile in range(start, end, TILE):
        position = tile + tl.arange(0, TILE)
        inside = position < end
        index, place = load_tokens(order, places, position, inside)
        weight = lagrange_weights(place, NODES, WORK)
        weight = tl.where(inside[:, None], weight, 0.0)
        v = load_rows(value, head, lead, index, inside, column, columns, dv)
        if sums.dtype == tl.float64:
            # A tile at a time: equal values would round in step.
            part = tl.zeros([NODES, BLOCK_DV], tl.float32)
            part = sum_onto_nodes(weight, v - own[None, :], part, DOT, PRECISION)
            sums += part.to(tl.float64)
        else:
            sums = sum_onto_nodes(weight, v, sums, DOT, PRECISION)
        total += tl.sum(weight, 0)
    if sums.dtype == tl.float32:
        sums -= total[:, None] * own[None, :]
    to = (head.to(tl.int64) * slots + slot) * NODES
    at = nodes[:, None] * dv + column + columns[None, :]
    valid = (nodes >= 0)[:, None] & (columns < dv - column)[None, :]
    tl.store(parts + to * dv + at, sums, valid)
    if tl.program_id(1) == 0:
        tl.store(part_counts + to + nodes, total.to(tl.float64))


@triton.jit
def reduce_kernel(
    layout,
    served,
    counts,
    ends,
    parts,
    part_counts,
    sums,  # [heads, panels, NODES, dv], written
    totals,  # [heads, panels, NODES] fp64, written
    dv,
    blocks,
    slots,
    panels,
    PANELS_FIELD: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
):
    """Adds the parts of a panel in the order of the chunks."""
    head, panel = tl.program_id(0) // panels, tl.program_id(0) % panels
    if tl.load(served + head) == 0:
        return
    if panel >= tl.load(layout + head * FIELDS + PANELS_FIELD):
        return
    counts += head.to(tl.int64) * BINS * blocks
    ends += head.to(tl.int64) * BINS * blocks
    start, end = panel_part(counts, ends, panel, blocks, 0, 0x7FFFFFFF)
    nodes, columns = tl.arange(0, NODES), tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    at = nodes[:, None] * dv + columns[None, :]
    inside = (nodes >= 0)[:, None] & (columns < dv)[None, :]
    sum = tl.zeros([NODES, BLOCK_DV], tl.float64)
    total = tl.zeros([NODES], tl.float64)
    if start < end:
        for chunk in range(start // CHUNK, (end - 1) // CHUNK + 1):
            slot = head.to(tl.int64) * slots + chunk + panel
            sum += tl.load(parts + slot * NODES * dv + at, inside, other=0.0).to(tl.float64)
            total += tl.load(part_counts + slot * NODES + nodes)
    to = tl.program_id(0).to(tl.int64) * NODES
    tl.store(sums + to * dv + at, sum, inside)
    if tl.program_id(1) == 0:
        tl.store(totals + to + nodes, total)


@triton.jit
def evaluate_kernel(
    layout,
    served,
    counts,
    ends,
    order,
    places,
    numbers,
    node_out,
    log_z,
    out,  # [heads, n, dv], written
    lse,  # [heads, n] fp64, written; or None
    n,
    dv,
    scale,
    blocks,
    slots,
    most_panels,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    WORK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Reads F and log Z off at the queries of a part."""
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    if tl.load(served + head) == 0:
        return
    row = layout + head * FIELDS
    counts += head.to(tl.int64) * BINS * blocks
    ends += head.to(tl.int64) * BINS * blocks
    panels = tl.load(row + QUERY_PANELS).to(tl.int32)
    panel, start, end = part_of_slot(counts, ends, blocks, n, slot, panels, BINS, CHUNK)
    if start >= end:
        return
    order += head.to(tl.int64) * n
    places += head.to(tl.int64) * n
    numbers += head.to(tl.int64) * n
    out += head.to(tl.int64) * n * dv
    column = tl.program_id(1) * BLOCK_DV
    nodes, columns = tl.arange(0, NODES), tl.arange(0, BLOCK_DV)
    at = nodes[:, None] * dv + column + columns[None, :]
    valid = (nodes >= 0)[:, None] & (columns < dv - column)[None, :]
    node = (head.to(tl.int64) * most_panels + panel) * NODES
    table = tl.load(node_out + node * dv + at, valid, other=0.0)
    log_z_nodes = tl.load(log_z + node + nodes).to(WORK)
    at_largest = end_of_query_panel(panel, row)
    reference = tl.where(at_largest, tl.load(row + S_MAX), tl.load(row + S_MIN))
    for tile in range(start, end, TILE):
        position = tile + tl.arange(0, TILE)
        inside = position < end
        index, place = load_tokens(order, places, position, inside)
        weight = lagrange_weights(place, NODES, WORK)
        if lse is not None:
            if tl.program_id(1) == 0:
                t = tl.load(numbers + position, inside, other=0.0).to(tl.float64) * joined(scale)
                rest = tl.sum(weight * log_z_nodes[None, :], 1)
                to = lse + head.to(tl.int64) * n + index
                tl.store(to, t * reference + rest.to(tl.float64), inside)
        rows = tl.dot(weight.to(tl.float32), table, input_precision=PRECISION)
        store_rows(out, rows, index, inside, column, columns, dv)


@triton.jit
def query_gradient_kernel(
    grad_out,
    grad_lse,
    layout,
    served,
    counts,
    ends,
    order,
    places,
    node_slopes,
    mean_gaps,
    parts,  # [heads, slots, NODES, dv] WORK, written: sums of grad_out
    part_lse,  # [heads, slots, NODES] fp64, written: sums of grad_lse
    grad_query,  # [column blocks, heads, n] fp32, written
    lead,
    n,
    dv,
    scale,
    blocks,
    slots,
    most_panels,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    WORK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq_i = scale (g_i . F'(t_i) + dlse_i E[s]), and sums of g onto the query nodes."""
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    if tl.load(served + head) == 0:
        return
    row = layout + head * FIELDS
    counts += head.to(tl.int64) * BINS * blocks
    ends += head.to(tl.int64) * BINS * blocks
    panels = tl.load(row + QUERY_PANELS).to(tl.int32)
    panel, start, end = part_of_slot(counts, ends, blocks, n, slot, panels, BINS, CHUNK)
    if start >= end:
        return
    order += head.to(tl.int64) * n
    places += head.to(tl.int64) * n
    grad_query += (tl.program_id(1).to(tl.int64) * lead[0] + head) * n
    column = tl.program_id(1) * BLOCK_DV
    nodes, columns = tl.arange(0, NODES), tl.arange(0, BLOCK_DV)
    at = nodes[:, None] * dv + column + columns[None, :]
    valid = (nodes >= 0)[:, None] & (columns < dv - column)[None, :]
    node = (head.to(tl.int64) * most_panels + panel) * NODES
    slopes = tl.load(node_slopes + node * dv + at, valid, other=0.0)
    gaps = tl.load(mean_gaps + node + nodes)
    at_largest = end_of_query_panel(panel, row)
    reference = tl.where(at_largest, tl.load(row + S_MAX), tl.load(row + S_MIN))
    sums = tl.zeros([NODES, BLOCK_DV], WORK)
    lse_sums = tl.zeros([NODES], tl.float64)
    for tile in range(start, end, TILE):
        position = tile + tl.arange(0, TILE)
        inside = position < end
        index, place = load_tokens(order, places, position, inside)
        weight = lagrange_weights(place, NODES, WORK)
        weight = tl.where(inside[:, None], weight, 0.0)
        g = load_rows(grad_out, head, lead, index, inside, column, columns, dv)
        slope = tl.dot(weight.to(tl.float32), slopes, input_precision=PRECISION)
        to_t = tl.sum(g.to(tl.float32) * slope, 1).to(tl.float64)
        if sums.dtype == tl.float64:
            part = tl.zeros([NODES, BLOCK_DV], tl.float32)
            sums += sum_onto_nodes(weight, g, part, DOT, PRECISION).to(tl.float64)
        else:
            sums = sum_onto_nodes(weight, g, sums, DOT, PRECISION)
        if grad_lse is not None:
            if tl.program_id(1) == 0:
                start_lse = grad_lse[0] + head_offset(grad_lse, head, lead)
                h = tl.load(start_lse + index.to(tl.int64) * grad_lse[4], inside, other=0.0)
                wide = weight.to(tl.float64)
                to_t += h.to(tl.float64) * (reference + tl.sum(wide * gaps[None, :], 1))
                lse_sums += tl.sum(wide * h.to(tl.float64)[:, None], 0)
        tl.store(grad_query + index, (to_t * joined(scale)).to(tl.float32), inside)
    to = (head.to(tl.int64) * slots + slot) * NODES
    tl.store(parts + to * dv + at, sums, valid)
    if tl.program_id(1) == 0:
        tl.store(part_lse + to + nodes, lse_sums)


@triton.jit
def key_gradient_kernel(
    value,
    layout,
    served,
    counts,
    ends,
    order,
    places,
    value_table,
    slope_table,
    rest_table,
    grad_key,  # [column blocks, heads, n] fp32, written
    grad_value,  # [heads, n, dv], written
    lead,
    n,
    dv,
    blocks,
    slots,
    most_panels,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    WORK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of the keys of a part, from the tables at the key nodes."""
    head, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    if tl.load(served + head) == 0:
        return
    row = layout + head * FIELDS
    counts += head.to(tl.int64) * BINS * blocks
    ends += head.to(tl.int64) * BINS * blocks
    panels = tl.load(row + KEY_PANELS).to(tl.int32)
    panel, start, end = part_of_slot(counts, ends, blocks, n, slot, panels, BINS, CHUNK)
    if start >= end:
        return
    order += head.to(tl.int64) * n
    places += head.to(tl.int64) * n
    grad_key += (tl.program_id(1).to(tl.int64) * lead[0] + head) * n
    grad_value += head.to(tl.int64) * n * dv
    column = tl.program_id(1) * BLOCK_DV
    nodes, columns = tl.arange(0, NODES), tl.arange(0, BLOCK_DV)
    at = nodes[:, None] * dv + column + columns[None, :]
    valid = (nodes >= 0)[:, None] & (columns < dv - column)[None, :]
    node = (head.to(tl.int64) * most_panels + panel) * NODES
    values = tl.load(value_table + node * dv + at, valid, other=0.0)
    slopes = tl.load(slope_table + node * dv + at, valid, other=0.0)
    rests = tl.load(rest_table + node + nodes)
    own = end_value(value, head, lead, row, end_of_key_panel(panel, row), column, columns, dv)
    for tile in range(start, end, TILE):
        position = tile + tl.arange(0, TILE)
        inside = position < end
        index, place = load_tokens(order, places, position, inside)
        weight = lagrange_weights(place, NODES, WORK)
        narrow = weight.to(tl.float32)
        v = load_rows(value, head, lead, index, inside, column, columns, dv)
        slope = tl.dot(narrow, slopes, input_precision=PRECISION)
        to_s = tl.sum((v.to(tl.float32) - own[None, :]) * slope, 1).to(tl.float64)
        if tl.program_id(1) == 0:
            to_s += tl.sum(weight.to(tl.float64) * rests[None, :], 1)
        tl.store(grad_key + index, to_s.to(tl.float32), inside)
        rows = tl.dot(narrow, values, input_precision=PRECISION)
        store_rows(grad_value, rows, index, inside, column, columns, dv)
