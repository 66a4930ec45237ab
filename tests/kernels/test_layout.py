"""python/boltzattn/transform/layout.py against csrc/spec/layout.h, and the promises of both."""

from __future__ import annotations

import math

import pytest
import torch
from boltzattn import _C
from boltzattn.transform import layout as lay
from boltzattn.transform.layout import Axis, Range
from hypothesis import example, given, settings
from hypothesis import strategies as st

# The same formulas in the same order, but libm, torch's vector functions and contracted
# multiply-adds may each differ in the last bits: a few dozen roundings.
ROUNDING = 1e-14

finite = st.floats(-1e6, 1e6, allow_subnormal=False)
widths = st.just(0.0) | st.floats(1e-12, 1e6)
node_counts = range(lay.LEAST_NODES, lay.MOST_NODES + 1, lay.NODE_STEP)


def assert_close(ours: float, theirs: float, size: float) -> None:
    assert abs(ours - theirs) <= ROUNDING * size, (ours, theirs)


def rounding_decides(axis: Axis, low: float, high: float, widest: float) -> bool:
    """Whether the last bits decide the number of panels, or if the axis has any width at all."""
    ratio = (high - low) / (2 * widest)
    on_an_integer = abs(ratio - round(ratio)) <= 1e-9 * max(1.0, ratio)
    on_the_threshold = abs(axis.half / widest / 1e-9 - 1) < 1e-3
    return on_an_integer or on_the_threshold


def same_axis(ours: Axis, theirs: dict, name: str, low: float, high: float, widest: float) -> bool:
    """Holds the axes equal; False if rounding gave them different panels."""
    if ours.panels != theirs[f"{name}_panels"]:
        assert rounding_decides(ours, low, high, widest)
        return False
    size = max(abs(low), abs(high), ours.half)  # `half` is a difference: its error is theirs
    assert_close(ours.origin, theirs[f"{name}_origin"], size)
    assert_close(ours.half, theirs[f"{name}_half"], size)
    return True


@settings(max_examples=300, deadline=None)
@given(
    t=st.tuples(finite, widths),
    s=st.tuples(finite, widths),
    keys=st.integers(1, 10**9),
    query_nodes=st.sampled_from(node_counts),
    key_nodes=st.sampled_from(node_counts),
    precision=st.sampled_from([1e-5, 1e-8, 1e-11, 1e-14, 1e-17, 1e-23]),
)
@example((0.0, 0.0), (0.0, 0.0), 1, 8, 8, 1e-8)  # nothing has any extent
@example((5.0, 0.0), (1.0, 3.0), 7, 16, 16, 1e-17)  # equal queries
@example((-2.0, 4.0), (3.0, 0.0), 7, 16, 16, 1e-17)  # equal keys
@example((-2e5, 4e5), (3.0, 0.0), 7, 16, 16, 1e-17)  # equal keys, far from the queries
@example((-15.0, 30.0), (-1e6, 2e6), 10**9, 32, 32, 1e-23)  # B = 3e7
@example((0.0, 1e-200), (0.0, 1e-200), 2, 8, 32, 1e-17)  # everything tiny
@example((0.0, 4.0), (0.0, 1.0), 4, 8, 8, 1e-8)  # B = 4, where the key axis starts to grow
def test_python_and_cpp_agree(
    t: tuple[float, float],
    s: tuple[float, float],
    keys: int,
    query_nodes: int,
    key_nodes: int,
    precision: float,
) -> None:
    span = Range(t[0], t[0] + t[1], s[0], s[0] + s[1], keys)
    ours = lay.make_layout(span, query_nodes, key_nodes, precision)
    theirs = _C.layout(
        span.t_min, span.t_max, span.s_min, span.s_max, keys, query_nodes, key_nodes, precision
    )
    assert_close(ours.tau, theirs["tau"], ours.tau)
    assert_close(ours.middle, theirs["middle"], max(abs(span.s_min), abs(span.s_max)))
    assert_close(ours.radius, theirs["radius"], ours.radius)

    low, high = math.asinh(span.t_min / ours.tau), math.asinh(span.t_max / ours.tau)
    widest = lay.panel_half_width(ours.query_strip, query_nodes, precision)
    if same_axis(ours.query, theirs, "query", low, high, widest):
        position = ours.query_nodes()
        expected = torch.tensor(theirs["query_nodes"], dtype=torch.float64)
        # sinh(u) passes the error of u, at most ROUNDING |u|, on with slope cosh(u).
        u = ours.query.positions()
        allowed = ROUNDING * ours.tau * u.cosh() * (1 + u.abs())
        assert ((position - expected).abs() <= allowed).all()

    edge = max(0.5 * math.log(max(span.largest_product, 4.0)), 0.3)
    widest = lay.panel_half_width(lay.KEY_STRIP, key_nodes, precision / math.sqrt(keys))
    if same_axis(ours.key, theirs, "key", -edge, edge, widest):
        position = ours.key_nodes() + ours.middle
        expected = torch.tensor(theirs["key_nodes"], dtype=torch.float64)
        allowed = ROUNDING * (abs(ours.middle) + ours.radius * (1 + edge))
        assert ((position - expected).abs() <= allowed).all()


