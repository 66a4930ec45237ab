"""Attention over all pairs in plain torch: the oracle of every kernel, and the fallback.

Scores are formed for a block of query rows at a time, so memory is linear in n for any n.

What a mask hides does not count, whatever it holds. Keys that `key_mask` hides are replaced by
zeros. Pairs that `is_causal` or `attn_mask` hides have weight 0, but 0 * NaN is NaN; `_product`
leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.problem import Gradients, OutputGradients, Problem, Saved, accumulate_dtype

# Scores held at once, over all heads. 2^20 fp32 scores are 4 MB; a handful of them live together.
SCORES_PER_BLOCK = 1 << 20


def _columns(x: Tensor) -> Tensor:
    """x transposed, for a product that sums every column in the same order.

    With other strides, such as those of broadcast heads, torch multiplies the last few columns in
    another way, and logits of equal keys would not be equal.
    """
    return x.contiguous().transpose(-1, -2)


def scores(problem: Problem, rows: slice | None = None) -> Tensor:
    """Masked logits [*L, rows, n_k] of some query rows, or of all."""
    rows = slice(0, problem.query.shape[-2]) if rows is None else rows
    logits = (problem.query[..., rows, :] * problem.scale) @ _columns(problem.key)
    if problem.attn_mask is not None:
        mask = problem.attn_mask[..., rows, :]
        logits = (
            logits.masked_fill(~mask, -math.inf)
            if mask.dtype == torch.bool
            else (logits + mask.to(logits.dtype)).masked_fill(mask == -math.inf, -math.inf)
        )
    if problem.key_mask is not None:
        columns = problem.key_mask[..., None, :]
        logits = (
            logits.masked_fill(columns, -math.inf)
            if columns.dtype == torch.bool
            else (logits + columns.to(logits.dtype)).masked_fill(columns == -math.inf, -math.inf)
        )
    if problem.is_causal:
        logits = logits.masked_fill(_later_keys(problem, rows), -math.inf)
    return logits


def _later_keys(problem: Problem, rows: slice) -> Tensor:
    row = torch.arange(rows.start, rows.stop, device=problem.query.device)
    column = torch.arange(problem.key.shape[-2], device=problem.query.device)
    return column > row[:, None]


def _hidden_pairs(problem: Problem, rows: slice) -> Tensor | None:
    """[*L, rows, n_k] or [rows, n_k]: which pairs a mask hides, but not because of their key."""
    if problem.is_causal:
        return _later_keys(problem, rows)
    if problem.attn_mask is None:
        return None
    mask = problem.attn_mask[..., rows, :]
    return ~mask if mask.dtype == torch.bool else mask == -math.inf


def _hide(x: Tensor, hidden: Tensor | None) -> Tensor:
    """Zeros at hidden pairs."""
    return x if hidden is None else x.masked_fill(hidden, 0.0)


def _product(weight: Tensor, x: Tensor, hidden: Tensor | None) -> Tensor:
    """weight @ x without hidden pairs, whose weight is 0."""
    if hidden is None:
        return weight @ x
    finite = x.isfinite().all(-1)
    odd = ~finite.reshape(finite.shape[:-1].numel(), finite.shape[-1]).all(0)
    if not bool(odd.any()):
        return weight @ x
    total = weight @ x.masked_fill(odd[:, None], 0.0)
    for j in odd.nonzero().flatten().tolist():
        here = weight[..., j, None] * x[..., j, None, :]
        total += here.masked_fill(hidden[..., j, None], 0.0)
    return total


def _transposed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.transpose(-1, -2)


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

    The pattern depends on positions alone, not on threads or on the backend; csrc/spec/dropout.h
    computes the same bits.
    """
    low32 = 0xFFFFFFFF
    row = torch.arange(rows.start, rows.stop, device=seed.device)
    column = torch.arange(n_k, device=seed.device)
    stream = _mix32((seed & low32) ^ _mix32((seed >> 32) & low32))
    line = _mix32((stream[..., None] + row * 0x27D4EB2F) & low32)
    draw = _mix32(line[..., None] ^ ((column * 0x9E3779B1) & low32))
    return draw >= round(dropout_p * 2**32)


