"""What a call is: the problem that validation makes of it, and what kernels return for it.

These tuples are passed on whole. Only the schema of an operator lists their fields (`schema` writes
it, `unflatten` reads it back), so a new argument is a new field here, a check in `validation` and a
few lines in the kernels that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

SCORES = ("dot", "gaussian")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Problem(NamedTuple):
    """The attention of one call, validated. Every tensor has the same leading shape L.

    L may have any number of dimensions, with stride 0 where an argument was broadcast.
    """

    query: Tensor  # [*L, n_q, rank]
    key: Tensor  # [*L, n_k, rank]
    value: Tensor  # [*L, n_k, dv]
    attn_mask: Tensor | None  # [*L, n_q, n_k]; bool (True = may attend) or added to the logits
    key_mask: Tensor | None  # [*L, n_k]; bool (True = ignored) or added to the logits
    slopes: Tensor | None  # [*L] fp64; -slope |i - j| is added to the logits
    seed: Tensor | None  # [*L] int64, one dropout seed per head
    scale: float
    dropout_p: float
    is_causal: bool
    is_gaussian: bool  # logits are -scale / 2 |q - k|^2, not scale q . k

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def key_bias(self) -> Tensor | None:
        """The mask of the keys if it is added to the logits, and so may have a gradient."""
        mask = self.key_mask
        return None if mask is None or mask.dtype == torch.bool else mask

    def new_gradients(self, new: str = "new_empty") -> Gradients:
        """Room for all gradients; `new` is "new_empty" or "new_zeros"."""
        make = getattr(self.query, new)
        sums, bias, slopes = accumulate_dtype(self.query.dtype), self.key_bias, self.slopes
        return Gradients(
            make(self.query.shape),
            make(self.key.shape),
            make(self.value.shape),
            make(0 if bias is None else bias.shape, dtype=sums),
            make(0 if slopes is None else slopes.shape, dtype=torch.float64),
        )

    def head(self, index: tuple[int, ...]) -> Problem:
        """The problem of one head, without leading dimensions."""
        return Problem._make(x[index] if isinstance(x, Tensor) else x for x in self)

    def to(self, dtype: torch.dtype) -> Problem:
        """The problem with query, key and value in another dtype."""
        query, key, value = self.query.to(dtype), self.key.to(dtype), self.value.to(dtype)
        return self._replace(query=query, key=key, value=value)

    def without_hidden_keys(self) -> Problem:
        """The problem with zeros for the keys, and their values, that `key_mask` hides.

        They may hold NaN, and a weight of 0 times NaN is NaN.
        """
        if self.key_mask is None:
            return self
        is_bool = self.key_mask.dtype == torch.bool
        hidden = (self.key_mask if is_bool else self.key_mask == -torch.inf)[..., None]
        key, value = (x.masked_fill(hidden, 0.0) for x in (self.key, self.value))
        return self._replace(key=key, value=value)

    def rows(self, queries: slice, keys: slice) -> Problem:
        """The problem of some queries and some keys; for problems without dropout."""
        attn_mask, key_mask = self.attn_mask, self.key_mask
        return self._replace(
            query=self.query[..., queries, :],
            key=self.key[..., keys, :],
            value=self.value[..., keys, :],
            attn_mask=None if attn_mask is None else attn_mask[..., queries, keys],
            key_mask=None if key_mask is None else key_mask[..., keys],
        )


class Saved(NamedTuple):
    """The results of forward, which backward needs again."""

    out: Tensor  # [*L, n_q, dv] in the dtype of query
    lse: Tensor  # [*L, n_q] fp64

    def rows(self, queries: slice) -> Saved:
        return Saved(self.out[..., queries, :], self.lse[..., queries].contiguous())


class OutputGradients(NamedTuple):
    """The gradients that backward starts from."""

    out: Tensor
    lse: Tensor | None

    def rows(self, queries: slice) -> OutputGradients:
        lse = None if self.lse is None else self.lse[..., queries]
        return OutputGradients(self.out[..., queries, :], lse)


class Gradients(NamedTuple):
    """The gradients that backward returns.

    `key_mask` and `slopes` have no elements where the problem has no floating mask or no slopes.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor  # [*L, n_k] in the precision of sums
    slopes: Tensor  # [*L] fp64


