"""Which rank does one layer need, with dot products and with Gaussian scores?

The paper proves that rank 1 suffices and asks what higher ranks are good for. All models here have
one layer, one head, values of full width and the same number of parameters. Tasks: random labels;
an equivariant function ("wave", of means and a maximum); and local averages: tokens are points with
a value, and the target is the average value near the point, in the plane and in space.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from boltzattn.experiments.comparison import model_cases
from boltzattn.experiments.experiment import (
    Experiment,
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
from boltzattn.theory.presentation import STYLES, Table

DIM, CLASSES = 8, 8
RANKS = (1, 2, 3)
# A model of text belongs here too: a task whose rows have an `error`.
LOCAL = {"local, plane": 2, "local, space": 3}
TASKS = ("labels", "wave", *LOCAL)
# Tokens of a set, and the distance within which they are averaged, of a side of the cube.
N_LOCAL, BANDWIDTH = 16, 0.15
MODELS = {f"{score}, rank {rank}": (score, rank) for score in ("dot", "gaussian") for rank in RANKS}


def local_average(dimensions: int) -> Draw:
    """Points in a cube with normal values; the target is a Gaussian average of the values.

    Example:
        >>> x, y = local_average(2)(5, torch.Generator())
        >>> x.shape, y.shape
        (torch.Size([5, 16, 3]), torch.Size([5, 16, 1]))
    """

    def draw(sets: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        points = torch.rand(sets, N_LOCAL, dimensions, generator=generator)
        values = torch.randn(sets, N_LOCAL, 1, generator=generator)
        near = torch.softmax(-(torch.cdist(points, points) ** 2) / (2 * BANDWIDTH**2), -1)
        return torch.cat([points, values], -1), near @ values

    return draw


def measure(
    task: str, model: str, parameters: int, count: int, steps: int, seeds: int, seed: int
) -> list[Row]:
    score, rank = MODELS[model]
    d = 8 if task == "labels" else 2 if task == "wave" else LOCAL[task] + 1
    outputs = {"labels": CLASSES, "wave": d}.get(task, 1)
    sizes: dict[str, Any] = {"embed_dim": DIM, "in_dim": d, "out_dim": outputs}
    sizes |= {"rank": rank, "score": score}
    hidden = hidden_dim_for(parameters, 1, **sizes)

    def build(_: int) -> Any:
        return transformer(1, hidden_dim=hidden, **sizes)

    numbers = model_seeds(seed, seeds)
    if task == "labels":
        rows = learn_labels(
            build,
            numbers,
            n=8,
            vocabulary=32,
            count=count,
            d=d,
            classes=CLASSES,
            steps=steps,
        )
    else:
        draw = uniform("wave", 4, d) if task == "wave" else local_average(LOCAL[task])
        rows = learn_function(build, numbers, draw=draw, batch=count, steps=steps)
    shared = {"score": score, "rank": rank, "true_parameters": count_parameters(build(0))}
    return [{**shared, **row} for row in rows]


def _found(rows: list[Row], task: str, model: str) -> list[float]:
    name = "accuracy" if task == "labels" else "error"
    return [row[name] for row in select(rows, task=task, model=model)]


def _worse(rows: list[Row], task: str, first: str, second: str) -> bool:
    """Whether every seed of `first` is worse than every seed of `second`."""
    a, b = _found(rows, task, first), _found(rows, task, second)
    return all_below(a, b) if task == "labels" else all_below(b, a)


def judge(rows: list[Row]) -> list[Finding]:
    def compare(claim: str, task: str, first: str, second: str, holds: bool) -> Finding:
        name = "accuracy" if task == "labels" else "error"
        one, two = (mean_and_range(_found(rows, task, m)) for m in (first, second))
        return Finding(claim, holds, f"{name} {one} ({first}), {two} ({second})")

    findings = []
    for task in ("labels", "wave"):
        for score in ("dot", "gaussian"):
            one, three = f"{score}, rank 1", f"{score}, rank 3"
            findings.append(
                compare(
                    f"rank 1 is as good as rank 3 ({task}, {score} scores)",
                    task,
                    one,
                    three,
                    not _worse(rows, task, one, three),
                )
            )
    for task, needed in LOCAL.items():
        for score in ("dot", "gaussian"):
            one, full = f"{score}, rank 1", f"{score}, rank {needed}"
            findings.append(
                compare(
                    f"local averages need the rank of their space ({task}, {score} scores)",
                    task,
                    one,
                    full,
                    _worse(rows, task, one, full),
                )
            )
        dot, gaussian = f"dot, rank {needed}", f"gaussian, rank {needed}"
        findings.append(
            compare(
                f"Gaussian scores are better than dot products for local averages ({task})",
                task,
                gaussian,
                dot,
                _worse(rows, task, dot, gaussian),
            )
        )
    return findings


def table(rows: list[Row]) -> Table:
    tasks = values(rows, "task")
    lines = []
    for model in values(rows, "model"):
        factor = {"labels": 100}
        cells = [
            mean_and_range([factor.get(task, 1) * x for x in _found(rows, task, model)])
            for task in tasks
        ]
        lines.append((model, select(rows, model=model)[0]["true_parameters"], *cells))
    return (
        "scores",
        "parameters",
        *("% labels learned" if t == "labels" else f"{t}, error" for t in tasks),
    ), lines


def draw(rows: list[Row], figure: Any) -> None:
    tasks = values(rows, "task")
    panels = figure.subplots(1, len(tasks))
    titles = {"labels": "random labels, % wrong"}
    for axis, task in zip(panels, tasks, strict=True):
        for score, style in zip(("dot", "gaussian"), STYLES, strict=False):
            found = []
            for rank in RANKS:
                numbers = np.array(_found(rows, task, f"{score}, rank {rank}"))
                numbers = 100 * (1 - numbers) if task == "labels" else numbers
                axis.plot([rank] * len(numbers), numbers, ".", color=style["color"], markersize=4)
                found.append(numbers.mean())
            axis.plot(RANKS, found, **style, label=score)
        axis.set_xticks(RANKS)
        axis.set(xlabel="rank", ylim=(0, None))
        axis.set_title(titles.get(task, f"{task}, error"))
    panels[0].legend()


_PAIRS = [(task, model) for task in TASKS for model in MODELS]

EXPERIMENT = Experiment(
    name="scores",
    question="Which rank does one layer need, with dot products and with Gaussian scores?",
    refuted_if="every seed of rank 1 does worse than every seed of rank 3, at equal parameters",
    cases={
        "tiny": model_cases(_PAIRS, parameters=2000, count=8, steps=4, seeds=2),
        "quick": model_cases(_PAIRS, parameters=2000, count=64, steps=300, seeds=3),
        "full": model_cases(_PAIRS, parameters=20_000, count=1024, steps=5000, seeds=5),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
