"""Universal approximation: a one-layer transformer close to a given permutation-equivariant f.

The first network rounds every coordinate to a grid, the attention of `construct_attention` maps
every (grid point, context) to a different number, its id, and the second network looks up the
value.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from boltzattn.nn import FeedForward, OneLayerTransformer
from boltzattn.theory.construction import RankOneAttention, construct_attention
from boltzattn.theory.contextual import SAFETY
from boltzattn.theory.direction import digit_direction
from boltzattn.theory.memorization import step_network
from boltzattn.theory.separation import ResolutionError

Function = Callable[[Tensor], Tensor]

# f counts as equivariant if shuffling changes it by less than this share of its size.
_EQUIVARIANCE = 1e-9
_MAX_IDS = 100_000
# Largest n for which f is averaged over all n! orders.
_MAX_SYMMETRISED = 7


class EquivarianceWarning(UserWarning):
    """f depends on the order of the tokens; the message says how much."""


@dataclass(frozen=True)
class ApproximationReport:
    """What `approximate` built, and the distance of its module from f.

    Distances are `(E |f - g|^2)^(1/2)` over uniform points of the domain, estimated from samples.

    Attributes:
        attention: the constructed head.
        grid: cells per coordinate.
        ids: number of (grid point, context) pairs.
        hidden: neurons of the two networks.
        relative_gap, noise: smallest distance between two ids along the reading direction, and
            largest distance between ids of the same cell; both divided by the range of the ids.
        error: distance of the module from f.
        grid_error: distance of f from its value at the centre of the cell, the cost of the grid.
        asymmetry: distance of f from its symmetrisation, a floor for the error (0 if equivariant).
        ramp_share: upper bound on the share of points in a ramp of the rounding network.
        repeat_share: share of points with two tokens in one cell.
    """

    attention: RankOneAttention
    grid: int
    ids: int
    hidden: tuple[int, int]
    relative_gap: float
    noise: float
    error: float
    grid_error: float
    asymmetry: float
    ramp_share: float
    repeat_share: float

    def __str__(self) -> str:
        return (
            f"grid {self.grid}: {self.ids} ids, {self.hidden[0]} + {self.hidden[1]} neurons, "
            f"relative gap {self.relative_gap:.2g} (noise {self.noise:.1g}), error "
            f"{self.error:.4f} (grid {self.grid_error:.4f}, asymmetry {self.asymmetry:.4f})"
        )


def approximate(
    f: Function,
    d: int,
    n: int,
    grid: int,
    *,
    repeats: bool = True,
    positions: bool = False,
    ramp: float = 1e-6,
    samples: int = 20_000,
    seed: int = 0,
) -> OneLayerTransformer:
    """Build a transformer `[.., n, d] -> [.., n, d]` close to `f` on the unit cube.

    Args:
        f: takes fp64 `[B, n, d]` with entries in [0, 1] and returns `[B, n, k]` with `k <= d`.
            Shuffling tokens must shuffle results. Otherwise the symmetrisation of f is built (no
            closer function exists), and an `EquivarianceWarning` gives the distance between them.
        d, n: width and number of tokens.
        grid: cells per coordinate. There are about `grid^(d n) / (n-1)!` ids, with one or two
            neurons each; fp64 resolves about ten thousand.
        repeats: whether contexts with two tokens in one cell get ids too. The paper omits them,
            which costs an error proportional to the root of their share.
        positions: whether f may depend on the order. The module then takes `add_positions(x)`,
            which moves token k to [k, k+1]; there are n times as many grid points.
        ramp: width of a step of the rounding network, as a share of a cell. In a ramp the result is
            wrong, so a wide ramp adds to the error; a narrow ramp amplifies rounding errors.
        samples: number of points for estimating the errors.
        seed: seed of these points.

    Returns:
        The module (fp64; coordinates `0..k-1` of its result approximate f). Its `report` is an
        `ApproximationReport`.

    Raises:
        ResolutionError: if the grid has more ids than fp64 can distinguish.

    Example:
        >>> model = approximate(TARGETS["product"], d=1, n=2, grid=8)
        >>> report = model.report
        >>> report.ids, report.error < 0.1
        (64, True)
    """
    _check_sizes(d, n, grid, ramp, positions)
    target, asymmetry = f, 0.0
    if not positions and (asymmetry := _asymmetry(f, d, n, samples, seed)):
        warnings.warn(
            f"f is not permutation equivariant: its distance from its symmetrisation is "
            f"{asymmetry:.3g}, and no transformer without positions comes closer; "
            "pass positions=True",
            EquivarianceWarning,
            stacklevel=2,
        )
        target = symmetrised(f)

    cells = _contexts(d, n, grid, repeats, positions)  # [contexts, n, d], cell numbers from 0
    centres = torch.from_numpy((cells + 0.5) / grid)
    placed = add_positions(centres) if positions else centres
    values = target(centres)
    if values.shape[:2] != centres.shape[:2] or not 1 <= values.shape[-1] <= d:
        raise ValueError(
            f"f must map [B, {n}, {d}] to [B, {n}, k] with k <= {d}, got {list(values.shape)} "
            f"from {list(centres.shape)}"
        )
    steps = grid * n if positions else grid
    ff1 = rounding_network(d, steps, 1 / grid, ramp)
    rounded = torch.round(placed * grid + 0.5) / grid  # the exact output of ff1
    head = construct_attention(rounded, v=torch.from_numpy(digit_direction(d, steps)))

    # A token that occurs twice in a context has one id and one value, because f is equivariant.
    once = np.ones(cells.shape[:2], dtype=bool)
    if not positions:
        once[:, 1:] = (cells[:, 1:] != cells[:, :-1]).any(2)
    along, noise = _read(head.module(ff1=ff1), head.v, placed, (1 - 4 * ramp) / grid, seed)
    keys, order = along[torch.from_numpy(once)].sort()
    extent = float(keys[-1] - keys[0]) or 1.0
    gap = float(keys.diff().min()) if len(keys) > 1 else extent
    if gap <= SAFETY * noise:
        raise ResolutionError(
            f"grid={grid} with d={d}, n={n} has {len(keys)} ids; the closest are "
            f"{gap / extent:.3g} of their range apart, not above {SAFETY:g} times the noise of "
            f"{noise / extent:.2g}. Use a smaller grid, or a wider ramp, whose slope is smaller"
        )
    looked_up = values[torch.from_numpy(once)][order].numpy()
    ff2 = step_network(keys.numpy(), looked_up, head.v.numpy(), "plateau")
    model = head.module(ff1=ff1, ff2=ff2)

    x = _uniform(samples, n, d, seed + 1)
    model.report = ApproximationReport(
        attention=head,
        grid=grid,
        ids=len(keys),
        hidden=(ff1.linear1.out_features, ff2.linear1.out_features),
        relative_gap=gap / extent,
        noise=noise / extent,
        error=distance(f, lambda z: model(add_positions(z) if positions else z), x),
        grid_error=distance(target, lambda z: target(_centre(z, grid)), x),
        asymmetry=asymmetry,
        ramp_share=n * d * ramp,
        repeat_share=0.0 if positions else 1 - math.prod(1 - i / grid**d for i in range(n)),
    )
    return model


def rounding_network(d: int, steps: int, height: float, ramp: float) -> FeedForward:
    """A network that rounds each coordinate up to a multiple of `height` and cancels the skip.

    Args:
        d: width.
        steps: number of steps; the last is reached at `(steps - 1) * height`.
        height: height of a step and distance between steps.
        ramp: the ramp of a step is `ramp * height` wide.

    Example:
        >>> net = rounding_network(1, steps=4, height=0.25, ramp=1e-3)
        >>> net(torch.tensor([[0.0], [0.1], [0.6], [1.0]]).double()).flatten().tolist()
        [0.25, 0.25, 0.75, 1.0]
    """
    slope = 1 / (ramp * height)
    starts = height * np.arange(steps)
    starts[0] -= ramp * height  # so that 0 itself belongs to the first cell
    eye = np.eye(d)
    w1 = np.concatenate([eye, -eye, *([np.repeat(slope * eye, steps, 0)] * 2)])
    begin = np.tile(-slope * starts, d)
    b1 = np.concatenate([np.zeros(2 * d), begin, begin - 1])
    up = np.repeat(height * eye, steps, 1)
    w2 = np.concatenate([-eye, eye, up, -up], 1)
    weights = (torch.from_numpy(w) for w in (w1, b1, w2, np.zeros(d)))
    return FeedForward.from_weights(*weights)


def symmetrised(f: Function) -> Function:
    """The mean of `f` over all orders of the tokens: the closest equivariant function.

    Example:
        >>> x = torch.rand(5, 3, 1)
        >>> torch.allclose(symmetrised(TARGETS["position"])(x), 2 * x)
        True
    """

    def mean(x: Tensor) -> Tensor:
        orders = list(itertools.permutations(range(x.shape[-2])))
        total = x.new_zeros(())
        for order in orders:
            back = np.argsort(order)
            total = total + f(x[..., list(order), :])[..., back.tolist(), :]
        return total / len(orders)

    return mean


def add_positions(x: Tensor) -> Tensor:
    """Token k moved from [0, 1] to [k, k+1] in every coordinate: `[.., n, d]`.

    Example:
        >>> add_positions(torch.zeros(3, 1)).flatten()
        tensor([0., 1., 2.])
    """
    return x + torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None]


def distance(f: Function, g: Function, x: Tensor) -> float:
    """`(mean over x of |f(x) - g(x)|^2)^(1/2)` for points x `[B, n, d]`; g may be wider than f.

    Example:
        >>> distance(lambda x: x, lambda x: x + 1, torch.zeros(10, 4, 1))
        2.0
    """
    wanted, total = f(x), 0.0
    with torch.no_grad():
        for piece, values in zip(x.split(2000), wanted.split(2000), strict=True):
            total += float((g(piece)[..., : values.shape[-1]] - values).square().sum())
    return math.sqrt(total / len(x))


def _wave(x: Tensor) -> Tensor:
    mean, square, top = x.mean(-2, True), x.square().mean(-2, True), x.amax(-2, True)
    return torch.sin(2 * math.pi * x) * mean + square - x * top


def _smoothing(x: Tensor) -> Tensor:
    return torch.softmax(-10 * torch.cdist(x, x), -1) @ x


def _rank(x: Tensor) -> Tensor:
    below = x.unsqueeze(-3) < x.unsqueeze(-2)
    return below.to(x.dtype).mean(-2)


def _position(x: Tensor) -> Tensor:
    return x * torch.arange(1, x.shape[-2] + 1, dtype=x.dtype, device=x.device)[:, None]


# Functions to approximate: two smooth ones, a soft neighbourhood mean, the discontinuous rank of a
# token (which can be approximated in L_p but not uniformly), and `k x_k`, which is not equivariant.
TARGETS: dict[str, Function] = {
    "product": lambda x: x * x.mean(-2, True),
    "wave": _wave,
    "smoothing": _smoothing,
    "rank": _rank,
    "position": _position,
}


def _check_sizes(d: int, n: int, grid: int, ramp: float, positions: bool) -> None:
    for name, size in (("d", d), ("n", n), ("grid", grid)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if not 0 < ramp <= 0.1:
        raise ValueError(f"ramp must be above 0 and at most 0.1 of a cell, got {ramp}")
    points = grid**d
    ids = n * points**n if positions else points * math.comb(points + n - 2, n - 1)
    if ids > _MAX_IDS:
        raise ValueError(
            f"grid={grid} with d={d}, n={n} has {ids} ids; the limit is {_MAX_IDS}, and fp64 "
            "resolves about ten thousand; use a smaller grid, d or n"
        )


def _contexts(d: int, n: int, grid: int, repeats: bool, positions: bool) -> np.ndarray:
    """Every context as cell numbers `[contexts, n, d]`, sorted unless tokens have positions."""
    points = np.stack(np.meshgrid(*[np.arange(grid)] * d, indexing="ij"), -1).reshape(-1, d)
    index = range(len(points))
    chosen: Iterable[tuple[int, ...]]
    if positions:
        chosen = itertools.product(index, repeat=n)
    elif repeats:
        chosen = itertools.combinations_with_replacement(index, n)
    else:
        chosen = itertools.combinations(index, n)
    rows = np.array(list(chosen))
    if not len(rows):
        raise ValueError(
            f"grid={grid} has only {grid**d} points for n={n} different tokens; pass repeats=True"
        )
    return points[rows]


def _uniform(samples: int, n: int, d: int, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand(samples, n, d, dtype=torch.float64, generator=generator, device="cpu")


def _centre(x: Tensor, grid: int) -> Tensor:
    """The centre of the cell of each coordinate."""
    return (torch.floor(x * grid).clamp(0, grid - 1) + 0.5) / grid


def _read(
    lookup: OneLayerTransformer, v: Tensor, placed: Tensor, width: float, seed: int
) -> tuple[Tensor, float]:
    """Outputs along `v` at cell centres `[contexts, n]`, and how much they vary within a cell."""
    contexts, n, d = placed.shape
    jitter = _uniform(contexts, n, d, seed) - 0.5
    with torch.no_grad():
        along = lookup(placed) @ v
        elsewhere = lookup(placed + jitter * width) @ v
    return along, float((along - elsewhere).abs().max())


def _asymmetry(f: Function, d: int, n: int, samples: int, seed: int) -> float:
    """Distance of f from its symmetrisation; 0 if swapping and rotating tokens changes nothing.

    A swap of neighbours and a rotation generate all orders.
    """
    x = _uniform(samples, n, d, seed)
    few = x[:100]
    here = f(few)
    rotation, swap = np.roll(np.arange(n), 1), np.arange(n)
    swap[:2] = swap[:2][::-1]
    moved = max(
        float((f(few[:, order.tolist()])[:, np.argsort(order).tolist()] - here).abs().max())
        for order in (rotation, swap)
    )
    if moved <= _EQUIVARIANCE * float(here.abs().max()):
        return 0.0
    if n > _MAX_SYMMETRISED:
        raise ValueError(
            f"f must be permutation equivariant for n > {_MAX_SYMMETRISED}, got n = {n} and "
            f"results that change by {moved:.3g} with the order; averaging f over all n! orders "
            "takes too long"
        )
    return distance(f, symmetrised(f), x)
