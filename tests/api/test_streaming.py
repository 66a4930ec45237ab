"""A stream gives what attention over everything appended gives, from a state that stays small."""

from __future__ import annotations

import io
import itertools
import math
import resource
from typing import Any

import boltzattn
import pytest
import torch
from boltzattn.dispatch.backends import kernels
from errors import assert_accurate
from oracle import dense
from torch import Tensor


def assert_rule(
    stream: boltzattn.StreamingAttention, query: Tensor, key: Tensor, value: Tensor
) -> None:
    """The error rule for out and lse, as for any certified method."""
    out, lse = stream.query(query, return_lse=True)
    doubles = [x.double() for x in (query, key, value)]
    truth = dense(*doubles, scale=stream.scale)
    eager = dense(query, key, value, scale=stream.scale)
    assert out.dtype == query.dtype
    assert_accurate(
        {"out": out, "lse": lse},
        dict(zip(("out", "lse"), truth, strict=True)),
        [dict(zip(("out", "lse"), eager, strict=True))],
        magnitudes={
            "out": value.abs().max().item(),
            "lse": max(1.0, truth[1].abs().max().item()),
        },
        method="transform",
    )


def keys_of(kind: str, n: int) -> Tensor:
    """Families that are hard for a summary: what matters may come first, last or drift away."""
    normal = torch.randn(2, n, 1, dtype=torch.float64)
    steps = torch.linspace(0.0, 1.0, n, dtype=torch.float64)[:, None]
    return {
        "normal": normal,
        "rising": steps + 0.001 * normal,
        "falling": -steps + 0.001 * normal,
        "late needle": torch.where(steps > 1 - 1.5 / n, 3.0, 0.01 * normal),
        "early needle": torch.where(steps < 0.5 / n, 3.0, 0.01 * normal),
        "heavy tails": (1.3 * normal).sinh(),
        "equal": torch.full_like(normal, 0.3),
        "two points": normal.sign(),
    }[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "normal",
        "rising",
        "falling",
        "late needle",
        "early needle",
        "heavy tails",
        "equal",
        "two points",
    ],
)
def test_equals_attention_over_everything(kind: str, dtype: torch.dtype) -> None:
    n, piece = 5000, 600
    key, value = keys_of(kind, n).to(dtype), torch.randn(2, n, 4, dtype=torch.float64).to(dtype)
    reach = (key.max() - key.min()).double().item() or 1.0
    stream = boltzattn.StreamingAttention(2, 4, 1e5 / (0.7 * reach), dtype=dtype, scale=0.7)
    for first in range(0, n, piece):
        stream.append(key[:, first : first + piece], value[:, first : first + piece])
    assert len(stream) == n
    for logits in (0.1, 30.0, 4000.0, 9e4):
        query = torch.linspace(-1.0, 1.0, 21, dtype=torch.float64) * logits / (reach * 0.7)
        query = query.to(dtype)[None, :, None].expand(2, -1, 1)
        assert_rule(stream, query, key, value)


def test_pieces_do_not_matter_beyond_the_rule() -> None:
    key, value = torch.randn(2, 3000, 1), torch.randn(2, 3000, 4)
    query = torch.randn(2, 20, 1) * 5
    for piece in (1, 63, 64, 65, 2999, 3000):
        stream = boltzattn.StreamingAttention(2, 4, 30.0)
        last = 0
        while last < 3000:
            step = min(piece, 3000 - last) if last < 40 or piece > 1 else 3000 - last
            stream.append(key[:, last : last + step], value[:, last : last + step])
            last += step
        assert_rule(stream, query, key, value)


def test_step_by_step_generation_equals_the_causal_pass() -> None:
    """The stream as the cache of a causal layer: one token in, one result out."""
    n, dv = 700, 4
    query, key = torch.randn(2, 3, n, 1, dtype=torch.float64).unbind()
    value = torch.randn(3, n, dv, dtype=torch.float64)
    stream = boltzattn.StreamingAttention(3, dv, 6.0, dtype=torch.float64)
    steps = []
    for i in range(n):
        token = slice(i, i + 1)
        steps.append(stream.step(query[:, token], key[:, token], value[:, token]))
    causal = boltzattn.attention(query, key, value, is_causal=True)
    # Both within the certificate of fp64.
    torch.testing.assert_close(torch.cat(steps, 1), causal, rtol=0.0, atol=2e-10)


