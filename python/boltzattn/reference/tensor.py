"""The stages of a head of rank 2 to 4, in plain torch and fp64.

`transform.tensor` makes the layout. N = sum_j v_j exp(t . s_j + c_j) and Z are interpolated apart
and divided at the token, so every pair has its weight to a known relative error, and out, lse and
all gradients inherit it. The stages have the names that they have everywhere:

    frame          coordinates in which panels are few, centred; a mean query becomes a bias
    moments        one pass over the keys: sums of (v, 1) onto the key nodes
    core           N, Z and their slopes at the query nodes, axis after axis
    evaluate       out = N / Z and lse, one pass over the queries
    query_moments  (backward) the gradient of the queries, and sums over them onto the query nodes
    adjoint        (backward) the core transposed, evaluated at the keys
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.problem import Problem
from boltzattn.reference.head import TOKENS_PER_TILE, dot
from boltzattn.transform.layout import Axis, lagrange_weights
from boltzattn.transform.tensor import SKIP, TensorLayout, choose_tensor_layout
from boltzattn.transform.tolerances import LARGEST_PRODUCT, LARGEST_SUM, LEAST_EXTENT

LARGEST_COST = 3e8  # nanoseconds of C++; a layout beyond is left to `direct`


class Frame(NamedTuple):
    """Coordinates of a head: t' = t inverse - t_middle, s' = s matrix^T - s_middle."""

    matrix: Tensor
    inverse: Tensor
    t: Tensor  # [n_q, rank]
    s: Tensor  # [keys, rank]
    t_middle: Tensor
    s_middle: Tensor
    bias: Tensor  # [keys], with what the mean query adds

    @property
    def t_most(self) -> list[float]:
        return _largest(self.t)

    @property
    def s_most(self) -> list[float]:
        return _largest(self.s)


def _largest(x: Tensor) -> list[float]:
    """The largest |x| on every axis."""
    return x.abs().amax(0).tolist() if len(x) else [0.0] * x.shape[1]


def _diagonalising(t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """A and its inverse, with both covariances diagonal: (A^-T t) . (A s) = t . s."""
    rank = t.shape[1]
    one = torch.eye(rank, dtype=t.dtype, device=t.device)
    if len(t) < 2 or len(s) < 2:
        return one, one
    of_query, of_key = (torch.cov(x.T, correction=0) for x in (t, s))
    # With less, A would be so far from a rotation that it costs digits of fp64.
    value, vector = torch.linalg.eigh(of_key + 1e-6 * of_key.trace() * one)
    if not float(value.min()) > 0:
        return one, one
    root = vector * value.sqrt() @ vector.T
    inverse_root = vector / value.sqrt() @ vector.T
    _, turn = torch.linalg.eigh(root @ of_query @ root)
    return turn.T @ inverse_root, root @ turn


def _extent(x: Tensor) -> Tensor:
    return x.amax(0) - x.amin(0)


def find_frame(t: Tensor, s: Tensor, bias: Tensor) -> Frame:
    """Coordinates with few panels; the given ones unless others save a tenth."""
    matrix, inverse = _diagonalising(t, s)
    turned = t @ inverse, s @ matrix.T
    if (_extent(turned[0]) * _extent(turned[1]) + 1).prod() < 0.9 * (
        _extent(t) * _extent(s) + 1
    ).prod():
        t, s = turned
    else:
        matrix = inverse = torch.eye(t.shape[1], dtype=t.dtype, device=t.device)
    t_middle, s_middle = ((x.amin(0) + x.amax(0)) / 2 for x in (t, s))
    s = s - s_middle
    return Frame(matrix, inverse, t - t_middle, s, t_middle, s_middle, bias + s @ t_middle)


class TensorTokens:
    """Tokens [n, rank] on the panels of all axes, ordered by panel."""

    def __init__(self, axes: tuple[Axis, ...], x: Tensor) -> None:
        self.axes, self.nodes = axes, axes[0].nodes ** len(axes)
        self.panel = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self.place = []
        for k, axis in enumerate(axes):
            panel, place = axis.locate(x[:, k])
            self.panel = self.panel * axis.panels + panel
            self.place.append(place)
        self.order = self.panel.argsort(stable=True)
        self.panels = math.prod(axis.panels for axis in axes)
        counts = self.panel.bincount(minlength=self.panels)
        self.starts = [0, *counts.cumsum(0).tolist()]
        self.occupied = counts > 0

    def tiles(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(panel, some tokens on it, their weights on its nodes [tokens, nodes])."""
        for panel in self.occupied.nonzero().squeeze(1).tolist():
            here = self.order[self.starts[panel] : self.starts[panel + 1]]
            for tokens in here.split(TOKENS_PER_TILE):
                weight = self.place[0].new_ones(len(tokens), 1)
                for axis, place in zip(self.axes, self.place, strict=True):
                    more = lagrange_weights(axis.nodes, place[tokens])
                    weight = (weight[:, :, None] * more[:, None, :]).flatten(1)
                yield panel, tokens, weight


