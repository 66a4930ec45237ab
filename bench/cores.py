"""Whether the cores are as near to each other as they can be.

A virtual machine's cores are moved about on the real ones. For seconds two of them share a cache;
then they do not, signals between threads take three times as long, and a call takes up to 1.5 times
as long (or less, if memory was its limit: it has two links then). Nothing tells but the time of the
shortest parallel operation. So samples are taken while that is near its best, as far as patience
reaches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from bench import child

StopWatch = Callable[[Callable[[], object], int], list[float]]  # seconds of each of some calls

_TOLERANCE = 1.25  # near: 1 to 1.2 times its best; apart: from 1.35 times on
_GRAIN = 32_768  # torch shares out elementwise work in pieces of this size


class Cores:
    """What the processes of a run know of the cores, and how long they may still wait for them."""

    def __init__(self) -> None:
        self._best = child.shared_number(math.inf)
        self._patience_s = child.shared_number(0.0)

    def allow(self, seconds: float) -> None:
        """How long may be waited, or spent in vain, from now on."""
        self._patience_s.value = seconds

    def near(self) -> bool:
        """Whether signals are as fast as they ever were; True with a single thread."""
        threads = torch.get_num_threads()
        if threads == 1:
            return True
        now = _signal_s(threads)
        self._best.value = min(self._best.value, now)
        return now < _TOLERANCE * self._best.value

    def patient(self, seconds: float) -> bool:
        """Spend that much patience; False if there was none left."""
        left = self._patience_s.value
        self._patience_s.value = left - seconds
        return left > 0

    def watch(self, seconds: StopWatch) -> StopWatch:
        """`seconds`, but repeated until the cores were near before and after."""

        def when_near(call: Callable[[], object], repeats: int) -> list[float]:
            while True:
                while not self.near() and self.patient(0.02):
                    time.sleep(0.02)
                took = seconds(call, repeats)
                if self.near() or not self.patient(sum(took)):
                    return took

        return when_near


def _signal_s(threads: int) -> float:
    """Seconds of the shortest operation that all threads take part in."""
    numbers = torch.zeros(_GRAIN * (threads - 1) + 1)
    best = math.inf
    for _ in range(50):
        start = time.perf_counter()
        numbers.add_(1)
        best = min(best, time.perf_counter() - start)
    return best
