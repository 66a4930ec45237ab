"""Run an experiment: print a table and its findings, write NAME.json and NAME.png."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from boltzattn.experiments import EXPERIMENTS
from boltzattn.experiments.experiment import Experiment, Result, run
from boltzattn.theory.presentation import format_table, save_figure


def main(arguments: list[str] | None = None, prog: str = "python -m boltzattn.experiments") -> None:
    names = "\n".join(f"  {name:20} {e.question}" for name, e in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"{__doc__}\n\nexperiments:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", choices=[*EXPERIMENTS, "all"], metavar="NAME", help="an experiment, or all"
    )
    parser.add_argument(
        "--tiny",
        dest="size",
        action="store_const",
        const="tiny",
        default="quick",
        help="seconds, for tests; otherwise all seventeen take half an hour of CPU time",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument(
        "--out", type=Path, default=Path("experiments-output"), help="folder for JSON and figures"
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in EXPERIMENTS if options.name == "all" else [options.name]:
        experiment = EXPERIMENTS[name]
        print(f"{name}: {experiment.question}\n  Refuted if {experiment.refuted_if}.\n")
        path = options.out / f"{name}.json"
        result = run(experiment, options.size, options.seed, show=True, save=path)
        report(experiment, result, options.out)


def report(experiment: Experiment, result: Result, out: Path) -> None:
    """Print the table and the findings, draw `NAME.png`."""
    print(format_table(experiment.table(result.rows)))
    print()
    for finding in result.findings:
        print(textwrap.fill(str(finding), 100, initial_indent="  ", subsequent_indent=" " * 11))
    save_figure(lambda figure: experiment.draw(result.rows, figure), out / f"{result.name}.png")
    print(f"\n{result.cpu_seconds:.0f} s of CPU time")
    print(f"wrote {out / result.name}.json and .png\n", flush=True)


if __name__ == "__main__":
    main()
