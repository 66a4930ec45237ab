"""Measure the quick grid, or the full one; print tables, write a CSV and figures."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from bench import cases, environment, measure, plot, providers, report, results
from bench.cases import Entry
from bench.cores import Cores
from bench.results import Record, Records

DEFAULT_OUT = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    grid = list(cases.full() if options.full else cases.quick())
    grid = [entry for device in _devices(options.device) for entry in on_device(grid, device)]
    if options.only:
        grid = list(only(grid, options.only))
        if not grid:
            print(f"--only {options.only!r} matches no case; see --list", file=sys.stderr)
            return 2
    if options.list:
        for entry in grid:
            print(entry.case.label, "|", ", ".join(able(entry)))
        return 0

    here = environment.detect()
    print(here, "\n")
    out = options.out
    path = out / (f"{here.machine}-{here.commit}.csv" if options.full else "quick.csv")
    records = results.load(path) if options.full and path.exists() else []
    records = run(grid, here, records, path, measure.FULL if options.full else measure.QUICK)
    print(report.table(records))
    print("\n" + report.target_table(records, judge=options.full))
    figures = plot.figures(records, out, prefix="" if options.full else "quick-")
    print("\n" + "\n".join(f"wrote {p}" for p in [path, *figures]))
    return 0


def run(
    grid: list[Entry],
    here: environment.Environment,
    records: Records,
    path: Path,
    effort: measure.Effort,
) -> Records:
    """Measure what is missing in `records`; the CSV is complete after every case or group."""
    todo = [e for e in grid if not results.is_done(e, here, records, able(e))]
    cost = {e.case: measure.expected_seconds(e, able(e), effort) for e in todo}
    spent = dict.fromkeys(cost, 0.0)
    cores = Cores()
    if todo:
        cores.learn(seconds=2.0)
    layout = "{percentage:3.0f}%|{bar}| {elapsed} spent, {remaining} left, {postfix}"
    with tqdm(total=sum(cost.values()), bar_format=layout, disable=None) as bar:

        def progress(entry: Entry, done: float) -> None:
            bar.set_postfix_str(entry.case.label, refresh=False)
            bar.update(cost[entry.case] * done - spent[entry.case])
            spent[entry.case] = cost[entry.case] * done

        for group in [todo] if effort.together else [[entry] for entry in todo]:
            for case, rows in measure.measure(group, effort, cores, progress).items():
                records = results.replace_case(records, [Record(here, case, row) for row in rows])
            results.save(path, records)
    # In the order of the grid, without rows of other environments.
    order = {entry.case: i for i, entry in enumerate(grid)}
    mine = [r for r in records if r.environment == here and r.case in order]
    return sorted(mine, key=lambda r: order[r.case])


def able(entry: Entry) -> list[str]:
    """The providers that can run the entry on this machine."""
    reasons = providers.taking_part(entry.case, entry.providers)
    return [name for name, reason in reasons.items() if reason is None]


def only(grid: Iterable[Entry], pattern: str) -> Iterator[Entry]:
    """Entries with a provider for which `<case label> <provider>` matches, and their baselines."""
    for entry in grid:
        hits = [n for n in able(entry) if re.search(pattern, f"{entry.case.label} {n}")]
        if hits:
            kept = dict.fromkeys([*hits, *providers.BASELINES[entry.case.level], "clone"])
            yield replace(entry, providers=tuple(kept))


def on_device(grid: Iterable[Entry], device: str) -> Iterator[Entry]:
    """The grid on a device; only the CPU has the axes `threads` and `fresh_pages`."""
    for entry in grid:
        if device == "cpu" or not (entry.case.threads or entry.case.fresh_pages):
            yield replace(entry, case=replace(entry.case, device=device))


def _devices(wanted: str) -> list[str]:
    if wanted != "all":
        return [wanted]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--full", action="store_true", help="measure the whole grid; resumable")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="output directory")
    parser.add_argument(
        "--only", metavar="REGEX", help="measure only matching cases: `LABEL PROVIDER`"
    )
    parser.add_argument("--device", choices=("all", "cpu", "cuda"), default="all")
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
