"""Replace the attention layers of a model by low-rank ones and measure how its outputs change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from boltzattn.nn.adapters import ADAPTERS, Adapter
from boltzattn.nn.approximation import Approximation, decompose
from boltzattn.nn.attention import LowRankAttention
from boltzattn.nn.layers import InPlaceLayer, Layer, MultiheadLayer
from boltzattn.nn.moments import Gathered, gather, is_token
from boltzattn.nn.ranks import Budget

MULTIHEAD = "nn.MultiheadAttention"


@dataclass(frozen=True)
class Conversion:
    """The report of `convert`.

    Attributes:
        replaced: maps the name of each replaced layer to what its new rank kept.
        skipped: maps the name of each attention layer that was not replaced to the reason.
        change: root mean square of (new output - old output) divided by the standard deviation of
            the old output, on the given batch; None without a batch.
        max_change: largest absolute change of an output; None without a batch.
        changes: the same as `change` for the output of each replaced layer, in the model with all
            layers replaced; empty without a batch.
        looked_for: the kinds of layers that were looked for.
    """

    replaced: dict[str, Approximation] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    change: float | None = None
    max_change: float | None = None
    changes: dict[str, float] = field(default_factory=dict)
    looked_for: tuple[str, ...] = (MULTIHEAD,)

    def __str__(self) -> str:
        lines = [
            f"replaced {name}: {report}"
            + (f"; its output changed by {self.changes[name]:.2%}" if name in self.changes else "")
            for name, report in self.replaced.items()
        ]
        lines += [f"skipped {name}: {reason}" for name, reason in self.skipped.items()]
        if self.change is not None and self.replaced:
            lines.append(f"outputs changed by {self.change:.2%} (largest {self.max_change:.3g})")
        return "\n".join(lines) or (
            "no attention layer found; looked for " + "; ".join(self.looked_for)
        )


def convert(
    model: nn.Module,
    rank: int | None = None,
    *,
    kept: float | None = None,
    total: int | None = None,
    per: str = "layer",
    data: Iterable[Any] | None = None,
    batch: Any = None,
    select: Callable[[str, nn.Module], bool] | None = None,
    adapters: Sequence[Adapter] = ADAPTERS,
    method: str = "auto",
    backend: str = "auto",
) -> Conversion:
    """Replace the attention layers in `model`, in place, by their best low-rank fits.

    With `data` the fit is best for the logits that occur on it; without, for inputs with
    uncorrelated coordinates, which those of trained models are not. An nn.MultiheadAttention
    becomes a `LowRankAttention` with new parameters: build the optimizer after converting. Layers
    found by `adapters` keep their parameters: coordinates beyond the rank become 0.

    Args:
        model: searched recursively; a layer used in two places stays shared.
        rank: rank of every new head, at most its present width, which is exact.
        kept: in place of `rank`, the share of the logits' variance to keep, as 0.95: the smallest
            ranks that keep it, on average over the heads of every layer, or in every head.
        total: in place of `rank`, the sum of the ranks of all heads, distributed so that the
            variance that is lost is least.
        per: whether `kept` and `total` choose one rank for every "layer" or for every "head". A
            `LowRankAttention` runs with the largest rank of its heads.
        data: batches on which the moments of queries and keys are measured. Of tokens that the
            batch's `attention_mask` or a layer's `key_padding_mask` hides nothing is counted.
        batch: input for measuring the change of the outputs; by default the first of `data`. A
            batch is a tensor, a tuple of positional arguments or a mapping of keyword arguments.
        select: `select(name, layer)` returns whether to replace the layer.
        adapters: the kinds of layers to look for besides nn.MultiheadAttention.
        method, backend: passed to every new `LowRankAttention`.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
        >>> report = convert(layer, rank=8, batch=torch.randn(2, 10, 32))
        >>> list(report.replaced), report.change < 1e-5
        (['self_attn'], True)
    """
    budget = Budget(rank, kept, total, per)
    if isinstance(model, nn.MultiheadAttention):
        raise ValueError(
            "model is itself an nn.MultiheadAttention and cannot be replaced in place; "
            "use LowRankAttention.from_multihead(model, rank)"
        )
    if isinstance(data, (Tensor, Mapping)):
        raise TypeError(
            f"data must be an iterable of batches, got a {type(data).__name__}; pass [data]"
        )
    looked_for = (MULTIHEAD, *(adapter.name for adapter in adapters))
    names, skipped = _find(model, select, adapters, method, backend)
    gathered: dict[Layer, Gathered] = {}
    if data is not None:
        data = iter(data)
        first = next(data, None)
        if first is None:
            raise ValueError("data must yield at least one batch, got none; is it a used iterator?")
        batch = first if batch is None else batch
        gathered = {layer: Gathered(layer.num_heads) for layer in names.values()}
        gather(
            lambda batch: _run(model, batch),
            _chain(first, data),
            lambda mask: [h for layer, sums in gathered.items() for h in layer.watch(sums, mask)],
        )
        for name, layer in list(names.items()):
            if gathered[layer].moments() is None:
                skipped[name] = "saw no tokens: the model did not call it on the data"
                del names[name]
    if batch is not None:
        _leave_out_other_functions(model, batch, names, skipped)
    layers = list(dict.fromkeys(names.values()))
    decompositions = []
    for layer in layers:
        moments = gathered[layer].moments() if gathered else None
        decompositions.append(decompose(layer.form, moments))
    ranks = budget.ranks([decomposition.spectrum for decomposition in decompositions])
    before = None if batch is None else _watched(model, batch, names)
    for layer, decomposition, own in zip(layers, decompositions, ranks, strict=True):
        layer.replace(model, decomposition, own, on_data=data is not None)
    _stop_nesting(model)
    replaced = {name: layer.approximation for name, layer in names.items()}
    if before is None:
        return Conversion(replaced, skipped, looked_for=looked_for)
    after = _watched(model, batch, names)
    changes = {name: _change(before[name], after[name])[0] for name in names if before[name]}
    if not before[""]:
        raise ValueError(
            "the model returns no floating-point output for this batch; pass another batch"
        )
    return Conversion(
        replaced, skipped, *_change(before[""], after[""]), changes=changes, looked_for=looked_for
    )


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _find(
    model: nn.Module,
    select: Callable[[str, nn.Module], bool] | None,
    adapters: Sequence[Adapter],
    method: str,
    backend: str,
) -> tuple[dict[str, Layer], dict[str, str]]:
    """(the layers to replace, why others are not), by name."""
    names: dict[str, Layer] = {}
    skipped: dict[str, str] = {}
    found: dict[nn.Module, Layer] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        adapter = None
        if not isinstance(module, nn.MultiheadAttention):
            adapter = next((a for a in adapters if a.matches(module)), None)
            if adapter is None:
                continue
        if select is not None and not select(name, module):
            skipped[name] = "not selected"
            continue
        if module in found:
            names[name] = found[module]
            found[module].names.append(name)
            continue
        reason = MultiheadLayer.why_not(module) if adapter is None else adapter.why_not(module)
        if reason is None and any(p.is_meta for p in module.parameters()):
            reason = "is on the meta device: load its weights first"
        if reason is not None:
            skipped[name] = reason
        elif adapter is None:
            names[name] = found[module] = MultiheadLayer(name, module, method, backend)
        else:
            names[name] = found[module] = InPlaceLayer(name, module, adapter)
    return names, skipped


def _leave_out_other_functions(
    model: nn.Module, batch: Any, names: dict[str, Layer], skipped: dict[str, str]
) -> None:
    """Skip layers whose output is not a function of the products of queries and keys.

    Names cannot tell what a layer does between its projections and the product (rotary positions,
    norms). A layer that does nothing keeps its output when the coordinates of queries and keys
    are turned alike.
    """
    suspects = {name: layer for name, layer in names.items() if isinstance(layer, InPlaceLayer)}
    if not suspects:
        return
    before = _watched(model, batch, suspects)
    with ExitStack() as stack:
        for layer in set(suspects.values()):
            stack.enter_context(layer.turned())
        after = _watched(model, batch, suspects)
    if not any(
        _differs(before[name], after[name], layer.dtype) for name, layer in suspects.items()
    ):
        return
    for name, layer in suspects.items():  # one at a time: a change reaches later layers, too
        with layer.turned():
            after = _watched(model, batch, suspects)
        if _differs(before[name], after[name], layer.dtype):
            del names[name]
            skipped[name] = (
                "its output is not a function of the products of queries and keys: it does "
                "something between their projections and the product"
            )


def _differs(before: list[Tensor], after: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether outputs changed by far more than rounding does; models may round to fp32 inside."""
    rounding = max(torch.finfo(t).eps for t in (dtype, torch.float32))
    return bool(before) and _change(before, after)[0] > rounding**0.5


