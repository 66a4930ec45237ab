"""Separation of tokens and the conditions of a contextual mapping, against all pairs."""

from __future__ import annotations

import builtins
import itertools
import math
import time

import numpy as np
import pytest
import torch
from boltzattn.theory import ResolutionWarning, contextual_gap, separation
from boltzattn.theory.separation import closest_pair, contexts
from scipy.spatial.distance import cdist


def all_pairs(points: np.ndarray, colour: np.ndarray) -> float:
    distances = cdist(points, points)
    distances[colour[:, None] == colour] = np.inf
    return float(distances.min())


@pytest.mark.parametrize("d", [1, 2, 5, 20])
@pytest.mark.parametrize("colours", [2, 7, 300, 10_000])
@pytest.mark.parametrize("clustered", [False, True])
def test_closest_pair_is_that_of_all_pairs(d, colours, clustered):
    rng = np.random.default_rng(colours + d)
    colour = rng.integers(colours, size=600)
    points = rng.standard_normal((600, d))
    if clustered:
        points = 0.1 * points + rng.standard_normal((colours, d))[colour]
    assert closest_pair(points, colour) == pytest.approx(all_pairs(points, colour), rel=1e-12)


def test_closest_pair_keeps_the_digits_of_tiny_distances():
    points = 100 * np.random.default_rng(0).standard_normal((500, 30))
    points[17] = points[400]
    points[17, 3] += 1e-9
    assert closest_pair(points) == pytest.approx(
        abs(points[17, 3] - points[400, 3]), rel=1e-12, abs=0
    )


def test_closest_pair_of_one_colour_is_infinite():
    assert closest_pair(np.zeros((4, 3)), np.ones(4, dtype=int)) == math.inf


@pytest.mark.parametrize("d", [2, 12])
def test_separation_measures_the_vocabulary(d):
    vocabulary = torch.randn(9, d, dtype=torch.float64)
    index = torch.tensor([[0, 1, 2], [3, 3, 4], [5, 6, 7], [8, 0, 1]])
    found = separation(vocabulary[index])
    pairs = torch.nn.functional.pdist(vocabulary)
    assert found.epsilon == pytest.approx(float(pairs.min()), rel=1e-12)
    assert found.r_min == pytest.approx(float(vocabulary.norm(dim=1).min()), rel=1e-12)
    assert found.r_max == pytest.approx(float(vocabulary.norm(dim=1).max()), rel=1e-12)
    assert found.repeated == (1,)
    assert found.has_duplicates_within_sequence
    assert not found.near_duplicates
    for row, names in zip(index, found.tokens, strict=True):
        assert torch.equal(found.vocabulary[names], vocabulary[row])


@pytest.mark.parametrize("d", [2, 12])
def test_near_duplicates_are_listed_and_warned_of(d):
    x = torch.randn(1, 6, d, dtype=torch.float64)
    x[0, 5] = x[0, 2]
    x[0, 5, 0] += 3e-10
    with pytest.warns(ResolutionWarning, match=r"1 pairs .* are 3e-10 apart"):
        found = separation(x)
    ((first, second, distance),) = found.near_duplicates
    assert distance == pytest.approx(3e-10, rel=1e-5, abs=0)
    assert distance == float((found.vocabulary[first] - found.vocabulary[second]).norm())
    assert found.epsilon == distance
    assert len(separation(x, tolerance=1e-10).near_duplicates) == 0


def test_signs_of_zero_are_one_token():
    x = torch.tensor([[[0.0, 1.0], [-0.0, 1.0]]])
    assert len(separation(x).vocabulary) == 1


def test_proportional_sequences_are_found():
    x, y, z = torch.eye(3, dtype=torch.float64)
    batch = [torch.stack(s) for s in ((x, y), (y, x), (x, x, y, y), (x, y, y), (z, z), (z,))]
    assert separation(batch).proportional == ((0, 2), (4, 5))


