"""The compiled operators check their tensors themselves: what Python hands over wrongly must raise.

Nobody calls them but boltzattn, which validates first; still, a mistake there must not become a
read outside a tensor.
"""

from __future__ import annotations

import math
from typing import Any

import boltzattn._C as module
import fuzz_operators
import pytest
import torch
from boltzattn.problem import LayerProblem, Problem, SelfAttentionProblem
from boltzattn.transform import tolerances
from torch import Tensor

ops = torch.ops.boltzattn
N, DV = 6, 3


def problem(**changes: Any) -> Problem:
    tensors = (torch.randn(2, N, width) for width in (1, 1, DV))
    return Problem(*tensors, *[None] * 4, 1.0, 0.0, False, False)._replace(**changes)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


WRONG = {
    "query must have at least 2 dimensions": {"query": ones(N)},
    "floating dtype, on cpu, got .* of Long": {"query": ones(2, N, 1, dtype=torch.int64)},
    "floating dtype, on cpu": {"query": torch.empty(2, N, 1, device="meta")},
    "key must have the dtype of query, got Double": {"key": ones(2, N, 1, dtype=torch.float64)},
    r"key must have shape \[2, 6, 1\], got \[3, 6, 1\]": {"key": ones(3, N, 1)},
    r"key must have shape \[2, 6, 1\], got \[2, 6, 2\]": {"key": ones(2, N, 2)},
    "key has only 1 dimensions": {"key": ones(N)},
    r"value must have shape \[2, 6, 3\], got \[2, 5, 3\]": {"value": ones(2, N - 1, DV)},
    "value must be on the device of query": {"value": torch.empty(2, N, DV, device="meta")},
    "rank and dv must be at least 1": {"value": ones(2, N, 0)},
    "attn_mask must have bool or a floating dtype": {"attn_mask": ones(2, N, N, dtype=torch.int64)},
    r"attn_mask must have shape \[2, 6, 6\]": {"attn_mask": ones(N, N)},
    r"key_mask must have shape \[2, 6\]": {"key_mask": ones(2, 1, N)},
    "seed must have int64, got Float": {"seed": ones(2), "dropout_p": 0.5},
    r"seed must have shape \[2\]": {"seed": ones(1, dtype=torch.int64), "dropout_p": 0.5},
    "with a seed if it is not 0": {"dropout_p": 0.5},
    "dropout_p must be from 0 to 1.*got nan": {"dropout_p": math.nan},
}


@pytest.mark.parametrize(("message", "changes"), WRONG.items(), ids=WRONG)
def test_inputs(message: str, changes: dict[str, Any]) -> None:
    wrong = problem(**changes)
    with pytest.raises(RuntimeError, match=message):
        ops.cpu_direct_forward(*wrong)
    out, lse = ops.cpu_direct_forward(*problem())
    with pytest.raises(RuntimeError, match=message):
        ops.cpu_direct_backward(out, None, out, lse, *wrong)


