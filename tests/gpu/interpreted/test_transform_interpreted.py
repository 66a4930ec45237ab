"""The Triton kernels of `transform`, interpreted, against the oracle and the layout in Python."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from boltzattn.problem import Problem
from boltzattn.reference import direct as reference
from boltzattn.transform import layout
from boltzattn.transform.tolerances import LARGEST_PRODUCT
from boltzattn.triton_kernels import layout as fields
from boltzattn.triton_kernels.launch import NODES
from boltzattn.triton_kernels.tolerances import PRECISION, most_panels
from boltzattn.triton_kernels.transform import transform_forward
from boltzattn.triton_kernels.transform_launch import find_layouts, run_to_core
from check import assert_alike, assert_attention, run
from oracle import magnitudes
from servers import Server
from torch import Tensor

TRITON = Server("transform", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(dtype: torch.dtype, n_q: int, n_k: int, dv: int, heads: int = 1) -> list[Tensor]:
    """Query, key, value and the incoming gradient."""
    shapes = ((heads, n_q, 1), (heads, n_k, 1), (heads, n_k, dv), (heads, n_q, dv))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def problem_of(query: Tensor, key: Tensor, value: Tensor, scale: float = 1.0) -> Problem:
    return Problem(query, key, value, *[None] * 4, scale, 0.0, False, False)


def served(query: Tensor, key: Tensor, value: Tensor) -> list[int]:
    """Which heads the transform itself serves."""
    return run_to_core(problem_of(query, key, value), for_backward=False).heads.served.tolist()


@pytest.mark.parametrize(
    ("dtype", "n_q", "n_k", "dv", "temperature"),
    [
        (torch.float32, 70, 600, 3, 1.0),
        (torch.bfloat16, 70, 600, 3, 3.0),
        (torch.float16, 30, 520, 3, 0.3),
        (torch.float32, 1, 1, 1, 30.0),
        (torch.bfloat16, 530, 70, 130, 0.1),
    ],
)
def test_against_the_oracle(
    dtype: torch.dtype, n_q: int, n_k: int, dv: int, temperature: float
) -> None:
    query, key, value, grad_out = inputs(dtype, n_q, n_k, dv)
    assert_attention(TRITON, query, key, value, grad_out, scale=temperature)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_heads_are_served(dtype: torch.dtype) -> None:
    """By the transform itself, not by what it falls back on."""
    assert served(*inputs(dtype, 9, 300, 2)[:3]) == [1]


def test_padding_and_gradients_of_lse() -> None:
    """Masked keys may hold anything."""
    query, key, value, grad_out = inputs(torch.float32, 20, 530, 3)
    ignored = torch.rand(530) < 0.3
    grad_lse = torch.randn(1, 20)
    assert_attention(TRITON, query, key, value, grad_out, grad_lse, key_padding_mask=ignored)
    key = key.masked_fill(ignored[:, None], math.nan)
    held = run(TRITON, query, key, value, grad_out, grad_lse, key_padding_mask=ignored)
    assert all(bool(x.isfinite().all()) for x in held)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda q, k, v: (q, k.index_fill(1, torch.tensor([3]), math.nan), v),
        lambda q, k, v: (q, k, v.index_fill(1, torch.tensor([3]), math.inf)),
        lambda q, k, v: (q * 1e9, k, v),
    ],
    ids=["NaN key", "infinite value", "B beyond the largest"],
)
def test_heads_it_cannot_serve_go_to_direct(spoil: Callable) -> None:
    """Only the spoilt head: the results of head 0 are those it has on its own."""
    query, key, value, grad_out = inputs(torch.float32, 9, 80, 3, heads=2)
    spoilt = [
        torch.cat([x[:1], y[1:]])
        for x, y in zip((query, key, value), spoil(query, key, value), strict=True)
    ]
    assert served(*spoilt) == [1, 0]
    both = run(TRITON, *spoilt, grad_out, scale=1.0)
    direct = run(Server("direct", "triton"), *(x[1:] for x in spoilt), grad_out[1:], scale=1.0)
    alone = run(TRITON, *(x[:1] for x in spoilt), grad_out[:1], scale=1.0)
    for name, x, y, z in zip(both._fields, both, direct, alone, strict=True):
        assert torch.equal(x[:1], z), name
        torch.testing.assert_close(x[1:], y, rtol=0.0, atol=0.0, equal_nan=True)


RANGES = [
    (-3.0, 3.0, -1.0, 2.0, 1000),
    (0.0, 0.0, -1.0, 2.0, 5),
    (2.0, 2.0, 0.5, 0.5, 1),
    (-1e-30, 1e-30, -1.0, 1.0, 17),
    (5.0, 1e4, -7.0, 1e3, 3000),
    (-1e5, -1e3, 0.0, 3e-3, 300),
    (-2.9e7, 2.9e7, -0.5, 0.5, 2000),
]


@pytest.mark.parametrize("span", RANGES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_are_those_of_python(span: tuple, dtype: torch.dtype) -> None:
    """Axis by axis, for tokens that span the range; bf16's own range is what it rounds to."""
    t_min, t_max, s_min, s_max, n = span
    query = torch.tensor([t_min, t_max]).view(1, 2, 1).to(dtype)
    key = torch.linspace(s_min, s_max, n).view(1, n, 1).to(dtype)
    found = find_layouts(problem_of(query, key, key)).layout[0].tolist()

    def assert_fields(of: object, names: dict[str, str]) -> None:
        for field, name in names.items():
            # A few roundings of fp64, made by other libraries.
            expected = pytest.approx(getattr(of, name), rel=1e-12, abs=1e-300)
            assert found[getattr(fields, field).value] == expected, field

    ends = (query.min(), query.max(), key.min(), key.max())
    exact = layout.Range(*(float(x) for x in ends), n)
    precision = PRECISION[dtype]
    query_layout = layout.make_layout(exact, NODES, NODES, precision.query)
    key_layout = layout.make_layout(exact, NODES, NODES, precision.key)
    for name in ("t_min", "t_max", "s_min", "s_max"):
        assert found[getattr(fields, name.upper()).value] == getattr(exact, name)
    for axis, of in (("QUERY", query_layout.query), ("KEY", key_layout.key)):
        assert_fields(of, {f"{axis}_{x.upper()}": x for x in ("origin", "half", "panels")})
    names = {x.upper(): x for x in ("tau", "middle", "radius")}
    assert_fields(query_layout, names | {"STRIP": "query_strip"})


