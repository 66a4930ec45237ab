"""What an experiment is and how it runs: cases, progress, seeds, findings, JSON."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from boltzattn._version import __version__
from boltzattn.theory import EquivarianceWarning, ResolutionWarning
from boltzattn.theory.presentation import Table

# The arguments of a case and what was measured: numbers, strings, booleans or None by name.
Row = dict[str, Any]

# "tiny" is for tests and takes seconds for all experiments together.
SIZES = ("tiny", "quick")


@dataclass(frozen=True)
class Finding:
    """A claim that measurements can refute, and whether they do.

    Attributes:
        claim: what should be true if the theory is right.
        holds: whether the measurements agree.
        evidence: the numbers that decide.
    """

    claim: str
    holds: bool
    evidence: str

    def __str__(self) -> str:
        return f"{'holds  ' if self.holds else 'REFUTED'}  {self.claim}: {self.evidence}"


@dataclass(frozen=True)
class Experiment:
    """A question, the measurements that answer it, and the rules that judge them.

    Attributes:
        name: the name on the command line.
        question: the question, in one sentence.
        refuted_if: what would refute the expected answer.
        cases: for each size the arguments of `measure`, one dictionary per call.
        measure: `measure(seed=.., **case)` returns rows; the seed determines all random numbers.
        judge: computes the findings from the rows alone.
        table: makes header and lines of a table from the rows.
        draw: draws the rows into an empty matplotlib figure.
    """

    name: str
    question: str
    refuted_if: str
    cases: dict[str, list[dict[str, Any]]]
    measure: Callable[..., list[Row]]
    judge: Callable[[list[Row]], list[Finding]]
    table: Callable[[list[Row]], Table]
    draw: Callable[[list[Row], Any], None]


@dataclass(frozen=True)
class Result:
    """The result of a run; the findings follow from the rows."""

    name: str
    size: str
    seed: int
    question: str
    refuted_if: str
    findings: list[Finding]
    rows: list[Row]
    cpu_seconds: float
    made_with: dict[str, str]

    def save(self, path: Path) -> None:
        # NaN and infinity are not JSON; a missing measurement is None.
        fields = asdict(self)
        rows = [json.dumps(row, allow_nan=False) for row in fields.pop("rows")]
        text = json.dumps(fields, indent=1, allow_nan=False).removesuffix("\n}")
        # One row per line.
        path.write_text(text + ',\n "rows": [\n' + ",\n".join(rows) + "\n ]\n}\n")

    @classmethod
    def load(cls, path: Path) -> Result:
        fields = json.loads(path.read_text())
        fields["findings"] = [Finding(**finding) for finding in fields["findings"]]
        return cls(**fields)


def run(
    experiment: Experiment,
    size: str = "quick",
    seed: int = 0,
    show: bool = False,
    save: Path | None = None,
) -> Result:
    """Measure and judge every case of `size`; the same seed gives the same rows and findings.

    Args:
        experiment: one of `boltzattn.experiments.EXPERIMENTS`.
        size: "tiny" or "quick".
        seed: seed of all random numbers.
        show: whether to show a progress bar on stderr.
        save: a JSON file, written after every case, so that an error does not lose earlier rows.

    Example:
        >>> from boltzattn.experiments import EXPERIMENTS
        >>> result = run(EXPERIMENTS["theory-vs-practice"], "tiny")
        >>> all(finding.holds for finding in result.findings)
        True
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(map(repr, SIZES))}, got {size!r}")
    start = time.process_time()
    rows: list[Row] = []

    def result(findings: list[Finding]) -> Result:
        return Result(
            name=experiment.name,
            size=size,
            seed=seed,
            question=experiment.question,
            refuted_if=experiment.refuted_if,
            findings=findings,
            rows=rows,
            cpu_seconds=round(time.process_time() - start, 1),
            made_with={
                "boltzattn": __version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
                "threads": str(torch.get_num_threads()),
            },
        )

    for case in tqdm(experiment.cases[size], desc=experiment.name, disable=not show):
        # For every case, so that a case gives the same rows alone and among others.
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            # The experiments measure what these warnings are about.
            warnings.simplefilter("ignore", ResolutionWarning)
            warnings.simplefilter("ignore", EquivarianceWarning)
            rows += [{**case, **row} for row in experiment.measure(seed=seed, **case)]
        if save is not None:
            result([]).save(save)
    judged = result(experiment.judge(rows))
    if save is not None:
        judged.save(save)
    return judged


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows with these values.

    Example:
        >>> select([{"n": 2, "gap": 0.5}, {"n": 3, "gap": 0.1}], n=3)
        [{'n': 3, 'gap': 0.1}]
    """
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def values(rows: Iterable[Row], name: str) -> list[Any]:
    """The different values of a column, in order of appearance."""
    return list(dict.fromkeys(row[name] for row in rows if name in row))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of the power law `y ~ x^p`, by least squares in logarithms.

    Example:
        >>> round(slope([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]), 6)
        2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def mean_and_range(numbers: Sequence[float], form: str = ".3g") -> str:
    """The mean, with the smallest and the largest number in brackets.

    Example:
        >>> mean_and_range([1.0, 2.0, 3.0])
        '2 [1, 3]'
    """
    mean, low, high = np.mean(numbers), min(numbers), max(numbers)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def all_below(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether every number of `first` is below every number of `second`."""
    return max(first) < min(second)
