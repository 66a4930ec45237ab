"""`boltzattn::attention` and `boltzattn::attention_backward`, with their derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from boltzattn.dispatch import plan
from boltzattn.dispatch.backends import Request
from boltzattn.dispatch.torch_modes import forward_mode_active, full_precision, without_autocast
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
    return Gradients(*(x.new_empty(x.shape) for x in problem.inputs))


attention = Operator(
    "attention", (Problem, Choice), "(Tensor out, Tensor lse)", _forward, _forward_fake
)
attention_backward = Operator(
    "attention_backward",
    (OutputGradients, Saved, Problem, Choice),
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    _backward,
    _backward_fake,
)


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
        return *found, *(None,) * (arguments - len(found))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[Any, tuple]:
        found = attention(*unflatten(batched(info, in_dims, arguments), Problem, Choice))
        return tuple(found), (0, 0)


class AttentionBackward(torch.autograd.Function):
    """Gradients(query, key, value), which are differentiable once more.

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
        moves = materialize(directions, problem.inputs)
        of_out, of_lse, *of_inputs = AttentionDoubleBackward.apply(
            *moves, *grads, *problem, *choice
        )
        rest = (None,) * (len(problem) + len(choice) - len(moves))
        return of_out, of_lse, None, None, *of_inputs, *rest

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple[Any, tuple]:
        kinds = attention_backward.kinds
        found = attention_backward(*unflatten(batched(info, in_dims, arguments), *kinds))
        return tuple(found), (0, 0, 0)


class AttentionDoubleBackward(torch.autograd.Function):
    """Gradients of <directions, AttentionBackward> for the output gradients and the inputs.

    A Function of its own so that a third derivative raises: `once_differentiable` would let parts
    of it through as zeros.
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        directions, grads, problem, choice = unflatten(
            arguments, Gradients, OutputGradients, Problem, Choice
        )
        request = Request.of(problem)
        # With symbolic sizes there is no plan yet; `direct` serves everything.
        sizes_known = isinstance(request.n_q, int) and isinstance(request.n_k, int)
        by_transform = (
            sizes_known
            and not problem.is_causal
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
        return results, tuple(None if x is None else 0 for x in results)


def tangent(results: Saved, problem: Problem, choice: Choice, tangents: tuple) -> Saved:
    """The tangents of out and lse for those of query, key and value.

    <tangents, backward(g)> is linear in g, and its gradient for g is what forward mode asks for.
    """
    zeros = OutputGradients(torch.zeros_like(results.out), torch.zeros_like(results.lse))
    moves = materialize(tangents[:3], problem.inputs)
    of_out, of_lse, *_ = AttentionDoubleBackward.apply(*moves, *zeros, *problem, *choice)
    return Saved(of_out, of_lse)


def _attention_jvp(ctx: Any, *tangents: Any) -> Saved:
    results, problem, choice = saved(ctx)
    return tangent(results, problem, choice, tangents)


def _attention_backward_jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
    """Backward is linear in grads; its derivative by the inputs is a Hessian, so symmetric."""
    grads, results, problem, choice = saved(ctx)
    moved, _, by_input, _ = unflatten(tangents, OutputGradients, Saved, Problem, Choice)
    moves = materialize(by_input.inputs, problem.inputs)
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
    """Whether a derivative by a mask is asked for, in reverse or in forward mode."""
    for mask in (problem.attn_mask, problem.key_mask):
        if mask is None or not mask.is_floating_point():
            continue
        if forward_mode_active() and forward_ad.unpack_dual(mask).tangent is not None:
            return True
        if mask.requires_grad and torch.is_grad_enabled():
            return True
    return False


def attend(problem: Problem, choice: Choice) -> Saved:
    """Attention, differentiable in every argument."""
    if mask_is_differentiated(problem):
        return plan.choose(Request.of(problem, mask_gradient=True), choice).kernels(problem)
    return attention(problem, choice)