def test_the_most_panels_are_enough() -> None:
    precision = PRECISION[torch.float32]
    for n in (2, 100, 10**6):
        span = layout.Range(-LARGEST_PRODUCT, LARGEST_PRODUCT, -0.5, 0.5, n)
        widest = layout.make_layout(span, NODES, NODES, precision.query).query.panels
        assert most_panels(n, precision)[0] >= widest


def test_bitwise_the_same_twice() -> None:
    tensors = inputs(torch.float32, 70, 600, 3)
    first, second = (run(TRITON, *tensors, scale=0.1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_agrees_with_the_reference() -> None:
    query, key, value, _ = inputs(torch.float32, 40, 300, 5)
    out, lse = transform_forward(problem_of(query, key, value, 7.0))
    dense, dense_lse = reference.forward(
        problem_of(query.double(), key.double(), value.double(), 7.0)
    )
    # fp32 weights and rows of 16 nodes: a few units of rounding of max|value|.
    assert (out - dense).abs().max() <= 8 * torch.finfo(torch.float32).eps * value.abs().max()
    assert (lse - dense_lse).abs().max() <= 1e-9  # fp64 nodes, interpolated to 1e-9


@pytest.mark.parametrize("temperature", [0.3, pytest.param(30.0, marks=pytest.mark.full)])
def test_as_the_cpu_backend(temperature: float) -> None:
    tensors, call = inputs(torch.float32, 70, 300, 5), {"scale": temperature}
    ours, cpus = run(TRITON, *tensors, **call), run(Server("transform", "cpu"), *tensors, **call)
    assert_alike(ours, cpus, magnitudes(*tensors, **call))
