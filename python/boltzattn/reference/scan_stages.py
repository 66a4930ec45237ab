"""The stages of a scan over one shard of a causal sequence, in plain torch and fp64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from boltzattn.problem import OutputGradients, Problem
from boltzattn.reference.head import head_indices
from boltzattn.reference.scan import Earlier, Head
from boltzattn.reference.stages import extents
from boltzattn.transform.scan_shards import ShardResults, ShardTables, SharedScan


def dtype(problem: Problem) -> torch.dtype:
    return torch.float64


def _heads(
    problem: Problem, shared: SharedScan, earlier: ShardTables | None = None
) -> Iterator[tuple[int, tuple[int, ...], Head]]:
    for h, index in enumerate(head_indices(problem)):
        layout = shared.layout(h)
        known = None
        if earlier is not None:
            shape = layout.panels, layout.nodes, -1
            high, low = earlier.ends[h].tolist()
            known = Earlier(
                (high, low) if low <= high else None,
                earlier.table[h].reshape(shape),
                earlier.slopes[h].reshape(shape) if earlier.slopes.shape[1] else None,
            )
        yield h, index, Head(problem.head(index), layout, known)


def tables(problem: Problem, shared: SharedScan, with_slopes: bool) -> ShardTables:
    """Those of the keys of this shard."""
    found = ShardTables.empty(shared, problem.value.shape[-1], with_slopes)
    for h, _, head in _heads(problem, shared):
        if not head.served:  # not finite; so is the largest value
            found.keys[h, 2] = math.nan
            continue
        if len(head.s) == 0:
            continue
        high, low = int(head.s.argmax()), int(head.s.argmin())
        found.ends[h] = torch.stack([head.s[high], head.s[low]])
        number = head.s.new_tensor(len(head.s))
        largest = head.v.abs().max() if head.v.numel() else torch.zeros_like(number)
        found.keys[h] = torch.stack([number, head.s.sum(), largest])
        found.centres[h] = head.v[[high, low]]
        table, slopes = head.tables(with_slopes)
        found.table[h] = table.flatten(0, 1)
        if slopes is not None:
            found.slopes[h] = slopes.flatten(0, 1)
    return found


def forward(problem: Problem, shared: SharedScan, earlier: ShardTables) -> ShardResults:
    query = problem.query
    out = query.new_zeros(*query.shape[:-1], problem.value.shape[-1])
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=torch.float64)
    all_z = lse.new_zeros(len(shared.t_most), query.shape[-2])
    for h, index, head in _heads(problem, shared, earlier):
        found, all_z[h] = head.forward()
        out[index], lse[index] = found.to(out.dtype), head.lse(all_z[h])
    return ShardResults(out, lse, all_z)


def _of_head(grads: OutputGradients, index: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    return grads.out[index].double(), None if grads.lse is None else grads.lse[index].double()


def query_table(
    grads: OutputGradients,
    results: ShardResults,
    problem: Problem,
    shared: SharedScan,
    earlier: ShardTables,
) -> Tensor:
    """What the keys of earlier shards, if there are any, need to know of the rows of this one.

    `results` are not read, here and below: half precision has lost what gradients need.
    """
    found = torch.zeros_like(earlier.table)
    for h, index, head in _heads(problem, shared, earlier):
        if head.earlier.ends is not None:
            found[h] = head.query_table(*_of_head(grads, index)).flatten(0, 1)
    return found


def backward(
    grads: OutputGradients,
    results: ShardResults,
    problem: Problem,
    shared: SharedScan,
    earlier: ShardTables,
    later: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value.

    `later` is the joined table over the rows of later shards, if there are any.
    """
    query, key, value = (x.new_zeros(x.shape) for x in problem.inputs)
    for h, index, head in _heads(problem, shared, earlier):
        layout = head.layout
        table = None if later is None else later[h].reshape(layout.panels, layout.nodes, -1)
        dt, ds, dv = head.backward(*_of_head(grads, index), table)
        query[index] = (dt * problem.scale)[:, None].to(query.dtype)
        key[index][head.at] = ds[:, None].to(key.dtype)
        value[index][head.at] = dv.to(value.dtype)
    return query, key, value


STAGES = (dtype, extents, tables, forward, query_table, backward)
