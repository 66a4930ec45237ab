"""The layout of a head with a bias per key or Gaussian scores: panels under the envelope.

The same mathematics as csrc/spec/envelope.h and csrc/cpu/envelope. Logits are k(t, s) + c with

    k(t, s) = t s  (gauge 0)  or  -(t - s)^2 / 2  (gauge 1, Gaussian).

The envelope E(t) is the largest logit at t. A key matters at t if its logit is at least E(t) - L.
If s < s' both matter at both t < t', then (t' - t)(s' - s) <= 2 L, so what matters is a band of
thin rectangles, and each is a block of few nodes:

    1. the upper hull, and for every site the t where it comes closest to the envelope;
    2. bins: runs of sites so narrow that one tilt serves them wherever they matter;
    3. query panels, from left to right, as wide as the error bound allows;
    4. key panels, likewise; 5. blocks.

A panel of few sites keeps the sites themselves as nodes, so no layout is ever refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from boltzattn.transform.layout import chebyshev_nodes


class EnvelopePrecision(NamedTuple):
    """Nodes of a panel, and the interpolation error that a layout aims at."""

    nodes: int
    error: float


ENVELOPE_PRECISION = EnvelopePrecision(24, 1e-14)  # of fp64
# Interpolation multiplies rounding errors by the largest weight on a panel over the smallest;
# panels on which the logarithm of that exceeds this are not made.
MOST_AMPLIFICATION = 3.0
FIRST_BINS = 256
# Logits of a Gaussian's keys may differ by this, and by their biases, over a key panel: roundings
# of weights follow them. Keys so far apart do not both matter, unless biases say so.
LARGEST_RISE = 100.0


def score_of(t: Tensor, s: Tensor | float, gauge: float) -> Tensor:
    return -0.5 * (t - s) * (t - s) if gauge else t * s


def rise(t: Tensor | float, s: Tensor, start: Tensor | float, gauge: float) -> Tensor:
    """k(t, s) - k(t, start), without cancellation."""
    return (s - start) * (t - gauge * 0.5 * (s + start))


class InterpolationError:
    """The error of interpolating exp(kappa x) on [-1, 1] in p Chebyshev nodes.

    It is at most 4 sum_{k >= p} I_k(kappa) with I_k <= (kappa / 2)^k / k! exp(kappa^2 / 4 (k + 1)),
    and at most 4 exp(kappa).

    Example:
        >>> error = InterpolationError(12)
        >>> x = torch.linspace(-1, 1, 201, dtype=torch.float64)
        >>> from boltzattn.transform.layout import chebyshev_nodes, lagrange_weights
        >>> found = lagrange_weights(12, x) @ (2 * chebyshev_nodes(12)).exp() - (2 * x).exp()
        >>> bool(found.abs().max() <= error.log_bound(torch.tensor(2.0, dtype=x.dtype)).exp())
        True
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.constant = math.log(4.0) - math.lgamma(nodes + 1)

    def log_bound(self, kappa: Tensor) -> Tensor:
        """The logarithm of the bound."""
        p = self.nodes
        ratio = kappa / (2 * (p + 1))
        crude = math.log(4.0) + kappa
        fine = p * (kappa / 2).log() + kappa * kappa / (4 * (p + 1)) - torch.log1p(-ratio)
        return torch.where(ratio > 0.9, crude, torch.minimum(self.constant + fine, crude))

    def reach(self, log_error: float) -> float:
        """The largest kappa with this bound."""
        low, high = 0.0, 2.0 * self.nodes
        for _ in range(40):
            middle = 0.5 * (low + high)
            small = float(self.log_bound(torch.tensor(middle, dtype=torch.float64))) <= log_error
            low, high = (middle, high) if small else (low, middle)
        return low


# ---- sites ----


class Sites(NamedTuple):
    """The distinct numbers among queries or keys, rising.

    Tokens with equal numbers are one site; its bias is the log of the sum of their weights.
    """

    at: Tensor
    bias: Tensor
    token: Tensor  # the one with the largest bias


def find_sites(x: Tensor, bias: Tensor) -> Sites:
    """The sites of finite numbers with finite biases.

    Example:
        >>> numbers = torch.tensor([2.0, 1.0, 2.0], dtype=torch.float64)
        >>> find_sites(numbers, torch.zeros_like(numbers)).at
        tensor([1., 2.], dtype=torch.float64)
    """
    sorted_x, order = (x + 0.0).sort(stable=True)
    at, counts = sorted_x.unique_consecutive(return_counts=True)
    log_sum, top = _log_sums(bias[order], counts)
    return Sites(at, log_sum, order[top])


