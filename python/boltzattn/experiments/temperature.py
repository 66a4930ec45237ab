"""At which temperature does attention separate contexts best?

At infinite temperature (beta = 0) attention is mean pooling, at temperature 0 it is hardmax. The
paper's construction works close to hardmax. For tokens in general position the mean of a set
identifies it; for integers sums collide; and for sets with equal power sums up to a degree the gap
near beta = 0 is of the order beta^degree.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boltzattn.experiments.experiment import Experiment, Finding, Row, select, slope, values
from boltzattn.experiments.memorize import draw_task
from boltzattn.nn import OneLayerTransformer
from boltzattn.theory import contextual_gap, hardmax_attention, prouhet_pair
from boltzattn.theory.presentation import GREY, STYLES, Table

# Smaller relative gaps are rounding errors of fp64: 2^-52 times a few operations.
NOISE = 1e-14


def draw_sets(family: str, n: int, count: int, seed: int) -> Tensor:
    """fp64 sets `[sets, n, 1]` on a line, of size at most 1.

    "gaussian", "integers": random sets of n out of 3 n tokens. "prouhet-k": the two sets of
    `prouhet_pair(k)`.

    Example:
        >>> draw_sets("prouhet-1", 4, 2, seed=0).flatten(1)[0] * 6
        tensor([1., 6., 2., 5.], dtype=torch.float64)
    """
    if family.startswith("prouhet"):
        pair = prouhet_pair(int(family.removeprefix("prouhet-")))
        x = torch.stack([pair.first, pair.second])
    else:
        x, _ = draw_task(family, n, 3 * n, count, 1, seed)
    return x / x.abs().max()


def measure(family: str, n: int, count: int, seed: int, points: int) -> list[Row]:
    """Gaps between equal tokens in different sets, in units of the largest token."""
    x = draw_sets(family, n, count, seed)
    one = torch.ones(1, 1, dtype=x.dtype)

    def softmax(beta: float) -> Tensor:
        head = OneLayerTransformer.from_weights(beta * one, one, one, one, method="direct")
        with torch.no_grad():
            return head(x) - x

    def gap(context: Tensor) -> float:
        return contextual_gap(context, x).delta_context

    rows = [{"limit": "mean", "beta": 0.0, "gap": gap(softmax(0.0))}]
    rows += [
        {"limit": None, "beta": beta, "gap": gap(softmax(beta))}
        for beta in np.geomspace(1e-3, 1e3, points).tolist()
    ]
    hard = gap(hardmax_attention(x, one, one, one, one) - x)
    return [*rows, {"limit": "hardmax", "beta": None, "gap": hard}]


def summary(rows: list[Row], family: str) -> Row:
    """The gap in both limits and at the best temperature, and the exponent near the mean."""
    some = select(rows, family=family)
    (mean,), (hard,) = (select(some, limit=limit) for limit in ("mean", "hardmax"))
    curve = select(some, limit=None)
    best = max(curve, key=lambda row: row["gap"])
    # From where the gap exceeds rounding up to a twentieth of the best beta.
    start = [row for row in curve if row["gap"] > 100 * NOISE and row["beta"] < best["beta"] / 20]
    exponent = None
    if len(start) > 1:
        exponent = slope([row["beta"] for row in start], [row["gap"] for row in start])
    return {
        "mean": mean["gap"],
        "hardmax": hard["gap"],
        "best": best["gap"],
        "best_beta": best["beta"],
        "exponent": exponent,
    }


def judge(rows: list[Row]) -> list[Finding]:
    found = {family: summary(rows, family) for family in values(rows, "family")}
    structured = {name: s for name, s in found.items() if name != "gaussian"}
    between = min(s["best"] for s in found.values())
    findings = [
        Finding(
            "hardmax separates no family",
            max(s["hardmax"] for s in found.values()) < NOISE,
            "gap " + ", ".join(f"{s['hardmax']:.1g} ({name})" for name, s in found.items()),
        ),
        Finding(
            "mean pooling fails if sums collide",
            max(s["mean"] for s in structured.values()) < NOISE,
            "gap " + ", ".join(f"{s['mean']:.1g} ({name})" for name, s in structured.items()),
        ),
        Finding(
            "an intermediate temperature separates every family",
            between > 100 * NOISE,
            "gap "
            + ", ".join(f"{s['best']:.1g} at {s['best_beta']:.2g} ({n})" for n, s in found.items()),
        ),
    ]
    if "gaussian" in found:
        generic = found["gaussian"]
        findings.append(
            Finding(
                "for tokens in general position mean pooling is within a factor of 10 of the best",
                generic["mean"] > generic["best"] / 10,
                f"gap {generic['mean']:.2g}, best {generic['best']:.2g}",
            )
        )
    for family, s in found.items():
        if family.startswith("prouhet"):
            degree = int(family.removeprefix("prouhet-"))
            # The next term of the expansion is at most beta/20 times the leading one.
            findings.append(
                Finding(
                    f"equal power sums up to degree {degree} make the gap beta^{degree} near the "
                    "mean",
                    s["exponent"] is not None and abs(s["exponent"] - degree) < 0.1,
                    "exponent " + ("not seen" if s["exponent"] is None else f"{s['exponent']:.2f}"),
                )
            )
    return findings


def table(rows: list[Row]) -> Table:
    lines = []
    for family in values(rows, "family"):
        s = summary(rows, family)
        lines.append(
            (
                family,
                f"{s['mean']:.1e}",
                f"{s['best']:.1e}",
                f"{s['best_beta']:.2g}",
                f"{s['hardmax']:.1e}",
                "-" if s["exponent"] is None else f"{s['exponent']:.2f}",
            )
        )
    return ("tokens", "mean", "best", "at beta", "hardmax", "exponent near mean"), lines


def draw(rows: list[Row], figure: Any) -> None:
    axis, mean = figure.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    floor = NOISE / 3
    for i, family in enumerate(values(rows, "family")):
        s, style = summary(rows, family), STYLES[i % len(STYLES)]
        curve = select(rows, family=family, limit=None)
        seen = [row["gap"] if row["gap"] > NOISE else math.nan for row in curve]
        betas = [row["beta"] for row in curve]
        line = {"color": style["color"], "linestyle": style["linestyle"]}
        axis.loglog(betas, seen, **line, label=family)
        for x, limit in enumerate(("mean", "hardmax")):
            mean.semilogy(
                x + 0.08 * (i - 2), max(s[limit], floor), style["marker"], color=style["color"]
            )
    for panel in (axis, mean):
        panel.axhline(NOISE, color=GREY, linewidth=1)
    axis.text(1e-3, NOISE * 1.5, "rounding", color=GREY, va="bottom")
    axis.set(
        xlabel="beta, inverse temperature of the largest token",
        ylabel="smallest gap / largest token",
        title="Neither the mean nor hardmax separates all families",
        ylim=(floor / 3, 3),
    )
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    mean.set_xticks([0, 1], ["mean\n(beta = 0)", "hardmax\n(infinity)"])
    mean.set(xlim=(-0.5, 1.5), title="The two limits")


def _cases(families: tuple[str, ...], n: int, count: int, points: int) -> list[dict[str, Any]]:
    return [{"family": f, "n": n, "count": count, "points": points} for f in families]


_FAMILIES = ("gaussian", "integers", "prouhet-1", "prouhet-3", "prouhet-5")

EXPERIMENT = Experiment(
    name="temperature",
    question="At which temperature does one head separate contexts best?",
    refuted_if="the mean or hardmax separates what it should not, or no intermediate temperature "
    "separates a family",
    cases={
        "tiny": _cases(("gaussian", "integers", "prouhet-1", "prouhet-3"), 4, 20, 41),
        "quick": _cases(_FAMILIES, 4, 60, 241),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
