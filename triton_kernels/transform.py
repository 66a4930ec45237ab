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
from boltzattn.layout import LARGEST_PRODUCT
from boltzattn.triton_kernels import direct
from boltzattn.triton_kernels.core import (
    adjoint_kernel,
    certify_kernel,
    core_kernel,
)
from boltzattn.triton_kernels.heads import (
    lead_of,
    split,
    strided,
)
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


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float, slopes: bool
) -> _Call:
    (n_q, _), (n_k, dv) = query.shape[-2:], value.shape[-2:]
    lead = lead_of(query, 2)
    heads = lead[0]
    aims = PRECISIONS[query.dtype]
    query_panels, key_panels = most_panels(n_k, aims)
    q, k, v, mask = strided(query, 2), strided(key, 2), strided(value, 2), strided(key_mask, 1)

    def new(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return query.new_empty(shape, dtype=dtype)

    layout, served = layouts(query, key, key_mask, scale, aims)
    by_query = _sort(q, None, layout, served, lead, n_q, split(scale), query_panels, False)
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
