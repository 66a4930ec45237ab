"""Is the network before attention, which rounds tokens to a grid, necessary?

Without it a token learns about the others only what attention adds: one number per head and value
coordinate. On a continuum, m numbers cannot identify n - 1 other tokens if m < n - 1, because a
continuous map to a lower dimension is not one to one. Then some sets have equal numbers and
different f, and no network after attention helps. The error has a floor,
(E Var(f | numbers))^(1/2).

The floor is measured without any network: it is half the mean square difference of f between
nearest neighbours, for growing samples. Tokens are on a line, and the numbers are

    "scalar":        one number, which the head adds to the token, as in the paper with d = 1;
    "temperatures":  the outputs of m heads of rank 1 on the tokens, each in its own coordinate;
    "powers":        means of x, .., x^m: one head with m values after a smooth network that is the
                     same for all f.

Then the block is trained, without a network before attention and with one (which may be smooth).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from boltzattn.experiments.experiment import (
    Experiment,
    Finding,
    Row,
    mean_and_range,
    select,
    values,
)
from boltzattn.experiments.tasks import learn_function
from boltzattn.experiments.training import model_seeds
from boltzattn.nn import OneLayerTransformer
from boltzattn.theory.presentation import BLUE, GREEN, GREY, ORANGE, STYLES, Table

BETAS = (0.0, 1.0, -1.0, 3.0, -3.0, 9.0, -9.0, 27.0)
# A smaller share of the standard deviation of f counts as no floor. The estimate extrapolates to
# an infinite sample and varies by a few hundredths.
NO_FLOOR = 0.05
DIM = 6  # for the token, up to three numbers, and the result


def f(x: Tensor) -> Tensor:
    """`f_k = x_k mean(cos(2 pi x))`, which depends on all other tokens; `[.., n, 1]`."""
    return x * torch.cos(2 * math.pi * x).mean(-2, True)


def pooled(x: Tensor, beta: float) -> Tensor:
    """What a rank-1 head adds to the first token of each set: `[sets, n, 1]` to `[sets]`."""
    one = torch.ones(1, 1, dtype=x.dtype)
    head = OneLayerTransformer.from_weights(beta * one, one, one, one, method="direct")
    with torch.no_grad():
        return (head(x) - x)[:, 0, 0]


def numbers(x: Tensor, variant: str, choice: tuple[float, ...]) -> np.ndarray:
    """The input of the network after attention at the first token, `[sets, 1 or 1 + m]`."""
    token = x[:, 0, 0]
    if variant == "scalar":
        beta, size = choice
        return (token + size * pooled(x, beta))[:, None].numpy()
    if variant == "temperatures":
        return torch.stack([token, *(pooled(x, beta) for beta in choice)], 1).numpy()
    means = [x[..., 0].pow(k).mean(1) for k in choice]
    return torch.stack([token, *means], 1).numpy()


def unexplained(seen: np.ndarray, wanted: np.ndarray) -> float:
    """Share of the variance of `wanted` `[sets]` between nearest neighbours in `seen` `[sets, k]`.

    Example:
        >>> x = np.linspace(0, 1, 1000)
        >>> unexplained(x[:, None], np.sin(9 * x)) < 1e-3
        True
        >>> noise = np.random.default_rng(0).standard_normal(1000)
        >>> 0.8 < unexplained(x[:, None], noise) < 1.2
        True
    """
    from scipy.spatial import cKDTree

    # With equal variance in all directions, because the network can scale any of them.
    u, s, _ = np.linalg.svd(seen - seen.mean(0), full_matrices=False)
    u = u[:, s > 1e-12 * s[0]]
    _, neighbour = cKDTree(u).query(u, k=2)
    return float(np.mean((wanted - wanted[neighbour[:, 1]]) ** 2) / (2 * wanted.var()))


def measure(part: str, seed: int, **case: Any) -> list[Row]:
    return _measure_floor(seed, **case) if part == "floor" else _measure_trained(seed, **case)


def _measure_floor(seed: int, variant: str, n: int, m: int, samples: list[int]) -> list[Row]:
    def draw(count: int, offset: int) -> tuple[Tensor, np.ndarray]:
        generator = torch.Generator().manual_seed(1000 * seed + offset)
        x = torch.rand(count, n, 1, dtype=torch.float64, generator=generator)
        return x, f(x)[:, 0, 0].numpy()

    choices: list[tuple[float, ...]] = [tuple(range(1, m + 1))]
    if variant == "scalar":
        choices = list(itertools.product(BETAS, np.geomspace(0.1, 10, 9).tolist()))
    elif variant == "temperatures":
        choices = list(itertools.combinations(BETAS, m))
    x, wanted = draw(samples[0], 0)
    best = min(choices, key=lambda choice: unexplained(numbers(x, variant, choice), wanted))
    shares = []
    for i, count in enumerate(samples):
        x, wanted = draw(count, i + 1)
        shares.append(unexplained(numbers(x, variant, best), wanted))
    # Neighbours in k dimensions are count^(-1/k) apart; squared differences of f follow its square.
    dimension = 1 if variant == "scalar" else min(n, 1 + m)
    decay = np.array(samples) ** (-2 / dimension)
    _, intercept = np.polyfit(decay, shares, 1)
    return [
        {
            "choice": list(best),
            "nearest": [math.sqrt(share) for share in shares],
            "floor": math.sqrt(max(intercept, 0.0)),
        }
    ]


def build(first_network: bool, heads: int, hidden: int) -> nn.Module:
    """The paper's block on padded tokens; after a network, attention has three values."""
    return OneLayerTransformer(
        DIM,
        form="paper",
        num_heads=heads,
        rank=1,
        head_dim=3 if first_network else 1,
        ff1_hidden_dim=32 if first_network else 0,
        ff2_hidden_dim=hidden,
        method="direct",
    )


