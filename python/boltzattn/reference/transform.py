"""Rank-1 attention in linear time, in plain torch and fp64: forward, backward, double backward.

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

The functions at the end of this file run the stages on every head. `forward` and `backward` run
them all; those in STAGES run one, and between them the caller may add up what several processes
found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.problem import Gradients, OutputGradients, Problem, Saved
from boltzattn.reference import direct
from boltzattn.transform.layout import Axis, Layout, Range, choose_layout, lagrange_weights
from boltzattn.transform.stages import Extent, SharedRange
from boltzattn.transform.tolerances import (
    LARGEST_PRODUCT,
    LARGEST_SUM,
    LEAST_EXTENT,
    REFERENCE_PRECISION,
)

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

    def double_backward(
        self, directions: Gradients, grads: OutputGradients
    ) -> tuple[OutputGradients, Gradients]:
        """Gradients of D = <directions, backward(grads)>, for grads and for (t, s, v).

        D is the derivative of <g, out> + <h, lse> in the direction (to_t, to_s, to_v):

            D = sum_i g_i . (to_t_i F' + t_i P + W) + h_i (to_t_i E[s] + t_i A),
            F = E[v],  P = E[to_s v] - A F,  W = E[to_v],  A = E[to_s]      all at t_i.

        Directions are measured from the end key, too: moving all keys, or all values, by the same
        amount moves lse by t times that, or out by that.
        """
        dv, (to_t, to_s, to_v), (g, h) = self.dv, directions, grads
        assert h is not None
        ends = self.end_values()
        core = self.core(self.moments(ends), ends, ends)
        widths = [dv, 1, 1, dv, dv]  # of x = v - end value, 1, y, y x, to_v, where y is to_s
        short, wide = dv + 1, sum(widths)  # x, 1
        grad_g, grad_h, grad_t = torch.empty_like(g), torch.empty_like(h), torch.empty_like(self.t)
        grad_s, grad_v = torch.zeros_like(self.s), torch.zeros_like(self.v)
        for half, end_key in zip(core.halves, (self.s.argmin(), self.s.argmax()), strict=True):
            gap = self.s - half.end
            to_end, to_end_value = to_s[end_key], to_v[end_key]
            moves = torch.cat([to_s - to_end, to_v - to_end_value], 1)

            def key_row(j: Tensor, half: Half = half, moves: Tensor = moves) -> Tensor:
                x, (y, w) = self.v[j] - half.end_value, moves[j].split([1, dv], 1)
                return torch.cat([x, torch.ones_like(y), y, y * x, w], 1)

            def key_columns(
                _: slice, j: Tensor, gap: Tensor = gap, key_row: Callable = key_row
            ) -> Tensor:
                row = key_row(j)
                return torch.cat([row, gap[j] * row, gap[j] * gap[j] * row[:, :short]], 1)

            def query_columns(_: slice, i: Tensor) -> Tensor:
                t, row = self.t[i], torch.cat([g[i], h[i]], 1)
                row = torch.cat([to_t[i] * row, t * row, g[i]], 1)
                return torch.cat([row, t * row], 1)

            node = half.kernel @ self.keys.sums(2 * wide + short, key_columns)
            plain, once, twice = node.split([wide, wide, short], 1)

            # Queries: the means of D and their derivatives by t.
            table = torch.cat(_means_and_slopes(plain, once, twice, widths), 1)
            for nodes, i, weight in self.queries.tiles(half.panels):
                t, to = self.t[i], to_t[i]
                here = slice(nodes.start - half.nodes.start, nodes.stop - half.nodes.start)
                f1, p, w, f2, p1, w1, m, a, m1, a1 = (weight @ table[here]).split(
                    [dv] * 6 + [1] * 4, 1
                )
                grad_g[i] = to * f1 + t * p + (w + to_end_value)
                grad_h[i] = to * (m + half.end) + t * (a + to_end)
                grad_t[i] = dot(g[i], to * f2 + t * p1 + p + w1)
                grad_t[i] += h[i] * (to * m1 + t * a1 + (a + to_end))

            # Keys: D as a function of the sums `plain` and `once`, and from there to the keys. The
            # derivative of an exponential by s_j brings t_i down, hence the second set of columns.
            both = self.queries.sums(2 * (2 * short + dv), query_columns, half.panels)[half.nodes]
            back = [
                _pull_back(plain, once[:, :short], part, widths)
                for part in both.split(2 * short + dv, 1)
            ]
            table = half.kernel.T @ torch.cat([*back[0], *back[1]], 1)
            for nodes, j, weight in self.keys.tiles():
                to_row, to_gap_row, by_s, by_s_gap = (weight @ table[nodes]).split(
                    [wide, short] * 2, 1
                )
                row = key_row(j)
                to_row[:, :short] += gap[j] * to_gap_row
                by_s[:, :short] += gap[j] * by_s_gap + to_gap_row
                to_x, _, _, to_product, _ = to_row.split(widths, 1)
                grad_v[j] += to_x + moves[j, :1] * to_product
                grad_s[j] += dot(row, by_s)
        return OutputGradients(grad_g, grad_h), Gradients(grad_t, grad_s, grad_v)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)


def _means_and_slopes(
    plain: Tensor, once: Tensor, twice: Tensor, widths: list[int]
) -> tuple[Tensor, ...]:
    """F', P, W, F'', P', W' [nodes, dv] and E[s], A, E[s]', A' [nodes, 1] from the sums of D."""
    z = plain.split(widths, 1)[1]
    f, _, a, c, w = (plain / z).split(widths, 1)
    fs, m, as_, cs, ws = (once / z).split(widths, 1)
    fss, ms = (twice / z).split(widths[:2], 1)
    f1, m1, a1 = fs - f * m, ms - m * m, as_ - a * m
    f2 = fss - fs * m - f1 * m - f * m1
    p1 = cs - c * m - f1 * a - f * a1
    return f1, c - f * a, w, f2, p1, ws - w * m, m, a, m1, a1


def _pull_back(
    plain: Tensor, once: Tensor, sums: Tensor, widths: list[int]
) -> tuple[Tensor, Tensor]:
    """Gradient of D for the sums over keys; D is linear in the sums over queries, `sums`."""
    dv = widths[0]
    to_slope, to_mean, to_p, to_a, to_w = sums.split([dv, 1, dv, 1, dv], 1)
    with torch.enable_grad():
        plain, once = plain.detach().requires_grad_(), once.detach().requires_grad_()
        total, z, a, c, w = plain.split(widths, 1)
        total_slope, z_slope = once.split([dv, 1], 1)
        f, a, m = total / z, a / z, z_slope / z
        d = (to_slope * (total_slope / z - f * m)).sum() + (to_mean * m).sum()
        d = d + (to_p * (c / z - f * a)).sum() + (to_a * a).sum() + (to_w * w / z).sum()
    to_plain, to_once = torch.autograd.grad(d, (plain, once))
    return to_plain, to_once


# ---- all stages of a head at once ----


def kept_keys(problem: Problem) -> Tensor | None:
    """Indices of the keys of a head that are not masked; None if the mask is a bias."""
    key_mask, n_k, device = problem.key_mask, problem.key.shape[-2], problem.key.device
    if key_mask is None:
        return torch.arange(n_k, device=device)
    if key_mask.dtype == torch.bool:
        return (~key_mask).nonzero().squeeze(1)
    masked = key_mask == -torch.inf
    if not bool((masked | (key_mask == 0)).all()):
        return None
    return (~masked).nonzero().squeeze(1)


def _indices(problem: Problem) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, problem.query.shape[:-2]))


