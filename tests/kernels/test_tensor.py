"""Heads of rank 2 to 4 by the transform: tensor panels.

`test_scores` and the fuzzer call all backends with ordinary numbers. Here queries, keys, biases and
temperatures are the awkward ones, for the reference and for the C++ of the CPU, which is told to
transform heads that `direct` would compute faster.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import boltzattn
import numpy as np
import pytest
import torch
from biased import Biased, assert_biased, run
from boltzattn.problem import Problem
from boltzattn.reference import tensor
from boltzattn.transform import tensor as layouts
from boltzattn.transform.tolerances import TOLERANCE
from covering import pairwise
from errors import CERTIFIED
from oracle import largest
from servers import Server, instruction_set, instruction_sets, transform_budget
from torch import Tensor

REFERENCE, CPU = Server("transform", "reference"), Server("transform", "cpu")
BOTH = (REFERENCE, CPU)


@pytest.fixture(autouse=True)
def _transformed() -> Iterator[None]:
    with transform_budget(3e9):
        yield


def _normal(n: int, rank: int) -> Tensor:
    return torch.randn(n, rank, dtype=torch.float64)


def _correlated(n: int, rank: int) -> Tensor:
    return _normal(n, 1) + 0.03 * _normal(n, rank)


def _circle(n: int, rank: int) -> Tensor:
    x = _normal(n, rank)
    return x / x.norm(dim=1, keepdim=True)


def _clusters(n: int, rank: int) -> Tensor:
    return _normal(5, rank)[torch.randint(5, (n,))] + 1e-3 * _normal(n, rank)


def _heavy(n: int, rank: int) -> Tensor:
    spread = torch.distributions.Chi2(3.0).sample((n, 1)).double() / 3
    return _normal(n, rank) / spread.sqrt()


def _outlier(n: int, rank: int) -> Tensor:
    x = _normal(n, rank)
    x[n // 2] *= 30
    return x


TOKENS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": _normal,
    "correlated": _correlated,
    "circle": _circle,
    "clusters": _clusters,
    "heavy tails": _heavy,
    "grid": lambda n, rank: torch.randint(-4, 5, (n, rank)).double(),
    "two points": lambda n, rank: 0.5 + (torch.rand(n, 1) < 0.5).double().expand(n, rank),
    "one far": _outlier,
    "one place": lambda n, rank: torch.full((n, rank), 0.7, dtype=torch.float64),
    "on a line": lambda n, rank: _normal(n, 1) * torch.arange(1.0, rank + 1),
    "far from 0": lambda n, rank: _normal(n, rank) + 30,
}
BIASES: dict[str, Callable[[int], Tensor | None]] = {
    "none": lambda n: None,
    "normal": lambda n: torch.randn(n, dtype=torch.float64),
    "normal 30": lambda n: 30 * torch.randn(n, dtype=torch.float64),
    "a third hidden": lambda n: torch.where(torch.arange(n) % 3 == 1, -math.inf, 0.0).double(),
}


class Case(NamedTuple):
    queries: str
    keys: str
    bias: str
    rank: int
    product: float  # B: the largest range of the logits along an axis, about
    score: str
    n_q: int
    n_k: int
    causal: bool = False

    def __str__(self) -> str:
        return "-".join(str(x).replace(" ", "_") for x in self)


PRODUCTS = {2: (0.1, 5.0, 20.0, 60.0, 200.0), 3: (0.1, 2.0, 5.0), 4: (0.1, 1.0)}


def _cases() -> list[Case]:
    rows = pairwise(
        {
            "queries": tuple(TOKENS),
            "keys": tuple(TOKENS),
            "bias": tuple(BIASES),
            "rank": (2, 2, 3, 4),
            "product": range(5),
            "score": ("dot", "gaussian"),
            "n_q": (1, 2, 63, 257),
            "n_k": (1, 2, 65, 300),
            "causal": (False, True),
        }
    )
    found = []
    for row in rows:
        products = PRODUCTS[row["rank"]]
        found.append(Case(**{**row, "product": products[row["product"] % len(products)]}))
    return list(dict.fromkeys(found))


CASES = _cases()


def _call(case: Case, dtype: torch.dtype, dv: int = 5) -> tuple[Biased, Tensor, Tensor]:
    torch.manual_seed(zlib.crc32(str(case).encode()))
    q, k = TOKENS[case.queries](case.n_q, case.rank), TOKENS[case.keys](case.n_k, case.rank)

    def spread(x: Tensor) -> float:
        if len(x) == 0:
            return 1.0
        return max(float((x.amax(0) - x.amin(0)).max()), 1e-3 * float(x.abs().max()), 1e-9)

    if case.score == "gaussian":  # B is the square of the range in bandwidths, over 2
        factor = math.sqrt(2 * case.product) / max(spread(q), spread(k))
        q, k = q * factor, (k + q.mean(0) - k.mean(0)) * factor
    else:
        factor = math.sqrt(2 * case.product / (spread(q) * spread(k)))
        q, k = q * factor, k * factor
    bias = BIASES[case.bias](case.n_k)
    call = Biased(q, k, torch.randn(case.n_k, dv).double(), bias, score=case.score)
    call = call._replace(is_causal=case.causal).to(dtype)
    return call, torch.randn(case.n_q, dv).to(dtype), torch.randn(case.n_q).to(dtype)


@pytest.mark.parametrize("server", BOTH, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_awkward_heads(case: Case, server: Server) -> None:
    assert_biased(*_call(case, torch.float32), server)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    assert_biased(*_call(case, dtype), CPU)


@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize("case", CASES[::9], ids=str)
def test_instruction_sets(case: Case, name: str) -> None:
    with instruction_set(name):
        assert_biased(*_call(case, torch.float32, dv=65), CPU)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dv", [1, 2, 7, 8, 63, 65, 257, 300])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_widths_of_values(rank: int, dv: int, causal: bool) -> None:
    case = Case("normal", "normal", "normal", rank, PRODUCTS[rank][1], "dot", 130, 97, causal)
    assert_biased(*_call(case, torch.float32, dv), CPU)


@pytest.mark.parametrize("n", [1, 47, 48, 49, 511, 513, 1025, 3000])
def test_sizes_around_tiles_and_segments(n: int) -> None:
    case = Case("normal", "normal", "none", 2, 20.0, "dot", n, 3001 - n)
    assert_biased(*_call(case, torch.float32), CPU)


@pytest.mark.parametrize("server", BOTH, ids=str)
@pytest.mark.parametrize(
    ("n_q", "n_k"), [(0, 5), (5, 0), (64, 64), (64, 200), (200, 64), (700, 650)]
)
def test_causal_sizes_around_chunks(n_q: int, n_k: int, server: Server) -> None:
    case = Case("normal", "normal", "normal", 2, 5.0, "dot", n_q, n_k, causal=True)
    assert_biased(*_call(case, torch.float32), server)


@pytest.mark.parametrize("server", BOTH, ids=str)
@pytest.mark.parametrize("order", ["rising", "falling", "inner first", "a late outlier"])
def test_prefixes_of_keys(order: str, server: Server) -> None:
    """One layout serves prefixes that are far smaller than the whole."""
    call, g, h = _call(
        Case("normal", "normal", "none", 2, 40.0, "dot", 500, 500, True), torch.float32
    )
    by = {"rising": call.key[:, 0], "falling": -call.key[:, 0], "inner first": call.key.norm(dim=1)}
    if order in by:
        call = call._replace(key=call.key[by[order].argsort()].contiguous())
    else:
        call.key[450] *= 3.0
    assert_biased(call, g, h, server)


@pytest.mark.parametrize("steps", ["rising", "falling"])
def test_biases_that_change_from_chunk_to_chunk(steps: str) -> None:
    """Sums over earlier keys must neither overflow nor vanish beside later ones."""
    call, g, h = _call(
        Case("normal", "normal", "none", 2, 5.0, "dot", 600, 600, True), torch.float32
    )
    bias = torch.linspace(0.0, 3000.0, 600)
    call = call._replace(key_bias=bias if steps == "rising" else bias.flip(0))
    assert_biased(call, g, h, CPU)


def test_a_causal_call_has_chunks() -> None:
    """The tests above would prove little if all of a head went pair by pair."""
    q, k, v = torch.randn(1, 700, 2), torch.randn(1, 700, 2), torch.randn(1, 700, 64)
    report = torch.ops.boltzattn.cpu_transform_report
    found = report(q, k, v, None, None, None, None, 1.0, 0.0, True, False)[0].tolist()
    head = layouts.TensorReport.of(found, 2)
    assert head.served
    assert head.chunk <= 192


@pytest.mark.parametrize("causal", [False, True])
def test_hidden_keys_do_not_count_whatever_they_hold(causal: bool) -> None:
    case = Case("normal", "normal", "none", 2, 20.0, "dot", 90, 120, causal)
    call, g, _ = _call(case, torch.float32)
    hidden = torch.arange(120) % 4 == 2
    bad = call._replace(
        key=call.key.masked_fill(hidden[:, None], math.nan),
        value=call.value.masked_fill(hidden[:, None], math.inf),
    )
    found = []
    for one in (call, bad):
        inputs = [x.clone().requires_grad_() for x in (one.query, one.key, one.value)]
        out = boltzattn.attention(
            *inputs, key_padding_mask=hidden, scale=1.0, is_causal=causal, **CPU.ask
        )
        found.append((out, *torch.autograd.grad(out, inputs, g)))
    for plain, other in zip(*found, strict=True):
        assert torch.equal(plain, other)
    for of_keys in found[0][2:]:
        assert (of_keys[hidden] == 0).all()


@pytest.mark.parametrize("server", BOTH, ids=str)
def test_causal_rows_that_see_no_key(server: Server) -> None:
    """The first 150 keys are hidden, which is more than a chunk."""
    call, g, h = _call(
        Case("normal", "normal", "none", 2, 5.0, "dot", 400, 400, True), torch.float32
    )
    bias = torch.where(torch.arange(400) < 150, -math.inf, 0.0)
    found = assert_biased(call._replace(key_bias=bias), g, h, server)
    assert (found["out"][:150] == 0).all()
    assert (found["lse"][:150] == -math.inf).all()


def test_no_visible_key() -> None:
    q, k, v = torch.randn(5, 2), torch.randn(7, 2), torch.randn(7, 3)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = boltzattn.attention(
        *inputs, key_padding_mask=torch.ones(7, dtype=torch.bool), return_lse=True, **CPU.ask
    )
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("what", ["query", "key", "value", "key_bias", "grad"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_numbers_that_are_not_finite_are_those_of_direct(
    causal: bool, what: str, number: float
) -> None:
    n = 300 if causal else 40
    case = Case("normal", "normal", "normal", 2, 5.0, "dot", n, n + 10, causal)
    call, g, h = _call(case, torch.float32)
    if what == "grad":
        g[3, 1] = number
    else:
        getattr(call, what).flatten()[7] = number
    transformed, direct = (run(call, g, h, Server(m, "cpu")) for m in ("transform", "direct"))
    for name, x in transformed.items():
        assert torch.equal(x, direct[name]) or torch.equal(x.isnan(), direct[name].isnan()), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
def test_threads_do_not_change_bits(rank: int, causal: bool) -> None:
    case = Case("normal", "normal", "normal", rank, 5.0, "dot", 3000, 2500, causal)
    call, g, h = _call(case, torch.float32, dv=9)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append(run(call, g, h, CPU))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for name, x in found[0].items():
            assert torch.equal(x, other[name]), name


@pytest.mark.parametrize("causal", [False, True])
def test_heads_with_any_strides(causal: bool) -> None:
    q, k = torch.randn(2, 300, 3, 2).transpose(1, 2), torch.randn(1, 3, 2, 300).transpose(-1, -2)
    v = torch.randn(2, 3, 300, 12)[..., ::2]
    many = boltzattn.attention(q, k.expand(2, -1, -1, -1), v, is_causal=causal, **CPU.ask)
    for b in range(2):
        for h in range(3):
            one = boltzattn.attention(
                *(x.contiguous() for x in (q[b, h], k[0, h], v[b, h])),
                is_causal=causal,
                **CPU.ask,
            )
            torch.testing.assert_close(many[b, h], one, rtol=0, atol=0)


def test_moving_keys_moves_only_lse() -> None:
    call, *_ = _call(Case("normal", "normal", "none", 2, 20.0, "dot", 100, 400), torch.float64)
    moved = call.key + torch.tensor([3.0, -2.0], dtype=torch.float64)
    (a, x), (b, y) = (
        boltzattn.attention(call.query, k, call.value, scale=1.0, return_lse=True, **CPU.ask)
        for k in (call.key, moved)
    )
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    shift = call.query @ torch.tensor([3.0, -2.0], dtype=torch.float64)
    torch.testing.assert_close(x + shift, y, rtol=0, atol=1e-11)


def test_a_rank_two_head_of_rank_one() -> None:
    """A second coordinate of zeros changes nothing."""
    q, k, v = torch.randn(500, 1), torch.randn(600, 1), torch.randn(600, 4)
    wide = [torch.cat([x, torch.zeros_like(x)], 1) for x in (q, k)]
    a = boltzattn.attention(q, k, v, scale=2.0, **CPU.ask)
    b = boltzattn.attention(*wide, v, scale=2.0, **CPU.ask)
    torch.testing.assert_close(a, b, rtol=0, atol=CERTIFIED[torch.float32] * largest(v))


# ---- layouts ----


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_kappa_is_what_it_says(dtype: torch.dtype) -> None:
    """Interpolating exp(kappa x) errs by at most `error` of it, and by nearly that."""
    error, reach = layouts.TENSOR_PRECISION[dtype]
    x = np.linspace(-1, 1, 401, dtype=np.longdouble)
    for nodes, kappa in reach.items():
        node = np.cos((2 * np.arange(nodes, dtype=np.longdouble) + 1) * np.pi / (2 * nodes))
        weight = np.ones((len(x), nodes), dtype=np.longdouble)
        for a in range(nodes):
            for b in range(nodes):
                if a != b:
                    weight[:, a] *= (x - node[b]) / (node[a] - node[b])
        worst = np.abs(weight @ np.exp(kappa * node) * np.exp(-kappa * x) - 1).max()
        assert 0.8 * error < worst <= 1.02 * error, (nodes, float(worst))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_layouts_of_cpp_are_those_of_python(rank: int, dtype: torch.dtype) -> None:
    from boltzattn import _C

    name = str(dtype).removeprefix("torch.")
    for product in (0.0, 0.3, 4.0, 11.0, 40.0, 200.0):
        t, s = [product + 0.1 * a for a in range(rank)], [1.0] * rank
        sizes = (
            (100, 4, 0),
            (30_000, 64, 0),
            (2_000_000, 64, 0),
            (300, 4, 150),
            (10**6, 64, 10**5),
        )
        for tokens, dv, rows in sizes:
            found = _C.tensor_layout(name, t, s, tokens, dv, rows)
            layout = layouts.choose_tensor_layout(dtype, t, s, tokens, dv, rows)
            if layout is None:
                assert found["nodes"] == 0
                continue
            assert (found["nodes"], found["kappa"]) == layout[:2]
            assert found["query_panels"] == [axis.panels for axis in layout.query]
            assert found["key_panels"] == [axis.panels for axis in layout.key]
            assert found["cost"] == pytest.approx(layout.cost, rel=1e-12)
            assert found["chunk"] == layout.chunk


@pytest.mark.parametrize("precision", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("rank", [2, 3])
def test_bound_of_every_pair(rank: int, precision: float) -> None:
    """Weights of pairs, with panels so wide that interpolation errors show, obey the bound."""
    torch.manual_seed(rank)
    reach = 0.0
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)
    for kappa in torch.linspace(0.05, 3, 60, dtype=torch.float64).tolist():
        weight = layouts_weights(6, x)
        node = torch.cos((2 * torch.arange(6).double() + 1) * math.pi / 12)
        if float((weight @ (kappa * node).exp() * (-kappa * x).exp() - 1).abs().max()) > precision:
            break
        reach = kappa
    for family in TOKENS:
        t, s = TOKENS[family](40, rank), TOKENS[family](50, rank)
        t = t * (6.0 / (t.abs().max() * s.abs().max() + 1e-9))
        at = tensor.find_frame(t, s, torch.zeros(50, dtype=torch.float64))
        sides = list(zip(at.t_most, at.s_most, strict=True))
        axes = tuple(layouts.tensor_axis(a, b, reach, 6) for a, b in sides)
        key_axes = tuple(layouts.tensor_axis(b, a, reach, 6) for a, b in sides)
        query = problem_of(t, s)
        head = tensor.TensorHead(
            query,
            torch.arange(50),
            at,
            torch.zeros(rank, dtype=torch.float64),
            layouts.TensorLayout(6, reach, axes, key_axes, 0.0),
        )
        head.skip = 200.0
        out, lse = head.forward()  # values are the identity, so out is the weights
        exact = (t @ s.T).softmax(-1)
        bound = (1 + precision) ** (2 * rank) - 1
        pairs = out * (lse - (t @ s.T).logsumexp(-1)).exp()[:, None]
        assert float(((pairs - exact).abs() / exact)[exact > 1e-9].max()) <= bound


def layouts_weights(nodes: int, x: Tensor) -> Tensor:
    from boltzattn.transform.layout import lagrange_weights

    return lagrange_weights(nodes, x)


def problem_of(t: Tensor, s: Tensor) -> Problem:
    value = torch.eye(len(s), dtype=torch.float64)
    return Problem(t, s, value, None, None, None, None, 1.0, 0.0, False, False)


# ---- tokens apart ----


@pytest.mark.parametrize("score", ["dot", "gaussian"])
@pytest.mark.parametrize("queries", ["heavy tails", "one far", "normal"])
@pytest.mark.parametrize("keys", ["heavy tails", "one far"])
def test_far_tokens_go_apart(queries: str, keys: str, score: str) -> None:
    """One key 30 times as far out would multiply the core; without it few panels are enough."""
    case = Case(queries, keys, "normal", 2, 1.0, score, 2100, 2300)
    call, g, h = _call(case, torch.float32, dv=3)
    far = 60.0 if score == "dot" else 8.0  # logits of the bulk range over about 20
    call = call._replace(query=call.query * far**0.5, key=call.key * far**0.5)
    report = torch.ops.boltzattn.cpu_transform_report(
        call.query[None], call.key[None], call.value[None], None, call.key_bias[None], None, None,
        1.0, 0.0, False, score == "gaussian",
    )  # fmt: skip
    assert report[0, 0] == 1.0
    assert_biased(call, g, h, CPU)


def test_far_tokens_do_not_decide_the_cost() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4096, 2), torch.randn(1, 4096, 2), torch.randn(1, 4096, 64)
    rest = (None, None, None, None, 1.0, 0.0, False, False)
    report = torch.ops.boltzattn.cpu_transform_report
    plain = report(q, k, v, *rest)[0]
    k[0, 17] *= 30.0
    far = report(q, k, v, *rest)[0]
    assert far[0] == plain[0] == 1.0
    assert far[5] <= 2 * plain[5], "panels of the keys"
