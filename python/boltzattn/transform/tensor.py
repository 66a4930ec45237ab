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
from boltzattn.transform.stages import TensorRange
from boltzattn.transform.tolerances import LARGEST_PRODUCT

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
# token; a head; an entry of a table that a chunk reads and writes; a pair of `direct`, each of its
# columns, and how much longer fp64 takes.
TOKEN_PRODUCT, TOKEN_PRODUCT_DOUBLE, CORE_PRODUCT = 0.045, 0.1, 0.075
TOKEN_OVERHEAD, TENSOR_HEAD, CHUNK_ENTRY = 60.0, 40_000.0, 0.6
DIRECT_PAIR, DIRECT_PAIR_COLUMN, DIRECT_DOUBLE = 0.75, 0.022, 2.3
CLOUD = 0.6  # the share of panel pairs that hold tokens and matter
CHUNK_UNIT = 64


class TensorLayout(NamedTuple):
    """Panels of every axis, with the same number of nodes on each; `cost` in nanoseconds.

    chunk: how many tokens of a causal head go pair by pair; 0 if it is not causal.
    """

    nodes: int
    kappa: float
    query: tuple[Axis, ...]
    key: tuple[Axis, ...]
    cost: float
    chunk: int = 0


def direct_cost(dtype: torch.dtype, pairs: float, rank: int, dv: int) -> float:
    """Nanoseconds of `direct`."""
    cost = pairs * (DIRECT_PAIR + DIRECT_PAIR_COLUMN * (rank + dv))
    return cost * (DIRECT_DOUBLE if dtype == torch.float64 else 1.0)


def choose_chunk(dtype: torch.dtype, rows: int, once: float, rank: int, dv: int) -> int:
    """How many tokens of a causal head go pair by pair.

    A chunk goes through the core once, which takes `once` nanoseconds; the best chunk has pairs
    that take about as long.
    """
    best = math.sqrt(2.0 * once / direct_cost(dtype, 1.0, rank, dv))
    largest = CHUNK_UNIT * math.ceil(rows / (4 * CHUNK_UNIT))
    return min(largest, max(CHUNK_UNIT, CHUNK_UNIT * math.floor(best / CHUNK_UNIT + 0.5)))


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
    rows: int = 0,
) -> TensorLayout | None:
    """The cheapest number of nodes for these T_a and S_a; None if none serves.

    rows: in causal calls, the queries with a key of their own place.
    """
    rank, best = len(t_most), None
    if not all(t * s <= LARGEST_TENSOR_PRODUCT for t, s in zip(t_most, s_most, strict=True)):
        return None
    for nodes, kappa in TENSOR_PRECISION[dtype].reach.items():
        if 2 * kappa * rank > MOST_SWING or nodes**rank > MOST_TENSOR_NODES:
            break
        pairs = list(zip(t_most, s_most, strict=True))
        query = tuple(tensor_axis(t, s, kappa, nodes) for t, s in pairs)
        key = tuple(tensor_axis(s, t, kappa, nodes) for t, s in pairs)
        rows_of_keys = math.prod(axis.size for axis in key)
        if rows_of_keys * (dv + 1) * 8 * (2 + rank) > MOST_TENSOR_BYTES:
            continue
        product = TOKEN_PRODUCT_DOUBLE if dtype == torch.float64 else TOKEN_PRODUCT
        cost = TENSOR_HEAD + tokens * (nodes**rank * (dv + 1) * product + TOKEN_OVERHEAD)
        once, chunk = _core_cost(query, key, dv), 0
        if rows > 0:
            once += rows_of_keys * (dv + 1) * CHUNK_ENTRY
            chunk = choose_chunk(dtype, rows, once, rank, dv)
            once = once * math.ceil(rows / chunk) + direct_cost(dtype, 0.5 * rows * chunk, rank, dv)
        if best is None or cost + once < best.cost:
            best = TensorLayout(nodes, kappa, query, key, cost + once, chunk)
    return best


