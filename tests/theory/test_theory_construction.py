"""The constructed attention head, always through the module."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from boltzattn.theory import (
    ResolutionWarning,
    boltz_gap,
    construct_attention,
    contextual_gap,
    prouhet_pair,
    separation,
)
from boltzattn.theory.construction import _log_context_gap
from boltzattn.theory.direction import (
    digit_direction,
    guaranteed_share,
    moment_curve_direction,
    projected,
    random_direction,
)
from boltzattn.theory.memorization import random_task


def numbers(*sequences: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(sequences, dtype=torch.float64)[..., None]


def log10_gap_in_many_digits(head, batch: torch.Tensor, digits: int) -> float:
    """The smallest distance between outputs of one token in two contexts, evaluated plainly."""
    with mpmath.workdps(digits):
        size = mpmath.norm(head.o.tolist())
        pooled: dict[float, dict[tuple, mpmath.mpf]] = {}
        for sequence in batch:
            along = [mpmath.mpf(p) for p in (sequence @ head.v).tolist()]
            for q in along:
                weights = [mpmath.exp(mpmath.mpf(head.beta) * q * k) for k in along]
                value = mpmath.fdot(weights, along) / mpmath.fsum(weights)
                pooled.setdefault(float(q), {})[tuple(sorted(map(float, along)))] = value
        smallest = min(
            abs(a - b)
            for values in pooled.values()
            for a, b in itertools.combinations(values.values(), 2)
        )
        return float(mpmath.log10(size * smallest))


def relative_gap_along_v(head, ids: torch.Tensor) -> float:
    """Where the next layer reads. The birthday law allows a few over the square of the ids."""
    along = (ids @ head.v).flatten().unique()
    distinct = along.diff() > 1e-12 * (along[-1] - along[0])  # else an id met twice
    return float(along.diff()[distinct].min() / (along[-1] - along[0]))


@pytest.mark.parametrize(
    "batch",
    [
        numbers((1, 2), (1, 3), (2, 3)),
        numbers(*itertools.combinations((1, -2, 3), 2)),
        numbers((1, 2, 3), (1, 2, 4), (1, 3, 4)) / 2,
    ],
)
def test_theorem_keeps_its_promise_beyond_floats(batch):
    with pytest.warns(ResolutionWarning, match="numerically a hardmax"):
        head = construct_attention(batch, "theorem")
    assert head.measured.delta == 0.0  # what fp64 sees
    truth = log10_gap_in_many_digits(head, batch, digits=40 - int(1.1 * head.log10_measured))
    assert head.log10_measured == pytest.approx(truth, rel=1e-12)
    assert head.log10_promised < head.log10_measured < -300
    # r_max is reached by a token here, so r may be reached as well.
    assert head.measured.r <= head.promised_r * (1 + 1e-15)


def test_theorem_constants():
    batch, _ = random_task(n=3, vocabulary=6, count=20, d=4)
    with pytest.warns(ResolutionWarning):
        head = construct_attention(batch, "theorem", head_size=2)
    found, m, n, d = head.separation, 7, 3, 4
    spacing = 2 * math.log(n) + 3
    beta = m**4 * spacing * math.pi * d / (8 * found.epsilon * found.r_min)
    assert head.beta == pytest.approx(beta, rel=1e-5)  # a hair more, as the lemma asks
    assert float(head.o.norm()) == pytest.approx(found.epsilon / (4 * found.r_max), rel=1e-12)
    assert head.promised_r == pytest.approx(found.r_max + found.epsilon / 4, rel=1e-12)
    prefactor = (
        2 * math.log(n) ** 2 * found.epsilon**2 * found.r_min
        / (found.r_max**2 * m**4 * spacing * math.pi * d)
    )  # fmt: skip
    exponent = m**4 * spacing * math.pi * d * found.r_max**2 / (4 * found.epsilon * found.r_min)
    log10_delta = math.log10(prefactor) - exponent / math.log(10)
    assert head.log10_promised == pytest.approx(log10_delta, rel=1e-5)
    # Different tokens stay more than half their distance apart.
    assert head.measured.delta_token > found.epsilon / 2
    assert head.parameters == 4 * (2 + 4)


def test_measured_scale_promises_more_than_the_theorem_and_keeps_it():
    batch = numbers((1, 2), (1, 3), (2, 3))
    head = construct_attention(batch, "measured")
    # The lemma's spacing is reached, exactly so for the closest tokens.
    along = (head.separation.vocabulary @ head.v).abs()
    assert head.beta * float(along.min()) * 1.0 == pytest.approx(2 * math.log(2) + 3, rel=1e-5)
    assert head.log10_promised < head.log10_measured
    # Here floats do see the gap, and what they see agrees.
    assert math.log10(head.measured.delta) == pytest.approx(head.log10_measured, abs=1e-6)
    truth = log10_gap_in_many_digits(head, batch, 60)
    assert head.log10_measured == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("scale", ["theorem", "measured", "practical"])
@pytest.mark.parametrize("head_size", [1, 3])
def test_weights_are_rank_one_and_shaped_as_in_the_paper(scale, head_size):
    batch = numbers((1, 2), (1, 3)).expand(2, 2, 5) * torch.randn(5, dtype=torch.float64)
    head = construct_attention(batch, scale, head_size=head_size, v=torch.randn(5))
    for w in (head.w_q, head.w_k, head.w_v):
        assert w.shape == (head_size, 5)
        assert torch.linalg.matrix_rank(w) <= 1
    assert head.w_o.shape == (5, head_size)
    # The module computes x_q + o c_q.
    x = batch.double()
    along = x @ head.v
    weights = torch.softmax(head.beta * along[:, :, None] * along[:, None, :], -1)
    pooled = (weights @ along[..., None]) * head.o
    torch.testing.assert_close(head.module()(x), x + pooled, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("choose_v", ["random", "deterministic"])
def test_practical_gap_is_what_the_module_shows(choose_v):
    batch, _ = random_task(n=4, vocabulary=12, count=100, d=8)
    head = construct_attention(batch, choose_v=choose_v)
    with torch.no_grad():
        ids = head.module()(batch)
    again = contextual_gap(ids, batch)
    assert head.measured.passed
    assert head.measured.delta == pytest.approx(again.delta, rel=1e-9, abs=0)
    assert head.log10_measured == pytest.approx(math.log10(again.delta), abs=1e-9)
    assert head.log10_promised is None
    assert relative_gap_along_v(head, ids) > 1 / head.measured.ids**2
    assert head.separation.has_duplicates_within_sequence is False


def test_practical_finds_a_temperature_where_mean_pooling_fails():
    # Sums agree in the pair, so the mean, beta = 0, cannot separate them.
    pair = prouhet_pair(3)
    head = construct_attention(torch.stack([pair.first, pair.second]))
    assert head.beta > 0
    assert head.measured.passed
    assert head.measured.bits < 20


def test_practical_separates_multisets():
    tokens = torch.randn(4, 3, dtype=torch.float64)
    index = torch.tensor(list(itertools.combinations_with_replacement(range(4), 3)))
    head = construct_attention(tokens[index])
    assert head.separation.has_duplicates_within_sequence
    assert head.measured.mode == "multiset"
    assert head.measured.passed
    assert relative_gap_along_v(head, head.module()(tokens[index]).detach()) > 1 / 40**2
    assert head.measured.ids == 40


def test_exact_gap_is_that_of_all_pairs_at_any_temperature():
    # Without the lemma's spacing no simple rule orders the values.
    found = separation(numbers(*itertools.combinations((-4, -3, -1, 1, 2, 5), 3)))
    for beta in (0.003, 0.01, 1.0):
        gaps = []
        for q in found.vocabulary.flatten().tolist():
            holders = [t for t in found.tokens if q in found.vocabulary[t]]
            levels = [(beta * q * found.vocabulary[t]).flatten().tolist() for t in holders]
            pairs = itertools.combinations(levels, 2)
            gaps += [boltz_gap(a, b).log - math.log(abs(beta * q)) for a, b in pairs]
        assert _log_context_gap(found, np.ones(1), beta, 1.0) == pytest.approx(min(gaps), rel=1e-12)


def test_noise_is_that_of_shuffling():
    batch, _ = random_task(n=60, vocabulary=80, count=20, d=1)
    head = construct_attention(batch)
    floor = torch.finfo(torch.float64).eps * head.measured.r
    with torch.no_grad():
        shuffled = (head.module()(batch.flip(1)).flip(1) - head.module()(batch)).abs().max()
    # Rounding differs from order to order, but not by orders of magnitude.
    assert head.measured.noise > floor
    assert float(shuffled) / 4 < head.measured.noise < 4 * float(shuffled)


def test_same_seed_same_weights():
    batch, _ = random_task(n=3, vocabulary=6, count=20, d=4)
    first, second = (construct_attention(batch, seed=3) for _ in range(2))
    assert torch.equal(first.w_q, second.w_q)
    assert not torch.equal(first.v, construct_attention(batch, seed=4).v)


def test_single_tokens_and_a_single_context():
    head = construct_attention(numbers((1,), (2,), (4,)), "measured")
    assert head.log10_promised == pytest.approx(math.log10(0.5))
    assert head.measured.passed
    assert construct_attention(numbers((3, 3))).measured.passed


# What cannot work says so, with the measured quantity.


@pytest.mark.parametrize("scale", ["theorem", "measured"])
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (numbers((1, 1, 2)), "without repeated tokens, got 1 of 1"),
        (numbers((0, 1, 2)), "got one of norm 0"),
        ([numbers((1, 2))[0], numbers((1, 2, 3))[0]], "one length, got 2 to 3"),
    ],
)
def test_assumptions_of_the_theorem_are_checked(scale, batch, message):
    with pytest.raises(ValueError, match=message):
        construct_attention(batch, scale)


def test_direction_orthogonal_to_a_token():
    batch = torch.tensor([[[1.0, 0.0], [1.0, 1.0]], [[1.0, 0.0], [2.0, 3.0]]])
    v = torch.tensor([0.0, 1.0])
    with pytest.raises(ValueError, match=r"orthogonal to 1 tokens.*\|v \. x\| = 0"):
        construct_attention(batch, "measured", v=v)
    with pytest.warns(ResolutionWarning, match=r"orthogonal to 1 tokens.*attend to the mean"):
        head = construct_attention(batch, "practical", v=v)
    # A zero query sees the mean, which here is enough.
    assert head.measured.passed


def test_direction_that_merges_tokens():
    batch = torch.tensor([[[1.0, 0.0], [1.0, 1.0]]])
    with pytest.raises(ValueError, match="same projection"):
        construct_attention(batch, "theorem", v=torch.tensor([1.0, 0.0]))


def test_proportional_sequences_have_no_gap_and_say_so():
    x, y = numbers((1, 2))[0]
    batch = [torch.stack([x, y]), torch.stack([x, x, y, y])]
    with pytest.warns(ResolutionWarning, match="exactly 0 in every softmax attention"):
        head = construct_attention(batch)
    outputs = [head.module()(s) for s in batch]
    # The outputs agree to the last rounding, and no temperature changes that.
    assert torch.allclose(outputs[0][0], outputs[1][0], rtol=1e-14, atol=0)
    assert not contextual_gap([o.detach() for o in outputs], batch).passed


def test_near_duplicates_below_resolution():
    batch = numbers((1, 2), (1 + 1e-15, 2))
    with pytest.warns(ResolutionWarning) as caught:
        construct_attention(batch)
    text = " ".join(str(w.message) for w in caught)
    assert "1.11e-15 apart" in text
    assert "more digits than the dtype has" in text


def test_float32_runs_out_of_digits():
    batch, _ = random_task(n=6, vocabulary=20, count=400, d=1)
    assert construct_attention(batch).measured.passed
    with pytest.warns(ResolutionWarning, match=r"torch.float32 are only .* apart, below 10 times"):
        construct_attention(batch, dtype=torch.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": "huge"}, "scale must be one of"),
        ({"choose_v": "best"}, "choose_v must be"),
        ({"head_size": 0}, "head_size must be"),
        ({"v": torch.zeros(1)}, "nonzero vector"),
        ({"v": torch.ones(2)}, "nonzero vector"),
    ],
)
def test_construct_rejects(arguments, message):
    with pytest.raises(ValueError, match=message):
        construct_attention(numbers((1, 2)), **arguments)


# Directions.


def test_projection_lemma_holds_for_a_third_of_random_directions():
    rng = np.random.default_rng(0)
    points = np.concatenate([np.zeros((1, 5)), rng.standard_normal((12, 5))])
    difference = np.stack([a - b for a, b in itertools.combinations(points, 2)])
    length = np.linalg.norm(difference, axis=1)
    v = rng.standard_normal((2000, 5))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    kept = (np.abs(v @ difference.T) / length).min(1) >= guaranteed_share(len(points), 5)
    # The proof gives 1 - 2/pi; three standard deviations of 2000 draws are 0.034.
    assert kept.mean() > 1 - 2 / math.pi - 0.034


@pytest.mark.parametrize("choose", [moment_curve_direction, "random"])
def test_chosen_direction_beats_the_lemma(choose):
    rng = np.random.default_rng(1)
    vocabulary = rng.standard_normal((15, 6))
    v = random_direction(vocabulary, rng) if choose == "random" else choose(vocabulary)
    assert np.linalg.norm(v) == pytest.approx(1)
    min_gap, min_abs = projected(vocabulary, v)
    closest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(vocabulary, 2))
    share = guaranteed_share(16, 6)
    assert min_gap * min_abs > (share**2 * closest * np.linalg.norm(vocabulary, axis=1).min())


def test_moment_curve_separates_tokens_made_to_collide():
    # Every coordinate, every sum and every difference of coordinates has ties.
    vocabulary = np.array(list(itertools.product((1.0, 2.0), repeat=3)))
    min_gap, min_abs = projected(vocabulary, moment_curve_direction(vocabulary))
    assert min_gap > 0
    assert min_abs > 0


def test_digits_space_a_grid_evenly():
    grid = np.array(list(itertools.product(range(1, 6), repeat=3)))
    steps = np.diff(np.sort(grid @ digit_direction(3, 5)))
    assert steps.min() > 0
    assert np.allclose(steps, steps[0], rtol=1e-9)
