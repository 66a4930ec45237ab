"""The steps of a transform, each a launch or a few: what `transform` and `layer` are made of.

Every shape follows from dtype and n, and the host never asks the device for a number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from boltzattn.transform.layout import LARGEST_PRODUCT
from boltzattn.triton_kernels.core import adjoint_kernel, certify_kernel, core_kernel
from boltzattn.triton_kernels.heads import lead_of, split, strided
from boltzattn.triton_kernels.launch import (
    CHUNK,
    cdiv,
    core_options,
    launch,
    node_options,
    token_options,
    work_dtype,
)
from boltzattn.triton_kernels.layout import (
    FIELDS,
    KEY_PANELS,
    NODES,
    PRECISIONS,
    QUERY_PANELS,
    RANGE_BLOCK,
    RANGES,
    Precision,
    key_side_error,
    layout_kernel,
    most_panels,
    ranges_kernel,
)
from boltzattn.triton_kernels.passes import (
    evaluate_kernel,
    key_gradient_kernel,
    moments_kernel,
    query_gradient_kernel,
    reduce_kernel,
)
from boltzattn.triton_kernels.sorting import count_kernel, order_kernel
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """The tokens of an axis in the order of their panels."""

    n: int
    scale: tuple[float, float]
    panels: int  # at most
    panels_field: int  # of a layout: how many are in use
    blocks: int
    bins: int
    counts: Tensor
    ends: Tensor
    order: Tensor
    places: Tensor
    numbers: Tensor | None  # of queries, in that order

    @property
    def slots(self) -> int:
        """Of parts: see `passes`."""
        return cdiv(self.n, CHUNK) + self.panels

    @property
    def sorted(self) -> tuple[Tensor, ...]:
        return self.counts, self.ends, self.order, self.places


@dataclass(frozen=True)
class Call:
    """Everything up to F at the query nodes, which forward and backward have in common.

    log_z, mean_gaps [heads, panels, NODES] fp64; node_out, node_means, node_slopes
    [heads, panels, NODES, dv] fp32. What belongs to panels that a head does not use, and all of a
    head that is not served, is uninitialised.
    """

    query: Axis
    key: Axis
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


def heads_of(call: Call, heads: slice, value: tuple, lead: tuple[int, int, int]) -> Call:
    """Some heads of a call; value and lead are theirs."""

    def some(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[heads]

    def on(axis: Axis) -> Axis:
        names = "counts", "ends", "order", "places", "numbers"
        return replace(axis, **{name: some(getattr(axis, name)) for name in names})

    names = ("layout", "served", "certificate", "node_out", "log_z")
    names += ("node_means", "node_slopes", "mean_gaps")
    tensors = {name: some(getattr(call, name)) for name in names}
    return replace(call, query=on(call.query), key=on(call.key), value=value, lead=lead, **tensors)


def sort(
    x: tuple,
    mask: tuple | None,
    layout: Tensor,
    served: Tensor,
    lead: tuple,
    n: int,
    scale: tuple[float, float],
    panels: int,
    is_key: bool,
) -> Axis:
    heads, blocks = lead[0], cdiv(n, RANGE_BLOCK)
    bins = 1 << panels.bit_length()  # one at least for masked keys
    counts = layout.new_zeros(heads, bins, blocks, dtype=torch.int32)
    order = layout.new_empty(heads, n, dtype=torch.int32)
    places = layout.new_empty(heads, n, dtype=work_dtype(x[0].dtype))
    numbers = None if is_key else x[0].new_empty(heads, n)
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
        ends,
        order,
        places,
        numbers,
        lead,
        n,
        scale,
        LEVELS=RANGE_BLOCK.bit_length() - 1,
        **fixed,
    )
    field = KEY_PANELS.value if is_key else QUERY_PANELS.value
    return Axis(n, scale, panels, field, blocks, bins, counts, ends, order, places, numbers)


def sum_parts(
    axis: Axis,
    layout: Tensor,
    served: Tensor,
    parts: Tensor,
    part_totals: Tensor,
    by_node: dict[str, Any],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Parts added up in fp64: [heads, panels, NODES, dv] in dtype, [heads, panels, NODES] fp64."""
    heads, slots, _, dv = parts.shape
    sums = parts.new_empty(heads, axis.panels, NODES, dv, dtype=dtype)
    totals = part_totals.new_empty(heads, axis.panels, NODES)
    launch(
        reduce_kernel,
        (heads * axis.panels, cdiv(dv, by_node["BLOCK_DV"])),
        layout,
        served,
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
        PANELS_FIELD=axis.panels_field,
        BINS=axis.bins,
        CHUNK=CHUNK,
        **by_node,
    )
    return sums, totals


