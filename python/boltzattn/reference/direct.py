"""Attention over all pairs in plain torch: the oracle of every kernel, and the fallback.

Scores are formed for a block of query rows at a time, so memory is linear in n for any n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from boltzattn.problem import (
    Directions,
    Gradients,
    OutputGradients,
    Problem,
    Saved,
    accumulate_dtype,
)
from boltzattn.reference.scores import (
    distances,
    hidden_pairs,
    hide,
    long_product,
    product,
    pull,
    scores,
    slope_of_scores,
    transposed,
)

# Scores held at once, over all heads. 2^20 fp32 scores are 4 MB; a handful of them live together.
SCORES_PER_BLOCK = 1 << 20


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
        hidden = hidden_pairs(problem, rows)
        query = problem.query[..., rows, :]
        if problem.is_gaussian:
            # All keys of an empty row may be hidden, and a difference to a query of NaN is NaN.
            query = query.masked_fill((lse == -math.inf)[..., None], 0.0)
        yield _Block(rows, query, hide(probability, hidden), lse, factor, hidden)


def dense(problem: Problem) -> Saved:
    """All scores at once, differentiable by autograd in every argument, masks included."""
    wide = problem.to(accumulate_dtype(problem.query.dtype)).without_hidden_keys()
    probability, lse = weights(scores(wide))
    factor = _dropout_factor(wide, slice(0, wide.query.shape[-2]))
    return Saved(long_product(probability * factor, wide.value).to(problem.query.dtype), lse)


def forward(problem: Problem) -> Saved:
    query, value = problem.query, problem.value
    wide = problem.to(accumulate_dtype(query.dtype)).without_hidden_keys()
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64)
    for block in _blocks(wide):
        kept = block.probability * block.factor
        out[..., block.rows, :] = product(kept, wide.value, block.hidden)
        lse[..., block.rows] = block.lse
    return Saved(out, lse)


def backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
    """The weights are computed again, not read from `saved`."""
    wide = problem.to(accumulate_dtype(problem.query.dtype)).without_hidden_keys()
    k, v = wide.key, wide.value
    found = wide.new_gradients("new_zeros")
    for rows, q, probability, _, factor, hidden in _blocks(wide):
        g = grads.out[..., rows, :].to(k.dtype)
        grad_probability = hide((g @ v.transpose(-1, -2)) * factor, hidden)
        mean = (probability * grad_probability).sum(-1, keepdim=True)
        centred = grad_probability - mean
        if grads.lse is not None:
            centred = centred + grads.lse[..., rows, None].to(k.dtype)
        grad_logits = hide(probability * centred, hidden)
        if k.shape[-2] > 0:
            grad_logits = _balanced(grad_logits, probability, grads.lse, rows)
        kept = probability * factor
        found.query[..., rows, :], by_key = pull(wide, grad_logits, q, k, hidden)
        found.key.add_(by_key)
        found.value.add_(product(kept.transpose(-1, -2), g, transposed(hidden)))
        _add_bias_gradients(wide, grad_logits, rows, found)
    return _narrow(found, problem)


def _add_bias_gradients(problem: Problem, grad_logits: Tensor, rows: slice, to: Gradients) -> None:
    if problem.key_bias is not None:
        to.key_mask.add_(grad_logits.sum(-2))
    if problem.slopes is not None:
        to.slopes.add_((grad_logits * distances(problem, rows)).sum((-2, -1)))


def _narrow(found: Gradients, problem: Problem) -> Gradients:
    """Gradients in the dtype of the problem, with zeros for the keys that are hidden."""
    hidden = problem._replace(key=found.key, value=found.value).without_hidden_keys()
    found = found._replace(key=hidden.key, value=hidden.value)
    if problem.key_bias is not None:
        ignored = problem.key_bias == -math.inf
        found = found._replace(key_mask=found.key_mask.masked_fill(ignored, 0.0))
    narrow = (x.to(problem.query.dtype) for x in found[:3])
    return Gradients._make((*narrow, *found[3:]))


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
    directions: Directions, grads: OutputGradients, problem: Problem
) -> tuple[OutputGradients, Gradients]:
    """Gradients of <directions, backward(...)> for the output gradients and the inputs.

    <directions, gradients> is the derivative of <grad_out, out> + <grad_lse, lse> along
    `directions`. Along it the logits have slopes S, lse_i has the slope L_i = sum_j P_ij S_ij, and

        <directions, ...> = sum_ij P_ij ((S_ij - L_i) A_ij + B_ij) + sum_i grad_lse_i L_i,

    where A and B are the products of grad_out with the values and with their direction, after
    dropout. The function returns the derivatives of this sum.
    """
    wide = problem.to(accumulate_dtype(problem.query.dtype)).without_hidden_keys()
    work = wide.query.dtype
    k, v = wide.key, wide.value
    to_query, to_key, to_value = (x.to(work) for x in directions[:3])
    to_bias, to_slopes = directions[3:]
    # Written and summed in place: results of a block among the freed scores of others would keep
    # their memory from being reused.
    of_grad_out = grads.out.new_empty(grads.out.shape)
    of_grad_lse = None if grads.lse is None else grads.lse.new_empty(grads.lse.shape)
    found = wide.new_gradients("new_zeros")
    for rows, q, probability, _, factor, hidden in _blocks(wide):
        g, to_q = grads.out[..., rows, :].to(work), to_query[..., rows, :]
        slope = slope_of_scores(wide, q, k, to_q, to_key)
        if to_bias is not None:
            slope = slope + to_bias[..., None, :].to(work)
        if to_slopes is not None:
            slope = slope + (to_slopes[..., None, None] * distances(wide, rows)).to(work)
        slope = hide(slope, hidden)
        lse_slope = (probability * slope).sum(-1, keepdim=True)
        slope = slope - lse_slope
        by_value = hide((g @ v.transpose(-1, -2)) * factor, hidden)  # A
        by_value = by_value - (probability * by_value).sum(-1, keepdim=True)
        if grads.lse is not None and of_grad_lse is not None:
            by_value = by_value + grads.lse[..., rows, None].to(work)
            of_grad_lse[..., rows] = lse_slope.squeeze(-1)
        # What a weight contributes; a part common to the whole row moves no weight.
        worth = slope * by_value + hide((g @ to_value.transpose(-1, -2)) * factor, hidden)
        worth = worth - (probability * worth).sum(-1, keepdim=True)
        grad_logits = hide(probability * worth, hidden)
        grad_slope = hide(probability * by_value, hidden)
        kept = probability * factor
        moved = hide(kept * slope, hidden)
        of_grad_out[..., rows, :] = product(moved, v, hidden) + product(kept, to_value, hidden)
        of_query, of_key = pull(wide, grad_logits, q, k, hidden)
        of_query_too, of_key_too = pull(wide, grad_slope, to_q, to_key, hidden)
        found.query[..., rows, :] = of_query + of_query_too
        found.key.add_(of_key).add_(of_key_too)
        found.value.add_(product(moved.transpose(-1, -2), g, transposed(hidden)))
        _add_bias_gradients(wide, grad_logits, rows, found)
    return OutputGradients(of_grad_out, of_grad_lse), _narrow(found, problem)
