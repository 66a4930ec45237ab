"""Is a layer that is applied several times as good as several layers with as many parameters?

In `depth` two layers memorize more labels than one of the same size. A loop applies one layer
several times: it is as deep, and its weights are tied, so its layer can be wider for the same
number of parameters. Xu & Sato (arXiv 2410.01405) show a limit of loops with the same weights in
every round and lift it with scales that depend on the round.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from boltzattn.experiments.comparison import draw_bars, model_cases
from boltzattn.experiments.depth import CLASSES, DIM
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
from boltzattn.experiments.tasks import learn_function, learn_labels, uniform
from boltzattn.experiments.training import count_parameters, model_seeds
from boltzattn.theory.presentation import BLUE, GREEN, ORANGE, Table

# (layers, loops, timestep_encoding), all of rank 1
MODELS: dict[str, tuple[int, int, str | None]] = {
    "1 layer": (1, 1, None),
    "2 layers": (2, 1, None),
    "2 loops": (1, 2, None),
    "4 loops": (1, 4, None),
    "4 loops, table": (1, 4, "table"),
    "4 loops, sinusoidal": (1, 4, "sinusoidal"),
}


def measure(
    task: str, model: str, parameters: int, count: int, steps: int, seeds: int, seed: int
) -> list[Row]:
    layers, loops, encoding = MODELS[model]
    d, outputs = (8, CLASSES) if task == "labels" else (2, 2)
    sizes: dict[str, Any] = {"embed_dim": DIM, "in_dim": d, "out_dim": outputs, "rank": 1}
    sizes |= {"loops": loops, "timestep_encoding": encoding}
    hidden = hidden_dim_for(parameters, layers, **sizes)

    def build(_: int) -> Any:
        return transformer(layers, hidden_dim=hidden, **sizes)

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
        rows = learn_function(
            build, numbers, draw=uniform("wave", 4, d), batch=2 * count, steps=steps
        )
    shared = {"hidden": hidden, "true_parameters": count_parameters(build(0))}
    return [{**shared, **row} for row in rows]


def _found(rows: list[Row], task: str, model: str) -> list[float]:
    name = "accuracy" if task == "labels" else "error"
    return [row[name] for row in select(rows, task=task, model=model)]


def _best(rows: list[Row], task: str, models: list[str]) -> str:
    sign = 1 if task == "labels" else -1
    return max(models, key=lambda m: sign * float(np.mean(_found(rows, task, m))))


def _worse(rows: list[Row], task: str, first: str, second: str) -> bool:
    """Whether every seed of `first` is worse than every seed of `second`."""
    a, b = _found(rows, task, first), _found(rows, task, second)
    return all_below(a, b) if task == "labels" else all_below(b, a)


def judge(rows: list[Row]) -> list[Finding]:
    sizes = values(rows, "true_parameters")
    looped = [m for m, (_, loops, _) in MODELS.items() if loops > 1]
    plain = [m for m in looped if MODELS[m][2] is None]
    scaled = [m for m in looped if MODELS[m][2] is not None]
    findings = [
        Finding(
            "the models have the same number of parameters",
            max(sizes) < 1.03 * min(sizes),
            f"{min(sizes)} to {max(sizes)}",
        )
    ]

    def compare(claim: str, task: str, first: str, second: str, holds: bool) -> Finding:
        name = "accuracy" if task == "labels" else "error"
        numbers = (mean_and_range(_found(rows, task, m)) for m in (first, second))
        one, two = numbers
        return Finding(claim, holds, f"{name} {one} ({first}), {two} ({second})")

    for task in ("labels", "function"):
        best = _best(rows, task, looped)
        findings += [
            compare(
                f"a loop is better than one layer ({task})",
                task,
                best,
                "1 layer",
                _worse(rows, task, "1 layer", best),
            ),
            compare(
                f"a loop is as good as two layers ({task})",
                task,
                best,
                "2 layers",
                not _worse(rows, task, best, "2 layers"),
            ),
            compare(
                f"scales of each loop help ({task})",
                task,
                _best(rows, task, scaled),
                _best(rows, task, plain),
                _worse(rows, task, _best(rows, task, plain), _best(rows, task, scaled)),
            ),
        ]
    return findings


def table(rows: list[Row]) -> Table:
    lines = []
    for model in values(rows, "model"):
        labels = select(rows, task="labels", model=model)
        done = [row["steps_to_99"] for row in labels if row["steps_to_99"] is not None]
        lines.append(
            (
                model,
                labels[0]["true_parameters"],
                labels[0]["hidden"],
                mean_and_range([100 * x for x in _found(rows, "labels", model)]),
                f"{np.mean(done):.0f} ({len(done)} of {len(labels)})" if done else "-",
                mean_and_range(_found(rows, "function", model)),
            )
        )
    header = ("model", "parameters", "hidden", "% labels learned", "steps to 99%")
    return (*header, "error of function"), lines


def draw(rows: list[Row], figure: Any) -> None:
    def colour(model: str) -> str:
        layers, loops, _ = MODELS[model]
        return BLUE if layers * loops == 1 else ORANGE if layers > 1 else GREEN

    titles = {"labels": "Memorization (more is better)", "function": "Regression (less is better)"}
    draw_bars(figure, rows, titles, colour)


_PAIRS = [(task, model) for task in ("labels", "function") for model in MODELS]

EXPERIMENT = Experiment(
    name="loops",
    question="Is a layer that is applied several times as good as several layers of the same size?",
    refuted_if="every seed of a loop does worse than every seed of two layers",
    cases={
        "tiny": model_cases(_PAIRS, parameters=2000, count=8, steps=4, seeds=2),
        "quick": model_cases(_PAIRS, parameters=2000, count=64, steps=500, seeds=3),
        "full": model_cases(_PAIRS, parameters=20_000, count=1024, steps=5000, seeds=5),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
