"""Checks of the inputs of a layer that is called like nn.MultiheadAttention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch.torch_modes import autocast_dtype
from boltzattn.validation import check_mask_kind


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    widths: tuple[int, int, int],
    batch_first: bool,
    weight: Tensor,
) -> None:
    """Raise unless the three fit each other, the widths (embed_dim, kdim, vdim) and the weight."""
    autocast = autocast_dtype(weight.device.type) is not None
    layout = "[batch, n, width]" if batch_first else "[n, batch, width]"
    for name, x, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
        if isinstance(x, torch.fx.Proxy):
            raise TypeError(
                f"{name} is a torch.fx.Proxy: fx.symbolic_trace cannot trace this layer, whose "
                "call depends on shapes and dtypes; use torch.export.export, or a Tracer whose "
                "is_leaf_module keeps the layer whole"
            )
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_nested:
            raise ValueError(
                f"{name} must not be a nested tensor unless query, key and value are all nested "
                "with jagged layout; convert all three to the jagged layout, or pad them and pass "
                "key_padding_mask. nn.TransformerEncoder makes strided nested tensors in eval mode "
                "if its first layer is a standard one: set encoder.use_nested_tensor = False"
            )
        if x.dtype != weight.dtype and not (autocast and x.is_floating_point()):
            raise TypeError(
                f"{name} must have the dtype of the layer, {weight.dtype}, got {x.dtype}; convert "
                f"it with {name}.to({weight.dtype}) or the layer with layer.to({x.dtype})"
            )
        if x.device != weight.device:
            raise ValueError(
                f"{name} must be on the device of the layer, {weight.device}, got {x.device}; "
                f"move it with {name}.to({str(weight.device)!r})"
            )
        if x.ndim not in (2, 3) or x.shape[-1] != width:
            raise ValueError(
                f"{name} must be [n, width] or {layout} with width {width}, got {list(x.shape)}"
            )
        if x.ndim != query.ndim:
            raise ValueError(
                f"{name} must be batched if and only if query is, got query "
                f"{list(query.shape)} and {name} {list(x.shape)}"
            )
    n, batch = (-2, 0) if batch_first else (0, 1)
    if key.shape[n] != value.shape[n]:
        raise ValueError(
            f"value must have as many rows as key, {key.shape[n]}, got {value.shape[n]} "
            f"(key {list(key.shape)}, value {list(value.shape)})"
        )
    if query.ndim == 3 and not query.shape[batch] == key.shape[batch] == value.shape[batch]:
        raise ValueError(
            f"query, key and value must have equal batch sizes in {layout} "
            f"(batch_first={batch_first}), got query {list(query.shape)}, key {list(key.shape)}, "
            f"value {list(value.shape)}"
        )


def jagged(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all three are nested tensors of the jagged layout."""
    return all(
        isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged
        for x in (query, key, value)
    )


def check_jagged(
    query: Any,  # Tensor's type lacks the methods of a jagged tensor
    key: Any,
    value: Any,
    widths: tuple[int, int, int],
    batch_first: bool,
    **refused: bool,
) -> None:
    """Raise unless three jagged tensors fit each other and the layer.

    `refused` says for each argument that nested tensors do not support whether it was given.
    """
    if not batch_first:
        raise ValueError(
            "query must not be a nested tensor with batch_first=False: a nested tensor is "
            "[batch, n, width]; build the layer with batch_first=True"
        )
    for name, x, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
        if x.ndim != 3 or x.shape[-1] != width:
            raise ValueError(f"{name} must be [batch, n, width] with width {width}, got {x.shape}")
    if query.shape[0] != key.shape[0]:
        raise ValueError(
            f"key must have as many sequences as query, {query.shape[0]}, got {key.shape[0]}"
        )
    if not torch.equal(key.offsets(), value.offsets()):
        raise ValueError("value must have the sequence lengths of key; their offsets() differ")
    for name, given in refused.items():
        if given:
            raise ValueError(
                f"{name} must not be given with nested tensors, which have no padding and no "
                "square matrix of weights; use padded tensors"
            )


def check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    """Raise unless the mask is bool or floating point and has one of the shapes."""
    check_mask_kind(name, mask)
    if tuple(mask.shape) not in [tuple(shape) for shape in shapes]:
        accepted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {accepted}, got {list(mask.shape)}")
