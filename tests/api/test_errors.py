"""Bad input: every error names the argument, what it got and what it accepts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import boltzattn
import pytest
import torch
from servers import PLAIN, Server
from torch import Tensor


def _call(**changed: Any) -> Tensor:
    """A good call with some arguments replaced."""
    good = {
        "query": torch.randn(2, 4, 5, 3),
        "key": torch.randn(2, 4, 6, 3),
        "value": torch.randn(2, 4, 6, 7),
    }
    return boltzattn.attention(**{**good, **changed})


def _grouped(heads: int, key_heads: int, value_heads: int | None = None) -> Callable[[], Tensor]:
    return lambda: boltzattn.attention(
        torch.randn(heads, 5, 3),
        torch.randn(key_heads, 6, 3),
        torch.randn(key_heads if value_heads is None else value_heads, 6, 7),
        enable_gqa=True,
    )


def bad(
    name: str, kind: type[Exception], words: list[str], call: Callable[[], Any]
) -> pytest.param:
    """A call that must raise `kind` with all of these words in the message."""
    return pytest.param(kind, words, call, id=name)


@pytest.mark.parametrize(
    ("kind", "words", "call"),
    [
        bad(
            "rank of key",
            ValueError,
            ["key", "rank", "3", "[2, 4, 6, 2]"],
            lambda: _call(key=torch.randn(2, 4, 6, 2)),
        ),
        bad(
            "rows of value",
            ValueError,
            ["value", "rows", "6", "[2, 4, 5, 7]"],
            lambda: _call(value=torch.randn(2, 4, 5, 7)),
        ),
        bad(
            "rank 0",
            ValueError,
            ["query", "rank", "at least 1", "[2, 4, 5, 0]"],
            lambda: _call(query=torch.randn(2, 4, 5, 0), key=torch.randn(2, 4, 6, 0)),
        ),
        bad(
            "dv 0",
            ValueError,
            ["value", "at least 1", "[2, 4, 6, 0]"],
            lambda: _call(value=torch.randn(2, 4, 6, 0)),
        ),
        bad(
            "0 heads",
            ValueError,
            ["query", "head", "[2, 0, 5, 3]"],
            lambda: _call(
                query=torch.randn(2, 0, 5, 3),
                key=torch.randn(2, 0, 6, 3),
                value=torch.randn(2, 0, 6, 7),
            ),
        ),
        bad(
            "too few dimensions",
            ValueError,
            ["query", "2 dimensions", "[3]"],
            lambda: _call(query=torch.randn(3)),
        ),
        bad(
            "leading dimensions",
            ValueError,
            ["broadcast", "[2, 4, 5, 3]", "[2, 3, 6, 3]", "enable_gqa"],
            lambda: _call(key=torch.randn(2, 3, 6, 3)),
        ),
        bad(
            "integer query",
            TypeError,
            ["query", "float32", "torch.int64", ".to("],
            lambda: _call(query=torch.ones(2, 4, 5, 3, dtype=torch.int64)),
        ),
        bad(
            "complex value",
            TypeError,
            ["value", "float32", "torch.complex64"],
            lambda: _call(value=torch.ones(2, 4, 6, 7, dtype=torch.complex64)),
        ),
        bad(
            "dtype of key",
            TypeError,
            ["key", "torch.float32", "torch.float64", ".to(query.dtype)"],
            lambda: _call(key=torch.randn(2, 4, 6, 3, dtype=torch.float64)),
        ),
        bad(
            "dtype of value",
            TypeError,
            ["value", "torch.float32", "torch.float16"],
            lambda: _call(value=torch.randn(2, 4, 6, 7).half()),
        ),
        bad(
            "device of value",
            ValueError,
            ["value", "device", "cpu", "meta"],
            lambda: _call(value=torch.empty(2, 4, 6, 7, device="meta")),
        ),
        bad(
            "query is no tensor", TypeError, ["query", "tensor", "list"], lambda: _call(query=[1.0])
        ),
        bad(
            "shape of attn_mask",
            ValueError,
            ["attn_mask", "[2, 4, 5, 6]", "[5, 5]"],
            lambda: _call(attn_mask=torch.zeros(5, 5)),
        ),
        bad(
            "attn_mask with more dimensions",
            ValueError,
            ["attn_mask", "[2, 4, 5, 6]", "[3, 2, 4, 5, 6]"],
            lambda: _call(attn_mask=torch.zeros(3, 2, 4, 5, 6)),
        ),
        bad(
            "integer attn_mask",
            TypeError,
            ["attn_mask", "bool", "torch.int64", ".bool()"],
            lambda: _call(attn_mask=torch.ones(5, 6, dtype=torch.int64)),
        ),
        bad(
            "attn_mask is no tensor",
            TypeError,
            ["attn_mask", "tensor", "bool"],
            lambda: _call(attn_mask=True),
        ),
        bad(
            "device of attn_mask",
            ValueError,
            ["attn_mask", "cpu", "meta"],
            lambda: _call(attn_mask=torch.ones(5, 6, device="meta")),
        ),
        bad(
            "shape of key_padding_mask",
            ValueError,
            ["key_padding_mask", "[2, 6]", "[2, 5]"],
            lambda: _call(key_padding_mask=torch.zeros(2, 5)),
        ),
        bad(
            "key_padding_mask with a head axis",
            ValueError,
            ["key_padding_mask", "[2, 6]", "[2, 4, 6]", "head"],
            lambda: _call(key_padding_mask=torch.zeros(2, 4, 6)),
        ),
        bad(
            "integer key_padding_mask",
            TypeError,
            ["key_padding_mask", "bool", "torch.uint8"],
            lambda: _call(key_padding_mask=torch.zeros(2, 6, dtype=torch.uint8)),
        ),
        bad(
            "is_causal with attn_mask",
            ValueError,
            ["attn_mask", "is_causal", "None"],
            lambda: _call(attn_mask=torch.zeros(5, 6), is_causal=True),
        ),
        bad(
            "unknown method",
            ValueError,
            ["method", "'quick'", "'direct'"],
            lambda: _call(method="quick"),
        ),
        bad(
            "unknown backend",
            ValueError,
            ["backend", "'gpu'", "'cpu'", "'reference'"],
            lambda: _call(backend="gpu"),
        ),
        bad("NaN scale", ValueError, ["scale", "finite", "nan"], lambda: _call(scale=math.nan)),
        bad(
            "infinite scale", ValueError, ["scale", "finite", "inf"], lambda: _call(scale=math.inf)
        ),
        bad("negative dropout_p", ValueError, ["dropout_p", "-0.1"], lambda: _call(dropout_p=-0.1)),
        bad("dropout_p above 1", ValueError, ["dropout_p", "1.5"], lambda: _call(dropout_p=1.5)),
        bad("NaN dropout_p", ValueError, ["dropout_p", "nan"], lambda: _call(dropout_p=math.nan)),
        bad("heads not a multiple", ValueError, ["query", "multiple", "5", "2"], _grouped(5, 2)),
        bad(
            "heads of key and value",
            ValueError,
            ["key", "value", "heads", "2", "3"],
            _grouped(6, 2, 3),
        ),
        bad("0 key heads", ValueError, ["key", "head", "[0, 6, 3]"], _grouped(6, 0)),
        bad(
            "grouped heads without heads",
            ValueError,
            ["query", "head axis", "[5, 3]"],
            lambda: boltzattn.attention(
                torch.randn(5, 3), torch.randn(6, 3), torch.randn(6, 7), enable_gqa=True
            ),
        ),
        bad(
            "boltz of integers",
            TypeError,
            ["a", "floating-point", "torch.int64"],
            lambda: boltzattn.boltz(torch.arange(3)),
        ),
        bad(
            "boltz of a scalar",
            ValueError,
            ["a", "at least one dimension"],
            lambda: boltzattn.boltz(torch.tensor(1.0)),
        ),
        bad(
            "boltz of nothing",
            ValueError,
            ["a", "[3, 0]", "dim -1"],
            lambda: boltzattn.boltz(torch.ones(3, 0)),
        ),
        bad(
            "boltz over no such dim",
            ValueError,
            ["dim", "-2 and 1", "2"],
            lambda: boltzattn.boltz(torch.ones(3, 2), 2),
        ),
        bad(
            "use_backend",
            ValueError,
            ["backend", "'gpu'", "'reference'"],
            lambda: boltzattn.use_backend("gpu").__enter__(),
        ),
        bad(
            "use_method",
            ValueError,
            ["method", "'quick'", "'direct'"],
            lambda: boltzattn.use_method("quick").__enter__(),
        ),
    ],
)
def test_bad_input(kind: type[Exception], words: list[str], call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    message = str(raised.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


@pytest.mark.parametrize("function", [boltzattn.attention, boltzattn.explain])
def test_explain_refuses_what_attention_refuses(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="key must have the rank"):
        function(torch.randn(5, 3), torch.randn(6, 2), torch.randn(6, 4))


@pytest.mark.parametrize("server", PLAIN, ids=str)
def test_not_errors(server: Server) -> None:
    """Empty sequences, an empty batch and rows that see nothing are ordinary calls."""
    q, k, v = torch.randn(2, 3, 5, 1), torch.randn(2, 3, 6, 1), torch.randn(2, 3, 6, 4)
    assert boltzattn.attention(q[..., :0, :], k, v, **server.ask).shape == (2, 3, 0, 4)
    empty = boltzattn.attention(q, k[..., :0, :], v[..., :0, :], **server.ask)
    assert torch.equal(empty, torch.zeros(2, 3, 5, 4))
    assert boltzattn.attention(q[:0], k[:0], v[:0], **server.ask).shape == (0, 3, 5, 4)
    nothing = torch.ones(2, 6, dtype=torch.bool)
    unseen = boltzattn.attention(q, k, v, key_padding_mask=nothing, **server.ask)
    assert torch.equal(unseen, torch.zeros(2, 3, 5, 4))
