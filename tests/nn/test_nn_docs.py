"""The code in docs/modules.md and docs/converting.md runs, and prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "modules.md").read_text()


def test_code_of_converting_runs() -> None:
    names: dict[str, object] = {}
    text = (DOCS / "converting.md").read_text()
    printed = io.StringIO()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(block, names)
    assert printed.getvalue().count("of the logits' variance on the data") == 2
    assert "looked for nn.MultiheadAttention" in printed.getvalue()
    assert "my attention" in printed.getvalue()


def test_code_runs_and_prints_what_it_says() -> None:
    torch.manual_seed(0)
    printed = io.StringIO()
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(block, names)
    (said,) = re.findall(r"^```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)

    def shape(text: str) -> str:
        return re.sub(r"[\d.]+(e-\d+)?%?", "0", text)  # figures follow from random weights

    assert shape(printed.getvalue()) == shape(said)
