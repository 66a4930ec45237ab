"""The examples of smoothing in small: they improve on what they are compared with, and draw."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from boltzattn.smoothing import kernel_regression

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_learnt_bandwidth_predicts_better() -> None:
    example = load("kernel_regression")
    x, y = example.draw_points(600, torch.Generator().manual_seed(0))
    learnt = example.learn_bandwidth(x, y, steps=15, show=False)
    at = torch.linspace(0, 1, 201)
    errors = [
        float((kernel_regression(x, y, at, b) - example.truth(at)).square().mean().sqrt())
        for b in (learnt, example.rule_of_thumb(x))
    ]
    assert errors[0] < 0.5 * errors[1]


def test_the_rule_of_the_example_is_that_of_the_package() -> None:
    example = load("kernel_regression")
    x, y = example.draw_points(100, torch.Generator().manual_seed(0))
    wanted = kernel_regression(x, y, bandwidth=example.rule_of_thumb(x))
    torch.testing.assert_close(kernel_regression(x, y), wanted)


def test_soft_ranks_order_better_than_least_squares() -> None:
    example = load("soft_sort")
    features, relevance = example.draw_items(200, torch.Generator().manual_seed(0))
    trained = example.train(features, relevance, steps=25, show=False)
    squares = torch.linalg.lstsq(features, relevance[:, None]).solution[:, 0]
    unseen, wanted = example.draw_items(500, torch.Generator().manual_seed(1))
    ranks = [example.hard_rank(unseen @ w) for w in (trained, squares)]
    found = [float(example.correlation(r, example.hard_rank(wanted))) for r in ranks]
    assert found[0] > found[1] + 0.1


@pytest.mark.parametrize(
    ("name", "options"),
    [("kernel_regression", ["--points", "200"]), ("soft_sort", ["--items", "100"])],
)
def test_draws(name: str, options: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    to = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", [name, *options, "--steps", "2", "--out", str(to)])
    load(name).main()
    assert to.read_bytes().startswith(b"\x89PNG")
    assert str(to) in capsys.readouterr().out


def test_the_extra_brings_what_examples_import() -> None:
    root = EXAMPLES.parent
    extra = re.search(r"^examples = \[(.*)\]$", (root / "pyproject.toml").read_text(), re.MULTILINE)
    brought = {re.split(r"[<>=]", name)[0].replace("-", "_") for name in eval(f"[{extra[1]}]")}
    brought |= {"torch", "boltzattn", "numpy"} | sys.stdlib_module_names
    for path in EXAMPLES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                assert name.partition(".")[0] in brought, f"{path.name} imports {name}"
