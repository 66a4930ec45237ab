"""LowRankAttention against nn.MultiheadAttention, its own formula, and bad input."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from boltzattn.nn import LowRankAttention
from torch import Tensor, nn

EMBED, HEADS, BATCH, N_Q, N_K = 12, 3, 2, 7, 5

# fp64 on both sides; sums of tens of terms of order 1 in another order.
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}


def twins(**options: object) -> tuple[nn.MultiheadAttention, LowRankAttention]:
    """nn.MultiheadAttention and a LowRankAttention of full rank that loaded its weights."""
    mha = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options)
    if mha.in_proj_bias is not None:  # MHA starts them at 0, which would test nothing
        nn.init.normal_(mha.in_proj_bias)
        nn.init.normal_(mha.out_proj.bias)
    ours = LowRankAttention(EMBED, HEADS, dtype=torch.float64, rank=EMBED // HEADS, **options)
    ours.load_state_dict(mha.state_dict())
    return mha, ours


def named_gradients(module: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in module.named_parameters()}
    if "in_proj_weight" in grads:
        for name, part in zip("qkv", grads.pop("in_proj_weight").chunk(3), strict=True):
            grads[f"{name}_proj_weight"] = part
    return grads


def assert_same(
    mha: nn.MultiheadAttention,
    ours: LowRankAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    **call: object,
) -> None:
    """Outputs, weights, and gradients of inputs and parameters agree."""
    results, input_grads = [], []
    for module in (mha, ours):
        # Keep `query is key`, which decides between self- and cross-attention.
        leaves = {id(x): x.clone().requires_grad_() for x in inputs}
        args = [leaves[id(x)] for x in inputs]
        out, weights = module(*args, **{"need_weights": False, **call})
        probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        (out * probe).sum().backward()
        results.append((out, weights))
        input_grads.append([x.grad for x in leaves.values()])
    (out, weights), (our_out, our_weights) = results
    torch.testing.assert_close(our_out, out, **ROUNDING)
    assert (weights is None) == (our_weights is None)
    if weights is not None:
        torch.testing.assert_close(our_weights, weights, **ROUNDING)
    for ours_grad, grad in zip(input_grads[1], input_grads[0], strict=True):
        torch.testing.assert_close(ours_grad, grad, **ROUNDING)
    wanted = named_gradients(mha)
    got = named_gradients(ours)
    assert wanted.keys() == got.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, **ROUNDING, msg=lambda m, n=name: f"{n}: {m}")


def tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def self_inputs(batch_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = tensor(BATCH, N_Q, EMBED) if batch_first else tensor(N_Q, BATCH, EMBED)
    return x, x, x


PADDED = torch.tensor([[False] * 6 + [True], [False] * 4 + [True] * 3])
BANNED = torch.rand(N_Q, N_Q, generator=torch.Generator().manual_seed(1)) < 0.3
BANNED.fill_diagonal_(False)  # a row without keys is NaN in nn.MultiheadAttention
BANNED[:, 0] = False  # likewise together with PADDED
CAUSAL = torch.ones(N_Q, N_Q, dtype=torch.bool).triu(1)
STACK = torch.rand(BATCH * HEADS, N_Q, N_Q, generator=torch.Generator().manual_seed(2)) < 0.3
STACK[:, :, 0] = False


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)


MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PADDED},
    "padding as float": {"key_padding_mask": additive(PADDED)},
    "key bias": {"key_padding_mask": torch.linspace(-1, 1, 2 * N_Q).double().view(2, N_Q)},
    "attn": {"attn_mask": BANNED},
    "attn as float": {"attn_mask": additive(BANNED)},
    "attn bias": {"attn_mask": torch.linspace(-1, 1, N_Q**2).double().view(N_Q, N_Q)},
    "attn per head": {"attn_mask": STACK},
    "attn per head as float": {"attn_mask": additive(STACK)},
    "both": {"attn_mask": BANNED, "key_padding_mask": PADDED},
    "both as float": {"attn_mask": additive(BANNED), "key_padding_mask": additive(PADDED)},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "causal as float": {"attn_mask": additive(CAUSAL), "is_causal": True},
    "causal and padding": {
        "attn_mask": CAUSAL,
        "is_causal": True,
        "key_padding_mask": PADDED,
    },
}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_parity_self_attention(masks: dict, batch_first: bool) -> None:
    assert_same(*twins(batch_first=batch_first), self_inputs(batch_first), **masks)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_parity_with_weights(masks: dict, average: bool) -> None:
    pair = twins(batch_first=True)
    assert_same(*pair, self_inputs(True), need_weights=True, average_attn_weights=average, **masks)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("widths", [{}, {"kdim": 4, "vdim": 6}], ids=["equal", "kdim vdim"])
def test_parity_cross_attention(widths: dict, batch_first: bool, bias: bool) -> None:
    query, key, value = (
        tensor(BATCH, n, width) if batch_first else tensor(n, BATCH, width)
        for n, width in (
            (N_Q, EMBED),
            (N_K, widths.get("kdim", EMBED)),
            (N_K, widths.get("vdim", EMBED)),
        )
    )
    mask = torch.zeros(BATCH, N_K, dtype=torch.bool)
    mask[0, 3:] = True
    pair = twins(batch_first=batch_first, bias=bias, **widths)
    assert_same(*pair, (query, key, value), key_padding_mask=mask)


@pytest.mark.parametrize(
    "masks", [{}, {"key_padding_mask": PADDED[1]}, {"attn_mask": STACK[:HEADS]}]
)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_parity_unbatched(need_weights: bool, batch_first: bool, masks: dict) -> None:
    x = tensor(N_Q, EMBED)
    assert_same(*twins(batch_first=batch_first), (x, x, x), need_weights=need_weights, **masks)


def test_causal_hint_on_a_rectangle_reads_the_mask() -> None:
    """For n_q != n_k a causal mask may be aligned at either end: only the mask knows."""
    _, ours = twins(batch_first=True)
    query, memory = tensor(BATCH, N_K, EMBED), tensor(BATCH, N_Q, EMBED)
    mask = torch.ones(N_K, N_Q, dtype=torch.bool).triu(1 + N_Q - N_K)
    hinted, _ = ours(query, memory, memory, attn_mask=mask, is_causal=True)
    plain, _ = ours(query, memory, memory, attn_mask=mask)
    torch.testing.assert_close(hinted, plain, rtol=0, atol=0)


def test_causal_without_mask() -> None:
    _, ours = twins(batch_first=True)
    x, _, _ = self_inputs(True)
    got, _ = ours(x, x, x, is_causal=True)
    wanted, _ = ours(x, x, x, attn_mask=CAUSAL)
    torch.testing.assert_close(got, wanted, **ROUNDING)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("head_dim", [None, 7])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("temperature", [False, True])
def test_formula(rank: int, head_dim: int | None, scale: float | None, temperature: bool) -> None:
    layer = LowRankAttention(
        EMBED,
        HEADS,
        batch_first=True,
        dtype=torch.float64,
        rank=rank,
        head_dim=head_dim,
        scale=scale,
        learnable_temperature=temperature,
    )
    nn.init.normal_(layer.in_proj_bias)
    if temperature:
        nn.init.normal_(layer.log_temperature)
    x = tensor(BATCH, N_Q, EMBED)
    width = EMBED // HEADS if head_dim is None else head_dim
    b_q, b_k, b_v = layer.in_proj_bias.split([HEADS * rank, HEADS * rank, HEADS * width])
    wanted = layer.out_proj.bias.expand(BATCH, N_Q, EMBED)
    for h in range(HEADS):
        qk, v = slice(h * rank, (h + 1) * rank), slice(h * width, (h + 1) * width)
        logits = (x @ layer.q_proj_weight[qk].T + b_q[qk]) @ (
            x @ layer.k_proj_weight[qk].T + b_k[qk]
        ).mT
        logits = logits * (rank**-0.5 if scale is None else scale)
        if temperature:
            logits = logits / layer.log_temperature[h].exp()
        heads = logits.softmax(-1) @ (x @ layer.v_proj_weight[v].T + b_v[v])
        wanted = wanted + heads @ layer.out_proj.weight[:, v].T
    torch.testing.assert_close(layer(x, x, x)[0], wanted, **ROUNDING)
    torch.testing.assert_close(layer(x, x.clone(), x)[0], wanted, **ROUNDING)


def test_signatures_are_those_of_multihead_attention() -> None:
    """Same positional arguments, same order, same defaults; only need_weights differs."""
    for name in ("__init__", "forward"):
        theirs = inspect.signature(getattr(nn.MultiheadAttention, name)).parameters
        ours = inspect.signature(getattr(LowRankAttention, name)).parameters
        positional = {n: p.default for n, p in ours.items() if p.kind != p.KEYWORD_ONLY}
        wanted = {n: p.default for n, p in theirs.items()}
        if name == "forward":
            wanted["need_weights"] = False
        assert list(positional.items()) == list(wanted.items())


def test_weights_are_off_by_default() -> None:
    layer = LowRankAttention(EMBED, HEADS)
    x = torch.randn(N_Q, BATCH, EMBED)
    assert layer(x, x, x)[1] is None


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_query_without_keys_gets_the_output_bias(need_weights: bool) -> None:
    layer = LowRankAttention(EMBED, HEADS, batch_first=True)
    nn.init.normal_(layer.out_proj.bias)
    x = torch.randn(BATCH, N_Q, EMBED, requires_grad=True)
    banned = torch.zeros(N_Q, N_Q, dtype=torch.bool)
    banned[3] = True
    out, _ = layer(x, x, x, attn_mask=banned, need_weights=need_weights)
    torch.testing.assert_close(out[:, 3], layer.out_proj.bias.expand(BATCH, EMBED))
    out.square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize(("embed", "heads"), [(64, 1), (64, 8), (256, 16), (8, 16)])
def test_initial_logits_have_unit_spread(embed: int, heads: int, rank: int) -> None:
    """Logits of standard normal inputs have variance 1, for every rank, width and head count."""
    layer = LowRankAttention(embed, heads, batch_first=True, rank=rank, head_dim=4)
    x, y = torch.randn(2, 4000, embed).unbind()
    q = (x @ layer.q_proj_weight.T).unflatten(-1, (heads, rank))
    k = (y @ layer.k_proj_weight.T).unflatten(-1, (heads, rank))
    logits = (q * k).sum(-1) * rank**-0.5
    # 4000 products of two Gaussians: the variance has a standard error of sqrt(8 / 4000) = 0.045
    # for one head, less for more; allow five of them.
    assert logits.var().item() == pytest.approx(1.0, abs=0.25)
    if heads * rank <= embed:
        gram = layer.q_proj_weight @ layer.q_proj_weight.T
        torch.testing.assert_close(gram, torch.eye(heads * rank), rtol=0, atol=1e-5)


def test_initial_heads_neither_average_nor_pick() -> None:
    """A typical query of a fresh rank-1 head sees an intermediate number of keys."""
    layer = LowRankAttention(64, 8, batch_first=True)
    x = torch.randn(1, 2000, 64)
    _, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
    share = 1 / weights.square().sum(-1) / 2000  # effective share of the keys
    typical = share.median().item()
    # exp(-q^2) at the median |q| = 0.67 of a standard normal is 0.63.
    assert 0.5 < typical < 0.75


def test_attention_dropout_only_in_training() -> None:
    layer = LowRankAttention(EMBED, HEADS, dropout=0.5, method="direct", batch_first=True)
    x = torch.randn(BATCH, N_Q, EMBED)
    first, second = layer(x, x, x)[0], layer(x, x, x)[0]
    assert not torch.equal(first, second)
    layer.eval()
    still = layer(x, x, x)[0]
    assert torch.equal(still, layer(x, x, x)[0])
    layer.train()
    with torch.no_grad():
        mean = torch.stack([layer(x, x, x)[0] for _ in range(2000)]).mean(0)
    # Dropout is unbiased; 2000 draws of outputs of order 0.3 leave a deviation of about 0.01.
    torch.testing.assert_close(mean, still, rtol=0, atol=0.05)


def test_weights_are_dropped_with_dropout() -> None:
    layer = LowRankAttention(EMBED, HEADS, dropout=0.5, method="direct", batch_first=True)
    x = torch.randn(BATCH, N_Q, EMBED)
    _, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
    assert 0.3 < (weights == 0).float().mean() < 0.7


def test_output_dropout() -> None:
    layer = LowRankAttention(EMBED, HEADS, output_dropout=0.5, batch_first=True)
    x = torch.randn(8, N_Q, EMBED)
    dropped = layer(x, x, x)[0] == 0
    assert 0.4 < dropped.float().mean() < 0.6
    layer.eval()
    assert not (layer(x, x, x)[0] == 0).any()


def test_dropout_of_weights_at_rank_one_warns_of_its_cost() -> None:
    with pytest.warns(UserWarning, match="output_dropout keeps rank 1 linear"):
        LowRankAttention(EMBED, HEADS, dropout=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 0}, "embed_dim must be an integer of at least 1, got 0"),
        ({"num_heads": 0}, "num_heads must be an integer of at least 1, got 0"),
        ({"rank": 0}, "rank must be an integer of at least 1, got 0"),
        ({"head_dim": -1}, "head_dim must be an integer of at least 1, got -1"),
        ({"num_heads": 5}, "num_heads must divide embed_dim .* pass head_dim"),
        ({"add_bias_kv": True}, "add_bias_kv=True is not supported .* append the extra token"),
        ({"add_zero_attn": True}, "add_zero_attn=True is not supported .* append the extra"),
        ({"dropout": 1.5}, "dropout must be between 0 and 1, got 1.5"),
        ({"output_dropout": -0.1}, "output_dropout must be between 0 and 1"),
        ({"method": "magic"}, "method must be 'auto' or one of .* got 'magic'"),
        ({"backend": "abacus"}, "backend must be 'auto' or one of .* got 'abacus'"),
        (
            {"dropout": 0.1, "method": "transform"},
            "which method 'transform' never forms; use output_dropout, or method='direct'",
        ),
        ({"scale": math.inf}, "scale must be a finite number"),
    ],
)
def test_bad_constructor_arguments(options: dict, message: str) -> None:
    arguments = {"embed_dim": EMBED, "num_heads": HEADS, **options}
    with pytest.raises(ValueError, match=message):
        LowRankAttention(**arguments)


def test_num_heads_need_not_divide_when_head_dim_is_given() -> None:
    layer = LowRankAttention(EMBED, 5, head_dim=3)
    x = torch.randn(N_Q, BATCH, EMBED)
    assert layer(x, x, x)[0].shape == x.shape


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((7, 2, 11), (7, 2, 12), (7, 2, 12)), r"query must be .* width 12, got \[7, 2, 11\]"),
        (((7, 2, 12), (7, 2, 13), (7, 2, 12)), r"key must be .* width 12, got \[7, 2, 13\]"),
        (((12,), (7, 12), (7, 12)), r"query must be .* got \[12\]"),
        (((7, 12), (7, 2, 12), (7, 2, 12)), "key must be batched if and only if query is"),
        (((7, 2, 12), (5, 2, 12), (6, 2, 12)), "value must have as many rows as key, 5, got 6"),
        (((7, 2, 12), (5, 3, 12), (5, 3, 12)), "equal batch sizes .*batch_first=False"),
    ],
)
def test_bad_inputs(shapes: tuple, message: str) -> None:
    layer = LowRankAttention(EMBED, HEADS)
    with pytest.raises(ValueError, match=message):
        layer(*(torch.randn(shape) for shape in shapes))


@pytest.mark.parametrize(
    ("masks", "error", "message"),
    [
        (
            {"attn_mask": torch.zeros(7, 6)},
            ValueError,
            r"attn_mask must have shape \[7, 7\] or \[6, 7, 7\], got \[7, 6\]",
        ),
        (
            {"attn_mask": torch.zeros(2, 7, 7)},
            ValueError,
            r"attn_mask must have shape .* got \[2, 7, 7\]",
        ),
        (
            {"attn_mask": torch.zeros(7, 7, dtype=torch.uint8)},
            TypeError,
            r"attn_mask must be bool or floating point, got torch.uint8; .*attn_mask.bool\(\)",
        ),
        (
            {"key_padding_mask": torch.zeros(7, 2)},
            ValueError,
            r"key_padding_mask must have shape \[2, 7\], got \[7, 2\]",
        ),
        (
            {"key_padding_mask": torch.zeros(2, 7, dtype=torch.int64)},
            TypeError,
            "key_padding_mask must be bool or floating point, got torch.int64",
        ),
        ({"key_padding_mask": [0, 1]}, TypeError, "key_padding_mask must be a tensor, got list"),
    ],
)
def test_bad_masks(masks: dict, error: type[Exception], message: str) -> None:
    layer = LowRankAttention(EMBED, HEADS)
    x = torch.randn(7, 2, EMBED)
    with pytest.raises(error, match=message):
        layer(x, x, x, **masks)


def test_nested_tensors_are_refused_with_the_remedy() -> None:
    layer = LowRankAttention(EMBED, HEADS, batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(3, EMBED), torch.randn(5, EMBED)])
    with pytest.raises(ValueError, match="use_nested_tensor = False"):
        layer(nested, nested, nested)