def _centres(axis: Axis, like: Tensor) -> Tensor:
    panel = torch.arange(axis.panels, dtype=like.dtype, device=like.device)
    return axis.half * (2 * panel + 1 - axis.panels)


class Tables(NamedTuple):
    """Numbers at the nodes of all panels [panels, nodes, 1 + rank, columns], in units exp(log).

    Entry 0 is plain; entry 1 + k has a factor of the source's coordinate k.
    """

    table: Tensor
    log: Tensor  # [panels]


def core(
    x: Tensor,
    log: Tensor,
    source: tuple[Axis, ...],
    target: tuple[Axis, ...],
    skip: float,
    flat: list[bool],
) -> Tables:
    """sum_b exp(a . b) x_b from the source's nodes b to the target's nodes a, axis by axis.

    x [panels, nodes, columns] is in units of exp(log [panels]), -inf for panels without tokens.
    flat: on which axes all tokens of the source are in the middle, so that slopes vanish.
    """
    rank, columns = len(source), x.shape[-1]
    x = x.reshape(*(axis.panels for axis in source), *(axis.nodes for axis in source), 1, columns)
    log = log.reshape([axis.panels for axis in source])
    for k in reversed(range(rank)):
        of, on = source[k], target[k]
        node, centre = of.positions(x.device).reshape(of.panels, -1), _centres(of, x)
        to, middle = on.positions(x.device).reshape(on.panels, -1), _centres(on, x)
        local = to[:, :, None, None] * node - (middle[:, None] * centre)[:, None, :, None]
        y = x.movedim((k, rank + k), (0, 1)).contiguous()
        rest = y.shape[2:]
        of_panel = log.movedim(k, -1)[..., None, :] + middle[:, None] * centre  # [.., on, of]
        top = of_panel.amax(-1)
        factor = (of_panel - top.clamp_min(-1e300)[..., None]).exp()
        factor = torch.where(factor > math.exp(-skip), factor, 0.0)
        # The unit of a panel is one number for all its nodes and columns.
        others = log.movedim(k, -1).shape[:-1]
        rows = y.reshape(of.panels, of.nodes, math.prod(others), -1)
        weight = factor.reshape(math.prod(others), on.panels, of.panels)
        if flat[k]:
            node = torch.zeros_like(node)
        plain = torch.einsum("oqs,qasb,sbox->qaox", weight, local.exp(), rows)
        slopes = torch.einsum(
            "oqs,qasb,sbox->qaox", weight, local.exp() * node, _first_table(rows, rest)
        )
        plain = plain.reshape(on.panels, on.nodes, *rest)
        slopes = slopes.reshape(on.panels, on.nodes, *rest[:-2], 1, columns)
        # Slopes of later axes are there already; that of this axis goes before them.
        y = torch.cat([plain[..., :1, :], slopes, plain[..., 1:, :]], -2)
        x, log = y.movedim((0, 1), (k, rank + k)), top.movedim(-1, k)
    panels = log.numel()
    return Tables(x.reshape(panels, -1, 1 + rank, columns), log.reshape(panels))


def _first_table(rows: Tensor, rest: torch.Size) -> Tensor:
    """Of tables [.., entries, columns] flattened into the last dimension: entry 0."""
    entries, columns = rest[-2:]
    return rows.unflatten(-1, (-1, entries, columns))[..., 0, :].flatten(-2)


