"""Rank-1 self-attention with the value and output projections applied at the nodes.

The output of a head is linear in its values, and the transform sums values into a few hundred nodes
before anything else happens to them. So `weight = w_o w_v` need not meet the n tokens: sums of the
raw rows are projected instead, and the n d d products of a layer disappear. docs/transform.md.

Shapes: query, key `[batch, heads, n, 1]`; value `[batch, n, d]`, shared by the heads; weight
`[heads, d_out, d]`; weight_bias `[heads, d_out]`; out_bias `[d_out]`; key_mask `[batch, n]`, bool;
extents `[batch, 2 * heads, 6]`, what `project` found out about the queries and keys; backend "cpu"
or "triton". The heads' results add up to `[batch, n, d_out]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch import backends
from boltzattn.dispatch.torch_modes import exact
from boltzattn.ops import attention as ops
from boltzattn.ops.autograd import Attention

_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor weight, Tensor? weight_bias, Tensor? out_bias, "
    "Tensor? key_mask, Tensor? extents, float scale, str backend"
)
ops.library.define(f"layer_forward({_CALL}) -> Tensor")
ops.library.define(
    f"layer_backward(Tensor grad_out, {_CALL}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_weight)"
)
ops.library.define("project(Tensor x, Tensor weight, Tensor? bias) -> (Tensor, Tensor)")


def project_first(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    weight_bias: Tensor | None,
    out_bias: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """The layer by projecting every token: differentiable, and what the nodes must agree with.

    One head at a time, so that memory stays a few times that of the output.
    """
    mask = None if key_mask is None else key_mask[:, None]
    out = None
    for head in range(query.shape[1]):
        values = value @ weight[head].mT
        if weight_bias is not None:
            values = values + weight_bias[head]
        part, _ = Attention.apply(
            query[:, head, None],
            key[:, head, None],
            values[:, None],
            None,
            mask,
            None,
            (scale, 0.0, False, "auto", "auto"),
        )
        out = part[:, 0] if out is None else out + part[:, 0]
    assert out is not None
    return out if out_bias is None else out + out_bias


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    weight_bias: Tensor | None,
    out_bias: Tensor | None,
    key_mask: Tensor | None,
    extents: Tensor | None,
    scale: float,
    backend: str,
) -> Tensor:
    call = query, key, value, weight, weight_bias, out_bias, key_mask
    with exact(query.device.type):
        if backend == "triton":
            from boltzattn.triton_kernels.layer import layer_forward

            return layer_forward(*call, scale)
        backends.extension()  # loads the operators
        out, served = torch.ops.boltzattn.cpu_layer_forward(*call, extents, scale)
        return out.to(value.dtype) if served else project_first(*call, scale)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    weight_bias: Tensor | None,
    out_bias: Tensor | None,
    key_mask: Tensor | None,
    extents: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = query, key, value, weight
    with exact(query.device.type):
        served = True
        if backend == "triton":
            from boltzattn.triton_kernels.layer import layer_backward

            grads = layer_backward(grad_out, *inputs, key_mask, scale)
        else:
            *grads, served = torch.ops.boltzattn.cpu_layer_backward(
                grad_out, *inputs, weight_bias, key_mask, extents, scale
            )
        if served:
            to_query, to_key, to_value, to_weight = (
                g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)
            )
            return to_query, to_key, to_value, to_weight
        return _backward_first(grad_out, *inputs, weight_bias, key_mask, scale)


def _backward_first(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    weight_bias: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `project_first`, where autograd is out of reach: inside an operator."""
    grad_value = torch.zeros_like(value)
    by_head = []
    masks = None, None if key_mask is None else key_mask[:, None], None
    options = scale, 0.0, False, "auto", "auto"
    for head in range(query.shape[1]):
        values = value @ weight[head].mT
        if weight_bias is not None:
            values = values + weight_bias[head]
        call = query[:, head, None], key[:, head, None], values[:, None]
        out, lse = torch.ops.boltzattn.forward(*call, *masks, *options)
        *grads, grad_values = torch.ops.boltzattn.backward(
            grad_out[:, None], None, *call, out, lse, *masks, *options
        )
        grad_value += grad_values[:, 0] @ weight[head]
        by_head.append((*grads, (grad_values[:, 0].mT @ value).sum(0)))
    grad_query, grad_key, grad_weight = zip(*by_head, strict=True)
    return torch.cat(grad_query, 1), torch.cat(grad_key, 1), grad_value, torch.stack(grad_weight)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from boltzattn.triton_kernels.project import project

        return project(x, weight, bias)
    backends.extension()  # loads the operators
    return torch.ops.boltzattn.cpu_project(x, weight, bias)


