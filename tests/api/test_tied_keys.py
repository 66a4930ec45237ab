"""Equal and tied keys under logits of any size: the weights are counts, and nothing may be lost.

The logits of tied keys are the same number, so eager softmax is exact here however large they are.
What is composed of parts must not lose how many keys a part has in the rounding of its lse.
"""

from __future__ import annotations

import boltzattn
import pytest
import torch
from check import assert_attention
from errors import assert_accurate
from oracle import dense, eagers, largest, magnitudes, oracle
from servers import Server, facts, instruction_set, instruction_sets, servers
from torch import Tensor

N = 600  # enough for two leaves of every composition
N_AUTO = 1100  # enough for "auto" to take the transform
N_STREAM = 1100  # enough for blocks of a stream that are merged
DTYPES = (torch.float32, torch.float64)
SIZES = (1e6, 1e10)
KINDS = ("equal", "tied")
SERVERS = [*servers(facts(is_causal=True, n_q=N, n_k=N)), Server("auto", "auto")]


def _inputs(kind: str, dtype: torch.dtype, size: float, n: int) -> list[Tensor]:
    """Query, key, value and the incoming gradient; logits are about -size, 0 or size.

    Two kinds of keys are as far apart as a transform or a stream takes them.
    """
    query = (torch.arange(n) % 3 - 1.0).view(1, n, 1).to(dtype)
    key = torch.full((1, n, 1), size, dtype=dtype)
    if kind == "tied":
        key[:, ::3] -= min(size / 4, 1e7)
    value, grad_out = torch.randn(2, 1, n, 2, dtype=torch.float64).to(dtype)
    return [query, key, value, grad_out]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", instruction_sets())
def test_keys_that_differ_by_the_order_of_two_numbers(name: str, dtype: torch.dtype) -> None:
    """q a + q b and q b + q a are one number if no product is fused with the addition."""
    a, b = torch.randn(2, 1, 100, 1, dtype=dtype)
    query = torch.randn(1, 200, 1, dtype=dtype).expand(1, 200, 2) * 1e5
    value = torch.eye(2, dtype=dtype)[None]
    with instruction_set(name):
        for one, other in zip(a[0], b[0], strict=True):
            key = torch.stack([torch.cat([one, other]), torch.cat([other, one])])[None]
            out = boltzattn.attention(query, key, value, method="direct", backend="cpu")
            assert torch.equal(out, torch.full_like(out, 0.5))


CASES = [
    pytest.param(
        server,
        dtype,
        size,
        id=f"{server}-{dtype}-{size:g}",
    )
    for server in SERVERS
    for dtype in DTYPES
    for size in SIZES
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("server", "dtype", "size"), CASES)
def test_causal(server: Server, dtype: torch.dtype, size: float, kind: str) -> None:
    n = N_AUTO if server.method == "auto" else N
    assert_attention(server, *_inputs(kind, dtype, size, n), is_causal=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("server", SERVERS, ids=str)
def test_all_pairs(server: Server, dtype: torch.dtype, size: float, kind: str) -> None:
    assert_attention(server, *_inputs(kind, dtype, size, 200))


@pytest.mark.parametrize("n", [7, 33])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("server", servers(facts(rank=8)), ids=str)
def test_equal_keys_of_groups(server: Server, dtype: torch.dtype, size: float, n: int) -> None:
    """Logits are rounded sums of 8 products, and equal wherever torch's product makes them so."""
    query = torch.randn(4, 33, 8, dtype=dtype)
    key = (size * torch.randn(2, 1, 8, dtype=dtype)).repeat(1, n, 1)
    value = torch.randn(2, n, 3, dtype=dtype)
    out = boltzattn.attention(query, key, value, enable_gqa=True, **server.ask)
    mean = value.double().mean(-2, keepdim=True).repeat_interleave(2, 0).expand(out.shape)
    eager = dense(query, *(x.repeat_interleave(2, 0) for x in (key, value)))[0]
    magnitude = {"out": largest(value)}
    assert_accurate({"out": out}, {"out": mean}, [{"out": eager}], magnitudes=magnitude)


def assert_packed(server: Server, n: int, tensors: list[Tensor], is_causal: bool) -> None:
    """Two sequences, of 5 tokens and of n, and the rule for the second one."""
    starts = torch.tensor([0, 5, 5 + n])
    leaves = [x.transpose(0, 1).detach().requires_grad_() for x in tensors[:3]]
    out = boltzattn.attention_varlen(*leaves, starts, starts, is_causal=is_causal, **server.ask)
    found = torch.autograd.grad(out, leaves, tensors[3].transpose(0, 1))
    names = "out", "grad_query", "grad_key", "grad_value"
    results = zip(names, (out, *found), strict=True)
    long, call = [x[:, 5:] for x in tensors], {"is_causal": is_causal}
    assert_accurate(
        {name: x.detach().transpose(0, 1)[:, 5:] for name, x in results},
        oracle(*long, **call)._asdict(),
        eagers(*long, **call),
        magnitudes=magnitudes(*long, **call),
        method=server.method,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("server", "dtype", "size"), CASES)
def test_varlen_causal(server: Server, dtype: torch.dtype, size: float, kind: str) -> None:
    n = N_AUTO if server.method == "auto" else N
    assert_packed(server, n, _inputs(kind, dtype, size, 5 + n), is_causal=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("server", SERVERS, ids=str)
def test_varlen(server: Server, dtype: torch.dtype, size: float, kind: str) -> None:
    assert_packed(server, 200, _inputs(kind, dtype, size, 205), is_causal=False)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size", "kind"),
    [(dtype, size, kind) for dtype in DTYPES for size in SIZES for kind in KINDS],
)
def test_stream(dtype: torch.dtype, size: float, kind: str, merged: bool) -> None:
    """Appended in pieces to one stream, or to two that are merged."""
    query, key, value, _ = _inputs(kind, dtype, size, N_STREAM)
    streams = [boltzattn.StreamingAttention(1, 2, 1.0, dtype=dtype) for _ in range(2)]
    for first in range(0, N_STREAM, 300):
        piece = slice(first, first + 300)
        streams[merged and first >= 600].append(key[:, piece], value[:, piece])
    if merged:
        streams[0].merge(streams[1])
    names = "out", "lse"
    found = streams[0].query(query[:, :3], return_lse=True)
    exact = dense(*(x.double() for x in (query[:, :3], key, value)))
    assert_accurate(
        dict(zip(names, found, strict=True)),
        dict(zip(names, exact, strict=True)),
        [dict(zip(names, dense(query[:, :3], key, value), strict=True))],
        magnitudes={"out": largest(value), "lse": max(1.0, largest(exact[1]))},
        method="transform",
    )
