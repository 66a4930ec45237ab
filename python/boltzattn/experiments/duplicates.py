"""How do repeated and nearly equal tokens affect memorization?

The theorem assumes sequences without repeated tokens, and tokens at least eps apart. A token that
occurs twice has twice the weight in attention, so repetitions in sequences of equal length should
not matter. Near duplicates should matter, because the network after attention has to resolve eps.
No attention without positions distinguishes (x, y) from (x, x, y, y): the weights are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from boltzattn.experiments.experiment import (
    Experiment,
    Finding,
    Row,
    mean_and_range,
    select,
    values,
)
from boltzattn.experiments.models import transformer
from boltzattn.experiments.training import build_all, model_seeds, train
from boltzattn.theory import memorize
from boltzattn.theory.presentation import BLUE, GREEN, GREY, ORANGE, Table
from boltzattn.theory.separation import contexts

N_TOKENS, VOCABULARY, D, CLASSES = 4, 12, 4, 4
# The best accuracy without distinguishing twins: all labels that twins share by chance, and half of
# the others.
BLIND = 1 / CLASSES + (1 - 1 / CLASSES) / 2


def repeating(rate: float, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences `[count, n, d]` whose tokens repeat an earlier token with probability `rate`.

    Also returns random labels `[count, n]`, a function of token and context.
    """
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((VOCABULARY, D))
    tokens = np.stack([rng.permutation(VOCABULARY)[:N_TOKENS] for _ in range(count)])
    for k in range(1, N_TOKENS):
        again = rng.random(count) < rate
        earlier = tokens[np.arange(count), rng.integers(k, size=count)]
        tokens[:, k] = np.where(again, earlier, tokens[:, k])
    return _labelled(tokens, points, rng)


