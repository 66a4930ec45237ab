"""The transform where it could break: degenerate keys, extreme numbers, and its symmetries.

Results of all dtypes are held to the one error rule (`errors`). Where two results of the package
are compared with each other, both may be off by the tolerance that the transform certifies,
`CERTIFIED` of the magnitude involved, so they may differ by twice that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import boltzattn
import pytest
import torch
from check import assert_attention, run
from errors import CERTIFIED
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Result
from servers import Server, instruction_set, instruction_sets
from torch import Tensor

TRANSFORM = Server("transform", "cpu")
DIRECT = Server("direct", "cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
N_Q, N_K, DV = 50, 300, 3


def inputs(dtype: torch.dtype, n_q: int = N_Q, n_k: int = N_K) -> list[Tensor]:
    """Query, key, value and the incoming gradient of two heads."""
    shapes = ((2, n_q, 1), (2, n_k, 1), (2, n_k, DV), (2, n_q, DV))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def assert_output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """out alone, scale 1: within what is certified, or half a step of a denormal result."""
    out = boltzattn.attention(query, key, value, scale=1.0, **TRANSFORM.ask)
    dense = (query.double() @ key.double().transpose(-1, -2)).softmax(-1) @ value.double()
    step = torch.finfo(value.dtype).smallest_normal * torch.finfo(value.dtype).eps
    allowed = certified(value.dtype) * value.double().abs().max().item() + step
    assert (out.double() - dense).abs().max() <= allowed
    return out


def certified(dtype: torch.dtype) -> float:
    """tol(dtype); half precision: 4 units of rounding."""
    return CERTIFIED.get(dtype, 4 * torch.finfo(dtype).eps / 2)


def needle(n: int) -> Tensor:
    return (torch.arange(n) == n // 3).double()


# Each [n] with a range of about 1, so that the query sets the temperature.
KEYS: dict[str, Callable[[int], Tensor]] = {
    "all equal": lambda n: torch.full((n,), 0.37, dtype=torch.float64),
    "two values": lambda n: (torch.arange(n) % 2).double(),
    "needle above": needle,
    "needle below": lambda n: -needle(n),
    "two neighbours": lambda n: 1 + 2.0**-7 * (torch.arange(n) % 2).double(),
    "cauchy": lambda n: torch.tan(1.57 * torch.linspace(-1, 1, n, dtype=torch.float64)) / 1e3,
    "log-normal": lambda n: (3 * torch.randn(n, dtype=torch.float64)).exp() / 1e3,
    "ladder up": lambda n: 0.5 ** (torch.arange(n, dtype=torch.float64) % 24),
    "ladder down": lambda n: -(0.5 ** (torch.arange(n, dtype=torch.float64) % 24)),
    "both ladders": lambda n: (
        (1 - 2.0 * (torch.arange(n) % 2)) * 0.5 ** (torch.arange(n, dtype=torch.float64) % 24)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", KEYS)
@pytest.mark.parametrize("temperature", [0.1, 30.0, 3000.0])
def test_awkward_keys(temperature: float, family: str, dtype: torch.dtype) -> None:
    query, key, value, grad_out = inputs(dtype)
    key = KEYS[family](N_K).expand(2, N_K)[..., None].to(dtype)
    query = (query.double().clamp(-1, 1) * temperature).to(dtype)
    assert_attention(TRANSFORM, query, key, value, grad_out)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 300.0, 3000.0])
def test_every_instruction_set(temperature: float, dtype: torch.dtype, isa: str) -> None:
    """Layouts from one panel to dozens, with nodes that AVX-512 vectors do not divide."""
    query, key, value, grad_out = inputs(dtype)
    with instruction_set(isa):
        assert_attention(TRANSFORM, query * temperature, key, value, grad_out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_k", [1, 2, 3])
@pytest.mark.parametrize("n_q", [1, 40])
def test_few_keys(n_q: int, n_k: int, dtype: torch.dtype) -> None:
    assert_attention(TRANSFORM, *inputs(dtype, n_q=n_q, n_k=n_k), scale=20.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_of_zero_average_the_values(dtype: torch.dtype) -> None:
    query, key, value, grad_out = inputs(dtype)
    assert_output(torch.zeros_like(query), key, value)
    actual = run(TRANSFORM, query, key, value, grad_out, scale=0.0)
    assert torch.equal(actual.grad_query, torch.zeros_like(query))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_values_of_any_size(size: float, dtype: torch.dtype) -> None:
    query, key, value, grad_out = inputs(dtype)
    assert_attention(TRANSFORM, query, key, (value.double() * size).to(dtype), grad_out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e5, 2e6, 1e7, 1e9])
def test_large_logits(size: float, dtype: torch.dtype) -> None:
    """In fp32 2e6 is still served by the transform; 1e7 and more go to direct."""
    query, key, value, _ = inputs(dtype)
    assert_output((query.double() * size).to(dtype), key, value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_denormals(which: int, dtype: torch.dtype) -> None:
    tensors = inputs(dtype)
    tiny = torch.finfo(dtype).smallest_normal / 4
    tensors[which] = (tensors[which].double() * tiny).to(dtype)
    out = assert_output(*tensors[:3])
    if which == 2:
        assert out.abs().max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_keys_may_hold_anything(dtype: torch.dtype) -> None:
    """NaN and inf behind the mask do not reach the result; the bits are those of short keys."""
    query, key, value, grad_out = inputs(dtype)
    mask = torch.zeros(N_K, dtype=torch.bool)
    mask[N_K // 2 :] = True
    clean = assert_attention(TRANSFORM, query, key, value, grad_out, key_padding_mask=mask)
    key[:, mask] = math.nan
    key[:, -1] = math.inf
    dirty = run(TRANSFORM, query, key, value, grad_out, key_padding_mask=mask)
    for x, y in zip(clean, dirty, strict=True):
        assert torch.equal(x, y)
    for gradient in (dirty.grad_key, dirty.grad_value):
        assert not gradient[:, mask].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_attend_to(dtype: torch.dtype) -> None:
    """All keys masked, or none there: zeros, lse -inf, gradients of zero."""
    query, key, value, grad_out = inputs(dtype)
    all_masked = torch.ones(N_K, dtype=torch.bool)
    results = (
        run(TRANSFORM, query, key, value, grad_out, key_padding_mask=all_masked),
        run(TRANSFORM, query, key[:, :0], value[:, :0], grad_out),
    )
    for actual in results:
        assert torch.equal(actual.out, torch.zeros_like(grad_out))
        assert (actual.lse == -math.inf).all()
        for gradient in actual[2:]:
            assert not gradient.any()


def test_no_queries() -> None:
    actual = run(TRANSFORM, *inputs(torch.float32, n_q=0))
    assert actual.out.shape == (2, 0, DV)
    assert torch.equal(actual.grad_key, torch.zeros(2, N_K, 1))
    assert torch.equal(actual.grad_value, torch.zeros(2, N_K, DV))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_and_inf_go_where_dense_softmax_sends_them(
    which: int, poison: float, dtype: torch.dtype
) -> None:
    """One poisoned number in one head; the other head does not notice."""
    tensors = inputs(dtype)
    clean = run(TRANSFORM, *tensors).out
    tensors[which][0, 7, 0] = poison
    actual = run(TRANSFORM, *tensors).out
    query, key, value = (x.double() for x in tensors[:3])
    dense = (query @ key.transpose(-1, -2)).softmax(-1) @ value
    assert torch.equal(actual.isnan(), dense.isnan())
    infinite = dense.isinf()
    assert torch.equal(actual.double()[infinite], dense[infinite])
    assert torch.equal(actual[1], clean[1])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poisoned_value_of_a_key_without_weight(poison: float) -> None:
    """0 * inf and 0 * NaN are NaN in dense softmax, however small the weight."""
    key = torch.linspace(0, 1, 300).view(1, 300, 1)
    query = torch.linspace(2000, 4000, 50).view(1, 50, 1)
    value = torch.randn(1, 300, 2)
    value[0, 150, 0] = poison
    out = boltzattn.attention(query, key, value, scale=1.0, **TRANSFORM.ask)
    dense = (query @ key.mT).softmax(-1) @ value
    assert torch.equal(out.isnan(), dense.isnan())


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [
        (torch.float64, 0.5),
        (torch.float64, 20.0),
        (torch.float64, 1000.0),
        (torch.float32, 20.0),
        (torch.float32, 1000.0),
    ],
)
@pytest.mark.parametrize("family", ["gauss", "cauchy", "needle above", "both ladders"])
def test_gradients(family: str, temperature: float, dtype: torch.dtype) -> None:
    """Through out and lse, with a mask, n_q != n_k, against autograd's in higher precision."""
    draw = KEYS.get(family, lambda n: torch.randn(n, dtype=torch.float64) / 5)
    query, _, value, grad_out = inputs(dtype, n_q=200, n_k=900)
    key = torch.stack([draw(900), -draw(900)])[..., None].to(dtype)
    mask = torch.arange(900) % 11 == 5
    query = query.clamp(-1, 1) * temperature
    grad_lse = torch.randn(2, 200).to(dtype)
    assert_attention(
        TRANSFORM, query, key, value, grad_out, grad_lse, key_padding_mask=mask, scale=1.0
    )