@pytest.mark.parametrize("prompt", [0, 1, 70])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_model_that_generates(prompt: int, batch_first: bool) -> None:
    """A stack of layers, token by token with a stream each, equals one causal pass."""
    torch.manual_seed(0)
    width, heads, n = 16, 4, 300
    layers = [
        boltzattn.nn.LowRankAttention(
            width,
            heads,
            batch_first=batch_first,
            dtype=torch.float64,
            learnable_temperature=True,
            scale=1.3,
        )
        for _ in range(2)
    ]
    states: list[Any] = [None, None]
    axis = 1 if batch_first else 0

    def step(x: Tensor) -> Tensor:
        for i, layer in enumerate(layers):
            out, states[i] = layer.step(x, states[i], query_bound=30.0)
            x = x + out
        return x

    tokens = torch.randn((3, n, width) if batch_first else (n, 3, width), dtype=torch.float64)
    pieces = [tokens.narrow(axis, 0, prompt)] if prompt else []
    pieces += [tokens.narrow(axis, i, 1) for i in range(prompt, n)]
    found = torch.cat([step(piece) for piece in pieces], axis)
    x = tokens
    with torch.no_grad():
        for layer in layers:
            x = x + layer(x, x, x, is_causal=True)[0]
    # Certificates of fp64, through two layers.
    torch.testing.assert_close(found, x, rtol=0.0, atol=1e-9)
    assert len(states[0]) == n


@pytest.mark.full
def test_ten_thousand_steps() -> None:
    torch.manual_seed(0)
    layer = boltzattn.nn.LowRankAttention(32, 4, batch_first=True)
    x = torch.randn(2, 10_000, 32)
    out, state = layer.step(x[:, :1000])
    parts = [out]
    for i in range(1000, 10_000):
        out, state = layer.step(x[:, i : i + 1], state)
        parts.append(out)
    with torch.no_grad():
        whole = layer(x, x, x, is_causal=True)[0]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0.0, atol=5e-6)


def test_step_refuses() -> None:
    with pytest.raises(ValueError, match="step needs a layer of rank 1"):
        boltzattn.nn.LowRankAttention(8, 2, rank=2, batch_first=True).step(torch.randn(1, 3, 8))


