"""The Triton kernels of `direct` with Gaussian scores, slopes and key biases, interpreted."""

from __future__ import annotations

import math
import zlib
from typing import Any

import boltzattn
import pytest
import torch
from biased import Biased, assert_biased
from covering import pairwise
from servers import Server
from torch import Tensor

TRITON = Server("direct", "triton")
SCORES = ("dot", "gaussian")
FEW = 5  # cases of every run


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(x).removeprefix("torch.") for x in case.values())


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=draw).to(dtype)


CASES = pairwise(
    {
        "n_q": (1, 63, 65, 129),
        "n_k": (1, 63, 65, 130),
        "rank": (1, 3, 16),
        "dv": (1, 17, 65),
        "dtype": (torch.float32, torch.bfloat16, torch.float16),
        "score": SCORES,
        "bias": ("none", "small", "large", "some hidden", "all hidden"),
        "slopes": (False, True),
        "mask": ("none", "causal", "bool", "float"),
        "offset": (0, 10_240),
    }
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=[pytest.mark.full] if number >= FEW else [])
        for number, case in enumerate(CASES)
    ],
)
def test_against_the_oracle(case: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(zlib.crc32(name_of(case).encode()))
    n_q, n_k, dtype, bias, mask = (case[x] for x in ("n_q", "n_k", "dtype", "bias", "mask"))

    def number(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=draw)

    # Gaussian scores depend on differences only. fp32 has the digits for an offset.
    offset = case["offset"] if case["score"] == "gaussian" and dtype == torch.float32 else 0
    key_bias = None
    if bias != "none":
        key_bias = (number(n_k) * (100 if bias == "large" else 1)).to(dtype)
        if bias == "some hidden":
            hidden = torch.rand(key_bias.shape, generator=draw) < 0.3
            key_bias = key_bias.masked_fill(hidden, -math.inf)
        elif bias == "all hidden":
            key_bias[0] = -math.inf
    attn_mask = None
    if mask == "bool":
        attn_mask = torch.rand(2, n_q, n_k, generator=draw) > 0.3
    elif mask == "float":
        attn_mask = number(n_q, n_k).to(dtype)
    call = Biased(
        (number(n_q, case["rank"]) + offset).to(dtype),
        (number(n_k, case["rank"]) + offset).to(dtype),
        number(n_k, case["dv"]).to(dtype),
        key_bias,
        torch.tensor([0.3, 0.01], dtype=dtype) if case["slopes"] else None,
        0.7,
        case["score"],
        mask == "causal",
        attn_mask,
    )
    assert_biased(call, number(n_q, case["dv"]).to(dtype), number(n_q).to(dtype), TRITON)


def _inputs(n: int, rank: int = 3) -> dict[str, Tensor]:
    return {
        "query": normal(2, n, rank, seed=1),
        "key": normal(2, n, rank, seed=2),
        "value": normal(2, n, 4, seed=3),
        "key_bias": normal(2, n, seed=4),
        "alibi_slopes": torch.tensor([0.3, 0.01]),
    }


def _run(inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Output, lse and all gradients."""
    given = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out, lse = boltzattn.attention(**given, return_lse=True, **options)
    grads = (normal(*out.shape, seed=5), torch.ones_like(lse))
    found = torch.autograd.grad((out, lse), list(given.values()), grads)
    named = {f"grad_{name}": x for name, x in zip(given, found, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_common_offset_changes_no_bit(is_causal: bool) -> None:
    """The numbers are multiples of 1 / 256, so that their sums with the offset are exact."""
    inputs = _inputs(70)
    for name in ("query", "key"):
        inputs[name] = (inputs[name] * 256).round() / 256
    moved = inputs | {name: inputs[name] + 10_240 for name in ("query", "key")}
    options = {"score": "gaussian", "is_causal": is_causal, **TRITON.ask}
    actual, expected = _run(moved, **options), _run(inputs, **options)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", [pytest.param("bool", marks=pytest.mark.full), "float"])
def test_hidden_keys_may_hold_anything(kind: str, score: str) -> None:
    inputs = _inputs(70)
    hidden = torch.arange(70) % 3 == 0
    options: dict[str, Any] = {"score": score, **TRITON.ask}
    if kind == "bool":
        del inputs["key_bias"]
        options["key_padding_mask"] = hidden.expand(2, 70)
        for name in ("query", "key", "value"):
            inputs[name] = inputs[name][:, None]
        inputs["alibi_slopes"] = inputs["alibi_slopes"][:, None]
    else:
        inputs["key_bias"] = inputs["key_bias"].masked_fill(hidden, -math.inf)
    results = []
    for filling in (0.0, math.nan, math.inf):
        filled = {
            name: inputs[name].masked_fill(hidden[:, None], filling) for name in ("key", "value")
        }
        results.append(_run(inputs | filled, **options))
    for other in results[1:]:
        for name, x in results[0].items():
            assert torch.equal(other[name], x), name
    assert not results[0]["grad_key"][..., hidden, :].any()
    if kind == "float":
        assert not results[0]["grad_key_bias"][..., hidden].any()


@pytest.mark.parametrize("score", [pytest.param("dot", marks=pytest.mark.full), "gaussian"])
def test_rows_without_keys_are_zero(score: str) -> None:
    inputs = _inputs(70)
    inputs["key_bias"][1] = -math.inf
    for name in ("query", "key", "value"):
        inputs[name][1, ::3] = math.nan
    found = _run(inputs, score=score, **TRITON.ask)
    assert (found.pop("lse")[1] == -math.inf).all()
    for name, x in found.items():
        assert not x[1].any(), name
        assert x[0].isfinite().all(), name


@pytest.mark.parametrize("score", [pytest.param("dot", marks=pytest.mark.full), "gaussian"])
def test_dropout_as_the_cpu_backend(score: str) -> None:
    results = []
    for server in (TRITON, Server("direct", "cpu")):
        torch.manual_seed(1)
        results.append(_run(_inputs(70), score=score, dropout_p=0.3, **server.ask))
    ours, cpus = results
    for name, x in cpus.items():
        # Both obey the rule; a weight that is dropped otherwise would show.
        apart = (ours[name] - x).abs().max().item()
        assert apart <= 64 * torch.finfo(torch.float32).eps * x.abs().max().item(), name


def test_bitwise_the_same_twice() -> None:
    first, second = (_run(_inputs(70), score="gaussian", **TRITON.ask) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(second[name], x), name
