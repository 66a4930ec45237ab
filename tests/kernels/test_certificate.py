"""The certificate of the CPU transform: an upper bound of the error, and not an idle one.

Its own rule, since it states its own error: the certificate bounds max|out - exact| / max|value|,
and a head that the transform serves is within the tolerance of its dtype. Exact is softmax in
fp64, or in extended precision where the inputs are fp64 themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import boltzattn
import numpy as np
import pytest
import torch
from boltzattn.dispatch.extension import extension
from boltzattn.problem import Problem
from boltzattn.transform.tolerances import TOLERANCE
from torch import Tensor

extension()  # the report is an op of the compiled module

SIZES = (1, 2, 3, 17, 129, 700, 3000)
PRODUCTS = [10.0**e for e in range(-3, 6)]  # B = max|t| (max s - min s)
HEADS = 2 * len(PRODUCTS)  # queries evenly spread, and over six decades
QUERIES = 40


def _report(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    problem = Problem(query, key, value, *[None] * 4, scale, 0.0, False, False)
    return torch.ops.boltzattn.cpu_transform_report(*problem)


def _uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _needle(heads: int, n: int) -> Tensor:
    keys = torch.zeros(heads, n, dtype=torch.float64)
    keys[:, n // 2] = 1.0
    return keys


def _crowd(heads: int, n: int) -> Tensor:
    """All keys but the two ends at one place in between, another for every head."""
    keys = _uniform(heads, 1).repeat(1, n)
    keys[:, 0], keys[:, -1] = 0.0, 1.0
    return keys


def _clusters(heads: int, n: int) -> Tensor:
    centres = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    return centres[torch.randint(3, (heads, n))] + 1e-3 * _normal(heads, n)


def _ladder(heads: int, n: int) -> Tensor:
    """Gaps that halve: at every temperature another rung decides. Every other head falls."""
    rungs = 0.5 ** (torch.arange(n, dtype=torch.float64) % 40)
    return rungs * (1 - 2 * (torch.arange(heads) % 2))[:, None]


KEYS: dict[str, Callable[[int, int], Tensor]] = {
    "gauss": _normal,
    "uniform": _uniform,
    "two points": lambda heads, n: (_uniform(heads, n) < 0.5).double(),
    "needle": _needle,
    "crowd": _crowd,
    "three clusters": _clusters,
    "cauchy": lambda heads, n: torch.tan(math.pi * (_uniform(heads, n) - 0.5)),
    "log-normal": lambda heads, n: (2 * _normal(heads, n)).exp(),
    "ladder": _ladder,
}


def _one_hot(heads: int, n: int) -> Tensor:
    values = torch.zeros(heads, n, 2, dtype=torch.float64)
    values[torch.arange(heads), torch.randint(n, (heads,))] = 1.0
    return values


def _ends_apart(heads: int, n: int) -> Tensor:
    """Equal values but for the first and the last: with a crowd of keys, all round in step."""
    values = -_uniform(heads, 1, 2).repeat(1, n, 1)
    values[:, 0] = values[:, -1] = 1.0
    return values


VALUES: dict[str, Callable[[int, int], Tensor]] = {
    "random": lambda heads, n: _normal(heads, n, 2),
    "signs": lambda heads, n: _normal(heads, n, 2).sign(),
    "one hot": _one_hot,
    "ends apart": _ends_apart,
    "huge": lambda heads, n: _normal(heads, n, 2) * 1e30,
    "far from zero": lambda heads, n: _normal(heads, n, 2) + 100,
}


class Case(NamedTuple):
    """One head: what was promised and what was seen, relative to max|value|."""

    served: bool
    certificate: float
    error: float
    tolerance: float
    what: str


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[heads, n_q, dv] in fp64; keys measured from the largest, which moves no weight."""
    number = np.longdouble if query.dtype == torch.float64 else np.float64
    q, k, v = (x.double().numpy().astype(number) for x in (query, key, value))
    logits = q * np.swapaxes(k - k.max(1, keepdims=True), 1, 2)
    weights = np.exp(logits - logits.max(2, keepdims=True))
    out = np.stack([w @ x for w, x in zip(weights, v, strict=True)])
    return torch.from_numpy((out / weights.sum(2, keepdims=True)).astype(np.float64))


def spread_queries(products: Tensor, count: int) -> Tensor:
    """[2 heads, count]: evenly in [-B, B], then log-spaced over six decades, both signs."""
    even = 2 * _uniform(len(products), count) - 1
    signs = _normal(len(products), count).sign()
    decades = signs * 10 ** (-6 * _uniform(len(products), count))
    even[:, 0] = decades[:, 0] = 1.0
    return torch.cat([even, decades]) * products.repeat(2)[:, None]


def draw_head(family: str, dtype: torch.dtype, n: int) -> tuple[Tensor, Tensor]:
    """query [HEADS, QUERIES, 1] and key [HEADS, n, 1] with every B of PRODUCTS, in dtype."""
    key = KEYS[family](HEADS, n)
    extent = key.amax(1, keepdim=True) - key.amin(1, keepdim=True)
    key = key / torch.where(extent > 0, extent, 1.0)
    query = spread_queries(torch.tensor(PRODUCTS, dtype=torch.float64), QUERIES)
    limit = min(torch.finfo(dtype).max, 1e300) / 1.1  # fp16 ends at 65504
    return query.clamp(-limit, limit)[..., None].to(dtype), key[..., None].to(dtype)


