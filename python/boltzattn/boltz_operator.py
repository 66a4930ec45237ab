"""The Boltzmann operator, with a gradient of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch.torch_modes import forward_mode_active
from boltzattn.ops.operator import with_jvp
from boltzattn.validation import kind_of, shape_of


def _boltz_parts(a: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(maximum, gaps below it, softmax, mean gap) along dim, all but the gaps of size 1 there.

    The maximum only shifts: it takes no part in derivatives. Entries of -inf get gap and weight 0.
    """
    top = a.detach().amax(dim, keepdim=True)
    gap = top - a
    weight = torch.exp(-gap)
    gap = torch.where(weight == 0, 0.0, gap)
    p = weight / weight.sum(dim, keepdim=True)
    return top, gap, p, (gap * p).sum(dim, keepdim=True)


def _slope(a: Tensor, dim: int) -> Tensor:
    """d boltz / da_i, in torch operations: double backward differentiates it."""
    _, gap, p, mean_gap = _boltz_parts(a, dim)
    return p * (1 + (mean_gap - gap))


class _Boltz(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, dim: int) -> Tensor:
        top, _, _, mean_gap = _boltz_parts(a, dim)
        return (top - mean_gap).squeeze(dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        a, ctx.dim = inputs
        ctx.save_for_backward(a)
        ctx.save_for_forward(a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (a,) = ctx.saved_tensors
        return grad.unsqueeze(ctx.dim) * _slope(a, ctx.dim), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, a: Tensor, dim: int) -> tuple[Tensor, int]:
        a = a.movedim(in_dims[0], 0)
        return _apply(a, dim if dim < 0 else dim + 1), 0


def _boltz_jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
    (a,) = ctx.saved_tensors
    return (tangent * _slope(a, ctx.dim)).sum(ctx.dim)


_ForwardModeBoltz = with_jvp(_Boltz, _boltz_jvp)


def _apply(a: Tensor, dim: int) -> Tensor:
    return (_ForwardModeBoltz if forward_mode_active() else _Boltz).apply(a, dim)


def boltz(a: Tensor, dim: int = -1) -> Tensor:
    """The Boltzmann operator `sum_i a_i softmax(a)_i` over `dim`: a smooth maximum.

    It lies between `mean(a)` and `max(a)`, and equals `logsumexp(a) - entropy(softmax(a))`.
    Computed as `max - mean gap`, so it does not overflow and keeps its digits for large `a`.
    Entries of -inf take no part. The gradient is `p_i (1 + a_i - boltz(a))`, differentiable again.

    Args:
        a: floating-point, with at least one element along `dim`.
        dim: the dimension that is reduced.

    Example:
        >>> boltzattn.boltz(torch.tensor([0.0, 0.0]))
        tensor(0.)
    """
    if not isinstance(a, Tensor) or not a.is_floating_point():
        raise TypeError(f"a must be a floating-point tensor, got {kind_of(a)}")
    if a.ndim == 0:
        raise ValueError("a must have at least one dimension, got a scalar; use a.reshape(1)")
    if not -a.ndim <= dim < a.ndim:
        raise ValueError(f"dim must be between {-a.ndim} and {a.ndim - 1}, got {dim}")
    if a.shape[dim] == 0:
        raise ValueError(
            f"a must not be empty along dim {dim}, got shape {shape_of(a)}: the Boltzmann operator "
            "of nothing is undefined"
        )
    return _apply(a, dim)
