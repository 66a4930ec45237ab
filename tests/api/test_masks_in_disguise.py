"""Masks that say no more than key_padding_mask or key_bias, and calls that turn quadratic."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import boltzattn
import pytest
import torch
from torch import Tensor


def _tensors(n: int = 300) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, n, width) for width in (1, 1, 5)]


def _method(*tensors: Tensor, **options: Tensor) -> str:
    return boltzattn.explain(*tensors, **options).split(",")[0]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    "shape", [(300,), (1, 300), (2, 1, 1, 300), (2, 4, 1, 300), (1, 4, 1, 300)], ids=str
)
def test_a_mask_of_the_keys_is_one(shape: tuple[int, ...], kind: str) -> None:
    query, key, value = _tensors()
    mask = torch.rand(shape) > 0.3 if kind == "bool" else torch.randn(shape)
    whole = mask.expand(2, 4, 300, 300).contiguous()
    expanded = mask.expand(2, 4, 300, 300)
    expected = boltzattn.attention(query, key, value, whole, method="direct", return_lse=True)
    for one in (mask, expanded):
        found = boltzattn.attention(query, key, value, one, method="transform", return_lse=True)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-5)
    assert _method(query, key, value, attn_mask=whole) == "method direct"


def test_it_joins_the_other_masks_of_keys() -> None:
    query, key, value = _tensors()
    hides = torch.rand(2, 1, 1, 300) > 0.2
    padding = torch.rand(2, 300) > 0.8
    bias = torch.randn(4, 300)
    visible = hides & ~padding[:, None, None]
    added = torch.zeros(2, 4, 300, 300).masked_fill(~visible, -torch.inf) + bias[:, None]
    options = {"key_padding_mask": padding, "key_bias": bias}
    expected = boltzattn.attention(query, key, value, added, method="direct")
    found = boltzattn.attention(query, key, value, hides, **options)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
    both = boltzattn.attention(query, key, value, hides, key_padding_mask=padding)
    alone = boltzattn.attention(query, key, value, key_padding_mask=~visible[:, 0, 0])
    assert torch.equal(both, alone)


def test_sums_of_biases_are_not_rounded_to_half_precision() -> None:
    query, key, value = (x.bfloat16() for x in _tensors(65))
    mask, bias = torch.randn(1, 65).bfloat16(), (100 * torch.randn(4, 65)).bfloat16()
    _, lse = boltzattn.attention(query, key, value, mask, key_bias=bias, return_lse=True)
    _, padded = boltzattn.attention(
        query, key, value, key_padding_mask=mask.expand(2, 65), key_bias=bias, return_lse=True
    )
    logits = query.double() * key.double().mT + mask.double() + bias.double()[:, None]
    for found in (lse, padded):
        torch.testing.assert_close(found.double(), logits.logsumexp(-1), rtol=1e-6, atol=1e-4)


def test_grouped_heads_and_one_query() -> None:
    query, key, value = _tensors()
    mask = torch.randn(2, 4, 1, 300)
    whole = mask.expand(2, 4, 300, 300).contiguous()
    few = key[:, :2], value[:, :2]
    found = boltzattn.attention(query, *few, mask, enable_gqa=True)
    expected = boltzattn.attention(query, *few, whole, enable_gqa=True, method="direct")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
    one = boltzattn.attention(query[..., :1, :], key, value, whole[..., :1, :])
    torch.testing.assert_close(
        one, boltzattn.attention(query, key, value, whole)[..., :1, :], rtol=0.0, atol=1e-5
    )


def test_its_gradient_is_that_of_the_mask() -> None:
    query, key, value = (x.double() for x in _tensors(100))
    mask = torch.randn(2, 1, 1, 100, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(value)
    found = torch.autograd.grad(boltzattn.attention(query, key, value, mask), mask, grad)
    whole = mask.expand(2, 4, 100, 100) + 0.0
    expected = torch.autograd.grad(boltzattn.attention(query, key, value, whole), mask, grad)
    torch.testing.assert_close(found, expected)


@pytest.fixture
def reactions() -> Iterator[None]:
    boltzattn.set_quadratic("warn")
    yield
    boltzattn.set_quadratic("warn")


@pytest.mark.usefixtures("reactions")
def test_calls_that_turn_quadratic_say_so() -> None:
    query, key, value = _tensors(3000)
    mask = torch.ones(3000, 3000, dtype=torch.bool).tril()
    with pytest.warns(UserWarning, match=r"attn_mask makes .* quadratic .* is_causal=True"):
        boltzattn.attention(query, key, value, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        boltzattn.attention(query, key, value, mask)  # once
        boltzattn.set_quadratic("ignore")
        boltzattn.attention(query, key, value, mask)
        boltzattn.set_quadratic("warn")
        boltzattn.attention(query, key, value, mask, method="direct")  # as asked for
        boltzattn.attention(*_tensors(64), mask[:64, :64])  # nothing is lost
        boltzattn.attention(*(torch.randn(1, 3000, 2) for _ in range(3)), mask)  # nor here
    with pytest.warns(UserWarning, match="dropout_p makes"):
        boltzattn.attention(query, key, value, dropout_p=0.5)
    boltzattn.set_quadratic("error")
    with pytest.raises(ValueError, match="attn_mask makes this call take quadratic time"):
        boltzattn.attention(query, key, value, mask)
    with pytest.raises(ValueError, match="reaction must be 'warn', 'error' or 'ignore'"):
        boltzattn.set_quadratic("shout")


def test_a_forgotten_rank_is_named() -> None:
    x, value = torch.randn(8, 40), torch.randn(8, 40, 4)
    with pytest.raises(ValueError, match=r"query\.unsqueeze\(-1\)"):
        boltzattn.attention(x, x, value)
    with pytest.raises(ValueError, match=r"query\.unsqueeze\(-1\)"):
        boltzattn.attention(x[0], x[0], value[0])


def test_the_state_of_a_multihead_module_is_named() -> None:
    layer = boltzattn.nn.LowRankAttention(64, 8)
    with pytest.raises(RuntimeError, match="from_multihead"):
        layer.load_state_dict(torch.nn.MultiheadAttention(64, 8).state_dict())


def test_convert_takes_no_more_than_the_rank_there_is() -> None:
    encoder = torch.nn.TransformerEncoderLayer(64, 8, batch_first=True)
    report = boltzattn.nn.convert(encoder, rank=64)
    assert "rank 8 -> 8, kept 100.0%" in str(report)
    assert encoder.self_attn.rank == 8
