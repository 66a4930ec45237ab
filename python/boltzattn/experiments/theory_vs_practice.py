"""Which gap does the theorem promise, which gap do its weights have, and which gap is possible?

Theorem 2 sets the temperature from the number of tokens, their distances and their norms alone, and
promises a gap delta between context ids. Exact arithmetic (`boltz_gap`) gives the true gap of these
weights, fp64 shows what is left of it, and the practical search finds the best weights of the same
form.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from boltzattn.experiments.experiment import Experiment, Finding, Row, select, slope, values
from boltzattn.theory import construct_attention, hardmax_attention
from boltzattn.theory.construction import RankOneAttention
from boltzattn.theory.memorization import random_task
from boltzattn.theory.presentation import BLUE, GREEN, GREY, ORANGE, RED, Table

D = 4


def measure(n: int, vocabulary: int, seed: int) -> list[Row]:
    count = min(40, math.comb(vocabulary, n))
    x, _ = random_task(n, vocabulary, count, D, seed=seed)
    theorem, scaled, practical = (
        construct_attention(x, scale, seed=seed) for scale in ("theorem", "measured", "practical")
    )
    return [
        {
            "log10_promised": theorem.log10_promised,
            "log10_exact": theorem.log10_measured,
            "fp64_gap": theorem.measured.delta,
            "fp64_seen": theorem.measured.passed,
            "from_hardmax": distance_from_hardmax(theorem, x),
            "log10_scaled": scaled.log10_measured,
            "scaled_seen": scaled.measured.passed,
            "practical_gap": practical.measured.delta,
            "practical_seen": practical.measured.passed,
            "practical_from_hardmax": distance_from_hardmax(practical, x),
        }
    ]


def distance_from_hardmax(head: RankOneAttention, x: torch.Tensor) -> float:
    """The largest difference in fp64 between the outputs of softmax and hardmax, relative."""
    weights = (head.w_q, head.w_k, head.w_v, head.w_o)
    with torch.no_grad():
        hard = hardmax_attention(x, *weights) - x
        soft = head.module()(x) - x
    return float((soft - hard).abs().max() / hard.abs().max())


def judge(rows: list[Row]) -> list[Finding]:
    slack = min(row["log10_exact"] - row["log10_promised"] for row in rows)
    hardest = max(row["from_hardmax"] for row in rows)
    seen = [row for row in rows if row["practical_seen"]]
    longest = max(values(rows, "n"))
    some = sorted(select(rows, n=longest), key=lambda row: row["vocabulary"])
    growth = slope(
        [row["vocabulary"] + 1 for row in some], [-row["log10_promised"] for row in some]
    )
    exact = slope([row["vocabulary"] + 1 for row in some], [-row["log10_exact"] for row in some])
    return [
        Finding(
            "exact arithmetic confirms the promised gap",
            slack >= 0,
            f"the true gap is 10^{slack:.0f} times the promise or more, in {len(rows)} data sets",
        ),
        Finding(
            "in fp64 the theorem's weights separate nothing",
            not any(row["fp64_seen"] for row in rows),
            f"{sum(row['fp64_seen'] for row in rows)} of {len(rows)} data sets separated",
        ),
        # Up to the rounding of a sum of n terms.
        Finding(
            "in fp64 the theorem's weights are a hardmax",
            hardest < 1e-12,
            f"their relative difference is {hardest:.1g}; for practical weights it is "
            f"{statistics.median(row['practical_from_hardmax'] for row in rows):.2g} (median)",
        ),
        Finding(
            "practical weights separate every data set in fp64",
            len(seen) == len(rows),
            f"{len(seen)} of {len(rows)}, smallest gap "
            f"{min(row['practical_gap'] for row in rows):.2g}",
        ),
        # eps and r_min shrink as the vocabulary grows, which adds to the fourth power.
        Finding(
            "the promised digits grow at least as the fourth power of the vocabulary",
            growth > 3.9,
            f"exponent {growth:.1f} for n = {longest}; for the digits of the true gap {exact:.1f}",
        ),
    ]


def table(rows: list[Row]) -> Table:
    header = (
        "data",
        "theorem promises",
        "theorem, exact",
        "theorem, in fp64",
        "measured scale, exact",
        "practical, in fp64",
    )
    return header, [
        (
            f"n={row['n']} |V|={row['vocabulary']}",
            f"10^{row['log10_promised']:.0f}",
            f"10^{row['log10_exact']:.0f}",
            f"{row['fp64_gap']:.1g}",
            f"10^{row['log10_scaled']:.0f}",
            f"{row['practical_gap']:.1g}",
        )
        for row in rows
    ]


def draw(rows: list[Row], figure: Any) -> None:
    lengths = values(rows, "n")
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    columns = (
        ("theorem: promised", lambda row: -row["log10_promised"], RED, "D:"),
        ("theorem: true gap", lambda row: -row["log10_exact"], ORANGE, "s--"),
        ("lemma at measured scale: true gap", lambda row: -row["log10_scaled"], BLUE, "o-"),
        ("practical, in fp64", lambda row: -math.log10(row["practical_gap"]), GREEN, "^-."),
    )
    for axis, n in zip(panels, lengths, strict=True):
        some = sorted(select(rows, n=n), key=lambda row: row["vocabulary"])
        for label, digits, colour, style in columns:
            # Gaps above 1/2 need no digit, and the axis is logarithmic.
            height = [max(0.3, digits(row)) for row in some]
            axis.loglog(
                [row["vocabulary"] for row in some], height, style, color=colour, label=label
            )
        axis.axhline(15.95, color=GREY, linewidth=1)
        axis.set_xticks(values(some, "vocabulary"), values(some, "vocabulary"), minor=False)
        axis.set_xticks([], minor=True)
        axis.set(xlabel="tokens in the vocabulary", title=f"sequences of {n}")
    panels[0].set_ylabel("digits needed, -log10(gap)")
    panels[0].text(panels[0].get_xlim()[1], 18, "fp64 ends", color=GREY, ha="right", va="bottom")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _cases(lengths: tuple[int, ...], sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    # At least two sequences with different tokens are needed.
    return [{"n": n, "vocabulary": size} for n in lengths for size in sizes if size > n]


EXPERIMENT = Experiment(
    name="theory-vs-practice",
    question="How do the promised gap, the true gap and the best gap compare?",
    refuted_if="the true gap is below the promise, fp64 resolves the theorem's weights, or it does "
    "not resolve the practical ones",
    cases={
        "tiny": _cases((2, 3), (3, 4, 6)),
        "quick": _cases((2, 4, 8), (3, 4, 6, 9, 14, 20)),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
