"""A rank-1 attention head that is a contextual mapping: the theorem's weights and practical ones.

With unit vectors `u` and `v`, `W_K = u v^T`, `W_Q = beta u v^T`, `W_V = u v^T` and `W_O = o u^T`,
the layer maps token `x_q` of a sequence with projections `P_k = v . x_k` to

    x_q + o c_q,    c_q = sum_k P_k softmax_k(beta P_q P_k) = boltz(beta P_q P) / (beta P_q).

So `c_q` is the Boltzmann operator of the whole sequence at a temperature that depends on the token.
`v`, `beta` and `o` are free to choose.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from boltzattn.nn import OneLayerTransformer
from boltzattn.theory import direction
from boltzattn.theory.boltzmann import boltz_gap, log_separation_bound, required_spacing
from boltzattn.theory.contextual import SAFETY, ContextualGap, contextual_gap
from boltzattn.theory.separation import Batch, ResolutionWarning, Separation, contexts, separation

SCALES = ("theorem", "measured", "practical")

# The separation lemma requires strictly more than its spacing.
_MORE = 1 + 1e-6

# Practical search: temperatures and output scales, relative to the range of the projections.
TEMPERATURES = (0.0, *np.geomspace(1e-2, 1e2, 17).tolist())
_OUTPUT_SCALES = np.geomspace(1e-3, 1e2, 26)
_DIRECTIONS = 4
# Scores of one piece of the search, [contexts, n, n]; 32 MB in fp64.
_SCORES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class RankOneAttention:
    """A constructed head, with its promised and its measured gap.

    Attributes:
        scale: "theorem", "measured" or "practical".
        v, beta, o: direction `[d]`, inverse temperature and output vector `[d]`; see the module.
        w_q, w_k, w_v, w_o: the weights, `[s, d]` and (`w_o`) `[d, s]`.
        separation: the assumptions, measured on the data.
        promised_r: the promised radius.
        log10_promised: log10 of the promised delta; None for "practical", which promises nothing.
        log10_measured: log10 of delta in exact arithmetic; for "practical" that of the module.
        measured: the conditions, measured on the outputs of the module in its own arithmetic.
    """

    scale: str
    v: Tensor
    beta: float
    o: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    separation: Separation
    promised_r: float
    log10_promised: float | None
    log10_measured: float
    measured: ContextualGap

    @property
    def parameters(self) -> int:
        """Number of parameters of four rank-1 matrices: `4 (s + d)`."""
        return 4 * sum(self.w_q.shape)

    def module(
        self, ff1: nn.Module | None = None, ff2: nn.Module | None = None
    ) -> OneLayerTransformer:
        """The paper's block with these weights; without networks it is the attention alone.

        The method is "direct", because the gaps can be smaller than the error bound of other
        methods.
        """
        return OneLayerTransformer.from_weights(
            self.w_q, self.w_k, self.w_v, self.w_o, ff1=ff1, ff2=ff2, method="direct"
        )

    def __str__(self) -> str:
        promise = "none" if self.log10_promised is None else f"10^{self.log10_promised:.1f}"
        return (
            f"{self.scale}: beta {self.beta:.3g}, promised delta {promise}, "
            f"exact delta 10^{self.log10_measured:.1f}; {self.measured}"
        )


def construct_attention(
    batch: Batch,
    scale: str = "practical",
    *,
    choose_v: str = "random",
    v: Tensor | None = None,
    head_size: int = 1,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> RankOneAttention:
    """Rank-1 weights that map every (token, context) of `batch` to a different output.

    Args:
        batch: `[N, n, d]`, or a sequence of `[n_i, d]` tensors.
        scale: how the temperature is set.
            "theorem": from `|V|`, `n`, `d` and the separation alone, as in Theorem 2. The promised
            delta is 10^-1000 or less, which floats do not resolve (a `ResolutionWarning` says so),
            so `log10_measured` comes from `boltz_gap`.
            "measured": the same argument with the actual projections.
            "practical": the `v`, `beta` and `|o|` that maximise the gap of the module.
        choose_v: "random" or "deterministic" (moment curve); see `theory.direction`.
        v: a given direction `[d]`.
        head_size: rows `s` of W_Q, W_K and W_V.
        dtype: dtype of the weights and of the measured module.
        seed: seed of the random choices.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [1.0, 3.0], [2.0, 3.0]], dtype=torch.float64)[..., None]
        >>> head = construct_attention(x)
        >>> head.measured.passed
        True
        >>> head.module()(x).shape
        torch.Size([3, 2, 1])
    """
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(map(repr, SCALES))}, got {scale!r}")
    if choose_v not in ("random", "deterministic"):
        raise ValueError(f"choose_v must be 'random' or 'deterministic', got {choose_v!r}")
    if head_size < 1:
        raise ValueError(f"head_size must be at least 1, got {head_size}")
    found = separation(batch)
    if found.proportional:
        i, j = found.proportional[0]
        warnings.warn(
            f"{len(found.proportional)} pairs of sequences hold the same tokens in the same "
            f"proportions at different lengths, first {i} and {j} ({len(found.tokens[i])} and "
            f"{len(found.tokens[j])} tokens): their gap is exactly 0 in every softmax attention "
            "without positions; add positions or a length token to separate them",
            ResolutionWarning,
            stacklevel=2,
        )
    if scale != "practical":
        _check_assumptions(found, scale)
    vocabulary = found.vocabulary.numpy()
    rng = np.random.default_rng(seed)
    given = None if v is None else _given_direction(v, vocabulary, scale)

    if scale == "practical":
        unit, beta, size = _search(found, given, choose_v, rng)
        promise = None
    else:
        unit = given if given is not None else _choose(vocabulary, choose_v, rng)
        beta = _theorem_beta(found) if scale == "theorem" else _measured_beta(found, unit)
        size = _spread(found) / (4 * found.r_max)
        promise = _log_promise(found, unit, beta, size, scale) / math.log(10)

    o, u = size * unit, np.full(head_size, head_size**-0.5)
    w_q, w_k, w_v, w_o = rank_one_weights(unit, beta, o, u, dtype)
    module = OneLayerTransformer.from_weights(w_q, w_k, w_v, w_o, method="direct")
    mode = "proportion" if found.proportional else "multiset"
    measured = _measure(module, batch, found, mode, rng)
    if scale == "practical":
        exact = math.log(measured.delta) if measured.delta else -math.inf
    else:
        exact = min(
            _log_context_gap(found, unit, beta, size),
            math.log(measured.delta_token) if measured.delta_token else -math.inf,
        )
    head = RankOneAttention(
        scale=scale,
        v=torch.from_numpy(unit),
        beta=beta,
        o=torch.from_numpy(o),
        w_q=w_q,
        w_k=w_k,
        w_v=w_v,
        w_o=w_o,
        separation=found,
        promised_r=found.r_max + size * found.r_max,
        log10_promised=promise,
        log10_measured=exact / math.log(10),
        measured=measured,
    )
    if not measured.passed:
        warnings.warn(
            f"the module's outputs in {dtype} are only {measured.delta:.3g} apart, below {SAFETY:g}"
            f" times their noise of {measured.noise:.2g}; in exact arithmetic the gap is "
            f"10^{head.log10_measured:.1f}. "
            + (
                "At this temperature softmax is numerically a hardmax; use scale='practical' for "
                "weights that floats resolve"
                if scale != "practical"
                else "The data need more digits than the dtype has; use fewer sequences, tokens "
                "further apart, or a wider dtype"
            ),
            ResolutionWarning,
            stacklevel=2,
        )
    return head


def evaluate(module: torch.nn.Module, batch: Batch) -> list[Tensor]:
    """The outputs of `module` for each sequence of `batch`, with one call per length.

    Example:
        >>> [y.shape for y in evaluate(torch.nn.Identity(), [torch.ones(2, 1), torch.ones(3, 1)])]
        [torch.Size([2, 1]), torch.Size([3, 1])]
    """
    by_length: dict[int, list[int]] = {}
    for i, x in enumerate(batch):
        by_length.setdefault(len(x), []).append(i)
    outputs = list(batch)  # replaced one by one
    dtype = next((p.dtype for p in module.parameters()), batch[0].dtype)
    with torch.no_grad():
        for members in by_length.values():
            result = module(torch.stack([batch[i] for i in members]).to(dtype))
            for i, y in zip(members, result, strict=True):
                outputs[i] = y
    return outputs


def _measure(
    module: OneLayerTransformer,
    batch: Batch,
    found: Separation,
    mode: str,
    rng: np.random.Generator,
) -> ContextualGap:
    """Measure the outputs of the module; the noise comes from shuffled sequences."""
    outputs = evaluate(module, batch)
    orders = [torch.from_numpy(rng.permutation(len(x))) for x in batch]
    shuffled = evaluate(module, [x[order] for x, order in zip(batch, orders, strict=True)])
    noise = max(
        float((y[order] - z).norm(dim=-1).max())
        for y, z, order in zip(outputs, shuffled, orders, strict=True)
    )
    return contextual_gap(outputs, found.tokens, mode, noise)


def _check_assumptions(found: Separation, scale: str) -> None:
    """Theorem 2 requires equal lengths, no repeated token and no token at the origin."""
    lengths = {len(t) for t in found.tokens}
    if len(lengths) > 1:
        raise ValueError(
            f"scale={scale!r} needs sequences of one length, got {min(lengths)} to {max(lengths)} "
            "tokens; use scale='practical'"
        )
    if found.repeated:
        raise ValueError(
            f"scale={scale!r} needs sequences without repeated tokens, got "
            f"{len(found.repeated)} of {len(found.tokens)} with one (first: {found.repeated[0]}); "
            "use scale='practical', which separates multisets"
        )
    if found.r_min == 0.0:
        raise ValueError(
            f"scale={scale!r} needs tokens away from the origin, got one of norm 0: its query is 0 "
            "and attends to the mean; shift the data, or use scale='practical'"
        )


def _given_direction(v: Tensor, vocabulary: np.ndarray, scale: str) -> np.ndarray:
    unit = v.detach().cpu().double().numpy()
    norm = float(np.linalg.norm(unit))
    if unit.shape != vocabulary.shape[1:] or norm == 0.0:
        raise ValueError(
            f"v must be a nonzero vector [d] with d = {vocabulary.shape[1]}, got shape "
            f"{list(unit.shape)} and norm {norm:g}"
        )
    unit = unit / norm
    along = np.abs(vocabulary @ unit)
    # Smaller projections are the rounding error of a dot product.
    unseen = along <= 4 * len(unit) * 2.0**-53 * np.linalg.norm(vocabulary, axis=1)
    if unseen.any():
        row = int(np.argmax(unseen))
        message = (
            f"v is orthogonal to {int(unseen.sum())} tokens, first row {row} of the vocabulary "
            f"(|v . x| = {along[row]:.3g}): their queries are 0 and attend to the mean of the "
            "sequence"
        )
        if scale != "practical":
            raise ValueError(message + "; omit v to let the function choose one")
        warnings.warn(message, ResolutionWarning, stacklevel=3)
    if (gap := direction.projected(vocabulary, unit).min_gap) == 0.0 and scale != "practical":
        raise ValueError(
            f"v must separate all tokens, got two with the same projection (gap {gap:g}); "
            "omit v to let the function choose one"
        )
    return unit


def _choose(vocabulary: np.ndarray, choose_v: str, rng: np.random.Generator) -> np.ndarray:
    if choose_v == "deterministic":
        return direction.moment_curve_direction(vocabulary)
    return direction.random_direction(vocabulary, rng)


def _spread(found: Separation) -> float:
    """The smallest distance between two tokens; for a single token, from the origin."""
    return found.epsilon if math.isfinite(found.epsilon) else found.r_min


def _theorem_beta(found: Separation) -> float:
    """`(|V|+1)^4 (2 log n + 3) pi d / (8 eps r_min)`, the worst case of the projection lemma."""
    size, d = found.vocabulary.shape
    share = direction.guaranteed_share(size + 1, d)
    return _MORE * required_spacing(found.longest) / (share**2 * _spread(found) * found.r_min)


def _measured_beta(found: Separation, unit: np.ndarray) -> float:
    min_gap, min_abs = direction.projected(found.vocabulary.numpy(), unit)
    return _MORE * required_spacing(found.longest) / (min(min_gap, _spread(found)) * min_abs)


def _log_promise(
    found: Separation, unit: np.ndarray, beta: float, size: float, scale: str
) -> float:
    """log of the promised delta: the lemma's bound on `boltz`, applied to the output."""
    if found.longest == 1:
        return math.log(_spread(found) / 2)  # the context is the token itself
    reach = found.r_max
    if scale == "measured":
        reach = float(np.abs(found.vocabulary.numpy() @ unit).max())
    bound = log_separation_bound(found.longest, beta * reach**2)
    return bound - math.log(beta * reach) + math.log(size)


