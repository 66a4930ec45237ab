"""Streams of rank 2 to 4: what attention over everything gives."""

from __future__ import annotations

import math
from typing import Any

import boltzattn
import pytest
import torch
from biased import Biased, oracle
from torch import Tensor

TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-10, torch.bfloat16: 4 * 2**-8}
BOUNDS = {2: (3.0, 1.5), 3: (1.5, 1.0, 0.5), 4: (0.1875, 0.1875, 0.1875, 0.1875)}


def _tokens(kind: str, n: int, rank: int) -> Tensor:
    """Keys [n, rank] within the bounds."""
    bound = torch.tensor(BOUNDS[rank]).double()
    x = torch.randn(n, rank, dtype=torch.float64)
    found = {
        "normal": x.clamp(-1, 1),
        "ties": x.round().clamp(-1, 1),
        "corners": x.sign(),
        "rising": torch.linspace(-1, 1, n).double()[:, None].expand(n, rank),
        "equal": torch.full_like(x, -0.7),
    }[kind]
    return found * bound


def _exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **more: Any) -> dict[str, Tensor]:
    zeros = torch.zeros(*q.shape[:-1], v.shape[-1]), torch.zeros(q.shape[:-1])
    return oracle(Biased(q, k, v, bias, **more), *zeros)[0]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "corners", "rising", "equal"])
@pytest.mark.parametrize("score", ["dot", "gaussian"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_equals_attention_over_everything(
    rank: int, score: str, kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    bound, n = torch.tensor(BOUNDS[rank]), 400
    key = torch.stack([_tokens(kind, n, rank) for _ in range(2)]).to(dtype)
    value, bias = torch.randn(2, n, 5).to(dtype), 3 * torch.randn(2, n)
    bias = bias.masked_fill(torch.rand(2, n) < 0.2, -math.inf).to(dtype)
    query = (2 * torch.rand(2, 40, rank) - 1).mul(bound).to(dtype)
    query[:, 0], query[:, 1] = bound, -bound
    scale = 2.0
    stream = boltzattn.StreamingAttention(
        2, 5, BOUNDS[rank], key_bound=BOUNDS[rank], rank=rank, score=score, scale=scale, dtype=dtype
    )
    out = stream.query(query)
    assert (out == 0).all()
    done = 0
    for size in (1, 2, 0, 65, 332):
        piece = slice(done, done + size)
        stream.append(key[:, piece], value[:, piece], bias[:, piece])
        done += size
    assert len(stream) == done == n
    out, lse = stream.query(query, return_lse=True)
    exact = _exact(query, key, value, bias, score=score, scale=scale)
    assert float((out.double() - exact["out"]).abs().max()) <= TOLERANCE[dtype] * float(
        value.abs().max()
    )
    size = exact["lse"].abs().max().clamp(min=1.0)
    precise = TOLERANCE[dtype] if dtype == torch.float64 else 5e-6
    assert float((lse.double() - exact["lse"]).abs().max() / size) <= precise


def test_steps_equal_the_causal_call() -> None:
    torch.manual_seed(0)
    n, slopes = 200, torch.tensor([0.5, 2.0**-8])
    query, key = (torch.randn(2, n, 2).clamp(-2, 2) for _ in range(2))
    value = torch.randn(2, n, 4)
    stream = boltzattn.StreamingAttention(2, 4, 2.0, key_bound=2.0, rank=2, alibi_slopes=slopes)
    steps = [stream.step(*(x[:, i : i + 1] for x in (query, key, value))) for i in range(n)]
    whole = boltzattn.attention(query, key, value, is_causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0.0, atol=1e-5)


def test_merge_and_state_dict() -> None:
    torch.manual_seed(0)
    key, value, query = torch.rand(3, 90, 2), torch.randn(3, 90, 4), torch.rand(3, 7, 2)
    streams = [boltzattn.StreamingAttention(3, 4, 1.0, key_bound=1.0, rank=2) for _ in range(3)]
    streams[0].append(key[:, :40], value[:, :40])
    streams[1].append(key[:, 40:], value[:, 40:])
    streams[0].merge(streams[1])
    whole = boltzattn.attention(query, key, value)
    torch.testing.assert_close(streams[0].query(query), whole, rtol=0.0, atol=1e-5)
    streams[2].load_state_dict(streams[0].state_dict())
    assert torch.equal(streams[2].query(query), streams[0].query(query))


def test_the_state_does_not_grow() -> None:
    stream = boltzattn.StreamingAttention(1, 8, 2.0, key_bound=2.0, rank=2)
    before = stream.state_bytes()
    for _ in range(3):
        stream.append(torch.rand(1, 1000, 2), torch.rand(1, 1000, 8))
    assert stream.state_bytes() == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 2}, "key_bound must be given with rank 2"),
        ({"rank": 5, "key_bound": 1.0}, "rank must be a number from 1 to 4"),
        ({"rank": 2, "key_bound": (1.0, 2.0, 3.0)}, "one for each of 2 axes"),
        ({"rank": 2, "key_bound": (1.0, -2.0)}, "positive finite"),
        ({"rank": 2, "key_bound": 1e4}, "query_bound times key_bound must be smaller"),
    ],
)
def test_wrong_settings(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        boltzattn.StreamingAttention(2, 3, 1.0, **options)


def test_tokens_beyond_the_bound_of_an_axis() -> None:
    stream = boltzattn.StreamingAttention(1, 2, (2.0, 1.0), key_bound=(2.0, 1.0), rank=2)
    wrong, right = torch.tensor([[[0.0, 1.5]]]), torch.tensor([[[1.5, 0.0]]])
    stream.append(right, torch.zeros(1, 1, 2))
    with pytest.raises(ValueError, match="key must be within key_bound = 1"):
        stream.append(wrong, torch.zeros(1, 1, 2))
    with pytest.raises(ValueError, match="query must be within query_bound = 1"):
        stream.query(wrong)
    with pytest.raises(ValueError, match="rank"):
        stream.query(wrong[..., :1])
    assert len(stream) == 1
