"""Whether the cores are as near to each other as they can be.

A virtual machine's cores are moved about on the real ones. For seconds two of them share a cache;
then they do not, a signal between threads takes three times as long, and a call up to 1.5 times (or
less than before, if memory is its limit: there are two links to it then). Nothing tells but the
time of the shortest parallel operation, which is 1.4 times its best when the cores are apart. So
samples are taken while they are near, as far as the time allowed for it reaches. A sample of
seconds may have seen both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from bench import child

StopWatch = Callable[[Callable[[], object], int], list[float]]  # seconds of each of some calls

_TOLERANCE = 1.25
_GRAIN = 32_768  # torch shares out elementwise work in pieces of this size
_PAUSE_S = 0.02


class Cores:
    """What the processes of a run know of the cores, and how long they may still wait for them."""

    def __init__(self) -> None:
        self._best = child.shared_number(math.inf)
        self._left_s = child.shared_number(0.0)

    def learn(self, seconds: float) -> None:
        """Watch the cores for a while, to know how near they can be."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.near()
            time.sleep(_PAUSE_S)

    def near(self) -> bool:
        """Whether signals are as fast as they ever were; True with a single thread."""
        threads = torch.get_num_threads()
        if threads == 1:
            return True
        now = _signal_s(threads)
        self._best.value = min(self._best.value, now)
        return now < _TOLERANCE * self._best.value

    def allow(self, seconds: float) -> None:
        """How much time may be lost by waiting and by samples in vain, from now on."""
        self._left_s.value = seconds

    def lose(self, seconds: float) -> bool:
        """Take that much of the time that may be lost; False, and nothing taken, if it is more."""
        if seconds > self._left_s.value:
            return False
        self._left_s.value -= seconds
        return True

    def watch(self, seconds: StopWatch) -> StopWatch:
        """`seconds`, but repeated until the cores were near before and after."""

        def when_near(call: Callable[[], object], repeats: int) -> list[float]:
            while True:
                while not self.near() and self.lose(_PAUSE_S):
                    time.sleep(_PAUSE_S)
                took = seconds(call, repeats)
                if self.near() or not self.lose(sum(took)):
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
