"""Replace the nn.MultiheadAttention layers of a model and measure how its outputs change."""

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
    """The report of `convert`.

    Attributes:
        replaced: maps the name of each replaced layer to what its new rank kept.
        skipped: maps the name of each nn.MultiheadAttention that was not replaced to the reason.
        change: root mean square of (new output - old output) divided by the standard deviation of
            the old output, on the given batch; None without a batch.
        max_change: largest absolute change of an output; None without a batch.
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
    """Replace every nn.MultiheadAttention in `model`, in place, by its best rank-`rank` fit.

    The replaced layers get new parameters: build the optimizer after converting.

    Args:
        model: searched recursively; a layer used in two places stays shared.
        rank: rank of every new head, at most its present `head_dim`, which is exact; see
            `LowRankAttention.from_multihead`.
        batch: input for measuring the change of the outputs: a tensor, a tuple of positional
            arguments or a mapping of keyword arguments.
        select: `select(name, layer)` returns whether to replace the layer.
        method, backend: passed to the new layers.

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
            skipped[name] = (
                f"is a subclass, {type(layer).__name__}, which may compute something else"
            )
            continue
        if layer not in new_layers:
            try:
                # A larger rank than the head's own would add nothing but zeros.
                new_layers[layer] = LowRankAttention.from_multihead(
                    layer, min(rank, layer.head_dim), method=method, backend=backend
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
    """Stop nn.TransformerEncoder from making nested tensors if one of its layers is ours.

    The encoder checks only its first layer, and only in its constructor.
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
    """The floating-point tensors in the output of a model, in nested containers too."""
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
        raise ValueError(
            "the model returns no floating-point output for this batch; pass another batch"
        )
    old, new = (torch.cat([x.flatten() for x in outputs]) for outputs in (before, after))
    difference = new - old
    spread = (old - old.mean()).square().mean().sqrt()
    relative = difference.square().mean().sqrt() / spread if spread > 0 else difference.abs().max()
    return float(relative), float(difference.abs().max())
