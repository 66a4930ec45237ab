"""The logic of the benchmarks: sampling, accuracy check, storage, tables and figures."""

import itertools
import math
import os
import resource
from dataclasses import replace

import pytest
import torch

from bench import __main__ as cli
from bench import (
    accuracy,
    cases,
    child,
    compare,
    cores,
    extrapolation,
    measure,
    plot,
    problems,
    providers,
    report,
    results,
    targets,
)
from bench.cases import Case, Entry
from bench.cores import Cores
from bench.environment import Environment, glibc_mallopt
from bench.results import FAILED, MEASURED, SKIPPED, TOO_SLOW, Record, Row

HERE = Environment("m", "Some CPU", 2, 2, 8, "", "avx2", "abc", "3.11", "2.13", "0.1")
INSTANT = measure.Effort(seconds_per_provider=0.0, longest_call_s=60.0, sample_s=0.0)


def row(provider: str, median_s: float | None = 1.0, **changes: object) -> Row:
    """A measured, accurate row unless told otherwise."""
    known = {"sdpa": 2, "sdpa padded": 2, "naive": 2}
    made = Row(provider, "exact", known.get(provider, 1), MEASURED)
    if median_s is None:
        made.status = TOO_SLOW
    else:
        made.samples, made.spread, made.fastest_s = 5, 0.01, median_s
        made.median_s, made.tokens_per_s = median_s, 1 / median_s
        made.max_error, made.rms_error, made.allowed_error = 1e-7, 1e-8, 5e-7
    return replace(made, **changes)


def record(provider: str, median_s: float | None = 1.0, n: int = 1024, **changes: object) -> Record:
    return Record(HERE, Case(n), row(provider, median_s, **changes))


# -- sampling -----------------------------------------------------------------------------------


class FakeClock:
    """Stands for the stop watch: calls are names, each takes its set time."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.log = seconds, []

    def __call__(self, call: str, repeats: int) -> list[float]:
        self.log.append((call, repeats))
        return [self.seconds[call] * (1 + i) for i in range(repeats)]


def drained(steps):
    """What a generator returns, and what it yields."""
    yielded = []
    while True:
        try:
            yielded.append(next(steps))
        except StopIteration as end:
            return end.value, yielded


def test_providers_take_turns_in_rotating_order():
    clock = FakeClock({"a": 1.0, "b": 1.0, "c": 1.0})
    effort = measure.Effort(seconds_per_provider=0.5, longest_call_s=9)
    samples, _ = drained(measure.take_turns({name: name for name in "abc"}, effort, clock))
    assert [call for call, _ in clock.log] == [*"abc", *"abc", *"bca", *"cab"]
    assert all(len(s) == 3 for s in samples.values())  # three even when one is too long


@pytest.mark.parametrize("effort", [measure.QUICK, measure.FULL])
def test_fewer_samples_of_long_calls_are_enough(effort):
    clock = FakeClock({"short": effort.long_call_s * 0.9, "long": effort.long_call_s * 1.1})
    samples, _ = drained(measure.take_turns({name: name for name in clock.seconds}, effort, clock))
    assert len(samples["short"]) == effort.least_samples >= 3
    assert len(samples["long"]) == effort.least_long_samples >= 2
    assert effort.least_long_samples <= effort.least_samples


def test_short_calls_are_repeated_and_budgets_are_kept():
    clock = FakeClock({"short": 1e-5, "long": 0.4})
    effort = measure.Effort(1e-2, longest_call_s=9, sample_s=1e-4)
    turns = measure.take_turns({"short": "short", "long": "long"}, effort, clock)
    samples, progress = drained(turns)
    assert progress == sorted(progress)
    assert progress[0] < 0.5 < progress[-1] < 1
    assert clock.log.count(("short", 10)) == 19  # 55e-5 s each: 1e-2 s is full
    assert samples["short"] == [1e-5] * 19  # the fastest call of each
    assert clock.log.count(("long", 2)) == 3  # never less


class FakeSignals:
    """Stands for the shortest parallel operation: takes what it is told, then the last forever."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def __call__(self, threads: int) -> float:
        return self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)  # put back after every test


