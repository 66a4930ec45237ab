"""The transform, stage by stage.

The time of `moments` grows with the keys, that of `evaluate` with the queries, and that of `core`
with neither. So many keys with few queries measure `moments` and `core`, and so on. The same shapes
separate the stages of backward.
"""

import pytest
import torch

from bench.micro import kernels

MANY, FEW = 16_384, 16
STAGES = {
    "core": (FEW, FEW),
    "moments + core": (FEW, MANY),
    "core + evaluate": (MANY, FEW),
    "all": (MANY, MANY),
}


@pytest.mark.benchmark(group="transform, per stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kernel", [kernels.forward, kernels.backward])
def test_stage(benchmark, kernel, stage):
    benchmark(kernel("transform", kernels.random_inputs(*STAGES[stage])))


@pytest.mark.benchmark(group="transform, per width of the values")
@pytest.mark.parametrize("dv", [1, 16, 64, 65, 256])
@pytest.mark.parametrize("kernel", [kernels.forward, kernels.backward])
def test_width(benchmark, kernel, dv):
    benchmark(kernel("transform", kernels.random_inputs(MANY, MANY, dv=dv)))


@pytest.mark.benchmark(group="transform, per dtype")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", [kernels.forward, kernels.backward])
def test_dtype(benchmark, kernel, dtype):
    benchmark(kernel("transform", kernels.random_inputs(MANY, MANY, dtype=dtype)))


@pytest.mark.benchmark(group="transform, sharper logits")
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 100.0, 10_000.0])
def test_temperature(benchmark, sharpness):
    """A larger range of the logits means a larger layout, and a larger core."""
    query, key, value = kernels.random_inputs(MANY, MANY)
    benchmark(kernels.forward("transform", (query * sharpness, key, value)))


@pytest.mark.benchmark(group="transform, causal")
@pytest.mark.parametrize("kernel", [kernels.forward, kernels.backward])
def test_causal(benchmark, kernel):
    benchmark(kernel("transform", kernels.random_inputs(MANY, MANY), causal=True))
