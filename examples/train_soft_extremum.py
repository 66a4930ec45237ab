"""Train a rank-1 one-layer transformer on sets of 100,000 elements, on a CPU.

Every element of a set has a value a_i and an inverse temperature s_i between -2 and 2. Its target
is its value relative to the soft extremum of the set at that temperature,

    y_i = a_i - sum_j a_j softmax_j(s_i a_j).

The soft extremum is close to the minimum at s = -2, the mean at s = 0, and close to the maximum at
s = 2. Values have random tails: three of four elements are near 0, each further level is four times
rarer, and the distances between levels are random for every set. So the target depends on a handful
of the 100,000 elements.

Mean pooling cannot compute it: replacing k of n elements changes the mean of any features by at
most k/n times their diameter, a ten-thousandth for the ten elements that matter, and the network
after it would have to amplify this to a change of order 1. One rank-1 softmax head can compute it
exactly: query s_i, key a_j, value a_j. Mean pooling is the same network with W_Q = 0, trained for
comparison.

The printed "skill" is the explained share of the variance between sets: 0 for the average over sets
at each temperature, 1 for the truth.

    python examples/train_soft_extremum.py
    python examples/train_soft_extremum.py --set-size 2000 --models rank-1 full-rank mean --seeds 3
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from boltzattn.nn import OneLayerTransformer
from torch import Tensor
from tqdm import trange

DIM = 4  # value, inverse temperature, and two free coordinates
RARER = 4  # each level has this many times fewer elements than the one below
TEMPERATURES = torch.linspace(-2, 2, 33)  # few, so that the targets are cheap


def draw_set(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(elements [size, DIM], targets [size], soft extremum at each of TEMPERATURES)."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    levels = int(math.log(size, RARER)) + 1
    steps = 0.4 + 2.0 * uniform(2, levels)
    steps[:, 0] = 0.0
    heights = steps.cumsum(1) * torch.tensor([[1.0], [-1.0]])  # upper and lower tail
    level = (-uniform(size).log() / math.log(RARER)).long().clamp_max(levels - 1)
    tail = (uniform(size) < 0.5).long()
    value = heights[tail, level] + 0.1 * torch.randn(size, generator=generator)

    weights = torch.softmax(TEMPERATURES[:, None] * value, dim=1)
    extremum = weights @ value
    which = torch.randint(len(TEMPERATURES), (size,), generator=generator)
    elements = torch.zeros(size, DIM)
    elements[:, 0], elements[:, 1] = value, TEMPERATURES[which]
    return elements, value - extremum[which], extremum


def block(num_heads: int, rank: int, method: str) -> OneLayerTransformer:
    """The paper's block: no normalisation, no scaling, rank equal to head_dim."""
    return OneLayerTransformer(
        DIM,
        form="paper",
        num_heads=num_heads,
        rank=rank,
        head_dim=rank,
        ff1_hidden_dim=8,
        ff2_hidden_dim=16,
        method=method,
    )


def rank_one(method: str) -> OneLayerTransformer:
    """Eight heads of size 1, because a head with a bad start learns nothing."""
    return block(8, 1, method)


def full_rank(method: str) -> OneLayerTransformer:
    """Heads with an arbitrary bilinear form."""
    return block(4, DIM, method)


def mean_pooling(method: str) -> OneLayerTransformer:
    """The rank-1 model with zero queries: equal weights, so a mean of the values."""
    model = rank_one(method)
    torch.nn.init.zeros_(model.attention.q_proj_weight)
    model.attention.q_proj_weight.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[str], OneLayerTransformer]] = {
    "rank-1": rank_one,
    "mean": mean_pooling,
    "full-rank": full_rank,
}


def train(
    model: OneLayerTransformer, set_size: int, steps: int, seed: int, show: str | None = None
) -> list[float]:
    """Train on a fresh set in every step; return the losses. `show` labels a progress bar."""
    generator = torch.Generator().manual_seed(seed)
    dtype = model.attention.v_proj_weight.dtype
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=3e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-2, total_steps=steps, pct_start=0.1
    )
    losses: list[float] = []
    bar = trange(steps, desc=show, disable=show is None)
    for _ in bar:
        elements, targets, _ = draw_set(set_size, generator)
        predicted = model(elements.to(dtype))[:, 0]
        loss = (predicted - targets.to(dtype)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{sum(losses[-20:]) / len(losses[-20:]):.4f}")
    return losses


@torch.no_grad()
def skill(model: OneLayerTransformer, set_size: int, sets: int = 32) -> float:
    """1 - mean squared error / variance between sets, on unseen sets."""
    generator = torch.Generator().manual_seed(2**31)
    errors, extrema = [], []
    for _ in range(sets):
        elements, targets, extremum = draw_set(set_size, generator)
        errors.append((model(elements)[:, 0] - targets).square().mean())
        extrema.append(extremum)
    return float(1 - torch.stack(errors).mean() / torch.stack(extrema).var(dim=0).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set-size", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=1, help="number of runs of each model")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["rank-1", "mean"])
    parser.add_argument("--method", default="auto", help="method of boltzattn.attention")
    options = parser.parse_args()
    for name in options.models:
        skills = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            model = MODELS[name](options.method)
            train(model, options.set_size, options.steps, seed, show=name)
            skills.append(skill(model, options.set_size))
        shown = ", ".join(f"{value:.3f}" for value in skills)
        print(f"{name}: skill {shown} on unseen sets of {options.set_size:,} elements")


if __name__ == "__main__":
    main()
