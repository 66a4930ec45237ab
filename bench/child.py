"""A fresh process for every measurement.

A server imports torch, runs nothing, and forks once per measurement. So a case does not see the
caches, thread pools, allocator state and peak memory of an earlier one, and a case that is killed
for lack of memory costs one row, not the run.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    # torch.autograd.grad imports the last module in its first call.
    ["torch", "boltzattn", "bench.measure", "torch.fx.experimental.symbolic_shapes"]
)


def shared_number(value: float) -> Any:
    """A number that children share if it is passed to them; read and set `.value`."""
    return _context.RawValue("d", value)  # only one child runs at a time, so no lock is needed


class ChildError(RuntimeError):
    """The child raised or died; the message says which."""


class Child:
    """A process that runs a generator, one step for every call of `step`."""

    def __init__(self, function: Callable[..., Generator[Any, None, Any]], *arguments: Any) -> None:
        """`function(*arguments)` makes the generator; both must be picklable."""
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, function, arguments))
        self._process.start()
        theirs.close()

    def step(self) -> tuple[bool, Any]:
        """Run to the next yield: (False, yielded value), or (True, returned value)."""
        try:
            self._pipe.send(None)
            kind, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            raise ChildError(f"the process died with exit code {code}") from None
        except BaseException:
            self.stop()  # Ctrl-C must not leave a measurement running
            raise
        if kind != "yielded":
            self._process.join()
        if kind == "raised":
            raise ChildError(answer)
        return kind == "returned", answer

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compute `function(*arguments)` in a fresh process; both must be picklable."""
    return Child(_at_once, function, arguments).step()[1]


def _at_once(function: Callable[..., Any], arguments: tuple) -> Generator[None, None, Any]:
    return function(*arguments)
    yield


def _serve(
    pipe: Connection, function: Callable[..., Generator[Any, None, Any]], arguments: tuple
) -> None:
    steps = function(*arguments)
    try:
        while True:
            pipe.recv()
            pipe.send(("yielded", next(steps)))
    except StopIteration as end:
        pipe.send(("returned", end.value))
    except EOFError:
        pass  # the parent closed the pipe
    except Exception:
        pipe.send(("raised", traceback.format_exc().strip()))
