"""The functions users call: defaults, shapes and the way to the operators; no mathematics."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from boltzattn.dispatch import (
    backends,
    plan,
)
from boltzattn.ops import attention as ops
from boltzattn.ops import layer  # noqa: F401
from boltzattn.ops import varlen as packed
from boltzattn.ops.autograd import Attention
from boltzattn.reference import direct as reference
from boltzattn.validation import (
    canonical,
    check_layer,
    check_mask_gradient,
    check_scale,
    expand_key_padding_mask,
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
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
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
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
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
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
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
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[sequences + 1]`, given together: the batch is
            packed without padding, as in flash-attn's varlen functions. Then query is
            `[total_q, H, rank]`, key `[total_k, H, rank]`, value `[total_k, H, dv]`; sequence b has
            queries `cu_seqlens_q[b] : cu_seqlens_q[b + 1]`, keys likewise, and attends to itself
            alone. Any length may be 0. The result is `[total_q, H, dv]`, lse `[H, total_q]`.
            `is_causal` is aligned at the top left of every sequence (flash-attn: bottom right; the
            same where the lengths are equal). No masks and no dropout.

    Returns:
        `[..., H, n_q, dv]` in the dtype of the inputs. A query that may attend to nothing gets
        zeros (and lse -inf), never NaN.

    Example:
        >>> import torch, boltzattn
        >>> q, k, v = torch.randn(8, 4096, 1), torch.randn(8, 4096, 1), torch.randn(8, 4096, 64)
        >>> boltzattn.attention(q, k, v).shape
        torch.Size([8, 4096, 64])
        >>> starts = torch.tensor([0, 100, 100, 4096])  # three sequences, the second one empty
        >>> q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        >>> boltzattn.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts).shape
        torch.Size([4096, 8, 64])
    """
    is_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if is_packed:
        query, key, value = packed.rows_last(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            attn_mask=attn_mask is not None,
            key_padding_mask=key_padding_mask is not None,
            dropout_p=dropout_p > 0.0,
        )
    tensors, options, lead = canonical(
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
    needs_gradient = [x is not None and x.requires_grad for x in tensors[:5]]
    if is_packed:
        scale, _, *rest = options
        out, lse = torch.ops.boltzattn.packed_forward(
            *tensors[:3], cu_seqlens_q, cu_seqlens_k, scale, *rest
        )
    elif not torch.is_grad_enabled() or not any(needs_gradient):
        out, lse = ops.forward(*tensors, *options)
    elif any(needs_gradient[3:]):
        check_mask_gradient(options[4])
        out, lse = reference.dense(*tensors, *options[:3])
    else:
        out, lse = Attention.apply(*tensors, options)
    if enable_gqa:
        out = out.reshape(*lead, *out.shape[-2:])
    if is_packed:
        out = out.transpose(0, 1)
    if not return_lse:
        return out
    return out, lse.reshape(*lead, lse.shape[-1]).to(reference.accumulate_dtype(out.dtype))


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
    `w_v` and `w_o` then never meet the n tokens, and the layer costs less than one `nn.Linear`.

    Example:
        >>> x, w = torch.randn(2, 100, 16), torch.randn(4, 16)
        >>> boltzattn.self_attention(x, w, w, torch.randn(32, 16), num_heads=4).shape
        torch.Size([2, 100, 32])
    """
    check_scale(scale)
    check_layer(x, w_q, w_k, w_v, w_o, num_heads, b_q, b_k, b_v, b_o)
    backends.check_name("method", method, backends.METHODS)
    backends.check_name("backend", backend, tuple(backends.BACKENDS))
    at_nodes = (
        attn_mask is None
        and dropout_p == 0.0
        and not is_causal
        and (
            key_padding_mask is None
            or (isinstance(key_padding_mask, Tensor) and key_padding_mask.dtype == torch.bool)
        )
        and plan.projects_at_nodes(
            x, w_q, w_v, w_o, num_heads, *backends.preferred(method, backend)
        )
    )
    if at_nodes:
        return _attend_at_nodes(
            x, w_q, w_k, w_v, w_o, num_heads, b_q, b_k, b_v, b_o, scale, key_padding_mask, backend
        )

    def heads(weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias).unflatten(-1, (num_heads, -1)).transpose(-2, -3)

    out = attention(
        heads(w_q, b_q),
        heads(w_k, b_k),
        heads(w_v, b_v),
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


def _attend_at_nodes(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor | None,
    num_heads: int,
    b_q: Tensor | None,
    b_k: Tensor | None,
    b_v: Tensor | None,
    b_o: Tensor | None,
    scale: float | None,
    key_padding_mask: Tensor | None,
    backend: str,
) -> Tensor:
    """`self_attention` of rank 1 by `layer`."""
    dtype = x.dtype
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = x.dtype if x.dtype == torch.float64 else torch.get_autocast_dtype(device)
    x, w_q, w_k, w_v = (t.to(dtype) for t in (x, w_q, w_k, w_v))
    lead, (n, d) = x.shape[:-2], x.shape[-2:]
    rows = x.reshape(-1, n, d)

    weight = w_v.unflatten(0, (num_heads, -1))
    weight_bias = None if b_v is None else b_v.to(dtype).unflatten(0, (num_heads, -1))
    if w_o is not None:
        outward = w_o.to(dtype).unflatten(1, (num_heads, -1)).transpose(0, 1)
        weight = outward @ weight
        if weight_bias is not None:
            weight_bias = (outward @ weight_bias[..., None]).squeeze(-1)
    bias = None
    if b_q is not None or b_k is not None:
        parts = [w_q.new_zeros(num_heads) if b is None else b.to(dtype) for b in (b_q, b_k)]
        bias = torch.cat(parts)
    numbers, extents = torch.ops.boltzattn.project(rows, torch.cat((w_q, w_k)), bias)
    query, key = numbers.unsqueeze(-1).split(num_heads, 1)
    key_mask = None
    if key_padding_mask is not None:
        mask = expand_key_padding_mask(key_padding_mask, x, (*lead, num_heads, n))
        key_mask = mask[..., 0, :].reshape(-1, n)
    out_bias = None if b_o is None else b_o.to(dtype)
    named = backends.preferred("auto", backend)[1]
    out = torch.ops.boltzattn.layer_forward(
        query,
        key,
        rows,
        weight,
        weight_bias,
        out_bias,
        key_mask,
        extents,
        1.0 if scale is None else float(scale),
        "triton" if x.is_cuda or named == "triton" else "cpu",
    )
    return out.reshape(*lead, n, out.shape[-1])
