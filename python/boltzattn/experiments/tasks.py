"""Data for training: random labels to memorize, and equivariant functions to regress."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boltzattn.experiments.experiment import Row
from boltzattn.experiments.training import build_all, train
from boltzattn.theory import TARGETS
from boltzattn.theory.memorization import random_task

TEST_SETS = 2000

# From a number of sets and a generator to inputs `[sets, n, d]` and targets `[sets, n, k]`.
Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def uniform(target: str, n: int, d: int) -> Draw:
    """One of `boltzattn.theory.TARGETS` at uniformly random points of the unit cube.

    Example:
        >>> x, y = uniform("wave", n=3, d=2)(5, torch.Generator())
        >>> x.shape, y.shape
        (torch.Size([5, 3, 2]), torch.Size([5, 3, 2]))
    """

    def draw(sets: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.rand(sets, n, d, generator=generator)
        return x, TARGETS[target](x)

    return draw


def learn_labels(
    build: Callable[[int], nn.Module],
    numbers: list[int],
    *,
    n: int,
    vocabulary: int,
    count: int,
    d: int,
    classes: int,
    steps: int,
    rate: float = 1e-2,
) -> list[Row]:
    """Train one model per seed, each on its own random labels (`random_task`).

    Returns rows with `accuracy`, the share of labels learned, and `steps_to_99`, the first step
    at which the labels have 99% of the probability (None if there is no such step).
    """
    data = [random_task(n, vocabulary, count, d, classes, number) for number in numbers]
    x = torch.stack([x for x, _ in data]).float()
    labels = torch.stack([labels for _, labels in data])
    models = build_all(build, numbers)

    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(out[..., :classes].flatten(0, 1), wanted.flatten())

    losses = train(models, lambda _: (x, labels), loss, steps, rate)
    rows = []
    for i, (number, model) in enumerate(zip(numbers, models, strict=True)):
        with torch.no_grad():
            guess = model(x[i])[..., :classes].argmax(-1)
        # A mean loss of -log(0.99).
        done = torch.nonzero(losses[:, i] < 0.01).flatten()
        rows.append(
            {
                "model_seed": number,
                "accuracy": float((guess == labels[i]).double().mean()),
                "steps_to_99": int(done[0]) if len(done) else None,
            }
        )
    return rows


def learn_function(
    build: Callable[[int], nn.Module],
    numbers: list[int],
    *,
    draw: Draw,
    batch: int,
    steps: int,
    rate: float = 1e-2,
) -> list[Row]:
    """Train one model per seed on `draw(sets, generator)`, with fresh sets in every step.

    Returns rows with `error`, the root mean square error on unseen sets divided by the standard
    deviation of the target: 1 for a model that predicts the mean.
    """
    generator = torch.Generator().manual_seed(numbers[0])
    models = build_all(build, numbers)

    def batches(_: int) -> tuple[Tensor, Tensor]:
        x, y = draw(len(models) * batch, generator)
        return x.unflatten(0, (-1, batch)), y.unflatten(0, (-1, batch))

    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(out[..., : wanted.shape[-1]], wanted)

    train(models, batches, loss, steps, rate)
    # This seed is larger than all seeds used for training.
    x, wanted = draw(TEST_SETS, torch.Generator().manual_seed(2**31 + numbers[0]))
    spread = (wanted - wanted.mean((0, 1))).square().mean().sqrt()
    rows = []
    for number, model in zip(numbers, models, strict=True):
        with torch.no_grad():
            out = model(x)[..., : wanted.shape[-1]]
        rows.append(
            {
                "model_seed": number,
                "error": float((out - wanted).square().mean().sqrt() / spread),
            }
        )
    return rows
