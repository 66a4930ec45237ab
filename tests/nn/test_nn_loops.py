"""Looped one-layer transformers: tied weights, scales of each loop, and the causal call."""

from __future__ import annotations

import pytest
import torch
from boltzattn.nn import OneLayerTransformer

DIM = 6
ENCODINGS = [None, "table", "sinusoidal"]


def _model(form: str = "standard", **options) -> OneLayerTransformer:
    torch.manual_seed(0)
    return OneLayerTransformer(DIM, form=form, num_heads=2, dtype=torch.float64, **options)


def _count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("form", ["paper", "standard"])
def test_a_loop_applies_attention_and_ff2_again(form):
    x = torch.randn(3, 5, DIM, dtype=torch.float64)
    once, thrice = _model(form), _model(form, loops=3)
    thrice.load_state_dict(once.state_dict())
    z = once.ff1(x)
    for _ in range(3):
        seen = z if once.attention_norm is None else once.attention_norm(z)
        z = once.ff2(z + once.attention(seen, seen, seen)[0])
    torch.testing.assert_close(thrice(x), z)
    assert _count(thrice) == _count(once)


@pytest.mark.parametrize("encoding", ENCODINGS[1:])
def test_scales_start_at_one(encoding):
    x = torch.randn(3, 5, DIM, dtype=torch.float64)
    plain, scaled = _model(loops=3), _model(loops=3, timestep_encoding=encoding)
    torch.testing.assert_close(scaled(x), plain(x))


def test_scales_multiply_what_is_added():
    x = torch.randn(3, 5, DIM, dtype=torch.float64)
    model = _model("paper", loops=2, timestep_encoding="table")
    with torch.no_grad():
        model.loop_scales.copy_(torch.randn(2, 2, DIM))
    z = model.ff1(x)
    for attention_scale, ff_scale in model.loop_scales:
        z = z + attention_scale * model.attention(z, z, z)[0]
        z = z + ff_scale * (model.ff2(z) - z)
    torch.testing.assert_close(model(x), z)


def test_a_loop_with_scale_zero_does_nothing():
    x = torch.randn(5, DIM, dtype=torch.float64)
    model, once = _model(loops=2, timestep_encoding="table"), _model()
    once.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        model.loop_scales[1] = 0.0
    torch.testing.assert_close(model(x), once(x))


def test_parameters_of_the_encodings():
    plain = _count(_model())
    assert _count(_model(loops=5)) == plain
    assert _count(_model(loops=5, timestep_encoding="table")) == plain + 5 * 2 * DIM
    sizes = {_count(_model(loops=k, timestep_encoding="sinusoidal")) for k in (2, 9)}
    assert sizes == {plain + 2 * DIM * 8}


def test_sinusoidal_scales_differ_between_loops():
    model = _model(loops=4, timestep_encoding="sinusoidal")
    with torch.no_grad():
        model.loop_scale_weight.normal_()
    scales = model._scales(torch.zeros(1, dtype=torch.float64))
    assert scales.shape == (4, 2, DIM)
    assert torch.pdist(scales.flatten(1)).min() > 0.1


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_permutation_equivariance(encoding):
    model = _model(loops=3, timestep_encoding=encoding)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x, order = torch.randn(2, 7, DIM, dtype=torch.float64), torch.randperm(7)
    torch.testing.assert_close(model(x[:, order]), model(x)[:, order])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_gradients_flow_and_state_dicts_load(encoding):
    model = _model(loops=3, timestep_encoding=encoding)
    x = torch.randn(2, 7, DIM, dtype=torch.float64, requires_grad=True)
    model(x).square().sum().backward()
    assert x.grad.abs().min() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    other = _model(loops=3, timestep_encoding=encoding)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model(x))


def test_a_single_loop_has_the_old_state_dict():
    assert not [name for name in _model().state_dict() if "loop" in name]
    assert "loops=2, timestep_encoding='table'" in repr(_model(loops=2, timestep_encoding="table"))
    assert "loops" not in repr(_model())


@pytest.mark.parametrize("method", ["direct", "transform"])
@pytest.mark.parametrize("loops", [1, 2])
def test_causal_outputs_do_not_see_later_tokens(method, loops):
    torch.manual_seed(0)
    model = OneLayerTransformer(DIM, loops=loops, method=method, dtype=torch.float64)
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    out = model(x, is_causal=True)
    torch.testing.assert_close(model(x[:, :4], is_causal=True), out[:, :4])
    assert not torch.allclose(model(x)[:, :4], out[:, :4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loops": 0}, "loops must be an integer of at least 1, got 0"),
        ({"loops": 1.5}, "loops must be an integer of at least 1, got 1.5"),
        ({"timestep_encoding": "sine"}, "timestep_encoding must be None, 'table' or 'sinusoidal'"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        OneLayerTransformer(DIM, **options)