class TensorHead:
    """One head: its layout, its queries and those of its keys that are not masked."""

    def __init__(
        self, problem: Problem, kept: Tensor, at: Frame, origin: Tensor, layout: TensorLayout
    ) -> None:
        self.at, self.layout, self.origin = at, layout, origin
        self.gaussian, self.scale = problem.is_gaussian, problem.scale
        self.factor = math.sqrt(problem.scale) if problem.is_gaussian else problem.scale
        self.q = (problem.query.detach().double() - origin) * self.factor
        self.k = (problem.key.detach()[kept].double() - origin) * (
            self.factor if self.gaussian else 1.0
        )
        self.v = problem.value.detach()[kept].double()
        self.rank, self.dv = self.q.shape[1], self.v.shape[1]
        self.skip = SKIP[problem.query.dtype] + 5 * layout.kappa * self.rank
        # On which axes all queries, all keys are in the middle.
        self.flat_query, self.flat_key = ([x == 0 for x in y] for y in (at.t_most, at.s_most))

    @cached_property
    def queries(self) -> TensorTokens:
        return TensorTokens(self.layout.query, self.at.t)

    @cached_property
    def keys(self) -> TensorTokens:
        return TensorTokens(self.layout.key, self.at.s)

    @cached_property
    def key_log(self) -> Tensor:
        """The largest bias of a panel, [key panels]."""
        empty = self.at.bias.new_full((self.keys.panels,), -math.inf)
        return empty.scatter_reduce(0, self.keys.panel, self.at.bias, "amax")

    @cached_property
    def at_nodes(self) -> Tables:
        """N and Z at the query nodes, and their slopes."""
        moments = self.v.new_zeros(self.keys.panels, self.keys.nodes, self.dv + 1)
        for p, j, weight in self.keys.tiles():
            own = (self.at.bias[j] - self.key_log[p]).exp()[:, None]
            columns = torch.cat([self.v[j] - self.v[0], torch.ones_like(own)], 1) * own
            moments[p] += weight.T @ columns
        skip = self.skip + math.log(len(self.v))
        return core(moments, self.key_log, self.layout.key, self.layout.query, skip, self.flat_key)

    def _panel(self, p: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tables of a query panel from its own value and mean key; both [dv], [rank]."""
        table = self.at_nodes.table[p]  # [nodes, 1 + rank, dv + 1]
        middle = table[len(table) // 2]
        value, mean = middle[0, :-1] / middle[0, -1], middle[1:, -1] / middle[0, -1]
        table = torch.cat([table[:, :1], table[:, 1:] - mean[:, None] * table[:, :1]], 1)
        table = torch.cat([table[..., :-1] - value * table[..., -1:], table[..., -1:]], -1)
        return table, value, mean

    def forward(self) -> tuple[Tensor, Tensor]:
        """(out [n_q, dv], lse [n_q])."""
        out, lse = self.v.new_empty(len(self.q), self.dv), self.q.new_empty(len(self.q))
        for p, i, weight in self.queries.tiles():
            table, value, _ = self._panel(p)
            n, z = (weight @ table[:, 0]).split([self.dv, 1], 1)
            out[i] = n / z + value + self.v[0]
            lse[i] = z.squeeze(1).log() + self.at_nodes.log[p]
        return out, self.add_offsets(lse)

    def backward(self, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of query, key, value and bias for those of out and lse."""
        dv, rank = self.dv, self.rank
        grad_t = torch.empty_like(self.at.t)
        sums = self.v.new_zeros(self.queries.panels, self.queries.nodes, dv + 1)
        for p, i, weight in self.queries.tiles():
            table, value, mean = self._panel(p)
            found = (weight @ table.flatten(1)).reshape(-1, 1 + rank, dv + 1)
            z = found[:, :1, -1]
            found = found / z[:, :, None]
            by_out = dot(g[i], found[:, 0, :-1])
            slope = torch.einsum("nd,nrd->nr", g[i], found[:, 1:, :-1])
            gap = found[:, 1:, -1]
            grad_t[i] = slope - by_out * gap + h[i] * (gap + mean + self.at.s_middle)
            sums[p] += weight.T @ (torch.cat([g[i], h[i] - by_out], 1) / z)
            # Column dv goes with values measured from the panel's; make it the first value.
            if i[-1] == self.queries.order[self.queries.starts[p + 1] - 1]:
                sums[p, :, -1:] -= (sums[p, :, :-1] * value).sum(-1, keepdim=True)
        log = torch.where(self.queries.occupied, -self.at_nodes.log, -math.inf)
        skip = self.skip + math.log(len(self.q))
        tables = core(sums, log, self.layout.query, self.layout.key, skip, self.flat_query)
        grad_s, grad_v = torch.zeros_like(self.at.s), torch.zeros_like(self.v)
        grad_bias = torch.zeros_like(self.at.bias)
        for p, j, weight in self.keys.tiles():
            here = self.v[self.keys.order[self.keys.starts[p]]]
            table = tables.table[p]
            rest = table[..., -1] + (table[..., :-1] * (here - self.v[0])).sum(-1)
            own = (self.at.bias[j] + tables.log[p]).exp()[:, None]
            found = (weight * own) @ torch.cat([table[..., :-1], rest[..., None]], -1).flatten(1)
            found = found.reshape(-1, 1 + rank, dv + 1)
            pull = torch.einsum("nd,nrd->nr", self.v[j] - here, found[..., :-1]) + found[..., -1]
            grad_v[j], grad_bias[j] = found[:, 0, :-1], pull[:, 0]
            grad_s[j] = pull[:, 1:] + pull[:, :1] * self.at.t_middle
        return self.out_of_frame(h, grad_t, grad_s, grad_v, grad_bias)

    def out_of_frame(
        self, h: Tensor, grad_t: Tensor, grad_s: Tensor, grad_v: Tensor, grad_bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of what the caller has from those in the frame."""
        grad_q, grad_k = grad_t @ self.at.inverse.T, grad_s @ self.at.matrix
        if self.gaussian:
            grad_q, grad_k = grad_q - h * self.q, grad_k - grad_bias[:, None] * self.k
            grad_k = grad_k * self.factor
        return grad_q * self.factor, grad_k, grad_v, grad_bias

    def add_offsets(self, lse: Tensor) -> Tensor:
        """lse of the caller's queries from log Z in the frame."""
        lse = lse + (self.at.t + self.at.t_middle) @ self.at.s_middle
        return lse - 0.5 * self.q.square().sum(1) if self.gaussian else lse


class RunningSums:
    """Sums over tokens at the nodes of one side, in units exp(log) of every panel."""

    def __init__(self, axes: tuple[Axis, ...], columns: int, like: Tensor) -> None:
        self.axes, self.count = axes, 0
        panels, nodes = math.prod(axis.panels for axis in axes), axes[0].nodes ** len(axes)
        self.sums = like.new_zeros(panels, nodes, columns)
        self.log = like.new_full((panels,), -math.inf)

    def add(self, x: Tensor, bias: Tensor, columns: Tensor, log: Tensor | None = None) -> None:
        """log: the units, if they are known; else they are raised to the largest bias."""
        tokens = TensorTokens(self.axes, x)
        if log is None:
            log = self.log.scatter_reduce(0, tokens.panel, bias, "amax")
            self.sums *= torch.where(log > self.log, (self.log - log).exp(), 1.0)[:, None, None]
        self.log = log
        self.count += len(x)
        for p, j, weight in tokens.tiles():
            self.sums[p] += weight.T @ (columns[j] * (bias[j] - log[p]).exp()[:, None])


class SummedTensorHead(TensorHead):
    """A head whose keys, and in backward rows, are summed in parts that are not all at hand."""

    centre: Tensor  # [dv]: values are measured from here

    @cached_property
    def columns(self) -> Tensor:
        """(v - centre, 1) of every key."""
        return torch.cat([self.v - self.centre, torch.ones_like(self.v[:, :1])], 1)

    def key_sums(self) -> RunningSums:
        return RunningSums(self.layout.key, self.dv + 1, self.v)

    def row_sums(self) -> RunningSums:
        return RunningSums(self.layout.query, self.dv + 1, self.v)

    def over_keys(self, sums: RunningSums) -> Tables:
        """N and Z at the query nodes, and their slopes."""
        skip, axes = self.skip + math.log(sums.count), self.layout
        return core(sums.sums, sums.log, axes.key, axes.query, skip, self.flat_key)

    def over_rows(self, sums: RunningSums) -> Tables:
        """The same at the key nodes, for what gradients of keys take from rows."""
        skip, axes = self.skip + math.log(sums.count), self.layout
        return core(sums.sums, sums.log, axes.query, axes.key, skip, self.flat_query)

    def read(self, tables: Tables, axes: tuple[Axis, ...], x: Tensor) -> tuple[Tensor, Tensor]:
        """Tables at tokens x: [tokens, 1 + rank, columns] in units exp(log [tokens])."""
        tokens = TensorTokens(axes, x)
        found = x.new_empty(len(x), *tables.table.shape[2:])
        for p, i, weight in tokens.tiles():
            found[i] = (weight @ tables.table[p].flatten(1)).unflatten(1, tables.table.shape[2:])
        return found, tables.log[tokens.panel]

    def asked(self, g: Tensor, h: Tensor, out: Tensor) -> Tensor:
        """What goes with (v - centre, 1) of a key in the gradient of its logit: [n_q, dv + 1].

        out is measured from the centre, too.
        """
        return torch.cat([g, h - dot(g, out)], 1)

    def pulled_rows(self, tables: Tables, rows: slice, asked: Tensor, log_z: Tensor) -> Tensor:
        """The gradients of some queries, as far as these keys contribute."""
        found, log = self.read(tables, self.layout.query, self.at.t[rows])
        found = found[:, 1:] * (log - log_z[rows]).exp()[:, None, None]
        return torch.einsum("nc,nrc->nr", asked[rows], found)

    def pulled_keys(self, tables: Tables, keys: slice) -> tuple[Tensor, Tensor]:
        """(those of some values [n, dv], of biases and keys [n, 1 + rank]) by these rows."""
        found, log = self.read(tables, self.layout.key, self.at.s[keys])
        found = found * (self.at.bias[keys] + log).exp()[:, None, None]
        return found[:, 0, :-1], torch.einsum("nc,nrc->nr", self.columns[keys], found)


class CausalTensorHead(SummedTensorHead):
    """Rows of a chunk see its keys pair by pair, and earlier ones by sums over all of them."""

    place: Tensor  # of the keys among the rows
    places: int  # of all keys, hidden ones included

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """(rows, keys) of every chunk; rows behind all keys are one chunk."""
        n_q, size = len(self.q), self.layout.chunk
        both = min(n_q, self.places)
        starts = [*range(0, both, size), both]
        bounds = torch.searchsorted(self.place, torch.tensor(starts, device=self.place.device))
        for first, end, key, key_end in zip(
            starts, starts[1:], bounds.tolist(), bounds[1:].tolist(), strict=False
        ):
            yield slice(first, end), slice(key, key_end)
        if n_q > both:
            yield slice(both, n_q), slice(len(self.k), len(self.k))

    def pairs(self, rows: slice, keys: slice) -> Tensor:
        """Logits in the frame, -inf for later keys."""
        logits = self.at.t[rows] @ self.at.s[keys].T + self.at.bias[keys]
        row = torch.arange(rows.start, rows.stop, device=logits.device)
        return logits.masked_fill(self.place[keys] > row[:, None], -math.inf)

    @cached_property
    def results(self) -> tuple[Tensor, Tensor]:
        """out, measured from the centre, and log Z in the frame."""
        out, log_z = self.v.new_zeros(len(self.q), self.dv), torch.empty_like(self.q[:, 0])
        sums = self.key_sums()
        for rows, keys in self.chunks():
            logits = self.pairs(rows, keys)
            top = logits.new_full(logits.shape[:1], -math.inf)
            if keys.stop > keys.start:
                top = logits.amax(1)
            total = self.v.new_zeros(len(logits), self.dv + 1)
            if sums.count:
                found, log = self.read(self.over_keys(sums), self.layout.query, self.at.t[rows])
                top = torch.maximum(top, log)
                total = found[:, 0] * (log - top).exp()[:, None]
            alive = top > -math.inf
            total += (logits - top.masked_fill(~alive, 0.0)[:, None]).exp() @ self.columns[keys]
            z = total[:, -1]
            out[rows] = total[:, :-1] / z.masked_fill(~alive, 1.0)[:, None]
            log_z[rows] = (top + z.log()).masked_fill(~alive, -math.inf)
            sums.add(self.at.s[keys], self.at.bias[keys], self.columns[keys])
        return out, log_z

    def forward(self) -> tuple[Tensor, Tensor]:
        out, log_z = self.results
        alive = (log_z > -math.inf)[:, None]
        return (out + self.centre).masked_fill(~alive, 0.0), self.add_offsets(log_z)

    def backward(self, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, log_z = self.results
        alive = log_z > -math.inf
        h = h.masked_fill(~alive[:, None], 0.0)
        log_z = log_z.masked_fill(~alive, 0.0)
        asked = self.asked(g, h, out).masked_fill(~alive[:, None], 0.0)
        grad_t, grad_s = torch.zeros_like(self.at.t), torch.zeros_like(self.at.s)
        grad_v, grad_bias = torch.zeros_like(self.v), torch.zeros_like(self.at.bias)
        sums = self.key_sums()
        for rows, keys in self.chunks():
            weights = (self.pairs(rows, keys) - log_z[rows, None]).exp()
            ds = weights * (asked[rows] @ self.columns[keys].T)
            grad_t[rows] = ds @ self.at.s[keys]
            grad_s[keys] = ds.T @ self.at.t[rows]
            grad_bias[keys] = ds.sum(0)
            grad_v[keys] = weights.T @ asked[rows, :-1]
            if sums.count:
                grad_t[rows] += self.pulled_rows(self.over_keys(sums), rows, asked, log_z)
            sums.add(self.at.s[keys], self.at.bias[keys], self.columns[keys])
        grad_t += h * self.at.s_middle
        later = self.row_sums()
        for rows, keys in reversed(list(self.chunks())):
            if later.count and keys.stop > keys.start:
                of_value, pull = self.pulled_keys(self.over_rows(later), keys)
                grad_v[keys] += of_value
                grad_bias[keys] += pull[:, 0]
                grad_s[keys] += pull[:, 1:]
            some = alive[rows]
            later.add(self.at.t[rows][some], -log_z[rows][some], asked[rows][some])
        grad_s += grad_bias[:, None] * self.at.t_middle
        return self.out_of_frame(h, grad_t, grad_s, grad_v, grad_bias)


def served_head(problem: Problem, kept: Tensor) -> TensorHead | None:
    """The head of a problem without leading dimensions; None: `direct` must serve it."""
    if problem.is_gaussian and not problem.scale > 0:
        return None
    q, k = problem.query.detach().double(), problem.key.detach()[kept].double()
    v = problem.value.detach()[kept].double()
    bias = k.new_zeros(len(k)) if problem.key_bias is None else problem.key_bias.detach()[kept]
    # Comparisons with NaN are false, so each of these also asks for finite numbers.
    if v.numel() and not float(v.abs().amax()) * len(v) <= LARGEST_SUM:
        return None
    if not float(bias.double().abs().amax()) <= LARGEST_PRODUCT:
        return None
    bias = bias.double()
    if problem.is_gaussian:
        origin, factor = k[0], math.sqrt(problem.scale)
        t, s = (q - origin) * factor, (k - origin) * factor
        bias = bias - 0.5 * s.square().sum(1)
    else:
        origin, t, s = torch.zeros_like(k[0]), q * problem.scale, k
    if not (bool(t.isfinite().all()) and bool(s.isfinite().all())):
        return None
    at = find_frame(t, s, bias)
    if any(0.0 < most < LEAST_EXTENT for most in (*at.t_most, *at.s_most)):
        return None
    dtype, dv = problem.query.dtype, v.shape[1]
    places = problem.key.shape[0]
    rows = min(len(q), places) if problem.is_causal else 0
    layout = choose_tensor_layout(dtype, at.t_most, at.s_most, len(q) + places, dv, rows)
    if layout is None or layout.cost > LARGEST_COST:
        return None
    if not float(at.bias.abs().amax()) <= LARGEST_PRODUCT:
        return None
    if not problem.is_causal:
        return TensorHead(problem, kept, at, origin, layout)
    head = CausalTensorHead(problem, kept, at, origin, layout)
    head.place, head.places, head.centre = kept, places, head.v[0]
    return head
