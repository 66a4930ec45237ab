"""Waiting until the cores share a cache.

The cores of a virtual machine move between physical cores. For a few seconds two of them share a
cache, then they do not. Without a shared cache a signal between threads takes three times as long
and a call up to 1.5 times (or less time than before, if it is limited by memory, because two links
to memory serve it). The only symptom is the time of the shortest parallel operation, which is 1.4
times its minimum without a shared cache. So samples are taken while the cores share a cache, until
a time allowance is used up. A sample of several seconds may have seen both states.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from bench import child

StopWatch = Callable[[Callable[[], object], int], list[float]]  # seconds of each call

_TOLERANCE = 1.25
_GRAIN = 32_768  # torch gives a thread elementwise work in pieces of this size
_PAUSE_S = 0.02


class Cores:
    """What the processes of a run know about the cores, and how long they may still wait."""

    def __init__(self) -> None:
        self._best = child.shared_number(math.inf)
        self._left_s = child.shared_number(0.0)

    def learn(self, seconds: float) -> None:
        """Observe the cores for a while, to learn the fastest signal."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.near()
            time.sleep(_PAUSE_S)

    def near(self) -> bool:
        """Whether signals are about as fast as the fastest so far; True with a single thread."""
        threads = torch.get_num_threads()
        if threads == 1:
            return True
        now = _signal_s(threads)
        self._best.value = min(self._best.value, now)
        return now < _TOLERANCE * self._best.value

    def allow(self, seconds: float) -> None:
        """Set how much time may be lost by waiting and by discarded samples from now on."""
        self._left_s.value = seconds

    def lose(self, seconds: float) -> bool:
        """Use up this much of the allowance; False, and nothing used, if it is not enough."""
        if seconds > self._left_s.value:
            return False
        self._left_s.value -= seconds
        return True

    def watch(self, seconds: StopWatch) -> StopWatch:
        """`seconds`, repeated until the cores share a cache before and after the sample."""

        def when_near(call: Callable[[], object], repeats: int) -> list[float]:
            while True:
                while not self.near() and self.lose(_PAUSE_S):
                    time.sleep(_PAUSE_S)
                took = seconds(call, repeats)
                if self.near() or not self.lose(sum(took)):
                    return took

        return when_near


def _signal_s(threads: int) -> float:
    """Seconds of the shortest operation that uses all threads."""
    numbers = torch.zeros(_GRAIN * (threads - 1) + 1)
    best = math.inf
    for _ in range(50):
        start = time.perf_counter()
        numbers.add_(1)
        best = min(best, time.perf_counter() - start)
    return best
