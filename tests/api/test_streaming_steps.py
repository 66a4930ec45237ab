"""Steps of one token: the last tokens wait beside the table, and nobody can tell.

Whatever happens between two steps, results obey the error rule, for tokens that are in the table
and for those that wait.
"""

from __future__ import annotations

import copy
import io
import math

import boltzattn
import pytest
import torch
from boltzattn.dispatch.backends import kernels
from boltzattn.transform.scan_layout import ROOM
from errors import assert_accurate
from oracle import dense
from torch import Tensor

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
KINDS = ["normal", "rising", "falling", "late needle", "heavy tails", "equal", "two points", "grid"]
Tokens = tuple[Tensor, Tensor, Tensor]  # query, key, value


def keys_of(kind: str, n: int) -> Tensor:
    """Families in which the largest key comes early, late or again and again."""
    normal = torch.randn(2, n, 1, dtype=torch.float64)
    steps = torch.linspace(0.0, 1.0, n, dtype=torch.float64)[:, None]
    return {
        "normal": normal,
        "rising": steps + 0.001 * normal,
        "falling": -steps + 0.001 * normal,
        "late needle": torch.where(steps > 1 - 5.0 / n, 3.0, 0.01 * normal),
        "heavy tails": (1.3 * normal).sinh(),
        "equal": torch.full_like(normal, 0.3),
        "two points": normal.sign(),
        "grid": (3 * normal).round(),
    }[kind]


def tokens_of(kind: str, n: int, logits: float, dtype: torch.dtype, dv: int = 5) -> Tokens:
    """Queries take both signs and all magnitudes for logits up to `logits`."""
    key = keys_of(kind, n).to(dtype)
    reach = (key.max() - key.min()).double().item() or 1.0
    sizes = 10 ** -(3 * torch.rand(2, n, 1, dtype=torch.float64))
    query = sizes * torch.randn(2, n, 1).sign() * logits / reach
    return query.to(dtype), key, torch.randn(2, n, dv, dtype=torch.float64).to(dtype)


def stream_for(tokens: Tokens) -> boltzattn.StreamingAttention:
    query, _, value = tokens
    bound = query.abs().max().item()
    return boltzattn.StreamingAttention(2, value.shape[-1], bound, dtype=query.dtype)


def some(tokens: Tokens, first: int, last: int) -> Tokens:
    query, key, value = (x[:, first:last] for x in tokens)
    return query, key, value


def step_through(
    stream: boltzattn.StreamingAttention, tokens: Tokens, first: int, last: int
) -> Tensor:
    return torch.cat([stream.step(*some(tokens, i, i + 1)) for i in range(first, last)], 1)


