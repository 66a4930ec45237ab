"""Labels from packed bits: they come back, sizes grow as the root, and limits are errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from boltzattn.nn import OneLayerTransformer
from boltzattn.theory import ConflictError, ResolutionError, memorize_packed
from boltzattn.theory.bit_extraction import digits, packed_network, solve_parity
from boltzattn.theory.memorization import random_task
from boltzattn.theory.packed import random_sequences
from boltzattn.theory.relu_network import BIAS, ReluNetwork, count_nonzero, relu_layer


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("count", "classes", "d"), [(1, 2, 1), (2, 2, 3), (37, 5, 2), (700, 2, 4), (400, 16, 4)]
)
def test_every_label_of_a_sequence_comes_back(tied, count, classes, d):
    x, y = random_sequences(6, 40, count, d, classes)
    model = memorize_packed(x, y, tied=tied)
    assert isinstance(model, OneLayerTransformer)
    with torch.no_grad():
        out = model(x)
    # Exactly, not to rounding: all numbers after the first layers are integers.
    assert torch.equal(out[:, -1, 0], y.double())
    assert not out[..., 1:].any()
    assert model.report.accuracy == 1.0
    assert model.report.max_error == 0.0
    assert model.report.code.ids == count


@pytest.mark.parametrize("tied", [False, True])
def test_every_label_of_a_token_comes_back(tied):
    x, y = random_task(n=5, vocabulary=12, count=80, d=3, classes=4)
    model = memorize_packed(x, y, read="all", tied=tied)
    with torch.no_grad():
        assert torch.equal(model(x)[..., 0], y.double())


def test_the_order_of_the_other_tokens_does_not_matter():
    x, y = random_sequences(6, 40, 50, 3)
    model = memorize_packed(x, y)
    with torch.no_grad():
        assert torch.equal(model(x[:, [3, 1, 0, 4, 2, 5]])[:, -1, 0], y.double())


def test_parameters_grow_as_the_root_and_loops_need_fewer():
    sizes = [1000, 4000]
    rng = np.random.default_rng(0)

    def parameters(count: int, tied: bool) -> int:
        positions = (np.arange(count) + 0.2 * rng.random(count)) / count
        labels = rng.integers(2, size=count)
        network, code = packed_network(positions, labels, np.ones(1), 1e-16, tied=tied)
        with torch.no_grad():
            out = network(torch.from_numpy(positions)[:, None]).numpy()[:, 0]
        assert (out == labels).all()
        # The network is far smaller than its number of labels, and holds one bit for each.
        assert code.groups * code.words * code.word_bits >= count
        return count_nonzero(network)

    small, large = (parameters(count, tied=False) for count in sizes)
    exponent = math.log(large / small) / math.log(sizes[1] / sizes[0])
    assert 0.3 < exponent < 0.6
    assert large < sizes[1] / 2
    assert parameters(sizes[1], tied=True) < large / 2


def test_words_are_as_long_as_a_mantissa_allows():
    x, y = random_sequences(6, 40, 600, 4)
    code = memorize_packed(x, y, tied=True).report.code
    assert code.words > 1  # several words per group
    assert code.word_bits + math.ceil(math.log2(code.groups + 1)) == 52


def test_bounds_are_below_the_network():
    x, y = random_sequences(6, 40, 600, 4)
    report = memorize_packed(x, y).report
    assert report.counting_bound == 600 / 64
    assert report.root_bound == math.sqrt(600)
    assert report.parameters > max(report.counting_bound, report.root_bound)
    assert report.parameters == count_nonzero(memorize_packed(x, y))
    assert "600 ids" in str(report)
    assert "100% correct" in str(report)


def test_gradients_reach_the_tokens_and_state_dicts_load():
    x, y = random_sequences(4, 20, 30, 2)
    model = memorize_packed(x, y)
    model(x)[:, -1, 0].sum().backward()
    assert model.attention.v_proj_weight.grad is not None
    other = memorize_packed(x, y)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        assert not other(x).any()
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x)[:, -1, 0], y.double())


def test_a_loop_is_one_layer_many_times():
    x, y = random_sequences(6, 40, 300, 4)
    network = memorize_packed(x, y, tied=True).ff2
    assert isinstance(network, ReluNetwork)
    assert len({id(layer) for layer in network}) < len(network) / 3


# What fp64 cannot do.


def test_ids_too_close_to_a_border_are_refused():
    rng = np.random.default_rng(0)
    positions = np.sort(rng.random(2000))
    labels = rng.integers(2, size=2000)
    with pytest.raises(ResolutionError, match=r"2000 ids cannot be read in fp64.*times the noise"):
        packed_network(positions, labels, np.ones(1), noise=1e-9)
    assert issubclass(ResolutionError, ValueError)


def test_ids_that_coincide_are_refused():
    with pytest.raises(ResolutionError, match="the closest ids are 0 apart"):
        packed_network(np.array([0.0, 1.0, 1.0]), np.array([0, 1, 0]), np.ones(1), noise=1e-16)


def test_noise_within_the_margin_changes_nothing():
    rng = np.random.default_rng(1)
    positions = np.sort(rng.random(300))
    labels = rng.integers(2, size=300)
    network, code = packed_network(positions, labels, np.ones(1), noise=1e-13)
    moved = positions + 0.4 * code.margin * rng.choice([-1, 1], 300)
    with torch.no_grad():
        assert (network(torch.from_numpy(moved)[:, None]).numpy()[:, 0] == labels).all()


def test_conflicts_are_listed():
    points = torch.randn(4, 2, dtype=torch.float64)
    x = points[torch.tensor([[0, 1, 3], [1, 0, 3], [1, 2, 3]])]
    with pytest.raises(ConflictError, match="got 1 conflicts") as caught:
        memorize_packed(x, torch.tensor([0, 1, 1]))
    assert "sequence 0 token 2 (label 0) and sequence 1 token 2 (label 1)" in str(caught.value)
    memorize_packed(x, torch.tensor([0, 0, 1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"read": "first"}, "read must be 'last' or 'all'"),
        ({"labels": torch.zeros(4, dtype=torch.long)}, r"labels must have shape \[5\]"),
        ({"labels": -torch.ones(5, dtype=torch.long)}, "labels must be integers from 0"),
        ({"labels": torch.zeros(5)}, "labels must be integers from 0"),
        ({"sequences": torch.zeros(5, 3, 2)}, "sequences must be fp64"),
        ({"sequences": torch.full((5, 3, 2), math.nan).double()}, "sequences must be finite"),
    ],
)
def test_arguments_are_checked(change, message):
    x, y = random_sequences(3, 20, 5, 2)
    with pytest.raises(ValueError, match=message):
        memorize_packed(**{"sequences": x, "labels": y, **change})


def test_too_few_contexts_for_the_sequences():
    with pytest.raises(ValueError, match="enough different contexts"):
        random_sequences(1, 3, 5, 2)


# The parts.


def test_streams_are_binary_digits():
    keys, modulus = np.array([1, 5, 17, 40]), 101
    found = digits(keys, modulus, 30)
    values = (found * 2.0 ** -np.arange(2, 32)).sum(1)
    assert np.abs(values - keys / modulus).max() < 2.0**-30


def test_parity_systems():
    rng = np.random.default_rng(0)
    unsolvable = 0
    for _ in range(100):
        rows, steps, planes = rng.integers(1, 20), rng.integers(1, 25), rng.integers(1, 4)
        streams = rng.random((rows, steps)) < 0.5
        wanted = rng.random((rows, planes)) < 0.5
        bits = solve_parity(streams, wanted)
        if bits is None:
            unsolvable += 1
            # More equations than unknowns, or dependent ones.
            assert np.linalg.matrix_rank(streams.astype(float)) <= steps
        else:
            assert ((streams.astype(int) @ bits.astype(int)) % 2 == wanted).all()
    assert 0 < unsolvable < 100
    same = np.array([[True, False], [True, False]])
    assert solve_parity(same, np.array([[True], [False]])) is None


def test_layers_by_name():
    layer = relu_layer(["a", "b"], {"c": {"a": 2, "b": -1, BIAS: 3}, "d": {}})
    assert layer(torch.tensor([[1.0, 7.0]]).double()).tolist() == [[0.0, 0.0]]
    assert layer(torch.tensor([[1.0, 1.0]]).double()).tolist() == [[4.0, 0.0]]
    assert count_nonzero(layer) == 3


def test_pieces_of_a_network_are_the_whole(monkeypatch):
    from boltzattn.theory import relu_network

    network = ReluNetwork(relu_layer(["a"], {"b": {"a": 1}, "c": {"a": -1, BIAS: 1}}))
    z = torch.rand(5, 7, 1, dtype=torch.float64)
    whole = network(z)
    monkeypatch.setattr(relu_network, "_NUMBERS_AT_ONCE", 6)
    with torch.no_grad():
        assert torch.equal(network(z), whole)


@pytest.mark.full
def test_a_hundred_thousand_labels():
    x, y = random_sequences(8, 64, 100_000, 4)
    report = memorize_packed(x, y).report
    assert report.accuracy == 1.0
    assert report.parameters < 12_000
