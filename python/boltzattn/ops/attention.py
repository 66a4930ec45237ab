"""`boltzattn::attention` and `boltzattn::attention_backward`, with their derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from boltzattn.dispatch import plan
from boltzattn.dispatch.backends import Request
from boltzattn.dispatch.preference import react_to_quadratic
from boltzattn.dispatch.torch_modes import forward_mode_active, full_precision, without_autocast
from boltzattn.ops import hidden_sequences
from boltzattn.ops.operator import (
    Operator,
    batched,
    materialize,
    output_gradients,
    save,
    saved,
)
from boltzattn.problem import (
    Choice,
    Directions,
    Gradients,
    OutputGradients,
    Problem,
    Saved,
    unflatten,
)
from boltzattn.reference import direct as reference_direct
from boltzattn.reference import transform as reference_transform


def _forward(problem: Problem, choice: Choice) -> Saved:
    request = Request.of(problem)
    if request.attn_mask or request.dropout:
        reason = plan.quadratic_reason(request, choice)
        if reason is not None:
            react_to_quadratic(reason)
    if problem.key_mask is not None or problem.attn_mask is not None:
        hidden_sequences.notice(problem.attn_mask, problem.key_mask)
    kernels = plan.choose(request, choice).kernels
    with without_autocast(request.device):
        return kernels.forward(problem)


def _backward(
    grads: OutputGradients, results: Saved, problem: Problem, choice: Choice
) -> Gradients:
    request = Request.of(problem)
    kernels = plan.choose(request, choice).kernels
    with without_autocast(request.device):
        return kernels.backward(grads, results._replace(lse=results.lse.contiguous()), problem)


def _forward_fake(problem: Problem, choice: Choice) -> Saved:
    query, rows = problem.query, problem.query.shape[:-1]
    out = query.new_empty(*rows, problem.value.shape[-1])
    return Saved(out, query.new_empty(rows, dtype=torch.float64))


def _backward_fake(
    grads: OutputGradients, results: Saved, problem: Problem, choice: Choice
) -> Gradients:
    return problem.new_gradients()


RESULTS_OF_BACKWARD = (
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_key_mask, "
    "Tensor grad_slopes)"
)
attention = Operator(
    "attention", (Problem, Choice), "(Tensor out, Tensor lse)", _forward, _forward_fake
)
attention_backward = Operator(
    "attention_backward",
    (OutputGradients, Saved, Problem, Choice),
    RESULTS_OF_BACKWARD,
    _backward,
    _backward_fake,
)


def by_argument(found: Sequence[Tensor], problem: Problem) -> tuple[Tensor | None, ...]:
    """Gradients in the order of the fields of a problem, up to the last that has one."""
    query, key, value, key_mask, slopes = found
    bias = None if problem.key_bias is None else key_mask.to(problem.key_bias.dtype)
    return query, key, value, None, bias, None if problem.slopes is None else slopes


def _moves(directions: tuple[Tensor | None, ...], problem: Problem) -> Directions:
    """Zeros for directions that autograd left out; None for what a problem does not have."""
    query, key, value, key_mask, slopes = directions
    found = materialize((query, key, value), problem.inputs)
    bias = None if problem.key_bias is None else key_mask
    return Directions._make((*found, bias, None if problem.slopes is None else slopes))


class Attention(torch.autograd.Function):
    """Saved(out, lse) of a problem and a choice."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return tuple(attention.run(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        save(ctx, Saved(*output), *unflatten(inputs, Problem, Choice))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
        results, problem, choice = saved(ctx)
        arguments = len(problem) + len(choice)
        asked = output_gradients(grad_out, grad_lse, results)
        if asked is None:
            return (None,) * arguments
        grads, results = asked
        found = attention_backward(grads, results, problem, choice)
        of_problem = by_argument(found, problem)
        return *of_problem, *(None,) * (arguments - len(of_problem))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[Any, tuple]:
        found = attention(*unflatten(batched(info, in_dims, arguments), Problem, Choice))
        return tuple(found), (0, 0)


