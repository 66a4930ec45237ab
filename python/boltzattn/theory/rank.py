"""Gaps between context ids for scores of rank 1, 2, 3, .., as dot products or Gaussian.

The theorem needs rank 1. This measures whether a higher rank, or scores that depend on the distance
of two tokens, would separate contexts better.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from boltzattn.functional import attention
from boltzattn.theory.construction import TEMPERATURES, search_head
from boltzattn.theory.separation import contexts, separation


def id_gap(
    x: Tensor,
    score: str,
    rank: int,
    temperature: float | None = None,
    *,
    draws: int = 4,
    seed: int = 0,
) -> float:
    """The largest relative gap between the context ids of random heads of this rank.

    Queries and keys are the projections of the tokens onto `rank` orthogonal directions, values
    that onto the first, P. So rank 1 with dot products is the head of `construct_attention`. Ids
    are `P_q + |o| c_q`, with the best `|o|` of those that it tries.

    Args:
        x: fp64 `[N, n, d]`; no two sequences may have the same tokens.
        score: "dot" or "gaussian".
        rank: coordinates of queries and keys, at most d.
        temperature: inverse temperature, relative to the range of P; None for the best of those
            above 0. At 0 attention is the mean, for any rank and score.
        draws: number of random heads.

    Example:
        >>> x = torch.randn(6, 4).double()[torch.tensor([[0, 1, 2], [0, 1, 3], [3, 4, 5]])]
        >>> id_gap(x, "gaussian", 2) > 1e-3
        True
    """
    count, _, d = x.shape
    if not 1 <= rank <= d:
        raise ValueError(f"rank must be from 1 to d = {d}, got {rank}")
    found = separation(x)
    if len(set(contexts(found.tokens).tolist())) < count or found.repeated:
        raise ValueError("x must hold different sequences without repeated tokens")
    vocabulary = found.vocabulary.numpy()
    tokens = np.stack(found.tokens)
    rng = np.random.default_rng(seed)
    best = 0.0
    for _ in range(draws):
        frame = np.linalg.qr(rng.standard_normal((d, d))).Q[:, :rank]
        along = vocabulary @ frame
        q = torch.from_numpy(along[tokens])[:, None]

        def pooled(
            positions: np.ndarray, beta: float, q: Tensor = q
        ) -> tuple[np.ndarray, np.ndarray]:
            mixed = attention(q, q, q[..., :1], scale=beta, score=score, method="direct")
            return positions[tokens].reshape(-1), mixed.numpy().reshape(-1)

        tried = TEMPERATURES[1:] if temperature is None else (temperature,)
        unit, beta, size = search_head(vocabulary, frame[:, :1].T, pooled, temperatures=tried)
        query, added = pooled(vocabulary @ unit, beta)
        ids = np.sort(query + size * added)
        best = max(best, float(np.diff(ids).min() / (ids[-1] - ids[0])))
    return best
