"""LowRankAttention inside torch's own encoder and decoder layers, fast paths included."""

from __future__ import annotations

import copy

import pytest
import torch
from boltzattn.nn import LowRankAttention, convert
from torch import Tensor, nn

EMBED, HEADS, BATCH, N = 16, 4, 3, 6
# fp64 layers that differ only in the order of sums.
ROUNDING = {"rtol": 1e-10, "atol": 1e-11}

PADDED = torch.zeros(BATCH, N, dtype=torch.bool)
PADDED[0, 4:] = True
PADDED[2, 2:] = True
CAUSAL = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)

MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDED},
    "attn": {"src_mask": torch.eye(N).bool().roll(1, 0)},
    "causal": {"src_mask": CAUSAL, "is_causal": True},
    "causal and padding": {
        "src_mask": CAUSAL,
        "is_causal": True,
        "src_key_padding_mask": PADDED,
    },
}
MODES = ("train", "eval", "eval no_grad", "eval inference_mode")


def run(module: nn.Module, mode: str, *args: Tensor, **kwargs: object) -> Tensor:
    module.train(mode == "train")
    if mode == "eval no_grad":
        with torch.no_grad():
            return module(*args, **kwargs)
    if mode == "eval inference_mode":
        with torch.inference_mode():
            return module(*args, **kwargs).clone()
    return module(*args, **kwargs)


def encoder_layer(**options: object) -> nn.TransformerEncoderLayer:
    options = {"dropout": 0.0, "dim_feedforward": 32, "dtype": torch.float64, **options}
    return nn.TransformerEncoderLayer(EMBED, HEADS, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_full_rank_layer_equals_the_original(
    masks: dict, batch_first: bool, norm_first: bool, mode: str
) -> None:
    layer = encoder_layer(batch_first=batch_first, norm_first=norm_first)
    ours = copy.deepcopy(layer)
    ours.self_attn = LowRankAttention.from_multihead(layer.self_attn, rank=EMBED // HEADS)
    x = torch.randn(BATCH, N, EMBED, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    got, wanted = run(ours, mode, x, **masks), run(layer, mode, x, **masks)
    torch.testing.assert_close(got, wanted, **ROUNDING)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("swap", ["before", "after"])
def test_encoder_never_takes_its_fast_path(swap: str, padding: bool, bias: bool, mode: str) -> None:
    """Swapped before or after the encoder was built, in every mode: the layers' own formula."""
    layer = encoder_layer(batch_first=True, bias=bias)

    def low_rank() -> LowRankAttention:
        return LowRankAttention(EMBED, HEADS, bias=bias, batch_first=True, dtype=torch.float64)

    if swap == "before":
        layer.self_attn = low_rank()
        with pytest.warns(UserWarning, match="use_nested_tensor is False"):
            encoder = nn.TransformerEncoder(layer, 2)
    else:
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=bias)
        for each in encoder.layers:
            each.self_attn = low_rank()
    x = torch.randn(BATCH, N, EMBED, dtype=torch.float64)
    mask = PADDED if padding else None
    got = run(encoder, mode, x, src_key_padding_mask=mask)

    wanted = x
    for each in encoder.layers:
        attended, _ = each.self_attn(wanted, wanted, wanted, key_padding_mask=mask)
        wanted = each.norm1(wanted + attended)
        wanted = each.norm2(wanted + each.linear2(each.activation(each.linear1(wanted))))
    torch.testing.assert_close(got, wanted, **ROUNDING)


@pytest.mark.parametrize("mode", MODES)
def test_converted_encoder_equals_the_original_on_real_tokens(mode: str) -> None:
    """With rank = head_dim; the original's fast path writes zeros at the padded ones."""
    encoder = nn.TransformerEncoder(encoder_layer(batch_first=True), 3)
    ours = copy.deepcopy(encoder)
    report = convert(ours, rank=EMBED // HEADS)
    assert list(report.replaced) == [f"layers.{i}.self_attn" for i in range(3)]
    x = torch.randn(BATCH, N, EMBED, dtype=torch.float64)
    got = run(ours, mode, x, src_key_padding_mask=PADDED)
    wanted = run(encoder, mode, x, src_key_padding_mask=PADDED)
    torch.testing.assert_close(got[~PADDED], wanted[~PADDED], **ROUNDING)


def test_an_encoder_with_only_a_later_layer_swapped() -> None:
    """Its plain first layer makes nested tensors: `convert` prevents it, by hand it is refused."""
    encoder = nn.TransformerEncoder(encoder_layer(batch_first=True), 2)
    by_hand = copy.deepcopy(encoder)
    by_hand.layers[1].self_attn = LowRankAttention.from_multihead(
        encoder.layers[1].self_attn, rank=EMBED // HEADS
    )
    x = torch.randn(BATCH, N, EMBED, dtype=torch.float64)
    with pytest.raises(ValueError, match="use_nested_tensor = False"):
        run(by_hand, "eval no_grad", x, src_key_padding_mask=PADDED)

    ours = copy.deepcopy(encoder)
    convert(ours, rank=EMBED // HEADS, select=lambda name, _: name.startswith("layers.1."))
    got = run(ours, "eval no_grad", x, src_key_padding_mask=PADDED)
    wanted = run(encoder, "eval no_grad", x, src_key_padding_mask=PADDED)
    torch.testing.assert_close(got[~PADDED], wanted[~PADDED], **ROUNDING)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_first", [False, True])
def test_whole_transformer_with_cross_attention(batch_first: bool, mode: str) -> None:
    model = nn.Transformer(
        EMBED,
        HEADS,
        num_encoder_layers=1,
        num_decoder_layers=2,
        dim_feedforward=32,
        dropout=0.0,
        batch_first=batch_first,
        dtype=torch.float64,
    )
    ours = copy.deepcopy(model)
    assert len(convert(ours, rank=EMBED // HEADS).replaced) == 1 + 2 * 2
    src = torch.randn(BATCH, N + 2, EMBED, dtype=torch.float64)
    tgt = torch.randn(BATCH, N, EMBED, dtype=torch.float64)
    if not batch_first:
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
    masks = {"tgt_mask": CAUSAL, "tgt_is_causal": True}
    got, wanted = run(ours, mode, src, tgt, **masks), run(model, mode, src, tgt, **masks)
    torch.testing.assert_close(got, wanted, **ROUNDING)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "causal and padding"])
def test_torch_layers_masks_leave_rank_one_linear(masks: str, mode: str) -> None:
    """The float masks torch makes of bool ones do not force the quadratic method."""
    layer = encoder_layer(batch_first=True)
    layer.self_attn = LowRankAttention(
        EMBED, HEADS, batch_first=True, dtype=torch.float64, method="transform"
    )
    x = torch.randn(BATCH, N, EMBED, dtype=torch.float64)
    got = run(layer, mode, x, **MASKS[masks])
    layer.self_attn.method = "direct"
    # The transform's certificate in fp64.
    torch.testing.assert_close(got, run(layer, mode, x, **MASKS[masks]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("mask_check", [False, True])
def test_compiled_encoder(mask_check: bool) -> None:
    encoder = nn.TransformerEncoder(encoder_layer(batch_first=True), 2, mask_check=mask_check)
    convert(encoder, rank=1)
    encoder.eval()
    x = torch.randn(BATCH, N, EMBED, dtype=torch.float64)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        got = compiled(x, src_key_padding_mask=PADDED)
        wanted = encoder(x, src_key_padding_mask=PADDED)
    torch.testing.assert_close(got, wanted, **ROUNDING)
