"""The state of a stream of plain dot scores: the table of a scan, over panels that nest."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch import backends
from boltzattn.dispatch.backends import Request
from boltzattn.problem import StreamKernels
from boltzattn.reference import stream as reference
from boltzattn.transform.layout import lagrange_weights
from boltzattn.transform.scan_layout import (
    MOST_LEVELS,
    ROOM,
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


class PlainTable:
    """Sums over all tokens at the nodes of the query axis. Panels are added as keys spread."""

    def __init__(
        self,
        lead: tuple[int, ...],
        head_dim: int,
        query_bound: float,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.head_dim, self.query_bound = head_dim, query_bound
        self.scale, self.device = scale, device
        self._nodes, self._ratio = _panel(SCAN_PRECISION[dtype])
        self._kappa = scan_kappa(SCAN_PRECISION[dtype], self._nodes)
        heads, width = math.prod(lead), -(-head_dim // LANES) * LANES
        request = Request(device.type, dtype, heads, 1, 1, 1, head_dim)
        taken = backends.select(request, "stream", "auto")
        self._kernels: StreamKernels = backends.kernels(taken.name, "stream")
        new = partial(torch.zeros, dtype=torch.float64, device=device)
        ends = new(heads, 2)
        ends[:, 0], ends[:, 1] = -math.inf, math.inf
        layout = self._layout_with(0)
        # The operators read how many wait, on the CPU.
        waiting = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._take(
            *(layout, new(heads, layout.features, width), new(heads, layout.features), ends),
            *(new(heads, ROOM), new(heads, ROOM, width), waiting),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._state.tensors

    def append(self, key: Tensor, value: Tensor) -> None:
        extent = self._kernels.append(self._state, key, value, self._most)
        self._check_extent(extent)
        if extent > self._most:
            self._refine(self._levels_for(extent))
            self._kernels.append(self._state, key, value, self._most)

    def query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, largest = self._kernels.query(self._state, query, self.head_dim, self.scale)
        check_largest(largest, self._state.layout.edges[-1], query, self.query_bound)
        return out, lse

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append, then query; does neither if it raises."""
        arguments = query, key, value, self.scale
        out, largest, extent = self._kernels.step(self._state, *arguments, self._most)
        check_largest(largest, self._state.layout.edges[-1], query, self.query_bound)
        self._check_extent(extent)
        if extent > self._most:
            self._refine(self._levels_for(extent))
            out, _, _ = self._kernels.step(self._state, *arguments, self._most)
        return out

    def merge(self, other: PlainTable) -> None:
        its = copy.deepcopy(other)
        for table in (self, its):
            table._fold()
        ends = reference.joined(self._state.ends, its._state.ends)
        levels = self._levels_for(float((ends[:, 0] - ends[:, 1]).max()))
        levels = max(levels, its._state.layout.levels)
        for table in (self, its):
            table._refine(levels)
            reference.move(table._state, ends)
        self._state.sums.add_(its._state.sums)
        self._state.z.add_(its._state.z)

    def _fold(self) -> None:
        """Add the tokens that wait to the table, as every append does."""
        state = self._state
        self._kernels.append(state, state.keys[:, :0, None], state.values[:, :0], math.inf)

    def _check_extent(self, extent: float) -> None:
        if math.isnan(extent):
            raise ValueError(
                "key and value must be finite: a stream cannot take back what was appended"
            )

    # ---- the layout ----

    def _layout_with(self, levels: int) -> ScanLayout:
        t_most = self.query_bound * abs(self.scale)
        return scan_layout_of(t_most, self._nodes, levels, self._ratio)

    def _take(self, layout: ScanLayout, *tensors: Tensor) -> None:
        """Use this state from now on."""
        positions = layout.nodes_of_panels(self.device).flatten()
        self._state = StreamState(layout, positions, *tensors)
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
        old = self._state.layout
        sums, z, ends, *waiting = self._state.tensors
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
        self._take(new, table[..., :-1].contiguous(), table[..., -1].contiguous(), ends, *waiting)

    # ---- state ----

    def entries(self) -> dict[str, Any]:
        return {"levels": self._state.layout.levels, **dict(zip(_NAMES, self.tensors, strict=True))}

    def load(self, state: dict[str, Any], count: int) -> None:
        """Take the entries of another table of `count` tokens.

        Raises, and changes nothing, if they cannot be.
        """
        levels = state["levels"]
        if not (isinstance(levels, int) and 0 <= levels <= MOST_LEVELS):
            raise ValueError(f"state must have 0 to {MOST_LEVELS} levels, got {levels!r}")
        layout = self._layout_with(levels)
        features = layout.features
        heads, _, width = self._state.sums.shape
        table = (heads, features, width), (heads, features), (heads, 2)
        shapes = *table, (heads, ROOM), (heads, ROOM, width), (1,)
        found = [
            checked_entry(state, name, shape, mine)
            for name, shape, mine in zip(_NAMES, shapes, self.tensors, strict=True)
        ]
        waiting = int(found[-1])
        if not 0 <= waiting <= min(ROOM, count):
            raise ValueError(f"state must have 0 to {ROOM} of its tokens waiting, got {waiting}")
        swapped = found[2][:, 1] > found[2][:, 0]
        if bool((swapped != (count == waiting)).any()):
            raise ValueError("state must have ends in order, and none before the first token")
        self._take(layout, *found)


_NAMES = "sums", "z", "ends", "keys", "values", "waiting"


def check_largest(largest: float, most: float, query: Tensor, query_bound: float) -> None:
    if not largest <= most:
        got = "NaN" if math.isnan(largest) else f"{float(query.abs().max()):.9g}"
        raise ValueError(
            f"query must be within query_bound = {query_bound:.9g}, got {got}; scale the "
            "queries down, or build the stream with a larger query_bound"
        )


def checked_entry(state: dict[str, Any], name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A copy of a tensor of a saved state."""
    x = state[name]
    if not (isinstance(x, Tensor) and x.shape == shape and x.dtype == like.dtype):
        kind = str(like.dtype).removeprefix("torch.")
        raise ValueError(f"state must have {name!r} as a {kind} tensor {list(shape)}")
    return x.to(like.device, copy=True).contiguous()


def _panel(precision: float) -> tuple[int, float]:
    """Nodes and ratio of panels with fewest nodes for a factor in |t|."""
    choices = range(LEAST_NODES, MOST_NODES + 1, NODE_STEP)
    found = [(nodes, scan_ratio(precision, nodes, MOST_KEYS)) for nodes in choices]
    return min(found, key=lambda one: one[0] / math.log(one[1]))
