"""ptxrun: a PTX interpreter in Python and numpy (see README.md)."""

from . import memops, ops, warpops  # noqa: F401  (register the instructions)
from .errors import (  # noqa: F401
    DeadlockError,
    Hazard,
    HazardError,
    MemoryFault,
    PtxError,
    PtxParseError,
    UnsupportedError,
)
from .helpers import from_triton, nvcc  # noqa: F401
from .machine import Kernel, Module, Result, Struct  # noqa: F401


def load(text):
    """Parse PTX text (str) and return a Module."""
    return Module(text)