@pytest.mark.usefixtures("two_threads")
def test_samples_wait_until_the_cores_are_near(monkeypatch):
    """Apart before the first sample, and moved apart during it: it is taken again."""
    known, clock = Cores(), FakeClock({"a": 1.0})
    monkeypatch.setattr(cores, "_signal_s", FakeSignals(4e-6))
    assert known.near()
    known.allow(10.0)
    signals = FakeSignals(6e-6, 6e-6, 4.5e-6, 6e-6, 4.5e-6)
    monkeypatch.setattr(cores, "_signal_s", signals)
    assert known.watch(clock)("a", 2) == [1.0, 2.0]
    assert clock.log == [("a", 2)] * 2
    assert len(signals.seconds) == 1  # all of them were asked for


@pytest.mark.usefixtures("two_threads")
def test_waiting_ends(monkeypatch):
    known, clock = Cores(), FakeClock({"a": 1.0})
    monkeypatch.setattr(cores, "_signal_s", FakeSignals(4e-6, 6e-6))
    assert known.near()
    known.allow(0.1)
    assert known.watch(clock)("a", 1) == [1.0]
    assert len(clock.log) == 1
    known.allow(2.5)
    monkeypatch.setattr(cores, "_signal_s", FakeSignals(4e-6, 6e-6, 4e-6, 6e-6, 4e-6, 6e-6))
    assert known.watch(clock)("a", 1) == [1.0]
    assert len(clock.log) == 4  # two calls of a second in vain, and then what there is
    assert known.lose(0.5)  # a third would have been too long; what is left is for shorter ones
    assert not known.lose(0.1)


@pytest.mark.usefixtures("two_threads")
def test_the_nearest_is_known_before_the_first_sample(monkeypatch):
    known = Cores()
    monkeypatch.setattr(cores, "_signal_s", FakeSignals(6e-6, 4e-6, 6e-6))
    known.learn(seconds=0.1)
    assert not known.near()


def test_one_thread_is_always_near():
    torch.set_num_threads(1)
    assert all(Cores().near() for _ in range(3))


def _near_after(known, signal_s):
    torch.set_num_threads(2)
    cores._signal_s = lambda threads: signal_s
    return known.near()


def test_processes_share_what_they_know_of_the_cores():
    known = Cores()
    assert child.run(_near_after, known, 4e-6)
    assert not child.run(_near_after, known, 6e-6)


@pytest.mark.usefixtures("two_threads")
def test_the_shortest_parallel_operation_takes_time():
    assert 0 < cores._signal_s(2) < 0.1


def test_median_spread_and_throughput():
    timed = row("naive", None)
    measure.fill_times(timed, [3.0, 1.0, 2.0, 100.0, 2.0], Case(n=10, batch=4))
    assert timed.status == MEASURED
    assert (timed.median_s, timed.fastest_s, timed.samples) == (2.0, 1.0, 5)
    assert timed.spread == 0.5  # quartiles 2 and 3: one outlier does not show
    assert timed.tokens_per_s == 20.0


def test_prediction_follows_the_growth():
    provider = providers.table()["naive"]
    case = Case(n=4 * measure.PROBE_N, dv=1)
    assert measure.predict(provider, case, lambda call, repeats: [0.5, 0.6]) == 0.5 * 4**2
    assert measure.predict(provider, replace(case, n=measure.PROBE_N), None) == 0.0


# -- accuracy -----------------------------------------------------------------------------------

SMALL = [
    Case(n=40, rank=3, dv=5, heads=2, batch=2),
    Case(n=40, dv=5, passes="both", causal=True),
    Case(n=40, dv=5, dtype="float64", passes="both", sharpness=10.0),
    Case(n=40, rank=2, dv=8, passes="both", dtype="bfloat16"),
    Case(n=40, dv=4, heads=2, dim=8, level="layer", passes="both"),
    Case(n=40, dv=4, heads=2, dim=8, level="module", passes="both"),
    Case(n=40, dv=4, heads=2, dim=8, level="module"),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.label)
