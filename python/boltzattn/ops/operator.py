"""How an operator of this package meets torch: schema, kernel, fake, autograd and vmap.

Schemas are defined in Python, so the operators exist even where no extension was built. Method and
backend are chosen inside the operator: a compiled graph holds one node for every size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from boltzattn.dispatch.names import NAMESPACE
from boltzattn.dispatch.torch_modes import (
    NO_TENSORS,
    forward_mode_active,
    may_bypass_dispatcher,
)
from boltzattn.problem import TENSOR_FIELDS, OutputGradients, Saved, schema, unflatten

library = torch.library.Library(NAMESPACE, "FRAGMENT")
_KERNEL = "CompositeExplicitAutograd"  # the dispatch key of kernels for every device


def needs_gradient(fields: Sequence[Any]) -> bool:
    if torch.is_grad_enabled():
        for x in fields:
            if type(x) not in NO_TENSORS and isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


class Operator:
    """`torch.ops.boltzattn.<name>`, called with tuples.

    The operator that torch sees takes the fields of the tuples. Where nothing needs to see it, a
    call goes to the kernel directly.
    """

    def __init__(
        self,
        name: str,
        kinds: tuple[Any, ...],
        results: str,
        kernel: Callable,
        fake: Callable,
        complete: Callable = lambda found, _: found,
    ) -> None:
        """`kernel` and `fake` take tuples of these kinds.

        `complete(found, promised)` turns what the kernel found into what the fake promised, for
        kernels that may leave a result out where the dispatcher is bypassed.
        """
        self.kinds, self.kernel = kinds, kernel
        self.name = name
        self.function: Any = None
        self.eager_function: Any = None
        self.forward_mode_function: Any = None
        library.define(f"{name}({schema(*kinds)}) -> {results}")
        self.registered = self._of_fields(
            lambda *tuples: complete(kernel(*tuples), lambda: fake(*tuples))
        )
        library.impl(name, self.registered, _KERNEL)
        torch.library.register_fake(f"{NAMESPACE}::{name}", self._of_fields(fake), lib=library)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def _check_devices(self, fields: Sequence[Any]) -> None:
        """Raise unless all tensors share a device.

        One meta tensor among real ones would make torch take the fake kernel, and the results would
        be memory that nobody has written.
        """
        device = fields[0].device
        for i, x in enumerate(fields):
            if isinstance(x, Tensor) and x.device != device:
                names = [argument.split()[-1] for argument in schema(*self.kinds).split(", ")]
                raise ValueError(
                    f"{names[i]} must be on the device of {names[0]}, {device}, got {x.device}; "
                    f"move it with {names[i]}.to({names[0]}.device)"
                )

    def _of_fields(self, function: Callable) -> Callable:
        """`function`, which takes tuples, as torch calls it."""

        def run(*fields: Any) -> Any:
            self._check_devices(fields)
            return function(*unflatten(fields, *self.kinds))

        return run

    def differentiate_by(
        self, function: type[torch.autograd.Function], jvp: Callable | None = None
    ) -> None:
        """Make the operator differentiable; `function` takes the fields of the tuples.

        `jvp` computes tangents in forward mode; without it forward mode raises.
        """
        self.function = function
        self.eager_function = _without_setup_context(function, self)
        self.forward_mode_function = with_jvp(function, jvp) if jvp else function

        def autograd_kernel(*fields: Any) -> Any:
            if forward_mode_active():
                self._check_devices(fields)
                return self.forward_mode_function.apply(*fields)
            if needs_gradient(fields):
                self._check_devices(fields)
                return self.function.apply(*fields)
            with torch._C._AutoDispatchBelowAutograd():
                return self.overload(*fields)

        library.impl(self.name, autograd_kernel, "Autograd")

    def batch_by_vmap(self, results: int) -> None:
        """Let vmap add a leading dimension to every tensor; there are this many results."""

        def rule(info: Any, in_dims: tuple, *fields: Any) -> tuple[Any, Any]:
            return self.overload(*batched(info, in_dims, fields)), (0,) * results

        torch.library.register_vmap(f"{NAMESPACE}::{self.name}", rule, lib=library)

    def loop_by_vmap(self, info: Any, in_dims: tuple, *fields: Any) -> tuple[Any, Any]:
        """A rule for vmap: one call after the other."""
        samples = [
            self.overload(
                *(
                    x if dim is None else x.select(dim, i)
                    for x, dim in zip(fields, in_dims, strict=True)
                )
            )
            for i in range(info.batch_size)
        ]
        found = tuple(torch.stack(results) for results in zip(*samples, strict=True))
        return found, (0,) * len(found)

    def __call__(self, *tuples: Any) -> Any:
        tensors = [x for one in tuples for x in one[: TENSOR_FIELDS.get(type(one), 0)]]
        bypass = may_bypass_dispatcher(tensors) and not forward_mode_active()
        if bypass and not needs_gradient(tensors):
            with torch._C._AutoDispatchBelowAutograd():
                return self.kernel(*tuples)
        fields = [x for one in tuples for x in one]
        if forward_mode_active():
            return self.forward_mode_function.apply(*fields)
        if needs_gradient(tensors) and not torch.compiler.is_compiling():
            return (self.eager_function if bypass else self.function).apply(*fields)
        return self.overload(*fields)

    def run(self, *fields: Any) -> Any:
        """The operator without its gradient: the `forward` of its autograd.Function."""
        if may_bypass_dispatcher(fields):
            with torch._C._AutoDispatchBelowAutograd():
                return self.registered(*fields)
        return self.overload(*fields)


def with_jvp(function: type[torch.autograd.Function], jvp: Callable) -> Any:
    """The same Function for forward mode: torch.compile rejects every Function that has a jvp."""
    return type(function.__name__, (function,), {"jvp": staticmethod(jvp)})


def _without_setup_context(function: Any, operator: Operator) -> Any:
    """The same Function for plain eager mode.

    The separate `setup_context` is what torch.func asks for; it makes torch bind the arguments to
    the signature at every call, which takes as long as attention over a few tokens.
    """

    def forward(ctx: Any, *fields: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            results = operator.kernel(*unflatten(fields, *operator.kinds))
        function.setup_context(ctx, fields, results)
        return results

    members = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    return type(function.__name__, (torch.autograd.Function,), members)


def batched(info: Any, in_dims: tuple, arguments: tuple[Any, ...]) -> list[Any]:
    """Give every tensor the vmapped dimension as its first, by stride 0 where it has none.

    Tensors of a problem may have any number of leading dimensions, so a batch of calls is a call.
    """

    def batch(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        if dim is None:
            return x.unsqueeze(0).expand(info.batch_size, *x.shape)
        return x.movedim(dim, 0)

    return [batch(x, dim) for x, dim in zip(arguments, in_dims, strict=True)]


def materialize(grads: tuple[Tensor | None, ...], like: tuple[Tensor, ...]) -> list[Tensor]:
    """Zeros for gradients that autograd left out."""
    return [
        torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, like, strict=True)
    ]


def output_gradients(
    grad_out: Tensor | None, grad_lse: Tensor | None, results: Saved
) -> tuple[OutputGradients, Saved] | None:
    """What backward starts from, or None if autograd asks for nothing."""
    if grad_out is None and grad_lse is None:
        return None
    grad_out = torch.zeros_like(results.out) if grad_out is None else grad_out
    return OutputGradients(grad_out, grad_lse), Saved(results.out.detach(), results.lse.detach())


def save(ctx: Any, *tuples: Any) -> None:
    """Keep tuples for backward; `saved` returns them."""
    tensors: list[Tensor | None] = []
    ctx.kinds_and_numbers = kinds_and_numbers = []
    for one in tuples:
        count = TENSOR_FIELDS[type(one)]
        tensors += one[:count]
        kinds_and_numbers.append((type(one), one[count:]))
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def saved(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [
        kind._make((*islice(tensors, TENSOR_FIELDS[kind]), *numbers))
        for kind, numbers in ctx.kinds_and_numbers
    ]
