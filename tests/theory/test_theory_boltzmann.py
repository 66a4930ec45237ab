"""Every identity and bound about the Boltzmann operator, and the separation lemma exhaustively."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from boltzattn import boltz
from boltzattn.theory import (
    boltz_gap,
    boltz_gradient,
    boltz_hessian,
    boltz_pair,
    decreasing_below,
    log_separation_bound,
    max_deficit,
    required_spacing,
    tempered_mean,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import lambertw

# Rounding of a dozen fp64 operations on numbers of the size of the entries (at most 30 here).
ROUNDING = 30 * 2.0**-46

entries = st.lists(st.floats(-30, 30, allow_subnormal=False), min_size=1, max_size=12)


def vector(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def exact(values, digits: int = 60) -> mpmath.mpf:
    """boltz in as many digits as asked for; the floats are taken as they are."""
    with mpmath.workdps(digits):
        top = max(values)
        weights = [mpmath.exp(mpmath.mpf(x) - top) for x in values]
        return mpmath.fdot(values, weights) / mpmath.fsum(weights)


@given(entries)
def test_is_logsumexp_minus_entropy(values):
    a = vector(values)
    p = torch.softmax(a, 0)
    entropy = -torch.special.xlogy(p, p).sum()
    assert boltz(a) == pytest.approx(float(a.logsumexp(0) - entropy), abs=ROUNDING)


@given(entries, st.floats(-30, 30), st.randoms())
def test_moves_with_a_shift_and_not_with_the_order(values, shift, random):
    a = vector(values)
    shuffled = values.copy()
    random.shuffle(shuffled)
    assert boltz(a + shift) == pytest.approx(float(boltz(a)) + shift, abs=ROUNDING)
    assert boltz(vector(shuffled)) == pytest.approx(float(boltz(a)), abs=ROUNDING)


@given(entries, st.floats(0.01, 3))
def test_tempered_mean_is_the_slope_of_logsumexp(values, t):
    a = vector(values)
    (slope,) = torch.autograd.functional.jacobian(lambda s: (s * a).logsumexp(0), vector([t]))
    assert tempered_mean(a, t) == pytest.approx(float(slope), abs=ROUNDING)
    assert tempered_mean(a, t) == pytest.approx(float(boltz(t * a)) / t, abs=ROUNDING / t)


@given(entries, st.floats(0, 3))
def test_its_growth_with_temperature_is_a_variance(values, t):
    a = vector(values)
    p = torch.softmax(t * a, 0)
    mean = (p * a).sum()
    (slope,) = torch.autograd.functional.jacobian(
        lambda s: (a * torch.softmax(s * a, 0)).sum(), vector([t])
    )
    assert float(slope) == pytest.approx(float((p * (a - mean) ** 2).sum()), abs=30 * ROUNDING)
    assert tempered_mean(a, 0.0) == pytest.approx(float(a.mean()), abs=ROUNDING)


def test_small_temperatures_follow_the_cumulants():
    a = torch.rand(7, dtype=torch.float64)
    centred = a - a.mean()
    k2, k3 = (centred**2).mean(), (centred**3).mean()
    k4 = (centred**4).mean() - 3 * k2**2

    def remainder(t: float) -> float:
        series = a.mean() + t * k2 + t**2 * k3 / 2 + t**3 * k4 / 6
        return abs(float(tempered_mean(a, t) - series))

    # The next term is of order t^4: halving t divides by 16, give or take the term after that.
    assert 12 < remainder(0.2) / remainder(0.1) < 20


@given(entries)
def test_gradient_and_hessian_are_the_derivatives(values):
    a = vector(values)

    def plain(z: torch.Tensor) -> torch.Tensor:
        return (z * torch.softmax(z, 0)).sum()

    gradient = torch.autograd.functional.jacobian(plain, a)
    hessian = torch.autograd.functional.hessian(plain, a)
    # Products of up to three entries of size 30.
    torch.testing.assert_close(boltz_gradient(a), gradient, rtol=0, atol=900 * ROUNDING)
    torch.testing.assert_close(boltz_hessian(a), hessian, rtol=0, atol=900 * ROUNDING)
    assert boltz_gradient(a).sum() == pytest.approx(1, abs=900 * ROUNDING)


@given(entries)
def test_gradient_in_terms_of_probabilities(values):
    a = vector(values)
    log_p = torch.log_softmax(a, 0)
    p = log_p.exp()
    entropy = -(p * log_p).sum()
    torch.testing.assert_close(
        boltz_gradient(a), p * (1 + log_p + entropy), rtol=0, atol=30 * ROUNDING
    )


@given(entries)
def test_lies_between_mean_and_maximum_and_close_to_the_maximum(values):
    a = vector(values)
    top, deficit = boltz_pair(a)
    assert top == max(values)
    assert float(top - deficit) == pytest.approx(float(boltz(a)), abs=ROUNDING)
    assert float(boltz(a)) >= float(a.mean()) - ROUNDING
    assert 0 <= float(deficit) <= max_deficit(len(values)) + ROUNDING


@pytest.mark.parametrize("n", [1, 2, 3, 10, 100, 10_000])
def test_largest_deficit_is_lamberts_function_and_is_reached(n):
    assert max_deficit(n) == pytest.approx(lambertw((n - 1) / math.e).real, rel=1e-14)
    assert max_deficit(n) <= math.log(n)
    a = torch.full((n,), -1 - max_deficit(n), dtype=torch.float64)
    a[0] = 0.0
    assert float(boltz_pair(a).deficit) == pytest.approx(max_deficit(n), rel=1e-12, abs=1e-15)


def test_deficit_keeps_its_digits_when_the_value_cannot():
    top, deficit = boltz_pair(vector([1e6, 1e6 - 50.0]))
    assert float(deficit) == pytest.approx(50 * math.exp(-50), rel=1e-13, abs=0)
    assert float(top - deficit) == 1e6


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=12))
def test_far_entries_pull_the_value_down(values):
    a = vector([0.0, *values])
    n = len(a)
    far = a < -decreasing_below(n)
    assert decreasing_below(n) <= 1 + math.log(n)
    assert (boltz_gradient(a)[far] < 0).all()
    below = a < boltz(a) - 1
    # Away from the boundary, where rounding decides, the sign is just that of a - boltz + 1.
    clear = (a - boltz(a) + 1).abs() > ROUNDING
    assert ((boltz_gradient(a) < 0) == below)[clear].all()
    farther = a < -math.log(n) - 3
    assert (boltz_hessian(a).diagonal()[farther] < 0).all()


@pytest.mark.parametrize("spread", [1.0, 30.0, 300.0, 3000.0])
def test_gap_agrees_with_many_digits(spread):
    rng = np.random.default_rng(0)
    for _ in range(25):
        table = np.sort(rng.uniform(-spread, spread, 8))
        a, b = (table[rng.choice(8, 4)].tolist() for _ in range(2))
        # As many digits as the smallest gap has zeros, and 40 more.
        digits = 40 + int(2 * spread / math.log(10))
        with mpmath.workdps(digits):
            truth = exact(b, digits) - exact(a, digits)
            gap = boltz_gap(a, b)
            assert gap.sign == mpmath.sign(truth)
            if truth:
                assert gap.log == pytest.approx(
                    float(mpmath.log(abs(truth))), abs=gap.relative_error + 1e-13, rel=1e-15
                )
                assert gap.relative_error < 1e-8


def test_gap_of_multisets_of_different_size():
    a, b = [5.0, 1.0, 1.0], [5.0, 1.0]
    truth = exact(b) - exact(a)
    gap = boltz_gap(a, b)
    assert gap.sign * math.exp(gap.log) == pytest.approx(float(truth), rel=1e-13)
    assert boltz_gap([3.0, 1.0], [1.0, 3.0]) == (0, -math.inf, 0.0)
    assert boltz_gap([3.0, 1.0], [1.0, 3.0, 3.0, 1.0]) == (0, -math.inf, 0.0)
    assert boltz_gap([2.0], [7.0]).log == pytest.approx(math.log(5), rel=1e-15)
    with pytest.raises(ValueError, match="must not be empty"):
        boltz_gap([], [1.0])


def test_gap_sees_past_levels_in_equal_proportion():
    # The two top levels alone have the same value in both; what tells them apart is 1e-900.
    a, b = [0.0, 0.0, -10.0, -10.0], [0.0, -10.0, -2000.0, -2000.0]
    truth = exact(b, 1000) - exact(a, 1000)
    gap = boltz_gap(a, b)
    assert gap.sign == mpmath.sign(truth)
    assert gap.log == pytest.approx(float(mpmath.log(abs(truth))), rel=1e-14)


def test_gap_knows_how_many_digits_cancellation_left():
    # Equal sums and equal sums of squares: the gap is of third order in a temperature of 1e-4.
    a, b = ([1e-4 * x for x in s] for s in ((0, 4, 5), (1, 2, 6)))
    truth = exact(b) - exact(a)
    gap = boltz_gap(a, b)
    assert 1e-9 < gap.relative_error < 1e-3
    assert gap.sign * math.exp(gap.log) == pytest.approx(float(truth), rel=gap.relative_error)


def levels_of(n: int, count: int) -> list[float]:
    """A symmetric grid a hair wider than the lemma asks for."""
    spacing = required_spacing(n) * (1 + 1e-9)
    return [spacing * (i - (count - 1) / 2) for i in range(count)]


@pytest.mark.parametrize(("n", "count"), [(2, 8), (3, 7), (4, 7), (5, 7)])
def test_lemma_holds_for_all_sets_on_a_grid(n, count):
    levels = levels_of(n, count)
    bound = log_separation_bound(n, levels[-1])
    sets = list(itertools.combinations(levels, n))
    gaps = {pair: boltz_gap(*pair) for pair in itertools.combinations(sets, 2)}
    assert all(gap.sign and gap.relative_error < 1e-6 for gap in gaps.values())
    assert min(gap.log for gap in gaps.values()) > bound
    assert all(abs(float(boltz(vector(list(s))))) <= levels[-1] for s in sets)
    # The worst pair shares its top and differs in the lowest entry, by one step at the bottom.
    worst = min(gaps, key=lambda pair: gaps[pair].log)
    top = tuple(levels[-(n - 1) :])
    assert {tuple(sorted(s)) for s in worst} == {(levels[0], *top), (levels[1], *top)}
    # And many digits agree with the log of its gap.
    with mpmath.workdps(400):
        truth = abs(exact(worst[1], 400) - exact(worst[0], 400))
        assert gaps[worst].log == pytest.approx(float(mpmath.log(truth)), rel=1e-13)


@pytest.mark.parametrize(("n", "count"), [(2, 7), (3, 6), (4, 5)])
def test_multisets_are_separated_too(n, count):
    levels = levels_of(n, count)
    multisets = list(itertools.combinations_with_replacement(levels, n))
    gaps = [boltz_gap(*pair) for pair in itertools.combinations(multisets, 2)]
    assert all(gap.sign and gap.relative_error < 1e-6 for gap in gaps)
    # n copies of the top against one of them moved to the bottom: 2r exp(-2r) / (n - 1).
    r = levels[-1]
    gap = boltz_gap([r] * n, [r] * (n - 1) + [-r])
    assert gap.log == pytest.approx(math.log(2 * r / (n - 1)) - 2 * r, abs=1e-9)


@pytest.mark.full
def test_lemma_holds_for_eight_out_of_ten():
    levels = levels_of(8, 10)
    sets = list(itertools.combinations(levels, 8))
    smallest = min(boltz_gap(*pair).log for pair in itertools.combinations(sets, 2))
    assert smallest > log_separation_bound(8, levels[-1])


def test_lemma_in_numbers():
    bound = math.log(math.log(7) ** 2 * math.exp(-40))
    assert log_separation_bound(7, 20.0) == pytest.approx(bound, rel=1e-12)
    assert required_spacing(7) == 2 * math.log(7) + 3


def test_lemma_says_nothing_about_single_entries():
    with pytest.raises(ValueError, match="n must be at least 2"):
        log_separation_bound(1, 1.0)
    with pytest.raises(ValueError, match="n must be at least 1"):
        max_deficit(0)
