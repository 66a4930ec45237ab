"""Scans with key biases, slopes and Gaussian scores, with all gradients, against long double."""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import boltzattn
import pytest
import torch
from biased import Biased, assert_biased, oracle, run
from covering import pairwise
from errors import assert_accurate
from servers import Server, instruction_set, instruction_sets
from torch import Tensor

SCAN = Server("transform", "cpu")
DIRECT = Server("direct", "cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SLOPES = 2.0 ** -torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)


class Case(NamedTuple):
    n_q: int
    n_k: int
    dtype: torch.dtype
    score: str
    keys: str
    product: float  # max|t| times the range of the keys
    key_bias: str
    slopes: str
    dv: int = 5

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        words = (self.n_q, self.n_k, dtype, self.score, self.keys, self.product)
        return "-".join(map(str, (*words, self.key_bias, self.slopes)))


def _keys(family: str, n: int, draw: torch.Generator) -> Tensor:
    x = torch.randn(n, generator=draw, dtype=torch.float64)
    if family == "two":
        return (x > 0).double()
    if family == "constant":
        return torch.full((n,), 0.75, dtype=torch.float64)
    if family == "heavy":
        return x / torch.randn(n, generator=draw, dtype=torch.float64)
    if family == "rising":
        return torch.linspace(-1.0, 1.0, n, dtype=torch.float64)
    if family == "needle":
        return (x * 1e-3).index_fill(0, torch.tensor(n // 2), 1.0)
    return x + (100.0 if family == "offset" else 0.0)


def _biases(kind: str, n: int, draw: torch.Generator) -> Tensor | None:
    x = torch.randn(4, n, generator=draw, dtype=torch.float64)
    token = torch.arange(n)
    return {
        "none": None,
        "small": x,
        "large": 40.0 * x,
        "rising": 0.5 * token.expand(4, n),
        "falling": -0.5 * token.expand(4, n),
        "needle": x.masked_fill(token == n // 3, 60.0),
        "hidden prefix": x.masked_fill(token < 130, -math.inf),
        "some hidden": x.masked_fill(x > 0.5, -math.inf),
        "all hidden": x.masked_fill(token >= 0, -math.inf),
    }[kind]


def make(case: Case) -> tuple[Biased, Tensor, Tensor]:
    """Four heads with the same queries and keys, and other biases, slopes and values."""
    draw = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(case.dtype)

    key = _keys(case.keys, case.n_k, draw)
    extent = (key.max() - key.min()).item() or 1.0
    query = torch.rand(case.n_q, generator=draw, dtype=torch.float64) * 2 - 1
    if case.score == "gaussian":
        scale = 2 * case.product / extent**2
        query = query * extent / 2 + (key.max() + key.min()) / 2
    else:
        scale, query = 1.0, query * case.product / extent
    slopes = {"none": None, "alibi": SLOPES, "negative": -SLOPES / 8, "zero": 0 * SLOPES}
    bias = _biases(case.key_bias, case.n_k, draw)
    call = Biased(
        query[:, None].expand(4, -1, -1),
        key[:, None].expand(4, -1, -1),
        normal(4, case.n_k, case.dv),
        bias,
        slopes[case.slopes],
        scale,
        case.score,
        is_causal=True,
    )
    return call.to(case.dtype), normal(4, case.n_q, case.dv), normal(4, case.n_q)


SIZES = (1, 2, 63, 65, 257, 1000)
CASES = [
    Case(**row)
    for row in pairwise(
        {
            "n_q": SIZES,
            "n_k": SIZES,
            "dtype": DTYPES,
            "score": ("dot", "gaussian"),
            "keys": ("normal", "two", "constant", "heavy", "rising", "needle", "offset"),
            "product": (0.1, 3.0, 20.0, 54.0, 150.0),
            "key_bias": (
                "none",
                "small",
                "large",
                "rising",
                "falling",
                "needle",
                "hidden prefix",
                "some hidden",
                "all hidden",
            ),
            "slopes": ("none", "alibi", "negative", "zero"),
        }
    )
]
TYPICAL = Case(700, 700, torch.float32, "dot", "normal", 20.0, "small", "alibi")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case: Case) -> None:
    assert_biased(*make(case), SCAN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", ["dot", "gaussian"])
@pytest.mark.parametrize("keys", ["normal", "needle", "heavy", "rising"])
@pytest.mark.parametrize("product", [0.1, 150.0])
def test_families_with_bias_and_slopes(
    product: float, keys: str, score: str, dtype: torch.dtype
) -> None:
    case = TYPICAL._replace(dtype=dtype, score=score, keys=keys, product=product)
    assert_biased(*make(case), SCAN)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dv", [1, 64, 300])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_every_instruction_set_and_blocks_of_columns(dtype: torch.dtype, dv: int, isa: str) -> None:
    with instruction_set(isa):
        assert_biased(*make(TYPICAL._replace(n_q=200, n_k=200, dtype=dtype, dv=dv)), SCAN)


@pytest.mark.parametrize("score", ["dot", "gaussian"])
def test_prefixes(score: str) -> None:
    """Rows do not depend on tokens after them."""
    call, *grads = make(TYPICAL._replace(n_q=300, n_k=300, dtype=torch.float64, score=score))
    truth, sizes = oracle(call, *grads)
    for m in (1, 2, 63, 64, 65, 129, 200):
        tokens = ("query", "key", "value")
        part = call._replace(**{name: getattr(call, name)[:, :m] for name in tokens})
        part = part._replace(key_bias=call.key_bias[:, :m])
        found = run(part, *(x[:, :m] for x in grads), SCAN)
        names = ("out", "lse", "grad_query")
        assert_accurate(
            {name: found[name] for name in names},
            {name: truth[name][:, :m] for name in names},
            (),
            magnitudes=sizes,
            method="transform",
        )


def test_threads_change_no_bit() -> None:
    call, *grads = make(TYPICAL._replace(score="gaussian"))
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(run(call, *grads, SCAN))
    finally:
        torch.set_num_threads(threads)
    for name, x in results[0].items():
        assert torch.equal(x, results[1][name]), name


def _same_bits(call: Biased, *grads: Tensor) -> bool:
    """Whether a call by the scan has the results of `direct`."""
    scan, direct = run(call, *grads, SCAN), run(call, *grads, DIRECT)
    return all(x.equal(direct[name]) for name, x in scan.items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("product", [20.0, 150.0])
def test_what_the_scan_serves(product: float, dtype: torch.dtype) -> None:
    assert not _same_bits(*make(TYPICAL._replace(product=product, dtype=dtype)))


def test_what_goes_to_direct() -> None:
    assert _same_bits(*make(TYPICAL._replace(product=400.0)))
    for name in ("query", "key", "value", "key_bias"):
        call, *grads = make(TYPICAL._replace(n_q=200, n_k=200))
        spoiled = getattr(call, name).clone()
        spoiled[:, 150] = math.nan
        scan = run(call._replace(**{name: spoiled}), *grads, SCAN)
        direct = run(call._replace(**{name: spoiled}), *grads, DIRECT)
        for result, x in scan.items():
            assert x.isnan().equal(direct[result].isnan()), (name, result)
            # With NaN in values, the order of sums of `direct` depends on the rows of a task.
            if name != "value":
                assert x.nan_to_num().equal(direct[result].nan_to_num()), (name, result)
        assert scan["out"][:, :150].isfinite().all(), name


def test_strides_and_grouped_heads() -> None:
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(130, 2, 6, 2, generator=draw)[..., :1].permute(1, 2, 0, 3)
    k = torch.randn(2, 130, 3, 1, generator=draw).transpose(1, 2)
    v = torch.randn(2, 130, 3, 14, generator=draw).transpose(1, 2)[..., ::2]
    options: dict[str, Any] = {
        "key_bias": torch.randn(130, 6, generator=draw).T,
        "alibi_slopes": torch.rand(6, 2, generator=draw)[:, 0],
        "is_causal": True,
        "enable_gqa": True,
    }
    strided = boltzattn.attention(q, k, v, **options, **SCAN.ask)
    dense = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(strided, boltzattn.attention(*dense, **options, **SCAN.ask))


def test_gradient_of_slopes_of_a_long_sequence() -> None:
    """Positions of 20,000 tokens do not cost digits: distances are measured where they are used."""
    n = 20_000
    case = TYPICAL._replace(n_q=n, n_k=n, key_bias="none", dv=2)
    call, *grads = make(case)
    pick = [0, 3]
    names = call.names
    call = call._replace(**{name: getattr(call, name)[pick] for name in names})
    grads = [x[pick] for x in grads]
    wide = run(call.to(torch.float64), *(x.double() for x in grads), DIRECT)
    keep = ("grad_alibi_slopes", "grad_query", "out")
    direct, scan = (run(call, *grads, server) for server in (DIRECT, SCAN))
    assert_accurate(
        {name: scan[name] for name in keep},
        {name: wide[name] for name in keep},
        [direct],
        method="transform",
    )


def test_explain_says_what_the_time_depends_on() -> None:
    q, k, v = torch.randn(8, 4096, 1), torch.randn(8, 4096, 1), torch.randn(8, 4096, 16)
    text = boltzattn.explain(q, k, v, alibi_slopes=torch.rand(8), is_causal=True)
    assert text.startswith("method transform, backend cpu")
    assert "max|scale q| (max k - min k)" in text
    assert "max|scale q|" not in boltzattn.explain(q, k, v, is_causal=True)
