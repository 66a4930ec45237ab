"""Which method and backend a call takes, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from boltzattn import backends, causal
from boltzattn.backends import Request
from boltzattn.modes import transformed


@dataclass(frozen=True)
class Plan:
    """How a call is computed. `kernels` is the backend's (forward, backward) pair."""

    method: str
    backend: str
    kernels: tuple[Callable, Callable] = field(repr=False)


# Nanoseconds on one core of an AMD EPYC (Zen 3), fp32, measured by `make micro`. Only their ratio
# decides, and it decides the same way on any machine that is not very unlike.
DIRECT_PAIR = 0.75  # a query and a key: score, exponential, sums
DIRECT_PAIR_COLUMN = 0.022  # and each of the rank + dv multiply-adds
TRANSFORM_HEAD = 45_000.0  # the core, at ordinary temperatures
TRANSFORM_HEAD_COLUMN = 550.0
TRANSFORM_TOKEN = 16.0  # a query or a key
TRANSFORM_TOKEN_COLUMN = 0.32
# A head of the reference's transform is some hundred calls of torch; against the reference's own
# direct method it breaks even at about 1,800 tokens.
REFERENCE_TRANSFORM_HEAD = 3e6


def direct_cost(request: Request) -> float:
    """Nanoseconds of one core for the direct method, forward."""
    pairs: float = request.heads * request.n_q * request.n_k
    if request.is_causal:
        pairs *= 0.5
    return pairs * (DIRECT_PAIR + DIRECT_PAIR_COLUMN * (request.rank + request.dv))


def transform_cost(request: Request, head: float = TRANSFORM_HEAD) -> float:
    """Nanoseconds of one core for the transform, forward; causal calls take one per level."""
    head = head + TRANSFORM_HEAD_COLUMN * request.dv
    token = TRANSFORM_TOKEN + TRANSFORM_TOKEN_COLUMN * request.dv
    if not request.is_causal:
        return request.heads * (head + token * (request.n_q + request.n_k))
    n = min(request.n_q, request.n_k)
    leaf = request._replace(n_q=n, n_k=min(n, causal.LEAF))
    levels = max(0, math.ceil(math.log2(max(1, n / causal.LEAF))))
    problems = max(1, n / causal.LEAF)  # pairs over all levels
    return direct_cost(leaf) + request.heads * (head * problems + token * n * levels)


@lru_cache(maxsize=1024)
def choose(request: Request, method: str, backend: str) -> Plan:
    """The plan for a call; named methods and backends are taken or raise every reason."""
    if method == "auto":
        method = "direct"
        if not backends.method_why_not(request, "transform") and backends.can_serve(
            request, "transform", backend
        ):
            slow = backends.select(request, "transform", backend).name == "reference"
            cost = transform_cost(request, REFERENCE_TRANSFORM_HEAD if slow else TRANSFORM_HEAD)
            method = "transform" if cost < direct_cost(request) else "direct"
    served_by = backends.select(request, method, backend)
    kernels = served_by.kernels(method)
    if method == "transform" and request.is_causal:
        halving = served_by.halving() if served_by.halving else None
        kernels = causal.kernels(served_by.kernels("direct"), kernels, halving)
    return Plan(method, served_by.name, kernels)


# Nanoseconds of one core for a multiply-add of torch's matrix products, and of the core in fp64.
LINEAR_PRODUCT = 0.031
CORE_PRODUCT = 0.06
CORE_NODES = 150  # on the key axis, at ordinary temperatures


def projects_at_nodes(
    x: Tensor,
    w_q: Tensor,
    w_v: Tensor,
    w_o: Tensor | None,
    num_heads: int,
    method: str,
    backend: str,
) -> bool:
    """Whether a self-attention layer is cheaper with its projections applied at the nodes."""
    n, d = x.shape[-2:]
    dv = w_v.shape[0] // num_heads
    batch = math.prod(x.shape[:-2])
    d_out = dv if w_o is None else w_o.shape[0]
    sizes = (batch, n, d, dv, d_out)
    if (
        w_q.shape[0] != num_heads
        or (w_o is None and num_heads > 1)  # the heads' outputs do not add up
        or x.device.type != "cpu"
        or not all(isinstance(size, int) and size > 0 for size in sizes)  # may be symbolic
        or transformed()
    ):
        return False
    return _nodes_are_cheaper(x.dtype, num_heads, *sizes, w_o is not None, method, backend)


def _nodes_are_cheaper(
    dtype: torch.dtype,
    num_heads: int,
    batch: int,
    n: int,
    d: int,
    dv: int,
    d_out: int,
    outward: bool,
    method: str,
    backend: str,
) -> bool:
    request = Request("cpu", dtype, num_heads * batch, n, n, 1, dv)
    taken = choose(request, method, backend)
    if (taken.method, taken.backend) != ("transform", "cpu"):
        return False
    fixed = num_heads * d * d_out * (CORE_NODES * CORE_PRODUCT + outward * LINEAR_PRODUCT * dv)
    fixed += request.heads * TRANSFORM_HEAD_COLUMN * (d_out - dv)
    at_nodes = TRANSFORM_TOKEN_COLUMN * (d + d_out)
    first = 2 * TRANSFORM_TOKEN_COLUMN * dv + LINEAR_PRODUCT * dv * (d + outward * d_out)
    return fixed + request.heads * n * at_nodes < request.heads * n * first


# What torch.compiler.assume_constant_result sets: sizes are constants of a trace, and so is this.
# Its decorator would import the whole compiler, and Triton, with the package.
_nodes_are_cheaper._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
