"""The best low-rank approximation of the logits of a head, on given data or on any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# What is added to the moments, relative to their mean: it makes directions rare that the data
# never showed, instead of impossible, so that all of them can be told from one another.
RIDGE = 1e-6


@dataclass(frozen=True)
class Approximation:
    """How much of the logits of each head a low-rank approximation keeps.

    Attributes:
        rank: the largest rank of a head.
        spectrum: `[num_heads, head_dim]` fp64, singular values in descending order. The sum of
            their squares is the variance of the logits: on the data, or, without data, for
            independent inputs with coordinates of unit variance.
        ranks: the rank of every head.
        on_data: whether the variance is that of the logits on the caller's data.
    """

    rank: int
    spectrum: Tensor
    ranks: tuple[int, ...] = ()
    on_data: bool = False

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", (self.rank,) * len(self.spectrum))

    @property
    def kept(self) -> Tensor:
        """`[num_heads]`: the share of the logits' variance that the approximation keeps."""
        shares = kept_shares(self.spectrum)
        width = shares.shape[-1]
        at = torch.tensor([min(rank, width) - 1 for rank in self.ranks])
        return shares.gather(1, at[:, None])[:, 0]

    @property
    def exact(self) -> bool:
        """Whether the approximation is exact: all dropped singular values are 0."""
        pairs = zip(self.spectrum, self.ranks, strict=True)
        return not any(bool(values[rank:].any()) for values, rank in pairs)

    def __str__(self) -> str:
        kept = self.kept
        fewest, most = min(self.ranks), max(self.ranks)
        ranks = f"{most}" if fewest == most else f"{fewest} to {most}"
        where = " on the data" if self.on_data else ""
        return (
            f"rank {self.spectrum.shape[-1]} -> {ranks}, kept {kept.mean():.1%} of the logits' "
            f"variance{where} (worst head {kept.min():.1%})"
        )


def kept_shares(spectrum: Tensor) -> Tensor:
    """`[num_heads, head_dim]`: the share of the variance that rank 1, 2, ... keep."""
    energy = spectrum.square()
    total = energy.sum(-1, keepdim=True)
    return torch.where(total == 0, 1.0, energy.cumsum(-1) / total)


class Form(NamedTuple):
    """What the logits `scale * (W_q x + b_q) . (W_k y)` of a layer's heads are made of, in fp64.

    The bias of the keys is not part of it: it adds a term that depends on x alone, which cancels
    in the softmax.
    """

    w_q: Tensor  # [num_heads, head_dim, d_q]
    b_q: Tensor | None  # [num_heads, head_dim]
    w_k: Tensor  # [num_heads, head_dim, d_k]
    scale: float

    @classmethod
    def of(cls, w_q: Tensor, b_q: Tensor | None, w_k: Tensor, num_heads: int, scale: float) -> Form:
        """From the weights of all heads, `[num_heads * head_dim, d]`, and the bias."""
        w_q, w_k = (w.detach().double().unflatten(0, (num_heads, -1)) for w in (w_q, w_k))
        if b_q is not None:
            b_q = b_q.detach().double().unflatten(0, (num_heads, -1))
        return cls(w_q, b_q, w_k, scale)


class Moments(NamedTuple):
    """Of the queries and keys of a layer on data, `[num_heads, head_dim, head_dim]` each, fp64.

    With the covariances S of the layer's inputs they are `W_q S W_q^T` and `W_k S W_k^T`, which is
    all that the approximation needs to know of S.
    """

    query: Tensor  # mean of q q^T
    key: Tensor  # mean of (k - m) (k - m)^T, m the mean of the keys of the same sequence


class Decomposition(NamedTuple):
    """New coordinates for the queries and keys of every head, those that matter most first.

    Coordinates `to_query q` and `to_key k` have the products `q . k`; the first r of them are the
    best approximation of rank r.
    """

    spectrum: Tensor  # [num_heads, width]
    to_query: Tensor  # [num_heads, width, head_dim]
    to_key: Tensor  # [num_heads, width, head_dim]


def decompose(form: Form, moments: Moments | None = None) -> Decomposition:
    """Coordinates in which truncation approximates the logits best in the mean square.

    The mean is over independent queries and keys with these moments. Softmax does not see a term
    that all keys share, hence the keys' covariance within a sequence. Without moments the inputs
    (x, 1) and y have uncorrelated coordinates of unit variance: then this is the singular value
    decomposition of the bilinear form `[W_q | b_q]^T W_k`.

    With `R^T R` the moments of queries and keys, the mean square of an error `q . E k` is the
    Frobenius norm of `R_q E R_k^T`, and Eckart-Young gives the best approximation of `R_q R_k^T`.
    """
    if moments is None:
        left = form.w_q if form.b_q is None else torch.cat([form.w_q, form.b_q[:, :, None]], -1)
        roots = [torch.linalg.qr(w.mT).R for w in (left, form.w_k)]
    else:
        roots = [_root(moment) for moment in moments]
    root_q, root_k = roots
    u, spectrum, vh = torch.linalg.svd(root_q @ root_k.mT, full_matrices=False)
    # Each side gets the square root of a singular value.
    share = spectrum.sqrt()[:, :, None]
    to_query = share * u.mT @ torch.linalg.pinv(root_q).mT
    to_key = share * vh @ torch.linalg.pinv(root_k).mT
    return Decomposition(form.scale * spectrum, to_query, to_key)


def _root(moment: Tensor) -> Tensor:
    """R with `R^T R = moment`, up to the ridge."""
    values, vectors = torch.linalg.eigh(moment)
    mean = values.mean(-1, keepdim=True)
    floor = torch.where(mean > 0, RIDGE * mean, 1.0)
    return (values.clamp_min(0.0) + floor).sqrt()[:, :, None] * vectors.mT


def truncate(
    form: Form, decomposition: Decomposition, ranks: Sequence[int], scale: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The projections of the approximation with these ranks, for logits with factor `scale`.

    Returns:
        w_q `[num_heads, width, d_q]`, b_q `[num_heads, width]`, w_k `[num_heads, width, d_k]` in
        fp64, zero from the rank of a head on. `width` is the smaller of the largest rank and the
        number of singular values.
    """
    width = min(max(ranks), decomposition.spectrum.shape[-1])
    rank_of = torch.tensor(list(ranks), device=form.w_q.device)[:, None]
    is_kept = torch.arange(width, device=form.w_q.device) < rank_of
    factor = (is_kept.double() * (form.scale / scale) ** 0.5)[:, :, None]
    to_query = factor * decomposition.to_query[:, :width]
    to_key = factor * decomposition.to_key[:, :width]
    b_q = None if form.b_q is None else (to_query @ form.b_q[:, :, None])[:, :, 0]
    return to_query @ form.w_q, b_q, to_key @ form.w_k