def _measure_trained(
    seed: int, first_network: bool, heads: int, hidden: int, n: int, steps: int, seeds: int
) -> list[Row]:
    def draw(sets: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.rand(sets, n, 1, generator=generator)
        return nn.functional.pad(x, (0, DIM - 1)), f(x)

    return learn_function(
        lambda _: build(first_network, heads, hidden),
        model_seeds(seed, seeds),
        draw=draw,
        batch=128,
        steps=steps,
    )


def judge(rows: list[Row]) -> list[Finding]:
    floors = select(rows, part="floor")
    scalar = select(floors, variant="scalar")
    findings = [
        Finding(
            "one number added to a token on a line leaves a floor for every n >= 2",
            min(row["floor"] for row in scalar) > NO_FLOOR,
            _show(scalar),
        )
    ]
    for variant, few, enough in (
        (
            "temperatures",
            "fewer than n - 1 heads of rank 1 leave a floor",
            "n - 1 heads of rank 1 at n - 1 temperatures leave no floor, without a network before",
        ),
        (
            "powers",
            "fewer than n - 1 values of one head leave a floor, after a network chosen before f",
            "n - 1 values of one head leave no floor after a smooth network, without rounding",
        ),
    ):
        some = select(floors, variant=variant)
        below = [row for row in some if row["m"] < row["n"] - 1]
        above = [row for row in some if row["m"] >= row["n"] - 1]
        if below:
            findings.append(
                Finding(few, min(row["floor"] for row in below) > NO_FLOOR, _show(below))
            )
        findings.append(
            Finding(enough, max(row["floor"] for row in above) < NO_FLOOR, _show(above))
        )
    trained = select(rows, part="trained")
    (n,) = values(trained, "n")
    one = select(trained, first_network=False, heads=1)
    (wall,) = select(floors, variant="temperatures", n=n, m=1)
    findings += [
        # The test set is finite and the floor is an estimate, hence the 10%.
        Finding(
            f"trained with one head and no network before, no width gets below the floor (n = {n})",
            min(row["error"] for row in one) > 0.9 * wall["floor"],
            f"errors {_by_width(one)}; floor {wall['floor']:.3f}",
        ),
        Finding(
            f"trained with a network before and three values, the block gets below it (n = {n})",
            max(_last(select(trained, first_network=True))) < wall["floor"],
            f"errors {_by_width(select(trained, first_network=True))}",
        ),
    ]
    return findings


def _show(rows: list[Row]) -> str:
    return "floor " + ", ".join(f"{r['floor']:.3f} (n={r['n']}, m={r['m']})" for r in rows)


def _last(rows: list[Row]) -> list[float]:
    widest = max(values(rows, "hidden"))
    return [row["error"] for row in select(rows, hidden=widest)]


def _by_width(rows: list[Row]) -> str:
    return ", ".join(
        f"{mean_and_range([r['error'] for r in select(rows, hidden=hidden)], '.3f')} at {hidden}"
        for hidden in values(rows, "hidden")
    )


def table(rows: list[Row]) -> Table:
    lines: list[tuple[object, ...]] = [
        (
            f"floor, {row['variant']}, n={row['n']}, {row['m']} number(s)",
            " ".join(f"{share:.3f}" for share in row["nearest"]),
            f"{row['floor']:.3f}",
        )
        for row in select(rows, part="floor")
    ]
    trained = select(rows, part="trained")
    for first in (False, True):
        for heads in values(select(trained, first_network=first), "heads"):
            for hidden in values(trained, "hidden"):
                some = select(trained, first_network=first, heads=heads, hidden=hidden)
                name = f"trained, {heads} head(s), {hidden} neurons"
                name += ", network before" if first else ""
                lines.append((name, "", mean_and_range([row["error"] for row in some], ".3f")))
    return ("case", "between neighbours, growing sample", "error / deviation of f"), lines


def draw(rows: list[Row], figure: Any) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    floors = select(rows, part="floor")
    lengths = values(floors, "n")
    kinds = [("scalar", 1)] + [
        (variant, m)
        for variant in ("temperatures", "powers")
        for m in values(select(floors, variant=variant), "m")
    ]
    colours = {"scalar": GREY, "temperatures": BLUE, "powers": ORANGE}
    labels = {
        "scalar": "one head, added to the token (paper, d = 1)",
        "temperatures": "heads of rank 1, no network before",
        "powers": "one head, values after a smooth network",
    }
    for i, (variant, m) in enumerate(kinds):
        for j, n in enumerate(lengths):
            found = select(floors, variant=variant, m=m, n=n)
            if found:
                place = j + (i - len(kinds) / 2 + 0.5) * 0.8 / len(kinds)
                height = max(found[0]["floor"], 2e-3)
                left.bar(
                    place,
                    height,
                    0.75 / len(kinds),
                    color=colours[variant],
                    label=labels[variant] if (m == 1 and j == 0) else None,
                )
                left.text(place, height * 1.06, str(m), ha="center", fontsize=8)
    left.axhline(NO_FLOOR, color=GREY, linewidth=1, linestyle="--")
    left.text(-0.28, NO_FLOOR * 1.1, "no floor below", color=GREY, fontsize=8)
    left.set_yscale("log")
    left.set_xticks(range(len(lengths)), [f"n = {n}" for n in lengths])
    left.set(
        ylabel="error / standard deviation of f",
        title="Floor, with m numbers from attention (m on the bars)",
        ylim=(1.5e-3, 40),
    )
    left.legend(loc="upper left")
    trained = select(rows, part="trained")
    curves = [
        (False, heads, f"{heads} head{'s' if heads > 1 else ''}, no network before")
        for heads in values(select(trained, first_network=False), "heads")
    ] + [(True, 1, "1 head, network before")]
    for (first, heads, label), style in zip(curves, STYLES, strict=False):
        some = select(trained, first_network=first, heads=heads)
        widths = values(some, "hidden")
        means = [np.mean([r["error"] for r in select(some, hidden=w)]) for w in widths]
        right.loglog(widths, means, **style, label=label)
    (n,) = values(trained, "n")
    (wall,) = select(floors, variant="temperatures", n=n, m=1)
    right.axhline(wall["floor"], color=GREEN, linewidth=1)
    right.text(
        min(values(trained, "hidden")),
        wall["floor"] * 0.93,
        "floor of 1 head",
        color=GREEN,
        va="top",
    )
    right.set_xticks(values(trained, "hidden"), values(trained, "hidden"))
    right.set_xticks([], minor=True)
    right.set(xlabel="neurons after attention", title=f"Trained, n = {n}")
    right.legend(loc="upper right")


def _cases(
    lengths: tuple[int, ...], samples: list[int], hidden: tuple[int, ...], steps: int, seeds: int
) -> list[dict[str, Any]]:
    floors = [
        {"part": "floor", "variant": variant, "n": n, "m": m, "samples": samples}
        for n in lengths
        for variant, most in (("scalar", 1), ("temperatures", 3), ("powers", 3))
        for m in range(1, most + 1)
        if m < n
    ]
    trained = [
        {
            "part": "trained",
            "first_network": first,
            "heads": heads,
            "hidden": width,
            "n": 3,
            "steps": steps,
            "seeds": seeds,
        }
        for first, heads in ((False, 1), (False, 2), (True, 1))
        for width in hidden
    ]
    return floors + trained


EXPERIMENT = Experiment(
    name="no-quantizer",
    question="Is it necessary to round the tokens to a grid before attention?",
    refuted_if="fewer than n - 1 numbers leave no floor, or n - 1 numbers leave one",
    cases={
        "tiny": _cases((2, 3), [1000, 2000, 4000], (16, 32), 30, 2),
        "quick": _cases((2, 3, 4), [4000, 8000, 16_000, 32_000], (16, 64, 256), 500, 3),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