@cache
def measure(dtype: torch.dtype, family: str) -> list[Case]:
    torch.manual_seed(0)
    cases = []
    for n in SIZES:
        query, key = draw_head(family, dtype, n)
        drawn = {name: draw(HEADS, n).to(dtype) for name, draw in VALUES.items()}
        drawn = {name: value for name, value in drawn.items() if value.isfinite().all()}
        truth = exact(query, key, torch.cat(list(drawn.values()), dim=-1)).split(2, dim=-1)
        for (name, value), expected in zip(drawn.items(), truth, strict=True):
            report = _report(query, key, value, 1.0)
            out = boltzattn.attention(
                query, key, value, scale=1.0, method="transform", backend="cpu"
            )
            largest = value.double().abs().amax((1, 2))
            error = (out.double() - expected).abs().amax((1, 2)) / largest
            for head, (row, e) in enumerate(zip(report.tolist(), error.tolist(), strict=True)):
                what = f"{name} values, n {n}, head {head}, B {row[2]:.3g}, layout {row[3:]}"
                cases.append(Case(row[0] == 1, row[1], e, TOLERANCE[dtype], what))
    return cases


def pairs() -> list[tuple[torch.dtype, str]]:
    return [(dtype, family) for dtype in TOLERANCE for family in KEYS]


@pytest.mark.parametrize(("dtype", "family"), pairs())
def test_is_an_upper_bound(dtype: torch.dtype, family: str) -> None:
    served = [case for case in measure(dtype, family) if case.served]
    assert len(served) > len(SIZES) * len(VALUES)  # or this would test nothing
    broken = [case for case in served if not case.error <= case.certificate <= case.tolerance]
    assert not broken, "\n".join(
        f"error {case.error:.2e}, certificate {case.certificate:.2e}: {case.what}"
        for case in broken[:10]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_is_tight_within_100(dtype: torch.dtype) -> None:
    """In the median over heads whose error is more than the rounding of the result.

    (In half precision no error is.)
    """
    unit = torch.finfo(dtype).eps / 2
    ratios = [
        case.certificate / case.error
        for pair_dtype, family in pairs()
        if pair_dtype == dtype
        for case in measure(dtype, family)
        if case.served and case.error > unit
    ]
    assert len(ratios) > 1000
    assert float(np.median(ratios)) < 100


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_head_up_to_1e5_is_served(dtype: torch.dtype) -> None:
    """Otherwise the transform would be a slow way to call direct."""
    refused = [
        f"{family}: {case.what}"
        for pair_dtype, family in pairs()
        if pair_dtype == dtype
        for case in measure(dtype, family)
        if not case.served
    ]
    assert not refused, refused[:10]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [1, 5])
def test_bitwise_equal(heads: int, dtype: torch.dtype) -> None:
    """Over repeats and numbers of threads, with chunks and parts enough to be shared out."""
    n_q, n_k, dv = 9000, 11000, 5
    tensors = [torch.randn(heads, n, w).to(dtype) for n, w in ((n_q, 1), (n_k, 1), (n_k, dv))]
    grad_out = torch.randn(heads, n_q, dv).to(dtype)
    grad_lse = torch.randn(heads, n_q)

    def results() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse = boltzattn.attention(
            *leaves, scale=8.0, method="transform", backend="cpu", return_lse=True
        )
        gradients = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse.to(lse.dtype)))
        report = _report(*tensors, 8.0)
        assert (report[:, 0] == 1).all()
        return [out.detach(), lse.detach(), *gradients, report]

    torch.set_num_threads(1)
    first = results()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for x, y in zip(first, results(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.full
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", ["gauss", "needle", "three clusters", "ladder"])
@pytest.mark.parametrize("product", [5.0, 500.0, 1e5])
def test_four_million_keys(product: float, family: str, dtype: torch.dtype) -> None:
    """Exact by multiplicity: the keys are draws from 500, so values can be summed beforehand."""
    n, distinct = 4_000_000, 500
    book = KEYS[family](1, distinct)[0]
    book = (book / (book.max() - book.min())).to(dtype)
    which = torch.cat([torch.arange(distinct), torch.randint(distinct, (n - distinct,))])
    if family == "needle":
        which[which == distinct // 2] = 0
        which[n // 3] = distinct // 2
    key, value = book[which].view(1, n, 1), torch.randn(1, n, 2).to(dtype)
    limit = torch.finfo(dtype).max / 1.1
    query = spread_queries(torch.tensor([min(product, limit)], dtype=torch.float64), 1000)
    query = query.reshape(1, -1, 1).to(dtype)
    report = _report(query, key, value, 1.0)[0]
    out = boltzattn.attention(query, key, value, scale=1.0, method="transform", backend="cpu")

    sums = torch.zeros(distinct, 3, dtype=torch.float64)
    sums.index_add_(0, which, torch.cat([value[0].double(), torch.ones(n, 1)], dim=-1))
    present = sums[:, 2] > 0
    sums, book = sums[present].numpy(), book[present].double().numpy()
    book = (book - book.max()).astype(np.longdouble)
    logits = query[0].double().numpy() * book
    total = np.exp(logits - logits.max(1, keepdims=True)) @ sums
    expected = torch.from_numpy((total[:, :2] / total[:, 2:]).astype(np.float64))
    error = (out[0].double() - expected).abs().max() / value.double().abs().max()
    assert report[0] == 1
    assert error <= report[1] <= TOLERANCE[dtype], report
