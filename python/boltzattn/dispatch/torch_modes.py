"""What surrounds a call: autocast, and the modes and transforms that must see operators."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def exact(device: str) -> contextlib.AbstractContextManager:
    """No autocast inside: the dtypes of the tensors are what the caller has settled on."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def transformed() -> bool:
    """Whether a function transform of torch.func (vmap, grad, ...) is active in eager mode."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def unwatched(*tensors: Tensor) -> bool:
    """Whether no mode or transform (compile, export, vmap, a tensor subclass) must see operators.

    Two trips through the dispatcher in Python cost more than attention over a hundred tokens.
    """
    return (
        not torch.compiler.is_compiling()
        and all(type(x) is Tensor for x in tensors)
        and not torch._C._len_torch_dispatch_stack()
        and not transformed()
    )
