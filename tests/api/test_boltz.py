"""boltz(a) = sum_i a_i softmax(a)_i: identities, derivatives, extremes."""

from __future__ import annotations

import math
from collections.abc import Callable

import boltzattn
import pytest
import torch
from errors import FLOOR_ULPS, assert_accurate, ulp
from hypothesis import given
from hypothesis import strategies as st
from oracle import EAGER_RUNS, largest
from scipy.special import lambertw
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def plain(a: Tensor, dim: int = -1) -> Tensor:
    """The definition, as one would write it in torch."""
    return (a * a.softmax(dim)).sum(dim)


def assert_boltz(a: Tensor, truth: Tensor, actual: Tensor | None = None) -> None:
    """The value against the truth in fp64, by the error rule with `a` for the magnitude."""
    actual = boltzattn.boltz(a) if actual is None else actual
    assert actual.dtype == a.dtype
    assert_accurate(
        {"out": actual}, {"out": truth}, [{"out": plain(a)}], magnitudes={"out": largest(a)}
    )


def spread(*shape: int) -> Tensor:
    """fp64 vectors from nearly equal to nearly one-hot."""
    width = torch.logspace(-2, 2, shape[0], dtype=torch.float64)
    return torch.randn(shape, dtype=torch.float64) * width.view(-1, *[1] * (len(shape) - 1))


# -- value -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 63, 1000])
def test_is_the_definition(n: int, dtype: torch.dtype) -> None:
    a = spread(20, n).to(dtype)
    assert_boltz(a, plain(a.double()))


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_any_dimension(dim: int) -> None:
    a = torch.randn(3, 4, 5, dtype=torch.float64)
    assert torch.equal(boltzattn.boltz(a, dim), boltzattn.boltz(a.movedim(dim, -1)))
    assert boltzattn.boltz(a, dim).shape == a.sum(dim).shape


def test_1a_is_lse_minus_entropy() -> None:
    a = spread(50, 30)
    log_p = a.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    assert_boltz(a, a.logsumexp(-1) - entropy)


def test_1a_moves_with_its_argument() -> None:
    a, shift = spread(50, 30), torch.randn(50, 1, dtype=torch.float64)
    moved = a + shift
    assert_boltz(moved, boltzattn.boltz(a) + shift.squeeze(-1))


def test_1a_ignores_order() -> None:
    a = spread(50, 30)
    assert_boltz(a, boltzattn.boltz(a[:, torch.randperm(30)]))


def test_1b_is_the_derivative_of_lse_in_the_temperature() -> None:
    a = spread(20, 10)
    t = torch.full((20, 1), 0.7, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad((t * a).logsumexp(-1).sum(), t)
    assert_boltz(0.7 * a, 0.7 * slope.squeeze(-1))


def test_1b_rises_from_mean_to_maximum_with_slope_variance() -> None:
    """boltz(ta) / t over t; with a in [-1, 1] the variance is at most 1."""
    a = 2 * torch.rand(10, dtype=torch.float64) - 1
    temperatures = torch.logspace(-6, 3, 200, dtype=torch.float64).requires_grad_()
    level = boltzattn.boltz(temperatures[:, None] * a) / temperatures
    assert (level.diff() >= -FLOOR_ULPS * ulp(1.0, a.dtype)).all()
    assert level[0] - a.mean() <= temperatures[0] + FLOOR_ULPS * ulp(1.0, a.dtype)
    assert a.max() - level[-1] <= math.log(10) / temperatures[-1]

    (slope,) = torch.autograd.grad(level.sum(), temperatures)
    p = (temperatures[:, None] * a).softmax(-1)
    variance = (p * (a - (p * a).sum(-1, keepdim=True)).square()).sum(-1)
    usual = (temperatures > 0.1) & (temperatures < 10)  # far below, division by t has the say

    def eager(order: Tensor) -> dict[str, Tensor]:
        level = plain(temperatures[:, None] * a[order]) / temperatures
        return {"slope": torch.autograd.grad(level.sum(), temperatures)[0][usual]}

    assert_accurate(
        {"slope": slope[usual]},
        {"slope": variance[usual]},
        (eager(torch.randperm(10)) for _ in range(EAGER_RUNS)),
        magnitudes={"slope": largest(level / temperatures)},  # a difference of terms of this size
    )


def test_1e_range() -> None:
    """0 <= max - boltz <= W0((n - 1) / e) <= log n, and the bound is attained."""
    for n in (2, 10, 100, 1000):
        bound = lambertw((n - 1) / math.e).real
        assert bound <= math.log(n)
        a = spread(200, n)
        below = a.max(-1).values - boltzattn.boltz(a)
        assert (below >= 0).all()
        assert (below <= bound).all()
        extreme = torch.zeros(n, dtype=torch.float64)
        extreme[1:] = -(1 + bound)
        assert_boltz(extreme, torch.tensor(-bound, dtype=torch.float64))


# -- derivatives -----------------------------------------------------------------------------------


def gradient(function: Callable[[Tensor], Tensor], a: Tensor) -> Tensor:
    a = a.detach().requires_grad_()
    return torch.autograd.grad(function(a).sum(), a)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_1c_gradient(dtype: torch.dtype) -> None:
    a = spread(50, 30).to(dtype)
    log_p = a.double().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    truth = log_p.exp() * (1 + log_p + entropy)
    actual = gradient(boltzattn.boltz, a)
    assert actual.dtype == dtype
    assert_accurate({"gradient": actual}, {"gradient": truth}, [{"gradient": gradient(plain, a)}])
    if dtype == torch.float64:
        sums = {"sum": actual.sum(-1)}, {"sum": torch.ones(50, dtype=dtype)}
        assert_accurate(*sums, [{"sum": gradient(plain, a).sum(-1)}])


def test_1d_hessian() -> None:
    a = torch.randn(6, dtype=torch.float64)
    p = a.softmax(-1)
    s = 1 + a - plain(a)
    truth = torch.diag(p * (1 + s)) - p[:, None] * p * (s[:, None] + s)
    names = ("by autograd", "by torch.func")
    actual = (
        torch.autograd.functional.hessian(boltzattn.boltz, a),
        torch.func.jacrev(torch.func.grad(boltzattn.boltz))(a),
    )
    eager = torch.autograd.functional.hessian(plain, a)
    assert_accurate(
        dict(zip(names, actual, strict=True)),
        dict.fromkeys(names, truth),
        [dict.fromkeys(names, eager)],
    )


def test_1f_where_it_falls_when_an_entry_rises() -> None:
    """The sign of d boltz / d a_i is that of a_i - (boltz - 1)."""
    a = spread(200, 20)
    slope = gradient(boltzattn.boltz, a)
    threshold = boltzattn.boltz(a).unsqueeze(-1) - 1
    clear = (a - threshold).abs() > 2 * FLOOR_ULPS * ulp(largest(a), a.dtype)
    clear &= a.softmax(-1) > torch.finfo(a.dtype).smallest_normal
    assert ((slope < 0) == (a < threshold))[clear].all()
    top = a.max(-1, keepdim=True).values
    far = clear & (a < top - math.log(20) - 1)
    assert far.any()
    assert (slope[far] < 0).all()


def test_1f_where_it_is_concave() -> None:
    a = spread(200, 20)
    hessian = torch.func.vmap(torch.func.jacrev(torch.func.grad(boltzattn.boltz)))(a)
    curvature = hessian.diagonal(dim1=-2, dim2=-1)
    far = a < a.max(-1, keepdim=True).values - math.log(20) - 3
    far &= a.softmax(-1) > torch.finfo(a.dtype).smallest_normal
    assert far.any()
    assert (curvature[far] < 0).all()


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradcheck(dim: int) -> None:
    a = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: boltzattn.boltz(x, dim), a)
    assert torch.autograd.gradgradcheck(lambda x: boltzattn.boltz(x, dim), a)


