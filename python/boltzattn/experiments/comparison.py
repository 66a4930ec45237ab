"""Comparing trained models on several tasks: the cases, and a figure of bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from boltzattn.experiments.experiment import Row, select, values
from boltzattn.theory.presentation import GREY


def model_cases(pairs: list[tuple[str, str]], **shared: int) -> list[dict[str, Any]]:
    """A case for every (task, model), with the same sizes."""
    return [{"task": task, "model": model, **shared} for task, model in pairs]


def draw_bars(
    figure: Any, rows: list[Row], titles: dict[str, str], colour: Callable[[str], str]
) -> None:
    """A panel for every task in `titles`, with a bar for every model and a dot for every seed."""
    panels = figure.subplots(1, len(titles), sharey=True)
    models = values(rows, "model")
    for axis, (task, title) in zip(panels, titles.items(), strict=True):
        name, factor = ("accuracy", 100) if task == "labels" else ("error", 1)
        for i, model in enumerate(models):
            numbers = [factor * row[name] for row in select(rows, task=task, model=model)]
            if numbers:
                axis.barh(i, np.mean(numbers), 0.7, color=colour(model))
                axis.plot(numbers, [i] * len(numbers), ".", color="black", markersize=4)
            else:
                axis.text(0, i, " not defined", color=GREY, va="center")
        labels = {"accuracy": "random labels learned, %", "error": "error / standard deviation"}
        axis.set(xlabel=labels[name])
        axis.set_title(title)
    panels[0].set_yticks(range(len(models)), models, fontsize=9)
    panels[0].invert_yaxis()
