"""Rank-1 self-attention with its projections applied at the nodes: boltzattn/layer.py on a GPU.

The transform runs on the tokens themselves. What it finds at the nodes is multiplied by the heads'
weights, a few hundred rows whatever the length, and only then read off at the queries:

    out_i = sum_h sum_a l_a(t_hi) (F_ha W_h^T)

Backward sums the incoming gradient onto the nodes, G_ha, and goes on with G_ha W_h; the gradient of
a weight is sum_a G_ha^T F_ha. Heads that the transform does not serve are left to `direct` and to
`product_kernel`, which start in any case and leave served heads alone: the host waits for nothing.

Shapes as in boltzattn/layer.py. Heads come before batches here, so that those of one head lie
together; outputs of heads are added up one head at a time, in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from boltzattn.triton_kernels import direct, steps
from boltzattn.triton_kernels.heads import (
    lead_of,
    load_matrix,
    store_matrix,
    strided,
    transposed,
)
from boltzattn.triton_kernels.launch import cdiv, launch, on_device, product_options
from boltzattn.triton_kernels.layout import QUERY_PANELS
from torch import Tensor


@triton.jit
def product_kernel(
    a,  # [batch, rows, inner]
    b,  # [batch, columns, inner]
    served,
    out,  # [batch, rows, columns] fp32, written where not served: a b^T
    lead,
    rows,
    columns,
    inner,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    batch, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tl.load(served + batch) != 0:
        return
    row, column = block * BLOCK_ROWS, tl.program_id(1) * BLOCK_COLUMNS
    i, j, k = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS), tl.arange(0, BLOCK_INNER)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, inner, BLOCK_INNER):
        x = load_matrix(a, batch, lead, row, i, rows, first, k, inner)
        y = load_matrix(transposed(b), batch, lead, first, k, inner, column, j, columns)
        sums = tl.dot(x.to(tl.float32), y.to(tl.float32), sums, input_precision=PRECISION)
    to = out + batch.to(tl.int64) * rows * columns
    store_matrix(to, sums, row, i, rows, column, j, columns)


def _product(a: Tensor, b: Tensor, served: Tensor, out: Tensor) -> None:
    """out[i] = a[i] b[i]^T wherever served[i] is 0."""
    batch, rows, columns = out.shape
    fixed = product_options()
    grid = batch * cdiv(rows, fixed["BLOCK_ROWS"]), cdiv(columns, fixed["BLOCK_COLUMNS"])
    sizes = rows, columns, a.shape[-1]
    lead = batch, 1, batch
    launch(product_kernel, grid, strided(a, 2), strided(b, 2), served, out, lead, *sizes, **fixed)


def _by_head(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The call with heads first; values and mask are those of every head."""
    query, key = query.transpose(0, 1), key.transpose(0, 1)
    heads = query.shape[0]
    mask = None if key_mask is None else key_mask.expand(heads, *key_mask.shape)
    return query, key, value.expand(heads, *value.shape), mask


def _alone(call: steps.Call, head: int, query: Tensor, value: Tensor) -> steps.Call:
    """One head of a call."""
    batch = query.shape[1]
    those = slice(head * batch, (head + 1) * batch)
    return steps.heads_of(call, those, strided(value, 2), lead_of(query[head], 2))


