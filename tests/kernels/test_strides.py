"""Strides, broadcasting and grouped heads: how the numbers lie in memory must not matter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import boltzattn
import pytest
import torch
from check import assert_attention
from errors import assert_accurate
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Result, eagers, magnitudes, oracle
from servers import ANY_RANK, Server, facts, servers, servers_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

SIZES = st.sampled_from((0, 1, 2, 7, 33, 66))


@st.composite
def laid_out(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers of this shape, somewhere in a larger storage, in any order of axes.

    Every axis may skip elements, leading axes may repeat one element (stride 0), the first
    element may lie inside the storage.
    """
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    repeated = [i < len(shape) - 2 and draw(st.booleans()) for i in range(len(shape))]
    offset = draw(st.integers(0, 3))
    stored = [1 if repeated[i] else shape[i] * steps[i] + offset for i in order]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    x = torch.randn(stored, generator=generator, dtype=torch.float64).to(dtype)
    x = x.permute([order.index(i) for i in range(len(shape))])
    for axis, (size, step) in enumerate(zip(shape, steps, strict=True)):
        if not repeated[axis]:
            taken = (slice(None),) * axis + (slice(offset, offset + size * step, step),)
            x = x[taken]
    return x.expand(shape)


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors (with the incoming gradients) and keywords of a call."""
    dtype = draw(st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)))
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    n_q, n_k = draw(SIZES), draw(SIZES)
    rank, dv = draw(st.integers(1, 18)), draw(st.sampled_from((1, 2, 5, 16, 33)))

    def broadcast(*inner: int) -> tuple[int, ...]:
        """A leading shape that broadcasts to `lead`, and the inner one."""
        kept = lead[draw(st.integers(0, len(lead))) :]
        return (*(1 if draw(st.booleans()) else size for size in kept), *inner)

    query = draw(laid_out((*lead, n_q, rank), dtype))
    key = draw(laid_out(broadcast(n_k, rank), dtype))
    value = draw(laid_out(broadcast(n_k, dv), dtype))
    grad_out = draw(laid_out((*lead, n_q, dv), dtype))
    call: dict[str, Any] = {}
    kind = draw(st.sampled_from(("none", "causal", "bool", "additive")))
    if kind == "causal":
        call["is_causal"] = True
    elif kind != "none":
        mask = draw(laid_out(broadcast(n_q, n_k), dtype))
        call["attn_mask"] = mask if kind == "additive" else mask > -0.5
    if draw(st.booleans()):
        padding = draw(laid_out((*lead[:-1], n_k), dtype))
        call["key_padding_mask"] = padding if draw(st.booleans()) else padding > 0.5
    return [query, key, value, grad_out], call


@settings(max_examples=150)
@given(calls())
def test_any_shapes_and_strides(drawn: tuple[list[Tensor], dict[str, Any]]) -> None:
    tensors, call = drawn
    for server in servers_of(*tensors[:3], **call):
        assert_attention(server, *tensors, **call)


def _as_heads_inside(x: Tensor) -> Tensor:
    """Stored as [batch, n, heads, width], the layout projections produce."""
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _sliced(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x, torch.nan), x], -1)[..., : x.shape[-1]]


def _every_second_row(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], -2).flatten(-3, -2)[..., ::2, :]


def _same_for_all_heads(x: Tensor) -> Tensor:
    return x[:, :1].expand(x.shape)


def _same_row(x: Tensor) -> Tensor:
    return x[..., :1, :].expand(x.shape)


def _same_column(x: Tensor) -> Tensor:
    return x[..., :1].expand(x.shape)


def _one_number(x: Tensor) -> Tensor:
    """What the gradient of a sum looks like."""
    return x.new_ones(()).expand(x.shape)


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        _as_heads_inside,
        _transposed,
        _sliced,
        _every_second_row,
        _same_for_all_heads,
        _same_row,
        _same_column,
        _one_number,
    ],
)
def test_named_layouts(layout: Callable[[Tensor], Tensor], server: Server) -> None:
    shapes = ((2, 3, 70, 3), (2, 3, 65, 3), (2, 3, 65, 20), (2, 3, 70, 20))
    assert_attention(server, *(layout(torch.randn(shape)) for shape in shapes))


@pytest.mark.parametrize("server", servers(facts(rank=3, attn_mask=True)), ids=str)
@pytest.mark.parametrize("shape", [(65,), (70, 1), (1, 65), (3, 1, 1), (2, 1, 70, 65)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_attn_mask_broadcasts(shape: tuple[int, ...], dtype: torch.dtype, server: Server) -> None:
    query, key, value = torch.randn(2, 3, 70, 3), torch.randn(2, 3, 65, 3), torch.randn(2, 3, 65, 4)
    mask = torch.randn(shape) if dtype.is_floating_point else torch.rand(shape) < 0.7
    grad_out = torch.randn(2, 3, 70, 4)
    assert_attention(server, query, key, value, grad_out, attn_mask=mask)


@pytest.mark.parametrize("server", ANY_RANK, ids=str)
@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((3, 1, 9, 3), (2, 8, 3), (8, 4)),
        ((9, 3), (2, 3, 8, 3), (1, 3, 8, 4)),
        ((9, 3), (8, 3), (2, 3, 8, 4)),
        ((2, 1, 3, 9, 3), (4, 1, 8, 3), (1, 1, 1, 8, 4)),
        ((0, 3, 9, 3), (1, 3, 8, 3), (3, 8, 4)),  # an empty batch
    ],
)
def test_leading_dimensions_broadcast(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], server: Server
) -> None:
    q, k, v = torch.randn(query), torch.randn(key), torch.randn(value)
    lead = torch.broadcast_shapes(query[:-2], key[:-2], value[:-2])
    actual = assert_attention(server, q, k, v, torch.randn(*lead, query[-2], value[-1]))
    assert actual.out.shape == (*lead, query[-2], value[-1])
    assert actual.lse.shape == (*lead, query[-2])


@pytest.mark.parametrize("server", servers(facts(rank=3, attn_mask=True)), ids=str)
@pytest.mark.parametrize(("heads", "key_heads"), [(6, 6), (6, 3), (6, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["plain", "causal", "masks"])
def test_grouped_heads(heads: int, key_heads: int, kind: str, server: Server) -> None:
    """Like repeating every key and value head for its group, and like SDPA."""
    query = torch.randn(2, heads, 9, 3)
    key, value = torch.randn(2, key_heads, 8, 3), torch.randn(2, key_heads, 8, 4)
    grad_out = torch.randn(2, heads, 9, 4)
    call: dict[str, Any] = {"is_causal": kind == "causal"}
    mask = padding = None
    if kind == "masks":
        mask, padding = torch.randn(2, heads, 9, 8), torch.randn(2, 8)

    def compute(function: Callable[..., Tensor], **masks: Tensor | None) -> dict[str, Tensor]:
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out = function(*leaves, **masks, **call, enable_gqa=True)
        grads = torch.autograd.grad(out, leaves, grad_out)
        return dict(zip(("out", *Result._fields[2:]), (out.detach(), *grads), strict=True))

    # The truth has the groups as an axis of their own, along which key and value broadcast.
    both = None if mask is None else (mask + padding[:, None, None]).unflatten(1, (key_heads, -1))
    grouped = (
        query.unflatten(1, (key_heads, -1)),
        key.unsqueeze(2),
        value.unsqueeze(2),
        grad_out.unflatten(1, (key_heads, -1)),
    )

    def flat(result: dict[str, Tensor]) -> dict[str, Tensor]:
        """As the caller sees it: the group axis is part of the heads again, or gone."""
        return {name: x.flatten(1, 2) for name, x in result.items()}

    truth = flat(oracle(*grouped, attn_mask=both, **call)._asdict())
    ours = partial(boltzattn.attention, key_padding_mask=padding, **server.ask)
    for function, its_mask in ((ours, mask), (sdpa, None if mask is None else both.flatten(1, 2))):
        assert_accurate(
            compute(function, attn_mask=its_mask),
            truth,
            map(flat, eagers(*grouped, attn_mask=both, **call)),
            magnitudes=magnitudes(*grouped, attn_mask=both, **call),
            method=server.method,
        )


def _allocated(function: Callable[[], Any]) -> int:
    """Bytes that torch's CPU allocator hands out during the call."""
    function()  # whatever is allocated once for all
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    return sum(
        event.cpu_memory_usage
        for event in profile.events()
        if event.name == "[memory]" and event.cpu_memory_usage > 0
    )


@pytest.mark.parametrize(
    "server", [s for s in servers(facts(rank=4)) if s.backend != "reference"], ids=str
)
@pytest.mark.parametrize(
    "layout", [_as_heads_inside, _transposed, _sliced, _same_for_all_heads, _same_column]
)
def test_strided_inputs_are_not_copied(layout: Callable[[Tensor], Tensor], server: Server) -> None:
    """Few queries and many keys: a copy of key or value would dwarf everything else."""
    query = layout(torch.randn(1, 2, 4, 4))
    key, value = (layout(torch.randn(1, 2, 20_000, width)) for width in (4, 16))
    copy_of_key = key.numel() * key.element_size()
    allocated = _allocated(lambda: boltzattn.attention(query, key, value, **server.ask))
    assert allocated < copy_of_key
