"""Can hardmax attention be trained to do what softmax attention does?

Take the multiples (1, 2, 5, 6) and (1, 3, 4, 6) of a vector. At the shared tokens 1 and 6 every
hardmax attention layer has the same output for both, for all weights, because it selects the
largest token, the smallest token, or the mean. Here layers learn which of the two sets a token is
in, from fresh sets in every step. At the other tokens hardmax can succeed, which shows that
training works. The argument is about tokens on a line. A network before attention bends the line,
so hardmax is also tried with one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from boltzattn.experiments.experiment import (
    Experiment,
    Finding,
    Row,
    mean_and_range,
    select,
    values,
)
from boltzattn.experiments.training import build_all, model_seeds, train
from boltzattn.nn import LowRankAttention, OneLayerTransformer
from boltzattn.theory import hardmax, search_hardmax_weights
from boltzattn.theory.presentation import BLUE, GREY, ORANGE, Table

D, HEADS = 4, 4
# Both in the order (shared, shared, own, own).
SETS = torch.tensor([[1.0, 6.0, 2.0, 5.0], [1.0, 6.0, 3.0, 4.0]])
TEST_SETS = 4000
RATE = 3e-2


class HardmaxAttention(LowRankAttention):
    """`LowRankAttention` that attends to the largest score, with a straight-through gradient.

    The weights are hardmax in forward and softmax in backward, because hardmax has no gradient.
    """

    def forward(self, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        q, k, v = (
            F.linear(query, weight).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
            for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        scores = q @ k.transpose(-1, -2)
        soft = torch.softmax(scores, -1)
        # Scores that are equal up to fp32 rounding are ties.
        weights = hardmax(scores.detach(), tolerance=1e-5) + soft - soft.detach()
        return self.out_proj((weights @ v).transpose(-2, -3).flatten(-2)), None


def build(kind: str, first_network: bool) -> OneLayerTransformer:
    """The paper's block with four heads of rank 1, and softmax, hardmax or the mean."""
    model = OneLayerTransformer(
        D,
        form="paper",
        num_heads=HEADS,
        rank=1,
        head_dim=1,
        ff1_hidden_dim=32 if first_network else 0,
        ff2_hidden_dim=64,
        method="direct",
    )
    if kind == "hardmax":
        state = model.attention.state_dict()
        model.attention = HardmaxAttention(
            D, HEADS, bias=False, batch_first=True, rank=1, head_dim=1, scale=1.0
        )
        model.attention.load_state_dict(state)
    elif kind == "mean":
        torch.nn.init.zeros_(model.attention.q_proj_weight)
        model.attention.q_proj_weight.requires_grad_(False)
    return model


