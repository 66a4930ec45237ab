"""Attention in plain torch: the oracle every kernel is tested against, and the fallback.

Everything here works on canonical tensors, as `ops` hands them to every backend:

    query     [*L, n_q, rank]     attn_mask [*L, n_q, n_k] bool (True = may attend) or additive
    key       [*L, n_k, rank]     key_mask  [*L, n_k]      bool (True = ignored) or additive
    value     [*L, n_k, dv]       seed      [*L]           int64, one dropout seed per head

with one and the same leading shape L (possibly by stride 0). Scores are formed for a block of
query rows at a time, so memory is linear in n however long the sequence is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Scores held at once, over all heads. 2^20 fp32 scores are 4 MB; a handful of them live together.
SCORES_PER_BLOCK = 1 << 20


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision sums are carried in: fp64 for fp64, fp32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Slices of query rows whose scores fit into SCORES_PER_BLOCK."""
    n_q, scores_per_row = query.shape[-2], math.prod(query.shape[:-2]) * key.shape[-2]
    step = max(1, SCORES_PER_BLOCK // max(1, scores_per_row))
    return (slice(start, min(start + step, n_q)) for start in range(0, n_q, step))


def _rows(mask: Tensor | None, rows: slice) -> Tensor | None:
    return None if mask is None else mask[..., rows, :]


def scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    is_causal: bool,
    first_row: int = 0,
) -> Tensor:
    """Masked logits [*L, rows, n_k] of the query rows that start at `first_row`."""
    logits = (query * scale) @ key.transpose(-1, -2)
    if attn_mask is not None:
        logits = (
            logits.masked_fill(~attn_mask, -math.inf)
            if attn_mask.dtype == torch.bool
            else logits + attn_mask.to(logits.dtype)
        )
    if key_mask is not None:
        columns = key_mask[..., None, :]
        logits = (
            logits.masked_fill(columns, -math.inf)
            if key_mask.dtype == torch.bool
            else logits + columns.to(logits.dtype)
        )
    if is_causal:
        row = torch.arange(first_row, first_row + query.shape[-2], device=query.device)
        column = torch.arange(key.shape[-2], device=query.device)
        logits = logits.masked_fill(column > row[:, None], -math.inf)
    return logits


def weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis and its lse [*L, rows] in fp64; an empty row gives zeros."""
    if logits.shape[-1] == 0:
        return logits, logits.new_full(logits.shape[:-1], -math.inf, dtype=torch.float64)
    top = logits.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    unnormalised = (logits - top).exp()
    total = unnormalised.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (top.double() + total.double().log()).masked_fill(empty, -math.inf).squeeze(-1)
    return unnormalised / total, lse


def _mix32(x: Tensor) -> Tensor:
    """A bijective 32-bit hash on int64 tensors holding values below 2^32."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & 0xFFFFFFFF
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def dropout_keep(seed: Tensor, rows: slice, n_k: int, dropout_p: float) -> Tensor:
    """Which weights survive dropout, [*L, rows, n_k]: a function of (seed of the head, row, key).

    Being a function of the position, the pattern does not depend on threads or on the backend;
    csrc/cpu/dropout.h computes the same bits.
    """
    low32 = 0xFFFFFFFF
    row = torch.arange(rows.start, rows.stop, device=seed.device)
    column = torch.arange(n_k, device=seed.device)
    stream = _mix32((seed & low32) ^ _mix32((seed >> 32) & low32))
    line = _mix32((stream[..., None] + row * 0x27D4EB2F) & low32)
    draw = _mix32(line[..., None] ^ ((column * 0x9E3779B1) & low32))
    return draw >= round(dropout_p * 2**32)


def _dropout_factor(
    seed: Tensor | None, rows: slice, key: Tensor, dropout_p: float
) -> Tensor | float:
    """What the weights are multiplied by: 0 or 1 / (1 - p)."""
    if seed is None or dropout_p == 0.0:
        return 1.0
    keep = dropout_keep(seed, rows, key.shape[-2], dropout_p)
    return keep.to(key.dtype) * (1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """All scores at once and differentiable by autograd in every argument, masks included."""
    work = accumulate_dtype(query.dtype)
    q, k, v = query.to(work), key.to(work), value.to(work)
    probability, lse = weights(scores(q, k, attn_mask, key_mask, scale, is_causal))
    factor = _dropout_factor(seed, slice(0, q.shape[-2]), k, dropout_p)
    return ((probability * factor) @ v).to(query.dtype), lse


def direct_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """(out [*L, n_q, dv] in the dtype of query, lse [*L, n_q] fp64)."""
    work = accumulate_dtype(query.dtype)
    k, v = key.to(work), value.to(work)
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64)
    for rows in row_blocks(query, key):
        q = query[..., rows, :].to(work)
        logits = scores(q, k, _rows(attn_mask, rows), key_mask, scale, is_causal, rows.start)
        probability, lse[..., rows] = weights(logits)
        out[..., rows, :] = (probability * _dropout_factor(seed, rows, k, dropout_p)) @ v
    return out, lse


