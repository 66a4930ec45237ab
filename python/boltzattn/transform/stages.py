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


LEVEL = SharedRange._fields.index("level")


class Stages(NamedTuple):
    """The stages as a backend has them; between them `distributed` adds up what processes found."""

    levels: int  # of precision that `moments` and `evaluate` can be asked for
    extents: Callable
    sizes: Callable
    moments: Callable
    evaluate: Callable
    query_moments: Callable
    adjoint: Callable