@st.composite
def heads(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Tensor]:
    """Query, key, value and gradient of one head: distribution, temperature, n, dv, dtype."""
    dtype = draw(st.sampled_from(dtypes))
    n_q, n_k = draw(st.integers(1, 60)), draw(st.integers(2, 400))
    dv = draw(st.integers(1, 9))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    family = draw(st.sampled_from(["gauss", *KEYS]))
    key = torch.randn(n_k, dtype=torch.float64) if family == "gauss" else KEYS[family](n_k)
    temperature = 10 ** draw(st.floats(-3, 4))
    query = torch.randn(n_q, dtype=torch.float64).clamp(-3, 3) * temperature
    tensors = (query[:, None], key[:, None], torch.randn(n_k, dv), torch.randn(n_q, dv))
    return [x[None].to(dtype) for x in tensors]


def assert_close(a: Tensor, b: Tensor, size: float, dtype: torch.dtype) -> None:
    """Two results that are both certified."""
    assert (a.double() - b.double()).abs().max() <= 2 * certified(dtype) * size


@given(heads((torch.float64,)))
@settings(max_examples=40)
def test_agrees_with_the_oracle(tensors: list[Tensor]) -> None:
    assert_attention(TRANSFORM, *tensors, scale=1.0)


@given(heads((torch.float64, torch.bfloat16, torch.float16)))
@settings(max_examples=40)
def test_agrees_with_direct(tensors: list[Tensor]) -> None:
    """(fp32 logits of direct carry an error of B eps, which is no matter of the transform's.)"""
    query, key, value, _ = tensors
    a, b = (
        boltzattn.attention(query, key, value, scale=1.0, **server.ask)
        for server in (TRANSFORM, DIRECT)
    )
    assert_close(a, b, value.abs().max().item(), value.dtype)


