"""Rank-1 attention in linear time: docs/transform.md, with every shape fixed by dtype and n.

Forward is ranges -> layout -> order of tokens -> moments of the keys -> core -> evaluation at the
queries; backward runs the same way and back. The host never asks the device for a number, so a call
can be captured in a graph. Heads that cannot be served (or whose certificate is not good enough)
are left to the kernels of `direct`, which start in any case and leave served heads alone.

Tokens are taken in the order of their panels, in chunks. A chunk meets few panels; the part of
panel p in chunk c has slot c + p of the partial sums to itself, since either c or p grows from one
part to the next. A second kernel adds the parts in order.

A row of values costs one matrix product with 16 nodes: fp32 with split tf32 operands, summed over a
tile of tokens and then in fp64. Coordinates, kernel values and the core are fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from boltzattn.layout import LARGEST_PRODUCT
from boltzattn.triton_kernels import direct
from boltzattn.triton_kernels.heads import head_offset, joined, lead_of, split, strided
from boltzattn.triton_kernels.launch import (
    CHUNK,
    cdiv,
    launch,
    node_options,
    on_device,
    precision,
    token_options,
)
from boltzattn.triton_kernels.layout import (
    AT_MAX,
    AT_MIN,
    FIELDS,
    KEY_PANELS,
    MIDDLE,
    NODES,
    PRECISIONS,
    QUERY_HALF,
    QUERY_PANELS,
    RANGE_BLOCK,
    RANGES,
    S_MAX,
    S_MIN,
    STRIP,
    end_of_key_panel,
    end_of_query_panel,
    key_nodes,
    key_side_error,
    lagrange_weights,
    layout_kernel,
    load_number,
    locate_keys,
    locate_queries,
    most_panels,
    query_nodes,
    ranges_kernel,
    wave,
)
from boltzattn.triton_kernels.sorting import count_kernel, order_kernel
from torch import Tensor

NEGLIGIBLE = tl.constexpr(-80.0)  # exponent below which a key node adds nothing


@triton.jit
def panel_of_token(x, head, lead, order, position, row, scale, IS_KEY: tl.constexpr):
    """The panel of the token at one position of the order."""
    index = tl.load(order + position + tl.arange(0, 1))
    number = load_number(x, head, lead, index, index >= 0, scale)
    if IS_KEY:
        panel, _ = locate_keys(number, row)
    else:
        panel, _ = locate_queries(number, row)
    return tl.max(panel, 0)


@triton.jit
def panel_part(counts, ends, panel, blocks, low, high):
    """Positions [from, to) of the panel's tokens within [low, high)."""
    start = tl.load(ends + panel * blocks) - tl.load(counts + panel * blocks)
    end = tl.load(ends + panel * blocks + blocks - 1)
    return tl.maximum(start, low), tl.minimum(end, high)


@triton.jit
def load_tokens(x, head, lead, order, position, inside, row, scale, IS_KEY: tl.constexpr):
    """(index, number, place) of the tokens at some positions of the order."""
    index = tl.load(order + position, inside, other=0)
    number = load_number(x, head, lead, index, inside, scale)
    if IS_KEY:
        _, place = locate_keys(number, row)
    else:
        _, place = locate_queries(number, row)
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
    first = panel_of_token(key, head, lead, order, low, row, 1.0, True)
    last = panel_of_token(key, head, lead, order, high - 1, row, 1.0, True)
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
                    key, head, lead, order, position, inside, row, 1.0, True
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
def product(a, b, PRECISION: tl.constexpr):
    """The fp64 product of two matrices; AMD's matrix units take none from Triton."""
    if PRECISION == "ieee":
        return tl.sum(a[:, :, None] * b[None, :, :], 1)
    else:
        return tl.dot(a, b)


