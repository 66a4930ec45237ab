"""Numbers at the edges: huge, tiny, equal, none, inf, NaN, and memory that was never written."""

from __future__ import annotations

import math
from collections.abc import Iterator

import boltzattn
import pytest
import torch
from check import assert_attention, lse_dtype, run
from errors import assert_accurate, error_of
from oracle import Result, largest, oracle
from servers import ANY_RANK, PLAIN, Server, facts, servers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def sdpa(*args: Tensor, **call: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*args, **call)


def _inputs(
    dtype: torch.dtype = torch.float32, n_q: int = 40, n_k: int = 70, rank: int = 1, dv: int = 3
) -> list[Tensor]:
    """Query, key, value and the incoming gradient."""
    shapes = ((2, n_q, rank), (2, n_k, rank), (2, n_k, dv), (2, n_q, dv))
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 30.0, 1e3, 1e6, 1e15])
def test_logits_of_any_size(size: float, dtype: torch.dtype, server: Server) -> None:
    """The size goes into the query; fp16 gets what it can hold without overflowing eager."""
    query, key, value, grad_out = _inputs(dtype)
    query = query * min(size, torch.finfo(dtype).max / 64)
    assert_attention(server, query, key, value, grad_out)


@pytest.mark.parametrize("server", PLAIN, ids=str)
def test_scaled_gradients_do_not_overflow(server: Server) -> None:
    """key times value overflows in fp32, but not what the scale makes of it."""
    query, key, value, grad_out = _inputs()
    actual = run(server, query, key * 1e30, value * 1e12, grad_out, scale=0.0)
    assert torch.equal(actual.grad_query, torch.zeros(2, 40, 1))
    assert torch.equal(actual.grad_key, torch.zeros(2, 70, 1))


@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [-1e4, -100.0, 100.0, 1e4])
def test_logits_far_from_zero(shift: float, dtype: torch.dtype, server: Server) -> None:
    """All logits of a row moved by a constant: the same weights, lse moved."""
    query, key, value, grad_out = _inputs(dtype)
    query = query.abs() + 0.5
    key = (key.double() + shift).to(dtype)
    assert_attention(server, query, key, value, grad_out)


# The transform of rank 2 is accurate beside the terms of a gradient (docs/tensor.md), not here.
@pytest.mark.parametrize(
    "server", [s for s in servers(facts(rank=2)) if s.method == "direct"], ids=str
)
@pytest.mark.parametrize("top", [3.0, 8.0])  # for more, fp64 would be no oracle
@pytest.mark.parametrize("n", [2, 16, 700])
def test_gradients_of_rows_with_one_heavy_key(n: int, top: float, server: Server) -> None:
    """The error is small beside the gradients, not just beside what cancels in them.

    The gradient of the heavy key's logit is minus the sum of the others', none of which cancels, so
    it can be had to a few roundings.
    """
    query, key, value, grad_out = _inputs(n_q=n, n_k=n, rank=2, dv=8)
    query = query.abs() + 1.0
    key = key.clamp(-2.0, 2.0)
    key[:, 0] = 2.0 + top
    actual = run(server, query, key, value, grad_out)
    truth = oracle(query, key, value, grad_out)
    tolerance = 32 * torch.finfo(torch.float32).eps * (1.0 + top)  # logits are rounded, too
    for name in ("grad_query", "grad_key"):
        error = error_of(getattr(actual, name), getattr(truth, name))
        assert error <= tolerance * largest(getattr(truth, name)), name


@pytest.mark.parametrize("server", PLAIN, ids=str)
def test_gradients_where_queries_keys_and_values_are_huge(server: Server) -> None:
    """Every row has one key; its gradient is 0, and what cancels would overflow times the keys."""
    query, key, value, grad_out = _inputs(n_q=16, n_k=16, dv=8)
    actual = run(server, query * 1e18, key * 1e18, value * 1e30, grad_out)
    for x in (actual.grad_query, actual.grad_key):
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys_average_the_values(dtype: torch.dtype, server: Server) -> None:
    query, _, value, grad_out = _inputs(dtype)
    key = query.new_full((2, 70, 1), 0.7)
    actual = assert_attention(server, query, key, value, grad_out)
    mean = value.double().mean(-2, keepdim=True).expand(actual.out.shape)
    assert_accurate(
        {"out": actual.out},
        {"out": mean},
        [],
        magnitudes={"out": largest(value)},
        method=server.method,
    )


