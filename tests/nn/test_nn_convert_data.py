"""Conversion for the logits that occur on data, budgets of ranks, and layers of other libraries."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from boltzattn.nn import ADAPTERS, LowRankAttention, convert, linears
from boltzattn.nn.approximation import Form, Moments, decompose, truncate
from torch import Tensor, nn

EMBED, HEADS, N = 24, 3, 12
HEAD_DIM = EMBED // HEADS
# fp64, after a square root of moments with a ridge of 1e-6.
ROUNDING = {"rtol": 1e-5, "atol": 1e-7}


def correlated(batch: int = 4, n: int = N, seed: int = 0) -> Tensor:
    """Tokens with a mean and a spectrum that falls fast, as those of trained models."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(EMBED, EMBED, generator=torch.Generator().manual_seed(99)).double()
    strengths = torch.logspace(0.5, -1.5, EMBED, dtype=torch.float64)
    x = torch.randn(batch, n, EMBED, dtype=torch.float64, generator=generator)
    return 1.0 + (x * strengths) @ torch.linalg.qr(mixing).Q


class Separate(nn.Module):
    """Attention with a Linear each, as in BERT; `between` is applied to queries and keys."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.num_attention_heads = HEADS
        self.query, self.key, self.value = (nn.Linear(EMBED, EMBED) for _ in range(3))
        self.between = between
        self.double()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(hidden_states).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.between is not None:
            q, k = self.between(q), self.between(k)
        if attention_mask is not None:
            attention_mask = attention_mask[:, None, None].bool()
        out = F.scaled_dot_product_attention(q, k, v, attention_mask)
        return out.transpose(1, 2).flatten(2)


class Conv1D(nn.Module):
    """A linear map as in GPT-2, by whose name it is recognised."""

    def __init__(self, out: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) / 5)
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.embed_dim = HEADS, EMBED
        self.c_attn = Conv1D(3 * EMBED, EMBED)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer.double(), 2, enable_nested_tensor=False)


MODELS = {
    "encoder": encoder,
    "query, key": lambda: nn.Sequential(Separate(), nn.Linear(EMBED, EMBED).double()),
    "Conv1D": lambda: nn.Sequential(Fused()),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def square_root(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(x)
    return vectors * values.clamp_min(0).sqrt() @ vectors.mT


@pytest.mark.parametrize("rank", [1, 3])
def test_best_in_the_metric_of_the_data(rank: int) -> None:
    """By definition: the bilinear form between roots of the inputs' moments, and Eckart-Young."""
    w_q, w_k = torch.randn(2, EMBED, EMBED, dtype=torch.float64).unbind()
    b_q = torch.randn(EMBED, dtype=torch.float64)
    x, y = correlated(40, seed=1), correlated(40, seed=2)
    with_one = torch.cat([x, torch.ones_like(x[..., :1])], -1).flatten(0, 1)
    s_x = with_one.T @ with_one / len(with_one)
    centred = (y - y.mean(1, keepdim=True)).flatten(0, 1)
    s_y = centred.T @ centred / len(centred)
    form = Form.of(w_q, b_q, w_k, HEADS, HEAD_DIM**-0.5)
    left = torch.cat([form.w_q, form.b_q[:, :, None]], -1)
    moments = Moments(left @ s_x @ left.mT, form.w_k @ s_y @ form.w_k.mT)
    found = decompose(form, moments)
    old = square_root(s_x) @ left.mT @ form.w_k @ square_root(s_y) * form.scale
    spectrum = torch.linalg.svdvals(old)[:, :HEAD_DIM]
    torch.testing.assert_close(found.spectrum, spectrum, rtol=1e-4, atol=1e-4)
    new_q, new_b, new_k = truncate(form, found, (rank,) * HEADS, 1.0)
    new = torch.cat([new_q, new_b[:, :, None]], -1).mT @ new_k
    error = torch.linalg.matrix_norm(square_root(s_x) @ new @ square_root(s_y) - old)
    torch.testing.assert_close(error, spectrum[:, rank:].norm(dim=-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_data_improves_on_plain_truncation(make) -> None:
    model = make()
    data, unseen = [correlated(8, seed=s) for s in range(5)], correlated(8, seed=9)
    plain = convert(copy.deepcopy(model), 2, batch=unseen)
    aware = convert(copy.deepcopy(model), 2, data=data, batch=unseen)
    assert aware.replaced.keys() == plain.replaced.keys() == aware.changes.keys()
    assert 0 < aware.change < 0.8 * plain.change
    exact = convert(model, HEAD_DIM, data=data, batch=unseen)
    assert exact.change < 1e-6


def test_kept_is_measured() -> None:
    """`kept` is a share of the variance of the logits of one softmax on the data."""
    model, x = nn.Sequential(Separate()), correlated(50)

    def logits() -> Tensor:
        """Of all pairs, also of different sequences: as if queries and keys were independent."""
        q, k = (
            part(x).unflatten(-1, (HEADS, -1)).detach() for part in (model[0].query, model[0].key)
        )
        return torch.einsum("bnhd,amhd->hbnam", q, k - k.mean(1, keepdim=True)).flatten(1)

    old = logits()
    report = convert(model, 2, data=[x]).replaced["0"]
    measured = 1 - (logits() - old).square().sum(1) / old.square().sum(1)
    torch.testing.assert_close(measured, report.kept, **ROUNDING)
    assert report.on_data
    assert "variance on the data" in str(report)


def test_decoder_with_cross_attention() -> None:
    layer = nn.TransformerDecoderLayer(EMBED, HEADS, 32, dropout=0.0)
    model = nn.TransformerDecoder(layer.double(), 1)
    memory, target = correlated(4).transpose(0, 1), correlated(4, 5, seed=3).transpose(0, 1)
    report = convert(model, 3, data=[(target, memory)] * 2)
    assert list(report.replaced) == ["layers.0.self_attn", "layers.0.multihead_attn"]
    assert all(isinstance(model.get_submodule(n), LowRankAttention) for n in report.replaced)
    assert all(0 < change < 1 for change in report.changes.values())


class MaskedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Separate()

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layer(x, attention_mask)


@pytest.mark.parametrize("kind", ["encoder", "query, key"])
def test_padding_does_not_count(kind: str) -> None:
    x = correlated(4)
    is_token = torch.arange(N) < torch.tensor([12, 7, 9, 1])[:, None]
    garbage = torch.where(is_token[..., None], x, 1e6)
    spectra = []
    for values in (x, garbage):
        torch.manual_seed(0)
        if kind == "encoder":
            model, batch = encoder(), {"src": values, "src_key_padding_mask": ~is_token}
        else:
            model = MaskedModel()
            batch = {"x": values, "attention_mask": is_token.long()}
        report = convert(model, 2, data=[batch])
        spectra.append(next(iter(report.replaced.values())).spectrum)
        if kind != "encoder":
            assert report.change < 10  # the measure leaves garbage out, too
    torch.testing.assert_close(*spectra, **ROUNDING)


def test_budgets() -> None:
    data = [correlated(8)]

    def ranks(**budget: object) -> list[tuple[int, ...]]:
        torch.manual_seed(0)
        report = convert(encoder(), data=data, **budget)
        return [found.ranks for found in report.replaced.values()], report

    chosen, report = ranks(kept=0.95)
    for own, found in zip(chosen, report.replaced.values(), strict=True):
        assert len(set(own)) == 1
        assert found.kept.mean() >= 0.95
        shares = found.spectrum.square()[:, : own[0] - 1].sum(1) / found.spectrum.square().sum(1)
        assert shares.mean() < 0.95
    chosen, report = ranks(kept=0.95, per="head")
    assert all(float(found.kept.min()) >= 0.95 for found in report.replaced.values())
    assert any(len(set(own)) > 1 for own in chosen)
    for per in ("layer", "head"):
        chosen, report = ranks(total=20, per=per)
        assert 20 - (HEADS if per == "layer" else 1) < sum(map(sum, chosen)) <= 20
    # Of all ways to distribute, none loses less variance.
    energy = torch.cat([found.spectrum.square() for found in report.replaced.values()])
    kept = sum(float(e[:r].sum()) for e, r in zip(energy, sum(chosen, ()), strict=True))
    later = energy[:, 1:].flatten().sort(descending=True).values
    assert kept == pytest.approx(float(energy[:, 0].sum() + later[: 20 - len(energy)].sum()))


def test_ranks_of_layers_changed_in_place() -> None:
    model = nn.Sequential(Separate())
    before = copy.deepcopy(model.state_dict())
    convert(model, total=5, per="head", data=[correlated(8)])
    ranks = model[0].boltzattn_ranks
    assert sum(ranks) == 5
    x = correlated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    for projection in (model[0].query, model[0].key):
        heads = projection(x).unflatten(-1, (HEADS, -1))
        for head, rank in enumerate(ranks):
            assert heads[..., head, :rank].all()
            assert not heads[..., head, rank:].any()
    again = copy.deepcopy(model)
    again.load_state_dict(before)
    assert again[0].boltzattn_ranks == (HEAD_DIM,) * HEADS
    assert model[0].boltzattn_ranks == ranks
    again.load_state_dict(model.state_dict())
    assert again[0].boltzattn_ranks == ranks
    fresh = nn.Sequential(Separate())
    fresh.load_state_dict(model.state_dict())
    convert(fresh, kept=1.0, per="head")  # finds the ranks of a converted checkpoint
    assert fresh[0].boltzattn_ranks == ranks
    torch.testing.assert_close(fresh(x), model(x), **ROUNDING)


class Rotary(Separate):
    def forward(self, hidden_states: Tensor, position_embeddings: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states)


class Grouped(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(EMBED, HEAD_DIM).double()


class Normed(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(HEAD_DIM)


class Quantized(nn.Linear):
    pass


class WithQuantized(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.key = Quantized(EMBED, EMBED).double()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Rotary, r"uses rotary positions \(position_embeddings\)"),
        (Grouped, "GQA"),
        (Normed, r"normalises queries .* \(q_norm\)"),
        (WithQuantized, "key is a Quantized, not an nn.Linear"),
        (lambda: Separate().to("meta"), "meta device"),
    ],
)
def test_what_cannot_be_converted_says_why(make, reason: str) -> None:
    report = convert(nn.Sequential(make()), 1)
    assert not report.replaced
    assert re.search(reason, report.skipped["0"])
    assert "skipped 0: " in str(report)


def test_layers_that_do_more_than_products_are_noticed() -> None:
    """Names do not tell; turning the coordinates does."""
    model = nn.Sequential(Separate(), Separate(nn.Tanh()), Separate())
    before = copy.deepcopy(model.state_dict())
    report = convert(model, HEAD_DIM, data=[correlated()])
    assert list(report.replaced) == ["0", "2"]
    assert "something between" in report.skipped["1"]
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)


def test_a_user_adds_an_adapter() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.inner = HEADS, Separate()
            self.to_q, self.to_k = self.inner.query, self.inner.key
            del self.inner.num_attention_heads

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = nn.Sequential(Mine())
    assert not convert(model, 1).replaced
    mine = linears("my attention", query="to_q", key="to_k", num_heads="heads")
    report = convert(model, 1, data=[correlated()], adapters=(*ADAPTERS, mine))
    assert list(report.replaced) == ["0"]
    assert model[0].boltzattn_ranks == (1,) * HEADS
    nothing = convert(nn.Linear(3, 3), 1, adapters=(mine,))
    assert (
        str(nothing) == "no attention layer found; looked for nn.MultiheadAttention; my attention"
    )


def test_a_layer_that_the_data_never_reaches_is_skipped() -> None:
    model = nn.Sequential(Separate())
    model.add_module("unused", Separate())
    model.forward = lambda x: model[0](x)
    report = convert(model, 1, data=[correlated()])
    assert "saw no tokens" in report.skipped["unused"]
    assert list(report.replaced) == ["0"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "exactly one of rank, kept and total, got none"),
        ({"rank": 1, "kept": 0.5}, ValueError, "got rank and kept"),
        ({"rank": 0}, ValueError, "rank must be an integer of at least 1, got 0"),
        ({"kept": 1.5}, ValueError, "kept must be a share above 0 and at most 1"),
        ({"kept": 0.5, "per": "model"}, ValueError, "per must be 'layer' or 'head'"),
        ({"total": 2}, ValueError, "total must be at least the number of heads, 6"),
        ({"rank": 1, "data": torch.ones(3)}, TypeError, "data must be an iterable of batches"),
        ({"rank": 1, "data": []}, ValueError, "data must yield at least one batch"),
    ],
)
def test_wrong_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        convert(encoder(), **arguments)
