"""The transform in plain torch: against dense attention, and its derivatives of either order."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import boltzattn
import pytest
import torch
from boltzattn.problem import Directions, OutputGradients, Problem
from boltzattn.reference import direct as reference
from boltzattn.reference import transform as rt
from check import assert_attention
from servers import Server
from torch import Tensor

N, DV, SCALE = 200, 3, 0.7
PRODUCTS = (1e-3, 1.0, 30.0, 1e3, 1e5)
BACKENDS = [name for name, backend in boltzattn.BACKENDS.items() if not backend.unavailable()]

# Relative to the largest entry. Logits of size B = 1e5 carry a rounding of 1e-11, and the dense
# formula loses about as much once more where all the weight is on a few keys.
DOUBLE_BACKWARD = 1e-9
# With all the weight on one key nothing is left of some gradients, while they are sums of terms
# of size 1: from here on they count as zero.
VANISHED = 1e-20


def _ladder(n: int) -> Tensor:
    return torch.ldexp(torch.ones(n), -torch.randint(0, 40, (n,)))


def _needle(n: int) -> Tensor:
    return torch.zeros(n).index_fill(0, torch.tensor(n // 3), 1.0)


KEYS: dict[str, Callable[[int], Tensor]] = {
    "gauss": torch.randn,
    "two points": lambda n: torch.randint(0, 2, (n,)).double(),
    "needle": _needle,
    "cauchy": lambda n: torch.empty(n).cauchy_(),
    "ladder": _ladder,
    "equal": lambda n: torch.full((n,), 3.7),
    "one key": lambda n: torch.randn(1),
}


def _problem(family: str, product: float, n: int = N, dv: int = DV) -> dict[str, Tensor]:
    """Query, key, value, incoming gradients and directions of one head with B = `product`."""
    key = KEYS[family](n).double()
    extent = float(key.max() - key.min()) or 1.0
    query = torch.randn(n, dtype=torch.float64)
    query *= product / (extent * SCALE * query.abs().max())
    draw = {"value": (len(key), dv), "grad_out": (n, dv), "to_query": (n, 1)}
    draw |= {"to_key": (len(key), 1), "to_value": (len(key), dv)}
    tensors = {name: torch.randn(1, *shape, dtype=torch.float64) for name, shape in draw.items()}
    grad_lse = torch.randn(1, n, dtype=torch.float64)
    return {
        "query": query[None, :, None],
        "key": key[None, :, None],
        "grad_lse": grad_lse,
    } | tensors


def _double_backwards(p: dict[str, Tensor], key_mask: Tensor | None = None) -> tuple[tuple, tuple]:
    """Double backward of the transform and of the direct method."""
    directions = Directions(p["to_query"], p["to_key"], p["to_value"], None, None)
    grads = OutputGradients(p["grad_out"], p["grad_lse"])
    problem = _of(p["query"], p["key"], p["value"], key_mask)
    ours, theirs = (
        method.double_backward(directions, grads, problem) for method in (rt, reference)
    )
    return (*ours[0], *ours[1]), (*theirs[0], *theirs[1])


def _of(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Problem:
    return Problem(query, key, value, None, key_mask, None, None, SCALE, 0.0, False, False)


def _assert_same(actual: tuple, expected: tuple, relative: float) -> None:
    names = ("grad_out", "grad_lse", "query", "key", "value", "key_mask", "slopes")
    for name, ours, theirs in zip(names, actual, expected, strict=True):
        if theirs.numel() == 0:
            continue
        size = max(theirs.abs().max().item(), VANISHED)
        torch.testing.assert_close(
            ours, theirs, rtol=0.0, atol=relative * size, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("family", KEYS)
def test_results_and_gradients(family: str, product: float) -> None:
    p = _problem(family, product)
    names = ("query", "key", "value", "grad_out", "grad_lse")
    server = Server("transform", "reference")
    assert_attention(server, *(p[name] for name in names), scale=SCALE)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("family", KEYS)
def test_double_backward(family: str, product: float) -> None:
    _assert_same(*_double_backwards(_problem(family, product)), DOUBLE_BACKWARD)


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_double_backward_leaves_masked_keys_out(kind: torch.dtype) -> None:
    """Masked keys, even NaN, get zero gradients and change nothing."""
    p = _problem("gauss", 30.0)
    masked = torch.rand(1, N) < 0.3
    mask = masked if kind == torch.bool else torch.zeros(1, N).masked_fill(masked, -math.inf)
    actual, expected = _double_backwards(p, mask)
    _assert_same(actual, expected, DOUBLE_BACKWARD)
    for name in ("key", "value"):
        p[name] = p[name].masked_fill(masked[..., None], math.nan)
    with_nan, _ = _double_backwards(p, mask)
    for before, after in zip(actual, with_nan, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    "case", ["nan bias", "inf query", "nan value", "huge product", "huge value"]
)
def test_what_it_cannot_do_is_done_directly(case: str) -> None:
    p, mask = _problem("gauss", 30.0), None
    if case == "nan bias":
        mask = torch.randn(1, N, dtype=torch.float64)
        mask[0, 3] = math.nan
    elif case == "inf query":
        p["query"][0, 5] = math.inf
    elif case == "nan value":
        p["value"][0, 7, 1] = math.nan
    elif case == "huge product":
        p["query"] *= 1e8
    else:
        p["value"] *= 1e300
    problem = _of(p["query"], p["key"], p["value"], mask)
    incoming = OutputGradients(p["grad_out"], p["grad_lse"])

    def both_passes(method: Any) -> tuple[Tensor, ...]:
        saved = method.forward(problem)
        return (*saved, *method.backward(incoming, saved, problem))

    doubles = _double_backwards(p, mask)
    actual = both_passes(rt) + doubles[0]
    for ours, theirs in zip(actual, both_passes(reference) + doubles[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize(("n_q", "n_k", "masked"), [(0, 5, False), (5, 0, False), (5, 6, True)])
def test_nothing_to_attend_to(n_q: int, n_k: int, masked: bool) -> None:
    query, key = torch.randn(2, n_q, 1), torch.randn(2, n_k, 1)
    value, mask = torch.randn(2, n_k, 3), torch.ones(2, n_k, dtype=torch.bool) if masked else None
    problem = _of(query, key, value, mask)
    out, lse = saved = rt.forward(problem)
    assert torch.equal(out, torch.zeros(2, n_q, 3))
    assert torch.equal(lse, torch.full((2, n_q), -math.inf, dtype=torch.float64))
    grad_lse = torch.randn(2, n_q)
    grads = rt.backward(OutputGradients(torch.ones_like(out), grad_lse), saved, problem)
    directions = Directions(*grads[:3], None, None)
    second = rt.double_backward(directions, OutputGradients(out, grad_lse), problem)
    inputs = (query, key, value, out, grad_lse, query, key, value)
    for grad, x in zip((*grads[:3], *second[0], *second[1][:3]), inputs, strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


def test_zero_queries_have_exact_gradients() -> None:
    """At t = 0 keys do not matter: their gradient is zero, not rounding."""
    p = _problem("gauss", 0.0)
    problem = _of(p["query"], p["key"], p["value"])
    grads = OutputGradients(p["grad_out"], None)
    _, grad_key, *_ = rt.backward(grads, rt.forward(problem), problem)
    assert torch.equal(grad_key, torch.zeros_like(grad_key))


def _leaves(temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((1, 3, 1), (1, 4, 1), (1, 4, 2))
    query, key, value = (torch.randn(s, dtype=torch.float64) for s in shapes)
    return tuple(x.requires_grad_() for x in (query * temperature, key, value))


@pytest.mark.parametrize("call", [{}, {"is_causal": True}], ids=["plain", "causal"])
@pytest.mark.parametrize("temperature", [0.5, 5.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str, temperature: float, call: dict[str, Any]) -> None:
    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return boltzattn.attention(
            *tensors, method="transform", backend=backend, return_lse=True, **call
        )

    tensors = _leaves(temperature)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradgradcheck_with_masked_keys(backend: str) -> None:
    mask = torch.tensor([False, True, False, False])

    def function(*tensors: Tensor) -> Tensor:
        return boltzattn.attention(
            *tensors, key_padding_mask=mask, method="transform", backend=backend
        )

    assert torch.autograd.gradgradcheck(function, _leaves(1.0))


def test_the_plan_decides_on_double_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    double_backward = rt.double_backward
    monkeypatch.setattr(
        rt,
        "double_backward",
        lambda *args: calls.append(1) or double_backward(*args),
    )
    for method, expected in (("direct", 0), ("transform", 1)):
        tensors = _leaves(1.0)
        out = boltzattn.attention(*tensors, method=method)
        (slope,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
        torch.autograd.grad(slope.square().sum(), tensors)
        assert len(calls) == expected, method


def test_auto_on_the_reference_waits_for_long_sequences() -> None:
    for n, method in ((512, "direct"), (16_384, "transform")):
        x = torch.randn(1, n, 1)
        assert boltzattn.explain(x, x, x, backend="reference").startswith(f"method {method}")


# Peak memory, so a process of its own; prints megabytes above the inputs, and seconds.
_DOUBLE_BACKWARD_AT = """
import resource, sys, time
import torch
from boltzattn.problem import Directions, OutputGradients, Problem
from boltzattn.reference import transform as rt

