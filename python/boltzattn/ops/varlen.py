"""`boltzattn::attention_varlen`: sequences of different lengths, packed without padding or copies.

The problem holds the rows of all sequences one after the other: query `[*L, total_q, rank]`, key
`[*L, total_k, rank]`, value `[*L, total_k, dv]`. Sequence b has rows
`cu_seqlens[b] : cu_seqlens[b + 1]` and attends to itself alone. Every sequence gets the method that
suits its length.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch import backends, plan
from boltzattn.dispatch.backends import Request
from boltzattn.dispatch.torch_modes import without_autocast
from boltzattn.ops.attention import (
    RESULTS_OF_BACKWARD,
    attention_backward,
    by_argument,
    tangent,
)
from boltzattn.ops.operator import Operator, materialize, output_gradients, save, saved
from boltzattn.problem import (
    Choice,
    Gradients,
    OutputGradients,
    Problem,
    Saved,
    Starts,
    unflatten,
)


def _bounds(name: str, starts: Tensor, total: int) -> list[int]:
    bounds = starts.tolist()
    falls = next((i for i, (a, b) in enumerate(itertools.pairwise(bounds)) if a > b), None)
    if falls is not None or bounds[0] != 0 or bounds[-1] != total:
        shown = f"{bounds[0]} at first and {bounds[-1]} at last"
        if falls is not None:
            shown = f"{bounds[falls]} followed by {bounds[falls + 1]} at index {falls + 1}"
        raise ValueError(f"{name} must rise from 0 to the number of rows, {total}, got {shown}")
    return bounds


class Sequences:
    """The sequences of a call, with the plan of each."""

    def __init__(self, problem: Problem, starts: Starts, choice: Choice) -> None:
        bounds = [
            _bounds(name, x, rows.shape[-2])
            for (name, x), rows in zip(
                starts._asdict().items(), (problem.query, problem.key), strict=True
            )
        ]
        self.rows = [
            (slice(*of_query), slice(*of_key))
            for of_query, of_key in zip(*map(itertools.pairwise, bounds), strict=True)
        ]
        whole = Request.of(problem)
        sizes = [(q.stop - q.start, k.stop - k.start) for q, k in self.rows]
        plans = {}
        for n_q, n_k in set(sizes):
            request = whole._replace(n_q=n_q, n_k=n_k)
            plans[n_q, n_k] = request, plan.choose(request, choice)
        self.requests = [plans[size][0] for size in sizes]
        self.plans = [plans[size][1] for size in sizes]
        self.by_transform = [taken.method == "transform" for taken in self.plans]
        taken = {taken.backend for taken in self.plans}
        self.backend = taken.pop() if len(taken) == 1 else None
        # One kernel for all sequences, where the backend has one. Its transform knows dot scores.
        by_dot = not (any(self.by_transform) and (whole.slopes or whole.gaussian))
        self.together = (
            self.backend is not None
            and by_dot
            and not backends.why_not(whole, "varlen", self.backend)
        )
        self.tables = (
            *(torch.tensor(x, dtype=torch.int64, device="cpu") for x in bounds),
            torch.tensor(self.by_transform, dtype=torch.bool, device="cpu"),
        )


def describe(problem: Problem, starts: Starts, choice: Choice) -> str:
    """The plans of a call in words: for each, how many sequences take it, and why."""
    sequences = Sequences(problem, starts, choice)
    taken: dict[tuple[str, str], list[Request]] = {}
    for one, request in zip(sequences.plans, sequences.requests, strict=True):
        taken.setdefault((one.method, one.backend), []).append(request)
    parts = [f"varlen, {len(sequences.plans)} sequences, {len(taken)} plans"]
    for requests in taken.values():
        longest = max(requests, key=lambda r: (r.n_q * r.n_k, r.n_q, r.n_k))
        parts.append(f"{len(requests)} sequences; for the longest of them:")
        parts.append(plan.describe(longest, choice))
    return "\n".join(parts)


def _rows_first(x: Tensor, width: int) -> Tensor:
    """An empty `[*L, total, width]` that lies in memory as `[total, *L, width]`."""
    return x.new_empty(x.shape[-2], *x.shape[:-2], width).movedim(0, -2)


def _new_gradients(problem: Problem) -> Gradients:
    found = problem.new_gradients()
    rows = (_rows_first(x, x.shape[-1]) for x in problem.inputs)
    return Gradients._make((*rows, found.key_mask.zero_(), found.slopes.zero_()))


def _forward(problem: Problem, starts: Starts, choice: Choice) -> Saved:
    sequences = Sequences(problem, starts, choice)
    out = _rows_first(problem.query, problem.value.shape[-1])
    with without_autocast(out.device.type):
        if sequences.together:
            forward, _ = backends.kernels(sequences.backend, "varlen")
            lse = forward(*problem, *sequences.tables, out)
            return Saved(out, lse)
        lse = out.new_empty(out.shape[:-1], dtype=torch.float64)
        for taken, (q, k) in zip(sequences.plans, sequences.rows, strict=True):
            out[..., q, :], lse[..., q] = taken.kernels.forward(problem.rows(q, k))
    return Saved(out, lse)


def _backward(
    grads: OutputGradients, results: Saved, problem: Problem, starts: Starts, choice: Choice
) -> Gradients:
    sequences = Sequences(problem, starts, choice)
    results = results._replace(lse=results.lse.contiguous())
    found = _new_gradients(problem)
    with without_autocast(problem.query.device.type):
        if sequences.together:
            _, backward = backends.kernels(sequences.backend, "varlen")
            backward(*grads, *results, *problem, *sequences.tables, *found)
            return found
        for taken, (q, k) in zip(sequences.plans, sequences.rows, strict=True):
            parts = taken.kernels.backward(grads.rows(q), results.rows(q), problem.rows(q, k))
            for total, part, rows in zip(found[:3], parts[:3], (q, k, k), strict=True):
                total[..., rows, :] = part
            if problem.key_bias is not None:
                found.key_mask[..., k] = parts.key_mask
            if problem.slopes is not None:
                found.slopes.add_(parts.slopes)
    return found


def _forward_fake(problem: Problem, starts: Starts, choice: Choice) -> Saved:
    lse = problem.query.new_empty(problem.query.shape[:-1], dtype=torch.float64)
    return Saved(_rows_first(problem.query, problem.value.shape[-1]), lse)


def _backward_fake(
    grads: OutputGradients, results: Saved, problem: Problem, starts: Starts, choice: Choice
) -> Gradients:
    return _new_gradients(problem)


varlen = Operator(
    "attention_varlen",
    (Problem, Starts, Choice),
    "(Tensor out, Tensor lse)",
    _forward,
    _forward_fake,
)
varlen_backward = Operator(
    "attention_varlen_backward",
    (OutputGradients, Saved, Problem, Starts, Choice),
    RESULTS_OF_BACKWARD,
    _backward,
    _backward_fake,
)


class VarlenAttention(torch.autograd.Function):
    """Saved(out, lse); the second derivative is computed sequence by sequence."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return tuple(varlen.run(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        save(ctx, Saved(*output), *unflatten(inputs, Problem, Starts, Choice))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
        results, problem, starts, choice = saved(ctx)
        arguments = len(problem) + len(starts) + len(choice)
        asked = output_gradients(grad_out, grad_lse, results)
        if asked is None:
            return (None,) * arguments
        grads, results = asked
        if torch.is_grad_enabled():
            found = _differentiable_backward(grads, results, problem, starts, choice)
        else:
            found = varlen_backward(grads, results, problem, starts, choice)
        of_problem = by_argument(found, problem)
        return *of_problem, *(None,) * (arguments - len(of_problem))


