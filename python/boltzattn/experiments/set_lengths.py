"""Which rank learns a task on sets, and works on sets far larger than those it has seen?

The task is that of long_sets: the soft extremum of a set at the temperature of each element. Models
are the paper's block with four heads, trained on sets of one size and measured on larger ones. The
answer is measured for some elements of a large set, which attend to all of them, so that
quadratic ranks can be measured, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boltzattn.experiments.experiment import (
    Experiment,
    Finding,
    Row,
    mean_and_range,
    select,
    values,
)
from boltzattn.experiments.long_sets import DIM, RATE, draw_set, train_on_sets
from boltzattn.experiments.training import model_seeds
from boltzattn.nn import LowRankAttention, OneLayerTransformer
from boltzattn.theory.presentation import STYLES, Table

WIDTH, HEADS = 8, 4
ASKED, TEST_SETS = 1000, 16  # elements whose answer is measured, and sets
RANKS = {1: "1", 2: "2", 4: "4", WIDTH: "8 (full)"}
MODELS = {
    **{f"dot, rank {shown}": ("dot", rank) for rank, shown in RANKS.items()},
    **{f"gaussian, rank {rank}": ("gaussian", rank) for rank in (1, 2)},
    "mean": ("dot", 1),
}


class SetModel(nn.Module):
    """The paper's block on elements that are padded with zeros to WIDTH."""

    def __init__(self, model: str) -> None:
        super().__init__()
        score, rank = MODELS[model]
        self.block = OneLayerTransformer(
            WIDTH, form="paper", num_heads=HEADS, rank=rank, ff1_hidden_dim=16, ff2_hidden_dim=32
        )
        if score == "gaussian":  # which the paper does not have
            self.block.attention = LowRankAttention(
                WIDTH, HEADS, bias=False, batch_first=True, rank=rank, score=score
            )
        if model == "mean":
            nn.init.zeros_(self.block.attention.q_proj_weight)
            self.block.attention.q_proj_weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(F.pad(x, (0, WIDTH - DIM)))

    def some(self, x: Tensor, count: int) -> Tensor:
        """The answers of the first `count` elements of one set."""
        before, after = self.block.ff1, self.block.ff2
        assert before is not None
        assert after is not None
        z = before(F.pad(x, (0, WIDTH - DIM)))
        asked = z[:count]
        return after(asked + self.block.attention(asked, z, z)[0])


def measure(model: str, size: int, steps: int, then: list[int], seeds: int, seed: int) -> list[Row]:
    """Train on sets of `size`; measure there and at the sizes of `then`."""
    rows: list[Row] = []
    for number in model_seeds(seed, seeds):
        torch.manual_seed(number)
        trained = SetModel(model)
        generator = torch.Generator().manual_seed(number)
        seconds = train_on_sets(trained, model, size, steps, RATE, generator)
        for at in (size, *then):
            found = skill(trained, at, number)
            rows.append(
                {"model_seed": number, "at": at, "skill": found, "seconds_per_step": seconds}
            )
    return rows


@torch.no_grad()
def skill(model: SetModel, size: int, seed: int) -> float:
    """1 - mean squared error / variance between sets, on unseen sets."""
    generator = torch.Generator().manual_seed(2**31 + seed)
    errors, answers = [], []
    for _ in range(TEST_SETS):
        x, wanted, everywhere = draw_set(size, generator)
        errors.append((model.some(x, ASKED)[:, 0] - wanted[:ASKED]).square().mean())
        answers.append(everywhere)
    return float(1 - torch.stack(errors).mean() / torch.stack(answers).var(dim=0).mean())


def _skills(rows: list[Row], model: str, at: int) -> list[float]:
    return [row["skill"] for row in select(rows, model=model, at=at)]


def judge(rows: list[Row]) -> list[Finding]:
    sizes = sorted(values(rows, "at"))
    smallest, largest = sizes[0], sizes[-1]

    def show(model: str) -> str:
        shown = ((mean_and_range(_skills(rows, model, at)), at) for at in sizes)
        return "skill " + ", ".join(f"{skills} at {at:,}" for skills, at in shown)

    one, full = "dot, rank 1", f"dot, rank {RANKS[WIDTH]}"
    return [
        Finding(
            f"rank 1 learns the task at {smallest:,} elements",
            min(_skills(rows, one, smallest)) > 0.9,
            show(one),
        ),
        Finding(
            f"full rank is not better at {smallest:,} elements",
            min(_skills(rows, full, smallest)) < max(_skills(rows, one, smallest)) + 0.02,
            show(full),
        ),
        Finding(
            f"rank 1 keeps its skill at {largest:,} elements",
            min(_skills(rows, one, largest)) > 0.8,
            show(one),
        ),
        Finding(
            f"rank 1 is at least as good as full rank at {largest:,} elements",
            max(_skills(rows, one, largest)) >= min(_skills(rows, full, largest)),
            f"{show(one)}; {show(full)}",
        ),
        Finding(
            f"Gaussian scores are not better at {largest:,} elements",
            max(_skills(rows, one, largest)) >= min(_skills(rows, "gaussian, rank 1", largest)),
            show("gaussian, rank 1"),
        ),
        Finding(
            "mean pooling does not learn the task",
            max(_skills(rows, "mean", smallest)) < 0.5,
            show("mean"),
        ),
    ]


def table(rows: list[Row]) -> Table:
    sizes = sorted(values(rows, "at"))
    lines = [
        (model, *(mean_and_range(_skills(rows, model, at)) for at in sizes))
        for model in values(rows, "model")
    ]
    return ("skill at", *(f"{size:,}" for size in sizes)), lines


def draw(rows: list[Row], figure: Any) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    for axis, score in zip(axes, ("dot", "gaussian"), strict=True):
        names = [name for name in MODELS if name.startswith(score)] + ["mean"]
        for name, style in zip(names, STYLES, strict=False):
            sizes = sorted(values(select(rows, model=name), "at"))
            skills = [_skills(rows, name, at) for at in sizes]
            shown = [max(-0.5, sum(some) / len(some)) for some in skills]
            label = name.removeprefix(f"{score}, ")
            axis.semilogx(sizes, shown, **style, label=label)
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set(xlabel="elements in a set", title=f"{score} scores", ylim=(-0.55, 1.05))
    axes[0].set(ylabel="skill on unseen sets (at least -0.5)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)


def _cases(size: int, steps: int, then: list[int], seeds: int) -> list[dict[str, Any]]:
    return [
        {"model": model, "size": size, "steps": steps, "then": then, "seeds": seeds}
        for model in MODELS
    ]


EXPERIMENT = Experiment(
    name="set-lengths",
    question="Which rank learns a task on sets, and works on sets far larger than those it saw?",
    refuted_if="rank 1 does not learn the task or loses it on larger sets where full rank does not",
    cases={
        "tiny": _cases(200, 5, [1000], 1),
        "quick": _cases(2000, 150, [10_000, 100_000], 3),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