def _stop_nesting(model: nn.Module) -> None:
    """Stop nn.TransformerEncoder from making nested tensors if one of its layers is ours.

    The encoder checks only its first layer, and only in its constructor.
    """
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(layer, LowRankAttention) for layer in encoder.modules()
        ):
            encoder.use_nested_tensor = False


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation without gradients, and without the fused kernels that pass layers by."""
    modes = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, training in modes.items():
            module.training = training


def _run(model: nn.Module, batch: Any) -> Any:
    with _evaluating(model):
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple) else model(batch)


def _watched(model: nn.Module, batch: Any, names: Iterable[str]) -> dict[str, list[Tensor]]:
    """The outputs of the model (under "") and of the layers, without those at padding."""
    mask = is_token(batch)
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    handles = []
    for name in seen:

        def see(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            seen[name] += _tensors(output, mask)[:1]

        handles.append(model.get_submodule(name).register_forward_hook(see))
    try:
        result = _run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {**seen, "": _tensors(result, mask)}


def _tensors(result: Any, mask: Tensor | None) -> list[Tensor]:
    """The floating-point tensors in the output of a model, in nested containers too."""
    if isinstance(result, Tensor):
        if not result.is_floating_point():
            return []
        found = result.detach().double()
        if mask is not None and found.shape[:2] == mask.shape:
            found = found[mask.to(found.device)]
        return [found]
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [tensor for value in result for tensor in _tensors(value, mask)]
    return []


def _change(before: list[Tensor], after: list[Tensor]) -> tuple[float, float]:
    old, new = (torch.cat([x.flatten() for x in outputs]) for outputs in (before, after))
    difference = new - old
    spread = (old - old.mean()).square().mean().sqrt()
    relative = difference.square().mean().sqrt() / spread if spread > 0 else difference.abs().max()
    return float(relative), float(difference.abs().max())
