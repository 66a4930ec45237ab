"""The operators of the compiled libraries as functions of problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from boltzattn.compose import causal
from boltzattn.problem import (
    Gradients,
    Kernels,
    LayerGradients,
    LayerKernels,
    LayerProblem,
    OutputGradients,
    Problem,
    Saved,
)
from boltzattn.transform.stages import Stages
from boltzattn.transform.tolerances import LEVELS


def attention(backend: str, operation: str) -> Kernels:
    """`<backend>_<operation>_forward` and `_backward`."""
    run_forward = getattr(torch.ops.boltzattn, f"{backend}_{operation}_forward").default
    run_backward = getattr(torch.ops.boltzattn, f"{backend}_{operation}_backward").default

    def forward(problem: Problem) -> Saved:
        return Saved._make(run_forward(*problem))

    def backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
        return Gradients._make(run_backward(*grads, *saved, *problem))

    return Kernels(forward, backward)


def cpu_causal() -> Kernels:
    """Forward is one operator; backward is composed."""
    run = torch.ops.boltzattn.cpu_causal_forward.default

    def forward(problem: Problem) -> Saved:
        return causal.in_accumulate_dtype(lambda wide: Saved._make(run(*wide)), problem)

    composed = causal.kernels(attention("cpu", "direct"), attention("cpu", "transform"))
    return Kernels(forward, composed.backward)


def cpu_varlen() -> tuple[Callable, Callable]:
    ops = torch.ops.boltzattn
    return ops.cpu_varlen_forward, ops.cpu_varlen_backward


def cpu_layer() -> LayerKernels:
    ops = torch.ops.boltzattn

    def forward(problem: LayerProblem) -> Tensor | None:
        out, served = ops.cpu_layer_forward(*problem)
        return out if served else None

    def backward(grad_out: Tensor, problem: LayerProblem) -> LayerGradients | None:
        *grads, served = ops.cpu_layer_backward(grad_out, *problem)
        return LayerGradients._make(grads) if served else None

    return LayerKernels(forward, backward)


def cpu_small_layer() -> tuple[Callable, Callable]:
    ops = torch.ops.boltzattn
    return ops.cpu_small_layer_forward.default, ops.cpu_small_layer_backward.default


def cpu_stages() -> Stages:
    ops = torch.ops.boltzattn

    def of_problem(run: Callable) -> Callable:
        return lambda problem, *rest: run(*problem, *rest)

    def query_moments(grads: OutputGradients, problem: Problem, *rest: Tensor) -> Any:
        return ops.cpu_stage_query_moments(*grads, *problem, *rest)

    return Stages(
        LEVELS,
        of_problem(ops.cpu_stage_extents),
        of_problem(ops.cpu_stage_sizes),
        of_problem(ops.cpu_stage_moments),
        of_problem(ops.cpu_stage_evaluate),
        query_moments,
        of_problem(ops.cpu_stage_adjoint),
    )
