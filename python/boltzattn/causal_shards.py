"""Causal attention over shards in several processes: the exchange of the tables of a scan.

Process r holds the tokens after those of process r - 1. Each gathers the tables of all shards, adds
up those before its own, and starts its scan from there; backward does the same from the end. The
volume does not depend on the number of tokens (`transform.scan_shards`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boltzattn.agreement import Agreement, collective
from boltzattn.dispatch.torch_modes import without_autocast
from boltzattn.problem import OutputGradients, Problem, Saved, accumulate_dtype
from boltzattn.transform.scan_layout import make_scan_layout
from boltzattn.transform.scan_shards import (
    ScanStages,
    ShardResults,
    ShardTables,
    SharedScan,
    ends_before,
    join,
    join_rows,
)
from boltzattn.transform.stages import step_of_keys


def check_lengths(problem: Problem) -> None:
    n_q, n_k = problem.query.shape[-2], problem.key.shape[-2]
    if n_q != n_k:
        raise ValueError(
            "query must have as many tokens as key on every rank with is_causal=True, got "
            f"{n_q} and {n_k}: shards of both hold the same tokens"
        )


def wants_gradients(problem: Problem) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in problem.inputs)


@dataclass
class CausalShared:
    """What a process knows after forward."""

    scan: SharedScan
    earlier: ShardTables  # of all keys before this shard
    before: list[Tensor]  # the ends of all keys before each shard, and of all
    results: ShardResults


@dataclass
class CausalExchange:
    """One process's side of a causal call of rank 1."""

    problem: Problem  # detached
    group: dist.ProcessGroup | None
    stages: ScanStages
    agreed: Agreement

    @property
    def most_keys(self) -> int:
        """An upper bound of the number of keys, in steps: only its logarithm matters."""
        in_a_shard = max((-self.agreed.numbers[:-1].view(-1, 7)[:, 5]).tolist(), default=0.0)
        return int(step_of_keys(in_a_shard * dist.get_world_size(self.group)))

    def scan(self) -> SharedScan | None:
        """The layouts that all processes use; None if a head is not for a scan."""
        problem, numbers = self.problem, self.agreed.numbers[:-1].view(-1, 7)
        t_low, t_high, s_low, s_high, n_q, n_k, regular = numbers.unbind(1)
        if not bool((regular == 1.0).all()):
            return None
        ends = torch.maximum((t_low * problem.scale).abs(), (t_high * problem.scale).abs())
        t_most = torch.where(n_q < 0, ends, 0.0)
        extent = torch.where(n_k < 0, -s_high - s_low, 0.0)
        widest = float((t_most * extent).max()) if len(numbers) else 0.0
        # One number of panels for all heads: more than a head needs do no harm.
        dtype = self.stages.dtype(problem)
        layout = make_scan_layout(dtype, widest, 1.0, self.most_keys)
        if layout is None:
            return None
        return SharedScan(layout.nodes, layout.levels, layout.ratio, t_most.contiguous())

    @property
    def with_slopes(self) -> bool:
        """Whether a process wants gradients: then tables of slopes travel, too."""
        return bool(self.agreed.numbers[-1] < 0)

    def sizes(self, scan: SharedScan) -> tuple[int, int]:
        """How many numbers a process sends in forward, and in backward."""
        sent = ShardTables.empty(scan, self.problem.value.shape[-1], self.with_slopes)
        return sent.numel(), sent.table.numel()

    def gather(self, x: Tensor, what: str) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        collective(lambda: dist.all_gather(parts, x, group=self.group), f"all-gather of {what}")
        return parts

    @torch.no_grad()
    def share(self) -> CausalShared | None:
        """Forward; None if a head is not for a scan, which all processes find alike."""
        scan = self.scan()
        if scan is None:
            return None
        problem, stages, me = self.problem, self.stages, dist.get_rank(self.group)
        none = ShardTables.empty(scan, problem.value.shape[-1], self.with_slopes)
        with without_autocast(problem.query.device.type):
            own = stages.tables(problem, scan, self.with_slopes)
            parts = self.gather(own.message(), "tables")
            shards = [ShardTables.of_message(part, none) for part in parts]
            whole = join(scan, shards, none)
            # No sum of a row may overflow, since one process alone could not go another way.
            count, _, largest = whole.keys.unbind(1)
            limit = torch.finfo(accumulate_dtype(problem.query.dtype)).max / 8
            if not bool((count * largest <= limit).all() and whole.table.isfinite().all()):
                return None
            earlier = join(scan, shards[:me], none)
            results = stages.forward(problem, scan, earlier)
        return CausalShared(scan, earlier, ends_before(shards, none), results)


class CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        exchange: CausalExchange,
        shared: CausalShared,
    ) -> Saved:
        ctx.save_for_backward(query, key, value, *shared.results)
        ctx.exchange, ctx.scan = exchange, shared.scan
        ctx.earlier, ctx.before = shared.earlier, shared.before
        ctx.set_materialize_grads(False)
        return Saved(shared.results.out, shared.results.lse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
        query, key, value, *results = ctx.saved_tensors
        exchange, scan, earlier, before = ctx.exchange, ctx.scan, ctx.earlier, ctx.before
        stages, me = exchange.stages, dist.get_rank(exchange.group)
        problem = exchange.problem._replace(query=query, key=key, value=value)
        if grad_out is None:
            grad_out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        grads = OutputGradients(grad_out, grad_lse)
        call = grads, ShardResults._make(results), problem, scan, earlier
        with without_autocast(query.device.type):
            tables = exchange.gather(stages.query_table(*call), "sums over queries")
            later = join_rows(scan, tables[me + 1 :], before[me + 1 : -1], before[me + 1])
            return *stages.backward(*call, later), None, None
