"""Triton kernels as compiled: resources on every architecture, and the PTX run on the CPU.

Compiling needs no GPU. What runs here is the sm_80 PTX, interpreted by ptxrun with bounds, race and
uninitialised-memory checks; fusion of multiply-adds is off in these kernels, so ptxas must round
as the PTX says. Triton's own interpreter has a process of its own (tests/gpu/interpreted).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from biased import Biased, assert_results
from boltzattn import _C
from boltzattn.problem import LayerProblem, OutputGradients, Problem, Saved
from boltzattn.reference.direct import dropout_keep
from boltzattn.triton_kernels import (
    direct,
    direct_kernels,
    extents,
    layer,
    layout,
    sorting,
    transform,
    transform_nodes,
    transform_tokens,
)
from boltzattn.triton_kernels import project as projection
from boltzattn.triton_kernels.launch import TOKEN_BLOCK
from boltzattn.triton_kernels.project import project
from boltzattn.triton_kernels.tolerances import NEGLIGIBLE, PRECISION, ROUNDING, most_panels
from boltzattn.triton_kernels.tools import report
from boltzattn.triton_kernels.tools.compilation import (
    TARGETS,
    Launch,
    compile_for,
    is_constant,
    launches_for,
    occupancy,
    resources_of,
    specialisation,
)
from covering import pairwise
from errors import CERTIFIED, assert_accurate, error_of
from gpu_launches import PtxRun
from hidden import SPOILABLE, Hiding, assert_hidden_do_not_count, hiding
from oracle import Result, eagers, largest, magnitudes, oracle
from torch import Tensor

# Largest shared memory of a program, in bytes.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
SHARED["gfx942"] = 64 << 10
NVIDIA = ("sm_80", "sm_90", "sm_100", "sm_120")
FP64_PRODUCTS = ("core_kernel", "adjoint_kernel")  # on matrix units of the first two only
METHODS = {
    "direct": (direct.direct_forward, direct.direct_backward),
    "transform": (transform.transform_forward, transform.transform_backward),
}


def tensors_of(
    dtype: torch.dtype, n_q: int, n_k: int, rank: int, dv: int, heads: int = 1
) -> tuple[Tensor, ...]:
    shapes = ((n_q, rank), (n_k, rank), (n_k, dv), (n_q, dv))
    return tuple(torch.randn(heads, *shape).to(dtype) for shape in shapes)


def launches_of(
    target: str, method: str, dtype: torch.dtype, rank: int, dv: int, kind: str
) -> list[Launch]:
    """Everything that forward and backward launch, one of each specialisation."""
    n = 4096
    *inputs, grad_out = tensors_of(dtype, n, n, rank, dv, heads=2)
    dense = kind == "masked" and method == "direct"
    attn_mask = torch.empty(2, n, n) if dense else None
    key_mask = torch.zeros(2, n, dtype=torch.bool) if kind == "masked" else None
    slopes = torch.empty(2, dtype=torch.float64) if kind in ("biased", "Gaussian") else None
    if slopes is not None or kind == "key bias":
        key_mask = torch.zeros(2, n)
    options = (0.7, 0.0, dense or slopes is not None, kind == "Gaussian")
    problem = Problem(*inputs, attn_mask, key_mask, slopes, None, *options)
    saved = Saved(torch.empty_like(grad_out), torch.empty(2, n, dtype=torch.float64))
    forward, backward = METHODS[method]
    launches = launches_for(target, forward, problem)
    for grad_lse in (saved.lse, None):
        launches += launches_for(
            target, backward, OutputGradients(grad_out, grad_lse), saved, problem
        )
    return list({specialisation(launch): launch for launch in launches}.values())


def assert_fits(launch: Launch, target: str) -> None:
    compiled = compile_for(launch, target)
    resources = resources_of(compiled)
    assert resources.spilled == 0, (launch.name, resources)
    assert resources.shared <= SHARED[target], (launch.name, resources)
    on_matrix_units = NVIDIA[:2] if launch.name in FP64_PRODUCTS else NVIDIA
    if "PRECISION" in launch.fixed and target in on_matrix_units:
        assert "mma" in compiled.asm["ptx"], f"{launch.name}: no matrix instructions"


def project_launches(target: str, dtype: torch.dtype, width: int, outputs: int) -> list[Launch]:
    x, weight = torch.empty(2, 4096, width, dtype=dtype), torch.empty(outputs, width, dtype=dtype)
    return launches_for(target, project, x, weight, torch.empty(outputs, dtype=dtype))


def layer_launches(target: str, dtype: torch.dtype, width: int) -> list[Launch]:
    """Forward and backward with two heads, values and outputs as wide as the tokens."""
    query, key = torch.empty(2, 1, 2, 4096, 1, dtype=dtype)
    x, weight = torch.empty(1, 4096, width, dtype=dtype), torch.empty(2, width, width, dtype=dtype)
    problem = LayerProblem(query, key, x, weight, None, None, None, None, 1.0)
    launches = launches_for(target, layer.layer_forward, problem)
    launches += launches_for(target, layer.layer_backward, x, problem)
    return list({specialisation(launch): launch for launch in launches}.values())


# (method, dtype, rank, dv, kind); for the projection, rank is the number of outputs and dv the
# width of the tokens. "key bias" has a bias per key, "biased" also slopes, and "Gaussian" these and
# Gaussian scores.
Case = tuple[str, torch.dtype, int, int, str]
QUICK: list[Case] = [
    ("direct", torch.bfloat16, 1, 64, "plain"),
    ("transform", torch.bfloat16, 1, 64, "plain"),
    ("project", torch.bfloat16, 2, 64, "plain"),
]
# With `full`, every row of the launch tables; fp16 has the same as bf16.
FULL: list[Case] = [
    *(
        ("direct", dtype, rank, dv, kind or ("masked" if dv == 64 else "plain"))
        for kind in ("", "key bias", "biased", "Gaussian")
        for dtype, widths in ((torch.float32, (16, 32, 64)), (torch.bfloat16, (16, 32, 64, 128)))
        for rank in (1, 16)
        for dv in widths
    ),
    *(
        ("transform", dtype, 1, dv, "plain")
        for dtype in (torch.float32, torch.bfloat16)
        for dv in (16, 32, 64, 128)
    ),
    *(
        ("project", dtype, outputs, 64, "plain")
        for dtype in (torch.float32, torch.float16)
        for outputs in (2, 32, 64)
    ),
    ("direct", torch.float16, 2, 64, "plain"),
    ("transform", torch.float16, 1, 64, "masked"),
    ("layer", torch.float32, 1, 64, "plain"),
    ("layer", torch.bfloat16, 1, 128, "plain"),
]


def case_name(case: Case) -> str:
    method, dtype, rank, dv, kind = case
    return f"{method} {dtype} rank {rank} dv {dv} {kind}".replace("torch.", "")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(c, id=case_name(c)) for c in QUICK),
        *(pytest.param(c, id=f"{case_name(c)}, full", marks=pytest.mark.full) for c in FULL),
    ],
)
def test_fits_into_registers(case: Case, target: str) -> None:
    method, dtype, rank, dv, _ = case
    if method == "project":
        launches = project_launches(target, dtype, dv, rank)
    elif method == "layer":
        launches = layer_launches(target, dtype, dv)
    else:
        launches = launches_of(target, *case)
    for launch in launches:
        assert_fits(launch, target)


@pytest.mark.parametrize("method", ["direct", "transform", "layer"])
def test_constants_are_not_nested(method: str) -> None:
    """Triton 3.6 loses a 1 or None in a tuple within a tuple, and does not compile the kernel."""
    if method == "layer":
        launches = layer_launches("sm_80", torch.bfloat16, 64)
    else:
        launches = launches_of("sm_80", method, torch.bfloat16, 1, 64, "masked")
        if method == "direct":
            launches += launches_of("sm_80", method, torch.bfloat16, 1, 64, "Gaussian")
    for launch in launches:
        fields = [x for argument in launch.args if isinstance(argument, tuple) for x in argument]
        nested = [x for field in fields if isinstance(field, tuple) for x in field]
        assert not any(map(is_constant, nested)), launch.name


def test_tolerances_are_those_of_cpp() -> None:
    compiled = _C.tolerances()
    assert compiled["negligible"] == NEGLIGIBLE.value
    for dtype, rounding in ROUNDING.items():
        assert compiled["rounding"][str(dtype).removeprefix("torch.")] == rounding


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_occupancy_of_the_token_passes(target: str) -> None:
    """At least a quarter of the threads a multiprocessor can hold, at dv = 64."""
    for launch in launches_of(target, "transform", torch.bfloat16, 1, 64, "plain"):
        if launch.name in ("moments_kernel", "evaluate_kernel"):
            share = occupancy(resources_of(compile_for(launch, target)), target)
            assert share >= 0.25, f"{launch.name}: {share:.3f}"


def check(method: str, tensors: tuple[Tensor, ...], launcher: PtxRun, **call: Any) -> None:
    """Forward and backward from PTX against the oracle."""
    *inputs, grad_out = tensors
    key_mask, is_causal = call.get("key_mask"), call.get("is_causal", False)
    problem = Problem(*inputs, None, key_mask, None, None, call["scale"], 0.0, is_causal, False)
    forward, backward = METHODS[method]
    saved = launcher.run(forward, problem)
    grads = launcher.run(backward, OutputGradients(grad_out, None), saved, problem)
    names = ("out", "lse", "grad_query", "grad_key", "grad_value")
    asked = {"scale": call["scale"], "is_causal": is_causal}
    if key_mask is not None:
        asked["key_padding_mask"] = key_mask[0]  # the same for every head
    assert_accurate(
        dict(zip(names, (saved.out, saved.lse.float(), *grads[:3]), strict=True)),
        oracle(*tensors, **asked)._asdict(),
        eagers(*tensors, **asked),
        magnitudes=magnitudes(*tensors, **asked),
        method=method,
    )


RUNS: dict[str, dict[str, Any]] = {
    "one order of programs": {"seed": 1},
    "another order": {"seed": 2},
    "warp by warp": {"schedule": "warps", "seed": 3},
}


@pytest.mark.parametrize("checks", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_direct_from_ptx(dtype: torch.dtype, checks: dict[str, Any]) -> None:
    tensors = tensors_of(dtype, 70, 90, 2, 20)
    check("direct", tensors, PtxRun(**checks), scale=0.7, is_causal=True)


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        ("causal", torch.bfloat16),
        *(
            pytest.param(mask, dtype, marks=pytest.mark.full)
            for mask, dtype in (("bool", torch.float32), ("float", torch.float16))
        ),
    ],
)
def test_hidden_pairs_do_not_count_from_ptx(mask: str, dtype: torch.dtype) -> None:
    """Where tokens hold NaN, only what sees them is spoilt."""

    def attend(call: Hiding) -> Result:
        *inputs, grad_out, grad_lse = call.spoilt()
        attn_mask = None if call.attn_mask is None else call.attn_mask.expand(2, -1, -1)
        scale = inputs[0].shape[-1] ** -0.5
        problem = Problem(*inputs, attn_mask, *[None] * 3, scale, 0.0, call.is_causal, False)
        launcher = PtxRun()
        saved = launcher.run(direct.direct_forward, problem)
        grads = OutputGradients(grad_out, grad_lse)
        found = launcher.run(direct.direct_backward, grads, saved, problem)
        return Result(saved.out, saved.lse.float(), *found[:3])

    names = ("query", "grad_out") if mask == "causal" else SPOILABLE
    assert_hidden_do_not_count(hiding(mask, names, torch.nan, (36, 20), dtype=dtype), attend)


SEEDS = torch.tensor([12345678901, -987654321])


def check_biased(
    dtype: torch.dtype,
    sizes: tuple[int, int],
    rank: int,
    dv: int,
    score: str,
    mask: str,
    launcher: PtxRun,
    dropout_p: float = 0.0,
) -> None:
    """Two heads with slopes and a bias per key or a padding mask, all gradients by PTX."""
    n_q, n_k = sizes
    query, key, value, grad_out = tensors_of(dtype, n_q, n_k, rank, dv, heads=2)
    grad_lse, slopes = torch.randn(2, n_q), torch.tensor([0.3, 0.01])
    if score == "gaussian" and dtype == torch.float32:
        query, key = query + 10_240, key + 10_240
    call = Biased(query, key, value, None, slopes, 0.7, score, mask == "causal")
    hidden = torch.rand(2, n_k) < 0.3
    if mask == "padding":
        call = call._replace(attn_mask=~hidden[:, None])
    else:
        bias = torch.randn(2, n_k).masked_fill(hidden, -torch.inf)
        call = call._replace(key_bias=bias.to(dtype))
    if dropout_p:
        keep = dropout_keep(SEEDS, slice(0, n_q), n_k, dropout_p)
        call = call._replace(keep=keep, dropout_p=dropout_p)
    problem = Problem(
        *(query, key, value, None, hidden if mask == "padding" else call.key_bias),
        *(slopes.double(), SEEDS, 0.7, dropout_p, call.is_causal, score == "gaussian"),
    )
    saved = launcher.run(direct.direct_forward, problem)
    grads = OutputGradients(grad_out, grad_lse.double())
    found = launcher.run(direct.direct_backward, grads, saved, problem)
    names = ("grad_query", "grad_key", "grad_value", "grad_key_bias", "grad_alibi_slopes")
    actual = {"out": saved.out, "lse": saved.lse.float()}
    actual |= {name: x for name, x in zip(names, found, strict=True) if x.numel()}
    # In fp64 they would be held to its roundings.
    actual["grad_alibi_slopes"] = found.slopes.float()
    assert_results(actual, call, grad_out, grad_lse, "direct")


@pytest.mark.parametrize("score", [pytest.param("dot", marks=pytest.mark.full), "gaussian"])
def test_biased_direct_from_ptx(score: str) -> None:
    dtype, mask = (torch.float32, "causal") if score == "gaussian" else (torch.bfloat16, "none")
    check_biased(dtype, (70, 40), 2, 20, score, mask, PtxRun(seed=1))


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "dtype": (torch.float32, torch.bfloat16, torch.float16),
            "sizes": ((1, 65), (63, 1), (65, 63), (70, 130)),
            "rank": (1, 3, 16),
            "dv": (1, 17, 65),
            "score": ("dot", "gaussian"),
            "mask": ("none", "causal", "padding"),
            "dropout_p": (0.0, 0.3),
            "checks": tuple(RUNS),
        }
    ),
    ids=lambda case: "-".join(str(x).removeprefix("torch.") for x in case.values()),
)
def test_all_biased_direct_from_ptx(case: dict[str, Any]) -> None:
    call = {name: x for name, x in case.items() if name != "checks"}
    check_biased(**call, launcher=PtxRun(**RUNS[case["checks"]]))


@pytest.mark.parametrize("checks", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(x, marks=pytest.mark.full) for x in (torch.float32, torch.half)),
    ],
)
def test_transform_from_ptx(dtype: torch.dtype, checks: dict[str, Any]) -> None:
    tensors = tensors_of(dtype, 70, 300, 1, 20)
    check("transform", tensors, PtxRun(**checks), scale=1.3)


@pytest.mark.full
@pytest.mark.parametrize("checks", RUNS.values(), ids=RUNS)
def test_long_transform_from_ptx(checks: dict[str, Any]) -> None:
    """More than one block to sort, chunk and tile, and more columns than one program takes."""
    tensors = tensors_of(torch.float32, 1100, 1300, 1, 70)
    check("transform", tensors, PtxRun(**checks), scale=1.3)


@pytest.mark.parametrize("checks", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)]
)
def test_project_from_ptx(dtype: torch.dtype, checks: dict[str, Any]) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 70, 33), (3, 33), (3,)))
    numbers, extents = PtxRun(**checks).run(project, x, weight, bias)
    linear = torch.nn.functional.linear
    wide = (x.double(), weight.double(), bias.double())
    # Sums round in proportion to the sum of their terms' magnitudes.
    size = linear(*(y.abs() for y in wide)).max().item()
    assert_accurate(
        {"numbers": numbers},
        {"numbers": linear(*wide).mT},
        [{"numbers": linear(x, weight, bias).mT}],
        magnitudes={"numbers": size},
    )
    rows = numbers.double()
    assert torch.equal(extents[..., 0], rows.amin(-1))
    assert torch.equal(extents[..., 1], rows.amax(-1))
    at = extents[..., 2:4].long()
    assert torch.equal(rows.gather(-1, at), extents[..., :2])
    assert torch.equal(extents[..., 4:], torch.tensor([70, 1.0]).double().expand(2, 3, 2))


@pytest.mark.parametrize("checks", RUNS.values(), ids=RUNS)
def test_products_of_heads_that_are_not_served_from_ptx(checks: dict[str, Any]) -> None:
    a, b = torch.randn(2, 40, 33), torch.randn(2, 35, 33)
    out = torch.full((2, 40, 35), 7.0)
    PtxRun(**checks).run(layer.product_unserved, a, b, torch.tensor([0, 1], dtype=torch.int32), out)
    exact = a[0].double() @ b[0].double().mT
    size = (a[0].abs() @ b[0].abs().mT).max().item()
    eager = {"out": a[0] @ b[0].mT}
    assert_accurate({"out": out[0]}, {"out": exact}, [eager], magnitudes={"out": size})
    assert (out[1] == 7.0).all()


@pytest.mark.full
@pytest.mark.parametrize("checks", RUNS.values(), ids=RUNS)
def test_layer_from_ptx(checks: dict[str, Any]) -> None:
    """Two heads of which one is not served, forward and backward, against dense fp64."""
    query, key = torch.randn(2, 1, 2, 40, 1)
    query[:, 1] *= 1e8
    x, weight, grad_out = torch.randn(1, 40, 20), torch.randn(2, 18, 20), torch.randn(1, 40, 18)
    problem = LayerProblem(query, key, x, weight, None, None, None, None, 1.0)
    launcher = PtxRun(**checks)
    out = launcher.run(layer.layer_forward, problem)
    grads = launcher.run(layer.layer_backward, grad_out, problem)
    leaves = [y.double().requires_grad_() for y in (query, key, x, weight)]
    logits = leaves[0] @ leaves[1].mT
    exact = (logits.softmax(-1) @ leaves[2][:, None] @ leaves[3].mT).sum(1)
    truth = torch.autograd.grad(exact, leaves, grad_out.double())
    assert error_of(out, exact.detach()) <= 2 * CERTIFIED[torch.float32] * largest(exact)
    # A hard softmax has no gradient in its logits to compare.
    served = (grads[0][:, :1], grads[1][:, :1], grads[2], grads[3])
    wanted = (truth[0][:, :1], truth[1][:, :1], truth[2], truth[3])
    for ours, other in zip(served, wanted, strict=True):
        assert error_of(ours, other) <= 4 * CERTIFIED[torch.float32] * largest(other)


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_masked_keys_from_ptx(method: str) -> None:
    tensors = tensors_of(torch.float32, 40, 300, 1, 20, heads=2)
    masked = (torch.rand(1, 300) < 0.3).expand(2, 300)
    check(method, tensors, PtxRun(), scale=1.3, key_mask=masked)


# Work on the nodes, which does not depend on the number of tokens.
CORE = ("layout_kernel", "core_kernel", "certify_kernel")


def counted_forward(n: int) -> PtxRun:
    """The transform's forward, bf16, dv = 64, with its traffic counted."""
    *inputs, _ = tensors_of(torch.bfloat16, n, n, 1, 64)
    problem = Problem(*inputs, *[None] * 4, 1.0, 0.0, False, False)
    launcher = PtxRun(
        racecheck=False, intrawarp=False, globalcheck=False, uninit="poison", profile=True
    )
    launcher.run(transform.transform_forward, problem)
    return launcher


