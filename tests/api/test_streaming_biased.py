"""Streams with a bias per key, ALiBi and Gaussian scores: what attention over everything gives."""

from __future__ import annotations

import math
from typing import Any

import boltzattn
import pytest
import torch
from torch import Tensor

TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-10, torch.bfloat16: 4 * 2**-8}
SETTINGS: dict[str, dict[str, Any]] = {
    "bias": {},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 2.0**-6])},
    "no slope": {"alibi_slopes": torch.zeros(2)},
    "gaussian": {"score": "gaussian", "scale": 9.0},
    "all": {"score": "gaussian", "scale": 3.0, "alibi_slopes": torch.tensor([0.01, 0.2])},
    "cold": {"scale": -30.0},
}


def keys_of(kind: str, n: int) -> Tensor:
    normal = torch.randn(2, n, 1, dtype=torch.float64)
    steps = torch.linspace(-1.0, 1.0, n, dtype=torch.float64)[:, None].expand(2, n, 1)
    return {
        "normal": normal.clamp(-3, 3),
        "rising": 3 * steps,
        "falling": -3 * steps,
        "ties": normal.round().clamp(-3, 3),
        "needle": torch.where(steps > 0.99, 3.0, 0.01 * normal),
        "equal": torch.full_like(normal, -0.7),
    }[kind]


