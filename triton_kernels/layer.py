"""Rank-1 self-attention with its projections applied at the nodes.

The transform runs on the tokens themselves. What it finds at the nodes is multiplied by the heads'
weights, a few hundred rows whatever the length, and only then evaluated at the queries:

    out_i = sum_h sum_a l_a(t_hi) (F_ha W_h^T)

Backward sums the incoming gradient onto the nodes, G_ha, and continues with G_ha W_h; the gradient
of a weight is sum_a G_ha^T F_ha. Heads that the transform does not serve are left to `direct` and
`product_kernel`, which start in any case and leave served heads alone: the host does not wait.

Heads come before batches here, so that those of one head lie together; outputs of heads are added
up one head at a time, in fp32. The extents in a problem are not used: finding them again costs
little.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from boltzattn.problem import Gradients, LayerGradients, LayerProblem, OutputGradients, Problem
from boltzattn.triton_kernels.direct import backward_unserved, empty_saved, forward_unserved
from boltzattn.triton_kernels.heads import (
    head_of,
    lead_of,
    load_matrix,
    span_of,
    store_matrix,
    strided,
    transposed,
)
from boltzattn.triton_kernels.launch import cdiv, launch, on_device, product_options
from boltzattn.triton_kernels.layout import QUERY_PANELS
from boltzattn.triton_kernels.transform_launch import (
    Transform,
    adjoint,
    evaluate,
    evaluate_keys,
    query_moments,
    run_to_core,
)
from torch import Tensor


@triton.jit
def product_kernel(
    a,  # [batch, rows, inner]
    b,  # [batch, columns, inner]
    served,
    out,  # [batch, rows, columns] fp32, written where not served: a b^T
    lead,
    n_rows,
    n_columns,
    n_inner,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    head = head_of(tl.program_id(0) // blocks, lead)
    if tl.load(served + head.number) != 0:
        return
    rows = span_of(tl.program_id(0) % blocks * BLOCK_ROWS, n_rows, BLOCK_ROWS)
    columns = span_of(tl.program_id(1) * BLOCK_COLUMNS, n_columns, BLOCK_COLUMNS)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, n_inner, BLOCK_INNER):
        inner = span_of(first, n_inner, BLOCK_INNER)
        x = load_matrix(a, head, rows, inner).to(tl.float32)
        y = load_matrix(transposed(b), head, inner, columns).to(tl.float32)
        sums = tl.dot(x, y, sums, input_precision=PRECISION)
    store_matrix(out + head.number * n_rows * n_columns, sums, rows, columns)


def product_unserved(a: Tensor, b: Tensor, served: Tensor, out: Tensor) -> None:
    """out[i] = a[i] b[i]^T wherever served[i] is 0."""
    batch, rows, columns = out.shape
    fixed = product_options()
    grid = batch * cdiv(rows, fixed["BLOCK_ROWS"]), cdiv(columns, fixed["BLOCK_COLUMNS"])
    inputs = strided(a, 2), strided(b, 2), served, out, lead_of(out, 2)
    launch(product_kernel, grid, *inputs, rows, columns, a.shape[-1], **fixed)


def heads_first(problem: LayerProblem) -> Problem:
    """Attention of the tokens themselves, heads before batches."""
    query, key, value, mask = problem.query, problem.key, problem.value, problem.key_mask
    heads = query.shape[1]
    return Problem(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.expand(heads, *value.shape),
        None,
        None if mask is None else mask.expand(heads, *mask.shape),
        None,
        None,
        problem.scale,
        0.0,
        False,
        False,
    )


def of_head(x: Any, head: int, batch: int) -> Any:
    """One head of x, whose tensors are [heads * batch, ...]."""
    if isinstance(x, Tensor):
        return x[head * batch : (head + 1) * batch]
    return type(x)(*(of_head(y, head, batch) for y in x)) if isinstance(x, tuple) else x


def one_head(transform: Transform, head: int) -> Transform:
    problem = Problem(*(x[head] if isinstance(x, Tensor) else x for x in transform.problem))
    one = of_head(transform._replace(problem=None), head, len(problem.query))
    heads = one.heads._replace(**lead_of(problem.query, 2)._asdict())
    return one._replace(problem=problem, heads=heads)


def layer_forward(problem: LayerProblem) -> Tensor:
    """out [batch, n, d_out] in the dtype of value."""
    value, weight, mask = problem.value, problem.weight, problem.key_mask
    (batch, n, _), (heads, d_out, d) = value.shape, weight.shape
    out = value.new_empty(batch, n, d_out, dtype=torch.float32)
    with on_device(value):
        transform = run_to_core(heads_first(problem), for_backward=False)
        node_out = transform.core.node_out
        tables = node_out.view(heads, -1, d) @ weight.float().mT
        tables = tables.view(*node_out.shape[:-1], d_out)
        for head in range(heads):
            one = one_head(transform, head)
            served = one.heads.served
            part = out if head == 0 else torch.empty_like(out)
            evaluate(one, of_head(tables, head, batch), part, None)
            attended = empty_saved(one.problem, torch.float32)
            forward_unserved(one.problem, served, attended)
            product_unserved(attended.out, weight[head].expand(batch, -1, -1), served, part)
            if head > 0:
                out += part
    if problem.weight_bias is not None:
        # Softmax weights sum to 1, except where there is no key.
        bias = problem.weight_bias.float().sum(0).expand(batch, d_out)
        if mask is not None:
            bias = bias * ~mask.all(1, keepdim=True)
        out += bias[:, None]
    if problem.out_bias is not None:
        out += problem.out_bias
    return out.to(value.dtype)


def layer_backward(grad_out: Tensor, problem: LayerProblem) -> LayerGradients:
    """The gradients, in fp32."""
    value, weight = problem.value, problem.weight
    (batch, n, d), (heads, d_out, _) = value.shape, weight.shape
    grad_query, grad_key = value.new_empty(2, heads, batch, n, 1, dtype=torch.float32)
    grad_weight = value.new_zeros(heads, batch, d_out, d, dtype=torch.float32)
    grad_value = value.new_zeros(batch, n, d, dtype=torch.float32)
    with on_device(value):
        transform = run_to_core(heads_first(problem), for_backward=True)
        layout, core = transform.heads.layout, transform.core
        nodes = core.node_out.shape[:-1]  # heads * batch, panels, nodes of a panel
        slopes = core.node_slopes.view(heads, -1, d) @ weight.float().mT
        incoming = OutputGradients(grad_out.expand(heads, *grad_out.shape), None)
        to_query, sums, lse_sums = query_moments(transform, slopes.view(*nodes, d_out), incoming)
        grad_query.copy_(to_query.view_as(grad_query))
        projected = sums.view(heads, -1, d_out) @ weight.double()
        tables = adjoint(transform, projected.view(*nodes, d), lse_sums)

        # Panels that a head does not use are uninitialised.
        panels = torch.arange(nodes[1], device=value.device)
        served = transform.heads.served[:, None] != 0
        used = ((panels < layout[:, QUERY_PANELS.value, None]) & served)[:, :, None, None]
        held = torch.where(used, sums, 0.0).view(heads, -1, d_out)
        means = torch.where(used, core.node_out.double(), 0.0).view(heads, -1, d)
        at_nodes = held.mT @ means

        for head in range(heads):
            one = one_head(transform, head)
            served = one.heads.served
            part = grad_value if head == 0 else torch.zeros_like(grad_value)
            to_key = evaluate_keys(one, of_head(tables, head, batch), part)
            grad_key[head].copy_(to_key.view(batch, n, 1))
            # What follows is for the heads that are not served.
            attended = empty_saved(one.problem, torch.float32)
            forward_unserved(one.problem, served, attended)
            back = torch.empty_like(attended.out)
            product_unserved(grad_out, weight[head].mT.expand(batch, -1, -1), served, back)
            found = Gradients(
                grad_query[head], grad_key[head], part, *one.problem.new_gradients()[3:]
            )
            backward_unserved(OutputGradients(back, None), attended, one.problem, served, found)
            product_unserved(grad_out.mT, attended.out.mT, served, grad_weight[head])
            if head > 0:
                grad_value += part
    grad_weight = grad_weight.sum(1) + at_nodes.float()
    return LayerGradients(
        grad_query.transpose(0, 1), grad_key.transpose(0, 1), grad_value, grad_weight
    )
