"""Loops with scales compute a square that equal loops cannot; gaps do not depend on the rank."""

from __future__ import annotations

import math

import pytest
import torch
from boltzattn.theory.loops import looped_square
from boltzattn.theory.memorization import random_task
from boltzattn.theory.rank import id_gap


@pytest.mark.parametrize("loops", [1, 3, 10, 20])
def test_the_square_needs_scales_of_each_loop(loops):
    y = torch.linspace(0, 1, 257, dtype=torch.float64)[:, None].expand(257, 2)
    with torch.no_grad():
        right = looped_square(loops)(y)[:, 1]
        wrong = looped_square(loops, None)(y)[:, 1]
    assert float((right - y[:, 0] ** 2).abs().max()) <= 4.0 ** -(loops + 1) + 1e-15
    assert float((wrong - y[:, 0] ** 2).abs().max()) > 0.7
    parameters = [sum(p.count_nonzero() for p in looped_square(k).ff2.parameters()) for k in (1, 9)]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize("score", ["dot", "gaussian"])
def test_gaps_do_not_depend_on_the_rank(score):
    x, _ = random_task(n=4, vocabulary=30, count=60, d=5)
    gaps = [id_gap(x, score, rank, draws=2) for rank in (1, 3)]
    # Birthday law: 240 random ids have gaps of about 5 / 240^2, whatever the rank.
    assert all(0.5 / 240**2 < gap < 50 / 240**2 for gap in gaps)
    assert abs(math.log(gaps[0] / gaps[1])) < math.log(8)


def test_gaps_at_one_temperature():
    x, _ = random_task(n=4, vocabulary=30, count=60, d=5)
    heads = [("dot", 1), ("dot", 3), ("gaussian", 1), ("gaussian", 3)]
    # The mean is the same for every head; other temperatures are not.
    means = [id_gap(x, *head, 0.0, draws=2) for head in heads]
    warm = [id_gap(x, *head, 1.0, draws=2) for head in heads]
    assert max(means) - min(means) < 1e-3 * min(means)
    assert len({round(math.log(gap), 2) for gap in warm}) > 1
    assert all(id_gap(x, *head, draws=2) >= gap for head, gap in zip(heads, warm, strict=True))


def test_rank_is_checked():
    x, _ = random_task(n=3, vocabulary=10, count=5, d=2)
    with pytest.raises(ValueError, match="rank must be from 1 to d = 2, got 3"):
        id_gap(x, "dot", 3)
    with pytest.raises(ValueError, match="different sequences"):
        id_gap(x[[0, 0]], "dot", 1)
