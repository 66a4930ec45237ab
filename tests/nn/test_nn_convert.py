"""Rank-r approximation of nn.MultiheadAttention and conversion of whole models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from boltzattn.nn import LowRankAttention, convert
from boltzattn.nn.approximation import Approximation, Form, decompose, truncate
from torch import Tensor, nn

EMBED, HEADS = 24, 3
HEAD_DIM = EMBED // HEADS
# fp64, after an SVD of matrices of order 1.
ROUNDING = {"rtol": 1e-9, "atol": 1e-11}


def multihead(**options: object) -> nn.MultiheadAttention:
    mha = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options)
    if mha.in_proj_bias is not None:
        nn.init.normal_(mha.in_proj_bias)
        nn.init.normal_(mha.out_proj.bias)
    return mha


@pytest.mark.parametrize("rank", [HEAD_DIM, HEAD_DIM + 1, 2 * HEAD_DIM])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 7}], ids=["equal", "kdim vdim"])
def test_exact_from_full_rank_on(widths: dict, bias: bool, rank: int) -> None:
    """Biases included: softmax does not see b_k, so b_q costs no extra coordinate."""
    mha = multihead(bias=bias, batch_first=True, **widths)
    ours = LowRankAttention.from_multihead(mha, rank=rank)
    query = torch.randn(2, 9, EMBED, dtype=torch.float64)
    key = torch.randn(2, 11, mha.kdim, dtype=torch.float64)
    value = torch.randn(2, 11, mha.vdim, dtype=torch.float64)
    torch.testing.assert_close(
        ours(query, key, value)[0], mha(query, key, value, need_weights=False)[0], **ROUNDING
    )
    assert ours.approximation.exact
    torch.testing.assert_close(ours.approximation.kept, torch.ones(HEADS, dtype=torch.float64))


def test_coordinates_beyond_the_full_rank_can_learn() -> None:
    ours = LowRankAttention.from_multihead(multihead(), rank=2 * HEAD_DIM)
    x = torch.randn(9, 2, EMBED, dtype=torch.float64)
    ours(x, x, x)[0].square().sum().backward()
    assert ours.q_proj_weight.grad.any(dim=1).all()


def bilinear_forms(
    w_q: Tensor, b_q: Tensor | None, w_k: Tensor, rank: int, heads: int = HEADS
) -> Tensor:
    """[heads, d_q (+ 1), d_k], by its definition."""
    left = w_q if b_q is None else torch.cat([w_q, b_q[:, None]], dim=1)
    left, right = left.unflatten(0, (heads, -1)), w_k.unflatten(0, (heads, -1))
    return left.mT @ right * rank**-0.5


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_nearest_bilinear_form(bias: bool, rank: int) -> None:
    """Eckart-Young: the error of the best rank-r matrix is the rest of the spectrum."""
    mha = multihead(bias=bias)
    ours = LowRankAttention.from_multihead(mha, rank=rank)
    w_q, w_k, _ = mha.in_proj_weight.detach().chunk(3)
    b_q = mha.in_proj_bias.detach().chunk(3)[0] if bias else None
    old = bilinear_forms(w_q, b_q, w_k, HEAD_DIM)
    our_b_q = ours.in_proj_bias.detach()[: HEADS * rank] if bias else None
    new = bilinear_forms(ours.q_proj_weight.detach(), our_b_q, ours.k_proj_weight.detach(), rank)
    spectrum = torch.linalg.svdvals(old)
    error = torch.linalg.matrix_norm(old - new)
    torch.testing.assert_close(error, spectrum[:, rank:].norm(dim=-1), **ROUNDING)
    report = ours.approximation
    torch.testing.assert_close(report.spectrum, spectrum[:, :HEAD_DIM], **ROUNDING)
    kept = 1 - error.square() / torch.linalg.matrix_norm(old).square()
    torch.testing.assert_close(report.kept, kept, **ROUNDING)
    assert not report.exact


def test_kept_is_the_share_of_the_variance_of_the_logits() -> None:
    """What `kept` claims, measured: 1 - E[(new - old)^2] / E[old^2] on white inputs."""
    w_q, w_k = torch.randn(2, HEADS * HEAD_DIM, EMBED, dtype=torch.float64).unbind()
    form = Form.of(w_q, None, w_k, HEADS, HEAD_DIM**-0.5)
    found = decompose(form)
    new_q, _, new_k = truncate(form, found, (3,) * HEADS, scale=3**-0.5)
    report = Approximation(3, found.spectrum)
    x, y = torch.randn(2, 20000, EMBED, dtype=torch.float64).unbind()

    def logits(q: Tensor, k: Tensor, rank: int) -> Tensor:
        return torch.einsum("nd,hrd,hre,ne->nh", x, q, k, y) * rank**-0.5

    old = logits(w_q.unflatten(0, (HEADS, -1)), w_k.unflatten(0, (HEADS, -1)), HEAD_DIM)
    error = logits(new_q, new_k, 3) - old
    measured = 1 - error.square().mean(0) / old.square().mean(0)
    # Two variances from 20,000 samples with heavy tails: about 2% each.
    torch.testing.assert_close(measured, report.kept, rtol=0, atol=0.05)


def test_error_falls_with_rank() -> None:
    mha = multihead(batch_first=True)
    x = torch.randn(2, 40, EMBED, dtype=torch.float64)
    wanted = mha(x, x, x)[0]
    errors = [
        (LowRankAttention.from_multihead(mha, rank=r)(x, x, x)[0] - wanted).norm().item()
        for r in (1, 2, 4, 6, 8)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9 < errors[-2]


@pytest.mark.parametrize("training", [False, True])
def test_settings_are_kept(training: bool) -> None:
    mha = nn.MultiheadAttention(EMBED, HEADS, dropout=0.1, bias=False, dtype=torch.bfloat16)
    mha.train(training)
    ours = LowRankAttention.from_multihead(mha, rank=2, method="direct")
    assert (ours.dropout, ours.batch_first, ours.in_proj_bias) == (0.1, False, None)
    assert (ours.training, ours.method, ours.rank) == (training, "direct", 2)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, "add_bias_kv=True is not supported"),
        ({"add_zero_attn": True}, "add_zero_attn=True is not supported"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowRankAttention.from_multihead(nn.MultiheadAttention(EMBED, HEADS, **options), rank=1)


def test_only_multihead_attention_is_accepted() -> None:
    with pytest.raises(TypeError, match=r"must be an nn.MultiheadAttention, got Linear"):
        LowRankAttention.from_multihead(nn.Linear(3, 3), rank=1)
    with pytest.raises(ValueError, match=r"use LowRankAttention.from_multihead"):
        convert(multihead(), rank=1)


class Model(nn.Module):
    """An encoder, a shared attention, one that cannot be converted, a dict as result."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(EMBED, HEADS, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.shared = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
        self.again = self.shared
        self.odd = nn.MultiheadAttention(EMBED, HEADS, add_zero_attn=True, batch_first=True)
        self.double()

    def forward(self, x: Tensor) -> dict[str, object]:
        x = self.encoder(x)
        x = x + self.shared(x, x, x)[0]
        x = x + self.again(x, x, x)[0]
        return {"out": x, "odd": [self.odd(x, x, x)[0]], "size": x.shape[1]}


