"""The layout of a transform, made on the device: the same mathematics as
boltzattn.transform.layout.

The host fixes the number of nodes on a panel and how many panels there may be at most, both from
dtype and n alone; everything else follows from the extents of queries and keys, which only the
device knows. A head becomes one row of FIELDS fp64 numbers, named by the constants below. Heads
that the transform cannot serve are marked, for `direct` to take.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from boltzattn.triton_kernels.extents import EXTENT, join_extents

T_MIN = tl.constexpr(0)
T_MAX = tl.constexpr(1)
S_MIN = tl.constexpr(2)
S_MAX = tl.constexpr(3)
AT_MIN = tl.constexpr(4)  # where the smallest and the largest key stand
AT_MAX = tl.constexpr(5)
QUERY_ORIGIN = tl.constexpr(6)
QUERY_HALF = tl.constexpr(7)
QUERY_PANELS = tl.constexpr(8)
KEY_ORIGIN = tl.constexpr(9)
KEY_HALF = tl.constexpr(10)
KEY_PANELS = tl.constexpr(11)
TAU = tl.constexpr(12)
MIDDLE = tl.constexpr(13)
RADIUS = tl.constexpr(14)
STRIP = tl.constexpr(15)
FIELDS = tl.constexpr(16)
PI = tl.constexpr(math.pi)


class Heads(NamedTuple):
    """What the stage `layout` finds of all heads."""

    layout: Any  # [heads, FIELDS] fp64
    served: Any  # [heads] int32
    total: int  # as in Lead
    middle: int
    inner: int
    query_panels: int  # at most
    key_panels: int


class Axis(NamedTuple):
    """One axis of a layout: its panels, and what warps a number into its coordinate."""

    origin: Any
    half: Any
    panels: Any
    centre: Any
    radius: Any


@triton.constexpr_function
def wave(nodes, k, i):
    """T_k at node i, times 2 / nodes: the weight of node i in Chebyshev coefficient k."""
    return math.cos(k * (2 * i + 1) * math.pi / (2 * nodes)) * 2 / nodes


@triton.constexpr_function
def chebyshev_node(nodes, i):
    return math.cos((2 * i + 1) * math.pi / (2 * nodes))


@triton.constexpr_function
def basis_factor(nodes, i):
    """1 / prod_{j != i} (x_i - x_j) of Chebyshev's nodes."""
    return (-1) ** i * math.sin((2 * i + 1) * math.pi / (2 * nodes)) * 2 ** (nodes - 1) / nodes


@triton.constexpr_function
def relative_half_width(nodes, precision):
    """Half width of a panel over the height of its strip."""
    rho = math.pow(1 / precision, 1 / nodes)
    return 2 / (rho - 1 / rho)


@triton.jit
def asinh(x):
    """By its series near 0, where log(1 + x) has no digits left."""
    size = tl.abs(x)
    far = tl.log(size + tl.sqrt(x * x + 1))
    near = size * (1 + x * x * (x * x * 0.075 - 1.0 / 6))
    u = tl.where(size < 1e-3, near, far)
    return tl.where(x < 0, -u, u)


@triton.jit
def sine(x):
    """For |x| < 1, to rounding: tl.sin would need a stack."""
    y, term, sum = x * x, x, x
    for k in tl.static_range(1, 10):
        term *= y * (-1.0 / (2 * k * (2 * k + 1)))
        sum += term
    return sum


@triton.jit
def tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def sinh(x):
    """By its series near 0, where the difference of exponentials has no digits left."""
    near = x * (1 + x * x * (1.0 / 6 + x * x * (1.0 / 120)))
    return tl.where(tl.abs(x) < 1e-3, near, 0.5 * (tl.exp(x) - tl.exp(-x)))


@triton.jit
def chebyshev_nodes(NODES: tl.constexpr):
    """[NODES] fp64, from constants: a cosine on the device would need a stack."""
    node = tl.arange(0, NODES)
    x = tl.zeros([NODES], tl.float64)
    for i in tl.static_range(NODES):
        x = tl.where(node == i, chebyshev_node(NODES, i), x)
    return x


@triton.jit
def lagrange_weights(place, NODES: tl.constexpr, WORK: tl.constexpr):
    """Weights of the Lagrange basis on the Chebyshev nodes, [tokens, NODES] in WORK."""
    node = tl.arange(0, NODES)[None, :]
    weight = tl.full([place.shape[0], NODES], 1.0, WORK)
    for i in tl.static_range(NODES):
        gap = (place - chebyshev_node(NODES, i)).to(WORK)  # fp64: they are the tables' nodes
        weight *= tl.where(node == i, basis_factor(NODES, i), gap[:, None])
    return weight


@triton.jit
def make_axis(low, high, widest):
    """(origin, half, panels) of the fewest panels over [low, high]."""
    panels = tl.maximum(1.0, tl.ceil((high - low) / (2 * widest)))
    # All tokens in one place: nodes around it, no farther than it is from 0.
    around = tl.where(low == 0, widest, tl.minimum(widest, tl.abs(low) / 2))
    spread = high > low
    origin = tl.where(spread, low, low - around)
    half = tl.where(spread, (high - low) / (2 * panels), around)
    return origin, half, tl.where(spread, panels, 1.0)


