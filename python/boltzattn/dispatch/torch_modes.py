"""The state of torch around a call: autocast, function transforms, modes and subclasses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast asks for on this device, or None where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def without_autocast(device: str) -> contextlib.AbstractContextManager:
    """Kernels compute in the dtypes they were given: validation has applied autocast already."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


class _Fp32Products:
    """Products of fp32 matrices are computed in fp32, though the user allows TF32 or bf16 for them.

    The setting belongs to the whole process. So the first thread that enters switches it and the
    last that leaves restores it.
    """

    def __init__(self, setting: Any) -> None:
        self.setting = setting  # has an attribute fp32_precision
        self.lock = threading.Lock()
        self.inside = 0
        self.before = ""

    def reduced(self) -> bool:
        return self.inside > 0 or self.setting.fp32_precision in ("tf32", "bf16")

    @contextlib.contextmanager
    def in_fp32(self) -> Iterator[None]:
        with self.lock:
            if self.inside == 0:
                self.before = self.setting.fp32_precision
                self.setting.fp32_precision = "ieee"
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if self.inside == 0:
                    self._restore()

    def _restore(self) -> None:
        # "none" takes the setting of the whole backend or of torch, which is read as if it were
        # set here.
        self.setting.fp32_precision = "none"
        if self.setting.fp32_precision != self.before:
            self.setting.fp32_precision = self.before


_mkldnn: Any = torch.backends.mkldnn  # its type lacks `matmul`
_BY_MKLDNN = _Fp32Products(_mkldnn.matmul)
_PRODUCTS = {
    "cuda": _Fp32Products(torch.backends.cuda.matmul),
    "cpu": _BY_MKLDNN,
    "xpu": _BY_MKLDNN,
}


@contextlib.contextmanager
def full_precision(device: str) -> Iterator[None]:
    """For kernels made of torch's own products: neither autocast nor TF32 may shorten them."""
    products = None if torch.compiler.is_compiling() else _PRODUCTS.get(device)
    with without_autocast(device):
        if products is None or not products.reduced():
            yield
            return
        with products.in_fp32():
            yield


def functorch_active() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) is active in eager mode."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def forward_mode_active() -> bool:
    """Whether tensors may carry tangents: within `torch.func.jvp` or a forward_ad.dual_level."""
    return forward_ad._current_level >= 0


# Asked first, because issubclass and isinstance are slow for torch's tensors.
NO_TENSORS = frozenset({type(None), bool, int, float, str})
_PLAIN = NO_TENSORS | {Tensor, torch.nn.Parameter}


def may_bypass_dispatcher(fields: Sequence[Any]) -> bool:
    """Whether nothing (compile, export, vmap, a mode, a tensor subclass) must see the operator.

    Two trips through the dispatcher in Python cost more than attention over a hundred tokens.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    for x in fields:
        if type(x) not in _PLAIN and isinstance(x, Tensor):
            return False
    return torch._C._functorch.peek_interpreter_stack() is None


def overrides_torch_function(x: Any) -> bool:
    """Whether a tensor subclass has its own idea of torch's functions (a quantized weight, say)."""
    own = getattr(type(x), "__torch_function__", None)
    return getattr(own, "__func__", own) not in (
        None,
        Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
        torch._C._disabled_torch_function_impl,
    )
