"""The layout of heads of rank 2 to 4: uniform panels on every axis, tensor products of nodes.

The same numbers as csrc/spec/tensor.h; a test holds the two equal. On axis a, after centring,
queries lie in [-T_a, T_a] and keys in [-S_a, S_a]. A panel of half width h on the key axis
interpolates exp(t s) with |t| h <= kappa, and one on the query axis likewise; each interpolation
errs by at most `error` relative to the exponential itself. docs/tensor.md derives it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from boltzattn.transform.layout import Axis

MOST_AXES = 4  # the largest rank


class TensorPrecision(NamedTuple):
    """A relative error, and by number of nodes the largest kappa that has it."""

    error: float
    reach: dict[int, float]


TENSOR_PRECISION = {
    torch.float64: TensorPrecision(
        1e-14, {8: 0.121, 10: 0.326, 12: 0.646, 14: 1.07, 16: 1.579, 18: 2.157, 20: 2.789}
    ),
    torch.float32: TensorPrecision(
        1e-7, {4: 0.065, 5: 0.175, 6: 0.345, 7: 0.569, 8: 0.836, 10: 1.468, 12: 2.185}
    ),
}
TENSOR_PRECISION[torch.bfloat16] = TENSOR_PRECISION[torch.float16] = TensorPrecision(
    1e-5, {3: 0.061, 4: 0.2, 5: 0.422, 6: 0.705, 8: 1.393, 10: 2.17, 12: 2.994}
)
MOST_TENSOR_NODES = 700  # on one panel: nodes ** rank
MOST_SWING = 9.0  # 2 kappa rank: interpolation multiplies roundings by its exponential
LARGEST_TENSOR_PRODUCT = 1e4  # T_a S_a
MOST_TENSOR_BYTES = 1e9  # of the tables of a head, for backward
# Exponents of panel pairs this far below the largest one are left out.
SKIP = {torch.float64: 40.0, torch.float32: 24.0, torch.bfloat16: 18.0, torch.float16: 18.0}

# Nanoseconds on one core: a multiply-add of the passes over tokens (fp32, fp64) and of the core; a
# token; a head. For pairs see `dispatch.plan`.
TOKEN_PRODUCT, TOKEN_PRODUCT_DOUBLE, CORE_PRODUCT = 0.045, 0.1, 0.075
TOKEN_OVERHEAD, TENSOR_HEAD = 60.0, 40_000.0
CLOUD = 0.6  # the share of panel pairs that hold tokens and matter


class TensorLayout(NamedTuple):
    """Panels of every axis, with the same number of nodes on each; `cost` in nanoseconds."""

    nodes: int
    kappa: float
    query: tuple[Axis, ...]
    key: tuple[Axis, ...]
    cost: float


def tensor_axis(extent: float, other: float, kappa: float, nodes: int) -> Axis:
    """Panels of [-extent, extent] with half * other <= kappa."""
    panels = max(1, math.ceil(extent * other / kappa))
    half = extent * (1 + 1e-12) / panels
    if not half > 0:  # all tokens in one place: any half width that the bound allows
        half = kappa / other if other > 0 else min(kappa, 1.0)
    return Axis(panels, nodes, -half * panels, half)


def choose_tensor_layout(
    dtype: torch.dtype,
    t_most: Sequence[float],
    s_most: Sequence[float],
    tokens: int,
    dv: int,
) -> TensorLayout | None:
    """The cheapest number of nodes for these T_a and S_a; None if none serves."""
    rank, best = len(t_most), None
    if not all(t * s <= LARGEST_TENSOR_PRODUCT for t, s in zip(t_most, s_most, strict=True)):
        return None
    for nodes, kappa in TENSOR_PRECISION[dtype].reach.items():
        if 2 * kappa * rank > MOST_SWING or nodes**rank > MOST_TENSOR_NODES:
            break
        pairs = list(zip(t_most, s_most, strict=True))
        query = tuple(tensor_axis(t, s, kappa, nodes) for t, s in pairs)
        key = tuple(tensor_axis(s, t, kappa, nodes) for t, s in pairs)
        rows = math.prod(axis.size for axis in key)
        if rows * (dv + 1) * 8 * (2 + rank) > MOST_TENSOR_BYTES:
            continue
        product = TOKEN_PRODUCT_DOUBLE if dtype == torch.float64 else TOKEN_PRODUCT
        cost = TENSOR_HEAD + tokens * (nodes**rank * (dv + 1) * product + TOKEN_OVERHEAD)
        cost += CLOUD * core_products(query, key) * (dv + 1) * CORE_PRODUCT
        if best is None or cost < best.cost:
            best = TensorLayout(nodes, kappa, query, key, cost)
    return best


def core_products(query: Sequence[Axis], key: Sequence[Axis]) -> float:
    """Multiply-adds of the core for one column, axis after axis from the last."""
    total, source = 0.0, float(math.prod(axis.size for axis in key))
    for to, of in zip(reversed(query), reversed(key), strict=True):
        total += source * to.size
        source *= to.size / of.size
    return total
