"""`boltzattn::layer`: rank-1 self-attention, the projections of value and output at the nodes.

The output of a head is linear in its values, and the transform sums values into a few hundred nodes
before anything else happens to them. So `weight = w_o w_v` need not meet the n tokens: sums of the
raw rows are projected instead, and the n d d products of a layer disappear. The results of the
heads add up to `[batch, n, d_out]`. docs/transform.md derives it.

`boltzattn::project` computes the numbers of rank-1 queries and keys, `[batch, outputs, n]`, and
their extents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch import backends
from boltzattn.dispatch.backends import Request
from boltzattn.dispatch.torch_modes import without_autocast
from boltzattn.ops.attention import attention, attention_backward
from boltzattn.ops.operator import Operator, materialize, save, saved
from boltzattn.problem import (
    Choice,
    LayerGradients,
    LayerOutputGradient,
    LayerProblem,
    OutputGradients,
    Problem,
    schema,
    unflatten,
)
from boltzattn.transform.stages import Extent

_AUTO = Choice("auto", "auto")


def _request(problem: LayerProblem) -> Request:
    (batch, heads, n, rank), dv = problem.query.shape, problem.weight.shape[1]
    device, dtype = problem.query.device.type, problem.query.dtype
    return Request(device, dtype, batch * heads, n, n, rank, dv)


def _kernels(problem: LayerProblem, choice: Choice) -> Any:
    taken = backends.select(_request(problem), "layer", choice.backend)
    return backends.kernels(taken.name, "layer")


def _projected_heads(problem: LayerProblem) -> Iterator[Problem]:
    """The attention of every head over values projected first; one at a time, to save memory."""
    mask = None if problem.key_mask is None else problem.key_mask[:, None]
    for head, weight in enumerate(problem.weight):
        values = problem.value @ weight.mT
        if problem.weight_bias is not None:
            values = values + problem.weight_bias[head]
        query, key = problem.query[:, head, None], problem.key[:, head, None]
        yield Problem(query, key, values[:, None], None, mask, None, problem.scale, 0.0, False)


def project_first(problem: LayerProblem) -> Tensor:
    """The layer by projecting every token: differentiable, and the truth for the kernels."""
    out = sum(attention(*head, *_AUTO)[0][:, 0] for head in _projected_heads(problem))
    assert isinstance(out, Tensor)
    return out if problem.out_bias is None else out + problem.out_bias


def _project_first_backward(grad_out: Tensor, problem: LayerProblem) -> LayerGradients:
    """The gradients of `project_first`, inside an operator where autograd is not available."""
    grad_value = torch.zeros_like(problem.value)
    by_head = []
    for head, weight in zip(_projected_heads(problem), problem.weight, strict=True):
        grads = OutputGradients(grad_out[:, None], None)
        results = attention(*head, *_AUTO)
        of_head = attention_backward(*grads, *results, *head, *_AUTO)
        grad_query, grad_key, grad_values = of_head
        grad_value += grad_values[:, 0] @ weight
        by_head.append((grad_query, grad_key, (grad_values[:, 0].mT @ problem.value).sum(0)))
    grad_query, grad_key, grad_weight = zip(*by_head, strict=True)
    return LayerGradients(
        torch.cat(grad_query, 1), torch.cat(grad_key, 1), grad_value, torch.stack(grad_weight)
    )


def _forward(*arguments: Any) -> Tensor:
    problem, choice = unflatten(arguments, LayerProblem, Choice)
    with without_autocast(problem.query.device.type):
        out = _kernels(problem, choice).forward(problem)
        return project_first(problem) if out is None else out.to(problem.value.dtype)


def _backward(grad_out: Tensor, *arguments: Any) -> LayerGradients:
    problem, choice = unflatten(arguments, LayerProblem, Choice)
    with without_autocast(problem.query.device.type):
        grads = _kernels(problem, choice).backward(grad_out, problem)
        if grads is None:
            return _project_first_backward(grad_out, problem)
        return LayerGradients(*(g.to(problem.value.dtype) for g in grads))


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    (batch, n, _), outputs = x.shape, weight.shape[0]
    request = Request(x.device.type, x.dtype, batch * outputs, n, n, 1, 1)
    taken = backends.select(request, "project", backend)
    return backends.kernels(taken.name, "project")(x, weight, bias)


def _forward_fake(*arguments: Any) -> Tensor:
    problem, _ = unflatten(arguments, LayerProblem, Choice)
    batch, _, n, _ = problem.query.shape
    return problem.value.new_empty(batch, n, problem.weight.shape[1])


def _backward_fake(grad_out: Tensor, *arguments: Any) -> LayerGradients:
    problem, _ = unflatten(arguments, LayerProblem, Choice)
    inputs = problem.query, problem.key, problem.value, problem.weight
    return LayerGradients(*(x.new_empty(x.shape) for x in inputs))


def _project_fake(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lead = x.shape[0], weight.shape[0]
    extents = x.new_empty(*lead, len(Extent._fields), dtype=torch.float64)
    return x.new_empty(*lead, x.shape[1]), extents


layer = Operator(f"layer({schema(LayerProblem, Choice)}) -> Tensor", _forward, _forward_fake)
layer_backward = Operator(
    f"layer_backward(Tensor grad_out, {schema(LayerProblem, Choice)}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weight)",
    _backward,
    _backward_fake,
)
project = Operator(
    "project(Tensor x, Tensor weight, Tensor? bias, str backend) -> (Tensor, Tensor)",
    _project,
    _project_fake,
)


class Projection(torch.autograd.Function):
    """The numbers of queries and keys, differentiable, and their extents, which are not."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return project.run(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, weight, bias, _ = inputs
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple:
        x, weight = ctx.saved_tensors
        grad_bias = grad.sum((0, 2)) if ctx.has_bias else None
        return grad.mT @ weight, (grad @ x).sum(0), grad_bias, None