def test_every_exact_provider_agrees_with_the_oracle(case):
    problem = problems.make_problem(case)
    for name, reason in providers.taking_part(case, ()).items():
        provider = providers.table()[name]
        if reason or provider.kind != "exact" or provider.compiles:
            continue
        bound = provider.build(problem)
        judge = accuracy.Judge(problem, bound.weights)
        found = judge.judge(measure.result_for_check(problem, bound))
        # What a report allows is a matter of ulps; half of the digits tell the same function.
        assert found.max_error < torch.finfo(problem.bulk.dtype).eps ** 0.5, (name, found)


def test_the_oracle_sees_a_wrong_row_and_a_wrong_gradient():
    problem = problems.make_problem(Case(n=64, passes="both"))
    judge = accuracy.Judge(problem)
    right = measure.result_for_check(problem, providers.table()["naive"].build(problem))
    assert judge.judge(right).passed
    for name in ("out", "dq", "dk", "dv"):
        wrong = {key: x.clone() for key, x in right.items()}
        wrong[name][0, 0, 17] += 1e-3 * judge.unit[name]
        found = judge.judge(wrong)
        assert found.tensor == name
        assert not found.passed
        assert found.max_error == pytest.approx(1e-3, rel=1e-2)
        wrong[name].fill_(math.nan)
        assert not judge.judge(wrong).passed


def test_double_precision_is_held_to_what_single_is_in_ulps():
    case = Case(n=200, passes="both", dtype="float64")
    problem = problems.make_problem(case)
    judge = accuracy.Judge(problem)
    single = accuracy.Judge(problems.make_problem(replace(case, dtype="float32")))
    for name in ("out", "dq", "dk", "dv"):
        assert judge.eager_error[name] == pytest.approx(1.5 * 2.0**-29 * single.eager_error[name])
    naive = measure.result_for_check(problem, providers.table()["naive"].build(problem))
    assert judge.judge(naive).passed
    wrong = naive | {"dk": naive["dk"] + 1e-12 * judge.unit["dk"]}
    assert not judge.judge(wrong).passed
    assert judge.judge(wrong, certified=True).passed  # fp64 certifies 1e-10


def test_the_rule_is_that_of_the_tests():
    import errors

    for name in ("EAGER_FACTOR", "FLOOR_ULPS", "CERTIFIED"):
        assert getattr(accuracy, name) == getattr(errors, name)
    assert accuracy.ulp(3.0, torch.float32) == errors.ulp(3.0, torch.float32) == 2.0**-22


def test_eager_runs_differ_by_their_roundings_alone():
    problem = problems.make_problem(Case(n=64, rank=3, passes="both", causal=True))
    exact, other = problem.dense(torch.float64), problem.dense(torch.float64, 5)
    for name in exact:
        torch.testing.assert_close(exact[name], other[name], rtol=1e-10, atol=1e-12)
    assert not torch.equal(
        problem.dense(torch.float32)["out"], problem.dense(torch.float32, 5)["out"]
    )


def test_more_eager_runs_only_for_what_is_over_the_limit():
    problem = problems.make_problem(Case(n=64))
    judge = accuracy.Judge(problem)
    right = measure.result_for_check(problem, providers.table()["naive"].build(problem))
    assert judge.judge(right).passed
    assert judge.runs == 1
    assert not judge.judge({"out": right["out"] + 1e-4}).passed
    assert judge.runs == accuracy.EAGER_RUNS


