"""The best low-rank approximation of the bilinear form of a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Approximation:
    """How much of each head's bilinear form a low-rank approximation keeps.

    Attributes:
        rank: the rank of the approximation.
        spectrum: `[num_heads, head_dim]` fp64, the singular values of
            `[W_Q | b_q]^T W_K / sqrt(head_dim)` in descending order. The sum of their squares is
            the variance of the logits for independent inputs with coordinates of unit variance.
    """

    rank: int
    spectrum: Tensor

    @property
    def kept(self) -> Tensor:
        """`[num_heads]`: the share of the logits' variance that the approximation keeps."""
        energy = self.spectrum.square()
        total = energy.sum(-1)
        share = energy[:, : self.rank].sum(-1) / total
        return torch.where(total == 0, 1.0, share)

    @property
    def exact(self) -> bool:
        """Whether the approximation is exact: all dropped singular values are 0."""
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
    """The rank-`rank` projections that approximate the logits best, at scale `1 / sqrt(rank)`.

    The logits `(W_Q x + b_q) . (W_K y + b_k) / sqrt(head_dim)` of a head are a bilinear form in
    (x, 1) and y, plus a term (that of b_k) that depends on x alone and cancels in the softmax.
    Truncating the singular value decomposition of the form is the best approximation in the
    Frobenius norm: in the mean square over inputs with uncorrelated coordinates of unit variance.
    It is exact if `rank >= head_dim`, with or without biases.

    Args:
        w_q, b_q: `[num_heads * head_dim, d_q]`, `[num_heads * head_dim]`.
        w_k: `[num_heads * head_dim, d_k]`.

    Returns:
        w_q `[num_heads, width, d_q]`, b_q `[num_heads, width]`, w_k `[num_heads, width, d_k]`
        in fp64, and the report. `width` is the smaller of `rank` and `head_dim`.
    """
    left = w_q.detach().double()
    if b_q is not None:
        left = torch.cat([left, b_q.detach().double()[:, None]], dim=1)
    left = left.unflatten(0, (num_heads, -1))  # [H, head_dim, d_q (+ 1)]
    right = w_k.detach().double().unflatten(0, (num_heads, -1))  # [H, head_dim, d_k]
    head_dim = left.shape[1]

    # The d_q x d_k product has rank head_dim, so its head_dim x head_dim core is decomposed.
    left_basis, left_core = torch.linalg.qr(left.mT)
    right_basis, right_core = torch.linalg.qr(right.mT)
    core = left_core @ right_core.mT * head_dim**-0.5
    u, spectrum, vh = torch.linalg.svd(core, full_matrices=False)
    width = min(rank, spectrum.shape[-1])
    # Each side gets the root of a singular value; the factor undoes the new scale 1 / sqrt(rank).
    root = (spectrum[:, :width] * rank**0.5).sqrt()[:, :, None]
    new_q = root * (left_basis @ u[:, :, :width]).mT
    new_k = root * (right_basis @ vh.mT[:, :, :width]).mT
    report = Approximation(rank, spectrum.cpu())
    if b_q is None:
        return new_q, None, new_k, report
    return new_q[:, :, :-1], new_q[:, :, -1], new_k, report
