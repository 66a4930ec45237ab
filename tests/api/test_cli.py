"""The command `boltzattn`: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys

import boltzattn
import pytest
import torch
from boltzattn import cli, info, selftest
from boltzattn.dispatch.extension import extension


def test_info_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["boltzattn"] == boltzattn.__version__
    assert known["torch"] == torch.__version__
    assert known["library"]["instruction sets"] == extension().supported_isas()
    assert known["library"]["built with"]["compiler"]
    assert list(known["backends"]) == list(boltzattn.BACKENDS)
    assert known["backends"]["cpu"]["not usable"] is None


def test_info_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "extension", lambda: "the library is gone")
    assert info.facts()["library"] == {"not usable": "the library is gone"}
    assert "library: the library is gone" in info.report()


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in cli.COMMANDS)])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: " + " ".join(["boltzattn", *words[:-1]]))
    if words == ["--help"]:
        assert all(name in printed for name in cli.COMMANDS)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["melody"],
        ["info", "--xml"],
        ["info", "--json", "--kernels"],
        ["bench", "--lengths", "0"],
        ["bench", "--device", "no-such"],
        ["selftest", "--length", "-1"],
        ["tune", "--dry-run", "--remove"],
    ],
)
def test_a_wrong_call_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "usage: boltzattn" in capsys.readouterr().err


def test_the_status_of_the_self_test_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "rows", lambda length: iter(["FAIL here"]))
    assert cli.main(["selftest"]) == 1
    monkeypatch.setattr(selftest, "rows", lambda length: iter(["ok   here"]))
    assert cli.main(["selftest"]) == 0


def test_bench_prints_a_line_for_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--lengths", "20", "3000", "--heads", "1", "--dv", "8"]
    assert cli.main(["bench", *lengths, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["tokens"] for row in rows] == [20, 3000]
    assert [row["taken"] for row in rows] == [f"method {m}, backend cpu" for m in boltzattn.METHODS]
    assert all(
        row[who][what] > 0 for row in rows for who in ("sdpa", "boltzattn") for what in row[who]
    )
    assert cli.main(["bench", *lengths, "--causal", "--rank", "8", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("1 heads of rank 8, dv 8, bfloat16 on cpu")
    assert [line.split()[0] for line in printed[-2:]] == ["20", "3000"]


def test_a_missing_package_is_named() -> None:
    program = (
        "import sys; sys.modules['numpy'] = None;"
        "from boltzattn import cli; sys.exit(cli.main(['theory']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        "boltzattn theory needs numpy; to install it: pip install 'boltzattn[theory]'"
    )


def test_no_numpy_is_needed() -> None:
    """Neither to import the package nor to call it, forward and backward."""
    program = """if True:
        import sys, warnings
        sys.modules["numpy"] = None
        warnings.simplefilter("ignore")  # torch's, about numpy
        import torch, boltzattn
        for method in boltzattn.METHODS:
            for backend in ("cpu", "reference"):
                query = torch.randn(2, 50, 1, requires_grad=True)
                out = boltzattn.attention(query, query, query, method=method, backend=backend)
                out.sum().backward()
        layer = boltzattn.nn.LowRankAttention(16, 2, rank=1)
        x = torch.randn(9, 2, 16)
        layer(x, x, x)[0].sum().backward()
        layer.step(x)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
