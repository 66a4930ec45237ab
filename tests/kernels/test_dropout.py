"""Dropout: seeded, the same pattern in every backend, and random enough.

Statistical tests are z-tests with a limit of FALSE_ALARM per comparison. Seeds are fixed, so a
test that passes keeps passing; the probability says how unlikely it is that a correct generator
was unlucky with them.
"""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import boltzattn
import pytest
import torch
from check import run
from errors import assert_accurate
from oracle import eagers, magnitudes, oracle
from servers import Server, facts, servers
from torch import Tensor

FALSE_ALARM = 1e-9
Z_LIMIT = -NormalDist().inv_cdf(FALSE_ALARM / 2)  # about 6.1 standard deviations
DROPPING = servers(facts(rank=2, dropout=True))
PROBABILITIES = (0.01, 0.1, 0.5, 0.9)


def kept(server: Server, shape: tuple[int, ...], dropout_p: float, seed: int) -> Tensor:
    """Which weights survive, bool [..., n_q, n_k], seen from outside.

    Equal logits give every key the weight 1 / n_k, and values that are the unit vectors bring each
    weight out by itself.
    """
    *lead, n_q, n_k = shape
    torch.manual_seed(seed)
    query, key = torch.zeros(*lead, n_q, 2), torch.zeros(*lead, n_k, 2)
    weights = boltzattn.attention(
        query, key, torch.eye(n_k).expand(*lead, n_k, n_k), dropout_p=dropout_p, **server.ask
    )
    expected = 1.0 / (n_k * (1.0 - dropout_p))
    survivors = weights > expected / 2
    assert torch.equal(survivors, weights != 0)
    return survivors


def assert_rate(hits: Tensor, probability: float) -> None:
    """The share of True is binomial around the probability."""
    n = hits.numel()
    deviation = abs(hits.double().sum().item() - n * probability)
    assert deviation <= Z_LIMIT * math.sqrt(n * probability * (1 - probability))


def test_somebody_drops() -> None:
    assert {"reference"} <= {server.backend for server in DROPPING}


@pytest.mark.parametrize("server", DROPPING, ids=str)
@pytest.mark.parametrize("dropout_p", PROBABILITIES)
def test_rate(dropout_p: float, server: Server) -> None:
    survivors = kept(server, (4, 200, 300), dropout_p, seed=1)
    assert_rate(survivors, 1 - dropout_p)
    for head in survivors:
        assert_rate(head, 1 - dropout_p)


@pytest.mark.parametrize("server", DROPPING, ids=str)
@pytest.mark.parametrize("dropout_p", PROBABILITIES)
@pytest.mark.parametrize(
    "shift", [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1), (0, 1, -1), (1, 1, 0), (0, 0, 64)]
)
def test_neighbours_are_independent(
    shift: tuple[int, int, int], dropout_p: float, server: Server
) -> None:
    """Two places survive together as often as independent ones: heads, rows, keys, diagonals."""
    survivors = kept(server, (4, 200, 300), dropout_p, seed=2)
    both = survivors & survivors.roll(shift, (0, 1, 2))
    rate = 1 - dropout_p
    # Pairs overlap in a place: the variance of their number is that of disjoint pairs and twice
    # the covariance of a pair with the next.
    variance = both.numel() * (rate**2 * (1 - rate**2) + 2 * (rate**3 - rate**4))
    deviation = abs(both.double().sum().item() - both.numel() * rate**2)
    assert deviation <= Z_LIMIT * math.sqrt(variance)


