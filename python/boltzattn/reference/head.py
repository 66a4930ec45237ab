"""The stages of the transform for one head of rank 1, in plain torch and fp64.

With t_i = scale q_i and s_j = k_j, everything that attention and its derivatives are made of is a
mean E_t[y] = sum_j y_j exp(t s_j) / sum_j exp(t s_j), a smooth function of the one variable t (see
`transform.layout`). The stages, by the names they have in every backend:

    extents        ranges of queries and keys, from which the layout follows
    moments        M[b] = sum_j l_b(s_j) y_j, one pass over the keys onto the key nodes
    core           E_t[y] at the query nodes, from M and exp(t_a s_b); no n in it
    evaluate       sum_a l_a(t_i) E_a[y], one pass over the queries
    query_moments  (backward) the gradient of the queries, and sums over them onto the query nodes
    adjoint        (backward) the core transposed, evaluated at the keys

Derivatives are means of other columns (E_t[y]' = E_t[s y] - E_t[s] E_t[y]), never derivatives of
the basis l.

Query panels with t < 0 and with t > 0 measure keys from the end key that has the largest weight
there, and values from the value of that key: at low temperature all that remains is such small
differences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.problem import Gradients, OutputGradients, Problem
from boltzattn.transform.layout import Axis, Layout, Range, choose_layout, lagrange_weights
from boltzattn.transform.stages import SharedRange
from boltzattn.transform.tolerances import REFERENCE_PRECISION

TOKENS_PER_TILE = 4096


class Tokens:
    """The tokens of an axis, ordered by panel."""

    def __init__(self, axis: Axis, u: Tensor) -> None:
        self.axis = axis
        panel, self.place = axis.locate(u)
        self.order = panel.argsort(stable=True)
        self.starts = [0, *panel.bincount(minlength=axis.panels).cumsum(0).tolist()]

    def tiles(self, panels: range | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(nodes of a panel, some tokens on it, their Lagrange weights [tokens, nodes])."""
        nodes = self.axis.nodes
        for panel in range(self.axis.panels) if panels is None else panels:
            here = self.order[self.starts[panel] : self.starts[panel + 1]]
            for tokens in here.split(TOKENS_PER_TILE) if len(here) else ():
                weight = lagrange_weights(nodes, self.place[tokens])
                yield slice(panel * nodes, (panel + 1) * nodes), tokens, weight

    def sums(
        self,
        width: int,
        columns: Callable[[slice, Tensor], Tensor],
        panels: range | None = None,
    ) -> Tensor:
        """Sums of columns(nodes, tokens) [tokens, width] onto the nodes, [axis.size, width]."""
        sums = self.place.new_zeros(self.axis.size, width)
        for nodes, tokens, weight in self.tiles(panels):
            sums[nodes] += weight.T @ columns(nodes, tokens)
        return sums


class Half(NamedTuple):
    """The query panels that measure keys and values from one end key."""

    panels: range
    nodes: slice  # of these panels
    end: float  # the end key
    end_value: Tensor  # [dv]
    kernel: Tensor  # [query nodes, key nodes] exp(t_a (s_b - end))


class Core(NamedTuple):
    """What the moments say at the query nodes; values are measured from the half's end value."""

    halves: tuple[Half, Half]
    mean: Tensor  # [query nodes, dv] F
    z: Tensor  # [query nodes, 1]
    slope: Tensor  # [query nodes, dv] F'
    mean_gap: Tensor  # [query nodes, 1] mean key, measured from the end key

    @property
    def served(self) -> bool:
        tables = self.mean, self.z.log(), self.slope
        return all(bool(table.isfinite().all()) for table in tables)