@given(heads(), st.integers(0, 2**31))
@settings(max_examples=40)
def test_permutation(tensors: list[Tensor], seed: int) -> None:
    """Permuted queries permute the rows, bit for bit; permuted keys change roundings only."""
    query, key, value, grad_out = tensors
    torch.manual_seed(seed)
    rows, columns = torch.randperm(query.shape[1]), torch.randperm(key.shape[1])
    plain = run(TRANSFORM, query, key, value, grad_out)
    by_row = run(TRANSFORM, query[:, rows], key, value, grad_out[:, rows])
    assert torch.equal(by_row.out, plain.out[:, rows])
    assert torch.equal(by_row.lse, plain.lse[:, rows])
    assert torch.equal(by_row.grad_query, plain.grad_query[:, rows])
    by_column = run(TRANSFORM, query, key[:, columns], value[:, columns], grad_out)
    assert_close(by_column.out, plain.out, value.abs().max().item(), value.dtype)


@given(heads((torch.float64,)), st.floats(-1000, 1000))
@settings(max_examples=40)
def test_moving_all_keys(tensors: list[Tensor], shift: float) -> None:
    """out stays and lse moves by t * shift; what the moved keys round to is what is moved."""
    query, key, value, grad_out = tensors
    moved = key + shift
    key = moved - shift
    a = run(TRANSFORM, query, key, value, grad_out, scale=1.0)
    b = run(TRANSFORM, query, moved, value, grad_out, scale=1.0)
    # Rounding of the difference `moved - shift` itself moves logits by |t| ulp(shift).
    drift = query.abs().max().item() * abs(shift) * torch.finfo(torch.float64).eps
    size = value.abs().max().item()
    assert (a.out - b.out).abs().max() <= (2e-10 + 2 * drift) * size
    assert (a.lse + query[..., 0] * shift - b.lse).abs().max() <= 2e-10 + 4 * drift


@given(heads((torch.float64,)), st.floats(0, 1))
@settings(max_examples=40)
def test_merging_two_parts_by_lse_gives_the_whole(tensors: list[Tensor], at: float) -> None:
    """fp64: there the ulp of lse, which the merge exponentiates, is small enough."""
    query, key, value, grad_out = tensors
    cut = round(at * key.shape[1])

    def part(rows: slice) -> Result:
        return run(TRANSFORM, query, key[:, rows], value[:, rows], grad_out, scale=1.0)

    a, b, whole = part(slice(cut)), part(slice(cut, None)), part(slice(None))
    lse = torch.logaddexp(a.lse, b.lse)
    merged = sum(x.out * (x.lse - lse).exp()[..., None] for x in (a, b))
    ulp = torch.finfo(torch.float64).eps * whole.lse.abs().max().item()
    size = value.abs().max().item()
    assert (merged - whole.out).abs().max() <= (2e-10 + 4 * ulp) * size
    assert (lse - whole.lse).abs().max() <= 2e-10 + 4 * ulp


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("temperature", [2.0, 6.0, 20.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_constant_values(dtype: torch.dtype, temperature: float, value: float) -> None:
    """A constant out is interpolated without error, but the weights are not: they need nodes."""
    key = 0.01 * torch.randn(2, 14, 1, dtype=torch.float64)
    key[:, 7] = 3.0
    query = temperature / 3 * torch.tensor([1.0, 0.0, -1.0, 1.0], dtype=torch.float64)
    values, grad_out = torch.full((2, 14, DV), value), torch.randn(2, 4, DV)
    query = query[None, :, None].expand(2, 4, 1)
    assert_attention(TRANSFORM, *(x.to(dtype) for x in (query, key, values, grad_out)))
