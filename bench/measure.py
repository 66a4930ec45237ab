"""Measure time, accuracy and memory of all providers of a case."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench import child, providers
from bench.accuracy import Judge
from bench.cases import Case, Entry
from bench.cores import Cores, StopWatch
from bench.environment import available_memory, glibc_mallopt
from bench.problems import LayerProblem, Problem, make_problem
from bench.providers import Bound, Provider
from bench.results import FAILED, MEASURED, SKIPPED, TOO_LARGE, TOO_SLOW, Row, fill_ratios

PROBE_N = 2048  # large enough for quadratic growth, small enough to be cheap
MB = 2**20


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    A sample is the fastest of the calls that fit into `sample_s`, of at least 2 calls: other load
    on the machine can only add time. A call longer than `long_call_s` is a sample of its own. A
    provider gets samples until `seconds_per_provider` is used up, and at least `least_samples`.
    """

    seconds_per_provider: float
    longest_call_s: float
    sample_s: float = 0.01
    least_samples: int = 3
    long_call_s: float = 1.0
    least_long_samples: int = 2
    waiting_s: float = 0.0  # how long one call of `measure` may wait for the cores
    together: bool = False  # whether cases take turns; otherwise they run one after the other

    def repeats(self, call_s: float) -> int:
        return 1 if call_s > self.long_call_s else max(2, math.ceil(self.sample_s / call_s))

    def done(self, samples: int, spent: float, call_s: float) -> float:
        """How much of a provider's share is measured; 1 is all of it."""
        least = self.least_long_samples if call_s > self.long_call_s else self.least_samples
        return min(spent / max(self.seconds_per_provider, 1e-9), samples / least)


QUICK = Effort(
    seconds_per_provider=0.4,
    longest_call_s=3.0,
    least_samples=5,
    long_call_s=0.3,
    least_long_samples=3,
    waiting_s=30.0,
    together=True,
)
FULL = Effort(seconds_per_provider=0.5, longest_call_s=4.0, least_long_samples=3, waiting_s=3.0)


def measure(
    entries: Sequence[Entry],
    effort: Effort,
    cores: Cores,
    progress: Callable[[Entry, float], None],
) -> dict[Case, list[Row]]:
    """All rows of some cases, including those of providers that cannot run them.

    Each case is timed in a fresh process, in which the providers take turns, so that noise affects
    all of them alike. The processes take turns too: a slow minute then costs a few samples of every
    row instead of all samples of a few rows. Memory is measured in a fresh process per provider.
    `progress(entry, share that is done)` is called after every step.
    """
    rows = {entry.case: _candidates(entry) for entry in entries}
    cores.allow(effort.waiting_s)
    children = {
        entry: child.Child(
            _time_in_turns,
            entry.case,
            [row for row in rows[entry.case] if not row.status],
            effort,
            effort.longest_call_s * entry.longest_factor,
            cores,
        )
        for entry in entries
    }
    done = dict.fromkeys(entries, -1.0)  # not begun
    try:
        while done:
            entry = min(done, key=done.__getitem__)  # the least advanced: all end together
            try:
                finished, answer = children[entry].step()
            except child.ChildError as error:
                finished, answer = True, [row for row in rows[entry.case] if not row.status]
                for row in answer:
                    row.status, row.reason = FAILED, str(error).splitlines()[-1]
            if finished:
                del done[entry]
                by_name = {row.provider: row for row in answer}
                rows[entry.case] = [by_name.get(r.provider, r) for r in rows[entry.case]]
            else:
                done[entry] = answer
            progress(entry, done.get(entry, 1.0))
    finally:
        for entry in done:
            children[entry].stop()
    for case, found in rows.items():
        for row in found:
            _fill_memory(case, row)
        fill_ratios(case, found)
    return rows


def _fill_memory(case: Case, row: Row) -> None:
    if row.measured and row.kind != "yardstick":
        with contextlib.suppress(child.ChildError):  # the cells stay empty
            row.peak_mb, row.extra_mb = child.run(_memory, case, row.provider)


