"""Which rank does one layer need, with dot products and with Gaussian scores?

The paper proves that rank 1 suffices and asks what higher ranks are good for. All models here have
one layer, one head, values of full width and the same number of parameters. Tasks: random labels;
an equivariant function ("wave", of means and a maximum); and local averages: tokens are points of
the plane or of space with a value, and the target is the average value near the point.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from boltzattn.experiments.comparison import (
    WAVE,
    as_good,
    better,
    found,
    model_cases,
    model_table,
    train_transformers,
)
from boltzattn.experiments.experiment import Experiment, Finding, Row, values
from boltzattn.experiments.tasks import Draw
from boltzattn.theory.presentation import STYLES

RANKS = (1, 2, 3)
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

    def draw_sets(sets: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        points = torch.rand(sets, N_LOCAL, dimensions, generator=generator)
        values = torch.randn(sets, N_LOCAL, 1, generator=generator)
        near = torch.softmax(-(torch.cdist(points, points) ** 2) / (2 * BANDWIDTH**2), -1)
        return torch.cat([points, values], -1), near @ values

    return draw_sets


LOCAL = {"local, plane": 2, "local, space": 3}
TASKS: dict[str, Draw | None] = {"labels": None, "wave": WAVE}
TASKS |= {task: local_average(dimensions) for task, dimensions in LOCAL.items()}


def measure(
    task: str, model: str, parameters: int, count: int, steps: int, seeds: int, seed: int
) -> list[Row]:
    score, rank = MODELS[model]
    rows = train_transformers(
        1,
        TASKS[task],
        parameters=parameters,
        count=count,
        steps=steps,
        seeds=seeds,
        seed=seed,
        rank=rank,
        score=score,
    )
    return [{"score": score, "rank": rank, **row} for row in rows]


def judge(rows: list[Row]) -> list[Finding]:
    findings = []
    for task in ("labels", "wave"):
        for score in ("dot", "gaussian"):
            claim = f"rank 1 is as good as rank 3 ({task}, {score} scores)"
            findings.append(as_good(rows, claim, task, f"{score}, rank 1", f"{score}, rank 3"))
    for task, needed in LOCAL.items():
        for score in ("dot", "gaussian"):
            claim = f"local averages need the rank of their space ({task}, {score} scores)"
            full = f"{score}, rank {needed}"
            findings.append(better(rows, claim, task, full, f"{score}, rank 1"))
        dot, gaussian = f"dot, rank {needed}", f"gaussian, rank {needed}"
        claim = f"Gaussian scores are better than dot products for local averages ({task})"
        findings.append(better(rows, claim, task, gaussian, dot))
    return findings


def draw(rows: list[Row], figure: Any) -> None:
    tasks = values(rows, "task")
    panels = figure.subplots(1, len(tasks))
    titles = {"labels": "random labels, % wrong"}
    for axis, task in zip(panels, tasks, strict=True):
        for score, style in zip(("dot", "gaussian"), STYLES, strict=False):
            means = []
            for rank in RANKS:
                numbers = np.array(found(rows, task, f"{score}, rank {rank}"))
                numbers = 100 * (1 - numbers) if task == "labels" else numbers
                axis.plot([rank] * len(numbers), numbers, ".", color=style["color"], markersize=4)
                means.append(numbers.mean())
            axis.plot(RANKS, means, **style, label=score)
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
    },
    measure=measure,
    judge=judge,
    table=model_table,
    draw=draw,
)
