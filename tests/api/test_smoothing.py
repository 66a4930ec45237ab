"""boltzattn.smoothing against dense fp64, its limits, its gradients and bad input."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import scipy.stats
import torch
from boltzattn.smoothing import kernel_density, kernel_regression, soft_rank, soft_sort
from errors import CERTIFIED, assert_accurate
from torch import Tensor


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits_of(at: Tensor, x: Tensor, b: Tensor | float) -> Tensor:
    """[..., m, n] of points [..., m, d] and [..., n, d]."""
    gap = (at[..., :, None, :] - x[..., None, :, :]) / b
    return -0.5 * gap.square().sum(-1)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    """Within the certificate of fp64."""
    atol = CERTIFIED[torch.float64] * max(1.0, float(wanted.detach().abs().max()))
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=atol)


LEADS = [(), (3,), (2, 3)]
every_lead = pytest.mark.parametrize("lead", LEADS, ids=str)
every_size = pytest.mark.parametrize("n", [1, 2, 63, 257])


@pytest.mark.parametrize("columns", [(), (1,), (5,)], ids=str)
@every_size
@every_lead
def test_regression(lead: tuple, n: int, columns: tuple) -> None:
    x, y, at = tensor(*lead, n), tensor(*lead, n, *columns), 2 * tensor(*lead, 9, seed=1)
    weights = logits_of(at[..., None], x[..., None], 0.3).softmax(-1)
    wanted = (weights @ y.reshape(*lead, n, -1)).reshape(*lead, 9, *columns)
    assert_close(kernel_regression(x, y, at, 0.3), wanted)


@every_lead
def test_regression_at_the_points_themselves(lead: tuple) -> None:
    x, y = tensor(*lead, 20), tensor(*lead, 20, seed=1)
    assert_close(kernel_regression(x, y, bandwidth=0.3), kernel_regression(x, y, x, 0.3))


@every_lead
def test_points_with_coordinates(lead: tuple) -> None:
    x, y, at = tensor(*lead, 20, 3), tensor(*lead, 20, 2), tensor(*lead, 9, 3, seed=1)
    b = tensor(*lead, 3, seed=2).exp()
    logits = logits_of(at, x, b[..., None, None, :])
    assert_close(kernel_regression(x, y, at, b, coordinates=True), logits.softmax(-1) @ y)
    constant = -math.log(20) - 1.5 * math.log(2 * math.pi) - b.log().sum(-1)[..., None]
    wanted = logits.logsumexp(-1) + constant
    assert_close(kernel_density(x, at, b, coordinates=True), wanted)
    for shared in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        found = kernel_density(x, at, shared, coordinates=True)
        wanted = kernel_density(x, at, torch.full((3,), 0.3, dtype=torch.float64), coordinates=True)
        assert_close(found, wanted)


def test_one_place_serves_a_batch() -> None:
    x, y, at = tensor(4, 20), tensor(4, 20, seed=1), tensor(9, seed=2)
    wanted = kernel_regression(x, y, at.expand(4, 9), 0.3)
    assert_close(kernel_regression(x, y, at, 0.3), wanted)
    assert_close(kernel_density(x, at, 0.3), kernel_density(x, at.expand(4, 9), 0.3))


@every_size
@every_lead
def test_density(lead: tuple, n: int) -> None:
    x, at = tensor(*lead, n), 2 * tensor(*lead, 9, seed=1)
    parts = torch.distributions.Normal(x[..., None, :], 0.3).log_prob(at[..., :, None])
    assert_close(kernel_density(x, at, 0.3), parts.logsumexp(-1) - math.log(n))


def test_density_integrates_to_one() -> None:
    at = torch.linspace(-8, 8, 4001).double()
    density = kernel_density(tensor(50), at).exp()
    assert torch.trapezoid(density, at).item() == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("d", [1, 3])
def test_rule_of_thumb_is_that_of_scipy(d: int) -> None:
    """scipy takes the whole covariance; whitened points have the unit matrix."""
    x = tensor(40, d)
    x = (x - x.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(x.T.cov().reshape(d, d))).T
    at = tensor(9, d, seed=1)
    theirs = scipy.stats.gaussian_kde(x.T.numpy(), "silverman").logpdf(at.T.numpy())
    assert_close(kernel_density(x, at, coordinates=True), torch.from_numpy(theirs))


def test_rule_of_thumb_follows_each_batch_and_has_no_gradient() -> None:
    x, y = tensor(2, 30), tensor(2, 30, seed=1)
    x[1] *= 100
    found = kernel_regression(x, y)
    assert_close(found, torch.stack([kernel_regression(*pair) for pair in zip(x, y, strict=True)]))
    b = x.std(-1) * (30 * 3 / 4) ** -0.2
    assert_close(found, kernel_regression(x, y, bandwidth=b))
    pair = []
    for bandwidth in (None, b):
        leaf = x.clone().requires_grad_()
        pair += torch.autograd.grad(kernel_regression(leaf, y, bandwidth=bandwidth).sum(), leaf)
    assert_close(*pair)


def test_equal_points_without_a_bandwidth_are_nan() -> None:
    x = torch.ones(2, 5).double()
    x[1, 0] = 0.0
    found = kernel_regression(x, tensor(2, 5))
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


def sorted_weights(x: Tensor, temperature: float) -> Tensor:
    gap = x.sort(-1).values[..., :, None] - x[..., None, :]
    return (-gap.square() / temperature).softmax(-1)


@pytest.mark.parametrize("columns", [None, (), (5,)], ids=str)
@every_size
@every_lead
def test_soft_sort(lead: tuple, n: int, columns: tuple | None) -> None:
    x = tensor(*lead, n)
    values = x if columns is None else tensor(*lead, n, *columns, seed=1)
    wanted = sorted_weights(x, 0.4) @ values.reshape(*lead, n, -1)
    found = soft_sort(x, None if columns is None else values, 0.4)
    assert_close(found, wanted.reshape(values.shape))
    down = soft_sort(x, values, 0.4, descending=True)
    assert_close(down, found.flip(-1 if values.ndim == x.ndim else -2))


@every_size
@every_lead
def test_soft_rank(lead: tuple, n: int) -> None:
    x = tensor(*lead, n)
    gap = x[..., :, None] - x.sort(-1).values[..., None, :]
    wanted = (-gap.square() / 0.4).softmax(-1) @ torch.arange(1.0, n + 1).double()
    found = soft_rank(x, 0.4)
    assert_close(found, wanted)
    assert (found.gather(-1, x.argsort(-1)).diff() >= -1e-9 * n).all()  # larger scores rank higher


def test_low_temperatures_sort() -> None:
    x = tensor(3, 50)
    assert_close(soft_sort(x, temperature=1e-9), x.sort(-1).values)
    assert_close(soft_rank(x, 1e-9), x.argsort(-1).argsort(-1).double() + 1)


def test_high_temperatures_average() -> None:
    x = tensor(3, 50)
    mean = x.mean(-1, keepdim=True).expand(3, 50)
    torch.testing.assert_close(soft_sort(x, temperature=1e12), mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(
        soft_rank(x, 1e12), torch.full((3, 50), 25.5).double(), rtol=0, atol=1e-9
    )


def test_ties() -> None:
    x = torch.tensor([2.0, 1.0, 2.0, 2.0, 5.0]).double()
    values = torch.tensor([1.0, 7.0, 2.0, 6.0, 0.0]).double()
    wanted = torch.from_numpy(scipy.stats.rankdata(x.numpy()))
    assert_close(soft_rank(x, 1e-6), wanted)
    assert_close(soft_sort(x, values, 1e-6), torch.tensor([7.0, 3.0, 3.0, 3.0, 0.0]).double())
    equal = torch.zeros(6).double()
    assert_close(soft_rank(equal), torch.full((6,), 3.5).double())
    assert_close(kernel_regression(x, values, x[:1], 0.01), torch.tensor([3.0]).double())


def test_temperature_and_bandwidth_per_batch() -> None:
    x, y = tensor(2, 3, 20), tensor(2, 3, 20, seed=1)
    width = tensor(3, seed=2).exp()
    for found in (
        lambda x, y, w: soft_sort(x, y, w),
        lambda x, y, w: soft_rank(x, w),
        lambda x, y, w: kernel_regression(x, y, bandwidth=w),
        lambda x, y, w: kernel_density(x, y, w),
    ):
        whole = found(x, y, width)
        for i, w in enumerate(width):
            assert_close(whole[:, i], found(x[:, i], y[:, i], float(w)))


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "regression": lambda x, y, at, b: kernel_regression(x, y, at, b),
    "density": lambda x, y, at, b: kernel_density(x, at, b),
    "soft_sort": lambda x, y, at, b: soft_sort(x, y, b),
    "soft_rank": lambda x, y, at, b: soft_rank(x, b),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())


@every_function
def test_gradients(function: Callable) -> None:
    """Also of the bandwidth or temperature, and of gradients."""
    inputs = tensor(2, 6), tensor(2, 6, seed=1), tensor(2, 4, seed=2), tensor(2, seed=3).exp()
    leaves = [x.requires_grad_() for x in inputs]
    torch.autograd.gradcheck(function, leaves)
    torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_follow_the_error_rule(dtype: torch.dtype) -> None:
    """Bandwidth and origin are powers of two here, so that no rounding precedes attention."""
    x = (tensor(64) * 8).round() / 8
    x = torch.cat([x, -x]).to(dtype)
    y, at = tensor(128, 3, seed=1).to(dtype), (tensor(9, seed=2) * 8).round().to(dtype) / 8

    def dense(x: Tensor, y: Tensor, at: Tensor) -> dict[str, Tensor]:
        return {"out": logits_of(at[:, None], x[:, None], 0.25).softmax(-1) @ y}

    found = {"out": kernel_regression(x, y, at, 0.25)}
    assert found["out"].dtype == dtype
    oracle = dense(x.double(), y.double(), at.double())
    magnitudes = {"out": float(y.double().abs().max())}
    assert_accurate(found, oracle, [dense(x, y, at)], magnitudes=magnitudes, method="transform")


def test_far_from_zero_differences_keep_their_digits() -> None:
    """Seconds since 1970 with a bandwidth of 1024: their quotients would be rounded, in fp32."""
    x = 1.6e9 + 128.0 * torch.arange(200)
    y = tensor(200, seed=1)
    wanted = kernel_regression(x.double(), y, bandwidth=1000.0)
    # The points are exact in fp32, the origin is one of them up to 128: error of fp32 arithmetic.
    found = kernel_regression(x, y.float(), bandwidth=1000.0).double()
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-5)


def test_autocast_leaves_the_dtype() -> None:
    x, y = tensor(30).float(), tensor(30, seed=1).float()
    wanted = kernel_regression(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        found = kernel_regression(x, y)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@every_function
def test_compile_and_vmap(function: Callable) -> None:
    inputs = tensor(2, 6), tensor(2, 6, seed=1), tensor(2, 4, seed=2), tensor(2, seed=3).exp()
    wanted = function(*inputs)
    assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), wanted)
    assert_close(torch.vmap(function)(*inputs), wanted)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kernel_regression([1.0], x), "x must be a tensor, got list"),
        (lambda x: kernel_regression(x.int(), x), r"x must be float64, .* got torch.int32"),
        (lambda x: kernel_regression(x[0, 0], x), r"x must be \[..., n\] .* got \[\]"),
        (lambda x: soft_rank(x[:, :0]), r"x must be \[..., n\] without empty .* got \[4, 0\]"),
        (
            lambda x: kernel_regression(x[0], x, coordinates=True),
            r"x must be \[..., n, d\] .* got \[6\]",
        ),
        (lambda x: kernel_regression(x, x[:, :5]), r"y must have shape \[4, 6\] or .* got \[4, 5"),
        (lambda x: kernel_regression(x, x[0]), r"y must have shape .* got \[6\]"),
        (lambda x: kernel_regression(x, x[:, :2]), "pass coordinates=True"),
        (lambda x: kernel_regression(x, x.float()), r"y must have the dtype .* with y.to\(x\)"),
        (lambda x: kernel_regression(x, x, x.float()), r"at must have the dtype .* at.to\(x\)"),
        (lambda x: kernel_density(x, x[:3]), r"at must have leading dimensions .* got \[3, 6\]"),
        (
            lambda x: kernel_density(x, x[:, :2], coordinates=True),
            "at must have points of as many coordinates as x, 6, got 2",
        ),
        (lambda x: kernel_regression(x, x, bandwidth=0.0), "bandwidth must be positive .* got 0"),
        (lambda x: kernel_density(x, x, -1.0), "bandwidth must be positive and finite, got -1.0"),
        (lambda x: kernel_density(x, x, "wide"), "bandwidth must be a number, got str"),
        (lambda x: kernel_density(x, x, x[0]), r"bandwidth must broadcast to \[4\], got \[6\]"),
        (lambda x: kernel_density(x, x, x[0, 0].float()), "bandwidth must have the dtype"),
        (lambda x: kernel_regression(x[:, :1], x[:, :1]), r"bandwidth must be given for n = 1"),
        (lambda x: soft_sort(x, temperature=math.nan), "temperature must be positive"),
        (lambda x: soft_sort(x, temperature=x), r"temperature must broadcast to \[4\], got"),
        (lambda x: soft_sort(x, x[0]), r"values must have shape \[4, 6\] or .* got \[6\]"),
        (lambda x: soft_sort(x, x.float()), "values must have the dtype and the device of x"),
        (lambda x: soft_rank(x, 0), "temperature must be positive and finite, got 0"),
    ],
)
def test_errors_name_the_argument(call: Callable, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(tensor(4, 6))
