"""Streams in plain torch: the table of a scan as a state. See `compose.streaming`.

No token waits here: those that another backend left waiting are added to the table first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from boltzattn.transform.scan_layout import ScanLayout, StreamState

TOKENS_AT_ONCE = 256


def end_of_panels(layout: ScanLayout, ends: Tensor) -> Tensor:
    """Where keys are measured from, [heads, panels], for ends [heads, 2]."""
    panel = torch.arange(layout.panels, device=ends.device)
    high, low = ends[:, :1], ends[:, 1:]
    outer = torch.where(layout.measured_from_high(panel), high, low)
    return torch.where(panel == 0, 0.5 * high + 0.5 * low, outer)


def move(stream: StreamState, new: Tensor) -> None:
    """Measure keys from other ends."""
    layout, old = stream.layout, stream.ends
    alive = (old[:, 1] <= old[:, 0])[:, None]
    gap = torch.where(alive, end_of_panels(layout, old) - end_of_panels(layout, new), 0.0)
    factor = (stream.positions * gap.repeat_interleave(layout.nodes, 1)).exp()
    stream.sums.mul_(factor[..., None])
    stream.z.mul_(factor)
    old.copy_(new)


def joined(a: Tensor, b: Tensor) -> Tensor:
    """The ends of two sets of keys."""
    return torch.stack([torch.maximum(a[:, 0], b[:, 0]), torch.minimum(a[:, 1], b[:, 1])], 1)


def fold(stream: StreamState) -> None:
    """Add the tokens that wait."""
    count = int(stream.waiting)
    if count > 0:
        stream.waiting.zero_()
        append(stream, stream.keys[:, :count, None], stream.values[:, :count], math.inf)


def append(stream: StreamState, key: Tensor, value: Tensor, most: float) -> float:
    """Add keys and values, unless the extent of the keys, which it returns, is above `most`.

    It is NaN, and nothing is added, if a number is not finite.
    """
    fold(stream)
    layout, ends = stream.layout, stream.ends
    keys, values = key.double().flatten(0, -3)[..., 0], value.double().flatten(0, -3)
    if not bool(keys.isfinite().all() and values.isfinite().all()):
        return math.nan
    if keys.shape[1] == 0:
        return 0.0
    after = joined(ends, torch.stack([keys.amax(1), keys.amin(1)], 1))
    extent = float((after[:, 0] - after[:, 1]).max())
    if extent > most:
        return extent
    move(stream, after)
    end = end_of_panels(layout, after).repeat_interleave(layout.nodes, 1)
    for some, rows in zip(
        keys.split(TOKENS_AT_ONCE, 1), values.split(TOKENS_AT_ONCE, 1), strict=True
    ):
        weight = (stream.positions[:, None] * (some[:, None] - end[..., None])).exp()
        stream.sums[..., : rows.shape[-1]] += weight @ rows
        stream.z.add_(weight.sum(-1))
    return extent


def query(
    stream: StreamState, queries: Tensor, head_dim: int, scale: float
) -> tuple[Tensor, Tensor, float]:
    """(out, lse, largest |t|); there is no result if that is beyond the layout."""
    fold(stream)
    layout, ends = stream.layout, stream.ends
    t = queries.double().flatten(0, -3)[..., 0] * scale
    out = t.new_zeros(*t.shape, head_dim)
    lse = torch.full_like(t, -math.inf)
    largest = float(t.abs().amax()) if t.numel() else 0.0
    if largest <= layout.edges[-1] and t.numel():
        table = torch.cat([stream.sums[..., :head_dim], stream.z[..., None]], -1)
        table = table.unflatten(1, (layout.panels, layout.nodes))
        alive = ends[:, 1] <= ends[:, 0]
        for h in range(len(t)):
            if not bool(alive[h]):
                continue
            panel, basis = layout.locate(t[h])
            end = end_of_panels(layout, ends[h : h + 1])[0, panel]
            for rows in torch.arange(t.shape[1], device=t.device).split(TOKENS_AT_ONCE):
                found = torch.einsum("ip,ipd->id", basis[rows], table[h, panel[rows]])
                total = found[:, -1:]
                out[h, rows] = found[:, :-1] / total
                lse[h, rows] = total[:, 0].log() + t[h, rows] * end[rows]
    shape = queries.shape[:-1]
    return out.reshape(*shape, head_dim).to(queries.dtype), lse.reshape(shape), largest


def step(
    stream: StreamState, queries: Tensor, key: Tensor, value: Tensor, scale: float, most: float
) -> tuple[Tensor, float, float]:
    """Append, then query: (out, largest |t|, extent). Does neither if one of them would not."""
    largest = float((queries.double() * scale).abs().amax()) if queries.numel() else 0.0
    extent = math.nan
    if largest <= stream.layout.edges[-1]:
        extent = append(stream, key, value, most)
    if not extent <= most:
        return queries.new_empty(0), largest, extent
    out, _, _ = query(stream, queries, value.shape[-1], scale)
    return out, largest, extent