def twins(distance: float, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pairs of sequences that differ by `distance` in one token, with random labels."""
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((VOCABULARY, D))
    step = rng.standard_normal((VOCABULARY, D))
    step *= distance / np.linalg.norm(step, axis=1, keepdims=True)
    tokens = np.stack([rng.permutation(VOCABULARY)[:N_TOKENS] for _ in range(count // 2)])
    twin = tokens.copy()
    twin[:, 0] += VOCABULARY  # the second half of the vocabulary is the first one, shifted
    return _labelled(np.concatenate([tokens, twin]), np.concatenate([points, points + step]), rng)


def _labelled(
    tokens: np.ndarray, points: np.ndarray, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    table = rng.integers(CLASSES, size=(len(tokens), len(points)))
    labels = table[contexts(list(tokens))[:, None], tokens]
    return torch.from_numpy(points[tokens]), torch.from_numpy(labels)


def measure(part: str, at: float, count: int, seeds: int, steps: int, seed: int) -> list[Row]:
    if part == "lengths":
        return _measure_lengths(seeds, seed)
    draw = {"rate": repeating, "distance": twins}[part]
    numbers = model_seeds(seed, seeds)
    tasks = [draw(at, count, number) for number in numbers]
    trained = _trained(tasks, numbers, steps)
    rows = []
    for number, (x, labels), accuracy in zip(numbers, tasks, trained, strict=True):
        row: Row = {"data_seed": number, "trained": accuracy}
        for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32)):
            try:
                report = memorize(x, labels, dtype=dtype, seed=number).report
            except ValueError:  # the gap is below the noise
                row[name], row[f"{name}_gap"] = 0.0, None
            else:
                row[name], row[f"{name}_gap"] = report.accuracy, report.relative_gap
        rows.append(row)
    return rows


def _trained(tasks: list[tuple[Tensor, Tensor]], numbers: list[int], steps: int) -> list[float]:
    """The share of labels that one rank-1 layer learns, for each task."""
    models = build_all(
        lambda _: transformer(1, 16, D, CLASSES, hidden_dim=64, num_heads=1, rank=1), numbers
    )
    x = torch.stack([x for x, _ in tasks]).float()
    labels = torch.stack([labels for _, labels in tasks])

    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), wanted.flatten())

    train(models, lambda _: (x, labels), loss, steps)
    with torch.no_grad():
        return [
            float((model(z).argmax(-1) == wanted).double().mean())
            for model, z, wanted in zip(models, x, labels, strict=True)
        ]


def _measure_lengths(seeds: int, seed: int) -> list[Row]:
    """Differences of the outputs of random transformers for sequences of different lengths."""
    rows = []
    for i in range(4 * seeds):
        number = 1000 * seed + i
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, D, dtype=torch.float64, generator=generator)
        torch.manual_seed(number)
        model = transformer(1 + i % 4, 8, D, 1, 16, num_heads=2, rank=1 + i % 3).double()
        with torch.no_grad():
            short = model(torch.stack([x, y]))
            proportional = model(torch.stack([x, y, x, y]))[:2]
            other = model(torch.stack([x, y, x]))[:2]
        size = short.abs().max()
        batch = [torch.stack([x, y]), torch.stack([x, x, y]), torch.stack([x, y, y, y])]
        report = memorize(batch, torch.tensor([0, 1, 2]), seed=number).report
        rows.append(
            {
                "data_seed": number,
                "layers": 1 + i % 4,
                "proportional": float((short - proportional).abs().max() / size),
                "other": float((short - other).abs().max() / size),
                "fp64": report.accuracy,
                "refused": _refuses([torch.stack([x, y]), torch.stack([x, x, y, y])]),
            }
        )
    return rows


def _refuses(batch: list[Tensor]) -> bool:
    try:
        memorize(batch, torch.tensor([0, 1]))
    except ValueError:
        return True
    return False


def judge(rows: list[Row]) -> list[Finding]:
    rates, near = select(rows, part="rate"), select(rows, part="distance")
    lengths = select(rows, part="lengths")
    findings = [
        Finding(
            "repeated tokens do not harm the construction",
            min(row["fp64"] for row in rates) == 1,
            f"lowest accuracy {100 * min(row['fp64'] for row in rates):.4g}%, up to a repetition "
            f"rate of {max(values(rates, 'at')):g}",
        )
    ]
    plain = _mean(select(rates, at=min(values(rates, "at"))), "trained")
    worst = min(_mean(select(rates, at=at), "trained") for at in values(rates, "at"))
    findings.append(
        # Training varies by a few per cent from seed to seed.
        Finding(
            "repeated tokens do not harm training",
            worst > plain - 0.05,
            f"{100 * worst:.3g}% learned at the worst rate, {100 * plain:.3g}% without repetition",
        )
    )
    resolved = [at for at in values(near, "at") if _mean(select(near, at=at), "fp64") == 1]
    close, far = min(values(near, "at")), max(values(near, "at"))
    finest = {name: _finest(near, name) for name in ("fp64", "fp32", "trained")}
    findings += [
        Finding(
            "in fp64 the construction distinguishes twins at a distance of 1e-6",
            any(at <= 1e-6 for at in resolved),
            f"all labels down to a distance of {_show(finest['fp64'])}, in fp32 down to "
            f"{_show(finest['fp32'])}",
        ),
        Finding(
            "a trained layer needs distances a thousand times larger than the construction",
            finest["trained"] is not None
            and finest["fp64"] is not None
            and finest["trained"] > 1e3 * finest["fp64"],
            f"99% of labels learned down to {_show(finest['trained'])}; "
            f"{100 * _mean(select(near, at=far), 'trained'):.3g}% at {far:g}, "
            f"{100 * _mean(select(near, at=close), 'trained'):.3g}% at {close:g}; without "
            f"distinguishing twins {100 * BLIND:.3g}% is possible",
        ),
        Finding(
            "(x, y) and (x, x, y, y) are the same to every softmax transformer without positions",
            # A few rounding errors per layer.
            max(row["proportional"] for row in lengths) < 1e-12
            and all(row["refused"] for row in lengths),
            f"outputs differ by {max(row['proportional'] for row in lengths):.1g} over "
            f"{len(lengths)} random transformers of 1 to {max(row['layers'] for row in lengths)} "
            f"layers; (x, y) and (x, y, x) by {min(row['other'] for row in lengths):.1g} or more",
        ),
        Finding(
            "other sequences of different lengths are memorized",
            all(row["fp64"] == 1 for row in lengths),
            f"lowest accuracy {100 * min(row['fp64'] for row in lengths):.4g}%",
        ),
    ]
    return findings


def _finest(near: list[Row], name: str) -> float | None:
    """The smallest distance such that it and all larger ones give (nearly) all labels."""
    finest = None
    for at in sorted(values(near, "at"), reverse=True):
        if _mean(select(near, at=at), name) < (0.99 if name == "trained" else 1.0):
            break
        finest = at
    return finest


def _show(distance: float | None) -> str:
    return "no distance" if distance is None else f"{distance:g}"


def _mean(rows: list[Row], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def table(rows: list[Row]) -> Table:
    lines = []
    for part, label in (("rate", "repetition rate"), ("distance", "distance of twins")):
        for at in values(select(rows, part=part), "at"):
            some = select(rows, part=part, at=at)
            gaps = [row["fp64_gap"] for row in some if row["fp64_gap"] is not None]
            lines.append(
                (
                    f"{label} {at:g}",
                    mean_and_range(gaps, ".1e") if gaps else "-",
                    *(
                        mean_and_range([100 * row[name] for row in some], ".3g")
                        for name in ("fp64", "fp32", "trained")
                    ),
                )
            )
    header = ("data", "gap / range", "fp64, % correct", "fp32, % correct", "trained, % correct")
    return header, lines


def draw(rows: list[Row], figure: Any) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, part in ((left, "rate"), (right, "distance")):
        some = select(rows, part=part)
        places = sorted(values(some, "at"))
        for name, label, colour, style in (
            ("fp64", "construction, fp64", BLUE, "o-"),
            ("fp32", "construction, fp32", ORANGE, "s--"),
            ("trained", "trained, fp32", GREEN, "^-."),
        ):
            shares = [[100 * row[name] for row in select(some, at=at)] for at in places]
            axis.plot(places, [np.mean(s) for s in shares], style, color=colour, label=label)
            axis.fill_between(
                places,
                [min(s) for s in shares],
                [max(s) for s in shares],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
    left.set(
        xlabel="probability that a token repeats an earlier one",
        ylabel="correct labels, %",
        title="Repeated tokens do no harm",
        ylim=(-4, 106),
    )
    left.legend(loc="lower left")
    right.set_xscale("log")
    right.invert_xaxis()
    right.axhline(100 * BLIND, color=GREY, linestyle="--", linewidth=1)
    right.text(
        max(values(select(rows, part="distance"), "at")),
        100 * BLIND - 2,
        "twins not distinguished",
        color=GREY,
        va="top",
    )
    right.set(xlabel="distance of near duplicates (tokens have norm 2)", title="Near duplicates do")


def _cases(
    rates: tuple[float, ...], distances: tuple[float, ...], count: int, seeds: int, steps: int
) -> list[dict[str, Any]]:
    shared = {"count": count, "seeds": seeds, "steps": steps}
    return [
        *({"part": "rate", "at": rate, **shared} for rate in rates),
        *({"part": "distance", "at": distance, **shared} for distance in distances),
        {"part": "lengths", "at": None, **shared},
    ]


EXPERIMENT = Experiment(
    name="duplicates",
    question="How do repeated and nearly equal tokens affect memorization?",
    refuted_if="repetition costs labels, proportional sequences are distinguished, or the "
    "construction fails on twins that fp64 resolves",
    cases={
        "tiny": _cases((0.0, 0.5), (1.0, 1e-6), 8, 2, 20),
        "quick": _cases(
            (0.0, 0.1, 0.3, 0.5, 1.0), (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-10), 32, 3, 600
        ),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
