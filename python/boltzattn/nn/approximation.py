"""The best approximation of a head's bilinear form by one of smaller rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Approximation:
    """What a change of rank kept of each head's bilinear form.

    Attributes:
        rank: the rank of the approximation.
        spectrum: `[num_heads, head_dim]`, singular values of `[W_Q | b_q]^T W_K / sqrt(head_dim)`,
            falling, fp64. For independent queries and keys with coordinates of unit variance,
            the sum of their squares is the variance of the logits.
    """

    rank: int
    spectrum: Tensor

    @property
    def kept(self) -> Tensor:
        """`[num_heads]`: the share of that variance which the approximation has, 1 if all."""
        energy = self.spectrum.square()
        total = energy.sum(-1)
        share = energy[:, : self.rank].sum(-1) / total
        return torch.where(total == 0, 1.0, share)

    @property
    def exact(self) -> bool:
        """Whether nothing was dropped."""
        return not bool(self.spectrum[:, self.rank :].any())

    def __str__(self) -> str:
        kept = self.kept
        return (
            f"rank {self.spectrum.shape[-1]} -> {self.rank}, kept {kept.mean():.1%} of the logits' "
            f"variance (worst head {kept.min():.1%})"
        )


def truncate(
    w_q: Tensor, b_q: Tensor | None, w_k: Tensor, num_heads: int, rank: int
) -> tuple[Tensor, Tensor | None, Tensor, Approximation]:
    """Projections to `rank` coordinates whose logits at scale `1 / sqrt(rank)` are nearest.

    A head's logits `(W_Q x + b_q) . (W_K y + b_k) / sqrt(head_dim)` are a bilinear form in (x, 1)
    and y, plus a term in x alone (that of b_k) which softmax over the keys does not see. Cutting
    its singular value decomposition is the best approximation in the Frobenius norm, that is,
    in mean square over inputs with uncorrelated coordinates of unit variance; and it is exact as
    soon as `rank >= head_dim`, biases or not.

    Args:
        w_q, b_q: `[num_heads * head_dim, d_q]`, `[num_heads * head_dim]`.
        w_k: `[num_heads * head_dim, d_k]`.

    Returns:
        w_q `[num_heads, width, d_q]`, b_q `[num_heads, width]`, w_k `[num_heads, width, d_k]`
        in fp64, and the report. `width` is `rank`, or head_dim if that is smaller.
    """
    left = w_q.detach().double()
    if b_q is not None:
        left = torch.cat([left, b_q.detach().double()[:, None]], dim=1)
    left = left.unflatten(0, (num_heads, -1))  # [H, head_dim, d_q (+ 1)]
    right = w_k.detach().double().unflatten(0, (num_heads, -1))  # [H, head_dim, d_k]
    head_dim = left.shape[1]

    # The d_q x d_k product has rank head_dim: decompose its head_dim x head_dim core instead.
    left_basis, left_core = torch.linalg.qr(left.mT)
    right_basis, right_core = torch.linalg.qr(right.mT)
    core = left_core @ right_core.mT * head_dim**-0.5
    u, spectrum, vh = torch.linalg.svd(core, full_matrices=False)
    width = min(rank, spectrum.shape[-1])
    # Half of each singular value to either side; the new scale 1 / sqrt(rank) is undone here.
    root = (spectrum[:, :width] * rank**0.5).sqrt()[:, :, None]
    new_q = root * (left_basis @ u[:, :, :width]).mT
    new_k = root * (right_basis @ vh.mT[:, :, :width]).mT
    report = Approximation(rank, spectrum.cpu())
    if b_q is None:
        return new_q, None, new_k, report
    return new_q[:, :, :-1], new_q[:, :, -1], new_k, report
