"""The layout of a transform: panels and nodes on the query axis and on the key axis of one head.

The same mathematics as csrc/spec/layout.h; a test holds the two equal. Queries t live in
[t_min, t_max], keys s in [s_min, s_max]; R = s_max - s_min, B = max|t| R.

    query axis: t = tau sinh(u), panels uniform in u;
    key axis:   s - middle = (R / 2) tanh(w) / tanh(W), panels uniform in w on [-W, W].

In these coordinates everything that is interpolated is analytic in a strip of fixed height, so
Chebyshev interpolation with p nodes on panels of half width h errs by about rho^-p, where
rho = r + sqrt(r^2 + 1) and r = height / h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from boltzattn.transform.tolerances import LEAST_NODES, MOST_NODES, NODE_STEP

KEY_STRIP = math.pi / 4  # height of the strip on the key axis


@dataclass(frozen=True)
class Range:
    """What the layout of a head depends on; `keys` counts those that are not masked."""

    t_min: float
    t_max: float
    s_min: float
    s_max: float
    keys: int

    @property
    def key_extent(self) -> float:
        """R; one key, or equal keys, get a width on which B is at most 1."""
        extent = self.s_max - self.s_min
        if extent > 0:
            return extent
        t_most = max(abs(self.t_min), abs(self.t_max))
        return 1 / t_most if t_most > 1 else 1.0

    @property
    def largest_product(self) -> float:
        """B."""
        return max(abs(self.t_min), abs(self.t_max)) * self.key_extent


@dataclass(frozen=True)
class Axis:
    """`panels` panels of half width `half` from `origin` on, with `nodes` nodes each."""

    panels: int
    nodes: int
    origin: float
    half: float

    @property
    def size(self) -> int:
        """Nodes of all panels together."""
        return self.panels * self.nodes

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Warped coordinates of all nodes, panel by panel, [size] fp64."""
        panel = torch.arange(self.panels, dtype=torch.float64, device=device)
        node = chebyshev_nodes(self.nodes, device)
        return (self.origin + self.half * ((2 * panel + 1)[:, None] + node)).flatten()

    def locate(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Panel (int64) and place in [-1, 1] on it of warped coordinates u."""
        f = (u - self.origin) * (0.5 / self.half)
        panel = f.long().clamp(0, self.panels - 1)
        return panel, 2 * (f - panel) - 1


@dataclass(frozen=True)
class Layout:
    """Both axes of a head and the constants of their warps."""

    query: Axis
    key: Axis
    tau: float  # scale of the query axis
    middle: float  # of the keys
    radius: float  # (R / 2) / tanh(W)
    s_min: float
    s_max: float
    query_strip: float  # height of the strip on the query axis

    def warp_queries(self, t: Tensor) -> Tensor:
        """u of queries t."""
        return torch.asinh(t / self.tau)

    def warp_keys(self, s: Tensor) -> Tensor:
        """w of keys s."""
        return torch.atanh((s - self.middle) / self.radius)

    def query_nodes(self, device: torch.device | str | None = None) -> Tensor:
        """t of all query nodes, [query.size] fp64."""
        return self.tau * self.query.positions(device).sinh()

    def key_nodes(self, device: torch.device | str | None = None) -> Tensor:
        """s of all key nodes, measured from `middle`, [key.size] fp64."""
        return self.radius * self.key.positions(device).tanh()

    def first_positive_panel(self) -> int:
        """Query panels from here on measure logits from the key s_max, those before from s_min.

        That is the key with the largest weight. On the panel around t = 0 either end will do,
        since B is small there.
        """
        axis = self.query
        return sum(axis.origin + axis.half * (2 * k + 1) < 0 for k in range(axis.panels))


def chebyshev_nodes(nodes: int, device: torch.device | str | None = None) -> Tensor:
    """Nodes on [-1, 1], from right to left, [nodes] fp64."""
    points = [math.cos((2 * i + 1) * math.pi / (2 * nodes)) for i in range(nodes)]
    return torch.tensor(points, dtype=torch.float64, device=device)


def lagrange_weights(nodes: int, place: Tensor) -> Tensor:
    """Weights of the Lagrange basis on the Chebyshev nodes at fp64 places [n], [n, nodes].

    Products from both ends keep every factor and divide by nothing that could vanish.

    Example:
        >>> place = torch.linspace(-1, 1, 5, dtype=torch.float64)
        >>> weights = lagrange_weights(8, place)
        >>> torch.allclose(weights @ chebyshev_nodes(8) ** 3, place**3)
        True
    """
    node = chebyshev_nodes(nodes, place.device)
    factor = 1 / (node[:, None] - node).fill_diagonal_(1).prod(1)
    gap = place[:, None] - node
    one = torch.ones_like(gap[:, :1])
    left = torch.cat([one, gap[:, :-1].cumprod(1)], 1)
    right = torch.cat([one, gap[:, 1:].flip(1).cumprod(1)], 1).flip(1)
    return left * right * factor


def panel_half_width(strip: float, nodes: int, precision: float) -> float:
    """Half width of a panel on which `nodes` nodes reach `precision` in a strip of this height."""
    rho = math.pow(1 / precision, 1 / nodes)
    return 2 * strip / (rho - 1 / rho)


def make_axis(low: float, high: float, strip: float, nodes: int, precision: float) -> Axis:
    """The fewest panels over [low, high] that reach `precision`."""
    widest = panel_half_width(strip, nodes, precision)
    panels = max(1, math.ceil((high - low) / (2 * widest)))
    if high > low:
        return Axis(panels, nodes, low, (high - low) / (2 * panels))
    # All tokens in one place: nodes around it, no farther than it is from 0.
    half = widest if low == 0 else min(widest, abs(low) / 2)
    return Axis(1, nodes, low - half, half)


def make_layout(span: Range, query_nodes: int, key_nodes: int, precision: float) -> Layout:
    """The layout with these numbers of nodes on a panel.

    Example:
        >>> layout = make_layout(Range(-3.0, 3.0, -1.0, 2.0, keys=1000), 16, 16, 1e-8)
        >>> layout.query.panels, layout.key.panels
        (7, 3)
    """
    extent = span.key_extent
    query_strip = math.pi / (4 * math.log(span.keys + 2))
    tau = 2 / (extent * math.sin(query_strip))
    edge = 0.5 * math.log(max(span.largest_product, 4.0))
    return Layout(
        query=make_axis(
            math.asinh(span.t_min / tau),
            math.asinh(span.t_max / tau),
            query_strip,
            query_nodes,
            precision,
        ),
        # The a-priori bound on this side adds up over the keys.
        key=make_axis(-edge, edge, KEY_STRIP, key_nodes, precision / math.sqrt(span.keys)),
        tau=tau,
        middle=0.5 * span.s_min + 0.5 * span.s_max,
        radius=extent / 2 / math.tanh(edge),
        s_min=span.s_min,
        s_max=span.s_max,
        query_strip=query_strip,
    )


def layout_cost(layout: Layout, n_q: int, n_k: int, dv: int) -> float:
    """Multiply-adds of forward: what the choice of nodes weighs.

    A core entry costs an exponential besides its products.
    """
    core = float(layout.query.size) * layout.key.size * (2.0 * (dv + 1) + 50)
    return core + float(dv + 1) * (float(n_q) * layout.query.nodes + float(n_k) * layout.key.nodes)


def choose_layout(span: Range, n_q: int, n_k: int, dv: int, precision: float) -> Layout:
    """The cheapest layout that reaches `precision`."""
    choices = range(LEAST_NODES, MOST_NODES + 1, NODE_STEP)
    layouts = (make_layout(span, p, q, precision) for p in choices for q in choices)
    return min(layouts, key=lambda layout: layout_cost(layout, n_q, n_k, dv))