for _name, _kernel in (
    ("layer_forward", _forward),
    ("layer_backward", _backward),
    ("project", _project),
):
    ops.library.impl(_name, _kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("boltzattn::layer_forward", lib=ops.library)
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return value.new_empty(query.shape[0], query.shape[2], weight.shape[1])


@torch.library.register_fake("boltzattn::layer_backward", lib=ops.library)
def _backward_fake(grad_out: Tensor, *call: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in call[:4])


@torch.library.register_fake("boltzattn::project", lib=ops.library)
def _project_fake(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lead = x.shape[0], weight.shape[0]
    return x.new_empty(*lead, x.shape[1]), x.new_empty(*lead, 6, dtype=torch.float64)


class Projection(torch.autograd.Function):
    """The numbers of rank-1 queries and keys, `[batch, outputs, n]`, and their extents."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.ops.boltzattn.project(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_bias = grad.sum((0, 2)) if ctx.biased else None
        return grad.mT @ weight, (grad @ x).sum(0), grad_bias


class Layer(torch.autograd.Function):
    """The layer, of tensors as above."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        weight_bias: Tensor | None,
        out_bias: Tensor | None,
        key_mask: Tensor | None,
        extents: Tensor | None,
        scale: float,
        backend: str,
    ) -> Tensor:
        return torch.ops.boltzattn.layer_forward(
            query, key, value, weight, weight_bias, out_bias, key_mask, extents, scale, backend
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        *tensors, ctx.scale, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple:
        grads = LayerBackward.apply(grad_out, *ctx.saved_tensors, ctx.scale, ctx.backend)
        weight_bias, out_bias, key_mask = ctx.saved_tensors[4:7]
        grad_weight_bias = grad_out_bias = None
        if out_bias is not None:
            grad_out_bias = grad_out.sum((0, 1))
        if weight_bias is not None:
            # Softmax weights sum to 1, except where there is no key.
            sums = grad_out.sum(1)
            if key_mask is not None:
                sums = sums * ~key_mask.all(1, keepdim=True)
            grad_weight_bias = sums.sum(0).expand_as(weight_bias)
        return *grads, grad_weight_bias, grad_out_bias, None, None, None, None


class LayerBackward(torch.autograd.Function):
    """(grad_query, grad_key, grad_value, grad_weight), differentiable once more."""

    @staticmethod
    def forward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        weight_bias: Tensor | None,
        out_bias: Tensor | None,
        key_mask: Tensor | None,
        extents: Tensor | None,
        scale: float,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        call = query, key, value, weight, weight_bias, out_bias, key_mask, extents, scale, backend
        return torch.ops.boltzattn.layer_backward(grad_out, *call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.scale, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        *variables, weight_bias, _out_bias, key_mask, _extents = ctx.saved_tensors
        second = LayerDoubleBackward.apply(*grads, *variables, weight_bias, key_mask, ctx.scale)
        return *second, None, None, None, None, None, None


class LayerDoubleBackward(torch.autograd.Function):
    """Gradients of <grads, LayerBackward> for grad_out, query, key, value and weight.

    A Function of its own so that a third derivative raises instead of being wrong.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        grads, variables, (weight_bias, key_mask, scale) = args[:4], args[4:9], args[9:]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in variables]
            grad_out, query, key, value, weight = leaves
            out = project_first(query, key, value, weight, weight_bias, None, key_mask, scale)
            first = torch.autograd.grad(out, leaves[1:], grad_out, create_graph=True)
            return torch.autograd.grad(first, leaves, grads, materialize_grads=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        raise RuntimeError(
            "self_attention has two derivatives, and a third was asked for; write it with "
            "(query @ key.mT * scale).softmax(-1) @ value to differentiate further"
        )


def above_autograd(operator: Any, function: type[torch.autograd.Function]) -> Any:
    """An Autograd kernel, so that calling the bare operator is differentiable."""

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return function.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return call


for _name, _function in (
    ("layer_forward", Layer),
    ("layer_backward", LayerBackward),
    ("project", Projection),
):
    _operator = getattr(torch.ops.boltzattn, _name)
    ops.library.impl(_name, above_autograd(_operator, _function), "Autograd")