def forward_bytes(n: int, without: tuple[str, ...] = ()) -> int:
    """Global bytes of it: those of the kernels, counted by ptxrun, and those of torch's running
    sums over the counts of panels, 8 per bin and block."""
    bins = sum(1 << panels.bit_length() for panels in most_panels(n, PRECISION[torch.bfloat16]))
    return counted_forward(n).bytes_moved(without) + 8 * bins * (n // TOKEN_BLOCK)


def test_bytes_of_a_token() -> None:
    """Forward moves little more than the least: every input read and every output written once.

    The bytes of one more token, so that what a long sequence amortises is left out: the core, and
    the partial sums of panels.
    """
    short, long = 2048, 4096
    moved = forward_bytes(long, CORE) - forward_bytes(short, CORE)
    least = report.least_forward_bytes(64, 2) * (long - short)
    print(f"{moved / least:.3f} of the least")
    assert moved <= 1.5 * least


@pytest.mark.full
def test_bytes_of_a_long_sequence() -> None:
    """Nothing left out."""
    n = 65536
    moved, least = forward_bytes(n), report.least_forward_bytes(64, 2) * n
    print(f"{moved / least:.3f} of the least")
    assert moved <= 1.5 * least


def test_modelled_bytes_are_the_counted() -> None:
    """What the report says of the passes over tokens, against ptxrun."""
    launcher = counted_forward(2048)
    for name in ("moments_kernel", "evaluate_kernel"):
        counted = sum(
            32 * sum(r.sectors.values()) for kernel, r in launcher.results if kernel == name
        )
        modelled = report.work_per_token(name, 64, 2).bytes * 2048
        # Tables and partial sums of panels that are not full come on top.
        assert modelled <= counted <= 1.25 * modelled, name


def test_the_report_has_every_kernel() -> None:
    modules = (
        direct_kernels,
        extents,
        layer,
        layout,
        projection,
        sorting,
        transform_nodes,
        transform_tokens,
    )
    every = [name for module in modules for name in vars(module) if name.endswith("_kernel")]
    assert len(set(every)) == len(every)
    for target in TARGETS:
        found = report.kernels(report.launches(target)).values()
        assert {launch.name for launch in found} == set(every)


@pytest.mark.full
def test_the_report_is_written() -> None:
    lines = list(report.lines())
    resources = [line.split(" | ")[1:] for line in lines if line.count("%") == len(TARGETS)]
    assert len(resources) == len(report.kernels(report.launches("sm_80")))
    for row in resources:
        assert all(cell.split(", ")[2] == "0" for cell in row), row  # nothing spills
    assert any(line.startswith("| ratio") for line in lines)
    assert "modelled, not measured" in "\n".join(lines)
