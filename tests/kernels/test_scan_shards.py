"""A scan over shards in one process, stage by stage: long shards, odd keys, wrong arguments."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import boltzattn
import pytest
import torch
from boltzattn.dispatch import backends
from boltzattn.dispatch.extension import extension
from boltzattn.problem import OutputGradients, Problem
from boltzattn.transform.scan_layout import make_scan_layout
from boltzattn.transform.scan_shards import (
    ShardTables,
    SharedScan,
    ends_before,
    join,
    join_rows,
)
from errors import assert_accurate
from oracle import Result, eagers, magnitudes, oracle
from torch import Tensor

extension()  # the operators of backend cpu
BACKENDS = ("cpu", "reference")


def problem_of(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Problem:
    return Problem(query, key, value, None, None, None, None, scale, 0.0, True, False)


def shards_of(problem: Problem, sizes: tuple[int, ...]) -> list[Problem]:
    return [
        problem.rows(slice(a, b), slice(a, b)) for a, b in pairwise(accumulate(sizes, initial=0))
    ]


def shared_by(problem: Problem, dtype: torch.dtype) -> SharedScan:
    t = (problem.query.double() * problem.scale).abs().amax((-1, -2)).flatten()
    key = problem.key.double()
    extent = (key.amax((-1, -2)) - key.amin((-1, -2))).flatten()
    layout = make_scan_layout(dtype, float((t * extent).max()), 1.0, 2**24)
    assert layout is not None
    return SharedScan(layout.nodes, layout.levels, layout.ratio, t)


def in_shards(
    tensors: list[Tensor | None], sizes: tuple[int, ...], backend: str, scale: float = 1.0
) -> Result:
    """What `distributed.attention` does, without its collectives."""
    query, key, value, grad_out, grad_lse = tensors
    problem = problem_of(query, key, value, scale)
    stages = backends.kernels(backend, "scan_stages")
    shared = shared_by(problem, stages.dtype(problem))
    shards = shards_of(problem, sizes)
    grads = [
        OutputGradients(grad_out, grad_lse).rows(slice(a, b))
        for a, b in pairwise(accumulate(sizes, initial=0))
    ]
    none = ShardTables.empty(shared, value.shape[-1], True)
    tables = [stages.tables(shard, shared, True) for shard in shards]
    before = ends_before(tables, none)
    calls = []
    for i, shard in enumerate(shards):
        earlier = join(shared, tables[:i], none)
        results = stages.forward(shard, shared, earlier)
        calls.append((grads[i], results, shard, shared, earlier))
    rows = [stages.query_table(*call) for call in calls]
    found = []
    for i, call in enumerate(calls):
        later = join_rows(shared, rows[i + 1 :], before[i + 1 : -1], before[i + 1])
        found.append((call[1].out, call[1].lse, *stages.backward(*call, later)))
    out, lse, *gradients = zip(*found, strict=True)
    return Result(torch.cat(out, -2), torch.cat(lse, -1), *(torch.cat(x, -2) for x in gradients))


def draw(n: int, dv: int, dtype: torch.dtype, keys: str = "normal") -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(n + dv)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    query, key, value = normal(2, n, 1), normal(2, n, 1), normal(2, n, dv)
    if keys == "two":
        key = (key > 0).to(dtype)
    if keys == "falling":  # an end key of every chunk
        key = -torch.arange(n, dtype=dtype).view(1, n, 1) / n + 0.01 * key
    return [query, key, value, normal(2, n, dv), normal(2, n).double()]


# Segments of a scan have at least 1,024 tokens: shards of one, of two and of three of them.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("sizes", "dv", "keys", "scale"),
    [
        ((63, 65, 2, 257), 3, "normal", 3.0),
        ((1, 64, 0, 128), 1, "two", 50.0),
        ((1100, 1300), 8, "falling", -200.0),
        ((300, 2200), 5, "two", 1e4),
    ],
)
def test_shards_equal_the_whole(
    sizes: tuple[int, ...], dv: int, keys: str, scale: float, dtype: torch.dtype, backend: str
) -> None:
    tensors = draw(sum(sizes), dv, dtype, keys)
    call: dict[str, Any] = {"scale": scale, "is_causal": True}
    assert_accurate(
        in_shards(tensors, sizes, backend, scale)._asdict(),
        oracle(*tensors, **call)._asdict(),
        eagers(*tensors, **call),
        magnitudes=magnitudes(*tensors, **call),
        method="transform",
    )


def test_long_shards_equal_the_scan_of_the_whole() -> None:
    """Too long for an oracle: several segments in every shard, several blocks of columns."""
    sizes, dv = (5000, 1, 7000), 270
    tensors = draw(sum(sizes), dv, torch.float64)
    leaves = [x.requires_grad_() for x in tensors[:3]]
    results = boltzattn.attention(
        *leaves, is_causal=True, scale=3.0, return_lse=True, method="transform", backend="cpu"
    )
    wanted = Result(*results, *torch.autograd.grad(results, leaves, tensors[3:]))
    found = in_shards([x.detach() for x in tensors], sizes, "cpu", 3.0)
    for actual, expected in zip(found, wanted, strict=True):
        size = expected.abs().max().item()
        # fp64 in another order.
        torch.testing.assert_close(actual, expected.detach(), rtol=0.0, atol=1e-13 * size)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    tensors = draw(5000, 8, torch.float32)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(in_shards(tensors, (2100, 2900), "cpu"))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_of_backends_agree(backend: str) -> None:
    """What travels means the same for every backend: ends, counts, values of end keys, sums."""
    query, key, value, *_ = draw(2000, 3, torch.float64)
    problem = problem_of(query, key, value, 2.0)
    stages = backends.kernels(backend, "scan_stages")
    shared = shared_by(problem, torch.float64)
    found = stages.tables(problem, shared, True)
    s = key[..., 0]
    torch.testing.assert_close(found.ends, torch.stack([s.amax(1), s.amin(1)], 1))
    sums = torch.stack([torch.full((2,), 2000.0).double(), s.sum(1), value.abs().amax((1, 2))], 1)
    torch.testing.assert_close(found.keys, sums)
    at = torch.stack([s.argmax(1), s.argmin(1)], 1)
    torch.testing.assert_close(found.centres, value.gather(1, at[..., None].expand(-1, -1, 3)))
    gap = s[:, None] - shared.end_of_nodes(found.ends)[..., None]
    weight = (shared.positions[..., None] * gap).exp()
    with_ones = torch.cat([value, torch.ones_like(s)[..., None]], -1)
    size = weight.sum(-1).max().item()
    for table, factor in ((found.table, weight), (found.slopes, weight * gap)):
        torch.testing.assert_close(table, factor @ with_ones, rtol=1e-12, atol=1e-12 * size)
    assert stages.tables(problem, shared, False).slopes.shape[1] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_that_are_not_finite_are_told(backend: str) -> None:
    query, key, value, *_ = draw(100, 3, torch.float32)
    problem = problem_of(query, key, value, 2.0)
    stages = backends.kernels(backend, "scan_stages")
    shared = shared_by(problem, torch.float64)
    value[1, 17, 2] = math.nan
    told = stages.tables(problem, shared, True)
    odd = ~(told.keys.isfinite().all(1) & told.table.isfinite().flatten(1).all(1))
    assert odd.tolist() == [False, True]


def test_operators_check_what_keeps_them_in_their_memory() -> None:
    ops = torch.ops.boltzattn
    query, key, value, grad_out, _ = draw(70, 3, torch.float32)
    problem = problem_of(query, key, value, 2.0)
    shared = shared_by(problem, torch.float32)
    earlier = ShardTables.empty(shared, 3, True)
    results = ops.cpu_shard_forward(*problem, *shared, *earlier)
    for name, wrong in (
        ("ends", earlier._replace(ends=earlier.ends[:1])),
        ("keys", earlier._replace(keys=earlier.keys.float())),
        ("centres", earlier._replace(centres=earlier.centres[..., :2])),
        ("table", earlier._replace(table=earlier.table[:, 1:])),
        ("slope_table", earlier._replace(slopes=earlier.slopes[:, 1:])),
    ):
        with pytest.raises(RuntimeError, match=f"{name} must"):
            ops.cpu_shard_forward(*problem, *shared, *wrong)
    for wrong_layout, said in (
        (shared._replace(nodes=1), "nodes, levels and ratio must be"),
        (shared._replace(levels=65), "nodes, levels and ratio must be"),
        (shared._replace(ratio=math.nan), "nodes, levels and ratio must be"),
        (shared._replace(t_most=-shared.t_most), "t_most must be finite"),
        (shared._replace(t_most=shared.t_most[:1]), "t_most must have shape"),
    ):
        with pytest.raises(RuntimeError, match=said):
            ops.cpu_shard_tables(*problem, *wrong_layout, True)
    with pytest.raises(RuntimeError, match="as many queries as keys"):
        ops.cpu_shard_tables(*problem._replace(query=query[:, 1:]), *shared, True)
    with pytest.raises(RuntimeError, match="z must have shape"):
        ops.cpu_shard_rows(
            grad_out, None, *results[:2], results[2][:1], *problem, *shared, *earlier
        )
    gradient = grad_out, None, *results[:2], *problem, *shared
    with pytest.raises(RuntimeError, match="slope_table must be given"):
        ops.cpu_shard_backward(*gradient, *ShardTables.empty(shared, 3, False), None)
    with pytest.raises(RuntimeError, match="later must have shape"):
        ops.cpu_shard_backward(*gradient, *earlier, earlier.table[:1])
    # Queries beyond the layout: no result, and no row outside of a panel.
    narrow = shared._replace(t_most=shared.t_most / 2)
    _, lse, _ = ops.cpu_shard_forward(*problem, *narrow, *ShardTables.empty(narrow, 3, True))
    assert lse.isnan().all()
