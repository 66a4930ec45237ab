"""Training: equal models from different seeds, in one call per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

Batches = Callable[[int], tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


def model_seeds(seed: int, count: int) -> list[int]:
    """The seeds of `count` models in a run with this seed."""
    return [1000 * seed + i for i in range(count)]


def build_all(build: Callable[[int], nn.Module], seeds: Sequence[int]) -> list[nn.Module]:
    """`build(seed)` for each seed, with torch's generator seeded first."""
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(build(seed))
    return models


def train(
    models: Sequence[nn.Module], batches: Batches, loss: Loss, steps: int, rate: float = 1e-2
) -> Tensor:
    """Train in place with Adam and a one-cycle schedule; return the losses `[steps, models]`.

    The parameters of all models are stacked, so that a step is one call. Adam updates every number
    separately, so each model is trained as it would be alone.

    Args:
        models: modules that differ only in the values of their parameters.
        batches: from a step to inputs `[models, ...]` and targets `[models, ...]`.
        loss: from the output and the target of one model to a number.
        steps: number of steps.
        rate: the largest learning rate.

    Example:
        >>> models = build_all(lambda seed: nn.Linear(1, 1), seeds=[0, 1])
        >>> x = torch.linspace(-1, 1, 20)[None, :, None].expand(2, 20, 1)
        >>> losses = train(models, lambda step: (x, 3 * x), nn.functional.mse_loss, 100, 0.1)
        >>> losses.shape, bool((losses[-1] < 1e-2).all())
        (torch.Size([100, 2]), True)
    """
    parameters, buffers = stack_module_state(list(models))
    template = models[0]

    def one(state: dict[str, Tensor], fixed: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(template, (state, fixed), (x,)), y)

    together = vmap(one)
    free = [p for p in parameters.values() if p.requires_grad]
    optimizer = torch.optim.Adam(free, lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    history = []
    for step in range(steps):
        losses = together(parameters, buffers, *batches(step))
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        schedule.step()
        history.append(losses.detach())
    with torch.no_grad():
        for i, model in enumerate(models):
            for name, parameter in model.named_parameters():
                parameter.copy_(parameters[name][i])
    return torch.stack(history)


def count_parameters(model: nn.Module) -> int:
    """The number of parameters of `model`, whether they are trained or not."""
    return sum(p.numel() for p in model.parameters())
