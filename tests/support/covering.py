"""Covering designs: few cases in which every pair of settings still meets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any


def pairwise(factors: dict[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Cases {factor: setting} such that any two settings of any two factors occur together.

    Greedy: each case starts from a pair that has not met yet and takes, factor by factor, the
    setting that makes most new pairs. The full product is the size of all factors multiplied;
    this is close to that of the two largest.
    """
    rng = random.Random(seed)
    names = list(factors)
    levels = {name: range(len(settings)) for name, settings in factors.items()}

    def meeting(name: str, level: int, other: str, other_level: int) -> frozenset:
        return frozenset(((name, level), (other, other_level)))

    missing = {
        meeting(a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(levels[a], levels[b])
    }
    order = sorted(missing, key=lambda pair: sorted(pair))
    rng.shuffle(order)
    cases = []
    for pair in order:
        if pair not in missing:
            continue
        case = dict(pair)
        rest = [name for name in names if name not in case]
        rng.shuffle(rest)
        for name in rest:
            tries = list(levels[name])
            rng.shuffle(tries)
            case[name] = max(
                tries,
                key=lambda i, name=name: sum(
                    meeting(name, i, other, j) in missing for other, j in case.items()
                ),
            )
        missing -= {meeting(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}
        cases.append({name: factors[name][case[name]] for name in names})
    assert not missing
    return cases
