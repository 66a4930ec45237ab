"""Rank-1 attention in linear time: docs/transform.md, with every shape fixed by dtype and n.

Forward is ranges -> layout -> order of tokens -> moments of the keys -> core -> evaluation at the
queries; backward runs the same way and back. The host never asks the device for a number, so a call
can be captured in a graph. Heads that cannot be served (or whose certificate is not good enough)
are left to the kernels of `direct`, which start in any case and leave served heads alone.

Tokens are taken in the order of their panels, in parts that lie on one panel; partial sums are
added up by a second kernel, in order.

A row of values costs one matrix product with 16 nodes: fp32 with split tf32 operands, summed over a
tile of tokens and then in fp64; half precision as it is, with split weights and summed in fp32.
Coordinates, kernel values and the core are fp64.
"""

from __future__ import annotations

import torch
from boltzattn.triton_kernels import direct, steps
from boltzattn.triton_kernels.heads import strided
from boltzattn.triton_kernels.launch import on_device
from torch import Tensor


def transform_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None,
    key_mask: Tensor | None,
    seed: None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """(out [*L, n_q, dv] in the dtype of query, lse [*L, n_q] fp64)."""
    if 0 in (query.shape[-2], key.shape[-2]):
        return direct.direct_forward(query, key, value, None, key_mask, None, scale, 0.0, False)
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64)
    with on_device(query):
        call = steps.prepare(query, key, value, key_mask, scale, slopes=False)
        steps.evaluate(call, call.node_out, out, lse)
    direct.run_forward(
        query, key, value, None, key_mask, None, scale, 0.0, False, call.served, out, lse
    )
    return out, lse


def transform_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: None,
    key_mask: Tensor | None,
    seed: None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    tensors = (grad_out, grad_lse, query, key, value, out, lse, None, key_mask, None)
    if 0 in (query.shape[-2], key.shape[-2]):
        return direct.direct_backward(*tensors, scale, 0.0, False)
    # Masked keys are left out of the order of keys, and have no gradient.
    grads = tuple(
        x.new_empty(x.shape) if key_mask is None else x.new_zeros(x.shape)
        for x in (query, key, value)
    )
    with on_device(query):
        call = steps.prepare(query, key, value, key_mask, scale, slopes=True)
        to_query, sums, lse_sums = steps.query_gradient(
            call, call.node_slopes, strided(grad_out, 2), strided(grad_lse, 1)
        )
        to_key = steps.key_gradient(call, steps.adjoint(call, sums, lse_sums), grads[2])
        for grad, found in ((grads[0], to_query), (grads[1], to_key)):
            grad.copy_(found.view(grad.shape))
    direct.run_backward(*tensors, scale, 0.0, False, call.served, grads)
    return grads
