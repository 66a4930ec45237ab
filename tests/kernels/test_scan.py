"""Scans: the layout and its bounds, and causal attention of rank 1 against extended precision."""

from __future__ import annotations

import itertools
import math
from typing import Any

import boltzattn
import numpy as np
import pytest
import torch
from boltzattn import _C
from boltzattn.dispatch.extension import extension
from boltzattn.transform.layout import chebyshev_nodes, lagrange_weights
from boltzattn.transform.scan_layout import (
    LARGEST_KAPPA,
    SCAN_PRECISION,
    make_scan_layout,
    outer_nodes,
    outer_weights,
    scan_error,
    scan_kappa,
    scan_layout_of,
    scan_ratio,
)
from check import assert_attention, run
from errors import assert_accurate
from oracle import Result, eagers, magnitudes
from servers import Server
from torch import Tensor

CPU = Server("transform", "cpu")
REFERENCE = Server("transform", "reference")
SERVERS = pytest.mark.parametrize("server", [CPU, REFERENCE], ids=str)


# ---- the layout ----


@pytest.mark.parametrize("dtype", list(SCAN_PRECISION))
@pytest.mark.parametrize("keys", [1, 700, 10**5, 10**7])
@pytest.mark.parametrize("product", [0.0, 1.0, 54.0, 1e5, 1e12])
def test_compiled_layout_is_the_same(dtype: torch.dtype, keys: int, product: float) -> None:
    name = str(dtype).removeprefix("torch.")
    compiled = _C.scan_layout(name, 2.0, product / 2, keys)
    ours = make_scan_layout(dtype, 2.0, product / 2, keys)
    assert ours is not None
    assert (ours.nodes, ours.levels) == (compiled["nodes"], compiled["levels"])
    np.testing.assert_allclose(ours.edges, compiled["edges"], rtol=1e-13)
    found = ours.nodes_of_panels().flatten()
    np.testing.assert_allclose(found, compiled["positions"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("nodes", [8, 12, 16, 20])
@pytest.mark.parametrize("ratio", [1.5, 2.0, 2.5, 3.0, 3.5])
def test_error_on_an_outer_panel(nodes: int, ratio: float) -> None:
    """`scan_error` bounds the error for every gap, and is not idle."""
    place = torch.linspace(1 / ratio, 1, 201, dtype=torch.float64)
    basis = outer_weights(nodes, ratio, place)
    gaps = torch.cat([torch.zeros(1), torch.logspace(-2, 3, 400)]).double()
    at_nodes = (-outer_nodes(nodes, ratio) * gaps[:, None]).exp()
    exact = (-place * gaps[:, None]).exp()
    worst = float((at_nodes @ basis.T - exact).abs().max())
    bound = scan_error(nodes, ratio)
    assert worst <= bound + 4e-15
    assert bound <= 100 * worst + 4e-15


@pytest.mark.parametrize("dtype", list(SCAN_PRECISION))
@pytest.mark.parametrize("nodes", [12, 16, 24])
def test_error_on_the_central_panel(dtype: torch.dtype, nodes: int) -> None:
    """Relative to the smallest weight; the rest is the rounding of this test."""
    precision = SCAN_PRECISION[dtype]
    kappa = scan_kappa(precision, nodes)
    assert kappa <= LARGEST_KAPPA
    place = torch.linspace(-1, 1, 201, dtype=torch.float64)
    for gap in torch.linspace(-kappa, kappa, 41, dtype=torch.float64).tolist():
        exact = (place * gap).exp()
        found = lagrange_weights(nodes, place) @ (chebyshev_nodes(nodes) * gap).exp()
        assert float((found - exact).abs().max()) * math.exp(kappa) <= precision + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keys", [100, 10**4, 10**7])
def test_ratio_reaches_the_precision(dtype: torch.dtype, keys: int) -> None:
    precision = SCAN_PRECISION[dtype]
    for nodes in range(8, 33, 4):
        assert keys * scan_error(nodes, scan_ratio(precision, nodes, keys)) <= 1.01 * precision


@pytest.mark.parametrize("keys", [10**3, 10**5, 10**7])
@pytest.mark.parametrize("gap", [0.01, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_one_top_key_and_a_crowd(keys: int, gap: float) -> None:
    """Errors of all keys add up. The crowd is summed by its multiplicity."""
    layout = make_scan_layout(torch.float32, 54.0, 1.0, keys)
    assert layout is not None
    t = torch.linspace(-54.0, 54.0, 2001, dtype=torch.float64)
    panel, basis = layout.locate(t)
    node = layout.nodes_of_panels()
    above = layout.measured_from_high(torch.arange(layout.panels))[:, None]
    worst = 0.0
    for top in (1.0, 0.0):  # the lone key is the largest, or the smallest
        places = torch.tensor([top, 1.0 - gap if top else gap, 1.0 - top], dtype=torch.float64)
        count = torch.tensor([1.0, keys - 2.0, 1.0], dtype=torch.float64)
        values = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
        end = torch.where(above, 1.0, 0.0).double()
        end[0] = 0.5
        weight = (node[..., None] * (places - end[..., None])).exp() * count
        table = torch.stack([(weight * values).sum(-1), weight.sum(-1)], -1)
        read = torch.einsum("ip,ipd->id", basis, table[panel])
        exact = (t[:, None] * (places - t.sign().clamp(min=0)[:, None])).exp() * count
        truth = (exact * values).sum(1) / exact.sum(1)
        worst = max(worst, float((read[:, 0] / read[:, 1] - truth).abs().max()))
    assert worst <= 2 * SCAN_PRECISION[torch.float32]


# ---- attention ----

FAMILIES = ("gauss", "two-point", "grid", "rising", "falling", "cauchy", "needle", "late", "ladder")


def keys_of(family: str, heads: int, n: int) -> Tensor:
    normal = torch.randn(heads, n, dtype=torch.float64)
    if family == "two-point":
        return (normal > 0).double()
    if family == "grid":
        return (3 * normal).round()
    if family == "rising":
        return normal.sort(-1).values
    if family == "falling":
        return -normal.sort(-1).values
    if family == "cauchy":
        return normal / torch.randn(heads, n, dtype=torch.float64)
    if family in ("needle", "late"):
        keys = 1e-3 * normal
        keys[:, n // 3 if family == "needle" else n - 1] = 5.0
        return keys
    if family == "ladder":
        return (2.0 ** -torch.arange(n).clamp(max=40).double()).expand(heads, n).clone()
    return normal


def _central_error(nodes: int, kappa: float) -> float:
    """The error of exp(kappa x) on [-1, 1] in Chebyshev's nodes, by Bernstein's ellipses."""
    rhos = [1 + 0.05 * i for i in range(1, 400)]
    return min(4 / (r - 1) * r**-nodes * math.exp(kappa * (r + 1 / r) / 2) for r in rhos)


@pytest.mark.parametrize("product", [3.0, 54.0, 1e4])
@pytest.mark.parametrize("family", [*FAMILIES, "crowd"])
@pytest.mark.parametrize(("nodes", "most_equal"), [(8, 1), (16, 10**7)])
def test_bound_of_every_prefix(family: str, product: float, nodes: int, most_equal: int) -> None:
    """On panels so coarse that their errors show; some keys stand for up to 1e7 equal ones."""
    n, ratio = 96, 2.5
    torch.manual_seed(n)
    key = keys_of("gauss" if family == "crowd" else family, 1, n)[0]
    if family == "crowd":  # one top key, then one key after the other at every gap
        key = torch.cat([torch.ones(1), 1 - torch.logspace(-4, 0, n - 1)]).double()
    count = torch.ones(n, dtype=torch.float64)
    count[n // 4 :: n // 4] = most_equal
    value = 2 * torch.rand(n, dtype=torch.float64) - 1
    t_most = product / float(key.max() - key.min())
    levels = max(0, math.ceil(math.log(product / 4, ratio)))
    layout = scan_layout_of(t_most, nodes, levels, ratio)
    t = t_most * torch.cat([-torch.logspace(-4, 0, 40), torch.logspace(-4, 0, 40)]).double()
    panel, basis = layout.locate(t)
    high, low = key.cummax(0).values[:, None], key.cummin(0).values[:, None]
    is_high = layout.measured_from_high(torch.arange(layout.panels))
    end = torch.where(is_high, high, low)
    end[:, 0] = (0.5 * (high + low))[:, 0]
    seen = torch.ones(n, n, dtype=torch.float64).tril() * count
    sums = torch.stack([value, torch.ones_like(value)], -1)
    gap = torch.where(seen[..., None] > 0, key[:, None] - end[:, None], 0)  # [prefix, key, panel]
    at_node = (layout.nodes_of_panels() * gap[..., None]).exp() * seen[..., None, None]
    table = torch.einsum("ijpb,jd->ipbd", at_node, sums)
    found = torch.einsum("tb,itbd->itd", basis, table[:, panel])
    exact = torch.einsum("ijt,jd->itd", (gap[..., panel] * t).exp() * seen[..., None], sums)
    error = (found[..., 0] / found[..., 1] - exact[..., 0] / exact[..., 1]).abs()
    of_key = torch.full((layout.panels,), scan_error(nodes, ratio), dtype=torch.float64)
    of_key[0] = _central_error(nodes, layout.edges[0] * float(key.max() - key.min()) / 2)
    missing = seen.sum(1, keepdim=True) * of_key[panel]
    left = exact[..., 1] - missing
    assert (left > 0).double().mean() > 0.5  # else the bound says nothing
    bound = torch.where(left > 0, 2 * missing / left, math.inf)
    assert (error <= bound + 1e-12).all()
    if product > 10 and family in ("gauss", "rising", "falling", "grid", "crowd"):
        assert error.max() > 1e-11


def tensors(
    family: str, n_q: int, n_k: int, product: float, dtype: torch.dtype, dv: int = 5
) -> tuple[Tensor, ...]:
    """query, key, value, grad_out, grad_lse of two heads whose logits span `product`."""
    torch.manual_seed(n_q + n_k)
    key = keys_of(family, 2, n_k)
    query = torch.randn(2, n_q, dtype=torch.float64)
    extent = float(key.max() - key.min()) if n_k else 1.0
    query = query / max(query.abs().max().item() if n_q else 0.0, 1e-30) * product / (extent or 1.0)
    value, grad_out = torch.randn(2, n_k, dv), torch.randn(2, n_q, dv)
    grad_lse = torch.randn(2, n_q, dtype=torch.float64)
    found = (query[..., None], key[..., None], value, grad_out)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (*(x.to(dtype) for x in found), grad_lse.to(wide))


@SERVERS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("product", [1.0, 54.0, 1e4])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, product: float, dtype: torch.dtype, server: Server) -> None:
    assert_attention(server, *tensors(family, 300, 300, product, dtype), is_causal=True)


@SERVERS
@pytest.mark.parametrize("n_q", [0, 1, 2, 63, 64, 65, 129])
@pytest.mark.parametrize("n_k", [0, 1, 64, 65, 200])
def test_sizes(n_q: int, n_k: int, server: Server) -> None:
    """Query i sees keys 0 .. i, whatever their number."""
    assert_attention(server, *tensors("gauss", n_q, n_k, 30.0, torch.float32), is_causal=True)


@pytest.mark.parametrize("dv", [1, 3, 16, 64, 65, 257, 600])
def test_widths(dv: int) -> None:
    for dtype in (torch.float32, torch.float64):
        assert_attention(CPU, *tensors("gauss", 150, 150, 40.0, dtype, dv), is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", ["gauss", "rising", "falling", "late", "grid"])
def test_segments(family: str, dtype: torch.dtype) -> None:
    """A head that is long enough for several segments."""
    assert_attention(CPU, *tensors(family, 2300, 2300, 54.0, dtype), is_causal=True)


@pytest.mark.parametrize(("n_q", "n_k"), [(2500, 1100), (1100, 2500)])
def test_segments_of_a_rectangle(n_q: int, n_k: int) -> None:
    assert_attention(CPU, *tensors("gauss", n_q, n_k, 54.0, torch.float32), is_causal=True)


@SERVERS
@pytest.mark.parametrize("n", [65, 1500])
@pytest.mark.parametrize("kind", ["some", "start", "all", "additive"])
def test_key_padding(kind: str, n: int, server: Server) -> None:
    """Masked keys may hold anything, and their gradients are exactly zero."""
    query, key, value, grad_out, grad_lse = tensors("gauss", n, n, 54.0, torch.float32)
    mask = torch.rand(n) < 0.3
    if kind == "start":
        mask = torch.arange(n) < 200
    elif kind == "all":
        mask = torch.ones(n, dtype=torch.bool)
    call: dict[str, Any] = {"is_causal": True, "key_padding_mask": mask}
    if kind == "additive":
        call["key_padding_mask"] = torch.zeros(n).masked_fill(mask, -math.inf)
    clean = assert_attention(server, query, key, value, grad_out, grad_lse, **call)
    assert clean.grad_key[:, mask].eq(0).all()
    assert clean.grad_value[:, mask].eq(0).all()
    key[:, mask], value[:, mask] = math.nan, math.inf
    spoiled = run(server, query, key, value, grad_out, grad_lse, **call)
    for one, other in zip(clean, spoiled, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _extended(tensors: tuple[Tensor, ...]) -> Result:
    """Causal attention in long double, with differences of keys: exact for logits of any size."""
    query, key, value, grad_out, grad_lse = (
        x.numpy().astype(np.longdouble) if x.dtype == torch.float64 else x.double().numpy()
        for x in (x.double() for x in tensors)
    )
    q, k = query[..., 0], key[..., 0]
    n = q.shape[-1]
    high, low = np.maximum.accumulate(k, -1), np.minimum.accumulate(k, -1)
    top = np.where(q >= 0, high, low)
    gap = k[:, None, :] - top[..., None]
    seen = np.tril(np.ones((n, n), bool))
    weights = np.where(seen, np.exp(np.where(seen, q[..., None] * gap, 0)), 0)
    z = weights.sum(-1)
    weights /= z[..., None]
    by_value = grad_out @ np.swapaxes(value, -1, -2)
    at_top = np.take_along_axis(by_value, (gap == 0).argmax(-1)[..., None], -1)
    by_value = by_value - at_top
    by_value = by_value - (weights * by_value).sum(-1, keepdims=True)
    moved = weights * (by_value + grad_lse[..., None])
    found = (
        weights @ value,
        q * top + np.log(z),
        ((weights * by_value * gap).sum(-1) + grad_lse * ((weights * gap).sum(-1) + top))[
            ..., None
        ],
        (moved * q[..., None]).sum(-2)[..., None],
        np.swapaxes(weights, -1, -2) @ grad_out,
    )
    return Result(*(torch.from_numpy(x.astype(np.float64)) for x in found))


@SERVERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e10])
@pytest.mark.parametrize("family", ["equal", "two-point", "grid", "bf16"])
def test_large_logits_and_ties(
    family: str, size: float, dtype: torch.dtype, server: Server
) -> None:
    """Ties on both sides of every boundary; logits reach `size`."""
    query, key, *rest = tensors("gauss", 1200, 1200, 20.0, dtype)
    if family == "equal":
        query, key = torch.ones_like(query), torch.full_like(key, size)
    else:
        source = keys_of("gauss" if family == "bf16" else family, 2, 1200)[..., None]
        key = source.bfloat16().to(dtype) if family == "bf16" else source.to(dtype)
        query = (query / query.abs().max() * size / key.abs().max()).to(dtype)
    call = {"is_causal": True, "scale": 1.0}
    given = (query, key, *rest)
    actual = run(server, *given, **call)
    assert_accurate(
        actual._asdict(),
        _extended(given)._asdict(),
        eagers(*given, **call),
        magnitudes=magnitudes(*given, **call),
        method="transform",
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_saturated_rows(family: str) -> None:
    """A key of an earlier chunk takes all the weight: out is its value, bit for bit."""
    query, key, value, grad_out, _ = tensors(family, 200, 200, 1.0, torch.float32)
    query = torch.where(query >= 0, 1.0, -1.0) * 1e12
    found = run(CPU, query, key, value, grad_out, is_causal=True)
    for h, i in itertools.product(range(2), (70, 130, 199)):
        keys = key[h, : i + 1, 0]
        tops = (keys == (keys.max() if query[h, i] > 0 else keys.min())).nonzero()
        if len(tops) == 1 and int(tops) < 64:
            assert torch.equal(found.out[h, i], value[h, int(tops)])
    if family in ("gauss", "rising", "falling", "cauchy"):
        assert found.grad_query.abs().max() == 0
        assert found.grad_key.abs().max() == 0


def test_rows_before_a_bad_token_stay_clean() -> None:
    for server in (CPU, REFERENCE):
        query, key, value, grad_out, _ = tensors("gauss", 300, 300, 30.0, torch.float32)
        clean = run(server, query, key, value, grad_out, is_causal=True)
        for spoiled in (query, key, value):
            spoiled[:, 200] = math.nan
            found = run(server, query, key, value, grad_out, is_causal=True)
            torch.testing.assert_close(found.out[:, :200], clean.out[:, :200], rtol=1e-5, atol=1e-5)
            assert found.out[:, 200].isnan().all()
            spoiled[:, 200] = 0.0


def test_threads_and_heads_do_not_change_a_bit() -> None:
    given = tensors("gauss", 3000, 3000, 54.0, torch.float32, 64)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(run(CPU, *given, is_causal=True))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("isa", extension().supported_isas())
def test_every_instruction_set(isa: str) -> None:
    extension().force_isa(isa)
    try:
        for family in ("gauss", "late", "two-point"):
            for dtype in (torch.float32, torch.float64, torch.float16):
                assert_attention(CPU, *tensors(family, 300, 300, 54.0, dtype, 17), is_causal=True)
    finally:
        extension().force_isa(None)


def test_long_sequences_keep_their_digits() -> None:
    """fp32 tables would lose digits over 200,000 tokens; queries are checked one by one."""
    n = 200_000
    torch.manual_seed(0)
    query, key, value = 1.7 * torch.randn(n, 1), torch.randn(n, 1), torch.randn(n, 8)
    value[:, 0] += 3.0
    out = boltzattn.attention(query, key, value, is_causal=True, scale=1.0, **CPU.ask)
    for i in (n - 1, n - 77, n // 2, 40_000):
        weights = (query[i].double() * key[: i + 1].double()).softmax(0)
        truth = (weights * value[: i + 1].double()).sum(0)
        assert float((out[i] - truth).abs().max()) <= 1e-6 * float(value.abs().max())
