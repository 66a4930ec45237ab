"""`use_backend`, `use_method`: what "auto" means within a block; `set_quadratic`: what it says."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

from boltzattn.dispatch.backends import BACKENDS, METHODS
from boltzattn.problem import Choice

_BACKENDS = tuple(BACKENDS)


class _Preference(threading.local):
    """A thread-local that torch.compile can guard on."""

    def __init__(self) -> None:
        self.method = "auto"
        self.backend = "auto"


_preference = _Preference()


def check_name(argument: str, name: str, accepted: tuple[str, ...]) -> None:
    if name != "auto" and name not in accepted:
        raise ValueError(
            f"{argument} must be 'auto' or one of {', '.join(map(repr, accepted))}, got {name!r}"
        )


def preferred(method: str, backend: str) -> Choice:
    """Check both names, and resolve "auto" by the enclosing `use_method` and `use_backend`."""
    check_name("method", method, METHODS)
    check_name("backend", backend, _BACKENDS)
    return Choice(
        _preference.method if method == "auto" else method,
        _preference.backend if backend == "auto" else backend,
    )


_REACTIONS = ("warn", "error", "ignore")
_reaction = "warn"
_warned: set[str] = set()


def set_quadratic(reaction: str) -> None:
    """What happens if a mask or dropout makes a call of rank 1 quadratic.

    Only calls with `method="auto"` that lose a factor of 4 or more count.

    Args:
        reaction: "warn", the default, warns once for each cause; "error" raises; "ignore" does
            nothing.

    Example:
        >>> boltzattn.set_quadratic("ignore")
        >>> boltzattn.set_quadratic("warn")
    """
    global _reaction
    if reaction not in _REACTIONS:
        raise ValueError(f"reaction must be 'warn', 'error' or 'ignore', got {reaction!r}")
    _reaction = reaction
    _warned.clear()


def react_to_quadratic(reason: str) -> None:
    """Do what `set_quadratic` says."""
    cause = reason.split(" ", 1)[0]
    if _reaction == "error":
        raise ValueError(reason)
    if _reaction == "warn" and cause not in _warned:
        _warned.add(cause)
        warnings.warn(reason, stacklevel=2)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, calls with `backend="auto"` use this backend, or raise why they cannot.

    Args:
        name: one of `boltzattn.BACKENDS`, or "auto".

    Example:
        >>> q = torch.randn(4, 100, 2)
        >>> with boltzattn.use_backend("reference"):
        ...     print(boltzattn.explain(q, q, q).splitlines()[0])
        method direct, backend reference
    """
    check_name("backend", name, _BACKENDS)
    before, _preference.backend = _preference.backend, name
    try:
        yield
    finally:
        _preference.backend = before


@contextlib.contextmanager
def use_method(name: str) -> Iterator[None]:
    """Within the block, calls with `method="auto"` use this method, or raise why they cannot.

    Args:
        name: one of `boltzattn.METHODS`, or "auto".

    Example:
        >>> q = torch.randn(4, 100, 1)
        >>> with boltzattn.use_method("direct"):
        ...     boltzattn.attention(q, q, q).shape
        torch.Size([4, 100, 1])
    """
    check_name("method", name, METHODS)
    before, _preference.method = _preference.method, name
    try:
        yield
    finally:
        _preference.method = before