def layouts(
    query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float, aims: Precision
) -> tuple[Tensor, Tensor]:
    """(layout [heads, FIELDS] fp64, served [heads] int32), from one look at queries and keys."""
    n_q, n_k = query.shape[-2], key.shape[-2]
    lead, blocks = lead_of(query, 2), cdiv(max(n_q, n_k), RANGE_BLOCK)
    heads = lead[0]
    parts = query.new_empty(heads, blocks, RANGES.value, dtype=torch.float64)
    layout = query.new_empty(heads, FIELDS.value, dtype=torch.float64)
    served = query.new_empty(heads, dtype=torch.int32)
    launch(
        ranges_kernel,
        (heads * blocks,),
        strided(query, 2),
        strided(key, 2),
        strided(key_mask, 1),
        parts,
        lead,
        n_q,
        n_k,
        split(scale),
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
        *most_panels(n_k, aims),
        QUERY_PRECISION=aims.query,
        KEY_PRECISION=aims.key,
        NODES=NODES,
        BLOCK=128,
        enable_fp_fusion=False,
    )
    return layout, served


def moments(
    axis: Axis,
    value: tuple,
    lead: tuple[int, int, int],
    dv: int,
    layout: Tensor,
    served: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Sums of value - end value and of ones onto the key nodes."""
    by_token = token_options("moments", dtype, dv, NODES)
    parts = layout.new_empty(lead[0], axis.slots, NODES, dv, dtype=work_dtype(dtype))
    part_totals = layout.new_empty(lead[0], axis.slots, NODES)
    launch(
        moments_kernel,
        (lead[0] * axis.slots, cdiv(dv, by_token["BLOCK_DV"])),
        value,
        layout,
        served,
        *axis.sorted,
        parts,
        part_totals,
        lead,
        axis.n,
        dv,
        axis.blocks,
        axis.slots,
        BINS=axis.bins,
        **by_token,
    )
    by_node = node_options(dtype, dv, NODES)
    # The core reads them once for every query panel: no wider than the parts.
    return sum_parts(axis, layout, served, parts, part_totals, by_node, parts.dtype)


def prepare(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float, slopes: bool
) -> Call:
    (n_q, _), (n_k, dv) = query.shape[-2:], value.shape[-2:]
    lead = lead_of(query, 2)
    heads = lead[0]
    aims = PRECISIONS[query.dtype]
    query_panels, key_panels = most_panels(n_k, aims)
    q, k, v, mask = strided(query, 2), strided(key, 2), strided(value, 2), strided(key_mask, 1)

    def new(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return query.new_empty(shape, dtype=dtype)

    layout, served = layouts(query, key, key_mask, scale, aims)
    by_query = sort(q, None, layout, served, lead, n_q, split(scale), query_panels, False)
    by_key = sort(k, mask, layout, served, lead, n_k, (1.0, 0.0), key_panels, True)

    fixed = core_options(query.dtype, dv, NODES)
    sums, totals = moments(by_key, v, lead, dv, layout, served, query.dtype)
    columns = cdiv(dv, fixed["BLOCK_DV"])
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
        **fixed,
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
    return Call(
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
    )


def evaluate(call: Call, node_out: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Fill out [heads, n, dv] and lse [heads, n] of the heads that are served, from F at nodes."""
    axis, dv = call.query, node_out.shape[-1]
    fixed = token_options("evaluate", call.dtype, dv, NODES)
    launch(
        evaluate_kernel,
        (call.lead[0] * axis.slots, cdiv(dv, fixed["BLOCK_DV"])),
        call.layout,
        call.served,
        *axis.sorted,
        axis.numbers,
        node_out,
        call.log_z,
        out,
        lse,
        axis.n,
        dv,
        axis.scale,
        axis.blocks,
        axis.slots,
        axis.panels,
        BINS=axis.bins,
        **fixed,
    )


def query_gradient(
    call: Call, node_slopes: Tensor, grad_out: tuple, grad_lse: tuple | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [heads, n] fp32, sums of grad_out and of grad_lse onto the query nodes, fp64)."""
    heads, axis, dv = call.lead[0], call.query, node_slopes.shape[-1]
    fixed = token_options("query_gradient", call.dtype, dv, NODES)
    shares = cdiv(dv, fixed["BLOCK_DV"])
    new = call.layout.new_empty
    parts = new(heads, axis.slots, NODES, dv, dtype=work_dtype(call.dtype))
    part_lse = new(heads, axis.slots, NODES)
    gradient = new(shares, heads, axis.n, dtype=torch.float32)
    launch(
        query_gradient_kernel,
        (heads * axis.slots, shares),
        grad_out,
        grad_lse,
        call.layout,
        call.served,
        *axis.sorted,
        node_slopes,
        call.mean_gaps,
        parts,
        part_lse,
        gradient,
        call.lead,
        axis.n,
        dv,
        axis.scale,
        axis.blocks,
        axis.slots,
        axis.panels,
        BINS=axis.bins,
        **fixed,
    )
    by_node = node_options(call.dtype, dv, NODES)
    sums, lse_sums = sum_parts(
        axis, call.layout, call.served, parts, part_lse, by_node, torch.float64
    )
    return gradient[0] if shares == 1 else gradient.sum(0), sums, lse_sums


@dataclass(frozen=True)
class KeyTables:
    """What the gradients of keys and values are read off, at the key nodes."""

    value: Tensor  # [heads, panels, NODES, dv] fp32
    slope: Tensor  # the same: to be multiplied by v - end value
    rest: Tensor  # [heads, panels, NODES] fp64: to be added


def adjoint(call: Call, sums: Tensor, lse_sums: Tensor) -> KeyTables:
    """The core read backwards."""
    heads, panels, dv = call.lead[0], call.key.panels, call.dv
    fixed = core_options(call.dtype, dv, NODES)
    columns = cdiv(dv, fixed["BLOCK_DV"])
    new = call.layout.new_empty
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
        call.lead,
        dv,
        call.query.panels,
        panels,
        **fixed,
    )
    return KeyTables(value_table, slope_table, rest_table.sum(0))


def key_gradient(call: Call, tables: KeyTables, grad_value: Tensor) -> Tensor:
    """Fill grad_value [heads, n, dv] of the keys that are not masked; dk [heads, n] fp32."""
    heads, axis, dv = call.lead[0], call.key, call.dv
    fixed = token_options("key_gradient", call.dtype, dv, NODES)
    shares = cdiv(dv, fixed["BLOCK_DV"])
    gradient = call.layout.new_zeros(shares, heads, axis.n, dtype=torch.float32)  # if masked
    launch(
        key_gradient_kernel,
        (heads * axis.slots, shares),
        call.value,
        call.layout,
        call.served,
        *axis.sorted,
        tables.value,
        tables.slope,
        tables.rest,
        gradient,
        grad_value,
        call.lead,
        axis.n,
        dv,
        axis.blocks,
        axis.slots,
        axis.panels,
        BINS=axis.bins,
        **fixed,
    )
    return gradient[0] if shares == 1 else gradient.sum(0)
