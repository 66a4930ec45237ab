"""What a call would do, and why, in words."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from boltzattn import distributed
from boltzattn.dispatch import plan
from boltzattn.ops import attention as ops
from boltzattn.ops import varlen as packed
from boltzattn.validation import canonical


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
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> str:
    """The plan `attention` would follow for these arguments, and why not the others.

    With `cu_seqlens_q` and `cu_seqlens_k` the plans of a packed call. With `group` what
    `boltzattn.distributed.attention` would send between its processes, in bytes; every one of them
    must then make this call.

    Example:
        >>> q = torch.randn(4, 100, 2)
        >>> print(boltzattn.explain(q, q, q).splitlines()[0])
        method direct, backend cpu
        >>> q, starts = torch.randn(6000, 2, 1), torch.tensor([0, 10, 30, 6000])
        >>> text = boltzattn.explain(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)
        >>> print(text.splitlines()[0])
        packed, 3 sequences, 2 plans
    """
    is_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if group is not None:
        refused = {
            "attn_mask": attn_mask is not None,
            "dropout_p": dropout_p > 0.0,
            "is_causal": is_causal,
            "cu_seqlens": is_packed,
            "method": method != "auto",
            "backend": backend != "auto",
        }
        for name, given in refused.items():
            if given:
                raise ValueError(
                    f"{name} must not be given together with group: distributed.attention takes "
                    "a key_padding_mask only"
                )
        return distributed.explain(
            query,
            key,
            value,
            group=group,
            scale=scale,
            enable_gqa=enable_gqa,
            key_padding_mask=key_padding_mask,
            exchange="moments" if query.shape[-1] == 1 else "gather",
        )
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
    tensors, options, _ = canonical(
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
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        return packed.describe(*tensors[:3], cu_seqlens_q, cu_seqlens_k, *options[2:])
    request = ops.request_of(*tensors[:5], dropout_p, is_causal)
    return plan.describe(request, *options[3:])
