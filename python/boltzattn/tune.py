"""Measures the constants by which `method="auto"` chooses, on this machine.

The built-in ones come from other CPUs. Measured ones are written into the user's cache directory
and used by every later process, until another version of boltzattn or another processor makes
them void; `boltzattn info` says which are in use. Takes a few seconds on a quiet machine: other
work beside it makes the result worse. Only calls on the CPU are concerned, and only in which method
they take: a result may differ by rounding from that of the other method.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

import boltzattn
from boltzattn.dispatch import costs, plan
from boltzattn.dispatch.backends import Request
from boltzattn.dispatch.costs import Costs
from boltzattn.dispatch.extension import cpu_unavailable
from boltzattn.dispatch.plan import LayerRequest
from boltzattn.ops.layer import nodes_forward
from boltzattn.problem import Choice, SelfAttentionProblem
from boltzattn.timing import times

REPEATS, PATIENCE = 9, 0.5  # calls of a case, and seconds for them
Model = Callable[[Costs], float]  # nanoseconds of a case, linear in the costs


class Case(NamedTuple):
    """A call and what the plan says of it."""

    run: Callable[[], object]
    model: Model


def nanoseconds(case: Case) -> float:
    """The fastest of some calls: whatever else runs can only add to it."""
    return 1e9 * min(times(case.run, "cpu", REPEATS, PATIENCE))


def fit(names: tuple[str, ...], known: Costs, measured: list[tuple[Model, float]]) -> Costs:
    """`known` with the costs of these names that come closest to what was measured.

    Least squares of relative errors, with no cost below 0: of all subsets of the names, whose
    others are 0, the best one that has none.
    """
    base = known._replace(**dict.fromkeys(names, 0.0))
    rest = torch.tensor([model(base) / time for model, time in measured], dtype=torch.float64)
    parts = torch.tensor(
        [
            [(model(base._replace(**{name: 1.0})) - model(base)) / time for name in names]
            for model, time in measured
        ],
        dtype=torch.float64,
    )
    best, least = base, torch.inf
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), size):
            columns = parts[:, list(chosen)]
            widths = columns.norm(dim=0).clamp(min=1e-300)  # costs differ by six powers of ten
            solved = torch.linalg.lstsq(columns / widths, 1 - rest).solution / widths
            missed = float((columns @ solved + rest - 1).norm())
            if bool((solved >= 0).all()) and missed < least:
                found = dict(zip((names[i] for i in chosen), solved.tolist(), strict=True))
                best, least = base._replace(**found), missed
    return best


def attention_case(
    method: str, n: int, rank: int, dv: int, is_causal: bool = False, with_bias: bool = False
) -> Case:
    """One head of attention."""
    query, key, value = (torch.randn(n, width) for width in (rank, rank, dv))
    bias = torch.randn(n) if with_bias else None
    request = Request("cpu", torch.float32, 1, n, n, rank, dv, is_causal, key_bias=with_bias)

    def model(cost: Costs) -> float:
        if method == "direct":
            return plan.direct_cost(request, cost)
        return plan.transform_cost(request, costs=cost)

    run = partial(boltzattn.attention, query, key, value, method=method, backend="cpu")
    return Case(partial(run, is_causal=is_causal, key_bias=bias), model)


def product_case(n: int, d: int) -> Case:
    """torch's own product, as in a layer that projects first."""
    run = partial(F.linear, torch.randn(n, d), torch.randn(d, d))
    return Case(run, lambda cost: n * d * d * cost.product)


def layer_case(n: int, d: int) -> Case:
    """A layer of one head that projects at the nodes."""
    shapes = (n, d), (1, d), (1, d), (d, d), (d, d)
    x, w_q, w_k, w_v, w_o = (torch.randn(shape) / d**0.5 for shape in shapes)
    problem = SelfAttentionProblem(x, w_q, w_k, w_v, w_o, None, None, None, 1, 1.0, False)
    request = LayerRequest.of(problem, training=False)

    def model(cost: Costs) -> float:
        at_nodes, _ = plan.projection_costs(request, cost)
        attention = request.attention()._replace(dv=0)  # the rest has no columns of tokens
        rest = plan.transform_cost(attention, costs=cost) + cost.transform_head_column * request.dv
        return at_nodes + rest + 2 * n * d * cost.product

    return Case(partial(nodes_forward, problem, request, Choice("transform", "cpu")), model)