def direct_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Recomputes the weights from lse-free scores."""
    work = accumulate_dtype(query.dtype)
    k, v = key.to(work), value.to(work)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_key = torch.zeros_like(k, memory_format=torch.contiguous_format)
    grad_value = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for rows in row_blocks(query, key):
        q, g = query[..., rows, :].to(work), grad_out[..., rows, :].to(work)
        logits = scores(q, k, _rows(attn_mask, rows), key_mask, scale, is_causal, rows.start)
        probability, _ = weights(logits)
        factor = _dropout_factor(seed, rows, k, dropout_p)
        grad_probability = (g @ v.transpose(-1, -2)) * factor
        mean = (probability * grad_probability).sum(-1, keepdim=True)
        centred = grad_probability - mean
        if grad_lse is not None:
            centred = centred + grad_lse[..., rows, None].to(work)
        grad_logits = probability * centred
        grad_query[..., rows, :] = (grad_logits @ k) * scale
        grad_key += grad_logits.transpose(-1, -2) @ (q * scale)
        grad_value += (probability * factor).transpose(-1, -2) @ g
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def direct_double_backward(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of <grads, backward(...)> for grad_out, grad_lse, query, key and value.

    <grads, (dq, dk, dv)> is the derivative of <grad_out, out> + <grad_lse, lse> in the direction
    `grads`. Along it the logits have slopes S, lse_i has the slope L_i = sum_j P_ij S_ij, and

        <grads, ...> = sum_ij P_ij ((S_ij - L_i) A_ij + B_ij) + sum_i grad_lse_i L_i,

    A and B being grad_out's products with the values and with their direction, after dropout.
    What is returned are the derivatives of this sum.
    """
    work = accumulate_dtype(query.dtype)
    k, v = key.to(work), value.to(work)
    to_query, to_key, to_value = (
        torch.zeros_like(x, dtype=work) if g is None else g.to(work)
        for g, x in zip(grads, (query, key, value), strict=True)
    )
    # Written and summed in place: what a block left behind among the freed scores of others would
    # hold on to their memory.
    of_grad_out = grad_out.new_empty(grad_out.shape)
    of_grad_lse = None if grad_lse is None else grad_lse.new_empty(grad_lse.shape)
    of_query = query.new_empty(query.shape)
    of_key, of_value = k.new_zeros(k.shape), v.new_zeros(v.shape)
    for rows in row_blocks(query, key):
        q, g = query[..., rows, :].to(work), grad_out[..., rows, :].to(work)
        to_q = to_query[..., rows, :]
        logits = scores(q, k, _rows(attn_mask, rows), key_mask, scale, is_causal, rows.start)
        probability, _ = weights(logits)
        factor = _dropout_factor(seed, rows, k, dropout_p)
        slope = (to_q @ k.transpose(-1, -2) + q @ to_key.transpose(-1, -2)) * scale
        lse_slope = (probability * slope).sum(-1, keepdim=True)
        slope = slope - lse_slope
        by_value = (g @ v.transpose(-1, -2)) * factor  # A
        by_value = by_value - (probability * by_value).sum(-1, keepdim=True)
        if grad_lse is not None and of_grad_lse is not None:
            by_value = by_value + grad_lse[..., rows, None].to(work)
            of_grad_lse[..., rows] = lse_slope.squeeze(-1)
        # What a weight contributes; a part common to the whole row moves no weight.
        worth = slope * by_value + (g @ to_value.transpose(-1, -2)) * factor
        grad_logits = probability * (worth - (probability * worth).sum(-1, keepdim=True))
        grad_slope = probability * by_value
        kept = probability * factor
        moved = kept * slope
        of_grad_out[..., rows, :] = moved @ v + kept @ to_value
        of_query[..., rows, :] = (grad_logits @ k + grad_slope @ to_key) * scale
        of_key += grad_logits.transpose(-1, -2) @ (q * scale)
        of_key += grad_slope.transpose(-1, -2) @ (to_q * scale)
        of_value += moved.transpose(-1, -2) @ g
    return of_grad_out, of_grad_lse, of_query, of_key.to(key.dtype), of_value.to(value.dtype)
