"""The stages of a head with a bias per key or Gaussian scores, in plain torch and fp64.

`transform.envelope` makes the layout. On a query panel Z and N = sum_j v_j exp(k(t, s_j) + c_j) are
interpolated in the unit exp(log_z + (t - t0)(mean - gauge (t + t0) / 2)); log Z is convex up to a
function of t alone, so Z >= 1 in this unit wherever its panel is. On a key panel the keys are
summed with their weights at the panel's tilt, and its nodes act as keys with biases of their own.
Nodes of a direct panel are its tokens. The stages have the names that they have everywhere:

    moments        one pass over the keys: sums of (v, 1) onto the key nodes
    core           N, Z and their derivatives at the query nodes; the certificate
    evaluate       out = N / Z and lse, one pass over the queries
    query_moments  (backward) the gradient of the queries, and sums over them onto the query nodes
    adjoint        (backward) the core transposed, evaluated at the keys
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.problem import Problem
from boltzattn.reference.head import TOKENS_PER_TILE, dot
from boltzattn.transform.envelope import (
    ENVELOPE_PRECISION,
    LARGEST_RISE,
    EnvelopeLayout,
    EnvelopePrecision,
    KeyPanel,
    QueryPanel,
    find_sites,
    make_envelope_layout,
    rise,
    score_of,
)
from boltzattn.transform.layout import lagrange_weights
from boltzattn.transform.tolerances import (
    LARGEST_PRODUCT,
    LARGEST_SUM,
    LEAST_EXTENT,
    ROUNDING,
    ROUNDING_OF_PRODUCT,
    TOLERANCE,
)


class Coordinates(NamedTuple):
    """Queries and keys as the layout sees them: s = factor (k - origin), t likewise.

    A common origin of a Gaussian's queries and keys moves no logit; one of keys alone moves a
    row's logits by t origin. It keeps the digits of keys with a large offset.
    """

    gauge: float
    t: Tensor  # [n_q]
    s: Tensor  # [keys]
    bias: Tensor  # [keys]
    query_factor: float
    key_factor: float
    origin: float

    @property
    def product(self) -> float:
        """What roundings of logits are proportional to; NaN if a number is not finite.

        That is the size of the logits that matter. A Gaussian's logit moves by the rounding of a
        position times the distance, too.
        """
        if not all(bool(x.isfinite().all()) for x in self[1:4]):
            return math.nan
        t, bias = float(self.t.abs().max()), float(self.bias.abs().max())
        if not self.gauge:
            return t * float(self.s.max() - self.s.min()) + bias
        nearest = self.farthest
        reach = math.sqrt(nearest * nearest + 4 * bias) + 2  # keys that matter are not farther
        position = max(t, float(self.s.abs().max()))
        return 0.5 * nearest * nearest + position * reach + LARGEST_RISE + bias

    @property
    def farthest(self) -> float:
        """The largest distance of a query to its nearest key."""
        sites = self.s.sort().values
        above = torch.searchsorted(sites, self.t).clamp(max=len(sites) - 1)
        gaps = (sites[above] - self.t).abs(), (self.t - sites[(above - 1).clamp(min=0)]).abs()
        return float(torch.minimum(*gaps).max())

    @property
    def moved(self) -> float:
        """What the origin adds to lse, over t."""
        return 0.0 if self.gauge else self.origin


def coordinates(problem: Problem, kept: Tensor) -> Coordinates:
    """Of a head of rank 1 with some queries and kept keys; a Gaussian's scale must be positive."""
    q = problem.query.detach().double().squeeze(1)
    k = problem.key.detach()[kept].double().squeeze(1)
    origin, bias = float(k[len(k) // 2]), torch.zeros_like(k)
    if problem.key_bias is not None:
        bias = problem.key_bias.detach()[kept].double()
    if not problem.is_gaussian:
        return Coordinates(0.0, q * problem.scale, k - origin, bias, problem.scale, 1.0, origin)
    factor = math.sqrt(problem.scale)
    t, s = (q - origin) * factor, (k - origin) * factor
    return Coordinates(1.0, t, s, bias, factor, factor, origin)


class PanelTokens:
    """The tokens of an axis, ordered by panel; tokens on no panel come last."""

    def __init__(self, panels: Sequence[QueryPanel | KeyPanel], x: Tensor) -> None:
        self.panels, self.x = panels, x
        low, high = (x.new_tensor([getattr(p, end) for p in panels]) for end in ("low", "high"))
        panel = (torch.searchsorted(low, x, right=True) - 1).clamp(min=0)
        on_panel = (x >= low[panel]) & (x <= high[panel])
        panel = torch.where(on_panel, panel, len(panels))
        self.order = panel.argsort(stable=True)
        self.starts = [0, *panel.bincount(minlength=len(panels) + 1).cumsum(0).tolist()]

    def tiles(self, nodes: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(panel, some tokens on it, their weights on its nodes [tokens, nodes]).

        On a direct panel that is 1 at the node that is the token itself. A key that matters nowhere
        has no node.
        """
        for p, panel in enumerate(self.panels):
            here = self.order[self.starts[p] : self.starts[p + 1]]
            for tokens in here.split(TOKENS_PER_TILE) if len(here) else ():
                x, node = self.x[tokens], nodes[panel.nodes]
                if panel.direct:
                    yield p, tokens, (x[:, None] == node).double()
                else:
                    place = (x - panel.middle) / panel.half
                    yield p, tokens, lagrange_weights(len(node), place)


class EnvelopeCore(NamedTuple):
    """What the moments say at the query nodes; values are measured from the panel's centre."""

    shift: Tensor  # [query nodes]: log of the unit of N and Z
    origin: Tensor  # [query nodes]: where slopes measure keys from
    centre: Tensor  # [query panels, dv]
    total: Tensor  # [query nodes, dv + 1]: N, Z
    slope: Tensor | None  # their derivatives, for backward
    certificate: float


class EnvelopeHead:
    """One head: its layout, its queries and those of its keys that are not masked."""

    def __init__(
        self, at: Coordinates, value: Tensor, layout: EnvelopeLayout, slopes: bool = False
    ) -> None:
        self.at, self.layout, self.slopes = at, layout, slopes  # slopes: for backward
        self.v, self.dv = value, value.shape[1]
        device = value.device
        self.query_nodes, self.key_nodes, self.node_bias = (
            x.to(device) for x in (layout.query_nodes, layout.key_nodes, layout.node_bias)
        )
        # Values are measured from here on a key panel.
        self.centre = value[torch.tensor([p.top for p in layout.key], device=device)]

    @cached_property
    def queries(self) -> PanelTokens:
        return PanelTokens(self.layout.query, self.at.t)

    @cached_property
    def keys(self) -> PanelTokens:
        return PanelTokens(self.layout.key, self.at.s)

    @cached_property
    def at_nodes(self) -> EnvelopeCore:
        return self.core(self.moments())

    def forward(self) -> tuple[Tensor, Tensor]:
        """(out [n_q, dv], lse [n_q])."""
        return self.evaluate(self.at_nodes)

    def backward(self, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of query, key, value and bias for those of out and lse."""
        grad_t, query_moments = self.query_moments(self.at_nodes, g, h)
        grad_s, grad_v, grad_bias = self.adjoint(self.at_nodes, query_moments)
        return grad_t * self.at.query_factor, grad_s * self.at.key_factor, grad_v, grad_bias

    def key_tiles(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Tiles of keys, whose weights are those that they have at the panel's tilt."""
        for p, j, weight in self.keys.tiles(self.key_nodes):
            panel, bias = self.layout.key[p], self.at.bias[j]
            if panel.direct:
                # Of a key that matters nowhere the difference is not bounded; its weights are 0.
                gap = (bias[:, None] - self.node_bias[panel.nodes]).clamp(max=0.0)
            else:
                lift = rise(panel.tilt, self.at.s[j], panel.middle, self.at.gauge)
                gap = (lift + bias - panel.scale)[:, None]
            yield p, j, weight * gap.exp()

    def moments(self) -> Tensor:
        """[key nodes, dv + 1]: sums of values, and of 1."""
        sums = self.v.new_zeros(len(self.key_nodes), self.dv + 1)
        for p, j, weight in self.key_tiles():
            columns = torch.cat([self.v[j] - self.centre[p], torch.ones_like(weight[:, :1])], 1)
            sums[self.layout.key[p].nodes] += weight.T @ columns
        sums[:, :-1] += sums[:, -1:] * self.by_key_node(self.centre)
        return sums

    def by_key_node(self, rows: Tensor) -> Tensor:
        """[key panels, width] to [key nodes, width]."""
        counts = [p.nodes.stop - p.nodes.start for p in self.layout.key]
        return rows.repeat_interleave(torch.tensor(counts, device=rows.device), 0)

    def block_nodes(self, panel: QueryPanel) -> Tensor:
        """The key nodes that matter on a query panel."""
        slices = [self.layout.key[k].nodes for k in panel.blocks]
        ranges = [torch.arange(x.start, x.stop) for x in slices]
        return torch.cat(ranges).to(self.v.device)

    def exponents(self, panel: QueryPanel, b: Tensor) -> Tensor:
        """[nodes of the panel, key nodes b]: k(t_a, s_b) + c_b, less its unit if interpolated."""
        t, s, bias = self.query_nodes[panel.nodes, None], self.key_nodes[b], self.node_bias[b]
        if panel.direct:
            return score_of(t, s, self.at.gauge) + bias
        # From the middle of the panel, by differences.
        middle = torch.full_like(t[:1], panel.middle)
        base = score_of(middle, s, self.at.gauge) + bias - panel.log_z
        return base + (s - panel.mean) * (t - panel.middle)

    def kernel(self, panel: QueryPanel, b: Tensor, shift: Tensor) -> Tensor:
        """Weights of key nodes b in the unit of the panel's nodes."""
        exponents = self.exponents(panel, b)
        return (exponents - shift[:, None] if panel.direct else exponents).exp()

    def shift_at(self, panel: QueryPanel, t: Tensor) -> Tensor:
        """The logarithm of the unit of N and Z where they are interpolated."""
        lift = panel.mean - self.at.gauge * 0.5 * (t + panel.middle)
        return panel.log_z + (t - panel.middle) * lift

    def core(self, moments: Tensor) -> EnvelopeCore:
        shift, origin = torch.empty_like(self.query_nodes), torch.empty_like(self.query_nodes)
        total = moments.new_empty(len(self.query_nodes), self.dv + 1)
        slope = torch.empty_like(total) if self.slopes else None
        centre = self.v.new_empty(len(self.layout.query), self.dv)
        worst = 0.0
        for p, panel in enumerate(self.layout.query):
            a, b = panel.nodes, self.block_nodes(panel)
            t = self.query_nodes[a]
            if panel.direct:  # every row has its own unit
                shift[a] = self.exponents(panel, b).amax(1)
            else:
                shift[a] = self.shift_at(panel, t)
            kernel = self.kernel(panel, b, shift[a])
            found = kernel @ moments[b]
            if not panel.direct:
                origin[a] = panel.mean
            elif self.at.gauge:  # a Gaussian's slope is s - t: nothing cancels
                origin[a] = t
            else:  # the mean key of the row
                origin[a] = kernel @ (self.key_nodes[b] * moments[b, -1]) / found[:, -1]
            least_z = float(found[:, -1].min())
            if not (least_z > 0 and float(found.abs().max()) <= LARGEST_SUM):
                worst = math.inf
            else:
                worst = max(worst, self.layout.bound(panel, min(1.0, least_z)))
            middle = found[len(t) // 2]
            centre[p] = middle[:-1] / middle[-1]
            found[:, :-1] -= centre[p] * found[:, -1:]
            total[a] = found
            if slope is not None:
                found = (kernel * (self.key_nodes[b] - origin[a, None])) @ moments[b]
                found[:, :-1] -= centre[p] * found[:, -1:]
                slope[a] = found
        certificate = ROUNDING + ROUNDING_OF_PRODUCT * self.at.product + worst
        return EnvelopeCore(shift, origin, centre, total, slope, certificate)

    def evaluate(self, core: EnvelopeCore) -> tuple[Tensor, Tensor]:
        """(out [n_q, dv], lse [n_q])."""
        out, lse = self.v.new_empty(len(self.at.t), self.dv), torch.empty_like(self.at.t)
        for p, i, weight in self.queries.tiles(self.query_nodes):
            panel = self.layout.query[p]
            n, z = (weight @ core.total[panel.nodes]).split([self.dv, 1], 1)
            shift = weight @ core.shift[panel.nodes] if panel.direct else None
            out[i] = n / z + core.centre[p]
            lse[i] = z.squeeze(1).log() + self.at.t[i] * self.at.moved
            lse[i] += self.shift_at(panel, self.at.t[i]) if shift is None else shift
        return out, lse

    def query_moments(self, core: EnvelopeCore, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """(gradient of t [n_q, 1], the gradients of N and Z summed onto the query nodes).

        g [n_q, dv] and h [n_q, 1] are the gradients of out and lse.
        """
        assert core.slope is not None
        grad_t, sums = torch.empty_like(h), torch.zeros_like(core.total)
        for p, i, weight in self.queries.tiles(self.query_nodes):
            a = self.layout.query[p].nodes
            n, z = (weight @ core.total[a]).split([self.dv, 1], 1)
            slope, mean_gap = (weight @ core.slope[a] / z).split([self.dv, 1], 1)
            origin = (weight @ core.origin[a])[:, None]
            by_out = dot(g[i], n / z)
            by_lse = (origin - self.at.gauge * self.at.t[i, None]) + mean_gap + self.at.moved
            grad_t[i] = dot(g[i], slope) - by_out * mean_gap + h[i] * by_lse
            sums[a] += weight.T @ (torch.cat([g[i], h[i] - by_out], 1) / z)
        for p, panel in enumerate(self.layout.query):  # from the centre to values as they are
            a = panel.nodes
            sums[a, -1:] -= dot(sums[a, :-1], core.centre[p])
        return grad_t, sums

    def adjoint(self, core: EnvelopeCore, query_moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of s [keys, 1], v and the biases [keys]."""
        dv, gauge = self.dv, self.at.gauge
        tables = query_moments.new_zeros(2, len(self.key_nodes), dv + 1)
        # Slopes are measured from the tilt, or from a Gaussian's key itself where that is a node.
        tilt = self.by_key_node(self.v.new_tensor([[p.tilt] for p in self.layout.key])).squeeze(1)
        direct = self.by_key_node(self.v.new_tensor([[p.direct] for p in self.layout.key]))
        own = (direct.squeeze(1) > 0) & (gauge != 0)
        origin = torch.where(own, self.key_nodes, tilt)
        for panel in self.layout.query:
            a, b = panel.nodes, self.block_nodes(panel)
            kernel = self.kernel(panel, b, core.shift[a])
            gap = self.query_nodes[a, None] - origin[b]
            tables[0, b] += kernel.T @ query_moments[a]
            tables[1, b] += (kernel * gap).T @ query_moments[a]
        tables[..., -1] += (tables[..., :-1] * self.by_key_node(self.centre)).sum(-1)
        grad_s, grad_v = torch.zeros_like(self.at.s)[:, None], torch.zeros_like(self.v)
        grad_bias = torch.zeros_like(self.at.s)
        for p, j, weight in self.key_tiles():
            key, value = self.layout.key[p], self.v[j] - self.centre[p]
            to_v, by_one = (weight @ tables[0, key.nodes]).split([dv, 1], 1)
            pull, by_gap = (weight @ tables[1, key.nodes]).split([dv, 1], 1)
            of_bias = dot(to_v, value) + by_one
            grad_v[j], grad_bias[j] = to_v, of_bias.squeeze(1)
            grad_s[j] = dot(pull, value) + by_gap
            if not (key.direct and gauge):
                grad_s[j] += (key.tilt - gauge * self.at.s[j, None]) * of_bias
        return grad_s, grad_v, grad_bias


def make_envelope_head(
    at: Coordinates,
    value: Tensor,
    slopes: bool,
    precision: EnvelopePrecision = ENVELOPE_PRECISION,
) -> EnvelopeHead:
    queries = find_sites(at.t.cpu(), torch.zeros_like(at.t, device="cpu"))
    keys = find_sites(at.s.cpu(), at.bias.cpu())
    layout = make_envelope_layout(queries, keys, at.gauge, precision)
    return EnvelopeHead(at, value, layout, slopes)


def served_head(problem: Problem, kept: Tensor, slopes: bool) -> EnvelopeHead | None:
    """The head of a problem without leading dimensions; None: `direct` must serve it."""
    if problem.is_gaussian and not problem.scale > 0:
        return None
    at, value = coordinates(problem, kept), problem.value.detach()[kept].double()
    # Comparisons with NaN are false, so each of these also asks for finite numbers.
    if value.numel() and not float(value.abs().amax()) * len(value) <= LARGEST_SUM:
        return None
    extent = float(at.s.max() - at.s.min())
    if not (at.product <= LARGEST_PRODUCT and (extent == 0 or extent >= LEAST_EXTENT)):
        return None
    head = make_envelope_head(at, value, slopes)
    # Numbers that overflow in between may leave a panel without keys.
    complete = all(panel.blocks for panel in head.layout.query)
    served = complete and head.at_nodes.certificate <= TOLERANCE[problem.query.dtype]
    return head if served else None
