"""LowRankAttention with Gaussian scores and with ALiBi, against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from boltzattn.nn import LowRankAttention, OneLayerTransformer
from torch import Tensor, nn

EMBED, HEADS, BATCH, N_Q, N_K = 12, 3, 2, 7, 5

# fp64 on both sides; sums of tens of terms of order 1 in another order.
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}
HIDDEN = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
BANNED = torch.rand(N_Q, N_K, generator=torch.Generator().manual_seed(1)) < 0.3
BANNED[:, 0] = False

OPTIONS = {
    "gaussian": {"score": "gaussian"},
    "alibi": {"alibi": True},
    "both": {"score": "gaussian", "alibi": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def build(**options: object) -> LowRankAttention:
    """With biases and bandwidths that matter."""
    layer = LowRankAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64, **options)
    if layer.in_proj_bias is not None:
        nn.init.normal_(layer.in_proj_bias)
    if layer.log_bandwidth is not None:
        nn.init.normal_(layer.log_bandwidth)
    return layer


def tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def added(n_q: int, n_k: int, call: dict) -> Tensor:
    """What the masks of a call add to the logits, [batch, n_q, n_k]."""
    total = torch.zeros(BATCH, n_q, n_k, dtype=torch.float64)
    for name, axis in (("key_padding_mask", 1), ("attn_mask", 0)):
        if (mask := call.get(name)) is not None:
            hides = mask.dtype == torch.bool
            mask = torch.zeros(mask.shape).double().masked_fill(mask, -math.inf) if hides else mask
            total = total + mask.unsqueeze(axis)
    if call.get("is_causal"):
        total = total.masked_fill(torch.ones(n_q, n_k).bool().triu(1), -math.inf)
    return total


def formula(layer: LowRankAttention, query: Tensor, key: Tensor, value: Tensor, **call: object):
    """(result, weights per head), written head by head."""
    heads, rank = layer.num_heads, layer.rank
    b_q, b_k, b_v = 0.0, 0.0, 0.0
    if layer.in_proj_bias is not None:
        b_q, b_k, b_v = layer.in_proj_bias.split(layer._widths)
    q = (query @ layer.q_proj_weight.T + b_q).unflatten(-1, (heads, rank))
    k = (key @ layer.k_proj_weight.T + b_k).unflatten(-1, (heads, rank))
    v = (value @ layer.v_proj_weight.T + b_v).unflatten(-1, (heads, -1))
    n_q, n_k = query.shape[1], key.shape[1]
    weights, results = [], []
    for h in range(heads):
        if layer.score == "gaussian":
            gap = q[:, :, None, h] - k[:, None, :, h]
            factor = -0.5 if layer.scale is None else -0.5 * layer.scale
            logits = factor * gap.square().sum(-1) / layer.log_bandwidth[h].exp() ** 2
        else:
            factor = rank**-0.5 if layer.scale is None else layer.scale
            logits = factor * q[:, :, h] @ k[:, :, h].mT
        if layer.alibi_slopes is not None:
            distance = (torch.arange(n_q)[:, None] - torch.arange(n_k)).abs()
            logits = logits - layer.alibi_slopes[h] * distance
        weights.append((logits + added(n_q, n_k, call)).softmax(-1))
        results.append(weights[-1] @ v[:, :, h])
    return layer.out_proj(torch.cat(results, -1)), torch.stack(weights, 1)


def assert_same_gradients(layer: LowRankAttention, got: Tensor, wanted: Tensor) -> None:
    probe = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view(got.shape)
    parameters = dict(layer.named_parameters())
    pair = [torch.autograd.grad((x * probe).sum(), parameters.values()) for x in (got, wanted)]
    for name, one, other in zip(parameters, *pair, strict=True):
        torch.testing.assert_close(one, other, **ROUNDING, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("scale", [None, 0.3])
@every_option
def test_self_attention(options: dict, scale: float | None, rank: int, need_weights: bool) -> None:
    layer = build(rank=rank, scale=scale, **options)
    x = tensor(BATCH, N_Q, EMBED)
    call = {"need_weights": need_weights, "average_attn_weights": False}
    got, weights = layer(x, x, x, **call)
    wanted, wanted_weights = formula(layer, x, x, x)
    torch.testing.assert_close(got, wanted, **ROUNDING)
    assert_same_gradients(layer, got, wanted)
    if need_weights:
        torch.testing.assert_close(weights, wanted_weights, **ROUNDING)
    else:
        assert weights is None


MASKS = {
    "none": {},
    "padding": {"key_padding_mask": HIDDEN},
    "key bias": {"key_padding_mask": torch.linspace(-1, 1, 2 * N_K).double().view(2, N_K)},
    "attn": {"attn_mask": BANNED},
    "both": {"attn_mask": BANNED, "key_padding_mask": HIDDEN},
    "causal": {"is_causal": True},
    "causal and padding": {"is_causal": True, "key_padding_mask": HIDDEN},
}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
@every_option
def test_masks(options: dict, masks: dict, need_weights: bool) -> None:
    layer = build(bias=False, **options)
    query, key, value = tensor(BATCH, N_Q, EMBED), *tensor(2, BATCH, N_K, EMBED)
    call = {"need_weights": need_weights, "average_attn_weights": False, **masks}
    got, weights = layer(query, key, value, **call)
    wanted, wanted_weights = formula(layer, query, key, value, **masks)
    torch.testing.assert_close(got, wanted, **ROUNDING)
    if need_weights:
        torch.testing.assert_close(weights, wanted_weights, **ROUNDING)


@pytest.mark.parametrize("is_causal", [False, True])
@every_option
def test_jagged_sequences_count_their_own_distances(options: dict, is_causal: bool) -> None:
    layer = build(**options)
    parts = [tensor(n, EMBED) for n in (3, 7, 1)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    got, _ = layer(jagged, jagged, jagged, is_causal=is_causal)
    for part, one in zip(parts, got.unbind(), strict=True):
        wanted, _ = layer(part, part, part, is_causal=is_causal)
        torch.testing.assert_close(one, wanted, **ROUNDING)


def test_a_narrow_gaussian_head_finds_the_nearest_key() -> None:
    """What a dot head cannot do: select a key in the middle."""
    layer = LowRankAttention(1, 1, batch_first=True, bias=False, score="gaussian")
    with torch.no_grad():
        for p in (layer.q_proj_weight, layer.k_proj_weight):
            p.fill_(1.0)
        layer.log_bandwidth.fill_(math.log(0.01))
    keys = torch.tensor([0.0, 0.5, 1.0])[None, :, None]
    _, weights = layer(torch.tensor([0.45])[None, :, None], keys, keys, need_weights=True)
    torch.testing.assert_close(weights[0, 0], torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("rank", [1, 4])
def test_initial_bandwidths(rank: int) -> None:
    layer = LowRankAttention(64, 4, rank=rank, score="gaussian")
    wanted = [rank**0.5 * 2 ** (-3 * (h + 0.5) / 4) for h in range(4)]
    torch.testing.assert_close(layer.log_bandwidth.exp(), torch.tensor(wanted))


def test_initial_heads_run_from_wide_to_narrow() -> None:
    layer = LowRankAttention(64, 8, batch_first=True, score="gaussian")
    x = torch.randn(1, 2000, 64)
    _, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
    share = (1 / weights.square().sum(-1) / 2000).median(-1).values[0]  # of the keys, per head
    assert (share.diff() < 0).all()
    # Standard normal keys, bandwidth b, query t: E[w]^2 / E[w^2] of w = exp(-(s - t)^2 / 2 b^2).
    b, t = layer.log_bandwidth.detach().exp().double(), 0.6745  # the median of |q|
    first = b / (1 + b**2).sqrt() * torch.exp(-(t**2) / (1 + b**2) / 2)
    second = b / (2 + b**2).sqrt() * torch.exp(-(t**2) / (2 + b**2))
    torch.testing.assert_close(share.double(), first**2 / second, rtol=0.1, atol=0.0)
    assert share[0] > 0.7
    assert share[-1] < 0.25


def test_alibi_slopes_are_a_buffer_of_the_state() -> None:
    layer = LowRankAttention(16, 8, alibi=True)
    assert layer.alibi_slopes.tolist() == [2.0**-h for h in range(1, 9)]
    assert "alibi_slopes" in layer.state_dict()
    assert "alibi_slopes" not in dict(layer.named_parameters())
    other = LowRankAttention(16, 8, alibi=True)
    other.alibi_slopes.mul_(2)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer.alibi_slopes, other.alibi_slopes)


def test_alibi_slopes_may_be_learnt() -> None:
    layer = build(alibi=True)
    layer.alibi_slopes = nn.Parameter(layer.alibi_slopes)
    x = tensor(BATCH, N_Q, EMBED)
    assert_same_gradients(layer, layer(x, x, x)[0], formula(layer, x, x, x)[0])


def test_one_layer_transformer_takes_a_score() -> None:
    model = OneLayerTransformer(8, num_heads=2, score="gaussian")
    model(torch.randn(2, 9, 8)).square().sum().backward()
    assert model.attention.log_bandwidth.grad.all()
    with pytest.raises(ValueError, match="score=gaussian is not part of the paper's block"):
        OneLayerTransformer(8, form="paper", score="gaussian")


def test_bad_score() -> None:
    with pytest.raises(ValueError, match="score must be 'dot' or 'gaussian', got 'cosine'"):
        LowRankAttention(EMBED, HEADS, score="cosine")


def test_temperature_of_gaussian_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learnable_temperature .* parameter log_bandwidth"):
        LowRankAttention(EMBED, HEADS, score="gaussian", learnable_temperature=True)


@every_option
@pytest.mark.parametrize("prompt", [1, 40])
def test_steps_equal_the_causal_pass(prompt: int, options: dict) -> None:
    torch.manual_seed(0)
    layer = LowRankAttention(EMBED, HEADS, dtype=torch.float64, **options)
    x = torch.randn(150, BATCH, EMBED, dtype=torch.float64)
    bounds = {"query_bound": 20.0, "key_bound": 20.0} if prompt == 1 else {}
    x = x / x.norm(dim=-1, keepdim=True) * EMBED**0.5 if prompt > 1 else x
    out, state = layer.step(x[:prompt], **bounds)
    parts = [out]
    for i in range(prompt, len(x)):
        out, state = layer.step(x[i : i + 1], state)
        parts.append(out)
    with torch.no_grad():
        whole = layer(x, x, x, is_causal=True)[0]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0.0, atol=1e-9)
    assert len(state) == len(x)