def test_sampled_oracle_is_the_dense_one_on_its_rows(monkeypatch):
    case = Case(n=300, dv=3, passes="both")
    everything = problems.make_problem(case).dense(torch.float64)
    monkeypatch.setattr(problems, "SAMPLE_PAIRS", 20 * case.n)
    problem = problems.make_problem(case)
    assert len(problem.rows) == 20
    assert problem.query.abs().argmax() in problem.rows  # the sharpest query is looked at
    torch.testing.assert_close(
        problem.dense(torch.float64)["out"], problem.picked(everything)["out"]
    )
    # Gradients of the loss on these rows, through a provider that knows nothing of samples.
    double = problems.make_problem(replace(case, dtype="float64"))
    naive = providers.table()["naive"].build(double)
    assert accuracy.Judge(double).judge(measure.result_for_check(double, naive)).passed


# -- the accuracy gate --------------------------------------------------------------------------


def test_no_speedup_without_a_passed_accuracy_check():
    rows = [
        row("sdpa", 4.0),
        row("sdpa padded", 2.0),
        row("boltzattn direct (cpu)", 1.0),
        row("boltzattn transform (cpu)", 0.1, max_error=1e-3),
        row("pykeops", 0.1, max_error=math.nan),
        row("nystrom", 0.1, kind="approximate", max_error=0.3),
        row("clone", 0.01, kind="yardstick", max_error=None),
    ]
    results.fill_ratios(Case(1024), rows)
    ratios = {r.provider: r.speedup for r in rows}
    assert ratios == {
        "sdpa": 0.5,
        "sdpa padded": 1.0,
        "boltzattn direct (cpu)": 2.0,
        "boltzattn transform (cpu)": None,
        "pykeops": None,
        "nystrom": None,
        "clone": None,
    }
    text = report.table([Record(HERE, Case(1024), r) for r in rows])
    line = {words[1]: words for words in map(str.split, text.splitlines()) if len(words) > 5}
    (wrong,) = [s for s in text.splitlines() if "transform" in s]
    assert "x" not in wrong.split("ms")[-1]
    assert "!1.0e-03" in wrong
    assert "approx." in line["nystrom"]


def test_an_inaccurate_baseline_stays_the_baseline():
    rows = [row("sdpa", 4.0), row("sdpa padded", 2.0, max_error=1.0), row("naive", 1.0)]
    results.fill_ratios(Case(1024), rows)
    assert (rows[2].baseline, rows[2].speedup) == ("sdpa padded", 2.0)
    assert rows[1].speedup is None


def test_a_target_is_not_met_by_a_wrong_result():
    target = targets.Target(
        "t", ((targets.Term(Case(8), "clone"), targets.Term(Case(8), targets.DIRECT)),), at_least=2
    )
    clone = record("clone", 4.0, n=8, kind="yardstick")
    assert target.met([clone]) is None
    assert target.met([clone, record(targets.DIRECT, 1.0, n=8)]) is True
    assert target.met([clone, record(targets.DIRECT, 3.0, n=8)]) is False
    assert target.met([clone, record(targets.DIRECT, 1.0, n=8, max_error=1.0)]) is None


# -- extrapolation ------------------------------------------------------------------------------


def test_extrapolation_is_marked_and_never_stored(tmp_path):
    records = [
        record("sdpa padded", 0.5, n=1024),
        record("sdpa padded", 2.0, n=2048),
        record("sdpa padded", None, n=8192, reason="one call would take about 32 s"),
        record("boltzattn transform (cpu)", 0.01, n=8192),
    ]
    assert extrapolation.estimate(records, records[2]) == 2.0 * 16  # n^2 from n = 2048
    assert extrapolation.best_baseline(records, Case(8192)) == (32.0, True)
    assert extrapolation.estimate(records, records[1]) is None  # measured
    assert extrapolation.estimate(records[2:], records[2]) is None  # from nothing

    text = report.table(records)
    assert "~32.0 s" in text
    assert "~3,200x" in text
    assert "~ " in report.LEGEND
    assert "~32.0 s" in plot.speedup_table(records, "forward")

    path = tmp_path / "x.csv"
    results.save(path, records)
    (line,) = [s for s in path.read_text().splitlines() if ",8192," in s and "sdpa" in s]
    assert TOO_SLOW in line
    stored = results.load(path)[2].row
    assert (stored.median_s, stored.speedup, stored.tokens_per_s) == (None, None, None)


