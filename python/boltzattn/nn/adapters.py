"""The attention layers of other libraries: where their projections are, and which cannot do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# The attribute in which a layer that was converted in place carries the ranks of its heads.
# `boltzattn.integrations.transformers` reads it.
RANKS = "boltzattn_ranks"


class Projection(NamedTuple):
    """A linear map inside a module: those rows of its weight, or columns if transposed.

    Attributes:
        module: has `weight` and `bias`; the bias may be None.
        rows: the outputs that belong to the map.
        transposed: the weight is `[in, out]`, as that of transformers' Conv1D.
    """

    module: nn.Module
    rows: slice = slice(None)
    transposed: bool = False

    @property
    def weight(self) -> Tensor:
        """A view, `[out, in]`."""
        weight: Any = self.module.weight
        return (weight.T if self.transposed else weight).detach()[self.rows]

    @property
    def bias(self) -> Tensor | None:
        """A view, `[out]`."""
        bias: Any = self.module.bias
        return None if bias is None else bias.detach()[self.rows]

    @torch.no_grad()
    def write(self, weight: Tensor, bias: Tensor | None) -> None:
        """Change the module in place.

        Args:
            weight: `[out, in]`.
            bias: `[out]`; None leaves the bias as it is, and a module without one ignores it.
        """
        self.weight.copy_(weight)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)


@dataclass(frozen=True)
class Adapter:
    """A kind of attention layer whose projections `convert` changes in place.

    The layer must compute `softmax(scale * q . k + terms without q and k)` from the outputs q and
    k of these projections, `[..., num_heads * head_dim]`.

    Attributes:
        name: what it looks for, in a few words.
        matches: whether a module is of this kind.
        query, key: the projections of a layer.
        num_heads: the number of its heads.
        why_not: the reason why a layer of this kind cannot be converted, or None.
        scale: the factor on its logits, None for `1 / sqrt(head_dim)`. It only weighs layers
            against one another when `convert` distributes a total.
    """

    name: str
    matches: Callable[[nn.Module], bool]
    query: Callable[[Any], Projection]
    key: Callable[[Any], Projection]
    num_heads: Callable[[Any], int]
    why_not: Callable[[Any], str | None] = lambda _: None
    scale: Callable[[Any], float | None] = lambda _: None


def linears(name: str, query: str, key: str, num_heads: str) -> Adapter:
    """An adapter for layers with one nn.Linear for the queries and one for the keys.

    Args:
        name: what it looks for, in a few words.
        query, key: names of the submodules.
        num_heads: name of the attribute with the number of heads, in the layer or its `config`.

    Example:
        >>> mine = linears("my attention", query="to_q", key="to_k", num_heads="heads")
        >>> print(boltzattn.nn.convert(torch.nn.Linear(3, 3), rank=4, adapters=(mine,)))
        no attention layer found; looked for nn.MultiheadAttention; my attention
    """

    def count(layer: Any) -> int:
        found = getattr(layer, num_heads, None)
        return int(getattr(layer.config, num_heads) if found is None else found)

    def matches(layer: nn.Module) -> bool:
        parts = (getattr(layer, part, None) for part in (query, key))
        has_heads = hasattr(layer, num_heads) or hasattr(getattr(layer, "config", None), num_heads)
        return has_heads and all(isinstance(part, nn.Module) for part in parts)

    def why_not(layer: nn.Module) -> str | None:
        if (reason := _between(layer)) is not None:
            return reason
        for part in (query, key):
            module = getattr(layer, part)
            if type(module) is not nn.Linear:
                return f"{part} is a {type(module).__name__}, not an nn.Linear"
        if getattr(layer, query).out_features != getattr(layer, key).out_features:
            return "key heads serve groups of query heads (GQA), which low-rank heads cannot share"
        return None

    return Adapter(
        name,
        matches,
        lambda layer: Projection(getattr(layer, query)),
        lambda layer: Projection(getattr(layer, key)),
        count,
        why_not,
        lambda layer: getattr(layer, "scaling", None),
    )


_POSITIONS = ("position_embeddings", "sinusoidal_pos", "rotary", "rope", "freqs_cis")
_BETWEEN = {
    "distance_embedding": "adds relative positions that are multiplied by queries and keys",
    "q_norm": "normalises queries between their projection and the product",
    "k_norm": "normalises keys between their projection and the product",
    "q_layernorm": "normalises queries between their projection and the product",
    "k_layernorm": "normalises keys between their projection and the product",
}


def _between(layer: nn.Module) -> str | None:
    """What the layer does between projections and product, as far as names tell."""
    held = [name for name, part in {**vars(layer), **layer._modules}.items() if part is not None]
    names = [*inspect.signature(layer.forward).parameters, *held]
    for name in names:
        if name.startswith(_POSITIONS):
            return (
                f"uses rotary positions ({name}): they turn queries and keys after their "
                "projections, by an angle for every token, so that no fixed low rank exists"
            )
    for name in held:
        if name in _BETWEEN:
            return f"{_BETWEEN[name]} ({name})"
    return None


def _is_gpt2(layer: nn.Module) -> bool:
    return type(getattr(layer, "c_attn", None)).__name__ == "Conv1D" and hasattr(layer, "num_heads")


def _gpt2_query(layer: Any) -> Projection:
    if hasattr(layer, "q_attn"):
        return Projection(layer.q_attn, transposed=True)
    return Projection(layer.c_attn, slice(layer.embed_dim), transposed=True)


def _gpt2_key(layer: Any) -> Projection:
    width = layer.embed_dim
    start = 0 if hasattr(layer, "q_attn") else width
    return Projection(layer.c_attn, slice(start, start + width), transposed=True)


# What `convert` looks for besides nn.MultiheadAttention; the first that matches is taken.
ADAPTERS = (
    linears("query, key (BERT, RoBERTa, MiniLM, ViT)", "query", "key", "num_attention_heads"),
    linears("q_proj, k_proj (OPT, CLIP, BART)", "q_proj", "k_proj", "num_heads"),
    linears(
        "q_proj, k_proj (ViT, Llama-style without rotary positions)",
        "q_proj",
        "k_proj",
        "num_attention_heads",
    ),
    linears("q_lin, k_lin (DistilBERT)", "q_lin", "k_lin", "n_heads"),
    Adapter(
        "c_attn of Conv1D (GPT-2)", _is_gpt2, _gpt2_query, _gpt2_key, lambda layer: layer.num_heads
    ),
)


def counted_ranks(query: Projection, key: Projection, num_heads: int) -> tuple[int, ...]:
    """How many leading coordinates of each head are not 0 in both projections."""
    used = None
    for projection in (query, key):
        rows = projection.weight.ne(0).any(1)
        if projection.bias is not None:
            rows = rows | projection.bias.ne(0)
        used = rows if used is None else used & rows
    assert used is not None
    per_head = used.unflatten(0, (num_heads, -1)).cpu()
    last = per_head * torch.arange(1, per_head.shape[1] + 1)
    return tuple(max(1, int(rank)) for rank in last.max(1).values)


def mark_ranks(layer: nn.Module, query: Projection, key: Projection, num_heads: int) -> None:
    """Note the ranks on the layer, and do so again whenever weights are loaded into it."""
    first = not hasattr(layer, RANKS)
    setattr(layer, RANKS, counted_ranks(query, key, num_heads))
    if first:
        hook = partial(_loaded, query=query, key=key, num_heads=num_heads)
        layer.register_load_state_dict_post_hook(hook)


def _loaded(
    layer: nn.Module, _: Any, *, query: Projection, key: Projection, num_heads: int
) -> None:
    setattr(layer, RANKS, counted_ranks(query, key, num_heads))
