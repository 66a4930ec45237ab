"""LowRankAttention(token_shift=): tokens mixed with earlier ones, whole or step by step."""

from __future__ import annotations

import math

import pytest
import torch
from boltzattn.nn import LowRankAttention
from torch import Tensor, nn

EMBED, HEADS, BATCH, N, SHIFT = 12, 3, 2, 9, 3

# fp64 on both sides; sums of a few terms in another order.
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}
OPTIONS = {
    "dot": {},
    "gaussian": {"score": "gaussian"},
    "alibi": {"alibi": True},
    "rank 2": {"rank": 2},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def pair(shift: int = SHIFT, **options: object) -> tuple[LowRankAttention, LowRankAttention]:
    """A layer with a shift whose weights matter, and the same layer without one."""
    options = {"dtype": torch.float64, "batch_first": True, **options}
    layer = LowRankAttention(EMBED, HEADS, token_shift=shift, **options)
    plain = LowRankAttention(EMBED, HEADS, **options)
    plain.load_state_dict(layer.state_dict(), strict=False)
    nn.init.normal_(layer.shift_weight)
    return layer, plain


def mixed(x: Tensor, weight: Tensor) -> Tensor:
    """Token by token; `x` is [batch, n, width]."""
    rows = []
    for i in range(x.shape[1]):
        rows.append(sum(weight[j] * x[:, i - j] for j in range(len(weight)) if j <= i))
    return torch.stack(rows, 1)


def tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@every_option
@pytest.mark.parametrize("call", [{}, {"is_causal": True}, {"need_weights": True}])
def test_is_attention_of_the_mixed_tokens(options: dict, call: dict) -> None:
    layer, plain = pair(**options)
    x = tensor(BATCH, N, EMBED)
    y = mixed(x, layer.shift_weight)
    found, wanted = layer(x, x, x, **call), plain(y, y, y, **call)
    torch.testing.assert_close(found[0], wanted[0], **ROUNDING)
    if call.get("need_weights"):
        torch.testing.assert_close(found[1], wanted[1], **ROUNDING)


def test_starts_without_an_effect() -> None:
    layer, plain = pair()
    layer.reset_parameters()
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = tensor(BATCH, N, EMBED)
    assert torch.equal(layer(x, x, x)[0], plain(x, x, x)[0])
    out = layer(x, x, x)[0]
    out.sum().backward()
    assert layer.shift_weight.grad.abs().min() > 0


@pytest.mark.parametrize("layout", ["sequence first", "unbatched", "one token"])
def test_layouts(layout: str) -> None:
    layer, _ = pair()
    x = tensor(BATCH, 1 if layout == "one token" else N, EMBED)
    wanted = layer(x, x, x, is_causal=True)[0]
    if layout == "unbatched":
        found = torch.stack([layer(row, row, row, is_causal=True)[0] for row in x])
    else:
        layer.batch_first = layout == "one token"
        x = x if layer.batch_first else x.transpose(0, 1)
        found = layer(x, x, x, is_causal=True)[0]
        found = found if layer.batch_first else found.transpose(0, 1)
    torch.testing.assert_close(found, wanted, **ROUNDING)


@pytest.mark.parametrize("floating", [False, True])
def test_hidden_tokens_may_hold_anything(floating: bool) -> None:
    """Padding on the left is in front of visible tokens, which mix with zeros instead."""
    layer, _ = pair()
    x = tensor(BATCH, N, EMBED)
    hidden = torch.zeros(BATCH, N, dtype=torch.bool)
    hidden[0, :4] = True
    dirty = x.masked_fill(hidden[..., None], math.nan)
    mask = torch.zeros(BATCH, N).double().masked_fill(hidden, -math.inf) if floating else hidden
    found = layer(dirty, dirty, dirty, mask)[0]
    rest = x[:1, 4:]
    alone = layer(rest, rest, rest)[0]
    torch.testing.assert_close(found[:1, 4:], alone, **ROUNDING)


@pytest.mark.parametrize("options", [{}, {"score": "gaussian"}, {"alibi": True}])
@pytest.mark.parametrize("prompt", [1, 2, 40])  # shorter and longer than the shift
def test_steps_equal_the_causal_pass(prompt: int, options: dict) -> None:
    torch.manual_seed(0)
    layer, _ = pair(**options, batch_first=False)
    with torch.no_grad():
        layer.shift_weight.mul_(0.3)
    x = tensor(60, BATCH, EMBED)
    out, state = layer.step(x[:prompt], query_bound=20.0, key_bound=20.0)
    parts = [out]
    place = prompt
    for count in (1, 1, 2, 5, 3, 1):  # one token, or several
        out, state = layer.step(x[place : place + count], state)
        parts.append(out)
        place += count
    with torch.no_grad():
        x = x[:place]
        whole = layer(x, x, x, is_causal=True)[0]
    # What the table of a stream is accurate to, as for layers without a shift.
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0.0, atol=1e-9)
    assert len(state) == place


def test_the_state_can_be_saved() -> None:
    layer, _ = pair()
    x = tensor(1, 20, EMBED)
    _, state = layer.step(x[:, :10], query_bound=50.0)
    _, other = layer.step(x[:, :1], query_bound=50.0)
    saved = state.state_dict()
    other.load_state_dict(saved)
    wanted, found = (layer.step(x[:, 10:], s)[0] for s in (state, other))
    assert torch.equal(wanted, found)
    assert state.state_bytes() > SHIFT * EMBED * 8
    del saved["recent"]
    with pytest.raises(ValueError, match="lacks 'recent'"):
        other.load_state_dict(saved)


def test_a_refused_step_leaves_the_state() -> None:
    layer, _ = pair()
    x = tensor(1, 20, EMBED)
    _, state = layer.step(x[:, :10], query_bound=50.0)
    before = state.state_dict()
    with pytest.raises(ValueError, match="query"):
        layer.step(1e4 * x[:, 10:11], state)
    assert torch.equal(state.recent, before["recent"])
    assert len(state) == 10


def test_what_is_refused() -> None:
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match="token_shift must be an integer of at least 0"):
            LowRankAttention(EMBED, HEADS, token_shift=wrong)
    with pytest.raises(ValueError, match="token_shift must be 0 with process_group and with kdim"):
        LowRankAttention(EMBED, HEADS, token_shift=1, kdim=5)
    layer, _ = pair()
    x = tensor(BATCH, N, EMBED)
    with pytest.raises(ValueError, match="query, key and value must be one tensor"):
        layer(x, x.clone(), x)
    nested = torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
    with pytest.raises(ValueError, match="not a nested one"):
        layer(nested, nested, nested)


def test_is_shown() -> None:
    assert "token_shift=3" in repr(pair()[0])
    assert "token_shift" not in repr(pair()[1])
