"""Oracle of attention with a key bias, ALiBi slopes or Gaussian scores, with all its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import boltzattn
import numpy as np
import torch
from errors import assert_accurate
from oracle import EAGER_RUNS, largest
from servers import Server
from torch import Tensor


class Biased(NamedTuple):
    """A call: tensors with the same leading dimensions, and what is added to their logits."""

    query: Tensor  # [*L, n_q, rank]
    key: Tensor  # [*L, n_k, rank]
    value: Tensor  # [*L, n_k, dv]
    key_bias: Tensor | None = None  # [*L, n_k]
    alibi_slopes: Tensor | None = None  # [*L]
    scale: float = 1.0
    score: str = "dot"
    is_causal: bool = False
    attn_mask: Tensor | None = None  # [*L, n_q or 1, n_k]; bool (True = may attend) or added
    keep: Tensor | None = None  # [*L, n_q, n_k]: which weights dropout leaves; not for `run`
    dropout_p: float = 0.0

    @property
    def names(self) -> list[str]:
        """Of what is differentiated."""
        given = ("query", "key", "value", "key_bias", "alibi_slopes")
        return [name for name in given if getattr(self, name) is not None]

    def to(self, dtype: torch.dtype) -> Biased:
        return self._replace(**{name: getattr(self, name).to(dtype) for name in self.names})


def run(call: Biased, grad_out: Tensor, grad_lse: Tensor, server: Server) -> dict[str, Tensor]:
    """Output, lse and gradients as a user gets them."""
    inputs = {name: getattr(call, name).detach().requires_grad_() for name in call.names}
    names = ("scale", "score", "is_causal", "attn_mask")
    options = {name: getattr(call, name) for name in names}
    out, lse = boltzattn.attention(**inputs, **options, **server.ask, return_lse=True)
    return _results(out, lse, inputs, grad_out, grad_lse)


def _results(
    out: Tensor, lse: Tensor, inputs: Mapping[str, Tensor], grad_out: Tensor, grad_lse: Tensor
) -> dict[str, Tensor]:
    grads = torch.autograd.grad((out, lse), list(inputs.values()), (grad_out, grad_lse.to(lse)))
    named = {f"grad_{name}": grad for name, grad in zip(inputs, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def _added_mask(call: Biased) -> Tensor | None:
    """`attn_mask` as numbers to add, fp64."""
    mask = call.attn_mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)


def _distance(n_q: int, n_k: int) -> Tensor:
    return -(torch.arange(n_k) - torch.arange(n_q)[:, None]).abs()


def eager(call: Biased, grad_out: Tensor, grad_lse: Tensor, order: int = 0) -> dict[str, Tensor]:
    """Dense softmax by torch in the dtype of the call; other orders round otherwise."""
    inputs = {name: getattr(call, name).detach().requires_grad_() for name in call.names}
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    n_q, n_k = query.shape[-2], key.shape[-2]
    columns, ranks, factor = torch.arange(n_k), torch.arange(query.shape[-1]), 1.0
    if order:
        draw = torch.Generator().manual_seed(order)
        columns, ranks = (torch.randperm(len(x), generator=draw) for x in (columns, ranks))
        factor = 1.0 + torch.rand((), generator=draw).item()
    query, key = query[..., ranks] * factor, key[..., columns, :][..., ranks] * factor
    value, scale = value[..., columns, :], call.scale / factor**2
    if call.score == "gaussian":
        gap = query[..., :, None, :] - key[..., None, :, :]
        logits = gap.square().sum(-1) * (-0.5 * scale)
    else:
        logits = query @ key.mT * scale
    if call.key_bias is not None:
        logits = logits + inputs["key_bias"][..., None, columns]
    if call.alibi_slopes is not None:
        slopes = inputs["alibi_slopes"][..., None, None]
        logits = logits + (slopes * _distance(n_q, n_k)[:, columns]).to(logits.dtype)
    if (mask := _added_mask(call)) is not None:
        logits = logits + mask[..., columns].to(logits.dtype)
    if call.is_causal:
        logits = logits.masked_fill(columns > torch.arange(n_q)[:, None], -math.inf)
    dead = (logits == -math.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(dead, 0.0)
    weights = logits.softmax(-1).masked_fill(dead, 0.0)
    lse = logits.logsumexp(-1).masked_fill(dead.squeeze(-1), -math.inf)
    if call.keep is not None:
        weights = weights * call.keep[..., columns] / (1.0 - call.dropout_p)
    return _results(weights @ value, lse, inputs, grad_out, grad_lse.masked_fill(dead[..., 0], 0.0))


def eagers(call: Biased, grad_out: Tensor, grad_lse: Tensor) -> Iterator[dict[str, Tensor]]:
    return (eager(call, grad_out, grad_lse, order) for order in range(EAGER_RUNS))


def oracle(
    call: Biased, grad_out: Tensor, grad_lse: Tensor
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The truth, by long double, and the magnitudes of the terms whose sums it is."""

    def long(x: Tensor) -> np.ndarray:
        return x.detach().double().numpy().astype(np.longdouble)

    def back(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x.astype(np.float64))

    q, k, v, g, h = map(long, (call.query, call.key, call.value, grad_out, grad_lse))
    n_q, n_k, rank = q.shape[-2], k.shape[-2], q.shape[-1]
    gaps = [q[..., :, None, r] - k[..., None, :, r] for r in range(rank)]
    if call.score == "gaussian":
        logits = sum(gap * gap for gap in gaps) * (-0.5 * np.longdouble(call.scale))
    else:
        logits = q @ np.swapaxes(k, -1, -2) * np.longdouble(call.scale)
    distance = long(_distance(n_q, n_k))
    if call.key_bias is not None:
        logits = logits + long(call.key_bias)[..., None, :]
    if call.alibi_slopes is not None:
        logits = logits + long(call.alibi_slopes)[..., None, None] * distance
    if (mask := _added_mask(call)) is not None:
        logits = logits + long(mask)
    if call.is_causal:
        logits = np.where(np.triu(np.ones((n_q, n_k), bool), 1), -np.inf, logits)
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    dead = top == -np.inf
    weights = np.exp(logits - np.where(dead, 0, top))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(dead, 1, total)
    lse = np.where(dead, -np.inf, top + np.log(np.where(dead, 1, total)))[..., 0]
    h = np.where(dead[..., 0], 0, h)[..., None]
    alive = 1 if call.keep is None else long(call.keep) / (1 - np.longdouble(call.dropout_p))
    pulls = g @ np.swapaxes(v, -1, -2) * alive
    grads = weights * (pulls - (weights * pulls).sum(-1, keepdims=True) + h)
    terms = weights * (np.abs(g) @ np.swapaxes(np.abs(v), -1, -2) * alive + np.abs(h))

    def of_inputs(ds: np.ndarray, absolute: bool) -> dict[str, np.ndarray]:
        keep = np.abs if absolute else np.asarray
        scale = keep(np.longdouble(call.scale))
        if call.score == "gaussian":
            pulled = [ds * keep(gap) for gap in gaps]
            sign = 1 if absolute else -1
            by_query = np.stack([sign * x.sum(-1) for x in pulled], -1) * scale
            by_key = np.stack([x.sum(-2) for x in pulled], -1) * scale
        else:
            by_query = ds @ keep(k) * scale
            by_key = np.swapaxes(ds, -1, -2) @ keep(q) * scale
        found = {"query": by_query, "key": by_key}
        if call.key_bias is not None:
            found["key_bias"] = ds.sum(-2)
        if call.alibi_slopes is not None:
            found["alibi_slopes"] = (ds * keep(distance)).sum((-2, -1))
        return found

    weights = weights * alive
    truth = {"out": back(weights @ v), "lse": back(lse)}
    truth |= {f"grad_{name}": back(x) for name, x in of_inputs(grads, False).items()}
    truth["grad_value"] = back(np.swapaxes(weights, -1, -2) @ g)
    sizes = {"out": largest(call.value), "lse": max(1.0, largest(back(lse)))}
    sizes |= {f"grad_{name}": largest(back(x)) for name, x in of_inputs(terms, True).items()}
    sizes["grad_value"] = largest(back(np.swapaxes(weights, -1, -2) @ np.abs(g)))
    return truth, sizes


def assert_results(
    actual: dict[str, Tensor], call: Biased, grad_out: Tensor, grad_lse: Tensor, method: str
) -> None:
    """What was computed for the call obeys the error rule."""
    truth, sizes = oracle(call, grad_out, grad_lse)
    eager_runs = eagers(call, grad_out, grad_lse)
    assert_accurate(actual, truth, eager_runs, magnitudes=sizes, method=method)


def assert_biased(
    call: Biased, grad_out: Tensor, grad_lse: Tensor, server: Server
) -> dict[str, Tensor]:
    """The call obeys the error rule; returns its results."""
    actual = run(call, grad_out, grad_lse, server)
    assert_results(actual, call, grad_out, grad_lse, server.method)
    return actual