def draw_sets(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sets `[count, 4, D]` of multiples of a vector of random length, and their labels `[count]`.

    Example:
        >>> x, label = draw_sets(5, torch.Generator().manual_seed(0))
        >>> x.shape, label.shape
        (torch.Size([5, 4, 4]), torch.Size([5]))
    """
    label = torch.randint(2, (count,), generator=generator)
    length = 0.5 + 0.5 * torch.rand(count, 1, 1, generator=generator)
    direction = torch.linspace(-1, 1, D)
    return SETS[label][:, :, None] / 2 * length * F.normalize(direction, dim=0), label


def measure(
    kind: str, first_network: bool, seeds: int, steps: int, batch: int, trials: int, seed: int
) -> list[Row]:
    if kind == "search":
        found = search_hardmax_weights(trials, seed)
        return [
            {
                "hardmax_max": found.hardmax_max,
                "softmax_median": found.softmax_median,
                "softmax_separates": found.softmax_separates,
            }
        ]
    generator = torch.Generator().manual_seed(seed)
    numbers = model_seeds(seed, seeds)
    models = build_all(lambda _: build(kind, first_network), numbers)

    def batches(_: int) -> tuple[Tensor, Tensor]:
        x, label = draw_sets(seeds * batch, generator)
        return x.unflatten(0, (seeds, batch)), label.unflatten(0, (seeds, batch))

    def loss(out: Tensor, label: Tensor) -> Tensor:
        wanted = label[:, None].expand(out.shape[:-1]).to(out.dtype)
        return F.binary_cross_entropy_with_logits(out[..., 0], wanted)

    train(models, batches, loss, steps, RATE)
    x, label = draw_sets(TEST_SETS, torch.Generator().manual_seed(2**31 + seed))
    rows = []
    for number, model in zip(numbers, models, strict=True):
        with torch.no_grad():
            right = ((model(x)[..., 0] > 0) == label[:, None].bool()).double().mean(0)
        rows.append(
            {
                "model_seed": number,
                "shared": float(right[:2].mean()),
                "own": float(right[2:].mean()),
            }
        )
    return rows


def judge(rows: list[Row]) -> list[Finding]:
    (found,) = select(rows, kind="search")

    def shares(kind: str, first_network: bool, token: str) -> list[float]:
        return [row[token] for row in select(rows, kind=kind, first_network=first_network)]

    def show(kind: str, first_network: bool, token: str = "shared") -> str:
        return f"{mean_and_range([100 * s for s in shares(kind, first_network, token)])}%"

    # Four standard deviations of guessing; the two shared tokens of a set are guessed alike.
    chance = 0.5 + 4 * 0.5 / TEST_SETS**0.5
    bent = shares("hardmax", True, "shared")
    return [
        Finding(
            "no hardmax layer separates the shared tokens",
            found["hardmax_max"] < 1e-12,
            f"largest relative gap of {found['trials']} random layers {found['hardmax_max']:.1g}; "
            f"softmax separates {100 * found['softmax_separates']:.0f}%",
        ),
        Finding(
            "trained hardmax attention guesses at the shared tokens",
            max(shares("hardmax", False, "shared")) < chance,
            f"{show('hardmax', False)} correct, at the other tokens "
            f"{show('hardmax', False, 'own')}",
        ),
        Finding(
            "trained mean pooling guesses at the shared tokens",
            max(shares("mean", False, "shared")) < chance,
            f"{show('mean', False)} correct",
        ),
        Finding(
            "trained softmax attention distinguishes the shared tokens",
            min(shares("softmax", False, "shared")) > 0.95,
            f"{show('softmax', False)} correct",
        ),
        Finding(
            "a network before attention does not help hardmax",
            max(bent) < chance,
            f"{show('hardmax', True)} correct; softmax {show('softmax', True)}, mean pooling "
            f"{show('mean', True)}",
        ),
    ]


def table(rows: list[Row]) -> Table:
    lines = []
    for kind in ("softmax", "hardmax", "mean"):
        for first in values(select(rows, kind=kind), "first_network"):
            some = select(rows, kind=kind, first_network=first)
            lines.append(
                (
                    kind + (", network before" if first else ""),
                    mean_and_range([100 * row["shared"] for row in some]),
                    mean_and_range([100 * row["own"] for row in some]),
                )
            )
    return ("trained layer", "% correct, shared tokens", "% correct, other tokens"), lines


def draw(rows: list[Row], figure: Any) -> None:
    axis = figure.subplots()
    bars = [
        (kind, first, kind + ("\nafter a\nnetwork" if first else ""))
        for kind in ("softmax", "hardmax", "mean")
        for first in values(select(rows, kind=kind), "first_network")
    ]
    for shift, token, colour, label in (
        (-0.2, "shared", BLUE, "tokens in both sets"),
        (0.2, "own", ORANGE, "other tokens"),
    ):
        for i, (kind, first, _) in enumerate(bars):
            shares = [100 * r[token] for r in select(rows, kind=kind, first_network=first)]
            mean = sum(shares) / len(shares)
            axis.bar(i + shift, mean, 0.36, color=colour, label=label if i == 0 else None)
            axis.plot([i + shift] * len(shares), shares, ".", color="black", markersize=4)
    axis.axhline(50, color=GREY, linestyle="--", linewidth=1)
    axis.text(len(bars) - 0.55, 51, "guessing", color=GREY, va="bottom", ha="left")
    axis.set_xticks(range(len(bars)), [name for *_, name in bars])
    axis.set(
        ylabel="correct sets, %",
        ylim=(0, 118),
        xlim=(-0.6, len(bars) - 0.05),
        title="Trained to distinguish (1, 2, 5, 6)x and (1, 3, 4, 6)x; dots are seeds",
    )
    axis.legend(loc="upper right", ncols=2)


def _cases(seeds: int, steps: int, batch: int, trials: int) -> list[dict[str, Any]]:
    shared = {"seeds": seeds, "steps": steps, "batch": batch, "trials": trials}
    kinds = [
        ("search", False),
        ("softmax", False),
        ("softmax", True),
        ("hardmax", False),
        ("hardmax", True),
        ("mean", False),
        ("mean", True),
    ]
    return [{"kind": kind, "first_network": first, **shared} for kind, first in kinds]


EXPERIMENT = Experiment(
    name="hardmax",
    question="Can hardmax attention be trained to do what softmax attention does?",
    refuted_if="hardmax beats guessing at the shared tokens, or softmax does not learn them",
    cases={
        "tiny": _cases(2, 20, 64, 20),
        "quick": _cases(3, 800, 64, 500),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