def _candidates(entry: Entry) -> list[Row]:
    """A row for every provider; those that cannot run the case already have a status."""
    case, rows = entry.case, []
    for name, reason in providers.taking_part(case, entry.providers).items():
        provider = providers.table()[name]
        row = Row(name, provider.kind, provider.growth, SKIPPED if reason else "", reason or "")
        rows.append(row)
        needed = provider.matrices(case) * case.batch * case.heads * case.n**2
        needed *= getattr(torch, case.dtype).itemsize
        if reason is None and case.device == "cpu" and needed > available_memory() / 2:
            row.status, row.reason = TOO_LARGE, "its n x n matrices do not fit into memory"
    return rows


def _time_in_turns(
    case: Case, rows: list[Row], effort: Effort, limit: float, cores: Cores
) -> Generator[float, None, list[Row]]:
    """Fill in time and accuracy. Runs in a child; yields the share that is done every round."""
    settle_allocator(case.fresh_pages)
    if case.threads:
        torch.set_num_threads(case.threads)
    seconds = cuda_seconds if case.device == "cuda" else cores.watch(cpu_seconds)
    problem = make_problem(case)
    judges: dict[int, Judge] = {}  # by weights: a provider of a layer may have its own
    calls: dict[str, Callable[[], object]] = {}
    least = problem.least_bytes()
    for row in rows:
        provider = providers.table()[row.provider]
        try:
            expected = predict(provider, case, seconds) if provider.growth > 1 else 0.0
            if expected > limit:
                row.status = TOO_SLOW
                row.reason = f"one call would take longer than {limit:g} s"
                continue
            bound = provider.build(problem)
            if provider.kind != "yardstick":
                if id(bound.weights) not in judges:
                    judges[id(bound.weights)] = Judge(problem, bound.weights)
                result = result_for_check(problem, bound)
                accuracy = judges[id(bound.weights)].judge(result, provider.certified)
                del result
                row.worst_tensor, row.allowed_error = accuracy.tensor, accuracy.allowed
                row.max_error, row.rms_error = accuracy.max_error, accuracy.rms_error
            calls[row.provider] = timed_call(problem, bound)
        except Exception as error:
            row.status, row.reason = FAILED, f"{type(error).__name__}: {_first_line(error)}"
    judges.clear()

    samples = yield from take_turns(calls, effort, seconds)
    for row in rows:
        if row.provider in samples:
            fill_times(row, samples[row.provider], case)
    clone = next((r for r in rows if r.provider == "clone" and r.measured), None)
    for row in rows:
        if row.measured and clone is not None and row is not clone:
            clone_bytes_per_s = 2 * problem.bulk.nbytes / clone.seconds
            row.clone_fraction = least / row.seconds / clone_bytes_per_s
    return rows


def take_turns(
    calls: dict[str, Callable[[], object]],
    effort: Effort,
    seconds: StopWatch,
) -> Generator[float, None, dict[str, list[float]]]:
    """Seconds per call of each, sampled in rounds whose order rotates.

    Yields the share that is done after every round.
    """
    fastest, samples, spent = {}, {}, {}
    for name, call in calls.items():
        [fastest[name]] = seconds(call, 1)
        # The accuracy check has warmed up a long call.
        samples[name] = [fastest[name]] if effort.repeats(fastest[name]) == 1 else []
        spent[name] = sum(samples[name])
    turn = 0
    while True:
        done = {name: effort.done(len(samples[name]), spent[name], fastest[name]) for name in calls}
        waiting = [name for name in calls if done[name] < 1]
        if not waiting:
            return samples
        yield min(done.values())
        shift = turn % len(waiting)
        turn += 1
        for name in waiting[shift:] + waiting[:shift]:
            took = seconds(calls[name], effort.repeats(fastest[name]))
            spent[name] += sum(took)
            samples[name].append(min(took))
            fastest[name] = min(fastest[name], min(took))  # the first call may have been slow


def fill_times(row: Row, samples: Sequence[float], case: Case) -> None:
    """Fill in median, interquartile range and throughput."""
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    row.status, row.samples = MEASURED, len(samples)
    row.median_s, row.fastest_s = median, min(samples)
    row.spread = (high - low) / median
    row.tokens_per_s = case.batch * case.n / median


def predict(provider: Provider, case: Case, seconds: StopWatch) -> float:
    """Expected seconds of one call, from a call at PROBE_N; 0 for cases that are not longer."""
    if case.n <= PROBE_N:
        return 0.0
    problem = make_problem(replace(case, n=PROBE_N))
    call = timed_call(problem, provider.build(problem))
    call()
    return min(seconds(call, 2)) * (case.n / PROBE_N) ** provider.growth


