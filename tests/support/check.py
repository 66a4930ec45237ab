"""One call of attention(), with everything it returns, held to the error rule."""

from __future__ import annotations

from typing import Any

import boltzattn
import torch
from errors import CERTIFIED, assert_accurate, error_of
from oracle import Result, eagers, magnitudes, oracle
from servers import Server
from torch import Tensor


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def run(
    server: Server,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    **call: Any,
) -> Result:
    """Output, lse and gradients as a user gets them; strides are those of the arguments."""
    tensors = tuple(x.detach().requires_grad_() for x in (query, key, value))
    out, lse = boltzattn.attention(*tensors, **call, **server.ask, return_lse=True)
    grads = (grad_out,) if grad_lse is None else (grad_out, grad_lse)
    gradients = torch.autograd.grad((out, lse)[: len(grads)], tensors, grads)
    return Result(out.detach(), lse.detach(), *gradients)


def assert_attention(
    server: Server,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    **call: Any,
) -> Result:
    """The call's results have the right dtypes and obey the error rule; returns them."""
    tensors = (query, key, value, grad_out, grad_lse)
    actual = run(server, *tensors, **call)
    assert actual.lse.dtype == lse_dtype(query.dtype)
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        assert getattr(actual, name).dtype == query.dtype, name
    assert_accurate(
        actual._asdict(),
        oracle(*tensors, **call)._asdict(),
        eagers(*tensors, **call),
        magnitudes=magnitudes(*tensors, **call),
        method=server.method,
    )
    return actual


def assert_alike(one: Result, other: Result, magnitudes: dict[str, float]) -> None:
    """fp32 results of two backends are no farther apart than two certificates."""
    for name, x in one._asdict().items():
        apart = error_of(x, getattr(other, name).double())
        assert apart <= 2 * CERTIFIED[torch.float32] * magnitudes[name], f"{name}: {apart:.3e}"
