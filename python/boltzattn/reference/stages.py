"""One stage of the transform for all heads, between which processes add up what they found.

The sums of all heads stand one after the other in one tensor. Each head has a row of dv + 1 sums
per key node, and one for either end key: its value, and 1 if this process has the key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.problem import OutputGradients, Problem
from boltzattn.reference.head import (
    Core,
    Head,
    gradient_columns,
    head_gradients,
    head_indices,
    kept_keys,
)
from boltzattn.transform.stages import Extent, SharedRange
from boltzattn.transform.tolerances import LEAST_EXTENT


class _Sums(NamedTuple):
    """How many sums a head shares."""

    over_keys: int
    over_queries: int


def _shared_heads(
    problem: Problem, ranges: Tensor
) -> Iterator[tuple[tuple[int, ...], Tensor | None, Head | None, _Sums]]:
    """(index, kept keys, head, its sums); no head where no process has queries or keys."""
    width = problem.value.shape[-1] + 1
    for index, row in zip(head_indices(problem), ranges.tolist(), strict=True):
        shared = SharedRange(*row)
        if shared.keys == 0 or shared.n_q == 0:
            yield index, None, None, _Sums(0, 0)
            continue
        one = problem.head(index)
        kept = kept_keys(one)
        head = Head(one, one.key.new_zeros(0).long() if kept is None else kept, shared)
        layout = head.layout
        sums = _Sums((layout.key.size + 2) * width, layout.query.size * width)
        yield index, kept, head, sums


def _shared_core(head: Head, moments: Tensor) -> tuple[Core, Tensor]:
    """The core of everybody's moments, and the values of the end keys."""
    *_, low, high = rows = moments.view(-1, head.dv + 1)
    # Equal end keys in several processes: the mean of their values.
    ends = torch.stack([low[:-1] / low[-1], high[:-1] / high[-1]])
    return head.core(rows[:-2], torch.zeros_like(ends), ends), ends


def _joined(parts: list[Tensor], problem: Problem) -> Tensor:
    return torch.cat(parts) if parts else problem.value.new_zeros(0, dtype=torch.float64)


def _extent(x: Tensor, rows: Tensor | None) -> Extent:
    numbers = x.double().squeeze(1) if rows is None else x.double().squeeze(1)[rows]
    if len(numbers) == 0:
        return Extent(math.inf, -math.inf, 0.0, 0.0, 0.0, 1.0)
    low, high = int(numbers.argmin()), int(numbers.argmax())
    at = (low, high) if rows is None else (int(rows[low]), int(rows[high]))
    regular = float(numbers.isfinite().all())
    return Extent(float(numbers[low]), float(numbers[high]), *at, len(numbers), regular)


def extents(problem: Problem) -> Tensor:
    """[heads, 2, 6]: an `Extent` of the queries and one of the keys of every head."""
    found = []
    for index in head_indices(problem):
        one = problem.head(index)
        kept = kept_keys(one)
        of_keys = _extent(one.key, kept)
        found += [
            _extent(one.query, None),
            of_keys if kept is not None else of_keys._replace(regular=0.0),
        ]
    return torch.tensor(found, dtype=torch.float64, device=problem.query.device).view(-1, 2, 6)


def sizes(problem: Problem, ranges: Tensor) -> tuple[int, int]:
    """How many sums over keys, and how many sums over queries, are shared."""
    sums = [sums for *_, sums in _shared_heads(problem, ranges)]
    return sum(x.over_keys for x in sums), sum(x.over_queries for x in sums)


def moments(problem: Problem, extents: Tensor, ranges: Tensor) -> Tensor:
    """This process's part of the sums over the keys."""
    parts, dv = [], problem.value.shape[-1]
    for (index, _, head, _), (_, of_keys) in zip(
        _shared_heads(problem, ranges), extents.tolist(), strict=True
    ):
        if head is None:
            continue
        keys, layout = Extent(*of_keys), head.layout
        ends = head.v.new_zeros(2, dv + 1)
        if keys.tokens > 0:
            here = (keys.low == layout.s_min, keys.high == layout.s_max)
            at = (int(keys.at_low), int(keys.at_high))
            for end in (end for end in range(2) if here[end]):
                ends[end, :dv] = problem.value[index][at[end]].double()
                ends[end, dv] = 1.0
        sums = head.moments(head.v.new_zeros(2, dv))
        parts.append(torch.cat([sums, ends]).flatten())
    return _joined(parts, problem)


def evaluate(problem: Problem, ranges: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, served [heads]) from everybody's moments; all processes find the same served."""
    query, first, served = problem.query, 0, []
    out = query.new_zeros(*query.shape[:-1], problem.value.shape[-1])
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=torch.float64)
    for index, _, head, sums in _shared_heads(problem, ranges):
        if head is None:
            served.append(True)
            continue
        core, _ = _shared_core(head, moments[first : first + sums.over_keys])
        first += sums.over_keys
        served.append(head.span.key_extent >= LEAST_EXTENT and core.served)
        out[index], lse[index] = head.evaluate(core)
    return out, lse, torch.tensor(served, dtype=torch.bool, device="cpu")


def query_moments(
    grads: OutputGradients, problem: Problem, ranges: Tensor, moments: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of query, and this process's part of the sums over the queries."""
    first, parts = 0, []
    grad_query = torch.zeros_like(problem.query, memory_format=torch.contiguous_format)
    for index, _, head, sums in _shared_heads(problem, ranges):
        if head is None:
            continue
        core, _ = _shared_core(head, moments[first : first + sums.over_keys])
        first += sums.over_keys
        grad_t, found = head.query_moments(core, *gradient_columns(head_gradients(grads, index)))
        grad_query[index] = (grad_t * problem.scale).to(grad_query.dtype)
        parts.append(found.flatten())
    return grad_query, _joined(parts, problem)


def adjoint(
    problem: Problem, ranges: Tensor, moments: Tensor, query_moments: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of key and value, from everybody's sums."""
    first, first_query = 0, 0
    grad_key, grad_value = (
        torch.zeros_like(x, memory_format=torch.contiguous_format)
        for x in (problem.key, problem.value)
    )
    for index, kept, head, sums in _shared_heads(problem, ranges):
        if head is None:
            continue
        core, ends = _shared_core(head, moments[first : first + sums.over_keys])
        found = query_moments[first_query : first_query + sums.over_queries]
        first, first_query = first + sums.over_keys, first_query + sums.over_queries
        grad_s, grad_v = head.adjoint(core, found.view(-1, head.dv + 1), ends)
        grad_key[index][kept] = grad_s.to(grad_key.dtype)
        grad_value[index][kept] = grad_v.to(grad_value.dtype)
    return grad_key, grad_value


STAGES = (extents, sizes, moments, evaluate, query_moments, adjoint)
