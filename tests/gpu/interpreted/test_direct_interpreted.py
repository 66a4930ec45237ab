"""The Triton kernels of `direct`, interpreted, against the oracle: every flag at awkward sizes."""

from __future__ import annotations

import math
from typing import Any

import boltzattn
import pytest
import torch
from check import assert_alike, assert_attention, run
from covering import pairwise
from oracle import magnitudes
from servers import Server
from test_attention import Case, call_of
from torch import Tensor

TRITON = Server("direct", "triton")
CASES = [
    Case(**case)
    for case in pairwise(
        {
            "n_q": (1, 63, 129),
            "n_k": (0, 2, 65, 257),
            "rank": (1, 2, 5, 16),
            "dv": (1, 17, 130),
            "dtype": (torch.float32, torch.bfloat16, torch.float16),
            "lead": ((), (2,), (1, 2, 1)),
            "mask": (
                "none",
                "causal",
                "bool with dead rows",
                "additive with dead rows",
                "bool padding",
                "additive padding",
                "causal, bool padding",
                "additive, additive padding",
            ),
            "scale": (None, -0.7),
            "through_lse": (True, False),
        }
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case: Case) -> None:
    tensors, call = call_of(case)
    assert_attention(TRITON, *tensors, **call)


def _inputs(n_q: int, n_k: int, rank: int, dv: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, n_q, rank), torch.randn(2, n_k, rank), torch.randn(2, n_k, dv)


def test_dropout_drops_what_the_cpu_backend_drops() -> None:
    query, key, value = _inputs(70, 130, 2, 5)
    outputs = []
    for server in (TRITON, Server("direct", "cpu")):
        torch.manual_seed(1)
        outputs.append(boltzattn.attention(query, key, value, dropout_p=0.4, **server.ask))
    # Both are within the rule of the same sum; a single weight dropped otherwise would show.
    torch.testing.assert_close(*outputs, rtol=0.0, atol=16 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_gradients_with_dropout(dropout_p: float) -> None:
    tensors = [x.requires_grad_() for x in _inputs(70, 130, 2, 5)]
    gradients = []
    for server in (TRITON, Server("direct", "cpu")):
        torch.manual_seed(1)
        out = boltzattn.attention(*tensors, dropout_p=dropout_p, **server.ask)
        gradients.append(torch.autograd.grad(out.square().sum(), tensors))
    for ours, cpus in zip(*gradients, strict=True):
        largest = cpus.abs().max().item()
        assert (ours - cpus).abs().max().item() <= 64 * torch.finfo(torch.float32).eps * largest


def test_strided_and_shared_heads() -> None:
    """Transposed and expanded inputs are read where they lie."""
    query = torch.randn(2, 40, 3, 2).transpose(1, 2)
    key = torch.randn(1, 2, 65).transpose(1, 2).expand(2, 3, 65, 2)
    value = torch.randn(2, 1, 65, 40)[..., ::2].expand(2, 3, 65, 20)
    grad_out = torch.randn(3, 2, 40, 20).transpose(0, 1)
    assert_attention(TRITON, query, key, value, grad_out)


def test_bitwise_the_same_twice() -> None:
    tensors = (*_inputs(129, 257, 3, 20), torch.randn(2, 129, 20))
    first, second = (run(TRITON, *tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_auto_does_not_take_the_interpreter() -> None:
    query, key, value = _inputs(4, 5, 1, 3)
    assert "backend triton" not in boltzattn.explain(query, key, value).splitlines()[0]


@pytest.mark.parametrize(
    "call",
    [{}, {"is_causal": True}, {"key_padding_mask": torch.arange(65) % 3 == 0}],
    ids=["plain", "causal", "padding"],
)
def test_as_the_cpu_backend(call: dict[str, Any]) -> None:
    tensors = (*_inputs(65, 65, 2, 5), torch.randn(2, 65, 5))
    ours, cpus = run(TRITON, *tensors, **call), run(Server("direct", "cpu"), *tensors, **call)
    assert_alike(ours, cpus, magnitudes(*tensors, **call))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_may_hold_anything(kind: str) -> None:
    query, key, value = (x.unsqueeze(1) for x in _inputs(70, 130, 2, 5))
    grad_out = torch.randn(2, 1, 70, 5)
    hidden = torch.arange(130) % 3 == 0
    padding = hidden if kind == "bool" else torch.zeros(130).masked_fill(hidden, -math.inf)
    results = []
    for filling in (0.0, math.nan, math.inf):
        filled = (x.masked_fill(hidden[:, None], filling) for x in (key, value))
        call = {"key_padding_mask": padding.expand(2, 130)}
        results.append(run(TRITON, query, *filled, grad_out, **call))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))
    assert not results[0].grad_key[..., hidden, :].any()
