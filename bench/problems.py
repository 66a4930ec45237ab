"""The inputs of a case, and the correct result.

The dense result for every query is too expensive at n = 1,000,000, so accuracy is checked on a
sample of the queries: their outputs, and the gradients of a loss on these rows, which makes the
dense result O(sample * n) for dk and dv too. Up to SAMPLE_PAIRS pairs the sample is everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Union

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases import Case

# 2^24 pairs are 128 MB in fp64 and take about a second.
SAMPLE_PAIRS = 2**24

Named = dict[str, Tensor]
Problem = Union["AttentionProblem", "LayerProblem"]


def make_problem(case: Case) -> Problem:
    """The problem of a case; equal cases have equal inputs."""
    return AttentionProblem(case) if case.level == "attention" else LayerProblem(case)


class AttentionProblem:
    """query, key `[batch, heads, n, rank]`, value `[batch, heads, n, dv]`, standard normal."""

    checked = ("dq", "dk", "dv")  # the gradients that are checked, in the order of the leaves

    def __init__(self, case: Case) -> None:
        draw = _Draw(case)
        lead = (case.batch, case.heads, case.n)
        self.case = case
        self.scale = case.rank**-0.5
        self.query = draw(*lead, case.rank).mul_(case.sharpness)
        self.key = draw(*lead, case.rank)
        self.value = draw(*lead, case.dv)
        self.dout = draw(*lead, case.dv) if case.backward else None
        self.leaves = (self.query, self.key, self.value)
        for leaf in self.leaves:
            leaf.requires_grad_(case.backward)
        self.bulk = self.value  # what the `clone` provider copies
        self.rows = _sample_rows(self.query.detach()[0, 0], case)

    def least_bytes(self) -> int:
        """Inputs read once and results written once: the least that any exact method moves."""
        inputs = sum(x.nbytes for x in self.leaves)
        out = self.value.nbytes
        forward, backward = inputs + out, inputs + out + inputs
        return {"forward": forward, "backward": backward, "both": forward + backward}[
            self.case.passes
        ]

    def dense(self, dtype: torch.dtype, order: int = 0) -> Named:
        """Dense softmax attention of the sampled rows in `dtype`, with gradients if needed."""
        query, key, value = (
            x.detach().to(dtype).requires_grad_(self.case.backward)
            for x in (self.query[..., self.rows, :], self.key, self.value)
        )
        with torch.set_grad_enabled(self.case.backward):
            out = dense_rows(query, key, value, self.scale, self.rows, self.case.causal, order)
        if not self.case.backward:
            return {"out": out}
        grads = torch.autograd.grad(out, (query, key, value), self.sampled_dout().to(dtype))
        return {"out": out.detach(), **dict(zip(self.checked, grads, strict=True))}

    def sampled_dout(self) -> Tensor:
        return self.dout[..., self.rows, :]

    def picked(self, result: Named) -> Named:
        """The part of a full result that `dense` computes."""
        return {
            name: x[..., self.rows, :] if name in ("out", "dq") else x for name, x in result.items()
        }

    def unit(self, name: str, exact: Tensor) -> float:
        """Errors are relative to this: max|value| for the output, max|gradient| for gradients."""
        return (self.value if name == "out" else exact).detach().abs().max().item()

    def magnitudes(self) -> dict[str, float]:
        """The size of the terms that are summed; rounding errors are proportional to it.

        The terms of a gradient may be far larger than the gradient, because `dP - D` cancels and
        the rounding errors of dP and D do not.
        """
        query, key, value = (
            x.detach().double() for x in (self.query[..., self.rows, :], self.key, self.value)
        )
        found = {"out": value}
        if self.case.backward:
            weights = dense_weights(query, key, self.scale, self.rows, self.case.causal)
            dout = self.sampled_dout().double().abs()
            found["dv"] = weights.mT @ dout
            terms = weights * (dout @ value.abs().mT)
            found["dq"] = terms @ key.abs() * self.scale
            found["dk"] = terms.mT @ query.abs() * self.scale
        return {name: x.abs().max().item() for name, x in found.items()}


@dataclass(frozen=True)
class Weights:
    """Projections as in nn.Linear: q, k `[heads*rank, dim]`, v `[heads*dv, dim]`, o transposed."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    b_o: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [x for x in vars(self).values() if x is not None]