class Head:
    """One head: its layout, its queries and those of its keys that are not masked."""

    def __init__(self, problem: Problem, kept: Tensor, shared: SharedRange) -> None:
        self.span = Range(*shared[:4], keys=int(shared.keys))
        n_q, n_k, self.dv = int(shared.n_q), int(shared.n_k), problem.value.shape[-1]
        self.layout: Layout = choose_layout(self.span, n_q, n_k, self.dv, REFERENCE_PRECISION)
        self.scale = problem.scale
        self.t = problem.query.detach().double() * problem.scale
        self.s = problem.key.detach()[kept].double()
        self.v = problem.value.detach()[kept].double()
        # Key panels that measure values from the highest key, by node; query panels by end key.
        axis = self.layout.key
        of_high = [axis.origin + axis.half * (2 * k + 1) >= 0 for k in range(axis.panels)]
        self.of_high = self.t.new_tensor(of_high).bool().repeat_interleave(axis.nodes)[:, None]
        split = self.layout.first_positive_panel()
        self.halves = range(split), range(split, self.layout.query.panels)

    @cached_property
    def queries(self) -> Tokens:
        return Tokens(self.layout.query, self.layout.warp_queries(self.t.squeeze(1)))

    @cached_property
    def keys(self) -> Tokens:
        return Tokens(self.layout.key, self.layout.warp_keys(self.s.squeeze(1)))

    def forward(self) -> tuple[Tensor, Tensor]:
        """(out [n_q, dv], lse [n_q])."""
        ends = self.end_values()
        return self.evaluate(self.core(self.moments(ends), ends, ends))

    def backward(self, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value for those of out and lse."""
        ends = self.end_values()
        core = self.core(self.moments(ends), ends, ends)
        grad_t, query_moments = self.query_moments(core, g, h)
        grad_s, grad_v = self.adjoint(core, query_moments, ends)
        return grad_t * self.scale, grad_s, grad_v

    def end_values(self) -> Tensor:
        """Values of the lowest and of the highest key, [2, dv]."""
        return self.v[torch.stack([self.s.argmin(), self.s.argmax()])]

    def by_key_node(self, ends: Tensor) -> Tensor:
        """[2, width] for the lowest and the highest key to [key nodes, width]: their own half's."""
        return torch.where(self.of_high, ends[1], ends[0])

    def moments(self, centre: Tensor) -> Tensor:
        """Sums of value - centre and of 1 over the keys, [key nodes, dv + 1]; centre [2, dv]."""
        of_node = self.by_key_node(centre)

        def columns(nodes: slice, j: Tensor) -> Tensor:
            return torch.cat([self.v[j] - of_node[nodes.start], torch.ones_like(self.s[j])], 1)

        return self.keys.sums(self.dv + 1, columns)

    def core(self, moments: Tensor, centre: Tensor, ends: Tensor) -> Core:
        """`ends` [2, dv] are the values of the end keys, `centre` what `moments` measured from."""
        dv, layout = self.dv, self.layout
        t = layout.query_nodes(moments.device)[:, None]
        totals, counts = moments.split([dv, 1], 1)
        halves, parts = [], []
        for panels, end, end_value in zip(
            self.halves, (self.span.s_min, self.span.s_max), ends, strict=True
        ):
            nodes = slice(panels.start * layout.query.nodes, panels.stop * layout.query.nodes)
            gap = (layout.key_nodes(moments.device) - (end - layout.middle))[:, None]
            kernel = (t[nodes] * gap.T).exp()
            measured = totals + counts * (self.by_key_node(centre) - end_value)
            columns = torch.cat([measured, counts], 1)
            parts.append(kernel @ torch.cat([columns, gap * columns], 1))
            halves.append(Half(panels, nodes, end, end_value, kernel))
        total, z, total_slope, z_slope = torch.cat(parts).split([dv, 1, dv, 1], 1)
        mean, mean_gap = total / z, z_slope / z
        slope = total_slope / z - mean * mean_gap
        if self.span.s_min == self.span.s_max:  # F is constant; the nodes lie around the key
            slope, mean_gap = torch.zeros_like(slope), torch.zeros_like(mean_gap)
        return Core((halves[0], halves[1]), mean, z, slope, mean_gap)

    def evaluate(self, core: Core) -> tuple[Tensor, Tensor]:
        """(out [n_q, dv], lse [n_q])."""
        out = self.t.new_empty(len(self.t), self.dv)
        lse = self.t.new_empty(len(self.t))
        table = torch.cat([core.mean, core.z.log()], 1)
        for half in core.halves:
            for nodes, i, weight in self.queries.tiles(half.panels):
                mean, log_z = (weight @ table[nodes]).split([self.dv, 1], 1)
                out[i] = mean + half.end_value
                lse[i] = (self.t[i] * half.end + log_z).squeeze(1)
        return out, lse

    def query_moments(self, core: Core, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """(gradient of t [n_q, 1], sums of g and h onto the query nodes [query nodes, dv + 1]).

        g [n_q, dv] and h [n_q, 1] are the gradients of out and lse.
        """
        grad_t = torch.empty_like(self.t)
        table = torch.cat([core.slope, core.mean_gap], 1)
        for half in core.halves:
            for nodes, i, weight in self.queries.tiles(half.panels):
                slope, mean_gap = (weight @ table[nodes]).split([self.dv, 1], 1)
                grad_t[i] = dot(g[i], slope) + h[i] * (half.end + mean_gap)
        sums = self.queries.sums(self.dv + 1, lambda _, i: torch.cat([g[i], h[i]], 1))
        return grad_t, sums

    def adjoint(self, core: Core, query_moments: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of s [keys, 1] and v: ds_j = sum_i t_i P_ij (g_i . (v_j - F_i) + h_i)."""
        dv = self.dv
        t = self.layout.query_nodes(query_moments.device)[:, None]
        if self.span.t_min == self.span.t_max == 0.0:
            t = torch.zeros_like(t)  # keys do not matter; the nodes lie around 0
        g, h = (query_moments / core.z).split([dv, 1], 1)
        rest = t * (h - dot(g, core.mean))
        grad_s, grad_v = torch.zeros_like(self.s), torch.zeros_like(self.v)
        table = torch.zeros(self.layout.key.size, 2 * dv + 1, dtype=t.dtype, device=t.device)
        centre = self.by_key_node(ends)
        for half in core.halves:
            gt = t[half.nodes] * g[half.nodes]
            columns = torch.cat([g[half.nodes], gt, rest[half.nodes]], 1)
            part = half.kernel.T @ columns
            # From the end value of the query panel to that of the key panel.
            part[:, -1:] += dot(part[:, dv : 2 * dv], centre - half.end_value)
            table += part
        for nodes, j, weight in self.keys.tiles():
            to_v, pull, by_s = (weight @ table[nodes]).split([dv, dv, 1], 1)
            grad_v[j] = to_v
            grad_s[j] = dot(self.v[j] - centre[nodes.start], pull) + by_s
        return grad_s, grad_v


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)


# ---- a head of a problem ----


def head_indices(problem: Problem) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, problem.query.shape[:-2]))


def has_envelope(problem: Problem) -> bool:
    """Whether a problem has a bias per key or Gaussian scores, which `Head` does not know."""
    return problem.key_bias is not None or problem.is_gaussian


def visible_keys(problem: Problem) -> Tensor:
    """Indices of the keys of a head that are not masked."""
    key_mask = problem.key_mask
    if key_mask is None:
        return torch.arange(problem.key.shape[-2], device=problem.key.device)
    hidden = key_mask if key_mask.dtype == torch.bool else key_mask == -torch.inf
    return (~hidden).nonzero().squeeze(1)


def kept_keys(problem: Problem) -> Tensor | None:
    """Indices of the keys of a head that are not masked; None if the head has another score."""
    return None if has_envelope(problem) else visible_keys(problem)


def put_head(to: Gradients, index: tuple[int, ...], found: Gradients) -> None:
    """The gradients of one head among those of all."""
    for total, part in zip(to, found, strict=True):
        if part.numel() > 0:
            total[index] = part


def head_gradients(grads: OutputGradients, index: tuple[int, ...]) -> OutputGradients:
    lse = None if grads.lse is None else grads.lse[index]
    return OutputGradients(grads.out[index], lse)


def gradient_columns(grads: OutputGradients) -> tuple[Tensor, Tensor]:
    """The output gradients of a head in fp64, [n_q, dv] and [n_q, 1]."""
    g = grads.out.detach().double()
    if grads.lse is None:
        return g, g.new_zeros(len(g), 1)
    return g, grads.lse.detach().double()[:, None]