def _log_sums(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of consecutive runs of x: the logarithm of the sum of exp, and the place of the largest."""
    run = torch.arange(len(counts)).repeat_interleave(counts)
    start = x.new_full((len(counts),), -math.inf)
    top = start.scatter_reduce(0, run, x, "amax")
    place = torch.where(x == top[run], torch.arange(len(x)), len(x))
    first = torch.full_like(counts, len(x)).scatter_reduce(0, run, place, "amin")
    total = torch.zeros_like(top).index_add_(0, run, (x - top[run]).exp())
    return top + total.log(), first


# ---- the layout ----


class QueryPanel(NamedTuple):
    low: float
    high: float
    direct: bool  # nodes are the sites
    nodes: slice  # of all query nodes
    mean: float  # the mean key at the middle
    log_z: float  # log Z at the middle
    error: float  # bound of the query-side error, relative to Z
    blocks: list[int]  # the key panels that matter here

    @property
    def middle(self) -> float:
        return 0.5 * (self.low + self.high)

    @property
    def half(self) -> float:
        return 0.5 * (self.high - self.low)


class KeyPanel(NamedTuple):
    low: float
    high: float
    direct: bool
    nodes: slice  # of all key nodes
    tilt: float  # the t where queries weigh the panel most
    scale: float  # log of the weight of its keys there, measured from the middle
    top: int  # the token of most weight there: values are measured from its value

    @property
    def middle(self) -> float:
        return 0.5 * (self.low + self.high)

    @property
    def half(self) -> float:
        return 0.5 * (self.high - self.low)


Panel = TypeVar("Panel")


class EnvelopeLayout(NamedTuple):
    gauge: float
    precision: EnvelopePrecision
    slack: float
    query: list[QueryPanel]
    key: list[KeyPanel]
    query_nodes: Tensor  # t
    key_nodes: Tensor  # s
    node_bias: Tensor  # a key node is a key with this bias
    key_error: float  # bound of the key-side error, relative to Z

    def bound(self, panel: QueryPanel, least_z: float) -> float:
        """Of the error of out over max|value| on a query panel, given the least Z of its nodes."""
        errors = math.exp(self.slack) * (panel.error + self.key_error) + 2 * self.precision.error
        return 2 * errors / least_z


class _Bins(NamedTuple):
    """Runs of sites first .. last - 1, rising."""

    at: Tensor  # middle
    half: Tensor
    scale: Tensor  # log weight at its tilt, measured from `at`
    start: Tensor  # of the window of t where they matter
    stop: Tensor
    first: Tensor
    last: Tensor
    token: Tensor  # of most weight


def make_envelope_layout(
    queries: Sites, keys: Sites, gauge: float, precision: EnvelopePrecision = ENVELOPE_PRECISION
) -> EnvelopeLayout:
    """
    Example:
        >>> t = find_sites(torch.linspace(-50, 50, 999, dtype=torch.float64), torch.zeros(999))
        >>> s = find_sites(torch.linspace(-1, 1, 500, dtype=torch.float64), torch.randn(500))
        >>> layout = make_envelope_layout(t, s._replace(bias=s.bias.double()), 0.0)
        >>> len(layout.query) < 20, len(layout.key) < 20
        (True, True)
    """
    return _Maker(queries, keys, gauge, precision).run()


class _Maker:
    """All tensors of a layout are small, fp64, and on the CPU."""

    def __init__(
        self, queries: Sites, keys: Sites, gauge: float, precision: EnvelopePrecision
    ) -> None:
        self.t, self.keys, self.gauge, self.precision = queries.at, keys, gauge, precision
        self.error = InterpolationError(precision.nodes)
        self.log_error = math.log(precision.error)
        log_n = math.log(len(keys.at) + 1)
        self.depth = log_n - self.log_error
        self.slack = min(1.0, 0.5 * self.error.reach(self.log_error))
        self.window = min(log_n, 6.0) - self.log_error + self.slack
        self.largest_rise = LARGEST_RISE + float(keys.bias.abs().max()) if gauge else math.inf
        self.t_min, self.t_max = float(self.t[0]), float(self.t[-1])

    def run(self) -> EnvelopeLayout:
        self.find_hull()
        self.keep_sites()
        self.make_bins()
        self.make_query_panels()
        self.make_key_panels()
        self.make_blocks()
        return EnvelopeLayout(
            self.gauge,
            self.precision,
            self.slack,
            self.query,
            self.key,
            torch.cat(self.query_nodes),
            torch.cat(self.key_nodes) if self.key else self.t.new_empty(0),
            torch.cat(self.node_bias) if self.key else self.t.new_empty(0),
            self.key_error,
        )

    # ---- hull and bins ----

    def find_hull(self) -> None:
        hull: list[int] = []
        cuts: list[float] = []  # where each hands over to the next
        s, c = self.keys.at.tolist(), self.keys.bias.tolist()
        for j in range(len(s)):
            while hull:
                i = hull[-1]
                gap = s[j] - s[i]
                t = 0.5 * self.gauge * (s[i] + s[j]) - (c[j] - c[i]) / gap  # j overtakes i
                if not cuts or t > cuts[-1]:
                    cuts.append(t)
                    break
                hull.pop()
                cuts.pop()
            hull.append(j)
        self.hull = torch.tensor(hull)
        self.hull_at, self.hull_bias = self.keys.at[self.hull], self.keys.bias[self.hull]
        self.cuts = torch.tensor(cuts, dtype=torch.float64)
        ends = self.t[:1], self.clip(self.cuts), self.t[-1:]
        self.edges = torch.cat(ends)  # the cuts, between t_min and t_max

    def clip(self, t: Tensor) -> Tensor:
        return t.clamp(self.t_min, self.t_max)

    def excess(self, t: Tensor, vertex: Tensor, s: Tensor, c: Tensor) -> Tensor:
        """What vertices of the hull exceed keys s with biases c by at t."""
        return rise(t, self.hull_at[vertex], s, self.gauge) + self.hull_bias[vertex] - c

    def keep_sites(self) -> None:
        """The sites that come within `depth` of the envelope, and where they come closest."""
        s, c, token = self.keys
        left = torch.searchsorted(self.hull_at, s, right=True) - 1  # last vertex at or below
        on_hull = self.hull[left] == torch.arange(len(s))
        above = self.edges[left + 1]  # of the edge of the hull above the site
        star = torch.where(on_hull, 0.5 * (self.edges[left] + above), above)
        reigning = torch.searchsorted(self.cuts, star)
        kept = self.excess(star, reigning, s, c) <= self.depth
        self.s, self.c, self.star, self.token = s[kept], c[kept], star[kept], token[kept]

    def windows(self, s: Tensor, scale: Tensor, tilt: Tensor) -> tuple[Tensor, Tensor]:
        """Where bins are within `window` of the envelope.

        The excess of the envelope is convex: bisection over the hull, on either side of the tilt.
        """
        home, bias = torch.searchsorted(self.cuts, tilt), scale + self.window

        def border(side: int) -> Tensor:
            near, far = home, torch.full_like(home, len(self.cuts) if side else 0)
            while bool((active := near != far).any()):
                middle = (near + far + side) // 2
                inside = self.excess(self.edges[middle + 1 - side], middle, s, bias) <= 0
                beyond = middle - 1 if side else middle + 1
                near = torch.where(active & inside, middle, near)
                far = torch.where(active & ~inside, beyond, far)
            top, top_bias = self.hull_at[near], self.hull_bias[near]
            slope = top - s
            crossing = 0.5 * self.gauge * (top + s) - (top_bias - bias) / slope
            crosses = slope > 0 if side else slope < 0
            return torch.where(crosses, self.clip(crossing), self.t_max if side else self.t_min)

        return border(0), border(1)

    def make_bins(self) -> None:
        """Halves runs of sites until one tilt will do for each."""
        step = max(1, len(self.s) // FIRST_BINS)
        first = torch.arange(0, len(self.s), step)
        last = (first + step).clamp(max=len(self.s))
        parts = []
        while len(first):
            at = 0.5 * (self.s[first] + self.s[last - 1])
            half = 0.5 * (self.s[last - 1] - self.s[first])
            middle, counts = (first + last) // 2, last - first
            tilt = self.star[middle]
            run = torch.arange(len(first)).repeat_interleave(counts)
            skipped = first - (counts.cumsum(0) - counts)
            site = torch.arange(len(run)) + skipped[run]
            logits = rise(tilt[run], self.s[site], at[run], self.gauge) + self.c[site]
            scale, top = _log_sums(logits, counts)
            start, stop = self.windows(at, scale, tilt)
            wide = half * torch.maximum(tilt - start, stop - tilt) > self.slack
            wide |= half * (tilt - self.gauge * at).abs() > self.largest_rise
            wide &= counts > 1
            found = _Bins(at, half, scale, start, stop, first, last, self.token[site[top]])
            parts.append([x[~wide] for x in found])
            first, last = (
                torch.cat([first[wide], middle[wide]]),
                torch.cat([middle[wide], last[wide]]),
            )
        bins = _Bins(*(torch.cat(x) for x in zip(*parts, strict=True)))
        order = bins.first.argsort()
        self.bins = _Bins(*(x[order] for x in bins))
        # Monotone bounds of the windows.
        self.reach_start = self.bins.start.flip(0).cummin(0).values.flip(0)
        self.reach_stop = self.bins.stop.cummax(0).values

    def bins_between(self, low: float, high: float) -> Tensor:
        """Numbers of the bins that matter somewhere between two t."""
        begin = int(torch.searchsorted(self.reach_stop, low))
        end = int(torch.searchsorted(self.reach_start, high, right=True))
        matter = (self.bins.start[begin:end] <= high) & (self.bins.stop[begin:end] >= low)
        return matter.nonzero().squeeze(1) + begin

    def logits_of_bins(self, t: Tensor, bins: Tensor) -> Tensor:
        return self.bins.scale[bins] + score_of(t, self.bins.at[bins], self.gauge)

    # ---- panels ----

    def query_panel(self, first: int, last: int) -> tuple[bool, QueryPanel]:
        """A panel of the query sites first .. last - 1, and whether it is good enough."""
        low, high = float(self.t[first]), float(self.t[last - 1])
        t, h = 0.5 * (low + high), 0.5 * (high - low)
        bins = self.bins_between(low, high)
        logits = self.logits_of_bins(self.t.new_tensor(t), bins)
        log_z = logits.logsumexp(0)
        weight, at = (logits - log_z).exp(), self.bins.at[bins]
        mean = weight @ at
        direct = last - first <= self.precision.nodes
        panel = QueryPanel(
            low, high, direct, slice(first, last), float(mean), float(log_z), 0.0, []
        )
        if direct:
            return True, panel
        gap = at - mean
        kappa = (gap.abs() + self.bins.half[bins]) * h
        error = float((logits - log_z + self.error.log_bound(kappa)).exp().sum())
        steep = max(float((logits - log_z + x * gap).logsumexp(0)) for x in (h, -h))
        good = error <= self.precision.error and steep <= MOST_AMPLIFICATION
        return good, panel._replace(error=error)

    def make_query_panels(self) -> None:
        self.query: list[QueryPanel] = []
        self.query_nodes: list[Tensor] = []
        spots, log_zs, self.first_spot = [], [], [0]  # where the key side is checked
        made = 0
        for first, last, panel in _greedy(len(self.t), self.query_panel):
            if panel.direct:
                nodes = spot = self.t[first:last]
            else:
                nodes = panel.middle + panel.half * chebyshev_nodes(self.precision.nodes)
                spot = self.t.new_tensor([panel.low, panel.middle, panel.high])
            bins = self.bins_between(panel.low, panel.high)
            spots.append(spot)
            log_zs.append(self.logits_of_bins(spot[:, None], bins).logsumexp(1))
            self.first_spot.append(self.first_spot[-1] + len(spot))
            self.query_nodes.append(nodes)
            self.query.append(panel._replace(nodes=slice(made, made + len(nodes))))
            made += len(nodes)
        self.spot, self.spot_log_z = torch.cat(spots), torch.cat(log_zs)
        self.query_low = self.t.new_tensor([panel.low for panel in self.query])
        self.query_high = self.t.new_tensor([panel.high for panel in self.query])

    def key_panel(self, first: int, last: int) -> tuple[bool, KeyPanel]:
        """A panel of the bins first .. last - 1, and whether it is good enough."""
        bins = self.bins
        sites = slice(int(bins.first[first]), int(bins.last[last - 1]))
        low, high = float(self.s[sites.start]), float(self.s[sites.stop - 1])
        direct = sites.stop - sites.start <= self.precision.nodes
        top = int(bins.token[first])
        panel = KeyPanel(low, high, direct, sites, 0.0, -math.inf, top)
        here = slice(first, last)
        x = int(torch.searchsorted(self.query_high, bins.start[here].min()))
        y = int(torch.searchsorted(self.query_low, bins.stop[here].max(), right=True))
        if x >= y:  # in a gap between the queries: no query sees it
            return True, panel
        seen = slice(self.first_spot[x], self.first_spot[y])
        spot, s, h = self.spot[seen], panel.middle, panel.half
        g = score_of(spot, s, self.gauge) - self.spot_log_z[seen]
        heavy = spot[g >= g.max() - 1]
        tilt = 0.5 * (float(heavy.min()) + float(heavy.max()))
        weight = bins.scale[here] + rise(tilt, bins.at[here], s, self.gauge)
        scale = float(weight.logsumexp(0))
        top = int(bins.token[first + int(weight.argmax())])
        panel = panel._replace(tilt=tilt, scale=scale, top=top)
        if direct:
            return True, panel
        kappa = (spot - tilt).abs() * h
        error = float((g + scale + self.error.log_bound(kappa)).max())
        amplified = float((g + scale + kappa).max())
        good = error <= self.log_error and amplified <= MOST_AMPLIFICATION
        return good and h * abs(tilt - self.gauge * s) <= self.largest_rise, panel

    def make_key_panels(self) -> None:
        self.key: list[KeyPanel] = []
        self.key_nodes: list[Tensor] = []
        self.node_bias: list[Tensor] = []
        self.panel_of_bin: list[int] = []
        made = 0
        for first, last, panel in _greedy(len(self.bins.at), self.key_panel):
            seen = panel.scale > -math.inf
            self.panel_of_bin += [len(self.key) if seen else -1] * (last - first)
            if not seen:
                continue
            if panel.direct:
                nodes, bias = self.s[panel.nodes], self.c[panel.nodes]
            else:
                nodes = panel.middle + panel.half * chebyshev_nodes(self.precision.nodes)
                bias = panel.scale - rise(panel.tilt, nodes, panel.middle, self.gauge)
            self.key_nodes.append(nodes)
            self.node_bias.append(bias)
            self.key.append(panel._replace(nodes=slice(made, made + len(nodes))))
            made += len(nodes)

    def make_blocks(self) -> None:
        of_bin = torch.tensor(self.panel_of_bin)
        for p, panel in enumerate(self.query):
            matter = of_bin[self.bins_between(panel.low, panel.high)].unique_consecutive()
            self.query[p] = panel._replace(blocks=matter[matter >= 0].tolist())
        self.check_key_side()

    def check_key_side(self) -> None:
        """The bound of the key-side error, over all query panels."""
        self.key_error = 0.0
        direct = torch.tensor([panel.direct for panel in self.key], dtype=torch.bool)
        middle, half, tilt, scale = (
            self.t.new_tensor([getattr(panel, name) for panel in self.key])
            for name in ("middle", "half", "tilt", "scale")
        )
        for p, panel in enumerate(self.query):
            block = torch.tensor(panel.blocks, dtype=torch.int64)
            block = block[~direct[block]]
            if len(block) == 0:
                continue
            seen = slice(self.first_spot[p], self.first_spot[p + 1])
            spot = self.spot[seen, None]
            g = scale[block] + score_of(spot, middle[block], self.gauge)
            kappa = (spot - tilt[block]).abs() * half[block]
            log_error = g - self.spot_log_z[seen, None] + self.error.log_bound(kappa)
            self.key_error = max(self.key_error, float(log_error.exp().sum(1).max()))


def _greedy(
    size: int, propose: Callable[[int, int], tuple[bool, Panel]]
) -> Iterator[tuple[int, int, Panel]]:
    """(first, last, panel) of panels from left to right, each as long as it is good enough.

    A run of one always is. Steps are powers of two, first growing, then shrinking.
    """
    first, guess = 0, 1
    while first < size:
        _, best = propose(first, first + 1)
        last, step, growing = first + 1, guess, True
        while step > 0 and last < size:
            wanted = min(last + step, size)
            good, panel = propose(first, wanted)
            if good:
                best, last = panel, wanted
            else:
                growing = False
            step = 2 * step if growing else step // 2
        yield first, last, best
        guess = 1
        while 4 * guess <= last - first:
            guess *= 2
        first = last
