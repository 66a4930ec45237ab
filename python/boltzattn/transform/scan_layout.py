"""The layout of a scan: panels and nodes on the query axis alone.

The same mathematics as csrc/spec/scan.h; a test holds the two equal. One panel of half width
`edges[0]` lies around t = 0, where keys are measured from their middle. On either side follow
`levels` panels [a, ratio a], where they are measured from the end of most weight. docs/transform.md
derives the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from boltzattn.transform.layout import chebyshev_nodes, lagrange_weights
from boltzattn.transform.tolerances import LEAST_NODES, MOST_NODES, NODE_STEP

# The error of interpolation that a scan may have, relative to the largest value.
SCAN_PRECISION = {
    torch.float64: 1e-15,
    torch.float32: 1e-7,
    torch.bfloat16: 1e-4,
    torch.float16: 1e-5,
}
WIDEST_RATIO = 3.5  # rounding errors of the nodes grow with it
LARGEST_KAPPA = 3.0  # rounding errors of the nodes grow like exp(2 kappa)
MOST_LEVELS = 64
ROOM = 16  # tokens of a stream that may wait beside its table


@dataclass(frozen=True)
class ScanLayout:
    """Panel 0 is the central one; then those of t > 0, outwards, then those of t < 0."""

    nodes: int  # of a panel
    levels: int  # panels on either side of the central one
    ratio: float
    edges: tuple[float, ...]  # [levels + 1]: ends of the panels, from the central one outwards

    @property
    def panels(self) -> int:
        return 2 * self.levels + 1

    @property
    def features(self) -> int:
        """Nodes of all panels together."""
        return self.panels * self.nodes

    def nodes_of_panels(self, device: torch.device | str | None = None) -> Tensor:
        """t of all nodes, [panels, nodes] fp64."""
        edges = torch.tensor(self.edges, dtype=torch.float64, device=device)
        outer = edges[1:, None] * outer_nodes(self.nodes, self.ratio, device)
        return torch.cat([edges[:1, None] * chebyshev_nodes(self.nodes, device), outer, -outer])

    def locate(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Panels (int64) of queries t [n], and the weights of their nodes there, [n, nodes]."""
        edges = torch.tensor(self.edges, dtype=torch.float64, device=t.device)
        level = torch.searchsorted(edges[:-1].contiguous(), t.abs())
        outer = level > 0
        panel = torch.where(outer & (t < 0), self.levels + level, level)
        place = t / edges[0] if self.edges[0] > 0 else torch.zeros_like(t)
        central = lagrange_weights(self.nodes, place.where(~outer, 0.0))
        place = (t.abs() / edges[level]).where(outer, 1.0)
        return panel, torch.where(
            outer[:, None], outer_weights(self.nodes, self.ratio, place), central
        )

    def measured_from_high(self, panel: Tensor) -> Tensor:
        return (panel > 0) & (panel <= self.levels)


def outer_nodes(nodes: int, ratio: float, device: torch.device | str | None = None) -> Tensor:
    """Nodes of an outer panel, relative to its outer end: Chebyshev's in log t."""
    half: Tensor = 0.5 * (chebyshev_nodes(nodes, device) - 1)
    return ratio**half


def outer_weights(nodes: int, ratio: float, place: Tensor) -> Tensor:
    """Weights of an outer panel's nodes at fp64 places [n], [n, nodes].

    Lagrange's basis with poles at the mirror images -x_b of the nodes: the best approximation of
    exp(-x d) by exp(-x_b d) over all d >= 0, in L2.
    """
    node = outer_nodes(nodes, ratio, place.device)
    factor = (node[:, None] + node).prod(1) / (node[:, None] - node).fill_diagonal_(1).prod(1)
    gap = place[:, None] - node
    one = torch.ones_like(gap[:, :1])
    left = torch.cat([one, gap[:, :-1].cumprod(1)], 1)
    right = torch.cat([one, gap[:, 1:].flip(1).cumprod(1)], 1).flip(1)
    return left * right * factor / (place[:, None] + node).prod(1, keepdim=True)


def scan_error(nodes: int, ratio: float) -> float:
    """The largest error of one key on an outer panel."""
    root = math.sqrt(ratio)
    return 3 * float(((root - 1) / (2 * (root + 1))) ** nodes)


def scan_ratio(precision: float, nodes: int, keys: int) -> float:
    """The largest ratio for which `keys` such errors add up to `precision` at most."""
    q = (precision / (3 * max(keys, 1))) ** (1 / nodes)
    if q >= 0.25:
        return WIDEST_RATIO
    root = (1 + 2 * q) / (1 - 2 * q)
    return min(WIDEST_RATIO, root * root)


@lru_cache
def scan_kappa(precision: float, nodes: int) -> float:
    """The largest kappa for which the central panel reaches `precision`, to four digits."""

    def error(kappa: float) -> float:
        rhos = (1 + 0.05 * i for i in range(1, 400))
        return min(
            math.log(4 / (rho - 1)) - nodes * math.log(rho) + kappa * ((rho + 1 / rho) / 2 + 1)
            for rho in rhos
        )

    low, high = 0.01, LARGEST_KAPPA
    if error(high) <= math.log(precision):
        return high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) <= math.log(precision) else (low, middle)
    return round(low, 4)


def scan_layout_of(t_most: float, nodes: int, levels: int, ratio: float) -> ScanLayout:
    """A layout of given sizes. More levels split the central panel and leave the others."""
    edges = tuple(t_most * ratio ** (k - levels) for k in range(levels + 1))
    return ScanLayout(nodes, levels, ratio, edges)


def make_scan_layout(
    dtype: torch.dtype, t_most: float, extent: float, keys: int
) -> ScanLayout | None:
    """The layout for queries |t| <= t_most and keys `extent` apart at most.

    A token is added to all nodes and reads those of one panel, so their sum is smallest.
    """
    precision = SCAN_PRECISION[dtype]
    best = None
    for nodes in range(LEAST_NODES, MOST_NODES + 1, NODE_STEP):
        ratio = scan_ratio(precision, nodes, keys)
        reach = t_most * extent / 2 / scan_kappa(precision, nodes)
        levels = math.ceil(math.log(reach) / math.log(ratio)) if 1 < reach < math.inf else 0
        if reach == math.inf or levels > MOST_LEVELS:
            continue
        if best is None or nodes * (levels + 1) < best[0] * (best[1] + 1):
            best = (
                nodes,
                levels,
                reach ** (1 / levels) if levels else ratio,
            )  # no wider than necessary
    if best is None:
        return None
    return scan_layout_of(t_most, *best)


@dataclass(frozen=True)
class StreamState:
    """The state of streams: sums over their tokens at the nodes of the query axis, in fp64.

    Tokens that come one by one may wait beside the table, and are added to it together.
    """

    layout: ScanLayout
    positions: Tensor  # [features]: t of the nodes
    sums: Tensor  # [heads, features, head_dim in whole vectors]
    z: Tensor  # [heads, features]
    ends: Tensor  # [heads, 2]: the largest and the smallest key of the table
    keys: Tensor  # [heads, ROOM]: of tokens that wait
    values: Tensor  # [heads, ROOM, head_dim in whole vectors]
    waiting: Tensor  # [1] int64, on the CPU: how many these are

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What changes from token to token."""
        return self.sums, self.z, self.ends, self.keys, self.values, self.waiting

    @cached_property
    def arguments(self) -> tuple[Tensor | float | int, ...]:
        """Of the operators."""
        layout = self.layout
        sizes = layout.edges[-1], layout.ratio, layout.nodes, layout.levels
        return *self.tensors, self.positions, *sizes
