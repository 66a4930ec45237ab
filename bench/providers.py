"""The implementations that are compared: one table, with what each of them cannot run and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import boltzattn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases import Case
from bench.environment import glibc_mallopt
from bench.problems import AttentionProblem, LayerProblem, Problem, Weights, make_problem

Reason = str | None
REFERENCE = "(reference)"


@dataclass
class Bound:
    """A provider bound to one problem. Without leaves there is nothing to differentiate."""

    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor] = ()
    weights: Weights | None = None  # of a layer, if they are not the low-rank ones


@dataclass(frozen=True)
class Provider:
    """One row of the table.

    Attributes:
        kind: "exact" (must pass the accuracy check), "approximate" (its error is shown, but no
            speed-up) or "yardstick" (computes something else and has no error).
        growth: time grows as n ** growth; with 2, a short run predicts the time of a long one.
        matrices: number of n x n matrices in memory at once, to avoid swapping.
        certified: has an error certificate, and is checked against it.
        compiles: compiles for each shape, so memory is measured in the second call.
    """

    name: str
    levels: tuple[str, ...]
    kind: str
    growth: int
    build: Callable[[Any], Bound]
    why_not: Callable[[Case], Reason] = lambda case: None
    matrices: Callable[[Case], int] = lambda case: 0
    certified: bool = False
    compiles: bool = False


# Speed-ups are relative to the fastest of these.
BASELINES = {
    "attention": ("sdpa", "sdpa padded"),
    "layer": ("linear",),
    "module": ("nn.MultiheadAttention",),
}


@lru_cache(maxsize=1)
def table() -> dict[str, Provider]:
    """Every provider by name, in the order of the tables."""
    attention, layer, module = ("attention",), ("layer",), ("module",)
    everywhere = attention + layer + module
    exact, approximate, yardstick = "exact", "approximate", "yardstick"
    layer_growth = 1 if "transform" in boltzattn.METHODS else 2  # layers here have rank 1
    rows = [
        Provider("clone", everywhere, yardstick, 1, _clone),
        Provider("naive", attention, exact, 2, _naive, matrices=lambda c: 5 if c.backward else 3),
        Provider("sdpa", attention, exact, 2, _sdpa, matrices=_sdpa_matrices),
        Provider("sdpa padded", attention, exact, 2, _sdpa_padded, _nothing_to_pad),
        Provider("flex compiled", attention, exact, 2, _flex, _flex_why_not, compiles=True),
        Provider("pykeops", attention, exact, 2, _pykeops, _pykeops_why_not, compiles=True),
        Provider("nystrom", attention, approximate, 1, _nystrom, _nystrom_why_not),
        Provider("performer", attention, approximate, 1, _performer, _performer_why_not),
        *_boltzattn_attention(),
        Provider("linear", layer, yardstick, 1, _linear),
        Provider("sdpa layer", layer, exact, 2, _sdpa_layer),
        Provider("nn.MultiheadAttention", module, exact, 2, _multihead),
        Provider(
            "boltzattn self_attention",
            layer + module,
            exact,
            layer_growth,
            _self_attention,
            certified=True,
        ),
        Provider(
            "boltzattn LowRankAttention",
            module,
            exact,
            layer_growth,
            _low_rank,
            _low_rank_why_not,
            certified=True,
        ),
    ]
    return {row.name: row for row in rows}


def taking_part(case: Case, wanted: Sequence[str] = ()) -> dict[str, Reason]:
    """For the wanted providers of the case's level (see `Entry`): None, or why they cannot run.

    The reference backend is slow by design and runs only if no other backend has the method.
    """
    prefixes = tuple(name for name in wanted if name not in table())
    reasons = {
        provider.name: _no_such_pages(case) or provider.why_not(case)
        for provider in table().values()
        if case.level in provider.levels
        and (not wanted or provider.name in wanted or provider.name.startswith(prefixes))
    }
    served = {
        name.split(" (")[0] for name, r in reasons.items() if r is None and REFERENCE not in name
    }
    return {
        name: reason
        for name, reason in reasons.items()
        if REFERENCE not in name or (reason is None and name.split(" (")[0] not in served)
    }


def _no_such_pages(case: Case) -> Reason:
    if case.fresh_pages and glibc_mallopt() is None:
        return "needs glibc's allocator"
    return None


def _clone(problem: Problem) -> Bound:
    return Bound(problem.bulk.detach().clone)


def _of_qkv(problem: AttentionProblem, function: Callable[..., Tensor], **options: Any) -> Bound:
    return Bound(partial(function, *problem.leaves, **options), problem.leaves)


def _naive(problem: AttentionProblem) -> Bound:
    later = None
    if problem.case.causal:
        ones = torch.ones(problem.case.n, problem.case.n, dtype=torch.bool)
        later = ones.triu_(1).to(problem.query.device)

    def naive(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = query @ key.mT * problem.scale
        if later is not None:
            logits = logits.masked_fill(later, -math.inf)
        return torch.softmax(logits, dim=-1) @ value

    return _of_qkv(problem, naive)


def _sdpa(problem: AttentionProblem) -> Bound:
    return _of_qkv(problem, F.scaled_dot_product_attention, is_causal=problem.case.causal)


def _sdpa_matrices(case: Case) -> int:
    if case.rank == case.dv or case.device == "cuda":
        return 0
    return 5 if case.backward else 3  # unequal widths use the dense path on the CPU


def _sdpa_padded(problem: AttentionProblem) -> Bound:
    missing = (0, problem.case.dv - problem.case.rank)

    def padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            F.pad(query, missing),
            F.pad(key, missing),
            value,
            is_causal=problem.case.causal,
            scale=problem.scale,
        )

    return _of_qkv(problem, padded)


def _nothing_to_pad(case: Case) -> Reason:
    return None if case.rank < case.dv else f"rank {case.rank} is not below dv {case.dv}"


def _flex(problem: AttentionProblem) -> Bound:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n, mask = problem.case.n, None
    if problem.case.causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, n, n, device=problem.query.device
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    return _of_qkv(problem, compiled, scale=problem.scale, block_mask=mask)


def _flex_why_not(case: Case) -> Reason:
    return "has no backward on the CPU" if case.backward and case.device == "cpu" else None


def _pykeops(problem: AttentionProblem) -> Bound:
    import pykeops
    from pykeops.torch import LazyTensor

    pykeops.set_verbose(False)

    def reduce(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query_i = LazyTensor(query.unsqueeze(-2) * problem.scale)  # [..., n, 1, rank]
        key_j, value_j = LazyTensor(key.unsqueeze(-3)), LazyTensor(value.unsqueeze(-3))
        return (query_i | key_j).sumsoftmaxweight(value_j, dim=3)

    return _of_qkv(problem, reduce)


def _pykeops_why_not(case: Case) -> Reason:
    if find_spec("pykeops") is None:
        return "pykeops is not installed"
    if case.causal:
        return "has no causal mask"
    return None if case.dtype in ("float32", "float64") else f"softmax has no {case.dtype}"


def _nystrom(problem: AttentionProblem) -> Bound:
    from nystrom_attention import NystromAttention

    case = problem.case

    class Given(nn.Module):
        """Replaces the projection of the module: returns q, k and v unchanged."""

        def forward(self, x: Tensor) -> Given:
            return self

        def chunk(self, *_: Any, **__: Any) -> list[Tensor]:
            return [x.transpose(1, 2).flatten(2) for x in problem.leaves]

    module = NystromAttention(
        dim=case.heads * case.dv,
        dim_head=case.rank,
        heads=case.heads,
        num_landmarks=min(256, case.n),
        residual=False,
    )
    module.to_qkv, module.to_out = Given(), nn.Identity()
    tokens = problem.value.detach().transpose(1, 2).flatten(2)  # read for its shape only

    def nystrom() -> Tensor:
        return module(tokens).unflatten(-1, (case.heads, case.dv)).transpose(1, 2)

    return Bound(nystrom, problem.leaves)


def _nystrom_why_not(case: Case) -> Reason:
    if find_spec("nystrom_attention") is None:
        return "nystrom-attention is not installed"
    if case.causal:
        return "has no causal mask"
    return None if case.n % min(256, case.n) == 0 else "n is not a multiple of its 256 landmarks"


def _performer(problem: AttentionProblem) -> Bound:
    from performer_pytorch import FastAttention

    module = FastAttention(dim_heads=problem.case.rank, nb_features=256)
    return _of_qkv(problem, module.to(problem.query))


def _performer_why_not(case: Case) -> Reason:
    if find_spec("performer_pytorch") is None:
        return "performer-pytorch is not installed"
    return "its causal form needs a CUDA build" if case.causal else None


def _boltzattn_attention() -> list[Provider]:
    """Each method on each backend, named `boltzattn <method> (<backend>)`."""
    return [
        Provider(
            f"boltzattn {method} ({backend})",
            ("attention",),
            "exact",
            growth=1 if method == "transform" else 2,
            build=partial(_boltzattn, method, backend),
            why_not=partial(_boltzattn_why_not, method, backend),
            certified=method == "transform",
        )
        for method in boltzattn.METHODS
        for backend in boltzattn.BACKENDS
    ]


def _boltzattn(method: str, backend: str, problem: AttentionProblem) -> Bound:
    return _of_qkv(
        problem,
        boltzattn.attention,
        is_causal=problem.case.causal,
        method=method,
        backend=backend,
    )


@lru_cache(maxsize=256)
def _boltzattn_why_not(method: str, backend: str, case: Case) -> Reason:
    """The error of a call with two tokens, if it raises."""
    tiny = make_problem(replace(case, n=2, batch=1, heads=1))
    try:
        _boltzattn(method, backend, tiny).forward()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return None


def _linear(problem: LayerProblem) -> Bound:
    dim = problem.case.dim
    weight = (
        torch.randn(dim, dim).div_(dim**0.5).to(problem.x).requires_grad_(problem.case.backward)
    )
    return Bound(partial(F.linear, problem.x, weight), (problem.x, weight))


def _sdpa_layer(problem: LayerProblem) -> Bound:
    case, w = problem.case, problem.low_rank
    missing = (0, case.dv - case.rank)

    def split(weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(problem.x, weight, bias).unflatten(-1, (case.heads, -1)).transpose(1, 2)

    def layer() -> Tensor:
        query, key = (F.pad(split(w_, b), missing) for w_, b in ((w.q, w.b_q), (w.k, w.b_k)))
        out = F.scaled_dot_product_attention(
            query, key, split(w.v, w.b_v), is_causal=case.causal, scale=case.rank**-0.5
        )
        return F.linear(out.transpose(1, 2).flatten(2), w.o, w.b_o)

    return Bound(layer, (problem.x, *w.tensors()))


def _self_attention(problem: LayerProblem) -> Bound:
    w = problem.low_rank
    call = partial(
        boltzattn.self_attention,
        problem.x,
        w.q,
        w.k,
        w.v,
        w.o,
        num_heads=problem.case.heads,
        is_causal=problem.case.causal,
        b_q=w.b_q,
        b_k=w.b_k,
        b_v=w.b_v,
        b_o=w.b_o,
    )
    return Bound(call, (problem.x, *w.tensors()))


def _of_module(problem: LayerProblem, module: nn.Module, weights: Weights, state: dict) -> Bound:
    state |= {
        "in_proj_bias": torch.cat([weights.b_q, weights.b_k, weights.b_v]),
        "out_proj.weight": weights.o,
        "out_proj.bias": weights.b_o,
    }
    own = None if weights is problem.low_rank else weights
    module.load_state_dict({name: x.detach() for name, x in state.items()})
    module.to(problem.x).requires_grad_(problem.case.backward)
    x = problem.x

    def forward() -> Tensor:
        return module(x, x, x, need_weights=False)[0]

    return Bound(forward, (x, *module.parameters()), own)


def _multihead(problem: LayerProblem) -> Bound:
    case, w = problem.case, problem.full_rank
    module = nn.MultiheadAttention(case.dim, case.heads, batch_first=True)
    return _of_module(problem, module, w, {"in_proj_weight": torch.cat([w.q, w.k, w.v])})


def _low_rank(problem: LayerProblem) -> Bound:
    from boltzattn.nn import LowRankAttention

    case, w = problem.case, problem.low_rank
    module = LowRankAttention(
        case.dim, case.heads, batch_first=True, rank=case.rank, head_dim=case.dv
    )
    state = {"q_proj_weight": w.q, "k_proj_weight": w.k, "v_proj_weight": w.v}
    return _of_module(problem, module, w, state)


def _low_rank_why_not(case: Case) -> Reason:
    return None if find_spec("boltzattn.nn") else "this boltzattn has no module boltzattn.nn"
