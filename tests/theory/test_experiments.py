"""The experiments at a small size: findings, repeatability, and that data can refute them.

Findings that need more training than a test allows are checked by the run marked `full`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from boltzattn.experiments import EXPERIMENTS, Finding, Result, run
from boltzattn.experiments.__main__ import report
from boltzattn.experiments.experiment import Row, select
from boltzattn.theory.presentation import format_table

NAMES = list(EXPERIMENTS)


@pytest.fixture(params=NAMES, scope="module")
def result(request: pytest.FixtureRequest) -> Result:
    """A tiny run; of module scope, so that tests of one experiment follow each other."""
    return run(EXPERIMENTS[request.param], "tiny")


def _verdict(findings: list[Finding], start: str) -> bool:
    (found,) = [finding for finding in findings if finding.claim.startswith(start)]
    return found.holds


def _without_times(rows: list[Row]) -> list[Row]:
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


# What a few seconds are enough to find.
FOUND = {
    "memorize": [
        "fp64 reproduces",
        "gaps follow ids^-2 for gaussian",
        "the same weights in fp32",
        "bf16 reproduces no",
    ],
    "theory-vs-practice": [
        "exact arithmetic confirms",
        "in fp64 the theorem's weights separate nothing",
        "in fp64 the theorem's weights are a hardmax",
        "practical weights separate",
        "the promised digits grow",
    ],
    "temperature": [
        "hardmax separates",
        "mean pooling fails",
        "an intermediate temperature",
        "for tokens in general position",
        "equal power sums up to degree 1",
        "equal power sums up to degree 3",
    ],
    "hardmax": [
        "no hardmax layer",
        "trained hardmax attention guesses",
        "trained mean pooling guesses",
    ],
    "duplicates": [
        "repeated tokens do not harm the construction",
        "in fp64 the construction distinguishes twins",
        "(x, y) and (x, x, y, y)",
        "other sequences of different lengths",
    ],
    "approximate": [
        "errors of Lipschitz functions",
        "the transformer adds nothing",
        "a function that is not equivariant stops",
        "with positions",
        "the L2 error of a discontinuous function",
        "dropping contexts",
        "wide ramps",
    ],
    "depth": ["the models have the same number of parameters"],
    "rank": [],
    "no-quantizer": [
        "one number added to a token",
        "fewer than n - 1 heads",
        "n - 1 heads of rank 1",
        "fewer than n - 1 values",
        "n - 1 values of one head",
        "trained with one head and no network before",
    ],
    "long-sets": ["mean pooling does not learn the task"],
    "capacity": ["every label comes back", "parameters grow as ids^1 (breakpoints)"],
    "next-token": [
        "every next token comes back",
        "distributions take",
        "parameters for next tokens grow as contexts^1",
    ],
    "loops": ["the models have the same number of parameters"],
    "polynomials": [
        "the number of parameters does not depend",
        "the error stays below its bound",
        "the error does not grow",
        "every tent map",
        "in fp32",
    ],
    "scores": [],
    "set-lengths": ["mean pooling does not learn"],
    "single-location": [
        "softmax, full rank finds",
        "linear attention does not",
        "mean does not",
    ],
}


def test_finds(result: Result) -> None:
    findings = result.findings
    assert [claim for claim in FOUND[result.name] if not _verdict(findings, claim)] == []


def test_one_case_alone_repeats_its_rows(result: Result) -> None:
    experiment = EXPERIMENTS[result.name]
    case = experiment.cases["tiny"][-1]  # a trained one, where there is training
    alone = dataclasses.replace(experiment, cases={"tiny": [case]}, judge=lambda rows: [])
    again = run(alone, "tiny").rows
    among_others = select(result.rows, **case)
    assert again
    assert _without_times(again) == _without_times(among_others)


def test_another_seed_gives_other_rows() -> None:
    experiment = EXPERIMENTS["theory-vs-practice"]
    small = dataclasses.replace(
        experiment, cases={"tiny": experiment.cases["tiny"][:1]}, judge=lambda rows: []
    )
    first, other = (run(small, "tiny", seed).rows for seed in (0, 1))
    assert [row["practical_gap"] for row in other] != [row["practical_gap"] for row in first]


def test_json_returns_what_was_saved(result: Result, tmp_path: Path) -> None:
    result.save(tmp_path / "result.json")
    loaded = Result.load(tmp_path / "result.json")
    assert loaded == result
    assert EXPERIMENTS[result.name].judge(loaded.rows) == result.findings


def test_reports(result: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = EXPERIMENTS[result.name]
    report(experiment, result, tmp_path)
    printed = capsys.readouterr().out
    assert format_table(experiment.table(result.rows)) in printed
    assert printed.count("holds    ") + printed.count("REFUTED  ") == len(result.findings)
    figure = (tmp_path / f"{result.name}.png").read_bytes()
    assert figure.startswith(b"\x89PNG")
    assert 10_000 < len(figure) < 100_000


def test_what_was_measured_is_saved_before_it_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    small = dataclasses.replace(
        EXPERIMENTS["theory-vs-practice"],
        cases={"tiny": [{"at": 0}, {"at": 1}, {"at": 2}]},
        measure=lambda seed, at: [{"number": 1 / (2 - at)}],
        judge=lambda rows: [Finding("never", False, str(rows[5]))],
    )
    with pytest.raises(ZeroDivisionError):
        run(small, "tiny", save=path)
    assert Result.load(path).rows == [{"at": 0, "number": 0.5}, {"at": 1, "number": 1.0}]
    two = dataclasses.replace(small, cases={"tiny": [{"at": 0}, {"at": 1}]})
    path.unlink()
    with pytest.raises(IndexError):
        run(two, "tiny", save=path)
    assert len(Result.load(path).rows) == 2
    assert Result.load(path).findings == []


def _set(**new: Any) -> Callable[[list[Row]], None]:
    """Sets these columns wherever a row has them."""

    def tamper(rows: list[Row]) -> None:
        for row in rows:
            row.update({name: value for name, value in new.items() if name in row})

    return tamper


def _where(tamper: Callable[[list[Row]], None], **wanted: Any) -> Callable[[list[Row]], None]:
    return lambda rows: tamper(select(rows, **wanted))


def _learned(rows: list[Row], better: str, worse: str) -> None:
    """Every seed of `better` beats every seed of `worse`, on every task."""
    for row in rows:
        if row["model"] in (better, worse):
            row["accuracy"] = 0.9 if row["model"] == better else 0.1
            row["error"] = 0.1 if row["model"] == better else 0.9


def _gaps_like_one_over_ids(rows: list[Row]) -> None:
    for row in rows:
        row["relative_gap"] = 1 / row["ids"]


def _errors_like_the_root(rows: list[Row]) -> None:
    for row in rows:
        row["error"] = row["grid"] ** -0.5


def _skills(**skills: float) -> Callable[[list[Row]], None]:
    def tamper(rows: list[Row]) -> None:
        for row in rows:
            if row["skill"] is not None:
                row["skill"] = skills.get(row["kind"].replace(" ", "_"), row["skill"])

    return tamper


def _found(at: int | None = None, **found: float) -> Callable[[list[Row]], None]:
    """Skills or errors of models by name, at one length or at all."""

    def tamper(rows: list[Row]) -> None:
        for row in rows:
            name = re.sub(r"\W+", "_", row["model"]).strip("_")
            if name in found and at in (None, row["at"]):
                row["skill" if "skill" in row else "error"] = found[name]

    return tamper


def _times(exponents: dict[str, float]) -> Callable[[list[Row]], None]:
    def tamper(rows: list[Row]) -> None:
        for row in rows:
            row["seconds_per_step"] = 1e-6 * row["size"] ** exponents.get(row["kind"], 1.0)

    return tamper


def _power(column: str, of: str, exponent: float) -> Callable[[list[Row]], None]:
    """Makes a column a power of another one, wherever a row has it."""

    def tamper(rows: list[Row]) -> None:
        for row in rows:
            if column in row:
                row[column] = 30 * row[of] ** exponent

    return tamper


def _refuse_a_million(rows: list[Row]) -> None:
    rows.append({"network": "packed", "count": 10**6, "ids": 10**6, "refused": "too close"})


def _only(better: str) -> Callable[[list[Row]], None]:
    """Every seed of `better` beats all others, on every task."""

    def tamper(rows: list[Row]) -> None:
        for row in rows:
            row["accuracy"] = 0.9 if row["model"] == better else 0.1
            row["error"] = 0.1 if row["model"] == better else 0.9

    return tamper


_EQUAL = _set(accuracy=0.5, error=0.5)

FULL, ONE = "scores 8, values 8", "scores 1, values 8"

# (experiment, claim, data that bear it out, data that refute it)
FLIPS: list[tuple[str, str, Callable[[list[Row]], None], Callable[[list[Row]], None]]] = [
    ("memorize", "fp64 reproduces", _set(fp64=1.0), _where(_set(fp64=0.99), family="sphere")),
    (
        "memorize",
        "gaps follow ids^-2 for gaussian",
        _set(),
        _where(_gaps_like_one_over_ids, family="gaussian"),
    ),
    ("memorize", "the same weights in fp32", _set(fp32=1.0), _set(fp32=0.9)),
    ("memorize", "bf16 reproduces no", _set(bf16=0.2), _set(bf16=1.0)),
    ("theory-vs-practice", "exact arithmetic", _set(), _set(log10_exact=-1e9)),
    ("theory-vs-practice", "in fp64 the theorem's weights sep", _set(), _set(fp64_seen=True)),
    ("theory-vs-practice", "in fp64 the theorem's weights are", _set(), _set(from_hardmax=0.1)),
    ("theory-vs-practice", "practical weights", _set(), _set(practical_seen=False)),
    ("temperature", "hardmax separates", _set(), _where(_set(gap=1e-3), limit="hardmax")),
    ("temperature", "mean pooling fails", _set(), _where(_set(gap=1e-3), limit="mean")),
    ("temperature", "an intermediate", _set(), _where(_set(gap=0.0), limit=None)),
    ("hardmax", "trained hardmax", _set(shared=0.5), _where(_set(shared=0.6), kind="hardmax")),
    ("hardmax", "trained softmax", _set(shared=0.99), _where(_set(shared=0.6), kind="softmax")),
    ("hardmax", "a network before", _set(shared=0.5), _where(_set(shared=1.0), kind="hardmax")),
    ("duplicates", "repeated tokens do not harm the", _set(), _where(_set(fp64=0.9), part="rate")),
    (
        "duplicates",
        "repeated tokens do not harm training",
        _set(trained=0.9),
        _where(_set(trained=0.5), part="rate", at=0.5),
    ),
    ("duplicates", "(x, y) and (x, x, y, y)", _set(), _set(proportional=1e-3)),
    ("duplicates", "(x, y) and (x, x, y, y)", _set(), _set(refused=False)),
    ("approximate", "errors of Lipschitz", _set(), _errors_like_the_root),
    ("approximate", "the transformer adds", _set(), _set(grid_error=1e-3)),
    ("approximate", "a function that is not", _set(), _where(_set(error=0.1), target="position")),
    (
        "depth",
        "one layer of rank 1 memorizes",
        lambda rows: _learned(rows, "1 layer, rank 1", "4 layers, full rank"),
        lambda rows: _learned(rows, "4 layers, full rank", "1 layer, rank 1"),
    ),
    (
        "depth",
        "one layer of rank 1 fits",
        lambda rows: _learned(rows, "1 layer, rank 1", "2 layers, full rank"),
        lambda rows: _learned(rows, "2 layers, full rank", "1 layer, rank 1"),
    ),
    *(
        (
            "rank",
            claim,
            functools.partial(_learned, better=first, worse=second),
            functools.partial(_learned, better=second, worse=first),
        )
        for claim, first, second in (
            ("rank-1 scores memorize", ONE, FULL),
            ("rank-1 values memorize", "scores 1, values 1", ONE),
            ("rank-1 scores imitate rank-1", ONE, FULL),
            ("rank-1 scores imitate full-rank", ONE, FULL),
            ("8 heads of rank 1 memorize", "8 heads of 1", FULL),
            ("8 heads of rank 1 imitate", "8 heads of 1", FULL),
            ("with the constructed vector", "constructed vector", "scores 1, values 1"),
        )
    ),
    ("no-quantizer", "one number added", _set(), _where(_set(floor=0.0), variant="scalar")),
    ("no-quantizer", "fewer than n - 1 heads", _set(), _set(floor=0.0)),
    ("no-quantizer", "n - 1 heads", _set(), _where(_set(floor=0.5), variant="temperatures")),
    ("no-quantizer", "n - 1 values", _set(), _where(_set(floor=0.5), variant="powers")),
    ("no-quantizer", "trained with one head", _set(), _where(_set(error=0.01), part="trained")),
    ("long-sets", "rank-1 heads learn", _skills(rank_1=0.95), _skills(rank_1=0.5)),
    ("long-sets", "full attention is not", _skills(rank_1=0.9, full=0.9), _skills(full=2.0)),
    ("long-sets", "full attention on", _skills(rank_1=1, sample=0.2), _skills(sample=0.95)),
    ("long-sets", "mean pooling", _skills(mean=0.0), _skills(mean=0.9)),
    ("long-sets", "a step takes linear", _times({"full": 2.0}), _times({"rank 1": 2.0})),
    ("capacity", "every label", _set(), _where(_set(accuracy=0.9), network="looped")),
    (
        "capacity",
        "parameters grow as ids^1 (breakpoints)",
        _power("parameters", "ids", 1.0),
        _power("parameters", "ids", 0.5),
    ),
    *(
        (
            "capacity",
            f"parameters grow as ids^0.5 ({network})",
            _power("parameters", "ids", 0.5),
            _power("parameters", "ids", 1.0),
        )
        for network in ("packed", "packed, every token")
    ),
    ("capacity", "a loop comes", _set(parameters=5), _set(parameters=5000)),
    ("capacity", "the distance", _power("margin", "ids", -3.0), _power("margin", "ids", -2.0)),
    ("capacity", "fp64 ends", _refuse_a_million, _set()),
    ("next-token", "every next", _set(), _where(_set(accuracy=0.9), network="packed")),
    ("next-token", "every next", _set(), _where(_set(max_error=0.1), network="distributions")),
    ("next-token", "distributions", _set(), _set(parameters=10**5)),
    *(
        (
            "next-token",
            f"parameters for next tokens grow as contexts^{exponent:g}",
            _power("parameters", "contexts", exponent),
            _power("parameters", "contexts", 0.75),
        )
        for exponent in (1.0, 0.5)
    ),
    ("next-token", "training", _set(accuracy=1.0), _where(_set(accuracy=0.9), part="trained")),
    *(
        ("loops", claim + f" ({task})", good, bad)
        for task in ("labels", "function")
        for claim, good, bad in (
            ("a loop is better than one layer", _only("4 loops"), _EQUAL),
            ("a loop is as good as two layers", _EQUAL, _only("2 layers")),
            ("scales of each loop help", _only("4 loops, table"), _only("2 loops")),
        )
    ),
    ("polynomials", "the number", _set(), _where(_set(parameters=1), size=100)),
    ("polynomials", "the error stays", _set(), _where(_set(error=1.0), depth=6)),
    ("polynomials", "the error does not", _set(), _where(_set(error=1.0), size=1000)),
    ("polynomials", "every tent map", _set(), _where(_set(error=0.1), part="depth")),
    ("polynomials", "in fp32", _set(), _where(_set(error=1.0), dtype="fp32")),
    *(
        (
            "scores",
            f"rank 1 is as good as rank 3 ({task}, {score}",
            _EQUAL,
            _only(f"{score}, rank 3"),
        )
        for task in ("labels", "wave")
        for score in ("dot", "gaussian")
    ),
    *(
        ("scores", f"local averages need the rank of their space ({task}, {score}", good, bad)
        for task, rank in (("local, plane", 2), ("local, space", 3))
        for score in ("dot", "gaussian")
        for good, bad in ((_only(f"{score}, rank {rank}"), _EQUAL),)
    ),
    *(
        (
            "scores",
            f"Gaussian scores are better than dot products for local averages ({task}",
            _only(f"gaussian, rank {rank}"),
            _only(f"dot, rank {rank}"),
        )
        for task, rank in (("local, plane", 2), ("local, space", 3))
    ),
    ("set-lengths", "rank 1 learns", _found(dot_rank_1=0.95), _found(dot_rank_1=0.5)),
    (
        "set-lengths",
        "full rank is not better at 200",
        _found(dot_rank_1=0.95, dot_rank_8_full=0.96),
        _found(dot_rank_1=0.9, dot_rank_8_full=0.97),
    ),
    (
        "set-lengths",
        "rank 1 keeps its skill at 1,000",
        _found(dot_rank_1=0.9),
        _found(1000, dot_rank_1=0.5),
    ),
    (
        "set-lengths",
        "rank 1 is at least as good as full rank at 1,000",
        _found(dot_rank_1=0.9, dot_rank_8_full=0.9),
        _found(1000, dot_rank_1=0.5, dot_rank_8_full=0.9),
    ),
    (
        "set-lengths",
        "Gaussian scores are not better",
        _found(dot_rank_1=0.9, gaussian_rank_1=0.9),
        _found(1000, dot_rank_1=0.5, gaussian_rank_1=0.9),
    ),
    ("set-lengths", "mean pooling", _found(mean=0.0), _found(mean=0.9)),
    *(
        (
            "single-location",
            f"{model} finds the token",
            _found(**{name: 0.1}),
            _found(64, **{name: 0.5}),
        )
        for model, name in (
            ("softmax, rank 1", "softmax_rank_1"),
            ("softmax, rank 8", "softmax_rank_8"),
            ("softmax, full rank", "softmax_full_rank"),
            ("Gaussian, rank 1", "Gaussian_rank_1"),
        )
    ),
    (
        "single-location",
        "rank 1 is as good as full rank",
        _found(softmax_rank_1=0.1, softmax_full_rank=0.1),
        _found(softmax_rank_1=0.2, softmax_full_rank=0.1),
    ),
    (
        "single-location",
        "linear attention does not",
        _found(linear_attention=0.95),
        _found(linear_attention=0.2),
    ),
    ("single-location", "mean does not", _found(mean=1.0), _found(mean=0.2)),
    (
        "single-location",
        "rank 1 trained at",
        _found(softmax_rank_1=0.1),
        _found(256, softmax_rank_1=0.9),
    ),
]


def test_verdicts_follow_the_data(result: Result) -> None:
    judge = EXPERIMENTS[result.name].judge
    flips = [flip for flip in FLIPS if flip[0] == result.name]
    assert flips
    for _, claim, good, bad in flips:
        for tamper, verdict in ((good, True), (bad, False)):
            rows = [dict(row) for row in result.rows]
            tamper(rows)
            assert _verdict(judge(rows), claim) is verdict, claim


@pytest.mark.parametrize("name", NAMES)
def test_sizes_grow(name: str) -> None:
    cases = EXPERIMENTS[name].cases
    assert set(cases) == {"tiny", "quick"}
    assert len(cases["tiny"]) <= len(cases["quick"])


def test_size_is_checked() -> None:
    with pytest.raises(ValueError, match=r"size must be one of 'tiny', 'quick', got 'big'"):
        run(EXPERIMENTS["memorize"], "big")


def test_training_together_is_training_alone() -> None:
    from boltzattn.experiments.training import build_all, train

    def build(_: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    x, y = torch.randn(2, 20, 3), torch.randn(2, 20, 1)
    loss = torch.nn.functional.mse_loss
    together = train(build_all(build, [0, 1]), lambda _: (x, y), loss, 50)
    for i in (0, 1):
        alone = train(build_all(build, [i]), lambda _, i=i: (x[i : i + 1], y[i : i + 1]), loss, 50)
        # The same steps in fp32, with sums in another order.
        torch.testing.assert_close(together[:, i], alone[:, 0], rtol=1e-3, atol=1e-5)


def test_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "boltzattn.experiments"]
    options = ["theory-vs-practice", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=True, timeout=600
    )
    assert "Refuted if" in done.stdout
    assert "holds    practical weights separate every data set in fp64: 5 of 5" in done.stdout
    assert "5/5" in done.stderr  # the progress bar
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "theory-vs-practice.json",
        "theory-vs-practice.png",
    ]
    unknown = subprocess.run([*command, "nonsense"], capture_output=True, text=True, timeout=600)
    assert unknown.returncode == 2
    assert "choose from" in unknown.stderr
    assert "memorize" in unknown.stderr


DOCS = Path(__file__).parents[2] / "docs"
PAGE = runpy.run_path(str(DOCS / "experiments_page.py"))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_saved_runs_are_what_the_experiment_measures_and_judges(name: str, seed: int) -> None:
    if not PAGE["path_of"](name, seed).exists():
        pytest.skip(f"no saved run of {name} with seed {seed}")
    saved, experiment = PAGE["saved"](name, seed), EXPERIMENTS[name]
    assert (saved.size, saved.seed, saved.question) == ("quick", seed, experiment.question)
    assert [case for case in experiment.cases["quick"] if not select(saved.rows, **case)] == []
    assert experiment.judge(saved.rows) == saved.findings


def test_documentation_says_what_the_saved_runs_found() -> None:
    text = (DOCS / "experiments.md").read_text()
    assert PAGE["page"](text) == text, "run python docs/experiments_page.py"
    for name in NAMES:
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert section.count("```text\n") == 1
        assert f"](experiments/{name}.png)" in section


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_quick_run_finds_what_the_documentation_says(name: str) -> None:
    findings = run(EXPERIMENTS[name], "quick").findings
    assert [(f.claim, f.holds) for f in findings] == [
        (f.claim, f.holds) for f in PAGE["saved"](name, 0).findings
    ]
