"""The two operators on random inputs, as the autograd functions call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def forward(method: str, inputs: tuple[Tensor, Tensor, Tensor], causal: bool = False) -> Callable:
    """A call of the forward operator on `inputs`: query, key, value."""
    return partial(torch.ops.boltzattn.forward, *inputs, *_rest(inputs, causal, method))


def backward(method: str, inputs: tuple[Tensor, Tensor, Tensor], causal: bool = False) -> Callable:
    """A call of the backward operator on the forward's results."""
    rest = _rest(inputs, causal, method)
    out, lse = torch.ops.boltzattn.forward(*inputs, *rest)
    return partial(
        torch.ops.boltzattn.backward, torch.randn_like(out), None, *inputs, out, lse, *rest
    )


def random_inputs(
    n_q: int, n_k: int, rank: int = 1, dv: int = 64, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """query `[1, n_q, rank]`, key `[1, n_k, rank]`, value `[1, n_k, dv]`, standard normal."""
    shapes = (n_q, rank), (n_k, rank), (n_k, dv)
    query, key, value = (torch.randn(1, *shape, dtype=dtype) for shape in shapes)
    return query, key, value


def _rest(inputs: tuple[Tensor, Tensor, Tensor], causal: bool, method: str) -> tuple:
    """attn_mask, key_mask, seed, scale, dropout_p, is_causal, method, backend."""
    return None, None, None, inputs[0].shape[-1] ** -0.5, 0.0, causal, method, "auto"
