"""Joining attention over two sets of keys: the monoid of (out, lse)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def share(lse_part: Tensor, lse: Tensor) -> Tensor:
    """The weight of a part within the whole, exp(lse_part - lse); 0 where there is nothing."""
    return torch.where(lse == -math.inf, 0.0, (lse_part - lse).exp())


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from attention over each.

    Args:
        out_a, out_b: `[..., n_q, dv]`, the same queries over keys A and over keys B.
        lse_a, lse_b: `[..., n_q]`, as `attention(..., return_lse=True)` gives them. The result is
            as accurate as they are: an fp32 lse of size 1e4 is known only to 0.001.

    Returns:
        `(out, lse)` over A and B together, differentiable in all four arguments.

    Example:
        >>> q, k, v = torch.randn(5, 1), torch.randn(8, 1), torch.randn(8, 3)
        >>> halves = [boltzattn.attention(q, k[s], v[s], return_lse=True)
        ...           for s in (slice(0, 4), slice(4, 8))]
        >>> out, lse = boltzattn.merge(*halves[0], *halves[1])
        >>> torch.allclose(out, boltzattn.attention(q, k, v), atol=1e-6)
        True
    """
    for name, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        for argument, x in ((f"out_{name}", out), (f"lse_{name}", lse)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{argument} must be a tensor, got {type(x).__name__}")
        if out.shape[:-1] != lse.shape:
            raise ValueError(
                f"lse_{name} must have the shape of out_{name} without its last dimension, "
                f"{list(out.shape[:-1])}, got {list(lse.shape)}"
            )
    if out_a.shape != out_b.shape:
        raise ValueError(
            f"out_a and out_b must have the same shape, got {list(out_a.shape)} and "
            f"{list(out_b.shape)}"
        )
    # Where neither side has a key, everything is 0 and lse -inf, and no NaN enters the gradients.
    nothing = (lse_a == -math.inf) & (lse_b == -math.inf)
    lse_a, lse_b = (lse.masked_fill(nothing, 0.0) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    # From the difference of the two, which is not rounded where it matters; exp(lse_a - lse) would
    # have the rounding error of lse.
    gap = lse_a - lse_b
    weight_a, weight_b = (x.sigmoid().masked_fill(nothing, 0.0)[..., None] for x in (gap, -gap))
    out = weight_a.to(out_a.dtype) * out_a + weight_b.to(out_b.dtype) * out_b
    return out, lse.masked_fill(nothing, -math.inf)
