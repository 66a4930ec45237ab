"""Every public function has an example, every example runs, and the README tells the truth."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import boltzattn
import pytest
import torch

from tools.public_api import undocumented

ROOT = Path(__file__).parents[2]
SETTINGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def _modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(boltzattn.__path__, "boltzattn.")
    # pkgutil takes libboltzattn.so for a module.
    names = [m.name for m in found if not m.name.rpartition(".")[2].startswith(("_", "lib"))]
    return [boltzattn, *map(importlib.import_module, names)]


def _documented() -> list[doctest.DocTest]:
    """The docstrings with examples of every module of the package."""
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


def test_every_parameter_is_described() -> None:
    assert undocumented() == []


def test_ten_lines_of_the_readme_run() -> None:
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"^## Ten lines\n+```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(code.replace("100_000", "5_000"), names)  # the same lines in less time and memory
    assert names["out"].shape == (8, 5_000, 64)
    assert names["y"].shape == (1000, 2, 512)


@pytest.mark.parametrize("name", ["attention", "lookup", "smoothing"])
def test_code_of_a_page_prints_what_it_says(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    printed, names = io.StringIO(), {}
    torch.manual_seed(0)
    with contextlib.redirect_stdout(printed):
        for kind, code in blocks:
            if kind == "python":
                exec(code, names)
    assert printed.getvalue() == "".join(said for kind, said in blocks if kind == "text")


def test_measurements_of_the_readme_are_those_of_the_tables() -> None:
    readme = (ROOT / "README.md").read_text()
    tables = (ROOT / "bench/results/tables.md").read_text()
    found = re.findall(r"^\| (forward.*?), n = ([\d,]+) \| (.*) \|$", readme, re.MULTILINE)
    assert len(found) == 5
    for passes, n, cells in found:
        table = tables.partition(f"{passes}, rank 1")[2]
        row = re.search(rf"^\| {n} \|.*$", table, re.MULTILINE)[0]
        sdpa, ours, speedup = cells.split(" | ")
        assert f"| {sdpa} " in row, (passes, n)
        assert f"| {ours} ({speedup}) |" in row, (passes, n)


PAGES = [p for p in ROOT.rglob("*.md") if not set(p.parts) & {".venv", "build", ".benchmarks"}]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\"]+)\"", page.read_text())
    missing = [
        link for pair in links for link in pair if link and not (page.parent / link).exists()
    ]
    assert missing == []


def test_every_page_has_a_place_on_the_site() -> None:
    places = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = set(re.findall(r"([\w-]+\.md)$", places, re.MULTILINE))
    assert named >= {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_citation_has_the_version_of_the_package() -> None:
    (version,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert version == boltzattn.__version__


@pytest.mark.parametrize("module", [m for m in _modules() if hasattr(m, "__all__")])
def test_all_lists_what_exists(module: ModuleType) -> None:
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
