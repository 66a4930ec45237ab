"""Memorization: construct a one-layer transformer that reproduces given labels.

The attention of `construct_attention` maps each (token, context) to a different number, its id; the
network after it is a piecewise linear function of the id with one breakpoint per id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from boltzattn.nn import FeedForward, OneLayerTransformer
from boltzattn.theory.construction import RankOneAttention, construct_attention, evaluate
from boltzattn.theory.contextual import SAFETY
from boltzattn.theory.separation import Batch, ResolutionError, check_conflicts, contexts

FORMS = ("linear", "plateau")


@dataclass(frozen=True)
class MemorizationReport:
    """What `memorize` built, and the errors of its module on the data.

    Attributes:
        attention: the constructed head.
        form: "linear" or "plateau".
        ids: number of different (token, context) pairs, M.
        relative_gap: smallest distance between two ids along the reading direction, divided by the
            range of the ids.
        noise: rounding noise of the ids, divided by their range.
        hidden: number of neurons; 2d of them cancel the skip connection.
        parameters: number of free parameters, without repetitions and zeros.
        paper_parameters: the paper's count, `4 (s + d) + d (2 n N + d)`.
        max_error: largest distance of an output of the module from its label.
        label_range: largest minus smallest label.
        accuracy: for integer labels, the share of outputs that round to their label; None for other
            labels.
    """

    attention: RankOneAttention
    form: str
    ids: int
    relative_gap: float
    noise: float
    hidden: int
    parameters: int
    paper_parameters: int
    max_error: float
    label_range: float
    accuracy: float | None

    def __str__(self) -> str:
        return (
            f"{self.ids} ids, relative gap {self.relative_gap:.2g} (noise {self.noise:.1g}), "
            f"{self.hidden} neurons, {self.parameters} parameters (paper "
            f"{self.paper_parameters}), max error {self.max_error:.2g} of range "
            f"{self.label_range:.3g}"
            + ("" if self.accuracy is None else f", {100 * self.accuracy:.4g}% correct")
        )


def memorize(
    sequences: Batch,
    labels: Tensor | Sequence[Tensor],
    *,
    form: str = "linear",
    scale: str = "practical",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> OneLayerTransformer:
    """Build a transformer whose output for every token is its label.

    Args:
        sequences: `[N, n, d]`, or a sequence of `[n_i, d]` tensors.
        labels: a label per sequence, `[N]`; or per token, `[N, n]`, or `[N, n, k]` with
            `k <= d`; or a sequence of `[n_i]` or `[n_i, k]` tensors. Classes are integers; round
            the output to get them. A label of a sequence is the label of each of its tokens.
        form: "linear" interpolates linearly between the labels; "plateau" is constant within a
            third of the gap around each id and takes twice as many neurons.
        scale: as in `construct_attention`.
        dtype: dtype of the weights and of the arithmetic.
        seed: seed of the random choice of `v`.

    Returns:
        The module `[.., n, d] -> [.., n, d]`; coordinates `0..k-1` of the output are the label, the
        others are 0. Its `report` is a `MemorizationReport`.

    Raises:
        ConflictError: if one token in one context has two labels (they are listed).
        ResolutionError: if the ids are too close for `dtype` (the gap and the noise are given).

    Example:
        >>> x = torch.randn(6, 2)[torch.tensor([[0, 1, 2], [0, 1, 3], [4, 4, 5]])].double()
        >>> model = memorize(x, torch.tensor([7, 8, 9]))
        >>> model(x)[:, 0, 0].round()
        tensor([7., 8., 9.], dtype=torch.float64, grad_fn=<RoundBackward0>)
    """
    if form not in FORMS:
        raise ValueError(f"form must be 'linear' or 'plateau', got {form!r}")
    targets = _targets(labels, sequences)
    head = construct_attention(sequences, scale, dtype=dtype, seed=seed)
    first, key = _unique_ids(head)
    values = np.concatenate(targets)
    places = [(i, j) for i, y in enumerate(targets) for j in range(len(y))]
    check_conflicts(
        values,
        first,
        key,
        lambda i: "sequence {} token {}".format(*places[i]),
        len(head.separation.proportional),
    )

    outputs = torch.cat(evaluate(head.module(), sequences)).double().numpy()
    along = outputs @ head.v.numpy()
    positions = along[first]
    noise = float(np.abs(along - positions[key]).max())
    order = np.argsort(positions)
    positions, values = positions[order], values[first][order]
    extent = float(positions[-1] - positions[0]) or 1.0
    gap = float(np.diff(positions).min()) if len(positions) > 1 else math.inf
    noise = max(noise, head.measured.noise, torch.finfo(dtype).eps * np.abs(positions).max())
    if gap <= SAFETY * noise:
        raise ResolutionError(
            f"sequences cannot be memorized in {dtype} with scale={scale!r}: the closest of "
            f"{len(positions)} context ids are {gap:.3g} apart (relative {gap / extent:.3g}), not "
            f"above {SAFETY:g} times their noise of {noise:.2g}. "
            f"Smallest distance of two tokens: {head.separation.epsilon:.3g}. Use "
            "scale='practical' and float64, fewer sequences, or tokens further apart"
        )

    ff2 = step_network(positions, values, head.v.numpy(), form).to(dtype)
    model = head.module(ff2=ff2)
    d, k = head.w_q.shape[1], values.shape[1]
    results = torch.cat(evaluate(model, sequences)).double().numpy()
    wanted = np.zeros_like(results)
    wanted[:, :k] = np.concatenate(targets)
    hidden = ff2.linear1.out_features
    model.report = MemorizationReport(
        attention=head,
        form=form,
        ids=len(positions),
        relative_gap=gap / extent,
        noise=noise / extent,
        hidden=hidden,
        # Reading direction, breakpoints, output weights; output bias.
        parameters=head.parameters + d + (hidden - 2 * d) * (1 + k) + k,
        paper_parameters=head.parameters + d * (2 * len(key) + d),
        max_error=float(np.abs(results - wanted).max()),
        label_range=float(np.ptp(values)),
        accuracy=_accuracy(results[:, :k], wanted[:, :k]),
    )
    return model


def random_task(
    n: int, vocabulary: int, count: int, d: int, classes: int = 10, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Sequences without repeated tokens, and random labels for each token and context.

    Args:
        n: tokens in a sequence.
        vocabulary: number of different tokens, normally distributed in R^d.
        count: number of sequences.
        classes: labels are integers below this.

    Returns:
        fp64 `[count, n, d]` and int64 `[count, n]`.

    Example:
        >>> x, y = random_task(n=4, vocabulary=12, count=100, d=8)
        >>> x.shape, y.shape
        (torch.Size([100, 4, 8]), torch.Size([100, 4]))
    """
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(vocabulary)[:n] for _ in range(count)])
    table = rng.integers(classes, size=(count, vocabulary))
    labels = table[contexts(list(tokens))[:, None], tokens]
    points = rng.standard_normal((vocabulary, d))
    return torch.from_numpy(points[tokens]), torch.from_numpy(labels)


