"""Attention over a sequence that is spread over several processes (context parallelism).

Every process holds some of the queries and some of the keys and values. What the queries need to
know of all keys is a few hundred sums a head at rank 1 (docs/transform.md), and some thousands at
rank 2 (docs/tensor.md), so processes exchange those instead of keys and values: an all-reduce of
the extents, one of the sums over keys, and in backward one of the sums over queries. The volume
does not depend on the length of the sequence.
Causal calls gather tables of the same kind instead (`causal_shards`).

Every process of the group must make the same calls, forward and backward. The first message tells
whether they do (`agreement`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from boltzattn import functional
from boltzattn.agreement import (
    EXCHANGES,
    Agreement,
    agree,
    collective,
    dtype_number,
    mask_number,
    reduce,
    shape_numbers,
)
from boltzattn.causal_shards import (
    CausalAttention,
    CausalExchange,
    check_lengths,
    wants_gradients,
)
from boltzattn.dispatch import backends
from boltzattn.dispatch.backends import Request
from boltzattn.dispatch.torch_modes import without_autocast
from boltzattn.problem import SCORES, OutputGradients, Problem, Saved, accumulate_dtype
from boltzattn.transform.layout import Range
from boltzattn.transform.scan_shards import ScanStages
from boltzattn.transform.stages import (
    LEVEL,
    Extent,
    SharedRange,
    Stages,
    TensorRange,
    step_of_keys,
)
from boltzattn.transform.tensor import MOST_AXES, shared_layout
from boltzattn.transform.tolerances import LARGEST_PRODUCT
from boltzattn.validation import Call, validate

# The layout weighs its cost by tokens. That is fixed, so that the volume of communication is the
# same for every length in use.
TOKENS_WEIGHED = 2**20

# Rows that look at gathered keys through one mask: its memory stays linear in n.
MASKED_ROWS = 1024

__all__ = ["attention", "explain"]

_log = logging.getLogger("boltzattn")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    key_bias: Tensor | None = None,
    score: str = "dot",
    alibi_slopes: Tensor | None = None,
    exchange: str = "moments",
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the local queries to the keys of all processes of the group.

    Args:
        query: `[..., H, n_q, rank]`, this process's queries. Shards may have any length, also 0.
        key: `[..., H, n_k, rank]`, this process's keys.
        value: `[..., H, n_k, dv]`.
        group: the processes; default all of them.
        scale, enable_gqa, return_lse: as in `boltzattn.attention`.
        key_padding_mask: `[batch..., n_k]` of the local keys.
        is_causal: the shards hold consecutive tokens in the order of the ranks, and a query sees
            the keys up to its own token. Each shard has as many queries as keys.
        key_bias: `[..., H, n_k]`, added to the logits of the local keys.
        score, alibi_slopes: as in `boltzattn.attention`. With slopes the shards are as for
            `is_causal`. These three options take "gather", whatever `exchange` says.
        exchange: "moments" sends sums over keys, a volume independent of n, for rank 1, and for
            ranks up to 4 without `is_causal`. "gather" sends all keys and values to every
            process, for any rank.
        backend: for "moments", "cpu" (C++, CPU tensors, rank 1) or "reference" (plain torch in
            fp64, on the device of the tensors); "auto" takes the first that can. The same in all
            processes. For "gather", as in `boltzattn.attention`.

    All three may be DTensors that are sharded along dimension -2 over one mesh dimension; the
    result is then one, too.

    Returns:
        `[..., H, n_q, dv]` for the local queries. Differentiable once; backward communicates, so
        every process must run it. A head that the transform does not serve (see docs/transform.md)
        makes the call fall back to "gather", on all processes alike, and is logged.

    Example:
        >>> import tempfile
        >>> import torch.distributed as dist
        >>> store = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", store, rank=0, world_size=1)
        >>> q, k, v = torch.randn(4, 1000, 1), torch.randn(4, 1000, 1), torch.randn(4, 1000, 8)
        >>> boltzattn.distributed.attention(q, k, v).shape
        torch.Size([4, 1000, 8])
        >>> dist.destroy_process_group()
    """
    _check_group()
    if _is_sharded(query):
        return _attend_to_shards(
            (query, key, value),
            group,
            scale=scale,
            enable_gqa=enable_gqa,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            key_bias=key_bias,
            score=score,
            alibi_slopes=alibi_slopes,
            exchange=exchange,
            backend=backend,
            return_lse=return_lse,
        )
    options = scale, enable_gqa, key_padding_mask, is_causal, key_bias, score, alibi_slopes
    shard = _Shard(query, key, value, *options, exchange, backend, group)
    side, agreed = _begin(shard)
    if side.exchanges_sums:
        call, results = side.call, _exchanged(side, agreed, group)
        if results is not None:
            return (call.out(results), call.lse(results)) if return_lse else call.out(results)
        _log.info("distributed.attention: not served by moments; keys and values are gathered")
    return _gathered(shard, agreed.keys, return_lse)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    key_bias: Tensor | None = None,
    score: str = "dot",
    alibi_slopes: Tensor | None = None,
    exchange: str = "moments",
    backend: str = "auto",
) -> str:
    """What `attention` would send, in bytes of what a process gives to the collectives. Collective.

    Args:
        query, key, value, group, scale, enable_gqa: as in `boltzattn.distributed.attention`.
        key_padding_mask, is_causal, key_bias, score: as in `boltzattn.distributed.attention`.
        alibi_slopes, exchange, backend: as in `boltzattn.distributed.attention`.

    Example:
        >>> import tempfile
        >>> store = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", store, rank=0, world_size=1)
        >>> q, v = torch.rand(4, 1000, 1), torch.rand(4, 1000, 8)
        >>> print(boltzattn.distributed.explain(q, q, v))
        exchange moments, 1 process, 4 heads, backend cpu
          forward: all-reduce of extents ... bytes, of moments ... bytes
          backward: all-reduce of sums over queries ... bytes
          the same for every number of tokens up to 16,777,216
        >>> dist.destroy_process_group()
    """
    _check_group()
    if _is_sharded(query):
        sharded: Any = (query, key, value)
        group = sharded[0].device_mesh.get_group()
        query, key, value = (x.to_local() for x in sharded)
    options = scale, enable_gqa, key_padding_mask, is_causal, key_bias, score, alibi_slopes
    shard = _Shard(query, key, value, *options, exchange, backend, group)
    side, agreed = _begin(shard)
    processes = _count(dist.get_world_size(group), "process", "processes")
    if side.scan_stages is not None:
        causal = CausalExchange(_detached(side.call.problem), group, side.scan_stages, agreed)
        scan = causal.scan()
        if scan is not None:
            tables, query_sums = causal.sizes(scan)
            heads = _count(len(scan.t_most), "head", "heads")
            slopes = "tables and their slopes" if causal.with_slopes else "tables"
            return (
                f"exchange moments, causal, {processes}, {heads}, backend {side.backend}\n"
                f"  forward: all-reduce of extents {agreed.sent} bytes, all-gather of {slopes} "
                f"{8 * tables} bytes\n"
                f"  backward: all-gather of sums over queries {8 * query_sums} bytes\n"
                f"  the same for every number of tokens up to {causal.most_keys:,}"
            )
    if side.stages is not None:
        problem = side.call.problem
        found = _shared_ranges(agreed, problem, group)
        if not bool((found.ranges[:, LEVEL] < 0).any()):
            moments, query_sums = side.stages.sizes(problem, found.ranges)
            return (
                f"exchange moments, {processes}, {_count(len(found.ranges), 'head', 'heads')}, "
                f"backend {side.backend}\n"
                f"  forward: all-reduce of extents {agreed.sent} bytes, of moments {8 * moments} "
                f"bytes\n  backward: all-reduce of sums over queries {8 * query_sums} bytes\n"
                f"  the same for every number of tokens up to {step_of_keys(found.keys):,}"
            )
    rows = [x.numel() // max(1, x.shape[-2]) for x in (key, value)]  # numbers a token
    sent = [n * max(agreed.keys) * key.itemsize for n in rows]
    back = [n * sum(agreed.keys) * accumulate_dtype(key.dtype).itemsize for n in rows]
    why = "the transform does not serve these logits"
    if exchange == "gather":
        why = "asked for"
    elif shard.is_biased:
        why = "key_bias, alibi_slopes and Gaussian scores need all keys"
    return (
        f"exchange gather ({why}), {processes}\n"
        f"  forward: all-reduce of lengths {agreed.sent} bytes, all-gather of keys {sent[0]} "
        f"bytes, of values {sent[1]} bytes\n"
        f"  backward: all-reduce of gradients of keys {back[0]} bytes, of values {back[1]} bytes\n"
        "  grows with the number of tokens"
    )


def check_exchange(exchange: str) -> None:
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be 'moments' or 'gather', got {exchange!r}")


def _check_group() -> None:
    if not dist.is_initialized():
        raise ValueError(
            "group must exist before the call: torch.distributed is not initialised; call "
            "torch.distributed.init_process_group first"
        )


def _count(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


# ---- the beginning of a call ----


class _Shard(NamedTuple):
    """The arguments of one process."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    enable_gqa: bool
    key_padding_mask: Tensor | None
    is_causal: bool
    key_bias: Tensor | None
    score: str
    alibi_slopes: Tensor | None
    exchange: str
    backend: str
    group: dist.ProcessGroup | None

    @property
    def is_biased(self) -> bool:
        """Whether logits are more than products of queries and keys."""
        return (
            self.key_bias is not None or self.alibi_slopes is not None or self.score == "gaussian"
        )


@dataclass
class _Side:
    """One process's side of a valid call; with stages of one kind if sums are exchanged."""

    call: Call
    backend: str = ""
    stages: Stages | None = None
    scan_stages: ScanStages | None = None  # of a causal call
    extents: Tensor | None = None  # of the local queries and keys

    @property
    def exchanges_sums(self) -> bool:
        return self.stages is not None or self.scan_stages is not None


def _begin(shard: _Shard) -> tuple[_Side, Agreement]:
    """Check the arguments on all processes, and share the extents. Collective.

    A process whose arguments are wrong must not leave the others waiting, so it raises only after
    it has told them.
    """
    side: Any = None
    facts: dict[str, float] = {}
    keys, numbers, error = 0, _empty_message(shard), None
    try:
        check_exchange(shard.exchange)
        side = _Side(
            validate(
                shard.query,
                shard.key,
                shard.value,
                scale=shard.scale,
                enable_gqa=shard.enable_gqa,
                key_padding_mask=shard.key_padding_mask,
                is_causal=shard.is_causal,
                key_bias=shard.key_bias,
                score=shard.score,
                alibi_slopes=shard.alibi_slopes,
                backend=shard.backend,
            )
        )
        facts.update(_facts(shard, side.call))
        keys = shard.key.shape[-2]
        if shard.is_causal or shard.alibi_slopes is not None:
            check_lengths(side.call.problem)
        if shard.exchange == "moments" and not shard.is_biased:
            side.backend, stages = _take_stages(side.call)
            facts["backend in use"] = list(backends.BACKENDS).index(side.backend)
            # Extents are those of all tokens, whoever sees them.
            problem = _detached(side.call.problem)._replace(is_causal=False)
            side.extents = stages.extents(problem)
            wide = problem.query.shape[-1] > 1
            numbers = side.extents.flatten() if wide else _numbers(side.extents)
            if shard.is_causal:
                side.scan_stages = stages
                wanted = -1.0 if wants_gradients(side.call.problem) else 0.0
                numbers = torch.cat([numbers, numbers.new_tensor([wanted])])
            else:
                side.stages = stages
    except Exception as failure:
        error = failure
    return side, agree(facts, keys, numbers, error, shard.group)


def _empty_message(shard: _Shard) -> Tensor:
    """No numbers, on the device that the group communicates from."""
    device = torch.device("cuda" if dist.get_backend(shard.group) == "nccl" else "cpu")
    if isinstance(shard.query, Tensor):
        device = shard.query.device
    return torch.empty(0, dtype=torch.float64, device=device)


def _facts(shard: _Shard, call: Call) -> dict[str, float]:
    """What the other processes must have alike."""
    problem, choice = call.problem, call.choice
    return {
        "exchange": EXCHANGES.index(shard.exchange),
        "dtype": dtype_number(problem.query.dtype),
        "key.dtype": dtype_number(shard.key.dtype),
        "value.dtype": dtype_number(shard.value.dtype),
        **shape_numbers("query", shard.query),
        **shape_numbers("key", shard.key),
        **shape_numbers("value", shard.value),
        "scale": problem.scale,
        "is_causal": problem.is_causal,
        "enable_gqa": bool(shard.enable_gqa),
        "key_padding_mask": mask_number(shard.key_padding_mask),
        "key_bias": mask_number(shard.key_bias),
        "score": SCORES.index(shard.score),
        "alibi_slopes": mask_number(shard.alibi_slopes),
        "method": ("auto", *backends.METHODS).index(choice.method),
        "backend": ("auto", *backends.BACKENDS).index(choice.backend),
    }


def _take_stages(call: Call) -> tuple[str, Any]:
    """The backend that serves "moments", and its stages."""
    problem, choice = call.problem, call.choice
    rank = problem.query.shape[-1]
    operation = "tensor_stages" if rank > 1 else "scan_stages" if problem.is_causal else "stages"
    if choice.method == "direct":
        raise ValueError(
            "method must be 'transform' for exchange='moments', got 'direct' by use_method; use "
            "exchange='gather'"
        )
    most = 1 if problem.is_causal else MOST_AXES
    if rank > most:
        causal = " with is_causal" if problem.is_causal else ""
        raise ValueError(
            f"query must have rank {most} at most for exchange='moments'{causal}, got rank {rank}; "
            "exchange='gather' takes any rank, at a volume that grows with n"
        )
    try:
        taken = backends.select(Request.of(problem), operation, choice.backend).name
    except ValueError as error:
        able = [name for name, x in backends.BACKENDS.items() if operation in x.operations]
        raise ValueError(
            f"backend must be one of {', '.join(map(repr, able))} for exchange='moments': "
            f"{error}; use backend='reference' or exchange='gather'"
        ) from None
    return taken, backends.kernels(taken, operation)


def _detached(problem: Problem) -> Problem:
    return Problem._make(x.detach() if isinstance(x, Tensor) else x for x in problem)


def _numbers(extents: Tensor) -> Tensor:
    """Seven numbers a head, whose least over all processes is the extent of the whole."""
    queries: Any
    keys: Any
    queries, keys = (Extent._make(of_one.unbind(1)) for of_one in extents.unbind(1))
    numbers = [
        *(queries.low, -queries.high, keys.low, -keys.high),
        *(-queries.tokens, -keys.tokens),
        torch.minimum(queries.regular, keys.regular),
    ]
    return torch.stack(numbers, 1).flatten()


def _exchanged(side: _Side, agreed: Agreement, group: dist.ProcessGroup | None) -> Any:
    """The results by sums that processes exchange; None if a head is not served by them."""
    problem = side.call.problem
    if side.scan_stages is not None:
        causal = CausalExchange(_detached(problem), group, side.scan_stages, agreed)
        known = causal.share()
        return None if known is None else CausalAttention.apply(*problem.inputs, causal, known)
    assert side.stages is not None
    exchange = _Exchange(_detached(problem), group, side.stages)
    shared = exchange.share(side.extents, agreed)
    return None if shared is None else _Moments.apply(*problem.inputs, exchange, shared)


# ---- moments ----


@dataclass
class _SharedRanges:
    ranges: Tensor  # [heads, 8]: a SharedRange of every head
    keys: int  # of the head with most of them, at most


def _shared_ranges(
    agreed: Agreement, problem: Problem, group: dist.ProcessGroup | None
) -> _SharedRanges:
    """The range of everybody's queries and keys."""
    processes, scale = dist.get_world_size(group), problem.scale
    if problem.query.shape[-1] > 1:
        return _shared_tensor_ranges(agreed.numbers, problem, processes)
    ranges, most_in_a_head = [], 0.0
    for t_low, t_high, s_low, s_high, n_q, n_k, regular in agreed.numbers.view(-1, 7).tolist():
        t_min, t_max = sorted((t_low * scale, -t_high * scale))
        # An upper bound: exact counts would be another all-reduce, and only their logarithm
        # matters.
        n_k = -n_k * processes
        most_keys, most_in_a_head = step_of_keys(n_k), max(most_in_a_head, n_k)
        level = 0
        if n_q < 0 and n_k > 0:
            span = Range(t_min, t_max, s_low, -s_high, int(most_keys))
            # A NaN fails the comparison, too.
            served = regular == 1.0 and span.largest_product <= LARGEST_PRODUCT
            level = 0 if served else -1
        weighed = TOKENS_WEIGHED if n_q < 0 else 0
        ranges.append(
            SharedRange(t_min, t_max, s_low, -s_high, most_keys, weighed, TOKENS_WEIGHED, level)
        )
    table = torch.tensor(ranges, dtype=torch.float64, device="cpu")
    return _SharedRanges(table.view(-1, len(SharedRange._fields)), int(most_in_a_head))


def _shared_tensor_ranges(numbers: Tensor, problem: Problem, processes: int) -> _SharedRanges:
    """The same for ranks 2 to 4."""
    rank, scale = problem.query.shape[-1], problem.scale
    ranges, most_in_a_head = [], 0.0
    for row in numbers.view(-1, 4 * rank + 3).tolist():
        t_low, t_high, s_low, s_high = (row[rank * k : rank * (k + 1)] for k in range(4))
        n_q, n_k, regular = row[4 * rank :]
        ends = [sorted((a * scale, -b * scale)) for a, b in zip(t_low, t_high, strict=True)]
        t_min, t_max = ([x[k] for x in ends] for k in range(2))
        n_k = -n_k * processes
        most_in_a_head = max(most_in_a_head, n_k)
        weighed = TOKENS_WEIGHED if n_q < 0 else 0
        of = TensorRange(t_min, t_max, s_low, [-x for x in s_high], step_of_keys(n_k), weighed, 0)
        served = regular == 1.0 and shared_layout(of, problem.query.dtype, problem.value.shape[-1])
        if n_q < 0 and n_k > 0 and not served:
            of = of._replace(level=-1)
        ranges.append(of.row)
    table = torch.tensor(ranges, dtype=torch.float64, device="cpu")
    return _SharedRanges(table.view(-1, 4 * rank + 3), int(most_in_a_head))


@dataclass
class _Shared:
    """What all processes know after forward, and the local results."""

    ranges: Tensor
    moments: Tensor
    results: Saved


@dataclass
class _Exchange:
    """One process's side of a call."""

    problem: Problem  # detached
    group: dist.ProcessGroup | None
    stages: Stages

    @torch.no_grad()
    def share(self, extents: Tensor | None, agreed: Agreement) -> _Shared | None:
        """Forward; None if a head is not for the transform, which all processes find alike."""
        problem, stages = self.problem, self.stages
        ranges = _shared_ranges(agreed, problem, self.group).ranges
        with without_autocast(problem.query.device.type):
            for _ in range(stages.levels):
                if bool((ranges[:, LEVEL] < 0).any()):
                    return None
                moments = stages.moments(problem, extents, ranges)
                reduce(moments, dist.ReduceOp.SUM, self.group, "all-reduce of moments")
                if not bool(moments.isfinite().all()):  # NaN or inf among the values
                    return None
                out, lse, served = stages.evaluate(problem, ranges, moments)
                if bool(served.all()):
                    return _Shared(ranges, moments, Saved(out, lse))
                ranges[~served, LEVEL] += 1
        return None


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, exchange: _Exchange, shared: _Shared
    ) -> Saved:
        ctx.save_for_backward(query, key, value, shared.ranges, shared.moments)
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return shared.results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
        query, key, value, ranges, moments = ctx.saved_tensors
        exchange = ctx.exchange
        stages, group = exchange.stages, exchange.group
        problem = exchange.problem._replace(query=query, key=key, value=value)
        if grad_out is None:
            grad_out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        grads = OutputGradients(grad_out, grad_lse)
        with without_autocast(query.device.type):
            grad_query, sums = stages.query_moments(grads, problem, ranges, moments)
            reduce(sums, dist.ReduceOp.SUM, group, "all-reduce of sums over queries")
            grad_key, grad_value = stages.adjoint(problem, ranges, moments, sums)
        return grad_query, grad_key, grad_value, None, None


# ---- gather ----


def _gathered(shard: _Shard, counts: list[int], return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """`counts` says how many keys every process has."""
    key, value, group = shard.key, shard.value, shard.group
    mask: Any = shard.key_padding_mask
    if mask is not None:
        # Masks may be broadcast in different ways by different processes.
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (shard.query, key, value)))
        mask = mask.expand(*batch, key.shape[-2])
        # gloo gathers no bools.
        bits = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
        mask = _Gather.apply(bits[..., None], counts, group)[..., 0].to(mask.dtype)
    bias: Any = shard.key_bias
    if bias is not None:
        lead = torch.broadcast_shapes(shard.query.shape[:-2], value.shape[:-2])
        bias = _Gather.apply(bias.expand(*lead, key.shape[-2])[..., None], counts, group)[..., 0]
    attend: Any = functional.attention  # overloads know no bool
    attend = partial(
        attend,
        scale=shard.scale,
        enable_gqa=shard.enable_gqa,
        score=shard.score,
        alibi_slopes=shard.alibi_slopes,
        backend=shard.backend,
    )
    keys, values = _Gather.apply(key, counts, group), _Gather.apply(value, counts, group)
    everything = _Keys(keys, values, mask, bias)
    if not shard.is_causal and shard.alibi_slopes is None:
        return attend(shard.query, return_lse=return_lse, **everything.up_to(sum(counts)))
    first = sum(counts[: dist.get_rank(group)])
    if not shard.is_causal:
        rows = _in_place(shard.query, first)
        out, lse = attend(rows, return_lse=True, **everything.up_to(sum(counts)))
        out, lse = out[..., first:, :], lse[..., first:]
    else:
        in_place = shard.query.shape[-1] == 1 or shard.alibi_slopes is not None
        out, lse = _attend_causally(attend, shard.query, everything, first, in_place)
    return (out, lse) if return_lse else out


