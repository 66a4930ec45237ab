"""The layout of a scan: panels and nodes on the query axis alone.

The same mathematics as csrc/spec/scan.h; a test holds the two equal. One panel of half width
`edges[0]` lies around t = 0, where keys are measured from their middle. On either side follow
`levels` panels [a, ratio a], where they are measured from the end of most weight. docs/transform.md
derives the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.transform.layout import chebyshev_nodes
from boltzattn.transform.tolerances import LEAST_NODES, MOST_NODES, NODE_STEP

# The error of interpolation that a scan may have, relative to the largest value.
SCAN_PRECISION = {
    torch.float64: 1e-15,
    torch.float32: 1e-7,
    torch.bfloat16: 1e-4,
    torch.float16: 1e-5,
}
WIDEST_RATIO = 2.5  # rounding errors of the nodes grow with it
LARGEST_KAPPA = 3.6  # rounding errors of the nodes grow like exp(2 kappa)
MOST_LEVELS = 64


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
        x = chebyshev_nodes(self.nodes, device)
        edges = torch.tensor(self.edges, dtype=torch.float64, device=device)
        low, high = edges[:-1, None], edges[1:, None]
        outer = 0.5 * (low + high) + 0.5 * (high - low) * x
        return torch.cat([edges[:1, None] * x, outer, -outer])

    def locate(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Panel (int64) of queries t, and their place on it; for t < 0 the place of -t."""
        edges = torch.tensor(self.edges, dtype=torch.float64, device=t.device)
        level = torch.searchsorted(edges[:-1].contiguous(), t.abs())
        outer = level > 0
        high, low = edges[level], edges[(level - 1).clamp(min=0)]
        place = (2 * t.abs() - (high + low)) / (high - low).where(outer, 1.0)
        panel = torch.where(outer & (t < 0), self.levels + level, level)
        return panel, torch.where(outer, place, t / edges[0] if self.edges[0] > 0 else 0.0)

    def measured_from_high(self, panel: Tensor) -> Tensor:
        return (panel > 0) & (panel <= self.levels)


def scan_error(nodes: int, ratio: float) -> float:
    """The largest error of one key on an outer panel."""
    x = (ratio + 1) / (ratio - 1)
    rho = x + math.sqrt(x * x - 1)
    return 4 / (rho - 1) * rho**-nodes


def scan_ratio(precision: float, nodes: int, keys: int) -> float:
    """The largest ratio for which `keys` such errors add up to `precision` at most."""
    wanted = 4 * keys / precision
    rho = max(2.0, wanted ** (1 / nodes))  # wanted = (rho - 1) rho^nodes, from above
    for _ in range(2):
        rho = max(2.0, (wanted / (rho - 1)) ** (1 / nodes))
    x = (rho + 1 / rho) / 2
    return min(WIDEST_RATIO, (x + 1) / (x - 1))


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
    return low


def scan_layout_of(t_most: float, nodes: int, levels: int, ratio: float) -> ScanLayout:
    """A layout of given sizes. More levels split the central panel and leave the others."""
    edges = tuple(t_most * ratio ** (k - levels) for k in range(levels + 1))
    return ScanLayout(nodes, levels, ratio, edges)


def make_scan_layout(
    dtype: torch.dtype, t_most: float, extent: float, keys: int
) -> ScanLayout | None:
    """The layout with fewest nodes for queries |t| <= t_most and keys `extent` apart at most."""
    precision = SCAN_PRECISION[dtype]
    best = None
    for nodes in range(LEAST_NODES, MOST_NODES + 1, NODE_STEP):
        ratio = scan_ratio(precision, nodes, max(keys, 1))
        reach = t_most * extent / 2 / scan_kappa(precision, nodes)
        levels = math.ceil(math.log(reach) / math.log(ratio)) if 1 < reach < math.inf else 0
        if reach == math.inf or levels > MOST_LEVELS:
            continue
        if best is None or nodes * (2 * levels + 1) < best[0] * (2 * best[1] + 1):
            best = nodes, levels, ratio
    if best is None:
        return None
    return scan_layout_of(t_most, *best)


class StreamState(NamedTuple):
    """The state of streams: sums over their tokens at the nodes of the query axis, all fp64."""

    layout: ScanLayout
    positions: Tensor  # [features]: t of the nodes
    sums: Tensor  # [heads, features, head_dim in whole vectors]
    z: Tensor  # [heads, features]
    ends: Tensor  # [heads, 2]: the largest and the smallest key

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.sums, self.z, self.ends