def _core_cost(query: Sequence[Axis], key: Sequence[Axis], dv: int) -> float:
    return CLOUD * core_products(query, key) * (dv + 1) * CORE_PRODUCT


def core_products(query: Sequence[Axis], key: Sequence[Axis]) -> float:
    """Multiply-adds of the core for one column, axis after axis from the last."""
    total, source = 0.0, float(math.prod(axis.size for axis in key))
    for to, of in zip(reversed(query), reversed(key), strict=True):
        total += source * to.size
        source *= to.size / of.size
    return total


# A core that takes longer, in nanoseconds, is not for processes that share a sequence; nor are
# logits to which a mean query adds more than this on a panel of keys.
LARGEST_SHARED_CORE, MOST_TILT = 1e9, 300.0


def shared_layout(of: TensorRange, dtype: torch.dtype, dv: int) -> TensorLayout | None:
    """The layout of a head whose tokens are in several processes; None if none serves."""
    t_most, s_most = of.t_most, of.s_most
    if not all(math.isfinite(x) for x in (*t_most, *s_most, *of.t_middle, *of.s_middle)):
        return None
    layout = choose_tensor_layout(dtype, t_most, s_most, int(of.tokens), dv)
    if layout is None or _core_cost(layout.query, layout.key, dv) > LARGEST_SHARED_CORE:
        return None
    if sum(2 * abs(m) * x.half for m, x in zip(of.t_middle, layout.key, strict=True)) > MOST_TILT:
        return None
    largest = [
        (abs(m) + t) * (abs(c) + s)
        for m, t, c, s in zip(of.t_middle, t_most, of.s_middle, s_most, strict=True)
    ]
    return layout if sum(largest) <= LARGEST_PRODUCT else None


class TensorReport(NamedTuple):
    """What the C++ kernels make of a head: a row of `cpu_transform_report`, at rank 2 to 4."""

    served: bool
    error: float  # of out, relative to the largest |value|
    nodes: int
    product: tuple[float, ...]  # B by axis
    panels: tuple[int, ...]  # by axis, of queries and of keys
    apart: tuple[int, int]  # queries and keys that are computed pair by pair
    cost: float  # nanoseconds on one thread
    direct_cost: float
    chunk: int  # as in TensorLayout

    @classmethod
    def of(cls, row: Sequence[float], rank: int) -> TensorReport:
        served, error, _, _, nodes, _, _, *more = row
        by_axis = [more[MOST_AXES * k : MOST_AXES * k + rank] for k in range(3)]
        queries, keys, cost, direct, chunk = more[3 * MOST_AXES :]
        panels = tuple(map(int, by_axis[1]))
        apart = int(queries), int(keys)
        return cls(
            served == 1.0, error, int(nodes), tuple(by_axis[0]), panels, apart, cost, direct,
            int(chunk),
        )  # fmt: skip

    def describe(self) -> str:
        times = f"about {self.cost / 1e6:.3g} ms on one thread, direct {self.direct_cost / 1e6:.3g}"
        if self.nodes == 0 and self.served:
            return "no query sees a key"
        if self.nodes == 0:
            return (
                "direct: NaN, infinity or logits beyond what the transform takes "
                f"({LARGEST_PRODUCT:g}), or no layout in a gigabyte"
            )
        reach = " and ".join(f"{x:.3g}" for x in self.product)
        if not self.served:
            why = f"panels would take {times}" if self.cost >= self.direct_cost else "its numbers"
            return f"direct: {why}; B {reach}"
        words = [
            f"B {reach}",
            f"{' x '.join(map(str, self.panels))} panels of {self.nodes} nodes an axis",
        ]
        if any(self.apart):
            words.append(f"{self.apart[0]} queries and {self.apart[1]} keys pair by pair")
        if self.chunk:
            words.append(f"chunks of {self.chunk} tokens")
        words.append(f"error at most {self.error:.1e} of the largest |value|")
        return "; ".join([*words, times])
