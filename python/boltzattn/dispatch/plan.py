"""Which method a call takes, by a cost model, on the first backend that can serve it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from boltzattn.dispatch import backends
from boltzattn.dispatch.backends import BACKENDS, METHODS, Request, operation_of
from boltzattn.dispatch.costs import GPU, Costs, of_cpu
from boltzattn.problem import Choice, SelfAttentionProblem
from boltzattn.transform.tensor import choose_tensor_layout


class Plan(NamedTuple):
    """How a call is computed."""

    method: str
    backend: str
    kernels: Any


# A head of the reference's transform is some hundred calls of torch; against the reference's own
# direct method it breaks even at about 1,800 tokens.
REFERENCE_TRANSFORM_HEAD = 3e6
SCAN_HEAD = 2e4
# Gaussian scores take more panels the narrower the bandwidth is, which a plan does not know.
GAUSSIAN_LOOKUP = 4.0
# The time of a scan with biases grows with B = max|scale q| (max k - min k), which a plan does not
# know: it is that of B = 50, relative to a plain scan. Heads above about 180 go to `direct`.
BIASED_SCAN, BIASED_SCAN_PRODUCT = 1.7, 50
SMALL_PRODUCT = 1.0  # T_a S_a of a head of rank 2 to 4 at which the transform is at its best
CORE_NODES = 150  # on the key axis, at ordinary temperatures
# The kernel for few tokens packs the weights first. If they have more numbers than this, they leave
# the cache, and torch's products are faster up to this many tokens.
PACKED_WEIGHTS, PACKED_TOKENS = 200_000, 256
# It computes in fp32; where the machine has products of bf16, torch is faster above this many.
BFLOAT16_PRODUCTS = 10_000_000
# A call that is this much slower than it would be without its mask is worth a warning.
QUADRATIC_NOTICE = 4.0
# Backward takes about this much longer at the nodes, relative to forward, than by projecting first.
NODES_TRAINING = 1.3


def _costs(device: str) -> Costs:
    return GPU if device == "cuda" else of_cpu()[0]


def direct_cost(request: Request, costs: Costs | None = None) -> float:
    """Nanoseconds of the direct method, forward."""
    cost = costs or _costs(request.device)
    pairs: float = request.heads * request.n_q * request.n_k
    if request.is_causal:
        pairs *= 0.5
    return pairs * (cost.direct_pair + cost.direct_pair_column * (request.rank + request.dv))


def is_biased(request: Request) -> bool:
    """Whether logits are more than products of queries and keys."""
    return request.key_bias or request.slopes or request.gaussian


def transform_cost(
    request: Request, head: float | None = None, costs: Costs | None = None
) -> float:
    """Nanoseconds of the transform, forward; of a scan if the call is causal."""
    cost = costs or _costs(request.device)
    if request.rank > 1:
        # What B is, only the data say. The kernels ask them, and compute a head for which `direct`
        # is faster by that.
        layout = choose_tensor_layout(
            request.dtype,
            [SMALL_PRODUCT] * request.rank,
            [1.0] * request.rank,
            request.n_q + request.n_k,
            request.dv,
            min(request.n_q, request.n_k) if request.is_causal else 0,
        )
        return math.inf if layout is None else request.heads * ((head or 0.0) + layout.cost)
    if request.is_causal:
        token = cost.scan_token + cost.scan_token_column * request.dv
        if is_biased(request):
            token *= BIASED_SCAN
        return request.heads * ((head or SCAN_HEAD) + token * request.n_q)
    if request.key_bias or request.gaussian:
        token = cost.lookup_token + cost.lookup_token_column * request.dv
        tokens = request.n_q + request.n_k
        factor = GAUSSIAN_LOOKUP if request.gaussian else 1.0
        return request.heads * factor * ((head or cost.lookup_head) + token * tokens)
    head = (cost.transform_head if head is None else head) + cost.transform_head_column * request.dv
    token = cost.transform_token + cost.transform_token_column * request.dv
    tokens = request.n_q + request.n_k
    return cost.transform_call + request.heads * (head + token * tokens)


@lru_cache(maxsize=1024)
def choose(request: Request, choice: Choice) -> Plan:
    """The plan for a call; a named method or backend is taken, or raises with every reason."""
    method, backend = choice
    if method == "auto":
        method = "direct"
        transform = operation_of("transform", request)
        if backends.can_serve(request, transform, backend):
            slow = backends.select(request, transform, backend).name == "reference"
            cost = transform_cost(request, REFERENCE_TRANSFORM_HEAD if slow else None)
            method = "transform" if cost < direct_cost(request) else "direct"
    operation = operation_of(method, request)
    taken = backends.select(request, operation, backend)
    return Plan(method, taken.name, backends.kernels(taken.name, operation))


@lru_cache(maxsize=1024)
def quadratic_reason(request: Request, choice: Choice) -> str | None:
    """Why a call with a mask or dropout does not take linear time, if that costs it much."""
    if choice.method != "auto" or request.rank > 1:
        return None
    plain = request._replace(attn_mask=False, dropout=False)
    if choose(plain, choice).method != "transform":
        return None
    if direct_cost(request) < QUADRATIC_NOTICE * transform_cost(plain):
        return None
    cause, remedy = (
        ("attn_mask", "pass is_causal=True, key_padding_mask or key_bias if that is what it says")
        if request.attn_mask
        else ("dropout_p", "drop outputs instead of weights")
    )
    return (
        f"{cause} makes this call take quadratic time (n_q = {request.n_q}, n_k = {request.n_k}), "
        f"where rank 1 could take linear time: {remedy}. boltzattn.set_quadratic('ignore') "
        "silences this warning, and 'error' makes it an error"
    )


class LayerRequest(NamedTuple):
    """The facts of a self-attention layer that decide how it is computed."""

    device: str
    dtype: torch.dtype
    batch: int
    num_heads: int
    n: int
    rank: int
    d: int
    dv: int
    d_out: int
    projects_out: bool
    is_causal: bool
    adds_mask: bool  # a floating key_mask
    training: bool  # backward follows

    @classmethod
    def of(cls, problem: SelfAttentionProblem, training: bool) -> LayerRequest:
        x, w_o, num_heads, mask = problem.x, problem.w_o, problem.num_heads, problem.key_mask
        *lead, n, d = x.shape
        width = problem.w_v.shape[0]
        return cls(
            x.device.type,
            x.dtype,
            math.prod(lead),
            num_heads,
            n,
            problem.w_q.shape[0] // num_heads,
            d,
            width // num_heads,
            width if w_o is None else w_o.shape[0],
            w_o is not None,
            problem.is_causal,
            mask is not None and mask.dtype != torch.bool,
            training,
        )

    def attention(self) -> Request:
        """The attention of the projected tokens."""
        return Request(
            self.device,
            self.dtype,
            self.num_heads * self.batch,
            self.n,
            self.n,
            self.rank,
            self.dv,
            self.is_causal,
        )


@lru_cache(maxsize=1024)
def choose_layer(request: LayerRequest, choice: Choice) -> str:
    """The way to compute a layer, "first", "small" or "nodes"; see `ops.layer`."""
    if 0 in (request.batch, request.n, request.d, request.d_out):
        return "first"
    if _projects_at_nodes(request, choice):
        return "nodes"
    return "small" if _is_small(request, choice) else "first"


@lru_cache(maxsize=1024)
def layer_kernels(request: LayerRequest, operation: str, choice: Choice) -> Any:
    """What computes "small_layer", "project" or "layer" for this layer."""
    taken = backends.select(request.attention(), operation, choice.backend)
    return backends.kernels(taken.name, operation)


def _is_small(layer: LayerRequest, choice: Choice) -> bool:
    """Whether one kernel takes less time than attention between torch's products."""
    request = layer.attention()
    taken = choose(request, choice)
    if taken.method != "direct" or backends.why_not(request, "small_layer", taken.backend):
        return False
    weights, tokens = layer.num_heads * layer.dv * (layer.d + layer.d_out), layer.n * layer.batch
    if weights > PACKED_WEIGHTS and tokens < PACKED_TOKENS:
        return False
    if layer.dtype == torch.bfloat16 and weights * tokens > BFLOAT16_PRODUCTS:
        return not torch.cpu._is_avx512_bf16_supported()
    return True