class Layer(torch.autograd.Function):
    """The output of a layer."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return layer.run(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        save(ctx, *unflatten(inputs, LayerProblem, Choice))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple:
        problem, choice = saved(ctx)
        if grad_out is None:
            return (None,) * (len(problem) + len(choice))
        grads = layer_backward(grad_out, *problem, *choice)
        of_biases = _bias_gradients(grad_out, problem)
        others = len(problem) + len(choice) - len(grads) - len(of_biases)
        return *grads, *of_biases, *(None,) * others


def _bias_gradients(grad_out: Tensor, problem: LayerProblem) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight_bias and out_bias."""
    of_weight = of_out = None
    if problem.out_bias is not None:
        of_out = grad_out.sum((0, 1))
    if problem.weight_bias is not None:
        # Softmax weights sum to 1, except where there is no key.
        sums = grad_out.sum(1)
        if problem.key_mask is not None:
            sums = sums * ~problem.key_mask.all(1, keepdim=True)
        of_weight = sums.sum(0).expand_as(problem.weight_bias)
    return of_weight, of_out


class LayerBackward(torch.autograd.Function):
    """LayerGradients, which are differentiable once more."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(layer_backward.run(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        save(ctx, *unflatten(inputs, LayerOutputGradient, LayerProblem, Choice))

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> tuple:
        (grad_out,), problem, choice = saved(ctx)
        inputs = problem.query, problem.key, problem.value, problem.weight
        moves = materialize(directions, inputs)
        second = LayerDoubleBackward.apply(*moves, grad_out, *problem)
        others = len(problem) + len(choice) - len(directions)
        return *second, *(None,) * others


class LayerDoubleBackward(torch.autograd.Function):
    """Gradients of <directions, LayerBackward> for grad_out, query, key, value and weight.

    A Function of its own so that a third derivative raises instead of being wrong.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        directions, (grad_out,), problem = unflatten(
            arguments, LayerGradients, LayerOutputGradient, LayerProblem
        )
        with torch.enable_grad():
            leaves = [
                x.detach().requires_grad_()
                for x in (grad_out, problem.query, problem.key, problem.value, problem.weight)
            ]
            grad_out, query, key, value, weight = leaves
            problem = problem._replace(query=query, key=key, value=value, weight=weight)
            out = project_first(problem._replace(out_bias=None))
            first = torch.autograd.grad(out, leaves[1:], grad_out, create_graph=True)
            return torch.autograd.grad(first, leaves, directions, materialize_grads=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        raise RuntimeError(
            "self_attention can be differentiated twice, and a third derivative was asked for; "
            "write it with (query @ key.mT * scale).softmax(-1) @ value to differentiate further"
        )


layer.differentiate_by(Layer)
layer_backward.differentiate_by(LayerBackward)
project.differentiate_by(Projection)