class Directions(NamedTuple):
    """A move of everything that may be differentiated; None: it stays."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    slopes: Tensor | None


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


class SelfAttentionProblem(NamedTuple):
    """A self-attention layer with its projections, validated. L is any leading shape."""

    x: Tensor  # [*L, n, d]
    w_q: Tensor  # [num_heads * rank, d]
    w_k: Tensor  # [num_heads * rank, d]
    w_v: Tensor  # [num_heads * dv, d]
    w_o: Tensor | None  # [d_out, num_heads * dv]; None: the result is the heads side by side
    b_in: Tensor | None  # [num_heads * (2 * rank + dv)], of query, key and value
    b_o: Tensor | None  # [d_out]
    key_mask: Tensor | None  # [*L, n]; bool (True = ignored) or added to the logits
    num_heads: int
    scale: float
    is_causal: bool

    @property
    def inputs(
        self,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """What is differentiated: everything but the mask."""
        return self[:7]


class Keep(NamedTuple):
    """Whether forward keeps what backward needs."""

    keep: bool


class SelfAttentionResults(NamedTuple):
    """The results of a layer's forward. Only `out` is computed if nothing is to be kept."""

    out: Tensor  # [*L, n, d_out]
    query_key: Tensor | None  # [*L, n, 2 * num_heads * rank], queries first
    value: Tensor | None  # [*L, n, num_heads * dv]; None if projected at the nodes
    heads: Tensor | None  # like value; None if it is `out`, or projected at the nodes
    lse: Tensor | None  # [*L, num_heads, n] fp64; None if projected at the nodes


class SelfAttentionSaved(NamedTuple):
    """What backward gets of the results of forward, as far as it was kept."""

    query_key: Tensor | None
    value: Tensor | None
    heads: Tensor | None
    lse: Tensor | None

    def everything(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of it, where every token was projected."""
        query_key, value, heads, lse = self
        assert query_key is not None
        assert value is not None
        assert heads is not None
        assert lse is not None
        return query_key, value, heads, lse


class SelfAttentionOutputGradient(NamedTuple):
    """The gradient that the backward pass of a layer starts from."""

    out: Tensor


class Wanted(NamedTuple):
    """Which gradients backward computes."""

    want_x: bool
    want_weights: bool


class SelfAttentionGradients(NamedTuple):
    """The gradients that backward returns, those of query and key together."""

    x: Tensor | None
    w_qk: Tensor | None
    w_v: Tensor | None
    w_o: Tensor | None
    b_in: Tensor | None
    b_o: Tensor | None


class Starts(NamedTuple):
    """Where packed sequences start, and in the last entry where they end: `[sequences + 1]`."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


class Kernels(NamedTuple):
    """How a backend computes attention."""

    forward: Callable[[Problem], Saved]
    backward: Callable[[OutputGradients, Saved, Problem], Gradients]


class LayerKernels(NamedTuple):
    """How a backend computes a layer; None where it does not serve a head."""

    forward: Callable[[LayerProblem], Tensor | None]
    backward: Callable[[Tensor, LayerProblem], LayerGradients | None]


class StreamKernels(NamedTuple):
    """How a backend keeps the state of a stream; see `reference.stream`."""

    append: Callable[..., float]
    query: Callable[..., tuple[Tensor, Tensor, float]]
    step: Callable[..., tuple[Tensor, float, float]]


class Choice(NamedTuple):
    """The method and backend the caller asked for; "auto" leaves it to the plan."""

    method: str
    backend: str


# How many fields of a tuple hold tensors; they come first.
TENSOR_FIELDS: dict[Any, int] = {
    kind: sum(hint in (Tensor, Tensor | None) for hint in get_type_hints(kind).values())
    for kind in (
        *(Problem, Saved, OutputGradients, Gradients, Directions, Starts, Choice),
        *(SelfAttentionProblem, SelfAttentionSaved, SelfAttentionOutputGradient),
    )
}


def schema(*kinds: Any) -> str:
    """The fields of these tuples as a torch.library schema lists them.

    Example:
        >>> schema(OutputGradients, Choice)
        'Tensor grad_out, Tensor? grad_lse, str method, str backend'
    """
    prefix = {OutputGradients: "grad_", SelfAttentionOutputGradient: "grad_"}
    types: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?"}
    types |= {kind: kind.__name__ for kind in (int, float, bool, str)}
    return ", ".join(
        f"{types[hint]} {prefix.get(kind, '')}{name}"
        for kind in kinds
        for name, hint in get_type_hints(kind).items()
    )


def unflatten(fields: Sequence[Any], *kinds: Any) -> list[Any]:
    """The tuples of these kinds whose fields are listed one after the other."""
    rest = iter(fields)
    return [kind._make(islice(rest, len(kind._fields))) for kind in kinds]


def default_scale(rank: int, score: str = "dot") -> float:
    return rank**-0.5 if score == "dot" else 1.0


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums: fp64 for fp64, fp32 for every narrower dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
