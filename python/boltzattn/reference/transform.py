"""Rank-1 attention in linear time, in plain torch: forward, backward, double backward.

Head by head, by the stages in `head`. Heads that they do not serve are computed by `direct`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from boltzattn.problem import Gradients, OutputGradients, Problem, Saved
from boltzattn.reference import direct, second_derivative
from boltzattn.reference.head import Head, gradient_columns, head_gradients, head_indices, kept_keys
from boltzattn.transform.layout import Range
from boltzattn.transform.stages import SharedRange
from boltzattn.transform.tolerances import LARGEST_PRODUCT, LARGEST_SUM, LEAST_EXTENT


def _whole_head(problem: Problem, kept: Tensor | None) -> Head | None:
    """The head of a problem without leading dimensions; None: `direct` must serve it."""
    if kept is None:
        return None
    t, s = problem.query.detach().double() * problem.scale, problem.key.detach()[kept].double()
    # Comparisons with NaN are false, so each of these also asks for finite numbers.
    if not float(problem.value.detach()[kept].abs().amax()) * len(s) <= LARGEST_SUM:
        return None
    ends = float(t.min()), float(t.max()), float(s.min()), float(s.max())
    span = Range(*ends, len(s))
    if not (span.largest_product <= LARGEST_PRODUCT and span.key_extent >= LEAST_EXTENT):
        return None
    return Head(problem, kept, SharedRange(*ends, len(s), len(t), len(s), 0))


def _heads(
    problem: Problem,
) -> Iterator[tuple[tuple[int, ...], Problem, Tensor | None, Head | None]]:
    """(index, problem, kept keys, head) of every head with queries and keys; None: `direct`."""
    for index in head_indices(problem):
        one = problem.head(index)
        kept = kept_keys(one)
        if kept is None or (one.query.shape[-2] > 0 and kept.numel() > 0):
            yield index, one, kept, _whole_head(one, kept)


def forward(problem: Problem) -> Saved:
    """
    Example:
        >>> q, k, v = torch.randn(3, 5000, 1), torch.randn(3, 5000, 1), torch.randn(3, 5000, 4)
        >>> out, lse = forward(Problem(q, k, v, None, None, None, 1.0, 0.0, False))
        >>> out.shape, lse.shape
        (torch.Size([3, 5000, 4]), torch.Size([3, 5000]))
    """
    query = problem.query
    out = query.new_zeros(*query.shape[:-1], problem.value.shape[-1])
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=torch.float64)
    for index, one, _, head in _heads(problem):
        if head is None:
            out[index], lse[index] = direct.forward(one)
            continue
        ends = head.end_values()
        out[index], lse[index] = head.evaluate(head.core(head.moments(ends), ends, ends))
    return Saved(out, lse)


def _zeros(problem: Problem) -> Gradients:
    return Gradients(*(x.new_zeros(x.shape) for x in problem.inputs))


def backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
    found = _zeros(problem)
    for index, one, kept, head in _heads(problem):
        part = head_gradients(grads, index)
        if head is None:
            outputs = Saved(saved.out[index], saved.lse[index])
            for total, x in zip(found, direct.backward(part, outputs, one), strict=True):
                total[index] = x
            continue
        ends = head.end_values()
        core = head.core(head.moments(ends), ends, ends)
        grad_t, query_moments = head.query_moments(core, *gradient_columns(part))
        grad_s, grad_v = head.adjoint(core, query_moments, ends)
        found.query[index] = grad_t * problem.scale
        found.key[index][kept] = grad_s.to(problem.key.dtype)
        found.value[index][kept] = grad_v.to(problem.value.dtype)
    return found


def double_backward(
    directions: Gradients, grads: OutputGradients, problem: Problem
) -> tuple[OutputGradients, Gradients]:
    """Gradients of <directions, backward(...)> for the output gradients and the inputs."""
    of_out = grads.out.new_zeros(grads.out.shape)
    of_lse = None if grads.lse is None else grads.lse.new_zeros(grads.lse.shape)
    found = _zeros(problem)
    for index, one, kept, head in _heads(problem):
        moves = Gradients(*(x[index] for x in directions))
        part = head_gradients(grads, index)
        if head is None:
            of_part, of_inputs = direct.double_backward(moves, part, one)
            for total, x in zip(found, of_inputs, strict=True):
                total[index] = x
        else:
            to_q, to_k, to_v = (x.detach().double() for x in moves)
            wide = Gradients(to_q * problem.scale, to_k[kept], to_v[kept])
            of_part, of_inputs = second_derivative.double_backward(
                head, wide, OutputGradients(*gradient_columns(part))
            )
            found.query[index] = of_inputs.query * problem.scale
            found.key[index][kept] = of_inputs.key.to(problem.key.dtype)
            found.value[index][kept] = of_inputs.value.to(problem.value.dtype)
        of_out[index] = of_part.out
        if of_lse is not None and of_part.lse is not None:
            of_lse[index] = of_part.lse.reshape(of_lse[index].shape)
    return OutputGradients(of_out, of_lse), found