@triton.jit
def core_kernel(
    value,
    layout,
    served,
    sums,  # [heads, key panels, NODES, dv] fp64
    totals,  # [heads, key panels, NODES] fp64
    node_out,  # [heads, query panels, NODES, dv] fp32, written: F
    log_z,  # [heads, query panels, NODES] fp64, written: log Z
    node_means,  # the same as node_out, or None: F - end value
    node_slopes,  # the same: F'
    mean_gaps,  # the same as log_z, or None: mean key - reference key
    bounds,  # [heads, query panels, column blocks, 2] fp32, written: error, size of F - end value
    lead,
    dv,
    query_panels,
    key_panels,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """F and log Z (and their slopes) at the nodes of a query panel."""
    head, panel = tl.program_id(0) // query_panels, tl.program_id(0) % query_panels
    if tl.load(served + head) == 0:
        return
    row = layout + head * FIELDS
    if panel >= tl.load(row + QUERY_PANELS):
        return
    column = tl.program_id(1) * BLOCK_DV
    nodes, columns = tl.arange(0, NODES), tl.arange(0, BLOCK_DV)
    at = nodes[:, None] * dv + column + columns[None, :]
    inside = (nodes >= 0)[:, None] & (columns < dv - column)[None, :]

    at_largest = end_of_query_panel(panel, row)
    reference = tl.where(at_largest, tl.load(row + S_MAX), tl.load(row + S_MIN))
    centre = end_value(value, head, lead, row, at_largest, column, columns, dv)
    t = query_nodes(panel, row, NODES)
    n_sum = tl.zeros([NODES, BLOCK_DV], tl.float64)
    z_sum = tl.zeros([NODES], tl.float64)
    if node_slopes is not None:
        n_slope = tl.zeros([NODES, BLOCK_DV], tl.float64)
        z_slope = tl.zeros([NODES], tl.float64)
    for k in range(0, tl.load(row + KEY_PANELS).to(tl.int32)):
        gap = key_nodes(k, row, NODES) - (reference - tl.load(row + MIDDLE))
        exponent = t[:, None] * gap[None, :]
        if tl.max(tl.max(exponent, 1), 0) > NEGLIGIBLE:
            kernel = tl.exp(exponent)
            slot = (head.to(tl.int64) * key_panels + k) * NODES
            own = end_value(value, head, lead, row, end_of_key_panel(k, row), column, columns, dv)
            m = tl.load(sums + slot * dv + at, inside, other=0.0)
            total = tl.load(totals + slot + nodes)
            shift = own.to(tl.float64) - centre.to(tl.float64)
            z = tl.sum(kernel * total[None, :], 1)
            n_sum += product(kernel, m, PRECISION) + z[:, None] * shift[None, :]
            z_sum += z
            if node_slopes is not None:
                z = tl.sum(kernel * (gap * total)[None, :], 1)
                n_slope += (
                    product(kernel * gap[None, :], m, PRECISION) + z[:, None] * shift[None, :]
                )
                z_slope += z

    f = n_sum / z_sum[:, None]
    slot = tl.program_id(0).to(tl.int64) * NODES
    whole = f + centre.to(tl.float64)[None, :]
    tl.store(node_out + slot * dv + at, whole.to(tl.float32), inside)
    if tl.program_id(1) == 0:
        tl.store(log_z + slot + nodes, tl.log(z_sum))
    if node_slopes is not None:
        mean_gap = z_slope / z_sum
        slope = n_slope / z_sum[:, None] - f * mean_gap[:, None]
        tl.store(node_means + slot * dv + at, f.to(tl.float32), inside)
        tl.store(node_slopes + slot * dv + at, slope.to(tl.float32), inside)
        if tl.program_id(1) == 0:
            tl.store(mean_gaps + slot + nodes, mean_gap)

    # The certificate of docs/transform.md: what the last four Chebyshev coefficients foretell.
    ratio = tl.load(row + STRIP) / tl.load(row + QUERY_HALF)
    rho = ratio + tl.sqrt(ratio * ratio + 1)
    largest = tl.zeros([], tl.float64)
    decay = 1 / rho
    for back in tl.static_range(1, 5):
        weight = tl.zeros([NODES], tl.float64)
        for i in tl.static_range(NODES):
            weight = tl.where(nodes == i, wave(NODES, NODES - back, i), weight)
        coefficient = tl.max(tl.abs(tl.sum(weight[:, None] * f, 0)), 0)
        largest = tl.maximum(largest, coefficient * decay)
        decay /= rho
    to = bounds + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * 2
    tl.store(to, (4 / (1 - 1 / rho) * largest).to(tl.float32))
    tl.store(to + 1, tl.max(tl.max(tl.abs(f), 1), 0).to(tl.float32))


@triton.jit
def certify_kernel(
    layout,
    served,  # [heads] int32, updated
    certificate,  # [heads] fp32, written
    bounds,
    query_panels,
    column_blocks,
    floor,  # the parts of the error that sizes alone decide
    tolerance,
    BLOCK: tl.constexpr,
):
    """Bounds max|out - exact| / max|v| of a head, and gives the head up if that is too much."""
    head = tl.program_id(0)
    if tl.load(served + head) == 0:
        tl.store(certificate + head, float("inf"))
        return
    panels = tl.load(layout + head * FIELDS + QUERY_PANELS).to(tl.int32)
    bounds += head.to(tl.int64) * query_panels * column_blocks * 2
    error = tl.zeros([BLOCK], tl.float32)
    size = tl.zeros([BLOCK], tl.float32)
    odd = tl.zeros([BLOCK], tl.int32)
    for first in range(0, panels * column_blocks, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < panels * column_blocks
        part_error = tl.load(bounds + index * 2, inside, other=0.0)
        part_size = tl.load(bounds + index * 2 + 1, inside, other=0.0)
        error, size = tl.maximum(error, part_error), tl.maximum(size, part_size)
        odd += ((part_error * 0 != 0) | (part_size * 0 != 0)).to(tl.int32)
    # |F - end value| <= 2 max|v|: half of it can only overstate the relative error.
    worst, half = tl.max(error, 0), tl.max(size, 0) / 2
    bound = tl.where(worst == 0, 0.0, worst / half) + floor
    bound = tl.where(tl.max(odd, 0) > 0, float("inf"), bound)
    tl.store(certificate + head, bound)
    tl.store(served + head, (bound <= tolerance).to(tl.int32))


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
    first = panel_of_token(query, head, lead, order, low, row, scale, False)
    last = panel_of_token(query, head, lead, order, high - 1, row, scale, False)
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
                query, head, lead, order, position, inside, row, scale, False
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
    counts += head.to(tl.int64) * BINS * blocks
    ends += head.to(tl.int64) * BINS * blocks
    order += head.to(tl.int64) * n
    grad_query += (tl.program_id(1).to(tl.int64) * lead[0] + head) * n
    low, high = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, n)
    column = tl.program_id(1) * BLOCK_DV
    nodes, columns = tl.arange(0, NODES), tl.arange(0, BLOCK_DV)
    at = nodes[:, None] * dv + column + columns[None, :]
    valid = (nodes >= 0)[:, None] & (columns < dv - column)[None, :]
    first = panel_of_token(query, head, lead, order, low, row, scale, False)
    last = panel_of_token(query, head, lead, order, high - 1, row, scale, False)
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
                    query, head, lead, order, position, inside, row, scale, False
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
def adjoint_kernel(
    value,
    layout,
    served,
    sums,  # [heads, query panels, NODES, dv] fp64: of grad_out
    lse_sums,  # [heads, query panels, NODES] fp64: of grad_lse
    node_means,
    log_z,
    value_table,  # [heads, key panels, NODES, dv] fp32, written
    slope_table,  # the same: to be multiplied by v - end value
    rest_table,  # [column blocks, heads, key panels, NODES] fp64, written: to be added
    lead,
    dv,
    query_panels,
    key_panels,
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The core read backwards, at the nodes of a key panel:

    dv_j = sum_a E_aj / Z_a G_a,  ds_j = sum_a t_a E_aj / Z_a (G_a . (v_j - F_a) + H_a).
    """
    head, panel = tl.program_id(0) // key_panels, tl.program_id(0) % key_panels
    if tl.load(served + head) == 0:
        return
    row = layout + head * FIELDS
    if panel >= tl.load(row + KEY_PANELS):
        return
    column = tl.program_id(1) * BLOCK_DV
    nodes, columns = tl.arange(0, NODES), tl.arange(0, BLOCK_DV)
    at = nodes[:, None] * dv + column + columns[None, :]
    inside = (nodes >= 0)[:, None] & (columns < dv - column)[None, :]

    own = end_value(value, head, lead, row, end_of_key_panel(panel, row), column, columns, dv)
    s = key_nodes(panel, row, NODES)
    to_value = tl.zeros([NODES, BLOCK_DV], tl.float64)
    to_slope = tl.zeros([NODES, BLOCK_DV], tl.float64)
    rest = tl.zeros([NODES], tl.float64)
    for q in range(0, tl.load(row + QUERY_PANELS).to(tl.int32)):
        at_largest = end_of_query_panel(q, row)
        reference = tl.where(at_largest, tl.load(row + S_MAX), tl.load(row + S_MIN))
        gap = s - (reference - tl.load(row + MIDDLE))
        t = query_nodes(q, row, NODES)
        exponent = gap[:, None] * t[None, :]
        if tl.max(tl.max(exponent, 1), 0) > NEGLIGIBLE:
            slot = (head.to(tl.int64) * query_panels + q) * NODES
            kernel = tl.exp(exponent - tl.load(log_z + slot + nodes)[None, :])
            centre = end_value(value, head, lead, row, at_largest, column, columns, dv)
            g = tl.load(sums + slot * dv + at, inside, other=0.0)
            f = tl.load(node_means + slot * dv + at, inside, other=0.0).to(tl.float64)
            shift = own.to(tl.float64) - centre.to(tl.float64)
            pull = tl.sum(g * (shift[None, :] - f), 1)
            if tl.program_id(1) == 0:
                pull += tl.load(lse_sums + slot + nodes)
            to_value += product(kernel, g, PRECISION)
            to_slope += product(kernel * t[None, :], g, PRECISION)
            rest += tl.sum(kernel * (t * pull)[None, :], 1)
    slot = tl.program_id(0).to(tl.int64) * NODES
    tl.store(value_table + slot * dv + at, to_value.to(tl.float32), inside)
    tl.store(slope_table + slot * dv + at, to_slope.to(tl.float32), inside)
    share = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * NODES
    tl.store(rest_table + share + nodes, rest)


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
    first = panel_of_token(key, head, lead, order, low, row, 1.0, True)
    last = panel_of_token(key, head, lead, order, high - 1, row, 1.0, True)
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
            index, _, place = load_tokens(key, head, lead, order, position, inside, row, 1.0, True)
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


@dataclass(frozen=True)
class _Axis:
    """The tokens of an axis in the order of their panels."""

    x: tuple  # query or key, as kernels take it
    n: int
    scale: tuple[float, float]
    panels: int  # at most
    blocks: int
    bins: int
    counts: Tensor
    ends: Tensor
    order: Tensor

    @property
    def sorted(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.counts, self.ends, self.order


@dataclass(frozen=True)
class _Call:
    """What forward and backward have in common: everything up to F at the query nodes."""

    query: _Axis
    key: _Axis
    value: tuple
    lead: tuple[int, int, int]
    dv: int
    layout: Tensor
    served: Tensor
    certificate: Tensor
    node_out: Tensor
    log_z: Tensor
    node_means: Tensor | None
    node_slopes: Tensor | None
    mean_gaps: Tensor | None
    dtype: torch.dtype
    how: str  # matrices of fp32 are multiplied

    def tokens(self, kernel: str) -> dict[str, Any]:
        return token_options(kernel, self.dtype, self.dv, NODES, self.how)

    @property
    def nodes(self) -> dict[str, Any]:
        return node_options(self.dtype, self.dv, NODES)


def _sort(
    x: tuple,
    mask: tuple | None,
    layout: Tensor,
    served: Tensor,
    lead: tuple,
    n: int,
    scale: tuple[float, float],
    panels: int,
    is_key: bool,
) -> _Axis:
    heads, blocks = lead[0], cdiv(n, RANGE_BLOCK)
    bins = 1 << panels.bit_length()  # one at least for masked keys
    counts = layout.new_zeros(heads, bins, blocks, dtype=torch.int32)
    order = layout.new_empty(heads, n, dtype=torch.int32)
    fixed = {"IS_KEY": is_key, "BINS": bins, "BLOCK": RANGE_BLOCK, "enable_fp_fusion": False}
    launch(
        count_kernel, (heads * blocks,), x, mask, layout, served, counts, lead, n, scale, **fixed
    )
    ends = counts.flatten(1).cumsum(1, dtype=torch.int32)
    launch(
        order_kernel,
        (heads * blocks,),
        x,
        mask,
        layout,
        served,
        counts,
        ends,
        order,
        lead,
        n,
        scale,
        STEP=64,
        **fixed,
    )
    return _Axis(x, n, scale, panels, blocks, bins, counts, ends, order)


def _sums(
    call_served: Tensor,
    layout: Tensor,
    axis: _Axis,
    field: int,
    parts: Tensor,
    part_totals: Tensor,
    dv: int,
    by_node: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Parts added up: [heads, panels, NODES, dv] and [heads, panels, NODES], fp64."""
    heads, slots = parts.shape[:2]
    sums = parts.new_empty(heads, axis.panels, NODES, dv)
    totals = parts.new_empty(heads, axis.panels, NODES)
    launch(
        reduce_kernel,
        (heads * axis.panels, cdiv(dv, by_node["BLOCK_DV"])),
        layout,
        call_served,
        axis.counts,
        axis.ends,
        parts,
        part_totals,
        sums,
        totals,
        dv,
        axis.blocks,
        slots,
        axis.panels,
        PANELS_FIELD=field,
        BINS=axis.bins,
        CHUNK=CHUNK,
        **by_node,
    )
    return sums, totals


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float, slopes: bool
) -> _Call:
    (n_q, _), (n_k, dv) = query.shape[-2:], value.shape[-2:]
    lead = lead_of(query, 2)
    heads = lead[0]
    aims = PRECISIONS[query.dtype]
    query_panels, key_panels = most_panels(n_k, aims)
    q, k, v, mask = strided(query, 2), strided(key, 2), strided(value, 2), strided(key_mask, 1)
    split_scale = split(scale)
    blocks = cdiv(max(n_q, n_k), RANGE_BLOCK)

    def new(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return query.new_empty(shape, dtype=dtype)

    parts, layout = new(heads, blocks, RANGES.value), new(heads, FIELDS.value)
    served = new(heads, dtype=torch.int32)
    launch(
        ranges_kernel,
        (heads * blocks,),
        q,
        k,
        mask,
        parts,
        lead,
        n_q,
        n_k,
        split_scale,
        BLOCK=RANGE_BLOCK,
        enable_fp_fusion=False,
    )
    launch(
        layout_kernel,
        (heads,),
        parts,
        layout,
        served,
        blocks,
        LARGEST_PRODUCT,
        query_panels,
        key_panels,
        QUERY_PRECISION=aims.query,
        KEY_PRECISION=aims.key,
        NODES=NODES,
        BLOCK=128,
        enable_fp_fusion=False,
    )
    by_query = _sort(q, None, layout, served, lead, n_q, split_scale, query_panels, False)
    by_key = _sort(k, mask, layout, served, lead, n_k, (1.0, 0.0), key_panels, True)

    how = precision(query.device)
    by_token = token_options("moments", query.dtype, dv, NODES, how)
    by_node = node_options(query.dtype, dv, NODES)
    chunks = cdiv(n_k, CHUNK)
    slots = chunks + key_panels
    parts, part_totals = new(heads, slots, NODES, dv), new(heads, slots, NODES)
    launch(
        moments_kernel,
        (heads * chunks, cdiv(dv, by_token["BLOCK_DV"])),
        k,
        v,
        layout,
        served,
        *by_key.sorted,
        parts,
        part_totals,
        lead,
        n_k,
        dv,
        by_key.blocks,
        slots,
        BINS=by_key.bins,
        **by_token,
    )
    sums, totals = _sums(
        served,
        layout,
        by_key,
        KEY_PANELS.value,
        parts,
        part_totals,
        dv,
        by_node,
    )
    columns = cdiv(dv, by_node["BLOCK_DV"])
    table, line = (heads, query_panels, NODES, dv), (heads, query_panels, NODES)
    node_out, log_z = new(*table, dtype=torch.float32), new(*line)
    node_means = new(*table, dtype=torch.float32) if slopes else None
    node_slopes = new(*table, dtype=torch.float32) if slopes else None
    mean_gaps = new(*line) if slopes else None
    bounds = new(heads, query_panels, columns, 2, dtype=torch.float32)
    certificate = new(heads, dtype=torch.float32)
    launch(
        core_kernel,
        (heads * query_panels, columns),
        v,
        layout,
        served,
        sums,
        totals,
        node_out,
        log_z,
        node_means,
        node_slopes,
        mean_gaps,
        bounds,
        lead,
        dv,
        query_panels,
        key_panels,
        PRECISION=how,
        **by_node,
    )
    floor = key_side_error(n_k, aims) + aims.rounding
    launch(
        certify_kernel,
        (heads,),
        layout,
        served,
        certificate,
        bounds,
        query_panels,
        columns,
        floor,
        aims.tolerance,
        BLOCK=128,
        enable_fp_fusion=False,
    )
    return _Call(
        by_query,
        by_key,
        v,
        lead,
        dv,
        layout,
        served,
        certificate,
        node_out,
        log_z,
        node_means,
        node_slopes,
        mean_gaps,
        query.dtype,
        how,
    )


def transform_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None,
    key_mask: Tensor | None,
    seed: None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """(out [*L, n_q, dv] in the dtype of query, lse [*L, n_q] fp64)."""
    if 0 in (query.shape[-2], key.shape[-2]):
        return direct.direct_forward(query, key, value, None, key_mask, None, scale, 0.0, False)
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64)
    with on_device(query):
        call = _prepare(query, key, value, key_mask, scale, slopes=False)
        axis, fixed = call.query, call.tokens("evaluate")
        grid = (
            call.lead[0] * cdiv(axis.n, CHUNK),
            cdiv(call.dv, fixed["BLOCK_DV"]),
        )
        launch(
            evaluate_kernel,
            grid,
            axis.x,
            call.layout,
            call.served,
            *axis.sorted,
            call.node_out,
            call.log_z,
            out,
            lse,
            call.lead,
            axis.n,
            call.dv,
            axis.scale,
            axis.blocks,
            axis.panels,
            BINS=axis.bins,
            **fixed,
        )
    direct.run_forward(
        query, key, value, None, key_mask, None, scale, 0.0, False, call.served, out, lse
    )
    return out, lse


def transform_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: None,
    key_mask: Tensor | None,
    seed: None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    tensors = (grad_out, grad_lse, query, key, value, out, lse, None, key_mask, None)
    if 0 in (query.shape[-2], key.shape[-2]):
        return direct.direct_backward(*tensors, scale, 0.0, False)
    # Masked keys are left out of the order of keys, and have no gradient.
    grads = tuple(
        x.new_empty(x.shape) if key_mask is None else x.new_zeros(x.shape)
        for x in (query, key, value)
    )
    with on_device(query):
        call = _prepare(query, key, value, key_mask, scale, slopes=True)
        _gradients(call, strided(grad_out, 2), strided(grad_lse, 1), grads)
    direct.run_backward(*tensors, scale, 0.0, False, call.served, grads)
    return grads


def _gradients(call: _Call, grad_out: tuple, grad_lse: tuple | None, grads: tuple) -> None:
    """Fill the gradients of the heads that are served."""
    heads, lead, dv, fixed = call.lead[0], call.lead, call.dv, call.tokens("query_gradient")
    shares = cdiv(dv, fixed["BLOCK_DV"])
    new = call.layout.new_empty

    axis = call.query
    chunks = cdiv(axis.n, CHUNK)
    slots = chunks + axis.panels
    parts, part_lse = new(heads, slots, NODES, dv), new(heads, slots, NODES)
    to_query = new(shares, heads, axis.n, dtype=torch.float32)
    launch(
        query_gradient_kernel,
        (heads * chunks, shares),
        axis.x,
        grad_out,
        grad_lse,
        call.layout,
        call.served,
        *axis.sorted,
        call.node_slopes,
        call.mean_gaps,
        parts,
        part_lse,
        to_query,
        lead,
        axis.n,
        dv,
        axis.scale,
        axis.blocks,
        slots,
        axis.panels,
        BINS=axis.bins,
        **fixed,
    )
    sums, lse_sums = _sums(
        call.served,
        call.layout,
        axis,
        QUERY_PANELS.value,
        parts,
        part_lse,
        dv,
        call.nodes,
    )

    columns, panels = cdiv(dv, call.nodes["BLOCK_DV"]), call.key.panels
    value_table = new(heads, panels, NODES, dv, dtype=torch.float32)
    slope_table = torch.empty_like(value_table)
    rest_table = new(columns, heads, panels, NODES)
    launch(
        adjoint_kernel,
        (heads * panels, columns),
        call.value,
        call.layout,
        call.served,
        sums,
        lse_sums,
        call.node_means,
        call.log_z,
        value_table,
        slope_table,
        rest_table,
        lead,
        dv,
        axis.panels,
        panels,
        PRECISION=call.how,
        **call.nodes,
    )
    axis, fixed = call.key, call.tokens("key_gradient")
    chunks = cdiv(axis.n, CHUNK)
    to_key = call.layout.new_zeros(shares, heads, axis.n, dtype=torch.float32)  # if masked
    launch(
        key_gradient_kernel,
        (heads * chunks, shares),
        axis.x,
        call.value,
        call.layout,
        call.served,
        *axis.sorted,
        value_table,
        slope_table,
        rest_table.sum(0),
        to_key,
        grads[2],
        lead,
        axis.n,
        dv,
        axis.blocks,
        panels,
        BINS=axis.bins,
        **fixed,
    )
    for grad, share in ((grads[0], to_query), (grads[1], to_key)):
        grad.copy_((share[0] if shares == 1 else share.sum(0)).view(grad.shape))
