"""Comparing trained models on several tasks: cases, training, verdicts, the table and the figure.

A task is called "labels" if its rows have an `accuracy`; rows of all others have an `error`. A
model is worse than another one if every seed of it is worse than every seed of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from boltzattn.experiments.experiment import (
    Finding,
    Row,
    all_below,
    mean_and_range,
    select,
    values,
)
from boltzattn.experiments.models import hidden_dim_for, transformer
from boltzattn.experiments.tasks import Draw, learn_function, learn_labels, uniform
from boltzattn.experiments.training import count_parameters, model_seeds
from boltzattn.theory.presentation import GREY, Table

DIM, CLASSES = 8, 8
WAVE = uniform("wave", 4, 2)
TITLES = {"labels": "Memorization (more is better)", "function": "Regression (less is better)"}


def model_cases(pairs: Iterable[tuple[str, str]], **shared: int) -> list[dict[str, Any]]:
    """A case for every (task, model), with the same sizes."""
    return [{"task": task, "model": model, **shared} for task, model in pairs]


def train_transformers(
    layers: int,
    draw: Draw | None,
    *,
    parameters: int,
    count: int,
    steps: int,
    seeds: int,
    seed: int,
    **attention: Any,
) -> list[Row]:
    """Train transformers of about `parameters` parameters, one per seed.

    Args:
        layers: of `models.transformer`.
        draw: sets and targets for regression; None for random labels of tokens of 8.
        count: sets to memorize, or sets per step.
        attention: further arguments of `models.transformer`.
    """
    numbers = model_seeds(seed, seeds)
    in_dim, out_dim = DIM, CLASSES
    if draw is not None:
        in_dim, out_dim = (t.shape[-1] for t in draw(1, torch.Generator()))
    sizes: dict[str, Any] = {"embed_dim": DIM, "in_dim": in_dim, "out_dim": out_dim, **attention}
    hidden = hidden_dim_for(parameters, layers, **sizes)

    def build(_: int) -> Any:
        return transformer(layers, hidden_dim=hidden, **sizes)

    if draw is None:
        task = {"n": 8, "vocabulary": 32, "count": count, "d": in_dim, "classes": out_dim}
        rows = learn_labels(build, numbers, steps=steps, **task)
    else:
        rows = learn_function(build, numbers, draw=draw, batch=count, steps=steps)
    shared = {"hidden": hidden, "true_parameters": count_parameters(build(0))}
    return [{**shared, **row} for row in rows]


def found(rows: list[Row], task: str, model: str) -> list[float]:
    """The accuracy or the error of every seed of a model."""
    return [row[_measure(task)] for row in select(rows, task=task, model=model)]


def best(rows: list[Row], task: str, models: Iterable[str]) -> str:
    """The model that is best in the mean over its seeds."""
    sign = 1 if task == "labels" else -1
    return max(models, key=lambda model: sign * float(np.mean(found(rows, task, model))))


def as_good(rows: list[Row], claim: str, task: str, first: str, second: str) -> Finding:
    """The claim that `first` is not worse than `second`."""
    return _compare(rows, claim, task, first, second, not _worse(rows, task, first, second))


def better(rows: list[Row], claim: str, task: str, first: str, second: str) -> Finding:
    """The claim that `second` is worse than `first`."""
    return _compare(rows, claim, task, first, second, _worse(rows, task, second, first))


def equal_sizes(rows: list[Row]) -> Finding:
    """The claim that the models have equal numbers of parameters, within three percent."""
    sizes = values(rows, "true_parameters")
    return Finding(
        "the models have the same number of parameters",
        max(sizes) < 1.03 * min(sizes),
        f"{min(sizes)} to {max(sizes)}",
    )


def model_table(rows: list[Row]) -> Table:
    """A line for every model, with the mean and the range of its seeds on every task."""
    tasks = values(rows, "task")
    header = ["model", "parameters"]
    for task in tasks:
        header += ["% labels learned", "steps to 99%"] if task == "labels" else [f"{task}, error"]
    lines = []
    for model in values(rows, "model"):
        cells = []
        for task in tasks:
            some = select(rows, task=task, model=model)
            factor = 100 if task == "labels" else 1
            numbers = [factor * number for number in found(rows, task, model)]
            cells.append(mean_and_range(numbers) if some else "")
            if task == "labels":
                done = [r["steps_to_99"] for r in some if r["steps_to_99"] is not None]
                cells.append(f"{np.mean(done):.0f} ({len(done)} of {len(some)})" if done else "-")
        lines.append((model, select(rows, model=model)[0]["true_parameters"], *cells))
    return header, lines


def draw_bars(
    figure: Any, rows: list[Row], titles: dict[str, str], colour: Callable[[str], str]
) -> None:
    """A panel for every task in `titles`, with a bar for every model and a dot for every seed."""
    panels = figure.subplots(1, len(titles), sharey=True)
    models = values(rows, "model")
    for axis, (task, title) in zip(panels, titles.items(), strict=True):
        factor = 100 if task == "labels" else 1
        for i, model in enumerate(models):
            numbers = [factor * number for number in found(rows, task, model)]
            if numbers:
                axis.barh(i, np.mean(numbers), 0.7, color=colour(model))
                axis.plot(numbers, [i] * len(numbers), ".", color="black", markersize=4)
            else:
                axis.text(0, i, " not defined", color=GREY, va="center")
        labels = {"accuracy": "random labels learned, %", "error": "error / standard deviation"}
        axis.set(xlabel=labels[_measure(task)])
        axis.set_title(title)
    panels[0].set_yticks(range(len(models)), models, fontsize=9)
    panels[0].invert_yaxis()


def _measure(task: str) -> str:
    return "accuracy" if task == "labels" else "error"


def _worse(rows: list[Row], task: str, first: str, second: str) -> bool:
    a, b = found(rows, task, first), found(rows, task, second)
    return all_below(a, b) if task == "labels" else all_below(b, a)


def _compare(
    rows: list[Row], claim: str, task: str, first: str, second: str, holds: bool
) -> Finding:
    one, two = (mean_and_range(found(rows, task, model)) for model in (first, second))
    return Finding(claim, holds, f"{_measure(task)} {one} ({first}), {two} ({second})")
