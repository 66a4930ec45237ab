"""The causal decoder: next tokens come back through the scan, and what cannot is an error."""

from __future__ import annotations

import math

import pytest
import torch
from boltzattn.theory import (
    ConflictError,
    ResolutionError,
    decoder_inputs,
    empirical_distributions,
    memorize_next,
)


def _documents(count: int, length: int, vocabulary: int = 6, d: int = 4, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    # Documents differ from their first token on, so that no prefix has two next tokens.
    tokens[:, 0] = torch.arange(count)
    return tokens, torch.randn(vocabulary + 1, d, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("network", ["linear", "packed", "looped"])
@pytest.mark.parametrize("length", [1, 30, 900])
def test_next_tokens_come_back(network, length):
    tokens, embedding = _documents(1, length)
    model = memorize_next(tokens, embedding, network=network)
    assert model.attention.method == "transform"
    with torch.no_grad():
        out = model(decoder_inputs(tokens, embedding), is_causal=True)[..., 0]
    assert torch.equal(out.round().long(), tokens)
    assert model.report.accuracy == 1.0
    assert model.report.contexts == length


def test_the_decoder_is_causal_and_generates_the_document():
    tokens, embedding = _documents(1, 60)
    model = memorize_next(tokens, embedding)
    said = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(60):
            x = decoder_inputs(said, embedding)
            said[0, -1] = model(x, is_causal=True)[0, -1, 0].round().long()
            said = torch.cat([said, torch.zeros(1, 1, dtype=torch.long)], 1)
    assert torch.equal(said[:, :-1], tokens)


def test_the_scan_and_the_quadratic_sum_read_the_same_tokens():
    tokens, embedding = _documents(1, 400)
    model = memorize_next(tokens, embedding)
    model.attention.method = "direct"
    with torch.no_grad():
        out = model(decoder_inputs(tokens, embedding), is_causal=True)[..., 0]
    assert torch.equal(out.round().long(), tokens)


def test_distributions_take_a_number_for_each():
    tokens, embedding = _documents(1, 200, vocabulary=4)
    targets = torch.randn(1, 200, 3, dtype=torch.float64)
    model = memorize_next(tokens, embedding, targets=targets)
    with torch.no_grad():
        out = model(decoder_inputs(tokens, embedding), is_causal=True)[..., :3]
    assert float((out - targets).abs().max()) < 1e-7
    assert model.report.accuracy is None
    assert 200 * 3 < model.report.parameters < 200 * 5


def test_several_documents_have_distributions():
    tokens, embedding = _documents(20, 30, vocabulary=20, d=20)
    with pytest.raises(ConflictError):
        memorize_next(tokens, embedding)
    wanted = empirical_distributions(tokens, 20)
    assert torch.allclose(wanted[:, 0], torch.full((20,), 0.05, dtype=torch.float64))
    model = memorize_next(tokens, embedding, targets=wanted[..., :-1])
    with torch.no_grad():
        out = model(decoder_inputs(tokens, embedding), is_causal=True)[..., :19]
    assert float((out - wanted[..., :-1]).abs().max()) < 1e-6
    assert model.report.contexts == 1 + 20 * 29


def test_a_repeated_token_is_no_problem_behind_the_first_one():
    _, embedding = _documents(1, 1)
    tokens = torch.tensor([[2] * 9 + [4]])
    report = memorize_next(tokens, embedding).report
    assert (report.contexts, report.accuracy) == (10, 1.0)


def test_prefixes_that_differ_in_order_only_conflict():
    _, embedding = _documents(1, 1)
    tokens = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])
    with pytest.raises(ConflictError, match="got 1 conflicts") as caught:
        memorize_next(tokens, embedding)
    assert "document 0 place 3 (label 3) and document 1 place 3 (label 4)" in str(caught.value)
    turned = torch.tensor([[0, 1, 2, 3], [1, 0, 2, 3]])
    with pytest.raises(ConflictError, match="does not see the order"):
        memorize_next(turned, embedding)


def test_tokens_that_fp64_cannot_tell_apart():
    embedding = torch.tensor([[1.0], [1.0 + 1e-15], [2.0]], dtype=torch.float64)
    tokens = torch.tensor([[0, 0, 1], [1, 0, 1]])
    targets = empirical_distributions(tokens, 2)[..., :1]
    with pytest.raises(ResolutionError, match="cannot be memorized in fp64"):
        memorize_next(tokens, embedding, targets=targets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": "deep"}, "network must be one of"),
        ({"tokens": torch.zeros(3, dtype=torch.long)}, "tokens must be integers"),
        ({"tokens": torch.full((1, 3), 6)}, "tokens must be from 0 to 5"),
        ({"embedding": torch.zeros(7, 2)}, "embedding must be fp64"),
        ({"targets": torch.zeros(1, 5)}, "targets must have shape"),
        ({"targets": torch.zeros(1, 5, 1), "network": "packed"}, "targets must be None"),
    ],
)
def test_arguments_are_checked(change, message):
    tokens, embedding = _documents(1, 5)
    with pytest.raises(ValueError, match=message):
        memorize_next(**{"tokens": tokens, "embedding": embedding, **change})


def test_capacity_of_packed_bits_grows_faster_than_parameters():
    sizes = [500, 2000]
    counts = {}
    for network in ("linear", "packed"):
        found = []
        for size in sizes:
            tokens, embedding = _documents(1, size, vocabulary=2)
            found.append(memorize_next(tokens, embedding, network=network).report.parameters)
        counts[network] = math.log(found[1] / found[0]) / math.log(sizes[1] / sizes[0])
    assert 0.9 < counts["linear"] < 1.1
    assert counts["packed"] < 0.6
