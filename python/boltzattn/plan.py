"""Which method and backend a call takes, and why not the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from boltzattn import backends
from boltzattn.backends import Request


@dataclass(frozen=True)
class Plan:
    """How a call is computed. `kernels` is the backend's (forward, backward) pair."""

    method: str
    backend: str
    kernels: tuple[Callable, Callable] = field(repr=False)


@lru_cache(maxsize=1024)
def choose(request: Request, method: str, backend: str) -> Plan:
    """The plan for a call; named methods and backends are taken or raise every reason."""
    chosen = "direct" if method == "auto" else method
    served_by = backends.select(request, chosen, backend)
    return Plan(chosen, served_by.name, served_by.kernels(chosen))


def describe(request: Request, method: str, backend: str) -> str:
    """The plan of a call in words, with every alternative and why it was not taken."""
    taken = choose(request, method, backend)
    lines = [
        f"method {taken.method}, backend {taken.backend}",
        f"  {request.heads} heads, n_q {request.n_q}, n_k {request.n_k}, rank {request.rank}, "
        f"dv {request.dv}, {str(request.dtype).removeprefix('torch.')} on {request.device}",
        "not taken:",
    ]
    for other_method in backends.METHODS:
        for other in backends.BACKENDS.values():
            if (other_method, other.name) == (taken.method, taken.backend):
                continue
            reasons = backends.method_why_not(request, other_method)
            reasons = reasons + other.why_not(request, other_method)
            lines.append(
                f"  {other_method} on {other.name}: {'; '.join(reasons) or 'would be slower'}"
            )
    return "\n".join(lines)
