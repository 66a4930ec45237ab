"""Write the findings of both seeds into docs/experiments.md, from docs/experiments/*.json."""

from __future__ import annotations

import textwrap
from pathlib import Path

from boltzattn.experiments import EXPERIMENTS, Result

HERE = Path(__file__).parent


def path_of(name: str, seed: int) -> Path:
    return HERE / "experiments" / (f"{name}-seed{seed}.json" if seed else f"{name}.json")


def saved(name: str, seed: int) -> Result:
    """The saved run of an experiment."""
    return Result.load(path_of(name, seed))


def findings(name: str) -> str:
    """The findings of seed 0, each with the verdict of seed 1; its evidence where they differ."""
    again = saved(name, 1).findings if path_of(name, 1).exists() else []
    other = {finding.claim: finding for finding in again}
    shown = []
    for finding in saved(name, 0).findings:
        text = str(finding)
        if found := other.get(finding.claim):
            agrees = found.holds == finding.holds
            verdict = "holds" if found.holds else "REFUTED"
            text += f" [seed 1 {'agrees' if agrees else f'{verdict}, {found.evidence}'}]"
        shown.append(textwrap.fill(text, 100, subsequent_indent=" " * 9, break_on_hyphens=False))
    return "\n".join(shown)


def page(text: str) -> str:
    """The page with the block of findings of every experiment replaced."""
    for name in EXPERIMENTS:
        before, start, section = text.partition(f"\n## {name}\n")
        between, fence, block = section.partition("```text\n")
        after = block.partition("\n```")[2]
        text = f"{before}{start}{between}{fence}{findings(name)}\n```{after}"
    return text


if __name__ == "__main__":
    path = HERE / "experiments.md"
    path.write_text(page(path.read_text()))
