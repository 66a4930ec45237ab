"""Distances between the tokens of a batch: the assumptions of every construction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Batch = Tensor | Sequence[Tensor]

# Beyond this many dimensions a k-d tree visits nearly every node; a matrix product is faster.
_TREE_DIMENSIONS = 8
_BLOCK_ROWS = 256  # rows of the matrix product at a time, so that a block stays in cache


class ResolutionWarning(UserWarning):
    """A distance or gap is too small for the arithmetic; the message says how small."""


class ResolutionError(ValueError):
    """A construction needs more digits than the arithmetic has; the message says how many."""


class ConflictError(ValueError):
    """Labels differ where no construction can tell the inputs apart; the message lists them."""


class DomainError(ValueError):
    """An input is outside the set for which a construction was made; the message says where."""


@dataclass(frozen=True)
class Separation:
    """The report of `separation`.

    Attributes:
        vocabulary: `[|V|, d]`, the distinct tokens.
        tokens: for each sequence, the rows of its tokens in `vocabulary`.
        r_min, r_max: smallest and largest norm of a token.
        epsilon: smallest distance between two distinct tokens (inf if there is only one).
        near_duplicates: `(row, row, distance)` of distinct tokens closer than `tolerance`.
        repeated: sequences in which some token occurs more than once.
        proportional: pairs of sequences of different length whose token counts are proportional,
            as (x, y) and (x, x, y, y). No softmax attention without positions separates them.
        tolerance: the distance below which two distinct tokens count as near duplicates.
    """

    vocabulary: Tensor
    tokens: tuple[np.ndarray, ...]
    r_min: float
    r_max: float
    epsilon: float
    near_duplicates: tuple[tuple[int, int, float], ...]
    repeated: tuple[int, ...]
    proportional: tuple[tuple[int, int], ...]
    tolerance: float

    @property
    def has_duplicates_within_sequence(self) -> bool:
        return bool(self.repeated)

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return max(len(t) for t in self.tokens)

    def __str__(self) -> str:
        return (
            f"{len(self.tokens)} sequences, {len(self.vocabulary)} tokens, "
            f"norms {self.r_min:.3g} .. {self.r_max:.3g}, epsilon {self.epsilon:.3g}, "
            f"{len(self.near_duplicates)} near duplicates, "
            f"{len(self.repeated)} sequences repeat a token, "
            f"{len(self.proportional)} proportional pairs"
        )


def separation(batch: Batch, tolerance: float | None = None) -> Separation:
    """Measure norms and smallest distances of the tokens of `batch`, and find duplicates.

    Tokens are the same only if all their coordinates are equal. Different tokens closer than
    `tolerance` are near duplicates: they are listed, and a `ResolutionWarning` gives the smallest
    distance.

    Args:
        batch: `[N, n, d]`, or a sequence of `[n_i, d]` tensors.
        tolerance: defaults to `sqrt(machine epsilon) * r_max` of the batch's dtype. A layer that
            separates tokens at that distance amplifies rounding errors to the square root of the
            machine epsilon.

    Example:
        >>> report = separation(torch.tensor([[[1.0], [2.0]], [[2.0], [4.0]]]))
        >>> report.r_min, report.r_max, report.epsilon
        (1.0, 4.0, 1.0)
    """
    sequences, dtype = as_sequences(batch)
    stacked = np.concatenate(sequences)
    vocabulary, index = np.unique(stacked, axis=0, return_inverse=True)
    tokens = _split(index.reshape(-1), sequences)
    norms = np.linalg.norm(vocabulary, axis=1)
    if tolerance is None:
        tolerance = math.sqrt(torch.finfo(dtype).eps) * float(norms.max())
    elif not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")

    epsilon = closest_pair(vocabulary)
    near = _pairs_below(vocabulary, tolerance) if epsilon < tolerance else ()
    if near:
        first, second, distance = min(near, key=lambda pair: pair[2])
        warnings.warn(
            f"{len(near)} pairs of distinct tokens are closer than {tolerance:.3g}; the closest, "
            f"rows {first} and {second} of the vocabulary, are {distance:.3g} apart. Merge them if "
            "they mean the same token, or rescale the data",
            ResolutionWarning,
            stacklevel=2,
        )
    return Separation(
        vocabulary=torch.from_numpy(vocabulary),
        tokens=tokens,
        r_min=float(norms.min()),
        r_max=float(norms.max()),
        epsilon=epsilon,
        near_duplicates=near,
        repeated=tuple(i for i, t in enumerate(tokens) if len(np.unique(t)) < len(t)),
        proportional=_proportional_pairs(tokens),
        tolerance=float(tolerance),
    )


def check_conflicts(
    values: np.ndarray,
    first: np.ndarray,
    key: np.ndarray,
    where: Callable[[int], str],
    proportional: int = 0,
) -> None:
    """Raise a ConflictError if entries with the same key have different values.

    Args:
        values: `[entries, k]`.
        first, key: the first entry of each key, and the key of each entry.
        where: from an entry to the words for it.
        proportional: pairs of sequences with the same shares of tokens, for the message.
    """
    wrong = np.flatnonzero((values != values[first[key]]).any(1)).tolist()
    if not wrong:
        return

    def show(entry: int) -> str:
        return f"{where(entry)} (label {', '.join(f'{x:g}' for x in values[entry].tolist())})"

    shown = [f"{show(int(first[key[entry]]))} and {show(entry)}" for entry in wrong[:5]]
    more = "" if len(wrong) <= 5 else f"; and {len(wrong) - 5} more"
    shares = (
        " Sequences of different length count as the same context when their tokens occur in the "
        f"same proportions ({proportional} pairs here): no softmax attention without positions "
        "distinguishes them."
        if proportional
        else ""
    )
    raise ConflictError(
        f"labels must be a function of token and context, got {len(wrong)} conflicts: "
        f"{'; '.join(shown)}{more}. Attention without positions does not see the order of the "
        f"other tokens.{shares}"
    )


def as_sequences(batch: Batch, name: str = "batch") -> tuple[list[np.ndarray], torch.dtype]:
    """The sequences of `batch` as fp64 arrays `[n_i, d]`, and their original dtype."""
    if isinstance(batch, Tensor) and batch.ndim != 3:
        raise ValueError(
            f"{name} must be [N, n, d] or a sequence of [n_i, d], got shape {list(batch.shape)}"
        )
    if not len(batch):
        raise ValueError(f"{name} must hold at least one sequence, got none")
    for i, x in enumerate(batch):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}[{i}] must be a floating-point tensor, got {kind}")
        if x.ndim != 2 or 0 in x.shape or x.shape[1] != batch[0].shape[1]:
            raise ValueError(
                f"{name}[{i}] must be [n_i, d] with n_i, d >= 1 and the d of {name}[0] "
                f"({list(batch[0].shape)}), got {list(x.shape)}"
            )
        if not torch.isfinite(x).all():
            raise ValueError(f"{name}[{i}] must be finite, got inf or nan")
    # Adding 0 turns -0.0 into 0.0, because they must be the same token.
    return [x.detach().cpu().double().numpy() + 0.0 for x in batch], batch[0].dtype


def contexts(tokens: Sequence[np.ndarray], mode: str = "multiset") -> np.ndarray:
    """An integer for each sequence, equal for sequences with the same context.

    Args:
        tokens: integer arrays, as in `Separation.tokens`.
        mode: "set" (which tokens occur, the paper's definition), "multiset" (and how often), or
            "proportion" (in which proportions they occur, all that softmax attention depends on).

    Example:
        >>> import numpy as np
        >>> contexts([np.array([0, 1]), np.array([1, 0, 1, 0])], "proportion")
        array([0, 0])
    """
    if mode not in ("set", "multiset", "proportion"):
        raise ValueError(f"mode must be 'set', 'multiset' or 'proportion', got {mode!r}")
    keys: dict[bytes, int] = {}
    result = np.empty(len(tokens), dtype=np.int64)
    for i, row in enumerate(tokens):
        values, counts = np.unique(row, return_counts=True)
        if mode == "set":
            counts = np.ones_like(counts)
        elif mode == "proportion":
            counts = counts // np.gcd.reduce(counts)
        result[i] = keys.setdefault(np.stack([values, counts]).tobytes(), len(keys))
    return result


def closest_pair(points: np.ndarray, colour: np.ndarray | None = None) -> float:
    """The smallest distance between two points of different `colour`, without testing all pairs.

    Args:
        points: `[M, k]`.
        colour: `[M]` integers; None gives every point its own.

    Returns:
        The distance, or inf if there are fewer than two colours.

    Example:
        >>> import numpy as np
        >>> closest_pair(np.array([[0.0], [0.1], [1.0]]), np.array([7, 7, 8]))
        0.9
    """
    if colour is None:
        colour = np.arange(len(points))
    _, colour, sizes = np.unique(colour, return_inverse=True, return_counts=True)
    if len(sizes) < 2:
        return math.inf
    if points.shape[1] == 1:
        # Between any two points of different colour lies an adjacent pair of different colour.
        order = np.argsort(points[:, 0], kind="stable")
        steps = np.diff(points[order, 0])
        return float(steps[np.diff(colour[order]) != 0].min())
    if sizes.max() == 1 and points.shape[1] > _TREE_DIMENSIONS:
        return min(distances.min() for _, _, distances in _dense_neighbours(points, 0.0))
    if sizes.max() < 64:
        # At least one of this many neighbours has another colour.
        k = int(sizes.max()) + 1
        distances, neighbours = _tree(points).query(points, k=k)
        return float(distances[colour[neighbours] != colour[:, None]].min())
    return _closest_between_clusters(points, colour)


def _closest_between_clusters(points: np.ndarray, colour: np.ndarray) -> float:
    """`closest_pair` for a few large clusters: compare only those whose balls are close."""
    order = np.argsort(colour, kind="stable")
    clusters = np.split(points[order], np.flatnonzero(np.diff(colour[order])) + 1)
    centres = np.stack([c.mean(0) for c in clusters])
    radii = np.array(
        [np.linalg.norm(c - m, axis=1).max() for c, m in zip(clusters, centres, strict=True)]
    )
    best = closest_pair(np.stack([c[0] for c in clusters]))
    pairs = _tree(centres).query_pairs(best + 2 * radii.max(), output_type="ndarray")
    apart = np.linalg.norm(centres[pairs[:, 0]] - centres[pairs[:, 1]], axis=1)
    lower = apart - radii[pairs].sum(1)
    trees: dict[int, Any] = {}
    for rank in np.argsort(lower):
        if lower[rank] >= best:
            break
        i, j = pairs[rank]
        if i not in trees:
            trees[i] = _tree(clusters[i])
        distances, _ = trees[i].query(clusters[j], distance_upper_bound=best)
        best = min(best, float(distances.min()))
    return best


def _tree(points: np.ndarray) -> Any:
    try:
        from scipy.spatial import cKDTree
    except ImportError:
        raise ImportError(
            "boltzattn.theory needs scipy for nearest neighbours; "
            "install it with pip install 'boltzattn[theory]'"
        ) from None
    return cKDTree(points)


def _dense_neighbours(
    points: np.ndarray, reach: float
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Blocks of `(i, j, distance)` with `i < j`: all pairs within `reach`, and the closest pair.

    A matrix product finds candidates. It loses digits, so their distances are computed again.
    """
    squares = (points**2).sum(1)
    # Far above the rounding error of |x|^2 + |y|^2 - 2xy, far below any interesting distance^2.
    slack = 1e-12 * float(squares.max())
    limit = math.inf
    for start in range(0, len(points) - 1, _BLOCK_ROWS):
        rows = points[start : start + _BLOCK_ROWS]
        approximate = -2 * (rows @ points[start:].T)
        approximate += squares[start:]
        approximate += squares[start : start + _BLOCK_ROWS, None]
        approximate[:, : len(rows)][np.tri(len(rows), dtype=bool)] = np.inf  # keep i < j
        limit = max(min(limit, float(approximate.min())), reach**2)
        i, j = np.nonzero(approximate <= limit + slack)
        if len(i):
            i, j = i + start, j + start
            yield i, j, np.linalg.norm(points[i] - points[j], axis=1)


def _pairs_below(points: np.ndarray, reach: float) -> tuple[tuple[int, int, float], ...]:
    if points.shape[1] > _TREE_DIMENSIONS:
        blocks = list(_dense_neighbours(points, reach))
        i, j, distances = (np.concatenate(part) for part in zip(*blocks, strict=True))
    else:
        i, j = _tree(points).query_pairs(reach, output_type="ndarray").T
        distances = np.linalg.norm(points[i] - points[j], axis=1)
    near = distances < reach
    found = zip(i[near].tolist(), j[near].tolist(), distances[near].tolist(), strict=True)
    return tuple(found)


def _proportional_pairs(tokens: Sequence[np.ndarray]) -> tuple[tuple[int, int], ...]:
    """A pair for each sequence with the proportions of an earlier sequence of another length."""
    lengths = [len(t) for t in tokens]
    if len(set(lengths)) == 1:
        return ()
    first: dict[int, int] = {}
    pairs = []
    for i, key in enumerate(contexts(tokens, "proportion").tolist()):
        j = first.setdefault(key, i)
        if lengths[j] != lengths[i]:
            pairs.append((j, i))
    return tuple(pairs)


def _split(flat: np.ndarray, like: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    return tuple(np.split(flat, np.cumsum([len(x) for x in like])[:-1]))