class _Keys(NamedTuple):
    """The keys of all processes, and what belongs to them."""

    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None
    key_bias: Tensor | None

    def up_to(self, end: int) -> dict[str, Tensor | None]:
        """The first of them, as arguments of attention."""
        mask, bias = self.key_padding_mask, self.key_bias
        return {
            "key": self.key[..., :end, :],
            "value": self.value[..., :end, :],
            "key_padding_mask": None if mask is None else mask[..., :end],
            "key_bias": None if bias is None else bias[..., :end],
        }


def _in_place(query: Tensor, first: int) -> Tensor:
    """Queries with others in front, so that they are at their places in the sequence."""
    front = query.new_zeros(*query.shape[:-2], first, query.shape[-1])
    return torch.cat([front, query], -2)


def _attend_causally(
    attend: Any, query: Tensor, everything: _Keys, first: int, in_place: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries `first`, `first` + 1, ... of a sequence with all its keys."""

    def of_rows(rows: Tensor, end: int, **options: Any) -> tuple[Tensor, Tensor]:
        return attend(rows, return_lse=True, **everything.up_to(end), **options)

    n = query.shape[-2]
    if in_place or first == 0:  # in linear time at rank 1
        out, lse = of_rows(_in_place(query, first), first + n, is_causal=True)
        return out[..., first:, :], lse[..., first:]
    parts = []
    for start in range(0, max(1, n), MASKED_ROWS):  # also without rows: backward communicates
        rows = query[..., start : start + MASKED_ROWS, :]
        count, before = rows.shape[-2], first + start
        seen = rows.new_ones(count, before + count, dtype=torch.bool).tril(before)
        parts.append(of_rows(rows, before + count, attn_mask=seen))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, -2), torch.cat(lses, -1)


class _Gather(torch.autograd.Function):
    """The rows of all processes one after the other, from `counts` rows (dimension -2) of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.counts, ctx.group = counts, group
        padded = x.new_zeros(*x.shape[:-2], max(counts), x.shape[-1])
        padded[..., : x.shape[-2], :] = x
        parts = [torch.empty_like(padded) for _ in counts]
        collective(lambda: dist.all_gather(parts, padded, group=group), "all-gather of rows")
        return torch.cat([p[..., :n, :] for p, n in zip(parts, counts, strict=True)], -2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = grad.to(accumulate_dtype(grad.dtype), copy=True)
        total = total.contiguous()
        reduce(total, dist.ReduceOp.SUM, ctx.group, "all-reduce of gradients")
        mine = dist.get_rank(ctx.group)
        first = sum(ctx.counts[:mine])
        return total.narrow(-2, first, ctx.counts[mine]).to(grad.dtype), None, None


def _is_sharded(x: object) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def _attend_to_shards(
    tensors: tuple[Any, Any, Any], group: dist.ProcessGroup | None, **call: Any
) -> Any:
    """The same for DTensors: their mesh says what the group is."""
    from torch.distributed.tensor import DTensor, Shard

    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        wanted = (Shard(x.ndim - 2),)
        if not isinstance(x, DTensor) or x.placements != wanted or x.device_mesh.ndim != 1:
            raise ValueError(
                f"{name} must be a DTensor sharded along dimension -2 on a mesh of one dimension "
                "if query is one, got "
                f"{x.placements if isinstance(x, DTensor) else type(x).__name__}; use redistribute"
            )
    query, _, value = tensors
    mesh = query.device_mesh
    if group is not None:
        raise ValueError("group must be None for DTensors: their mesh names the processes")
    local: Any = attention(*(x.to_local() for x in tensors), group=mesh.get_group(), **call)
    out, lse = local if call["return_lse"] else (local, None)
    shape = torch.Size((*query.shape[:-1], value.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        out.contiguous(), mesh, query.placements, run_check=False, shape=shape, stride=stride
    )
    if lse is None:
        return whole
    shape = query.shape[:-1]
    stride = torch.empty(shape, device="meta").stride()
    return whole, DTensor.from_local(
        lse.contiguous(),
        mesh,
        [Shard(lse.ndim - 1)],
        run_check=False,
        shape=shape,
        stride=stride,
    )
