"""Attention in linear time, in plain torch: forward, backward, double backward.

Head by head, by the stages in `head`, by those in `envelope` for heads with a bias per key or
Gaussian scores, or by those in `tensor` for ranks above 1, which may be causal. Heads that they do
not serve are computed by `direct`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from boltzattn.problem import Directions, Gradients, OutputGradients, Problem, Saved
from boltzattn.reference import direct, envelope, second_derivative, tensor
from boltzattn.reference.head import (
    Head,
    gradient_columns,
    has_envelope,
    head_gradients,
    head_indices,
    put_head,
    visible_keys,
)
from boltzattn.transform.layout import Range
from boltzattn.transform.stages import SharedRange
from boltzattn.transform.tolerances import LARGEST_PRODUCT, LARGEST_SUM, LEAST_EXTENT


def _whole_head(problem: Problem, kept: Tensor) -> Head | None:
    """The head of a problem without leading dimensions; None: `direct` must serve it."""
    t, s = problem.query.detach().double() * problem.scale, problem.key.detach()[kept].double()
    # Comparisons with NaN are false, so each of these also asks for finite numbers.
    if not float(problem.value.detach()[kept].abs().amax()) * len(s) <= LARGEST_SUM:
        return None
    ends = float(t.min()), float(t.max()), float(s.min()), float(s.max())
    span = Range(*ends, len(s))
    if not (span.largest_product <= LARGEST_PRODUCT and span.key_extent >= LEAST_EXTENT):
        return None
    return Head(problem, kept, SharedRange(*ends, len(s), len(t), len(s), 0))


def _heads(problem: Problem) -> Iterator[tuple[tuple[int, ...], Problem, Tensor]]:
    """(index, problem, kept keys) of every head with queries and keys; others have zeros."""
    for index in head_indices(problem):
        one = problem.head(index)
        kept = visible_keys(one)
        if one.is_causal:
            kept = kept[kept < one.query.shape[-2]]
        if one.query.shape[-2] > 0 and kept.numel() > 0:
            yield index, one, kept


def _served(
    one: Problem, kept: Tensor, slopes: bool
) -> Head | envelope.EnvelopeHead | tensor.TensorHead | None:
    """What serves a head, with slopes for backward; None: `direct` must."""
    if one.query.shape[-1] > 1:
        return tensor.served_head(one, kept)
    if has_envelope(one):
        return envelope.served_head(one, kept, slopes)
    return _whole_head(one, kept)


def forward(problem: Problem) -> Saved:
    """
    Example:
        >>> q, k, v = torch.randn(3, 5000, 1), torch.randn(3, 5000, 1), torch.randn(3, 5000, 4)
        >>> out, lse = forward(Problem(q, k, v, *[None] * 4, 1.0, 0.0, False, False))
        >>> out.shape, lse.shape
        (torch.Size([3, 5000, 4]), torch.Size([3, 5000]))
    """
    query = problem.query
    out = query.new_zeros(*query.shape[:-1], problem.value.shape[-1])
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=torch.float64)
    for index, one, kept in _heads(problem):
        head = _served(one, kept, slopes=False)
        out[index], lse[index] = direct.forward(one) if head is None else head.forward()
    return Saved(out, lse)


def backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
    found = problem.new_gradients("new_zeros")
    for index, one, kept in _heads(problem):
        part = head_gradients(grads, index)
        head = _served(one, kept, slopes=True)
        columns = gradient_columns(part)
        # Blocks leave out keys of no weight, but 0 times NaN is NaN.
        blocks = has_envelope(one) or one.query.shape[-1] > 1
        odd = blocks and not all(bool(x.isfinite().all()) for x in columns)
        if head is None or odd:
            outputs = Saved(saved.out[index], saved.lse[index])
            put_head(found, index, direct.backward(part, outputs, one))
            continue
        of_query, *of_keys = head.backward(*columns)
        found.query[index] = of_query
        for total, of_key in zip(found[1:], of_keys, strict=False):
            if total.numel() > 0:
                total[index][kept] = of_key.to(total.dtype)
    return found


def double_backward(
    directions: Directions, grads: OutputGradients, problem: Problem
) -> tuple[OutputGradients, Gradients]:
    """Gradients of <directions, backward(...)> for the output gradients and the inputs."""
    of_out = grads.out.new_zeros(grads.out.shape)
    of_lse = None if grads.lse is None else grads.lse.new_zeros(grads.lse.shape)
    found = problem.new_gradients("new_zeros")
    for index, one, kept in _heads(problem):
        plain = one.query.shape[-1] == 1 and not has_envelope(one)
        head = _whole_head(one, kept) if plain else None
        moves = Directions._make(None if x is None else x[index] for x in directions)
        part = head_gradients(grads, index)
        if head is None:
            of_part, of_inputs = direct.double_backward(moves, part, one)
            put_head(found, index, of_inputs)
        else:
            to_q, to_k, to_v = (x.detach().double() for x in moves[:3])
            of_part, (of_t, of_s, of_v) = second_derivative.double_backward(
                head,
                (to_q * problem.scale, to_k[kept], to_v[kept]),
                OutputGradients(*gradient_columns(part)),
            )
            found.query[index] = of_t * problem.scale
            found.key[index][kept] = of_s.to(problem.key.dtype)
            found.value[index][kept] = of_v.to(problem.value.dtype)
        of_out[index] = of_part.out
        if of_lse is not None and of_part.lse is not None:
            of_lse[index] = of_part.lse.reshape(of_lse[index].shape)
    return OutputGradients(of_out, of_lse), found
