"""The direction `v` onto which a rank-1 head projects its tokens: random or deterministic."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# By the projection lemma one draw fails with probability below 2/pi, so all draws fail with
# probability below 1e-97.
DRAWS = 500
POLISH_STEPS = 300
# The moment curve is scanned at this many points, and at more only if none of them separates.
_CURVE_POINTS = 2000


class Projected(NamedTuple):
    """The smallest distance between two projected tokens, and from one to the origin."""

    min_gap: float
    min_abs: float


def projected(vocabulary: np.ndarray, v: np.ndarray) -> Projected:
    """How well `v` `[d]` separates the rows of `vocabulary` `[|V|, d]`."""
    positions = np.sort(vocabulary @ v)
    gaps = np.diff(positions)
    return Projected(float(gaps.min()) if len(gaps) else math.inf, float(np.abs(positions).min()))


def guaranteed_share(size: int, d: int) -> float:
    """The projection lemma: some unit vector `v` keeps this share of every distance in R^d.

    It is `sqrt(8 / (pi d)) / size^2` for `size` points, including the origin. A uniformly random
    `v` has this property with probability above `1 - 2/pi`.

    Example:
        >>> guaranteed_share(10, 2) < 1
        True
    """
    return math.sqrt(8 / (math.pi * d)) / size**2


def random_directions(vocabulary: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The `count` best of `DRAWS` random unit vectors, `[count, d]`, best first."""
    d = vocabulary.shape[1]
    if d == 1:
        return np.ones((1, 1))
    draws = rng.standard_normal((DRAWS, d))
    draws /= np.linalg.norm(draws, axis=1, keepdims=True)
    scores = np.array([_score(vocabulary, v) for v in draws])
    return draws[np.argsort(-scores)[:count]]


def random_direction(vocabulary: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The best of `DRAWS` random unit vectors, improved by shrinking random steps."""
    best = random_directions(vocabulary, 1, rng)[0]
    score = _score(vocabulary, best)
    for radius in np.geomspace(0.3, 1e-3, POLISH_STEPS if len(best) > 1 else 0):
        trial = best + radius * rng.standard_normal(len(best))
        trial /= np.linalg.norm(trial)
        if (trial_score := _score(vocabulary, trial)) > score:
            best, score = trial, trial_score
    return best


def moment_curve_direction(vocabulary: np.ndarray) -> np.ndarray:
    """The best `v(t)`, proportional to `(1, t, .., t^(d-1))`, over a fixed list of `t`.

    The projected difference of two tokens is a polynomial in `t` of degree below `d` and has fewer
    than `d` roots. With the origin there are `|V|(|V|+1)/2` pairs, so among one more than `d - 1`
    times as many `t` at least one separates all tokens. No randomness is involved.
    """
    size, d = vocabulary.shape
    if d == 1:
        return np.ones(1)
    enough = (d - 1) * (size + 1) * size // 2 + 1
    best: np.ndarray = np.ones(d) / math.sqrt(d)
    score, tried = -1.0, 0
    while tried < enough and (tried == 0 or score <= 0):
        block = range(tried, min(enough, tried + _CURVE_POINTS))
        tried = block.stop
        for i in block:
            # Low-discrepancy points of (-1.5, 1.5), all of them different.
            t = 3 * ((i + 1) * _GOLDEN % 1) - 1.5
            trial = t ** np.arange(d)
            trial /= np.linalg.norm(trial)
            if (trial_score := _score(vocabulary, trial)) > score:
                best, score = trial, trial_score
    return best


def digit_direction(d: int, base: int) -> np.ndarray:
    """`v` proportional to `(1, base, .., base^(d-1))`: the digits of a grid point as a number.

    On the grid `{1, .., base}^d` all projections differ and are equally spaced.
    """
    v = float(base) ** np.arange(d)
    return v / np.linalg.norm(v)


_GOLDEN = (math.sqrt(5) - 1) / 2


def _score(vocabulary: np.ndarray, v: np.ndarray) -> float:
    """The smallest `|P_q (P_k - P_l)|`; the larger, the smaller beta can be.

    A token at the origin projects to 0 for every `v`, so then only the gaps count.
    """
    min_gap, min_abs = projected(vocabulary, v)
    if min_abs == 0.0 and not vocabulary.any(axis=1).all():
        return min_gap
    # A single token has no gap; min_abs alone decides.
    return min_abs * min(min_gap, 1.0) if math.isinf(min_gap) else min_abs * min_gap