def layer_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    weight_bias: Tensor | None,
    out_bias: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """out [batch, n, d_out] in the dtype of value."""
    (batch, n, d), d_out = value.shape, weight.shape[1]
    query, key, values, mask = _by_head(query, key, value, key_mask)
    with on_device(value):
        call = steps.prepare(query, key, values, mask, scale, slopes=False)
        tables = call.node_out.view(len(weight), -1, d) @ weight.float().mT
        tables = tables.view(*call.node_out.shape[:-1], d_out)
        out = None
        for head in range(len(weight)):
            one = _alone(call, head, query, value)
            part = value.new_empty(batch, n, d_out, dtype=torch.float32)
            steps.evaluate(one, tables[head * batch : (head + 1) * batch], part, None)
            rows, _ = _attended(query[head], key[head], value, key_mask, scale, one.served)
            _product(rows, weight[head].expand(batch, -1, -1), one.served, part)
            out = part if out is None else out.add_(part)
    assert out is not None
    if weight_bias is not None:
        # Softmax weights sum to 1, except where there is no key.
        bias = weight_bias.float().sum(0).expand(batch, d_out)
        if key_mask is not None:
            bias = bias * ~key_mask.all(1, keepdim=True)
        out += bias[:, None]
    if out_bias is not None:
        out += out_bias
    return out.to(value.dtype)


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    scale: float,
    served: Tensor,
) -> tuple[Tensor, Tensor]:
    """(attention of the tokens [batch, n, d] fp32, lse) by `direct`, where not served."""
    rows = value.new_empty(value.shape, dtype=torch.float32)
    lse = value.new_empty(value.shape[:2], dtype=torch.float64)
    masks = None, key_mask, None
    direct.run_forward(query, key, value, *masks, scale, 0.0, False, served, rows, lse)
    return rows, lse


def layer_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    key_mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and weight, in fp32."""
    (batch, n, d), (heads, d_out, _) = value.shape, weight.shape
    query, key, values, mask = _by_head(query, key, value, key_mask)
    grad_query, grad_key = value.new_empty(2, heads, batch, n, 1, dtype=torch.float32)
    grad_weight = value.new_zeros(heads, batch, d_out, d, dtype=torch.float32)
    grad_value = None
    with on_device(value):
        call = steps.prepare(query, key, values, mask, scale, slopes=True)
        nodes = call.node_out.shape[:-1]  # heads * batch, panels, nodes of a panel
        slopes = call.node_slopes.view(heads, -1, d) @ weight.float().mT
        incoming = strided(grad_out.expand(heads, *grad_out.shape), 2)
        to_query, sums, lse_sums = steps.query_gradient(
            call, slopes.view(*nodes, d_out), incoming, None
        )
        grad_query.copy_(to_query.view_as(grad_query))
        projected = sums.view(heads, -1, d_out) @ weight.double()
        tables = steps.adjoint(call, projected.view(*nodes, d), lse_sums)

        # Panels that a head does not use hold anything.
        panels = torch.arange(nodes[1], device=value.device)
        used = (panels < call.layout[:, QUERY_PANELS.value, None]) & (call.served[:, None] != 0)
        used = used[:, :, None, None]
        held = torch.where(used, sums, 0.0).view(heads, -1, d_out)
        means = torch.where(used, call.node_out.double(), 0.0).view(heads, -1, d)
        at_nodes = held.mT @ means

        for head in range(heads):
            one = _alone(call, head, query, value)
            those = slice(head * batch, (head + 1) * batch)
            own = steps.KeyTables(tables.value[those], tables.slope[those], tables.rest[those])
            part = value.new_zeros(batch, n, d, dtype=torch.float32)
            grad_key[head].copy_(steps.key_gradient(one, own, part).view(batch, n, 1))
            # What follows is for the heads that are not served.
            rows, lse = _attended(query[head], key[head], value, key_mask, scale, one.served)
            back = torch.empty_like(rows)
            _product(grad_out, weight[head].mT.expand(batch, -1, -1), one.served, back)
            tensors = back, None, query[head], key[head], value, rows, lse, None, key_mask, None
            grads = grad_query[head], grad_key[head], part
            direct.run_backward(*tensors, scale, 0.0, False, one.served, grads)
            _product(grad_out.mT, rows.mT, one.served, grad_weight[head])
            grad_value = part if grad_value is None else grad_value.add_(part)
    assert grad_value is not None
    grad_weight = grad_weight.sum(1) + at_nodes.float()
    return grad_query.transpose(0, 1), grad_key.transpose(0, 1), grad_value, grad_weight