def test_convert_reports_and_replaces() -> None:
    model = Model().train()
    before = copy.deepcopy(model).eval()
    x = torch.randn(2, 10, EMBED, dtype=torch.float64)
    report = convert(model, rank=2, batch=x)
    names = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "shared", "again"]
    assert sorted(report.replaced) == sorted(names)
    assert all(isinstance(model.get_submodule(n), LowRankAttention) for n in names)
    assert model.shared is model.again
    assert list(report.skipped) == ["odd"]
    assert "add_zero_attn=True is not supported" in report.skipped["odd"]
    assert type(model.odd) is nn.MultiheadAttention
    assert all(module.training for module in model.modules())

    model.eval()
    old, new = before(x), model(x)
    old, new = (torch.stack([r["out"], r["odd"][0]]) for r in (old, new))
    assert report.max_change == pytest.approx(float((new - old).detach().abs().max()), rel=1e-9)
    relative = (new - old).detach().square().mean().sqrt() / old.detach().std(correction=0)
    assert report.change == pytest.approx(float(relative), rel=1e-9)
    text = str(report)
    assert "replaced shared: rank 8 -> 2, kept" in text
    assert f"outputs changed by {report.change:.2%}" in text


BATCHES: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x,),
    "mapping": lambda x: {"src": x},
}


@pytest.mark.parametrize("wrap", BATCHES.values(), ids=BATCHES.keys())
def test_convert_at_full_rank_changes_nothing(wrap: Callable[[Tensor], object]) -> None:
    layer = nn.TransformerEncoderLayer(
        EMBED, HEADS, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    x = torch.randn(2, 10, EMBED, dtype=torch.float64)
    report = convert(layer, rank=HEAD_DIM, batch=wrap(x))
    assert 0 <= report.change < 1e-12
    assert report.max_change < 1e-11


def test_convert_without_batch_or_layers() -> None:
    report = convert(nn.Linear(3, 3), rank=1)
    assert (report.replaced, report.skipped, report.change) == ({}, {}, None)
    text = str(report)
    assert text.startswith("no attention layer found; looked for nn.MultiheadAttention; ")
    assert "c_attn of Conv1D (GPT-2)" in text


def test_convert_leaves_subclasses_alone() -> None:
    class Special(nn.MultiheadAttention):
        pass

    model = nn.ModuleList([Special(EMBED, HEADS)])
    report = convert(model, rank=1)
    assert "is a subclass, Special" in report.skipped["0"]
    assert type(model[0]) is Special


def test_convert_refuses_a_batch_without_floating_output() -> None:
    class Count(nn.Module):
        def forward(self, x: Tensor) -> int:
            return x.numel()

    with pytest.raises(ValueError, match="no floating-point output"):
        convert(Count(), rank=1, batch=torch.ones(3))
