"""Sequences that softmax distinguishes and hardmax and mean pooling do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from boltzattn.nn import OneLayerTransformer


class Pair(NamedTuple):
    """Two sequences with different sets of tokens, and their shared tokens.

    Attributes:
        first, second: `[n, d]`.
        shared: `(row of first, row of second)` for each shared token.
    """

    first: Tensor
    second: Tensor
    shared: tuple[tuple[int, int], ...]


# The smallest known sets of k = 2 to 6 integers whose power sums agree up to degree k - 1.
IDEAL_PAIRS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((0, 3), (1, 2)),
    ((0, 4, 5), (1, 2, 6)),
    ((0, 4, 7, 11), (1, 2, 9, 10)),
    ((0, 4, 8, 16, 17), (1, 2, 10, 14, 18)),
    ((0, 5, 6, 16, 17, 22), (1, 2, 10, 12, 20, 21)),
)


def hardmax(scores: Tensor, dim: int = -1, tolerance: float = 1e-9) -> Tensor:
    """The limit of softmax at temperature 0: equal weights on the maxima, 0 elsewhere.

    Scores within `tolerance` times the largest magnitude count as equal, so that ties do not depend
    on rounding.

    Example:
        >>> hardmax(torch.tensor([1.0, 3.0, 3.0]))
        tensor([0.0000, 0.5000, 0.5000])
    """
    slack = tolerance * scores.abs().amax(dim, keepdim=True)
    top = (scores >= scores.amax(dim, keepdim=True) - slack).to(scores.dtype)
    return top / top.sum(dim, keepdim=True)


def hardmax_attention(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, num_heads: int = 1
) -> Tensor:
    """The attention layer of the paper with its skip connection, with hardmax instead of softmax.

    Shapes are those of `OneLayerTransformer.from_weights`; x is `[..., n, d]`.

    Example:
        >>> x, w = torch.tensor([[1.0], [2.0]]), torch.ones(1, 1)
        >>> hardmax_attention(x, w, w, w, w).tolist()
        [[3.0], [4.0]]
    """

    def heads(weight: Tensor) -> Tensor:
        return (x @ weight.T).unflatten(-1, (num_heads, -1)).transpose(-2, -3)

    scores = heads(w_q) @ heads(w_k).transpose(-1, -2)
    mixed = (hardmax(scores) @ heads(w_v)).transpose(-2, -3).flatten(-2)
    return x + mixed @ w_o.T


def hardmax_counterexample(
    n: int = 4, d: int = 1, x: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Pair:
    """Two sequences that no hardmax attention layer distinguishes at their shared tokens.

    They are the multiples (1, 2, 5, 6) and (1, 3, 4, 6) of one vector `x`, for `n > 4` with the
    same further multiples between 1 and 2 in both. All scores of a head have the form `s a_k a_q`,
    so it selects the multiple 6 if s > 0, the multiple 1 if s < 0, and the mean of all if s = 0.
    These three agree in both sequences, for all weights and any number of heads, and the skip
    connection adds the same token.

    Args:
        n: length, at least 4. (In shorter collinear sets the largest, the smallest or the mean
            differ.)
        d: width.
        x: any nonzero vector `[d]`; default all ones.

    Example:
        >>> pair = hardmax_counterexample()
        >>> pair.first.flatten().tolist(), pair.second.flatten().tolist()
        ([1.0, 6.0, 2.0, 5.0], [1.0, 6.0, 3.0, 4.0])
    """
    if n < 4:
        raise ValueError(
            f"n must be at least 4, got {n}: hardmax distinguishes shorter collinear sequences"
        )
    x = torch.ones(d, dtype=dtype, device="cpu") if x is None else x
    if x.shape != (d,) or not x.any():
        raise ValueError(f"x must be a nonzero vector of shape [{d}], got {x.tolist()}")
    padding = [1 + j / (n - 3) for j in range(1, n - 3)]
    shared = [1.0, 6.0, *padding]
    first, second = (
        x.new_tensor([*shared, *inner])[:, None] * x for inner in ((2.0, 5.0), (3.0, 4.0))
    )
    return Pair(first, second, tuple((i, i) for i in range(len(shared))))


def prouhet_pair(degree: int, dtype: torch.dtype = torch.float64) -> Pair:
    """Two sequences `[n, 1]` of integers with equal power sums up to `degree` and equal extremes.

    Hardmax depends on the smallest and the largest token, mean pooling on the mean of the tokens
    (or of their powers up to `degree`, if a network comes before it): all of them agree. Softmax at
    inverse temperature beta separates the shared tokens by `O(beta^degree)` near 0 and by an
    exponentially small amount at infinity, so it needs an intermediate temperature.

    The tokens between the extremes are the smallest known sets up to degree 5, and the numbers
    below `2^(degree+1)` with an even and with an odd number of binary ones (Prouhet) above.
    Degree 1 is `hardmax_counterexample(4)`.

    Example:
        >>> pair = prouhet_pair(2)
        >>> pair.first.flatten().tolist(), pair.second.flatten().tolist()
        ([1.0, 9.0, 2.0, 6.0, 7.0], [1.0, 9.0, 3.0, 4.0, 8.0])
    """
    if degree < 1:
        raise ValueError(f"degree must be at least 1, got {degree}")
    if degree <= len(IDEAL_PAIRS):
        sets = IDEAL_PAIRS[degree - 1]
    else:
        numbers = range(2 ** (degree + 1))
        sets = (
            tuple(i for i in numbers if i.bit_count() % 2 == 0),
            tuple(i for i in numbers if i.bit_count() % 2 == 1),
        )
    top = max(map(max, sets)) + 3
    first, second = (
        torch.tensor([1, top, *(2 + i for i in inner)], dtype=dtype, device="cpu")[:, None]
        for inner in sets
    )
    return Pair(first, second, ((0, 0), (1, 1)))


def shared_gaps(pair: Pair, layer: Callable[[Tensor], Tensor]) -> Tensor:
    """The difference of the outputs at each shared token, `[number of shared tokens]`, max norm.

    Example:
        >>> shared_gaps(hardmax_counterexample(), lambda x: x + x.mean(0))
        tensor([0., 0.], dtype=torch.float64)
    """
    first, second = (layer(x) for x in (pair.first, pair.second))
    rows = torch.tensor(pair.shared, device=first.device)
    return (first[rows[:, 0]] - second[rows[:, 1]]).abs().amax(-1)


def temperature_scan(pair: Pair, betas: np.ndarray) -> np.ndarray:
    """`shared_gaps` of a softmax head with `W_Q = beta` for each beta: `[betas, shared]`.

    For pairs in R^1; the head is a `OneLayerTransformer`.

    Example:
        >>> temperature_scan(hardmax_counterexample(), np.array([0.1])).round(3)
        array([[0.097, 0.201]])
    """
    one = pair.first.new_ones(1, 1)
    gaps = []
    for beta in betas.tolist():
        head = OneLayerTransformer.from_weights(beta * one, one, one, one, method="direct")
        with torch.no_grad():
            gaps.append(shared_gaps(pair, head).numpy())
    return np.stack(gaps)


class Weights(NamedTuple):
    """Weights of one attention layer, in the order of `OneLayerTransformer.from_weights`."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor


