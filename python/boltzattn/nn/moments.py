"""Moments of queries and keys on the caller's data, gathered while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from boltzattn.nn.approximation import Moments
from boltzattn.problem import accumulate_dtype


class Gathered:
    """Sums over all tokens seen so far; their size does not depend on how many there were."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.query: Tensor | None = None
        self.key: Tensor | None = None
        self.queries = 0.0
        self.keys = 0.0

    def add_queries(self, q: Tensor, is_token: Tensor | None) -> None:
        """Add queries `[batch, n, num_heads * head_dim]`, or `[n, ...]` of one sequence."""
        heads, weight = self._heads(q, is_token)
        self.query = self._sum(self.query, heads * weight)
        self.queries += float(weight.sum())

    def add_keys(self, k: Tensor, is_token: Tensor | None) -> None:
        """The same for keys, minus the mean of their sequence."""
        heads, weight = self._heads(k, is_token)
        mean = (heads * weight).sum(1, True) / weight.sum(1, True).clamp_min(1.0)
        self.key = self._sum(self.key, (heads - mean) * weight)
        self.keys += float(weight.sum())

    def moments(self) -> Moments | None:
        """None if the layer saw no token."""
        if self.query is None or self.key is None or not self.queries or not self.keys:
            return None
        return Moments(self.query / self.queries, self.key / self.keys)

    def _heads(self, x: Tensor, is_token: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x with an axis for the heads, 1 for tokens and 0 for padding [batch, n, 1, 1])."""
        x = x.detach().to(accumulate_dtype(x.dtype))
        x = x.unsqueeze(0) if x.ndim == 2 else x.flatten(0, -3)
        x = x.unflatten(-1, (self.num_heads, -1))
        if is_token is None or is_token.shape != x.shape[:2]:
            weight = x.new_ones(x.shape[:2])
        else:
            weight = is_token.to(x.device, x.dtype)
            # What padding holds may be anything.
            x = x.masked_fill(weight[:, :, None, None] == 0, 0.0)
        return x, weight[:, :, None, None]

    @staticmethod
    def _sum(total: Tensor | None, x: Tensor) -> Tensor:
        products = torch.einsum("bnhi,bnhj->hij", x, x).double()
        return products if total is None else total + products


def is_token(batch: Any) -> Tensor | None:
    """`[batch, n]`, False for padding, from the `attention_mask` that Hugging Face models take."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def gather(
    run: Callable[[Any], object],
    data: Iterable[Any],
    watch: Callable[[Callable[[], Tensor | None]], list[Any]],
) -> None:
    """Run the model on all batches. `watch(mask)` sets its hooks and returns their handles."""
    mask: Tensor | None = None
    handles = watch(lambda: mask)
    count = 0
    try:
        for batch in data:
            mask = is_token(batch)
            run(batch)
            count += 1
    finally:
        for handle in handles:
            handle.remove()
    if count == 0:
        raise ValueError("data must yield at least one batch, got none; is it a used-up iterator?")
