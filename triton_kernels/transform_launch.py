"""The stages of a transform, each a launch or a few: what `transform` and `layer` are made of.

Every shape follows from dtype and n, and the host never asks the device for a number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from boltzattn.problem import OutputGradients, Problem
from boltzattn.transform.tolerances import LARGEST_PRODUCT, TOLERANCE
from boltzattn.triton_kernels.extents import EXTENT, extents_kernel
from boltzattn.triton_kernels.heads import lead_of, split, strided
from boltzattn.triton_kernels.launch import (
    CHUNK,
    NODES,
    TOKEN_BLOCK,
    cdiv,
    column_blocks,
    launch,
    node_options,
    precision,
    sum_shares,
    token_options,
    work_dtype,
)
from boltzattn.triton_kernels.layout import FIELDS, Heads, layout_kernel
from boltzattn.triton_kernels.sorting import count_kernel, order_kernel
from boltzattn.triton_kernels.tolerances import PRECISION, ROUNDING, key_side_error, most_panels
from boltzattn.triton_kernels.transform_nodes import adjoint_kernel, certify_kernel, core_kernel
from boltzattn.triton_kernels.transform_tokens import (
    Tokens,
    evaluate_kernel,
    evaluate_keys_kernel,
    moments_kernel,
    query_moments_kernel,
    reduce_kernel,
)
from torch import Tensor


class Core(NamedTuple):
    """What the core finds at the query nodes.

    What belongs to panels that a head does not use, and all of a head that is not served, is
    uninitialised.
    """

    node_out: Tensor  # F [heads, panels, NODES, dv] fp32
    log_z: Tensor  # [heads, panels, NODES] fp64
    # For backward:
    node_means: Tensor | None = None  # F - end value, like node_out
    node_slopes: Tensor | None = None  # F', like node_out
    mean_gaps: Tensor | None = None  # mean key - reference key, like log_z


class Transform(NamedTuple):
    """A problem after the core, which forward and backward both start from."""

    problem: Problem
    heads: Heads
    queries: Tokens
    numbers: Tensor  # the queries in that order, [heads, n_q]
    keys: Tokens
    core: Core


class KeyTables(NamedTuple):
    """What the adjoint finds at the key nodes: dv, and dk = slope . (v - end value) + rest."""

    value: Tensor  # [heads, panels, NODES, dv] fp32
    slope: Tensor  # like value
    rest: Tensor  # [heads, panels, NODES] fp64


def find_layouts(problem: Problem) -> Heads:
    """The stages `extents` and `layout`."""
    query, key = problem.query, problem.key
    n_q, n_k, lead = query.shape[-2], key.shape[-2], lead_of(query, 2)
    aims, blocks = PRECISION[query.dtype], cdiv(max(n_q, n_k), TOKEN_BLOCK)
    parts = query.new_empty(lead.total, 2, blocks, EXTENT.value, dtype=torch.float64)
    layout = query.new_empty(lead.total, FIELDS.value, dtype=torch.float64)
    served = query.new_empty(lead.total, dtype=torch.int32)
    heads = Heads(layout, served, *lead, *most_panels(n_k, aims))
    inputs = strided(query, 2), strided(key, 2), strided(problem.key_mask, 1)
    sizes = lead, n_q, n_k, split(problem.scale)
    launch(extents_kernel, (lead.total * blocks,), *inputs, parts, *sizes, BLOCK=TOKEN_BLOCK)
    launch(
        layout_kernel,
        (lead.total,),
        parts,
        heads,
        blocks,
        LARGEST_PRODUCT,
        QUERY_PRECISION=aims.query,
        KEY_PRECISION=aims.key,
        NODES=NODES,
        BLOCK=128,
    )
    return heads


def sort(problem: Problem, heads: Heads, is_key: bool) -> tuple[Tokens, Tensor | None]:
    """The tokens of an axis in the order of their panels, and the queries themselves in it."""
    x, mask = (problem.key, problem.key_mask) if is_key else (problem.query, None)
    panels, scale = (heads.key_panels, 1.0) if is_key else (heads.query_panels, problem.scale)
    n, count = x.shape[-2], heads.total
    blocks = cdiv(n, TOKEN_BLOCK)
    bins = 1 << panels.bit_length()  # one at least for masked keys
    counts = x.new_zeros(count, bins, blocks, dtype=torch.int32)
    order = x.new_empty(count, n, dtype=torch.int32)
    places = x.new_empty(count, n, dtype=work_dtype(x.dtype))
    numbers = None if is_key else x.new_empty(count, n)
    grid, inputs = (count * blocks,), (strided(x, 2), strided(mask, 1), heads, n, split(scale))
    fixed = {"IS_KEY": is_key, "BINS": bins, "BLOCK": TOKEN_BLOCK}
    launch(count_kernel, grid, *inputs, counts, **fixed)
    ends = counts.flatten(1).cumsum(1, dtype=torch.int32)
    fixed["LEVELS"] = TOKEN_BLOCK.bit_length() - 1
    launch(order_kernel, grid, *inputs, ends, order, places, numbers, **fixed)
    slots = cdiv(n, CHUNK) + panels
    return Tokens(counts, ends, order, places, split(scale), n, blocks, slots, panels), numbers


PASSES = {
    "moments": moments_kernel,
    "evaluate": evaluate_kernel,
    "query_moments": query_moments_kernel,
    "evaluate_keys": evaluate_keys_kernel,
}


def pass_over_tokens(
    name: str, heads: Heads, tokens: Tokens, dtype: torch.dtype, dv: int, *args: Any
) -> None:
    grid = heads.total * tokens.slots, column_blocks(dv)
    fixed = token_options(name, dtype, dv)
    launch(PASSES[name], grid, heads, tokens, dv, *args, BINS=tokens.counts.shape[1], **fixed)


def new_parts(tokens: Tokens, dtype: torch.dtype, dv: int) -> tuple[Tensor, Tensor]:
    """Room for what parts sum onto their nodes: rows, and single numbers in fp64."""
    shape, new = (len(tokens.order), tokens.slots, NODES), tokens.order.new_empty
    return new(*shape, dv, dtype=work_dtype(dtype)), new(shape, dtype=torch.float64)


def sum_parts(
    heads: Heads, tokens: Tokens, is_key: bool, rows: Tensor, numbers: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Parts added up in fp64: rows [heads, panels, NODES, dv] in dtype, numbers without dv."""
    shape, dv = (heads.total, tokens.panels, NODES), rows.shape[-1]
    sums, totals = rows.new_empty(*shape, dv, dtype=dtype), numbers.new_empty(shape)
    grid = heads.total * tokens.panels, column_blocks(dv)
    fixed = {"IS_KEY": is_key, "BINS": tokens.counts.shape[1], "CHUNK": CHUNK, **node_options(dv)}
    launch(reduce_kernel, grid, heads, tokens, dv, rows, numbers, sums, totals, **fixed)
    return sums, totals


