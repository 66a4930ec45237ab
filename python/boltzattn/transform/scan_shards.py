"""A scan over a sequence whose shards lie in several processes.

A shard is a segment of the scan. Its rows see the keys of earlier shards through the table of these
keys, and its keys get their gradients from the rows of later shards through a table over those
rows. Tables of several shards are moved to the same ends and added up; their size does not depend
on the number of tokens. docs/transform.md derives the tables. Everything here is fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.transform.scan_layout import ScanLayout, scan_layout_of


class SharedScan(NamedTuple):
    """The layouts of all heads, the same in all processes. They differ in their width alone."""

    nodes: int
    levels: int
    ratio: float
    t_most: Tensor  # [heads]: the largest |t|

    @property
    def features(self) -> int:
        return (2 * self.levels + 1) * self.nodes

    def layout(self, h: int) -> ScanLayout:
        return scan_layout_of(float(self.t_most[h]), self.nodes, self.levels, self.ratio)

    @property
    def positions(self) -> Tensor:
        """t of all nodes, [heads, features]."""
        layout = scan_layout_of(1.0, self.nodes, self.levels, self.ratio)
        return self.t_most[:, None] * layout.nodes_of_panels(self.t_most.device).flatten()

    def end_of_nodes(self, ends: Tensor) -> Tensor:
        """Where keys are measured from, [heads, features]."""
        high, low = ends[:, :1], ends[:, 1:]
        middle = 0.5 * high + 0.5 * low
        side = self.levels * self.nodes
        return torch.cat(
            [middle.expand(-1, self.nodes), high.expand(-1, side), low.expand(-1, side)], 1
        )

    def gap(self, old: Tensor, new: Tensor) -> Tensor:
        """By how much the ends of all nodes move; 0 if there are no keys on one side."""
        alive = ((old[:, 1] <= old[:, 0]) & (new[:, 1] <= new[:, 0]))[:, None]
        return torch.where(alive, self.end_of_nodes(old) - self.end_of_nodes(new), 0.0)


class ShardTables(NamedTuple):
    """What the rows of later shards need to know of the keys of a shard, or of several."""

    ends: Tensor  # [heads, 2]: the largest and the smallest key; (-inf, inf) without keys
    keys: Tensor  # [heads, 3]: their number, their sum, and the largest |value|
    centres: Tensor  # [heads, 2, dv]: the values of the two end keys
    table: Tensor  # [heads, features, dv + 1]: sums of exp(t_a (s_j - end)) (v_j, 1)
    slopes: Tensor  # the same times (s_j - end), for gradients; or [heads, 0, dv + 1]

    def message(self) -> Tensor:
        return torch.cat([x.flatten(1) for x in self], 1).contiguous()

    @classmethod
    def of_message(cls, message: Tensor, like: ShardTables) -> ShardTables:
        sizes = [x[0].numel() if len(x) else 0 for x in like]
        parts = message.split(sizes, 1) if len(message) else like
        return cls._make(part.view(x.shape) for part, x in zip(parts, like, strict=True))

    @classmethod
    def empty(cls, shared: SharedScan, dv: int, with_slopes: bool) -> ShardTables:
        heads, of = len(shared.t_most), shared.t_most
        none = of.new_tensor([-torch.inf, torch.inf]).repeat(heads, 1)
        slopes = of.new_zeros(heads, shared.features if with_slopes else 0, dv + 1)
        table = of.new_zeros(heads, shared.features, dv + 1)
        return cls(none, of.new_zeros(heads, 3), of.new_zeros(heads, 2, dv), table, slopes)

    def numel(self) -> int:
        return sum(x.numel() for x in self)


class ShardResults(NamedTuple):
    """The results of a shard."""

    out: Tensor
    lse: Tensor  # fp64
    z: Tensor  # [heads, n]: sums of weights, relative to that of a row's top key


def joined_ends(a: Tensor, b: Tensor) -> Tensor:
    """The ends of two sets of keys."""
    return torch.stack([torch.maximum(a[:, 0], b[:, 0]), torch.minimum(a[:, 1], b[:, 1])], 1)


def ends_before(shards: Sequence[ShardTables], none: ShardTables) -> list[Tensor]:
    """The ends of all keys before each shard, and of all."""
    return list(accumulate((shard.ends for shard in shards), joined_ends, initial=none.ends))


def join(shared: SharedScan, shards: Sequence[ShardTables], none: ShardTables) -> ShardTables:
    """The tables of the keys of several shards, in their order."""
    total = none
    for shard in shards:
        ends = joined_ends(total.ends, shard.ends)
        # Of equal end keys the first counts.
        first = torch.stack(
            [total.ends[:, 0] >= shard.ends[:, 0], total.ends[:, 1] <= shard.ends[:, 1]], 1
        )
        keys = torch.cat(
            [
                total.keys[:, :2] + shard.keys[:, :2],
                torch.maximum(total.keys[:, 2:], shard.keys[:, 2:]),
            ],
            1,
        )
        tables = [_moved(shared, one, ends) for one in (total, shard)]
        table, slopes = (a + b for a, b in zip(*tables, strict=True))
        centres = torch.where(first[..., None], total.centres, shard.centres)
        total = ShardTables(ends, keys, centres, table, slopes)
    return total


def _moved(shared: SharedScan, tables: ShardTables, ends: Tensor) -> tuple[Tensor, Tensor]:
    """(table, slopes) measured from other ends, which have the old ones between them."""
    gap = shared.gap(tables.ends, ends)
    factor = (shared.positions * gap).exp()[..., None]
    table, slopes = tables.table, tables.slopes
    if slopes.shape[1]:
        slopes = (slopes + gap[..., None] * table) * factor
    return table * factor, slopes


def join_rows(
    shared: SharedScan,
    tables: Sequence[Tensor],
    before: Sequence[Tensor],
    ends: Tensor,
) -> Tensor | None:
    """The table over the rows of later shards, for keys that end at `ends`; None without shards.

    Each is measured from the ends before its shard, which lie around `ends`.
    """
    total: Tensor | None = None
    for table, old in zip(tables, before, strict=True):
        # Keys read it by exp(t_a (s_j - end)), and the end falls: a factor of at most 1.
        moved = table * (shared.positions * shared.gap(ends, old)).exp()[..., None]
        total = moved if total is None else total + moved
    return total


class ScanStages(NamedTuple):
    """The stages of a scan as a backend has them; between them `distributed` exchanges tables."""

    dtype: Callable  # (problem): the precision that the layout is made for
    extents: Callable  # (problem): of queries and keys, [heads, 2, 6]
    tables: Callable  # (problem, shared, with_slopes): ShardTables of the keys of a shard
    forward: Callable  # (problem, shared, earlier): ShardResults
    query_table: Callable  # (grads, results, problem, shared, earlier): [heads, features, dv + 1]
    backward: Callable  # (grads, results, problem, shared, earlier, later): of query, key, value
