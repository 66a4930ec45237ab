"""One function that measures a case: time, accuracy, memory, all providers in turn."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench import child, providers
from bench.accuracy import Judge
from bench.cases import Case, Entry
from bench.environment import available_memory
from bench.problems import LayerProblem, Problem, make_problem
from bench.providers import Bound, Provider
from bench.results import FAILED, MEASURED, SKIPPED, TOO_LARGE, TOO_SLOW, Row, fill_ratios

StopWatch = Callable[[Callable[[], object], int], list[float]]  # seconds of each of some calls
PROBE_N = 2048  # large enough to be quadratic, small enough to cost nothing
MB = 2**20


@dataclass(frozen=True)
class Effort:
    """How long to measure. A provider gets samples until its share is used up, but at least 3.

    A sample is the fastest of the calls that fit into `sample_s`: what else the machine does can
    only add time. Of long calls 2 are enough: what disturbs them averages out within each.
    """

    seconds_per_provider: float
    longest_call_s: float
    most_samples: int = 60
    sample_s: float = 5e-3
    long_call_s: float = math.inf

    def least_samples(self, call_s: float) -> int:
        return 3 if call_s <= self.long_call_s else 2


QUICK = Effort(seconds_per_provider=0.8, longest_call_s=3.0, long_call_s=1.0)
FULL = Effort(seconds_per_provider=1.0, longest_call_s=4.0, long_call_s=1.0)


def measure(entry: Entry, effort: Effort) -> list[Row]:
    """All rows of a case, those of providers that cannot take part included.

    Timing happens in one fresh process, where providers take turns, so that noise hits them alike;
    memory in one fresh process for each provider.
    """
    case, rows, able = entry.case, [], []
    for name, reason in providers.taking_part(case, entry.providers).items():
        provider = providers.table()[name]
        row = Row(name, provider.kind, provider.growth, SKIPPED, reason or "")
        rows.append(row)
        needed = provider.matrices(case) * case.batch * case.heads * case.n**2
        needed *= getattr(torch, case.dtype).itemsize
        if reason is None and case.device == "cpu" and needed > available_memory() / 2:
            row.status, row.reason = TOO_LARGE, "its n x n matrices do not fit into memory"
        elif reason is None:
            able.append(row)

    limit = effort.longest_call_s * entry.patience
    try:
        timed = child.run(_time_in_turns, case, able, effort, limit)
    except child.ChildError as error:
        timed = able
        for row in timed:
            row.status, row.reason = FAILED, str(error).splitlines()[-1]
    by_name = {row.provider: row for row in timed}
    rows = [by_name.get(row.provider, row) for row in rows]
    for row in rows:
        if row.measured and row.kind != "yardstick":
            with contextlib.suppress(child.ChildError):  # leaves the cells empty
                row.peak_mb, row.extra_mb = child.run(_memory, case, row.provider)
    fill_ratios(case, rows)
    return rows


def _time_in_turns(case: Case, rows: list[Row], effort: Effort, limit: float) -> list[Row]:
    """Fill in time and accuracy. Runs in a child."""
    settle_allocator()
    if case.threads:
        torch.set_num_threads(case.threads)
    seconds = cuda_seconds if case.device == "cuda" else cpu_seconds
    problem = make_problem(case)
    judges: dict[int, Judge] = {}  # by the weights of a layer, which its provider may choose
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

    samples = take_turns(calls, effort, seconds)
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
) -> dict[str, list[float]]:
    """Seconds per call of each, sampled in rounds whose order rotates."""
    repeats, samples, spent, least = {}, {}, {}, {}
    for name, call in calls.items():
        [spent[name]] = seconds(call, 1)
        least[name] = effort.least_samples(spent[name])
        repeats[name] = max(1, math.ceil(effort.sample_s / max(spent[name], 1e-9)))
        # A long call needs no warm-up beyond that of the accuracy check; a short one has it here.
        samples[name] = [spent[name]] if repeats[name] == 1 else []
    for turn in range(effort.most_samples):
        waiting = [
            name
            for name in calls
            if len(samples[name]) < least[name] or spent[name] < effort.seconds_per_provider
        ]
        if not waiting:
            break
        shift = turn % len(waiting)
        for name in waiting[shift:] + waiting[:shift]:
            if repeats[name] > 1:
                seconds(calls[name], 1)  # a short call would be timed with its neighbour's caches
            took = seconds(calls[name], repeats[name])
            spent[name] += sum(took)
            samples[name].append(min(took))
    return samples


def fill_times(row: Row, samples: Sequence[float], case: Case) -> None:
    """Median, interquartile spread and throughput."""
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    row.status, row.samples = MEASURED, len(samples)
    row.median_s, row.fastest_s = median, min(samples)
    row.spread = (high - low) / median
    row.tokens_per_s = case.batch * case.n / median


def predict(provider: Provider, case: Case, seconds: StopWatch) -> float:
    """Seconds that one call should take, from a call at PROBE_N; 0 for cases not longer than it."""
    if case.n <= PROBE_N:
        return 0.0
    problem = make_problem(replace(case, n=PROBE_N))
    call = timed_call(problem, provider.build(problem))
    call()
    return min(seconds(call, 2)) * (case.n / PROBE_N) ** provider.growth


def timed_call(problem: Problem, bound: Bound) -> Callable[[], object]:
    """What is timed: forward, backward alone on a kept graph, or both."""
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
    """The full output, and gradients of a loss that sees the sampled rows only."""
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
    """Time on the device between two events, with the L2 cache flushed before each call."""
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


def settle_allocator() -> None:
    """Put glibc's allocator where a long-running program has it.

    It learns from the sizes it sees whether a freed block goes back to the system (and costs page
    faults next time); left to itself, the rows of a table would depend on the order of calls.
    These are the largest values it learns: blocks from 32 MB on are fresh pages, others reused.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        libc.mallopt(mmap_threshold, 32 * MB)
        libc.mallopt(trim_threshold, 64 * MB)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _memory(case: Case, name: str) -> tuple[float, float]:
    """Peak MB of one call above its inputs, and that without its results. Runs in a child."""
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
    """Memory held now, with the peak forgotten where the kernel lets us."""
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
    """Largest resident size so far, kept by the kernel: nothing is missed between samples."""
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
    """A rough guess for the progress bar; it corrects itself by the time really spent."""
    case, longest = entry.case, effort.longest_call_s * entry.patience
    pairs = case.batch * case.heads * case.n**2 * (3 if case.backward else 1)
    total = 1.0
    for name in able:
        call = 5e-9 * pairs if providers.table()[name].growth > 1 else 1e-7 * case.n
        if call > longest:
            total += 0.2
        else:
            total += 0.2 + max(5 * call, min(effort.seconds_per_provider, 60 * call))
    return total