# -- CSV and resuming ---------------------------------------------------------------------------


def test_csv_round_trip(tmp_path):
    records = [
        Record(HERE, Case(8, causal=True, sharpness=0.1, threads=1), row("naive", 1.25)),
        Record(HERE, Case(9, dim=4, level="layer"), row("linear", None, reason='a "b", c')),
    ]
    path = tmp_path / "deep" / "x.csv"
    results.save(path, records)
    assert results.load(path) == records
    assert path.read_text().splitlines()[0] == ",".join(results.COLUMNS)
    assert len(set(results.COLUMNS)) == len(results.COLUMNS)
    assert [p.name for p in path.parent.iterdir()] == ["x.csv"]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="another version"):
        results.load(path)


def test_rows_are_keyed_by_machine_commit_versions_case_and_provider():
    base = record("naive")
    others = [
        *(
            Record(replace(HERE, **{name: "other"}), base.case, base.row)
            for name in ("machine", "commit", "torch", "python")
        ),
        record("sdpa"),
        record("naive", n=8),
    ]
    assert len({r.key for r in [base, *others]}) == 1 + len(others)


@pytest.fixture
def counted(monkeypatch):
    """`measure.measure` replaced by one that counts its calls."""
    calls = []

    def fake(entries, effort, cores, progress):
        calls.extend(entry.case for entry in entries)
        missing = row("pykeops", None, status=SKIPPED)
        return {e.case: [*(row(name) for name in cli.able(e)), missing] for e in entries}

    monkeypatch.setattr(measure, "measure", fake)
    return calls


def test_a_second_run_measures_nothing_and_a_new_commit_everything(counted, tmp_path):
    grid = [Entry(Case(n), ("naive", "sdpa")) for n in (8, 16)]
    path = tmp_path / "x.csv"
    first = cli.run(grid, HERE, [], path, INSTANT)
    assert counted == [Case(8), Case(16)]
    again = cli.run(grid, HERE, results.load(path), path, INSTANT)
    assert len(counted) == 2
    assert again == first
    later = replace(HERE, commit="def")
    cli.run(grid, later, results.load(path), path, INSTANT)
    assert len(counted) == 4
    assert {r.environment for r in results.load(path)} == {HERE, later}


