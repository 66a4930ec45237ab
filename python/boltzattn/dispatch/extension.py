"""The compiled libraries: loading them, or saying why they cannot be loaded."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import warnings
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch

from boltzattn._version import __version__
from boltzattn.dispatch import native


@lru_cache(maxsize=1)
def extension() -> ModuleType | str:
    """The compiled module `_C`, or the reason why it cannot be loaded (and one warning)."""
    try:
        module = _load_module("boltzattn._C")
    except Exception as error:  # a damaged library may raise anything, SystemError for example
        reason = f"the extension boltzattn._C cannot be loaded ({error})"
        warnings.warn(
            f"boltzattn: {reason}; attention runs on the slow reference backend. To build the "
            "extension, install torch and a C++ compiler, then install boltzattn again "
            "(`pip install -v` shows the compiler's messages).",
            RuntimeWarning,
            stacklevel=2,
        )
        return reason
    return module


def _load_module(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        check_file(Path(spec.origin))
    module = importlib.import_module(name)
    check_operators("cpu")
    return module


def cpu_unavailable() -> str | None:
    """Why the CPU kernels cannot be used, or None."""
    loaded = extension()
    return loaded if isinstance(loaded, str) else None


@lru_cache(maxsize=1)
def cuda_unavailable() -> str | None:
    """Load the library `_C_cuda`; why it cannot be used, or None.

    A CPU build of torch never loads it. It loads without a GPU or a driver.
    """
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    found = sorted(Path(__file__).parents[1].glob("_C_cuda*.so"))
    if not found:
        return (
            "the extension boltzattn._C_cuda was not built; to build it with a CUDA toolkit: "
            "BOLTZATTN_CUDA=1 pip install --no-build-isolation ."
        )
    try:
        check_file(found[0])
        torch.ops.load_library(str(found[0]))
        check_operators("cuda")
    except Exception as error:
        return f"the extension boltzattn._C_cuda cannot be loaded ({error})"
    return None


def check_file(library: Path) -> None:
    """Raise ImportError unless the file is as setup.py recorded it when it was built.

    This comes before the library is mapped: a missing page would end the process with a bus error.
    """
    record = library.with_name(f"{library.name}.record")
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
        operator = getattr(torch.ops.boltzattn, name, None)
        found = "" if operator is None else str(operator.default._schema)
        if not found.startswith(f"boltzattn::{name}({arguments}"):
            have = "lacks" if operator is None else "has other arguments for"
            raise ImportError(f"it {have} the operator {name}: it was built from other sources")
