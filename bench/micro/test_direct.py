"""The direct method: each rank, each dtype, causal, and the overhead of a call."""

import boltzattn
import pytest
import torch

from bench.micro import kernels

N = 1024


@pytest.mark.benchmark(group="direct forward, per rank")
@pytest.mark.parametrize("rank", [*range(1, 17), 32])
def test_forward(benchmark, rank):
    benchmark(kernels.forward("direct", kernels.random_inputs(N, N, rank)))


@pytest.mark.benchmark(group="direct backward, per rank")
@pytest.mark.parametrize("rank", [*range(1, 17), 32])
def test_backward(benchmark, rank):
    benchmark(kernels.backward("direct", kernels.random_inputs(N, N, rank)))


@pytest.mark.benchmark(group="direct, per dtype")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", [kernels.forward, kernels.backward])
def test_dtype(benchmark, kernel, dtype):
    benchmark(kernel("direct", kernels.random_inputs(N, N, 8, dtype=dtype)))


@pytest.mark.benchmark(group="direct, causal")
@pytest.mark.parametrize("kernel", [kernels.forward, kernels.backward])
def test_causal(benchmark, kernel):
    benchmark(kernel("direct", kernels.random_inputs(N, N, 8), causal=True))


@pytest.mark.benchmark(group="overhead of a call, n = 16")
@pytest.mark.parametrize("call", ["operator", "attention", "attention with autograd", "sdpa"])
def test_overhead(benchmark, call):
    q, k, v = (torch.randn(1, 1, 16, width) for width in (1, 1, 64))
    if call == "operator":
        benchmark(kernels.forward("direct", kernels.random_inputs(16, 16)))
    elif call == "sdpa":
        benchmark(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    else:
        q.requires_grad_(call == "attention with autograd")
        benchmark(boltzattn.attention, q, k, v, method="direct")
