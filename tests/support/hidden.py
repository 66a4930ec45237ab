"""NaN or infinity in some tokens spoils what depends on them, and nothing else.

What depends on a token follows from who sees whom alone, so no backend is asked for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from errors import assert_accurate
from oracle import Result, eagers, magnitudes, oracle
from torch import Tensor

SPOILABLE = ("query", "key", "value", "grad_out")
MASKS = ("bool", "float", "causal")


class Hiding(NamedTuple):
    """A call in which some tokens are spoilt: two heads that share keys and values."""

    tensors: dict[str, Tensor]  # query, key, value, grad_out and grad_lse, all finite
    sees: Tensor  # [n_q, n_k]
    attn_mask: Tensor | None  # [n_q, n_k]
    is_causal: bool
    tokens: dict[str, Tensor]  # of those tensors that are spoilt: which tokens
    poison: float

    def spoilt(self) -> tuple[Tensor, ...]:
        """Query, key, value and the gradients of out and lse, as the call gets them."""
        return tuple(self._filled(self.poison))

    def _filled(self, filling: float) -> list[Tensor]:
        """Spoilt tokens with this instead; heads still share the memory of keys and values."""
        filled = dict(self.tensors)
        for name, tokens in self.tokens.items():
            x = filled[name]
            own = x[:1] if x.stride(0) == 0 else x
            filled[name] = own.masked_fill(tokens[:, None], filling).expand_as(x)
        return list(filled.values())

    def dependent(self) -> dict[str, Tensor]:
        """Which tokens of each result depend on a spoilt one."""
        n_q, n_k = self.sees.shape
        found = {name: torch.zeros(n_q, dtype=torch.bool) for name in Result._fields[:3]}
        found |= {name: torch.zeros(n_k, dtype=torch.bool) for name in Result._fields[3:]}
        for name, tokens in self.tokens.items():
            of_query = name in ("query", "grad_out")
            rows = tokens if of_query else (self.sees & tokens).any(-1)
            keys = (self.sees & rows[:, None]).any(0)
            found["grad_query"] |= rows
            found["grad_key"] |= keys
            if name != "grad_out":
                found["out"] |= rows
            if name in ("query", "key"):
                found["lse"] |= rows
            if name != "value":
                found["grad_value"] |= keys
        return found


def hiding(
    mask: str,
    names: tuple[str, ...],
    poison: float,
    sizes: tuple[int, int] = (70, 45),
    rank: int = 2,
    dv: int = 5,
    dtype: torch.dtype = torch.float32,
) -> Hiding:
    """With a mask, two groups that do not see each other, one of which has the spoilt tokens; with
    "causal", a late token is spoilt, and the last key."""
    n_q, n_k = sizes
    query, grad_out = (torch.randn(2, n_q, width).to(dtype) for width in (rank, dv))
    key, value = (torch.randn(1, n_k, width).to(dtype).expand(2, -1, -1) for width in (rank, dv))
    grad_lse = torch.randn(2, n_q, dtype=torch.float64)
    tensors = {"query": query, "key": key, "value": value}
    tensors |= {"grad_out": grad_out, "grad_lse": grad_lse}
    attn_mask = None
    if mask == "causal":
        sees = torch.arange(n_k) <= torch.arange(n_q)[:, None]
        spoilt = [torch.arange(n) == min(sizes) * 2 // 3 for n in sizes]
        spoilt[1][-1] = True
    else:
        groups = [torch.arange(n) % 2 == 0 for n in sizes]
        sees = (groups[0][:, None] == groups[1]) & (torch.rand(n_q, n_k) < 0.7)
        sees[4] = False  # a query that sees nothing, and a key that nobody sees
        sees[:, 5] = False
        attn_mask = sees
        if mask == "float":
            attn_mask = torch.randn(n_q, n_k).to(dtype).masked_fill(~sees, -math.inf)
        spoilt = [torch.arange(n) % 10 == 5 for n in sizes]
    of_query, of_key = spoilt
    tokens = {name: of_query if name in ("query", "grad_out") else of_key for name in names}
    return Hiding(tensors, sees, attn_mask, mask == "causal", tokens, poison)


def assert_hidden_do_not_count(call: Hiding, run: Callable[[Hiding], Result], **more: Any) -> None:
    """What `run` makes of the call is right where nothing spoilt is seen; NaN gives NaN elsewhere.

    `more`: further arguments of the oracle, such as those of dropout.
    """
    actual = run(call)._asdict()
    clean = call._filled(0.0)
    masks = {"attn_mask": call.attn_mask, "is_causal": call.is_causal, **more}
    truth = oracle(*clean, **masks)._asdict()
    for name, tokens in call.dependent().items():
        elsewhere = tokens[:, None] if truth[name].ndim == 3 else tokens
        if math.isnan(call.poison):
            truth[name] = truth[name].masked_fill(elsewhere, math.nan)
        else:
            truth[name] = truth[name].masked_fill(elsewhere, 0.0)
            actual[name] = actual[name].masked_fill(elsewhere, 0.0)
    sizes = magnitudes(*clean, **masks)
    assert_accurate(actual, truth, eagers(*clean, **masks), magnitudes=sizes)
    unseen = ~call.sees.any(0)
    for name in ("grad_key", "grad_value"):
        assert not actual[name][:, unseen].any(), name
