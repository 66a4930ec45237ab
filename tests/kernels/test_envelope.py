"""Heads with a bias per key or Gaussian scores by the transform: panels under the envelope.

`test_scores` calls all backends with ordinary numbers. Here keys, biases, temperatures and
bandwidths are the awkward ones, for the reference and for the C++ of the CPU.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import boltzattn
import numpy as np
import pytest
import torch
from biased import Biased, eagers, oracle, run
from boltzattn.dispatch.backends import why_not
from boltzattn.dispatch.extension import extension
from boltzattn.problem import Problem
from boltzattn.reference import direct
from boltzattn.reference.envelope import EnvelopeHead, coordinates, make_envelope_head
from boltzattn.reference.head import visible_keys
from boltzattn.transform.envelope import ENVELOPE_PRECISION, EnvelopePrecision
from boltzattn.transform.tolerances import ROUNDING_OF_PRODUCT, TOLERANCE
from covering import pairwise
from errors import CERTIFIED, assert_accurate
from oracle import largest
from servers import Server, facts
from torch import Tensor

extension()  # the report is an op of the compiled module

REFERENCE, CPU = Server("transform", "reference"), Server("transform", "cpu")


def _uniform(n: int) -> Tensor:
    return torch.rand(n, dtype=torch.float64)


def _normal(n: int) -> Tensor:
    return torch.randn(n, dtype=torch.float64)


def _needle(n: int) -> Tensor:
    keys = torch.zeros(n, dtype=torch.float64)
    keys[n // 2] = 1.0
    return keys


def _clusters(n: int) -> Tensor:
    centres = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    return centres[torch.randint(3, (n,))] + 1e-3 * _normal(n)


KEYS: dict[str, Callable[[int], Tensor]] = {
    "normal": _normal,
    "uniform": _uniform,
    "two points": lambda n: (_uniform(n) < 0.5).double(),
    "needle": _needle,
    "cauchy": lambda n: torch.tan(math.pi * (_uniform(n) - 0.5)),
    "log-normal": lambda n: (2 * _normal(n)).exp(),
    "ladder": lambda n: 0.5 ** (torch.arange(n, dtype=torch.float64) % 40),
    "grid": lambda n: torch.randint(-8, 9, (n,)).double(),
    "clusters": _clusters,
}


def _one_huge(s: Tensor, product: float) -> Tensor:
    bias = torch.zeros_like(s)
    bias[len(s) // 3] = 1e4
    return bias


def _a_third_hidden(s: Tensor, product: float) -> Tensor:
    bias = _normal(len(s)).masked_fill(_uniform(len(s)) < 1 / 3, -math.inf)
    bias[0] = 0.0
    return bias


# Of keys with extent 1, in units of logits; `product` is the range of the scores.
BIASES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "zero": lambda s, product: torch.zeros_like(s),
    "normal": lambda s, product: _normal(len(s)),
    "normal 10": lambda s, product: 10 * _normal(len(s)),
    "normal 100": lambda s, product: 100 * _normal(len(s)),
    "one huge": _one_huge,
    "linear in position": lambda s, product: -0.25 * torch.arange(len(s)).double(),
    "parabola": lambda s, product: -0.5 * product * (s - s.mean()).square(),
    "a third hidden": _a_third_hidden,
}
PRODUCTS = (0.1, 10.0, 300.0, 1e4, 1e5)  # B = max|t| (max s - min s)
BANDWIDTHS = (10.0, 0.3, 1e-2, 1e-3, 1e-5)  # over the extent of the keys
SIZES = (1, 2, 3, 63, 257)


class Case(NamedTuple):
    keys: str
    bias: str
    level: int  # of PRODUCTS or BANDWIDTHS
    n_q: int
    n_k: int

    def __str__(self) -> str:
        return f"{self.keys}-{self.bias}-{self.level}-{self.n_q}x{self.n_k}"


CASES = [
    Case(**row)
    for row in pairwise(
        {
            "keys": tuple(KEYS),
            "bias": tuple(BIASES),
            "level": range(5),
            "n_q": SIZES,
            "n_k": SIZES,
        }
    )
]


def draw_keys(family: str, n: int) -> Tensor:
    """[n] fp64 with extent 1, or 0."""
    keys = KEYS[family](n)
    extent = keys.max() - keys.min()
    return keys / extent if extent > 0 else keys


def draw_queries(keys: Tensor, product: float, n: int) -> Tensor:
    """Some spread evenly over [-product, product], some over six decades."""
    even = 2 * _uniform(n) - 1
    decades = _normal(n).sign() * 10 ** (-6 * _uniform(n))
    queries = torch.where(torch.arange(n) % 2 == 0, even, decades)
    queries[-1] = 1.0
    return queries * product


def draw_lookups(keys: Tensor, bandwidth: float, n: int) -> Tensor:
    """Half exactly on keys, the others up to 100 bandwidths away from one.

    (Farther from all keys logits exceed what fp64 resolves to 1e-10: left to `direct`.)
    """
    away = (torch.arange(n) % 2) * bandwidth * _normal(n).sign() * 10 ** (4 * _uniform(n) - 2)
    return keys[torch.randint(len(keys), (n,))] + away


def draw(case: Case, score: str, dtype: torch.dtype, dv: int = 3) -> tuple[Biased, Tensor, Tensor]:
    """A call of one head, with output gradients."""
    torch.manual_seed(zlib.crc32(f"{case}{score}".encode()))
    keys = draw_keys(case.keys, case.n_k)
    if score == "dot":
        product = PRODUCTS[case.level]
        queries, scale = draw_queries(keys, product, case.n_q), 1.0
        bias = BIASES[case.bias](keys, product)
    else:
        bandwidth = BANDWIDTHS[case.level]
        bias = BIASES[case.bias](keys, 1 / bandwidth)
        visible = keys[bias > -math.inf]
        queries, scale = draw_lookups(visible, bandwidth, case.n_q), bandwidth**-2
    value, grad_out = torch.randn(1, case.n_k, dv), torch.randn(1, case.n_q, dv)
    call = Biased(
        *(x[None].to(dtype) for x in (queries[:, None], keys[:, None])),
        value.to(dtype),
        bias[None].to(dtype),
        None,
        scale,
        score,
    )
    return call, grad_out.to(dtype), torch.randn(1, case.n_q).to(dtype)


def assert_right(call: Biased, grad_out: Tensor, grad_lse: Tensor, server: Server) -> None:
    """The call obeys the error rule.

    The terms of the gradients vanish where a Gaussian's query lies on the only key in its reach, or
    a key of value 0 has all the weight; what is left are roundings of the positions themselves, and
    keys of weights below the rounding. There the floor is 8 eps |grad| |value| |key| scale.
    """
    truth, sizes = oracle(call, grad_out, grad_lse)
    dtype = call.query.dtype
    size = largest(grad_out) * largest(call.value) + largest(grad_lse)
    floor = 8 * torch.finfo(dtype).eps * size * largest(call.key) * call.scale
    of_gradients = ("grad_query", "grad_key") if call.score == "gaussian" else ("grad_query",)
    for name in of_gradients:
        sizes[name] = max(sizes[name], floor / CERTIFIED[dtype])
    actual = run(call, grad_out, grad_lse, server)
    assert_accurate(
        actual, truth, eagers(call, grad_out, grad_lse), magnitudes=sizes, method=server.method
    )


def problem_of(call: Biased) -> Problem:
    tensors = (call.query, call.key, call.value, None, call.key_bias, None, None)
    return Problem(*tensors, call.scale, 0.0, False, call.score == "gaussian")


def one_by_one(problem: Problem) -> list[Problem]:
    return [problem.head((h,)) for h in range(len(problem.query))]


def envelope_head(
    problem: Problem, precision: EnvelopePrecision = ENVELOPE_PRECISION
) -> EnvelopeHead:
    """Of a problem of one head, whether it is served or not."""
    kept = visible_keys(problem)
    return make_envelope_head(coordinates(problem, kept), problem.value[kept], False, precision)


@pytest.fixture
def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that the reference does not serve fail."""

    def fail(*_: Any) -> None:
        raise AssertionError("the head is not served")

    monkeypatch.setattr(direct, "forward", fail)
    monkeypatch.setattr(direct, "backward", fail)