def groups() -> Iterator[tuple[str, tuple[str, ...], list[Case]]]:
    """What is measured together: its name, its costs and its cases. Later ones use earlier ones."""
    direct = [
        attention_case("direct", n, rank, dv)
        for n in (256, 1024)
        for rank, dv in ((1, 16), (1, 64), (1, 128), (8, 64))
    ]
    yield "all pairs", ("direct_pair", "direct_pair_column"), direct
    shapes = [(n, dv) for n in (256, 2048, 16384) for dv in (16, 64, 128)]
    for kind, is_causal, with_bias in (
        ("transform", False, False),
        ("lookup", False, True),
        ("scan", True, False),
    ):
        yield (
            {"transform": "transform", "lookup": "with key biases", "scan": "causal"}[kind],
            tuple(name for name in Costs._fields if name.startswith(kind) and "call" not in name),
            [attention_case("transform", n, 1, dv, is_causal, with_bias) for n, dv in shapes],
        )
    yield "products", ("product",), [product_case(1024, 256), product_case(4096, 512)]
    layers = [layer_case(n, d) for n in (1024, 16384) for d in (128, 512)]
    yield "layers", ("layer_token_column", "core_product"), layers


def measure(report: Callable[[str], object]) -> Costs:
    """All costs, measured on one thread, as the built-in ones were."""
    found = costs.CPU
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for label, names, cases in groups():
                measured = [(case.model, nanoseconds(case)) for case in cases]
                found = fit(names, found, measured)
                off = max(abs(model(found) / time - 1) for model, time in measured)
                report(f"{label}: {len(cases)} calls, off by at most {100 * off:.0f} %")
    finally:
        torch.set_num_threads(threads)
    return found


def break_even(cost: Costs, **kind: bool) -> int:
    """The number of tokens from which on the transform is chosen at rank 1 and dv 64."""

    def transformed(n: int) -> bool:
        request = Request("cpu", torch.float32, 1, n, n, 1, 64, **kind)
        return plan.transform_cost(request, costs=cost) < plan.direct_cost(request, cost)

    return bisect.bisect_left(range(1 << 20), True, key=transformed)


def table(old: Costs, new: Costs) -> str:
    """Both side by side: nanoseconds, and what follows from them."""
    lines = [f"{'nanoseconds':<24}{'built in':>12}{'measured':>12}"]
    for name, before, after in zip(Costs._fields, old, new, strict=True):
        lines.append(f"{name:<24}{before:>12.4g}{after:>12.4g}")
    lines.append("transform from this number of tokens on (rank 1, dv 64):")
    for label, kind in (
        ("plain", {}),
        ("with a key bias", {"key_bias": True}),
        ("causal", {"is_causal": True}),
    ):
        before, after = break_even(old, **kind), break_even(new, **kind)
        lines.append(f"{'  ' + label:<24}{before:>12}{after:>12}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None, prog: str = "python -m boltzattn.tune") -> int:
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog=prog, description=summary, epilog=more)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="measure and print, write nothing")
    what.add_argument("--remove", action="store_true", help="go back to the built-in constants")
    asked = parser.parse_args(arguments)
    file = costs.path()
    if asked.remove:
        if file is not None:
            file.unlink(missing_ok=True)
        print("the built-in constants are in use from the next process on")
        return 0
    if reason := cpu_unavailable():
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 1
    if file is None and not asked.dry_run:
        print(
            "no file to write: BOLTZATTN_COSTS is empty, or there is no home; --dry-run measures",
            file=sys.stderr,
        )
        return 1
    new = measure(lambda line: print(line, flush=True))
    print(table(costs.CPU, new))
    if file is not None and not asked.dry_run:
        costs.write(file, new)
        print(f"written to {file}; used from the next process on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