def step_network(
    positions: np.ndarray, values: np.ndarray, read: np.ndarray, form: str
) -> FeedForward:
    """A network that maps `z` with `read . z = positions[j]` to `values[j]` and cancels the skip.

    Args:
        positions: `[M]`, increasing.
        values: `[M, k]`, `k <= d`; other coordinates become 0.
        read: `[d]`, the direction onto which `z` is projected.
        form: "linear" or "plateau", as in `memorize`.

    Example:
        >>> import numpy as np
        >>> values = np.array([[5.0], [2.0], [7.0]])
        >>> net = step_network(np.arange(3.0), values, np.ones(1), "linear")
        >>> net(torch.tensor([[0.0], [1.0], [2.0]]).double()).flatten().tolist()
        [5.0, 2.0, 7.0]
    """
    d, k = len(read), values.shape[1]
    if k > d:
        raise ValueError(f"values must have at most d = {d} columns, got {k}; widen the tokens")
    # Units of the range keep products of slopes and distances close to the size of the labels.
    start, extent = positions[0], float(positions[-1] - positions[0]) or 1.0
    knots, slopes = _knots((positions - start) / extent, values, form)

    w1 = np.concatenate([np.eye(d), -np.eye(d), np.outer(np.ones(len(knots)), read / extent)])
    b1 = np.concatenate([np.zeros(2 * d), -knots - start / extent])
    w2 = np.zeros((d, len(w1)))
    w2[:, :d], w2[:, d : 2 * d] = -np.eye(d), np.eye(d)  # z - relu(z) + relu(-z) = 0
    w2[:k, 2 * d :] = slopes.T
    b2 = np.zeros(d)
    b2[:k] = values[0]
    return FeedForward.from_weights(*(torch.from_numpy(w) for w in (w1, b1, w2, b2)))


def _knots(positions: np.ndarray, values: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Breakpoints and changes of slope, without breakpoints at which no slope changes."""
    steps, rises = np.diff(positions), np.diff(values, axis=0)
    if form == "linear":
        knots = positions[:-1]
        slopes = rises / steps[:, None]
        changes = np.diff(slopes, axis=0, prepend=0.0)
    else:
        up, down = positions[:-1] + steps / 3, positions[:-1] + 2 * steps / 3
        slopes = 3 * rises / steps[:, None]
        knots = np.stack([up, down], 1).reshape(-1)
        changes = np.stack([slopes, -slopes], 1).reshape(-1, values.shape[1])
    needed = (changes != 0).any(1)
    return knots[needed], changes[needed]


def _targets(labels: Tensor | Sequence[Tensor], sequences: Batch) -> list[np.ndarray]:
    """Labels as `[n_i, k]` fp64 arrays, one per sequence."""
    if len(labels) != len(sequences):
        raise ValueError(
            f"labels must have one entry per sequence, got {len(labels)} for {len(sequences)}"
        )
    d = sequences[0].shape[-1]
    targets = []
    for i, (label, x) in enumerate(zip(labels, sequences, strict=True)):
        y = given = torch.as_tensor(label, device="cpu").detach().double()
        if y.ndim == 0:
            y = y.expand(len(x))
        if y.ndim == 1:
            y = y[:, None]
        if y.ndim != 2 or len(y) != len(x) or not 1 <= y.shape[1] <= d:
            raise ValueError(
                f"labels[{i}] must be one number, [n] or [n, k] with n = {len(x)} and k <= d = {d} "
                f"(pad tokens with zeros to widen them), got {list(given.shape)}"
            )
        if not torch.isfinite(y).all():
            raise ValueError(f"labels[{i}] must be finite, got inf or nan")
        targets.append(y.numpy())
    return targets


def _unique_ids(head: RankOneAttention) -> tuple[np.ndarray, np.ndarray]:
    """First position of each (token, context) in the flat batch, and the id of each position."""
    tokens = head.separation.tokens
    context = np.repeat(contexts(tokens, "proportion"), [len(t) for t in tokens])
    _, first, key = np.unique(
        np.stack([np.concatenate(tokens), context], 1),
        axis=0,
        return_index=True,
        return_inverse=True,
    )
    return first, key.reshape(-1)


def _accuracy(results: np.ndarray, wanted: np.ndarray) -> float | None:
    if (wanted != np.round(wanted)).any():
        return None
    return float((np.round(results) == wanted).all(1).mean())
