"""One stage of a head of rank 2 to 4 after the other, for tokens in several processes.

The stages of `stages`, for these ranks. All processes have the same layout, and panels have units
that follow from it and from sums that are known to all, so sums of processes add up. Coordinates
are those of the caller, centred.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.problem import OutputGradients, Problem
from boltzattn.reference.head import (
    gradient_columns,
    head_gradients,
    head_indices,
    kept_keys,
)
from boltzattn.reference.tensor import (
    Frame,
    RunningSums,
    SummedTensorHead,
    Tables,
)
from boltzattn.transform.stages import TensorRange
from boltzattn.transform.tensor import shared_layout


class _Shared(NamedTuple):
    place: tuple[int, ...]  # among the heads
    kept: Tensor | None
    head: _SharedHead | None  # none where no process has queries or keys
    over_keys: int  # how many sums it shares
    over_queries: int


class _SharedHead(SummedTensorHead):
    """The part of a head that this process has."""

    count: int  # keys of all processes, at most

    @property
    def key_units(self) -> Tensor:
        """The largest bias that a key of a panel can have."""
        middle, tilt = self.at.t_middle, 0.0
        units = middle.new_zeros(1)
        for a, axis in enumerate(self.layout.key):
            panel = torch.arange(axis.panels, dtype=middle.dtype, device=middle.device)
            centre = axis.half * (2 * panel + 1 - axis.panels)
            units = (units[:, None] + middle[a] * centre).flatten()
            tilt += float(middle[a].abs()) * axis.half
        return units + tilt

    def everybodys(self, numbers: Tensor, units: Tensor, sums: RunningSums) -> RunningSums:
        """The sums of all processes as those of one; panels without any have no unit."""
        sums.sums = numbers.view_as(sums.sums)
        empty = (sums.sums == 0).flatten(1).all(1)
        sums.log, sums.count = units.masked_fill(empty, -math.inf), self.count
        return sums

    def tables(self, moments: Tensor) -> Tables:
        return self.over_keys(self.everybodys(moments, self.key_units, self.key_sums()))

    def results(self, tables: Tables) -> tuple[Tensor, Tensor]:
        """out and log Z in the frame, of the local queries."""
        found, log = self.read(tables, self.layout.query, self.at.t)
        n, z = found[:, 0].split([self.dv, 1], 1)
        return n / z, log + z.squeeze(1).log()


def _head(problem: Problem, kept: Tensor, of: TensorRange) -> _SharedHead:
    t, s = problem.query.detach().double() * problem.scale, problem.key.detach()[kept].double()
    dv = problem.value.shape[-1]
    layout = shared_layout(of, problem.query.dtype, dv)
    assert layout is not None, "ranges without a layout have a level below 0"

    def numbers(x: list[float]) -> Tensor:
        return torch.tensor(x, dtype=torch.float64, device=t.device)

    t_middle, s_middle = numbers(of.t_middle), numbers(of.s_middle)
    one = torch.eye(t.shape[1], dtype=torch.float64, device=t.device)
    s = s - s_middle
    at = Frame(one, one, t - t_middle, s, t_middle, s_middle, s @ t_middle)
    head = _SharedHead(problem, kept, at, torch.zeros_like(t_middle), layout)
    head.centre, head.count = head.v.new_zeros(dv), max(1, int(of.keys))
    head.flat_query, head.flat_key = ([x == 0 for x in y] for y in (of.t_most, of.s_most))
    return head


def _shared_heads(problem: Problem, ranges: Tensor) -> Iterator[_Shared]:
    width = problem.value.shape[-1] + 1
    for index, row in zip(head_indices(problem), ranges.tolist(), strict=True):
        of = TensorRange.of(row)
        if of.keys == 0 or of.tokens == 0 or of.level < 0:
            yield _Shared(index, None, None, 0, 0)
            continue
        one = problem.head(index)
        kept = kept_keys(one)
        head = _head(one, one.key.new_zeros(0).long() if kept is None else kept, of)
        sides = (math.prod(axis.size for axis in x) for x in (head.layout.key, head.layout.query))
        yield _Shared(index, kept, head, *(width * size for size in sides))


def extents(problem: Problem) -> Tensor:
    """Of every head what `TensorRange` is made of: numbers whose least is that of the whole."""
    found = []
    for index in head_indices(problem):
        one = problem.head(index)
        kept = kept_keys(one)
        q = one.query.double()
        k = one.key.double() if kept is None else one.key[kept].double()
        regular = kept is not None and bool(q.isfinite().all()) and bool(k.isfinite().all())
        ends = [[math.inf] * q.shape[1]] * 2
        row: list[float] = []
        for x in (q, k):
            low, high = (x.amin(0).tolist(), (-x.amax(0)).tolist()) if len(x) else ends
            row += [*low, *high]
        found.append([*row, -len(q), -len(k), float(regular)])
    return torch.tensor(found, dtype=torch.float64, device=problem.query.device)


def sizes(problem: Problem, ranges: Tensor) -> tuple[int, int]:
    """How many sums over keys, and how many sums over queries, are shared."""
    heads = list(_shared_heads(problem, ranges))
    return sum(x.over_keys for x in heads), sum(x.over_queries for x in heads)


def moments(problem: Problem, extents: Tensor, ranges: Tensor) -> Tensor:
    """This process's part of the sums over the keys."""
    parts = []
    for shared in _shared_heads(problem, ranges):
        if (head := shared.head) is not None:
            sums = head.key_sums()
            sums.add(head.at.s, head.at.bias, head.columns, head.key_units)
            parts.append(sums.sums.flatten())
    return _joined(parts, problem)