@pytest.mark.parametrize("server", PLAIN, ids=str)
def test_keys_of_zero_give_queries_no_gradient(server: Server) -> None:
    query, key, value, grad_out = _inputs()
    actual = run(server, query, torch.zeros_like(key), value, grad_out, torch.randn(2, 40))
    assert torch.equal(actual.grad_query, torch.zeros(2, 40, 1))


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_returns_its_value(dtype: torch.dtype, server: Server) -> None:
    query, key, value, grad_out = _inputs(dtype, n_k=1, rank=3)
    actual = run(server, query, key, value, grad_out)
    assert torch.equal(actual.out, value.expand(actual.out.shape))


@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_stay(dtype: torch.dtype, server: Server) -> None:
    """A mean of equal numbers is that number, also where the sum of them nearly overflows."""
    query, key, value, grad_out = _inputs(dtype)
    value = torch.full_like(value, torch.finfo(dtype).max / 128)
    actual = assert_attention(server, query, key, value, grad_out)
    assert actual.out.isfinite().all()


@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["query", "key", "value", "all"])
def test_denormal_inputs(which: str, dtype: torch.dtype, server: Server) -> None:
    """Numbers below the smallest normal one are numbers, not zeros."""
    names = ("query", "key", "value")
    tiny = torch.finfo(dtype).smallest_normal / 4
    query, key, value = (
        (x.double() * tiny).to(dtype) if which in (name, "all") else x
        for name, x in zip(names, _inputs(dtype), strict=False)
    )
    actual = assert_attention(server, query, key, value, torch.randn(2, 40, 3).to(dtype))
    if which in ("value", "all"):
        assert actual.out.abs().max() > 0


@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_keys(is_causal: bool, server: Server) -> None:
    tensors = _inputs(n_k=0)
    actual = run(server, *tensors, torch.randn(2, 40), is_causal=is_causal)
    assert torch.equal(actual.out, torch.zeros(2, 40, 3))
    assert torch.equal(actual.lse, torch.full((2, 40), -math.inf))
    assert torch.equal(actual.grad_query, torch.zeros(2, 40, 1))
    assert actual.grad_key.shape == (2, 0, 1)
    assert actual.grad_value.shape == (2, 0, 3)


@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_queries(is_causal: bool, server: Server) -> None:
    tensors = _inputs(n_q=0)
    actual = run(server, *tensors, torch.randn(2, 0), is_causal=is_causal)
    assert actual.out.shape == (2, 0, 3)
    assert actual.lse.shape == (2, 0)
    assert torch.equal(actual.grad_key, torch.zeros(2, 70, 1))
    assert torch.equal(actual.grad_value, torch.zeros(2, 70, 3))


