"""Attention over a stream of tokens: a state of fixed size instead of keys and values."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch import backends
from boltzattn.dispatch.backends import Request
from boltzattn.problem import DTYPES, StreamKernels, accumulate_dtype
from boltzattn.reference import stream as reference
from boltzattn.transform.layout import lagrange_weights
from boltzattn.transform.scan_layout import (
    MOST_LEVELS,
    SCAN_PRECISION,
    ScanLayout,
    StreamState,
    scan_kappa,
    scan_layout_of,
    scan_ratio,
)
from boltzattn.transform.tolerances import LEAST_NODES, MOST_NODES, NODE_STEP

MOST_KEYS = 10**7  # interpolation errors of so many keys may add up
LANES = 8  # columns of a table are padded to whole vectors


class StreamingAttention:
    """Exact attention over all keys and values appended so far, in memory that does not grow.

    Rank 1. The state is a table over about a hundred nodes of the query axis, which is all that a
    query needs to know of the keys (docs/transform.md, "a scan"). Keys may have any range: if it
    grows, nodes are added. Queries must stay within `query_bound`. Results obey the error bounds of
    `attention`. There are no gradients.

    Args:
        num_heads: the leading shape, a number of heads or `(batch, num_heads)`.
        head_dim: width of the values.
        query_bound: the largest magnitude of a query; a query beyond it raises. The state grows
            with the logarithm of `query_bound` times the range of the keys.
        scale: factor on the logits; default 1, as in `attention` at rank 1.
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
        query_bound: float,
        *,
        scale: float = 1.0,
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
        if not (0 < query_bound < math.inf):
            raise ValueError(f"query_bound must be a positive finite number, got {query_bound}")
        if not math.isfinite(scale):
            raise ValueError(f"scale must be a finite number, got {scale}")
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype}")
        self.lead, self.head_dim, self.dtype = lead, head_dim, dtype
        self.query_bound, self.scale = float(query_bound), float(scale)
        # Tensors name their device with its index.
        self.device = torch.empty(0, device=device).device
        self._nodes, self._ratio = _panel(SCAN_PRECISION[dtype])
        self._kappa = scan_kappa(SCAN_PRECISION[dtype], self._nodes)
        self._count = 0
        heads, width = math.prod(lead), -(-head_dim // LANES) * LANES
        request = Request(self.device.type, dtype, heads, 1, 1, 1, head_dim)
        taken = backends.select(request, "stream", "auto")
        self._kernels: StreamKernels = backends.kernels(taken.name, "stream")
        new = partial(torch.zeros, dtype=torch.float64, device=self.device)
        ends = new(heads, 2)
        ends[:, 0], ends[:, 1] = -math.inf, math.inf
        layout = self._layout_with(0)
        self._take(layout, new(heads, layout.features, width), new(heads, layout.features), ends)

    def __len__(self) -> int:
        """Tokens appended so far."""
        return self._count

    def state_bytes(self) -> int:
        """Memory of the state."""
        return sum(x.numel() * x.itemsize for x in self._state.tables)

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        """Take in keys `[*num_heads, n, 1]` and values `[*num_heads, n, head_dim]`; any n, also 1.

        They are not kept.
        """
        n = self._tokens(key)
        self._check("key", key, (*self.lead, n, 1))
        self._check("value", value, (*self.lead, n, self.head_dim))
        if n == 0:
            return
        extent = self._kernels.append(self._state, key, value, self._most)
        self._check_extent(extent)
        if extent > self._most:
            self._refine(self._levels_for(extent))
            self._kernels.append(self._state, key, value, self._most)
        self._count += n

    @torch.no_grad()
    def query(self, query: Tensor, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of queries `[*num_heads, n_q, 1]` to all tokens: `[*num_heads, n_q, head_dim]`.

        Before the first token: zeros, and lse -inf. With `return_lse` also the log-sum-exp
        `[*num_heads, n_q]`, fp64 for fp64 and fp32 else, for `boltzattn.merge`.
        """
        self._check("query", query, (*self.lead, self._tokens(query), 1))
        out, lse, largest = self._kernels.query(self._state, query, self.head_dim, self.scale)
        self._check_largest(largest, query)
        return (out, lse.to(accumulate_dtype(self.dtype))) if return_lse else out

    @torch.no_grad()
    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append tokens, then query: what a causal decoder does with every token it adds.

        If it raises, nothing has been appended.
        """
        n = self._tokens(key)
        self._check("query", query, (*self.lead, self._tokens(query), 1))
        self._check("key", key, (*self.lead, n, 1))
        self._check("value", value, (*self.lead, n, self.head_dim))
        arguments = query, key, value, self.scale
        out, largest, extent = self._kernels.step(self._state, *arguments, self._most)
        self._check_largest(largest, query)
        self._check_extent(extent)
        if extent > self._most:
            self._refine(self._levels_for(extent))
            out, _, _ = self._kernels.step(self._state, *arguments, self._most)
        self._count += n
        return out

    def _check_extent(self, extent: float) -> None:
        if math.isnan(extent):
            raise ValueError(
                "key and value must be finite: a stream cannot take back what was appended"
            )

    def _check_largest(self, largest: float, query: Tensor) -> None:
        if not largest <= self._state.layout.edges[-1]:
            got = "NaN" if math.isnan(largest) else f"{float(query.abs().max()):g}"
            raise ValueError(
                f"query must be within query_bound = {self.query_bound:g}, got {got}; scale the "
                "queries down, or build the stream with a larger query_bound"
            )

    def merge(self, other: StreamingAttention) -> None:
        """Take in all that another stream has taken in; that one stays as it is."""
        mine, its = self._settings(), other._settings()
        if mine != its:
            raise ValueError(f"other must be a stream with the settings of this one, {mine}: {its}")
        if other._count == 0:
            return
        copy = StreamingAttention.__new__(StreamingAttention)
        copy.__dict__.update(other.__dict__)
        copy._take(other._state.layout, *(x.clone() for x in other._state.tables))
        ends = reference.joined(self._state.ends, other._state.ends)
        levels = self._levels_for(float((ends[:, 0] - ends[:, 1]).max()))
        levels = max(levels, other._state.layout.levels)
        for stream in (self, copy):
            stream._refine(levels)
            reference.move(stream._state, ends)
        self._state.sums.add_(copy._state.sums)
        self._state.z.add_(copy._state.z)
        self._count += other._count

    # ---- the layout ----

    def _layout_with(self, levels: int) -> ScanLayout:
        t_most = self.query_bound * abs(self.scale)
        return scan_layout_of(t_most, self._nodes, levels, self._ratio)

    def _take(self, layout: ScanLayout, sums: Tensor, z: Tensor, ends: Tensor) -> None:
        """Use this state from now on."""
        positions = layout.nodes_of_panels(self.device).flatten()
        self._state = StreamState(layout, positions, sums, z, ends)
        self._most = self._reach(layout.levels)

    def _reach(self, levels: int) -> float:
        """The largest extent of the keys for which this many levels are enough."""
        t_most = self._state.layout.edges[-1]
        return math.inf if t_most == 0 else 2 * self._kappa * self._ratio**levels / t_most

    def _levels_for(self, extent: float) -> int:
        levels = self._state.layout.levels
        while extent > self._reach(levels):
            levels += 1
            if levels > MOST_LEVELS:
                raise ValueError(
                    f"key must not lie so far from other keys: {extent:g} apart, with queries up "
                    f"to query_bound = {self.query_bound:g}; scale keys or query_bound down"
                )
        return levels

    def _refine(self, levels: int) -> None:
        """Split the central panel. Inside it the table is smooth: it is read at the new nodes."""
        old, _, sums, z, ends = self._state
        added = levels - old.levels
        if added <= 0:
            return
        new = self._layout_with(levels)
        node = new.nodes_of_panels(self.device)
        inner = [0, *range(1, added + 1), *range(levels + 1, levels + added + 1)]
        at = node[inner]
        basis = lagrange_weights(old.nodes, (at / old.edges[0]).flatten())
        # From the middle of the keys to the ends of the new panels.
        alive = (ends[:, 1] <= ends[:, 0])[:, None]
        end = reference.end_of_panels(new, ends)[:, inner]
        gap = torch.where(alive, end[:, :1] - end, 0.0)
        factor = (at * gap[..., None]).exp().flatten(1)

        def split(table: Tensor) -> Tensor:
            panels = table.unflatten(1, (old.panels, old.nodes))
            shape = (len(table), len(inner), old.nodes, -1)
            found = ((basis @ panels[:, 0]) * factor[..., None]).view(shape)
            outer = old.levels
            parts = (
                *(found[:, : added + 1], panels[:, 1 : outer + 1]),
                *(found[:, added + 1 :], panels[:, outer + 1 :]),
            )
            return torch.cat(parts, 1).flatten(1, 2)

        table = split(torch.cat([sums, z[..., None]], -1))
        self._take(new, table[..., :-1].contiguous(), table[..., -1].contiguous(), ends)

    # ---- state ----

    def _settings(self) -> dict[str, Any]:
        return {
            "num_heads": self.lead,
            "head_dim": self.head_dim,
            "query_bound": self.query_bound,
            "scale": self.scale,
            "dtype": self.dtype,
        }

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state; `load_state_dict` continues from it, bit for bit."""
        return {
            "settings": self._settings(),
            "count": self._count,
            "levels": self._state.layout.levels,
            "sums": self._state.sums.clone(),
            "z": self._state.z.clone(),
            "ends": self._state.ends.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state by a copy of what `state_dict` returned; raises if it is not that."""
        names = {"settings", "count", "levels", "sums", "z", "ends"}
        if missing := names - state.keys():
            raise ValueError(f"state must have the entries of state_dict(), lacks {min(missing)!r}")
        mine, its = self._settings(), state["settings"]
        if mine != its:
            raise ValueError(
                f"state must come from a stream with the settings of this one, {mine}: {its}"
            )
        count, levels = state["count"], state["levels"]
        if not (isinstance(count, int) and isinstance(levels, int) and count >= 0):
            raise ValueError(f"state must have a count of tokens, got {count!r}, {levels!r} levels")
        if not 0 <= levels <= MOST_LEVELS:
            raise ValueError(f"state must have 0 to {MOST_LEVELS} levels, got {levels}")
        layout = self._layout_with(levels)
        features = layout.features
        heads, _, width = self._state.sums.shape
        shapes = {"sums": (heads, features, width), "z": (heads, features), "ends": (heads, 2)}
        found = {}
        for name, shape in shapes.items():
            x = state[name]
            if not (isinstance(x, Tensor) and x.shape == shape and x.dtype == torch.float64):
                raise ValueError(f"state must have {name!r} as a float64 tensor {list(shape)}")
            found[name] = x.to(self.device, copy=True).contiguous()
        swapped = found["ends"][:, 1] > found["ends"][:, 0]
        if bool((swapped != (count == 0)).any()):
            raise ValueError("state must have ends in order, and none before the first token")
        self._count = count
        self._take(layout, found["sums"], found["z"], found["ends"])

    @staticmethod
    def _tokens(x: Tensor) -> int:
        return x.shape[-2] if isinstance(x, Tensor) and x.ndim >= 2 else 0

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


def _panel(precision: float) -> tuple[int, float]:
    """Nodes and ratio of panels with fewest nodes for a factor in |t|."""
    choices = range(LEAST_NODES, MOST_NODES + 1, NODE_STEP)
    found = [(nodes, scan_ratio(precision, nodes, MOST_KEYS)) for nodes in choices]
    return min(found, key=lambda one: one[0] / math.log(one[1]))