def test_an_interrupted_run_keeps_what_it_has(counted, tmp_path, monkeypatch):
    grid = [Entry(Case(n), ("naive",)) for n in (8, 16)]
    path, whole = tmp_path / "x.csv", measure.measure

    def interrupted(entries, effort, cores, progress):
        if entries[0].case.n == 16:
            raise KeyboardInterrupt
        return whole(entries, effort, cores, progress)

    monkeypatch.setattr(measure, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cli.run(grid, HERE, [], path, INSTANT)
    monkeypatch.setattr(measure, "measure", whole)
    cli.run(grid, HERE, results.load(path), path, INSTANT)
    assert counted == [Case(8), Case(16)]


def test_two_runs_are_compared_row_by_row(tmp_path, capsys):
    times = {
        "naive": (1.0, 1.14),
        "sdpa": (1.2, 1.0),
        "clone": (1e-4, 9e-4),
        "pykeops": (1.0, None),
    }
    for run in range(2):
        records = [record(name, both[run]) for name, both in times.items()]
        results.save(tmp_path / f"{run}.csv", records)
    paths = [str(tmp_path / f"{run}.csv") for run in range(2)]
    assert compare.main(paths) == 1
    apart, count = capsys.readouterr().out.splitlines()
    assert apart.split()[:4] == ["20%", "1200", "and", "1000"]
    assert apart.endswith("sdpa")
    assert count == "1 of 2 medians above 1 ms agree within 15%"  # one too short, one not measured
    assert compare.main(paths[:1] * 2) == 0


def test_a_case_is_measured_again_as_a_whole_when_a_provider_is_new():
    entry = Entry(Case(8))
    known = [
        Record(HERE, entry.case, row("naive")),
        Record(HERE, entry.case, row("sdpa", None, status=FAILED)),
        Record(HERE, entry.case, row("pykeops", None, status=SKIPPED)),
    ]
    assert results.is_done(entry, HERE, known, ["naive", "sdpa"])
    assert not results.is_done(entry, HERE, known, ["naive", "sdpa", "pykeops"])
    fresh = [Record(HERE, entry.case, row("pykeops"))]
    other = record("naive", n=99)
    assert results.replace_case([*known, other], fresh) == [other, *fresh]


# -- the grids ----------------------------------------------------------------------------------


def test_every_target_is_a_row_of_the_full_grid():
    grid = {entry.case: entry for entry in cases.full()}
    for target in targets.targets():
        for term in (t for pair in target.pairs for t in pair if t is not None):
            assert term.case in grid, (target.claim, term.case.label)
            prefixes = grid[term.case].providers
            assert term.column in results.COLUMNS
            for name in term.providers:
                assert not prefixes or name.startswith(prefixes), (target.claim, name)
                if not name.startswith("boltzattn transform"):  # a method, not in every version
                    assert term.case.level in providers.table()[name].levels


def test_a_quick_run_shows_values_without_verdicts():
    names = ("sdpa", "sdpa padded", targets.DIRECT)
    records = [
        Record(HERE, Case(4096, 8), row(name, s)) for name, s in zip(names, (3, 2, 1), strict=True)
    ]
    assert [
        line.split()[-1] for line in report.target_table(records, judge=False).splitlines()
    ] == [
        "value",
        "2x",
    ]
    judged = report.target_table(records).splitlines()
    assert len(judged) == 1 + len(list(targets.targets()))
    assert sum(line.endswith("met") for line in judged) == 1
    assert not any(line.endswith("missed") for line in judged)


def test_a_target_without_a_bound_is_not_judged():
    copy = targets.Target("t", ((targets.Term(Case(8), targets.DIRECT, "clone_fraction"), None),))
    records = [record(targets.DIRECT, n=8, clone_fraction=0.3)]
    assert (copy.worst(records), copy.met(records), copy.bound) == (0.3, None, "")


def test_grids_have_no_duplicates_and_labels_tell_cases_apart():
    for grid in (list(cases.quick()), list(cases.full())):
        assert len({e.case for e in grid}) == len(grid)
        assert len({e.case.label for e in grid}) == len(grid)


def test_the_quick_grid_has_the_rows_of_some_claims():
    """Speed and memory of `direct`; speed, memory and bandwidth of `transform`."""
    grid = {entry.case: entry.providers for entry in cases.quick()}

    def decided(target):
        terms = [t for pair in target.pairs for t in pair if t is not None]
        return all(
            t.case in grid and any(n.startswith(grid[t.case]) for n in t.providers) for t in terms
        )

    claims = [t.claim for t in targets.targets() if decided(t)]
    assert sum(claim.startswith("direct") for claim in claims) == 4
    assert sum(claim.startswith("transform") for claim in claims) >= 4


def test_only_keeps_the_baselines():
    grid = [Entry(Case(8)), Entry(Case(16)), Entry(Case(16, dim=4, level="layer"))]
    (entry,) = cli.only(grid, "n=8 .*direct")
    names = providers.taking_part(entry.case, entry.providers)
    assert {"sdpa", "sdpa padded", "clone", "boltzattn direct (cpu)"} <= set(names)
    assert not {"naive", "pykeops"} & set(names)
    assert len(list(cli.only(grid, "n=16"))) == 2
    assert not list(cli.only(grid, "no such thing"))


def test_a_case_that_makes_no_sense_is_refused():
    for wrong in ({"level": "model"}, {"passes": "sideways"}, {"level": "layer"}, {"dim": 4}):
        with pytest.raises(ValueError, match=r"must be one of|dim is for"):
            Case(8, **wrong)


# -- real measurements, small -------------------------------------------------------------------


def test_children_answer_fail_and_die():
    assert child.run(math.sqrt, 4.0) == 2.0
    with pytest.raises(child.ChildError, match="ValueError: math domain error"):
        child.run(math.sqrt, -1.0)
    with pytest.raises(child.ChildError, match="exit code 3"):
        child.run(os._exit, 3)


def measured(entry, effort):
    """Rows of one case by provider."""
    rows = measure.measure([entry], effort, Cores(), lambda entry, done: None)
    return {r.provider: r for r in rows[entry.case]}


def count_down(start):
    yield from range(start, 0, -1)
    return "lift-off"


def test_children_run_step_by_step():
    twins = [child.Child(count_down, 2) for _ in range(2)]
    assert [twin.step() for twin in twins] == [(False, 2)] * 2
    assert [twins[0].step() for _ in range(2)] == [(False, 1), (True, "lift-off")]
    assert twins[1].step() == (False, 1)
    twins[1].stop()
    with pytest.raises(child.ChildError, match="exit code"):
        twins[1].step()


def test_cases_take_turns(monkeypatch):
    """A slow minute is a few samples of every row: no case is done before another has begun."""
    entries = [Entry(Case(n, dv=4), ("naive", "boltzattn direct")) for n in (8, 16, 24)]
    effort = measure.Effort(0.02, longest_call_s=9, sample_s=1e-4)
    seen = []
    rows = measure.measure(entries, effort, Cores(), lambda e, done: seen.append((e.case.n, done)))
    assert [case.n for case in rows] == [8, 16, 24]
    assert all(row.samples >= 3 for found in rows.values() for row in found if row.measured)
    assert {n for n, _ in seen[: len(entries)]} == {8, 16, 24}
    last = {n: at for at, (n, _) in enumerate(seen)}
    assert min(last.values()) > len(seen) / 2
    assert all(done == 1 for n, done in (seen[at] for at in last.values()))


def test_a_case_that_dies_costs_its_own_rows_only(monkeypatch):
    entries = [Entry(Case(n, dv=4), ("naive",)) for n in (8, 16)]
    whole = child.Child.step

    def step(self):
        if self is doomed[0]:
            self.stop()
        return whole(self)

    doomed = []
    start = child.Child.__init__

    def remember(self, *arguments):
        start(self, *arguments)
        doomed.append(self)

    monkeypatch.setattr(child.Child, "__init__", remember)
    monkeypatch.setattr(child.Child, "step", step)
    first, second = measure.measure(entries, INSTANT, Cores(), lambda entry, done: None).values()
    assert first[0].status == FAILED
    assert "exit code" in first[0].reason
    assert second[0].measured


def test_measuring_a_case_fills_every_cell():
    entry = Entry(Case(256, passes="both"), cases.BASIC)
    rows = measured(entry, INSTANT)
    for name in ("naive", "sdpa", "sdpa padded"):
        got = rows[name]
        assert got.status == MEASURED, got.reason
        assert got.samples == 3
        assert got.median_s > 0
        assert 0 < got.max_error < 1e-4
        assert got.rms_error < got.max_error
        assert got.clone_fraction > 0
        assert got.extra_mb >= 0
    assert rows["clone"].max_error is None
    served = [r for name, r in rows.items() if name.startswith("boltzattn direct") and r.measured]
    assert len(served) == 1
    assert served[0].accurate


def page_faults(fresh_pages):
    """The fewest of several allocations of 64 MB, after others of that size were freed.

    A single allocation may grow the heap if a small block was placed into the freed one.
    """
    measure.settle_allocator(fresh_pages)
    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(2**24).add_(1)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults[3:])


