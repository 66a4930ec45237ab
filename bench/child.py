"""A fresh process for every measurement.

The server has imported torch but never run anything, and forks once per measurement. So nothing
that one case leaves behind (caches, thread pools, allocator state, peak memory) meets the next,
and a case that is killed for want of memory costs one row, not the run.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "boltzattn", "bench.measure"])


class ChildError(RuntimeError):
    """The child raised, or died; the message says which."""


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` computed in a fresh process; both must be picklable."""
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=_serve, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        done, answer = receiver.recv()
    except EOFError:
        process.join()
        raise ChildError(f"the process died with exit code {process.exitcode}") from None
    except BaseException:
        process.terminate()  # Ctrl-C: do not leave a measurement behind
        process.join()
        raise
    process.join()
    if not done:
        raise ChildError(answer)
    return answer


def _serve(sender: Connection, function: Callable[..., Any], arguments: tuple) -> None:
    try:
        sender.send((True, function(*arguments)))
    except Exception:
        sender.send((False, traceback.format_exc().strip()))
