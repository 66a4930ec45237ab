"""The C interface of libboltzattn: its instruction sets, its build record, and signals.

The library knows nothing of Python. So that Ctrl-C can end a long call, it is handed the addresses
of four functions of Python's stable C API; `interruptible` raises what a signal's handler raised.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ENDED = "boltzattn: interrupted by a signal"  # csrc/library.cpp
_SIGNAL_FUNCTIONS = (
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyErr_CheckSignals",
    "PyErr_Fetch",
)
_loaded: Library | None = None  # whose operators torch has


def record_of(library: Path) -> Path:
    """The file beside a library that says how it was built."""
    return library.with_name(f"{library.name}.record")


class Library:
    """A library whose operators torch has loaded already."""

    def __init__(self, path: Path) -> None:
        global _loaded
        self.path = path
        self._c = ctypes.CDLL(str(path))
        for name in ("boltzattn_isa", "boltzattn_supported_isas", "boltzattn_force_isa"):
            getattr(self._c, name).restype = ctypes.c_char_p
        addresses = [
            ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p)
            for name in _SIGNAL_FUNCTIONS
        ]
        main_thread = ctypes.c_ulong(threading.main_thread().ident or 0)
        self._c.boltzattn_handle_signals(main_thread, *addresses)
        _loaded = self

    def isa(self) -> str:
        """The instruction set the kernels run with."""
        return self._c.boltzattn_isa().decode()

    def supported_isas(self) -> list[str]:
        """The instruction sets this machine can run, best first."""
        return self._c.boltzattn_supported_isas().decode().split()

    def force_isa(self, name: str | None) -> None:
        """Run the kernels with another instruction set; None for the best."""
        wanted = None if name is None else ctypes.c_char_p(name.encode())
        if error := self._c.boltzattn_force_isa(wanted):
            raise ValueError(f"{name}: {error.decode()}")

    def set_transform_budget(self, nanoseconds: float) -> None:
        """Heads of rank 2 to 4 that cost less take the transform even if `direct` is faster.

        For tests; 0 is what users have.
        """
        self._c.boltzattn_set_transform_budget(ctypes.c_double(nanoseconds))

    def build_record(self) -> dict[str, str]:
        """What the library was built with; empty if nobody recorded it."""
        record = record_of(self.path)
        known = json.loads(record.read_text()) if record.exists() else {}
        return {name: known[name] for name in ("torch", "compiler") if name in known}

    def raise_what_the_handler_raised(self) -> None:
        """Raises if a signal's handler has, and nobody was told."""
        raised = (ctypes.c_void_p * 3)()
        self._c.boltzattn_take_raised(raised)
        if raised[0]:
            # ctypes raises what it finds set after a call of Python's own functions.
            ctypes.pythonapi.PyErr_Restore(*(ctypes.c_void_p(x) for x in raised))


def interruptible(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of the library, which raises KeyboardInterrupt after Ctrl-C."""

    def call(*arguments: Any) -> Any:
        try:
            return operator(*arguments)
        except RuntimeError as error:
            if _loaded is not None and _ENDED in str(error):
                _loaded.raise_what_the_handler_raised()
            raise

    return call
