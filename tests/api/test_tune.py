"""Costs measured on this machine: fitted, kept in a file, and used only where they belong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from boltzattn import cli, info, tune
from boltzattn.dispatch import costs, plan
from boltzattn.dispatch.backends import Request
from boltzattn.dispatch.costs import CPU, Costs

SLOW_PAIRS = CPU._replace(direct_pair=100 * CPU.direct_pair)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "cache/costs.json"
    monkeypatch.setenv("BOLTZATTN_COSTS", str(path))
    forget()
    yield path
    monkeypatch.undo()
    forget()


def forget() -> None:
    """As a new process would."""
    costs.of_cpu.cache_clear()
    plan.choose.cache_clear()


def chosen(n: int) -> str:
    request = Request("cpu", torch.float32, 1, n, n, 1, 64)
    return plan.choose(request, plan.Choice("auto", "cpu")).method


def test_a_written_file_decides(file: Path) -> None:
    assert costs.of_cpu() == (CPU, "built in")
    assert chosen(64) == "direct"
    costs.write(file, SLOW_PAIRS)
    forget()
    assert costs.of_cpu()[0] == SLOW_PAIRS
    assert chosen(64) == "transform"
    assert f"measured here, {file}" in info.report()
    assert info.facts()["costs"] == f"measured here, {file}"


@pytest.mark.parametrize("entry", ["boltzattn", "processor", "instruction set"])
def test_a_file_from_elsewhere_does_not_count(file: Path, entry: str) -> None:
    costs.write(file, SLOW_PAIRS)
    file.write_text(json.dumps({**json.loads(file.read_text()), entry: "another"}))
    forget()
    taken, origin = costs.of_cpu()
    assert taken == CPU
    assert f"{entry} was another" in origin
    assert "run boltzattn tune again" in origin


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"costs": 3}',
        '{"costs": {"direct_pair": "x"}}',
        '{"costs": {"no_such": 1}}',
        '{"costs": {"direct_pair": -1}}',
        '{"costs": {"direct_pair": NaN}}',
    ],
)
def test_a_damaged_file_does_not_count(file: Path, text: str) -> None:
    file.parent.mkdir()
    entries = {**costs.machine(), **json.loads(text)} if text.startswith('{"') else None
    file.write_text(text if entries is None else json.dumps(entries))
    taken, origin = costs.of_cpu()
    assert taken == CPU
    assert "damaged" in origin


def test_a_folder_in_its_place_does_not_count(file: Path) -> None:
    file.mkdir(parents=True)
    assert costs.of_cpu()[0] == CPU


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BOLTZATTN_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert costs.path() == tmp_path / "boltzattn/costs.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert costs.path() == Path("/somewhere/.cache/boltzattn/costs.json")
    monkeypatch.setenv("BOLTZATTN_COSTS", "")
    assert costs.path() is None


def test_nothing_is_read_at_import(file: Path) -> None:
    program = (
        "import boltzattn; from boltzattn.dispatch import costs;"
        "assert costs.of_cpu.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_cost_is_measured_once() -> None:
    named = [name for _, names, _ in tune.groups() for name in names]
    assert sorted(named) == sorted(set(Costs._fields) - {"transform_call"})


def test_fit_finds_the_costs_that_times_came_from() -> None:
    true = CPU._replace(**{name: 1.7 * cost for name, cost in CPU._asdict().items()})
    found = CPU
    for _, names, cases in tune.groups():
        found = tune.fit(names, found, [(case.model, case.model(true)) for case in cases])
    for name, cost, expected in zip(Costs._fields, found, true, strict=True):
        assert cost == pytest.approx(expected, rel=1e-6), name


def test_fit_has_no_negative_cost() -> None:
    """Times that fall with the width of the values leave that cost at 0."""
    cases = [tune.attention_case("direct", 100, 1, dv) for dv in (10, 1000)]
    measured = [(cases[0].model, 2e6), (cases[1].model, 1e6)]
    found = tune.fit(("direct_pair", "direct_pair_column"), CPU, measured)
    assert found.direct_pair_column == 0
    assert 1e6 < found.direct_pair * 100 * 100 < 2e6


def test_the_command(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "measure", lambda report: SLOW_PAIRS)
    assert cli.main(["tune", "--dry-run"]) == 0
    assert not file.exists()
    assert cli.main(["tune"]) == 0
    assert costs.read(file) == SLOW_PAIRS
    printed = capsys.readouterr().out
    assert f"written to {file}" in printed
    plain = next(line for line in printed.splitlines() if line.split()[:1] == ["plain"])
    before, after = map(int, plain.split()[1:])
    assert before > after
    assert cli.main(["tune", "--remove"]) == 0
    assert not file.exists()
    assert cli.main(["tune", "--remove"]) == 0
    monkeypatch.setenv("BOLTZATTN_COSTS", "")
    assert cli.main(["tune"]) == 1
    assert "no file to write" in capsys.readouterr().err


def test_without_a_library_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "cpu_unavailable", lambda: "the library is gone")
    assert cli.main(["tune"]) == 1
    assert "the library is gone" in capsys.readouterr().err


@pytest.mark.full
def test_measuring_ends_and_leaves_torch_as_it_was(file: Path) -> None:
    torch.set_num_threads(2)
    state = torch.random.get_rng_state()
    found = tune.measure(lambda line: None)
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.random.get_rng_state(), state)
    assert found.direct_pair > 0
    assert all(cost >= 0 for cost in found)
    assert 16 < tune.break_even(found) < 4096
