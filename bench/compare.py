"""Compare two runs on the same machine: which medians differ by more than 15%?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import results
from bench.results import Record, Records

SHORTEST_S = 1e-3  # shorter calls are dominated by noise
TOLERANCE = 0.15


def pairs(first: Records, second: Records) -> list[tuple[Record, Record]]:
    """Rows that both runs measured and that take long enough to compare."""
    known = {(r.case, r.row.provider): r for r in second if r.row.measured}
    found = [(r, known.get((r.case, r.row.provider))) for r in first if r.row.measured]
    both = [(a, b) for a, b in found if b is not None]
    return [(a, b) for a, b in both if max(a.row.seconds, b.row.seconds) > SHORTEST_S]


def difference(first: Record, second: Record) -> float:
    """How much larger the larger median is, relative to the smaller one."""
    low, high = sorted((first.row.seconds, second.row.seconds))
    return high / low - 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    options = parser.parse_args(arguments)
    compared = pairs(results.load(options.first), results.load(options.second))
    apart = sorted(
        (p for p in compared if difference(*p) > TOLERANCE), key=lambda p: difference(*p)
    )
    for a, b in reversed(apart):
        times = f"{a.row.seconds * 1e3:.4g} and {b.row.seconds * 1e3:.4g} ms"
        print(f"{difference(a, b):4.0%}  {times:24} {a.case.label} {a.row.provider}")
    agree = f"{len(compared) - len(apart)} of {len(compared)} medians"
    print(f"{agree} above {SHORTEST_S * 1e3:g} ms agree within {TOLERANCE:.0%}")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
