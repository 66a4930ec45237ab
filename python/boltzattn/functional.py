"""The functions users call: they validate, and pass the problem to the operators."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from boltzattn.dispatch import plan
from boltzattn.dispatch.preference import preferred
from boltzattn.dispatch.torch_modes import autocast_dtype, forward_mode_active, functorch_active
from boltzattn.ops.attention import attend
from boltzattn.ops.layer import layer, project
from boltzattn.ops.varlen import varlen
from boltzattn.problem import Choice, LayerProblem, Problem, default_scale
from boltzattn.validation import (
    check_layer,
    check_scale,
    expand_key_padding_mask,
    validate,
    validate_varlen,
)


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    key_padding_mask: Tensor | None = ...,
    method: str = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    key_padding_mask: Tensor | None = ...,
    method: str = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_padding_mask: Tensor | None = None,
    method: str = "auto",
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention, `out_i = sum_j softmax_j(scale * q_i . k_j) v_j`.

    Arguments and their order are those of `torch.nn.functional.scaled_dot_product_attention`;
    the rank of the QK product and the width of the values are independent of each other.

    Args:
        query: `[..., H, n_q, rank]`, fp64, fp32, bf16 or fp16.
        key: `[..., H, n_k, rank]`. Leading dimensions broadcast.
        value: `[..., H, n_k, dv]`.
        attn_mask: broadcastable to `[..., H, n_q, n_k]`; bool (True = may attend) or floating
            (added to the logits).
        dropout_p: probability of dropping an attention weight, applied whenever it is above 0,
            as in SDPA. The seed is drawn from torch's generator.
        is_causal: query i sees keys 0..i (aligned at the top left when n_q != n_k, as in SDPA).
            Not together with `attn_mask`.
        scale: default `1 / sqrt(rank)`.
        enable_gqa: let each key/value head serve a group of H / H_key query heads.
        key_padding_mask: `[batch..., n_k]` without a head axis; bool (True = key is ignored, as
            in `nn.MultiheadAttention`) or floating (added to the logits of that key).
        method: "auto" or one of `boltzattn.METHODS`.
        backend: "auto" or one of `boltzattn.BACKENDS`.
        return_lse: also return the log-sum-exp of the logits, `[..., H, n_q]`, fp32 (fp64 for
            fp64 inputs). It is differentiable.

    Returns:
        `[..., H, n_q, dv]` in the dtype of the inputs. A query that may attend to nothing gets
        zeros (and lse -inf), never NaN.

    Example:
        >>> import torch, boltzattn
        >>> q, k, v = torch.randn(8, 4096, 1), torch.randn(8, 4096, 1), torch.randn(8, 4096, 64)
        >>> boltzattn.attention(q, k, v).shape
        torch.Size([8, 4096, 64])
    """
    call = validate(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        key_padding_mask,
        method,
        backend,
    )
    results = attend(call.problem, call.choice)
    return (call.out(results), call.lse(results)) if return_lse else call.out(results)


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    method: str = "auto",
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of sequences with different lengths, packed without padding.

    Shapes are those of flash-attn's varlen functions. Sequence b has the queries
    `cu_seqlens_q[b] : cu_seqlens_q[b + 1]` and the keys `cu_seqlens_k[b] : cu_seqlens_k[b + 1]`,
    and attends to itself alone. Any length may be 0.

    Args:
        query: `[total_q, H, rank]`.
        key: `[total_k, H, rank]`.
        value: `[total_k, H, dv]`.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[sequences + 1]`, rising from 0 to the total.
        is_causal: aligned at the top left of every sequence (flash-attn aligns at the bottom right;
            the two agree where the lengths are equal).
        scale, enable_gqa, method, backend, return_lse: as in `attention`.

    Returns:
        `[total_q, H, dv]`, and with `return_lse` also `[H, total_q]`.

    Example:
        >>> q, k, v = torch.randn(4096, 8, 1), torch.randn(4096, 8, 1), torch.randn(4096, 8, 64)
        >>> starts = torch.tensor([0, 100, 100, 4096])  # three sequences, the second one empty
        >>> boltzattn.attention_varlen(q, k, v, starts, starts).shape
        torch.Size([4096, 8, 64])
    """
    call = validate_varlen(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        method=method,
        backend=backend,
    )
    results = varlen(*call.problem, cu_seqlens_q, cu_seqlens_k, *call.choice)
    out = call.out(results).transpose(0, 1)
    return (out, call.lse(results)) if return_lse else out


def self_attention(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor | None = None,
    *,
    num_heads: int = 1,
    b_q: Tensor | None = None,
    b_k: Tensor | None = None,
    b_v: Tensor | None = None,
    b_o: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    method: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """A whole self-attention layer: projections, attention per head, output projection.

    Args:
        x: `[..., n, d]`.
        w_q, w_k: `[num_heads * rank, d]`, as the weight of an `nn.Linear`.
        w_v: `[num_heads * dv, d]`.
        w_o: `[d_out, num_heads * dv]`, or None to return the heads side by side.
        b_q, b_k, b_v, b_o: biases of the projections.
        attn_mask, dropout_p, is_causal, scale, key_padding_mask, method, backend: as in
            `attention`, with `[..., num_heads, n, n]` for the mask.

    Returns:
        `[..., n, d_out]`, or `[..., n, num_heads * dv]` without `w_o`.

    Heads of rank 1 that the transform serves are projected at its nodes where that is cheaper:
    `w_v` and `w_o` then never meet the n tokens.

    Example:
        >>> x, w = torch.randn(2, 100, 16), torch.randn(4, 16)
        >>> boltzattn.self_attention(x, w, w, torch.randn(32, 16), num_heads=4).shape
        torch.Size([2, 100, 32])
    """
    check_scale(scale)
    check_layer(
        x,
        {"w_q": w_q, "w_k": w_k, "w_v": w_v},
        {"w_o": w_o, "b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o},
        num_heads,
    )
    b_qk = None
    if b_q is not None or b_k is not None:
        b_qk = torch.cat(
            [w.new_zeros(len(w)) if b is None else b for w, b in ((w_q, b_q), (w_k, b_k))]
        )
    weights = Projections(torch.cat((w_q, w_k)), w_v, w_o, b_qk, b_v, b_o)
    return attend_layer(
        x,
        weights,
        num_heads,
        preferred(method, backend),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        key_padding_mask=key_padding_mask,
    )


class Projections(NamedTuple):
    """The weights of a self-attention layer; those of query and key are one matrix."""

    w_qk: Tensor  # [2 * num_heads * rank, d]
    w_v: Tensor  # [num_heads * dv, d]
    w_o: Tensor | None  # [d_out, num_heads * dv]
    b_qk: Tensor | None
    b_v: Tensor | None
    b_o: Tensor | None


def attend_layer(
    x: Tensor,
    weights: Projections,
    num_heads: int,
    choice: Choice,
    *,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    key_padding_mask: Tensor | None,
) -> Tensor:
    """`self_attention` with weights that fit each other and x."""
    w_qk, w_v, w_o, b_qk, b_v, b_o = weights
    rank = w_qk.shape[0] // (2 * num_heads)
    plain = attn_mask is None and dropout_p == 0.0
    if plain and not is_causal and rank == 1:
        padding_is_bool = getattr(key_padding_mask, "dtype", torch.bool) == torch.bool
        if padding_is_bool and _projects_at_nodes(x, weights, num_heads, choice):
            return _attend_at_nodes(x, weights, num_heads, scale, key_padding_mask, choice)

    rows = x.shape[:-1]
    query, key = F.linear(x, w_qk, b_qk).view(*rows, 2, num_heads, rank).unbind(-3)
    value = F.linear(x, w_v, b_v).view(*rows, num_heads, -1)
    query, key, value = query.transpose(-2, -3), key.transpose(-2, -3), value.transpose(-2, -3)
    if plain:
        key_mask = None
        if key_padding_mask is not None:
            key_mask = expand_key_padding_mask(key_padding_mask, query, key.shape[:-1])
        scale = default_scale(rank) if scale is None else float(scale)
        numbers = scale, 0.0, bool(is_causal)
        out = attend(Problem(query, key, value, None, key_mask, None, *numbers), choice)[0]
    else:
        method, backend = choice
        out = attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            key_padding_mask=key_padding_mask,
            method=method,
            backend=backend,
        )
    out = out.transpose(-2, -3).flatten(-2)
    return out if w_o is None else F.linear(out, w_o, b_o)


def _projects_at_nodes(x: Tensor, weights: Projections, num_heads: int, choice: Choice) -> bool:
    """Whether a layer of rank 1 is one for the operator `layer`, and cheaper that way."""
    if weights.w_o is None and num_heads > 1:  # the outputs of the heads do not add up
        return False
    *lead, n, d = x.shape
    dv = weights.w_v.shape[0] // num_heads
    d_out = dv if weights.w_o is None else weights.w_o.shape[0]
    batch = math.prod(lead)
    # Sizes may be symbolic; an empty layer is no case for the transform.
    if not (type(n) is int and type(batch) is int and n > 0 and batch > 0):
        return False
    if functorch_active() or forward_mode_active():  # no tangents through the operator `layer`
        return False
    shape = (batch, num_heads, n, d, dv, d_out, weights.w_o is not None)
    return plan.projects_at_nodes(x.device.type, x.dtype, *shape, *choice)


def _attend_at_nodes(
    x: Tensor,
    weights: Projections,
    num_heads: int,
    scale: float | None,
    key_padding_mask: Tensor | None,
    choice: Choice,
) -> Tensor:
    """A layer of rank 1 by the operators `project` and `layer`."""
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and x.dtype != torch.float64:
        x = x.to(dtype)
        weights = Projections._make(None if w is None else w.to(dtype) for w in weights)
    w_qk, w_v, w_o, b_qk, b_v, b_o = weights
    lead, (n, d) = x.shape[:-2], x.shape[-2:]
    rows = x.reshape(-1, n, d)

    weight = w_v.unflatten(0, (num_heads, -1))
    weight_bias = None if b_v is None else b_v.unflatten(0, (num_heads, -1))
    if w_o is not None:
        outward = w_o.unflatten(1, (num_heads, -1)).transpose(0, 1)
        weight = outward @ weight
        if weight_bias is not None:
            weight_bias = (outward @ weight_bias[..., None]).squeeze(-1)
    numbers, extents = project(rows, w_qk, b_qk, choice.backend)
    query, key = numbers.unsqueeze(-1).split(num_heads, 1)
    key_mask = None
    if key_padding_mask is not None:
        mask = expand_key_padding_mask(key_padding_mask, x, (*lead, num_heads, n))
        key_mask = mask[..., 0, :].reshape(-1, n)
    problem = LayerProblem(
        query=query,
        key=key,
        value=rows,
        weight=weight,
        weight_bias=weight_bias,
        out_bias=b_o,
        key_mask=key_mask,
        extents=extents,
        scale=default_scale(1) if scale is None else float(scale),
    )
    out = layer(*problem, *choice)
    return out.reshape(*lead, n, out.shape[-1])
