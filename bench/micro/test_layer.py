"""Layers, projections, and the Boltzmann operator."""

import boltzattn
import pytest
import torch
from boltzattn.nn import LowRankAttention


def layer(heads: int, dim: int, n: int, rank: int, grad: bool):
    """The leaves (x and the weights), and a call of self_attention."""
    x = torch.randn(1, n, dim, requires_grad=grad)
    shapes = [(heads * rank, dim), (heads * rank, dim), (dim, dim), (dim, dim)]
    weights = [(torch.randn(shape) / dim**0.5).requires_grad_(grad) for shape in shapes]
    return [x, *weights], lambda: boltzattn.self_attention(x, *weights, num_heads=heads)


@pytest.mark.benchmark(group="self_attention")
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("rank", [1, 8])
def test_forward(benchmark, heads, rank):
    _, call = layer(heads, dim=256, n=1024, rank=rank, grad=False)
    benchmark(call)


@pytest.mark.benchmark(group="self_attention backward")
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("rank", [1, 8])
def test_backward(benchmark, heads, rank):
    leaves, call = layer(heads, dim=256, n=1024, rank=rank, grad=True)
    out = call()
    grad_out = torch.randn_like(out)
    benchmark(lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True))


@pytest.mark.parametrize("passes", ["forward", "both"])
@pytest.mark.parametrize("kind", ["LowRankAttention", "MultiheadAttention"])
@pytest.mark.parametrize(
    ("batch", "n", "dim", "heads"), [(1, 16, 64, 4), (8, 64, 192, 3), (64, 256, 192, 3)]
)
def test_module(benchmark, batch, n, dim, heads, kind, passes):
    """The layer that people swap in, against the one they swap out."""
    benchmark.group = f"module, batch {batch}, n {n}, dim {dim}, {heads} heads, {passes}"
    x = torch.randn(batch, n, dim, requires_grad=passes == "both")
    build = LowRankAttention if kind == "LowRankAttention" else torch.nn.MultiheadAttention
    module = build(dim, heads, batch_first=True).requires_grad_(passes == "both")
    grad_out = torch.randn(batch, n, dim)

    def call():
        out, _ = module(x, x, x, need_weights=False)
        if passes == "both":
            out.backward(grad_out)

    benchmark(call)


@pytest.mark.benchmark(group="project: q and k of one head from x")
@pytest.mark.parametrize("width", [2, 1024])
def test_project(benchmark, width):
    """Rank 1 needs two columns; 1024 is a full linear map, for comparison."""
    x, weight = torch.randn(4096, 1024), torch.randn(width, 1024)
    benchmark(torch.nn.functional.linear, x, weight)


@pytest.mark.benchmark(group="boltz")
@pytest.mark.parametrize("call", ["boltz", "logsumexp"])
def test_boltz(benchmark, call):
    a = torch.randn(64, 4096)
    benchmark({"boltz": boltzattn.boltz, "logsumexp": torch.logsumexp}[call], a, -1)