@pytest.mark.parametrize("in_dim", [0, 1, 2, -1])
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_vmap(dim: int, in_dim: int) -> None:
    a = torch.randn(3, 4, 5, dtype=torch.float64)
    together = torch.func.vmap(lambda x: boltzattn.boltz(x, dim), in_dim)(a)
    one_by_one = [boltzattn.boltz(x, dim) for x in a.unbind(in_dim)]
    assert torch.equal(together, torch.stack(one_by_one))


def test_vmap_of_grad() -> None:
    a = torch.randn(4, 5, dtype=torch.float64)
    assert torch.equal(
        torch.func.vmap(torch.func.grad(boltzattn.boltz))(a), gradient(boltzattn.boltz, a)
    )


def test_compile() -> None:
    a = torch.randn(4, 5)
    compiled = torch.compile(boltzattn.boltz, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a), boltzattn.boltz(a))
    assert torch.equal(gradient(compiled, a), gradient(boltzattn.boltz, a))


# -- extremes --------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=20))
def test_lies_between_mean_and_maximum(entries: list[float]) -> None:
    a = torch.tensor(entries, dtype=torch.float64)
    value = boltzattn.boltz(a)
    assert value <= a.max()
    assert value >= (a / len(entries)).sum() - FLOOR_ULPS * ulp(largest(a), a.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_entries(dtype: torch.dtype) -> None:
    big = torch.finfo(dtype).max / 4
    a = torch.tensor([[big, -big, 0.0], [-big, -big, -big], [big, big, -big]], dtype=dtype)
    assert torch.equal(boltzattn.boltz(a), a.max(-1).values)
    slope = gradient(boltzattn.boltz, a)
    expected = torch.tensor([[1, 0, 0], [1 / 3] * 3, [0.5, 0.5, 0]], dtype=torch.float64)
    assert_accurate({"slope": slope}, {"slope": expected}, [])


def test_keeps_digits_far_from_zero() -> None:
    """The gap to the maximum survives an offset that would swallow it in a plain sum."""
    gaps = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    a = 2.0**50 - gaps
    assert boltzattn.boltz(a).item() == 2.0**50 + boltzattn.boltz(-gaps).item()
    slope = {"slope": gradient(boltzattn.boltz, a)}
    assert_accurate(slope, {"slope": gradient(boltzattn.boltz, -gaps)}, [])


def test_minus_inf_takes_no_part() -> None:
    a = torch.tensor([1.0, -math.inf, 2.0, -math.inf], dtype=torch.float64)
    assert torch.equal(boltzattn.boltz(a), boltzattn.boltz(a[[0, 2]]))
    slope = gradient(boltzattn.boltz, a)
    assert torch.equal(slope[[1, 3]], torch.zeros(2, dtype=torch.float64))
    kept = gradient(boltzattn.boltz, a[[0, 2]])
    assert_accurate({"slope": slope[[0, 2]]}, {"slope": kept}, [])
    x = a.clone().requires_grad_()
    (first,) = torch.autograd.grad(boltzattn.boltz(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.isfinite().all()


def test_nan_propagates() -> None:
    a = torch.tensor([[1.0, math.nan], [1.0, 2.0]])
    assert boltzattn.boltz(a).isnan().tolist() == [True, False]
    assert gradient(boltzattn.boltz, a).isnan().tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_entry(dtype: torch.dtype) -> None:
    a = torch.tensor([[3.5], [-7.0], [0.0]], dtype=dtype)
    assert torch.equal(boltzattn.boltz(a), a.squeeze(-1))
    assert torch.equal(gradient(boltzattn.boltz, a), torch.ones_like(a))