@pytest.mark.parametrize("name", ["direct", "transform"])
def test_saved_results_and_gradients(name: str) -> None:
    backward = getattr(ops, f"cpu_{name}_backward")
    out, lse = getattr(ops, f"cpu_{name}_forward")(*problem())
    for message, arguments in {
        "grad_out must have the dtype of query": (out.double(), None, out, lse),
        "grad_out must have shape": (out[:, 1:], None, out, lse),
        "grad_lse must have float64": (out, lse.float(), out, lse),
        "out must have the dtype of query": (out, None, out.half(), lse),
        "out must have shape": (out, None, out[:1], lse),
        "lse must have float64": (out, None, out, lse.float()),
        "lse must have shape": (out, None, out, lse[:, 1:]),
        "lse must be contiguous": (out, None, out, lse.mT.contiguous().mT),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            backward(*arguments, *problem())


@pytest.mark.parametrize(
    "changes",
    [
        {"query": ones(2, N, 5), "key": ones(2, N, 5)},
        {"attn_mask": ones(2, N, N)},
        {"dropout_p": 0.5, "seed": ones(2, dtype=torch.int64)},
        {"is_causal": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_the_transform_does_not_take(changes: dict[str, Any]) -> None:
    for operator in (ops.cpu_transform_forward, ops.cpu_transform_report, ops.cpu_stage_extents):
        with pytest.raises(RuntimeError, match=r"the transform takes ranks up to [14], no attn"):
            operator(*problem(**changes))
    wide = problem(query=ones(2, N, 2), key=ones(2, N, 2))
    with pytest.raises(RuntimeError, match="the transform takes ranks up to 1"):
        ops.cpu_stage_extents(*wide)
    with pytest.raises(RuntimeError, match="is_causal=True"):
        ops.cpu_scan_forward(*problem())
    slopes = {"is_causal": True, "slopes": ones(2, dtype=torch.float64)}
    wide = {"query": ones(2, N, 2), "key": ones(2, N, 2)}
    with pytest.raises(RuntimeError, match="the transform takes ranks up to 1"):
        ops.cpu_scan_forward(*problem(**wide, **slopes))


def test_sequences() -> None:
    starts, served = torch.tensor([0, 2, N]), torch.tensor([True, False])
    out = ones(2, N, DV)
    ops.cpu_varlen_forward(*problem(), starts, starts, served, out)
    for message, arguments in {
        "query_starts must have int64": (starts.float(), starts, served, out),
        "key_starts must have shape": (starts, starts[:2], served, out),
        "key_starts must be contiguous": (starts, starts.repeat_interleave(2)[::2], served, out),
        "by_transform must have bool": (starts, starts, served.int(), out),
        "must cover all rows": (starts, torch.tensor([0, 2, N + 1]), served, out),
        "must not decrease": (
            torch.tensor([0, N + 9, 0, N]),
            torch.tensor([0, 1, 2, N]),
            torch.tensor([False] * 3),
            out,
        ),
        "out must have shape": (starts, starts, served, out[:, 1:]),
        "out must have the dtype of query": (starts, starts, served, out.double()),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            ops.cpu_varlen_forward(*problem(), *arguments)
    with pytest.raises(RuntimeError, match="varlen takes no attn_mask"):
        ops.cpu_varlen_forward(*problem(attn_mask=ones(2, N, N)), starts, starts, served, out)
    for changes in ({"slopes": ones(2, dtype=torch.float64)}, {"is_gaussian": True}):
        with pytest.raises(RuntimeError, match="the transform of a sequence takes no slopes"):
            ops.cpu_varlen_forward(*problem(**changes), starts, starts, served, out)
        ops.cpu_varlen_forward(*problem(**changes), starts, starts, ~served & served, out)
    wide = problem(query=ones(2, N, 5), key=ones(2, N, 5))
    with pytest.raises(RuntimeError, match="the transform takes ranks up to 4"):
        ops.cpu_varlen_forward(*wide, starts, starts, served, out)


def test_gradients_of_sequences() -> None:
    starts, served = torch.tensor([0, 2, N]), torch.tensor([False, False])
    biased = problem(key_mask=ones(2, N), slopes=ones(2, dtype=torch.float64))
    out, lse = ops.cpu_direct_forward(*biased)
    written = [ones(2, N, 1), ones(2, N, 1), ones(2, N, DV), ones(2, N), ones(2).double()]
    for place, wrong, message in (
        (3, ones(2, N).double(), "grad_key_mask must have dtype Float, got Double"),
        (3, ones(2, N).bool(), "grad_key_mask must have dtype Float, got Bool"),
        (3, ones(0), r"grad_key_mask must have shape \[2, 6\]"),
        (4, ones(2), "grad_slopes must have float64"),
        (4, ones(0).double(), r"grad_slopes must have shape \[2\]"),
    ):
        arguments = [*written[:place], wrong, *written[place + 1 :]]
        with pytest.raises(RuntimeError, match=message):
            ops.cpu_varlen_backward(
                out, None, out, lse, *biased, starts, starts, served, *arguments
            )


def _shared() -> tuple[Tensor, Tensor]:
    extents = ops.cpu_stage_extents(*problem())
    return extents, torch.tensor([[-1.0, 1.0, -2.0, 2.0, N, N, N, 0.0]] * 2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("field", "number"),
    [(0, 2.0), (1, math.nan), (1, math.inf), (1, 1e9), (2, 3.0), (3, math.inf)]
    + [(field, number) for field in (4, 5, 6) for number in (-1.0, math.nan, 1e30)]
    + [(7, 3.0), (7, math.nan)],
)
def test_ranges(field: int, number: float) -> None:
    """A range that no machine would agree on could imply a layout of any size."""
    _, ranges = _shared()
    assert ops.cpu_stage_sizes(*problem(), ranges) > (0, 0)
    ranges[1, field] = number
    with pytest.raises(RuntimeError, match="boltzattn: ranges must"):
        ops.cpu_stage_sizes(*problem(), ranges)


def test_stages() -> None:
    extents, ranges = _shared()
    moments = ops.cpu_stage_moments(*problem(), extents, ranges)
    for field, number in ((2, N), (3, -1), (3, math.nan), (4, math.nan), (4, N + 1)):
        wrong = extents.clone()
        wrong[1, 1, field] = number
        with pytest.raises(RuntimeError, match="extents must count tokens and point at them"):
            ops.cpu_stage_moments(*problem(), wrong, ranges)
    with pytest.raises(RuntimeError, match="moments must have shape"):
        ops.cpu_stage_evaluate(*problem(), ranges, moments[1:])
    with pytest.raises(RuntimeError, match="moments must have float64"):
        ops.cpu_stage_evaluate(*problem(), ranges, moments.float())
    with pytest.raises(RuntimeError, match="ranges must have shape"):
        ops.cpu_stage_evaluate(*problem(), ranges[:1], moments)
    # Moments that are no numbers are not served, and have no gradients.
    out, _, served = ops.cpu_stage_evaluate(*problem(), ranges, moments * math.nan)
    assert not served.any()
    grad, query_moments = ops.cpu_stage_query_moments(
        out, None, *problem(), ranges, moments * math.nan
    )
    grads = ops.cpu_stage_adjoint(*problem(), ranges, moments * math.nan, query_moments)
    assert not any(x.any() for x in (grad, query_moments, *grads))


def _layer(**changes: Any) -> LayerProblem:
    x, weight = torch.randn(2, N, 5), torch.randn(3, 4, 5)
    numbers, extents = ops.cpu_project(x, torch.randn(6, 5), None)
    query, key = numbers.unsqueeze(-1).split(3, 1)
    return LayerProblem(query, key, x, weight, None, None, None, extents, 1.0)._replace(**changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("query of a layer must have 4 dimensions", {"query": ones(2, N, 1)}),
        ("value must have shape", {"value": ones(2, 3, N, 5)}),
        ("weight must have shape", {"weight": ones(2, 4, 5)}),
        ("weight must not be empty", {"weight": ones(3, 0, 5)}),
        ("weight must have the dtype of query", {"weight": ones(3, 4, 5).half()}),
        ("weight_bias must have shape", {"weight_bias": ones(4)}),
        ("out_bias must have shape", {"out_bias": ones(3, 4)}),
        ("key_mask must have shape", {"key_mask": ones(2, 3, N, dtype=torch.bool)}),
        ("extents must have shape", {"extents": ones(2, 3, 6, dtype=torch.float64)}),
        ("extents must have float64", {"extents": ones(2, 6, 6)}),
        ("extents must count", {"extents": N * ones(2, 6, 6, dtype=torch.float64)}),
        ("extents must count", {"extents": math.nan * ones(2, 6, 6, dtype=torch.float64)}),
    ],
)
def test_layers(message: str, changes: dict[str, Any]) -> None:
    out, _ = ops.cpu_layer_forward(*_layer())
    with pytest.raises(RuntimeError, match=message):
        ops.cpu_layer_forward(*_layer(**changes))
    with pytest.raises(RuntimeError, match=message):
        ops.cpu_layer_backward(out, *_layer(**changes))


def _small(**changes: Any) -> SelfAttentionProblem:
    weights = ones(6, 5), ones(6, 5), ones(9, 5), ones(4, 9), ones(21), ones(4)
    call = SelfAttentionProblem(torch.randn(2, N, 5), *weights, None, 3, 1.0, False)
    return call._replace(**changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("x must have at least 2 dimensions", {"x": ones(5)}),
        ("w_q must have shape", {"x": ones(2, N, 4)}),
        ("w_k must have shape", {"w_k": ones(3, 5)}),
        ("w_v must have the dtype of x", {"w_v": ones(9, 5).double()}),
        ("w_o must have shape", {"w_o": ones(4, 8)}),
        ("w_o must not be empty", {"w_o": ones(0, 9)}),
        ("w_o must be on the device of x", {"w_o": torch.empty(4, 9, device="meta")}),
        ("b_in must have shape", {"b_in": ones(20)}),
        ("b_o must have shape", {"b_o": ones(4, 1)}),
        ("key_mask must have shape", {"key_mask": ones(2, 3, N)}),
        ("key_mask must have bool or a floating", {"key_mask": ones(2, N, dtype=torch.int64)}),
        ("num_heads must divide", {"num_heads": 2}),
        ("num_heads must divide", {"num_heads": 0}),
        ("num_heads must divide", {"w_v": ones(0, 5)}),
    ],
)
def test_small_layers(message: str, changes: dict[str, Any]) -> None:
    out, *kept = ops.cpu_small_layer_forward(*_small(), True)
    with pytest.raises(RuntimeError, match=message):
        ops.cpu_small_layer_forward(*_small(**changes), False)
    with pytest.raises(RuntimeError, match=message):
        ops.cpu_small_layer_backward(out, *kept, *_small(**changes), True, True)


def test_what_small_layers_kept() -> None:
    out, query_key, value, heads, lse = ops.cpu_small_layer_forward(*_small(), True)
    for message, arguments in {
        "grad_out must have shape": (out[:, 1:], query_key, value, heads, lse),
        "query_key must have shape": (out, query_key[..., 1:], value, heads, lse),
        "value must have the dtype of x": (out, query_key, value.double(), heads, lse),
        "value must be contiguous": (out, query_key, value.mT.contiguous().mT, heads, lse),
        "heads must have shape": (out, query_key, value, heads[:1], lse),
        "lse must have float64": (out, query_key, value, heads, lse.float()),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            ops.cpu_small_layer_backward(*arguments, *_small(), True, True)


def test_projections() -> None:
    x, weight = ones(2, N, 5), ones(4, 5)
    for message, arguments in {
        "x must have 3 dimensions": (x[0], weight, None),
        "weight must have shape": (x, weight[:, 1:], None),
        "weight must have the dtype of x": (x, weight.double(), None),
        "bias must have shape": (x, weight, ones(5)),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            ops.cpu_project(*arguments)
    numbers, extents = ops.cpu_project(x[:0], weight, None)
    assert numbers.shape == (0, 4, N)
    assert extents.shape == (0, 4, 6)


def test_tolerances_are_those_of_python() -> None:
    table = module.tolerances()
    for name in ("largest_product", "largest_sum", "levels", "least_nodes", "most_nodes"):
        assert table[name] == getattr(tolerances, name.upper()), name
    assert table["node_step"] == tolerances.NODE_STEP
    for dtype, tolerance in tolerances.TOLERANCE.items():
        name = str(dtype).removeprefix("torch.")
        assert table["tolerance"][name] == tolerance
        assert table["precision"][name][0] == tolerances.PRECISION[dtype]
        assert len(table["precision"][name]) == tolerances.LEVELS


def test_wrong_calls_of_all_operators_end_without_a_signal() -> None:
    """A short run without AddressSanitizer; `make fuzz-operators` is the long one with it."""
    counts, wrong = fuzz_operators.fuzz(first=1_000_000, calls=100_000, seconds=25)
    assert not wrong, "\n".join(wrong)
    assert counts["raised"] > 100


@pytest.mark.parametrize("waiting", [-1, 17, 2**62])
def test_tokens_that_wait(waiting: int) -> None:
    """How many wait is data, and an index."""
    double = torch.float64
    state = ones(2, 16, 8, dtype=double), ones(2, 16, dtype=double), ones(2, 2, dtype=double)
    tokens = ones(2, 16, dtype=double), ones(2, 16, 8, dtype=double), torch.tensor([waiting])
    layout = torch.linspace(-9, 9, 16, dtype=double), 9.0, 2.0, 16, 0
    query, value = ones(2, 1, 1), ones(2, 1, DV)
    calls = {
        ops.cpu_stream_append: (query, value, 1e3),
        ops.cpu_stream_query: (query, DV, 1.0),
        ops.cpu_stream_step: (query, query, value, 1.0, 1e3),
    }
    for call, arguments in calls.items():
        with pytest.raises(RuntimeError, match=f"waiting must be from 0 to 16, got {waiting}"):
            call(*state, *tokens, *layout, *arguments)
