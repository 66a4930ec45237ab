"""`boltzattn::self_attention` and `boltzattn::self_attention_backward`: one operator for a layer.

The way to compute it (see `ops.layer`) is chosen inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch import plan
from boltzattn.dispatch.names import NAMESPACE
from boltzattn.dispatch.torch_modes import without_autocast
from boltzattn.ops import hidden_sequences, layer
from boltzattn.ops.attention import attend
from boltzattn.ops.operator import Operator, batched, library, save, saved
from boltzattn.problem import (
    Choice,
    Keep,
    SelfAttentionGradients,
    SelfAttentionOutputGradient,
    SelfAttentionProblem,
    SelfAttentionResults,
    SelfAttentionSaved,
    Wanted,
    unflatten,
)


def _forward(problem: SelfAttentionProblem, choice: Choice, keep: Keep) -> SelfAttentionResults:
    if problem.key_mask is not None:
        hidden_sequences.notice(None, problem.key_mask)
    request = plan.LayerRequest.of(problem, keep.keep)
    with without_autocast(request.device):
        way = plan.choose_layer(request, choice)
        if way == "small":
            return layer.small_forward(problem, request, choice, keep.keep)
        results = layer.nodes_forward(problem, request, choice) if way == "nodes" else None
        if results is None:
            results = layer.first_forward(problem, choice)
    return results if keep.keep else SelfAttentionResults(results.out, None, None, None, None)


def _backward(
    grads: SelfAttentionOutputGradient,
    kept: SelfAttentionSaved,
    problem: SelfAttentionProblem,
    choice: Choice,
    wanted: Wanted,
) -> SelfAttentionGradients:
    request = plan.LayerRequest.of(problem, True)
    with without_autocast(request.device):
        way = plan.choose_layer(request, choice)
        if kept.query_key is None or kept.query_key.numel() == 0:
            kept = _saved(_forward(problem, choice, Keep(True)), problem)
        if way == "nodes":
            assert kept.query_key is not None
            found = layer.nodes_backward(grads.out, kept.query_key, problem, request, choice)
            if found is not None:
                return found
            kept = _saved(layer.first_forward(problem, choice), problem)
        if way == "small":
            return layer.small_backward(grads.out, kept, problem, request, choice, wanted)
        return layer.first_backward(grads.out, kept, problem, choice, wanted)


def _saved(results: SelfAttentionResults, problem: SelfAttentionProblem) -> SelfAttentionSaved:
    out, query_key, value, heads, lse = results
    return SelfAttentionSaved(query_key, value, out if problem.w_o is None else heads, lse)


def _forward_fake(
    problem: SelfAttentionProblem, choice: Choice, keep: Keep
) -> SelfAttentionResults:
    x, width = problem.x, problem.w_v.shape[0]
    *lead, n, _ = x.shape
    out = x.new_empty(*lead, n, width if problem.w_o is None else problem.w_o.shape[0])
    if not keep.keep:
        return SelfAttentionResults(out, *(x.new_empty(0) for _ in range(4)))
    return SelfAttentionResults(
        out,
        x.new_empty(*lead, n, 2 * problem.w_q.shape[0]),
        x.new_empty(*lead, n, width),
        x.new_empty(0) if problem.w_o is None else x.new_empty(*lead, n, width),
        x.new_empty(*lead, problem.num_heads, n, dtype=torch.float64),
    )


def _backward_fake(
    grads: SelfAttentionOutputGradient,
    kept: SelfAttentionSaved,
    problem: SelfAttentionProblem,
    choice: Choice,
    wanted: Wanted,
) -> SelfAttentionGradients:
    x, w_q, _, w_v, w_o, b_in, b_o = problem.inputs
    grad_x = x.new_empty(x.shape if wanted.want_x else 0)
    of_weights = (w_q.new_empty(2 * w_q.shape[0], w_q.shape[1]), w_v, w_o, b_in, b_o)
    return SelfAttentionGradients(
        grad_x,
        *(x.new_empty(0 if w is None or not wanted.want_weights else w.shape) for w in of_weights),
    )


def _complete(found: Any, promise: Callable[[], Any]) -> Any:
    """Every tensor that the fake promised: graphs of torch.compile know one shape for all ways."""
    return type(found)._make(
        like if x is None or x.shape != like.shape else x.contiguous()
        for x, like in zip(found, promise(), strict=True)
    )


self_attention = Operator(
    "self_attention",
    (SelfAttentionProblem, Choice, Keep),
    "(Tensor out, Tensor query_key, Tensor value, Tensor heads, Tensor lse)",
    _forward,
    _forward_fake,
    complete=_complete,
)
self_attention_backward = Operator(
    "self_attention_backward",
    (SelfAttentionOutputGradient, SelfAttentionSaved, SelfAttentionProblem, Choice, Wanted),
    "(Tensor grad_x, Tensor grad_w_qk, Tensor grad_w_v, Tensor grad_w_o, Tensor grad_b_in, "
    "Tensor grad_b_o)",
    _backward,
    _backward_fake,
    complete=_complete,
)


def _vmap(info: Any, in_dims: tuple, *fields: Any) -> tuple[Any, Any]:
    """x may have any number of leading dimensions; layers with other weights are other calls."""
    of_x, *of_weights, of_mask = in_dims[:8]
    if any(dim is not None for dim in of_weights):
        return self_attention.loop_by_vmap(info, in_dims, *fields)
    x, mask = batched(info, (of_x, of_mask), (fields[0], fields[7]))
    found = self_attention.overload(x, *fields[1:7], mask, *fields[8:])
    return found, (0, *(0 if fields[-1] else None for _ in found[1:]))


class SelfAttention(torch.autograd.Function):
    """SelfAttentionResults, of which `out` is differentiable."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        return tuple(self_attention.run(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        problem, choice, _ = unflatten(inputs, SelfAttentionProblem, Choice, Keep)
        results = SelfAttentionResults(*output)
        ctx.mark_non_differentiable(*(x for x in output[1:] if x is not None))
        save(ctx, _saved(results, problem), problem, choice)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple:
        kept, problem, choice = saved(ctx)
        others = (None,) * (len(SelfAttentionProblem._fields) - 7 + len(choice) + 1)
        if grad_out is None:
            return (None,) * 7 + others
        if torch.is_grad_enabled():
            return *_differentiable_backward(grad_out, problem, choice), *others
        needed = ctx.needs_input_grad[:7]
        found = self_attention_backward(
            SelfAttentionOutputGradient(grad_out),
            kept,
            problem,
            choice,
            Wanted(needed[0], any(needed[1:])),
        )
        grad_x, w_qk, *rest = found
        w_q = w_k = None
        if w_qk is not None:
            w_q, w_k = w_qk[: problem.w_q.shape[0]], w_qk[problem.w_q.shape[0] :]
        grads = (grad_x, w_q, w_k, *rest)
        return *(g if need else None for g, need in zip(grads, needed, strict=True)), *others

    vmap = staticmethod(_vmap)


def compose(problem: SelfAttentionProblem, choice: Choice) -> Tensor:
    """The layer from operators of torch and `boltzattn::attention`, which see vmap and tangents."""
    return layer.compose(problem, lambda attention: attend(attention, choice)[0])


def _differentiable_backward(
    grad_out: Tensor, problem: SelfAttentionProblem, choice: Choice
) -> list[Tensor | None]:
    # Aliases: a tensor that is passed twice has two gradients.
    inputs = [None if x is None else x.view_as(x) for x in problem.inputs]
    asked = [x for x in inputs if x is not None and x.requires_grad]
    out = compose(SelfAttentionProblem._make((*inputs, *problem[7:])), choice)
    found = iter(torch.autograd.grad(out, asked, grad_out, create_graph=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


self_attention.differentiate_by(SelfAttention)
torch.library.register_vmap(f"{NAMESPACE}::self_attention", _vmap, lib=library)
torch.library.register_vmap(
    f"{NAMESPACE}::self_attention_backward", self_attention_backward.loop_by_vmap, lib=library
)