@pytest.mark.parametrize("score", ["dot", "gaussian"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case: Case, score: str, request: pytest.FixtureRequest) -> None:
    call, grad_out, grad_lse = draw(case, score, torch.float64)
    (one,) = one_by_one(problem_of(call))
    # At the narrowest bandwidth, lookups far from keys lose more than 1e-10 in fp64.
    if coordinates(one, visible_keys(one)).product * ROUNDING_OF_PRODUCT < 0.9e-10:
        request.getfixturevalue("no_direct")
    else:
        assert score == "gaussian"
        assert case.level == 4
    assert_right(call, grad_out, grad_lse, REFERENCE)


SCORES = {
    REFERENCE: ("dot", "gaussian"),
    CPU: tuple(
        score
        for score in ("dot", "gaussian")
        if not why_not(facts(key_bias=True, gaussian=score == "gaussian"), "transform", "cpu")
    ),
}
BOTH = [(server, score) for server, scores in SCORES.items() for score in scores]


CASES_OF_THE_CPU = [
    pytest.param(*(case, dtype, score), id=f"{case}-{str(dtype).removeprefix('torch.')}-{score}")
    for case in CASES
    for dtype in (torch.float32, torch.float64)
    for score in SCORES[CPU]
]


@pytest.mark.parametrize(("case", "dtype", "score"), CASES_OF_THE_CPU)
def test_cpu(case: Case, dtype: torch.dtype, score: str) -> None:
    assert_right(*draw(case, score, dtype), CPU)


@pytest.mark.parametrize(("server", "score"), BOTH, ids=str)
@pytest.mark.parametrize("dv", [1, 3, 65, 300])
def test_widths_of_values(dv: int, server: Server, score: str) -> None:
    dtypes = [torch.float64] if server == REFERENCE else [torch.float64, torch.float32]
    for dtype in dtypes:
        for case in (
            Case("normal", "normal 10", 2, 257, 65),
            Case("uniform", "normal", 4, 65, 257),
        ):
            assert_right(*draw(case, score, dtype, dv), server)


# ---- the certificate ----


def exact_out(call: Biased) -> Tensor:
    q, k, v, c = (
        x.double().numpy().astype(np.longdouble)
        for x in (call.query, call.key, call.value, call.key_bias)
    )
    gap = q - np.swapaxes(k, -1, -2)
    scores = q * np.swapaxes(k, -1, -2) if call.score == "dot" else -0.5 * gap * gap
    logits = scores * np.longdouble(call.scale) + c[..., None, :]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    out = np.einsum("hij,hjd->hid", weights, v) / weights.sum(-1, keepdims=True)
    return torch.from_numpy(out.astype(np.float64))


def all_heads(n_q: int, n_k: int, dtype: torch.dtype, score: str, level: int) -> Biased:
    """A head for every kind of keys and biases."""
    heads = [
        draw(Case(keys, bias, level, n_q, n_k), score, dtype)[0] for keys in KEYS for bias in BIASES
    ]
    names = ("query", "key", "value", "key_bias")
    together = {name: torch.cat([getattr(head, name) for head in heads]) for name in names}
    return heads[0]._replace(**together)


def relative_error(out: Tensor, call: Biased) -> Tensor:
    """[heads]: over max|value|."""
    off = (out.double() - exact_out(call)).abs().amax((1, 2))
    return off / call.value.double().abs().amax((1, 2))


@pytest.mark.parametrize("score", SCORES[CPU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", range(5))
def test_certificate_of_the_cpu_is_an_upper_bound(
    level: int, dtype: torch.dtype, score: str
) -> None:
    call = all_heads(40, 129, dtype, score, level)
    report = torch.ops.boltzattn.cpu_transform_report(*problem_of(call))
    served, certificate = report[:, 0] == 1, report[:, 1]
    # At bandwidths of R / 1e5 the rounding of positions alone is more than fp64's certificate.
    if not (level == 4 and dtype == torch.float64 and score == "gaussian"):
        assert served.sum() >= 0.8 * len(served)
    out, _ = torch.ops.boltzattn.cpu_transform_forward(*problem_of(call))
    assert (certificate[served] <= TOLERANCE[dtype]).all()
    over = served & ~(relative_error(out, call) <= certificate)
    assert not over.any(), f"heads {over.nonzero().flatten().tolist()}"


@pytest.mark.parametrize("score", ["dot", "gaussian"])
def test_certificate_of_the_reference_is_an_upper_bound(score: str) -> None:
    """With few nodes and a large error, which then shows."""
    visible, heads = 0, 0
    for level in range(4):
        call = all_heads(60, 129, torch.float64, score, level)
        exact = exact_out(call)
        for h, (problem, truth) in enumerate(zip(one_by_one(problem_of(call)), exact, strict=True)):
            if h % 2 != level % 2:  # to save time
                continue
            precision = EnvelopePrecision((6, 8, 12)[h % 3], 10.0 ** -(3 + h % 4))
            head = envelope_head(problem, precision)
            out, _ = head.forward()
            error = float((out - truth).abs().max() / head.v.abs().max())
            assert error <= head.at_nodes.certificate, f"level {level}, head {h}, {precision}"
            visible += error > 1e-9
            heads += 1
    assert visible > heads / 4


@pytest.mark.parametrize("score", SCORES[CPU])
def test_layouts_of_reference_and_cpu_agree(score: str) -> None:
    """In the number of panels; roundings may move a border, and one bound is a little wider."""
    for level in (1, 3):
        problem = problem_of(all_heads(129, 129, torch.float64, score, level))
        report = torch.ops.boltzattn.cpu_transform_report(*problem)
        for row, one in zip(report.tolist(), one_by_one(problem), strict=True):
            layout = envelope_head(one).layout
            assert row[4] == row[6] == ENVELOPE_PRECISION.nodes
            for ours, theirs in ((len(layout.query), row[3]), (len(layout.key), row[5])):
                assert abs(ours - theirs) <= 1 + 0.1 * theirs


def test_constants_of_reference_and_cpu_agree() -> None:
    """Few tokens are nodes themselves, so the certificate is made of nothing but constants."""
    problem = problem_of(all_heads(20, 20, torch.float64, "dot", 2))
    report = torch.ops.boltzattn.cpu_transform_report(*problem)
    for row, one in zip(report.tolist(), one_by_one(problem), strict=True):
        assert envelope_head(one).at_nodes.certificate == pytest.approx(row[1], rel=1e-9)


# ---- what must not matter ----


def assert_same(
    actual: dict[str, Tensor], expected: dict[str, Tensor], call: Biased, *output_gradients: Tensor
) -> None:
    """Up to the certificate, of the magnitudes of the call."""
    _, sizes = oracle(call, *output_gradients)
    for name, x in actual.items():
        limit = CERTIFIED[call.query.dtype] * sizes[name]
        torch.testing.assert_close(x, expected[name], rtol=0.0, atol=limit, msg=name)


def some_heads(score: str, dtype: torch.dtype, n_q: int = 150, n_k: int = 200) -> tuple:
    draws = [
        draw(Case(keys, bias, level, n_q, n_k), score, dtype)
        for keys, bias, level in (
            ("normal", "normal", 2),
            ("uniform", "normal 10", 2),
            ("grid", "a third hidden", 2),
        )
    ]
    calls, *gradients = zip(*draws, strict=True)
    names = ("query", "key", "value", "key_bias")
    together = {name: torch.cat([getattr(call, name) for call in calls]) for name in names}
    return calls[0]._replace(**together), *(torch.cat(x) for x in gradients)


@pytest.mark.parametrize(("server", "score"), BOTH, ids=str)
def test_order_of_tokens(server: Server, score: str) -> None:
    call, grad_out, grad_lse = some_heads(score, torch.float64)
    rows, columns = torch.randperm(150), torch.randperm(200)
    moved = call._replace(
        query=call.query[:, rows],
        key=call.key[:, columns],
        value=call.value[:, columns],
        key_bias=call.key_bias[:, columns],
    )
    found = run(moved, grad_out[:, rows], grad_lse[:, rows], server)
    by_key = ("grad_key", "grad_value", "grad_key_bias")
    found = {
        name: x[:, (columns if name in by_key else rows).argsort()] for name, x in found.items()
    }
    assert_same(found, run(call, grad_out, grad_lse, server), call, grad_out, grad_lse)


@pytest.mark.parametrize(("server", "score"), BOTH, ids=str)
def test_a_constant_moves_lse_alone(server: Server, score: str) -> None:
    call, grad_out, grad_lse = some_heads(score, torch.float64)
    call = call._replace(key_bias=(call.key_bias * 64).round() / 64)  # so that sums are exact
    lifted = call._replace(key_bias=call.key_bias + 8)
    found = run(lifted, grad_out, grad_lse, server)
    found["lse"] = found["lse"] - 8
    assert_same(found, run(call, grad_out, grad_lse, server), call, grad_out, grad_lse)


@pytest.mark.parametrize(("server", "score"), BOTH, ids=str)
@pytest.mark.parametrize("content", [0.5, math.nan])
def test_minus_infinity_removes_a_key(content: float, server: Server, score: str) -> None:
    call, grad_out, grad_lse = some_heads(score, torch.float64)
    call = call._replace(key_bias=torch.randn(3, 200, dtype=torch.float64))
    kept = torch.rand(200) < 0.6
    less = Biased(
        call.query,
        call.key[:, kept],
        call.value[:, kept],
        call.key_bias[:, kept],
        None,
        call.scale,
        score,
    )
    call = call._replace(
        key=torch.where(kept[:, None], call.key, content),
        value=torch.where(kept[:, None], call.value, content),
        key_bias=call.key_bias.masked_fill(~kept, -math.inf),
    )
    found = run(call, grad_out, grad_lse, server)
    for name in ("grad_key", "grad_value", "grad_key_bias"):
        assert (found[name][:, ~kept] == 0).all(), name
        found[name] = found[name][:, kept]
    assert_same(found, run(less, grad_out, grad_lse, server), less, grad_out, grad_lse)


@pytest.mark.parametrize(("server", "score"), BOTH, ids=str)
def test_strides(server: Server, score: str) -> None:
    call, grad_out, grad_lse = some_heads(score, torch.float64)
    expected = run(call, grad_out, grad_lse, server)

    def apart(x: Tensor) -> Tensor:
        """The same numbers, last two dimensions exchanged in memory, with gaps."""
        wide = torch.full((*x.shape[:-2], x.shape[-1], 2 * x.shape[-2]), math.nan, dtype=x.dtype)
        wide[..., ::2] = x.mT
        return wide[..., ::2].mT

    strided = call._replace(
        query=apart(call.query),
        key=apart(call.key),
        value=apart(call.value),
        key_bias=apart(call.key_bias[..., None]).squeeze(-1),
    )
    assert_same(run(strided, apart(grad_out), grad_lse, server), expected, call, grad_out, grad_lse)


@pytest.mark.parametrize(("server", "score"), BOTH, ids=str)
def test_expanded_and_grouped_heads(server: Server, score: str) -> None:
    draw_from = {"dtype": torch.float64}
    query, bias = torch.randn(2, 4, 90, 1, **draw_from), torch.randn(4, 1, **draw_from)
    key, value = torch.randn(2, 2, 70, 1, **draw_from), torch.randn(2, 2, 70, 5, **draw_from)
    grad_out, grad_lse = torch.randn(2, 4, 90, 5, **draw_from), torch.randn(2, 4, 90, **draw_from)
    bias = bias.expand(4, 70) * torch.linspace(0, 1, 70, **draw_from)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    options = {"scale": 20.0, "score": score, "return_lse": True}
    out, lse = boltzattn.attention(*inputs, key_bias=bias, enable_gqa=True, **options, **server.ask)
    found = torch.autograd.grad((out, lse), inputs, (grad_out, grad_lse))
    call = Biased(
        query,
        key.repeat_interleave(2, 1),
        value.repeat_interleave(2, 1),
        bias.expand(2, 4, 70),
        None,
        20.0,
        score,
    )
    truth, sizes = oracle(call, grad_out, grad_lse)
    by_group = [truth[name].unflatten(1, (2, 2)).sum(2) for name in ("grad_key", "grad_value")]
    expected = (truth["out"], truth["lse"], truth["grad_query"], *by_group)
    names = ("out", "lse", "grad_query", "grad_key", "grad_value")
    for name, x, y in zip(names, (out, lse, *found), expected, strict=True):
        limit = 2 * CERTIFIED[torch.float64] * sizes[name]  # sums of two heads
        torch.testing.assert_close(x, y, rtol=0.0, atol=limit, msg=name)


@pytest.mark.parametrize("score", SCORES[CPU])
@pytest.mark.parametrize(("heads", "n_q", "n_k"), [(1, 9000, 7000), (3, 700, 900), (16, 65, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [3.0, 1000.0])
def test_bitwise_equal_for_any_number_of_threads(
    heads: int, n_q: int, n_k: int, dtype: torch.dtype, scale: float, score: str
) -> None:
    query, key, value, grad_out = (
        torch.randn(heads, n, width).to(dtype)
        for n, width in ((n_q, 1), (n_k, 1), (n_k, 7), (n_q, 7))
    )
    call = Biased(query, key, value, torch.randn(heads, n_k).to(dtype), None, scale, score)
    grad_lse = torch.randn(heads, n_q).to(dtype)

    def bits(threads: int) -> dict[str, Tensor]:
        torch.set_num_threads(threads)
        return run(call, grad_out, grad_lse, CPU)

    expected = bits(1)
    for threads in (2, 3, 7):
        for name, x in bits(threads).items():
            assert torch.equal(x, expected[name]), f"{name} with {threads} threads"


# ---- the reference alone ----


@pytest.mark.parametrize("score", ["dot", "gaussian"])
def test_long_heads(score: str, no_direct: None) -> None:
    """20,000 keys, of which blocks see few; some queries are compared."""
    case = Case("normal", "normal 10", 2, 20_000, 20_000)
    call, _, _ = draw(case, score, torch.float64)
    out = boltzattn.attention(
        call.query,
        call.key,
        call.value,
        key_bias=call.key_bias,
        scale=call.scale,
        score=score,
        **REFERENCE.ask,
    )
    some = call._replace(query=call.query[:, ::997])
    assert relative_error(out[:, ::997], some) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("server", [REFERENCE, CPU], ids=str)
def test_keys_far_from_zero(server: Server) -> None:
    """Only differences of keys move weights, so a common offset costs no digits."""
    call, _, _ = draw(Case("uniform", "normal", 2, 100, 200), "dot", torch.float64)
    call = call._replace(key=call.key + 1e6)
    problem = problem_of(call)
    if server == REFERENCE:
        (one,) = one_by_one(problem)
        certificate, out = envelope_head(one).at_nodes.certificate, envelope_head(one).forward()[0]
    else:
        certificate = float(torch.ops.boltzattn.cpu_transform_report(*problem)[0, 1])
        out = torch.ops.boltzattn.cpu_transform_forward(*problem)[0][0]
    near = call._replace(key=call.key - 1e6)  # exact
    assert relative_error(out[None], near) <= certificate <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("server", [REFERENCE, CPU], ids=str)
@pytest.mark.parametrize("name", ["value", "grad_out"])
def test_nan_reaches_what_has_no_weight(name: str, server: Server) -> None:
    """0 times NaN is NaN, as by the direct method."""
    tensors = [torch.randn(1, n, width).double() for n, width in ((200, 1), (5, 1), (5, 2))]
    if name == "grad_out":
        tensors = [torch.randn(1, 200, width).double() for width in (1, 1, 2)]
    call = Biased(tensors[0] * 1000, *tensors[1:], torch.zeros(1, tensors[1].shape[1]).double())
    call.key_bias[0, 3] = -1e5 if name == "value" else 0.0
    grad_out, grad_lse = torch.randn(1, 200, 2).double(), torch.randn(1, 200).double()
    (call.value if name == "value" else grad_out)[0, 3] = math.nan
    found = run(call, grad_out, grad_lse, server)
    expected = run(call, grad_out, grad_lse, Server("direct", server.backend))
    for key, x in found.items():
        assert torch.equal(x.isnan(), expected[key].isnan()), key


ODD = {
    "nan query": ("query", math.nan),
    "inf key": ("key", math.inf),
    "nan value": ("value", math.nan),
    "nan bias": ("key_bias", math.nan),
    "inf bias": ("key_bias", math.inf),
    "nan gradient": ("grad_out", math.nan),
    "huge query": ("query", 1e12),
    "huge value": ("value", 1e305),
}


@pytest.mark.parametrize("score", ["dot", "gaussian"])
@pytest.mark.parametrize("odd", ODD)
def test_what_it_cannot_do_is_done_directly(odd: str, score: str) -> None:
    """Head by head: of three, the second."""
    call, grad_out, grad_lse = some_heads(score, torch.float64)
    call = call._replace(scale=1000.0)
    name, number = ODD[odd]
    tensors = {**call._asdict(), "grad_out": grad_out}
    tensors[name] = tensors[name].clone()
    tensors[name][(1, 5, 0)[: tensors[name].ndim]] = number
    grad_out = tensors.pop("grad_out")
    call = Biased(**tensors)
    second = {name: getattr(call, name)[1:2] for name in call.names}
    found = run(call, grad_out, grad_lse, REFERENCE)
    expected = run(
        call._replace(**second), grad_out[1:2], grad_lse[1:2], Server("direct", "reference")
    )
    for name, x in found.items():
        if name.startswith("grad") or odd != "nan gradient":
            torch.testing.assert_close(
                x[1:2], expected[name], rtol=0.0, atol=0.0, equal_nan=True, msg=name
            )
        assert x[0].isfinite().all(), name


@pytest.mark.parametrize("score", ["dot", "gaussian"])
@pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0), (5, 4)])
def test_nothing_to_attend_to(n_q: int, n_k: int, score: str) -> None:
    sizes = ((n_q, 1), (n_k, 1), (n_k, 3))
    call = Biased(
        *(torch.randn(1, *size) for size in sizes),
        torch.full((1, n_k), -math.inf),
        None,
        1.0,
        score,
    )
    found = run(call, torch.randn(1, n_q, 3), torch.randn(1, n_q), REFERENCE)
    assert (found.pop("lse") == -math.inf).all()
    assert all((x == 0).all() for x in found.values())
