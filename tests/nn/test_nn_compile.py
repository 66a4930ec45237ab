"""LowRankAttention under torch.compile, torch.export, torch.fx and quantization."""

from __future__ import annotations

import copy

import pytest
import torch
from boltzattn.nn import LowRankAttention
from torch import Tensor, nn
from torch._dynamo.utils import counters

DIM = 16
LENGTHS = (300, 777, 5000, 1024, 301, 2048)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = LowRankAttention(DIM, 2, batch_first=True)
        self.out = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.out(x + self.attention(x, x, x)[0])


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_training_at_changing_lengths_with_inductor(dynamic: bool | None) -> None:
    """One graph for the first length, at most one more for all others, and the same training."""
    layer = LowRankAttention(DIM, 2, batch_first=True)
    layers = layer, copy.deepcopy(layer)
    compiled = torch.compile(layers[1], backend="inductor", fullgraph=True, dynamic=dynamic)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in layers]
    counters.clear()
    graphs = []
    for n in LENGTHS:
        x = torch.randn(2, n, DIM)
        losses = []
        for call, optimizer in zip((layer, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (call(x, x, x)[0] - x.amax(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    first, second, *_ = graphs
    assert first == 1
    assert second == (1 if dynamic else 2)
    assert graphs[1:] == [second] * (len(LENGTHS) - 1)
    for one, other in zip(*(one.parameters() for one in layers), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_export_for_all_lengths() -> None:
    model = Model().eval()
    n = torch.export.Dim("n", min=2, max=10_000)
    program = torch.export.export(model, (torch.randn(2, 300, DIM),), dynamic_shapes=({1: n},))
    for length in LENGTHS:
        x = torch.randn(2, length, DIM)
        torch.testing.assert_close(program.module()(x), model(x))


def test_symbolic_trace_says_why_not_and_works_with_a_leaf() -> None:
    model = Model().eval()
    with pytest.raises(TypeError, match=r"fx.symbolic_trace cannot trace .* use torch.export"):
        torch.fx.symbolic_trace(model)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, LowRankAttention) or super().is_leaf_module(module, name)

    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    x = torch.randn(2, 50, DIM)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic_quantization_leaves_the_layer_as_it_is() -> None:
    model = Model().eval()
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(quantized.out) is not nn.Linear
    x = torch.randn(2, 50, DIM)
    inner = model.norm(x)
    wanted, found = (m.attention(inner, inner, inner)[0] for m in (model, quantized))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    # qint8 has 8 bits.
    torch.testing.assert_close(quantized(x), model(x), rtol=0.1, atol=0.05)
