"""The operators `attention` and `attention_backward` on random inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from boltzattn.problem import Choice, Problem
from torch import Tensor


def forward(method: str, inputs: tuple[Tensor, Tensor, Tensor], causal: bool = False) -> Callable:
    """A call of the forward operator on `inputs`: query, key, value."""
    return partial(torch.ops.boltzattn.attention, *_arguments(method, inputs, causal))


def backward(method: str, inputs: tuple[Tensor, Tensor, Tensor], causal: bool = False) -> Callable:
    """A call of the backward operator on the results of forward."""
    arguments = _arguments(method, inputs, causal)
    out, lse = torch.ops.boltzattn.attention(*arguments)
    grad_out = torch.randn_like(out)
    return partial(torch.ops.boltzattn.attention_backward, grad_out, None, out, lse, *arguments)


def random_inputs(
    n_q: int, n_k: int, rank: int = 1, dv: int = 64, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """query `[1, n_q, rank]`, key `[1, n_k, rank]`, value `[1, n_k, dv]`, standard normal."""
    shapes = (n_q, rank), (n_k, rank), (n_k, dv)
    query, key, value = (torch.randn(1, *shape, dtype=dtype) for shape in shapes)
    return query, key, value


def _arguments(method: str, inputs: tuple[Tensor, Tensor, Tensor], causal: bool) -> tuple:
    scale = inputs[0].shape[-1] ** -0.5
    problem = Problem(*inputs, *[None] * 4, scale, 0.0, causal, False)
    return *problem, *Choice(method, "auto")
