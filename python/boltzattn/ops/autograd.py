"""The two torch.autograd.Functions over the operators of `ops`, with their vmap rules."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch import plan
from boltzattn.dispatch.torch_modes import unwatched
from boltzattn.ops import attention as ops
from boltzattn.ops.attention import library, request_of
from boltzattn.reference import direct as reference
from boltzattn.reference import transform as reference_transform

Options = tuple[float, float, bool, str, str]  # scale, dropout_p, is_causal, method, backend


def _batched(info: Any, in_dims: tuple, tensors: tuple) -> list[Tensor | None]:
    """Give every tensor the vmapped axis as its first leading axis, by stride 0 where it has none.

    Canonical tensors may have any number of leading axes, so batching a call is just another call.
    """

    def batch(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        if dim is None:
            return x.unsqueeze(0).expand(info.batch_size, *x.shape)
        return x.movedim(dim, 0)

    return [batch(x, dim) for x, dim in zip(tensors, in_dims, strict=True)]


class Attention(torch.autograd.Function):
    """(out, lse) of canonical tensors; lse is fp64."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_mask: Tensor | None,
        seed: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        return ops.forward(query, key, value, attn_mask, key_mask, seed, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
        query, key, value, attn_mask, key_mask, seed, out, lse = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return (None,) * 7
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        tensors = (
            grad_out,
            grad_lse,
            query,
            key,
            value,
            out.detach(),
            lse.detach(),
            attn_mask,
            key_mask,
            seed,
        )
        if not torch.is_grad_enabled() and unwatched(grad_out, query, key, value):
            grads = ops.backward(*tensors, *ctx.options)
        else:
            grads = AttentionBackward.apply(*tensors, ctx.options)
        return *grads, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, Tensor], tuple]:
        *tensors, options = args
        return Attention.apply(*_batched(info, in_dims[:-1], tuple(tensors)), options), (0, 0)


class AttentionBackward(torch.autograd.Function):
    """(grad_query, grad_key, grad_value), itself differentiable once more.

    `out` and `lse` are functions of the other inputs; they are passed to save work, not as
    variables, so no gradient is returned for them.
    """

    @staticmethod
    def forward(
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
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.boltzattn.backward(
            grad_out, grad_lse, query, key, value, out, lse, attn_mask, key_mask, seed, *options
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        grad_out, grad_lse, query, key, value, _out, _lse, attn_mask, key_mask, seed, options = (
            inputs
        )
        ctx.options = options
        ctx.save_for_backward(grad_out, grad_lse, query, key, value, attn_mask, key_mask, seed)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        results = AttentionDoubleBackward.apply(*grads, *ctx.saved_tensors, ctx.options)
        return *results, None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple]:
        *tensors, options = args
        batched = _batched(info, in_dims[:-1], tuple(tensors))
        return AttentionBackward.apply(*batched, options), (0, 0, 0)


class AttentionDoubleBackward(torch.autograd.Function):
    """Gradients of <grads, AttentionBackward> for grad_out, grad_lse, query, key and value.

    A Function of its own so that a third derivative raises: `once_differentiable` would let parts
    of it through as zeros. And vmap's batches are just more heads here too.
    """

    @staticmethod
    def forward(
        to_query: Tensor | None,
        to_key: Tensor | None,
        to_value: Tensor | None,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_mask: Tensor | None,
        seed: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        scale, dropout_p, is_causal, method, backend = options
        tensors = (to_query, to_key, to_value), grad_out, grad_lse, query, key, value
        request = request_of(query, key, value, attn_mask, key_mask, dropout_p, is_causal)
        # While sizes are symbolic nothing is known of the plan; `direct` serves everything.
        sizes_known = isinstance(request.n_q, int) and isinstance(request.n_k, int)
        if (
            sizes_known
            and not is_causal
            and plan.choose(request, method, backend).method == "transform"
        ):
            return reference_transform.transform_double_backward(*tensors, key_mask, scale)
        return reference.direct_double_backward(
            *tensors, attn_mask, key_mask, seed, scale, dropout_p, is_causal
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        raise RuntimeError(
            "attention has two derivatives, and a third was asked for; "
            "write it as (query @ key.mT * scale).softmax(-1) @ value to differentiate further"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor | None, ...], tuple]:
        *tensors, options = args
        batched = _batched(info, in_dims[:-1], tuple(tensors))
        results = AttentionDoubleBackward.apply(*batched, options)
        return results, tuple(None if x is None else 0 for x in results)


# torch binds the arguments of `forward` anew at every call; its signature, found once, saves more
# time than a small call takes.
_functions: tuple[Any, ...] = (Attention, AttentionBackward)
for _function in _functions:
    _function.forward.__signature__ = inspect.signature(_function.forward)


def _differentiable(operator: Any, function: type[torch.autograd.Function], tensors: int) -> Any:
    """An Autograd kernel, so that calling the bare operator is differentiable too."""

    def call(*args: Any) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in args[:tensors]
        ):
            return function.apply(*args[:tensors], args[tensors:])
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return call


@torch.library.register_vmap("boltzattn::forward", lib=library)
def _forward_vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, Tensor], tuple]:
    return torch.ops.boltzattn.forward(*_batched(info, in_dims[:6], args[:6]), *args[6:]), (0, 0)


library.impl("forward", _differentiable(torch.ops.boltzattn.forward, Attention, 6), "Autograd")
library.impl(
    "backward", _differentiable(torch.ops.boltzattn.backward, AttentionBackward, 10), "Autograd"
)
