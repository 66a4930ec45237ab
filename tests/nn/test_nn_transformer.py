"""FeedForward and OneLayerTransformer: their formulas, symmetry and bad input."""

from __future__ import annotations

import pytest
import torch
from boltzattn.nn import FeedForward, OneLayerTransformer, transformer
from torch import Tensor, nn

DIM, N = 6, 9
# fp64; sums of tens of terms in another order.
ROUNDING = {"rtol": 1e-10, "atol": 1e-11}


def tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def feed_forward_weights(hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tensor(hidden, DIM), tensor(hidden), tensor(DIM, hidden), tensor(DIM)


def paper_feed_forward(z: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """FF(Z) = Z + W2 relu(W1 Z + b1) + b2 with tokens in columns, as the paper has them."""
    return z + w2 @ torch.relu(w1 @ z + b1[:, None]) + b2[:, None]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(("heads", "rank", "head_dim"), [(1, 1, 1), (3, 2, 2), (2, 1, 4)])
def test_paper_form(heads: int, rank: int, head_dim: int, first: bool, second: bool) -> None:
    """Against the paper's definition, columns being tokens: softmax runs down each column."""
    w_q, w_k = tensor(heads * rank, DIM), tensor(heads * rank, DIM)
    w_v, w_o = tensor(heads * head_dim, DIM), tensor(DIM, heads * head_dim)
    ff1 = feed_forward_weights(20) if first else None
    ff2 = feed_forward_weights(5) if second else None
    model = OneLayerTransformer.from_weights(
        w_q,
        w_k,
        w_v,
        w_o,
        num_heads=heads,
        ff1=FeedForward.from_weights(*ff1) if ff1 else None,
        ff2=FeedForward.from_weights(*ff2) if ff2 else None,
    )
    x = tensor(N, DIM)

    z = x.T
    if ff1:
        z = paper_feed_forward(z, *ff1)
    added = torch.zeros_like(z)
    for h in range(heads):
        qk, v = slice(h * rank, (h + 1) * rank), slice(h * head_dim, (h + 1) * head_dim)
        scores = (w_k[qk] @ z).T @ (w_q[qk] @ z)
        added = added + w_o[:, v] @ (w_v[v] @ z) @ torch.softmax(scores, dim=0)
    z = z + added
    if ff2:
        z = paper_feed_forward(z, *ff2)
    torch.testing.assert_close(model(x), z.T, **ROUNDING)


def test_paper_form_has_nothing_else() -> None:
    model = OneLayerTransformer(DIM, form="paper", num_heads=2, ff1_hidden_dim=7, ff2_hidden_dim=11)
    assert sorted(name for name, _ in model.named_parameters()) == [
        "attention.k_proj_weight",
        "attention.out_proj.weight",
        "attention.q_proj_weight",
        "attention.v_proj_weight",
        *[f"ff{i}.linear{j}.{p}" for i in (1, 2) for j in (1, 2) for p in ("bias", "weight")],
    ]
    assert model.ff1.linear1.out_features == 7
    assert model.ff2.linear1.out_features == 11


def test_standard_form() -> None:
    model = OneLayerTransformer(
        DIM, form="standard", num_heads=2, in_dim=3, out_dim=4, dtype=torch.float64
    )
    for norm in (model.ff1.norm, model.attention_norm, model.ff2.norm, model.out_norm):
        nn.init.normal_(norm.weight)  # all ones would hide a norm that is not applied
    x = tensor(2, N, 3)

    def step(network: FeedForward, z: Tensor) -> Tensor:
        hidden = nn.functional.gelu(network.linear1(network.norm(z)))
        return z + network.linear2(hidden)

    z = step(model.ff1, model.in_proj(x))
    seen = model.attention_norm(z)
    z = step(model.ff2, z + model.attention(seen, seen, seen)[0])
    torch.testing.assert_close(model(x), model.out_proj(model.out_norm(z)), **ROUNDING)


MODELS = {
    "paper": {"form": "paper", "num_heads": 2},
    "standard": {"form": "standard", "num_heads": 3, "in_dim": 4, "out_dim": 2},
    "standard, rank 2, temperature": {
        "form": "standard",
        "num_heads": 2,
        "rank": 2,
        "head_dim": 5,
        "learnable_temperature": True,
    },
}


def build(options: dict) -> tuple[OneLayerTransformer, int]:
    model = OneLayerTransformer(DIM, dtype=torch.float64, **options)
    return model, options.get("in_dim") or DIM


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_permutation_equivariance(options: dict) -> None:
    model, width = build(options)
    x = tensor(2, 50, width)
    order = torch.randperm(50)
    torch.testing.assert_close(model(x[:, order]), model(x)[:, order], **ROUNDING)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_padding_is_not_seen(options: dict) -> None:
    model, width = build(options)
    x = tensor(2, N, width)
    filled = torch.cat([x, tensor(2, 4, width)], dim=1)
    mask = torch.zeros(2, N + 4, dtype=torch.bool)
    mask[:, N:] = True
    torch.testing.assert_close(model(filled, mask)[:, :N], model(x), **ROUNDING)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_leading_dimensions(options: dict) -> None:
    model, width = build(options)
    x = tensor(2, 3, N, width)
    mask = torch.rand(2, 3, N) < 0.3
    each = [[model(x[i, j], mask[i, j]) for j in range(3)] for i in range(2)]
    wanted = torch.stack([torch.stack(row) for row in each])
    torch.testing.assert_close(model(x, mask), wanted, **ROUNDING)


def test_dropout_acts_in_training_only() -> None:
    model = OneLayerTransformer(DIM, dropout=0.5, num_heads=2)
    x = torch.randn(N, DIM)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_every_parameter_learns() -> None:
    model = OneLayerTransformer(DIM, num_heads=2, in_dim=3, out_dim=1, learnable_temperature=True)
    model(torch.randn(2, N, 3)).square().sum().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


def test_feed_forward_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    network = FeedForward(DIM, 40, norm=True, activation="gelu", dtype=torch.float64)
    z = tensor(3, 17, DIM)
    wanted = network(z)
    pieces = []
    network.linear1.register_forward_pre_hook(lambda _, args: pieces.append(len(args[0])))
    monkeypatch.setattr(transformer, "HIDDEN_AT_ONCE", 400)
    with torch.no_grad():
        torch.testing.assert_close(network(z), wanted, **ROUNDING)
    assert pieces == [10, 10, 10, 10, 10, 1]


def test_feed_forward_never_holds_all_hidden_activations() -> None:
    """8,000 neurons on 8,000 tokens would be 512 MB of fp64 at once."""
    network = FeedForward(1, 8000, dtype=torch.float64)
    largest = 0

    def watch(_: nn.Module, __: tuple, out: Tensor) -> None:
        nonlocal largest
        largest = max(largest, out.numel())

    network.linear1.register_forward_hook(watch)
    with torch.no_grad():
        network(tensor(8000, 1))
    assert 0 < largest <= transformer.HIDDEN_AT_ONCE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "novel"}, "form must be 'paper' or 'standard', got 'novel'"),
        ({"form": "paper", "in_dim": 3}, "in_dim=3 is not part of the paper's block; use form="),
        ({"form": "paper", "dropout": 0.1}, "dropout=0.1 is not part of the paper's block"),
        ({"form": "paper", "learnable_temperature": True}, "learnable_temperature=True is no"),
        ({"num_heads": 4}, "num_heads must divide embed_dim"),
        ({"ff1_hidden_dim": -1}, "embed_dim and hidden_dim must be at least 1"),
    ],
)
def test_bad_constructor_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OneLayerTransformer(DIM, **options)


def test_bad_weights() -> None:
    w1, b1, w2, b2 = feed_forward_weights(5)
    with pytest.raises(ValueError, match=r"w2 must have shape \[6, 5\] .* got \[5, 6\]"):
        FeedForward.from_weights(w1, b1, w2.T, b2)
    with pytest.raises(ValueError, match="activation must be one of 'relu', 'gelu', got 'tanh'"):
        FeedForward(DIM, 5, activation="tanh")
    w = tensor(2, DIM)
    with pytest.raises(ValueError, match=r"w_o must have shape \[6, 2\] .* got \[2, 6\]"):
        OneLayerTransformer.from_weights(w, w, w, w)
    with pytest.raises(ValueError, match="num_heads must divide the rows of w_q, got 4 and 2"):
        OneLayerTransformer.from_weights(w, w, w, w.T, num_heads=4)
