"""Print the table of docs/scaling.md: a model with constants measured on one machine."""

from __future__ import annotations

import math
from typing import NamedTuple

# Measured by `python -m bench.scaleout` in CPU time of one thread (AMD EPYC, Zen 3) on a shared
# machine; fp32, dv = 64, forward.
TOKEN = 160e-9  # s per token (a query and a key) of the transform, at n = 2^20 per process
CORE = 2.9e-3  # s per head and call, independent of n: core and all-reduces on one machine
PAIR = 2.3e-9  # s per query-key pair, the fastest of SDPA and `direct`
SHARED = 109_304  # bytes of extents and moments per head, for logits that differ by up to 18

# Assumed, not measured.
BANDWIDTH = 10e9  # bytes/s that a device sends
LATENCY = 10e-6  # s per message

DV = 64
ROW = 4 * (DV + 1)  # bytes of a key and its value


class Cost(NamedTuple):
    seconds: float
    sent: float  # bytes per device
    memory: float  # bytes per device, without inputs and output


def moments(n: float, devices: int) -> Cost:
    """An all-reduce of fixed size: reduce-scatter and all-gather."""
    sent = 2 * SHARED * (devices - 1) / devices
    messages = 2 * 2 * math.ceil(math.log2(devices)) if devices > 1 else 0
    compute = TOKEN * n / devices + CORE
    return Cost(compute + sent / BANDWIDTH + messages * LATENCY, sent, 2 * SHARED)


def ring(n: float, devices: int) -> Cost:
    """Keys and values go round; sending overlaps with computing."""
    block = ROW * n / devices
    sent = block * (devices - 1)
    compute = PAIR * n * n / devices
    transfer = sent / BANDWIDTH + (devices - 1) * LATENCY
    return Cost(max(compute, transfer), sent, 2 * block if devices > 1 else 0.0)


def human(x: float, units: tuple[tuple[float, str], ...]) -> str:
    for size, unit in units:
        if x >= size:
            return f"{x / size:,.0f} {unit}" if x >= 10 * size else f"{x / size:.1f} {unit}"
    return "0"


def time_of(x: float) -> str:
    return human(
        x,
        ((86400 * 365, "years"), (86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")),
    )


def bytes_of(x: float) -> str:
    return human(x, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def table() -> str:
    lines = [
        "| n | devices | time, moments | time, ring | sent, moments | sent, ring "
        "| extra memory, moments | extra memory, ring |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for n in (10**6, 10**7, 10**8, 10**9):
        for devices in (1, 8, 64, 1024):
            a, b = moments(n, devices), ring(n, devices)
            cells = [f"10^{round(math.log10(n))}", f"{devices:,}", time_of(a.seconds)]
            cells += [time_of(b.seconds), bytes_of(a.sent), bytes_of(b.sent)]
            cells += [bytes_of(a.memory), bytes_of(b.memory)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