def _whole_head(problem: Problem, kept: Tensor | None) -> Head | None:
    """The head of a problem without leading dimensions; None: `direct` must serve it."""
    if kept is None:
        return None
    t, s = problem.query.detach().double() * problem.scale, problem.key.detach()[kept].double()
    # Comparisons with NaN are false, so each of these also asks for finite numbers.
    if not float(problem.value.detach()[kept].abs().amax()) * len(s) <= LARGEST_SUM:
        return None
    ends = float(t.min()), float(t.max()), float(s.min()), float(s.max())
    span = Range(*ends, len(s))
    if not (span.largest_product <= LARGEST_PRODUCT and span.key_extent >= LEAST_EXTENT):
        return None
    return Head(problem, kept, SharedRange(*ends, len(s), len(t), len(s), 0))


def _heads(
    problem: Problem,
) -> Iterator[tuple[tuple[int, ...], Problem, Tensor | None, Head | None]]:
    """(index, problem, kept keys, head) of every head with queries and keys; None: `direct`."""
    for index in _indices(problem):
        one = problem.head(index)
        kept = kept_keys(one)
        if kept is None or (one.query.shape[-2] > 0 and kept.numel() > 0):
            yield index, one, kept, _whole_head(one, kept)


def _output_gradients(grads: OutputGradients, index: tuple[int, ...]) -> OutputGradients:
    lse = None if grads.lse is None else grads.lse[index]
    return OutputGradients(grads.out[index], lse)


def _columns(grads: OutputGradients) -> tuple[Tensor, Tensor]:
    """The output gradients of a head in fp64, [n_q, dv] and [n_q, 1]."""
    g = grads.out.detach().double()
    if grads.lse is None:
        return g, g.new_zeros(len(g), 1)
    return g, grads.lse.detach().double()[:, None]


