"""`make fuzz`: seeds one after the other, until the time is up.

Counts add up over runs in `fuzz-output/counts.json`, where a run goes on after the last seed of
those before it. A case that fails is made smaller and printed as a test. Remove the folder to
start again, as after a change of the kernels.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from fuzz.cases import Case, draw
from fuzz.judge import check

# The axes that are counted one by one, beside the cells.
AXES = ("kind", "family", "queries", "values", "mask", "strides", "isa", "threads", "rank")
AXES += ("score", "key_bias", "alibi")
SAVE_EVERY = 20.0  # seconds
ATTEMPTS = 400  # of the shrinking


def failure(case: Case) -> str | None:
    """What is wrong with a case, or None."""
    try:
        check(case)
    except AssertionError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# ---- shrinking ----


def _smaller(case: Case) -> Iterator[Case]:
    """Cases that are a little plainer, the boldest steps first."""
    for name in ("n_q", "n_k", "dv"):
        n = getattr(case, name)
        for less in (n // 2, n - 1):
            if 0 < less < n:
                yield replace(case, **{name: less})
    if case.n_q == case.n_k:
        yield replace(case, n_q=case.n_q // 2, n_k=case.n_k // 2)
    kept = ("seed", "kind", "n_q", "n_k", "dv", "digits", "temperature", "pieces")
    for setting in fields(Case):
        if setting.name not in kept and getattr(case, setting.name) != setting.default:
            yield replace(case, **{setting.name: setting.default})
    if case.pieces > 2:
        yield replace(case, pieces=2)
    if len(case.lead) > 1:
        yield replace(case, lead=case.lead[-1:])
    if case.derivative in ("jvp", "double"):
        yield replace(case, derivative="forward")
    for digits in (1, 2, 3):
        if not case.digits or digits < case.digits:
            yield replace(case, digits=digits)
    one_digit = float(f"{case.temperature:.0e}")
    if one_digit != case.temperature:
        yield replace(case, temperature=one_digit)


def _kind_of(message: str) -> str:
    """Wrong numbers stay wrong numbers while a case is made smaller, and errors the same error."""
    return message.split(":")[0] if "Error" in message.split(":")[0] else ""


def shrink(case: Case, message: str) -> tuple[Case, str]:
    """A plainer case that fails in the same way."""
    attempts, wrong = 0, _kind_of(message)
    progress = True
    while progress and attempts < ATTEMPTS:
        progress = False
        for candidate in _smaller(case):
            attempts += 1
            found = failure(candidate)
            if found is not None and _kind_of(found) == wrong:
                case, message, progress = candidate, found, True
                break
    return case, message


def as_test(case: Case, message: str) -> str:
    """A case as a test to paste into test_fuzz.py."""
    lines = [
        f"def test_fuzz_{case.seed}() -> None:",
        *(f"    # {line[:110]}" for line in message.splitlines()[:3] if line),
        f"    judge.check({case!r})",
    ]
    return "\n".join(lines)


# ---- counting ----


class Counts:
    """Cases by cell and outcome, and the ranges of seeds that they are of."""

    def __init__(self, file: Path) -> None:
        self.file = file
        found = json.loads(file.read_text()) if file.exists() else {}
        self.ranges: list[list[int]] = found.get("ranges", [])
        self.cells: dict[str, dict[str, int]] = found.get("cells", {})
        self.wrong: list[dict[str, Any]] = found.get("wrong", [])

    def next_seed(self) -> int:
        return max((last for _, last in self.ranges), default=0)

    def covers(self, seed: int) -> bool:
        return any(first <= seed < last for first, last in self.ranges)

    def add(self, case: Case, outcome: str) -> None:
        causal = " causal" if case.causal else ""
        cell = f"{case.backend} {case.kind}{causal} {case.method} {case.dtype} {case.derivative}"
        names = [f"cell: {cell}", f"backend: {case.backend}"]
        names += [f"{axis}: {getattr(case, axis) or 'none'}" for axis in AXES]
        names.append(f"temperature: 1e{len(f'{case.temperature:.0f}') - 1}")
        for name in names:
            of_cell = self.cells.setdefault(name, {})
            of_cell[outcome] = of_cell.get(outcome, 0) + 1

    def done(self, first: int, last: int) -> None:
        """Seeds first .. last - 1 were counted."""
        if self.ranges and self.ranges[-1][1] == first:
            self.ranges[-1][1] = last
        elif last > first:
            self.ranges.append([first, last])

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        whole = {"ranges": self.ranges, "cells": self.cells, "wrong": self.wrong}
        part.write_text(json.dumps(whole, indent=1, sort_keys=True))
        part.replace(self.file)

    def table(self, axis: str) -> str:
        rows = []
        for name, outcomes in sorted(self.cells.items()):
            if name.startswith(f"{axis}: "):
                counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))
                rows.append(f"  {name.removeprefix(f'{axis}: '):<45} {counts}")
        return "\n".join([f"{axis}:", *rows])


def run(counts: Counts, seeds: Iterator[int], seconds: float, most_shown: int) -> int:
    """Run seeds until the time is up; returns how many cases are wrong."""
    start = saved = time.monotonic()
    first = last = -1
    wrong = 0
    for seed in seeds:
        now = time.monotonic()
        if now - start > seconds:
            break
        if counts.covers(seed):
            continue
        if seed != last:
            counts.done(first, last)
            first = seed
        case = draw(seed)
        message = failure(case)
        counts.add(case, "right" if message is None else "wrong")
        last = seed + 1
        if message is not None:
            wrong += 1
            counts.wrong.append({"seed": seed, "message": message, "case": asdict(case)})
            print(f"\nseed {seed}: {message}\n  {case}", flush=True)
            if wrong <= most_shown:
                print(as_test(*shrink(case, message)), flush=True)
        if now - saved > SAVE_EVERY:
            counts.done(first, last)
            first, saved = last, now
            counts.save()
    counts.done(first, last)
    counts.save()
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, help="the first; default: after the last run's")
    parser.add_argument("--last", type=int, help="the last seed; default: as time permits")
    parser.add_argument("--output", type=Path, default=Path("fuzz-output/counts.json"))
    parser.add_argument("--shrink", type=int, default=20, help="cases to make smaller at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = Counts(options.output)
    first = counts.next_seed() if options.seed is None else options.seed
    last = options.last if options.last is not None else first + 10**9
    print(f"seeds from {first}; counts in {options.output}")
    wrong = run(counts, iter(range(first, last + 1)), 60 * options.minutes, options.shrink)
    for axis in ("cell", "temperature", *AXES, "backend"):
        print(counts.table(axis))
    total = sum(b - a for a, b in counts.ranges)
    print(f"{wrong} wrong in this run; {total} cases in all, {len(counts.wrong)} of them wrong")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
