"""What each backend can do, why it cannot do the rest, and which one serves a call."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from boltzattn.reference import direct as reference
from boltzattn.reference import transform as reference_transform

METHODS = ("direct", "transform")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_log = logging.getLogger("boltzattn")


class Request(NamedTuple):
    """The facts of a call that decide who can serve it: a key of caches, so it hashes fast."""

    device: str
    dtype: torch.dtype
    heads: int
    n_q: int
    n_k: int
    rank: int
    dv: int
    is_causal: bool = False
    attn_mask: bool = False
    key_bias: bool = False
    dropout: bool = False
    mask_gradient: bool = False


@lru_cache(maxsize=1)
def extension() -> ModuleType | str:
    """The compiled module `_C`, or the reason why it cannot be loaded (warned of once)."""
    try:
        return importlib.import_module("boltzattn._C")
    except ImportError as error:
        reason = f"the extension boltzattn._C is not usable ({error})"
        warnings.warn(
            f"boltzattn: {reason}; attention runs on the slow reference backend. To build "
            "it, install boltzattn again where torch and a C++ compiler are; `pip install -v` "
            "tells what goes wrong.",
            RuntimeWarning,
            stacklevel=2,
        )
        return reason


def _extension_missing() -> str | None:
    loaded = extension()
    return loaded if isinstance(loaded, str) else None


def _cpu_kernels(method: str) -> tuple[Callable, Callable]:
    ops = torch.ops.boltzattn
    return {
        "direct": (ops.cpu_direct_forward, ops.cpu_direct_backward),
        "transform": (ops.cpu_transform_forward, ops.cpu_transform_backward),
    }[method]


@lru_cache(maxsize=1)
def cuda_extension() -> str | None:
    """Load the compiled library `_C_cuda`; None, or the reason why there is none.

    Under a CPU torch it is not touched. It loads without a GPU or a driver: who then has no CUDA
    tensors hears so from torch.
    """
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    found = sorted(Path(__file__).parents[1].glob("_C_cuda*.so"))
    if not found:
        return (
            "the extension boltzattn._C_cuda was not built; with a CUDA toolkit at hand: "
            "BOLTZATTN_CUDA=1 pip install --no-build-isolation ."
        )
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        return f"the extension boltzattn._C_cuda is not usable ({error})"
    return None


def _cuda_kernels(method: str) -> tuple[Callable, Callable]:
    ops = torch.ops.boltzattn
    return {
        "direct": (ops.cuda_direct_forward, ops.cuda_direct_backward),
        "transform": (ops.cuda_transform_forward, ops.cuda_transform_backward),
    }[method]


def _reference_kernels(method: str) -> tuple[Callable, Callable]:
    return {
        "direct": (reference.direct_forward, reference.direct_backward),
        "transform": (
            reference_transform.transform_forward,
            reference_transform.transform_backward,
        ),
    }[method]


def _triton_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available() and not _interpreter():
        return "torch sees no GPU"
    return None


def _interpreter() -> tuple[str, ...]:
    """Triton's own interpreter runs kernels on CPU tensors: slow, but it needs no GPU."""
    return ("cpu",) if os.environ.get("TRITON_INTERPRET") == "1" else ()


def _triton_kernels(method: str) -> tuple[Callable, Callable]:
    module = importlib.import_module(f"boltzattn.triton_kernels.{method}")
    return getattr(module, f"{method}_forward"), getattr(module, f"{method}_backward")


@dataclass(frozen=True)
class Backend:
    """One row of the capability table."""

    name: str
    summary: str
    devices: tuple[str, ...] | None  # None: wherever torch runs
    methods: tuple[str, ...]
    unavailable: Callable[[], str | None]
    kernels: Callable[[str], tuple[Callable, Callable]]
    mask_gradient: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES
    largest_rank: int | None = None
    only_by_name: Callable[[], tuple[str, ...]] = tuple  # devices that `auto` does not take it for
    elsewhere: str = ""  # what to do on another device
    halving: Callable[[], Callable] | None = None  # causal forward of rank 1 in one operator

    def why_not(self, request: Request, method: str) -> list[str]:
        """Every reason why this backend cannot serve the request by this method; [] if it can."""
        reasons = []
        if missing := self.unavailable():
            reasons.append(missing)
        if self.devices is not None and request.device not in (
            *self.devices,
            *self.only_by_name(),
        ):
            where = " or ".join(self.devices)
            reasons.append(f"runs on {where} tensors, got {request.device}{self.elsewhere}")
        if request.dtype not in self.dtypes:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            reasons.append(f"takes {accepted}, got {str(request.dtype).removeprefix('torch.')}")
        if self.largest_rank is not None and request.rank > self.largest_rank:
            reasons.append(f"takes ranks up to {self.largest_rank}, got {request.rank}")
        if method not in self.methods:
            reasons.append(f"has no method {method!r} (it has {', '.join(self.methods)})")
        if request.mask_gradient and not self.mask_gradient:
            reasons.append(
                "computes no gradient for attn_mask or key_padding_mask; "
                "detach() the mask or use backend='reference'"
            )
        return reasons


