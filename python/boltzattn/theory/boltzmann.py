"""The Boltzmann operator: identities, bounds, and gaps far below the resolution of fp64.

A rank-1 attention head computes `boltz(a) = sum_i a_i softmax(a)_i`: it maps query `q` to
`boltz(t P) / t` with `t = beta P_q`, where `P_k` are the projected tokens. `boltzattn.boltz`
computes the value; this file has what the theory says about it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from boltzattn.boltz_operator import boltz

# A few rounding errors per term of the fp64 sums in `boltz_gap`.
_ROUNDING = 8 * 2.0**-53


class BoltzPair(NamedTuple):
    """`boltz(a) = top - deficit`, as two numbers because the difference may round to `top`."""

    top: Tensor
    deficit: Tensor


class Gap(NamedTuple):
    """A number `sign * exp(log)`, for differences too small for any float.

    `relative_error` bounds the rounding error of the magnitude; if it is 1 or more, the sign is
    noise.
    """

    sign: int
    log: float
    relative_error: float

    @property
    def log10(self) -> float:
        return self.log / math.log(10.0)


def boltz_pair(a: Tensor, dim: int = -1) -> BoltzPair:
    """The maximum of `a` and the distance of `boltz(a)` below it.

    Example:
        >>> top, deficit = boltz_pair(torch.tensor([1e6, 1e6 - 50.0], dtype=torch.float64))
        >>> f"{top.item():.0f} - {deficit.item():.2e}"
        '1000000 - 9.64e-21'
    """
    top = a.amax(dim, keepdim=True)
    return BoltzPair(top.squeeze(dim), -boltz(a - top, dim))


def tempered_mean(a: Tensor, t: float, dim: int = -1) -> Tensor:
    """`sum_i a_i softmax(t a)_i`, which is `boltz(t a) / t`, and the mean at `t = 0`.

    It is the derivative of `logsumexp(t a)` in `t` and increases from the mean at 0 to the maximum
    at infinity.

    Example:
        >>> tempered_mean(torch.tensor([1.0, 2.0, 5.0, 6.0]), 0.0)
        tensor(3.5000)
    """
    return (a * torch.softmax(t * a, dim)).sum(dim)


def boltz_gradient(a: Tensor) -> Tensor:
    """The gradient `p_i (1 + a_i - boltz(a))` over the last dimension; its entries sum to 1.

    Example:
        >>> boltz_gradient(torch.tensor([0.0, 5.0]))[0] < 0  # raising it lowers the value
        tensor(True)
    """
    return torch.softmax(a, -1) * (1 + a - boltz(a).unsqueeze(-1))


def boltz_hessian(a: Tensor) -> Tensor:
    """The Hessian of `boltz` for `a` of shape `[..., n]`, as `[..., n, n]`.

    With `s_i = 1 + a_i - boltz(a)` it is `delta_ij p_i (1 + s_i) - p_i p_j (s_i + s_j)`.

    Example:
        >>> boltz_hessian(torch.zeros(2))
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  0.5000]])
    """
    p = torch.softmax(a, -1)
    s = 1 + a - boltz(a).unsqueeze(-1)
    outer = p.unsqueeze(-1) * p.unsqueeze(-2)
    return torch.diag_embed(p * (1 + s)) - outer * (s.unsqueeze(-1) + s.unsqueeze(-2))


def max_deficit(n: int) -> float:
    """The largest possible `max(a) - boltz(a)` over `a` in R^n: `W((n-1)/e)`, at most `log n`.

    `W` is Lambert's function. One maximum and `n - 1` entries `1 + max_deficit(n)` below it reach
    this bound.

    Example:
        >>> round(max_deficit(10), 3)
        1.101
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    target = (n - 1) / math.e
    # Newton on w exp(w) = target from above; the function is convex, so it descends to the root.
    w = math.log1p(target)
    for _ in range(50):
        step = (w - target * math.exp(-w)) / (1 + w)
        w -= step
        if abs(step) <= 1e-16 * w:
            break
    return w


