"""Launch parameters by measurement: `autotune(call)`.

The table in `launch` was chosen without a GPU. On yours, other sizes may be faster; this tries them
on a call of your own and keeps the fastest for the rest of the process:

    from boltzattn.triton_kernels.tools.autotune import autotune
    autotune(lambda: boltzattn.attention(q, k, v, backend="triton"))

Results stay within the same error bounds but are not bitwise the same: sums are split differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from boltzattn.triton_kernels.launch import DirectTile, TokenTile, asked, tuned

CANDIDATES: dict[str, list[Any]] = {
    "direct": [
        DirectTile(rows, keys, warps)
        for rows in (16, 32, 64, 128)
        for keys in (16, 32, 64)
        for warps in (4, 8)
    ],
    "transform": [
        TokenTile(tile, warps, registers)
        for tile in (16, 32, 64, 128)
        for warps in (2, 4, 8)
        for registers in (None, 128)
    ],
}


def milliseconds(call: Callable[[], Any]) -> float:
    """The median time of a call on the current GPU."""
    from triton.testing import do_bench

    return do_bench(call, return_mode="median")


def autotune(
    call: Callable[[], Any], timer: Callable[[Callable[[], Any]], float] = milliseconds
) -> dict[tuple, Any]:
    """Try other launch parameters for every kernel that call() starts; keep and return the fastest.

    Entries of the table are tried one at a time, with the others at their best so far. Parameters
    that the device does not support are skipped. Takes minutes: every candidate is compiled.
    """
    asked.clear()
    call()
    for key in sorted(asked, key=str):
        best = timer(call)
        for candidate in CANDIDATES[key[0]]:
            before = tuned.get(key)
            tuned[key] = candidate
            time = _time(call, timer)
            if time is not None and time < best:
                best = time
            elif before is None:
                del tuned[key]
            else:
                tuned[key] = before
    return dict(tuned)


def _time(call: Callable[[], Any], timer: Callable[[Callable[[], Any]], float]) -> float | None:
    """None if the device has too few registers or too little shared memory."""
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        return timer(call)
    except (OutOfResources, PTXASError):
        return None


def reset() -> None:
    """Forget what was tuned."""
    tuned.clear()
