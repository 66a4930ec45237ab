"""The state of torch around a call: autocast, function transforms, modes and subclasses."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
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


def functorch_active() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) is active in eager mode."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def forward_mode_active() -> bool:
    """Whether tensors may carry tangents: within `torch.func.jvp` or a forward_ad.dual_level."""
    return forward_ad._current_level >= 0


def may_bypass_dispatcher(fields: Sequence[Any]) -> bool:
    """Whether nothing (compile, export, vmap, a mode, a tensor subclass) must see the operator.

    Two trips through the dispatcher in Python cost more than attention over a hundred tokens.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    for x in fields:
        kind = type(x)
        if kind is not Tensor and issubclass(kind, Tensor) and kind is not torch.nn.Parameter:
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
