"""Causal attention from unmasked attention, by halving: O(n log n) on top of the transform.

Cut the sequence into leaves. Within a leaf the direct kernel applies the causal mask. At every size
from the leaf up, the left block of a pair acts on all queries of the right block without any mask,
which is a problem for the transform; all pairs of one size are one batched call. The pieces of a
query are merged by their lse.

Query i sees keys 0..i, so keys past the last query are never seen, and queries past the last key
see all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.compose.merge import share
from boltzattn.problem import (
    Gradients,
    Kernels,
    OutputGradients,
    Problem,
    Saved,
    accumulate_dtype,
)

LEAF = 512  # tokens; below this the direct kernel is faster than a transform


class Piece(NamedTuple):
    """Blocks of `stride` tokens from `start` on; in each, some keys act on some queries."""

    start: int
    blocks: int
    stride: int
    queries: slice
    keys: slice
    masked: bool  # causal within the block

    def cut(self, x: Tensor, part: slice, axis: int = -2) -> Tensor:
        """View of the blocks' rows: `[..., blocks, rows, width]`, or without width for axis -1."""
        n = x.shape[axis]
        stop = min(self.start + self.blocks * self.stride, n)
        if self.blocks == 1:
            window = x.narrow(axis, self.start, stop - self.start).unsqueeze(axis - 1)
        else:
            window = x.narrow(axis, self.start, self.blocks * self.stride)
            window = window.unflatten(axis, (self.blocks, self.stride))
        length = min(part.stop, window.shape[axis]) - part.start
        return window.narrow(axis, part.start, length)

    def of(self, problem: Problem) -> Problem:
        mask = problem.key_mask
        return problem._replace(
            query=self.cut(problem.query, self.queries),
            key=self.cut(problem.key, self.keys),
            value=self.cut(problem.value, self.keys),
            key_mask=None if mask is None else self.cut(mask, self.keys, axis=-1),
            is_causal=self.masked,
        )


def pieces(n_q: int, n_k: int) -> Iterator[Piece]:
    """The leaves, then the pairs of every size, then the queries that see all keys."""
    n = min(n_q, n_k)

    def cut(size: int, least: int, queries: slice, keys: slice, masked: bool) -> Iterator[Piece]:
        whole = n // size
        if whole:
            yield Piece(0, whole, size, queries, keys, masked)
        if n - whole * size > least:
            yield Piece(whole * size, 1, n - whole * size, queries, keys, masked)

    yield from cut(LEAF, 0, slice(0, LEAF), slice(0, LEAF), True)
    half = LEAF
    while half < n:
        yield from cut(2 * half, half, slice(half, 2 * half), slice(0, half), False)
        half *= 2
    if n_q > n_k:
        yield Piece(0, 1, n_q, slice(n_k, n_q), slice(0, n_k), False)


def in_accumulate_dtype(forward: Callable[[Problem], Saved], problem: Problem) -> Saved:
    """Merged results would be rounded at every level in the dtype of the tensors."""
    out, lse = forward(problem.to(accumulate_dtype(problem.query.dtype)))
    return Saved(out.to(problem.query.dtype), lse)


def kernels(direct: Kernels, transform: Kernels) -> Kernels:
    """Causal attention from the kernels of a backend."""

    def of(piece: Piece) -> Kernels:
        return direct if piece.masked else transform

    def forward(problem: Problem) -> Saved:
        return in_accumulate_dtype(merge_pieces, problem)

    def merge_pieces(problem: Problem) -> Saved:
        query, value = problem.query, problem.value
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        lse = query.new_full(query.shape[:-1], -math.inf, dtype=torch.float64)
        for piece in pieces(query.shape[-2], problem.key.shape[-2]):
            part = of(piece).forward(piece.of(problem))
            out_rows = piece.cut(out, piece.queries)
            lse_rows = piece.cut(lse, piece.queries, axis=-1)
            if piece.masked:
                out_rows.copy_(part.out)
                lse_rows.copy_(part.lse)
                continue
            together = torch.logaddexp(lse_rows, part.lse)
            together.masked_fill_((lse_rows == -math.inf) & (part.lse == -math.inf), -math.inf)
            out_rows.mul_(share(lse_rows, together)[..., None].to(out.dtype))
            out_rows.addcmul_(part.out, share(part.lse, together)[..., None].to(out.dtype))
            lse_rows.copy_(together)
        return Saved(out, lse)

    def backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
        # out = sum_s w_s out_s with w_s = exp(lse_s - lse), so a piece receives w_s dO and, through
        # its lse, w_s (dO . (out_s - out) + dlse).
        work = accumulate_dtype(problem.query.dtype)
        wide = problem.to(work)
        out, grad_out = saved.out.to(work), grads.out.to(work)
        totals = [
            torch.zeros_like(x, memory_format=torch.contiguous_format)
            for x in (wide.query, wide.key, wide.value)
        ]
        for piece in pieces(problem.query.shape[-2], problem.key.shape[-2]):
            part = piece.of(wide)
            part_saved = of(piece).forward(part)
            weight = share(part_saved.lse, piece.cut(saved.lse, piece.queries, axis=-1))
            grad_rows = piece.cut(grad_out, piece.queries)
            moved = (grad_rows * (part_saved.out - piece.cut(out, piece.queries))).sum(-1).double()
            if grads.lse is not None:
                moved = moved + piece.cut(grads.lse, piece.queries, axis=-1)
            part_grads = OutputGradients(grad_rows * weight[..., None].to(work), weight * moved)
            found = of(piece).backward(part_grads, part_saved, part)
            ranges = piece.queries, piece.keys, piece.keys
            for total, one, rows in zip(totals, found, ranges, strict=True):
                piece.cut(total, rows).add_(one)
        return Gradients(*(g.to(problem.query.dtype) for g in totals))

    return Kernels(forward, backward)
