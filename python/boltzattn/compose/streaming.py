"""Attention over a stream of tokens: a state of fixed size instead of keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from boltzattn.compose.biased_table import BiasedTable, Bounds
from boltzattn.compose.plain_table import PlainTable
from boltzattn.problem import DTYPES, SCORES, accumulate_dtype
from boltzattn.transform.tensor import MOST_AXES

P = ParamSpec("P")
R = TypeVar("R")


def _without_gradients(method: Callable[P, R]) -> Callable[P, R]:
    """torch.no_grad takes 5 us even where gradients are off, which is a tenth of a step."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return method(*args, **kwargs)
        with torch.no_grad():
            return method(*args, **kwargs)

    return run


class StreamingAttention:
    """Exact attention over all keys and values appended so far, in memory that does not grow.

    The state is a table over nodes of the query axis, which is all that a query needs to
    know of the keys (docs/transform.md, "a scan"). Queries must stay within `query_bound`. Results
    obey the error bounds of `attention`. There are no gradients.

    Plain dot scores take keys of any range: if it grows, nodes are added. Their state has about a
    hundred nodes. A stream with `key_bound` also takes a bias per key, ALiBi, Gaussian scores and
    ranks up to 4; its state grows with the product of `query_bound * key_bound` over the axes.

    Args:
        num_heads: the leading shape, a number of heads or `(batch, num_heads)`.
        head_dim: width of the values.
        query_bound: the largest magnitude of a query; a query beyond it raises. The state grows
            with the logarithm of `query_bound` times the range of the keys. At rank 2 to 4 of any
            coordinate, or a bound for each.
        scale: factor on the logits; default as in `attention`: `1 / sqrt(rank)`, or 1 for Gaussian
            scores.
        score: "dot", or "gaussian" for logits `-scale / 2 (q - k)^2`.
        alibi_slopes: `[num_heads]` or `[batch, num_heads]`; adds `slope * (j - i)` to the logits,
            where i is the last token. It is the same for all queries.
        key_bound: the largest magnitude of a key, as `query_bound`; a key beyond it raises.
            Required for Gaussian scores, ALiBi, `key_bias` and ranks above 1.
        rank: width of queries and keys, 1 to 4.
        dtype: of keys, values, queries and results; the state is fp64.
        device: where the state lives.

    Example:
        >>> stream = boltzattn.StreamingAttention(num_heads=2, head_dim=3, query_bound=5.0)
        >>> k, v, q = torch.randn(2, 5000, 1), torch.randn(2, 5000, 3), torch.randn(2, 4, 1)
        >>> stream.append(k[:, :4000], v[:, :4000])
        >>> stream.append(k[:, 4000:], v[:, 4000:])
        >>> torch.allclose(stream.query(q), boltzattn.attention(q, k, v), atol=1e-5)
        True
    """

    def __init__(
        self,
        num_heads: int | tuple[int, ...],
        head_dim: int,
        query_bound: float | Sequence[float],
        *,
        scale: float | None = None,
        score: str = "dot",
        alibi_slopes: Tensor | None = None,
        key_bound: float | Sequence[float] | None = None,
        rank: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        lead = (num_heads,) if isinstance(num_heads, int) else tuple(num_heads)
        if not all(isinstance(size, int) and size > 0 for size in lead):
            raise ValueError(
                f"num_heads must be a positive number or a tuple of them, got {num_heads!r}"
            )
        if not (isinstance(head_dim, int) and head_dim >= 1):
            raise ValueError(f"head_dim must be an integer of at least 1, got {head_dim!r}")
        if not (isinstance(rank, int) and 1 <= rank <= MOST_AXES):
            raise ValueError(f"rank must be a number from 1 to {MOST_AXES}, got {rank!r}")
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype}")
        if score not in SCORES:
            raise ValueError(f"score must be 'dot' or 'gaussian', got {score!r}")
        is_gaussian = score == "gaussian"
        if scale is None:
            scale = 1.0 if is_gaussian else 1.0 / math.sqrt(rank)
        if not math.isfinite(scale) or (is_gaussian and scale <= 0):
            kind = "positive" if is_gaussian else "finite"
            raise ValueError(f"scale must be a {kind} number, got {scale}")
        if key_bound is None and (is_gaussian or alibi_slopes is not None or rank > 1):
            asked = f"rank {rank}" if rank > 1 else "alibi_slopes"
            asked = "score='gaussian'" if is_gaussian else asked
            raise ValueError(
                f"key_bound must be given with {asked}: the size of the state follows from the "
                "largest |query| and the largest |key|"
            )
        self.lead, self.head_dim, self.dtype = lead, head_dim, dtype
        self.rank, self.scale, self.score = rank, float(scale), score
        self.query_bound = _bound("query_bound", query_bound, rank, dtype)
        self.key_bound = None if key_bound is None else _bound("key_bound", key_bound, rank, dtype)
        self.alibi_slopes = _checked_slopes(alibi_slopes, lead)
        # Tensors name their device with its index.
        self.device = torch.empty(0, device=device).device
        self._count = 0
        self._table = self._new_table()

    def _new_table(self) -> PlainTable | BiasedTable:
        if self.key_bound is None:
            return PlainTable(
                self.lead, self.head_dim, self.query_bound[0], self.scale, self.dtype, self.device
            )
        return BiasedTable(
            self.lead,
            self.head_dim,
            Bounds(self.query_bound, self.key_bound),
            self.scale,
            self.score == "gaussian",
            self.alibi_slopes,
            self.dtype,
            self.device,
        )

    def __len__(self) -> int:
        """Tokens appended so far."""
        return self._count

    def state_bytes(self) -> int:
        """Memory of the state."""
        return sum(x.numel() * x.itemsize for x in self._table.tensors)

    @_without_gradients
    def append(self, key: Tensor, value: Tensor, key_bias: Tensor | None = None) -> None:
        """Take in tokens, which are not kept. If it raises, nothing has been appended.

        Args:
            key: `[*num_heads, n, rank]`; any n, also 1.
            value: `[*num_heads, n, head_dim]`.
            key_bias: broadcastable to `[*num_heads, n]`, added to all logits of a key; -inf hides
                it.
        """
        n, bias = self._check_tokens(key, value, key_bias)
        if n > 0:
            self._table.append(key, value, *bias)
            self._count += n

    @_without_gradients
    def query(self, query: Tensor, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of queries to all tokens: `[*num_heads, n_q, head_dim]`.

        Before the first token: zeros, and lse -inf.

        Args:
            query: `[*num_heads, n_q, rank]`.
            return_lse: also return the log-sum-exp `[*num_heads, n_q]`, fp64 for fp64 and fp32
                else, for `boltzattn.merge`.
        """
        self._check("query", query, (*self.lead, _tokens(query), self.rank))
        out, lse = self._table.query(query)
        return (out, lse.to(accumulate_dtype(self.dtype))) if return_lse else out

    @_without_gradients
    def step(
        self, query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None = None
    ) -> Tensor:
        """Append tokens, then query: what a causal decoder does with every token it adds.

        If it raises, nothing has been appended.

        Args:
            query: as of `query`.
            key, value, key_bias: as of `append`.
        """
        self._check("query", query, (*self.lead, _tokens(query), self.rank))
        n, bias = self._check_tokens(key, value, key_bias)
        if n == 0:
            return self._table.query(query)[0]
        out = self._table.step(query, key, value, *bias)
        self._count += n
        return out

    def merge(self, other: StreamingAttention) -> None:
        """Take in all that another stream has taken in.

        Args:
            other: a stream with the same settings, which stays as it is. With `alibi_slopes` its
                tokens come after those of this stream.
        """
        mine, its = self._settings(), other._settings()
        if mine != its:
            raise ValueError(f"other must be a stream with the settings of this one, {mine}: {its}")
        if other._count == 0:
            return
        if isinstance(self._table, BiasedTable) and isinstance(other._table, BiasedTable):
            self._table.merge(other._table, other._count)
        elif isinstance(self._table, PlainTable) and isinstance(other._table, PlainTable):
            self._table.merge(other._table)
        self._count += other._count

    # ---- state ----

    def _settings(self) -> dict[str, Any]:
        slopes = self.alibi_slopes
        return {
            "num_heads": self.lead,
            "head_dim": self.head_dim,
            "query_bound": self.query_bound,
            "scale": self.scale,
            "rank": self.rank,
            "score": self.score,
            "alibi_slopes": None if slopes is None else slopes.tolist(),
            "key_bound": self.key_bound,
            "dtype": self.dtype,
        }

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state; `load_state_dict` continues from it, bit for bit."""
        entries = self._table.entries().items()
        copies = {name: x.clone() if isinstance(x, Tensor) else x for name, x in entries}
        return {"settings": self._settings(), "count": self._count, **copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state by a copy of another.

        Args:
            state: what `state_dict` returned; raises if it is not that.
        """
        names = {"settings", "count", *self._table.entries()}
        if missing := names - state.keys():
            raise ValueError(f"state must have the entries of state_dict(), lacks {min(missing)!r}")
        mine, its = self._settings(), state["settings"]
        if mine != its:
            raise ValueError(
                f"state must come from a stream with the settings of this one, {mine}: {its}"
            )
        count = state["count"]
        if not (isinstance(count, int) and count >= 0):
            raise ValueError(f"state must have a count of tokens, got {count!r}")
        self._table.load(state, count)
        self._count = count

    # ---- checks ----

    def _check_tokens(
        self, key: Tensor, value: Tensor, key_bias: Tensor | None
    ) -> tuple[int, tuple[Tensor, ...]]:
        """The number of tokens, and their bias if there is one."""
        n = _tokens(key)
        self._check("key", key, (*self.lead, n, self.rank))
        self._check("value", value, (*self.lead, n, self.head_dim))
        if key_bias is None:
            return n, ()
        if self.key_bound is None:
            raise ValueError("key_bias needs a stream with key_bound, the largest |key|; pass it")
        if not (isinstance(key_bias, Tensor) and key_bias.is_floating_point()):
            raise TypeError("key_bias must be a floating-point tensor")
        if key_bias.device != self.device:
            raise ValueError(f"key_bias must be on {self.device}, got {key_bias.device}")
        try:
            key_bias.expand(*self.lead, n)
        except RuntimeError:
            raise ValueError(
                f"key_bias must broadcast to [*num_heads, n] = {[*self.lead, n]}, got "
                f"{list(key_bias.shape)}"
            ) from None
        return n, (key_bias,)

    def _check(self, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.shape != shape:
            width = "head_dim" if name == "value" else "rank"
            raise ValueError(
                f"{name} must have shape [*num_heads, n, {width}] = {list(shape)}, "
                f"got {list(x.shape)}"
            )
        if x.dtype != self.dtype or x.device != self.device:
            raise ValueError(
                f"{name} must be {self.dtype} on {self.device} as the stream is, got {x.dtype} on "
                f"{x.device}; use {name}.to(...)"
            )


def _bound(
    name: str, bound: float | Sequence[float], rank: int, dtype: torch.dtype
) -> tuple[float, ...]:
    """The bound of every axis, or what a token that was clamped to it holds in this precision."""
    bounds = tuple(bound) if isinstance(bound, Sequence) else (bound,) * rank
    if len(bounds) != rank:
        raise ValueError(
            f"{name} must be a number or have one for each of {rank} axes, got {bound}"
        )
    if not all(0 < x < math.inf for x in bounds):
        raise ValueError(f"{name} must be a positive finite number, got {bound}")
    rounded = torch.tensor(bounds, dtype=dtype, device="cpu").tolist()
    pairs = zip(bounds, rounded, strict=True)
    return tuple(max(float(x), y) if y < math.inf else float(x) for x, y in pairs)


def _tokens(x: Tensor) -> int:
    return x.shape[-2] if isinstance(x, Tensor) and x.ndim >= 2 else 0


def _checked_slopes(slopes: Tensor | None, lead: tuple[int, ...]) -> Tensor | None:
    """A copy in fp64, `[*num_heads]`."""
    if slopes is None:
        return None
    if not (isinstance(slopes, Tensor) and slopes.is_floating_point()):
        raise TypeError("alibi_slopes must be a floating-point tensor")
    try:
        found = slopes.detach().double().expand(lead).clone()
    except RuntimeError:
        raise ValueError(
            f"alibi_slopes must broadcast to num_heads = {list(lead)}, got {list(slopes.shape)}"
        ) from None
    if not bool(found.isfinite().all()):
        raise ValueError("alibi_slopes must be finite")
    return found
