"""The transform in stages, in plain torch: the queries and keys of a head lie on several machines.

The same stages as csrc/cpu/stages.h, on any device and in fp64. Between them the caller adds up
what every machine found: extents, sums over the keys, and in backward sums over the queries. All
machines work with the same layout, which follows from the shared range alone.

Tensors are canonical, as in `reference`, with rank 1. Where numbers of several heads are shared
they stand one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from boltzattn.reference.transform import LEAST_EXTENT, PRECISION, Tokens, dot, kept_keys
from boltzattn.transform.layout import Layout, Range, choose_layout


@dataclass
class _Head:
    """One head: the layout that all machines share, and where the head stands."""

    index: tuple[int, ...]
    span: Range
    layout: Layout | None  # none: nobody has queries, or nobody has keys

    def key_sums(self, dv: int) -> int:
        """Sums over the keys: a row per key node and one for either end, whose last counts."""
        return 0 if self.layout is None else (self.layout.key.size + 2) * (dv + 1)

    def query_sums(self, dv: int) -> int:
        return 0 if self.layout is None else self.layout.query.size * (dv + 1)


def _heads(query: Tensor, value: Tensor, ranges: Tensor) -> Iterator[_Head]:
    indices = itertools.product(*map(range, query.shape[:-2]))
    for index, row in zip(indices, ranges.tolist(), strict=True):
        t_min, t_max, s_min, s_max, keys, n_q, n_k, _ = row
        span = Range(t_min, t_max, s_min, s_max, int(keys))
        layout = None
        if keys > 0 and n_q > 0:
            layout = choose_layout(span, int(n_q), int(n_k), value.shape[-1], PRECISION)
        yield _Head(index, span, layout)


@dataclass
class _Core:
    """What everybody's sums over the keys say at the query nodes."""

    layout: Layout
    halves: list[tuple[slice, float, Tensor, Tensor]]  # query nodes, end key, its value, kernel
    f: Tensor  # [query nodes, dv] mean value, measured from the end value
    z: Tensor  # [query nodes, 1]
    slope: Tensor  # [query nodes, dv] f'
    mean: Tensor  # [query nodes, 1] mean key, measured from the end key

    @classmethod
    def of(cls, head: _Head, sums: Tensor, dv: int) -> _Core:
        layout = head.layout
        assert layout is not None
        *_, low, high = sums.view(-1, dv + 1)
        sums = sums.view(-1, dv + 1)[:-2]
        split = layout.first_positive_panel() * layout.query.nodes
        t = layout.query_nodes(sums.device)[:, None]
        halves, parts = [], []
        for nodes, end, row in (
            (slice(0, split), head.span.s_min, low),
            (slice(split, len(t)), head.span.s_max, high),
        ):
            # Equal end keys on several machines: the mean of their values.
            end_value = row[:dv] / row[dv]
            gap = layout.key_nodes(sums.device) - (end - layout.middle)
            kernel = (t[nodes] * gap).exp()
            centred = torch.cat([sums[:, :dv] - sums[:, dv:] * end_value, sums[:, dv:]], 1)
            parts.append(kernel @ torch.cat([centred, gap[:, None] * centred], 1))
            halves.append((nodes, end, end_value, kernel))
        total, z, total_slope, z_slope = torch.cat(parts).split([dv, 1, dv, 1], 1)
        f, mean = total / z, z_slope / z
        return cls(layout, halves, f, z, total_slope / z - f * mean, mean)

    def end_at(self, node: int) -> tuple[float, Tensor]:
        """The end key that the panel of this query node measures from, and its value."""
        _, end, end_value, _ = self.halves[node >= self.halves[1][0].start]
        return end, end_value


def _queries(head: _Head, layout: Layout, query: Tensor, scale: float) -> tuple[Tensor, Tokens]:
    t = query[head.index].double().squeeze(1) * scale
    return t[:, None], Tokens(layout.query, layout.warp_queries(t))


