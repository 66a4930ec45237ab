"""The state of a stream with a bias per key, ALiBi, Gaussian scores, or ranks above 1.

Logits are t s_j + c_j up to a function of the query: Gaussian scores put -s_j^2 / 2 into c_j, and
ALiBi adds slope (j - i). With a bias any key may have the most weight, so panels are uniform: on
|t - middle| <= half, with keys |s| <= key_bound,

    exp(t s_j) = sum_a l_a(t) exp(t_a s_j)

holds to the same relative error for every key, and hence for all sums over keys. At rank 2 to 4
panels and nodes are tensor products of those of the axes. A panel is measured from `top`, a logit
at its middle, at most SLACK below the largest one so far. Slopes are counted from the last token,
so `top` falls as tokens arrive, and numbers stay small in streams of any length. Plain torch, fp64.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boltzattn.compose.plain_table import check_largest, checked_entry
from boltzattn.transform.envelope import EnvelopePrecision, InterpolationError
from boltzattn.transform.layout import chebyshev_nodes, lagrange_weights

# Nodes of a panel, and the error of a weight relative to itself.
STREAM_PRECISION = {
    torch.float64: EnvelopePrecision(24, 1e-14),
    torch.float32: EnvelopePrecision(12, 1e-8),
    torch.bfloat16: EnvelopePrecision(8, 1e-5),
    torch.float16: EnvelopePrecision(8, 1e-5),
}
# Nodes on an axis that a stream of rank 2 to 4 chooses from; the fewest features are best there.
TENSOR_NODES = (4, 6, 8, 10, 12, 16, 20, 24, 32)
# Interpolation multiplies the roundings of fp64 by exp(2 half |s|) on every axis.
MOST_ROUNDING = {
    torch.float64: 1e-12,
    torch.float32: 1e-8,
    torch.bfloat16: 1e-5,
    torch.float16: 1e-5,
}
MOST_FEATURES, MOST_TENSOR_FEATURES = 8192, 32_768
TOKENS_AT_ONCE = 128
# Tables are moved only if a logit is this much above `top`: weights may be as large as exp(SLACK).
SLACK = 40.0


@lru_cache
def panel_reach(precision: EnvelopePrecision) -> float:
    """The largest half |s| of a panel: an error of `precision` times the smallest weight on it."""
    error = InterpolationError(precision.nodes)
    low, high = 0.0, 2.0 * precision.nodes
    for _ in range(40):
        kappa = 0.5 * (low + high)
        bound = float(error.log_bound(torch.tensor(kappa, dtype=torch.float64))) + kappa
        low, high = (kappa, high) if bound <= math.log(precision.error) else (low, kappa)
    return low


class Bounds(NamedTuple):
    """What a stream was declared for: the largest |query| and |key| on every axis."""

    query: tuple[float, ...]
    key: tuple[float, ...]


def _choose_panels(products: tuple[float, ...], dtype: torch.dtype) -> tuple[int, list[int]]:
    """Nodes of a panel on an axis, and the panels of every axis, for the largest |t s| there."""
    precision, rank = STREAM_PRECISION[dtype], len(products)
    if rank == 1:
        choices = [(precision.nodes, panel_reach(precision))]
    else:
        swing = math.log(MOST_ROUNDING[dtype] / torch.finfo(torch.float64).eps) / (2 * rank)
        choices = [
            (nodes, min(swing, panel_reach(EnvelopePrecision(nodes, precision.error))))
            for nodes in TENSOR_NODES
        ]
    found = [
        (nodes, [max(1, math.ceil(min(x / reach, 1e9))) for x in products])
        for nodes, reach in choices
    ]
    return min(found, key=lambda one: math.prod(one[0] * panels for panels in one[1]))


class BiasedTable:
    """Sums over all tokens at the nodes of uniform panels, each measured from its `top`."""

    def __init__(
        self,
        lead: tuple[int, ...],
        head_dim: int,
        bounds: Bounds,
        scale: float,
        is_gaussian: bool,
        slopes: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.lead, self.head_dim, self.bounds, self.device = lead, head_dim, bounds, device
        self.is_gaussian = is_gaussian
        self.query_factor = math.sqrt(scale) if is_gaussian else scale
        self.key_factor = math.sqrt(scale) if is_gaussian else 1.0
        self.t_most = [abs(self.query_factor) * x for x in bounds.query]
        self.rank = len(self.t_most)
        self.slopes = None
        if slopes is not None:
            self.slopes = slopes.to(device, torch.float64).expand(lead).reshape(-1, 1)
        products = tuple(
            t * self.key_factor * s for t, s in zip(self.t_most, bounds.key, strict=True)
        )
        self.nodes, self.panels = _choose_panels(products, dtype)
        features = math.prod(self.nodes * panels for panels in self.panels)
        most = MOST_FEATURES if self.rank == 1 else MOST_TENSOR_FEATURES
        if not features <= most:
            raise ValueError(
                "query_bound times key_bound must be smaller: logits up to "
                f"{' and '.join(f'{x:g}' for x in products)} need more "
                f"than {most} nodes a head; scale queries or keys down, or keep keys and "
                "values and call attention"
            )
        self.half = [t / panels for t, panels in zip(self.t_most, self.panels, strict=True)]
        self.middles = [
            (2 * torch.arange(panels, dtype=torch.float64, device=device) + 1 - panels) * half
            for panels, half in zip(self.panels, self.half, strict=True)
        ]
        self.middle = _product(self.middles)  # [panels of all axes, rank]
        self.offset = _product([half * chebyshev_nodes(self.nodes, device) for half in self.half])
        heads, panels, nodes = math.prod(lead), len(self.middle), len(self.offset)
        new = torch.zeros(heads, panels, nodes, head_dim + 1, dtype=torch.float64, device=device)
        self.sums, self.top = new, new.new_full((heads, panels), -math.inf)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.sums, self.top

    # ---- tokens ----

    def append(self, key: Tensor, value: Tensor, key_bias: Tensor | None = None) -> None:
        self._add(*self._checked(key, value, key_bias))

    def query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return self._read(query, self._t_of(query))

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None = None
    ) -> Tensor:
        """Append, then query; does neither if it raises."""
        t = self._t_of(query)
        self._add(*self._checked(key, value, key_bias))
        return self._read(query, t)[0]

    def merge(self, other: BiasedTable, tokens: int) -> None:
        """Take in the tokens of another table, as if they came after those of this one."""
        self._grow_older(tokens)
        higher = torch.maximum(self.top, other.top)
        self._measure_from(higher)
        self.sums += other.sums * _decay(other.top, higher)[..., None, None]

    def _t_of(self, query: Tensor) -> Tensor:
        t = query.double().reshape(-1, *query.shape[-2:]) * self.query_factor
        for a, (most, bound) in enumerate(zip(self.t_most, self.bounds.query, strict=True)):
            largest = float(t[..., a].abs().amax()) if t.numel() else 0.0
            check_largest(largest, most * (1 + 1e-12), query[..., a], bound)
        return t

    def _checked(
        self, key: Tensor, value: Tensor, key_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(s, v, c) of tokens, fp64. A key whose bias is -inf is hidden, whatever it holds."""
        n = key.shape[-2]
        s = key.double().reshape(-1, n, self.rank)
        v = value.double().reshape(-1, n, self.head_dim)
        c = torch.zeros_like(s[..., 0])
        if key_bias is not None:
            c = key_bias.double().expand(*self.lead, n).reshape(-1, n)
            hidden = c == -math.inf
            s, v = (x.masked_fill(hidden[..., None], 0.0) for x in (s, v))
            if not bool((c < math.inf).all()):
                raise ValueError("key_bias must be finite or -inf, got NaN or inf")
        if not bool(s.isfinite().all() and v.isfinite().all()):
            raise ValueError(
                "key and value must be finite: a stream cannot take back what was appended"
            )
        for a, bound in enumerate(self.bounds.key):
            largest = float(s[..., a].abs().amax()) if s.numel() else 0.0
            if largest > bound * (1 + 1e-12):
                raise ValueError(
                    f"key must be within key_bound = {bound:g}, got {largest:g}; scale the keys "
                    "down, or build the stream with a larger key_bound"
                )
        s = s * self.key_factor
        return s, v, c - 0.5 * s.square().sum(-1) if self.is_gaussian else c

    def _add(self, s: Tensor, v: Tensor, c: Tensor) -> None:
        for some, rows, bias in zip(
            *(x.split(TOKENS_AT_ONCE, 1) for x in (s, v, c)),
            strict=True,
        ):
            n = some.shape[1]
            self._grow_older(n)
            if self.slopes is not None:
                bias = bias + self.slopes * torch.arange(1 - n, 1, device=self.device)
            logit = self.middle @ some.mT + bias[:, None]  # [heads, panels, n]
            highest = logit.amax(-1)
            above = highest > self.top + SLACK
            if bool(above.any()):
                self._measure_from(torch.where(above, highest, self.top))
            at_middle = (logit - _finite(self.top)[..., None]).exp()
            at_node = (self.offset @ some.mT).exp()  # [heads, nodes, n]
            weight = (at_middle[:, :, None] * at_node[:, None]).flatten(1, 2)
            with_one = torch.cat([rows, torch.ones_like(rows[..., :1])], -1)
            self.sums.flatten(1, 2).baddbmm_(weight, with_one)

    def _grow_older(self, tokens: int) -> None:
        """Count distances from a token that comes `tokens` later."""
        if self.slopes is not None:
            self.top = self.top - self.slopes * tokens

    def _measure_from(self, top: Tensor) -> None:
        self.sums *= _decay(self.top, top)[..., None, None]
        self.top = top

    def _read(self, query: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        heads = torch.arange(len(t), device=self.device)[:, None]
        parts = []
        for some in t.split(TOKENS_AT_ONCE, 1):
            panel, basis = self._locate(some)
            found = (basis[..., None, :] @ self.sums[heads, panel]).squeeze(-2)
            lse = found[..., -1].log() + self.top[heads, panel]
            if self.is_gaussian:
                lse = lse - 0.5 * some.square().sum(-1)
            parts.append((found[..., :-1] / found[..., -1:], lse))
        out, lse = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        empty = lse == -math.inf  # no key yet, or none that is not hidden
        out = out.masked_fill(empty[..., None], 0.0)
        shape = query.shape[:-1]
        return out.to(query.dtype).view(*shape, self.head_dim), lse.view(shape)

    def _locate(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The panel of every query [heads, n, rank], and its weights on the nodes there."""
        panel = t.new_zeros(t.shape[:-1], dtype=torch.long)
        basis = t.new_ones(*t.shape[:-1], 1)
        for a, (panels, half, middle) in enumerate(
            zip(self.panels, self.half, self.middles, strict=True)
        ):
            x = t[..., a]
            place = (x + self.t_most[a]) / (2 * half) if half > 0 else x
            here = place.floor().clamp(0, panels - 1).long()
            place = (x - middle[here]) / half if half > 0 else x
            weight = lagrange_weights(self.nodes, place.flatten()).view(*x.shape, 1, -1)
            panel, basis = panel * panels + here, (basis[..., None] * weight).flatten(-2)
        return panel, basis

    # ---- state ----

    def entries(self) -> dict[str, Any]:
        return {"sums": self.sums, "top": self.top}

    def load(self, state: dict[str, Any], count: int) -> None:
        """Take the entries of another table of `count` tokens.

        Raises, and changes nothing, if they cannot be.
        """
        sums = checked_entry(state, "sums", tuple(self.sums.shape), self.sums)
        top = checked_entry(state, "top", tuple(self.top.shape), self.top)
        if count == 0 and bool((top > -math.inf).any()):
            raise ValueError("state must have no logits before the first token")
        self.sums, self.top = sums, top


def _product(axes: list[Tensor]) -> Tensor:
    """All points with these coordinates, the last axis fastest: [points, rank]."""
    return torch.cartesian_prod(*axes).view(-1, len(axes))


def _finite(top: Tensor) -> Tensor:
    """Where nothing has a weight yet, it is measured from 0."""
    return top.masked_fill(top == -math.inf, 0.0)


def _decay(old: Tensor, new: Tensor) -> Tensor:
    return (old - _finite(new)).exp()