def _joined(parts: list[Tensor], problem: Problem) -> Tensor:
    return torch.cat(parts) if parts else problem.value.new_zeros(0, dtype=torch.float64)


def _with_tables(
    problem: Problem, ranges: Tensor, moments: Tensor
) -> Iterator[tuple[_Shared, _SharedHead, Tables]]:
    first = 0
    for shared in _shared_heads(problem, ranges):
        if (head := shared.head) is not None:
            yield shared, head, head.tables(moments[first : first + shared.over_keys])
            first += shared.over_keys


def evaluate(problem: Problem, ranges: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, served [heads]) from everybody's moments. The bound is known, so all are."""
    query = problem.query
    out = query.new_zeros(*query.shape[:-1], problem.value.shape[-1])
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=torch.float64)
    for shared, head, tables in _with_tables(problem, ranges, moments):
        found, log_z = head.results(tables)
        out[shared.place], lse[shared.place] = found.to(out.dtype), head.add_offsets(log_z)
    return out, lse, torch.ones(len(ranges), dtype=torch.bool, device="cpu")


def query_moments(
    grads: OutputGradients, problem: Problem, ranges: Tensor, moments: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of query, and this process's part of the sums over the queries."""
    parts, every = [], slice(None)
    grad_query = torch.zeros_like(problem.query, memory_format=torch.contiguous_format)
    for shared, head, tables in _with_tables(problem, ranges, moments):
        g, h = gradient_columns(head_gradients(grads, shared.place))
        out, log_z = head.results(tables)
        asked = head.asked(g, h, out)
        grad_t = head.pulled_rows(tables, every, asked, log_z) + h * head.at.s_middle
        grad_query[shared.place] = (grad_t * problem.scale).to(grad_query.dtype)
        sums = head.row_sums()
        sums.add(head.at.t, -log_z, asked, -tables.log)
        parts.append(sums.sums.flatten())
    return grad_query, _joined(parts, problem)


def adjoint(
    problem: Problem, ranges: Tensor, moments: Tensor, query_moments: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of key and value, from everybody's sums."""
    first = 0
    grad_key, grad_value = (
        torch.zeros_like(x, memory_format=torch.contiguous_format)
        for x in (problem.key, problem.value)
    )
    for shared, head, tables in _with_tables(problem, ranges, moments):
        numbers = query_moments[first : first + shared.over_queries]
        first += shared.over_queries
        sums = head.everybodys(numbers, -tables.log, head.row_sums())
        of_value, pull = head.pulled_keys(head.over_rows(sums), slice(None))
        grad_s = pull[:, 1:] + pull[:, :1] * head.at.t_middle
        grad_key[shared.place][shared.kept] = grad_s.to(grad_key.dtype)
        grad_value[shared.place][shared.kept] = of_value.to(grad_value.dtype)
    return grad_key, grad_value


STAGES = (extents, sizes, moments, evaluate, query_moments, adjoint)
