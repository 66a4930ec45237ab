"""What a call is: the problem that validation makes of it, and what its kernels return.

These tuples are passed on whole. Only the schema of a torch.library operator flattens them, and
`schema` writes that part of it, so a new argument is a new field here and a line in the kernels
that use it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Problem(NamedTuple):
    """Attention of one call, validated; every tensor has the same leading shape L.

    L may have any number of dimensions, and stride 0 where an argument was broadcast. The order of
    the fields is the order of the arguments of every operator.
    """

    query: Tensor  # [*L, n_q, rank]
    key: Tensor  # [*L, n_k, rank]
    value: Tensor  # [*L, n_k, dv]
    attn_mask: Tensor | None  # [*L, n_q, n_k]; bool (True = may attend) or added to the logits
    key_mask: Tensor | None  # [*L, n_k]; bool (True = ignored) or added to the logits
    seed: Tensor | None  # [*L] int64, one dropout seed per head
    scale: float
    dropout_p: float
    is_causal: bool


class Saved(NamedTuple):
    """The results of forward, which backward needs again."""

    out: Tensor  # [*L, n_q, dv] in the dtype of query
    lse: Tensor  # [*L, n_q] fp64


class OutputGradients(NamedTuple):
    """The gradients that backward starts from."""

    out: Tensor
    lse: Tensor | None


class Gradients(NamedTuple):
    """The gradients that backward returns."""

    query: Tensor
    key: Tensor
    value: Tensor


class LayerProblem(NamedTuple):
    """Rank-1 self-attention whose value and output projections are applied at the nodes."""

    query: Tensor  # [batch, heads, n, 1]
    key: Tensor  # [batch, heads, n, 1]
    value: Tensor  # [batch, n, d], shared by the heads
    weight: Tensor  # [heads, d_out, d]
    weight_bias: Tensor | None  # [heads, d_out]
    out_bias: Tensor | None  # [d_out]
    key_mask: Tensor | None  # [batch, n] bool
    extents: Tensor | None  # [batch, 2 * heads, 6], what `project` found of queries and keys
    scale: float


class LayerGradients(NamedTuple):
    """The gradients that the backward pass of a layer returns."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