def _log_context_gap(found: Separation, unit: np.ndarray, beta: float, size: float) -> float:
    """log of the smallest distance between outputs of a token in two contexts, without rounding.

    After sorting by the sign of `boltz_gap`, the closest contexts are neighbours.
    """
    positions = (found.vocabulary.numpy() @ unit).tolist()
    _, first = np.unique(contexts(found.tokens), return_index=True)
    of_token: dict[int, list[Sequence[int]]] = {}
    for i in first:
        members = found.tokens[i].tolist()
        for token in set(members):
            of_token.setdefault(token, []).append(members)
    smallest = math.inf
    for token, seen in of_token.items():
        query = beta * positions[token]
        levels = [[query * positions[k] for k in members] for members in seen]
        # This order is correct if levels are far apart, because then a larger maximum raises the
        # value and every other larger entry lowers it. It saves most exact comparisons.
        levels.sort(key=lambda a: [max(a), *(-x for x in sorted(a, reverse=True))])
        levels.sort(key=functools.cmp_to_key(_compare))
        for a, b in itertools.pairwise(levels):
            smallest = min(smallest, boltz_gap(a, b).log - math.log(abs(query)))
    return smallest + math.log(size)


def _compare(a: list[float], b: list[float]) -> int:
    return boltz_gap(b, a).sign


