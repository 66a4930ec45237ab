"""The ways to compute a self-attention layer; `boltzattn::self_attention` takes one of them.

* `first`: project every token, then attend.
* `small`: the same in one kernel, for few tokens.
* `nodes`: rank 1 by the transform, with the projections of value and output applied at its nodes.
  The output of a head is linear in its values, and the transform sums values into a few hundred
  nodes before anything else happens to them. So `weight = w_o w_v` need not meet the n tokens: sums
  of the raw rows are projected instead, and the n d d products of a layer disappear. The results of
  the heads add up to `[*L, n, d_out]`. docs/transform.md derives it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from boltzattn.dispatch import plan
from boltzattn.dispatch.backends import Request
from boltzattn.dispatch.plan import LayerRequest
from boltzattn.problem import (
    Choice,
    Kernels,
    LayerProblem,
    OutputGradients,
    Problem,
    Saved,
    SelfAttentionGradients,
    SelfAttentionProblem,
    SelfAttentionResults,
    SelfAttentionSaved,
    Wanted,
)

# ---- project first ----


def _linear_query_key(problem: SelfAttentionProblem) -> Tensor:
    w_q, w_k, bias = problem.w_q, problem.w_k, problem.b_in
    return F.linear(
        problem.x, torch.cat((w_q, w_k)), None if bias is None else bias[: 2 * w_q.shape[0]]
    )


def _linear_value(problem: SelfAttentionProblem) -> Tensor:
    bias = problem.b_in
    return F.linear(
        problem.x, problem.w_v, None if bias is None else bias[2 * problem.w_q.shape[0] :]
    )


def _heads_of(rows: Tensor, num_heads: int) -> Tensor:
    """`[*L, n, num_heads * width]` as `[*L, num_heads, n, width]`."""
    return rows.unflatten(-1, (num_heads, rows.shape[-1] // num_heads)).transpose(-2, -3)


def _rows_of(heads: Tensor) -> Tensor:
    """`[*L, num_heads, n, width]` as `[*L, n, num_heads * width]`."""
    return heads.transpose(-2, -3).flatten(-2)


def _attention(problem: SelfAttentionProblem, query_key: Tensor, value: Tensor) -> Problem:
    """The attention of projected tokens."""
    num_heads, mask = problem.num_heads, problem.key_mask
    query, key = query_key.split(problem.w_q.shape[0], -1)
    query, key, value = (_heads_of(rows, num_heads) for rows in (query, key, value))
    if mask is not None:
        mask = mask.unsqueeze(-2).expand(*mask.shape[:-1], num_heads, mask.shape[-1])
    numbers = problem.scale, 0.0, problem.is_causal, False
    return Problem(query, key, value, None, mask, None, None, *numbers)


def compose(problem: SelfAttentionProblem, attend: Callable[[Problem], Tensor]) -> Tensor:
    """The layer from torch's operators and `attend`: differentiable as often as these are."""
    attention = _attention(problem, _linear_query_key(problem), _linear_value(problem))
    heads = _rows_of(attend(attention))
    return heads if problem.w_o is None else F.linear(heads, problem.w_o, problem.b_o)


def _attention_kernels(attention: Problem, choice: Choice) -> Kernels:
    return plan.choose(Request.of(attention), choice).kernels


def first_forward(problem: SelfAttentionProblem, choice: Choice) -> SelfAttentionResults:
    query_key, value = _linear_query_key(problem), _linear_value(problem)
    attention = _attention(problem, query_key, value)
    attended, lse = _attention_kernels(attention, choice).forward(attention)
    heads = _rows_of(attended)
    if problem.w_o is None:
        return SelfAttentionResults(heads, query_key, value, None, lse)
    out = F.linear(heads, problem.w_o, problem.b_o)
    return SelfAttentionResults(out, query_key, value, heads, lse)


def first_backward(
    grad_out: Tensor,
    saved: SelfAttentionSaved,
    problem: SelfAttentionProblem,
    choice: Choice,
    wanted: Wanted,
) -> SelfAttentionGradients:
    x, w_q, w_k, w_v, w_o, b_in, b_o = problem.inputs
    query_key, value, heads, lse = saved.everything()
    num_heads = problem.num_heads
    attention = _attention(problem, query_key, value)
    grad_heads = grad_out if w_o is None else grad_out @ w_o
    parts = _attention_kernels(attention, choice).backward(
        OutputGradients(_heads_of(grad_heads, num_heads), None),
        Saved(_heads_of(heads, num_heads), lse.contiguous()),
        attention,
    )
    of_query, of_key, of_value = (_rows_of(part).flatten(0, -2) for part in parts[:3])
    of_query_key = torch.cat((of_query, of_key), -1)
    grad_x = grad_qk = grad_v = grad_o = grad_in = grad_b_o = None
    if wanted.want_x:
        grad_x = (of_value @ w_v).addmm_(of_query_key, torch.cat((w_q, w_k))).view(x.shape)
    if wanted.want_weights:
        tokens = x.flatten(0, -2)
        grad_qk, grad_v = of_query_key.mT @ tokens, of_value.mT @ tokens
        if b_in is not None:
            grad_in = torch.cat((of_query_key.sum(0), of_value.sum(0)))
        if w_o is not None:
            incoming = grad_out.flatten(0, -2)
            grad_o = incoming.mT @ heads.flatten(0, -2)
            grad_b_o = None if b_o is None else incoming.sum(0)
    return SelfAttentionGradients(grad_x, grad_qk, grad_v, grad_o, grad_in, grad_b_o)


# ---- few tokens ----


