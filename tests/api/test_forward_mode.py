"""Forward-mode AD agrees with reverse mode and with dense softmax; it never returns zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import boltzattn
import pytest
import torch
from oracle import dense
from servers import PLAIN, Server, facts, servers
from torch import Tensor
from torch.autograd import forward_ad

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "padded": {"key_padding_mask": torch.arange(7) > 4},
}


def _tensors(rank: int = 1, n_q: int = 5, n_k: int = 7) -> tuple[Tensor, ...]:
    shapes = (2, n_q, rank), (2, n_k, rank), (2, n_k, 3)
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def _assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("server", servers(facts(dtype=torch.float64)), ids=str)
def test_jvp_of_out_and_lse(server: Server, call: str) -> None:
    tensors, moves = _tensors(), _tensors()

    def ours(*x: Tensor) -> tuple[Tensor, Tensor]:
        return boltzattn.attention(*x, **CALLS[call], **server.ask, return_lse=True)

    def truth(*x: Tensor) -> tuple[Tensor, Tensor]:
        return dense(*x, **CALLS[call])

    expected = torch.func.jvp(truth, tensors, moves)
    _assert_close(torch.func.jvp(ours, tensors, moves), expected)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, move) for x, move in zip(tensors, moves, strict=True)]
        results = [forward_ad.unpack_dual(x) for x in ours(*duals)]
    _assert_close(tuple(x.primal for x in results), expected[0])
    _assert_close(tuple(x.tangent for x in results), expected[1])


@pytest.mark.parametrize("server", servers(facts(dtype=torch.float64, rank=3)), ids=str)
def test_some_inputs_have_no_tangent(server: Server) -> None:
    query, key, value = _tensors(3)
    move = torch.randn_like(key)

    def of_key(attend: Callable[..., Tensor]) -> Tensor:
        return torch.func.jvp(lambda k: attend(query, k, value), (key,), (move,))[1]

    ours = of_key(lambda *x: boltzattn.attention(*x, **server.ask))
    _assert_close(ours, of_key(lambda *x: dense(*x)[0]))


@pytest.mark.parametrize("server", PLAIN, ids=str)
def test_jacobians_and_hessians(server: Server) -> None:
    query, key, value = _tensors(n_q=2, n_k=3)

    def attend(q: Tensor) -> Tensor:
        return boltzattn.attention(q, key, value, **server.ask)

    def loss(attend: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
        return attend(q).square().sum()

    _assert_close(torch.func.jacfwd(attend)(query), torch.func.jacrev(attend)(query))
    expected = torch.func.hessian(lambda q: loss(lambda q: dense(q, key, value)[0], q))(query)
    _assert_close(torch.func.hessian(lambda q: loss(attend, q))(query), expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_varlen(is_causal: bool) -> None:
    starts = torch.tensor([0, 3, 3, 8])
    shapes = (8, 2, 1), (8, 2, 1), (8, 2, 4)
    tensors, moves = (
        tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes) for _ in range(2)
    )

    def one(q: slice, *x: Tensor) -> Tensor:
        return dense(*(t[q].transpose(0, 1) for t in x), is_causal=is_causal)[0].transpose(0, 1)

    def truth(*x: Tensor) -> Tensor:
        return torch.cat([one(slice(0, 3), *x), one(slice(3, 8), *x)])

    def ours(*x: Tensor) -> Tensor:
        return boltzattn.attention_varlen(*x, starts, starts, is_causal=is_causal)

    expected = torch.func.jvp(truth, tensors, moves)
    _assert_close(torch.func.jvp(ours, tensors, moves), expected)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, move) for x, move in zip(tensors, moves, strict=True)]
        out = forward_ad.unpack_dual(ours(*duals))
        _assert_close((out.primal, out.tangent), expected)


@pytest.mark.parametrize("n", [6, 3000])
def test_layer(n: int) -> None:
    """At 3,000 tokens the layer would be projected at its nodes, where no tangent passes."""
    layer = boltzattn.nn.LowRankAttention(32, 1, batch_first=True, dtype=torch.float64)
    x, move = torch.randn(2, 1, n, 32, dtype=torch.float64)
    step = 1e-6

    def attend(x: Tensor) -> Tensor:
        return layer(x, x, x)[0]

    out, tangent = torch.func.jvp(attend, (x,), (move,))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(attend(forward_ad.make_dual(x, move)))
    difference = (attend(x + step * move) - attend(x - step * move)) / (2 * step)
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-7)
    _assert_close(dual.tangent, tangent)
    _assert_close(dual.primal, out)


def test_floating_masks_have_tangents() -> None:
    tensors, mask = _tensors(), torch.randn(5, 7, dtype=torch.float64)

    def by_mask(attend: Callable[..., Tensor]) -> Tensor:
        return torch.func.jvp(lambda m: attend(m), (mask,), (torch.ones_like(mask).tril(),))[1]

    ours = by_mask(lambda m: boltzattn.attention(*tensors, m))
    _assert_close(ours, by_mask(lambda m: dense(*tensors, attn_mask=m)[0]))


def test_boltz() -> None:
    a, move = torch.randn(2, 4, 9, dtype=torch.float64)

    def truth(a: Tensor) -> Tensor:
        return (a * a.softmax(-1)).sum(-1)

    expected = torch.func.jvp(truth, (a,), (move,))
    _assert_close(torch.func.jvp(boltzattn.boltz, (a,), (move,)), expected)
    _assert_close(torch.func.jacfwd(boltzattn.boltz)(a), torch.func.jacrev(boltzattn.boltz)(a))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(boltzattn.boltz(forward_ad.make_dual(a, move)))
    _assert_close(dual.tangent, expected[1])


def test_gradcheck_in_forward_mode() -> None:
    tensors = tuple(x.requires_grad_() for x in _tensors(2, n_q=2, n_k=3))
    assert torch.autograd.gradcheck(boltzattn.attention, tensors, check_forward_ad=True)


def test_operators_without_tangents_raise() -> None:
    """`self_attention` composes such calls; the operator itself has no rule for them."""
    x, w = torch.randn(1, 50, 8), torch.randn(2, 8)
    numbers = 2, 1.0, False, "auto", "auto", False
    with forward_ad.dual_level():
        x = forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="jvp"):
            torch.ops.boltzattn.self_attention(x, w, w, w, None, None, None, None, *numbers)