def _search(
    found: Separation, given: np.ndarray | None, choose_v: str, rng: np.random.Generator
) -> tuple[np.ndarray, float, float]:
    """The `(v, beta, |o|)` whose smallest gap along `v`, relative to the range, is largest.

    Along `v`, which the next layer reads, the output is the number `P_q + |o| c_q`.
    """
    vocabulary = found.vocabulary.numpy()
    if given is not None:
        units = given[None]
    elif choose_v == "deterministic":
        units = direction.moment_curve_direction(vocabulary)[None]
    else:
        units = direction.random_directions(vocabulary, _DIRECTIONS, rng)
    _, first = np.unique(contexts(found.tokens, "proportion"), return_index=True)
    groups = _by_length([found.tokens[i] for i in first])
    return search_head(vocabulary, units, lambda along, beta: _pooled(along, groups, beta))


def search_head(
    vocabulary: np.ndarray,
    units: np.ndarray,
    pooled_at: Callable[[np.ndarray, float], tuple[np.ndarray, np.ndarray]],
    every: int = 1,
    temperatures: Sequence[float] = TEMPERATURES,
) -> tuple[np.ndarray, float, float]:
    """The `(v, beta, |o|)` whose smallest gap along `v`, relative to the range, is largest.

    Args:
        vocabulary: `[|V|, d]`.
        units: directions to try, `[count, d]`.
        pooled_at: from the projections `[|V|]` of the vocabulary and beta to `P_q` and `c_q` of
            all ids, two flat arrays.
        every: try only every so many of the temperatures and of the output scales.
        temperatures: values of beta to try, relative to the range of the projections.

    Example:
        >>> def means(positions, beta):
        ...     return positions, np.array([0.0, 1.0])
        >>> search_head(np.ones((2, 1)), np.ones((1, 1)), means)[1]
        0.0
    """
    best, choice = -1.0, (units[0], 0.0, 1.0)
    for unit in units:
        positions = vocabulary @ unit
        reach = float(np.abs(positions).max()) * float(np.ptp(positions) or 1.0) or 1.0
        for temperature in temperatures[::every]:
            beta = temperature / reach
            query, pooled = pooled_at(positions, beta)
            stretch = float(np.ptp(query) / (np.ptp(pooled) or 1.0)) or 1.0
            for size in _OUTPUT_SCALES[::every] * stretch:
                ids = np.sort(query + size * pooled)
                gap = float(np.diff(ids).min(initial=np.inf) / (ids[-1] - ids[0] or 1.0))
                if gap > best:
                    best, choice = gap, (unit, beta, float(size))
    return choice