def test_contexts_by_mode():
    tokens = [np.array(s) for s in ((0, 1), (1, 0), (0, 0, 1), (0, 1, 0, 1), (0, 2))]
    assert contexts(tokens, "set").tolist() == [0, 0, 0, 0, 1]
    assert contexts(tokens, "multiset").tolist() == [0, 0, 1, 2, 3]
    assert contexts(tokens, "proportion").tolist() == [0, 0, 1, 0, 2]
    with pytest.raises(ValueError, match="mode must be"):
        contexts(tokens, "bag")


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("mode", ["set", "multiset"])
def test_contextual_gap_is_that_of_all_pairs(width, mode):
    rng = np.random.default_rng(width)
    tokens = rng.integers(6, size=(80, 3))
    # Some function of token and multiset, by a table of random numbers.
    table: dict[tuple, np.ndarray] = {}
    ids = np.stack(
        [
            [table.setdefault((t, *sorted(row)), rng.standard_normal(width)) for t in row]
            for row in tokens
        ]
    )
    report = contextual_gap(torch.from_numpy(ids), torch.from_numpy(tokens), mode)

    def context(row: np.ndarray) -> tuple:
        return tuple(sorted(set(row) if mode == "set" else row))

    where = list(itertools.product(range(80), range(3)))
    same_token, other_token = [math.inf], [math.inf]
    for (i, k), (j, m) in itertools.combinations(where, 2):
        distance = float(np.linalg.norm(ids[i, k] - ids[j, m]))
        if tokens[i, k] != tokens[j, m]:
            other_token.append(distance)
        elif context(tokens[i]) != context(tokens[j]):
            same_token.append(distance)
    assert report.delta_context == pytest.approx(min(same_token), rel=1e-12)
    assert report.delta_token == pytest.approx(min(other_token), rel=1e-12)
    assert report.delta == min(report.delta_context, report.delta_token)
    assert report.r == pytest.approx(float(np.linalg.norm(ids, axis=2).max()), rel=1e-12)
    assert report.ids == len({(t, context(row)) for row in tokens for t in row})
    assert report.bits == pytest.approx(math.log2(2 * report.r / report.delta))
    assert report.passed


def test_set_mode_does_not_ask_to_separate_multisets():
    tokens = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 1, 2]])
    ids = torch.tensor([[1.0, 1, 2], [1, 2, 2], [3, 4, 5]])
    assert contextual_gap(ids, tokens, "set").delta == 1.0
    assert contextual_gap(ids, tokens, "multiset").delta == 0.0
    assert not contextual_gap(ids, tokens, "multiset").passed


def test_noise_between_orders_decides():
    tokens = torch.tensor([[0, 1], [1, 0], [0, 2]])
    ids = torch.tensor([[1.0, 2.0], [2.0 + 1e-3, 1.0], [1.0 + 5e-3, 3.0]], dtype=torch.float64)
    report = contextual_gap(ids, tokens)
    assert report.noise == pytest.approx(1e-3, rel=1e-9)
    assert report.delta == pytest.approx(5e-3, rel=1e-9)
    assert not report.passed
    assert "NOT separated" in str(report)
    assert not contextual_gap(ids[1:], tokens[1:], noise=1e-3).passed
    assert contextual_gap(ids[1:], tokens[1:]).passed


def test_thousands_of_sequences_take_seconds():
    vocabulary = torch.randn(200, 16, dtype=torch.float64)
    x = vocabulary[torch.randint(200, (4000, 8))]
    start = time.process_time()
    separation(x)
    contextual_gap(x + x.mean(1, keepdim=True), x)
    # 32,000 ids: all pairs would be 5e8 distances in R^16.
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (torch.zeros(2, 3), ValueError, "batch must be"),
        ([], ValueError, "at least one sequence"),
        (torch.zeros(2, 3, 1, dtype=torch.int64), TypeError, "floating-point"),
        ([torch.zeros(2, 1), torch.zeros(2, 2)], ValueError, r"batch\[1\] must be"),
        (torch.full((1, 2, 1), math.nan), ValueError, "finite"),
    ],
)
def test_separation_rejects(batch, error, message):
    with pytest.raises(error, match=message):
        separation(batch)


def test_other_rejections():
    x = torch.ones(2, 3, 1)
    with pytest.raises(ValueError, match="tolerance"):
        separation(x, tolerance=-1.0)
    with pytest.raises(ValueError, match="same sequences"):
        contextual_gap(x, x[:, :2])
    with pytest.raises(ValueError, match=r"ids must be"):
        contextual_gap(torch.ones(3), x)
    with pytest.raises(ValueError, match="tokens must hold"):
        contextual_gap(x, [])


def test_scipy_is_asked_for_by_name(monkeypatch):
    real = builtins.__import__

    def without_scipy(name, *args, **kwargs):
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(ImportError, match=r"boltzattn\[theory\]"):
        closest_pair(np.random.default_rng(0).standard_normal((9, 2)))
