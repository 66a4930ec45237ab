"""Memorization through the module: labels come back, and what cannot be learned is said."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from boltzattn.nn import OneLayerTransformer
from boltzattn.theory import ResolutionWarning, memorize
from boltzattn.theory.memorization import random_task, step_network


@pytest.mark.parametrize("form", ["linear", "plateau"])
@pytest.mark.parametrize("sizes", [(3, 6, 20, 4), (4, 12, 100, 8), (8, 30, 300, 16), (5, 9, 60, 1)])
def test_every_label_comes_back(form, sizes):
    x, y = random_task(*sizes)
    model = memorize(x, y, form=form)
    report = model.report
    assert isinstance(model, OneLayerTransformer)
    assert model.form == "paper"
    with torch.no_grad():
        out = model(x)
    assert torch.equal(out[..., 0].round().long(), y)
    assert report.accuracy == 1.0
    # Coordinates that carry no label are 0: the skip connections are cancelled.
    wanted = torch.nn.functional.pad(y[..., None].double(), (0, sizes[3] - 1))
    assert float((out - wanted).abs().max()) == pytest.approx(report.max_error, rel=1e-6, abs=0)
    assert report.max_error < 1e-5 * report.label_range


def test_a_thousand_sequences_of_sixteen_tokens():
    x, y = random_task(n=16, vocabulary=60, count=1000, d=16)
    model = memorize(x, y)
    report = model.report
    with torch.no_grad():
        out = model(x)
    assert report.ids == 16_000
    assert torch.equal(out[..., 0].round().long(), y)
    assert report.max_error < 1e-5 * report.label_range


def test_linear_time_attention_reads_the_same_labels():
    x, y = random_task(n=512, vocabulary=600, count=3, d=4)
    model = memorize(x, y)
    report = model.report
    model.attention.method = "transform"
    with torch.no_grad():
        out = model(x)
    assert report.ids == 3 * 512
    assert torch.equal(out[..., 0].round().long(), y)


def test_regression_with_several_outputs():
    x, _ = random_task(n=4, vocabulary=12, count=60, d=5)
    y = torch.randn(60, 4, 3, dtype=torch.float64)
    seen: dict[tuple, torch.Tensor] = {}
    for i, j in itertools.product(range(60), range(4)):  # repeated contexts share their label
        key = (*x[i, j].tolist(), *sorted(x[i, :, 0].tolist()))
        y[i, j] = seen.setdefault(key, y[i, j].clone())
    model = memorize(x, y)
    report = model.report
    with torch.no_grad():
        out = model(x)
    assert float((out[..., :3] - y).abs().max()) < 1e-5 * report.label_range
    assert float(out[..., 3:].abs().max()) < 1e-5 * report.label_range
    assert report.accuracy is None


def test_sequence_labels_appear_at_every_token():
    x, _ = random_task(n=4, vocabulary=30, count=50, d=3)
    labels = list(range(50))
    model = memorize(x, labels)
    report = model.report
    with torch.no_grad():
        out = model(x)[..., 0].round()
    assert torch.equal(out, torch.arange(50.0).double()[:, None].expand(50, 4))
    assert report.accuracy == 1.0


def test_repeated_tokens_and_lengths():
    points = torch.randn(5, 3, dtype=torch.float64)
    rows = [(0, 0, 1), (0, 1, 1), (0, 1, 2, 3), (4,), (0, 0, 0, 1)]
    x = [points[list(row)] for row in rows]
    model = memorize(x, torch.arange(5))
    for label, sequence in enumerate(x):
        assert (model(sequence)[:, 0].round() == label).all()
    # The order of the tokens is of no consequence.
    assert torch.allclose(model(x[2].flip(0)), model(x[2]).flip(0), atol=1e-6)


def test_parameters_are_counted():
    x, y = random_task(n=3, vocabulary=6, count=20, d=4)
    model = memorize(x, y)
    report = model.report
    n, count, d, s = 3, 20, 4, 1
    assert report.paper_parameters == 4 * (s + d) + d * (2 * n * count + d)
    hidden = model.ff2.linear1.out_features
    assert report.hidden == hidden
    steps = hidden - 2 * d
    # Attention, reading direction, a breakpoint and a weight per step, one output bias.
    assert report.parameters == 4 * (s + d) + d + 2 * steps + 1
    assert steps <= report.ids - 1
    assert report.parameters < report.paper_parameters
    # All breakpoints read in one direction, and all rows of the skip's cancellation are units.
    assert torch.linalg.matrix_rank(model.ff2.linear1.weight[2 * d :]) == 1
    assert report.attention.parameters == 4 * (s + d)


def test_equal_neighbours_take_no_neurons():
    x, y = random_task(n=3, vocabulary=6, count=20, d=4)
    report = memorize(x, torch.zeros_like(y)).report
    assert report.hidden == 2 * 4
    assert report.max_error < 1e-12


@pytest.mark.parametrize("form", ["linear", "plateau"])
def test_network_is_the_interpolation(form):
    rng = np.random.default_rng(0)
    positions = np.sort(rng.uniform(-3, 5, 30))
    values = rng.standard_normal((30, 2))
    network = step_network(positions, values, np.array([0.0, 1.0, 0.0]), form)
    at = rng.uniform(positions[0], positions[-1], 500)
    z = rng.standard_normal((500, 3))
    z[:, 1] = at
    with torch.no_grad():
        out = network(torch.from_numpy(z)).numpy()
    if form == "linear":
        knots, heights = positions, values
    else:
        step = np.diff(positions) / 3
        knots = np.stack([positions[:-1] + step, positions[:-1] + 2 * step], 1).reshape(-1)
        heights = np.stack([values[:-1], values[1:]], 1).reshape(-1, 2)
    wanted = np.stack([np.interp(at, knots, heights[:, c]) for c in range(2)], 1)
    # 60 terms of size slope * range, of which most cancels.
    slope = np.abs(np.diff(heights, axis=0) / np.diff(knots)[:, None]).max()
    assert np.abs(out[:, :2] - wanted).max() < 60 * slope * 8 * 2.0**-52
    assert np.abs(out[:, 2]).max() < 1e-14


def test_plateaus_bear_noise():
    positions, values = np.arange(5.0), np.array([[3.0], [1.0], [4.0], [1.0], [5.0]])
    network = step_network(positions, values, np.ones(1), "plateau")
    z = torch.from_numpy(positions + 0.3 * np.array([1, -1, 1, -1, -1]))[:, None]
    torch.testing.assert_close(network(z), torch.from_numpy(values), rtol=0, atol=1e-12)


def test_float32_does_a_thousand_ids_and_refuses_when_noise_wins():
    x, y = random_task(n=6, vocabulary=20, count=200, d=16)
    model = memorize(x, y, dtype=torch.float32)
    report = model.report
    assert model.attention.q_proj_weight.dtype == torch.float32
    assert report.accuracy == 1.0
    x, y = random_task(n=8, vocabulary=40, count=600, d=16)
    with (
        pytest.warns(ResolutionWarning),
        pytest.raises(ValueError, match=r"torch.float32.*closest of 4800 context ids are .* apart"),
    ):
        memorize(x, y, dtype=torch.float32)


# What cannot be learned.


def test_conflicting_labels_are_listed():
    points = torch.randn(3, 2, dtype=torch.float64)
    x = points[torch.tensor([[0, 1], [1, 0], [1, 2]])]
    with pytest.raises(ValueError, match="got 1 conflicts") as caught:
        memorize(x, torch.tensor([[1, 2], [2, 7], [3, 4]]))
    assert "sequence 0 token 0 (label 1) and sequence 1 token 1 (label 7)" in str(caught.value)
    memorize(x, torch.tensor([[1, 2], [2, 1], [3, 4]]))


def test_many_conflicts_are_counted():
    x = torch.randn(1, 3, 2, dtype=torch.float64).expand(10, 3, 2)
    with pytest.raises(ValueError, match=r"got 27 conflicts: .*; and 22 more"):
        memorize(x, torch.arange(10))


def test_proportional_sequences_conflict_unless_labels_agree():
    x, y = torch.randn(2, 3, dtype=torch.float64)
    batch = [torch.stack([x, y]), torch.stack([x, x, y, y])]
    with (
        pytest.warns(ResolutionWarning, match="exactly 0"),
        pytest.raises(ValueError, match=r"same\s+proportions \(1 pairs here\)"),
    ):
        memorize(batch, [1, 2])
    with pytest.warns(ResolutionWarning, match="exactly 0"):
        model = memorize(batch, [4, 4])
    assert (model(batch[1])[:, 0].round() == 4).all()


def test_near_duplicates_below_resolution():
    x = torch.tensor([[1.0, 2.0], [1.0 + 1e-15, 2.0]], dtype=torch.float64)[..., None]
    with (
        pytest.warns(ResolutionWarning),
        pytest.raises(ValueError, match=r"Smallest distance of two tokens: 1\.11e-15"),
    ):
        memorize(x, [0, 1])


def test_theorem_weights_cannot_memorize_in_floats():
    x, y = random_task(n=3, vocabulary=6, count=20, d=4)
    with (
        pytest.warns(ResolutionWarning, match="numerically a hardmax"),
        pytest.raises(ValueError, match="scale='theorem': the closest of 48 context ids"),
    ):
        memorize(x, y, scale="theorem")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(3), "one entry per sequence, got 3 for 2"),
        (torch.zeros(2, 4), r"labels\[0\] must be"),
        (torch.zeros(2, 3, 2), r"k <= d = 1"),
        (torch.full((2,), float("nan")), "finite"),
    ],
)
def test_labels_are_checked(labels, message):
    x = torch.tensor([[1.0, 2, 3], [1, 2, 4]])[..., None]
    with pytest.raises(ValueError, match=message):
        memorize(x, labels)


def test_form_is_checked():
    with pytest.raises(ValueError, match="form must be"):
        memorize(torch.ones(1, 1, 1), [1], form="cubic")
    with pytest.raises(ValueError, match="at most d = 1 columns"):
        step_network(np.zeros(1), np.zeros((1, 2)), np.ones(1), "linear")
