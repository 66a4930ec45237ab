"""The core of a transform: from key nodes to query nodes and back, in fp64; no n in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from boltzattn.triton_kernels.heads import Head, Span, head_of, span_of
from boltzattn.triton_kernels.layout import (
    FIELDS,
    MIDDLE,
    QUERY_HALF,
    STRIP,
    is_upper,
    key_nodes,
    query_nodes,
    reference_key,
    wave,
)
from boltzattn.triton_kernels.tolerances import NEGLIGIBLE
from boltzattn.triton_kernels.transform_tokens import (
    end_value,
    load_nodes,
    panels_in_use,
    store_nodes,
)


class Panel(NamedTuple):
    head: Head
    number: Any
    row: Any  # of the layout
    columns: Span  # of the values


@triton.jit
def load_panel(heads, panels, dv, BLOCK_DV: tl.constexpr):
    """The panel of this program, where every head has `panels` of them."""
    head = head_of(tl.program_id(0) // panels, heads)
    row = heads.layout + head.number * FIELDS
    columns = span_of(tl.program_id(1) * BLOCK_DV, dv, BLOCK_DV)
    return Panel(head, tl.program_id(0) % panels, row, columns)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """The fp64 product of two matrices; Triton has none on AMD's matrix units."""
    if PRECISION == "ieee":
        return tl.sum(a[:, :, None] * b[None, :, :], 1)
    else:
        return tl.dot(a, b)


@triton.jit
def core_kernel(
    heads,
    value,
    dv,
    sums,  # [heads, key panels, NODES, dv] fp64, of half precision fp32
    totals,  # [heads, key panels, NODES] fp64
    node_out,  # [heads, query panels, NODES, dv] fp32, written: F
    log_z,  # [heads, query panels, NODES] fp64, written: log Z
    node_means,  # like node_out, or None: F - end value
    node_slopes,  # like node_out, or None: F'
    mean_gaps,  # like log_z, or None: mean key - reference key
    bounds,  # [heads, query panels, column blocks, 2] fp32, written: error, size of F - end value
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """F and log Z (and their slopes) at the nodes of a query panel."""
    head, panel, row, columns = load_panel(heads, heads.query_panels, dv, BLOCK_DV)
    if panel >= panels_in_use(heads, head.number, False):
        return
    nodes = tl.arange(0, NODES)
    reference = reference_key(panel, row)
    centre = end_value(value, head, row, is_upper(panel, row, False), columns)
    t = query_nodes(panel, row, NODES)
    n_sum = tl.zeros([NODES, BLOCK_DV], tl.float64)
    z_sum = tl.zeros([NODES], tl.float64)
    if node_slopes is not None:
        n_slope = tl.zeros([NODES, BLOCK_DV], tl.float64)
        z_slope = tl.zeros([NODES], tl.float64)
    for k in range(0, panels_in_use(heads, head.number, True)):
        gap = key_nodes(k, row, NODES) - (reference - tl.load(row + MIDDLE))
        exponent = t[:, None] * gap[None, :]
        if tl.max(tl.max(exponent, 1), 0) > NEGLIGIBLE:
            kernel = tl.exp(exponent)
            node = (head.number * heads.key_panels + k) * NODES
            own = end_value(value, head, row, is_upper(k, row, True), columns)
            m = load_nodes(sums, node, columns, NODES).to(tl.float64)
            total = tl.load(totals + node + nodes)
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
    node = tl.program_id(0).to(tl.int64) * NODES
    store_nodes(node_out, node, columns, f + centre.to(tl.float64)[None, :], NODES)
    if tl.program_id(1) == 0:
        tl.store(log_z + node + nodes, tl.log(z_sum))
    if node_slopes is not None:
        mean_gap = z_slope / z_sum
        slope = n_slope / z_sum[:, None] - f * mean_gap[:, None]
        store_nodes(node_means, node, columns, f, NODES)
        store_nodes(node_slopes, node, columns, slope, NODES)
        if tl.program_id(1) == 0:
            tl.store(mean_gaps + node + nodes, mean_gap)

    # The certificate of docs/transform.md, from the last four Chebyshev coefficients.
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
    heads,  # served is updated
    bounds,
    column_blocks,
    floor,  # the parts of the error that follow from dtype and n
    tolerance,
    BLOCK: tl.constexpr,
):
    """Bounds max|out - exact| / max|v| of a head, which is not served if that is too much."""
    head = head_of(tl.program_id(0), heads)
    count = panels_in_use(heads, head.number, False) * column_blocks
    if count == 0:
        return
    bounds += head.number * heads.query_panels * column_blocks * 2
    error = tl.zeros([BLOCK], tl.float32)
    size = tl.zeros([BLOCK], tl.float32)
    odd = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        index = first + tl.arange(0, BLOCK)
        part_error = tl.load(bounds + index * 2, index < count, other=0.0)
        part_size = tl.load(bounds + index * 2 + 1, index < count, other=0.0)
        error, size = tl.maximum(error, part_error), tl.maximum(size, part_size)
        odd += (part_size * 0 != 0).to(tl.int32)
    # |F - end value| <= 2 max|v|: half of it can only overstate the relative error.
    worst, half = tl.max(error, 0), tl.max(size, 0) / 2
    bound = tl.where(worst == 0, 0.0, worst / half) + floor
    served = (tl.max(odd, 0) == 0) & (bound <= tolerance)
    tl.store(heads.served + head.number, served.to(tl.int32))


