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
    token_options,
    work_dtype,
)
from boltzattn.triton_kernels.layout import FIELDS, layout_kernel
from boltzattn.triton_kernels.sorting import Heads, count_kernel, order_kernel
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
    node_means: Tensor | None  # F - end value, like node_out
    node_slopes: Tensor | None  # F', like node_out
    mean_gaps: Tensor | None  # mean key - reference key, like log_z


class Transform(NamedTuple):
    """A problem up to the core, where forward and backward part."""

    problem: Problem
    heads: Heads
    queries: Tokens
    numbers: Tensor  # the queries in that order, [heads, n_q]
    keys: Tokens
    core: Core


class KeyTables(NamedTuple):
    """What the gradients of keys and values are read off, at the key nodes."""

    value: Tensor  # [heads, panels, NODES, dv] fp32
    slope: Tensor  # like value: to be multiplied by v - end value
    rest: Tensor  # [heads, panels, NODES] fp64: to be added


def find_layouts(problem: Problem) -> Heads:
    """The stages `extents` and `layout`: one look at queries and keys."""
    query, key = problem.query, problem.key
    n_q, n_k, lead = query.shape[-2], key.shape[-2], lead_of(query, 2)
    aims, blocks = PRECISION[query.dtype], cdiv(max(n_q, n_k), TOKEN_BLOCK)
    parts = query.new_empty(lead.heads, 2, blocks, EXTENT.value, dtype=torch.float64)
    layout = query.new_empty(lead.heads, FIELDS.value, dtype=torch.float64)
    served = query.new_empty(lead.heads, dtype=torch.int32)
    launch(
        extents_kernel,
        (lead.heads * blocks,),
        strided(query, 2),
        strided(key, 2),
        strided(problem.key_mask, 1),
        parts,
        lead,
        n_q,
        n_k,
        split(problem.scale),
        BLOCK=TOKEN_BLOCK,
    )
    launch(
        layout_kernel,
        (lead.heads,),
        parts,
        layout,
        served,
        blocks,
        LARGEST_PRODUCT,
        *most_panels(n_k, aims),
        QUERY_PRECISION=aims.query,
        KEY_PRECISION=aims.key,
        NODES=NODES,
        BLOCK=128,
    )
    return Heads(layout, served, lead)


def sort(problem: Problem, heads: Heads, panels: int, is_key: bool) -> tuple[Tokens, Tensor | None]:
    """The tokens of an axis in the order of their panels, and, of queries, their numbers."""
    x, mask = (problem.key, problem.key_mask) if is_key else (problem.query, None)
    n, count = x.shape[-2], heads.lead.heads
    blocks = cdiv(n, TOKEN_BLOCK)
    bins = 1 << panels.bit_length()  # one at least for masked keys
    counts = x.new_zeros(count, bins, blocks, dtype=torch.int32)
    order = x.new_empty(count, n, dtype=torch.int32)
    places = x.new_empty(count, n, dtype=work_dtype(x.dtype))
    numbers = None if is_key else x.new_empty(count, n)
    grid, inputs = (count * blocks,), (strided(x, 2), strided(mask, 1), heads)
    sizes = n, split(1.0 if is_key else problem.scale)
    fixed = {"IS_KEY": is_key, "BINS": bins, "BLOCK": TOKEN_BLOCK}
    launch(count_kernel, grid, *inputs, counts, *sizes, **fixed)
    ends = counts.flatten(1).cumsum(1, dtype=torch.int32)
    fixed["LEVELS"] = TOKEN_BLOCK.bit_length() - 1
    launch(order_kernel, grid, *inputs, ends, order, places, numbers, *sizes, **fixed)
    slots = cdiv(n, CHUNK) + panels
    return Tokens(counts, ends, order, places, n, blocks, slots, panels), numbers


PASSES = {
    "moments": moments_kernel,
    "evaluate": evaluate_kernel,
    "query_moments": query_moments_kernel,
    "evaluate_keys": evaluate_keys_kernel,
}


def pass_over(
    tokens: Tokens, name: str, heads: Heads, dtype: torch.dtype, dv: int, *args: Any
) -> None:
    """Launch one of the passes."""
    grid = heads.lead.heads * tokens.slots, column_blocks(dv)
    fixed = token_options(name, dtype, dv)
    launch(PASSES[name], grid, heads, tokens, dv, *args, BINS=tokens.counts.shape[1], **fixed)


def new_parts(tokens: Tokens, dtype: torch.dtype, dv: int) -> tuple[Tensor, Tensor]:
    """Room for what parts sum onto their nodes: rows, and single numbers in fp64."""
    shape, new = (len(tokens.order), tokens.slots, NODES), tokens.order.new_empty
    return new(*shape, dv, dtype=work_dtype(dtype)), new(shape, dtype=torch.float64)


