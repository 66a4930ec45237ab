"""Causal attention from unmasked attention, by halving: O(n log n) on top of the transform.

Cut the sequence into leaves. Within a leaf the direct kernel applies the causal mask. At every size
from the leaf up, the left block of a pair acts on all queries of the right block without any mask,
which is a problem for the transform; all pairs of one size are one batched call. A query's pieces
are joined by their lse.

Query i sees keys 0..i, so keys past the last query are never seen, and queries past the last key
see all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from boltzattn.compose.merge import share
from boltzattn.reference.direct import accumulate_dtype

LEAF = 512  # tokens; below, the direct kernel is faster than a transform of its own

Kernels = tuple[Callable, Callable]


@dataclass(frozen=True)
class Piece:
    """`count` blocks of `stride` tokens from `start` on; in each, some keys act on some queries."""

    start: int
    count: int
    stride: int
    queries: slice
    keys: slice
    masked: bool  # causal within the block

    def cut(self, x: Tensor, part: slice, axis: int = -2) -> Tensor:
        """View of the blocks' rows: `[..., count, rows, width]`, or without width for axis -1."""
        n = x.shape[axis]
        stop = min(self.start + self.count * self.stride, n)
        if self.count == 1:
            window = x.narrow(axis, self.start, stop - self.start).unsqueeze(axis - 1)
        else:
            window = x.narrow(axis, self.start, self.count * self.stride)
            window = window.unflatten(axis, (self.count, self.stride))
        length = min(part.stop, window.shape[axis]) - part.start
        return window.narrow(axis, part.start, length)


def pieces(n_q: int, n_k: int) -> Iterator[Piece]:
    """The leaves, then the pairs of every size, then the queries that see all keys."""
    n = min(n_q, n_k)

    def blocks(size: int, least: int, queries: slice, keys: slice, masked: bool) -> Iterator[Piece]:
        whole = n // size
        if whole:
            yield Piece(0, whole, size, queries, keys, masked)
        if n - whole * size > least:
            yield Piece(whole * size, 1, n - whole * size, queries, keys, masked)

    yield from blocks(LEAF, 0, slice(0, LEAF), slice(0, LEAF), True)
    half = LEAF
    while half < n:
        yield from blocks(2 * half, half, slice(half, 2 * half), slice(0, half), False)
        half *= 2
    if n_q > n_k:
        yield Piece(0, 1, n_q, slice(n_k, n_q), slice(0, n_k), False)


def _calls(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
) -> Iterator[tuple[Piece, tuple[Tensor, Tensor, Tensor, None, Tensor | None, None]]]:
    for piece in pieces(query.shape[-2], key.shape[-2]):
        mask = None if key_mask is None else piece.cut(key_mask, piece.keys, axis=-1)
        yield (
            piece,
            (
                piece.cut(query, piece.queries),
                piece.cut(key, piece.keys),
                piece.cut(value, piece.keys),
                None,
                mask,
                None,
            ),
        )


def kernels(direct: Kernels, transform: Kernels, halving: Callable | None = None) -> Kernels:
    """(forward, backward) of causal attention, with the signatures of what they are made of.

    `halving` is a backend's own forward for tensors of the accumulating dtype, if it has one.
    """

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: None,
        key_mask: Tensor | None,
        seed: None,
        scale: float,
        dropout_p: float,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor]:
        work = accumulate_dtype(query.dtype)
        query, key, value, dtype = query.to(work), key.to(work), value.to(work), query.dtype
        if halving is not None:
            out, lse = halving(query, key, value, None, key_mask, None, scale, 0.0, True)
            return out.to(dtype), lse
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        lse = query.new_full(query.shape[:-1], -math.inf, dtype=torch.float64)
        for piece, tensors in _calls(query, key, value, key_mask):
            run, _ = direct if piece.masked else transform
            out_part, lse_part = run(*tensors, scale, 0.0, piece.masked)
            out_rows = piece.cut(out, piece.queries)
            lse_rows = piece.cut(lse, piece.queries, axis=-1)
            if piece.masked:
                out_rows.copy_(out_part)
                lse_rows.copy_(lse_part)
                continue
            together = torch.logaddexp(lse_rows, lse_part)
            together.masked_fill_((lse_rows == -math.inf) & (lse_part == -math.inf), -math.inf)
            out_rows.mul_(share(lse_rows, together)[..., None].to(work))
            out_rows.addcmul_(out_part, share(lse_part, together)[..., None].to(work))
            lse_rows.copy_(together)
        return out.to(dtype), lse

    def backward(
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        attn_mask: None,
        key_mask: Tensor | None,
        seed: None,
        scale: float,
        dropout_p: float,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # out = sum_s w_s out_s with w_s = exp(lse_s - lse), so a piece receives w_s dO and, through
        # its lse, w_s (dO . (out_s - out) + dlse).
        dtypes = query.dtype, key.dtype, value.dtype
        work = accumulate_dtype(query.dtype)
        query, key, value, out, grad_out = (x.to(work) for x in (query, key, value, out, grad_out))
        grads = [
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
        ]
        for piece, tensors in _calls(query, key, value, key_mask):
            run, run_backward = direct if piece.masked else transform
            out_part, lse_part = run(*tensors, scale, 0.0, piece.masked)
            weight = share(lse_part, piece.cut(lse, piece.queries, axis=-1))
            grad_rows = piece.cut(grad_out, piece.queries)
            moved = (grad_rows * (out_part - piece.cut(out, piece.queries))).sum(-1).double()
            if grad_lse is not None:
                moved = moved + piece.cut(grad_lse, piece.queries, axis=-1)
            parts = run_backward(
                grad_rows * weight[..., None].to(work),
                weight * moved,
                *tensors[:3],
                out_part,
                lse_part,
                *tensors[3:],
                scale,
                0.0,
                piece.masked,
            )
            ranges = piece.queries, piece.keys, piece.keys
            for total, part, rows in zip(grads, parts, ranges, strict=True):
                piece.cut(total, rows).add_(part)
        grad_query, grad_key, grad_value = (
            g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)
        )
        return grad_query, grad_key, grad_value

    return forward, backward
