"""What a layer with the call of nn.MultiheadAttention accepts, and what it says otherwise."""

from __future__ import annotations

import torch
from torch import Tensor


def check_inputs(
    query: Tensor, key: Tensor, value: Tensor, widths: tuple[int, int, int], batch_first: bool
) -> None:
    """Raise unless the three fit each other and the layer's (embed_dim, kdim, vdim)."""
    layout = "[batch, n, width]" if batch_first else "[n, batch, width]"
    for name, x, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_nested:
            raise ValueError(
                f"{name} must not be a nested tensor; pad it and pass key_padding_mask. "
                "(nn.TransformerEncoder makes nested tensors in eval mode when its first "
                "layer is a plain one: set encoder.use_nested_tensor = False)"
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


def check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    """Raise unless the mask is bool or floating and has one of the shapes."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"{name} must be bool or floating point, got {mask.dtype}; convert 0/1 masks with "
            f"{name}.bool()"
        )
    if tuple(mask.shape) not in [tuple(shape) for shape in shapes]:
        accepted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {accepted}, got {list(mask.shape)}")
