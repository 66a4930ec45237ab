"""Universal approximation through the module: rates, repeats, controls."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from boltzattn.nn import OneLayerTransformer
from boltzattn.theory import (
    TARGETS,
    EquivarianceWarning,
    ResolutionError,
    add_positions,
    approximate,
    rounding_network,
    symmetrised,
)

SAMPLES = 3000


def slope(grids: tuple[int, ...], errors: list[float]) -> float:
    return float(np.polyfit(np.log(grids), np.log(errors), 1)[0])


@pytest.mark.parametrize(
    ("name", "d", "n", "grids"),
    [
        ("wave", 1, 2, (8, 16, 32)),
        ("product", 1, 3, (4, 8, 16)),
        ("wave", 2, 2, (4, 8)),
        ("smoothing", 2, 2, (2, 4, 8)),
    ],
)
def test_error_falls_with_slope_minus_one(name, d, n, grids):
    reports = [approximate(TARGETS[name], d, n, g, samples=SAMPLES).report for g in grids]
    errors = [r.error for r in reports]
    assert slope(grids, errors) == pytest.approx(-1, abs=0.1)
    # Nothing is lost beyond the grid: ramps hold 1e-6 of the points per coordinate.
    for report in reports:
        assert report.error == pytest.approx(report.grid_error, rel=1e-3)


def test_error_is_within_the_bound_for_a_lipschitz_function():
    # |grad of x_k mean(x)| <= 1 + 1/sqrt(n) per token; |.| over n tokens of d coordinates.
    d, n, grid = 1, 2, 16
    report = approximate(TARGETS["product"], d, n, grid, samples=SAMPLES).report
    lipschitz = (1 + 1 / math.sqrt(n)) * math.sqrt(n)
    modulus = lipschitz * math.sqrt(d * n) / (2 * grid)
    assert report.error <= modulus + math.sqrt(report.ramp_share) * 2 * math.sqrt(n)


def test_module_returns_the_value_at_the_centre_of_the_cell():
    model = approximate(TARGETS["wave"], 1, 3, 6, samples=100)
    report = model.report
    assert isinstance(model, OneLayerTransformer)
    assert model.form == "paper"
    x = torch.rand(200, 3, 1, dtype=torch.float64)
    centre = (torch.floor(6 * x) + 0.5) / 6
    clear = ((6 * x) % 1 > 1e-5).all(-1).all(-1)
    with torch.no_grad():
        torch.testing.assert_close(
            model(x)[clear], TARGETS["wave"](centre)[clear], rtol=0, atol=1e-8
        )
    assert report.ids == 6 * math.comb(6 + 1, 2)  # (multiset, member) pairs
    assert report.hidden[0] == 2 + 2 * 6
    assert report.hidden[1] <= 2 + 2 * (report.ids - 1)


def test_corners_of_the_cube_belong_to_their_cells():
    model = approximate(TARGETS["product"], 1, 2, 4, samples=100)
    corners = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)[..., None]
    wanted = TARGETS["product"](corners.clamp(1 / 8, 7 / 8))
    with torch.no_grad():
        torch.testing.assert_close(model(corners), wanted, rtol=0, atol=1e-9)


def test_three_tokens_on_a_grid_need_softmax():
    # Sums collide on a grid, so mean pooling, beta = 0, merges contexts; two tokens do not mind.
    assert approximate(TARGETS["wave"], 1, 3, 5, samples=100).report.attention.beta > 0
    assert approximate(TARGETS["wave"], 1, 2, 5, samples=100).report.attention.beta == 0


def test_multisets_beat_dropping_repeats():
    kept = approximate(TARGETS["wave"], 1, 3, 8, samples=SAMPLES).report
    dropped = approximate(TARGETS["wave"], 1, 3, 8, samples=SAMPLES, repeats=False).report
    assert dropped.ids == 3 * math.comb(8, 3)
    assert kept.repeat_share == pytest.approx(1 - (7 / 8) * (6 / 8))
    assert kept.error < 0.7 * dropped.error


def test_wide_ramps_cost_accuracy():
    narrow, wide = (
        approximate(TARGETS["wave"], 1, 2, 16, samples=SAMPLES, ramp=r).report for r in (1e-6, 0.1)
    )
    assert wide.error > 1.5 * narrow.error
    assert wide.ramp_share == pytest.approx(0.2)


def test_position_dependent_function_stays_at_its_asymmetry():
    f = TARGETS["position"]
    errors = []
    for grid in (4, 16):
        with pytest.warns(EquivarianceWarning, match=r"distance from its symmetrisation is 0\.4"):
            report = approximate(f, 1, 2, grid, samples=SAMPLES).report
        errors.append(report.error)
    # f - sym f = (x_1 - .., ..): E |f - sym f|^2 = E (x_1^2 + x_2^2) / 4 = 1/6.
    assert report.asymmetry == pytest.approx(math.sqrt(1 / 6), rel=0.03)
    assert errors[-1] == pytest.approx(math.sqrt(1 / 6), rel=0.03)
    assert errors[0] < 1.2 * errors[-1]


def test_positions_make_it_learnable():
    grids = (4, 8, 16)
    reports = [
        approximate(TARGETS["position"], 1, 2, g, samples=SAMPLES, positions=True).report
        for g in grids
    ]
    assert slope(grids, [r.error for r in reports]) == pytest.approx(-1, abs=0.1)
    assert reports[0].ids == 2 * 4**2
    assert add_positions(torch.zeros(2, 3, 1))[0, :, 0].tolist() == [0, 1, 2]


def test_discontinuous_function_converges_in_mean_only():
    grids = (4, 8, 16, 32)
    f = TARGETS["rank"]
    errors = [approximate(f, 1, 2, g, samples=SAMPLES).report.error for g in grids]
    # The error sits where both tokens share a cell, a share 1/grid of the points.
    assert slope(grids, errors) == pytest.approx(-0.5, abs=0.12)


def test_result_is_permutation_equivariant():
    model = approximate(TARGETS["wave"], 2, 3, 3, samples=100)
    x = torch.rand(20, 3, 2, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(x.flip(1)), model(x).flip(1), rtol=0, atol=1e-8)


@pytest.mark.parametrize("d", [1, 3])
def test_rounding_network(d):
    network = rounding_network(d, steps=7, height=0.5, ramp=1e-4)
    x = torch.rand(300, d, dtype=torch.float64) * 3.5
    clear = ((x / 0.5) % 1 > 1e-3).all(1)
    wanted = (torch.floor(x / 0.5) + 1) * 0.5
    with torch.no_grad():
        # The slope 1 / (ramp height) amplifies the rounding of x and of the breakpoints.
        torch.testing.assert_close(network(x)[clear], wanted[clear], rtol=0, atol=1e-10)


def test_symmetrised_is_equivariant_and_a_projection():
    f = symmetrised(TARGETS["position"])
    x = torch.rand(10, 4, 2, dtype=torch.float64)
    torch.testing.assert_close(f(x.roll(1, 1)), f(x).roll(1, 1))
    torch.testing.assert_close(symmetrised(TARGETS["wave"])(x), TARGETS["wave"](x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d": 0, "n": 2, "grid": 4}, "d must be at least 1"),
        ({"d": 1, "n": 2, "grid": 4, "ramp": 0.0}, "ramp must be"),
        ({"d": 2, "n": 4, "grid": 8}, r"has \d+ ids"),
        ({"d": 1, "n": 5, "grid": 4, "repeats": False}, "only 4 points for n=5"),
    ],
)
def test_sizes_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        approximate(TARGETS["wave"], samples=100, **arguments)


def test_noise_above_the_gap_is_refused():
    # A ramp of 1e-14 of a cell has a slope of 1e15: rounding of x alone moves the result.
    with pytest.raises(ResolutionError, match=r"ids; the closest are .* times the noise of"):
        approximate(TARGETS["wave"], 1, 3, 8, samples=100, ramp=1e-14)


def test_functions_of_the_wrong_shape_or_order_are_refused():
    with pytest.raises(ValueError, match=r"f must map \[B, 2, 1\] to \[B, 2, k\]"):
        approximate(lambda x: x.repeat(1, 1, 2), 1, 2, 4, samples=100)
    with pytest.raises(ValueError, match="f must be permutation equivariant for n > 7"):
        approximate(TARGETS["position"], 1, 8, 2, samples=100)