class LayerProblem:
    """x `[batch, n, dim]` and the projections around attention; biases at the module level."""

    checked = ("dx",)

    def __init__(self, case: Case) -> None:
        draw = _Draw(case)
        self.case = case
        self.x = draw(case.batch, case.n, case.dim).requires_grad_(case.backward)
        self.dout = draw(case.batch, case.n, case.dim) if case.backward else None
        # Scaled so that queries, keys and values are standard normal.
        self.low_rank = self._weights(draw, case.rank)
        self.full_rank = self._weights(draw, case.dv) if case.level == "module" else None
        self.bulk = self.x
        self.rows = _sample_rows(F.linear(self.x.detach()[0], self.low_rank.q[:1].detach()), case)

    def _weights(self, draw: _Draw, rank: int) -> Weights:
        case = self.case
        widths = {"q": case.heads * rank, "k": case.heads * rank, "v": case.heads * case.dv}
        made = {name: draw(width, case.dim).div_(case.dim**0.5) for name, width in widths.items()}
        made["q"].mul_(case.sharpness)
        made["o"] = draw(case.dim, widths["v"]).div_(widths["v"] ** 0.5)
        if case.level == "module":
            made |= {f"b_{name}": draw(width) for name, width in (*widths.items(), ("o", case.dim))}
        return Weights(**{name: x.requires_grad_(case.backward) for name, x in made.items()})

    def least_bytes(self) -> int:
        """x read and the result written once, without weights; backward also reads dout."""
        forward, backward = 2 * self.x.nbytes, 3 * self.x.nbytes
        return {"forward": forward, "backward": backward, "both": forward + backward}[
            self.case.passes
        ]

    def dense(self, dtype: torch.dtype, order: int = 0, weights: Weights | None = None) -> Named:
        """The layer on the sampled rows in `dtype`, with the gradient of x if needed."""
        given = self.low_rank if weights is None else weights
        w = Weights(
            **{k: None if t is None else t.detach().to(dtype) for k, t in vars(given).items()}
        )
        x = self.x.detach().to(dtype).requires_grad_(self.case.backward)
        heads = self.case.heads

        def split(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return F.linear(x, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)

        with torch.set_grad_enabled(self.case.backward):
            query = split(x[:, self.rows], w.q, w.b_q)
            key, value = split(x, w.k, w.b_k), split(x, w.v, w.b_v)
            scale = query.shape[-1] ** -0.5
            out = dense_rows(query, key, value, scale, self.rows, self.case.causal, order)
            out = F.linear(out.transpose(1, 2).flatten(2), w.o, w.b_o)
        if not self.case.backward:
            return {"out": out}
        (dx,) = torch.autograd.grad(out, x, self.sampled_dout().to(dtype))
        return {"out": out.detach(), "dx": dx}

    def sampled_dout(self) -> Tensor:
        return self.dout[:, self.rows]

    def picked(self, result: Named) -> Named:
        return {name: x[:, self.rows] if name == "out" else x for name, x in result.items()}

    def unit(self, name: str, exact: Tensor) -> float:
        return exact.abs().max().item()

    def magnitudes(self) -> dict[str, float]:
        return {}  # the results themselves set the scale


def dense_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    rows: Tensor,
    causal: bool,
    order: int = 0,
) -> Tensor:
    """Dense softmax attention of the queries at positions `rows`.

    Args:
        query: `[..., len(rows), rank]`; key: `[..., n, rank]`; value: `[..., n, dv]`.
        order: 0 is the plain formula; any other number gives the same result with different
            rounding errors, from permuted queries and keys and a divided scale.
    """
    if not order:
        return dense_weights(query, key, scale, rows, causal) @ value
    draw = torch.Generator().manual_seed(order)
    mixed_rows = torch.randperm(query.shape[-2], generator=draw).to(rows.device)
    columns = torch.randperm(key.shape[-2], generator=draw).to(rows.device)
    part = 1.0 + torch.rand((), generator=draw).item()
    weights = dense_weights(
        query[..., mixed_rows, :] * part,
        key[..., columns, :] / part,
        scale,
        rows[mixed_rows],
        causal,
        columns,
    )
    return (weights @ value[..., columns, :])[..., mixed_rows.argsort(), :]


def dense_weights(
    query: Tensor,
    key: Tensor,
    scale: float,
    rows: Tensor,
    causal: bool,
    columns: Tensor | None = None,
) -> Tensor:
    """The softmax weights `[..., len(rows), n]`, for keys at positions `columns` if given."""
    logits = query @ key.mT * scale
    if causal:
        if columns is None:
            columns = torch.arange(key.shape[-2], device=rows.device)
        logits = logits.masked_fill(columns > rows[:, None], -math.inf)
    return torch.softmax(logits, dim=-1)


class _Draw:
    """Standard normal tensors of a case's dtype and device, from a fixed seed."""

    def __init__(self, case: Case) -> None:
        self.generator = torch.Generator(case.device).manual_seed(0)
        self.options = {"dtype": getattr(torch, case.dtype), "device": case.device}

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, **self.options)


def _sample_rows(query: Tensor, case: Case) -> Tensor:
    """Positions of the sampled queries: evenly spaced by |q|, including the largest."""
    count = max(16, SAMPLE_PAIRS // (case.batch * case.heads * case.n))
    if count >= case.n:
        return torch.arange(case.n, device=query.device)
    order = query.double().norm(dim=-1).argsort()
    at = torch.linspace(0, case.n - 1, count, device=query.device).round().long()
    return order[at].sort().values