def small_forward(
    problem: SelfAttentionProblem, request: LayerRequest, choice: Choice, keep: bool
) -> SelfAttentionResults:
    run, _ = plan.layer_kernels(request, "small_layer", choice)
    return SelfAttentionResults._make(run(*problem, keep))


def small_backward(
    grad_out: Tensor,
    saved: SelfAttentionSaved,
    problem: SelfAttentionProblem,
    request: LayerRequest,
    choice: Choice,
    wanted: Wanted,
) -> SelfAttentionGradients:
    _, run = plan.layer_kernels(request, "small_layer", choice)
    return SelfAttentionGradients._make(run(grad_out, *saved, *problem, *wanted))


# ---- project at the nodes ----


def _outward(problem: SelfAttentionProblem) -> Tensor | None:
    """`[num_heads, d_out, dv]`"""
    if problem.w_o is None:
        return None
    return problem.w_o.unflatten(1, (problem.num_heads, -1)).transpose(0, 1)


def _inward(problem: SelfAttentionProblem) -> tuple[Tensor, Tensor | None]:
    """`[num_heads, dv, d]`, `[num_heads, dv, 1]`"""
    bias, num_heads = problem.b_in, problem.num_heads
    if bias is not None:
        bias = bias[2 * num_heads :].view(num_heads, -1, 1)
    return problem.w_v.unflatten(0, (num_heads, -1)), bias


def _node_problem(
    problem: SelfAttentionProblem, numbers: Tensor, extents: Tensor | None
) -> LayerProblem:
    n, d = problem.x.shape[-2:]
    outward, (weight, bias) = _outward(problem), _inward(problem)
    if outward is not None:
        weight = outward @ weight
        bias = None if bias is None else outward @ bias
    query, key = numbers.unsqueeze(-1).split(problem.num_heads, 1)
    return LayerProblem(
        query=query,
        key=key,
        value=problem.x.reshape(-1, n, d),
        weight=weight,
        weight_bias=None if bias is None else bias.squeeze(-1),
        out_bias=problem.b_o,
        key_mask=None if problem.key_mask is None else problem.key_mask.reshape(-1, n),
        extents=extents,
        scale=problem.scale,
    )


def nodes_forward(
    problem: SelfAttentionProblem, request: LayerRequest, choice: Choice
) -> SelfAttentionResults | None:
    """None if the transform does not serve a head."""
    x, num_heads = problem.x, problem.num_heads
    n, d = x.shape[-2:]
    bias = None if problem.b_in is None else problem.b_in[: 2 * num_heads]
    project = plan.layer_kernels(request, "project", choice)
    weight = torch.cat((problem.w_q, problem.w_k))
    numbers, extents = project(x.reshape(-1, n, d), weight, bias)
    layer = plan.layer_kernels(request, "layer", choice)
    out = layer.forward(_node_problem(problem, numbers, extents))
    if out is None:
        return None
    out = out.to(x.dtype).view(*x.shape[:-1], out.shape[-1])
    query_key = numbers.mT.reshape(*x.shape[:-1], 2 * num_heads)
    return SelfAttentionResults(out, query_key, None, None, None)


def nodes_backward(
    grad_out: Tensor,
    query_key: Tensor,
    problem: SelfAttentionProblem,
    request: LayerRequest,
    choice: Choice,
) -> SelfAttentionGradients | None:
    """None if the transform does not serve a head."""
    x, num_heads, dtype = problem.x, problem.num_heads, problem.x.dtype
    n = x.shape[-2]
    numbers = query_key.reshape(-1, n, 2 * num_heads).mT
    nodes = _node_problem(problem, numbers, None)
    grad_out = grad_out.reshape(-1, n, grad_out.shape[-1])
    found = plan.layer_kernels(request, "layer", choice).backward(grad_out, nodes)
    if found is None:
        return None
    of_query, of_key, grad_x, grad_weight = (part.to(dtype) for part in found)
    of_numbers = torch.cat((of_query, of_key), 1).squeeze(-1)
    grad_x = grad_x + of_numbers.mT @ torch.cat((problem.w_q, problem.w_k))
    grad_qk = (of_numbers @ nodes.value).sum(0)
    of_bias, grad_b_o = _bias_gradients(grad_out, nodes)
    grad_v, grad_o = grad_weight, None
    outward, (inward, inward_bias) = _outward(problem), _inward(problem)
    if outward is not None:
        grad_v = outward.mT @ grad_weight
        of_outward = grad_weight @ inward.mT
        if of_bias is not None and inward_bias is not None:
            of_outward = of_outward + of_bias[..., None] @ inward_bias.mT
            of_bias = (outward.mT @ of_bias[..., None]).squeeze(-1)
        grad_o = of_outward.transpose(0, 1).flatten(1)
    grad_in = None
    if of_bias is not None:
        grad_in = torch.cat((of_numbers.sum((0, 2)), of_bias.reshape(-1)))
    return SelfAttentionGradients(
        grad_x.view(x.shape), grad_qk, grad_v.flatten(0, 1), grad_o, grad_in, grad_b_o
    )


def _bias_gradients(grad_out: Tensor, problem: LayerProblem) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight_bias and out_bias."""
    of_weight = of_out = None
    if problem.out_bias is not None:
        of_out = grad_out.sum((0, 1))
    if problem.weight_bias is not None:
        # Softmax weights sum to 1, except where there is no key.
        sums = grad_out.sum(1)
        if problem.key_mask is not None:
            sums = sums * ~problem.key_mask.all(1, keepdim=True)
        of_weight = sums.sum(0).expand_as(problem.weight_bias)
    return of_weight, of_out
