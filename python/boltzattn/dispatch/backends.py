"""The table of backends and operations: who can serve a request, why not, and with which kernels.

Dispatch, `explain`, `info`, error messages, the feature table of docs/support.md and the parameters
of the tests all follow from BACKENDS and OPERATIONS.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch

from boltzattn.dispatch import native
from boltzattn.dispatch.extension import cpu_unavailable, cuda_unavailable
from boltzattn.dispatch.torch_modes import full_precision
from boltzattn.problem import (
    DTYPES,
    Kernels,
    LayerKernels,
    Problem,
    StreamKernels,
)
from boltzattn.reference import direct as reference_direct
from boltzattn.reference import scan as reference_scan
from boltzattn.reference import scan_stages as reference_scan_stages
from boltzattn.reference import stages as reference_stages
from boltzattn.reference import stream as reference_stream
from boltzattn.reference import tensor_stages as reference_tensor_stages
from boltzattn.reference import transform as reference_transform
from boltzattn.transform.scan_shards import ScanStages
from boltzattn.transform.stages import Stages
from boltzattn.transform.tensor import MOST_AXES

METHODS = ("direct", "transform")

_log = logging.getLogger("boltzattn")


class Request(NamedTuple):
    """The facts of a problem that decide who can serve it; hashable, so that choices are cached."""

    device: str
    dtype: torch.dtype
    heads: int
    n_q: int
    n_k: int
    rank: int
    dv: int
    is_causal: bool = False
    attn_mask: bool = False
    dropout: bool = False
    key_bias: bool = False
    slopes: bool = False
    gaussian: bool = False
    mask_gradient: bool = False

    @classmethod
    def of(cls, problem: Problem, mask_gradient: bool = False) -> Request:
        query, value = problem.query, problem.value
        *lead, n_q, rank = query.shape
        n_k, dv = value.shape[-2:]
        return cls(
            query.device.type,
            query.dtype,
            math.prod(lead),
            n_q,
            n_k,
            rank,
            dv,
            problem.is_causal,
            problem.attn_mask is not None,
            problem.dropout_p > 0.0,
            problem.key_bias is not None,
            problem.slopes is not None,
            problem.is_gaussian,
            mask_gradient,
        )


# ---- operations ----


def _anything(request: Request) -> list[str]:
    return []


def _rank_one_why_not(request: Request) -> list[str]:
    reasons = []
    if request.rank != 1:
        reasons.append(f"transform needs rank 1 here, got rank {request.rank}")
    return reasons + _masks_why_not(request)


def _transform_why_not(request: Request) -> list[str]:
    reasons = []
    if request.rank > MOST_AXES:
        reasons.append(f"transform takes ranks up to {MOST_AXES}, got rank {request.rank}")
    if request.rank > 1 and request.slopes and request.is_causal:
        reasons.append(f"transform takes alibi_slopes only at rank 1, got rank {request.rank}")
    return reasons + _masks_why_not(request)


def _masks_why_not(request: Request) -> list[str]:
    reasons = []
    if request.attn_mask:
        reasons.append("transform takes no attn_mask (it takes key_padding_mask and is_causal)")
    if request.dropout:
        reasons.append("transform never forms the weights that dropout_p would drop")
    if request.slopes and not request.is_causal:
        reasons.append("transform takes alibi_slopes only with is_causal=True")
    if request.mask_gradient:
        reasons.append("transform computes no gradient for attn_mask; detach() the mask")
    return reasons


class Operation(NamedTuple):
    """A row of the table: what it computes, and the requests it cannot take on any backend."""

    summary: str
    why_not: Callable[[Request], list[str]] = _anything


OPERATIONS = {
    "direct": Operation("attention over all pairs, any rank"),
    "dense": Operation("the gradient of attn_mask (detach() it, or take backend 'reference')"),
    "transform": Operation("attention of rank 1 to 4 in linear time", _transform_why_not),
    "scan": Operation("the transform with `is_causal`, rank 1 to 4", _transform_why_not),
    "varlen": Operation("all sequences of `attention_varlen` in one kernel"),
    "layer": Operation("`self_attention` projected at the nodes", _rank_one_why_not),
    "small_layer": Operation("`self_attention` of few tokens in one kernel"),
    "project": Operation("rank-1 queries and keys of a layer in one pass"),
    "stages": Operation("the transform in stages, for `distributed`", _rank_one_why_not),
    "tensor_stages": Operation("the same for ranks 2 to 4", _transform_why_not),
    "scan_stages": Operation(
        "the scan in stages, for causal calls of `distributed`", _rank_one_why_not
    ),
    "stream": Operation("the state of `StreamingAttention`"),
}


def operation_of(method: str, request: Request) -> str:
    """The operation by which a method serves attention."""
    if method == "direct":
        return "dense" if request.mask_gradient else "direct"
    return "scan" if request.is_causal else method


# ---- backends ----


class Implementation(NamedTuple):
    """A cell of the table: the kernels, loaded when first needed, and what they take."""

    load: Callable[[], Any]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    largest_rank: int | None = None
    lacks: tuple[str, ...] = ()  # names of FEATURES


# What not every kernel takes: fields of Request, and the arguments that ask for them.
FEATURES = {
    "key_bias": "key_bias (or a floating key_padding_mask)",
    "slopes": "alibi_slopes",
    "gaussian": "score='gaussian'",
}


def _triton_module(name: str) -> Any:
    return importlib.import_module(f"..triton_kernels.{name}", __package__)


def _triton(name: str, kind: type) -> Any:
    module = _triton_module(name)
    return kind(getattr(module, f"{name}_forward"), getattr(module, f"{name}_backward"))


def _by_torch(*functions: Callable) -> list[Callable]:
    """Kernels that multiply matrices by torch; their last argument is the problem."""

    def in_full_precision(function: Callable) -> Callable:
        @wraps(function)
        def run(*arguments: Any) -> Any:
            with full_precision(arguments[-1].query.device.type):
                return function(*arguments)

        return run

    return [in_full_precision(function) for function in functions]


def _triton_unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available() and not _interpreter():
        return "torch sees no GPU"
    return None


def _interpreter() -> tuple[str, ...]:
    """Triton's own interpreter runs kernels on CPU tensors: slow, but it needs no GPU."""
    return ("cpu",) if os.environ.get("TRITON_INTERPRET") == "1" else ()