def truth(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and lse in fp64; distances are counted from the last key."""
    q, k, v = (x.double() for x in (query, key, value))
    scale, n = settings.get("scale", 1.0), key.shape[-2]
    gaussian = settings.get("score") == "gaussian"
    logits = -0.5 * scale * (q - k.mT) ** 2 if gaussian else scale * q * k.mT
    if bias is not None:
        logits = logits + bias.double().expand(2, n)[:, None]
    if (slopes := settings.get("alibi_slopes")) is not None:
        logits = logits + slopes.double()[:, None, None] * torch.arange(1 - n, 1)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return weights @ v, lse


def biases(n: int) -> Tensor:
    found = 3 * torch.randn(2, n, dtype=torch.float64)
    return found.masked_fill(torch.rand(2, n) < 0.2, -math.inf)


def assert_right(
    stream: boltzattn.StreamingAttention,
    tokens: tuple[Tensor, Tensor, Tensor | None],
    settings: dict[str, Any],
) -> None:
    key, value, bias = tokens
    query = torch.cat([torch.linspace(-4, 4, 33).double(), torch.tensor([0.0, 1e-9])])
    query = query.to(stream.dtype).expand(2, -1)[..., None]
    out, lse = stream.query(query, return_lse=True)
    exact, exact_lse = truth(query, key, value, bias, settings)
    tolerance = TOLERANCE[stream.dtype]
    assert float((out.double() - exact).abs().max()) <= tolerance * float(value.abs().max())
    size = exact_lse.abs().amax().clamp(min=1.0)
    precise = tolerance if stream.dtype == torch.float64 else 5e-6
    assert float((lse.double() - exact_lse).abs().max() / size) <= precise


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["normal", "rising", "falling", "ties", "needle", "equal"])
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_attention_over_everything(name: str, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    settings, n = SETTINGS[name], 700
    key, value = keys_of(kind, n).to(dtype), torch.randn(2, n, 5).to(dtype)
    bias = None if name in ("alibi", "gaussian") else biases(n)
    stream = boltzattn.StreamingAttention(2, 5, 4.0, key_bound=3.0, dtype=dtype, **settings)
    done = 0
    for size in (1, 2, 0, 63, 65, 257, 312):
        piece = slice(done, done + size)
        part = None if bias is None else bias[:, piece]
        stream.append(key[:, piece], value[:, piece], part)
        done += size
        if done in (1, 66, n):
            seen = slice(0, done)
            part = None if bias is None else bias[:, seen]
            assert_right(stream, (key[:, seen], value[:, seen], part), settings)
    assert len(stream) == done == n


def test_steps_equal_the_causal_call() -> None:
    torch.manual_seed(0)
    n, slopes = 300, torch.tensor([0.5, 0.25, 2.0**-8])
    query, key, value = (torch.randn(3, n, w).clamp(-3, 3) for w in (1, 1, 4))
    bias = torch.randn(3, n)
    stream = boltzattn.StreamingAttention(3, 4, 3.0, key_bound=3.0, alibi_slopes=slopes)
    steps = [
        stream.step(query[:, i : i + 1], key[:, i : i + 1], value[:, i : i + 1], bias[:, i : i + 1])
        for i in range(n)
    ]
    whole = boltzattn.attention(
        query, key, value, is_causal=True, key_bias=bias, alibi_slopes=slopes
    )
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0.0, atol=1e-5)


def test_a_million_tokens_fade() -> None:
    """Distances are counted from the last token, so nothing grows with the length."""
    torch.manual_seed(0)
    slopes = torch.tensor([0.5, 2.0**-8])
    stream = boltzattn.StreamingAttention(2, 3, 4.0, key_bound=3.0, alibi_slopes=slopes)
    for _ in range(10):
        key, value = keys_of("normal", 5000).float(), torch.randn(2, 5000, 3)
        stream.append(key, value)
    stream._table._grow_older(10**6)  # as hidden tokens would
    stream.append(key, value)
    # What is older weighs less than exp(-5000 / 256 - 1e6 / 256).
    assert_right(stream, (key, value, None), {"alibi_slopes": slopes})


@pytest.mark.parametrize("name", SETTINGS)
def test_merge_of_halves_is_the_whole(name: str) -> None:
    torch.manual_seed(0)
    settings, n = SETTINGS[name], 400
    key, value, bias = keys_of("normal", n), torch.randn(2, n, 5).double(), biases(n)
    kind = {"key_bound": 3.0, "dtype": torch.float64, **settings}
    halves = [boltzattn.StreamingAttention(2, 5, 4.0, **kind) for _ in range(2)]
    for stream, part in zip(halves, (slice(0, 150), slice(150, n)), strict=True):
        stream.append(key[:, part], value[:, part], bias[:, part])
    empty = boltzattn.StreamingAttention(2, 5, 4.0, **kind)
    empty.merge(halves[0])
    empty.merge(halves[1])
    assert len(empty) == n
    assert_right(empty, (key, value, bias), settings)


def test_the_state_is_small_and_saved_without_loss() -> None:
    slopes = torch.tensor([0.5, 0.25])
    kind = {"key_bound": 4.0, "alibi_slopes": slopes}
    stream = boltzattn.StreamingAttention(2, 64, 4.0, **kind)
    assert stream.state_bytes() / 2 <= 150e3  # a head, with logits up to 16
    stream.append(torch.rand(2, 1000, 1), torch.randn(2, 1000, 64))
    saved = stream.state_dict()
    other = boltzattn.StreamingAttention(2, 64, 4.0, **kind)
    other.load_state_dict(saved)
    query = torch.randn(2, 3, 1)
    token = torch.rand(2, 1, 1), torch.randn(2, 1, 64)
    for one in (stream, other):
        one.append(*token)
    assert torch.equal(stream.query(query), other.query(query))
    with pytest.raises(ValueError, match="settings of this one"):
        boltzattn.StreamingAttention(2, 64, 4.0, key_bound=4.0).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"'top' as a float64 tensor"):
        other.load_state_dict({**saved, "top": torch.zeros(1)})
    assert len(other) == 1001


def test_nothing_yet_and_nothing_visible() -> None:
    stream = boltzattn.StreamingAttention(2, 3, 4.0, key_bound=3.0)
    query = torch.randn(2, 5, 1).clamp(-4, 4)
    hidden = torch.full((2, 4), -math.inf)
    for _ in range(2):
        out, lse = stream.query(query, return_lse=True)
        assert torch.equal(out, torch.zeros(2, 5, 3))
        assert (lse == -math.inf).all()
        # A hidden key never contributes, whatever it holds.
        stream.append(torch.full((2, 4, 1), math.nan), torch.full((2, 4, 3), math.inf), hidden)
    key, value = torch.randn(2, 9, 1).clamp(-3, 3), torch.randn(2, 9, 3)
    stream.append(key, value)
    assert_right(stream, (key, value, None), {})


def test_refuses() -> None:
    make = boltzattn.StreamingAttention
    with pytest.raises(ValueError, match="key_bound must be given with score='gaussian'"):
        make(2, 3, 4.0, score="gaussian")
    with pytest.raises(ValueError, match="key_bound must be given with alibi_slopes"):
        make(2, 3, 4.0, alibi_slopes=torch.ones(2))
    with pytest.raises(ValueError, match="key_bound must be a positive finite number"):
        make(2, 3, 4.0, key_bound=-1.0)
    with pytest.raises(ValueError, match="scale must be a positive number"):
        make(2, 3, 4.0, key_bound=1.0, score="gaussian", scale=0.0)
    with pytest.raises(ValueError, match="score must be 'dot' or 'gaussian'"):
        make(2, 3, 4.0, score="cosine")
    with pytest.raises(ValueError, match="alibi_slopes must broadcast"):
        make(2, 3, 4.0, key_bound=1.0, alibi_slopes=torch.ones(3))
    with pytest.raises(ValueError, match="query_bound times key_bound must be smaller"):
        make(2, 3, 1e3, key_bound=1e3)
    key, value = torch.zeros(2, 1, 1), torch.zeros(2, 1, 3)
    with pytest.raises(ValueError, match="key_bias needs a stream with key_bound"):
        make(2, 3, 4.0).append(key, value, torch.zeros(2, 1))
    stream = make(2, 3, 4.0, key_bound=3.0)
    with pytest.raises(ValueError, match=r"key must be within key_bound = 3, got 4"):
        stream.append(key + 4, value)
    with pytest.raises(ValueError, match=r"query must be within query_bound = 4, got 5"):
        stream.step(key + 5, key, value)
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="key_bias must be finite or -inf"):
            stream.append(key, value, torch.full((2, 1), wrong))
        with pytest.raises(ValueError, match="key and value must be finite"):
            stream.append(key, value + wrong)
    with pytest.raises(ValueError, match="key_bias must broadcast"):
        stream.append(key, value, torch.zeros(3, 1))
    with pytest.raises(TypeError, match="key_bias must be a floating-point tensor"):
        stream.append(key, value, torch.zeros(2, 1, dtype=torch.int64))
    assert len(stream) == 0
