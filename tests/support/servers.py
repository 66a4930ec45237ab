"""Who can serve a call: the (method, backend) pairs that the capability table offers for it.

Tests ask here instead of naming backends, so a method or backend that is added to the table is
tested by everything it claims to serve. A pair that cannot serve a call is not collected at all;
`test_backends` checks that it then refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import boltzattn
import torch
from boltzattn.dispatch.backends import Request, operation_of, why_not
from boltzattn.dispatch.extension import extension
from torch import Tensor


class Server(NamedTuple):
    """How to ask for one way of computing: `attention(q, k, v, **server.ask)`."""

    method: str
    backend: str

    @property
    def ask(self) -> dict[str, str]:
        return {"method": self.method, "backend": self.backend}

    def __str__(self) -> str:
        return f"{self.method}-{self.backend}"


def facts(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    heads: int = 1,
    n_q: int = 8,
    n_k: int = 8,
    rank: int = 1,
    dv: int = 4,
    **features: bool,
) -> Request:
    """A Request with small, harmless defaults (rank 1: what every method accepts)."""
    return Request(device, dtype, heads, n_q, n_k, rank, dv, **features)


def servers(request: Request) -> list[Server]:
    """Every (method, backend) that says it can serve the request."""
    return [
        Server(method, backend)
        for method in boltzattn.METHODS
        for backend in boltzattn.BACKENDS
        if not why_not(request, operation_of(method, request), backend)
    ]


def servers_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> list[Server]:
    """Every (method, backend) for a call at hand, where it is drawn inside a test."""
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    return servers(
        facts(
            query.device.type,
            query.dtype,
            heads=lead.numel(),
            n_q=query.shape[-2],
            n_k=key.shape[-2],
            rank=query.shape[-1],
            dv=value.shape[-1],
            is_causal=is_causal,
            attn_mask=attn_mask is not None,
            dropout=dropout_p > 0.0,
        )
    )


# Any rank up to whatever the kernels specialise for, no mask: the widest common ground.
PLAIN = servers(facts())
ANY_RANK = servers(facts(rank=3))


def instruction_sets() -> list[str]:
    """Those that the CPU kernels are compiled for and this processor has, the best first."""
    compiled = extension()
    return [] if isinstance(compiled, str) else compiled.supported_isas()


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """The CPU kernels of lesser processors than the one at hand."""
    extension().force_isa(name)
    try:
        yield
    finally:
        extension().force_isa(None)


@contextmanager
def transform_budget(nanoseconds: float) -> Iterator[None]:
    """Heads of rank 2 to 4 by the transform of the CPU, even if `direct` would be faster."""
    if isinstance(extension(), str):  # not built
        yield
        return
    extension().set_transform_budget(nanoseconds)
    try:
        yield
    finally:
        extension().set_transform_budget(0.0)
