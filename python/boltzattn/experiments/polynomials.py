"""Does a transformer for a symmetric polynomial stay the same for sets of any size?

Takeshita & Imaizumi (arXiv 2502.11467): the number of parameters that approximate a polynomial of a
set does not depend on the number of its elements. `symmetric_polynomial` builds such a transformer;
its error falls as 4^-L with the depth L of its multiplications. What can refute this is rounding:
in fp32, or in the mean of many elements. Polynomials of sums, instead of means, are another matter:
their coefficients grow with the set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from boltzattn.experiments.experiment import Experiment, Finding, Row, select, values
from boltzattn.theory import evaluate_polynomial, symmetric_polynomial
from boltzattn.theory.presentation import GREY, STYLES, Table
from boltzattn.theory.symmetric import Polynomial

# Variance and covariance, a product of three means, and one of degree 4.
POLYNOMIAL: Polynomial = {
    ((2, 0),): 1.0,
    ((1, 0), (1, 0)): -1.0,
    ((1, 1),): 2.0,
    ((1, 0), (0, 1), (0, 1)): -0.5,
    ((3, 0), (0, 1)): 1.0,
}
# With this depth the approximation error is about that of fp32.
DEPTH = 12
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def measure(part: str, size: int, depth: int, sets: int, seed: int) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(sets, size, 2, dtype=torch.float64, generator=generator)
    # Sets around different means, so that the values differ.
    x = x * torch.rand(sets, 1, 2, dtype=torch.float64, generator=generator)
    wanted = evaluate_polynomial(POLYNOMIAL, x)
    rows = []
    for name, dtype in DTYPES.items():
        model = symmetric_polynomial(POLYNOMIAL, 2, depth)
        report = model.report
        model = model.to(dtype)
        with torch.no_grad():
            out = model(x.to(dtype))[..., 0].double()
        rows.append(
            {
                "dtype": name,
                "parameters": report.parameters,
                "layers": report.layers,
                "error": float((out - wanted[:, None]).abs().max()),
                "spread": float(wanted.max() - wanted.min()),
                "error_bound": report.error_bound,
            }
        )
    return rows


def judge(rows: list[Row]) -> list[Finding]:
    sizes = select(rows, part="size", dtype="fp64")
    depths = select(rows, part="depth", dtype="fp64")
    counts = values(sizes, "parameters")
    seen = [row for row in rows if row["dtype"] == "fp64"]
    # The error of fp64 itself is 1e-15; below ten times that no law can be seen.
    falling = [row for row in depths if row["error"] > 1e-14]
    fit = np.polyfit([r["depth"] for r in falling], np.log([r["error"] for r in falling]), 1)
    factor = float(np.exp(-fit[0]))
    single = select(rows, part="size", dtype="fp32")
    return [
        Finding(
            "the number of parameters does not depend on the size of the set",
            len(counts) == 1,
            f"{counts[0]:,} for {sizes[0]['size']:,} to {sizes[-1]['size']:,} elements",
        ),
        Finding(
            "the error stays below its bound at every size and depth in fp64",
            all(row["error"] <= row["error_bound"] for row in seen),
            f"at most {max(row['error'] / row['error_bound'] for row in seen):.2f} of the bound",
        ),
        Finding(
            "the error does not grow with the size of the set",
            sizes[-1]["error"] < 2 * sizes[0]["error"],
            f"{sizes[0]['error']:.1e} at {sizes[0]['size']:,} elements, {sizes[-1]['error']:.1e} "
            f"at {sizes[-1]['size']:,}",
        ),
        Finding(
            "every tent map divides the error by 4",
            3.5 < factor < 4.5,
            f"by {factor:.2f}, from depth {falling[0]['depth']} to {falling[-1]['depth']}",
        ),
        Finding(
            "in fp32 the error stays below the same bound at every size",
            all(row["error"] <= row["error_bound"] for row in single),
            f"at most {max(row['error'] for row in single):.1e}; more depth does not help, "
            f"{select(rows, part='depth', dtype='fp32')[-1]['error']:.1e} at depth "
            f"{depths[-1]['depth']}",
        ),
    ]


def table(rows: list[Row]) -> Table:
    lines = [
        (
            f"{row['size']:,} elements, depth {row['depth']}, {row['dtype']}",
            f"{row['parameters']:,}",
            row["layers"],
            f"{row['error']:.1e}",
            f"{row['error_bound']:.1e}",
        )
        for row in rows
    ]
    return ("set", "parameters", "layers", "largest error", "bound"), lines


def draw(rows: list[Row], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for name, style in zip(DTYPES, STYLES, strict=False):
        some = select(rows, part="size", dtype=name)
        left.loglog([r["size"] for r in some], [r["error"] for r in some], **style, label=name)
        some = select(rows, part="depth", dtype=name)
        right.semilogy([r["depth"] for r in some], [r["error"] for r in some], **style, label=name)
    sizes = select(rows, part="size", dtype="fp64")
    bound = sizes[0]["error_bound"]
    left.axhline(bound, color=GREY, linestyle="--", linewidth=1)
    left.text(sizes[0]["size"], 1.1 * bound, "bound", color=GREY, va="bottom")
    count = sizes[0]["parameters"]
    left.set(xlabel="elements of a set", ylabel="largest error")
    left.set_title(f"{count:,} parameters at every size")
    left.set_ylim(bound / 1e3, 20 * max(row["error"] for row in select(rows, part="size")))
    left.legend()
    depths = select(rows, part="depth", dtype="fp64")
    at = [row["depth"] for row in depths]
    bounds = [row["error_bound"] for row in depths]
    right.semilogy(at, bounds, "--", color=GREY, linewidth=1, label="bound")
    right.set(xlabel="depth of a multiplication", ylabel="largest error", title="4 per tent map")
    right.legend()


def _cases(sizes: list[int], depths: list[int], budget: int) -> list[dict[str, Any]]:
    """As many sets of a size as the budget of elements allows, 32 at most."""
    return [
        *(
            {"part": "size", "size": n, "depth": DEPTH, "sets": max(1, min(32, budget // n))}
            for n in sizes
        ),
        *({"part": "depth", "size": 10, "depth": depth, "sets": 32} for depth in depths),
    ]


EXPERIMENT = Experiment(
    name="polynomials",
    question="Does the transformer of a symmetric polynomial stay the same for sets of any size?",
    refuted_if="the error grows with the size of the set, or exceeds its bound",
    cases={
        "tiny": _cases([10, 100, 1000], [2, 4, 6], 2000),
        "quick": _cases(
            [10, 100, 1000, 10_000, 100_000, 1_000_000], [2, 4, 8, 12, 16, 20, 24], 100_000
        ),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