@dataclass(frozen=True)
class Backend:
    """A column of the table."""

    name: str
    summary: str
    devices: tuple[str, ...] | None  # None: every device of torch
    unavailable: Callable[[], str | None]
    operations: dict[str, Implementation] = field(repr=False)
    only_by_name: Callable[[], tuple[str, ...]] = tuple  # devices that `auto` does not take it for
    remedy: str = ""  # for tensors on another device

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(method for method in METHODS if method in self.operations)

    def serves(self, device: str) -> bool:
        """Whether it runs on tensors of this device."""
        return self.devices is None or device in (*self.devices, *self.only_by_name())

    def why_not(self, request: Request, operation: str) -> list[str]:
        """Every reason why this backend cannot serve the request; [] if it can."""
        reasons = []
        if missing := self.unavailable():
            reasons.append(missing)
        if self.devices is not None and not self.serves(request.device):
            where = " or ".join(self.devices)
            reasons.append(f"runs on {where} tensors, got {request.device}{self.remedy}")
        if operation not in self.operations:
            remedy = (
                "; detach() the mask or use backend='reference'" if operation == "dense" else ""
            )
            reasons.append(f"does not compute {OPERATIONS[operation].summary}{remedy}")
            return reasons
        limits = self.operations[operation]
        if request.dtype not in limits.dtypes:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in limits.dtypes)
            reasons.append(f"takes {accepted}, got {str(request.dtype).removeprefix('torch.')}")
        if limits.largest_rank is not None and request.rank > limits.largest_rank:
            reasons.append(f"takes ranks up to {limits.largest_rank}, got {request.rank}")
        for feature in limits.lacks:
            if getattr(request, feature):
                reasons.append(f"does not take {FEATURES[feature]}")
        return reasons


