"""Gaussian scores, slopes and key biases where they are hard: offsets, odd scales, hidden NaN, many
threads, other instruction sets, packed sequences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import boltzattn
import pytest
import torch
from biased import Biased, assert_biased
from boltzattn.ops.varlen import Sequences
from boltzattn.problem import Choice, Starts
from boltzattn.validation import validate_varlen
from servers import Server, facts, instruction_set, instruction_sets, servers
from torch import Tensor

SCORES = ("dot", "gaussian")
GAUSSIAN = [s for s in servers(facts(rank=3, gaussian=True, slopes=True)) if s.method == "direct"]
MASKED = servers(facts(rank=3, attn_mask=True, gaussian=True, slopes=True))
POISONS = [math.nan, math.inf, -math.inf, 3e38]


def _normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)


def _inputs(n: int, rank: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "query": _normal(2, n, rank, dtype=dtype, seed=1),
        "key": _normal(2, n, rank, dtype=dtype, seed=2),
        "value": _normal(2, n, 4, dtype=dtype, seed=3),
        "key_bias": _normal(2, n, dtype=dtype, seed=4),
        "alibi_slopes": torch.tensor([0.3, 0.01], dtype=dtype),
    }


def _run(inputs: dict[str, Tensor], grad_out: Tensor, **options: Any) -> dict[str, Tensor]:
    """Output, lse and all gradients."""
    given = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out, lse = boltzattn.attention(**given, return_lse=True, **options)
    grads = torch.autograd.grad((out, lse), list(given.values()), (grad_out, torch.ones_like(lse)))
    named = {f"grad_{name}": x for name, x in zip(given, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def _assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


@pytest.mark.parametrize("server", GAUSSIAN, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_common_offset_changes_no_bit(is_causal: bool, server: Server) -> None:
    """The numbers are multiples of 1 / 256, so that their sums with the offset are exact."""
    inputs, grad_out = _inputs(310), _normal(2, 310, 4, seed=5)
    for name in ("query", "key"):
        inputs[name] = (inputs[name] * 256).round() / 256
    moved = inputs | {name: inputs[name] + 10_240 for name in ("query", "key")}
    options = {"score": "gaussian", "is_causal": is_causal, **server.ask}
    _assert_same(_run(moved, grad_out, **options), _run(inputs, grad_out, **options))


@pytest.mark.parametrize("server", GAUSSIAN, ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("rank", [1, 17])
def test_scales_that_are_not_positive(rank: int, scale: float, score: str, server: Server) -> None:
    inputs = _inputs(130, rank)
    call = Biased(**inputs, scale=scale, score=score)
    assert_biased(call, _normal(2, 130, 4, seed=5), _normal(2, 130, seed=6), server)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("score", SCORES)
def test_every_instruction_set(score: str, dtype: torch.dtype, isa: str) -> None:
    call = Biased(**_inputs(313, 5, dtype), scale=0.7, score=score, is_causal=True)
    grads = _normal(2, 313, 4, dtype=dtype, seed=5), _normal(2, 313, dtype=dtype, seed=6)
    with instruction_set(isa):
        assert_biased(call, *grads, Server("direct", "cpu"))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_threads_change_no_bit(is_causal: bool, score: str) -> None:
    """Enough keys for several shares."""
    inputs, grad_out = _inputs(2100), _normal(2, 2100, 4, seed=5)
    options = {"score": score, "is_causal": is_causal, "method": "direct", "backend": "cpu"}
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(_run(inputs, grad_out, **options))
    finally:
        torch.set_num_threads(threads)
    _assert_same(*results)


# ---- what a mask hides does not count ----


@pytest.mark.parametrize("server", GAUSSIAN, ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("poison", POISONS)
def test_keys_of_bias_minus_infinity_may_hold_anything(
    poison: float, score: str, server: Server
) -> None:
    inputs, grad_out = _inputs(300), _normal(2, 300, 4, seed=5)
    hidden = torch.arange(300) % 7 == 3
    inputs["key_bias"] = inputs["key_bias"].masked_fill(hidden, -math.inf)

    def filled(x: float) -> dict[str, Tensor]:
        both = {name: inputs[name].masked_fill(hidden[:, None], x) for name in ("key", "value")}
        return inputs | both

    expected = _run(filled(0.0), grad_out, score=score, **server.ask)
    _assert_same(_run(filled(poison), grad_out, score=score, **server.ask), expected)
    assert all(x.isfinite().all() for x in expected.values())
    for name in ("grad_key", "grad_value"):
        assert not expected[name][:, hidden].any()
    assert not expected["grad_key_bias"][:, hidden].any()


@pytest.mark.parametrize("server", MASKED, ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_hidden_tokens_may_hold_anything(
    kind: str, poison: float, score: str, server: Server
) -> None:
    """Tokens that attn_mask takes out altogether: no row sees them, and they see nothing."""
    n = 310
    inputs, grad_out = _inputs(n), _normal(2, n, 4, seed=5)
    hidden = torch.arange(n) % 11 == 4
    mask = ~(hidden | hidden[:, None])
    if kind == "float":
        mask = torch.zeros(n, n).masked_fill(~mask, -math.inf)

    def filled(x: float) -> dict[str, Tensor]:
        names = ("query", "key", "value")
        return inputs | {name: inputs[name].masked_fill(hidden[:, None], x) for name in names}

    options = {"score": score, "attn_mask": mask, **server.ask}
    actual, expected = (_run(filled(x), grad_out, **options) for x in (poison, 0.0))
    for name, x in expected.items():
        assert actual[name].isfinite().all() or name == "lse", name
        # Pairs are added up one by one where there is NaN, so results may differ by their rounding.
        torch.testing.assert_close(actual[name], x, rtol=1e-4, atol=1e-5, msg=name)
    for name in ("query", "key", "value"):
        assert not actual[f"grad_{name}"][:, hidden].any()


@pytest.mark.parametrize("server", GAUSSIAN, ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_causal_rows_before_a_token_stay_clean(
    which: str, poison: float, score: str, server: Server
) -> None:
    inputs, grad_out = _inputs(300), _normal(2, 300, 4, seed=5)
    options = {"score": score, "is_causal": True, **server.ask}
    expected = _run(inputs, grad_out, **options)
    inputs[which] = inputs[which].clone()
    inputs[which][:, 170] = poison
    actual = _run(inputs, grad_out, **options)
    for name in ("out", "lse", "grad_query"):
        assert actual[name][:, :170].isfinite().all(), name
        torch.testing.assert_close(
            actual[name][:, :170], expected[name][:, :170], rtol=1e-4, atol=1e-5, msg=name
        )


@pytest.mark.parametrize("server", GAUSSIAN, ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf])
def test_rows_without_keys_are_zero(poison: float, score: str, server: Server) -> None:
    inputs, grad_out = _inputs(70), _normal(2, 70, 4, seed=5)
    inputs["key_bias"][1] = -math.inf
    for name in ("query", "key", "value"):
        inputs[name][1, ::3] = poison
    found = _run(inputs, grad_out, score=score, **server.ask)
    assert (found.pop("lse")[1] == -math.inf).all()
    for name, x in found.items():
        assert not x[1].any(), name
        assert x[0].isfinite().all(), name


# ---- packed sequences ----


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("method", "score", "left_out"),
    [
        *(("direct", score, out) for score in SCORES for out in ("", "key_bias", "alibi_slopes")),
        ("transform", "dot", "alibi_slopes"),
    ],
)
def test_packed_sequences_are_separate_calls(
    method: str, score: str, left_out: str, is_causal: bool
) -> None:
    """Bitwise, in one kernel; gradients of slopes are added up in the order of the sequences."""
    starts = torch.tensor([0, 1, 66, 66, 323, 400])
    inputs = _inputs(400, rank=1 if method == "transform" else 3)
    grad_out = _normal(2, 400, 4, seed=5)
    inputs.pop(left_out, None)
    options = {"score": score, "is_causal": is_causal, "method": method, "backend": "cpu"}
    parts = []
    for first, last in itertools.pairwise(starts.tolist()):
        cut = {
            name: x if name == "alibi_slopes" else x[:, first:last] for name, x in inputs.items()
        }
        parts.append(_run(cut, grad_out[:, first:last], **options))
    given = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    packed = {name: given[name].transpose(0, 1) for name in ("query", "key", "value")}
    rest = {name: x for name, x in given.items() if name not in packed}
    call = validate_varlen(**packed, cu_seqlens_q=starts, cu_seqlens_k=starts, **rest, **options)
    assert Sequences(call.problem, Starts(starts, starts), Choice(method, "cpu")).together
    out, lse = boltzattn.attention_varlen(
        **packed, cu_seqlens_q=starts, cu_seqlens_k=starts, **rest, **options, return_lse=True
    )
    grads = torch.autograd.grad(
        (out, lse), list(given.values()), (grad_out.transpose(0, 1), torch.ones_like(lse))
    )
    assert torch.equal(out.transpose(0, 1), torch.cat([part["out"] for part in parts], 1))
    for name, x in zip(given, grads, strict=True):
        of_parts = [part[f"grad_{name}"] for part in parts]
        if name == "alibi_slopes":
            torch.testing.assert_close(x, sum(of_parts))  # these are rounded to fp32
        else:
            assert torch.equal(x, torch.cat(of_parts, 1)), name
