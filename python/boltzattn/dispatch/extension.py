"""The compiled libraries: loading them, or saying why they cannot be loaded."""

from __future__ import annotations

import importlib
import warnings
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch


@lru_cache(maxsize=1)
def extension() -> ModuleType | str:
    """The compiled module `_C`, or the reason why it cannot be loaded (and one warning)."""
    try:
        return importlib.import_module("boltzattn._C")
    except ImportError as error:
        reason = f"the extension boltzattn._C cannot be loaded ({error})"
        warnings.warn(
            f"boltzattn: {reason}; attention runs on the slow reference backend. To build the "
            "extension, install torch and a C++ compiler, then install boltzattn again "
            "(`pip install -v` shows the compiler's messages).",
            RuntimeWarning,
            stacklevel=2,
        )
        return reason


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
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        return f"the extension boltzattn._C_cuda cannot be loaded ({error})"
    return None