def assert_causal(out: Tensor, tokens: Tokens, first: int) -> None:
    """Rows `first` and later of causal attention, by the error rule."""
    query, key, value = tokens
    mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()[first:]
    query = query[:, first:]
    truth = dense(query.double(), key.double(), value.double(), scale=1.0, attn_mask=mask)[0]
    eager = dense(query, key, value, scale=1.0, attn_mask=mask)[0]
    assert_accurate(
        {"out": out},
        {"out": truth},
        [{"out": eager}],
        magnitudes={"out": value.abs().max().item()},
        method="transform",
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_causal_attention(kind: str, dtype: torch.dtype) -> None:
    """From an empty table, from one token, and from many."""
    n = 3 * ROOM + 5
    for prompt, logits in ((0, 3.0), (1, 1e4), (70, 300.0), (0, 1e5)):
        tokens = tokens_of(kind, prompt + n, logits, dtype)
        stream = stream_for(tokens)
        stream.append(*some(tokens, 0, prompt)[1:])
        out = step_through(stream, tokens, prompt, prompt + n)
        assert_causal(out, tokens, prompt)
        assert len(stream) == prompt + n


@pytest.mark.parametrize("waiting", [1, 2, ROOM - 1, ROOM, ROOM + 1, 2 * ROOM])
@pytest.mark.parametrize("event", ["append", "append one", "query", "step", "lopsided", "merge"])
@pytest.mark.parametrize("kind", ["normal", "two points"])
def test_anything_between_two_steps(kind: str, event: str, waiting: int) -> None:
    prompt, after = 37, ROOM + 3
    added = {"append": 90, "append one": 1, "query": 0, "step": 3, "lopsided": 2, "merge": 20}
    cut, end = prompt + waiting, prompt + waiting + added[event]
    tokens = tokens_of(kind, end + after, 900.0, torch.float32)
    stream = stream_for(tokens)
    stream.append(*some(tokens, 0, prompt)[1:])
    assert_causal(step_through(stream, tokens, prompt, cut), some(tokens, 0, cut), prompt)
    query, key, value = some(tokens, cut, end)
    if event in ("append", "append one"):
        stream.append(key, value)
    elif event == "step":
        stream.step(query, key, value)
    elif event == "lopsided":
        assert stream.step(query[:, :1], key, value).shape == (2, 1, 5)
    elif event == "merge":
        other = stream_for(tokens)
        step_through(other, tokens, cut, end)
        stream.merge(other)
    found, lse = stream.query(tokens[0], return_lse=True)
    seen = tokens[0], tokens[1][:, :end], tokens[2][:, :end]
    truth = dense(*(x.double() for x in seen), scale=1.0)
    eager = dense(*seen, scale=1.0)
    assert_accurate(
        {"out": found, "lse": lse},
        {"out": truth[0], "lse": truth[1]},
        [{"out": eager[0], "lse": eager[1]}],
        magnitudes={"out": tokens[2].abs().max().item(), "lse": truth[1].abs().max().item()},
        method="transform",
    )
    out = step_through(stream, tokens, end, end + after)
    assert_causal(out, tokens, end)
    assert len(stream) == end + after


def test_one_query_sees_tokens_that_wait() -> None:
    tokens = tokens_of("normal", 20, 30.0, torch.float64)
    stream = stream_for(tokens)
    stream.append(*some(tokens, 0, 13)[1:])
    out = step_through(stream, tokens, 13, 20)
    assert torch.equal(stream.query(tokens[0][:, 19:]), out[:, 6:])


def test_new_ends_while_tokens_wait() -> None:
    """The central panel is split, again and again, while tokens are waiting."""
    for dtype in (torch.float32, torch.float64):
        n = 6 * ROOM
        query, key, value = tokens_of("normal", n, 1.0, dtype)
        key = (key.double() * torch.logspace(-6, 3, n)[:, None]).to(dtype)
        query = (query.sign() * 40 * torch.rand_like(query)).to(dtype)
        stream = boltzattn.StreamingAttention(2, 5, 40.0, dtype=dtype)
        out, levels = [], set()
        for i in range(n):
            out.append(stream.step(*some((query, key, value), i, i + 1)))
            levels.add(stream.state_dict()["levels"])
        assert_causal(torch.cat(out, 1), (query, key, value), 0)
        assert len(levels) > 4


@pytest.mark.parametrize("waiting", [1, ROOM - 1, ROOM, ROOM + 1])
def test_saved_midway(waiting: int) -> None:
    """Saving changes nothing, and what was saved goes on bit for bit."""
    n = waiting + 2 * ROOM + 1
    tokens = tokens_of("normal", n, 100.0, torch.float32)
    stream, saved = stream_for(tokens), stream_for(tokens)
    step_through(stream, tokens, 0, waiting)
    step_through(saved, tokens, 0, waiting)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    restored = stream_for(tokens)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert len(restored) == waiting
    expected = step_through(stream, tokens, waiting, n)
    for one in (saved, restored):
        assert torch.equal(step_through(one, tokens, waiting, n), expected)


def test_queries_and_copies_change_nothing() -> None:
    tokens = tokens_of("normal", 4 * ROOM, 100.0, torch.float32)
    stream, asked = stream_for(tokens), stream_for(tokens)
    expected = step_through(stream, tokens, 0, 4 * ROOM)
    copied, found = copy.deepcopy(asked), []
    for i in range(4 * ROOM):
        found.append(asked.step(*some(tokens, i, i + 1)))
        assert torch.equal(asked.query(tokens[0][:, i : i + 1]), found[-1])
        asked.query(tokens[0])
        copied.step(*some(tokens, i, i + 1))
        copied = copy.deepcopy(copied)
    assert torch.equal(torch.cat(found, 1), expected)
    query = tokens[0]
    assert torch.equal(copied.query(query), stream.query(query))


def test_a_merged_stream_stays_as_it_is() -> None:
    tokens = tokens_of("normal", 3 * ROOM, 100.0, torch.float32)
    other, alone = stream_for(tokens), stream_for(tokens)
    for stream in (other, alone):
        step_through(stream, tokens, 0, ROOM + 3)
    stream_for(tokens).merge(other)
    assert len(other) == ROOM + 3
    rest = ROOM + 3, 3 * ROOM
    assert torch.equal(step_through(other, tokens, *rest), step_through(alone, tokens, *rest))


def test_a_refused_step_changes_nothing() -> None:
    tokens = tokens_of("normal", 2 * ROOM, 100.0, torch.float32)
    stream, alone = stream_for(tokens), stream_for(tokens)
    for i in range(2 * ROOM):
        query, key, value = some(tokens, i, i + 1)
        for wrong in (
            (query * math.nan, key, value),
            (query.sign() * 1e6, key, value),
            (query, key / 0, value),
            (query, key, torch.full_like(value, math.nan)),
        ):
            with pytest.raises(ValueError, match="must be"):
                stream.step(*wrong)
        assert len(stream) == i
        assert torch.equal(stream.step(query, key, value), alone.step(query, key, value))


def test_threads_do_not_matter() -> None:
    """Many heads, which threads share."""
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        stream = boltzattn.StreamingAttention((16, 8), 64, 10.0)
        steps = []
        for _ in range(ROOM + 2):
            query, key, value = (
                torch.randn(16, 8, 1, width, generator=generator) for width in (1, 1, 64)
            )
            steps.append(stream.step(query, key, value))
        found.append(torch.stack(steps))
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_the_reference_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state with tokens that wait, in a backend that lets none wait."""
    tokens = tokens_of("normal", 2 * ROOM, 100.0, torch.float32)
    stream, other = stream_for(tokens), stream_for(tokens)
    step_through(stream, tokens, 0, 5)
    monkeypatch.setattr(other._table, "_kernels", kernels("reference", "stream"))
    for method in ("query", "step", "append"):
        other.load_state_dict(stream.state_dict())
        if method == "append":
            other.append(*some(tokens, 5, 6)[1:])
        elif method == "step":
            other.step(*some(tokens, 5, 6))
        seen = 5 if method == "query" else 6
        expected = dense(tokens[0], tokens[1][:, :seen], tokens[2][:, :seen], scale=1.0)
        torch.testing.assert_close(other.query(tokens[0], True), expected, rtol=1e-5, atol=1e-5)
    assert_causal(step_through(other, tokens, 6, 2 * ROOM), tokens, 6)


@pytest.mark.parametrize("waiting", [-1, 6, ROOM + 1])
def test_a_wrong_number_of_waiting_tokens_is_refused(waiting: int) -> None:
    """Negative, more than were appended, more than there is room for."""
    tokens = tokens_of("normal", 5, 100.0, torch.float32)
    stream = stream_for(tokens)
    step_through(stream, tokens, 0, 5)
    state = stream.state_dict()
    state["waiting"].fill_(waiting)
    with pytest.raises(ValueError, match="state must have"):
        stream.load_state_dict(state)