def _dropout_factor(problem: Problem, rows: slice) -> Tensor | float:
    """The factor on the weights: 0 or 1 / (1 - p)."""
    p = problem.dropout_p
    if problem.seed is None or p == 0.0:
        return 1.0
    keep = dropout_keep(problem.seed, rows, problem.key.shape[-2], p)
    return keep.to(problem.key.dtype) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)


class _Block(NamedTuple):
    """Some query rows of a problem, with their weights."""

    rows: slice
    query: Tensor
    probability: Tensor
    lse: Tensor
    factor: Tensor | float  # of dropout
    hidden: Tensor | None  # pairs


def _blocks(problem: Problem) -> Iterator[_Block]:
    """Blocks of query rows whose scores fit into SCORES_PER_BLOCK."""
    n_q = problem.query.shape[-2]
    scores_per_row = math.prod(problem.query.shape[:-2]) * problem.key.shape[-2]
    step = max(1, SCORES_PER_BLOCK // max(1, scores_per_row))
    for start in range(0, n_q, step):
        rows = slice(start, min(start + step, n_q))
        probability, lse = weights(scores(problem, rows))
        factor = _dropout_factor(problem, rows)
        hidden = _hidden_pairs(problem, rows)
        query = problem.query[..., rows, :]
        yield _Block(rows, query, _hide(probability, hidden), lse, factor, hidden)


def dense(problem: Problem) -> Saved:
    """All scores at once, differentiable by autograd in every argument, masks included."""
    wide = problem.to(accumulate_dtype(problem.query.dtype)).without_hidden_keys()
    probability, lse = weights(scores(wide))
    factor = _dropout_factor(wide, slice(0, wide.query.shape[-2]))
    return Saved(((probability * factor) @ wide.value).to(problem.query.dtype), lse)


def forward(problem: Problem) -> Saved:
    query, value = problem.query, problem.value
    wide = problem.to(accumulate_dtype(query.dtype)).without_hidden_keys()
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64)
    for block in _blocks(wide):
        kept = block.probability * block.factor
        out[..., block.rows, :] = _product(kept, wide.value, block.hidden)
        lse[..., block.rows] = block.lse
    return Saved(out, lse)


def backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
    """The weights are computed again, not read from `saved`."""
    query, key, value = problem.query, problem.key, problem.value
    wide = problem.to(accumulate_dtype(query.dtype)).without_hidden_keys()
    k, v = wide.key, wide.value
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_key = torch.zeros_like(k, memory_format=torch.contiguous_format)
    grad_value = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for rows, q, probability, _, factor, hidden in _blocks(wide):
        g = grads.out[..., rows, :].to(k.dtype)
        grad_probability = _hide((g @ v.transpose(-1, -2)) * factor, hidden)
        mean = (probability * grad_probability).sum(-1, keepdim=True)
        centred = grad_probability - mean
        if grads.lse is not None:
            centred = centred + grads.lse[..., rows, None].to(k.dtype)
        # Scaled before the products, which may overflow where their scaled values do not.
        grad_logits = _hide(probability * centred, hidden)
        if k.shape[-2] > 0:
            grad_logits = _balanced(grad_logits, probability, grads.lse, rows)
        grad_scaled = grad_logits * problem.scale
        kept, by_key = probability * factor, _transposed(hidden)
        grad_query[..., rows, :] = _product(grad_scaled, k, hidden)
        grad_key += _product(grad_scaled.transpose(-1, -2), q, by_key)
        grad_value += _product(kept.transpose(-1, -2), g, by_key)
    _, grad_key, grad_value, *_ = wide._replace(
        key=grad_key, value=grad_value
    ).without_hidden_keys()
    return Gradients(grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype))


