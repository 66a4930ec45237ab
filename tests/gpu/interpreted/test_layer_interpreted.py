"""Self-attention with its projections at the nodes, by Triton kernels, against dense fp64."""

from __future__ import annotations

import errors
import pytest
import torch
from test_layer import assert_agrees, problem, run
from torch import Tensor

DENSE = {"method": "direct", "backend": "reference"}
TRITON = {"method": "transform", "backend": "triton"}
# The interpreter takes seconds for a head.
SMALL = {"n": 70, "d": 20, "heads": 2, "dv": 3, "d_out": 18}
ALONE = SMALL | {"lead": (), "heads": 1}


def both(
    monkeypatch: pytest.MonkeyPatch, tensors: dict[str, Tensor], heads: int, **call: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(by Triton at the nodes, dense in fp64)."""
    ours = run(monkeypatch, "nodes", tensors, heads, **call, **TRITON)
    doubles = {name: x.double() for name, x in tensors.items()}
    return ours, run(monkeypatch, "first", doubles, heads, **call, **DENSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_oracle(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    assert_agrees(*both(monkeypatch, problem(dtype, lead=(), **SMALL), 2), dtype)


def test_no_output_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = problem(torch.float32, lead=(), n=65, d=5, heads=1, dv=3, biased=False)
    del tensors["w_o"]
    assert_agrees(*both(monkeypatch, tensors, 1), torch.float32)


def test_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = problem(torch.float32, **SMALL)
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[1] = True  # no key at all: only the output's bias is left
    ours, exact = both(monkeypatch, tensors, 2, key_padding_mask=mask)
    assert_agrees(ours, exact, torch.float32)
    assert torch.equal(ours["out"][1], tensors["b_o"].expand(70, -1))


def test_heads_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one head only: the other goes on at the nodes."""
    tensors = problem(torch.float32, lead=(), **SMALL)
    tensors["w_q"][1] *= 1e9
    ours, exact = both(monkeypatch, tensors, 2)
    # fp32 cannot tell logits of 1e10 apart; the token of the largest key takes all, and gradients
    # through such a softmax are not comparable at all.
    for name in ("out", "w_v", "w_o"):
        assert errors.largest(ours[name].double() - exact[name]) <= 2e-5 * errors.largest(
            exact[name]
        )


def test_as_the_cpu_and_bitwise_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = problem(torch.float32, **ALONE | {"n": 33})
    first, second = (run(monkeypatch, "nodes", tensors, 1, **TRITON) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_agrees(first, run(monkeypatch, "nodes", tensors, 1), torch.float32)