def random_weights(d: int, num_heads: int, head_size: int, generator: torch.Generator) -> Weights:
    """Random weights of a layer; one head in five has `W_K = 0`, so all its scores are equal."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(
            *shape, dtype=torch.float64, generator=generator, device=generator.device
        )

    w_k = draw(num_heads, head_size, d)
    w_k[torch.rand(num_heads, generator=generator, device=w_k.device) < 0.2] = 0.0
    rows = num_heads * head_size
    return Weights(draw(rows, d), w_k.flatten(0, 1), draw(rows, d), draw(d, rows))


class SearchResult(NamedTuple):
    """The largest gap of hardmax at a shared token, and the gaps of softmax."""

    trials: int
    hardmax_max: float
    softmax_median: float
    softmax_separates: float


def search_hardmax_weights(trials: int, seed: int = 0) -> SearchResult:
    """Try to separate `hardmax_counterexample` with random hardmax and softmax layers.

    Layers have width up to 5, up to 4 heads and head sizes up to 3. Gaps are relative to the
    largest output. `softmax_separates` is the share of layers that separate the pair by more than
    1e-6 with softmax.

    Example:
        >>> search_hardmax_weights(20).hardmax_max < 1e-12
        True
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def below(limit: int) -> int:
        return 1 + int(torch.randint(limit, (), generator=generator, device="cpu"))

    hard, soft = [], []
    for _ in range(trials):
        d, num_heads, head_size, n = below(5), below(4), below(3), 3 + below(6)
        x = torch.randn(d, dtype=torch.float64, generator=generator, device="cpu")
        pair = hardmax_counterexample(n, d, x)
        weights = random_weights(d, num_heads, head_size, generator)

        def hardened(z: Tensor, weights: Weights = weights, num_heads: int = num_heads) -> Tensor:
            return hardmax_attention(z, *weights, num_heads=num_heads)

        softened = OneLayerTransformer.from_weights(*weights, num_heads=num_heads, method="direct")
        with torch.no_grad():
            size = hardened(pair.first).abs().max()
            hard.append(float(shared_gaps(pair, hardened).max() / size))
            soft.append(float(shared_gaps(pair, softened).max() / size))
    return SearchResult(
        trials, max(hard), float(np.median(soft)), float(np.mean(np.array(soft) > 1e-6))
    )