def decreasing_below(n: int) -> float:
    """An entry more than this below the maximum has a negative partial derivative.

    Raising such an entry lowers `boltz`, because its weight grows faster than its value.

    Example:
        >>> a = torch.tensor([0.0, -1.01 * decreasing_below(2)])
        >>> boltz_gradient(a)[1] < 0
        tensor(True)
    """
    return 1 + max_deficit(n)


def required_spacing(n: int) -> float:
    """Entries more than this apart satisfy the Boltzmann separation lemma: `2 log n + 3`.

    Example:
        >>> required_spacing(1)
        3.0
    """
    return 2 * math.log(n) + 3


def log_separation_bound(n: int, r: float) -> float:
    """`log((log n)^2 exp(-2r))`: the lower bound of the lemma on the distance of two values.

    It holds for two vectors of `n` distinct entries in `[-r, r]` that differ as sets, if any two
    different entries of both vectors are more than `required_spacing(n)` apart.

    Example:
        >>> log_separation_bound(3, 100.0) > -200
        True
    """
    if n < 2:
        raise ValueError(f"n must be at least 2 (a single entry is its own value), got {n}")
    return 2 * math.log(math.log(n)) - 2 * r


def boltz_gap(a: Iterable[float], b: Iterable[float]) -> Gap:
    """`boltz(b) - boltz(a)` as a sign and a logarithm, for multisets of any sizes.

    Over a common denominator the difference is a sum over pairs of levels,

        sum_{i<j} (a_i b_j - a_j b_i) (x_j - x_i) exp(x_i + x_j),

    where `a_i` counts how often level `x_i` occurs in a. The common part of a and b cancels in
    these integers before anything is rounded, and the largest remaining exponential is factored out
    as a logarithm. So fp64 arithmetic gives a gap of 1e-5000 with about 13 digits, and proportional
    multisets give exactly 0. Entries are the same level if they are equal as floats, so both
    vectors should come from one table of values.

    Example:
        >>> gap = boltz_gap([900.0, 0.0], [900.0, 10.0])
        >>> gap.sign, round(gap.log10, 3)
        (-1, -383.573)
    """
    entries = [np.fromiter(x, dtype=np.float64) for x in (a, b)]
    if not all(len(x) for x in entries):
        raise ValueError(
            "a and b must not be empty: the Boltzmann operator of nothing is undefined"
        )
    levels, position = np.unique(np.concatenate(entries), return_inverse=True)
    count_a, count_b = (
        np.bincount(where, minlength=len(levels))
        for where in np.split(position.reshape(-1), [len(entries[0])])
    )
    products = np.outer(count_a, count_b)
    pairs = products - products.T
    i, j = np.nonzero(np.triu(pairs, 1))
    if not len(i):
        return Gap(0, -math.inf, 0.0)
    below = levels[-1] - levels  # with distances from the top, all exponentials are at most 1
    exponent = below[i] + below[j]
    shift = float(exponent.min())
    terms = pairs[i, j] * (levels[j] - levels[i]) * np.exp(shift - exponent)
    total = math.fsum(terms)
    if total == 0.0:
        return Gap(0, -math.inf, math.inf)
    log = math.log(abs(total)) - shift - _log_sum(count_a, below) - _log_sum(count_b, below)
    # Cancellation between terms, and rounding of the exponents.
    relative_error = _ROUNDING * (float(np.abs(terms).sum()) / abs(total) + shift)
    return Gap(1 if total > 0 else -1, log, relative_error)


def _log_sum(count: np.ndarray, below: np.ndarray) -> float:
    """`log sum_i count_i exp(-below_i)`."""
    nearest = float(below[count > 0].min())
    return math.log(float(count @ np.exp(np.minimum(0.0, nearest - below)))) - nearest