def _balanced(
    grad_logits: Tensor, probability: Tensor, grad_lse: Tensor | None, rows: slice
) -> Tensor:
    """Let the key that has more than half of a row's weight get what the other keys leave.

    The gradients of a row's logits add up to grad_lse. Where one key has nearly all the weight, its
    own gradient is a difference of nearly equal numbers, and the others' are not.
    """
    weight, top = probability.max(-1, keepdim=True)
    others = grad_logits.scatter(-1, top, 0.0)
    left = -others.sum(-1, keepdim=True)
    if grad_lse is not None:
        left = left + grad_lse[..., rows, None].to(left.dtype)
    return others.scatter(-1, top, torch.where(weight > 0.5, left, grad_logits.gather(-1, top)))


def double_backward(
    directions: Gradients, grads: OutputGradients, problem: Problem
) -> tuple[OutputGradients, Gradients]:
    """Gradients of <directions, backward(...)> for the output gradients and the inputs.

    <directions, (dq, dk, dv)> is the derivative of <grad_out, out> + <grad_lse, lse> along
    `directions`. Along it the logits have slopes S, lse_i has the slope L_i = sum_j P_ij S_ij, and

        <directions, ...> = sum_ij P_ij ((S_ij - L_i) A_ij + B_ij) + sum_i grad_lse_i L_i,

    where A and B are the products of grad_out with the values and with their direction, after
    dropout. The function returns the derivatives of this sum.
    """
    wide = problem.to(accumulate_dtype(problem.query.dtype)).without_hidden_keys()
    work, scale = wide.query.dtype, problem.scale
    k, v = wide.key, wide.value
    to_query, to_key, to_value = (x.to(work) for x in directions)
    # Written and summed in place: results of a block among the freed scores of others would keep
    # their memory from being reused.
    of_grad_out = grads.out.new_empty(grads.out.shape)
    of_grad_lse = None if grads.lse is None else grads.lse.new_empty(grads.lse.shape)
    of_query = problem.query.new_empty(problem.query.shape)
    of_key, of_value = k.new_zeros(k.shape), v.new_zeros(v.shape)
    for rows, q, probability, _, factor, hidden in _blocks(wide):
        by_key = _transposed(hidden)
        g, to_q = grads.out[..., rows, :].to(work), to_query[..., rows, :]
        slope = _hide((to_q @ _columns(k) + q @ _columns(to_key)) * scale, hidden)
        lse_slope = (probability * slope).sum(-1, keepdim=True)
        slope = slope - lse_slope
        by_value = _hide((g @ v.transpose(-1, -2)) * factor, hidden)  # A
        by_value = by_value - (probability * by_value).sum(-1, keepdim=True)
        if grads.lse is not None and of_grad_lse is not None:
            by_value = by_value + grads.lse[..., rows, None].to(work)
            of_grad_lse[..., rows] = lse_slope.squeeze(-1)
        # What a weight contributes; a part common to the whole row moves no weight.
        worth = slope * by_value + _hide((g @ to_value.transpose(-1, -2)) * factor, hidden)
        worth = worth - (probability * worth).sum(-1, keepdim=True)
        grad_logits = _hide(probability * worth, hidden) * scale
        grad_slope = _hide(probability * by_value, hidden) * scale
        kept = probability * factor
        moved = _hide(kept * slope, hidden)
        of_grad_out[..., rows, :] = _product(moved, v, hidden) + _product(kept, to_value, hidden)
        of_query[..., rows, :] = _product(grad_logits, k, hidden)
        of_query[..., rows, :] += _product(grad_slope, to_key, hidden)
        of_key += _product(grad_logits.transpose(-1, -2), q, by_key)
        of_key += _product(grad_slope.transpose(-1, -2), to_q, by_key)
        of_value += _product(moved.transpose(-1, -2), g, by_key)
    _, of_key, of_value, *_ = wide._replace(key=of_key, value=of_value).without_hidden_keys()
    dtype = problem.query.dtype
    gradients = Gradients(of_query, of_key.to(dtype), of_value.to(dtype))
    return OutputGradients(of_grad_out, of_grad_lse), gradients
