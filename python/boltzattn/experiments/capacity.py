"""How many parameters does it take to memorize N labels, and where does fp64 end?

`memorize` has a breakpoint per id: the number of parameters grows as N. Kajitsuka & Sato (arXiv
2409.17677) prove that O~(sqrt(N)) parameters suffice in real arithmetic, where a parameter holds
any number of bits. `memorize_packed` packs labels into words of a mantissa's size. By counting, N
labels of one bit take N / 64 parameters of fp64 at least, so the square root cannot last forever.
The first limit is another one: the ids themselves must be read bit by bit, and for N random ids the
best cells have a border within about log(N) / N^3 of an id.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from boltzattn.experiments.experiment import Experiment, Finding, Row, select, slope, values
from boltzattn.theory import ResolutionError, memorize, memorize_packed
from boltzattn.theory.memorization import random_task
from boltzattn.theory.packed import PARAMETER_BITS, random_sequences
from boltzattn.theory.presentation import GREY, STYLES, Table

# name: what stores the labels
NETWORKS = ("breakpoints", "packed", "packed, every token", "looped")
N_TOKENS, VOCABULARY, D = 8, 64, 4


def measure(network: str, count: int, seed: int) -> list[Row]:
    """`count` labels of one bit: of sequences, or of the tokens of count / 8 sequences."""
    each = count // N_TOKENS
    try:
        if network == "breakpoints":
            x, y = random_task(N_TOKENS, VOCABULARY, each, D, classes=2, seed=seed)
            report: Any = memorize(x, y, seed=seed).report
            return [_row(report, report.ids, len(y.flatten()), report.accuracy or 0.0)]
        if network == "packed, every token":
            x, y = random_task(N_TOKENS, VOCABULARY, each, D, classes=2, seed=seed)
            report = memorize_packed(x, y, read="all", seed=seed).report
        else:
            x, y = random_sequences(N_TOKENS, VOCABULARY, count, D, seed=seed)
            report = memorize_packed(x, y, tied=network == "looped", seed=seed).report
    except ResolutionError as refused:
        return [{"ids": count, "refused": str(refused)}]
    code = report.code
    return [
        {
            **_row(report, code.ids, len(y.flatten()), report.accuracy),
            "layers": report.layers,
            "groups": code.groups,
            "words": code.words,
            "word_bits": code.word_bits,
            "word_parameters": report.word_parameters,
            "margin": code.margin,
            "noise": code.noise,
        }
    ]


def _row(report: Any, ids: int, labels: int, accuracy: float) -> Row:
    return {
        "ids": ids,
        "labels": labels,
        "parameters": report.parameters,
        "relative_gap": report.relative_gap,
        "accuracy": accuracy,
    }


def _built(rows: list[Row], network: str, least: int = 0) -> list[Row]:
    some = select(rows, network=network)
    return [row for row in some if "parameters" in row and row["ids"] >= least]


def _slope(rows: list[Row], column: str = "parameters") -> float:
    return slope([row["ids"] for row in rows], [row[column] for row in rows])


def judge(rows: list[Row]) -> list[Finding]:
    built = [row for row in rows if "parameters" in row]
    wrong = [row for row in built if row["accuracy"] < 1]
    findings = [
        Finding(
            "every label comes back in fp64",
            not wrong,
            f"{len(built) - len(wrong)} of {len(built)} networks, up to "
            f"{max(row['ids'] for row in built):,} ids",
        )
    ]
    # Below a thousand ids the bits of the keys are most of the network.
    for network, wanted in (("breakpoints", 1.0), ("packed", 0.5), ("packed, every token", 0.5)):
        some = _built(rows, network, 900)
        found = _slope(some)
        findings.append(
            Finding(
                f"parameters grow as ids^{wanted:g} ({network})",
                abs(found - wanted) < 0.1,
                f"exponent {found:.2f} from {some[0]['ids']:,} ids ({some[0]['parameters']:,} "
                f"parameters) to {some[-1]['ids']:,} ({some[-1]['parameters']:,}); from size to "
                f"size {', '.join(f'{_slope(list(pair)):.2f}' for pair in pairwise(some))}",
            )
        )
    last = _built(rows, "looped")[-1]
    ratio = last["parameters"] / (last["ids"] / PARAMETER_BITS)
    findings.append(
        Finding(
            "a loop comes within a factor of 5 of what 64-bit parameters can hold at all",
            ratio < 5,
            f"{last['parameters']:,} parameters for {last['ids']:,} labels, {ratio:.2f} times the "
            f"counting bound; {last['layers']:,} layers",
        )
    )
    packed = _built(rows, "packed", 900)
    fall = _slope(packed, "margin")
    findings.append(
        Finding(
            "the distance of ids from the borders of cells falls as ids^-3",
            abs(fall + 3) < 0.3,
            f"exponent {fall:.2f}; {packed[-1]['margin']:.1e} of the range at "
            f"{packed[-1]['ids']:,} ids, noise {packed[-1]['noise']:.1e}",
        )
    )
    refused = [row["ids"] for row in rows if "refused" in row]
    most = max(row["ids"] for row in packed)
    findings.append(
        Finding(
            "fp64 ends above the largest size, and says so",
            bool(refused) and min(refused) > most,
            f"refused at {', '.join(f'{n:,}' for n in refused) or 'no size'}; built up to {most:,}",
        )
    )
    return findings


def table(rows: list[Row]) -> Table:
    lines = []
    for row in rows:
        if "refused" in row:
            lines.append((f"{row['network']}, {row['ids']:,}", "refused", *[""] * 6))
            continue
        bound = row["ids"] / PARAMETER_BITS
        lines.append(
            (
                f"{row['network']}, {row['ids']:,}",
                f"{row['parameters']:,}",
                f"{bound:.0f}",
                f"{row['ids'] ** 0.5:.0f}",
                f"{row.get('word_parameters', ''):,}" if "words" in row else "",
                str(row.get("layers", "")),
                f"{row['margin']:.1e}" if "margin" in row else "",
                f"{100 * row['accuracy']:.4g}",
            )
        )
    header = ("network, ids", "parameters", "N/64", "sqrt N", "words", "layers", "margin")
    return (*header, "% correct"), lines


def draw(rows: list[Row], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for network, style in zip(values(rows, "network"), STYLES, strict=False):
        some = _built(rows, network)
        left.loglog(
            [r["ids"] for r in some], [r["parameters"] for r in some], **style, label=network
        )
    ids = np.array(sorted({row["ids"] for row in rows}))
    left.loglog(ids, ids**0.5, "-", color=GREY, linewidth=1)
    left.text(ids[0], 0.6 * ids[0] ** 0.5, r"$\sqrt{N}$", color=GREY, va="top")
    left.loglog(ids, ids / PARAMETER_BITS, ":", color=GREY, linewidth=1.2)
    left.text(ids[0], 0.5 * ids[0] / PARAMETER_BITS, "N / 64", color=GREY, va="top")
    left.set(xlabel="labels of one bit", ylabel="nonzero parameters", title="Size of the network")
    left.set_ylim(bottom=0.4)
    left.legend()
    packed = _built(rows, "packed")
    styles = (("margin", "distance from cells' borders", STYLES[0]),)
    for column, label, style in (*styles, ("relative_gap", "smallest gap", STYLES[1])):
        right.loglog([r["ids"] for r in packed], [r[column] for r in packed], **style, label=label)
    right.loglog(
        [r["ids"] for r in packed], [10 * r["noise"] for r in packed], "--", color=GREY, linewidth=1
    )
    right.text(packed[0]["ids"], 15 * packed[0]["noise"], "10 x noise", color=GREY, va="bottom")
    for row in rows:
        if "refused" in row:
            right.axvline(row["ids"], color=STYLES[3]["color"], linewidth=1, linestyle=":")
            right.text(row["ids"], 1e-3, "refused ", color=STYLES[3]["color"], ha="right")
    right.set(xlabel="ids", ylabel="share of the range", title="Where fp64 ends")
    right.legend(loc="lower left", bbox_to_anchor=(0, 0.12))


def _cases(sizes: dict[str, list[int]]) -> list[dict[str, Any]]:
    return [{"network": n, "count": count} for n, counts in sizes.items() for count in counts]


_DECADES = [100, 300, 1000, 3000, 10_000, 30_000, 100_000]

EXPERIMENT = Experiment(
    name="capacity",
    question="How many parameters does it take to memorize N labels, and where does fp64 end?",
    refuted_if="a label is wrong, or the sizes do not grow as N and as sqrt(N)",
    cases={
        "tiny": _cases(
            {
                "breakpoints": [960, 1440],
                "packed": [1000, 2000],
                "packed, every token": [960, 1440],
                "looped": [200],
            }
        ),
        "quick": _cases(
            {
                "breakpoints": [104, 304, *_DECADES[2:-2]],
                "packed": [*_DECADES, 300_000],
                "packed, every token": [104, 304, *_DECADES[2:-1]],
                "looped": _DECADES[:-2],
            }
        ),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