# In the order in which `auto` asks them.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            "cpu",
            "C++",
            ("cpu",),
            ("direct", "transform"),
            _extension_missing,
            _cpu_kernels,
            halving=lambda: torch.ops.boltzattn.cpu_causal_forward,
        ),
        Backend(
            "cuda",
            "CUDA C++",
            ("cuda",),
            ("direct", "transform"),
            cuda_extension,
            _cuda_kernels,
        ),
        Backend(
            "triton",
            "Triton",
            ("cuda",),
            ("direct", "transform"),
            _triton_missing,
            _triton_kernels,
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            largest_rank=16,
            only_by_name=_interpreter,
            elsewhere=" (to interpret it on the CPU start Python with TRITON_INTERPRET=1)",
        ),
        Backend(
            "reference",
            "eager torch",
            None,
            ("direct", "transform"),
            lambda: None,
            _reference_kernels,
            mask_gradient=True,
        ),
    )
}


def method_why_not(request: Request, method: str) -> list[str]:
    """Reasons that belong to the method itself, whichever backend runs it."""
    if method == "direct":
        return []
    reasons = []
    if request.rank != 1:
        reasons.append(f"transform needs rank 1, got rank {request.rank}")
    if request.attn_mask:
        reasons.append("transform takes no attn_mask; key_padding_mask and is_causal it can")
    if request.dropout:
        reasons.append("transform never forms the weights that dropout_p would drop")
    return reasons


class _Preference(threading.local):
    """What `use_backend` and `use_method` set; a thread-local that torch.compile can guard on."""

    def __init__(self) -> None:
        self.backend = "auto"
        self.method = "auto"


_preference = _Preference()


def preferred(method: str, backend: str) -> tuple[str, str]:
    """Resolve "auto" by the enclosing `use_method` / `use_backend`, if there is one."""
    return (
        _preference.method if method == "auto" else method,
        _preference.backend if backend == "auto" else backend,
    )


def check_name(argument: str, name: str, accepted: tuple[str, ...]) -> None:
    if name != "auto" and name not in accepted:
        raise ValueError(
            f"{argument} must be 'auto' or one of {', '.join(map(repr, accepted))}, got {name!r}"
        )


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, calls that leave `backend="auto"` use this backend, or raise why not.

    Example:
        >>> q = torch.randn(4, 100, 2)
        >>> with boltzattn.use_backend("reference"):
        ...     print(boltzattn.explain(q, q, q).splitlines()[0])
        method direct, backend reference
    """
    check_name("backend", name, tuple(BACKENDS))
    before, _preference.backend = _preference.backend, name
    try:
        yield
    finally:
        _preference.backend = before


@contextlib.contextmanager
def use_method(name: str) -> Iterator[None]:
    """Within the block, calls that leave `method="auto"` use this method, or raise why not.

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


def can_serve(request: Request, method: str, backend: str) -> bool:
    """Whether the named backend, or with "auto" any, can serve the request by this method."""
    candidates = _candidates(request) if backend == "auto" else [BACKENDS[backend]]
    return any(not candidate.why_not(request, method) for candidate in candidates)


def _candidates(request: Request) -> list[Backend]:
    """Those that `auto` may take, in order."""
    return [b for b in BACKENDS.values() if request.device not in b.only_by_name()]


@lru_cache(maxsize=1024)
def select(request: Request, method: str, backend: str) -> Backend:
    """The backend that serves the request by the given method.

    `auto` takes the first of BACKENDS that can and logs once why a faster one could not; a named
    backend that cannot raises with every reason.
    """
    if reasons := method_why_not(request, method):
        raise ValueError(f"method {method!r} cannot serve this call: " + "; ".join(reasons))
    if backend != "auto":
        if reasons := BACKENDS[backend].why_not(request, method):
            raise ValueError(f"backend {backend!r} cannot serve this call: " + "; ".join(reasons))
        return BACKENDS[backend]
    for candidate in _candidates(request):
        reasons = candidate.why_not(request, method)
        if not reasons:
            return candidate
        if candidate.devices is None or request.device in candidate.devices:
            _log.info("backend %s not taken: %s", candidate.name, "; ".join(reasons))
    raise ValueError(f"no backend can serve this call by method {method!r}")  # reference always can
