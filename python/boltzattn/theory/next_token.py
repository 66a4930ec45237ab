"""A causal one-layer decoder that memorizes the next tokens of long documents.

Madden, Fox & Thrampoulidis (arXiv 2405.13718) prove that the number of contexts whose next-token
distributions a one-layer decoder can interpolate is, up to a constant factor, its number of
parameters divided by the size of the vocabulary (less one). Here the decoder is constructed: one
causal head of rank 1 gives every prefix an id, and a network of the id gives the next token. Causal
attention is a scan in linear time (`method="transform"`).

Every document starts with the same extra token. It occurs once in a prefix, so no two prefixes of
different length have proportional counts, which softmax attention could not tell apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from boltzattn.functional import attention
from boltzattn.nn import OneLayerTransformer
from boltzattn.theory import direction
from boltzattn.theory.bit_extraction import packed_network
from boltzattn.theory.construction import pooled_tokens, rank_one_weights, search_head
from boltzattn.theory.contextual import SAFETY
from boltzattn.theory.memorization import step_network
from boltzattn.theory.relu_network import count_nonzero
from boltzattn.theory.separation import ResolutionError, check_conflicts

NETWORKS = ("linear", "packed", "looped")

_DIRECTIONS = 4
_MANY = 20_000
# The scan is compared with plain sums at this many prefixes.
_CHECKED = 64


@dataclass(frozen=True)
class NextTokenReport:
    """What `memorize_next` built, and the errors of its decoder on the documents.

    Attributes:
        network: "linear", "packed" or "looped".
        contexts: number of different prefixes.
        vocabulary: number of different tokens, without the first one.
        relative_gap: smallest distance between two ids, divided by their range.
        noise: rounding noise of the ids, divided by their range.
        parameters: number of free parameters: for "linear" as in `memorize`, else nonzero weights.
        max_error: largest distance of an output of the decoder from its target.
        accuracy: for next tokens, the share of outputs that round to the next token; None for other
            targets.
    """

    network: str
    contexts: int
    vocabulary: int
    relative_gap: float
    noise: float
    parameters: int
    max_error: float
    accuracy: float | None

    def __str__(self) -> str:
        return (
            f"{self.contexts} prefixes, relative gap {self.relative_gap:.2g} (noise "
            f"{self.noise:.1g}), {self.parameters} parameters, max error {self.max_error:.2g}"
            + ("" if self.accuracy is None else f", {100 * self.accuracy:.4g}% correct")
        )


def memorize_next(
    tokens: Tensor,
    embedding: Tensor,
    *,
    network: str = "linear",
    targets: Tensor | None = None,
    seed: int = 0,
) -> OneLayerTransformer:
    """Build a causal decoder whose output at every token is the next token.

    Args:
        tokens: documents as integers `[N, T]` below V.
        embedding: fp64 `[V + 1, d]`; the last row is the token before every document.
        network: "linear" has a breakpoint per prefix; "packed" and "looped" read the next token out
            of packed bits, see `memorize_packed`.
        targets: real numbers `[N, T, k]` with k <= d to output instead of the next token, for
            instance V - 1 of `empirical_distributions`, which documents need that start alike and
            go on differently; with `network="linear"` only.
        seed: seed of the random choices.

    Returns:
        The decoder: `model(decoder_inputs(tokens, embedding), is_causal=True)[..., 0]` rounds to
        `tokens`. Its `report` is a `NextTokenReport`.

    Raises:
        ConflictError: if two prefixes with the same last token and the same tokens before it, in
            any order, are followed by different tokens.
        ResolutionError: if fp64 does not resolve the ids.

    Example:
        >>> tokens, embedding = torch.randint(5, (1, 200)), torch.randn(6, 3).double()
        >>> model = memorize_next(tokens, embedding)
        >>> out = model(decoder_inputs(tokens, embedding), is_causal=True)[..., 0]
        >>> bool((out.round() == tokens).all())
        True
    """
    if network not in NETWORKS:
        raise ValueError(
            f"network must be one of {', '.join(map(repr, NETWORKS))}, got {network!r}"
        )
    _check(tokens, embedding, network, targets)
    x = decoder_inputs(tokens, embedding)
    seen = np.concatenate(
        [np.full((len(tokens), 1), len(embedding) - 1), tokens.cpu().numpy()[:, :-1]], 1
    )
    first, key = _prefixes(seen, len(embedding))
    following = tokens.cpu().numpy().reshape(-1)
    values = following[:, None].astype(float)
    if targets is not None:
        values = targets.detach().cpu().double().numpy().reshape(len(following), -1)
    length = seen.shape[1]
    check_conflicts(values, first, key, lambda i: f"document {i // length} place {i % length}")

    rng = np.random.default_rng(seed)
    vocabulary = embedding.detach().cpu().numpy()
    unit, beta, size = search_head(
        vocabulary,
        direction.random_directions(vocabulary, _DIRECTIONS, rng),
        lambda along, beta: (along[seen].reshape(-1)[first], _scan(along[seen], beta)[first]),
        every=1 if len(first) <= _MANY else 3,
    )
    weights = rank_one_weights(unit, beta, size * unit, np.ones(1), torch.float64)
    head = OneLayerTransformer.from_weights(*weights, method="transform")
    with torch.no_grad():
        outputs = head(x, is_causal=True).numpy().reshape(len(following), -1)
    along = outputs @ unit
    noise = _noise(vocabulary @ unit, seen, beta, size, along, rng)
    order = np.argsort(along[first])
    positions, wanted = along[first][order], values[first][order]
    steps = np.diff(positions)
    gap, extent = float(steps.min(initial=np.inf)), float(steps.sum()) or 1.0
    if network == "linear":
        if gap <= SAFETY * noise:
            raise ResolutionError(
                f"the next tokens of {len(positions)} prefixes cannot be memorized in fp64: the "
                f"closest ids are {gap:.3g} apart (relative {gap / extent:.3g}), not above "
                f"{SAFETY:g} times the noise of {noise:.2g}; use fewer or shorter documents, or "
                "tokens further apart"
            )
        ff2: torch.nn.Module = step_network(positions, wanted, unit, "linear")
    else:
        ff2, _ = packed_network(
            positions,
            wanted[:, 0].astype(np.int64),
            unit,
            noise,
            tied=network == "looped",
            seed=seed,
        )
    model = OneLayerTransformer.from_weights(*weights, ff2=ff2, method="transform")
    with torch.no_grad():
        found = model(x, is_causal=True).numpy().reshape(len(following), -1)[:, : values.shape[1]]
    d, k = len(unit), values.shape[1]
    parameters = count_nonzero(model)
    if network == "linear":
        hidden = ff2.linear1.out_features - 2 * d  # type: ignore[union-attr, operator]
        parameters = 4 * (1 + d) + d + int(hidden) * (1 + k) + k
    model.report = NextTokenReport(
        network=network,
        contexts=len(positions),
        vocabulary=len(embedding) - 1,
        relative_gap=gap / extent,
        noise=noise / extent,
        parameters=parameters,
        max_error=float(np.abs(found - values).max()),
        accuracy=float((np.round(found) == values).mean()) if targets is None else None,
    )
    return model


def decoder_inputs(tokens: Tensor, embedding: Tensor) -> Tensor:
    """The documents `[N, T]` as tokens `[N, T, d]`, moved by one place behind the first token.

    Example:
        >>> decoder_inputs(torch.tensor([[0, 1]]), torch.tensor([[5.0], [6.0], [7.0]])).tolist()
        [[[7.0], [5.0]]]
    """
    start = tokens.new_full((len(tokens), 1), len(embedding) - 1)
    return embedding[torch.cat([start, tokens[:, :-1]], 1)]


def empirical_distributions(tokens: Tensor, vocabulary: int) -> Tensor:
    """How often each token follows the prefixes of a place, as probabilities `[N, T, V]`.

    Prefixes count as the same if they have the same last token and the same tokens before it in
    any order, which is what attention without positions can see.

    Example:
        >>> empirical_distributions(torch.tensor([[0, 0], [1, 1]]), 2)[:, 0].tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """
    documents = tokens.cpu().numpy()
    start = np.full((len(documents), 1), vocabulary)
    first, key = _prefixes(np.concatenate([start, documents[:, :-1]], 1), vocabulary + 1)
    counts = np.zeros((len(first), vocabulary))
    np.add.at(counts, (key, documents.reshape(-1)), 1.0)
    shares = counts / counts.sum(1, keepdims=True)
    return torch.from_numpy(shares[key].reshape(*documents.shape, vocabulary))


def _check(tokens: Tensor, embedding: Tensor, network: str, targets: Tensor | None) -> None:
    if tokens.ndim != 2 or 0 in tokens.shape or tokens.is_floating_point():
        raise ValueError(
            f"tokens must be integers of shape [N, T], got {tokens.dtype} of shape "
            f"{list(tokens.shape)}"
        )
    if embedding.ndim != 2 or embedding.dtype != torch.float64:
        raise ValueError(
            f"embedding must be fp64 of shape [V + 1, d], got {embedding.dtype} of shape "
            f"{list(embedding.shape)}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= len(embedding) - 1:
        raise ValueError(
            f"tokens must be from 0 to {len(embedding) - 2}, the rows of embedding without the "
            f"last one, got {low} to {high}"
        )
    if targets is None:
        return
    if network != "linear":
        raise ValueError(f"targets must be None with network={network!r}; use network='linear'")
    if targets.ndim != 3 or targets.shape[:2] != tokens.shape:
        raise ValueError(
            f"targets must have shape [N, T, k] with [N, T] = {list(tokens.shape)}, got "
            f"{list(targets.shape)}"
        )


def _prefixes(seen: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """First place of every different (last token, counts of tokens), and the id of each place.

    Counts are compared by sums of 64 random bits per token.
    """
    rng = np.random.default_rng(0)
    names = rng.integers(2**63, size=(2, vocabulary), dtype=np.uint64)
    sums = np.cumsum(names[0][seen], axis=1, dtype=np.uint64) * np.uint64(3) + names[1][seen]
    _, first, key = np.unique(sums.reshape(-1), return_index=True, return_inverse=True)
    return first, key.reshape(-1)


def _scan(along: np.ndarray, beta: float) -> np.ndarray:
    """`c_q` of every prefix, `[N T]`, for projections `[N, T]`."""
    p = torch.from_numpy(along)[:, None, :, None]
    with torch.no_grad():
        mixed = attention(beta * p, p, p, is_causal=True, scale=1.0, method="transform")
    return mixed.numpy().reshape(-1)


def _noise(
    positions: np.ndarray,
    seen: np.ndarray,
    beta: float,
    size: float,
    along: np.ndarray,
    rng: np.random.Generator,
) -> float:
    """The largest difference between the scan and a plain sum, at random places and the last."""
    count, length = seen.shape
    worst = 0.0
    for place in {count * length - 1, *rng.integers(count * length, size=_CHECKED).tolist()}:
        row, t = divmod(place, length)
        prefix = positions[seen[row, : t + 1]]
        pooled = pooled_tokens(prefix[-1:], prefix[None], beta)[0]
        worst = max(worst, abs(prefix[-1] + size * pooled - along[place]))
    return max(worst, float(np.finfo(np.float64).eps * np.abs(along).max()))
