"""What the stages of a transform tell each other about a head, as rows of fp64 tensors.

`distributed` shares these between processes, so they hold for every backend; csrc/spec/types.h and
csrc/cpu/problem.h have the same structures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Extent(NamedTuple):
    """What the stage `extents` finds of the queries, or of the keys that are not masked."""

    low: float
    high: float
    at_low: float  # which token is the lowest
    at_high: float
    tokens: float  # how many
    regular: float  # 1: all finite, and masked by nothing but 0 and -inf


class SharedRange(NamedTuple):
    """What the layout of a head follows from; the same in all processes."""

    t_min: float
    t_max: float
    s_min: float
    s_max: float
    keys: float  # that are not masked
    n_q: float  # tokens that the cost of a layout is weighed by
    n_k: float
    level: float  # of precision; below 0: not served


# Layouts widen with the logarithm of the number of keys. Processes that share a sequence count keys
# in these steps, so that what they send is the same for every length in use.
MOST_KEYS = (2**24, 2**36, 2**48)


def step_of_keys(n: float) -> float:
    """The step of MOST_KEYS that n keys are in."""
    return next((most for most in MOST_KEYS if n <= most), n) if n > 0 else 0


LEVEL = -1  # the last entry of a range


class TensorRange(NamedTuple):
    """The same of a head of rank 2 to 4, by axis; as a row one number after the other."""

    t_min: list[float]
    t_max: list[float]
    s_min: list[float]
    s_max: list[float]
    keys: float
    tokens: float  # that the cost of a layout is weighed by
    level: float

    @classmethod
    def of(cls, row: list[float]) -> TensorRange:
        rank = (len(row) - 3) // 4
        t_min, t_max, s_min, s_max = (row[rank * k : rank * (k + 1)] for k in range(4))
        return cls(t_min, t_max, s_min, s_max, *row[4 * rank :])

    @property
    def row(self) -> list[float]:
        return [*self.t_min, *self.t_max, *self.s_min, *self.s_max, *self[4:]]

    @property
    def t_middle(self) -> list[float]:
        return [0.5 * (a + b) for a, b in zip(self.t_min, self.t_max, strict=True)]

    @property
    def s_middle(self) -> list[float]:
        return [0.5 * (a + b) for a, b in zip(self.s_min, self.s_max, strict=True)]

    @property
    def t_most(self) -> list[float]:
        """The largest distance from the middle."""
        return [0.5 * (b - a) for a, b in zip(self.t_min, self.t_max, strict=True)]

    @property
    def s_most(self) -> list[float]:
        return [0.5 * (b - a) for a, b in zip(self.s_min, self.s_max, strict=True)]


class Stages(NamedTuple):
    """The stages as a backend has them; between them `distributed` adds up what processes found."""

    levels: int  # of precision that `moments` and `evaluate` can be asked for
    extents: Callable
    sizes: Callable
    moments: Callable
    evaluate: Callable
    query_moments: Callable
    adjoint: Callable