@triton.jit
def layout_kernel(
    parts,  # of extents
    heads,  # layout and served are written
    blocks,
    largest_product,
    QUERY_PRECISION: tl.constexpr,
    KEY_PRECISION: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The layout of a head from the extents of its blocks."""
    head = tl.program_id(0)
    parts += head.to(tl.int64) * 2 * blocks * EXTENT
    t = join_extents(parts, blocks, BLOCK)
    s = join_extents(parts + blocks * EXTENT, blocks, BLOCK)

    t_most = tl.maximum(tl.abs(t.low), tl.abs(t.high))
    # One key, or equal keys, get a width on which B is at most 1.
    extent = s.high - s.low
    extent = tl.where(extent > 0, extent, tl.where(t_most > 1, 1 / t_most, 1.0))
    product = t_most * extent
    strip = 1 / tl.log(s.tokens + 2) * (PI / 4)
    tau = 2 / (extent * sine(strip))
    q_origin, q_half, q_panels = make_axis(
        asinh(t.low / tau), asinh(t.high / tau), strip * relative_half_width(NODES, QUERY_PRECISION)
    )
    edge = 0.5 * tl.log(tl.maximum(product, 4.0))
    rho = tl.exp((0.5 * tl.log(s.tokens) - tl.log(s.tokens * 0 + KEY_PRECISION)) / NODES)
    k_origin, k_half, k_panels = make_axis(-edge, edge, 1 / (rho - 1 / rho) * (PI / 2))

    can_serve = (t.regular > 0) & (s.regular > 0) & (s.tokens > 0) & (product <= largest_product)
    can_serve = can_serve & (q_panels <= heads.query_panels)
    can_serve = can_serve & (k_panels <= heads.key_panels)
    tl.store(heads.served + head, can_serve.to(tl.int32))
    to = heads.layout + head * FIELDS
    tl.store(to + T_MIN, t.low)
    tl.store(to + T_MAX, t.high)
    tl.store(to + S_MIN, s.low)
    tl.store(to + S_MAX, s.high)
    tl.store(to + AT_MIN, s.at_low)
    tl.store(to + AT_MAX, s.at_high)
    tl.store(to + QUERY_ORIGIN, q_origin)
    tl.store(to + QUERY_HALF, q_half)
    tl.store(to + QUERY_PANELS, q_panels)
    tl.store(to + KEY_ORIGIN, k_origin)
    tl.store(to + KEY_HALF, k_half)
    tl.store(to + KEY_PANELS, k_panels)
    tl.store(to + TAU, tau)
    tl.store(to + MIDDLE, 0.5 * s.low + 0.5 * s.high)
    tl.store(to + RADIUS, extent / 2 / tanh(edge))
    tl.store(to + STRIP, strip)


@triton.jit
def load_panels(row, IS_KEY: tl.constexpr):
    """Where the panels of an axis start, and half the width of each."""
    if IS_KEY:
        return tl.load(row + KEY_ORIGIN), tl.load(row + KEY_HALF)
    else:
        return tl.load(row + QUERY_ORIGIN), tl.load(row + QUERY_HALF)


@triton.jit
def load_axis(row, IS_KEY: tl.constexpr):
    """An axis of a layout row; to be read once, outside of loops."""
    origin, half = load_panels(row, IS_KEY)
    if IS_KEY:
        panels, centre, radius = KEY_PANELS, tl.load(row + MIDDLE), tl.load(row + RADIUS)
    else:
        panels, centre, radius = QUERY_PANELS, 0.0, tl.load(row + TAU)
    return Axis(origin, half, tl.load(row + panels), centre, radius)


@triton.jit
def locate(number, axis, IS_KEY: tl.constexpr):
    """Panel of queries t or keys s, and place in [-1, 1] on it."""
    if IS_KEY:
        y = (number - axis.centre) / axis.radius
        u = 0.5 * tl.log((1 + y) / (1 - y))
    else:
        u = asinh(number / axis.radius)
    f = (u - axis.origin) * (0.5 / axis.half)
    panel = tl.minimum(tl.maximum(f.to(tl.int32), 0), axis.panels.to(tl.int32) - 1)
    return panel, 2 * (f - panel.to(tl.float64)) - 1


@triton.jit
def node_places(panel, row, IS_KEY: tl.constexpr, NODES: tl.constexpr):
    """Warped coordinates of the nodes of a panel, [NODES] fp64."""
    origin, half = load_panels(row, IS_KEY)
    return origin + half * (tl.cast(2 * panel + 1, tl.float64) + chebyshev_nodes(NODES))


@triton.jit
def query_nodes(panel, row, NODES: tl.constexpr):
    """t of the nodes of a query panel, [NODES] fp64; zeros if every query is zero."""
    u = node_places(panel, row, False, NODES)
    flat = (tl.load(row + T_MIN) == 0) & (tl.load(row + T_MAX) == 0)
    return tl.where(flat, 0.0, tl.load(row + TAU) * sinh(u))


@triton.jit
def key_nodes(panel, row, NODES: tl.constexpr):
    """s of the nodes of a key panel, measured from the middle of the keys, [NODES] fp64."""
    return tl.load(row + RADIUS) * tanh(node_places(panel, row, True, NODES))


@triton.jit
def is_upper(panel, row, IS_KEY: tl.constexpr):
    """Whether the middle of a panel is not below that of its axis.

    On the query axis the largest key then takes most weight, so that logits are measured from it;
    on the key axis it is the nearer end. Otherwise the smallest key is.
    """
    origin, half = load_panels(row, IS_KEY)
    return origin + half * tl.cast(2 * panel + 1, tl.float64) >= 0


@triton.jit
def reference_key(panel, row):
    """The key from which the logits of a query panel are measured."""
    return tl.where(is_upper(panel, row, False), tl.load(row + S_MAX), tl.load(row + S_MIN))
