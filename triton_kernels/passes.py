"""The passes of a transform over tokens, in the order of their panels.

A program takes a chunk of tokens and goes through the panels it meets; docs/transform.md has the
formulas. Partial sums go to slots of their own (see `transform`), so nothing is added atomically.
"""

from __future__ import annotations

import triton
import triton.language as tl
from boltzattn.triton_kernels.heads import (
    head_offset,
    joined,
)
from boltzattn.triton_kernels.layout import (
    AT_MAX,
    AT_MIN,
    FIELDS,
    S_MAX,
    S_MIN,
    end_of_key_panel,
    end_of_query_panel,
    lagrange_weights,
    load_axis,
    load_number,
    locate_tokens,
)


@triton.jit
def panel_of_token(x, head, lead, order, position, axis, scale, IS_KEY: tl.constexpr):
    """The panel of the token at one position of the order."""
    index = tl.load(order + position + tl.arange(0, 1))
    number = load_number(x, head, lead, index, index >= 0, scale)
    panel, _ = locate_tokens(number, axis, IS_KEY)
    return tl.max(panel, 0)


@triton.jit
def panel_part(counts, ends, panel, blocks, low, high):
    """Positions [from, to) of the panel's tokens within [low, high)."""
    start = tl.load(ends + panel * blocks) - tl.load(counts + panel * blocks)
    end = tl.load(ends + panel * blocks + blocks - 1)
    return tl.maximum(start, low), tl.minimum(end, high)


@triton.jit
def load_tokens(x, head, lead, order, position, inside, axis, scale, IS_KEY: tl.constexpr):
    """(index, number, place) of the tokens at some positions of the order."""
    index = tl.load(order + position, inside, other=0)
    number = load_number(x, head, lead, index, inside, scale)
    _, place = locate_tokens(number, axis, IS_KEY)
    # Tokens past the end of the part lie on other panels: keep their powers finite.
    return index, number, tl.where(inside, place, 0.0)


@triton.jit
def load_rows(x, head, lead, index, inside, column, columns, dv):
    """Rows of a matrix by index, in fp32."""
    start = x[0] + head_offset(x, head, lead) + tl.cast(column, tl.int64) * x[5]
    at = index.to(tl.int64)[:, None] * x[4] + columns[None, :] * x[5]
    valid = inside[:, None] & (columns < dv - column)[None, :]
    return tl.load(start + at, valid, other=0.0).to(tl.float32)


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
    key,
    value,
    layout,
    served,
    counts,
    ends,
    order,
    parts,  # [heads, slots, NODES, dv] fp64, written: sums of value - end value
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
    PRECISION: tl.constexpr,
):
    """Sums over the keys of a chunk onto the key nodes."""
    chunks = tl.cdiv(n, CHUNK)
    head, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    if tl.load(served + head) == 0:
        return
    row = layout + head * FIELDS
    axis = load_axis(row, True)
    counts += head.to(tl.int64) * BINS * blocks
    ends += head.to(tl.int64) * BINS * blocks
    order += head.to(tl.int64) * n
    low = chunk * CHUNK
    kept = tl.load(ends + (BINS - 2) * blocks + blocks - 1)  # the last bin holds masked keys
    high = tl.minimum(low + CHUNK, kept)
    if low >= high:
        return
    column = tl.program_id(1) * BLOCK_DV
    nodes, columns = tl.arange(0, NODES), tl.arange(0, BLOCK_DV)
    first = panel_of_token(key, head, lead, order, low, axis, 1.0, True)
    last = panel_of_token(key, head, lead, order, high - 1, axis, 1.0, True)
    for panel in range(first, last + 1):
        start, end = panel_part(counts, ends, panel, blocks, low, high)
        if start < end:
            own = end_value(
                value, head, lead, row, end_of_key_panel(panel, row), column, columns, dv
            )
            sums = tl.zeros([NODES, BLOCK_DV], tl.float64)
            total = tl.zeros([NODES], tl.float64)
            for tile in range(start, end, TILE):
                position = tile + tl.arange(0, TILE)
                inside = position < end
                index, _, place = load_tokens(
                    key, head, lead, order, position, inside, axis, 1.0, True
                )
                weight = lagrange_weights(place, NODES, WORK)
                weight = tl.where(inside[:, None], weight, 0.0)
                v = load_rows(value, head, lead, index, inside, column, columns, dv) - own[None, :]
                part = tl.dot(tl.trans(weight.to(tl.float32)), v, input_precision=PRECISION)
                sums += part.to(tl.float64)
                total += tl.sum(weight, 0).to(tl.float64)
            slot = head.to(tl.int64) * slots + chunk + panel
            to = parts + slot * NODES * dv + nodes[:, None] * dv + column + columns[None, :]
            tl.store(to, sums, (columns < dv - column)[None, :] & (nodes >= 0)[:, None])
            if tl.program_id(1) == 0:
                tl.store(part_counts + slot * NODES + nodes, total)


