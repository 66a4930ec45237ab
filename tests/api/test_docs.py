"""Every public function has an example, and every example runs, README's too."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import boltzattn
import pytest
import torch

SETTINGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def _modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(boltzattn.__path__, "boltzattn.")
    names = [m.name for m in found if not m.name.rpartition(".")[2].startswith("_")]
    return [boltzattn, *map(importlib.import_module, names)]


def _documented() -> list[doctest.DocTest]:
    """Docstrings with examples, of every module of the package."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    usual = {"torch": torch, "boltzattn": boltzattn}
    return [
        test
        for module in _modules()
        for test in finder.find(module, module.__name__, module, {**vars(module), **usual})
        if test.examples
    ]


PUBLIC = sorted(name for name in boltzattn.__all__ if callable(getattr(boltzattn, name)))


@pytest.mark.parametrize("test", _documented(), ids=lambda test: test.name)
def test_example_runs(test: doctest.DocTest) -> None:
    failures = doctest.DocTestRunner(optionflags=SETTINGS).run(test)
    assert failures.attempted > 0
    assert failures.failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_function_has_an_example(name: str) -> None:
    text = getattr(boltzattn, name).__doc__
    assert text
    assert doctest.DocTestParser().get_examples(text), f"{name} has no example"


def test_ten_lines_of_the_readme_run() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = re.findall(r"^## Ten lines\n+```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(code.replace("100_000", "5_000"), names)  # the same lines in less time and memory
    assert names["out"].shape == (8, 5_000, 64)
    assert names["y"].shape == (1000, 2, 512)


def test_all_lists_what_exists() -> None:
    assert sorted(boltzattn.__all__) == list(boltzattn.__all__)
    for name in boltzattn.__all__:
        assert hasattr(boltzattn, name)
