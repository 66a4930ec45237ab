"""The core of a transform: from key nodes to query nodes and back, in fp64; no n in it."""

from __future__ import annotations

import triton
import triton.language as tl
from boltzattn.triton_kernels.layout import (
    FIELDS,
    KEY_PANELS,
    MIDDLE,
    QUERY_HALF,
    QUERY_PANELS,
    S_MAX,
    S_MIN,
    STRIP,
    end_of_key_panel,
    end_of_query_panel,
    key_nodes,
    query_nodes,
    wave,
)
from boltzattn.triton_kernels.passes import end_value

NEGLIGIBLE = tl.constexpr(-80.0)  # exponent below which a key node adds nothing


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
    sums,  # [heads, key panels, NODES, dv] fp64, of half precision fp32
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
            m = tl.load(sums + slot * dv + at, inside, other=0.0).to(tl.float64)
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
    # NaN would be lost in a maximum.
    size = tl.where(f * 0 == 0, tl.abs(f), float("inf"))
    tl.store(to + 1, tl.max(tl.max(size, 1), 0).to(tl.float32))


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
        odd += (part_size * 0 != 0).to(tl.int32)
    # |F - end value| <= 2 max|v|: half of it can only overstate the relative error.
    worst, half = tl.max(error, 0), tl.max(size, 0) / 2
    bound = tl.where(worst == 0, 0.0, worst / half) + floor
    bound = tl.where(tl.max(odd, 0) > 0, float("inf"), bound)
    tl.store(certificate + head, bound)
    tl.store(served + head, (bound <= tolerance).to(tl.int32))


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
