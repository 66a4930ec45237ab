"""Whether the package serves a case as the error rule asks.

The floor of the rule is 4 ulp of twice the magnitude (`fuzz.oracle`), that is 4 to 8 eps of
|g| |v| |k| for a gradient: rounding query, key, value and the incoming gradient by half an eps
each, and the weights by that of the lse they are computed from again, moves the result by as much.
A certified method is held to its certificate.

At rank > 1, with a bias or from a difference a logit is a sum, which is rounded at least once, by
half an ulp and so by up to half an eps of the logit; a method that holds logits in the dtype cannot
do better, and two keys can be rounded in opposite directions. Eager does no better, but its error
may be that of one row whose logits all its orders happen to round well, so the floor has to say it:
half an eps times what a relative change of the logits does (`by_logits` in `fuzz.oracle`). Else a
logit is one product, for which eager has the same number of roundings, and the floor stays as it
is.

A transform under a bias leaves out keys that weigh less than the error it aims at (LEFT_OUT,
docs/lookup.md). Where one key has all the weight, gradients of queries, keys and biases are made of
nothing else. So its floor has that error times the gradient that such a key would have with all the
weight.

Products below the smallest normal number are rounded by as much as that one is, each of those that
a sum has: over columns, coordinates, and in gradients over queries or keys.
"""

from __future__ import annotations

import math
import warnings

import torch
from errors import CERTIFIED, assert_accurate

from fuzz.calls import eagers, ours
from fuzz.cases import DTYPES, Case, Inputs, build, scale_of
from fuzz.oracle import truth

# Weights that a transform under a bias may leave out.
LEFT_OUT = {"fp64": 1e-14, "fp32": 1e-8, "bf16": 1e-6, "fp16": 1e-6}


def _of_one_key(case: Case, inputs: Inputs) -> dict[str, float]:
    """The largest gradients that a key with all the weight can have, by name."""

    def largest(*names: str) -> float:
        tensors = [inputs.tensors[name].double() for name in names]
        return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)

    def range_of(*names: str) -> float:
        numbers = torch.cat([inputs.tensors[name].double().flatten() for name in names])
        return float(numbers.max() - numbers.min()) if numbers.numel() else 0.0

    grad = float(inputs.grad_out.double().abs().max()) if inputs.grad_out.numel() else 0.0
    if inputs.grad_lse is not None and inputs.grad_lse.numel():
        grad += float(inputs.grad_lse.double().abs().max())
    of_logit = grad * case.dv * 2 * max(largest("value"), 1.0)
    scale = abs(scale_of(case))
    apart = scale * range_of("query", "key")
    to_query, to_key = (
        (apart, apart)
        if case.score == "gaussian"
        else (scale * largest("key"), scale * largest("query"))
    )
    rows = max(1, case.n_q) * max(1, math.prod(case.lead))
    return {
        "grad_query": of_logit * to_query,
        "grad_key": of_logit * to_key * rows,
        "grad_value": grad * rows,
        "grad_key_bias": of_logit * rows,
    }


def check(case: Case) -> None:
    """Raise AssertionError where the case is wrong, and whatever else the package raises."""
    inputs = build(case)
    actual = ours(case, inputs)
    exact, magnitudes, by_logits = truth(case, inputs)
    info = torch.finfo(DTYPES[case.dtype])
    certified = case.method != "direct" and DTYPES[case.dtype] in CERTIFIED
    terms = case.dv + case.rank + case.n_q + case.n_k
    factor, least = 1.0 if certified else 2.0, info.smallest_normal * terms
    if case.kind == "merge":  # what is merged is as accurate as the lse of the parts
        factor *= max(1.0, magnitudes["lse"])
    sizes = {name: max(factor * size, least) for name, size in magnitudes.items()}
    is_sum = case.rank > 1 or case.score == "gaussian" or case.key_bias or case.alibi
    is_sum = is_sum or "bias" in case.mask
    if is_sum and not certified:
        # 4 ulp of a number are at least 2 eps of it.
        sizes = {name: size + by_logits.get(name, 0.0) / 4 for name, size in sizes.items()}
    if certified and (case.score == "gaussian" or case.key_bias):
        # As above: 4 ulp are at least 2 eps.
        share = LEFT_OUT[case.dtype] / (2 * info.eps)
        left_out = _of_one_key(case, inputs)
        sizes = {name: size + share * left_out.get(name, 0.0) for name, size in sizes.items()}
    # A result that the dtype cannot hold is not judged.
    judged = {name: x for name, x in actual.items() if magnitudes[name] < 0.25 * info.max}
    if judged:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_accurate(
                judged,
                exact,
                eagers(case, inputs),
                magnitudes=sizes,
                method="direct" if case.method == "direct" else "transform",
            )
    # Projections, tangents and second derivatives are torch's products, whose bits depend on
    # the threads.
    kernels_alone = case.backend == "cpu" and case.derivative in ("forward", "vjp")
    if case.threads > 1 and kernels_alone and case.kind in ("attention", "varlen", "merge"):
        one = ours(Case(**{**case.__dict__, "threads": 1}), inputs)
        for name, x in actual.items():
            assert torch.equal(x.nan_to_num(nan=7.0), one[name].nan_to_num(nan=7.0)), (
                f"{name}: {case.threads} threads and one do not give the same bits"
            )