class AttentionBackward(torch.autograd.Function):
    """Gradients of a problem, which are differentiable once more.

    `out` and `lse` are functions of the other inputs. They are passed to save work, not as
    variables, so no gradient is returned for them.
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(attention_backward.run(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        save(ctx, *unflatten(inputs, OutputGradients, Saved, Problem, Choice))

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> tuple:
        grads, _, problem, choice = saved(ctx)
        moves = _moves(directions, problem)
        of_out, of_lse, *of_inputs = AttentionDoubleBackward.apply(
            *moves, *grads, *problem, *choice
        )
        of_problem = by_argument(of_inputs, problem)
        rest = (None,) * (len(problem) + len(choice) - len(of_problem))
        return of_out, of_lse, None, None, *of_problem, *rest

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[Any, tuple]:
        kinds = attention_backward.kinds
        grads, results, problem, choice = unflatten(batched(info, in_dims, arguments), *kinds)
        found = attention_backward(grads, results, problem, choice)
        given = (*problem.inputs, problem.key_bias, problem.slopes)
        return tuple(found), tuple(None if x is None else 0 for x in given)


class AttentionDoubleBackward(torch.autograd.Function):
    """Gradients of <directions, AttentionBackward> for the output gradients and the inputs.

    A Function of its own so that a third derivative raises: `once_differentiable` would let parts
    of it through as zeros.
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        directions, grads, problem, choice = unflatten(
            arguments, Directions, OutputGradients, Problem, Choice
        )
        request = Request.of(problem)
        # With symbolic sizes there is no plan yet; `direct` serves everything.
        sizes_known = isinstance(request.n_q, int) and isinstance(request.n_k, int)
        by_transform = (
            sizes_known
            and not (problem.is_causal or problem.is_gaussian)
            and problem.key_bias is None
            and plan.choose(request, choice).method == "transform"
        )
        reference = reference_transform if by_transform else reference_direct
        with full_precision(request.device):
            of_grads, of_inputs = reference.double_backward(directions, grads, problem)
        return *of_grads, *of_inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        raise RuntimeError(
            "attention can be differentiated twice, and a third derivative was asked for; "
            "write it as (query @ key.mT * scale).softmax(-1) @ value to differentiate further"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[Any, tuple]:
        results = AttentionDoubleBackward.apply(*batched(info, in_dims, arguments))
        empty = [x is None or (i >= 5 and x.numel() == 0) for i, x in enumerate(results)]
        return results, tuple(None if nothing else 0 for nothing in empty)


def tangent(results: Saved, problem: Problem, choice: Choice, tangents: tuple) -> Saved:
    """The tangents of out and lse for those of the fields of a problem.

    <tangents, backward(g)> is linear in g, and its gradient for g is what forward mode asks for.
    """
    zeros = OutputGradients(torch.zeros_like(results.out), torch.zeros_like(results.lse))
    query, key, value, _, key_mask, slopes, *_ = tangents
    moves = _moves((query, key, value, key_mask, slopes), problem)
    of_out, of_lse, *_ = AttentionDoubleBackward.apply(*moves, *zeros, *problem, *choice)
    return Saved(of_out, of_lse)


def _attention_jvp(ctx: Any, *tangents: Any) -> Saved:
    results, problem, choice = saved(ctx)
    return tangent(results, problem, choice, tangents)


def _attention_backward_jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
    """Backward is linear in grads; its derivative by the inputs is a Hessian, so symmetric."""
    grads, results, problem, choice = saved(ctx)
    moved, _, by_input, _ = unflatten(tangents, OutputGradients, Saved, Problem, Choice)
    moves = _moves((*by_input.inputs, by_input.key_mask, by_input.slopes), problem)
    _, _, *found = AttentionDoubleBackward.apply(*moves, *grads, *problem, *choice)
    if moved.out is not None or moved.lse is not None:
        (grad_out,) = materialize((moved.out,), (grads.out,))
        moved = moved._replace(out=grad_out)
        of_moved = attention_backward(moved, results, problem, choice)
        found = [a + b for a, b in zip(found, of_moved, strict=True)]
    return tuple(found)


attention.differentiate_by(Attention, _attention_jvp)
attention_backward.differentiate_by(AttentionBackward, _attention_backward_jvp)
attention.batch_by_vmap(2)


def mask_is_differentiated(problem: Problem) -> bool:
    """Whether a derivative by attn_mask is asked for, in reverse or in forward mode."""
    mask = problem.attn_mask
    if mask is None or not mask.is_floating_point():
        return False
    if forward_mode_active() and forward_ad.unpack_dual(mask).tangent is not None:
        return True
    return mask.requires_grad and torch.is_grad_enabled()


def attend(problem: Problem, choice: Choice) -> Saved:
    """Attention, differentiable in every argument."""
    if mask_is_differentiated(problem):
        return plan.choose(Request.of(problem, mask_gradient=True), choice).kernels(problem)
    return attention(problem, choice)
