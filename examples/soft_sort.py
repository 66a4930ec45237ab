"""Train through sorting: a model whose loss is a rank correlation.

Items have features and a relevance that grows with a hidden linear score, but not linearly: it is
an exponential of it, so that a few items have a relevance far above all others. Least squares
follows those few. Spearman's correlation counts ranks only; `soft_rank` makes it a loss with a
gradient. Prints Spearman's correlation of both models on unseen items, and draws what soft sorting
does at several temperatures.

    python examples/soft_sort.py
    python examples/soft_sort.py --items 20000 --steps 200 --out soft-sort.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import boltzattn
import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from boltzattn.smoothing import soft_rank, soft_sort
from torch import Tensor
from tqdm import trange

FEATURES = 16
SPREAD = 4.0  # of the logarithm of relevance


def draw_items(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(features [count, FEATURES], relevance [count])."""
    features = torch.randn(count, FEATURES, generator=generator)
    hidden = features @ torch.linspace(-1, 1, FEATURES)
    noisy = hidden / hidden.std() + 0.3 * torch.randn(count, generator=generator)
    return features, torch.exp(SPREAD * noisy)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(), b - b.mean()
    return (a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()


def hard_rank(x: Tensor) -> Tensor:
    return x.argsort().argsort().to(x.dtype)


def train(features: Tensor, relevance: Tensor, steps: int, show: bool = True) -> Tensor:
    """The weights of a linear model that orders the items as their relevance does."""
    wanted = hard_rank(relevance)
    weights = torch.full((FEATURES,), 0.01, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)
    bar = trange(steps, desc="soft ranks", disable=not show)
    for _ in bar:
        scores = features @ weights
        # In units of the spread of the scores, or the model would grow instead of learning.
        loss = 1 - correlation(soft_rank(scores / scores.std(), temperature=0.1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.4f}")
    return weights.detach()


def draw(to: Path) -> None:
    """Twelve numbers, sorted and ranked softly."""
    x = torch.randn(12, generator=torch.Generator().manual_seed(1))
    place = torch.arange(1, 13)
    figure, (sort, rank) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colours = "#0072B2", "#E69F00", "#D55E00"
    markers = "o", "s", "^"
    for temperature, colour, marker in zip((0.001, 0.1, 1.0), colours, markers, strict=True):
        style = {"color": colour, "marker": marker, "ms": 5, "label": f"temperature {temperature}"}
        sort.plot(place, soft_sort(x, temperature=temperature), **style)
        order = x.argsort()
        rank.plot(x[order], soft_rank(x, temperature)[order], **style)
    sort.plot(place, x.sort().values, color="black", lw=0.8, label="sorted")
    rank.plot(x.sort().values, place, color="black", lw=0.8, label="rank")
    sort.set(xlabel="place", ylabel="score", title="soft_sort", xticks=place)
    rank.set(xlabel="score", ylabel="rank", title="soft_rank", yticks=place)
    for axes in (sort, rank):
        axes.legend(frameon=False)
    figure.savefig(to, dpi=160)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="auto", help="method of boltzattn.attention")
    parser.add_argument("--out", type=Path, default=Path("soft-sort.png"))
    options = parser.parse_args()
    if options.items <= FEATURES:
        parser.error(f"--items must be more than {FEATURES}")
    generator = torch.Generator().manual_seed(options.seed)
    features, relevance = draw_items(options.items, generator)
    unseen, unseen_relevance = draw_items(options.items, generator)
    with boltzattn.use_method(options.method):
        models = {
            "least squares": torch.linalg.lstsq(features, relevance[:, None]).solution[:, 0],
            "soft ranks": train(features, relevance, options.steps),
        }
        draw(options.out)
    for name, weights in models.items():
        found = correlation(hard_rank(unseen @ weights), hard_rank(unseen_relevance))
        print(f"{name}: Spearman's correlation {found:.3f} on {options.items:,} unseen items")
    print(options.out)


if __name__ == "__main__":
    main()