n, dv = int(sys.argv[1]), int(sys.argv[2])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
torch.manual_seed(0)
draw = lambda *shape: torch.randn(1, *shape, dtype=torch.float64)
grads = OutputGradients(draw(n, dv), draw(n))
tensors = 10 * draw(n, 1), draw(n, 1), draw(n, dv)
directions = Directions(draw(n, 1), draw(n, 1), draw(n, dv), None, None)
problem = Problem(*tensors, *[None] * 4, 1.0, 0.0, False, False)
before, start = peak(), time.perf_counter()
rt.double_backward(directions, grads, problem)
print(peak() - before, time.perf_counter() - start)
"""


def _double_backward_at(n: int, dv: int) -> tuple[float, float]:
    run = subprocess.run(
        [sys.executable, "-c", _DOUBLE_BACKWARD_AT, str(n), str(dv)],
        capture_output=True,
        text=True,
        check=True,
    )
    megabytes, seconds = map(float, run.stdout.split())
    return megabytes, seconds


def test_double_backward_in_little_memory() -> None:
    """At n = 8,192 one matrix of scores in fp64 would be 512 MB."""
    megabytes, _ = _double_backward_at(8192, 8)
    assert megabytes < 200


@pytest.mark.full
def test_double_backward_is_linear() -> None:
    """At n = 65,536 one matrix of scores in fp64 would be 34 GB."""
    short, _ = _double_backward_at(65_536, 8)
    long, seconds = _double_backward_at(262_144, 8)
    assert short < 300
    assert long < 4 * 300
    assert seconds < 120  # quadratic time would be hours