@pytest.mark.skipif(glibc_mallopt() is None, reason="needs glibc's allocator")
def test_freed_memory_is_used_again_unless_fresh_pages_are_asked_for():
    assert child.run(page_faults, False) < 100
    assert child.run(page_faults, True) > 20  # a fault may bring 2 MB


def test_fresh_pages_are_not_claimed_where_there_are_none(monkeypatch):
    monkeypatch.setattr(providers, "glibc_mallopt", lambda: None)
    assert all(providers.taking_part(Case(8, fresh_pages=True), ("naive", "sdpa")).values())
    assert providers.taking_part(Case(8), ("naive",)) == {"naive": None}


def test_a_baseline_that_was_not_asked_is_no_slower_one():
    faster = targets._faster("t", Case(1024), targets.DIRECT, at_least=2)
    ours = record(targets.DIRECT, 1.0)
    assert faster.met([ours, record("sdpa", 3.0)]) is None
    assert faster.met([ours, record("sdpa", 3.0), record("sdpa padded", 1.5)]) is False
    assert faster.met([ours, record("sdpa", 3.0), record("sdpa padded", None)]) is True


def test_peak_memory_is_that_of_one_call():
    """naive keeps logits and weights, n^2 numbers each; the result is not counted as extra."""
    n, mb = 2048, 2**20
    matrix = n * n * 4 / mb
    _, extra = child.run(measure._memory, Case(n), "naive")
    assert 2 * matrix <= extra + 1 < 4 * matrix  # counters of the kernel lag by up to 1 MB
    wide = Case(n, dv=4096)  # the result is 32 MB
    peak, extra = child.run(measure._memory, wide, "clone")
    assert peak == pytest.approx(n * 4096 * 4 / mb, abs=2)
    assert extra < 2


