"""Is a layer that is applied several times as good as several layers with as many parameters?

In `depth` two layers memorize more labels than one of the same size. A loop applies one layer
several times: it is as deep, and its weights are tied, so its layer can be wider for the same
number of parameters. Xu & Sato (arXiv 2410.01405) show a limit of loops with the same weights in
every round and lift it with scales that depend on the round.
"""

from __future__ import annotations

from typing import Any

from boltzattn.experiments.comparison import (
    TITLES,
    WAVE,
    as_good,
    best,
    better,
    draw_bars,
    equal_sizes,
    model_cases,
    model_table,
    train_transformers,
)
from boltzattn.experiments.experiment import Experiment, Finding, Row
from boltzattn.theory.presentation import BLUE, GREEN, ORANGE

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
    sizes: dict[str, Any] = {"parameters": parameters, "steps": steps, "seeds": seeds, "seed": seed}
    sizes |= {"rank": 1, "loops": loops, "timestep_encoding": encoding}
    if task == "labels":
        return train_transformers(layers, None, count=count, **sizes)
    return train_transformers(layers, WAVE, count=2 * count, **sizes)


def judge(rows: list[Row]) -> list[Finding]:
    looped = [m for m, (_, loops, _) in MODELS.items() if loops > 1]
    findings = [equal_sizes(rows)]
    for task in ("labels", "function"):
        loop = best(rows, task, looped)
        plain, scaled = (
            best(rows, task, [m for m in looped if (MODELS[m][2] is None) is without])
            for without in (True, False)
        )
        findings += [
            better(rows, f"a loop is better than one layer ({task})", task, loop, "1 layer"),
            as_good(rows, f"a loop is as good as two layers ({task})", task, loop, "2 layers"),
            better(rows, f"scales of each loop help ({task})", task, scaled, plain),
        ]
    return findings


def draw(rows: list[Row], figure: Any) -> None:
    def colour(model: str) -> str:
        layers, loops, _ = MODELS[model]
        return BLUE if layers * loops == 1 else ORANGE if layers > 1 else GREEN

    draw_bars(figure, rows, TITLES, colour)


_PAIRS = [(task, model) for task in ("labels", "function") for model in MODELS]

EXPERIMENT = Experiment(
    name="loops",
    question="Is a layer that is applied several times as good as several layers of the same size?",
    refuted_if="every seed of a loop does worse than every seed of two layers",
    cases={
        "tiny": model_cases(_PAIRS, parameters=2000, count=8, steps=4, seeds=2),
        "quick": model_cases(_PAIRS, parameters=2000, count=64, steps=500, seeds=3),
    },
    measure=measure,
    judge=judge,
    table=model_table,
    draw=draw,
)
