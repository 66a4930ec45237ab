"""What no hardmax layer separates, what no mean separates, and softmax that does."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from boltzattn.nn import OneLayerTransformer
from boltzattn.theory import (
    hardmax,
    hardmax_attention,
    hardmax_counterexample,
    prouhet_pair,
    search_hardmax_weights,
    separation,
    shared_gaps,
    temperature_scan,
)
from boltzattn.theory.hardmax import random_weights


def tokens_of(x: torch.Tensor) -> set[float]:
    return set(x.flatten().tolist())


def test_hardmax_splits_ties_evenly():
    scores = torch.tensor([[2.0, 2.0, 1.0], [0.0, 0.0, 0.0], [-3.0, -1.0, -2.0]])
    wanted = torch.tensor([[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(hardmax(scores), wanted)
    nearly = torch.tensor([1e6, 1e6 * (1 + 1e-12)], dtype=torch.float64)
    assert hardmax(nearly).tolist() == [0.5, 0.5]
    assert hardmax(nearly, tolerance=0.0).tolist() == [0.0, 1.0]


def test_hardmax_attention_is_the_limit_of_softmax():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    w_q, w_k, w_v, w_o = random_weights(3, 2, 2, generator)
    cold = OneLayerTransformer.from_weights(1e6 * w_q, w_k, w_v, w_o, num_heads=2, method="direct")
    # Scores that differ by more than 1e-4 leave exp(-100) to the others.
    torch.testing.assert_close(
        cold(x), hardmax_attention(x, w_q, w_k, w_v, w_o, num_heads=2), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("n", [4, 5, 9])
@pytest.mark.parametrize("d", [1, 3])
def test_counterexample_has_different_tokens_and_shared_ones(n, d):
    x = torch.randn(d, dtype=torch.float64)
    pair = hardmax_counterexample(n, d, x)
    assert pair.first.shape == pair.second.shape == (n, d)
    found = separation(torch.stack([pair.first, pair.second]))
    assert len(found.vocabulary) == n + 2
    assert not found.repeated
    assert len(pair.shared) == n - 2
    for i, j in pair.shared:
        assert torch.equal(pair.first[i], pair.second[j])


def test_counterexample_rejects():
    with pytest.raises(ValueError, match="n must be at least 4, got 3"):
        hardmax_counterexample(3)
    with pytest.raises(ValueError, match="nonzero"):
        hardmax_counterexample(4, 2, torch.zeros(2))


def test_no_hardmax_layer_separates_and_softmax_does():
    found = search_hardmax_weights(300)
    assert found.hardmax_max < 1e-12  # rounding of sums of a dozen terms
    assert found.softmax_median > 1e-4
    assert found.softmax_separates > 0.8


@pytest.mark.full
def test_no_hardmax_layer_separates_in_ten_thousand():
    assert search_hardmax_weights(10_000, seed=1).hardmax_max < 1e-12


def test_hardmax_does_separate_other_pairs():
    # The search above would be worth nothing if hardmax never separated anything.
    x = torch.tensor([[1.0], [6.0], [2.0], [5.0]])
    other = torch.tensor([[1.0], [7.0], [3.0], [4.0]])
    w = torch.ones(1, 1)
    assert hardmax_attention(x, w, w, w, w)[0] != hardmax_attention(other, w, w, w, w)[0]


def test_softmax_gap_by_temperature():
    betas = np.array([0.0, 0.1, 0.3, 3.0, 10.0])
    gaps = temperature_scan(hardmax_counterexample(), betas)
    assert gaps[0] == pytest.approx([0, 0], abs=1e-15)  # mean pooling
    assert (gaps[1] > 0.05).all()
    # Towards hardmax it vanishes again: at token 6 beyond all floats.
    assert (gaps[1:].max(1) < [0.3, 0.3, 0.1, 1e-4]).all()
    assert gaps[-1, 1] == 0.0


@pytest.mark.parametrize("degree", range(1, 9))
def test_prouhet_pairs_have_equal_power_sums_and_equal_extremes(degree):
    pair = prouhet_pair(degree)
    first, second = ([Fraction(v) for v in x.flatten().tolist()] for x in (pair.first, pair.second))
    for power in range(1, degree + 1):
        assert sum(v**power for v in first) == sum(v**power for v in second)
    assert sum(v ** (degree + 1) for v in first) != sum(v ** (degree + 1) for v in second)
    assert tokens_of(pair.first) != tokens_of(pair.second)
    assert (min(first), max(first)) == (min(second), max(second)) == (first[0], first[1])
    # So neither hardmax nor the mean of powers tells them apart.
    one = torch.ones(1, 1, dtype=torch.float64)
    for sign in (-1, 0, 1):
        gaps = shared_gaps(pair, lambda x, s=sign: hardmax_attention(x, s * one, one, one, one))
        assert float(gaps.max()) <= 1e-12 * float(pair.first.max())


@pytest.mark.parametrize("degree", [1, 3, 5])
def test_prouhet_pairs_need_an_interior_temperature(degree):
    pair = prouhet_pair(degree)
    top = float(pair.first.max())
    t = np.array([0.01, 0.02, 0.4, 10.0, 40.0])
    gaps = temperature_scan(pair, t / top)[:, 1]
    # gap ~ t^degree: doubling t multiplies by 2^degree, up to the next order of 20 t.
    assert gaps[1] / gaps[0] == pytest.approx(2**degree, rel=0.3)
    assert gaps[2] > 0.1
    assert gaps[3] < 1e-3
    assert gaps[4] < 1e-12 * top


def test_degree_one_is_the_counterexample():
    pair, other = prouhet_pair(1), hardmax_counterexample(4)
    assert torch.equal(pair.first, other.first)
    assert torch.equal(pair.second, other.second)
    with pytest.raises(ValueError, match="degree must be at least 1"):
        prouhet_pair(0)