def test_saved_and_restored_without_loss() -> None:
    key, value, query = torch.randn(2, 6000, 1), torch.randn(2, 6000, 4), torch.randn(2, 9, 1)
    stream = boltzattn.StreamingAttention(2, 4, 10.0)
    stream.append(key[:, :4321], value[:, :4321])
    file = io.BytesIO()
    torch.save(stream.state_dict(), file)
    stream.append(key[:, 4321:], value[:, 4321:])
    file.seek(0)
    restored = boltzattn.StreamingAttention(2, 4, 10.0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert len(restored) == 4321
    restored.append(key[:, 4321:], value[:, 4321:])
    for a, b in zip(stream.query(query, True), restored.query(query, True), strict=True):
        assert torch.equal(a, b)


def test_merge() -> None:
    key, value, query = torch.randn(2, 8000, 1), torch.randn(2, 8000, 4), torch.randn(2, 9, 1)
    cuts = [0, 3000, 3100, 8000]
    streams = []
    for first, last in itertools.pairwise(cuts):
        streams.append(boltzattn.StreamingAttention(2, 4, 10.0))
        streams[-1].append(key[:, first:last], value[:, first:last])
    before = streams[1].query(query)
    streams[0].merge(streams[1])
    streams[2].merge(streams[0])
    assert len(streams[2]) == 8000
    assert torch.equal(streams[1].query(query), before)
    assert_rule(streams[2], query, key, value)


def fill(stream: boltzattn.StreamingAttention, blocks: int, size: int) -> None:
    for i in range(blocks):
        generator = torch.Generator().manual_seed(i)
        key = torch.randn(1, size, 1, generator=generator)
        stream.append(key, torch.randn(1, size, stream.head_dim, generator=generator))
        stream.query(key[:, :1])


@pytest.mark.parametrize(("product", "most"), [(54.0, 68e3), (1e5, 188e3)])
def test_the_state_does_not_grow(product: float, most: float) -> None:
    """Bytes of a head with values of width 64, whose logits differ by up to `product`."""
    stream = boltzattn.StreamingAttention(1, 64, product)
    stream.append(torch.tensor([0.0, 1.0]).view(1, 2, 1), torch.randn(1, 2, 64))
    size = stream.state_bytes()
    assert size <= most
    for _ in range(20):
        stream.append(torch.rand(1, 1000, 1), torch.randn(1, 1000, 64))
    assert stream.state_bytes() == size


def test_keys_of_growing_range() -> None:
    """The central panel is split again and again; what it held stays exact."""
    for dtype in (torch.float32, torch.float64):
        key = torch.randn(2, 900, 1, dtype=torch.float64) * torch.logspace(-6, 3, 900)[:, None]
        key, value = key.to(dtype), torch.randn(2, 900, 4, dtype=dtype)
        stream = boltzattn.StreamingAttention(2, 4, 40.0, dtype=dtype)
        levels = set()
        for first in range(0, 900, 50):
            stream.append(key[:, first : first + 50], value[:, first : first + 50])
            levels.add(stream.state_dict()["levels"])
            query = torch.linspace(-40, 40, 41, dtype=dtype).view(1, 41, 1).expand(2, 41, 1)
            assert_rule(stream, query, key[:, : first + 50], value[:, : first + 50])
        assert len(levels) > 4


def test_backends_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    key, value, query = torch.randn(2, 700, 1), torch.randn(2, 700, 5), torch.randn(2, 90, 1)
    streams = [boltzattn.StreamingAttention(2, 5, 10.0) for _ in range(2)]
    streams[0].append(key, value)
    found = streams[0].query(query, return_lse=True)
    monkeypatch.setattr(streams[1]._table, "_kernels", kernels("reference", "stream"))
    for piece in (slice(0, 300), slice(300, 700)):
        streams[1].append(key[:, piece], value[:, piece])
    torch.testing.assert_close(streams[1].query(query, return_lse=True), found)
    step = torch.randn(2, 1, 1), torch.randn(2, 1, 1), torch.randn(2, 1, 5)
    torch.testing.assert_close(streams[0].step(*step), streams[1].step(*step))
    with pytest.raises(ValueError, match="query_bound = 10, got 11"):
        streams[1].step(torch.full((2, 1, 1), 11.0), *step[1:])
    streams[0]._table._fold()
    for name in ("sums", "z", "ends"):
        one, other = (stream.state_dict()[name] for stream in streams)
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.full
def test_ten_million_tokens_in_bounded_memory() -> None:
    """Exact to the rule at the end, from a state and a process that did not grow."""
    stream = boltzattn.StreamingAttention(1, 16, 1e4)
    query = torch.tensor([-1e4, -30.0, -1.0, 0.0, 1.0, 30.0, 1e4]).view(1, 7, 1)
    truth = torch.zeros(1, 7, 16, dtype=torch.float64), torch.full((1, 7), -math.inf).double()
    eager = truth[0].float(), truth[1].float()
    largest, settled = 0.0, 0
    for i in range(1250):
        generator = torch.Generator().manual_seed(i)
        key = torch.rand(1, 8000, 1, generator=generator)
        value = key.sin() + torch.randn(1, 8000, 16, generator=generator)
        stream.append(key, value)
        largest = max(largest, value.abs().max().item())
        truth = boltzattn.merge(*truth, *dense(query.double(), key.double(), value.double()))
        eager = boltzattn.merge(*eager, *dense(query, key, value))
        if i == 250:
            settled = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - settled
    assert len(stream) == 10_000_000
    assert stream.state_bytes() < 1e5
    assert grown < 50_000  # kB; keys and values of the last 8 million tokens are 540 MB
    out, lse = stream.query(query, return_lse=True)
    names = "out", "lse"
    assert_accurate(
        {"out": out, "lse": lse},
        dict(zip(names, truth, strict=True)),
        [dict(zip(names, eager, strict=True))],
        magnitudes={"out": largest, "lse": truth[1].abs().max().item()},
        method="transform",
    )


def test_nothing_yet() -> None:
    stream = boltzattn.StreamingAttention((2, 3), 4, 10.0)
    out, lse = stream.query(torch.randn(2, 3, 5, 1), return_lse=True)
    assert torch.equal(out, torch.zeros(2, 3, 5, 4))
    assert (lse == -math.inf).all()
    stream.append(torch.randn(2, 3, 0, 1), torch.randn(2, 3, 0, 4))
    assert len(stream) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key_bound", [None, 0.7])
def test_takes_a_query_at_its_bound(dtype: torch.dtype, key_bound: float | None) -> None:
    bound = 6.8  # float32 and bfloat16 round it up
    stream = boltzattn.StreamingAttention(1, 2, bound, key_bound=key_bound, dtype=dtype)
    at_bound = torch.tensor([[[bound], [-bound]]], dtype=dtype)
    key = torch.tensor([[[0.7], [-0.7]]], dtype=dtype)
    stream.append(key, torch.ones(1, 2, 2, dtype=dtype))
    torch.testing.assert_close(stream.query(at_bound), torch.ones(1, 2, 2, dtype=dtype))
    with pytest.raises(ValueError, match=r"query_bound = 6\.8\d*, got"):
        stream.query(at_bound * 1.01)


def test_refuses() -> None:
    stream = boltzattn.StreamingAttention(2, 4, 10.0)
    key, value = torch.randn(2, 10, 1), torch.randn(2, 10, 4)
    with pytest.raises(ValueError, match=r"value must have shape \[\*num_heads, n, head_dim\]"):
        stream.append(key, value[..., :3])
    with pytest.raises(ValueError, match=r"key must be torch\.float32"):
        stream.append(key.double(), value)
    with pytest.raises(ValueError, match="must be finite"):
        stream.append(key, value / 0.0)
    assert len(stream) == 0
    stream.append(key, value)
    with pytest.raises(ValueError, match=r"query_bound = 10, got 1000000;.*larger query_bound"):
        stream.query(torch.full((2, 1, 1), 1e6))
    with pytest.raises(ValueError, match=r"query_bound = 10, got NaN"):
        stream.query(torch.full((2, 1, 1), math.nan))
    with pytest.raises(ValueError, match="key must not lie so far"):
        stream.append(torch.full((2, 1, 1), 1e38), value[:, :1])
    assert len(stream) == 10
    token = torch.zeros(2, 1, 1), value[:, :1]
    with pytest.raises(ValueError, match=r"query_bound = 10, got 11"):
        stream.step(torch.full((2, 1, 1), 11.0), *token)
    with pytest.raises(ValueError, match="must be finite"):
        stream.step(torch.zeros(2, 1, 1), torch.full((2, 1, 1), math.nan), value[:, :1])
    assert len(stream) == 10
    with pytest.raises(ValueError, match="settings of this one"):
        stream.merge(boltzattn.StreamingAttention(2, 4, 10.0, scale=2.0))
    with pytest.raises(ValueError, match="settings of this one"):
        boltzattn.StreamingAttention(3, 4, 10.0).load_state_dict(stream.state_dict())
    with pytest.raises(ValueError, match="query_bound must be a positive finite number"):
        boltzattn.StreamingAttention(2, 4, math.inf)


@pytest.mark.parametrize("keys", [[0.0, 1e-310], [0.0, 5e-311, 1e-310], [5e-324, 0.0]])
def test_denormal_keys(keys: list[float]) -> None:
    key = torch.tensor(keys, dtype=torch.float64).repeat(400)[None, :, None]
    value = torch.randn(1, key.shape[1], 2, dtype=torch.float64)
    stream = boltzattn.StreamingAttention(1, 2, 10.0, dtype=torch.float64)
    stream.append(key[:, :700], value[:, :700])
    stream.append(key[:, 700:], value[:, 700:])
    assert_rule(
        stream, torch.tensor([-1.0, 0.0, 3.0], dtype=torch.float64)[None, :, None], key, value
    )


def _filled(tokens: int = 700) -> boltzattn.StreamingAttention:
    stream = boltzattn.StreamingAttention(1, 2, 10.0)
    stream.append(torch.randn(1, tokens, 1), torch.randn(1, tokens, 2))
    return stream


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    children = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return [tensor for child in children for tensor in _tensors(child)]


def test_a_saved_state_is_a_copy() -> None:
    stream, query = _filled(), torch.randn(1, 3, 1)
    before = stream.query(query)
    for x in _tensors(stream.state_dict()):
        x.fill_(7)
    assert torch.equal(stream.query(query), before)


def test_a_restored_state_is_a_copy() -> None:
    state = _filled().state_dict()
    stream, query = boltzattn.StreamingAttention(1, 2, 10.0), torch.randn(1, 3, 1)
    stream.load_state_dict(state)
    before = stream.query(query)
    for x in _tensors(state):
        x.fill_(7)
    assert torch.equal(stream.query(query), before)


def test_a_failed_restore_changes_nothing() -> None:
    state = _filled().state_dict()
    query = torch.randn(1, 3, 1)
    for name in state:
        stream = _filled(5)
        before = stream.query(query)
        with pytest.raises((KeyError, ValueError)):
            stream.load_state_dict({key: x for key, x in state.items() if key != name})
        assert len(stream) == 5
        assert torch.equal(stream.query(query), before)


@pytest.mark.parametrize("wrong", ["negative count", "swapped ends"])
def test_a_state_that_cannot_be_is_refused(wrong: str) -> None:
    state = _filled().state_dict()
    if wrong == "negative count":
        state["count"] = -state["count"]
    else:
        state["ends"] = state["ends"].flip(1)
    with pytest.raises(ValueError, match="state"):
        boltzattn.StreamingAttention(1, 2, 10.0).load_state_dict(state)