def moments(problem: Problem, heads: Heads, keys: Tokens) -> tuple[Tensor, Tensor]:
    """Sums of value - end value and of ones onto the key nodes."""
    dtype, dv = problem.query.dtype, problem.value.shape[-1]
    parts = new_parts(keys, dtype, dv)
    pass_over_tokens("moments", heads, keys, dtype, dv, strided(problem.value, 2), *parts)
    # The core reads them once for every query panel: no wider than the parts.
    return sum_parts(heads, keys, True, *parts, parts[0].dtype)


def run_core(
    problem: Problem, heads: Heads, sums: Tensor, totals: Tensor, for_backward: bool
) -> Core:
    """The stage `core`; a head whose certificate is too large is no longer served."""
    dtype, (n_k, dv) = problem.query.dtype, problem.value.shape[-2:]
    count, columns, new = heads.total, column_blocks(dv), heads.layout.new_empty
    line = count, heads.query_panels, NODES
    table, line = new(*line, dv, dtype=torch.float32), new(line)
    more = (table, table, line) if for_backward else ()
    core = Core(table, line, *map(torch.empty_like, more))
    bounds = new(count, heads.query_panels, columns, 2, dtype=torch.float32)
    grid, value = (count * heads.query_panels, columns), strided(problem.value, 2)
    fixed = {"PRECISION": precision(), **node_options(dv)}
    launch(core_kernel, grid, heads, value, dv, sums, totals, *core, bounds, **fixed)
    floor = key_side_error(n_k, PRECISION[dtype]) + ROUNDING[dtype]
    launch(certify_kernel, (count,), heads, bounds, columns, floor, TOLERANCE[dtype], BLOCK=128)
    return core


