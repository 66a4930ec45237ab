"""`attn_implementation="boltzattn"` for the models of Hugging Face's transformers.

    import boltzattn.integrations.transformers
    boltzattn.integrations.transformers.register()
    model = AutoModel.from_pretrained(name, attn_implementation="boltzattn")

Outputs are those of "sdpa". Heads to which `boltzattn.nn.convert` gave a low rank are computed with
that rank, in linear time at rank 1, also with padding and causal.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from boltzattn.functional import attention
from boltzattn.nn.adapters import RANKS

NAME = "boltzattn"
# The first version in which BERT calls the attention interface.
OLDEST = (5, 0)
# Arguments that change the logits; a model that passes one would silently get other results.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "cache")


def register() -> None:
    """Make `attn_implementation="boltzattn"` known to transformers, with its mask function.

    Raises:
        ImportError: transformers is missing, or older than 5.0.
    """
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "boltzattn.integrations.transformers needs the package transformers, which cannot be "
            "imported; install it with pip install 'boltzattn[transformers]'"
        ) from error
    version = tuple(int(part) for part in library.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(
            f"boltzattn.integrations.transformers needs transformers 5.0 or later, found "
            f"{library.__version__}; install it with pip install 'boltzattn[transformers]'"
        )
    library.AttentionInterface.register(NAME, attend)
    library.AttentionMaskInterface.register(NAME, make_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a layer of transformers calls: heads `[batch, heads, n, width]` to `[batch, n, ...]`.

    A mask of two dimensions is padding to which a causal mask is to be added, as `make_mask` makes
    it. Any other mask is complete.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} is not supported by attn_implementation='boltzattn'; use 'sdpa' or 'eager'"
            )
    if kwargs.get("output_attentions"):
        warnings.warn(
            "attn_implementation='boltzattn' returns no attention weights; use 'eager' for "
            "output_attentions",
            stacklevel=2,
        )
    n_q, n_k = query.shape[-2], key.shape[-2]
    padding = None
    if attention_mask is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        causal = bool(is_causal) and n_q > 1
    elif attention_mask.ndim == 2:
        padding, attention_mask = ~attention_mask, None
        causal = n_q > 1
    else:
        attention_mask = attention_mask[..., :n_k]
        causal = False
    options: dict[str, Any] = {
        "attn_mask": attention_mask,
        "dropout_p": dropout,
        "is_causal": causal,
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "key_padding_mask": padding,
    }
    ranks = getattr(module, RANKS, None)
    if ranks is None:
        options["enable_gqa"] = query.shape[-3] != key.shape[-3]
        out = attention(query, key, value, **options)
    elif len(set(ranks)) == 1:
        rank = ranks[0]
        out = attention(query[..., :rank], key[..., :rank], value, **options)
    else:
        out = _attend_by_rank(query, key, value, ranks, options)
    return out.transpose(1, 2).contiguous(), None


def _attend_by_rank(
    query: Tensor, key: Tensor, value: Tensor, ranks: tuple[int, ...], options: dict[str, Any]
) -> Tensor:
    """Heads of different ranks, those of equal rank in one call."""
    out = value.new_empty(*query.shape[:-1], value.shape[-1])
    mask = options.pop("attn_mask")
    parts, places = [], []
    for rank in sorted(set(ranks)):
        heads = [head for head, own in enumerate(ranks) if own == rank]
        own_mask = mask if mask is None or mask.shape[-3] == 1 else mask[:, heads]
        q, k, v = query[:, heads, :, :rank], key[:, heads, :, :rank], value[:, heads]
        parts.append(attention(q, k, v, own_mask, **options))
        places += heads
    order = torch.tensor(places).argsort().to(out.device)
    return torch.cat(parts, 1)[:, order]


def make_mask(
    batch_size: int,
    *,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int = 0,
    cache_position: Tensor | None = None,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for `attend`: padding stays padding where it can.

    * Causal masks are None without padding, and the padding `[batch, n_k]` with it.
    * Bidirectional masks are the padding, broadcast to `[batch, 1, n_q, n_k]` without copies.
    * All others (windows, chunks, packed sequences, static caches) are dense: those of "sdpa".
    """
    masking: Any = importlib.import_module("transformers.masking_utils")
    # The first versions of transformers 5 pass the positions of the queries, later ones the first.
    positions: dict[str, Any]
    if cache_position is not None:
        n_q, positions = cache_position.shape[0], {"cache_position": cache_position}
        is_last = n_q == 1 and attention_mask is not None and kv_offset == 0
    else:
        assert q_length is not None
        n_q, positions = q_length, {"q_length": q_length, "q_offset": q_offset}
        is_last = n_q == 1 and isinstance(q_offset, int) and q_offset + 1 == kv_length
    fits = attention_mask is None or tuple(attention_mask.shape[1:]) == (kv_length,)
    if kv_offset == 0 and fits:
        if mask_function is masking.causal_mask_function and (n_q == kv_length or is_last):
            return None if attention_mask is None else attention_mask.bool()
        if mask_function is masking.bidirectional_mask_function and attention_mask is not None:
            return attention_mask.bool()[:, None, None].expand(batch_size, 1, n_q, kv_length)
    kwargs["allow_is_causal_skip"] = False
    if mask_function is not masking.bidirectional_mask_function:
        kwargs["allow_is_bidirectional_skip"] = False
    mask: Tensor | None = masking.sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **positions,
        **kwargs,
    )
    return mask
