"""Attention over sequences of different lengths, packed end to end: no padding, no copies.

Tensors are canonical (see `reference`) with the rows of all sequences one after the other: query
`[*L, total_q, rank]`, key `[*L, total_k, rank]`, value `[*L, total_k, dv]`. Sequence b has rows
`cu_seqlens[b] : cu_seqlens[b + 1]` and attends to itself alone. Every sequence gets the method that
suits its length.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch import plan
from boltzattn.dispatch.backends import Request
from boltzattn.dispatch.torch_modes import exact
from boltzattn.ops import attention as ops
from boltzattn.ops.autograd import AttentionBackward
from boltzattn.ops.layer import above_autograd
from boltzattn.reference.direct import accumulate_dtype

_CALL = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, float scale, bool is_causal, str method, "
_CALL += "str backend"
ops.library.define(
    f"packed_forward(Tensor query, Tensor key, Tensor value, {_CALL}) -> (Tensor out, Tensor lse)"
)
ops.library.define(
    "packed_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    f"Tensor out, Tensor lse, {_CALL}) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)


def rows_last(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    **refused: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check a packed call and turn `[total, heads, width]` into `[heads, total, width]`.

    `refused` are arguments that packed calls do not take: (name, given).
    """
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(starts, Tensor):
            raise TypeError(
                f"{name} must be an int32 or int64 tensor [sequences + 1], got "
                f"{type(starts).__name__}; cu_seqlens_q and cu_seqlens_k are given together"
            )
        if starts.dtype not in (torch.int32, torch.int64) or starts.ndim != 1 or len(starts) < 1:
            raise ValueError(
                f"{name} must be int32 or int64 of shape [sequences + 1], got {starts.dtype} "
                f"{list(starts.shape)}"
            )
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_k must have as many entries as cu_seqlens_q, "
            f"{len(cu_seqlens_q)}, got {len(cu_seqlens_k)}"
        )
    for name, given in refused.items():
        if given:
            raise ValueError(
                f"{name} must not be given together with cu_seqlens: packed sequences take no "
                "masks and no dropout; shorten the sequences instead of masking their ends"
            )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if isinstance(x, Tensor) and x.ndim != 3:
            raise ValueError(
                f"{name} must be [total, heads, width] with cu_seqlens, got {list(x.shape)}"
            )
    return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)


def _bounds(name: str, starts: Tensor, total: int) -> list[int]:
    bounds = starts.tolist()
    if bounds[0] != 0 or bounds[-1] != total or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(
            f"{name} must rise from 0 to the number of rows, {total}, got {_shortened(bounds)}"
        )
    return bounds


def _shortened(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{numbers[0]}, ..., {numbers[-1]}]"


