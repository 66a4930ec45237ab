"""Rows, their CSV, and which of them are already measured."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from bench.cases import Case, Entry
from bench.environment import Environment
from bench.providers import BASELINES

MEASURED = "measured"
TOO_SLOW = "too slow"  # not started: one call would exceed the limit; tables may extrapolate
TOO_LARGE = "too large"  # not started: it would not fit into memory
SKIPPED = "skipped"  # cannot run the case or is not installed; tried again in the next run
FAILED = "failed"


@dataclass
class Row:
    """The result of one provider for one case. None means not measured; nothing is estimated."""

    provider: str
    kind: str
    growth: int
    status: str
    reason: str = ""
    samples: int = 0
    median_s: float | None = None
    spread: float | None = None  # interquartile range / median
    fastest_s: float | None = None
    baseline: str = ""  # the provider that `speedup` is relative to
    speedup: float | None = None  # only for exact rows that passed the accuracy check
    tokens_per_s: float | None = None
    clone_fraction: float | None = None  # bytes that must be moved / time, over that of `clone`
    peak_mb: float | None = None  # above the inputs
    extra_mb: float | None = None  # above the inputs and the results
    worst_tensor: str = ""
    max_error: float | None = None
    rms_error: float | None = None
    allowed_error: float | None = None

    @property
    def measured(self) -> bool:
        return self.status == MEASURED

    @property
    def seconds(self) -> float:
        """The median of a measured row."""
        if self.median_s is None:
            raise ValueError(f"{self.provider} was not measured: {self.status} {self.reason}")
        return self.median_s

    @property
    def accurate(self) -> bool:
        """Whether the row passed the accuracy check; False for rows without one."""
        if not self.measured or self.kind != "exact" or self.max_error is None:
            return False
        return self.allowed_error is not None and self.max_error <= self.allowed_error


@dataclass
class Record:
    """A row with its environment and case: one line of the CSV."""

    environment: Environment
    case: Case
    row: Row

    @property
    def key(self) -> tuple:
        return (self.environment, self.case, self.row.provider)


Records = list[Record]
_PARTS = (Environment, Case, Row)
COLUMNS = [field.name for part in _PARTS for field in fields(part)]


def fill_ratios(case: Case, rows: list[Row]) -> None:
    """Fill in speed-ups over the fastest baseline of the same run, for accurate rows only.

    A baseline that fails the accuracy check is still a baseline: dropping a fast one would make
    all other rows look better.
    """
    baselines = [r for r in rows if r.provider in BASELINES[case.level] and r.measured]
    if not baselines:
        return
    best = min(baselines, key=lambda r: r.seconds)
    for row in rows:
        if row.accurate:
            row.baseline, row.speedup = best.provider, best.seconds / row.seconds


def save(path: Path, records: Iterable[Record]) -> None:
    """Replace the file in one step, so that an interrupted run leaves a complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for record in records:
            cells = asdict(record.environment) | asdict(record.case) | asdict(record.row)
            writer.writerow({name: _to_cell(value) for name, value in cells.items()})
    os.replace(partial, path)


def load(path: Path) -> Records:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            raise ValueError(
                f"{path} was written by another version of the benchmarks (its columns are "
                f"{reader.fieldnames}); move it, or pass another --out"
            )
        return [
            Record(*(part(**_cells_of(part, line)) for part in _PARTS))  # type: ignore[arg-type]
            for line in reader
        ]


def is_done(entry: Entry, environment: Environment, records: Records, able: Iterable[str]) -> bool:
    """Whether all providers that can run the case now have been measured in this environment.

    Ratios are only fair within one run, so a case is measured again as a whole or not at all.
    """
    known = {r.key for r in records if r.row.status != SKIPPED}
    return all((environment, entry.case, name) in known for name in able)


def replace_case(records: Records, fresh: Records) -> Records:
    """`records`, with the rows of the same environment and case replaced by the fresh ones."""
    cases = {(r.environment, r.case) for r in fresh}
    return [r for r in records if (r.environment, r.case) not in cases] + fresh


def _to_cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _cells_of(part: type, line: dict[str, str]) -> dict[str, object]:
    parse = {
        "int": int,
        "float": float,
        "bool": lambda cell: cell == "True",
        "str": str,
        "float | None": lambda cell: float(cell) if cell else None,
    }
    return {f.name: parse[str(f.type)](line[f.name]) for f in fields(part)}