def run_to_core(problem: Problem, for_backward: bool) -> Transform:
    """The stages up to the core."""
    heads = find_layouts(problem)
    queries, numbers = sort(problem, heads, is_key=False)
    keys, _ = sort(problem, heads, is_key=True)
    core = run_core(problem, heads, *moments(problem, heads, keys), for_backward)
    return Transform(problem, heads, queries, numbers, keys, core)


def evaluate(transform: Transform, node_out: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Fill out [heads, n, dv] and lse [heads, n] of the heads that are served, from F at nodes."""
    dtype, dv = transform.problem.query.dtype, node_out.shape[-1]
    args = transform.numbers, node_out, transform.core.log_z, out, lse
    pass_over_tokens("evaluate", transform.heads, transform.queries, dtype, dv, *args)


def query_moments(
    transform: Transform, node_slopes: Tensor, grads: OutputGradients
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [heads, n] fp32, sums of grad_out and of grad_lse onto the query nodes, fp64)."""
    heads, queries = transform.heads, transform.queries
    dtype, dv = transform.problem.query.dtype, node_slopes.shape[-1]
    parts = new_parts(queries, dtype, dv)
    shares = queries.order.new_empty(column_blocks(dv), *queries.order.shape, dtype=torch.float32)
    incoming = strided(grads.out, 2), strided(grads.lse, 1)
    args = *incoming, node_slopes, transform.core.mean_gaps, *parts, shares
    pass_over_tokens("query_moments", heads, queries, dtype, dv, *args)
    return sum_shares(shares), *sum_parts(heads, queries, False, *parts, torch.float64)


def adjoint(transform: Transform, sums: Tensor, lse_sums: Tensor) -> KeyTables:
    """The adjoint of the core, from query nodes to key nodes."""
    heads, core, dv = transform.heads, transform.core, sums.shape[-1]
    line, new = (heads.total, heads.key_panels, NODES), heads.layout.new_empty
    tables = new(2, *line, dv, dtype=torch.float32)
    rest = new(column_blocks(dv), *line)
    grid = heads.total * heads.key_panels, column_blocks(dv)
    args = strided(transform.problem.value, 2), dv, sums, lse_sums, core.node_means, core.log_z
    fixed = {"PRECISION": precision(), **node_options(dv)}
    launch(adjoint_kernel, grid, heads, *args, *tables, rest, **fixed)
    return KeyTables(*tables, rest.sum(0))


def evaluate_keys(transform: Transform, tables: KeyTables, grad_value: Tensor) -> Tensor:
    """Fill grad_value [heads, n, dv] of the keys that are not masked; dk [heads, n] fp32."""
    problem, heads, keys = transform.problem, transform.heads, transform.keys
    dtype, dv = problem.query.dtype, problem.value.shape[-1]
    # Zeros for masked keys.
    shares = keys.order.new_zeros(column_blocks(dv), *keys.order.shape, dtype=torch.float32)
    args = strided(problem.value, 2), *tables, shares, grad_value
    pass_over_tokens("evaluate_keys", heads, keys, dtype, dv, *args)
    return sum_shares(shares)