class _Sequences:
    """The sequences of a call, with the plan of each."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        is_causal: bool,
        method: str,
        backend: str,
    ) -> None:
        query_bounds = _bounds("cu_seqlens_q", cu_seqlens_q, query.shape[-2])
        key_bounds = _bounds("cu_seqlens_k", cu_seqlens_k, key.shape[-2])
        self.starts = [
            torch.tensor(bounds, dtype=torch.int64) for bounds in (query_bounds, key_bounds)
        ]
        lengths = [
            [b - a for a, b in itertools.pairwise(bounds)] for bounds in (query_bounds, key_bounds)
        ]
        sizes = list(zip(lengths[0], lengths[1], strict=True))
        heads, rank, dv = query.shape[:-2].numel(), query.shape[-1], value.shape[-1]
        requests = {
            (n_q, n_k): Request(
                query.device.type, query.dtype, heads, n_q, n_k, rank, dv, is_causal=is_causal
            )
            for n_q, n_k in set(sizes)
        }
        plans = {size: plan.choose(one, method, backend) for size, one in requests.items()}
        self.requests = [requests[size] for size in sizes]
        self.plans = [plans[size] for size in sizes]
        self.rows = [
            (slice(q, q + n_q), slice(k, k + n_k))
            for q, k, (n_q, n_k) in zip(query_bounds, key_bounds, sizes, strict=False)
        ]
        by_transform = [taken.method == "transform" for taken in self.plans]
        self.by_transform = torch.tensor(by_transform, dtype=torch.bool)
        # One operator for all.
        self.together = all(taken.backend == "cpu" for taken in self.plans)
        # Halved sequences (see `causal`) accumulate in out, and are differentiated one by one.
        self.halved = [is_causal and transformed for transformed in by_transform]


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    method: str,
    backend: str,
) -> str:
    """The plans of a packed call in words: for each, how many sequences take it, and why."""
    starts = cu_seqlens_q, cu_seqlens_k
    sequences = _Sequences(query, key, value, *starts, is_causal, method, backend)
    taken: dict[tuple[str, str], list[Request]] = {}
    for one, request in zip(sequences.plans, sequences.requests, strict=True):
        taken.setdefault((one.method, one.backend), []).append(request)
    parts = [f"packed, {len(sequences.plans)} sequences, {len(taken)} plans"]
    for requests in taken.values():
        longest = max(requests, key=lambda r: (r.n_q * r.n_k, r.n_q, r.n_k))
        parts.append(f"{len(requests)} sequences, the longest of them:")
        parts.append(plan.describe(longest, method, backend))
    return "\n".join(parts)


def _rows_first(x: Tensor, width: int) -> Tensor:
    """An empty `[*L, total, width]` that lies in memory as `[total, *L, width]`."""
    return x.new_empty(x.shape[-2], *x.shape[:-2], width).movedim(0, -2)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    is_causal: bool,
    method: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    starts = cu_seqlens_q, cu_seqlens_k
    sequences = _Sequences(query, key, value, *starts, is_causal, method, backend)
    dtype = query.dtype
    if sequences.together and any(sequences.halved):
        query, key, value = (x.to(accumulate_dtype(dtype)) for x in (query, key, value))
    out = _rows_first(query, value.shape[-1])
    with exact(query.device.type):
        if sequences.together:
            lse = torch.ops.boltzattn.cpu_packed_forward(
                query,
                key,
                value,
                *sequences.starts,
                sequences.by_transform,
                scale,
                is_causal,
                out,
            )
            return out.to(dtype), lse
        lse = query.new_empty(query.shape[:-1], dtype=torch.float64)
        for taken, (q, k) in zip(sequences.plans, sequences.rows, strict=True):
            forward, _ = taken.kernels
            out[..., q, :], lse[..., q] = forward(
                query[..., q, :],
                key[..., k, :],
                value[..., k, :],
                None,
                None,
                None,
                scale,
                0.0,
                is_causal,
            )
    return out, lse


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    is_causal: bool,
    method: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    starts = cu_seqlens_q, cu_seqlens_k
    sequences = _Sequences(query, key, value, *starts, is_causal, method, backend)
    rank = query.shape[-1]
    grads = (
        _rows_first(query, rank),
        _rows_first(key, rank),
        _rows_first(value, value.shape[-1]),
    )
    lse = lse.contiguous()
    with exact(query.device.type):
        if sequences.together:
            torch.ops.boltzattn.cpu_packed_backward(
                grad_out,
                grad_lse,
                query,
                key,
                value,
                out,
                lse,
                *sequences.starts,
                sequences.by_transform,
                scale,
                is_causal,
                *grads,
            )
        for taken, halved, (q, k) in zip(
            sequences.plans, sequences.halved, sequences.rows, strict=True
        ):
            if sequences.together and not halved:
                continue
            _, backward = taken.kernels
            parts = backward(
                grad_out[..., q, :],
                None if grad_lse is None else grad_lse[..., q],
                query[..., q, :],
                key[..., k, :],
                value[..., k, :],
                out[..., q, :],
                lse[..., q].contiguous(),
                None,
                None,
                None,
                scale,
                0.0,
                is_causal,
            )
            for total, part, rows in zip(grads, parts, (q, k, k), strict=True):
                total[..., rows, :] = part
    return grads


ops.library.impl("packed_forward", _forward, "CompositeExplicitAutograd")
ops.library.impl("packed_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("boltzattn::packed_forward", lib=ops.library)
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64)
    return _rows_first(query, value.shape[-1]), lse


@torch.library.register_fake("boltzattn::packed_backward", lib=ops.library)
def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, ...]:
    return tuple(_rows_first(x, x.shape[-1]) for x in (query, key, value))


class PackedAttention(torch.autograd.Function):
    """(out, lse) of tensors as above; differentiated twice, it goes sequence by sequence."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.boltzattn.packed_forward(query, key, value, starts_q, starts_k, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, scale, is_causal, method, backend = inputs
        ctx.options = scale, is_causal, method, backend
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
        query, key, value, *starts, out, lse = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return (None,) * 9
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        call = grad_out, grad_lse, query, key, value, out.detach(), lse.detach()
        if torch.is_grad_enabled():
            grads = _differentiable_backward(call, tuple(starts), ctx.options)
        else:
            grads = torch.ops.boltzattn.packed_backward(*call, *starts, *ctx.options)
        return *grads, None, None, None, None, None, None


def _differentiable_backward(call: tuple, starts: tuple, options: tuple) -> list[Tensor]:
    grad_out, grad_lse, query, key, value, out, lse = call
    scale, is_causal, method, backend = options
    parts = []
    starts_q, starts_k = starts
    for q, k in _Sequences(query, key, value, starts_q, starts_k, is_causal, method, backend).rows:
        parts.append(
            AttentionBackward.apply(
                grad_out[..., q, :],
                None if grad_lse is None else grad_lse[..., q],
                query[..., q, :],
                key[..., k, :],
                value[..., k, :],
                out[..., q, :],
                lse[..., q],
                None,
                None,
                None,
                (scale, 0.0, is_causal, method, backend),
            )
        )
    if not parts:
        return [torch.zeros_like(x) for x in (query, key, value)]
    return [torch.cat(of_one, -2) for of_one in zip(*parts, strict=True)]


ops.library.impl(
    "packed_forward",
    above_autograd(torch.ops.boltzattn.packed_forward, PackedAttention),
    "Autograd",
)
