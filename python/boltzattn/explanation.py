"""What a call would do, and why, in words."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from boltzattn import distributed
from boltzattn.dispatch import native, plan
from boltzattn.dispatch.backends import Request
from boltzattn.ops import varlen
from boltzattn.ops.attention import mask_is_differentiated
from boltzattn.problem import Problem, Starts
from boltzattn.transform.tensor import MOST_AXES, TensorReport
from boltzattn.validation import validate, validate_varlen

MOST_HEADS = 4  # heads that are described one by one


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
    key_bias: Tensor | None = None,
    score: str = "dot",
    alibi_slopes: Tensor | None = None,
    method: str = "auto",
    backend: str = "auto",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> str:
    """The plan `attention` would follow for these arguments, and why not the others.

    Args:
        query, key, value, attn_mask, dropout_p: as in `attention`.
        is_causal, scale, enable_gqa, key_padding_mask: as in `attention`.
        key_bias, score, alibi_slopes, method, backend: as in `attention`.
        cu_seqlens_q, cu_seqlens_k: as in `attention_varlen`, whose plans are then described.
        group: describe what `boltzattn.distributed.attention` would send between the processes of
            this group, in bytes; every one of them must then make this call.

    Example:
        >>> q = torch.randn(4, 100, 2)
        >>> print(boltzattn.explain(q, q, q).splitlines()[0])
        method direct, backend cpu
        >>> q, starts = torch.randn(6000, 2, 1), torch.tensor([0, 10, 30, 6000])
        >>> text = boltzattn.explain(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)
        >>> print(text.splitlines()[0])
        varlen, 3 sequences, 2 plans
    """
    given = {
        "attn_mask": attn_mask is not None,
        "dropout_p": dropout_p > 0.0,
        "key_padding_mask": key_padding_mask is not None,
        "key_bias": key_bias is not None,
        "score": score != "dot",
        "alibi_slopes": alibi_slopes is not None,
        "is_causal": is_causal,
        "method": method != "auto",
        "backend": backend != "auto",
        "cu_seqlens_q": cu_seqlens_q is not None,
        "cu_seqlens_k": cu_seqlens_k is not None,
    }
    if group is not None:
        _refuse(given, "distributed.attention", {"key_padding_mask", "is_causal", "backend"})
        return distributed.explain(
            query,
            key,
            value,
            group=group,
            scale=scale,
            enable_gqa=enable_gqa,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            exchange="moments" if query.shape[-1] <= (1 if is_causal else MOST_AXES) else "gather",
            backend=backend,
        )
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        accepted = {"is_causal", "method", "backend", "cu_seqlens_q", "cu_seqlens_k"}
        accepted |= {"key_bias", "score", "alibi_slopes"}
        _refuse(given, "attention_varlen", accepted)
        packed = validate_varlen(
            query,
            key,
            value,
            cu_seqlens_q,  # type: ignore[arg-type]
            cu_seqlens_k,  # type: ignore[arg-type]
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            key_bias=key_bias,
            score=score,
            alibi_slopes=alibi_slopes,
            method=method,
            backend=backend,
        )
        starts = Starts(cu_seqlens_q, cu_seqlens_k)  # type: ignore[arg-type]
        return varlen.describe(packed.problem, starts, packed.choice)
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
    problem = call.problem
    request = Request.of(problem, mask_is_differentiated(problem))
    taken = plan.choose(request, call.choice)
    panels = request.rank > 1 and (taken.method, taken.backend) == ("transform", "cpu")
    details = _tensor_heads(problem) if panels else []
    return plan.describe(request, call.choice, details)


def _tensor_heads(problem: Problem) -> list[str]:
    """What the CPU kernels make of heads of rank 2 to 4, in lines."""
    with torch.no_grad():
        rows = native.ops.cpu_transform_report(*problem)
    heads = [TensorReport.of(row, problem.query.shape[-1]) for row in rows.tolist()]
    lines = [f"head {i}: {head.describe()}" for i, head in enumerate(heads[:MOST_HEADS])]
    if rest := heads[MOST_HEADS:]:
        direct = sum(not head.served for head in rest)
        lines.append(f"{len(rest)} more heads, {direct} of them computed by direct")
    return lines


def _refuse(given: dict[str, bool], function: str, accepted: set[str]) -> None:
    for name in given:
        if given[name] and name not in accepted:
            raise ValueError(f"{name} must not be given here: {function} does not take it")