def _projects_at_nodes(layer: LayerRequest, choice: Choice) -> bool:
    """Whether the projections of value and output are cheaper at the nodes."""
    if layer.rank != 1 or layer.is_causal or layer.adds_mask:
        return False
    if layer.num_heads > 1 and not layer.projects_out:  # the outputs of the heads do not add up
        return False
    request = layer.attention()
    if choose(request, choice).method != "transform":
        return False
    if not all(
        backends.can_serve(request, operation, choice.backend) for operation in ("layer", "project")
    ):
        return False
    at_nodes, first = projection_costs(layer, _costs(layer.device))
    return at_nodes * (NODES_TRAINING if layer.training else 1.0) < first


def projection_costs(layer: LayerRequest, cost: Costs) -> tuple[float, float]:
    """Nanoseconds, forward, that differ: of projecting at the nodes, and of projecting first."""
    heads, n, d, dv, d_out = layer.num_heads * layer.batch, layer.n, layer.d, layer.dv, layer.d_out
    outward = cost.product * dv if layer.projects_out else 0.0
    # The core meets the weight in every head; w_o w_v is formed once for the whole batch.
    fixed = d * d_out * heads * CORE_NODES * cost.core_product
    fixed += d * d_out * layer.num_heads * outward
    fixed += heads * cost.transform_head_column * (d_out - dv)
    at_nodes = fixed + heads * n * cost.layer_token_column * (d + d_out)
    column = 2 * cost.transform_token_column + cost.product * d
    return at_nodes, heads * n * (column * dv + outward * d_out)


