"""The inputs of a case, and what their result should be.

A benchmark at n = 1,000,000 cannot afford the dense answer for every query, so accuracy is judged
on a sample of queries: the output is compared there, and gradients are those of a loss that sees
only these rows, which makes the dense answer O(sample * n) for dk and dv too. Up to SAMPLE_PAIRS
query-key pairs the sample is everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Union

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases import Case

# 2^24 pairs are 128 MB in fp64: one second of oracle, no need for blocks.
SAMPLE_PAIRS = 2**24

Named = dict[str, Tensor]
Problem = Union["AttentionProblem", "LayerProblem"]


def make_problem(case: Case) -> Problem:
    """The problem of a case; equal cases give equal numbers."""
    return AttentionProblem(case) if case.level == "attention" else LayerProblem(case)


class AttentionProblem:
    """query, key `[batch, heads, n, rank]`, value `[batch, heads, n, dv]`, standard normal."""

    checked = ("dq", "dk", "dv")  # the gradients compared with the oracle, in the order of leaves

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
        """Inputs read once and results written once: no exact method moves less."""
        inputs = sum(x.nbytes for x in self.leaves)
        out = self.value.nbytes
        forward, backward = inputs + out, inputs + out + inputs
        return {"forward": forward, "backward": backward, "both": forward + backward}[
            self.case.passes
        ]

    def dense(self, dtype: torch.dtype) -> Named:
        """Materialised softmax on the sampled rows, computed in `dtype`; gradients if asked for."""
        query, key, value = (
            x.detach().to(dtype).requires_grad_(self.case.backward)
            for x in (self.query[..., self.rows, :], self.key, self.value)
        )
        with torch.set_grad_enabled(self.case.backward):
            out = dense_rows(query, key, value, self.scale, self.rows, self.case.causal)
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
        # Scaled so that queries, keys and values are standard normal again.
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
        """x read and the result written once, weights left out; backward also reads dout."""
        forward, backward = 2 * self.x.nbytes, 3 * self.x.nbytes
        return {"forward": forward, "backward": backward, "both": forward + backward}[
            self.case.passes
        ]

    def dense(self, dtype: torch.dtype, weights: Weights | None = None) -> Named:
        """The layer on the sampled rows, computed in `dtype`; the gradient of x if asked for."""
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
            out = dense_rows(query, key, value, scale, self.rows, self.case.causal)
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


def dense_rows(
    query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Tensor, causal: bool
) -> Tensor:
    """Softmax attention of the queries at positions `rows`, every weight in memory.

    Args:
        query: `[..., len(rows), rank]`; key: `[..., n, rank]`; value: `[..., n, dv]`.
    """
    logits = query @ key.mT * scale
    if causal:
        later = torch.arange(key.shape[-2], device=rows.device) > rows[:, None]
        logits = logits.masked_fill(later, -math.inf)
    return torch.softmax(logits, dim=-1) @ value


@dataclass(frozen=True)
class Accuracy:
    """Error of the tensor that comes nearest to its limit (or is farthest beyond it)."""

    tensor: str
    max_error: float
    rms_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.max_error <= self.allowed  # False for NaN too


class Judge:
    """Holds the fp64 truth of a problem and how far from it a result may be.

    Allowed: twice the error of eager torch on the same inputs in the same dtype, or 4 ulp of the
    largest magnitude, whichever is larger.
    """

    def __init__(self, problem: Problem, weights: Weights | None = None) -> None:
        extra = () if weights is None else (weights,)
        dtype = problem.bulk.dtype
        self.problem = problem
        self.exact = problem.dense(torch.float64, *extra)
        self.unit = {name: problem.unit(name, x) or 1.0 for name, x in self.exact.items()}
        if dtype == torch.float64:
            self.allowed = self._allowed_in_double()
        else:
            eager = problem.dense(dtype, *extra)
            floor = 4 * torch.finfo(dtype).eps
            self.allowed = {
                name: max(2 * self._error(name, x)[0], floor) for name, x in eager.items()
            }

    def _allowed_in_double(self) -> dict[str, float]:
        """What fp32 is allowed on numbers of the same kind, scaled by the ratio of the ulps.

        Eager fp64 *is* the truth here, so its own error cannot be seen; rounding errors are
        proportional to the ulp. Half as much again, because the truth has that error as well.
        """
        single = Judge(make_problem(replace(self.problem.case, dtype="float32")))
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return {name: 1.5 * ratio * allowed for name, allowed in single.allowed.items()}

    def judge(self, result: Named) -> Accuracy:
        """`result`: the full output, and gradients for `dout` zero outside the sample."""
        found = []
        for name, x in self.problem.picked(result).items():
            max_error, rms_error = self._error(name, x)
            found.append(Accuracy(name, max_error, rms_error, self.allowed[name]))
        return max(
            found, key=lambda a: math.inf if math.isnan(a.max_error) else a.max_error / a.allowed
        )

    def _error(self, name: str, x: Tensor) -> tuple[float, float]:
        difference = x.detach().double() - self.exact[name]
        unit = self.unit[name]
        return difference.abs().max().item() / unit, difference.square().mean().sqrt().item() / unit


class _Draw:
    """Standard normal tensors of a case's dtype and device, from a fixed seed."""

    def __init__(self, case: Case) -> None:
        self.generator = torch.Generator(case.device).manual_seed(0)
        self.options = {"dtype": getattr(torch, case.dtype), "device": case.device}

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, **self.options)


def _sample_rows(query: Tensor, case: Case) -> Tensor:
    """Positions of the sampled queries: evenly spaced in |q|, so the sharpest is among them."""
    count = max(16, SAMPLE_PAIRS // (case.batch * case.heads * case.n))
    if count >= case.n:
        return torch.arange(case.n, device=query.device)
    order = query.double().norm(dim=-1).argsort()
    at = torch.linspace(0, case.n - 1, count, device=query.device).round().long()
    return order[at].sort().values
