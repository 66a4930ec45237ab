"""Is one layer of rank 1 as good as several layers with the same number of parameters?

One layer suffices in principle. No theorem says whether training finds as good a fit as with
several layers and the same number of parameters. The models differ in the number of layers and in
the rank of the head in each layer; the width of the token-wise networks makes their numbers of
parameters equal.
"""

from __future__ import annotations

from typing import Any

from boltzattn.experiments.comparison import (
    DIM,
    TITLES,
    WAVE,
    as_good,
    best,
    draw_bars,
    equal_sizes,
    model_cases,
    model_table,
    train_transformers,
)
from boltzattn.experiments.experiment import Experiment, Finding, Row
from boltzattn.theory.presentation import BLUE, ORANGE

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
    sizes = {"parameters": parameters, "steps": steps, "seeds": seeds, "seed": seed, "rank": rank}
    if task == "labels":
        return train_transformers(layers, None, count=count, **sizes)
    return train_transformers(layers, WAVE, count=2 * count, **sizes)


def judge(rows: list[Row]) -> list[Finding]:
    one, full = "1 layer, rank 1", "1 layer, full rank"
    findings = [equal_sizes(rows)]
    deep = [model for model, (layers, _) in MODELS.items() if layers > 1]
    for task, claim in (
        ("labels", "one layer of rank 1 memorizes as many labels as any deeper model"),
        ("function", "one layer of rank 1 fits a function as well as any deeper model"),
    ):
        findings.append(as_good(rows, claim, task, one, best(rows, task, deep)))
    for task in ("labels", "function"):
        claim = f"in one layer, rank 1 is as good as full rank ({task})"
        findings.append(as_good(rows, claim, task, one, full))
    return findings


def draw(rows: list[Row], figure: Any) -> None:
    draw_bars(
        figure,
        rows,
        TITLES,
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
    },
    measure=measure,
    judge=judge,
    table=model_table,
    draw=draw,
)