@pytest.mark.parametrize("server", servers(facts(attn_mask=True)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_masks_mask_nothing_entirely(dtype: torch.dtype, server: Server) -> None:
    """The lowest finite number is a popular stand-in for -inf: a row full of it is not dead."""
    query, key, value, grad_out = _inputs(dtype)
    mask = torch.zeros(40, 70, dtype=dtype)
    mask[:, ::2] = torch.finfo(dtype).min
    mask[7] = torch.finfo(dtype).min
    actual = assert_attention(server, query, key, value, grad_out, attn_mask=mask)
    assert actual.out[:, 7].abs().min() > 0


@pytest.mark.parametrize("server", servers(facts(n_q=3, n_k=200_000)), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sums_do_not_drift(dtype: torch.dtype, server: Server) -> None:
    """A plain running sum of 200,000 numbers in fp32 would lose three digits."""
    query, key, value, grad_out = _inputs(dtype, n_q=3, n_k=200_000)
    assert_attention(server, query, key, value + 1, grad_out)


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sign", [1, -1])
def test_inf_and_nan_go_where_sdpa_sends_them(
    sign: int, poison: float, which: str, server: Server
) -> None:
    """With key[0] of one sign a row of infinite logits is all +inf or all -inf, else mixed."""
    query, key, value, _ = _inputs(n_q=5, n_k=6, rank=3)
    query[1] = query[1].abs()
    key[1] = sign * key[1].abs()
    {"query": query, "key": key, "value": value}[which][:, 2, 0] = poison
    out = boltzattn.attention(query, key, value, **server.ask)
    truth = sdpa(query.double(), key.double(), value.double())
    theirs = {"out": sdpa(query, key, value)}
    assert_accurate(
        {"out": out},
        {"out": truth},
        [theirs],
        magnitudes={"out": largest(value)},
        method=server.method,
    )


@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_nan_that_is_seen_is_shown(kind: str, which: str, server: Server) -> None:
    """Whatever a mask hides, a NaN that a query may attend to reaches its row."""
    query, key, value, _ = _inputs(n_q=90, n_k=90)
    {"query": query, "key": key, "value": value}[which][:, 66] = math.nan
    sees = torch.arange(90) == 66 if which == "query" else torch.ones(90, dtype=torch.bool)
    if kind == "causal":
        out = boltzattn.attention(query, key, value, is_causal=True, **server.ask)
        sees &= torch.arange(90) >= 66
    else:
        padding = torch.zeros(90, dtype=torch.bool)
        padding[:20] = True
        out = boltzattn.attention(query, key, value, key_padding_mask=padding, **server.ask)
    assert out[:, sees].isnan().all()
    if which == "query":
        assert out[:, ~sees].isfinite().all()


@pytest.mark.parametrize("server", PLAIN, ids=str)
def test_nan_reaches_the_gradients(server: Server) -> None:
    query, key, value, grad_out = _inputs()
    grad_out[:, 3] = math.nan
    actual = run(server, query, key, value, grad_out)
    assert actual.grad_query[:, 3].isnan().all()
    assert actual.grad_query[:, :3].isfinite().all()
    assert actual.grad_key.isnan().all()
    assert actual.grad_value.isnan().all()


@pytest.fixture
def nan_filled_empty() -> Iterator[None]:
    """Let torch.empty return NaN, as it one day will anyway."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("n_q", "n_k", "is_causal", "padded"),
    [
        (70, 90, False, False),
        (90, 70, True, False),
        (65, 1, False, False),
        (5, 0, False, False),
        (300, 33, True, True),
        (33, 300, False, True),
        (40, 40, False, True),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("server", PLAIN, ids=str)
@pytest.mark.usefixtures("nan_filled_empty")
def test_uninitialised_memory_is_not_read(
    n_q: int, n_k: int, is_causal: bool, padded: bool, dtype: torch.dtype, server: Server
) -> None:
    tensors = _inputs(dtype, n_q, n_k, dv=65)
    call = {"is_causal": is_causal}
    if padded:  # everything in one batch: rows that see nothing
        call["key_padding_mask"] = torch.arange(n_k) >= torch.tensor([[n_k // 2], [0]])
    tensors = [x.unsqueeze(1) for x in tensors]
    grad_lse = torch.randn(2, 1, n_q, dtype=lse_dtype(dtype))
    actual = run(server, *tensors, grad_lse, **call)
    for name, x in zip(Result._fields, actual, strict=True):
        assert not x.isnan().any(), name


@pytest.mark.parametrize("score", ["dot", "gaussian"])
@pytest.mark.parametrize("n_k", [16, 32, 64, 65, 128])
def test_scratch_of_the_last_call_does_not_count(n_k: int, score: str) -> None:
    """NaN among the visible tokens selects a slower order of sums; NaN left in scratch must not."""
    generator = torch.Generator().manual_seed(n_k)
    inputs = [torch.randn(45, w, generator=generator) for w in (1, 17)]
    keys = [torch.randn(n_k, w, generator=generator) for w in (1, 17)]
    mask = torch.randn(45, n_k, generator=generator)

    def gradients() -> list[torch.Tensor]:
        query, key, value = (x.clone().requires_grad_() for x in (inputs[0], *keys))
        out = boltzattn.attention(
            query, key, value, attn_mask=mask, score=score, method="direct", backend="cpu"
        )
        return list(torch.autograd.grad(out, (query, key, value), inputs[1]))

    def fill_scratch(x: float) -> None:
        tensors = [torch.full((300, w), x, requires_grad=True) for w in (1, 1, 17)]
        out = boltzattn.attention(*tensors, score=score, method="direct", backend="cpu")
        out.sum().backward()

    fill_scratch(1.0)
    clean = gradients()
    fill_scratch(math.nan)
    assert all(map(torch.equal, gradients(), clean))
