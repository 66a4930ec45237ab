"""key_bias, alibi_slopes and score="gaussian" against long double, with all gradients."""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import boltzattn
import pytest
import torch
from biased import Biased, assert_biased
from covering import pairwise
from servers import Server, facts, servers
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    n_q: int
    n_k: int
    rank: int
    dtype: torch.dtype
    score: str
    key_bias: str
    slopes: bool
    is_causal: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        flags = ("-slopes" if self.slopes else "") + ("-causal" if self.is_causal else "")
        return f"{self.n_q}x{self.n_k}-{self.rank}-{dtype}-{self.score}-{self.key_bias}{flags}"


CASES = [
    Case(**row)
    for row in pairwise(
        {
            "n_q": (1, 2, 63, 65, 257, 700),
            "n_k": (1, 2, 63, 65, 257, 700),
            "rank": (1, 2, 5),
            "dtype": DTYPES,
            "score": ("dot", "gaussian"),
            "key_bias": ("none", "small", "large", "some hidden", "all hidden"),
            "slopes": (False, True),
            "is_causal": (False, True),
        }
    )
]


def servers_of(case: Case) -> list[Server]:
    return servers(
        facts(
            dtype=case.dtype,
            n_q=case.n_q,
            n_k=case.n_k,
            rank=case.rank,
            is_causal=case.is_causal,
            key_bias=case.key_bias != "none",
            slopes=case.slopes,
            gaussian=case.score == "gaussian",
        )
    )


def make(case: Case) -> tuple[Biased, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(case.dtype)

    lead = (2,)
    bias = None
    if case.key_bias != "none":
        bias = normal(*lead, case.n_k) * (10 if case.key_bias == "large" else 1)
        if case.key_bias == "some hidden":
            bias = bias.masked_fill(torch.rand(bias.shape, generator=draw) < 0.3, -math.inf)
        if case.key_bias == "all hidden":
            bias[0] = -math.inf
    slopes = torch.tensor([0.5, 0.01], dtype=case.dtype) if case.slopes else None
    call = Biased(
        normal(*lead, case.n_q, case.rank) * 3,
        normal(*lead, case.n_k, case.rank),
        normal(*lead, case.n_k, 5),
        bias,
        slopes,
        0.7,
        case.score,
        case.is_causal,
    )
    return call, normal(*lead, case.n_q, 5), normal(*lead, case.n_q)


@pytest.mark.parametrize(
    ("case", "server"),
    [(case, server) for case in CASES for server in servers_of(case)],
    ids=str,
)
def test_results_and_gradients(case: Case, server: Server) -> None:
    assert_biased(*make(case), server)


def test_key_bias_joins_key_padding_mask() -> None:
    q, k, v = torch.randn(2, 3, 9, 1), torch.randn(2, 3, 7, 1), torch.randn(2, 3, 7, 4)
    bias, hidden = torch.randn(3, 7), torch.zeros(2, 7, dtype=torch.bool)
    hidden[1, 3] = True
    both = bias.expand(2, 3, 7).masked_fill(hidden[:, None], -math.inf)
    expected = boltzattn.attention(q, k, v, key_bias=both)
    for mask in (hidden, torch.zeros(2, 7).masked_fill(hidden, -math.inf)):
        found = boltzattn.attention(q, k, v, key_bias=bias, key_padding_mask=mask)
        torch.testing.assert_close(found, expected)


def test_grouped_heads() -> None:
    q, k, v = torch.randn(2, 6, 9, 1), torch.randn(2, 3, 9, 1), torch.randn(2, 3, 9, 4)
    bias, slopes = torch.randn(6, 9), torch.rand(6)
    options = {"key_bias": bias, "alibi_slopes": slopes, "is_causal": True}
    found = boltzattn.attention(q, k, v, enable_gqa=True, **options)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    torch.testing.assert_close(found, boltzattn.attention(q, k, v, **options))


def test_varlen_counts_distances_within_a_sequence() -> None:
    q, k, v = torch.randn(12, 2, 1), torch.randn(12, 2, 1), torch.randn(12, 2, 4)
    bias, slopes = torch.randn(2, 12), torch.rand(2)
    inputs = [x.requires_grad_() for x in (q, k, v, bias, slopes)]
    starts = torch.tensor([0, 5, 5, 12])
    found = boltzattn.attention_varlen(
        q, k, v, starts, starts, key_bias=bias, alibi_slopes=slopes, is_causal=True
    )
    parts = []
    for rows in (slice(0, 5), slice(5, 12)):
        part = boltzattn.attention(
            *(x[rows].transpose(0, 1) for x in (q, k, v)),
            key_bias=bias[:, rows],
            alibi_slopes=slopes,
            is_causal=True,
        )
        parts.append(part.transpose(0, 1))
    expected, grad = torch.cat(parts), torch.randn(12, 2, 4)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(x, inputs, grad) for x in (found, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("score", ["dot", "gaussian"])
def test_second_derivatives_and_tangents(score: str) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 6, 2), (2, 7, 2), (2, 7, 3), (2, 7), (2,)
    inputs = [torch.rand(s, generator=draw, dtype=torch.float64) for s in shapes]
    inputs = [x.requires_grad_() for x in inputs]

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, slopes: Tensor) -> tuple:
        return boltzattn.attention(
            query,
            key,
            value,
            key_bias=bias,
            alibi_slopes=slopes,
            score=score,
            is_causal=True,
            return_lse=True,
        )

    torch.autograd.gradcheck(call, inputs, fast_mode=True, check_forward_ad=True)
    torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "cosine"}, "score must be 'dot' or 'gaussian', got 'cosine'"),
        ({"key_bias": torch.zeros(2, 5)}, r"key_bias must broadcast to .* = \[2, 3, 7\]"),
        ({"key_bias": torch.zeros(7, dtype=torch.bool)}, "key_bias must be floating point"),
        ({"key_bias": [0.0]}, "key_bias must be a tensor, got list"),
        ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes must broadcast to .* = \[2, 3\]"),
        ({"alibi_slopes": torch.zeros(3), "method": "transform"}, "only with is_causal=True"),
    ],
)
def test_errors_name_the_argument(options: dict, message: str) -> None:
    q, k, v = torch.randn(2, 3, 9, 1), torch.randn(2, 3, 7, 1), torch.randn(2, 3, 7, 4)
    with pytest.raises((TypeError, ValueError), match=message):
        boltzattn.attention(q, k, v, **options)
