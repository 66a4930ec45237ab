"""Validation: what a call may be. Every error names the argument, what it got and the remedy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boltzattn.dispatch.preference import preferred
from boltzattn.dispatch.torch_modes import autocast_dtype
from boltzattn.problem import (
    DTYPES,
    SCORES,
    Choice,
    Problem,
    Saved,
    accumulate_dtype,
    default_scale,
)


def shape_of(x: Tensor) -> str:
    return str(list(x.shape))


def kind_of(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"{type(x).__name__}"


class Call(NamedTuple):
    """A validated call."""

    problem: Problem
    choice: Choice
    # The leading shape of the result. Grouped heads are one more dimension of the problem, so that
    # no key is repeated in memory.
    lead: tuple[int, ...]

    def out(self, results: Saved) -> Tensor:
        """The output in the shape that users get."""
        out = results[0]
        if len(self.lead) + 2 == out.ndim:
            return out
        return out.reshape(*self.lead, *out.shape[-2:])

    def lse(self, results: Saved) -> Tensor:
        """The same of lse, in the precision of sums."""
        lse = results[1].to(accumulate_dtype(results[0].dtype))
        return lse.reshape(*self.lead, lse.shape[-1])


def validate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    score: str = "dot",
    alibi_slopes: Tensor | None = None,
    method: str = "auto",
    backend: str = "auto",
) -> Call:
    """Check the arguments of a call and make a problem of them."""
    check_tensors(query, key, value)
    check_score(score)
    choice = preferred(method, backend)
    check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    check_scale(scale)
    scale = default_scale(query.shape[-1], score) if scale is None else scale
    if is_causal and attn_mask is not None:
        raise ValueError(
            "attn_mask must be None when is_causal is set (as in SDPA); "
            "to combine them, pass attn_mask & causal_mask with is_causal=False"
        )
    target = autocast_dtype(query.device.type)
    if target is not None:
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
    key_mask = slopes = None
    if key_padding_mask is not None:
        key_mask = expand_key_padding_mask(key_padding_mask, query, (*out_lead, n_k))
    if key_bias is not None:
        key_mask = _join_masks(_expand_key_bias(key_bias, query, (*out_lead, n_k)), key_mask)
    if attn_mask is not None and _is_same_for_all_queries(attn_mask):
        row = attn_mask[..., 0, :]
        key_mask = _join_masks(~row if row.dtype == torch.bool else row, key_mask)
        attn_mask = None
    if attn_mask is not None and enable_gqa:
        attn_mask = attn_mask.unflatten(-3, (-1, groups))
    if key_mask is not None and enable_gqa:
        key_mask = key_mask.unflatten(-2, (-1, groups))
    if alibi_slopes is not None:
        slopes = _expand_slopes(alibi_slopes, query, out_lead)
        if enable_gqa:
            slopes = slopes.unflatten(-1, (-1, groups))
    seed = None
    if dropout_p > 0.0:
        # One draw per call; an odd multiple of the head's index tells the heads apart.
        draw = torch.randint(2**63 - 1, (), dtype=torch.int64, device=query.device)
        index = torch.arange(math.prod(lead), device=query.device).view(lead)
        seed = draw + index * 0x1E3779B97F4A7C15
    numbers = float(scale), float(dropout_p), bool(is_causal), score == "gaussian"
    problem = Problem(query, key, value, attn_mask, key_mask, slopes, seed, *numbers)
    return Call(problem, choice, out_lead)


def validate_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    **options: Any,
) -> Call:
    """The same for packed sequences; the problem has the heads first."""
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(starts, Tensor):
            raise TypeError(
                f"{name} must be an int32 or int64 tensor [sequences + 1], got {kind_of(starts)}"
            )
        if starts.dtype not in (torch.int32, torch.int64) or starts.ndim != 1 or len(starts) < 1:
            raise ValueError(
                f"{name} must be int32 or int64 of shape [sequences + 1], got {starts.dtype} "
                f"{shape_of(starts)}"
            )
        if isinstance(query, Tensor) and starts.device != query.device:
            raise ValueError(
                f"{name} must be on the device of query, {query.device}, got {starts.device}; "
                f"move it with {name}.to(query.device)"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_k must have as many entries as cu_seqlens_q, "
            f"{len(cu_seqlens_q)}, got {len(cu_seqlens_k)}"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {kind_of(x)}")
        if x.ndim != 3:
            raise ValueError(f"{name} must be [total, heads, width], got {shape_of(x)}")
    return validate(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), **options)


def check_scale(scale: float | None) -> None:
    if scale is not None:
        check_number("scale", scale)
        if not math.isfinite(scale):
            raise ValueError(f"scale must be a finite number, got {scale}")


def check_floating(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {kind_of(x)}")
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}; "
            f"convert it with {name}.to(torch.float32)"
        )


def check_score(score: str) -> None:
    if score not in SCORES:
        raise ValueError(f"score must be 'dot' or 'gaussian', got {score!r}")


def check_number(name: str, x: object) -> None:
    if not isinstance(x, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} must be a number, got {kind_of(x)}")


def check_layer(
    x: Tensor,
    projections: dict[str, Tensor],
    optional: dict[str, Tensor | None],
    num_heads: int,
) -> None:
    """Check x, `projections` (w_q, w_k, w_v) and `optional` (w_o, b_q, b_k, b_v, b_o)."""
    if not isinstance(num_heads, int) or num_heads < 1:
        raise ValueError(f"num_heads must be an integer of at least 1, got {num_heads!r}")
    given = {name: t for name, t in optional.items() if t is not None}
    for name, t in {"x": x, **projections, **given}.items():
        check_floating(name, t)
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
        raise ValueError(f"x must have at least 2 dimensions [..., n, d], got shape {shape_of(x)}")
    d = x.shape[-1]
    for name, weight in projections.items():
        rows = weight.shape[0] if weight.ndim == 2 else 0
        if weight.ndim != 2 or weight.shape[1] != d or rows == 0 or rows % num_heads:
            width = "dv" if name == "w_v" else "rank"
            raise ValueError(
                f"{name} must have shape [num_heads * {width}, d] with num_heads = {num_heads} and "
                f"d = {d} (the last dimension of x), got {shape_of(weight)}"
            )
    w_q, w_k, w_v = projections.values()
    if w_q.shape != w_k.shape:
        raise ValueError(
            f"w_k must have the shape of w_q, {shape_of(w_q)}, got {shape_of(w_k)}: queries and "
            "keys have the same rank"
        )
    w_o = given.get("w_o")
    if w_o is not None and (w_o.ndim != 2 or w_o.shape[1] != w_v.shape[0]):
        raise ValueError(
            f"w_o must have shape [d_out, num_heads * dv] = [d_out, {w_v.shape[0]}], "
            f"got {shape_of(w_o)}"
        )
    if "b_o" in given and w_o is None:
        raise ValueError("b_o must be None without w_o: there is no output projection to add it to")
    for name, w in {**projections, "w_o": w_o}.items():
        b = given.get(name.replace("w", "b"))
        if b is not None and w is not None and b.shape != w.shape[:1]:
            raise ValueError(
                f"{name.replace('w', 'b')} must have shape {[w.shape[0]]}, one number per row of "
                f"{name}, got {shape_of(b)}"
            )


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_floating(name, x)
        if x.ndim < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions [..., n, width], got shape "
                f"{shape_of(x)}{_forgotten_rank(query, key, value)}"
            )
        if x.ndim > 2 and x.shape[-3] == 0:
            raise ValueError(f"{name} must have at least 1 head (dimension -3), got {shape_of(x)}")
    if query.shape[-1] == 0:
        raise ValueError(f"query must have rank (last dimension) at least 1, got {shape_of(query)}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"key must have the rank (last dimension) of query, {query.shape[-1]}, "
            f"got {key.shape[-1]} (query {shape_of(query)}, key {shape_of(key)})"
            f"{_forgotten_rank(query, key, value)}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"value must have as many rows as key, {key.shape[-2]}, got {value.shape[-2]} "
            f"(key {shape_of(key)}, value {shape_of(value)}){_forgotten_rank(query, key, value)}"
        )
    if value.shape[-1] == 0:
        raise ValueError(f"value must have a last dimension of at least 1, got {shape_of(value)}")
    for name, x in (("key", key), ("value", value)):
        if x.device != query.device:
            raise ValueError(
                f"{name} must be on the device of query, {query.device}, got {x.device}; "
                f"move it with {name}.to(query.device)"
            )


def _forgotten_rank(query: Tensor, key: Tensor, value: Tensor) -> str:
    """The remedy if queries and keys look like numbers without a dimension for the rank."""
    shapes = [getattr(x, "shape", ()) for x in (query, key, value)]
    if len(shapes[0]) == len(shapes[1]) == len(shapes[2]) - 1 and shapes[1] == shapes[2][:-1]:
        return (
            "; for rank 1 give query and key a last dimension of 1 with query.unsqueeze(-1) and "
            "key.unsqueeze(-1)"
        )
    return ""


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
            raise ValueError(
                f"{name} must have a head axis for enable_gqa, got shape {shape_of(x)}"
            )
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
            f"got query {shape_of(query)}, key {shape_of(key)}, value {shape_of(value)}"
            "; for fewer key heads than query heads pass enable_gqa=True"
        ) from None
    return tuple(lead)


def check_mask_kind(name: str, mask: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {kind_of(mask)}")
    if mask.dtype != torch.bool and mask.dtype not in DTYPES:
        raise TypeError(
            f"{name} must be bool or floating point, got {mask.dtype}; convert 0/1 masks "
            f"with {name}.bool()"
        )


def _check_mask(name: str, mask: Tensor, query: Tensor) -> None:
    check_mask_kind(name, mask)
    if mask.device != query.device:
        raise ValueError(
            f"{name} must be on the device of query, {query.device}, got {mask.device}; "
            f"move it with {name}.to(query.device)"
        )


def _expand_attn_mask(mask: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    _check_mask("attn_mask", mask, query)
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"attn_mask must broadcast to [..., heads, n_q, n_k] = {list(shape)}, "
            f"got {shape_of(mask)}"
        ) from None


def _expand_key_bias(bias: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    _check_mask("key_bias", bias, query)
    if bias.dtype == torch.bool:
        raise TypeError("key_bias must be floating point, got torch.bool; pass key_padding_mask")
    try:
        return bias.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"key_bias must broadcast to [..., heads, n_k] = {list(shape)}, got {shape_of(bias)}; "
            "for one bias per batch and key insert a head axis with key_bias.unsqueeze(-2)"
        ) from None


def _is_same_for_all_queries(mask: Tensor) -> bool:
    """Whether a mask was broadcast over the queries, and so is one of the keys."""
    return bool(mask.shape[-2] == 1 or (mask.shape[-2] > 0 and mask.stride(-2) == 0))


def _join_masks(one: Tensor, other: Tensor | None) -> Tensor:
    """Two masks of keys as one; what either hides is hidden."""
    if other is None:
        return one
    if one.dtype == torch.bool and other.dtype == torch.bool:
        return one | other
    if one.dtype == torch.bool or other.dtype == torch.bool:
        hidden, bias = (one, other) if one.dtype == torch.bool else (other, one)
        return bias.masked_fill(hidden, -math.inf)
    # Half precision would round the sum.
    wide = accumulate_dtype(torch.promote_types(one.dtype, other.dtype))
    hidden = (one == -math.inf) | (other == -math.inf)
    return (one.to(wide) + other.to(wide)).masked_fill(hidden, -math.inf)


def _expand_slopes(slopes: Tensor, query: Tensor, lead: tuple[int, ...]) -> Tensor:
    _check_mask("alibi_slopes", slopes, query)
    if slopes.dtype == torch.bool:
        raise TypeError("alibi_slopes must be floating point, got torch.bool")
    try:
        return slopes.double().expand(lead)
    except RuntimeError:
        raise ValueError(
            f"alibi_slopes must broadcast to [..., heads] = {list(lead)}, got {shape_of(slopes)}"
        ) from None


def expand_key_padding_mask(mask: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    _check_mask("key_padding_mask", mask, query)
    *lead, n_k = shape
    batch = lead[:-1]
    try:
        spread = mask.expand(*batch, n_k)
    except RuntimeError:
        raise ValueError(
            f"key_padding_mask must broadcast to [batch..., n_k] = {[*batch, n_k]} "
            f"(no head axis: the last leading dimension of query is the head), got {shape_of(mask)}"
        ) from None
    return spread.unsqueeze(-2).expand(shape) if lead else spread
