"""How long a call takes, and what the commands that measure it share."""

from __future__ import annotations

import argparse
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


def positive(text: str) -> int:
    """The type of an option of argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text!r}")
    return int(text)
