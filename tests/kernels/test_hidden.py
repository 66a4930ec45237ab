"""What a mask hides does not count, whatever it holds: NaN and infinity behind masks."""

from __future__ import annotations

import math

import boltzattn
import pytest
import torch
from check import assert_attention, run
from errors import assert_accurate
from hidden import MASKS, SPOILABLE, Hiding, assert_hidden_do_not_count, hiding
from oracle import Result, eagers, magnitudes, oracle
from servers import PLAIN, Server, facts, servers
from torch import Tensor

POISONS = [math.nan, math.inf, -math.inf]
MASKED = servers(facts(rank=3, attn_mask=True))
CAUSAL = servers(facts(is_causal=True, n_q=1200, n_k=1200))


def _inputs(n: int, rank: int = 1, dv: int = 3) -> list[Tensor]:
    """Query, key, value and the gradients of out and lse."""
    return [torch.randn(2, 1, n, width) for width in (rank, rank, dv, dv)] + [torch.randn(2, 1, n)]


def _fill(x: Tensor, rows: Tensor, poison: float) -> Tensor:
    return x.masked_fill(rows[:, None], poison)


@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("which", ["key", "value", "both"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_may_hold_anything(kind: str, which: str, poison: float, server: Server) -> None:
    """The results are bitwise those of zeros in the padding, and its gradients are zero."""
    query, key, value, *grads = _inputs(300)
    hidden = torch.arange(300) % 7 == 3
    hidden[250:] = True
    padding = hidden if kind == "bool" else torch.zeros(300).masked_fill(hidden, -math.inf)
    call = {"key_padding_mask": padding.expand(2, 300)}
    zeros = [_fill(x, hidden, 0.0) for x in (key, value)]
    poisoned = [
        _fill(x, hidden, poison) if which in (name, "both") else x
        for name, x in (("key", zeros[0]), ("value", zeros[1]))
    ]
    expected = assert_attention(server, query, *zeros, *grads, **call)
    actual = run(server, query, *poisoned, *grads, **call)
    for name, x, y in zip(Result._fields, actual, expected, strict=True):
        assert torch.equal(x, y), name
    for x in (actual.grad_key, actual.grad_value):
        assert torch.equal(x[..., hidden, :], torch.zeros_like(x[..., hidden, :]))


@pytest.mark.parametrize("server", PLAIN, ids=str)
def test_padding_has_no_gradient_where_every_row_is_nan(server: Server) -> None:
    query, key, value, *grads = _inputs(300)
    key[..., 5, :] = math.nan
    padding = (torch.arange(300) > 200).expand(2, 300)
    actual = run(server, query, key, value, *grads, key_padding_mask=padding)
    assert actual.out.isnan().all()
    assert not actual.grad_key[..., 201:, :].any()
    assert not actual.grad_value[..., 201:, :].any()


@pytest.mark.parametrize("server", MASKED, ids=str)
@pytest.mark.parametrize("poison", [*POISONS, 3e38])
@pytest.mark.parametrize("which", ["query", "key", "value", "grad_out"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_groups_do_not_see_each_other(kind: str, which: str, poison: float, server: Server) -> None:
    """Two groups of tokens that attend to themselves; whatever one holds, the other is clean."""
    n = 310
    tensors = dict(
        zip(
            ("query", "key", "value", "grad_out", "grad_lse"), _inputs(n, rank=3, dv=5), strict=True
        )
    )
    group = torch.rand(n) < 0.5
    mask = group == group[:, None]
    if kind == "float":
        mask = torch.zeros(n, n).masked_fill(~mask, -math.inf)
    alone = [x[:, :, group] for x in tensors.values()]
    tensors[which] = _fill(tensors[which], ~group & (torch.rand(n) < 0.1), poison)
    actual = run(server, *tensors.values(), attn_mask=mask)
    assert_accurate(
        {name: x[:, :, group] for name, x in actual._asdict().items()},
        oracle(*alone)._asdict(),
        eagers(*alone),
        magnitudes=magnitudes(*alone),
    )


@pytest.mark.parametrize("server", CAUSAL, ids=str)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("token", [60, 700])
def test_causal_rows_before_a_token_stay_clean(
    token: int, which: str, poison: float, server: Server
) -> None:
    tensors = dict(
        zip(("query", "key", "value", "grad_out", "grad_lse"), _inputs(1200), strict=True)
    )
    alone = [x[:, :, :token] for x in tensors.values()]
    tensors[which][:, :, token] = poison
    actual = run(server, *tensors.values(), is_causal=True)
    clean = {name: getattr(actual, name)[:, :, :token] for name in ("out", "lse", "grad_query")}
    assert_accurate(
        clean,
        oracle(*alone, is_causal=True)._asdict(),
        eagers(*alone, is_causal=True),
        magnitudes=magnitudes(*alone, is_causal=True),
        method=server.method,
    )
    if which != "query" and math.isnan(poison):
        assert actual.out[:, :, token:].isnan().all()


def test_packed_causal_sequences_stay_clean() -> None:
    """As above, and a sequence is clean whatever the others hold."""
    lengths = [70, 900, 130]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    query, key, value = (torch.randn(1100, 2, width) for width in (1, 1, 3))
    expected = boltzattn.attention_varlen(query, key, value, starts, starts, is_causal=True)
    key[500], value[600] = math.nan, math.inf
    out = boltzattn.attention_varlen(query, key, value, starts, starts, is_causal=True)
    for others in (slice(0, 70), slice(970, 1100)):
        assert torch.equal(out[others], expected[others])
    # The head is computed by another method, so results may differ by their rounding.
    torch.testing.assert_close(out[70:500], expected[70:500], rtol=1e-5, atol=1e-5)
    assert out[500:970].isnan().all()


@pytest.mark.parametrize("server", PLAIN, ids=str)
def test_second_derivatives_do_not_see_padding(server: Server) -> None:
    query, key, value, *_ = _inputs(40)
    hidden = torch.arange(40) % 3 == 0
    results = []
    for filling in (0.0, math.nan):
        tensors = [query, _fill(key, hidden, filling), _fill(value, hidden, filling)]
        tensors = [x.detach().requires_grad_() for x in tensors]
        out = boltzattn.attention(*tensors, key_padding_mask=hidden.expand(2, 40), **server.ask)
        grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        loss = sum(x.square().sum() for x in grads)
        results.append(torch.autograd.grad(loss, tensors))
    for zeros, nans in zip(*results, strict=True):
        assert torch.equal(zeros, nans)


@pytest.mark.parametrize("server", MASKED, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", SPOILABLE)
@pytest.mark.parametrize("mask", MASKS)
def test_only_what_is_seen_counts(mask: str, name: str, poison: float, server: Server) -> None:
    """Queries and gradients of out reach the keys that they see, keys and values the rows that see
    them; as many queries as keys or not, and keys shared by heads."""
    call = hiding(mask, (name,), poison, (40, 70) if name == "key" else (70, 40))

    def attend(call: Hiding) -> Result:
        return run(server, *call.spoilt(), attn_mask=call.attn_mask, is_causal=call.is_causal)

    assert_hidden_do_not_count(call, attend)