def timed_call(problem: Problem, bound: Bound) -> Callable[[], object]:
    """The function to time: forward, backward on a retained graph, or both."""
    passes, leaves, forward = problem.case.passes, bound.leaves, bound.forward
    if passes == "forward" or not leaves:

        def call() -> None:
            with torch.no_grad():
                forward()

    elif passes == "both":

        def call() -> None:
            torch.autograd.grad(forward(), leaves, problem.dout)

    else:
        out = forward()

        def call() -> None:
            torch.autograd.grad(out, leaves, problem.dout, retain_graph=True)

    return call


def result_for_check(problem: Problem, bound: Bound) -> dict[str, Tensor]:
    """The full output, and the gradients of a loss on the sampled rows."""
    if not problem.case.backward:
        with torch.no_grad():
            return {"out": bound.forward()}
    out = bound.forward()
    dout = torch.zeros_like(problem.dout)
    axis = 1 if isinstance(problem, LayerProblem) else 2
    dout.index_copy_(axis, problem.rows, problem.sampled_dout())
    grads = torch.autograd.grad(out, bound.leaves, dout)
    checked = dict(zip(problem.checked, grads, strict=False))  # weights come after x
    return {"out": out.detach(), **checked}


def cpu_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    took = []
    with _no_garbage_collection():
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            took.append(time.perf_counter() - start)
    return took


def cuda_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Device time between two events, with the L2 cache flushed before each call."""
    flush = torch.empty(256 * MB, dtype=torch.int8, device="cuda")
    took = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        took.append(start.elapsed_time(end) * 1e-3)
    return took


def settle_allocator(fresh_pages: bool) -> None:
    """Set what glibc does with freed memory, so that rows do not depend on the order of calls.

    By default it keeps freed memory and uses it again, as caching allocators do, so that the time
    does not include zeroing pages. With `fresh_pages` it returns blocks of 32 MB or more to the
    system, which is what its default settings lead to. Other allocators are not changed.
    """
    mallopt = glibc_mallopt()
    if mallopt is None:
        return
    trim_threshold, mmap_threshold, mmap_max, arena_max = -1, -3, -4, -8
    if fresh_pages:
        mallopt(mmap_threshold, 32 * MB)
        mallopt(trim_threshold, 64 * MB)
    else:
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)  # never
        mallopt(arena_max, 1)  # only the main heap grows without mmap


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _memory(case: Case, name: str) -> tuple[float, float]:
    """Peak MB of one call above its inputs, and above inputs and results. Runs in a child."""
    if case.threads:
        torch.set_num_threads(case.threads)
    provider = providers.table()[name]
    tiny = make_problem(replace(case, n=min(case.n, 64)))
    timed_call(tiny, provider.build(tiny))()  # starts thread pools, loads libraries
    problem = make_problem(case)
    bound = provider.build(problem)
    if provider.compiles:
        timed_call(problem, bound)()
    if case.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resident_bytes()
    results = _results(problem, bound)
    if case.device == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        peak = peak_bytes() - before
    return peak / MB, max(0, peak - sum(x.nbytes for x in results)) / MB


def _results(problem: Problem, bound: Bound) -> list[Tensor]:
    if not problem.case.backward:
        with torch.no_grad():
            return [bound.forward()]
    out = bound.forward()
    return [out, *torch.autograd.grad(out, bound.leaves, problem.dout)]


def resident_bytes() -> int:
    """Resident memory; also resets the kernel's peak counter where that is allowed."""
    gc.collect()
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak_bytes()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    """Peak resident memory, as recorded by the kernel."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def expected_seconds(entry: Entry, able: Sequence[str], effort: Effort) -> float:
    """A rough guess for the progress bar."""
    case, longest = entry.case, effort.longest_call_s * entry.longest_factor
    pairs = case.batch * case.heads * case.n**2 * (3 if case.backward else 1)
    total = 1.0
    for name in able:
        call = 5e-9 * pairs if providers.table()[name].growth > 1 else 1e-7 * case.n
        if call > longest:
            total += 0.2
        else:
            total += 0.2 + max(5 * call, min(effort.seconds_per_provider, 60 * call))
    return total