def _varlen_jvp(ctx: Any, *tangents: Any) -> Saved:
    results, problem, starts, choice = saved(ctx)
    moves = materialize(tangents[:3], problem.inputs)
    _, to_bias, to_slopes = tangents[3:6]
    # Laid out as the results are: torch wants that of the tangent of a view.
    found = Saved(*(torch.zeros_like(x) for x in results))
    for q, k in Sequences(problem, starts, choice).rows:
        cut = tuple(move[..., rows, :] for move, rows in zip(moves, (q, k, k), strict=True))
        cut_bias = None if to_bias is None else to_bias[..., k]
        moved = (*cut, None, cut_bias, to_slopes)
        one = tangent(results.rows(q), problem.rows(q, k), choice, moved)
        found.out[..., q, :], found.lse[..., q] = one
    return found


def _differentiable_backward(
    grads: OutputGradients, results: Saved, problem: Problem, starts: Starts, choice: Choice
) -> Gradients:
    parts = [
        attention_backward(grads.rows(q), results.rows(q), problem.rows(q, k), choice)
        for q, k in Sequences(problem, starts, choice).rows
    ]
    if not parts:
        return problem.new_gradients("new_zeros")
    query, key, value, key_mask, slopes = zip(*parts, strict=True)
    rows = (torch.cat(of_one, -2) for of_one in (query, key, value))
    return Gradients._make((*rows, torch.cat(key_mask, -1), torch.stack(slopes).sum(0)))


varlen.differentiate_by(VarlenAttention, _varlen_jvp)