@pytest.mark.parametrize("server", DROPPING, ids=str)
def test_patterns_of_eight_are_uniform(server: Server) -> None:
    """At p = 1/2 all 256 patterns of 8 keys in a row are equally frequent (chi squared)."""
    survivors = kept(server, (4, 200, 320), 0.5, seed=3).view(-1, 8)
    codes = (survivors * (2 ** torch.arange(8))).sum(-1)
    counts = torch.bincount(codes, minlength=256).double()
    expected = counts.sum() / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    # Wilson and Hilferty: the cube root of chi squared over its mean is normal.
    freedom = 255
    spread = 2 / (9 * freedom)
    z = ((chi_squared / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert abs(z) <= Z_LIMIT


@pytest.mark.parametrize("server", DROPPING, ids=str)
def test_seeds_repeat_and_differ(server: Server) -> None:
    shape = (2, 100, 120)
    first = kept(server, shape, 0.5, seed=4)
    assert torch.equal(first, kept(server, shape, 0.5, seed=4))
    for seed in range(5, 15):
        assert_rate(first == kept(server, shape, 0.5, seed=seed), 0.5)


@pytest.mark.parametrize("server", DROPPING, ids=str)
def test_successive_calls_differ(server: Server) -> None:
    query, value = torch.zeros(100, 2), torch.eye(100)
    first, second = (
        boltzattn.attention(query, query, value, dropout_p=0.5, **server.ask) for _ in range(2)
    )
    assert_rate((first > 0) == (second > 0), 0.5)


@pytest.mark.parametrize("dropout_p", PROBABILITIES)
@pytest.mark.parametrize("shape", [(70, 130), (3, 70, 65), (2, 3, 33, 40), (1, 300, 1)])
def test_every_backend_draws_the_same(shape: tuple[int, ...], dropout_p: float) -> None:
    patterns = [kept(server, shape, dropout_p, seed=5) for server in DROPPING]
    for first, second in itertools.pairwise(patterns):
        assert torch.equal(first, second)


@pytest.mark.parametrize("server", DROPPING, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_gradients_given_the_pattern(
    is_causal: bool, dtype: torch.dtype, server: Server
) -> None:
    """With the survivors known, the error rule holds; lse knows nothing of dropout."""
    lead, n_q, n_k, dropout_p, seed = (2, 2), 40, 70, 0.3, 6
    keep = kept(server, (*lead, n_q, n_k), dropout_p, seed)
    shapes = ((n_q, 2), (n_k, 2), (n_k, 5), (n_q, 5))
    tensors = [torch.randn(*lead, *shape).to(dtype) for shape in shapes]
    torch.manual_seed(seed)
    actual = run(server, *tensors, dropout_p=dropout_p, is_causal=is_causal)
    call = {"keep": keep, "dropout_p": dropout_p, "is_causal": is_causal}
    truth = oracle(*tensors, **call)._asdict()
    sizes = magnitudes(*tensors, **call)
    sizes["out"] /= 1.0 - dropout_p  # a survivor counts that much more
    yardsticks = eagers(*tensors, **call)
    assert_accurate(actual._asdict(), truth, yardsticks, magnitudes=sizes, method=server.method)


@pytest.mark.parametrize("server", DROPPING, ids=str)
@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_the_expectation_is_attention_without_dropout(dropout_p: float, server: Server) -> None:
    """A draw has the mean sum_j w_j v_j and the variance sum_j (w_j v_j)^2 p / (1 - p)."""
    draws, n_q, n_k = 4000, 3, 10
    query, key, value = torch.randn(n_q, 2), torch.randn(n_k, 2), torch.randn(n_k, 2)
    weights = (query @ key.T * 2**-0.5).softmax(-1).double()
    mean = weights @ value.double()
    variance = weights.square() @ value.double().square() * dropout_p / (1 - dropout_p)
    out = boltzattn.attention(
        query.expand(draws, n_q, 2), key, value, dropout_p=dropout_p, **server.ask
    )
    z = (out.double().mean(0) - mean) / (variance / draws).sqrt()
    assert z.abs().max() <= Z_LIMIT


@pytest.mark.parametrize("server", DROPPING, ids=str)
def test_gradcheck_with_a_fixed_seed(server: Server) -> None:
    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(8)
        return boltzattn.attention(*tensors, dropout_p=0.4, **server.ask, return_lse=True)

    shapes = ((2, 5, 2), (2, 6, 2), (2, 6, 3))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("server", DROPPING, ids=str)
def test_nothing_and_everything_dropped(server: Server) -> None:
    tensors = [torch.randn(2, 5, 2), torch.randn(2, 6, 2), torch.randn(2, 6, 3)]
    none = boltzattn.attention(*tensors, dropout_p=0.0, **server.ask)
    assert torch.equal(none, boltzattn.attention(*tensors, **server.ask))
    actual = run(server, *tensors, torch.randn(2, 5, 3), dropout_p=1.0)
    for x in (actual.out, *actual[2:]):
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize("server", DROPPING, ids=str)
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_keeps_its_promise_of_randomness(randomness: str, server: Server) -> None:
    query, value = torch.zeros(2, 80, 2), torch.eye(80)

    def function(query: Tensor) -> Tensor:
        return boltzattn.attention(query, query, value, dropout_p=0.5, **server.ask) > 0

    first, second = torch.func.vmap(function, randomness=randomness)(query)
    if randomness == "same":
        assert torch.equal(first, second)
    else:
        assert_rate(first == second, 0.5)