@triton.jit
def reduce_kernel(
    layout,
    served,
    counts,
    ends,
    parts,
    part_counts,
    sums,  # [heads, panels, NODES, dv] fp64, written
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
            sum += tl.load(parts + slot * NODES * dv + at, inside, other=0.0)
            total += tl.load(part_counts + slot * NODES + nodes)
    to = tl.program_id(0).to(tl.int64) * NODES
    tl.store(sums + to * dv + at, sum, inside)
    if tl.program_id(1) == 0:
        tl.store(totals + to + nodes, total)


@triton.jit
def evaluate_kernel(
    query,
    layout,
    served,
    counts,
    ends,
    order,
    node_out,
    log_z,
    out,  # [heads, n, dv], written
    lse,  # [heads, n] fp64, written
    lead,
    n,
    dv,
    scale,
    blocks,
    panels,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    WORK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Reads F and log Z off at the queries of a chunk."""
    scale = joined(scale)
    chunks = tl.cdiv(n, CHUNK)
    head, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    if tl.load(served + head) == 0:
        return
    row = layout + head * FIELDS
    axis = load_axis(row, False)
    counts += head.to(tl.int64) * BINS * blocks
    ends += head.to(tl.int64) * BINS * blocks
    order += head.to(tl.int64) * n
    out += head.to(tl.int64) * n * dv
    lse += head.to(tl.int64) * n
    low, high = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, n)
    column = tl.program_id(1) * BLOCK_DV
    nodes, columns = tl.arange(0, NODES), tl.arange(0, BLOCK_DV)
    at = nodes[:, None] * dv + column + columns[None, :]
    valid = (nodes >= 0)[:, None] & (columns < dv - column)[None, :]
    first = panel_of_token(query, head, lead, order, low, axis, scale, False)
    last = panel_of_token(query, head, lead, order, high - 1, axis, scale, False)
    for panel in range(first, last + 1):
        start, end = panel_part(counts, ends, panel, blocks, low, high)
        slot = (head.to(tl.int64) * panels + panel) * NODES
        table = tl.load(node_out + slot * dv + at, valid, other=0.0)
        log_z_nodes = tl.load(log_z + slot + nodes)
        reference = tl.where(
            end_of_query_panel(panel, row), tl.load(row + S_MAX), tl.load(row + S_MIN)
        )
        for tile in range(start, end, TILE):
            position = tile + tl.arange(0, TILE)
            inside = position < end
            index, t, place = load_tokens(
                query, head, lead, order, position, inside, axis, scale, False
            )
            weight = lagrange_weights(place, NODES, WORK)
            rows = tl.dot(weight.to(tl.float32), table, input_precision=PRECISION)
            store_rows(out, rows, index, inside, column, columns, dv)
            if tl.program_id(1) == 0:
                rest = tl.sum(weight.to(tl.float64) * log_z_nodes[None, :], 1)
                tl.store(lse + index, t * reference + rest, inside)


@triton.jit
def query_gradient_kernel(
    query,
    grad_out,
    grad_lse,
    layout,
    served,
    counts,
    ends,
    order,
    node_slopes,
    mean_gaps,
    parts,  # [heads, slots, NODES, dv] fp64, written: sums of grad_out
    part_lse,  # [heads, slots, NODES] fp64, written: sums of grad_lse
    grad_query,  # [column blocks, heads, n] fp32, written
    lead,
    n,
    dv,
    scale,
    blocks,
    slots,
    panels,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    WORK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq_i = scale (g_i . F'(t_i) + dlse_i E[s]), and sums of g onto the query nodes."""
    scale = joined(scale)
    chunks = tl.cdiv(n, CHUNK)
    head, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    if tl.load(served + head) == 0:
        return
    row = layout + head * FIELDS
    axis = load_axis(row, False)
    counts += head.to(tl.int64) * BINS * blocks
    ends += head.to(tl.int64) * BINS * blocks
    order += head.to(tl.int64) * n
    grad_query += (tl.program_id(1).to(tl.int64) * lead[0] + head) * n
    low, high = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, n)
    column = tl.program_id(1) * BLOCK_DV
    nodes, columns = tl.arange(0, NODES), tl.arange(0, BLOCK_DV)
    at = nodes[:, None] * dv + column + columns[None, :]
    valid = (nodes >= 0)[:, None] & (columns < dv - column)[None, :]
    first = panel_of_token(query, head, lead, order, low, axis, scale, False)
    last = panel_of_token(query, head, lead, order, high - 1, axis, scale, False)
    for panel in range(first, last + 1):
        start, end = panel_part(counts, ends, panel, blocks, low, high)
        if start < end:
            node = (head.to(tl.int64) * panels + panel) * NODES
            slopes = tl.load(node_slopes + node * dv + at, valid, other=0.0)
            gaps = tl.load(mean_gaps + node + nodes)
            reference = tl.where(
                end_of_query_panel(panel, row), tl.load(row + S_MAX), tl.load(row + S_MIN)
            )
            sums = tl.zeros([NODES, BLOCK_DV], tl.float64)
            lse_sums = tl.zeros([NODES], tl.float64)
            for tile in range(start, end, TILE):
                position = tile + tl.arange(0, TILE)
                inside = position < end
                index, _, place = load_tokens(
                    query, head, lead, order, position, inside, axis, scale, False
                )
                weight = lagrange_weights(place, NODES, WORK)
                weight = tl.where(inside[:, None], weight, 0.0)
                g = load_rows(grad_out, head, lead, index, inside, column, columns, dv)
                slope = tl.dot(weight.to(tl.float32), slopes, input_precision=PRECISION)
                to_t = tl.sum(g * slope, 1).to(tl.float64)
                part = tl.dot(tl.trans(weight.to(tl.float32)), g, input_precision=PRECISION)
                sums += part.to(tl.float64)
                if grad_lse is not None:
                    if tl.program_id(1) == 0:
                        h = load_number(grad_lse, head, lead, index, inside, 1.0)
                        wide = weight.to(tl.float64)
                        to_t += h * (reference + tl.sum(wide * gaps[None, :], 1))
                        lse_sums += tl.sum(wide * h[:, None], 0)
                tl.store(grad_query + index, (to_t * scale).to(tl.float32), inside)
            slot = head.to(tl.int64) * slots + chunk + panel
            tl.store(parts + slot * NODES * dv + at, sums, valid)
            if tl.program_id(1) == 0:
                tl.store(part_lse + slot * NODES + nodes, lse_sums)


@triton.jit
def key_gradient_kernel(
    key,
    value,
    layout,
    served,
    counts,
    ends,
    order,
    value_table,
    slope_table,
    rest_table,
    grad_key,  # [column blocks, heads, n] fp32, written
    grad_value,  # [heads, n, dv], written
    lead,
    n,
    dv,
    blocks,
    panels,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    WORK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of the keys of a chunk, from the tables at the key nodes."""
    chunks = tl.cdiv(n, CHUNK)
    head, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    if tl.load(served + head) == 0:
        return
    row = layout + head * FIELDS
    axis = load_axis(row, True)
    counts += head.to(tl.int64) * BINS * blocks
    ends += head.to(tl.int64) * BINS * blocks
    order += head.to(tl.int64) * n
    grad_key += (tl.program_id(1).to(tl.int64) * lead[0] + head) * n
    grad_value += head.to(tl.int64) * n * dv
    low = chunk * CHUNK
    kept = tl.load(ends + (BINS - 2) * blocks + blocks - 1)
    high = tl.minimum(low + CHUNK, kept)
    if low >= high:
        return
    column = tl.program_id(1) * BLOCK_DV
    nodes, columns = tl.arange(0, NODES), tl.arange(0, BLOCK_DV)
    at = nodes[:, None] * dv + column + columns[None, :]
    valid = (nodes >= 0)[:, None] & (columns < dv - column)[None, :]
    first = panel_of_token(key, head, lead, order, low, axis, 1.0, True)
    last = panel_of_token(key, head, lead, order, high - 1, axis, 1.0, True)
    for panel in range(first, last + 1):
        start, end = panel_part(counts, ends, panel, blocks, low, high)
        node = (head.to(tl.int64) * panels + panel) * NODES
        values = tl.load(value_table + node * dv + at, valid, other=0.0)
        slopes = tl.load(slope_table + node * dv + at, valid, other=0.0)
        rests = tl.load(rest_table + node + nodes)
        own = end_value(value, head, lead, row, end_of_key_panel(panel, row), column, columns, dv)
        for tile in range(start, end, TILE):
            position = tile + tl.arange(0, TILE)
            inside = position < end
            index, _, place = load_tokens(key, head, lead, order, position, inside, axis, 1.0, True)
            weight = lagrange_weights(place, NODES, WORK)
            v = load_rows(value, head, lead, index, inside, column, columns, dv)
            narrow = weight.to(tl.float32)
            rows = tl.dot(narrow, values, input_precision=PRECISION)
            store_rows(grad_value, rows, index, inside, column, columns, dv)
            slope = tl.dot(narrow, slopes, input_precision=PRECISION)
            to_s = tl.sum((v - own[None, :]) * slope, 1).to(tl.float64)
            if tl.program_id(1) == 0:
                to_s += tl.sum(weight.to(tl.float64) * rests[None, :], 1)
            tl.store(grad_key + index, to_s.to(tl.float32), inside)
