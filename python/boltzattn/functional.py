"""The functions users call: validation, defaults, shapes and autocast; no mathematics."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from boltzattn import backends, layer, ops, packed, plan, reference  # noqa: F401
from boltzattn.autograd import Attention, Options

# query, key, value, attn_mask, key_mask, seed: see `reference`.
Canonical = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


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
    tensors, options, lead = _canonical(
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
        _check_mask_gradient(options[4])
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


def explain(
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
) -> str:
    """The plan `attention` would follow for these arguments, and why not the others.

    Example:
        >>> q = torch.randn(4, 100, 2)
        >>> print(boltzattn.explain(q, q, q).splitlines()[0])
        method direct, backend cpu
    """
    tensors, options, _ = _canonical(
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
    request = ops.request_of(*tensors[:5], dropout_p, is_causal)
    return plan.describe(request, *options[3:])


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
    _check_layer(x, w_q, w_k, w_v, w_o, num_heads, b_q, b_k, b_v, b_o)
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
            x, w_q, w_k, w_v, w_o, num_heads, b_q, b_k, b_v, b_o, scale, key_padding_mask
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
        mask = _expand_key_padding_mask(key_padding_mask, x, (*lead, num_heads, n))
        key_mask = mask[..., 0, :].reshape(-1, n)
    out_bias = None if b_o is None else b_o.to(dtype)
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
    )
    return out.reshape(*lead, n, out.shape[-1])


def _boltz_parts(a: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(maximum, gaps below it, softmax, mean gap) along dim, all but the gaps of size 1 there.

    The maximum only shifts: it takes no part in derivatives. Entries of -inf get gap and weight 0.
    """
    top = a.detach().amax(dim, keepdim=True)
    gap = top - a
    weight = torch.exp(-gap)
    gap = torch.where(weight == 0, 0.0, gap)
    p = weight / weight.sum(dim, keepdim=True)
    return top, gap, p, (gap * p).sum(dim, keepdim=True)