def sum_parts(
    tokens: Tokens, heads: Heads, is_key: bool, rows: Tensor, numbers: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Parts added up in fp64: rows [heads, panels, NODES, dv] in dtype, numbers without dv."""
    shape, dv = (heads.lead.heads, tokens.panels, NODES), rows.shape[-1]
    sums, totals = rows.new_empty(*shape, dv, dtype=dtype), numbers.new_empty(shape)
    launch(
        reduce_kernel,
        (heads.lead.heads * tokens.panels, column_blocks(dv)),
        heads,
        tokens,
        dv,
        rows,
        numbers,
        sums,
        totals,
        IS_KEY=is_key,
        BINS=tokens.counts.shape[1],
        CHUNK=CHUNK,
        **node_options(dv),
    )
    return sums, totals


def moments(problem: Problem, heads: Heads, keys: Tokens) -> tuple[Tensor, Tensor]:
    """Sums of value - end value and of ones onto the key nodes."""
    value, dtype, dv = strided(problem.value, 2), problem.query.dtype, problem.value.shape[-1]
    parts = new_parts(keys, dtype, dv)
    pass_over(keys, "moments", heads, dtype, dv, value, *parts)
    # The core reads them once for every query panel: no wider than the parts.
    return sum_parts(keys, heads, True, *parts, parts[0].dtype)


def run_core(
    problem: Problem, heads: Heads, panels: tuple[int, int], slopes: bool, *sums: Tensor
) -> Core:
    """The core; heads whose certificate is not good enough are no longer served."""
    n_k, dv = problem.value.shape[-2:]
    count, columns = heads.lead.heads, column_blocks(dv)
    line, new = (count, panels[0], NODES), heads.layout.new_empty

    def table() -> Tensor:
        return new(*line, dv, dtype=torch.float32)

    core = Core(
        table(),
        new(line),
        table() if slopes else None,
        table() if slopes else None,
        new(line) if slopes else None,
    )
    bounds = new(count, panels[0], columns, 2, dtype=torch.float32)
    launch(
        core_kernel,
        (count * panels[0], columns),
        heads,
        strided(problem.value, 2),
        dv,
        *panels,
        *sums,
        *core,
        bounds,
        PRECISION=precision(),
        **node_options(dv),
    )
    dtype = problem.query.dtype
    floor = key_side_error(n_k, PRECISION[dtype]) + ROUNDING[dtype]
    sizes = panels[0], columns, floor, TOLERANCE[dtype]
    launch(certify_kernel, (count,), heads, bounds, *sizes, BLOCK=128)
    return core


def run_to_core(problem: Problem, slopes: bool) -> Transform:
    """The stages up to the core; `slopes` are what backward needs of it."""
    panels = most_panels(problem.key.shape[-2], PRECISION[problem.query.dtype])
    heads = find_layouts(problem)
    queries, numbers = sort(problem, heads, panels[0], is_key=False)
    keys, _ = sort(problem, heads, panels[1], is_key=True)
    core = run_core(problem, heads, panels, slopes, *moments(problem, heads, keys))
    return Transform(problem, heads, queries, numbers, keys, core)


def evaluate(transform: Transform, node_out: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Fill out [heads, n, dv] and lse [heads, n] of the heads that are served, from F at nodes."""
    problem, dv = transform.problem, node_out.shape[-1]
    tables = transform.numbers, node_out, transform.core.log_z
    inputs = transform.heads, problem.query.dtype, dv, split(problem.scale), *tables
    pass_over(transform.queries, "evaluate", *inputs, out, lse)


def query_moments(
    transform: Transform, node_slopes: Tensor, grads: OutputGradients
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [heads, n] fp32, sums of grad_out and of grad_lse onto the query nodes, fp64)."""
    problem, heads, queries, dv = *transform[:3], node_slopes.shape[-1]
    parts = new_parts(queries, problem.query.dtype, dv)
    shape = column_blocks(dv), heads.lead.heads, queries.n
    shares = queries.order.new_empty(shape, dtype=torch.float32)
    inputs = heads, problem.query.dtype, dv, split(problem.scale)
    incoming = strided(grads.out, 2), strided(grads.lse, 1)
    tables = node_slopes, transform.core.mean_gaps
    pass_over(queries, "query_moments", *inputs, *incoming, *tables, *parts, shares)
    return summed(shares), *sum_parts(queries, heads, False, *parts, torch.float64)


def summed(shares: Tensor) -> Tensor:
    """The gradient from the shares of the blocks of columns."""
    return shares[0] if len(shares) == 1 else shares.sum(0)


def adjoint(transform: Transform, sums: Tensor, lse_sums: Tensor) -> KeyTables:
    """The core read backwards."""
    heads, core, dv = transform.heads, transform.core, sums.shape[-1]
    panels, columns = transform.keys.panels, column_blocks(dv)
    line, new = (heads.lead.heads, panels, NODES), heads.layout.new_empty
    value, slope = new(2, *line, dv, dtype=torch.float32)
    rest = new(columns, *line)
    launch(
        adjoint_kernel,
        (heads.lead.heads * panels, columns),
        heads,
        strided(transform.problem.value, 2),
        dv,
        transform.queries.panels,
        panels,
        sums,
        lse_sums,
        core.node_means,
        core.log_z,
        value,
        slope,
        rest,
        PRECISION=precision(),
        **node_options(dv),
    )
    return KeyTables(value, slope, rest.sum(0))


def evaluate_keys(transform: Transform, tables: KeyTables, grad_value: Tensor) -> Tensor:
    """Fill grad_value [heads, n, dv] of the keys that are not masked; dk [heads, n] fp32."""
    problem, heads, keys = transform.problem, transform.heads, transform.keys
    dv = problem.value.shape[-1]
    shape = column_blocks(dv), heads.lead.heads, keys.n
    shares = keys.order.new_zeros(shape, dtype=torch.float32)  # of masked keys
    inputs = heads, problem.query.dtype, dv, strided(problem.value, 2)
    pass_over(keys, "evaluate_keys", *inputs, *tables, shares, grad_value)
    return summed(shares)
