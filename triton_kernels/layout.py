"""The layout of a transform, made on the device: the same mathematics as boltzattn.layout.

The host fixes the number of nodes on a panel and how many panels there may be at most, both from
dtype and n alone; everything else follows from the ranges of queries and keys, which only the
device knows. A head becomes one row of FIELDS fp64 numbers, named by the constants below. Heads
that the transform cannot serve are marked, for `direct` to take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from boltzattn.transform import layout
from boltzattn.triton_kernels.heads import joined, load_vector

NODES = 16  # on a panel of either axis: the shortest side of a matrix product
RANGE_BLOCK = 1024  # tokens of a program that looks for ranges

T_MIN = tl.constexpr(0)
T_MAX = tl.constexpr(1)
S_MIN = tl.constexpr(2)
S_MAX = tl.constexpr(3)
KEYS = tl.constexpr(4)  # that are not masked
REGULAR = tl.constexpr(5)
AT_MIN = tl.constexpr(6)  # where the smallest and the largest key stand
AT_MAX = tl.constexpr(7)
QUERY_ORIGIN = tl.constexpr(8)
QUERY_HALF = tl.constexpr(9)
QUERY_PANELS = tl.constexpr(10)
KEY_ORIGIN = tl.constexpr(11)
KEY_HALF = tl.constexpr(12)
KEY_PANELS = tl.constexpr(13)
TAU = tl.constexpr(14)
MIDDLE = tl.constexpr(15)
RADIUS = tl.constexpr(16)
STRIP = tl.constexpr(17)
RANGES = tl.constexpr(8)  # fields that ranges consist of
FIELDS = tl.constexpr(18)
PI = tl.constexpr(math.pi)


@dataclass(frozen=True)
class Precision:
    """Interpolation errors aimed at, and how far the sum of all errors may go."""

    query: float
    key: float  # the rounding of a weight counts by the largest kernel value on its panel
    rounding: float
    tolerance: float


PRECISIONS = {
    torch.float32: Precision(1e-9, 4e-12, 3e-6, 5e-6),
    torch.bfloat16: Precision(1e-5, 1e-9, 1 / 256, 4 / 256),
    torch.float16: Precision(1e-5, 1e-9, 1 / 2048, 4 / 2048),
}


def most_panels(n_k: int, precision: Precision) -> tuple[int, int]:
    """Panels of the query axis and of the key axis at the largest B that is served."""
    widest = layout.LARGEST_PRODUCT
    span = layout.Range(-widest, widest, -0.5, 0.5, n_k)
    query = layout.make_layout(span, NODES, NODES, precision.query).query
    key = layout.make_layout(span, NODES, NODES, precision.key).key
    return query.panels, key.panels


def key_side_error(n_k: int, precision: Precision) -> float:
    """The a-priori bound of docs/transform.md over all keys, relative to max|v|."""
    half = layout.panel_half_width(layout.KEY_STRIP, NODES, precision.key / math.sqrt(n_k))
    r = layout.KEY_STRIP / half
    rho = r + math.sqrt(r * r + 1)
    return 2 * n_k * 4 * rho ** (1 - NODES) / (rho - 1) * math.exp(4 / 3)


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
    """For |x| < 1, to rounding: tl.sin would cost a stack."""
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
    """By its series near 0, for the same reason."""
    near = x * (1 + x * x * (1.0 / 6 + x * x * (1.0 / 120)))
    return tl.where(tl.abs(x) < 1e-3, near, 0.5 * (tl.exp(x) - tl.exp(-x)))


@triton.jit
def chebyshev_nodes(NODES: tl.constexpr):
    """[NODES] fp64, from constants: a cosine of the device would cost it a stack."""
    node = tl.arange(0, NODES)
    x = tl.zeros([NODES], tl.float64)
    for i in tl.static_range(NODES):
        x = tl.where(node == i, chebyshev_node(NODES, i), x)
    return x


@triton.jit
def node_places(panel, origin, half, NODES: tl.constexpr):
    """Warped coordinates of the nodes of a panel, [NODES] fp64."""
    return origin + half * (tl.cast(2 * panel + 1, tl.float64) + chebyshev_nodes(NODES))


@triton.jit
def locate(u, origin, half, panels):
    """Panel and place in [-1, 1] on it of warped coordinates."""
    f = (u - origin) * (0.5 / half)
    panel = tl.minimum(tl.maximum(f.to(tl.int32), 0), panels.to(tl.int32) - 1)
    return panel, 2 * (f - panel.to(tl.float64)) - 1


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
def ranges_kernel(query, key, key_mask, parts, lead, n_q, n_k, scale, BLOCK: tl.constexpr):
    """Ranges of a block of tokens: parts [heads, blocks, RANGES] fp64."""
    blocks = tl.cdiv(tl.maximum(n_q, n_k), BLOCK)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    first, local = block * BLOCK, tl.arange(0, BLOCK)
    infinity = float("inf")

    t = load_vector(query, head, lead, first, local, n_q).to(tl.float64) * joined(scale)
    is_query = local < n_q - first
    odd = tl.sum((is_query & (t * 0 != 0)).to(tl.int32), 0)

    s = load_vector(key, head, lead, first, local, n_k).to(tl.float64)
    kept = local < n_k - first
    if key_mask is not None:
        mask = load_vector(key_mask, head, lead, first, local, n_k)
        if mask.dtype == tl.uint8:
            kept = kept & (mask == 0)
        else:
            mask = mask.to(tl.float32)
            odd += tl.sum((kept & (mask != 0) & (mask != -infinity)).to(tl.int32), 0)
            kept = kept & (mask == 0)
    odd += tl.sum((kept & (s * 0 != 0)).to(tl.int32), 0)
    low = tl.min(tl.where(kept, s, infinity), 0)
    high = tl.max(tl.where(kept, s, -infinity), 0)
    index = (first + local).to(tl.float64)

    parts += tl.program_id(0).to(tl.int64) * RANGES
    tl.store(parts + T_MIN, tl.min(tl.where(is_query, t, infinity), 0))
    tl.store(parts + T_MAX, tl.max(tl.where(is_query, t, -infinity), 0))
    tl.store(parts + S_MIN, low)
    tl.store(parts + S_MAX, high)
    tl.store(parts + KEYS, tl.sum(kept.to(tl.int32), 0).to(tl.float64))
    tl.store(parts + REGULAR, (odd == 0).to(tl.float64))
    tl.store(parts + AT_MIN, tl.min(tl.where(kept & (s == low), index, infinity), 0))
    tl.store(parts + AT_MAX, tl.min(tl.where(kept & (s == high), index, infinity), 0))


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
    parts,
    heads_layout,  # [heads, FIELDS] fp64, written
    served,  # [heads] int32, written
    blocks,
    largest_product,
    query_panels,
    key_panels,
    QUERY_PRECISION: tl.constexpr,
    KEY_PRECISION: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The layout of a head from the ranges of its blocks."""
    head = tl.program_id(0)
    infinity = float("inf")
    parts += head.to(tl.int64) * blocks * RANGES
    t_min = tl.full([], infinity, tl.float64)
    t_max, s_min, s_max = -t_min, t_min, -t_min
    at_min, at_max = t_min, t_min
    keys = tl.zeros([], tl.float64)
    regular = keys + 1
    for first in range(0, blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        at, inside = parts + block.to(tl.int64) * RANGES, block < blocks
        t_min = tl.minimum(t_min, tl.min(tl.load(at + T_MIN, inside, other=infinity), 0))
        t_max = tl.maximum(t_max, tl.max(tl.load(at + T_MAX, inside, other=-infinity), 0))
        lows = tl.load(at + S_MIN, inside, other=infinity)
        highs = tl.load(at + S_MAX, inside, other=-infinity)
        low, high = tl.min(lows, 0), tl.max(highs, 0)
        at_lows = tl.where(lows == low, tl.load(at + AT_MIN, inside, other=infinity), infinity)
        at_highs = tl.where(highs == high, tl.load(at + AT_MAX, inside, other=infinity), infinity)
        at_min = tl.where(low < s_min, tl.min(at_lows, 0), at_min)
        at_max = tl.where(high > s_max, tl.min(at_highs, 0), at_max)
        s_min, s_max = tl.minimum(s_min, low), tl.maximum(s_max, high)
        keys += tl.sum(tl.load(at + KEYS, inside, other=0.0), 0)
        regular = tl.minimum(regular, tl.min(tl.load(at + REGULAR, inside, other=1.0), 0))

    t_most = tl.maximum(tl.abs(t_min), tl.abs(t_max))
    # One key, or equal keys, get a width on which B is at most 1.
    extent = s_max - s_min
    extent = tl.where(extent > 0, extent, tl.where(t_most > 1, 1 / t_most, 1.0))
    product = t_most * extent
    strip = 1 / tl.log(keys + 2) * (PI / 4)
    tau = 2 / (extent * sine(strip))
    low, high = asinh(t_min / tau), asinh(t_max / tau)
    q_origin, q_half, q_panels = make_axis(
        low, high, strip * relative_half_width(NODES, QUERY_PRECISION)
    )
    edge = 0.5 * tl.log(tl.maximum(product, 4.0))
    rho = tl.exp((0.5 * tl.log(keys) - tl.log(keys * 0 + KEY_PRECISION)) / NODES)
    k_origin, k_half, k_panels = make_axis(-edge, edge, 1 / (rho - 1 / rho) * (PI / 2))

    fine = (regular > 0) & (keys > 0) & (product <= largest_product)
    fine = fine & (q_panels <= query_panels) & (k_panels <= key_panels)
    tl.store(served + head, fine.to(tl.int32))
    to = heads_layout + head * FIELDS
    tl.store(to + T_MIN, t_min)
    tl.store(to + T_MAX, t_max)
    tl.store(to + S_MIN, s_min)
    tl.store(to + S_MAX, s_max)
    tl.store(to + KEYS, keys)
    tl.store(to + REGULAR, regular)
    tl.store(to + AT_MIN, at_min)
    tl.store(to + AT_MAX, at_max)
    tl.store(to + QUERY_ORIGIN, q_origin)
    tl.store(to + QUERY_HALF, q_half)
    tl.store(to + QUERY_PANELS, q_panels)
    tl.store(to + KEY_ORIGIN, k_origin)
    tl.store(to + KEY_HALF, k_half)
    tl.store(to + KEY_PANELS, k_panels)
    tl.store(to + TAU, tau)
    tl.store(to + MIDDLE, 0.5 * s_min + 0.5 * s_max)
    tl.store(to + RADIUS, extent / 2 / tanh(edge))
    tl.store(to + STRIP, strip)


@triton.jit
def load_axis(row, IS_KEY: tl.constexpr):
    """What `locate_tokens` needs of a layout row: to be read once, outside of loops."""
    if IS_KEY:
        warp = (tl.load(row + MIDDLE), tl.load(row + RADIUS))
        axis = (tl.load(row + KEY_ORIGIN), tl.load(row + KEY_HALF), tl.load(row + KEY_PANELS))
    else:
        tau = tl.load(row + TAU)
        warp = (tau, tau)
        axis = (tl.load(row + QUERY_ORIGIN), tl.load(row + QUERY_HALF), tl.load(row + QUERY_PANELS))
    return warp + axis


@triton.jit
def locate_tokens(number, axis, IS_KEY: tl.constexpr):
    """(panel, place) of queries t or keys s."""
    if IS_KEY:
        y = (number - axis[0]) / axis[1]
        u = 0.5 * tl.log((1 + y) / (1 - y))
    else:
        u = asinh(number / axis[0])
    return locate(u, axis[2], axis[3], axis[4])


@triton.jit
def query_nodes(panel, row, NODES: tl.constexpr):
    """t of the nodes of a query panel, [NODES] fp64; zeros if every query is zero."""
    u = node_places(panel, tl.load(row + QUERY_ORIGIN), tl.load(row + QUERY_HALF), NODES)
    flat = (tl.load(row + T_MIN) == 0) & (tl.load(row + T_MAX) == 0)
    return tl.where(flat, 0.0, tl.load(row + TAU) * sinh(u))


@triton.jit
def key_nodes(panel, row, NODES: tl.constexpr):
    """s of the nodes of a key panel, measured from the middle of the keys, [NODES] fp64."""
    w = node_places(panel, tl.load(row + KEY_ORIGIN), tl.load(row + KEY_HALF), NODES)
    return tl.load(row + RADIUS) * tanh(w)


@triton.jit
def end_of_query_panel(panel, row):
    """Whether the largest key (else the smallest) takes most weight: what logits start from."""
    origin, half = tl.load(row + QUERY_ORIGIN), tl.load(row + QUERY_HALF)
    return origin + half * tl.cast(2 * panel + 1, tl.float64) >= 0


@triton.jit
def end_of_key_panel(panel, row):
    """Whether the largest key (else the smallest) is the nearer end."""
    origin, half = tl.load(row + KEY_ORIGIN), tl.load(row + KEY_HALF)
    return origin + half * tl.cast(2 * panel + 1, tl.float64) >= 0
