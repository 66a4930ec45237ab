"""Groups of processes for tests: started, awaited with a limit, and never left behind."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 240.0  # seconds; generous, for machines that do other things too
COLLECTIVE = timedelta(seconds=120)


def _enter(body: Callable, rank: int, world: int, folder: Path, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder / 'store'}", rank=rank, world_size=world, timeout=COLLECTIVE
    )
    result = body(rank, world, *arguments)
    torch.save(result, folder / f"{rank}.pt")
    # No destroy_process_group: it waits for peers, and one of them may be dead on purpose.


def run(
    body: Callable[..., Any], world: int, folder: Path, *arguments: Any, dying: tuple[int, ...] = ()
) -> list[Any]:
    """What body(rank, world, *arguments) returned in `world` gloo processes, by rank.

    Processes in `dying` are expected to fail, and give None; any other failure is an error.
    """
    # A server that has imported the package once and forks from there: no test's threads in it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["boltzattn"])
    processes = [
        context.Process(target=_enter, args=(body, rank, world, folder, arguments), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, code in enumerate(codes):
        assert code is not None, f"process {rank} of {world} still ran after {LIMIT} s"
        assert (code != 0) == (rank in dying), f"process {rank} of {world} ended with code {code}"
    return [
        None if rank in dying else torch.load(folder / f"{rank}.pt", weights_only=False)
        for rank in range(world)
    ]
