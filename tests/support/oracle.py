"""Attention as its definition says it, all scores at once: what everything is compared with.

It shares no line with the package. `eager` is the yardstick of the error rule, materialised
softmax in the dtype of the inputs; `oracle` is the truth: the same in fp64, or in numpy's
extended precision if the inputs are fp64 themselves (against fp64, eager fp64 would look exact).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

EAGER_RUNS = 32


class Result(NamedTuple):
    """Everything a call can be asked for; gradients are of <grad_out, out> + <grad_lse, lse>."""

    out: Tensor
    lse: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor


def logit_bias(
    n_q: int,
    n_k: int,
    dtype: torch.dtype,
    *,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    has_heads: bool = True,
) -> Tensor:
    """All masks of a call as one tensor [..., n_q, n_k] to add: -inf where not to attend."""

    def additive(mask: Tensor, true_means_ignore: bool) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(dtype)
        ignored = mask if true_means_ignore else ~mask
        return torch.zeros(mask.shape, dtype=dtype).masked_fill(ignored, -math.inf)

    bias = torch.zeros(n_q, n_k, dtype=dtype)
    if is_causal:
        bias = bias + additive(torch.ones(n_q, n_k, dtype=torch.bool).tril(), False)
    if attn_mask is not None:
        bias = bias + additive(attn_mask, False)
    if key_padding_mask is not None:
        columns = key_padding_mask[..., None, None, :] if has_heads else key_padding_mask
        bias = bias + additive(columns, True)
    return bias


def _same_lead(*tensors: Tensor) -> list[Tensor]:
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in tensors))
    return [x.expand(*lead, *x.shape[-2:]) for x in tensors]


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    gaussian: bool = False,
    added: Tensor | None = None,
    order: int = 0,
    **masks: Any,
) -> tuple[Tensor, Tensor]:
    """(out [..., n_q, dv], lse [..., n_q]) in the dtype of the inputs, differentiable.

    `keep` [..., n_q, n_k] says which weights dropout left alive, and `added` is added to the
    logits, which are -scale / 2 |q - k|^2 if `gaussian`. Order 0 does it as PyTorch's own
    SDPA, the root of the scale on either side; every other order is the same computation with
    other roundings: queries, keys and rank permuted, the scale divided unevenly.
    """
    query, key, value = _same_lead(query, key, value)
    n_q, n_k, rank = query.shape[-2], key.shape[-2], query.shape[-1]
    scale = rank**-0.5 if scale is None else scale
    rows, columns, ranks = torch.arange(n_q), torch.arange(n_k), torch.arange(rank)
    to_query = math.sqrt(abs(scale)) or 1.0
    if order:
        draw = torch.Generator().manual_seed(order)
        rows, columns, ranks = (
            x[torch.randperm(len(x), generator=draw)] for x in (rows, columns, ranks)
        )
        to_query *= 1.0 + torch.rand((), generator=draw).item()

    q, k = query[..., rows, :][..., ranks], key[..., columns, :][..., ranks]
    if gaussian:
        gaps = (q[..., :, None, :] - k[..., None, :, :]) * to_query
        logits = gaps.square().sum(-1) * (-0.5 * scale / to_query**2)
    else:
        logits = (q * to_query) @ (k * (scale / to_query)).transpose(-1, -2)
    if added is not None:
        logits = logits + added[..., rows, :][..., columns]
    bias = logit_bias(n_q, n_k, query.dtype, **masks, has_heads=query.ndim > 2)
    logits = logits + bias[..., rows, :][..., columns]
    # Rows that may attend to nothing are zeros by definition, with lse -inf and no gradient.
    dead = (logits == -math.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(dead, 0.0)
    weights = logits.softmax(-1).masked_fill(dead, 0.0)
    lse = logits.logsumexp(-1).masked_fill(dead.squeeze(-1), -math.inf)
    if keep is not None:
        weights = weights * keep[..., rows, :][..., columns] / (1.0 - dropout_p)
    out = weights @ value[..., columns, :]
    back = rows.argsort()
    return out[..., back, :], lse[..., back]


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    **call: Any,
) -> Result:
    """`dense` and its gradients by autograd, in the dtype of the inputs."""
    tensors = tuple(x.detach().requires_grad_() for x in (query, key, value))
    out, lse = dense(*tensors, **call)
    grads = (grad_out,) if grad_lse is None else (grad_out, grad_lse.to(lse.dtype))
    gradients = torch.autograd.grad((out, lse)[: len(grads)], tensors, grads)
    return Result(out.detach(), lse.detach(), *gradients)


def eagers(*tensors: Tensor | None, **call: Any) -> Iterator[dict[str, Tensor]]:
    """Eager results that differ by nothing but the luck of their roundings, computed on demand."""
    return (eager(*tensors, **call, order=order)._asdict() for order in range(EAGER_RUNS))


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    **call: Any,
) -> Result:
    """The true output, lse and gradients for these inputs, rounded to fp64."""
    if query.dtype == torch.float64:
        return _extended(query, key, value, grad_out, grad_lse, **call)
    doubles = (x.double() for x in (query, key, value, grad_out))
    return eager(*doubles, None if grad_lse is None else grad_lse.double(), **call)


def magnitudes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    *,
    scale: float | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    **masks: Any,
) -> dict[str, float]:
    """How large the terms are whose sums the results are: what roundings are proportional to.

    For the output, sum_j p_ij |v_j|, that is max|value|. For the gradients the same with their own
    terms, because `dP - D` may cancel to nothing while the rounding errors of dP and D do not.
    For lse at least 1, because it is a logarithm: a relative error inside is an absolute one here.
    """
    query, key, value = (x.double() for x in _same_lead(query, key, value))
    q, k, v, g = (x.abs() for x in (query, key, value, grad_out.double()))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    bias = logit_bias(q.shape[-2], k.shape[-2], q.dtype, **masks, has_heads=q.ndim > 2)
    logits = query @ key.transpose(-1, -2) * scale + bias
    weights = logits.softmax(-1).nan_to_num(nan=0.0)  # rows that may attend to nothing
    alive = 1.0 if keep is None else keep.double() / (1.0 - dropout_p)
    terms = weights * (g @ v.transpose(-1, -2)) * alive
    if grad_lse is not None:
        terms = terms + weights * grad_lse.double().abs().unsqueeze(-1)
    found = {
        "out": value,
        "lse": logits.logsumexp(-1),
        "grad_query": terms @ k * scale,
        "grad_key": terms.transpose(-1, -2) @ q * scale,
        "grad_value": (weights * alive).transpose(-1, -2) @ g,
    }
    sizes = {name: largest(x) for name, x in found.items()}
    return {**sizes, "lse": max(1.0, sizes["lse"])}


def largest(x: Tensor) -> float:
    """The largest finite magnitude in x."""
    finite = x.detach().double()[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _extended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    *,
    scale: float | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    **masks: Any,
) -> Result:
    """The same mathematics in long double, with the gradients written out."""

    def long(x: Tensor) -> np.ndarray:
        return x.detach().numpy().astype(np.longdouble)

    def transposed(x: np.ndarray) -> np.ndarray:
        return np.swapaxes(x, -1, -2)

    def back(x: np.ndarray, like: Tensor) -> Tensor:
        """A gradient of a broadcast argument is the sum over what it was broadcast to."""
        return torch.from_numpy(x.astype(np.float64)).sum_to_size(like.shape)

    q, k, v, g = map(long, (*_same_lead(query, key, value), grad_out))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    logits = q @ transposed(k) * factor
    bias = logit_bias(*logits.shape[-2:], torch.float64, **masks, has_heads=logits.ndim > 2)
    logits = logits + long(bias)
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    dead = top == -np.inf
    unnormalised = np.exp(logits - np.where(dead, 0, top))
    total = unnormalised.sum(-1, keepdims=True)
    weights = unnormalised / np.where(dead, 1, total)
    lse = np.where(dead, -np.inf, top + np.log(np.where(dead, 1, total)))[..., 0]
    alive = 1 if keep is None else long(keep) / (1 - np.longdouble(dropout_p))
    grad_weights = g @ transposed(v) * alive
    grad_logits = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdims=True))
    if grad_lse is not None:
        grad_logits = grad_logits + weights * long(grad_lse)[..., None]
    return Result(
        torch.from_numpy((weights * alive @ v).astype(np.float64)),
        torch.from_numpy(lse.astype(np.float64)),
        back(grad_logits @ k * factor, query),
        back(transposed(grad_logits) @ q * factor, key),
        back(transposed(weights * alive) @ g, value),
    )
