"""The ranks of heads from a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boltzattn.nn.approximation import kept_shares

# What rounding leaves of a head's variance in directions that it does not use.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Budget:
    """One of: a rank for all heads, a share to keep, a sum of ranks; see `convert`."""

    rank: int | None
    kept: float | None
    total: int | None
    per: str

    def __post_init__(self) -> None:
        given = {"rank": self.rank, "kept": self.kept, "total": self.total}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(
                "convert needs exactly one of rank, kept and total, got "
                + (" and ".join(names) or "none; rank=1 runs in linear time")
            )
        if self.per not in ("layer", "head"):
            raise ValueError(f"per must be 'layer' or 'head', got {self.per!r}")
        for name in ("rank", "total"):
            value = given[name]
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.kept is not None and not 0 < self.kept <= 1:
            raise ValueError(f"kept must be a share above 0 and at most 1, got {self.kept!r}")

    def ranks(self, spectra: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """The ranks of the heads of every layer, from its spectrum `[num_heads, width]`."""
        if self.rank is not None:
            # A larger rank than the head's own would add nothing but zeros.
            return [(min(self.rank, s.shape[-1]),) * len(s) for s in spectra]
        if self.kept is not None:
            return [self._keeping(self.kept, spectrum) for spectrum in spectra]
        assert self.total is not None
        return self._distributed(self.total, spectra)

    def _keeping(self, kept: float, spectrum: Tensor) -> tuple[int, ...]:
        shares = kept_shares(spectrum)
        if self.per == "layer":
            shares = shares.mean(0, keepdim=True)
        reached = shares >= kept - ROUNDING
        ranks = tuple(int(rank) + 1 for rank in reached.int().argmax(-1))
        return ranks if self.per == "head" else ranks * len(spectrum)

    def _distributed(self, total: int, spectra: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Rank 1 for every head, and then always where a coordinate gains most variance."""
        if not spectra:
            return []
        sizes = [len(spectrum) for spectrum in spectra]
        if total < sum(sizes):
            raise ValueError(
                f"total must be at least the number of heads, {sum(sizes)}, got {total}: every "
                "head has at least rank 1; use select to convert fewer layers"
            )
        gains = [spectrum.square() for spectrum in spectra]
        if self.per == "layer":
            gains = [gain.mean(0, keepdim=True) for gain in gains]
        costs = [size // len(gain) for size, gain in zip(sizes, gains, strict=True)]
        ranks = [torch.ones(len(gain), dtype=torch.int64) for gain in gains]
        left = total - sum(sizes)
        # Gains fall with the rank, so that this order meets the coordinates of a head in turn.
        order = sorted(
            (-float(gain[head, r]), layer, head, r)
            for layer, gain in enumerate(gains)
            for head in range(len(gain))
            for r in range(1, gain.shape[1])
        )
        full = set()
        for _, layer, head, _ in order:
            if costs[layer] > left:
                full.add((layer, head))  # and none of its later coordinates
            if (layer, head) not in full:
                ranks[layer][head] += 1
                left -= costs[layer]
        chosen = [tuple(int(r) for r in own) for own in ranks]
        return [own * (size // len(own)) for own, size in zip(chosen, sizes, strict=True)]
