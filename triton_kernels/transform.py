"""Rank-1 attention in linear time: docs/transform.md, with every shape fixed by dtype and n.

Forward is extents -> layout -> order of tokens -> moments of the keys -> core -> evaluation at the
queries; backward goes on from the core with query moments -> adjoint -> evaluation at the keys. The
host never asks the device for a number, so a call can be captured in a graph. Heads that cannot be
served (or whose certificate is not good enough) are left to the kernels of `direct`, which start in
any case and leave served heads alone.

Tokens are taken in the order of their panels, in parts that lie on one panel; partial sums are
added up by a second kernel, in order.

A row of values costs one matrix product with 16 nodes: fp32 with split tf32 operands, summed over a
tile of tokens and then in fp64; half precision as it is, with split weights and summed in fp32.
Coordinates, kernel values and the core are fp64.
"""

from __future__ import annotations

from boltzattn.problem import Gradients, OutputGradients, Problem, Saved
from boltzattn.triton_kernels.direct import (
    backward_unserved,
    direct_backward,
    direct_forward,
    empty_saved,
    forward_unserved,
)
from boltzattn.triton_kernels.launch import on_device
from boltzattn.triton_kernels.transform_launch import (
    adjoint,
    evaluate,
    evaluate_keys,
    query_moments,
    run_to_core,
)


def transform_forward(problem: Problem) -> Saved:
    if 0 in (problem.query.shape[-2], problem.key.shape[-2]):
        return direct_forward(problem)
    saved = empty_saved(problem)
    with on_device(problem.query):
        transform = run_to_core(problem, for_backward=False)
        evaluate(transform, transform.core.node_out, *saved)
    forward_unserved(problem, transform.heads.served, saved)
    return saved


def transform_backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
    if 0 in (problem.query.shape[-2], problem.key.shape[-2]):
        return direct_backward(grads, saved, problem)
    # Masked keys are left out of the order of keys, and have no gradient.
    new = "new_empty" if problem.key_mask is None else "new_zeros"
    found = problem.new_gradients(new)
    with on_device(problem.query):
        transform = run_to_core(problem, for_backward=True)
        to_query, *sums = query_moments(transform, transform.core.node_slopes, grads)
        to_key = evaluate_keys(transform, adjoint(transform, *sums), found.value)
        found.query.copy_(to_query.view(found.query.shape))
        found.key.copy_(to_key.view(found.key.shape))
    backward_unserved(grads, saved, problem, transform.heads.served, found)
    return found