_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# In the order in which `auto` asks them.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            "cpu",
            "C++",
            ("cpu",),
            cpu_unavailable,
            {
                "direct": Implementation(lambda: native.attention("cpu", "direct")),
                "transform": Implementation(lambda: native.attention("cpu", "transform")),
                "scan": Implementation(lambda: native.attention("cpu", "scan")),
                "varlen": Implementation(native.cpu_varlen),
                "layer": Implementation(native.cpu_layer),
                "small_layer": Implementation(native.cpu_small_layer),
                "project": Implementation(lambda: native.ops.cpu_project),
                "stages": Implementation(native.cpu_stages),
                "scan_stages": Implementation(native.cpu_scan_stages),
                "stream": Implementation(native.cpu_stream),
            },
        ),
        Backend(
            "cuda",
            "CUDA C++",
            ("cuda",),
            cuda_unavailable,
            {
                "direct": Implementation(native.cuda_direct),
                "transform": Implementation(
                    lambda: native.attention("cuda", "transform"),
                    largest_rank=1,
                    lacks=tuple(FEATURES),
                ),
                "project": Implementation(lambda: native.ops.cuda_project),
            },
        ),
        Backend(
            "triton",
            "Triton",
            ("cuda",),
            _triton_unavailable,
            {
                "direct": Implementation(
                    lambda: _triton("direct", Kernels), _TRITON_DTYPES, largest_rank=16
                ),
                "transform": Implementation(
                    lambda: _triton("transform", Kernels),
                    _TRITON_DTYPES,
                    largest_rank=1,
                    lacks=tuple(FEATURES),
                ),
                "layer": Implementation(
                    lambda: LayerKernels(*_by_torch(*_triton("layer", LayerKernels))),
                    _TRITON_DTYPES,
                ),
                "project": Implementation(
                    lambda: _triton_module("project").project, _TRITON_DTYPES
                ),
            },
            only_by_name=_interpreter,
            remedy=" (to interpret it on the CPU, start Python with TRITON_INTERPRET=1)",
        ),
        Backend(
            "reference",
            "eager torch",
            None,
            lambda: None,
            {
                "direct": Implementation(
                    lambda: Kernels(*_by_torch(reference_direct.forward, reference_direct.backward))
                ),
                "dense": Implementation(lambda: _by_torch(reference_direct.dense)[0]),
                "transform": Implementation(
                    lambda: Kernels(
                        *_by_torch(reference_transform.forward, reference_transform.backward)
                    )
                ),
                "scan": Implementation(
                    lambda: Kernels(*_by_torch(reference_scan.forward, reference_scan.backward))
                ),
                "stages": Implementation(lambda: Stages(1, *reference_stages.STAGES)),
                "tensor_stages": Implementation(lambda: Stages(1, *reference_tensor_stages.STAGES)),
                "scan_stages": Implementation(lambda: ScanStages(*reference_scan_stages.STAGES)),
                "stream": Implementation(
                    lambda: StreamKernels(
                        reference_stream.append, reference_stream.query, reference_stream.step
                    )
                ),
            },
        ),
    )
}


def candidates(device: str) -> list[Backend]:
    """The backends that `auto` may take for tensors on this device, in order."""
    return [b for b in BACKENDS.values() if device not in b.only_by_name()]


def why_not(request: Request, operation: str, backend: str) -> list[str]:
    """Every reason why the named backend cannot serve the request by this operation."""
    return OPERATIONS[operation].why_not(request) + BACKENDS[backend].why_not(request, operation)


def can_serve(request: Request, operation: str, backend: str) -> bool:
    """Whether the named backend, or any with "auto", serves the request by this operation."""
    names = [b.name for b in candidates(request.device)] if backend == "auto" else [backend]
    return any(not why_not(request, operation, name) for name in names)


@lru_cache(maxsize=1024)
def select(request: Request, operation: str, backend: str) -> Backend:
    """The backend that serves the request by the given operation.

    `auto` takes the first of BACKENDS that can and logs once why a faster one could not. A named
    backend that cannot raises with every reason.
    """
    if reasons := OPERATIONS[operation].why_not(request):
        method = "direct" if operation in ("direct", "dense") else "transform"
        raise ValueError(f"method {method!r} cannot serve this call: " + "; ".join(reasons))
    if backend != "auto":
        if reasons := BACKENDS[backend].why_not(request, operation):
            raise ValueError(f"backend {backend!r} cannot serve this call: " + "; ".join(reasons))
        return BACKENDS[backend]
    for candidate in candidates(request.device):
        reasons = candidate.why_not(request, operation)
        if not reasons:
            return candidate
        if candidate.devices is None or request.device in candidate.devices:
            _log.info("backend %s not taken: %s", candidate.name, "; ".join(reasons))
    raise ValueError(
        f"no backend computes {OPERATIONS[operation].summary} for {request.dtype} tensors on "
        f"{request.device}"
    )


@lru_cache(maxsize=64)
def kernels(backend: str, operation: str) -> Any:
    """What runs an operation on a backend."""
    return BACKENDS[backend].operations[operation].load()


def feature_table() -> str:
    """The table as Markdown: a row per operation, a column per backend."""
    lines = ["| operation | " + " | ".join(BACKENDS) + " |", "|---" * (len(BACKENDS) + 1) + "|"]
    for name, operation in OPERATIONS.items():
        cells = [_cell(backend, name) for backend in BACKENDS.values()]
        lines.append(f"| {name}: {operation.summary} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(backend: Backend, operation: str) -> str:
    found = backend.operations.get(operation)
    if found is None:
        return "-"
    words = []
    if found.dtypes != DTYPES:
        names = {torch.float64: "fp64", torch.float32: "fp32"}
        names |= {torch.bfloat16: "bf16", torch.float16: "fp16"}
        words.append("no " + ", ".join(names[x] for x in DTYPES if x not in found.dtypes))
    if found.largest_rank is not None:
        words.append(f"rank up to {found.largest_rank}")
    if found.lacks:
        arguments = {"key_bias": "`key_bias`", "slopes": "`alibi_slopes`", "gaussian": "Gaussian"}
        words.append("no " + ", ".join(arguments[x] for x in found.lacks))
    return "yes" + (f" ({', '.join(words)})" if words else "")
