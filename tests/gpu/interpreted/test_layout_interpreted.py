"""The layout in Triton against those in Python and in C++: nodes, panels, places and weights."""

from __future__ import annotations

import math
import random

import pytest
import torch
import triton
import triton.language as tl
from boltzattn import _C
from boltzattn.problem import Problem
from boltzattn.transform import layout
from boltzattn.triton_kernels.launch import NODES
from boltzattn.triton_kernels.layout import (
    KEY_PANELS,
    QUERY_PANELS,
    key_nodes,
    lagrange_weights,
    load_axis,
    locate,
    query_nodes,
)
from boltzattn.triton_kernels.tolerances import PRECISION
from boltzattn.triton_kernels.transform_launch import find_layouts
from torch import Tensor

TOKENS = 64
# The same formulas by other libraries, and asinh and atanh by logarithms: some dozen roundings.
ROUNDING = 1e-13


@triton.jit
def probe_kernel(row, x, nodes, panel, place, weight, IS_KEY: tl.constexpr, COUNT: tl.constexpr):
    """All nodes of an axis, and where tokens x [64] lie on it."""
    node = tl.arange(0, COUNT)
    panels = tl.load(row + (KEY_PANELS if IS_KEY else QUERY_PANELS)).to(tl.int32)
    for k in range(0, panels):
        if IS_KEY:
            tl.store(nodes + k * COUNT + node, key_nodes(k, row, COUNT))
        else:
            tl.store(nodes + k * COUNT + node, query_nodes(k, row, COUNT))
    token = tl.arange(0, 64)
    found, at = locate(tl.load(x + token), load_axis(row, IS_KEY), IS_KEY)
    tl.store(panel + token, found)
    tl.store(place + token, at)
    to = weight + token[:, None] * COUNT + node[None, :]
    tl.store(to, lagrange_weights(at, COUNT, tl.float64))


def probe(row: Tensor, x: Tensor, panels: int, is_key: bool) -> tuple[Tensor, ...]:
    nodes = torch.empty(panels * NODES, dtype=torch.float64)
    panel = torch.empty(TOKENS, dtype=torch.int32)
    place = torch.empty(TOKENS, dtype=torch.float64)
    weight = torch.empty(TOKENS, NODES, dtype=torch.float64)
    probe_kernel[(1,)](row, x, nodes, panel, place, weight, IS_KEY=is_key, COUNT=NODES)
    return nodes, panel.long(), place, weight


def assert_close(ours: Tensor, theirs: Tensor, size: Tensor | float) -> None:
    assert ((ours - theirs).abs() <= ROUNDING * size).all()


def assert_located(
    axis: layout.Axis, u: Tensor, panel: Tensor, place: Tensor, weight: Tensor
) -> None:
    """Tokens with warped coordinates u."""
    # A token on an edge may fall on either side of it: what counts is its coordinate.
    back = axis.origin + axis.half * (2 * panel + 1 + place)
    assert ((panel >= 0) & (panel < axis.panels)).all()
    assert_close(back, u, 1 + u.abs())
    expected, _ = axis.locate(u)
    apart = (panel - expected).abs()
    on_an_edge = (place.abs() - 1).abs() <= ROUNDING * (1 + u.abs()) / axis.half
    assert ((apart == 0) | ((apart == 1) & on_an_edge)).all()
    # 16 factors up to 2, each of one rounding.
    torch.testing.assert_close(weight, layout.lagrange_weights(NODES, place), rtol=0, atol=1e-13)


def spans() -> list[layout.Range]:
    """Drawn over all temperatures and offsets, and the ends of what is served."""
    draw = random.Random(0)
    found = []
    for _ in range(12):
        s_min, extent = draw.uniform(-5, 5), 10 ** draw.uniform(-2, 3)
        t_min, product = draw.uniform(-1, 0), 10 ** draw.uniform(-3, 7)
        wide = product / extent
        found.append(
            layout.Range(t_min * wide, wide, s_min, s_min + extent, draw.randrange(2, 3000))
        )
    found.append(layout.Range(-3e7, 3e7, -0.5, 0.5, 100))
    found.append(layout.Range(0.0, 4.0, 0.0, 1.0, 4))  # where the key axis starts to grow
    found.append(layout.Range(0.0, 1e-30, 0.0, 1.0, 5))
    return found


@pytest.mark.parametrize("span", spans(), ids=str)
def test_as_in_python_and_cpp(span: layout.Range) -> None:
    precision = PRECISION[torch.float32]
    # fp32 has the numbers; what it rounds them to is the range.
    query = torch.tensor([span.t_min, span.t_max]).view(1, 2, 1)
    key = torch.linspace(span.s_min, span.s_max, span.keys).view(1, span.keys, 1)
    ends = (query.min(), query.max(), key.min(), key.max())
    exact = layout.Range(*(float(x) for x in ends), span.keys)
    row = find_layouts(Problem(query, key, key, *[None] * 4, 1.0, 0.0, False, False)).layout[0]
    sizes = (exact.t_min, exact.t_max, exact.s_min, exact.s_max, exact.keys, NODES, NODES)
    share = torch.cat([torch.tensor([0.0, 1.0]), torch.rand(TOKENS - 2)]).double()

    ours = layout.make_layout(exact, NODES, NODES, precision.query)
    t = exact.t_min + share * (exact.t_max - exact.t_min)
    nodes, *located = probe(row, t, ours.query.panels, False)
    u = ours.query.positions()
    slope = ours.tau * u.cosh() * (1 + u.abs())  # by which t follows u
    assert_close(nodes, ours.query_nodes(), slope)
    theirs = _C.layout(*sizes, precision.query)["query_nodes"]
    assert_close(nodes, torch.tensor(theirs, dtype=torch.float64), slope)
    assert_located(ours.query, ours.warp_queries(t), *located)

    ours = layout.make_layout(exact, NODES, NODES, precision.key)
    s = exact.s_min + share * (exact.s_max - exact.s_min)
    nodes, *located = probe(row, s, ours.key.panels, True)
    edge = 0.5 * math.log(max(exact.largest_product, 4.0))
    size = abs(ours.middle) + ours.radius * (1 + edge)
    assert_close(nodes, ours.key_nodes(), size)
    theirs = _C.layout(*sizes, precision.key)["key_nodes"]
    assert_close(nodes + ours.middle, torch.tensor(theirs, dtype=torch.float64), size)
    # atanh loses what 1 - y has lost: at the ends by a factor of cosh^2, 3e7.
    w = ours.warp_keys(s)
    place, weight = located[1], located[2]
    back = ours.key.origin + ours.key.half * (2 * located[0] + 1 + place)
    assert_close(back, w, (1 + abs(ours.middle) / ours.radius) * w.cosh() ** 2)
    torch.testing.assert_close(weight, layout.lagrange_weights(NODES, place), rtol=0, atol=1e-13)
