"""Memorization with about sqrt(N) parameters: sequence ids from attention, labels from packed bits.

Kajitsuka & Sato ("On the Optimal Memorization Capacity of Transformers", ICLR 2025, arXiv
2409.17677) prove that transformers memorize the labels of N sequences with O~(sqrt(N)) parameters,
and of the n N tokens of N sequences with O~(sqrt(n N)), and that fewer do not suffice (for tokens:
with hardmax). The network here is derived anew, with arithmetic that fp64 carries out exactly; see
`bit_extraction`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from boltzattn.nn import OneLayerTransformer
from boltzattn.theory import direction
from boltzattn.theory.bit_extraction import PackedCode, packed_network
from boltzattn.theory.construction import pooled_tokens, rank_one_weights, search_head
from boltzattn.theory.relu_network import count_nonzero
from boltzattn.theory.separation import check_conflicts

READ = ("last", "all")

# With more ids than this the search tries every third temperature and output scale.
_MANY = 20_000
_DIRECTIONS = 4
# Bits of a parameter in fp64.
PARAMETER_BITS = 64


@dataclass(frozen=True)
class PackedReport:
    """What `memorize_packed` built, and the errors of its module on the data.

    Attributes:
        code: how the labels are stored; `code.ids` is their number M.
        tied: whether the walk is a loop.
        relative_gap: smallest distance between two ids, divided by their range.
        layers: number of ReLU layers that are evaluated.
        parameters: number of nonzero weights of the module, attention included.
        word_parameters: those that are words, which hold the labels.
        max_error: largest distance of an output of the module from its label.
        accuracy: share of outputs that round to their label.
    """

    code: PackedCode
    tied: bool
    relative_gap: float
    layers: int
    parameters: int
    word_parameters: int
    max_error: float
    accuracy: float

    @property
    def counting_bound(self) -> float:
        """Parameters of 64 bits that any program needs to store the labels."""
        return self.code.ids * self.code.label_bits / PARAMETER_BITS

    @property
    def root_bound(self) -> float:
        """`sqrt(M)` for labels of one bit: the lower bound in real arithmetic, up to logarithms.

        ReLU networks of P parameters have a VC dimension of O(P^2) and cannot fit more labels.
        """
        return math.sqrt(self.code.ids * self.code.label_bits)

    def __str__(self) -> str:
        return (
            f"{self.code.ids} ids in {self.code.groups} groups of {self.code.group_size}, "
            f"{self.code.words} words of {self.code.word_bits} bits per group, {self.layers} "
            f"layers, {self.parameters} parameters (words {self.word_parameters}, bounds "
            f"{self.counting_bound:.0f} in fp64 and {self.root_bound:.0f} in real arithmetic), "
            f"margin {self.code.margin:.1g} (noise {self.code.noise:.1g}), "
            f"{100 * self.accuracy:.4g}% correct"
        )


def memorize_packed(
    sequences: Tensor,
    labels: Tensor,
    *,
    read: str = "last",
    tied: bool = False,
    seed: int = 0,
) -> OneLayerTransformer:
    """Build a transformer whose output is the label, with far fewer parameters than labels.

    Args:
        sequences: fp64 `[N, n, d]`.
        labels: integers from 0; `[N]` for `read="last"`, `[N, n]` for `read="all"`.
        read: "last" reads the output of the last token only, as in next-token prediction: N ids;
            "all" that of every token: up to n N ids.
        tied: use the same weights in all steps of the walk over the bits; then the network is a
            loop, with fewer parameters and more layers.
        seed: seed of the random choices.

    Returns:
        The module `[.., n, d] -> [.., n, d]`; coordinate 0 of the output is the label. Its `report`
        is a `PackedReport`.

    Raises:
        ConflictError: if one token in one context has two labels.
        ResolutionError: if fp64 does not resolve the ids; the message says by how much.

    Example:
        >>> x = torch.randn(20, 4, dtype=torch.float64)[torch.randint(20, (300, 6))]
        >>> labels = torch.arange(300) % 2
        >>> model = memorize_packed(x, labels)
        >>> bool((model(x)[:, -1, 0] == labels).all())
        True
    """
    if read not in READ:
        raise ValueError(f"read must be 'last' or 'all', got {read!r}")
    _check(sequences, labels, read)
    n, d = sequences.shape[1:]
    vocabulary, index = np.unique(
        sequences.detach().cpu().numpy().reshape(-1, d) + 0.0, axis=0, return_inverse=True
    )
    tokens = index.reshape(-1, n)
    places = np.arange(n - 1, n) if read == "last" else np.arange(n)
    wanted = labels.cpu().numpy().reshape(len(tokens), len(places))
    first, key = _ids(tokens, places)
    check_conflicts(wanted.reshape(-1, 1), first, key, lambda i: _where(i, places))

    rng = np.random.default_rng(seed)
    units = direction.random_directions(vocabulary, _DIRECTIONS, rng)
    row, column = first // len(places), places[first % len(places)]
    members, own = tokens[row], tokens[row, column]
    unit, beta, size = search_head(
        vocabulary,
        units,
        lambda along, beta: (along[own], pooled_tokens(along[own], along[members], beta)),
        every=1 if len(first) <= _MANY else 3,
    )
    weights = rank_one_weights(unit, beta, size * unit, np.ones(1), torch.float64)
    attention = OneLayerTransformer.from_weights(*weights, method="direct")
    seen, noise = _outputs(attention, sequences, places, unit, rng)
    positions = (seen @ unit).reshape(-1)[first]
    order = np.argsort(positions)
    network, code = packed_network(
        positions[order], wanted.reshape(-1)[first][order], unit, noise, tied=tied, seed=seed
    )
    model = OneLayerTransformer.from_weights(*weights, ff2=network, method="direct")
    with torch.no_grad():
        outputs = network(torch.from_numpy(seen)).numpy()[..., 0]
    steps = np.diff(positions[order])
    model.report = PackedReport(
        code=code,
        tied=tied,
        relative_gap=float(steps.min() / steps.sum()) if len(steps) else 1.0,
        layers=len(network),
        parameters=count_nonzero(model),
        word_parameters=code.groups * code.words * code.label_bits,
        max_error=float(np.abs(outputs - wanted).max()),
        accuracy=float((np.round(outputs) == wanted).mean()),
    )
    return model


def random_sequences(
    n: int, vocabulary: int, count: int, d: int, classes: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Sequences with different contexts, and a random label for each.

    Returns:
        fp64 `[count, n, d]` and int64 `[count]`.

    Example:
        >>> x, y = random_sequences(n=8, vocabulary=64, count=1000, d=4)
        >>> x.shape, y.shape
        (torch.Size([1000, 8, 4]), torch.Size([1000]))
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(vocabulary, size=(count, n))
    for _ in range(100):
        _, first = np.unique(np.sort(tokens, 1), axis=0, return_index=True)
        if len(first) == count:
            break
        again = np.setdiff1d(np.arange(count), first)
        tokens[again] = rng.integers(vocabulary, size=(len(again), n))
    else:
        raise ValueError(
            f"count must leave enough different contexts of n={n} of {vocabulary} tokens, got "
            f"{count}; use a larger n or vocabulary"
        )
    points = rng.standard_normal((vocabulary, d))
    return torch.from_numpy(points[tokens]), torch.from_numpy(rng.integers(classes, size=count))


def _check(sequences: Tensor, labels: Tensor, read: str) -> None:
    if sequences.ndim != 3 or 0 in sequences.shape or sequences.dtype != torch.float64:
        raise ValueError(
            "sequences must be fp64 of shape [N, n, d], got "
            f"{sequences.dtype} of shape {list(sequences.shape)}"
        )
    if not torch.isfinite(sequences).all():
        raise ValueError("sequences must be finite, got inf or nan")
    wanted = sequences.shape[:1] if read == "last" else sequences.shape[:2]
    if labels.shape != wanted:
        raise ValueError(
            f"labels must have shape {list(wanted)} for read={read!r}, got {list(labels.shape)}"
        )
    if labels.is_floating_point() or int(labels.min()) < 0:
        raise ValueError(
            f"labels must be integers from 0, got {labels.dtype}, least {labels.min()}"
        )


def _ids(tokens: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First entry of each (token, context), and the id of each entry, entries being [N, places]."""
    _, context = np.unique(np.sort(tokens, 1), axis=0, return_inverse=True)
    entries = context.reshape(-1, 1) * (tokens.max() + 1) + tokens[:, places]
    _, first, key = np.unique(entries.reshape(-1), return_index=True, return_inverse=True)
    return first, key.reshape(-1)


def _where(entry: int, places: np.ndarray) -> str:
    return f"sequence {entry // len(places)} token {places[entry % len(places)]}"


def _outputs(
    attention: OneLayerTransformer,
    sequences: Tensor,
    places: np.ndarray,
    unit: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, float]:
    """Outputs at the places that are read, and the noise along `unit`, from shuffled sequences."""
    n = sequences.shape[1]
    order = rng.permutation(n)
    if len(places) == 1:  # the last token stays in its place
        order = np.append(rng.permutation(n - 1), n - 1)
    with torch.no_grad():
        seen = attention(sequences)[:, places].numpy()
        shuffled = attention(sequences[:, order])[:, np.argsort(order)[places]].numpy()
    spread = np.abs((seen - shuffled) @ unit).max()
    rounding = np.finfo(np.float64).eps * (np.abs(seen) @ np.abs(unit)).max()
    return seen, float(max(spread, rounding))
