"""The two operators `boltzattn::forward` and `boltzattn::backward`, opaque to torch.compile.

The schemas live here, not in C++, so that the operators exist even where the extension was not
built. Method and backend are chosen inside the operator: a compiled graph holds one node whatever
the sizes turn out to be at run time. Tensors are canonical (see `reference`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch import plan
from boltzattn.dispatch.backends import Request
from boltzattn.dispatch.torch_modes import exact, unwatched

library = torch.library.Library("boltzattn", "FRAGMENT")

_CALL = (
    "Tensor? attn_mask, Tensor? key_mask, Tensor? seed, float scale, float dropout_p, "
    "bool is_causal, str method, str backend"
)
library.define(
    f"forward(Tensor query, Tensor key, Tensor value, {_CALL}) -> (Tensor out, Tensor lse)"
)
library.define(
    "backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    f"Tensor out, Tensor lse, {_CALL}) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)


def request_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> Request:
    """The facts of a canonical call."""
    *lead, n_q, rank = query.shape
    n_k, dv = value.shape[-2:]
    return Request(
        device=query.device.type,
        dtype=query.dtype,
        heads=math.prod(lead),
        n_q=n_q,
        n_k=n_k,
        rank=rank,
        dv=dv,
        is_causal=is_causal,
        attn_mask=attn_mask is not None,
        key_bias=key_mask is not None and key_mask.dtype != torch.bool,
        dropout=dropout_p > 0.0,
    )


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
    method: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    request = request_of(query, key, value, attn_mask, key_mask, dropout_p, is_causal)
    forward, _ = plan.choose(request, method, backend).kernels
    with exact(request.device):
        return forward(query, key, value, attn_mask, key_mask, seed, scale, dropout_p, is_causal)


def _backward(
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
    scale: float,
    dropout_p: float,
    is_causal: bool,
    method: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    request = request_of(query, key, value, attn_mask, key_mask, dropout_p, is_causal)
    _, backward = plan.choose(request, method, backend).kernels
    with exact(request.device):
        return backward(
            grad_out,
            grad_lse,
            query,
            key,
            value,
            out,
            lse.contiguous(),
            attn_mask,
            key_mask,
            seed,
            scale,
            dropout_p,
            is_causal,
        )


def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """`torch.ops.boltzattn.forward`, not differentiable, on the shortest way."""
    if unwatched(query, key, value):
        with torch._C._AutoDispatchBelowAutograd():
            return _forward(query, key, value, *rest)
    return torch.ops.boltzattn.forward(query, key, value, *rest)


def backward(grad_out: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.ops.boltzattn.backward` on tensors that are unwatched, not differentiable."""
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(grad_out, *rest)


library.impl("forward", _forward, "CompositeExplicitAutograd")
library.impl("backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("boltzattn::forward", lib=library)
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    rows = query.shape[:-1]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows, dtype=torch.float64)


@torch.library.register_fake("boltzattn::backward", lib=library)
def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