class _Boltz(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, dim: int) -> Tensor:
        top, _, _, mean_gap = _boltz_parts(a, dim)
        return (top - mean_gap).squeeze(dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        a, ctx.dim = inputs
        ctx.save_for_backward(a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (a,) = ctx.saved_tensors
        # In torch operations on purpose: this is what double backward differentiates.
        _, gap, p, mean_gap = _boltz_parts(a, ctx.dim)
        return grad.unsqueeze(ctx.dim) * p * (1 + (mean_gap - gap)), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, a: Tensor, dim: int) -> tuple[Tensor, int]:
        a = a.movedim(in_dims[0], 0)
        return _Boltz.apply(a, dim if dim < 0 else dim + 1), 0


def boltz(a: Tensor, dim: int = -1) -> Tensor:
    """The Boltzmann operator `sum_i a_i softmax(a)_i` over `dim`: a smooth maximum.

    It lies between `mean(a)` and `max(a)`, and equals `logsumexp(a) - entropy(softmax(a))`.
    Computed as `max - mean gap`, so it does not overflow and keeps its digits for large `a`.
    Entries of -inf take no part. The gradient is `p_i (1 + a_i - boltz(a))`, differentiable again.

    Example:
        >>> boltzattn.boltz(torch.tensor([0.0, 0.0]))
        tensor(0.)
    """
    if not isinstance(a, Tensor) or not a.is_floating_point():
        raise TypeError(f"a must be a floating-point tensor, got {_kind(a)}")
    if a.ndim == 0:
        raise ValueError("a must have at least one dimension, got a scalar; use a.reshape(1)")
    if not -a.ndim <= dim < a.ndim:
        raise ValueError(f"dim must be between {-a.ndim} and {a.ndim - 1}, got {dim}")
    if a.shape[dim] == 0:
        raise ValueError(
            f"a must not be empty along dim {dim}, got shape {_shape(a)}: the Boltzmann operator "
            "of nothing is undefined"
        )
    return _Boltz.apply(a, dim)


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _kind(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"{type(x).__name__}"


def _canonical(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    key_padding_mask: Tensor | None,
    method: str,
    backend: str,
) -> tuple[Canonical, Options, tuple[int, ...]]:
    """Validate a call and bring it into the form of `reference`: (tensors, options, lead).

    `lead` is the leading shape of the result; with grouped heads the canonical one has an axis
    more, so that no key is repeated in memory.
    """
    _check_tensors(query, key, value)
    backends.check_name("method", method, backends.METHODS)
    backends.check_name("backend", backend, tuple(backends.BACKENDS))
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    elif not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale}")
    if is_causal and attn_mask is not None:
        raise ValueError(
            "attn_mask must be None when is_causal is set (as in SDPA); "
            "to combine them, pass attn_mask & causal_mask with is_causal=False"
        )

    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        target = torch.get_autocast_dtype(device)
        query, key, value = (
            x if x.dtype == torch.float64 else x.to(target) for x in (query, key, value)
        )
    _check_dtypes(query, key, value)

    n_q, n_k = query.shape[-2], key.shape[-2]
    if enable_gqa:
        query, key, value, groups = _group_heads(query, key, value)
    lead = tuple(query.shape[:-2])
    if lead != key.shape[:-2] or lead != value.shape[:-2]:
        lead = _broadcast_lead(query, key, value)
        query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    out_lead = (*lead[:-2], lead[-2] * lead[-1]) if enable_gqa else lead

    if attn_mask is not None:
        attn_mask = _expand_attn_mask(attn_mask, query, (*out_lead, n_q, n_k))
        if enable_gqa:
            attn_mask = attn_mask.unflatten(-3, (-1, groups))
    key_mask = None
    if key_padding_mask is not None:
        key_mask = _expand_key_padding_mask(key_padding_mask, query, (*out_lead, n_k))
        if enable_gqa:
            key_mask = key_mask.unflatten(-2, (-1, groups))
    seed = None
    if dropout_p > 0.0:
        # One draw per call; an odd multiple of the head's index tells the heads apart.
        draw = torch.randint(2**63 - 1, (), dtype=torch.int64, device=query.device)
        index = torch.arange(math.prod(lead), device=query.device).view(lead)
        seed = draw + index * 0x1E3779B97F4A7C15

    method, backend = backends.preferred(method, backend)
    options = (float(scale), float(dropout_p), bool(is_causal), method, backend)
    return (query, key, value, attn_mask, key_mask, seed), options, out_lead


def _check_layer(
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
) -> None:
    if not isinstance(num_heads, int) or num_heads < 1:
        raise ValueError(f"num_heads must be an integer of at least 1, got {num_heads!r}")
    tensors = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
    tensors |= {"b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
    for name, t in tensors.items():
        if t is None and name not in ("x", "w_q", "w_k", "w_v"):
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor, got {_kind(t)}")
        if t.dtype not in backends.DTYPES:
            raise TypeError(
                f"{name} must be float64, float32, bfloat16 or float16, got {t.dtype}; "
                f"convert it with {name}.to(torch.float32)"
            )
        if t.device != x.device:
            raise ValueError(
                f"{name} must be on the device of x, {x.device}, got {t.device}; "
                f"move it with {name}.to(x.device)"
            )
        if t.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"{name} must have the dtype of x, {x.dtype}, got {t.dtype}; "
                f"convert it with {name}.to(x.dtype)"
            )
    if x.ndim < 2:
        raise ValueError(f"x must have at least 2 dimensions [..., n, d], got shape {_shape(x)}")
    d = x.shape[-1]
    for name, weight in (("w_q", w_q), ("w_k", w_k), ("w_v", w_v)):
        rows = weight.shape[0] if weight.ndim == 2 else 0
        if weight.ndim != 2 or weight.shape[1] != d or rows == 0 or rows % num_heads:
            width = "dv" if name == "w_v" else "rank"
            raise ValueError(
                f"{name} must have shape [num_heads * {width}, d] with num_heads = {num_heads} and "
                f"d = {d} (the last dimension of x), got {_shape(weight)}"
            )
    if w_q.shape != w_k.shape:
        raise ValueError(
            f"w_k must have the shape of w_q, {_shape(w_q)}, got {_shape(w_k)}: queries and keys "
            "have the same rank"
        )
    if w_o is not None and (w_o.ndim != 2 or w_o.shape[1] != w_v.shape[0]):
        raise ValueError(
            f"w_o must have shape [d_out, num_heads * dv] = [d_out, {w_v.shape[0]}], "
            f"got {_shape(w_o)}"
        )
    if b_o is not None and w_o is None:
        raise ValueError("b_o must be None without w_o: there is no output projection to add it to")
    pairs = (("q", b_q, w_q), ("k", b_k, w_k), ("v", b_v, w_v), ("o", b_o, w_o))
    for name, b, w in pairs:
        if b is not None and w is not None and b.shape != w.shape[:1]:
            raise ValueError(
                f"b_{name} must have shape {[w.shape[0]]}, one number per row of w_{name}, "
                f"got {_shape(b)}"
            )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {_kind(x)}")
        if x.dtype not in backends.DTYPES:
            raise TypeError(
                f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}; "
                f"convert it with {name}.to(torch.float32)"
            )
        if x.ndim < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions [..., n, width], got shape {_shape(x)}"
            )
        if x.ndim > 2 and x.shape[-3] == 0:
            raise ValueError(f"{name} must have at least 1 head (dimension -3), got {_shape(x)}")
    if query.shape[-1] == 0:
        raise ValueError(f"query must have rank (last dimension) at least 1, got {_shape(query)}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"key must have the rank (last dimension) of query, {query.shape[-1]}, "
            f"got {key.shape[-1]} (query {_shape(query)}, key {_shape(key)})"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"value must have as many rows as key, {key.shape[-2]}, got {value.shape[-2]} "
            f"(key {_shape(key)}, value {_shape(value)})"
        )
    if value.shape[-1] == 0:
        raise ValueError(f"value must have a last dimension of at least 1, got {_shape(value)}")
    for name, x in (("key", key), ("value", value)):
        if x.device != query.device:
            raise ValueError(
                f"{name} must be on the device of query, {query.device}, got {x.device}; "
                f"move it with {name}.to(query.device)"
            )


