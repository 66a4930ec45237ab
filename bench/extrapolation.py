"""Estimates for rows that were too slow to run: printed with a mark, never stored."""

from __future__ import annotations

from dataclasses import replace

from bench.cases import Case
from bench.providers import BASELINES
from bench.results import TOO_SLOW, Record, Records


def estimate(records: Records, record: Record) -> float | None:
    """Seconds of a row that was too slow, extrapolated from the largest n that was measured.

    None for other rows, and if nothing shorter was measured.
    """
    if record.row.status != TOO_SLOW:
        return None
    shorter = [
        r
        for r in records
        if r.row.measured
        and r.row.provider == record.row.provider
        and r.environment == record.environment
        and r.case.n < record.case.n
        and replace(r.case, n=record.case.n) == record.case
    ]
    if not shorter:
        return None
    longest = max(shorter, key=lambda r: r.case.n)
    return longest.row.seconds * (record.case.n / longest.case.n) ** record.row.growth


def best_baseline(records: Records, case: Case) -> tuple[float, bool] | None:
    """Seconds of the fastest baseline of a case, and whether they are an estimate."""
    found = []
    for record in records:
        if record.case != case or record.row.provider not in BASELINES[case.level]:
            continue
        if record.row.measured:
            found.append((record.row.seconds, False))
        elif guess := estimate(records, record):
            found.append((guess, True))
    return min(found) if found else None
