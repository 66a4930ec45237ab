"""The functions users call: they validate, and pass the problem to the operators."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from boltzattn.dispatch.preference import preferred
from boltzattn.dispatch.torch_modes import (
    autocast_dtype,
    forward_mode_active,
    functorch_active,
    overrides_torch_function,
)
from boltzattn.ops.attention import attend
from boltzattn.ops.layer import compose
from boltzattn.ops.operator import needs_gradient
from boltzattn.ops.self_attention import self_attention as self_attention_operator
from boltzattn.ops.varlen import varlen
from boltzattn.problem import Choice, Keep, SelfAttentionProblem, Starts, default_scale
from boltzattn.validation import (
    check_layer,
    check_scale,
    check_score,
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
    key_bias: Tensor | None = ...,
    score: str = ...,
    alibi_slopes: Tensor | None = ...,
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
    key_bias: Tensor | None = ...,
    score: str = ...,
    alibi_slopes: Tensor | None = ...,
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
    key_bias: Tensor | None = None,
    score: str = "dot",
    alibi_slopes: Tensor | None = None,
    method: str = "auto",
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention, `out_i = sum_j softmax_j(scale * q_i . k_j) v_j`.

    Masks: True in `attn_mask` = may attend (as in SDPA); True in `key_padding_mask` = ignore (as
    in nn.MultiheadAttention). A mask that hides every key of a sequence warns once.

    Arguments and their order are those of `torch.nn.functional.scaled_dot_product_attention`;
    the rank of the QK product and the width of the values are independent of each other.

    Args:
        query: `[..., H, n_q, rank]`, fp64, fp32, bf16 or fp16.
        key: `[..., H, n_k, rank]`. Leading dimensions broadcast.
        value: `[..., H, n_k, dv]`.
        attn_mask: broadcastable to `[..., H, n_q, n_k]`; bool (True = may attend) or floating
            (added to the logits). One that is broadcast over the queries, `[..., 1, n_k]`, is a
            mask of the keys; any other makes rank 1 quadratic (`boltzattn.set_quadratic`).
        dropout_p: probability of dropping an attention weight, applied whenever it is above 0,
            as in SDPA. The seed is drawn from torch's generator.
        is_causal: query i sees keys 0..i (aligned at the top left when n_q != n_k, as in SDPA).
            Not together with `attn_mask`.
        scale: default `1 / sqrt(rank)`; with `score="gaussian"` it is 1.
        enable_gqa: let each key/value head serve a group of H / H_key query heads.
        key_padding_mask: `[batch..., n_k]` without a head axis; bool (True = key is ignored, as
            in `nn.MultiheadAttention`) or floating (added to the logits of that key).
        key_bias: broadcastable to `[..., H, n_k]`, floating; added to all logits of a key. -inf
            hides the key. Differentiable, as is a floating `key_padding_mask`.
        score: "dot", or "gaussian" for logits `-scale / 2 * |q_i - k_j|^2`: every query looks up
            the keys near it, with bandwidth `1 / sqrt(scale)`. To learn a bandwidth, divide query
            and key by it.
        alibi_slopes: `[H]`, or `[batch, H]` with leading dimensions; `-slope * |i - j|` is added to
            the logits of query i and key j, as in flash-attn for n_q = n_k. Differentiable.
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
        key_bias,
        score,
        alibi_slopes,
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
    key_bias: Tensor | None = None,
    score: str = "dot",
    alibi_slopes: Tensor | None = None,
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
        key_bias: floating, broadcastable to `[H, total_k]`.
        alibi_slopes: `[H]`; distances are counted within every sequence.
        scale, enable_gqa, score, method, backend, return_lse: as in `attention`.

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
        key_bias=key_bias,
        score=score,
        alibi_slopes=alibi_slopes,
        method=method,
        backend=backend,
    )
    results = varlen(call.problem, Starts(cu_seqlens_q, cu_seqlens_k), call.choice)
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
    key_bias: Tensor | None = None,
    score: str = "dot",
    alibi_slopes: Tensor | None = None,
    method: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """A whole self-attention layer: projections, attention per head, output projection.

    Args:
        x: `[..., n, d]`.
        w_q, w_k: `[num_heads * rank, d]`, as the weight of an `nn.Linear`.
        w_v: `[num_heads * dv, d]`.
        w_o: `[d_out, num_heads * dv]`, or None to return the heads side by side.
        num_heads: number of heads; their rank and dv follow from the weights.
        b_q, b_k, b_v, b_o: biases of the projections.
        attn_mask, key_bias: as in `attention`, with `[..., num_heads, n, n]` for the mask and
            `[..., num_heads, n]` for the bias.
        dropout_p, is_causal, scale, key_padding_mask: as in `attention`.
        score, alibi_slopes, method, backend: as in `attention`.

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
    check_score(score)
    check_layer(
        x,
        {"w_q": w_q, "w_k": w_k, "w_v": w_v},
        {"w_o": w_o, "b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o},
        num_heads,
    )
    b_in = None
    if not (b_q is None and b_k is None and b_v is None):
        pairs = (w_q, b_q), (w_k, b_k), (w_v, b_v)
        b_in = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
    return attend_layer(
        x,
        Projections(w_q, w_k, w_v, w_o, b_in, b_o),
        num_heads,
        preferred(method, backend),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        key_padding_mask=key_padding_mask,
        key_bias=key_bias,
        score=score,
        alibi_slopes=alibi_slopes,
    )


class Projections(NamedTuple):
    """The weights of a self-attention layer; the biases of query, key and value are one vector."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor | None
    b_in: Tensor | None
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
    key_bias: Tensor | None = None,
    score: str = "dot",
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """`self_attention` with weights that fit each other and x."""
    if scale is None:
        scale = default_scale(weights.w_q.shape[0] // num_heads, score)
    numbers = num_heads, float(scale), bool(is_causal)
    plain = attn_mask is None and key_bias is None and alibi_slopes is None and score == "dot"
    if not plain or dropout_p != 0.0 or _must_compose((x, *weights), key_padding_mask):
        return compose(
            SelfAttentionProblem(x, *weights, None, *numbers),
            lambda p: attention(
                p.query,
                p.key,
                p.value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                key_padding_mask=key_padding_mask,
                key_bias=key_bias,
                score=score,
                alibi_slopes=alibi_slopes,
                method=choice.method,
                backend=choice.backend,
            ),
        )
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and x.dtype != torch.float64:
        x = x.to(dtype)
        weights = Projections._make(None if w is None else w.to(dtype) for w in weights)
    key_mask = None
    if key_padding_mask is not None:
        shape = *x.shape[:-2], num_heads, x.shape[-2]
        key_mask = expand_key_padding_mask(key_padding_mask, x, shape)[..., 0, :]
    problem = SelfAttentionProblem(x, *weights, key_mask, *numbers)
    return self_attention_operator(problem, choice, Keep(needs_gradient(problem)))[0]


def _must_compose(tensors: tuple[Tensor | None, ...], key_padding_mask: Tensor | None) -> bool:
    """Whether torch must see the parts of a layer: the operator has no rule for these calls."""
    if functorch_active() or forward_mode_active():
        return True
    if getattr(key_padding_mask, "requires_grad", False) and torch.is_grad_enabled():
        return True
    if not has_torch_function(tensors):
        return False
    return any(overrides_torch_function(x) for x in tensors)
