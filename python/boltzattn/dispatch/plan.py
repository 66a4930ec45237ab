"""Which method and backend a call takes, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from boltzattn.compose import causal
from boltzattn.dispatch import backends
from boltzattn.dispatch.backends import Request
from boltzattn.dispatch.torch_modes import transformed


@dataclass(frozen=True)
class Plan:
    """How a call is computed. `kernels` is the backend's (forward, backward) pair."""

    method: str
    backend: str
    kernels: tuple[Callable, Callable] = field(repr=False)


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of one device. Only ratios decide."""

    direct_pair: float  # a query and a key: score, exponential, sums
    direct_pair_column: float  # and each of the rank + dv multiply-adds
    transform_call: float
    transform_head: float  # the core, at ordinary temperatures
    transform_head_column: float
    transform_token: float  # a query or a key
    transform_token_column: float
    product: float  # a multiply-add of torch's matrix products
    core_product: float  # and of the core, in fp64


# One core of an AMD EPYC (Zen 3), fp32, measured by `make micro`; the choice is the same on any
# machine that is not very unlike.
CPU = Costs(
    direct_pair=0.75,
    direct_pair_column=0.022,
    transform_call=0.0,
    transform_head=45_000.0,
    transform_head_column=330.0,
    transform_token=16.0,
    transform_token_column=0.32,
    product=0.031,
    core_product=0.06,
)
# An A100 by its data sheet, as in triton_kernels/report.py: modelled, not measured. A pair takes
# about 30 fp32 operations (19.5e12 a second), a column of it 3 tf32 products (156e12); a token
# moves 59 bytes and a column of it, bf16, 2 (2.04e12); the core of 200 x 150 nodes is fp64 (19.5e12
# with matrix units); a call is 10 launches of 5 us that have little to do.
GPU = Costs(
    direct_pair=1.5e-3,
    direct_pair_column=4e-5,
    transform_call=5e4,
    transform_head=20.0,
    transform_head_column=3.0,
    transform_token=0.03,
    transform_token_column=1e-3,
    product=1.3e-5,
    core_product=1e-4,
)
# A head of the reference's transform is some hundred calls of torch; against the reference's own
# direct method it breaks even at about 1,800 tokens.
REFERENCE_TRANSFORM_HEAD = 3e6


def costs(device: str) -> Costs:
    return GPU if device == "cuda" else CPU


def direct_cost(request: Request) -> float:
    """Nanoseconds for the direct method, forward."""
    cost = costs(request.device)
    pairs: float = request.heads * request.n_q * request.n_k
    if request.is_causal:
        pairs *= 0.5
    return pairs * (cost.direct_pair + cost.direct_pair_column * (request.rank + request.dv))


def transform_cost(request: Request, head: float | None = None) -> float:
    """Nanoseconds for the transform, forward; causal calls take one per level."""
    cost = costs(request.device)
    head = (cost.transform_head if head is None else head) + cost.transform_head_column * request.dv
    token = cost.transform_token + cost.transform_token_column * request.dv
    if not request.is_causal:
        tokens = request.n_q + request.n_k
        return cost.transform_call + request.heads * (head + token * tokens)
    n = min(request.n_q, request.n_k)
    leaf = request._replace(n_q=n, n_k=min(n, causal.LEAF))
    levels = max(0, math.ceil(math.log2(max(1, n / causal.LEAF))))
    problems = max(1, n / causal.LEAF)  # pairs over all levels
    calls = cost.transform_call * levels
    return direct_cost(leaf) + calls + request.heads * (head * problems + token * n * levels)


@lru_cache(maxsize=1024)
def choose(request: Request, method: str, backend: str) -> Plan:
    """The plan for a call; named methods and backends are taken or raise every reason."""
    if method == "auto":
        method = "direct"
        if not backends.method_why_not(request, "transform") and backends.can_serve(
            request, "transform", backend
        ):
            slow = backends.select(request, "transform", backend).name == "reference"
            cost = transform_cost(request, REFERENCE_TRANSFORM_HEAD if slow else None)
            method = "transform" if cost < direct_cost(request) else "direct"
    served_by = backends.select(request, method, backend)
    kernels = served_by.kernels(method)
    if method == "transform" and request.is_causal:
        halving = served_by.halving() if served_by.halving else None
        kernels = causal.kernels(served_by.kernels("direct"), kernels, halving)
    return Plan(method, served_by.name, kernels)


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
        or not all(isinstance(size, int) and size > 0 for size in sizes)  # may be symbolic
        or transformed()
    ):
        return False
    return _nodes_are_cheaper(
        x.device.type, x.dtype, num_heads, *sizes, w_o is not None, method, backend
    )


def _nodes_are_cheaper(
    device: str,
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
    request = Request(device, dtype, num_heads * batch, n, n, 1, dv)
    taken = choose(request, method, backend)
    if taken.method != "transform" or taken.backend not in ("cpu", "triton"):
        return False
    cost = costs(device)
    fixed = num_heads * d * d_out * (CORE_NODES * cost.core_product + outward * cost.product * dv)
    fixed += request.heads * cost.transform_head_column * (d_out - dv)
    at_nodes = cost.transform_token_column * (d + d_out)
    first = 2 * cost.transform_token_column * dv + cost.product * dv * (d + outward * d_out)
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