def forward(problem: Problem) -> Saved:
    """
    Example:
        >>> q, k, v = torch.randn(3, 5000, 1), torch.randn(3, 5000, 1), torch.randn(3, 5000, 4)
        >>> out, lse = forward(Problem(q, k, v, None, None, None, 1.0, 0.0, False))
        >>> out.shape, lse.shape
        (torch.Size([3, 5000, 4]), torch.Size([3, 5000]))
    """
    query = problem.query
    out = query.new_zeros(*query.shape[:-1], problem.value.shape[-1])
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=torch.float64)
    for index, one, _, head in _heads(problem):
        if head is None:
            out[index], lse[index] = direct.forward(one)
            continue
        ends = head.end_values()
        out[index], lse[index] = head.evaluate(head.core(head.moments(ends), ends, ends))
    return Saved(out, lse)


def _zeros(problem: Problem) -> Gradients:
    return Gradients(*(x.new_zeros(x.shape) for x in problem.inputs))


def backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
    found = _zeros(problem)
    for index, one, kept, head in _heads(problem):
        part = _output_gradients(grads, index)
        if head is None:
            outputs = Saved(saved.out[index], saved.lse[index])
            for total, x in zip(found, direct.backward(part, outputs, one), strict=True):
                total[index] = x
            continue
        ends = head.end_values()
        core = head.core(head.moments(ends), ends, ends)
        grad_t, query_moments = head.query_moments(core, *_columns(part))
        grad_s, grad_v = head.adjoint(core, query_moments, ends)
        found.query[index] = grad_t * problem.scale
        found.key[index][kept] = grad_s.to(problem.key.dtype)
        found.value[index][kept] = grad_v.to(problem.value.dtype)
    return found


def double_backward(
    directions: Gradients, grads: OutputGradients, problem: Problem
) -> tuple[OutputGradients, Gradients]:
    """Gradients of <directions, backward(...)> for the output gradients and the inputs."""
    of_out = grads.out.new_zeros(grads.out.shape)
    of_lse = None if grads.lse is None else grads.lse.new_zeros(grads.lse.shape)
    found = _zeros(problem)
    for index, one, kept, head in _heads(problem):
        moves = Gradients(*(x[index] for x in directions))
        part = _output_gradients(grads, index)
        if head is None:
            of_part, of_inputs = direct.double_backward(moves, part, one)
            for total, x in zip(found, of_inputs, strict=True):
                total[index] = x
        else:
            to_q, to_k, to_v = (x.detach().double() for x in moves)
            wide = Gradients(to_q * problem.scale, to_k[kept], to_v[kept])
            of_part, of_inputs = head.double_backward(wide, OutputGradients(*_columns(part)))
            found.query[index] = of_inputs.query * problem.scale
            found.key[index][kept] = of_inputs.key.to(problem.key.dtype)
            found.value[index][kept] = of_inputs.value.to(problem.value.dtype)
        of_out[index] = of_part.out
        if of_lse is not None and of_part.lse is not None:
            of_lse[index] = of_part.lse.reshape(of_lse[index].shape)
    return OutputGradients(of_out, of_lse), found


# ---- one stage of all heads ----
#
# The sums of all heads stand one after the other in one tensor. Each head has a row of dv + 1 sums
# per key node, and one for either end key: its value, and 1 if this process has the key.


class _Sums(NamedTuple):
    """How many sums a head shares."""

    over_keys: int
    over_queries: int


def _shared_heads(
    problem: Problem, ranges: Tensor
) -> Iterator[tuple[tuple[int, ...], Tensor | None, Head | None, _Sums]]:
    """(index, kept keys, head, its sums); no head where no process has queries or keys."""
    width = problem.value.shape[-1] + 1
    for index, row in zip(_indices(problem), ranges.tolist(), strict=True):
        shared = SharedRange(*row)
        if shared.keys == 0 or shared.n_q == 0:
            yield index, None, None, _Sums(0, 0)
            continue
        one = problem.head(index)
        kept = kept_keys(one)
        head = Head(one, one.key.new_zeros(0).long() if kept is None else kept, shared)
        layout = head.layout
        sums = _Sums((layout.key.size + 2) * width, layout.query.size * width)
        yield index, kept, head, sums


def _shared_core(head: Head, moments: Tensor) -> tuple[Core, Tensor]:
    """The core of everybody's moments, and the values of the end keys."""
    *_, low, high = rows = moments.view(-1, head.dv + 1)
    # Equal end keys in several processes: the mean of their values.
    ends = torch.stack([low[:-1] / low[-1], high[:-1] / high[-1]])
    return head.core(rows[:-2], torch.zeros_like(ends), ends), ends


def _joined(parts: list[Tensor], problem: Problem) -> Tensor:
    return torch.cat(parts) if parts else problem.value.new_zeros(0, dtype=torch.float64)