def pooled_tokens(query: np.ndarray, along: np.ndarray, beta: float) -> np.ndarray:
    """`c_q` of one token per sequence, from its projection `[N]` and those of all `[N, n]`.

    Example:
        >>> pooled_tokens(np.array([1.0]), np.array([[1.0, 3.0]]), beta=0.0)
        array([2.])
    """
    scores = beta * query[:, None] * along
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return (weights * along).sum(1) / weights.sum(1)


def rank_one_weights(
    unit: np.ndarray, beta: float, o: np.ndarray, u: np.ndarray, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`W_Q = beta u v^T`, `W_K = W_V = u v^T` and `W_O = o u^T`.

    Example:
        >>> one = np.ones(1)
        >>> [float(w) for w in rank_one_weights(one, 3.0, 2 * one, one, torch.float64)]
        [3.0, 1.0, 1.0, 2.0]
    """
    w_q, w_k, w_o = (
        torch.from_numpy(np.outer(left, right)).to(dtype)
        for left, right in ((beta * u, unit), (u, unit), (o, u))
    )
    return w_q, w_k, w_k, w_o


def _by_length(tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
    lengths = np.array([len(t) for t in tokens])
    return [
        np.stack([np.sort(t) for t in tokens if len(t) == n]) for n in np.unique(lengths).tolist()
    ]


def _pooled(
    positions: np.ndarray, groups: list[np.ndarray], beta: float
) -> tuple[np.ndarray, np.ndarray]:
    """`P_q` and `c_q` of every different token of every context, as two flat arrays."""
    queries, pooled = [], []
    for group in groups:
        n = group.shape[1]
        fresh = np.ones(group.shape, dtype=bool)
        fresh[:, 1:] = group[:, 1:] != group[:, :-1]  # repeated tokens are neighbours
        for start in range(0, len(group), max(1, _SCORES_AT_ONCE // n**2)):
            piece = slice(start, start + max(1, _SCORES_AT_ONCE // n**2))
            along = positions[group[piece]]
            scores = beta * along[:, :, None] * along[:, None, :]
            scores -= scores.max(2, keepdims=True)
            weights = np.exp(scores, out=scores)
            context = np.einsum("cqk,ck->cq", weights, along) / weights.sum(2)
            queries.append(along[fresh[piece]])
            pooled.append(context[fresh[piece]])
    return np.concatenate(queries), np.concatenate(pooled)
