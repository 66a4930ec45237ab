"""The compiled libraries: loading them, or saying why they cannot be loaded."""

from __future__ import annotations

import hashlib
import json
import warnings
from functools import lru_cache
from pathlib import Path

import torch

from boltzattn._version import __version__
from boltzattn.dispatch import native
from boltzattn.dispatch.library import Library, record_of
from boltzattn.dispatch.names import CPU_LIBRARY, CUDA_LIBRARY, NAMESPACE


@lru_cache(maxsize=1)
def extension() -> Library | str:
    """The library of the CPU kernels, or the reason why it cannot be loaded (and one warning)."""
    try:
        _load(CPU_LIBRARY, "cpu")
        return Library(CPU_LIBRARY)
    except Exception as error:  # a damaged library may raise anything
        reason = f"the library {CPU_LIBRARY.name} cannot be loaded ({error})"
        warnings.warn(
            f"boltzattn: {reason}; attention runs on the slow reference backend. To build the "
            "library, install torch and a C++ compiler, then install boltzattn again "
            "(`pip install -v` shows the compiler's messages).",
            RuntimeWarning,
            stacklevel=2,
        )
        return reason


def _load(library: Path, backend: str) -> None:
    if not library.exists():
        raise ImportError("it was not built")
    check_file(library)
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(
            str(error.__cause__ or error)
        ) from error  # torch hides the linker's words
    check_operators(backend)


def cpu_unavailable() -> str | None:
    """Why the CPU kernels cannot be used, or None."""
    loaded = extension()
    return loaded if isinstance(loaded, str) else None


@lru_cache(maxsize=1)
def cuda_unavailable() -> str | None:
    """Load the library of the CUDA kernels; why it cannot be used, or None.

    A CPU build of torch never loads it. It loads without a GPU or a driver.
    """
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not CUDA_LIBRARY.exists():
        return (
            f"the library {CUDA_LIBRARY.name} was not built; to build it with a CUDA toolkit: "
            "BOLTZATTN_CUDA=1 pip install --no-build-isolation ."
        )
    try:
        _load(CUDA_LIBRARY, "cuda")
    except Exception as error:
        return f"the library {CUDA_LIBRARY.name} cannot be loaded ({error})"
    return None


def check_file(library: Path) -> None:
    """Raise ImportError unless the file is as setup.py recorded it when it was built.

    This comes before the library is mapped: a missing page would end the process with a bus error.
    """
    record = record_of(library)
    if not record.exists():
        return
    try:
        built = json.loads(record.read_text())
        expected = built["version"], built["size"], built["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ImportError(f"the build record {record.name} is damaged: {error!r}") from error
    content = library.read_bytes()
    if (len(content), hashlib.sha256(content).hexdigest()) != expected[1:]:
        raise ImportError(
            f"{library.name} is damaged: it has {len(content)} bytes and another content than when "
            f"it was built with {expected[1]} bytes; if it was changed on purpose, for example by "
            f"strip or patchelf, remove {record.name}"
        )
    if expected[0] != __version__:
        raise ImportError(
            f"{library.name} was built for boltzattn {expected[0]}, but this is {__version__}"
        )


def check_operators(backend: str) -> None:
    """Raise ImportError unless the loaded library has the operators that `native` calls."""
    for name, arguments in native.OPERATORS[backend].items():
        operator = getattr(getattr(torch.ops, NAMESPACE), name, None)
        found = "" if operator is None else str(operator.default._schema)
        if not found.startswith(f"{NAMESPACE}::{name}({arguments}"):
            have = "lacks" if operator is None else "has other arguments for"
            raise ImportError(f"it {have} the operator {name}: it was built from other sources")
