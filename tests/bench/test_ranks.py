"""bench.ranks times what it says."""

from __future__ import annotations

import math

import pytest
import torch

from bench import ranks


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.scores.SECONDS", 0.0)


@pytest.mark.parametrize("product", [0.5, 20.0, ranks.STUDENT])
def test_problems_have_the_range_they_are_named_for(product: float) -> None:
    query, key, value = ranks.problem(500, 2, product)
    assert value.shape == (1, 1, 500, ranks.DV)
    reach = (2 * query.abs().amax((0, 1, 2)) * key.abs().amax((0, 1, 2))).max().item()
    if product == ranks.STUDENT:
        assert reach > 20.0
    else:
        assert reach == pytest.approx(product, rel=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_rows(rank: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LARGEST_DENSE", 64)
    row = ranks.measure(rank, 128, 2.0, causal=causal, backward=rank == 2)
    times = torch.tensor([row.transform, row.direct, row.auto, row.sdpa, row.clone])
    assert bool((times > 0).all() and times.isfinite().all())
    assert row.extrapolated
    assert row.regret == row.auto / min(row.transform, row.direct)
    assert str(row).split()[:3] == [str(rank), "128", "2"]
    assert len(str(row).split()) == len(ranks.HEADER.replace("SDPA / auto", "ratio").split())


def test_a_transform_that_takes_too_long_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "FOREVER", 1.0)
    row = ranks.measure(4, 32, 100.0)
    assert row.transform == math.inf
    assert row.regret == row.auto / row.direct
