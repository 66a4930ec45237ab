"""Softmax attention over a stream of keys and values that is not kept.

At rank 1 a block of keys and values acts on any query through a few hundred sums, its moments on
the nodes of a key axis (docs/transform.md). Blocks are merged by treating the nodes of both as keys
with weights. Merged pairwise in doubling sizes, like the digits of a binary counter, n tokens leave
O(log n) blocks behind, and each was interpolated O(log n) times. Everything is fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from boltzattn.problem import DTYPES, accumulate_dtype
from boltzattn.transform.layout import KEY_STRIP, Axis, lagrange_weights, make_axis
from boltzattn.transform.tolerances import (
    LARGEST_PRODUCT,
    LEAST_NODES,
    MOST_NODES,
    NODE_STEP,
    PRECISION,
)

LEAF = 512  # tokens that are kept as they are until they become a block
MOST_KEYS = 2**24  # interpolation errors of so many keys may add up at random
WEIGHTS_AT_ONCE = 1 << 20  # of a query


@dataclass
class _Block:
    """Sums over some tokens on the nodes of a key axis between their least and largest key."""

    count: int
    low: Tensor  # [heads]
    high: Tensor  # [heads]
    sums: Tensor  # [heads, nodes, dv + 1]; the last column sums the weights


class StreamingAttention:
    """Exact attention over all keys and values appended so far, in memory O(log n).

    Rank 1. Results obey the same error bounds as `attention`, as long as no two logits of a query
    differ by more than `logit_bound`; beyond that `query` raises.

    Args:
        num_heads: the leading shape, a number of heads or `(batch, num_heads)`.
        head_dim: width of the values.
        scale: factor on the logits; default 1, as in `attention` at rank 1.
        logit_bound: largest difference of two logits that can be served; the state grows with its
            logarithm.
        dtype: of keys, values, queries and results.
        device: where the state lives.

    Example:
        >>> stream = boltzattn.StreamingAttention(num_heads=2, head_dim=3)
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
        *,
        scale: float = 1.0,
        logit_bound: float = 1e5,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        lead = (num_heads,) if isinstance(num_heads, int) else tuple(num_heads)
        if not all(isinstance(size, int) and size > 0 for size in lead):
            raise ValueError(
                f"num_heads must be a positive number or a tuple of them, got {num_heads!r}"
            )
        if head_dim < 1:
            raise ValueError(f"head_dim must be at least 1, got {head_dim}")
        if not math.isfinite(scale):
            raise ValueError(f"scale must be a finite number, got {scale}")
        if not 0 < logit_bound <= LARGEST_PRODUCT:
            raise ValueError(
                f"logit_bound must be between 0 and {LARGEST_PRODUCT:g}, got {logit_bound}"
            )
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype}")
        self.lead, self.head_dim, self.scale, self.dtype = lead, head_dim, float(scale), dtype
        self.logit_bound = float(logit_bound)
        self.device = torch.device(device)
        self._axis = _key_axis(
            self.logit_bound, 1e-16 if dtype == torch.float64 else PRECISION[torch.float32]
        )
        self._positions = self._axis.positions(self.device).tanh()
        self._edge = math.tanh(-self._axis.origin)
        self._blocks: list[_Block] = []  # oldest and largest first
        # [i]: block i, and blocks 0 .. i as one; made when asked for.
        self._running: list[tuple[_Block, _Block]] = []
        heads = math.prod(lead)
        self._tail = torch.empty(heads, LEAF, head_dim + 2, dtype=torch.float64, device=self.device)
        self._tail_count = 0
        self._low = torch.full((heads,), math.inf, dtype=torch.float64, device=self.device)
        self._high = -self._low
        self._count = 0

    def __len__(self) -> int:
        """Tokens appended so far."""
        return self._count

    def state_bytes(self) -> int:
        """Memory of the state, caches included."""
        merged = [so_far for _, so_far in self._running]
        blocks = {id(block): block for block in (*self._blocks, *merged)}
        tensors = [x for b in blocks.values() for x in (b.low, b.high, b.sums)]
        return sum(x.numel() * x.itemsize for x in (*tensors, self._tail, self._low, self._high))

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        """Take in keys `[*num_heads, n, 1]` and values `[*num_heads, n, head_dim]`; any n, also 1.

        They are not kept, and no gradient flows to them.
        """
        n = key.shape[-2] if isinstance(key, Tensor) and key.ndim >= 2 else 0
        self._check("key", key, (*self.lead, n, 1))
        self._check("value", value, (*self.lead, n, self.head_dim))
        rows = torch.cat([key, value, torch.ones_like(key)], -1).double()
        rows = rows.reshape(math.prod(self.lead), n, self.head_dim + 2)
        if not bool(rows.isfinite().all()):
            raise ValueError(
                "key and value must be finite: a stream cannot take back what was appended"
            )
        if n == 0:
            return
        self._low = torch.minimum(self._low, rows[..., 0].amin(1))
        self._high = torch.maximum(self._high, rows[..., 0].amax(1))
        self._count += n
        for piece in rows.split(16 * LEAF, 1):
            self._append_rows(piece)

    def _append_rows(self, rows: Tensor) -> None:
        n = rows.shape[1]
        if self._tail_count + n < LEAF:
            self._tail[:, self._tail_count : self._tail_count + n] = rows
            self._tail_count += n
            return
        rows = torch.cat([self._tail[:, : self._tail_count], rows], 1)
        self._tail_count = 0
        keys = rows[..., 0].contiguous()
        low, high = keys.amin(1), keys.amax(1)
        self._blocks.append(self._deposit(rows.shape[1], low, high, keys, rows[..., 1:]))
        self._settle()

    def _settle(self) -> None:
        """Merge neighbours until every block is at least twice as large as the next."""
        for i in range(len(self._blocks) - 1, 0, -1):
            larger, smaller = self._blocks[i - 1], self._blocks[i]
            if larger.count < 2 * smaller.count:
                self._blocks[i - 1 : i + 1] = [self._merged(larger, smaller)]
        # What was merged of blocks that are still there is kept.
        same = 0
        for block, (source, _) in zip(self._blocks, self._running, strict=False):
            if block is not source:
                break
            same += 1
        del self._running[same:]

    def _whole(self) -> _Block | None:
        """All blocks as one. What the latest blocks did not touch is not merged again."""
        for block in self._blocks[len(self._running) :]:
            so_far = self._merged(self._running[-1][1], block) if self._running else block
            self._running.append((block, so_far))
        return self._running[-1][1] if self._running else None

    def _nodes(self, block: _Block) -> Tensor:
        """Where the nodes of a block lie, [heads, nodes]."""
        middle, half = 0.5 * (block.low + block.high), 0.5 * (block.high - block.low)
        return middle[:, None] + (half / self._edge)[:, None] * self._positions

    def _merged(self, a: _Block, b: _Block) -> _Block:
        keys = torch.cat([self._nodes(a), self._nodes(b)], 1)
        low, high = torch.minimum(a.low, b.low), torch.maximum(a.high, b.high)
        return self._deposit(a.count + b.count, low, high, keys, torch.cat([a.sums, b.sums], 1))

    def _deposit(self, count: int, low: Tensor, high: Tensor, keys: Tensor, rows: Tensor) -> _Block:
        """Sum rows [heads, m, dv + 1] at keys [heads, m] onto the nodes between low and high."""
        axis = self._axis
        middle, half = 0.5 * (low + high), 0.5 * (high - low)
        place = (keys - middle[:, None]) * (self._edge / half)[:, None]
        # Equal keys: all nodes lie there, too, and any place will do.
        place = torch.where(half[:, None] > 0, place, 0.0).clamp(-self._edge, self._edge)
        panel, local = axis.locate(place.atanh())
        order = panel.argsort(dim=1, stable=True)
        sums = rows.new_zeros(rows.shape[0], axis.size, rows.shape[2])
        for h in range(rows.shape[0]):
            counts = panel[h].bincount(minlength=axis.panels).tolist()
            weights = lagrange_weights(axis.nodes, local[h, order[h]])
            first = 0
            for p, m in enumerate(counts):
                if m == 0:
                    continue
                here = order[h, first : first + m]
                nodes = slice(p * axis.nodes, (p + 1) * axis.nodes)
                sums[h, nodes] = weights[first : first + m].T @ rows[h, here]
                first += m
        return _Block(count, low, high, sums)

    @torch.no_grad()
    def query(self, query: Tensor, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of queries `[*num_heads, n_q, 1]` to all tokens: `[*num_heads, n_q, head_dim]`.

        Before the first token: zeros, and lse -inf. With `return_lse` also the log-sum-exp
        `[*num_heads, n_q]`, fp64 for fp64 and fp32 else, for `boltzattn.merge`.
        """
        n = query.shape[-2] if isinstance(query, Tensor) and query.ndim >= 2 else 0
        self._check("query", query, (*self.lead, n, 1))
        t = query.double().reshape(math.prod(self.lead), n) * self.scale
        out = t.new_zeros(*t.shape, self.head_dim)
        lse = torch.full_like(t, -math.inf)
        if self._count > 0 and n > 0:
            largest = float((t.abs().amax(1) * (self._high - self._low)).max())
            if not largest <= self.logit_bound:
                raise ValueError(
                    f"query must not make logits that differ by more than logit_bound = "
                    f"{self.logit_bound:g}, got {largest:g}; scale the queries down, or build the "
                    "stream with a larger logit_bound"
                )
            sources = [
                (self._tail[:, : self._tail_count, 0], self._tail[:, : self._tail_count, 1:])
            ]
            whole = self._whole()
            if whole is not None:
                sources.append((self._nodes(whole), whole.sums))
            points = sum(keys.shape[1] for keys, _ in sources)
            step = max(1, WEIGHTS_AT_ONCE // (points * t.shape[0]))
            for first in range(0, n, step):
                rows = slice(first, first + step)
                out[:, rows], lse[:, rows] = self._attend(t[:, rows], sources)
        out = out.reshape(*self.lead, n, self.head_dim).to(self.dtype)
        if not return_lse:
            return out
        return out, lse.reshape(*self.lead, n).to(accumulate_dtype(self.dtype))

    def _attend(self, t: Tensor, sources: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        # Logits are measured from the key of most weight: the largest for t > 0, else the smallest.
        # Of the two products of a pair one is 0, so this rounds once.
        signs = torch.stack([t.clamp(min=0.0), t.clamp(max=0.0)], -1)
        total: Tensor | None = None
        for keys, rows in sources:
            gaps = torch.stack([keys - self._high[:, None], keys - self._low[:, None]], 1)
            part = (signs @ gaps).exp_() @ rows
            total = part if total is None else total + part
        assert total is not None
        top = torch.where(t > 0, self._high[:, None], self._low[:, None])
        z = total[..., self.head_dim]
        return total[..., : self.head_dim] / z[..., None], z.log() + t * top

    def merge(self, other: StreamingAttention) -> None:
        """Take in all that another stream has taken in; that one stays as it is."""
        mine, its = self._settings(), other._settings()
        if mine != its:
            raise ValueError(f"other must be a stream with the settings of this one, {mine}: {its}")
        self._low = torch.minimum(self._low, other._low)
        self._high = torch.maximum(self._high, other._high)
        self._count += other._count
        self._running.clear()
        self._blocks = sorted([*self._blocks, *other._blocks], key=lambda block: -block.count)
        self._settle()
        if other._tail_count:
            self._append_rows(other._tail[:, : other._tail_count].clone())

    def _settings(self) -> dict[str, Any]:
        return {
            "num_heads": self.lead,
            "head_dim": self.head_dim,
            "scale": self.scale,
            "logit_bound": self.logit_bound,
            "dtype": self.dtype,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything there is to know; `load_state_dict` goes on from it, bit for bit."""
        return {
            "settings": self._settings(),
            "count": self._count,
            "low": self._low.clone(),
            "high": self._high.clone(),
            "tail": self._tail[:, : self._tail_count].clone(),
            "blocks": [
                {"count": b.count, "low": b.low, "high": b.high, "sums": b.sums}
                for b in self._blocks
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state by one that `state_dict` gave."""
        mine, its = self._settings(), state["settings"]
        if mine != its:
            raise ValueError(
                f"state must come from a stream with the settings of this one, {mine}: {its}"
            )
        self._count = state["count"]
        self._low, self._high = (state[name].to(self.device).clone() for name in ("low", "high"))
        self._tail_count = state["tail"].shape[1]
        self._tail[:, : self._tail_count] = state["tail"].to(self.device)
        self._blocks = [
            _Block(b["count"], *(b[name].to(self.device) for name in ("low", "high", "sums")))
            for b in state["blocks"]
        ]
        self._running = []

    def _check(self, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.shape != shape:
            width = "head_dim" if name == "value" else "1"
            raise ValueError(
                f"{name} must have shape [*num_heads, n, {width}] = {list(shape)}, "
                f"got {list(x.shape)}"
            )
        if x.dtype != self.dtype or x.device != self.device:
            raise ValueError(
                f"{name} must be {self.dtype} on {self.device} as the stream is, got {x.dtype} on "
                f"{x.device}; use {name}.to(...)"
            )


def _key_axis(logit_bound: float, precision: float) -> Axis:
    """The key axis with fewest nodes for this bound; the same for every block."""
    edge = 0.5 * math.log(max(logit_bound, 4.0))
    precision = precision / math.sqrt(MOST_KEYS)
    choices = range(LEAST_NODES, MOST_NODES + 1, NODE_STEP)
    return min(
        (make_axis(-edge, edge, KEY_STRIP, nodes, precision) for nodes in choices),
        key=lambda axis: axis.size,
    )
