"""The operators of the compiled libraries as functions of problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch.library import interruptible
from boltzattn.dispatch.names import NAMESPACE
from boltzattn.problem import (
    Gradients,
    Keep,
    Kernels,
    LayerGradients,
    LayerKernels,
    LayerProblem,
    OutputGradients,
    Problem,
    Saved,
    SelfAttentionProblem,
    StreamKernels,
    Wanted,
    schema,
)
from boltzattn.transform.scan_layout import StreamState
from boltzattn.transform.scan_shards import ScanStages, ShardResults, ShardTables, SharedScan
from boltzattn.transform.stages import Stages
from boltzattn.transform.tolerances import LEVELS

_FORWARD = schema(Problem)
_BACKWARD = schema(OutputGradients, Saved, Problem)
_PROJECT = "Tensor x, Tensor weight, Tensor? bias"
_LAYOUT = "Tensor positions, float t_most, float ratio, int nodes, int levels"
_STREAM = (
    "Tensor sums, Tensor z, Tensor ends, Tensor keys, Tensor values, Tensor waiting, " + _LAYOUT
)
_CHANGED_STREAM = (
    "Tensor(a!) sums, Tensor(b!) z, Tensor(c!) ends, Tensor(d!) keys, Tensor(e!) values, "
    "Tensor(f!) waiting, " + _LAYOUT
)
_SHARD = "int nodes, int levels, float ratio, Tensor t_most"
_EARLIER = "Tensor ends, Tensor keys, Tensor centres, Tensor table, Tensor slope_table"
_VARLEN = "Tensor query_starts, Tensor key_starts, Tensor by_transform"
_WRITTEN = (
    "Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value, Tensor(d!) grad_key_mask, "
    "Tensor(e!) grad_slopes"
)

# What this file calls, with the arguments it passes: a library without them is of no use.
OPERATORS = {
    "cpu": {
        "cpu_direct_forward": _FORWARD,
        "cpu_direct_backward": _BACKWARD,
        "cpu_transform_forward": _FORWARD,
        "cpu_transform_backward": _BACKWARD,
        "cpu_transform_report": _FORWARD,
        "cpu_scan_forward": _FORWARD,
        "cpu_scan_backward": _BACKWARD,
        "cpu_varlen_forward": f"{_FORWARD}, {_VARLEN}",
        "cpu_varlen_backward": f"{_BACKWARD}, {_VARLEN}, {_WRITTEN}",
        "cpu_project": _PROJECT,
        "cpu_layer_forward": schema(LayerProblem),
        "cpu_layer_backward": f"Tensor grad_out, {schema(LayerProblem)}",
        "cpu_small_layer_forward": schema(SelfAttentionProblem, Keep),
        "cpu_small_layer_backward": "Tensor grad_out, Tensor query_key, Tensor value, "
        f"Tensor heads, Tensor lse, {schema(SelfAttentionProblem, Wanted)}",
        "cpu_stream_append": f"{_CHANGED_STREAM}, Tensor key, Tensor value, float most",
        "cpu_stream_query": f"{_STREAM}, Tensor query, int head_dim, float scale",
        "cpu_stream_step": f"{_CHANGED_STREAM}, Tensor query, Tensor key, Tensor value, "
        "float scale, float most",
        "cpu_stage_extents": _FORWARD,
        "cpu_stage_sizes": f"{_FORWARD}, Tensor ranges",
        "cpu_stage_moments": f"{_FORWARD}, Tensor extents, Tensor ranges",
        "cpu_stage_evaluate": f"{_FORWARD}, Tensor ranges, Tensor moments",
        "cpu_stage_query_moments": f"{schema(OutputGradients, Problem)}, Tensor ranges",
        "cpu_stage_adjoint": f"{_FORWARD}, Tensor ranges, Tensor moments",
        "cpu_shard_tables": f"{_FORWARD}, {_SHARD}, bool with_slopes",
        "cpu_shard_forward": f"{_FORWARD}, {_SHARD}, {_EARLIER}",
        "cpu_shard_rows": f"{schema(OutputGradients, Saved)}, Tensor z, {_FORWARD}, {_SHARD}, "
        f"{_EARLIER}",
        "cpu_shard_backward": f"{_BACKWARD}, {_SHARD}, {_EARLIER}, Tensor? later",
    },
    "cuda": {
        "cuda_direct_forward": _FORWARD,
        "cuda_direct_backward": _BACKWARD,
        "cuda_transform_forward": _FORWARD,
        "cuda_transform_backward": _BACKWARD,
        "cuda_project": _PROJECT,
    },
}


class _Operators:
    """torch.ops.boltzattn.<name>, one by one and interruptible."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = interruptible(getattr(getattr(torch.ops, NAMESPACE), name).default)
        setattr(self, name, operator)  # so that this is asked once
        return operator


