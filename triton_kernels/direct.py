"""Attention over all pairs, any rank up to 16: O(n_q n_k) time, O(n) memory."""

from __future__ import annotations

import torch
from boltzattn.triton_kernels.heads import lead_of, strided
from boltzattn.triton_kernels.launch import cdiv, direct_options, launch, on_device
from boltzattn.triton_kernels.pairs import (
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from torch import Tensor


def _dropout(seed: Tensor | None, dropout_p: float) -> tuple | None:
    if seed is None or dropout_p == 0.0:
        return None
    kept_factor = 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
    return strided(seed, 0), round(dropout_p * 2**32), kept_factor


def direct_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """(out [*L, n_q, dv] in the dtype of query, lse [*L, n_q] fp64)."""
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64)
    run_forward(
        query, key, value, attn_mask, key_mask, seed, scale, dropout_p, is_causal, None, out, lse
    )
    return out, lse


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
    done: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fill out and lse of the heads that are not done."""
    (n_q, rank), (n_k, dv) = query.shape[-2:], value.shape[-2:]
    lead = lead_of(query, 2)
    with on_device(query):
        options = direct_options("forward", query.dtype, rank, dv)
        launch(
            forward_kernel,
            (cdiv(n_q, options["BLOCK_Q"]) * lead[0], cdiv(dv, options["BLOCK_DV"])),
            strided(query, 2),
            strided(key, 2),
            strided(value, 2),
            strided(attn_mask, 2),
            strided(key_mask, 1),
            _dropout(seed, dropout_p),
            done,
            out,
            lse,
            lead,
            n_q,
            n_k,
            dv,
            scale,
            IS_CAUSAL=is_causal,
            RANK=rank,
            **options,
        )


def direct_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    grads = tuple(x.new_empty(x.shape) for x in (query, key, value))
    run_backward(
        grad_out,
        grad_lse,
        query,
        key,
        value,
        out,
        lse,
        attn_mask,
        key_mask,
        seed,
        scale,
        dropout_p,
        is_causal,
        None,
        grads,
    )
    return grads


def run_backward(
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
    done: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill the gradients of the heads that are not done."""
    (n_q, rank), (n_k, dv) = query.shape[-2:], value.shape[-2:]
    lead = lead_of(query, 2)
    # dq and dk of every block of columns, to be added.
    with on_device(query):
        by_rows = direct_options("query_gradient", query.dtype, rank, dv)
        by_keys = direct_options("key_gradient", query.dtype, rank, dv)
    blocks = cdiv(dv, by_rows["BLOCK_DV"])
    delta = query.new_empty(blocks, lead[0], n_q, dtype=torch.float32)
    to_query = query.new_empty(blocks, *query.shape, dtype=torch.float32)
    to_key = query.new_empty(blocks, *key.shape, dtype=torch.float32)
    inputs = (
        strided(query, 2),
        strided(key, 2),
        strided(value, 2),
        strided(attn_mask, 2),
        strided(key_mask, 1),
        _dropout(seed, dropout_p),
        done,
    )
    with on_device(query):
        launch(
            query_gradient_kernel,
            (cdiv(n_q, by_rows["BLOCK_Q"]) * lead[0], blocks),
            strided(grad_out, 2),
            strided(grad_lse, 1),
            *inputs,
            strided(out, 2),
            lse,
            delta,
            to_query,
            lead,
            n_q,
            n_k,
            dv,
            scale,
            IS_CAUSAL=is_causal,
            RANK=rank,
            **by_rows,
        )
        launch(
            key_gradient_kernel,
            (cdiv(n_k, by_keys["BLOCK_K"]) * lead[0], blocks),
            strided(grad_out, 2),
            *inputs,
            lse,
            delta,
            to_key,
            grads[2],
            lead,
            n_q,
            n_k,
            dv,
            scale,
            IS_CAUSAL=is_causal,
            RANK=rank,
            **by_keys,
        )
    for grad, parts in ((grads[0], to_query), (grads[1], to_key)):
        whole = parts[0] if blocks == 1 else parts.sum(0)
        if done is None:
            grad.copy_(whole)
        else:
            kept = done.view(*query.shape[:-2], 1, 1).bool()
            grad.copy_(torch.where(kept, grad, whole.to(grad.dtype)))
