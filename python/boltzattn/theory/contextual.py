"""Measure whether outputs are a contextual mapping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from boltzattn.theory.separation import as_sequences, closest_pair, contexts

# A gap is usable if it exceeds the noise by this factor.
SAFETY = 10.0


@dataclass(frozen=True)
class ContextualGap:
    """The report of `contextual_gap`: the map is an (r, delta)-contextual mapping on the data.

    Attributes:
        mode: which sequences count as the same context, see `contexts`.
        ids: number of different (token, context) pairs.
        r: largest norm of an output.
        delta: smallest distance between two outputs whose token or context differs.
        delta_context: the same for equal tokens in different contexts.
        delta_token: the same for different tokens.
        noise: largest distance between outputs that should be equal (other orders of the same
            sequence), and at least the rounding unit of the outputs at radius `r`.
    """

    mode: str
    ids: int
    r: float
    delta: float
    delta_context: float
    delta_token: float
    noise: float

    @property
    def passed(self) -> bool:
        """Whether delta exceeds `SAFETY` times the noise."""
        return self.delta > SAFETY * self.noise

    @property
    def bits(self) -> float:
        """Mantissa bits that a layer needs to distinguish the closest outputs."""
        if self.delta == 0:
            return math.inf
        return max(0.0, math.log2(2 * self.r / self.delta)) if self.r else 0.0

    def __str__(self) -> str:
        verdict = "separated" if self.passed else "NOT separated"
        return (
            f"{self.ids} context ids ({self.mode}) {verdict}: delta {self.delta:.3g} "
            f"(same token {self.delta_context:.3g}, different tokens {self.delta_token:.3g}), "
            f"r {self.r:.3g}, noise {self.noise:.2g}, {self.bits:.1f} bits needed"
        )


def contextual_gap(
    ids: Tensor | Sequence[Tensor],
    tokens: Tensor | Sequence[Tensor] | Sequence[np.ndarray],
    mode: str = "multiset",
    noise: float | None = None,
) -> ContextualGap:
    """Measure the two conditions of a contextual mapping on the outputs `ids` for `tokens`.

    Every output must lie within a radius `r`, and two outputs must differ by more than `delta` if
    their token or their context differs. Sorting or a k-d tree finds the closest outputs.

    Args:
        ids: `[N, n, k]` (or `[N, n]` for k = 1), or a sequence of `[n_i, k]` tensors.
        tokens: the inputs `[N, n, d]`, or their integer names `[N, n]`; or a sequence of these.
        mode: "set" is the paper's definition, in which (x, x, y) and (x, y, y) are the same
            context; "multiset" distinguishes them, as memorization requires; "proportion" is the
            best that softmax attention can do if lengths differ.
        noise: a known noise level; the measured one is used if it is larger.

    Example:
        >>> x = torch.tensor([[[1.0], [2.0]], [[1.0], [4.0]]])
        >>> report = contextual_gap(x + x.sum(1, keepdim=True), x)
        >>> report.delta, report.passed
        (1.0, True)
    """
    outputs, dtype = _outputs(ids)
    names = _names(tokens)
    if [len(x) for x in outputs] != [len(x) for x in names]:
        raise ValueError(
            "ids and tokens must hold the same sequences, got lengths "
            f"{[len(x) for x in outputs][:5]}.. and {[len(x) for x in names][:5]}.."
        )
    lengths = [len(x) for x in names]
    points, token = np.concatenate(outputs), np.concatenate(names)
    # Proportional sequences count as equal only in the mode "proportion".
    exact = "proportion" if mode == "proportion" else "multiset"
    same = np.repeat(contexts(names, exact), lengths)
    context = np.repeat(contexts(names, mode), lengths)

    _, first, key = np.unique(
        np.stack([token, same], 1), axis=0, return_index=True, return_inverse=True
    )
    spread = np.linalg.norm(points - points[first[key.reshape(-1)]], axis=1).max()
    r = float(np.linalg.norm(points, axis=1).max())
    level = max(float(spread), torch.finfo(dtype).eps * r, noise or 0.0)

    points, token, context = points[first], token[first], context[first]
    delta_token = closest_pair(points, token)
    order = np.argsort(token, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(token[order])) + 1)
    delta_context = min(closest_pair(points[g], context[g]) for g in groups)
    return ContextualGap(
        mode=mode,
        ids=len(np.unique(np.stack([token, context], 1), axis=0)),
        r=r,
        delta=min(delta_context, delta_token),
        delta_context=delta_context,
        delta_token=delta_token,
        noise=level,
    )


def _outputs(ids: Tensor | Sequence[Tensor]) -> tuple[list[np.ndarray], torch.dtype]:
    if isinstance(ids, Tensor) and ids.ndim == 2:
        ids = ids.unsqueeze(-1)
    elif not isinstance(ids, Tensor):
        ids = [x.unsqueeze(-1) if x.ndim == 1 else x for x in ids]
    return as_sequences(ids, "ids")


def _names(tokens: Tensor | Sequence[Tensor] | Sequence[np.ndarray]) -> list[np.ndarray]:
    """Integer names of tokens, from names or from vectors."""
    if not len(tokens):
        raise ValueError("tokens must hold at least one sequence, got none")
    rows = [torch.as_tensor(row, device="cpu") for row in tokens]
    if not rows[0].is_floating_point():
        return [row.cpu().numpy().astype(np.int64) for row in rows]
    sequences, _ = as_sequences(rows, "tokens")
    _, names = np.unique(np.concatenate(sequences), axis=0, return_inverse=True)
    return np.split(names.reshape(-1), np.cumsum([len(x) for x in sequences])[:-1])