def _why_not_taken(other: Choice, taken: Plan, asked: Choice) -> str:
    """Why a plan that could serve the call was not taken."""
    for name, wanted in asked._asdict().items():
        if wanted not in ("auto", getattr(other, name)):
            return f"{name}={wanted!r} was asked for"
    return "would be slower" if other.method != taken.method else f"comes after {taken.backend}"


def describe(request: Request, choice: Choice, details: Sequence[str] = ()) -> str:
    """The plan of a call in words, with every alternative and why it was not taken.

    details: lines about what the kernels find in the data.
    """
    taken, rank_one = choose(request, choice), request.rank == 1
    lines = [
        f"method {taken.method}, backend {taken.backend}",
        f"  {request.heads} heads, n_q {request.n_q}, n_k {request.n_k}, rank {request.rank}, "
        f"dv {request.dv}, {str(request.dtype).removeprefix('torch.')} on {request.device}",
    ]
    if taken.method == "transform" and rank_one and request.is_causal and is_biased(request):
        lines.append(
            "  its time depends on max|scale q| (max k - min k), taken to be "
            f"{BIASED_SCAN_PRODUCT}; heads above about 180 are computed by direct"
        )
    if taken.method == "transform" and not rank_one:
        lines.append(
            "  its time depends on B, the range of the logits along every axis; heads that direct "
            "computes faster are computed by direct"
        )
    lines += [f"  {line}" for line in details]
    lines.append("not taken:")
    here = [name for name, backend in BACKENDS.items() if backend.serves(request.device)]
    for method in METHODS:
        for backend in here:
            if (method, backend) != (taken.method, taken.backend):
                reasons = backends.why_not(request, operation_of(method, request), backend)
                if not reasons:
                    reasons = [_why_not_taken(Choice(method, backend), taken, choice)]
                lines.append(f"  {method} on {backend}: {'; '.join(reasons)}")
    if elsewhere := [name for name in BACKENDS if name not in here]:
        lines.append(f"  {', '.join(elsewhere)}: for tensors on other devices than this")
    return "\n".join(lines)
