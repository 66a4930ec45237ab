"""The CUDA kernels, executed: nvcc's PTX for sm_80 runs in ptxrun, launched by the real launchers.

Checked besides the numbers: bounds of every tensor and workspace (gaps of strided views too),
races and uninitialised reads in shared memory, and blocks that touch the same global memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from biased import Biased, assert_results
from boltzattn.cuda_report import readable
from boltzattn.reference.direct import dropout_keep
from covering import pairwise
from cuda_launch import Machine, backward, executed, forward, modules, project
from errors import assert_accurate
from hidden import SPOILABLE, Hiding, assert_hidden_do_not_count, hiding
from oracle import Result, eagers, magnitudes, oracle
from torch import Tensor

pytestmark = pytest.mark.nvcc

HEADS = 2
SEED = torch.tensor([12345678901, -987654321])
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Problem(NamedTuple):
    """A call in canonical form, and the same call for the oracle."""

    tensors: tuple[Tensor, Tensor, Tensor]
    grads: tuple[Tensor, Tensor]
    options: tuple[Any, ...]  # attn_mask .. is_causal
    call: dict[str, Any]
    score: Mapping[str, Any] = MappingProxyType({})  # slopes and is_gaussian, where asked for
    biased: Biased | None = None  # for the oracle, if Gaussian or with a bias or slopes


def strided(x: Tensor, how: str) -> Tensor:
    """The same numbers elsewhere: with gaps, with rows and columns exchanged, or as they are."""
    if how == "gaps":
        rows, columns = x.shape[-2:]
        return x.new_empty(*x.shape[:-2], rows * 2, columns + 3)[..., ::2, 1:-2].copy_(x)
    if how == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x


def problem(
    dtype: torch.dtype,
    sizes: tuple[int, int],
    dv: int,
    rank: int = 1,
    mask: str = "none",
    dropout: float = 0.0,
    strides: str = "dense",
    scale: float = 0.7,
    heads: int = HEADS,
    score: str = "dot",
    slopes: bool = False,
    offset: float = 0.0,
) -> Problem:
    n_q, n_k = sizes
    query, key, value, grad_out = (
        strided(torch.randn(heads, n, width).to(dtype), strides)
        for n, width in ((n_q, rank), (n_k, rank), (n_k, dv), (n_q, dv))
    )
    if offset:
        query, key = (strided(x + offset, strides) for x in (query, key))
    grad_lse = torch.randn(heads, n_q, dtype=torch.float64)
    call: dict[str, Any] = {"scale": scale}
    attn_mask = key_mask = seed = None
    if mask == "causal":
        call["is_causal"] = True
    elif mask == "bool":
        attn_mask = call["attn_mask"] = torch.rand(heads, n_q, n_k) > 0.3
        attn_mask[:, -1] = False  # a query that may attend to nothing
    elif mask == "bias":
        attn_mask = torch.randn(heads, n_k, n_q).to(dtype).transpose(-1, -2)
        call["attn_mask"] = attn_mask
    elif mask in ("padding", "infinite", "key bias"):
        padding = torch.rand(n_k) > 0.6
        if mask == "infinite":
            padding = torch.zeros(n_k).masked_fill(padding, -math.inf).to(dtype)
        elif mask == "key bias":
            padding = torch.randn(n_k).to(dtype)
        call["key_padding_mask"] = padding
        key_mask = padding.expand(heads, n_k)
    if dropout:
        seed = SEED
        call["dropout_p"] = dropout
        call["keep"] = dropout_keep(SEED, slice(0, n_q), n_k, dropout)
    options = (attn_mask, key_mask, seed, scale, dropout, mask == "causal")
    asked: dict[str, Any] = {}
    biased = None
    if score == "gaussian" or slopes or mask == "key bias":
        of_distance = torch.tensor([0.3, 0.01])[:heads].double() if slopes else None
        asked = {"slopes": of_distance, "is_gaussian": score == "gaussian"}
        of_pairs = ~key_mask[:, None] if mask == "padding" else attn_mask
        biased = Biased(
            *(query, key, value, key_mask if mask in ("infinite", "key bias") else None),
            *(of_distance, scale, score, mask == "causal", of_pairs),
            *(call.get("keep"), dropout),
        )
    return Problem((query, key, value), (grad_out, grad_lse), options, call, asked, biased)


def assert_runs(method: str, p: Problem, **options: Any) -> tuple[Machine, Machine]:
    """Forward and backward obey the error rule and every check of the machine."""
    ahead, back = Machine(**options), Machine(**options)
    out, lse = forward(method, ahead, *p.tensors, *p.options, **p.score)
    grads = backward(method, back, *p.grads, out, lse, *p.tensors, *p.options, **p.score)
    lse = lse if out.dtype == torch.float64 else lse.float()
    names = ("out", "lse", "grad_query", "grad_key", "grad_value")
    if p.biased is not None:
        actual = dict(zip(names, (out, lse, *grads[:3]), strict=True))
        if p.biased.key_bias is not None:
            actual["grad_key_bias"] = grads.key_mask
        if p.biased.alibi_slopes is not None:
            # As users get it: in fp64 it would be held to the roundings of fp64.
            actual["grad_alibi_slopes"] = grads.slopes.to(lse.dtype)
        assert_results(actual, p.biased, *p.grads, method)
        return ahead, back
    arguments = (*p.tensors, *p.grads)
    assert_accurate(
        dict(zip(names, (out, lse, *grads[:3]), strict=True)),
        oracle(*arguments, **p.call)._asdict(),
        eagers(*arguments, **p.call),
        magnitudes=magnitudes(*arguments, **p.call),
        method=method,
    )
    return ahead, back


def few_and_rest(cases: list[dict[str, Any]], few: int) -> list[Any]:
    """The first cases for every run, all of them for the full one."""
    return [
        pytest.param(
            case,
            id="-".join(str(x).removeprefix("torch.") for x in case.values()),
            marks=[pytest.mark.full] if number >= few else [],
        )
        for number, case in enumerate(cases)
    ]


DIRECT = pairwise(
    {
        "dtype": DTYPES,
        "sizes": ((33, 70), (1, 1), (130, 40), (5, 131)),
        "dv": (64, 1, 5, 16, 70),
        "rank": (1, 3, 8, 16, 20),
        "mask": ("none", "causal", "bool", "bias", "padding", "key bias"),
        "dropout": (0.0, 0.3),
        "strides": ("dense", "gaps", "transposed"),
    }
)
TRANSFORM = pairwise(
    {
        "dtype": DTYPES,
        "sizes": ((70, 150), (1, 40), (530, 30), (30, 530)),
        "dv": (64, 1, 5, 70),
        "mask": ("none", "padding", "infinite", "key bias"),
        "strides": ("dense", "gaps", "transposed"),
    }
)


@pytest.mark.parametrize("case", few_and_rest(DIRECT, 8))
def test_direct(case: dict[str, Any]) -> None:
    assert_runs("direct", problem(**case))


BIASED = pairwise(
    {
        "dtype": DTYPES,
        "sizes": ((33, 65), (1, 63), (130, 40), (65, 1)),
        "dv": (1, 17, 65),
        "rank": (1, 3, 16, 20),
        "mask": ("key bias", "causal", "bool", "bias", "padding", "infinite", "none"),
        "dropout": (0.0, 0.3),
        "strides": ("dense", "gaps"),
        "score": ("gaussian", "dot"),
        "slopes": (True, False),
    }
)


@pytest.mark.parametrize("case", few_and_rest(BIASED, 1))
def test_biased_direct(case: dict[str, Any]) -> None:
    """Gaussian scores, slopes and key biases, with their gradients."""
    offset = 10_240 if case["score"] == "gaussian" and case["dtype"].itemsize >= 4 else 0
    assert_runs("direct", problem(**case, offset=offset))


HIDING = [
    {"mask": "float", "names": SPOILABLE, "poison": math.nan, "sizes": (24, 36)}
    | {"dtype": torch.bfloat16},
    {"mask": "causal", "names": ("query", "grad_out"), "poison": math.nan},
    *pairwise(
        {
            "mask": ("causal", "bool", "float"),
            "names": (("query",), ("key",), ("value",), ("grad_out",), SPOILABLE),
            "poison": (math.nan, math.inf, -math.inf),
            "sizes": ((40, 70), (70, 40)),
            "rank": (1, 20),
            "dv": (5, 70),
            "dtype": DTYPES,
        }
    ),
]


@pytest.mark.parametrize("case", few_and_rest(HIDING, 2))
def test_hidden_pairs_do_not_count(case: dict[str, Any]) -> None:
    """Where tokens hold NaN or infinity, only what sees them is spoilt."""
    call = hiding(**case)

    def attend(call: Hiding) -> Result:
        *tensors, grad_out, grad_lse = call.spoilt()
        mask = None if call.attn_mask is None else call.attn_mask.expand(2, -1, -1)
        scale = tensors[0].shape[-1] ** -0.5
        problem = (*tensors, mask, None, None, scale, 0.0, call.is_causal)
        out, lse = forward("direct", Machine(), *problem)
        grads = backward("direct", Machine(), grad_out, grad_lse, out, lse, *problem)
        return Result(out, lse if out.dtype == torch.float64 else lse.float(), *grads[:3])

    assert_hidden_do_not_count(call, attend)


@pytest.mark.parametrize("case", few_and_rest(TRANSFORM, 4))
def test_transform(case: dict[str, Any]) -> None:
    ahead, back = assert_runs("transform", problem(**case, scale=0.25))
    served = case["mask"] != "key bias"  # which is a case for `direct`
    assert (ahead.report[:, 0] == served).all()
    assert (back.report[:, 0] == served).all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(x, marks=pytest.mark.full) for x in DTYPES[1:])]
)
def test_long_rows_are_summed_in_spans(dtype: torch.dtype) -> None:
    """More keys than a running fp32 sum takes: totals go through global memory."""
    p = problem(dtype, (3, 4200), 3)
    machine = Machine()
    out, _ = forward("direct", machine, *p.tensors, *p.options)
    truth = oracle(*p.tensors, *p.grads, **p.call).out
    assert_accurate({"out": out}, {"out": truth}, (), magnitudes={"out": 1.0})


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_columns_are_summed_in_spans(dtype: torch.dtype) -> None:
    """The same for the gradient of the values, a sum over queries."""
    assert_runs("direct", problem(dtype, (2100, 3), 3))


@pytest.mark.parametrize("method", ["direct", pytest.param("transform", marks=pytest.mark.full)])
def test_16_bit_products_run_on_tensor_cores(method: str) -> None:
    p = problem(torch.bfloat16, (40, 70), 16, scale=0.25)
    machines = assert_runs(method, p)
    with_mma = {result.kernel for m in machines for result in m.results if result.mma_flops}
    expected = {
        "direct": {"direct_forward", "direct_value_gradient", "direct_logit_gradient"},
        "transform": {"transform_moments", "transform_evaluate", "transform_evaluate_keys"},
    }[method]
    assert {readable(name).partition("<")[0] for name in with_mma} == expected


@pytest.mark.parametrize("keys", ["equal", "one of a kind", "nan value", "all masked", "zero"])
def test_transform_of_odd_heads(keys: str) -> None:
    """Served by the transform or handed to `direct`, but right either way."""
    p = problem(torch.float32, (20, 60), 4, scale=0.5)
    query, key, value = p.tensors
    options, call = list(p.options), dict(p.call)
    if keys == "equal":
        key[:] = 1.5
    elif keys == "one of a kind":
        key[:] = 0.25
        key[:, 17] = 3.0
    elif keys == "nan value":
        value[0, 3, 1] = math.nan
    elif keys == "all masked":
        options[1] = torch.ones(60, dtype=torch.bool).expand(HEADS, 60)
        call["key_padding_mask"] = options[1][0]
    else:
        query[:] = 0.0
    machine = assert_runs("transform", Problem(p.tensors, p.grads, tuple(options), call))[0]
    served = torch.tensor({"nan value": [0.0, 1.0], "all masked": [0.0, 0.0]}.get(keys, [1.0, 1.0]))
    assert torch.equal(machine.report[:, 0], served.double())


@pytest.mark.full
def test_more_panels_than_there_is_room_for() -> None:
    """At a low temperature so few queries are not worth their panels: left to `direct`."""
    p = problem(torch.float32, (40, 300), 4, scale=40.0)
    machine = assert_runs("transform", p)[0]
    assert (machine.report[:, 0] == 0).all()


@pytest.mark.full
def test_many_panels() -> None:
    """At a low temperature so many queries are worth their panels, more than a hundred of them."""
    p = problem(torch.float32, (8192, 300), 4, scale=300.0, heads=1)
    # Races within a block are looked for where there are few blocks, all of which do the same.
    for machine in assert_runs("transform", p, racecheck=False):
        served, panels = machine.report[0, 0], machine.report[0, 3]
        assert served == 1
        assert panels > 100


def test_results_do_not_depend_on_the_order_of_blocks() -> None:
    p = problem(torch.float32, (150, 40), 4, scale=0.25)
    runs = [
        forward("transform", Machine(seed=seed, schedule=schedule), *p.tensors, *p.options)
        for seed, schedule in ((0, "lockstep"), (1, "warps"))
    ]
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)]
)
def test_bytes_of_the_token_passes(dtype: torch.dtype) -> None:
    """Forward moves at most 1.5 times its inputs and outputs, the core (no n in it) aside.

    In sectors of 32 bytes, which is what memory moves: lanes of a warp that read the same row share
    them.
    """
    n, dv = 4096, 64
    query, key = torch.randn(2, 1, n, 1).mul(0.3).to(dtype).unbind()
    value = torch.randn(1, n, dv).to(dtype)
    machine = Machine(racecheck=False, globalcheck=False, uninit="poison", profile=True)
    forward("transform", machine, query, key, value, None, None, None, 1.0, 0.0, False)
    assert machine.report[0, 0] == 1
    moved = 0
    for result in machine.results:
        if not any(name in result.kernel for name in ("core", "layout", "key_error", "certify")):
            moved += 32 * sum(result.sectors.values())
    least = n * (dtype.itemsize * (1 + 1 + dv + dv) + 8)  # query, key, value, out; lse
    print(f"{moved / least:.2f} of the minimum")
    assert moved <= 1.5 * least


PROJECT = pairwise(
    {
        "dtype": DTYPES,
        "sizes": ((2, 70), (1, 1), (1, 129)),
        "columns": (64, 5, 300),
        "outputs": (2, 9, 1),
        "strides": ("dense", "gaps"),
        "bias": (True, False),
    }
)


def test_every_kernel_is_executed() -> None:
    """No instantiation is shipped that has never run: all that are in the PTX, one by one."""
    executed.clear()
    for dtype in DTYPES:
        for dv in (5, 70):  # few columns and many have kernels of their own
            assert_runs("direct", problem(dtype, (9, 7), dv, heads=1))
            p = problem(dtype, (7, 5), dv, mask="key bias", heads=1, score="gaussian", slopes=True)
            assert_runs("direct", p)
        assert_runs("transform", problem(dtype, (12, 15), 5, scale=0.25, heads=1))
        assert_project(dtype, (1, 5), 5, 2, "dense", True)
    never = sorted(map(readable, modules().keys() - executed))
    assert not never
    print(f"{len(executed)} kernels")


@pytest.mark.parametrize("case", few_and_rest(PROJECT, 3))
def test_project(case: dict[str, Any]) -> None:
    assert_project(**case)


def assert_project(
    dtype: torch.dtype,
    sizes: tuple[int, int],
    columns: int,
    outputs: int,
    strides: str,
    bias: bool,
) -> None:
    """Numbers obey the error rule; extents are those of the numbers, exactly."""
    batch, n = sizes
    x = strided(torch.randn(batch, n, columns).to(dtype), strides)
    weight = strided(torch.randn(outputs, columns).to(dtype), strides)
    shift = torch.randn(outputs).to(dtype) if bias else None
    out, extents = project(Machine(), x, weight, shift)
    wide = (x.double(), weight.double(), None if shift is None else shift.double())
    truth = torch.nn.functional.linear(*wide).transpose(1, 2)
    eager = torch.nn.functional.linear(x, weight, shift).transpose(1, 2)
    # Sums round in proportion to the sum of their terms' magnitudes.
    size = torch.nn.functional.linear(*(None if y is None else y.abs() for y in wide)).max().item()
    assert_accurate({"out": out}, {"out": truth}, [{"out": eager}], magnitudes={"out": size})
    low, high = out.double().min(-1), out.double().max(-1)
    assert torch.equal(extents[..., 0], low.values)
    assert torch.equal(extents[..., 1], high.values)
    for at, values in ((extents[..., 2], low.values), (extents[..., 3], high.values)):
        assert torch.equal(out.double().gather(-1, at.long()[..., None])[..., 0], values)
    assert (extents[..., 4] == n).all()
    assert (extents[..., 5] == 1).all()