def _extent(x: Tensor, rows: Tensor | None) -> Extent:
    numbers = x.double().squeeze(1) if rows is None else x.double().squeeze(1)[rows]
    if len(numbers) == 0:
        return Extent(math.inf, -math.inf, 0.0, 0.0, 0.0, 1.0)
    low, high = int(numbers.argmin()), int(numbers.argmax())
    at = (low, high) if rows is None else (int(rows[low]), int(rows[high]))
    regular = float(numbers.isfinite().all())
    return Extent(float(numbers[low]), float(numbers[high]), *at, len(numbers), regular)


def extents(problem: Problem) -> Tensor:
    """[heads, 2, 6]: an `Extent` of the queries and one of the keys of every head."""
    found = []
    for index in _indices(problem):
        one = problem.head(index)
        kept = kept_keys(one)
        of_keys = _extent(one.key, kept)
        found += [
            _extent(one.query, None),
            of_keys if kept is not None else of_keys._replace(regular=0.0),
        ]
    return torch.tensor(found, dtype=torch.float64, device=problem.query.device).view(-1, 2, 6)


def sizes(problem: Problem, ranges: Tensor) -> tuple[int, int]:
    """How many sums over keys, and how many sums over queries, are shared."""
    sums = [sums for *_, sums in _shared_heads(problem, ranges)]
    return sum(x.over_keys for x in sums), sum(x.over_queries for x in sums)


def moments(problem: Problem, extents: Tensor, ranges: Tensor) -> Tensor:
    """This process's part of the sums over the keys."""
    parts, dv = [], problem.value.shape[-1]
    for (index, _, head, _), (_, of_keys) in zip(
        _shared_heads(problem, ranges), extents.tolist(), strict=True
    ):
        if head is None:
            continue
        keys, layout = Extent(*of_keys), head.layout
        ends = head.v.new_zeros(2, dv + 1)
        if keys.tokens > 0:
            here = (keys.low == layout.s_min, keys.high == layout.s_max)
            at = (int(keys.at_low), int(keys.at_high))
            for end in (end for end in range(2) if here[end]):
                ends[end, :dv] = problem.value[index][at[end]].double()
                ends[end, dv] = 1.0
        sums = head.moments(head.v.new_zeros(2, dv))
        parts.append(torch.cat([sums, ends]).flatten())
    return _joined(parts, problem)


def evaluate(problem: Problem, ranges: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, served [heads]) from everybody's moments; all processes find the same served."""
    query, first, served = problem.query, 0, []
    out = query.new_zeros(*query.shape[:-1], problem.value.shape[-1])
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=torch.float64)
    for index, _, head, sums in _shared_heads(problem, ranges):
        if head is None:
            served.append(True)
            continue
        core, _ = _shared_core(head, moments[first : first + sums.over_keys])
        first += sums.over_keys
        served.append(head.span.key_extent >= LEAST_EXTENT and core.served)
        out[index], lse[index] = head.evaluate(core)
    return out, lse, torch.tensor(served, dtype=torch.bool)


def query_moments(
    grads: OutputGradients, problem: Problem, ranges: Tensor, moments: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of query, and this process's part of the sums over the queries."""
    first, parts = 0, []
    grad_query = torch.zeros_like(problem.query, memory_format=torch.contiguous_format)
    for index, _, head, sums in _shared_heads(problem, ranges):
        if head is None:
            continue
        core, _ = _shared_core(head, moments[first : first + sums.over_keys])
        first += sums.over_keys
        grad_t, found = head.query_moments(core, *_columns(_output_gradients(grads, index)))
        grad_query[index] = (grad_t * problem.scale).to(grad_query.dtype)
        parts.append(found.flatten())
    return grad_query, _joined(parts, problem)


def adjoint(
    problem: Problem, ranges: Tensor, moments: Tensor, query_moments: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of key and value, from everybody's sums."""
    first, first_query = 0, 0
    grad_key, grad_value = (
        torch.zeros_like(x, memory_format=torch.contiguous_format)
        for x in (problem.key, problem.value)
    )
    for index, kept, head, sums in _shared_heads(problem, ranges):
        if head is None:
            continue
        core, ends = _shared_core(head, moments[first : first + sums.over_keys])
        found = query_moments[first_query : first_query + sums.over_queries]
        first, first_query = first + sums.over_keys, first_query + sums.over_queries
        grad_s, grad_v = head.adjoint(core, found.view(-1, head.dv + 1), ends)
        grad_key[index][kept] = grad_s.to(grad_key.dtype)
        grad_value[index][kept] = grad_v.to(grad_value.dtype)
    return grad_key, grad_value


STAGES = (extents, sizes, moments, evaluate, query_moments, adjoint)
