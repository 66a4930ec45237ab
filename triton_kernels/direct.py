"""Attention over all pairs, any rank up to 16: O(n_q n_k) time, O(n) memory."""

from __future__ import annotations

from typing import Any

import torch
from boltzattn.problem import Gradients, OutputGradients, Problem, Saved
from boltzattn.triton_kernels.direct_kernels import (
    Dropout,
    Sizes,
    direct_forward_kernel,
    direct_key_gradient_kernel,
    direct_query_gradient_kernel,
)
from boltzattn.triton_kernels.heads import lead_of, strided
from boltzattn.triton_kernels.launch import cdiv, direct_options, launch, on_device, sum_shares
from torch import Tensor


def empty_saved(problem: Problem, dtype: torch.dtype | None = None) -> Saved:
    """Room for the results of forward; `out` has the dtype of query unless another is given."""
    query, shape = problem.query, problem.query.shape[:-1]
    return Saved(
        query.new_empty(*shape, problem.value.shape[-1], dtype=dtype or query.dtype),
        query.new_empty(shape, dtype=torch.float64),
    )


def direct_forward(problem: Problem) -> Saved:
    saved = empty_saved(problem)
    forward_unserved(problem, None, saved)
    return saved


def direct_backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
    found = problem.new_gradients()
    backward_unserved(grads, saved, problem, None, found)
    return found


def _inputs(problem: Problem, served: Tensor | None) -> tuple[Any, ...]:
    """The arguments that all kernels have in common; the last are the sizes."""
    query, key, value, attn_mask, key_mask, slopes, seed, scale, p, _, _ = problem
    sizes = Sizes(*lead_of(query, 2), query.shape[-2], *value.shape[-2:], scale)
    dropout = None
    if seed is not None and p > 0.0:
        kept_factor = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        dropout = Dropout(*strided(seed, 0)[:4], round(p * 2**32), kept_factor)
    tensors = *(strided(x, 2) for x in (query, key, value, attn_mask)), strided(key_mask, 1)
    return *tensors, strided(slopes, 0), dropout, served, sizes


def _options(kernel: str, problem: Problem) -> dict[str, Any]:
    rank, dv = problem.query.shape[-1], problem.value.shape[-1]
    added = problem.slopes is not None or problem.key_bias is not None
    biased = problem.is_gaussian or added
    hiding = problem.is_causal or problem.attn_mask is not None
    fixed = direct_options(kernel, problem.query.dtype, rank, dv, biased, hiding)
    flags = {"IS_CAUSAL": problem.is_causal, "GAUSSIAN": problem.is_gaussian}
    return {**flags, "RANK": rank, **fixed}


def forward_unserved(problem: Problem, served: Tensor | None, saved: Saved) -> None:
    """Fill in the results of the heads that are not served."""
    with on_device(problem.query):
        fixed = _options("forward", problem)
        *_, sizes = inputs = _inputs(problem, served)
        rows = cdiv(sizes.n_q, fixed["BLOCK_Q"]) * sizes.total
        grid = rows, cdiv(sizes.dv, fixed["BLOCK_DV"])
        launch(direct_forward_kernel, grid, *inputs, *saved, **fixed)


def backward_unserved(
    grads: OutputGradients,
    saved: Saved,
    problem: Problem,
    served: Tensor | None,
    found: Gradients,
) -> None:
    """Fill in the gradients of the heads that are not served."""
    query, key, _ = problem.inputs
    with on_device(query):
        by_row, by_key = _options("query_gradient", problem), _options("key_gradient", problem)
        *_, sizes = inputs = _inputs(problem, served)
        heads, shares = sizes.total, cdiv(sizes.dv, by_row["BLOCK_DV"])
        delta = query.new_empty(shares, heads, sizes.n_q, dtype=torch.float32)
        row_blocks = cdiv(sizes.n_q, by_row["BLOCK_Q"])
        # Every block of columns has a share of these, and of slopes every block of rows too.
        to_query = query.new_empty(shares, *query.shape, dtype=torch.float32)
        to_key = query.new_empty(shares, *key.shape, dtype=torch.float32)
        to_bias = to_slopes = None
        if problem.key_bias is not None:
            to_bias = query.new_empty(shares, *key.shape[:-1], dtype=torch.float32)
        if problem.slopes is not None:
            to_slopes = query.new_empty(shares, heads, row_blocks, dtype=torch.float64)
        grad_out = strided(grads.out, 2)
        launch(
            direct_query_gradient_kernel,
            (row_blocks * heads, shares),
            *inputs,
            grad_out,
            strided(grads.lse, 1),
            strided(saved.out, 2),
            saved.lse,
            delta,
            to_query,
            to_slopes,
            **by_row,
        )
        launch(
            direct_key_gradient_kernel,
            (cdiv(sizes.n_k, by_key["BLOCK_K"]) * heads, shares),
            *inputs,
            grad_out,
            saved.lse,
            delta,
            to_key,
            found.value,
            to_bias,
            **by_key,
        )
        pairs = [(found.query, sum_shares(to_query)), (found.key, sum_shares(to_key))]
        if to_bias is not None:
            pairs.append((found.key_mask, sum_shares(to_bias)))
        if to_slopes is not None:
            pairs.append((found.slopes, to_slopes.sum((0, 2)).view(found.slopes.shape)))
    lead = query.shape[:-2]
    for grad, whole in pairs:
        if served is None:
            grad.copy_(whole)
        else:
            kept = served.view(*lead, *[1] * (grad.ndim - len(lead))).bool()
            grad.copy_(torch.where(kept, grad, whole.to(grad.dtype)))
