"""How long a call takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def times(run: Callable[[], object], device: str, repeats: int, patience: float) -> list[float]:
    """Seconds of some calls, after one that warms up unless it has used up the patience.

    `patience`, in seconds, limits all calls together; at least one is made. Waits for the device
    before and after each.
    """

    def wait() -> None:
        if device != "cpu":
            torch.accelerator.synchronize()

    found: list[float] = []
    while not found or (len(found) <= repeats and sum(found) < patience):
        wait()
        start = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - start)
    return found[1:] or found