ops = _Operators()


def attention(backend: str, operation: str) -> Kernels:
    """`<backend>_<operation>_forward` and `_backward`."""
    run_forward = getattr(ops, f"{backend}_{operation}_forward")
    run_backward = getattr(ops, f"{backend}_{operation}_backward")

    def forward(problem: Problem) -> Saved:
        return Saved._make(run_forward(*problem))

    def backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
        return Gradients._make(run_backward(*grads, *saved, *problem))

    return Kernels(forward, backward)


def cuda_direct() -> Kernels:
    """What `key_mask` hides may hold NaN, which these kernels would multiply by weights of 0."""
    forward, backward = attention("cuda", "direct")

    def clean_backward(grads: OutputGradients, saved: Saved, problem: Problem) -> Gradients:
        query, key, value, *biases = backward(grads, saved, problem.without_hidden_keys())
        found = problem._replace(query=query, key=key, value=value).without_hidden_keys()
        return Gradients(*found.inputs, *biases)

    return Kernels(lambda problem: forward(problem.without_hidden_keys()), clean_backward)


def cpu_varlen() -> tuple[Callable, Callable]:
    return ops.cpu_varlen_forward, ops.cpu_varlen_backward


def cpu_layer() -> LayerKernels:
    def forward(problem: LayerProblem) -> Tensor | None:
        out, served = ops.cpu_layer_forward(*problem)
        return out if served else None

    def backward(grad_out: Tensor, problem: LayerProblem) -> LayerGradients | None:
        *grads, served = ops.cpu_layer_backward(grad_out, *problem)
        return LayerGradients._make(grads) if served else None

    return LayerKernels(forward, backward)


def cpu_small_layer() -> tuple[Callable, Callable]:
    return ops.cpu_small_layer_forward, ops.cpu_small_layer_backward


def cpu_stages() -> Stages:
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


def cpu_scan_stages() -> ScanStages:
    def tables(problem: Problem, shared: SharedScan, with_slopes: bool) -> ShardTables:
        return ShardTables._make(ops.cpu_shard_tables(*problem, *shared, with_slopes))

    def forward(problem: Problem, shared: SharedScan, earlier: ShardTables) -> ShardResults:
        return ShardResults._make(ops.cpu_shard_forward(*problem, *shared, *earlier))

    def query_table(
        grads: OutputGradients,
        results: ShardResults,
        problem: Problem,
        shared: SharedScan,
        earlier: ShardTables,
    ) -> Tensor:
        return ops.cpu_shard_rows(*grads, *results, *problem, *shared, *earlier)

    def backward(
        grads: OutputGradients,
        results: ShardResults,
        problem: Problem,
        shared: SharedScan,
        earlier: ShardTables,
        later: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, _ = results
        return ops.cpu_shard_backward(*grads, out, lse, *problem, *shared, *earlier, later)

    return ScanStages(
        lambda problem: problem.query.dtype,
        cpu_stages().extents,
        tables,
        forward,
        query_table,
        backward,
    )


def cpu_stream() -> StreamKernels:
    def append(stream: StreamState, key: Tensor, value: Tensor, most: float) -> float:
        return ops.cpu_stream_append(*stream.arguments, key, value, most)

    def query(stream: StreamState, x: Tensor, head_dim: int, scale: float) -> Any:
        return ops.cpu_stream_query(*stream.arguments, x, head_dim, scale)

    def step(
        stream: StreamState, x: Tensor, key: Tensor, value: Tensor, scale: float, most: float
    ) -> Any:
        return ops.cpu_stream_step(*stream.arguments, x, key, value, scale, most)

    return StreamKernels(append, query, step)