@settings(max_examples=100, deadline=None)
@given(
    low=st.floats(-20, 20),
    width=st.floats(0, 40),
    nodes=st.sampled_from(node_counts),
    draws=st.lists(st.floats(0, 1), min_size=1, max_size=20),
)
def test_tokens_fall_on_their_panels(
    low: float, width: float, nodes: int, draws: list[float]
) -> None:
    """Every token lies on a panel, and panel and place give its coordinate back."""
    axis = lay.make_axis(low, low + width, 0.1, nodes, 1e-8)
    u = low + width * torch.tensor([0.0, 1.0, *draws], dtype=torch.float64)
    panel, place = axis.locate(u)
    assert ((panel >= 0) & (panel < axis.panels)).all()
    # Coordinates up to 60 carry a rounding of 7e-15, seen from panels of at least 1e-9 * 0.03.
    assert (place.abs() <= 1 + 1e-14 * 60 / axis.half).all()
    back = axis.origin + axis.half * (2 * panel + 1 + place)
    torch.testing.assert_close(back, u, rtol=0, atol=1e-13)


@pytest.mark.parametrize("count", node_counts)
def test_lagrange_weights_reproduce_polynomials(count: int) -> None:
    """Exact for every Chebyshev polynomial below the number of nodes, at the nodes too."""
    node = lay.chebyshev_nodes(count)
    place = torch.cat([node, torch.linspace(-1, 1, 101, dtype=torch.float64)])
    weight = lay.lagrange_weights(count, place)
    degree = torch.arange(count, dtype=torch.float64)
    at_nodes = torch.cos(degree * node.acos()[:, None])
    at_places = torch.cos(degree * place.acos()[:, None])
    # The rounding of `count` products, and of a sum of `count` weights below 1.
    allowed = 4 * count * torch.finfo(torch.float64).eps
    torch.testing.assert_close(weight @ at_nodes, at_places, rtol=0, atol=allowed)
    unit = torch.eye(count, dtype=torch.float64)
    torch.testing.assert_close(weight[:count], unit, rtol=0, atol=allowed)


@settings(max_examples=20, deadline=None)
@given(product=st.floats(1e-3, 3e7), keys=st.integers(1, 10**7), dv=st.sampled_from([1, 64, 1024]))
def test_choice_is_the_cheapest(product: float, keys: int, dv: int) -> None:
    span = Range(-product, product / 3, -0.5, 0.5, keys)
    chosen = lay.choose_layout(span, keys, keys, dv, 1e-17)
    cost = lay.layout_cost(chosen, keys, keys, dv)
    for p in node_counts:
        for q in node_counts:
            other = lay.make_layout(span, p, q, 1e-17)
            assert cost <= lay.layout_cost(other, keys, keys, dv)


def test_cost_counts_core_and_tokens() -> None:
    layout = lay.make_layout(Range(-3.0, 3.0, -1.0, 2.0, 1000), 16, 12, 1e-8)
    core = layout.query.panels * 16 * layout.key.panels * 12 * (2 * 8 + 50)
    assert lay.layout_cost(layout, 100, 1000, 7) == core + 8 * (100 * 16 + 1000 * 12)


@pytest.mark.parametrize(
    ("t_min", "t_max"), [(-3.0, 3.0), (1.0, 9.0), (-9.0, -1.0), (0.0, 0.0), (-100.0, 1.0)]
)
def test_panels_split_by_the_sign_of_their_centre(t_min: float, t_max: float) -> None:
    layout = lay.make_layout(Range(t_min, t_max, -1.0, 2.0, 1000), 16, 16, 1e-8)
    first = layout.first_positive_panel()
    centre = layout.query.positions().view(layout.query.panels, -1).mean(1)
    rounding = 1e-12  # of the mean of 16 positions below 20
    assert (centre[:first] < rounding).all()
    assert (centre[first:] >= -rounding).all()
