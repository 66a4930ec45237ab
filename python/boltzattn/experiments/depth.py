"""Is one layer of rank 1 as good as several layers with the same number of parameters?

One layer suffices in principle. No theorem says whether training finds as good a fit as with
several layers and the same number of parameters. The models differ in the number of layers and in
the rank of the head in each layer; the width of the token-wise networks makes their numbers of
parameters equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from boltzattn.experiments.comparison import draw_bars, model_cases
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
from boltzattn.theory.presentation import BLUE, ORANGE, Table

DIM, CLASSES = 8, 8
# (layers, rank of the head); rank DIM is full rank.
MODELS = {
    "1 layer, rank 1": (1, 1),
    "1 layer, rank 4": (1, 4),
    "1 layer, full rank": (1, DIM),
    "2 layers, rank 1": (2, 1),
    "2 layers, full rank": (2, DIM),
    "4 layers, full rank": (4, DIM),
}


def measure(
    task: str, model: str, parameters: int, count: int, steps: int, seeds: int, seed: int
) -> list[Row]:
    layers, rank = MODELS[model]
    d, outputs = (8, CLASSES) if task == "labels" else (2, 2)
    sizes: dict[str, Any] = {"embed_dim": DIM, "in_dim": d, "out_dim": outputs, "rank": rank}
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


def judge(rows: list[Row]) -> list[Finding]:
    sizes = values(rows, "true_parameters")
    findings = [
        Finding(
            "the models have the same number of parameters",
            max(sizes) < 1.03 * min(sizes),
            f"{min(sizes)} to {max(sizes)}",
        )
    ]
    for task, name, better, claim in (
        ("labels", "accuracy", max, "one layer of rank 1 memorizes as many labels as any deeper"),
        ("function", "error", min, "one layer of rank 1 fits a function as well as any deeper"),
    ):
        found = {m: [r[name] for r in select(rows, task=task, model=m)] for m in MODELS}
        shallow = found["1 layer, rank 1"]
        deep = {m: numbers for m, numbers in found.items() if MODELS[m][0] > 1}
        best = better(deep, key=lambda m: float(np.mean(deep[m])))
        # Clearly better: every seed of the deep model beats every seed of the shallow one.
        beaten = all_below(*((shallow, deep[best]) if task == "labels" else (deep[best], shallow)))
        findings.append(
            Finding(
                f"{claim} model",
                not beaten,
                f"{name} {mean_and_range(shallow)}, best deeper model ({best}) "
                f"{mean_and_range(deep[best])}",
            )
        )
    for task, name in (("labels", "accuracy"), ("function", "error")):
        one, full = (
            [r[name] for r in select(rows, task=task, model=m)]
            for m in ("1 layer, rank 1", "1 layer, full rank")
        )
        apart = all_below(*((one, full) if task == "labels" else (full, one)))
        findings.append(
            Finding(
                f"in one layer, rank 1 is as good as full rank ({task})",
                not apart,
                f"{name} {mean_and_range(one)}, full rank {mean_and_range(full)}",
            )
        )
    return findings


def table(rows: list[Row]) -> Table:
    lines = []
    for model in values(rows, "model"):
        labels, function = (select(rows, task=task, model=model) for task in ("labels", "function"))
        done = [row["steps_to_99"] for row in labels if row["steps_to_99"] is not None]
        lines.append(
            (
                model,
                labels[0]["true_parameters"],
                mean_and_range([100 * row["accuracy"] for row in labels]),
                f"{np.mean(done):.0f} ({len(done)} of {len(labels)})" if done else "-",
                mean_and_range([row["error"] for row in function]),
            )
        )
    return ("model", "parameters", "% labels learned", "steps to 99%", "error of function"), lines


def draw(rows: list[Row], figure: Any) -> None:
    draw_bars(
        figure,
        rows,
        {"labels": "Memorization (more is better)", "function": "Regression (less is better)"},
        lambda model: BLUE if MODELS[model][0] == 1 else ORANGE,
    )


_PAIRS = [(task, model) for task in ("labels", "function") for model in MODELS]


EXPERIMENT = Experiment(
    name="depth",
    question="Is one trained layer of rank 1 as good as several layers with as many parameters?",
    refuted_if="every seed of a deeper model does better than every seed of the shallow one",
    cases={
        "tiny": model_cases(_PAIRS, parameters=2000, count=8, steps=10, seeds=2),
        "quick": model_cases(_PAIRS, parameters=2000, count=64, steps=500, seeds=3),
        "full": model_cases(_PAIRS, parameters=20_000, count=1024, steps=5000, seeds=5),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