def _check_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(
                f"{name} must have the dtype of query, {query.dtype}, got {x.dtype}; "
                f"convert it with {name}.to(query.dtype)"
            )


def _group_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """View H query heads as H_key groups, and let the group axis of key and value broadcast."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name} must have a head axis for enable_gqa, got shape {_shape(x)}")
    heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    if key_heads != value_heads:
        raise ValueError(
            f"key and value must have equally many heads for enable_gqa, "
            f"got {key_heads} and {value_heads}"
        )
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"query must have a multiple of key's heads for enable_gqa, "
            f"got {heads} query heads and {key_heads} key heads"
        )
    groups = heads // key_heads
    return query.unflatten(-3, (key_heads, groups)), key.unsqueeze(-3), value.unsqueeze(-3), groups


def _broadcast_lead(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    try:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    except RuntimeError:
        raise ValueError(
            "query, key and value must have leading dimensions that broadcast, "
            f"got query {_shape(query)}, key {_shape(key)}, value {_shape(value)}"
            "; for fewer key heads than query heads pass enable_gqa=True"
        ) from None
    return tuple(lead)


def _check_mask_kind(name: str, mask: Tensor, query: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {_kind(mask)}")
    if mask.dtype != torch.bool and mask.dtype not in backends.DTYPES:
        raise TypeError(
            f"{name} must be bool or floating point, got {mask.dtype}; convert 0/1 masks "
            f"with {name}.bool()"
        )
    if mask.device != query.device:
        raise ValueError(
            f"{name} must be on the device of query, {query.device}, got {mask.device}"
        )


def _expand_attn_mask(mask: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    _check_mask_kind("attn_mask", mask, query)
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"attn_mask must broadcast to [..., heads, n_q, n_k] = {list(shape)}, "
            f"got {_shape(mask)}"
        ) from None


def _expand_key_padding_mask(mask: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    _check_mask_kind("key_padding_mask", mask, query)
    *lead, n_k = shape
    batch = lead[:-1]
    try:
        spread = mask.expand(*batch, n_k)
    except RuntimeError:
        raise ValueError(
            f"key_padding_mask must broadcast to [batch..., n_k] = {[*batch, n_k]} "
            f"(no head axis: the last leading dimension of query is the head), got {_shape(mask)}"
        ) from None
    return spread.unsqueeze(-2).expand(shape) if lead else spread


def _check_mask_gradient(backend: str) -> None:
    if backend not in ("auto", "reference"):
        raise ValueError(
            f"backend {backend!r} cannot serve this call: it computes no gradient for attn_mask "
            "or key_padding_mask; detach() the mask or use backend='reference'"
        )
