"""Measure context parallelism and streaming, each against an alternative in the same run.

* Context parallelism: two gloo processes with one thread each, forward over n tokens per process.
  The ideal is the same work without communication: both processes run at the same time, each on its
  own tokens, with `attention` or with `distributed.attention` in a group of one, whichever is
  faster. The order changes from round to round, because the first call after large tensors were
  freed pays for fresh pages.
* Bytes communicated per head and call, at two lengths.
* Constants for docs/scaling_model.py, in CPU time of one thread.
* Streaming: tokens appended and queried in blocks, against attention over a growing cache of keys
  and values, timed at a few lengths and extrapolated linearly. In CPU time of one thread, which
  depends less on other load.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import boltzattn
import torch
import torch.distributed as dist
import torch.nn.functional as F

DV = 64
RUNS = 9


def seconds(call: Callable[[], Any]) -> float:
    """CPU time of a call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def draw(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.rand(1, n, width, generator=generator) * 6 - 3 for width in (1, 1, DV))
    # The same range of logits at every n, so that the volumes can be compared.
    q[0, :2, 0] = k[0, :2, 0] = torch.tensor([-3.0, 3.0])
    return q, k, v


def _process(rank: int, folder: str, n: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    own = [dist.new_group([r]) for r in range(2)][rank]
    q, k, v = draw(n, rank)
    contenders: list[tuple[str, Callable[[], Any]]] = [
        ("alone, attention", lambda: boltzattn.attention(q, k, v)),
        ("alone, in stages", lambda: boltzattn.distributed.attention(q, k, v, group=own)),
        ("together", lambda: boltzattn.distributed.attention(q, k, v)),
    ]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in contenders}
    for round_ in range(-1, RUNS):
        first = round_ % len(contenders)
        for name, attend in contenders[first:] + contenders[:first]:
            dist.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            attend()
            worked = time.process_time() - worked
            dist.barrier()  # the slower process counts
            if round_ >= 0:  # round -1 is the warm-up
                times[name].append((time.perf_counter() - begin, worked))
    short = draw(1024, rank)
    constants = [
        min(seconds(lambda x=x: boltzattn.distributed.attention(*x)) for _ in range(RUNS))
        for x in (short, (q, k, v))
    ]
    explained = [boltzattn.distributed.explain(*draw(length, rank)) for length in (2**14, 2**20)]
    torch.save((times, constants, explained), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def context_parallel(n: int) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_process, args=(r, folder, n)) for r in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        times, (core, whole), explained = torch.load(Path(folder) / "0.pt")
    print(f"context parallel, 2 processes, n = {n:,} each, forward:")
    best = {}
    for name, found in times.items():
        wall, worked = zip(*found, strict=True)
        best[name] = min(wall), min(worked)
        print(
            f"  {name}: best {min(wall):.3f} s, median {statistics.median(wall):.3f} s, "
            f"CPU time {min(worked):.3f} s"
        )
    together = best.pop("together")
    ideal = [min(found) for found in zip(*best.values(), strict=True)]
    print(f"  share of the ideal: {ideal[0] / together[0]:.2f}")
    print(f"  in CPU time: {ideal[1] / together[1]:.2f}")
    print(f"  core {core * 1e3:.2f} ms, token {(whole - core) / n * 1e9:.0f} ns, in CPU time")
    same = "the same" if explained[0] == explained[1] else "NOT the same"
    print(f"volume at n = 2^14 and 2^20 per process: {same}")
    print(explained[1])


def streaming(tokens: int, block: int) -> None:
    torch.set_num_threads(1)
    stream = boltzattn.StreamingAttention(1, DV, query_bound=10.0)
    spent, most = 0.0, 0
    for i in range(tokens // block):
        q, k, v = draw(block, i)

        def step(q: Any = q, k: Any = k, v: Any = v) -> None:
            stream.append(k, v)
            stream.query(q)

        spent += seconds(step)
        most = max(most, stream.state_bytes())
    lengths = [2**14, 2**16, 2**17]
    growing = []
    for n in lengths:
        q, k, v = draw(n, 0)
        padded = [F.pad(x, (0, DV - 1)) for x in (q[:, :block], k)]
        calls = (
            partial(F.scaled_dot_product_attention, q[:, :block], k, v),
            partial(F.scaled_dot_product_attention, *padded, v, scale=1.0),
            partial(boltzattn.attention, q[:, :block], k, v, method="direct"),
        )
        growing.append(min(seconds(call) for call in calls for _ in range(3)) / n)
        print(f"  pair at n = {n:,}: {growing[-1] / block * 1e9:.2f} ns")
    cache = min(growing) * tokens * (tokens / block) / 2  # the mean length is tokens / 2
    print(f"streaming, {tokens:,} tokens appended and queried in blocks of {block:,}:")
    print(f"  {spent:.1f} s, state at most {most / 1e6:.2f} MB")
    print(
        f"  growing cache (the fastest of SDPA, padded SDPA and direct, extrapolated from "
        f"n = {lengths}): ~{cache:,.0f} s, {cache / spent:.0f} times as long"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=2**20, help="tokens per process")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="length of the stream")
    arguments = parser.parse_args()
    context_parallel(arguments.n)
    streaming(arguments.tokens, 1000)
