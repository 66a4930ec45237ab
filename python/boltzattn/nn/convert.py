"""Replace the nn.MultiheadAttention layers of a model and measure what that changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from boltzattn.nn.approximation import Approximation
from boltzattn.nn.attention import LowRankAttention


@dataclass(frozen=True)
class Conversion:
    """What `convert` did.

    Attributes:
        replaced: name of each replaced layer -> what its new rank kept.
        skipped: name of each nn.MultiheadAttention left alone -> why.
        change: root mean square of (new output - old output), relative to that of the old output
            about its mean, on the batch given; None without a batch.
        max_change: largest absolute difference of an output; None without a batch.
    """

    replaced: dict[str, Approximation] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    change: float | None = None
    max_change: float | None = None

    def __str__(self) -> str:
        lines = [f"replaced {name}: {report}" for name, report in self.replaced.items()]
        lines += [f"skipped {name}: {reason}" for name, reason in self.skipped.items()]
        if self.change is not None:
            lines.append(f"outputs changed by {self.change:.2%} (largest {self.max_change:.3g})")
        return "\n".join(lines) or "no nn.MultiheadAttention found"


def convert(
    model: nn.Module,
    rank: int,
    *,
    batch: Any = None,
    select: Callable[[str, nn.MultiheadAttention], bool] | None = None,
    method: str = "auto",
    backend: str = "auto",
) -> Conversion:
    """Replace every nn.MultiheadAttention of `model`, in place, by its nearest of this rank.

    Parameters of replaced layers are new tensors: build the optimizer afterwards.

    Args:
        model: walked recursively; a layer used in two places stays shared.
        rank: of every new head; see `LowRankAttention.from_multihead`.
        batch: what to call the model with, before and after, to measure the change: a tensor, a
            tuple of arguments or a mapping of keyword arguments.
        select: `select(name, layer)` says whether to replace this one.
        method, backend: of the new layers.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
        >>> report = convert(layer, rank=8, batch=torch.randn(2, 10, 32))
        >>> list(report.replaced), report.change < 1e-5
        (['self_attn'], True)
    """
    if isinstance(model, nn.MultiheadAttention):
        raise ValueError(
            "model is itself an nn.MultiheadAttention and cannot be replaced in place; "
            "use LowRankAttention.from_multihead(model, rank)"
        )
    before = None if batch is None else _outputs(model, batch)
    replaced: dict[str, Approximation] = {}
    skipped: dict[str, str] = {}
    new_layers: dict[nn.Module, LowRankAttention] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, nn.MultiheadAttention):
            continue
        if select is not None and not select(name, layer):
            skipped[name] = "not selected"
            continue
        if type(layer) is not nn.MultiheadAttention:
            skipped[name] = f"is a subclass, {type(layer).__name__}, that may compute another thing"
            continue
        if layer not in new_layers:
            try:
                new_layers[layer] = LowRankAttention.from_multihead(
                    layer, rank, method=method, backend=backend
                )
            except ValueError as error:
                skipped[name] = str(error)
                continue
        new = new_layers[layer]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
        assert new.approximation is not None
        replaced[name] = new.approximation
    _stop_nesting(model)
    if before is None:
        return Conversion(replaced, skipped)
    return Conversion(replaced, skipped, *_change(before, _outputs(model, batch)))


def _stop_nesting(model: nn.Module) -> None:
    """Keep nn.TransformerEncoder from making nested tensors when any of its layers is ours.

    It asks only its first layer, and did so when it was built.
    """
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(layer, LowRankAttention) for layer in encoder.modules()
        ):
            encoder.use_nested_tensor = False


def _outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            if isinstance(batch, Mapping):
                result = model(**batch)
            else:
                result = model(*batch) if isinstance(batch, tuple) else model(batch)
    finally:
        for module, training in modes.items():
            module.training = training
    return [tensor.double() for tensor in _tensors(result)]


def _tensors(result: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a model's result, however it wraps them."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, (tuple, list)):
        for value in result:
            yield from _tensors(value)


def _change(before: list[Tensor], after: list[Tensor]) -> tuple[float, float]:
    if not before:
        raise ValueError("batch gave no floating-point output to compare; pass another batch")
    old, new = (torch.cat([x.flatten() for x in outputs]) for outputs in (before, after))
    difference = new - old
    spread = (old - old.mean()).square().mean().sqrt()
    relative = difference.square().mean().sqrt() / spread if spread > 0 else difference.abs().max()
    return float(relative), float(difference.abs().max())