def test_what_takes_too_long_or_too_much_is_not_started(monkeypatch):
    entry = Entry(Case(16_384), ("naive", "sdpa padded"))
    monkeypatch.setattr(measure, "available_memory", lambda: 2**30)
    hasty = measure.Effort(seconds_per_provider=0.0, longest_call_s=1e-3)
    rows = measured(entry, hasty)
    assert rows["naive"].status == results.TOO_LARGE
    assert rows["naive"].reason == "its n x n matrices do not fit into memory"
    assert rows["sdpa padded"].status == TOO_SLOW
    assert "one call would take" in rows["sdpa padded"].reason
    assert rows["sdpa padded"].median_s is None


# -- figures ------------------------------------------------------------------------------------


def test_slopes_and_figures_come_from_the_csv_alone(tmp_path):
    records = []
    for n in (256, 1024, 4096):
        for name, seconds in (("naive", 1e-8 * n**2), ("sdpa", 2e-8 * n**2), ("clone", 1e-9 * n)):
            kind = "yardstick" if name == "clone" else "exact"
            records.append(record(name, seconds, n=n, kind=kind))
    results.save(tmp_path / "x.csv", records)
    series = {s.name: s for s in plot.scaling_series(records, "forward")}
    assert series["naive"].slope == pytest.approx(2.0)
    assert series["clone"].slope == pytest.approx(1.0)
    assert plot.main([str(tmp_path / "x.csv"), "--out", str(tmp_path / "out")]) == 0
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {
        "scaling.png",
        "scaling-dark.png",
        "accuracy.png",
        "accuracy-dark.png",
        "tables.md",
    }
    assert (
        "| 4,096 | 168 ms (2.00x) | 336 ms (1.00x) |"
        in (tmp_path / "out" / "tables.md").read_text()
    )


@pytest.mark.parametrize("wanted", [[0.5, 0.5, 0.5], [0.99, 1.0, 1.0], [0.0, 0.01, 0.9], [0.2]])
def test_labels_are_pushed_apart_and_stay_inside(wanted):
    heights = plot.spread_out(wanted, gap=0.05)
    assert all(b - a >= 0.05 - 1e-9 for a, b in itertools.pairwise(heights))
    assert max(heights) <= 1.0
    assert heights == sorted(heights)
