"""Logits of some query rows in plain torch, and how a gradient of logits reaches what they are of.

What a mask hides does not count, whatever it holds. Keys that `key_mask` hides are replaced by
zeros before (`Problem.without_hidden_keys`). Pairs that `is_causal` or `attn_mask` hides have
weight 0, but 0 * NaN is NaN; `product` leaves them out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from boltzattn.problem import Problem

# Numbers that a product adds up at a time. Some BLAS libraries add all of them to one running sum
# if there are few rows, and over 200,000 numbers that loses three digits in fp32.
LONGEST_SUM = 1024


def _columns(x: Tensor) -> Tensor:
    """x transposed, for a product that sums every column in the same order.

    With other strides, such as those of broadcast heads, torch multiplies the last few columns in
    another way, and logits of equal keys would not be equal.
    """
    return x.contiguous().transpose(-1, -2)


def _gaps(query: Tensor, key: Tensor) -> list[Tensor]:
    """q - k for each of the rank's coordinates, [*L, rows, n_k]."""
    return [query[..., :, None, r] - key[..., None, :, r] for r in range(query.shape[-1])]


def scores(problem: Problem, rows: slice | None = None) -> Tensor:
    """Masked logits [*L, rows, n_k] of some query rows, or of all."""
    rows = slice(0, problem.query.shape[-2]) if rows is None else rows
    query, key = problem.query[..., rows, :], problem.key
    if problem.is_gaussian:
        # From differences: |q|^2 - 2 q . k + |k|^2 would cancel.
        squares = [gap * gap for gap in _gaps(query, key)]
        logits = sum(squares[1:], squares[0]) * (-0.5 * problem.scale)
    else:
        logits = (query * problem.scale) @ _columns(key)
    if problem.slopes is not None:
        bias = problem.slopes[..., None, None] * distances(problem, rows)
        logits = logits + bias.to(logits.dtype)
    if problem.attn_mask is not None:
        logits = _add_mask(logits, problem.attn_mask[..., rows, :], hides=False)
    if problem.key_mask is not None:
        logits = _add_mask(logits, problem.key_mask[..., None, :], hides=True)
    if problem.is_causal:
        logits = logits.masked_fill(_later_keys(problem, rows), -math.inf)
    return logits


def _add_mask(logits: Tensor, mask: Tensor, hides: bool) -> Tensor:
    """`hides`: what True means. A logit that a mask hides is -inf, whatever its key holds."""
    if mask.dtype == torch.bool:
        return logits.masked_fill(mask if hides else ~mask, -math.inf)
    return (logits + mask.to(logits.dtype)).masked_fill(mask == -math.inf, -math.inf)


def distances(problem: Problem, rows: slice) -> Tensor:
    """-|i - j|, [rows, n_k] fp64: what `slopes` multiply."""
    row, column = _positions(problem, rows)
    return -(column - row).abs().double()


def _positions(problem: Problem, rows: slice) -> tuple[Tensor, Tensor]:
    device = problem.query.device
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    return row, torch.arange(problem.key.shape[-2], device=device)


def _later_keys(problem: Problem, rows: slice) -> Tensor:
    row, column = _positions(problem, rows)
    return column > row


def hidden_pairs(problem: Problem, rows: slice) -> Tensor | None:
    """[*L, rows, n_k] or [rows, n_k]: which pairs a mask hides, but not because of their key."""
    if problem.is_causal:
        return _later_keys(problem, rows)
    if problem.attn_mask is None:
        return None
    mask = problem.attn_mask[..., rows, :]
    return ~mask if mask.dtype == torch.bool else mask == -math.inf


def hide(x: Tensor, hidden: Tensor | None) -> Tensor:
    """Zeros at hidden pairs."""
    return x if hidden is None else x.masked_fill(hidden, 0.0)


def transposed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.transpose(-1, -2)


def long_product(weight: Tensor, x: Tensor) -> Tensor:
    """weight @ x, summed in parts."""
    whole = x.shape[-2] // LONGEST_SUM * LONGEST_SUM
    if x.shape[-2] <= 2 * LONGEST_SUM:
        return weight @ x
    rows = weight[..., :whole].unflatten(-1, (-1, LONGEST_SUM)).transpose(-3, -2)
    parts = rows @ x[..., :whole, :].unflatten(-2, (-1, LONGEST_SUM))
    return parts.sum(-3) + weight[..., whole:] @ x[..., whole:, :]


def product(weight: Tensor, x: Tensor, hidden: Tensor | None) -> Tensor:
    """weight @ x without hidden pairs, whose weight is 0."""
    if hidden is None:
        return long_product(weight, x)
    finite = x.isfinite().all(-1)
    odd = ~finite.reshape(finite.shape[:-1].numel(), finite.shape[-1]).all(0)
    if not bool(odd.any()):
        return long_product(weight, x)
    total = long_product(weight, x.masked_fill(odd[:, None], 0.0))
    for j in odd.nonzero().flatten().tolist():
        here = weight[..., j, None] * x[..., j, None, :]
        total += here.masked_fill(hidden[..., j, None], 0.0)
    return total


def slope_of_scores(
    problem: Problem, query: Tensor, key: Tensor, to_query: Tensor, to_key: Tensor
) -> Tensor:
    """The derivative of logits along a move of queries and keys."""
    if problem.is_gaussian:
        pairs = zip(_gaps(query, key), _gaps(to_query, to_key), strict=True)
        products = [gap * move for gap, move in pairs]
        return sum(products[1:], products[0]) * -problem.scale
    return (to_query @ _columns(key) + query @ _columns(to_key)) * problem.scale


def pull(
    problem: Problem, weight: Tensor, query: Tensor, key: Tensor, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of `weight` . logits for queries and keys, for weights that hide hidden pairs.

    The same function of a move of queries and keys is the gradient of `weight` . slope_of_scores.
    """
    if problem.is_gaussian:
        pulls = [hide(weight * gap, hidden) * problem.scale for gap in _gaps(query, key)]
        by_query = torch.stack([-x.sum(-1) for x in pulls], -1)
        return by_query, torch.stack([x.sum(-2) for x in pulls], -1)
    # Scaled before the products, which may overflow where their scaled values do not.
    weight = weight * problem.scale
    by_key = weight.transpose(-1, -2)
    return product(weight, key, hidden), product(by_key, query, transposed(hidden))
