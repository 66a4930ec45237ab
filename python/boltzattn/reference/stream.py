"""Streams in plain torch: the table of a scan as a state. See `compose.streaming`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from boltzattn.transform.layout import lagrange_weights
from boltzattn.transform.scan_layout import ScanLayout

TOKENS_AT_ONCE = 256


def end_of_panels(layout: ScanLayout, ends: Tensor) -> Tensor:
    """Where keys are measured from, [heads, panels], for ends [heads, 2]."""
    panel = torch.arange(layout.panels, device=ends.device)
    high, low = ends[:, :1], ends[:, 1:]
    outer = torch.where(layout.measured_from_high(panel), high, low)
    return torch.where(panel == 0, 0.5 * high + 0.5 * low, outer)


def move(layout: ScanLayout, sums: Tensor, z: Tensor, old: Tensor, new: Tensor) -> None:
    """Measure a table from other ends."""
    alive = (old[:, 1] <= old[:, 0])[:, None]
    gap = torch.where(alive, end_of_panels(layout, old) - end_of_panels(layout, new), 0.0)
    factor = (layout.nodes_of_panels(sums.device) * gap[..., None]).exp().flatten(1)
    sums *= factor[..., None]
    z *= factor


def joined(a: Tensor, b: Tensor) -> Tensor:
    """The ends of two sets of keys."""
    return torch.stack([torch.maximum(a[:, 0], b[:, 0]), torch.minimum(a[:, 1], b[:, 1])], 1)


def append(
    layout: ScanLayout,
    sums: Tensor,
    z: Tensor,
    ends: Tensor,
    key: Tensor,
    value: Tensor,
    most: float,
) -> float:
    """As `cpu_stream_append`: the extent with these keys, or NaN if a number is not finite."""
    keys, values = key.double().flatten(0, -3)[..., 0], value.double().flatten(0, -3)
    if not bool(keys.isfinite().all() and values.isfinite().all()):
        return math.nan
    if keys.shape[1] == 0:
        return 0.0
    after = joined(ends, torch.stack([keys.amax(1), keys.amin(1)], 1))
    extent = float((after[:, 0] - after[:, 1]).max())
    if extent > most:
        return extent
    move(layout, sums, z, ends, after)
    ends.copy_(after)
    node = layout.nodes_of_panels(sums.device)
    end = end_of_panels(layout, after)
    for some, rows in zip(
        keys.split(TOKENS_AT_ONCE, 1), values.split(TOKENS_AT_ONCE, 1), strict=True
    ):
        gap = some[:, None] - end[..., None]
        weight = (node[..., None] * gap[:, :, None]).exp().flatten(1, 2)
        sums[..., : rows.shape[-1]] += weight @ rows
        z += weight.sum(-1)
    return extent


def query(
    layout: ScanLayout,
    sums: Tensor,
    z: Tensor,
    ends: Tensor,
    queries: Tensor,
    head_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor, float]:
    """As `cpu_stream_query`: (out, lse, largest |t|)."""
    t = queries.double().flatten(0, -3)[..., 0] * scale
    out = t.new_zeros(*t.shape, head_dim)
    lse = torch.full_like(t, -math.inf)
    largest = float(t.abs().amax()) if t.numel() else 0.0
    if largest <= layout.edges[-1] and t.numel():
        table = torch.cat([sums[..., :head_dim], z[..., None]], -1)
        table = table.unflatten(1, (layout.panels, layout.nodes))
        alive = ends[:, 1] <= ends[:, 0]
        for h in range(len(t)):
            if not bool(alive[h]):
                continue
            panel, place = layout.locate(t[h])
            basis = lagrange_weights(layout.nodes, place)
            end = end_of_panels(layout, ends[h : h + 1])[0, panel]
            for rows in torch.arange(t.shape[1], device=t.device).split(TOKENS_AT_ONCE):
                found = torch.einsum("ip,ipd->id", basis[rows], table[h, panel[rows]])
                total = found[:, -1:]
                out[h, rows] = found[:, :-1] / total
                lse[h, rows] = total[:, 0].log() + t[h, rows] * end[rows]
    shape = queries.shape[:-1]
    return out.reshape(*shape, head_dim).to(queries.dtype), lse.reshape(shape), largest