def extents(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    """Of queries and of keys, [heads, 2, 6]: low, high, where, where, how many, all regular."""
    found = []
    for index in itertools.product(*map(range, query.shape[:-2])):
        kept = kept_keys(_mask_of(key_mask, index), key.shape[-2], key.device)
        everything = torch.arange(query.shape[-2], device=query.device)
        for x, rows in ((query, everything), (key, kept)):
            regular = rows is not None
            rows = torch.arange(x.shape[-2], device=x.device) if rows is None else rows
            numbers = x[index].double().squeeze(1)[rows]
            if len(rows) == 0:
                found.append([math.inf, -math.inf, 0.0, 0.0, 0.0, 1.0])
                continue
            low, high = numbers.argmin(), numbers.argmax()
            regular = regular and bool(numbers.isfinite().all())
            found.append(
                [
                    *(float(numbers[low]), float(numbers[high])),
                    *(float(rows[low]), float(rows[high])),
                    *(float(len(rows)), float(regular)),
                ]
            )
    return torch.tensor(found, dtype=torch.float64, device=query.device).view(-1, 2, 6)


def _mask_of(key_mask: Tensor | None, index: tuple[int, ...]) -> Tensor | None:
    return None if key_mask is None else key_mask[index]


def sizes(query: Tensor, key: Tensor, value: Tensor, ranges: Tensor) -> tuple[int, int]:
    """How many sums over keys, and how many sums over queries, are shared."""
    dv = value.shape[-1]
    heads = list(_heads(query, value, ranges))
    return sum(head.key_sums(dv) for head in heads), sum(head.query_sums(dv) for head in heads)


def sum_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    extents: Tensor,
    ranges: Tensor,
    scale: float,
) -> Tensor:
    """This machine's part of the sums over the keys."""
    dv, parts = value.shape[-1], []
    for head, (_, of_keys) in zip(_heads(query, value, ranges), extents.tolist(), strict=True):
        layout = head.layout
        if layout is None:
            continue
        sums = value.new_zeros(layout.key.size + 2, dv + 1, dtype=torch.float64)
        parts.append(sums.view(-1))
        kept = kept_keys(_mask_of(key_mask, head.index), key.shape[-2], key.device)
        if kept is None or len(kept) == 0:
            continue
        s, v = key[head.index][kept].double().squeeze(1), value[head.index][kept].double()
        tokens = Tokens(layout.key, layout.warp_keys(s))
        sums[:-2] = tokens.moments(
            lambda j, v=v: [v[j], torch.ones_like(v[j, :1])]  # type: ignore[misc]
        )
        low, high, at_low, at_high, *_ = of_keys
        for row, here, at in (
            (sums[-2], low == layout.s_min, at_low),
            (sums[-1], high == layout.s_max, at_high),
        ):
            if here:
                row[:dv] = value[head.index][int(at)].double()
                row[dv] = 1.0
    return torch.cat(parts) if parts else value.new_zeros(0, dtype=torch.float64)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    ranges: Tensor,
    sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, served [heads]) from everybody's sums; all machines find the same heads served."""
    dv, first, served = value.shape[-1], 0, []
    out = query.new_zeros(*query.shape[:-1], dv)
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=torch.float64)
    for head in _heads(query, value, ranges):
        layout = head.layout
        if layout is None:
            served.append(True)
            continue
        last = first + head.key_sums(dv)
        core = _Core.of(head, sums[first:last], dv)
        first = last
        table = torch.cat([core.f, core.z.log()], 1)
        served.append(
            head.span.key_extent >= LEAST_EXTENT
            and bool(table.isfinite().all() and core.slope.isfinite().all())
        )
        t, tokens = _queries(head, layout, query, scale)
        for nodes, i, weight in tokens.tiles():
            end, end_value = core.end_at(nodes.start)
            f, log_z = (weight @ table[nodes]).split([dv, 1], 1)
            out[head.index][i] = (f + end_value).to(out.dtype)
            lse[head.index][i] = (t[i] * end + log_z).squeeze(1)
    return out, lse, torch.tensor(served, dtype=torch.bool)


def sum_queries(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranges: Tensor,
    sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The gradient of query, and this machine's part of the sums over the queries."""
    dv, first, parts = value.shape[-1], 0, []
    grad_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
    for head in _heads(query, value, ranges):
        layout = head.layout
        if layout is None:
            continue
        last = first + head.key_sums(dv)
        core = _Core.of(head, sums[first:last], dv)
        first = last
        own = value.new_zeros(layout.query.size, dv + 1, dtype=torch.float64)
        parts.append(own.view(-1))
        t, tokens = _queries(head, layout, query, scale)
        g = grad_out[head.index].double()
        h = torch.zeros_like(t) if grad_lse is None else grad_lse[head.index].double()[:, None]
        table = torch.cat([core.f, core.slope, core.mean], 1)
        for nodes, i, weight in tokens.tiles():
            end, _ = core.end_at(nodes.start)
            f, slope, mean = (weight @ table[nodes]).split([dv, dv, 1], 1)
            by_t = dot(g[i], slope) + h[i] * (end + mean)
            grad_query[head.index][i] = (by_t * scale).to(grad_query.dtype)
            own[nodes] += weight.T @ torch.cat([g[i], h[i] - dot(g[i], f)], 1)
    return grad_query, torch.cat(parts) if parts else value.new_zeros(0, dtype=torch.float64)


def key_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    ranges: Tensor,
    sums: Tensor,
    query_sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of key and value, from everybody's sums."""
    dv, first, first_query = value.shape[-1], 0, 0
    grad_key, grad_value = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (key, value)
    )
    for head in _heads(query, value, ranges):
        layout = head.layout
        if layout is None:
            continue
        last, last_query = first + head.key_sums(dv), first_query + head.query_sums(dv)
        core = _Core.of(head, sums[first:last], dv)
        g, rest = (query_sums[first_query:last_query].view(-1, dv + 1) / core.z).split([dv, 1], 1)
        first, first_query = last, last_query
        kept = kept_keys(_mask_of(key_mask, head.index), key.shape[-2], key.device)
        if kept is None or len(kept) == 0:
            continue
        s, v = key[head.index][kept].double().squeeze(1), value[head.index][kept].double()
        grad_s, grad_v = torch.zeros_like(v[:, :1]), torch.zeros_like(v)
        t = layout.query_nodes(key.device)[:, None]
        adjoint = torch.cat([g, t * g, t * rest], 1)
        tokens = Tokens(layout.key, layout.warp_keys(s))
        # ds_j = sum_i t_i P_ij (g_i . (v_j - F_i) + h_i)
        for part, _, end_value, kernel in core.halves:
            table = kernel.T @ adjoint[part]
            for nodes, j, weight in tokens.tiles():
                to_v, pull, by_s = (weight @ table[nodes]).split([dv, dv, 1], 1)
                grad_v[j] += to_v
                grad_s[j] += dot(v[j] - end_value, pull) + by_s
        grad_key[head.index][kept] = grad_s.to(key.dtype)
        grad_value[head.index][kept] = grad_v.to(value.dtype)
    return grad_key, grad_value
