"""Write the findings of both seeds into docs/experiments.md, from docs/experiments/*.json."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from boltzattn.experiments import EXPERIMENTS, Result

HERE = Path(__file__).parent


def saved(name: str, seed: int) -> Result:
    """The saved run of an experiment."""
    return Result.load(
        HERE / "experiments" / (f"{name}-seed{seed}.json" if seed else f"{name}.json")
    )


def findings(name: str) -> str:
    """The findings of seed 0, each with the verdict of seed 1; its evidence where they differ."""
    shown = []
    again_run = saved(name, 1).findings if path_of(name, 1).exists() else []
    other = {finding.claim: finding for finding in again_run}
    for finding in saved(name, 0).findings:
        if finding.claim not in other:
            shown.append(
                textwrap.fill(str(finding), 100, subsequent_indent=" " * 9, break_on_hyphens=False)
            )
            continue
        again = other[finding.claim]
        verdict = "holds" if again.holds else "REFUTED"
        says = "agrees" if again.holds == finding.holds else f"{verdict}, {again.evidence}"
        text = f"{finding} [seed 1 {says}]"
        shown.append(textwrap.fill(text, 100, subsequent_indent=" " * 9, break_on_hyphens=False))
    return "\n".join(shown)


def page(text: str) -> str:
    """The page with the block of findings of every experiment replaced."""
    for name in EXPERIMENTS:
        before, heading, section = text.partition(f"\n## {name}\n")
        block = f"```text\n{findings(name)}\n```"
        start, end = re.search(r"```text\n.*?\n```", section, re.DOTALL).span()
        text = before + heading + section[:start] + block + section[end:]
    return text


if __name__ == "__main__":
    path = HERE / "experiments.md"
    path.write_text(page(path.read_text()))
