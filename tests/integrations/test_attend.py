"""The function that layers of transformers call, without transformers."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from boltzattn.integrations.transformers import attend, register
from errors import assert_accurate
from oracle import largest
from torch import Tensor, nn

BATCH, HEADS, N, WIDTH = 2, 4, 40, 8


def inputs(key_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(BATCH, HEADS, N, WIDTH)
    k, v = torch.randn(2, BATCH, key_heads, N, WIDTH).unbind()
    return q, k, v


def layer(is_causal: bool = False, **attributes: object) -> nn.Module:
    module = nn.Module()
    module.is_causal = is_causal
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options) -> None:
    def sdpa(*tensors: Tensor) -> dict[str, Tensor]:
        out = F.scaled_dot_product_attention(*tensors, mask, **options).transpose(1, 2)
        return {"out": out}

    oracle = sdpa(q.double(), k.double(), v.double())
    floor = {"out": largest(v)}
    runs = (sdpa(q, k, v) for _ in range(1))
    assert_accurate({"out": out}, oracle, runs, magnitudes=floor, method="transform")


CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
PADDING = torch.arange(N) < torch.tensor([N, 25])[:, None]  # True for tokens


@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_masks(key_heads: int) -> None:
    q, k, v = inputs(key_heads)
    gqa = {"enable_gqa": key_heads != HEADS}
    wide = PADDING[:, None, None].expand(BATCH, 1, N, N)
    for module, mask, options, wanted in [
        (layer(), None, {}, None),
        (layer(is_causal=True), None, {}, CAUSAL),
        (layer(is_causal=True), None, {"is_causal": False}, None),
        (layer(is_causal=True), PADDING, {}, CAUSAL & wide),
        (layer(is_causal=True), wide, {}, wide),  # complete: a cross-attention, say
        (layer(), CAUSAL & wide, {}, CAUSAL & wide),
        (layer(), torch.where(wide, 0.0, torch.finfo().min), {}, wide),
    ]:
        out, weights = attend(module, q, k, v, mask, **options)
        assert weights is None
        assert out.is_contiguous()
        check(out, q, k, v, wanted, **gqa)
    out, _ = attend(layer(), q, k, v, None, scaling=0.7)
    check(out, q, k, v, None, scale=0.7, **gqa)


def test_last_query_sees_all_tokens() -> None:
    q, k, v = inputs()
    out, _ = attend(layer(is_causal=True), q[..., -1:, :], k, v, PADDING)
    check(out, q[..., -1:, :], k, v, PADDING[:, None, None])
    out, _ = attend(layer(is_causal=True), q[..., -1:, :], k, v, None)
    check(out, q[..., -1:, :], k, v, None)


@pytest.mark.parametrize("ranks", [(1, 1, 1, 1), (3, 3, 3, 3), (3, 1, 8, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_low_ranks_are_used(ranks: tuple[int, ...], causal: bool, monkeypatch) -> None:
    q, k, v = inputs()
    is_kept = torch.arange(WIDTH) < torch.tensor(ranks)[:, None, None]
    q, k = q * is_kept, k * is_kept
    seen = []
    module = importlib.import_module("boltzattn.integrations.transformers")
    attention = module.attention

    def spy(query: Tensor, *args: object, **options: object) -> Tensor:
        seen.append((query.shape[-1], query.shape[-3]))
        return attention(query, *args, **options)

    monkeypatch.setattr(module, "attention", spy)
    mask = PADDING if causal else PADDING[:, None, None].expand(BATCH, 1, N, N)
    out, _ = attend(layer(causal, boltzattn_ranks=ranks), q, k, v, mask)
    assert seen == sorted((rank, ranks.count(rank)) for rank in set(ranks))
    wanted = PADDING[:, None, None] & CAUSAL if causal else PADDING[:, None, None]
    check(out, q, k, v, wanted)


@pytest.mark.parametrize("name", ["softcap", "position_bias", "s_aux"])
def test_arguments_that_change_logits_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not supported .* use 'sdpa' or 'eager'"):
        attend(layer(), *inputs(), None, **{name: 1.0})


def test_weights_are_not_returned_silently() -> None:
    with pytest.warns(UserWarning, match="returns no attention weights; use 'eager'"):
        attend(layer(), *inputs(), None, output_attentions=True)


def test_missing_and_old_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'boltzattn\[transformers\]'"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.57.1"))
    with pytest.raises(ImportError, match=r"needs transformers 5.0 or later, found 4.57.1"):
        register()
