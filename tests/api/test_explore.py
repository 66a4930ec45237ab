"""The mathematics of the interactive page, run by node and compared with the package."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import boltzattn
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "docs/explore.js"
KEYS = [-2.0, -1.5, 0.25, 0.5, 1.75]
BIAS = [0.0, 3.0, -1.0, 0.5, 0.0]
VALUES = [1.0, -0.5, 2.0, 0.25, 0.75]

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def run(call: str) -> Any:
    program = (
        f"const page = require({json.dumps(str(SCRIPT))}); console.log(JSON.stringify({call}))"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["dot", "gaussian"])
def test_weights_are_those_of_the_package(kind: str) -> None:
    found = run(f"page.weights('{kind}', 0.7, {KEYS}, 0.5, {BIAS})")
    query, keys = torch.tensor([[0.7]]).double(), torch.tensor(KEYS).double()[:, None]
    expected = boltzattn.attention(
        query,
        keys,
        torch.eye(5).double(),
        scale=2.0,
        score=kind,
        key_bias=torch.tensor(BIAS).double(),
    )
    torch.testing.assert_close(torch.tensor(found).double(), expected[0])


def test_hardmax_shares_among_the_largest() -> None:
    assert run("page.weights('hardmax', -1, [1, 2, 1], 0.1, [0, 0, 0])") == [0.5, 0, 0.5]


def test_the_table_converges() -> None:
    """A few nodes are wrong, many are right to a dozen digits: what the sliders show."""
    errors = [
        run(f"page.tableError(3, 4, {nodes}, {KEYS}, {VALUES}, {BIAS})") for nodes in (2, 6, 24)
    ]
    assert errors[0] > 1e-2 > 1e-3 > errors[1] > 1e-9
    assert errors[2] < 1e-12


def test_the_page_has_what_the_script_asks_for() -> None:
    page = SCRIPT.with_suffix(".md").read_text()
    names = ("keys", "query", "temperature", "bias", "panels", "nodes", "error", "table")
    for name in (*names, "dot", "gaussian", "hardmax"):
        assert f'id="{name}"' in page