@triton.jit
def adjoint_kernel(
    heads,
    value,
    dv,
    sums,  # [heads, query panels, NODES, dv] fp64: of grad_out
    lse_sums,  # [heads, query panels, NODES] fp64: of grad_lse
    node_means,
    log_z,
    value_table,  # [heads, key panels, NODES, dv] fp32, written
    slope_table,  # like value_table: to be multiplied by v - end value
    rest_table,  # [column blocks, heads, key panels, NODES] fp64, written: to be added
    BLOCK_DV: tl.constexpr,
    NODES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The adjoint of the core, at the nodes of a key panel:

    dv_j = sum_a E_aj / Z_a G_a,  ds_j = sum_a t_a E_aj / Z_a (G_a . (v_j - F_a) + H_a).
    """
    head, panel, row, columns = load_panel(heads, heads.key_panels, dv, BLOCK_DV)
    if panel >= panels_in_use(heads, head.number, True):
        return
    nodes = tl.arange(0, NODES)
    own = end_value(value, head, row, is_upper(panel, row, True), columns)
    s = key_nodes(panel, row, NODES)
    to_value = tl.zeros([NODES, BLOCK_DV], tl.float64)
    to_slope = tl.zeros([NODES, BLOCK_DV], tl.float64)
    rest = tl.zeros([NODES], tl.float64)
    for q in range(0, panels_in_use(heads, head.number, False)):
        gap = s - (reference_key(q, row) - tl.load(row + MIDDLE))
        t = query_nodes(q, row, NODES)
        exponent = gap[:, None] * t[None, :]
        if tl.max(tl.max(exponent, 1), 0) > NEGLIGIBLE:
            node = (head.number * heads.query_panels + q) * NODES
            kernel = tl.exp(exponent - tl.load(log_z + node + nodes)[None, :])
            centre = end_value(value, head, row, is_upper(q, row, False), columns)
            g = load_nodes(sums, node, columns, NODES)
            f = load_nodes(node_means, node, columns, NODES).to(tl.float64)
            shift = own.to(tl.float64) - centre.to(tl.float64)
            pull = tl.sum(g * (shift[None, :] - f), 1)
            if tl.program_id(1) == 0:
                pull += tl.load(lse_sums + node + nodes)
            to_value += product(kernel, g, PRECISION)
            to_slope += product(kernel * t[None, :], g, PRECISION)
            rest += tl.sum(kernel * (t * pull)[None, :], 1)
    node = tl.program_id(0).to(tl.int64) * NODES
    store_nodes(value_table, node, columns, to_value, NODES)
    store_nodes(slope_table, node, columns, to_slope, NODES)
    share = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * NODES
    tl.store(rest_table + share + nodes, rest)
