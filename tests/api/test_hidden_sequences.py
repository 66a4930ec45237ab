"""A mask that hides every key of a sequence warns once."""

from __future__ import annotations

import warnings

import boltzattn
import boltzattn.nn
import pytest
import torch
from boltzattn.ops import hidden_sequences
from torch import Tensor

N = 20
PADDING = torch.arange(N) >= torch.tensor([[N], [12]])  # True for padding


@pytest.fixture(autouse=True)
def _start() -> None:
    hidden_sequences.start_again()


def attend(**masks: Tensor) -> None:
    q, k, v = torch.randn(2, 3, N, 1), torch.randn(2, 3, N, 1), torch.randn(2, 3, N, 4)
    boltzattn.attention(q, k, v, **masks)


def layer(**masks: Tensor) -> None:
    module, x = boltzattn.nn.LowRankAttention(8, 2, batch_first=True), torch.randn(2, N, 8)
    module(x, x, x, **masks)


INVERTED = [
    (attend, {"key_padding_mask": ~PADDING}),
    (attend, {"key_padding_mask": torch.where(PADDING, 0.0, -torch.inf)}),
    (attend, {"attn_mask": PADDING[:, None, None]}),
    (attend, {"attn_mask": PADDING[:, None, None] & torch.ones(N, N).bool().tril()}),
    (layer, {"key_padding_mask": ~PADDING}),
]


@pytest.mark.parametrize(("call", "masks"), INVERTED)
def test_warns_once(call, masks: dict[str, Tensor]) -> None:
    with pytest.warns(UserWarning, match="hides every key of a sequence"):
        call(**masks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(**masks)


RIGHT = [
    (attend, {"key_padding_mask": PADDING}),
    (attend, {"key_padding_mask": torch.where(PADDING, -torch.inf, 0.0)}),
    (attend, {"attn_mask": ~PADDING[:, None, None]}),
    (attend, {"attn_mask": torch.ones(N, N).bool().triu(1)}),  # one query sees nothing
    (layer, {"key_padding_mask": PADDING}),
]


@pytest.mark.parametrize(("call", "masks"), RIGHT)
def test_right_masks_do_not_warn(call, masks: dict[str, Tensor]) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(**masks)
    assert not seen


def test_only_the_first_calls_are_looked_at() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(hidden_sequences.CHECKED):
            attend(key_padding_mask=PADDING)
        attend(key_padding_mask=~PADDING)
    assert not seen


def test_compiled_calls_warn_too() -> None:
    compiled = torch.compile(boltzattn.attention, backend="aot_eager", fullgraph=True)
    q, k, v = torch.randn(2, 3, N, 1), torch.randn(2, 3, N, 1), torch.randn(2, 3, N, 4)
    with pytest.warns(UserWarning, match="hides every key of a sequence"):
        compiled(q, k, v, key_padding_mask=~PADDING)
