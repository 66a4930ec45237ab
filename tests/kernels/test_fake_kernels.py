"""Fake kernels say shapes. A call with a real tensor must never get their unwritten results."""

from __future__ import annotations

from typing import Any

import boltzattn
import pytest
import torch
from boltzattn.ops.operator import Operator
from boltzattn.problem import (
    Choice,
    Keep,
    OutputGradients,
    Problem,
    Saved,
    SelfAttentionOutputGradient,
    SelfAttentionProblem,
    SelfAttentionSaved,
    Starts,
    Wanted,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

BATCH, HEADS, N, D, DV = 2, 2, 6, 4, 3


def _tuples() -> dict[Any, Any]:
    """A tuple of every kind, with every tensor given."""
    scores = torch.randn(BATCH, HEADS, N, 1)
    out, lse = torch.randn(BATCH, HEADS, N, DV), torch.randn(BATCH, HEADS, N, dtype=torch.float64)
    mask = torch.zeros(BATCH, HEADS, N, dtype=torch.bool)
    starts = torch.tensor([0, 2, N])
    seed = torch.zeros(BATCH, HEADS, dtype=torch.int64)
    slopes = torch.ones(BATCH, HEADS, dtype=torch.float64)
    attn_mask = torch.ones(BATCH, HEADS, N, N, dtype=torch.bool)
    return {
        Problem: Problem(
            scores, scores, out, attn_mask, mask, slopes, seed, 1.0, 0.5, False, False
        ),
        OutputGradients: OutputGradients(out, lse),
        Saved: Saved(out, lse),
        Starts: Starts(starts, starts),
        Choice: Choice("auto", "auto"),
        Keep: Keep(True),
        Wanted: Wanted(True, True),
        SelfAttentionOutputGradient: SelfAttentionOutputGradient(torch.randn(BATCH, N, D)),
        SelfAttentionSaved: SelfAttentionSaved(
            query_key=torch.randn(BATCH, N, 2 * HEADS),
            value=torch.randn(BATCH, N, HEADS * DV),
            heads=torch.randn(BATCH, N, HEADS * DV),
            lse=lse,
        ),
        SelfAttentionProblem: SelfAttentionProblem(
            x=torch.randn(BATCH, N, D),
            w_q=torch.randn(HEADS, D),
            w_k=torch.randn(HEADS, D),
            w_v=torch.randn(HEADS * DV, D),
            w_o=torch.randn(D, HEADS * DV),
            b_in=torch.randn(HEADS * (2 + DV)),
            b_o=torch.randn(D),
            key_mask=mask[:, 0],
            num_heads=HEADS,
            scale=1.0,
            is_causal=False,
        ),
    }


def _operators() -> dict[str, Operator]:
    from boltzattn.ops import attention, self_attention, varlen

    found = [x for module in (attention, self_attention, varlen) for x in vars(module).values()]
    return {x.name: x for x in found if isinstance(x, Operator)}


OPERATORS = _operators()


def _fields(operator: Operator) -> list[Any]:
    tuples = _tuples()
    return [x for kind in operator.kinds for x in tuples[kind]]


def _cases() -> list[tuple[str, int, str]]:
    cases = []
    for name, operator in OPERATORS.items():
        arguments = operator.overload._schema.arguments
        given = _fields(operator)
        assert len(arguments) == len(given)
        for i, (argument, x) in enumerate(zip(arguments, given, strict=True)):
            assert isinstance(x, Tensor) == ("Tensor" in str(argument.type))
            if isinstance(x, Tensor):
                cases.append((name, i, argument.name))
    return cases


def test_all_operators_are_here() -> None:
    names = [schema.name for schema in torch._C._jit_get_all_schemas()]
    ours = {name.removeprefix("boltzattn::") for name in names if name.startswith("boltzattn::")}
    in_python = {name for name in ours if not name.startswith(("cpu_", "cuda_"))}
    assert in_python == set(OPERATORS)


@pytest.mark.parametrize(
    ("name", "index", "argument"), _cases(), ids=[f"{name}, {what}" for name, _, what in _cases()]
)
@pytest.mark.parametrize("gradient", [False, True], ids=["", "with gradient"])
def test_one_meta_tensor_among_real_ones(
    name: str, index: int, argument: str, gradient: bool
) -> None:
    operator = OPERATORS[name]
    fields = _fields(operator)
    fields[index] = fields[index].to("meta")
    if gradient:
        fields = [
            x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in fields
        ]
    with pytest.raises(ValueError, match="must be on the device of"):
        operator.overload(*fields)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="device"):
        operator.overload(*fields)


@pytest.mark.parametrize("name", OPERATORS)
def test_meta_tensors_alone_give_meta_tensors(name: str) -> None:
    operator = OPERATORS[name]
    fields = [x.to("meta") if isinstance(x, Tensor) else x for x in _fields(operator)]
    found = operator.overload(*fields)
    for x in found if isinstance(found, tuple) else (found,):
        assert x.device.type == "meta"


@pytest.mark.parametrize("argument", ["query", "key", "value", "attn_mask", "key_padding_mask"])
def test_the_function_names_the_argument(argument: str) -> None:
    tensors = {name: torch.randn(2, N, 1) for name in ("query", "key", "value")}
    tensors["attn_mask"], tensors["key_padding_mask"] = torch.zeros(N, N), torch.zeros(N)
    tensors[argument] = tensors[argument].to("meta")
    with pytest.raises(ValueError, match="must be on the device of query"):
        boltzattn.attention(**tensors)
