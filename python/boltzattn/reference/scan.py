"""Causal attention of rank 1 in one pass, in plain torch and fp64, head by head.

Heads of rank 2 to 4 are those of `tensor`.

On a panel of the query axis exp(t s) = sum_a l_a(t) exp(t_a s), so all that later rows need to know
of earlier keys is the table sum_j exp(t_a (s_j - end)) (v_j, 1) at the nodes t_a. docs/transform.md
derives it. Rows of a chunk see the keys of their own chunk pair by pair, and earlier ones by the
table. Weights of a row are measured from its top key, so both parts add up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.problem import Gradients, OutputGradients, Problem, Saved
from boltzattn.reference import direct, transform
from boltzattn.reference.head import put_head
from boltzattn.transform.scan_layout import ScanLayout, make_scan_layout

CHUNK = 128  # tokens


class Earlier(NamedTuple):
    """The keys of earlier shards of a sequence: their ends, and their tables measured from them."""

    ends: tuple[float, float] | None  # the largest and the smallest key, if there are keys
    table: Tensor  # [panels, nodes, dv + 1]
    slopes: Tensor | None


class _Chunk(NamedTuple):
    rows: slice
    keys: slice  # among those that are not masked
    before: tuple[float, float] | None  # largest and smallest key before the chunk
    after: tuple[float, float] | None


class Head:
    """A head: queries t, keys s that are not masked at positions `at`, and the nodes."""

    def __init__(
        self, problem: Problem, layout: ScanLayout | None = None, earlier: Earlier | None = None
    ) -> None:
        """`served` is False if the head is not for a scan; nothing else is set then.

        A shard of a sequence is given the layout of the whole, and what it knows of earlier shards.
        """
        n_q, n_k = problem.query.shape[0], problem.key.shape[0]
        kept = torch.ones(n_k, dtype=torch.bool, device=problem.key.device)
        mask = problem.key_mask
        self.served = not (problem.is_gaussian or problem.slopes is not None)
        self.served &= problem.key_bias is None
        if not self.served:
            return
        if mask is not None:
            kept = ~mask
        seen = torch.arange(n_k, device=kept.device) < n_q
        self.at = (kept & seen).nonzero().squeeze(1)
        self.t = problem.query[:, 0].double() * problem.scale
        self.s = problem.key[self.at, 0].double()
        self.v = problem.value[self.at].double()
        self.served = all(bool(x.isfinite().all()) for x in (self.t, self.s, self.v))
        if not self.served:
            return
        if layout is None:
            extent = float(self.s.max() - self.s.min()) if len(self.s) else 0.0
            t_most = float(self.t.abs().max()) if n_q else 0.0
            layout = make_scan_layout(torch.float64, t_most, extent, len(self.s))
        self.served = layout is not None
        if layout is None:
            return
        self.layout = layout
        device = self.t.device
        self.node = layout.nodes_of_panels(device)
        self.panel, self.basis = layout.locate(self.t)
        row = torch.arange(n_q, device=device)
        self.seen = torch.searchsorted(self.at, row, right=True)
        self.earlier = earlier or Earlier(None, self.table(self.v.shape[1] + 1), None)
        high, low = (torch.full_like(self.t, x) for x in self.earlier.ends or (-math.inf, math.inf))
        if len(self.s):
            last = (self.seen - 1).clamp(min=0)
            some = self.seen > 0
            high = torch.maximum(high, self.s.cummax(0).values[last]).where(some, high)
            low = torch.minimum(low, self.s.cummin(0).values[last]).where(some, low)
        self.alive = low <= high
        self.top = torch.where(self.t >= 0, high, low).where(self.alive, 0.0)

    def chunks(self) -> Iterator[_Chunk]:
        n = len(self.t)
        starts = torch.tensor([*range(0, n, CHUNK), n], device=self.at.device)
        bounds = torch.searchsorted(self.at, starts).tolist()
        before = self.earlier.ends
        for i, first in enumerate(range(0, n, CHUNK)):
            keys = slice(bounds[i], bounds[i + 1])
            after = before
            if keys.stop > keys.start:
                high, low = float(self.s[keys].max()), float(self.s[keys].min())
                after = (
                    (high, low) if before is None else (max(high, before[0]), min(low, before[1]))
                )
            yield _Chunk(slice(first, min(n, first + CHUNK)), keys, before, after)
            before = after

    def end(self, panel: Tensor, ends: tuple[float, float]) -> Tensor:
        """Where keys are measured from on a panel."""
        high, low = ends
        middle = 0.5 * high + 0.5 * low
        at = torch.tensor([middle, high, low], dtype=torch.float64, device=panel.device)
        which = torch.where(self.layout.measured_from_high(panel), 1, 2)
        return at[which.masked_fill(panel == 0, 0)]

    def ends_of_nodes(self, ends: tuple[float, float]) -> Tensor:
        panels = torch.arange(self.layout.panels, device=self.t.device)
        return self.end(panels, ends)[:, None]

    def pairs(self, chunk: _Chunk) -> Tensor:
        """exp(t_i (s_j - top_i)) within a chunk."""
        rows, keys = chunk.rows, chunk.keys
        visible = torch.arange(keys.start, keys.stop, device=self.t.device) < self.seen[rows, None]
        logits = self.t[rows, None] * (self.s[keys] - self.top[rows, None])
        return logits.masked_fill(~visible, -math.inf).exp()

    def reading(self, chunk: _Chunk, ends: tuple[float, float]) -> Tensor:
        """How much of every node of its panel a row reads, [rows, nodes]."""
        rows = chunk.rows
        end = self.end(self.panel[rows], ends)
        return self.basis[rows] * (self.t[rows] * (end - self.top[rows])).exp()[:, None]

    def read(self, table: Tensor, chunk: _Chunk, ends: tuple[float, float]) -> Tensor:
        """[rows, columns] of a table [panels, nodes, columns]."""
        return torch.einsum("ip,ipd->id", self.reading(chunk, ends), table[self.panel[chunk.rows]])

    def features(self, chunk: _Chunk, ends: tuple[float, float]) -> Tensor:
        """exp(t_a (s_j - end)), [panels, nodes, keys]."""
        gap = self.s[chunk.keys] - self.ends_of_nodes(ends)
        return (self.node[..., None] * gap[:, None]).exp()

    def moved(self, old: tuple[float, float], new: tuple[float, float]) -> Tensor:
        """The factor of a table whose ends move, [panels, nodes, 1]."""
        return (self.node * (self.ends_of_nodes(old) - self.ends_of_nodes(new))).exp()[..., None]

    def table(self, columns: int) -> Tensor:
        return self.v.new_zeros(self.layout.panels, self.layout.nodes, columns)

    @property
    def values(self) -> Tensor:
        """(v_j, 1)"""
        return torch.cat([self.v, torch.ones_like(self.v[:, :1])], 1)

    def add(self, chunk: _Chunk, values: Tensor, table: Tensor, slopes: Tensor | None) -> None:
        """Move tables of (v_j, 1) and of (s_j - end) (v_j, 1) past a chunk, and add its keys."""
        if chunk.after is None:
            return
        if chunk.before is not None:
            moved = self.moved(chunk.before, chunk.after)
            if slopes is not None:
                gap = self.ends_of_nodes(chunk.before) - self.ends_of_nodes(chunk.after)
                slopes += gap[..., None] * table
                slopes *= moved
            table *= moved
        weight = self.features(chunk, chunk.after)
        table += weight @ values[chunk.keys]
        if slopes is not None:
            gap = self.s[chunk.keys] - self.ends_of_nodes(chunk.after)
            slopes += (weight * gap[:, None]) @ values[chunk.keys]

    def tables(self, with_slopes: bool) -> tuple[Tensor, Tensor | None]:
        """The tables of all keys, measured from their ends."""
        values = self.values
        table = self.earlier.table.clone()
        slopes = torch.zeros_like(table) if with_slopes else None
        for chunk in self.chunks():
            self.add(chunk, values, table, slopes)
        return table, slopes

    def forward(self) -> tuple[Tensor, Tensor]:
        """(out, z): z is measured from the weight of the top key."""
        values = self.values
        total = self.v.new_zeros(len(self.t), values.shape[1])
        table = self.earlier.table.clone()
        for chunk in self.chunks():
            total[chunk.rows] = self.pairs(chunk) @ values[chunk.keys]
            if chunk.before is not None:
                total[chunk.rows] += self.read(table, chunk, chunk.before)
            self.add(chunk, values, table, None)
        z = total[:, -1]
        return total[:, :-1] / z.masked_fill(~self.alive, 1.0)[:, None], z

    def lse(self, z: Tensor) -> Tensor:
        return (self.t * self.top + z.log()).masked_fill(~self.alive, -math.inf)

    def add_rows(self, later: Tensor, chunk: _Chunk, over_z: Tensor) -> None:
        """Move a table over later rows to the ends before a chunk, and add the chunk's rows."""
        if chunk.before is None or chunk.after is None:
            return
        later *= self.moved(chunk.before, chunk.after)
        weight = self.reading(chunk, chunk.before)
        later.index_add_(0, self.panel[chunk.rows], weight[..., None] * over_z[chunk.rows, None])

    def over_z(self, g: Tensor, grad_lse: Tensor | None, out: Tensor, z: Tensor) -> Tensor:
        """(g_i, -delta_i) / z_i, which (v_j, 1) are multiplied by."""
        of_lse = 0.0 if grad_lse is None else grad_lse
        signed = torch.cat([g, (of_lse - (g * out).sum(1))[:, None]], 1)
        return signed / z.masked_fill(~self.alive, 1.0)[:, None]

    def query_table(self, g: Tensor, grad_lse: Tensor | None) -> Tensor:
        """The table over the rows, measured from the ends of the earlier shards."""
        over_z = self.over_z(g, grad_lse, *self.forward())
        table = self.table(self.v.shape[1] + 1)
        for chunk in reversed(list(self.chunks())):
            self.add_rows(table, chunk, over_z)
        return table

    def backward(
        self, g: Tensor, grad_lse: Tensor | None, later: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dt, ds, dv) of keys that are not masked; `later` is the table over later shards.

        With delta_i = g_i . out_i - grad_lse_i, dt_i = sum_j P_ij (s_j - o) (g_i . v_j - delta_i)
        + grad_lse_i o for any o, and ds_j = sum_i P_ij t_i (g_i . v_j - delta_i).
        """
        over_z = self.over_z(g, grad_lse, *self.forward())
        dt, ds, dv = torch.zeros_like(self.t), torch.zeros_like(self.s), torch.zeros_like(self.v)
        values = self.values
        table, slopes = self.earlier.table.clone(), self.table(values.shape[1])
        if self.earlier.slopes is not None:
            slopes += self.earlier.slopes
        for chunk in self.chunks():  # dt
            rows, keys = chunk.rows, chunk.keys
            origin = self.top[rows]
            weight = self.pairs(chunk) * (over_z[rows] @ values[keys].T)
            dt[rows] = (weight * (self.s[keys] - origin[:, None])).sum(1)
            if chunk.before is not None:
                plain = (self.read(table, chunk, chunk.before) * over_z[rows]).sum(1)
                sloped = (self.read(slopes, chunk, chunk.before) * over_z[rows]).sum(1)
                end = self.end(self.panel[rows], chunk.before)
                dt[rows] += sloped + (end - origin) * plain
            if grad_lse is not None:
                dt[rows] += grad_lse[rows] * origin
            self.add(chunk, values, table, slopes)
        table = self.table(values.shape[1]) if later is None else later.clone()
        for chunk in reversed(list(self.chunks())):  # ds and dv, by a table over later rows
            rows, keys = chunk.rows, chunk.keys
            weight = self.pairs(chunk)
            dv[keys] = weight.T @ over_z[rows, :-1]
            ds[keys] = ((weight * (over_z[rows] @ values[keys].T)).T * self.t[rows]).sum(1)
            if chunk.after is not None:
                weight = self.features(chunk, chunk.after)
                dv[keys] += torch.einsum("pak,pad->kd", weight, table[..., :-1])
                by_t = torch.einsum("pak,pad->kd", weight * self.node[..., None], table)
                ds[keys] += (by_t * values[keys]).sum(1)
            self.add_rows(table, chunk, over_z)
        return dt, ds, dv


def _heads(problem: Problem) -> Iterator[tuple[tuple[int, ...], Problem]]:
    for index in itertools.product(*map(range, problem.query.shape[:-2])):
        yield index, problem.head(index)


def forward(problem: Problem) -> Saved:
    query = problem.query
    if query.shape[-1] > 1:
        return transform.forward(problem)
    out = query.new_zeros(*query.shape[:-1], problem.value.shape[-1])
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=torch.float64)
    for index, one in _heads(problem):
        head = Head(one)
        if not head.served:
            out[index], lse[index] = direct.forward(one)
            continue
        found, z = head.forward()
        out[index], lse[index] = found.to(out.dtype), head.lse(z)
    return Saved(out, lse)


def backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
    """`saved` is not read: half precision has lost what gradients need."""
    if problem.query.shape[-1] > 1:
        return transform.backward(grads, saved, problem)
    found = problem.new_gradients("new_zeros")
    for index, one in _heads(problem):
        head = Head(one)
        grad_lse = None if grads.lse is None else grads.lse[index]
        if not head.served:
            asked = OutputGradients(grads.out[index], grad_lse)
            of_saved = Saved(saved.out[index], saved.lse[index])
            put_head(found, index, direct.backward(asked, of_saved, one))
            continue
        dt, ds, dv = head.backward(grads.out[index].double(), grad_lse)
        found.query[index] = (dt * problem.scale)[:, None].to(found.query.dtype)
        found.key[index][head.at] = ds[:, None].to(found.key.dtype)
        found.value[index][head.at] = dv.to(found.value.dtype)
    return found
