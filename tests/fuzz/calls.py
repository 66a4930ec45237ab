"""A case as a user calls it, and the same by eager softmax, the yardstick."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import boltzattn
import torch
import torch.nn.functional as F
from oracle import EAGER_RUNS, dense
from servers import instruction_set, instruction_sets, transform_budget
from torch import Tensor
from torch.autograd import forward_ad

from fuzz.cases import DTYPES, Case, Inputs, scale_of

Outputs = tuple[Tensor, ...]  # (out,) or (out, lse)
Function = Callable[..., Outputs]  # of the tensors of a case, in order


def results_of(case: Case, inputs: Inputs, function: Function) -> dict[str, Tensor]:
    """The outputs of a function and the derivatives that the case asks for, by name."""
    names, given = list(inputs.tensors), [x.detach() for x in inputs.tensors.values()]
    if case.derivative == "forward":
        with torch.no_grad():
            return _named(function(*given))
    if case.derivative == "jvp":
        with forward_ad.dual_level():
            pairs = zip(given, inputs.moves.values(), strict=True)
            duals = [forward_ad.unpack_dual(x) for x in function(*(_dual(*p) for p in pairs))]
        tangents = _named(tuple(x.tangent for x in duals), "tangent_")
        return {**_named(tuple(x.primal for x in duals)), **tangents}
    tensors = [x.requires_grad_() for x in given]
    outputs = function(*tensors)
    grads = [inputs.grad_out]
    if inputs.grad_lse is not None:
        grads.append(inputs.grad_lse.to(outputs[1].dtype))
    chosen = outputs[: len(grads)]
    if case.derivative == "vjp":
        found = torch.autograd.grad(chosen, tensors, grads)
        gradients = {f"grad_{name}": x for name, x in zip(names, found, strict=True)}
        return {**_named(outputs), **gradients}
    grads = [g.detach().requires_grad_() for g in grads]
    first = torch.autograd.grad(chosen, tensors, grads, create_graph=True)
    found = torch.autograd.grad(first, [*tensors, *grads], list(inputs.moves.values()))
    to = [*names, "grad_out", "grad_lse"]
    second = {f"double_{name}": x for name, x in zip(to, found, strict=False)}
    return {**_named(outputs), **second}


def _dual(x: Tensor, move: Tensor) -> Tensor:
    return forward_ad.make_dual(x, move)


def _named(outputs: Outputs, prefix: str = "") -> dict[str, Tensor]:
    return {prefix + name: x.detach() for name, x in zip(("out", "lse"), outputs, strict=False)}


# ---- the package ----


def _ours(case: Case, inputs: Inputs) -> Function:
    ask = {"method": case.method, "backend": case.backend, "scale": case.scale}
    masks = {"attn_mask": inputs.attn_mask, "key_padding_mask": inputs.key_padding_mask}

    def scores(biases: tuple[Tensor, ...]) -> dict[str, Any]:
        return {"score": case.score, **dict(zip(list(inputs.tensors)[3:], biases, strict=True))}

    def attention(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor) -> Outputs:
        return boltzattn.attention(
            query,
            key,
            value,
            **masks,
            **scores(biases),
            is_causal=case.causal,
            enable_gqa=case.gqa,
            return_lse=True,
            **ask,
        )

    def varlen(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor) -> Outputs:
        starts = (torch.tensor(x) for x in (inputs.starts_q, inputs.starts_k))
        out, lse = boltzattn.attention_varlen(
            *(x.transpose(0, 1) for x in (query, key, value)),
            *starts,
            **scores(biases),
            is_causal=case.causal,
            enable_gqa=case.gqa,
            return_lse=True,
            **ask,
        )
        return out.transpose(0, 1), lse

    def merge(query: Tensor, key: Tensor, value: Tensor) -> Outputs:
        parts = [
            attention(query, key[..., first:last, :], value[..., first:last, :])
            for first, last in itertools.pairwise(inputs.starts_k)
        ]
        out, lse = parts[0]
        for part in parts[1:]:
            out, lse = boltzattn.merge(out, lse, *part)
        return out, lse

    def stream(query: Tensor, key: Tensor, value: Tensor) -> Outputs:
        scale = 1.0 if case.scale is None else case.scale
        bound = max(float(query.double().abs().max()), 1e-300)
        found = boltzattn.StreamingAttention(
            case.lead, case.dv, bound, scale=scale, dtype=DTYPES[case.dtype]
        )
        for first, last in itertools.pairwise(inputs.starts_k):
            found.append(key[..., first:last, :], value[..., first:last, :])
        return found.query(query, return_lse=True)

    def layer(*tensors: Tensor) -> Outputs:
        named = dict(zip(inputs.tensors, tensors, strict=True))
        out = boltzattn.self_attention(
            **named, **masks, num_heads=case.heads, is_causal=case.causal, **ask
        )
        return (out,)

    functions: dict[str, Function] = {
        "attention": attention,
        "varlen": varlen,
        "merge": merge,
        "stream": stream,
        "layer": layer,
    }
    function = functions[case.kind]
    return torch.compile(function, backend="aot_eager") if case.compiled else function


def ours(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """The results of the package, on the instruction set and the threads of the case."""
    kernels: AbstractContextManager = nullcontext()
    if case.isa in instruction_sets():
        kernels = instruction_set(case.isa)
    if torch.get_num_threads() != case.threads:
        torch.set_num_threads(case.threads)
    try:
        with kernels, transform_budget(2e7):
            return results_of(case, inputs, _ours(case, inputs))
    finally:
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        if case.compiled:
            torch._dynamo.reset()


# ---- the yardstick ----


def _added(case: Case, biases: tuple[Tensor, ...], n_q: int, n_k: int) -> Tensor | None:
    """What a key bias and slopes add to the logits, in the dtype of the case."""
    rest, added = list(biases), None
    if case.key_bias:
        added = rest.pop(0)[..., None, :].expand(*case.lead, n_q, n_k)
    if case.alibi:
        distance = (torch.arange(n_k) - torch.arange(n_q)[:, None]).abs()
        slopes = -rest.pop(0)[..., None, None] * distance
        added = slopes if added is None else added + slopes
    return added


def _eager(case: Case, inputs: Inputs, order: int) -> Function:
    def attention(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor) -> Outputs:
        if case.key_heads:
            repeats = case.heads // case.key_heads
            key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
        return dense(
            query,
            key,
            value,
            scale=scale_of(case),
            gaussian=case.score == "gaussian",
            added=_added(case, biases, query.shape[-2], key.shape[-2]),
            order=order,
            attn_mask=inputs.attn_mask,
            key_padding_mask=inputs.key_padding_mask,
            is_causal=case.causal,
        )

    def varlen(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor) -> Outputs:
        outs, lses = [], []
        rows, columns = (itertools.pairwise(x) for x in (inputs.starts_q, inputs.starts_k))
        for (first_q, last_q), (first_k, last_k) in zip(rows, columns, strict=True):
            keys = slice(first_k, last_k)
            cut = (x[..., keys] if x.ndim == 2 else x for x in biases)
            out, lse = attention(query[:, first_q:last_q], key[:, keys], value[:, keys], *cut)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, 1), torch.cat(lses, 1)

    def layer(*tensors: Tensor) -> Outputs:
        t = dict(zip(inputs.tensors, tensors, strict=True))
        d = t["x"].shape[-1]
        columns = torch.arange(d)
        if order:
            columns = torch.randperm(d, generator=torch.Generator().manual_seed(order))

        def project(name: str) -> Tensor:
            x, w = t["x"][..., columns], t[f"w_{name}"][:, columns]
            return (
                F.linear(x, w, t.get(f"b_{name}")).unflatten(-1, (case.heads, -1)).transpose(-2, -3)
            )

        out, _ = attention(*(project(name) for name in "qkv"))
        return (F.linear(out.transpose(-2, -3).flatten(-2), t["w_o"], t.get("b_o")),)

    def merge(query: Tensor, key: Tensor, value: Tensor) -> Outputs:
        """Parts as eager gives them: their lse is rounded, and so is what is merged by it."""
        outs, lses = [], []
        for first, last in itertools.pairwise(inputs.starts_k):
            out, lse = attention(query, key[..., first:last, :], value[..., first:last, :])
            outs.append(out)
            lses.append(lse)
        weights = torch.stack(lses).softmax(0).nan_to_num(nan=0.0)
        out = sum(w[..., None] * out for w, out in zip(weights, outs, strict=True))
        return out, torch.stack(lses).logsumexp(0)

    functions: dict[str, Function] = {"varlen": varlen, "layer": layer, "merge": merge}
    return functions.get(case.kind, attention)


def eagers(case: Case, inputs: Inputs) -> Iterator[dict[str, Tensor]]:
    """Results that differ by nothing but their roundings, computed on demand."""
    for order in range(EAGER_RUNS):
        yield results_of(case, inputs, _eager(case, inputs, order))
