"""What a user may call, and which of it lacks a docstring or the description of a parameter."""

from __future__ import annotations

import inspect
import re
from typing import Any

import boltzattn

MODULES = (boltzattn, boltzattn.nn, boltzattn.distributed, boltzattn.smoothing)
# "    name: ...", "    name, other: ...", as Google's style has them.
ENTRY = re.compile(r"^\s+(\w+(?:, \w+)*):", re.MULTILINE)


def public() -> dict[str, Any]:
    """The functions and classes, by full name."""
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in MODULES
        for name in module.__all__
        if callable(getattr(module, name))
    }


def undocumented() -> list[str]:
    """Names without a docstring, and parameters that a docstring does not describe."""
    missing = []
    for name, thing in public().items():
        members = {name: thing}
        if inspect.isclass(thing):
            fields = inspect.get_annotations(thing)  # described with the class
            members |= {
                f"{name}.{key}": value
                for key, value in vars(thing).items()
                if not key.startswith("_") and key not in fields and callable(value)
            }
        for key, value in members.items():
            text = inspect.getdoc(value)
            if not text:
                missing.append(key)
                continue
            described = {word for entry in ENTRY.findall("\n" + text) for word in entry.split(", ")}
            kinds = inspect.signature(value).parameters.values()
            missing += [
                f"{key}({one.name})"
                for one in kinds
                if one.name not in ("self", *described)
                and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            ]
    return missing
