"""The two operators on random inputs, as the autograd functions call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


def forward(
    method: str, n: int, rank: int, dv: int = 64, causal: bool = False, **options
) -> Callable:
    """A call of the forward operator; `options` are those of torch.randn."""
    query, key, value = _inputs(n, rank, dv, **options)
    return partial(torch.ops.boltzattn.forward, query, key, value, *_rest(rank, causal, method))


def backward(
    method: str, n: int, rank: int, dv: int = 64, causal: bool = False, **options
) -> Callable:
    """A call of the backward operator on the forward's results."""
    query, key, value = _inputs(n, rank, dv, **options)
    rest = _rest(rank, causal, method)
    out, lse = torch.ops.boltzattn.forward(query, key, value, *rest)
    grad_out = torch.randn_like(out)
    return partial(torch.ops.boltzattn.backward, grad_out, None, query, key, value, out, lse, *rest)


def _inputs(n: int, rank: int, dv: int, **options) -> list[torch.Tensor]:
    return [torch.randn(1, n, width, **options) for width in (rank, rank, dv)]


def _rest(rank: int, causal: bool, method: str) -> tuple:
    """attn_mask, key_mask, seed, scale, dropout_p, is_causal, method, backend."""
    return None, None, None, rank**-0.5, 0.0, causal, method, "auto"
