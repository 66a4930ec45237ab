"""How many labels does the construction memorize, and in which arithmetic?

Theorem and construction hold in real arithmetic, where every context id has a different value. In
floating point the closest two must also be distinguishable. If the ids are like random numbers, the
closest two of M are about 1/M^2 of the range apart (the birthday problem), for all tokens.

The hardest data are pairs of sequences with equal extremes and equal power sums up to degree 3, so
that only an intermediate temperature distinguishes them. The temperature of a query is its own
projection: pairs that are spread along the line need the same temperature, and get different ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from boltzattn.experiments.experiment import (
    Experiment,
    Finding,
    Row,
    mean_and_range,
    select,
    slope,
    values,
)
from boltzattn.theory import memorize, prouhet_pair, separation
from boltzattn.theory.construction import evaluate
from boltzattn.theory.memorization import random_task
from boltzattn.theory.presentation import GREY, STYLES, Table
from boltzattn.theory.separation import contexts

FAMILIES = ("gaussian", "sphere", "integers", "prouhet", "prouhet-spread")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
CLASSES = 10
# Networks in bf16 are slow on a CPU, and wrong for fewer ids already.
_BF16_IDS = 1500


def draw_task(
    family: str, n: int, vocabulary: int, count: int, d: int, seed: int
) -> tuple[Tensor, Tensor]:
    """fp64 sequences `[count, n, d]` without repeated tokens, and random labels `[count, n]`.

    Families: "gaussian" and "sphere": tokens in R^d. "integers": 1 .. vocabulary on a line, whose
    sums collide. "prouhet": images `a x + b` on a line of one pair of 6 tokens with the same
    extremes and the same power sums up to degree 3, with b random between 0 and 20.
    "prouhet-spread": the same with b = 0, 1, 2, .., so that more pairs cover more of the line.

    Example:
        >>> draw_task("prouhet", 6, 20, 12, 1, seed=0)[0].shape
        torch.Size([12, 6, 1])
    """
    rng = np.random.default_rng(seed)
    if family.startswith("prouhet"):
        pair = torch.stack(prouhet_pair(3)[:2])
        stretch, shift = rng.uniform(1, 3, (2, count // 2, 1, 1, 1))
        shift = (
            10 * (shift - 1)
            if family == "prouhet"
            else np.arange(count // 2.0).reshape(shift.shape)
        )
        x = (torch.from_numpy(stretch) * pair + torch.from_numpy(shift)).flatten(0, 1)
        found = np.stack(separation(x).tokens)
        classes = rng.integers(CLASSES, size=(len(x), found.max() + 1))
        return x, torch.from_numpy(classes[contexts(list(found))[:, None], found])
    x, labels = random_task(n, vocabulary, count, d, CLASSES, seed)
    if family == "gaussian":
        return x, labels
    tokens = torch.from_numpy(np.stack(separation(x).tokens))
    if family == "sphere":
        points = torch.nn.functional.normalize(separation(x).vocabulary, dim=1)
    else:
        points = torch.arange(1.0, vocabulary + 1, dtype=torch.float64)[:, None]
    return points[tokens], labels


def measure(family: str, n: int, vocabulary: int, count: int, d: int, seed: int) -> list[Row]:
    x, labels = draw_task(family, n, vocabulary, count, d, seed)
    try:
        model = memorize(x, labels, seed=seed)
        report = model.report
    except ValueError:  # fp64 does not resolve the ids
        return [{"ids": None, "relative_gap": 0.0, "max_error": None, "fp64": 0.0}]
    row: Row = {
        "ids": report.ids,
        "relative_gap": report.relative_gap,
        "max_error": report.max_error,
        "beta": report.attention.beta,
        "parameters": report.parameters,
        "paper_parameters": report.paper_parameters,
        "fp64": report.accuracy,
    }
    for name, dtype in list(DTYPES.items())[1:]:
        if name == "bf16" and report.ids > _BF16_IDS:
            continue
        outputs = torch.stack(evaluate(model.to(dtype), x))[..., 0]
        row[name] = float((outputs.round() == labels).double().mean())
    return [row]


def judge(rows: list[Row]) -> list[Finding]:
    failed = [row for row in rows if row["fp64"] < 1]
    built = [row for row in rows if row["ids"]]
    findings = [
        Finding(
            "fp64 reproduces every label, in every family",
            not failed,
            f"{len(rows) - len(failed)} of {len(rows)} data sets without an error"
            + (f", up to {max(row['ids'] for row in built)} ids" if built else ""),
        )
    ]
    for family in values(built, "family"):
        some = select(built, family=family)
        exponent = slope([row["ids"] for row in some], [row["relative_gap"] for row in some])
        # The gap of a data set varies by a factor of 3 around the law, and the sizes span a factor
        # of 30 or more: at worst 2 log(3) / log(30) = 0.65, and half of it with a few seeds.
        findings.append(
            Finding(
                f"gaps follow ids^-2 for {family}",
                abs(exponent + 2) < 0.35,
                f"exponent {exponent:.2f} over {len(some)} data sets",
            )
        )
    coarse = [row for row in built if row["relative_gap"] > 2.0**-15]
    findings.append(
        Finding(
            "the same weights in fp32 are correct if gaps exceed 2^-15 of the range",
            all(row["fp32"] == 1 for row in coarse),
            f"lowest accuracy {100 * min((row['fp32'] for row in coarse), default=1):.4g}%; "
            f"for smaller gaps down to {100 * _lowest(built, coarse):.3g}%",
        )
    )
    bf16 = [row["bf16"] for row in built if "bf16" in row]
    findings.append(
        Finding(
            "bf16 reproduces no data set",
            max(bf16) < 1,
            f"highest accuracy {100 * max(bf16):.3g}%; guessing gives {100 / CLASSES:.0f}%",
        )
    )
    return findings


def _lowest(built: list[Row], coarse: list[Row]) -> float:
    return min((row["fp32"] for row in built if row not in coarse), default=1.0)


def table(rows: list[Row]) -> Table:
    lines = []
    for family in values(rows, "family"):
        for count in values(select(rows, family=family), "count"):
            some = select(rows, family=family, count=count)
            lines.append(
                (
                    f"{family}, n={some[0]['n']} N={count} d={some[0]['d']}",
                    some[0]["ids"],
                    mean_and_range([row["relative_gap"] for row in some], ".1e"),
                    *(
                        mean_and_range([100 * row[name] for row in some], ".4g")
                        if name in some[0]
                        else "-"
                        for name in DTYPES
                    ),
                )
            )
    return ("data", "ids", "gap / range", *(f"{name}, % correct" for name in DTYPES)), lines


def draw(rows: list[Row], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    rows = [row for row in rows if row["ids"]]
    for family, style in zip(values(rows, "family"), STYLES, strict=False):
        some = select(rows, family=family)
        ids = [row["ids"] for row in some]
        style = {**style, "linestyle": ""}
        left.loglog(ids, [row["relative_gap"] for row in some], **style, label=family)
        right.semilogx(ids, [100 * row["fp32"] for row in some], **style)
    m = np.array(sorted(row["ids"] for row in rows))
    left.loglog(m, 5.0 / m**2, "--", color=GREY, label="5 / ids$^2$")
    left.set(xlabel="context ids", ylabel="smallest gap / range", title="Gaps between ids")
    left.legend()
    bf16 = [row for row in rows if "bf16" in row]
    right.semilogx(
        [row["ids"] for row in bf16], [100 * row["bf16"] for row in bf16], "x", color=GREY
    )
    right.axhline(100, color=GREY, linewidth=1)
    right.text(m[0], 102, "fp64, all families", color=GREY, va="bottom")
    right.text(m[-1], 92, "fp32", ha="right", va="top")
    right.text(m[-1] ** 0.5 * m[0] ** 0.5, 22, "bf16", color=GREY, ha="center")
    right.set(
        xlabel="context ids",
        ylabel="correct labels, %",
        title="The same weights, rounded",
        ylim=(-3, 112),
    )


def _cases(sizes: list[tuple[int, int, int, int]], draws: int) -> list[dict[str, Any]]:
    """`sizes` are (n, vocabulary, count, d); lines and pairs take what applies to them."""
    return [
        {
            "family": family,
            "n": 6 if family.startswith("prouhet") else n,
            "vocabulary": vocabulary,
            "count": count,
            "d": d if family in ("gaussian", "sphere") else 1,
            "draw": i,
        }
        for family in FAMILIES
        for n, vocabulary, count, d in sizes
        for i in range(draws)
    ]


def _measure_draw(seed: int, draw: int, **case: Any) -> list[Row]:
    return measure(seed=1000 * seed + draw, **case)


_SMALL = [(3, 6, 20, 4), (3, 10, 50, 4), (4, 12, 100, 8), (6, 20, 200, 16)]

EXPERIMENT = Experiment(
    name="memorize",
    question="How many labels does the constructed layer memorize, and in which arithmetic?",
    refuted_if="fp64 does not reproduce some data set, or gaps do not follow ids^-2",
    cases={
        "tiny": _cases(_SMALL[:3], 1),
        "quick": _cases([*_SMALL, (8, 30, 300, 16), (8, 40, 600, 16)], 3),
    },
    measure=_measure_draw,
    judge=judge,
    table=table,
    draw=draw,
)
