"""Which rank do the scores and the values need, and how many heads?

The theorem needs rank 1 only: queries, keys and values all project the token onto one vector. Here
the ranks vary at an equal number of parameters, and the models are trained on random labels, or to
imitate an attention layer whose scores have full rank (or rank 1, for comparison). Then the same
total rank is divided into few wide heads or many heads of rank 1. Finally, attention is fixed, with
the vector of the construction or a random one, and only the network after it is trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boltzattn.experiments.comparison import (
    as_good,
    draw_bars,
    found,
    model_cases,
    model_table,
)
from boltzattn.experiments.experiment import Experiment, Finding, Row, mean_and_range
from boltzattn.experiments.tasks import Draw, learn_function, learn_labels
from boltzattn.experiments.training import count_parameters, model_seeds
from boltzattn.nn import FeedForward, OneLayerTransformer
from boltzattn.theory import construct_attention
from boltzattn.theory.memorization import random_task
from boltzattn.theory.presentation import BLUE, GREEN, ORANGE

D, N_TOKENS, VOCABULARY = 8, 6, 24  # D is also the number of classes: the output is the logits
# name: number of heads, rank of the scores and width of the values of a head
TRAINED = {
    **{f"scores {r}, values {D}": (1, r, D) for r in (1, 2, 4, D)},
    **{f"scores {r}, values {r}": (1, r, r) for r in (1, 2, 4)},
    **{f"{h} heads of {D // h}": (h, D // h, D // h) for h in (2, 4, 8)},
}
ALONE = ("tied vector", "constructed vector", "random vector")


class TiedAttention(nn.Module):
    """The theorem's attention, with trained parameters: `z + o sum_k P_k softmax_k(b P_q P_k)`.

    `P = z . v`: queries, keys and values are projections onto the same vector.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.v = nn.Parameter(F.normalize(torch.randn(dim), dim=0))
        self.beta = nn.Parameter(torch.ones(()))
        self.o = nn.Parameter(torch.randn(dim) / dim**0.5)

    def forward(self, z: Tensor) -> Tensor:
        p = z @ self.v
        weights = torch.softmax(self.beta * p[..., :, None] * p[..., None, :], -1)
        return z + (weights @ p[..., None]) * self.o


def build(model: str, parameters: int, count: int, seed: int) -> nn.Module:
    """Attention, followed by a network that brings the total to about `parameters`.

    Attention counts even if it is not trained. There is no network before attention, because it
    would change the rank.
    """
    attention = _attention(model, count, seed)
    hidden = round((parameters - count_parameters(attention) - D) / (2 * D + 1))
    return nn.Sequential(attention, FeedForward(D, hidden))


def _attention(model: str, count: int, seed: int) -> nn.Module:
    if model in TRAINED:
        heads, rank, width = TRAINED[model]
        layer = OneLayerTransformer(
            D,
            form="paper",
            num_heads=heads,
            rank=rank,
            head_dim=width,
            ff1_hidden_dim=0,
            ff2_hidden_dim=0,
            method="direct",
        )
        # The paper has no scale, but scores of every rank should start with the same variance.
        layer.attention.scale = rank**-0.5
        return layer
    if model == "tied vector":
        return TiedAttention(D)
    if model == "constructed vector":
        fixed = construct_attention(_sequences(count, seed), seed=seed).module().float()
    else:
        w_q, w_k, w_v = (F.normalize(torch.randn(1, D), dim=1) for _ in range(3))
        fixed = OneLayerTransformer.from_weights(
            w_q,
            w_k,
            w_v,
            torch.randn(D, 1) / D**0.5,
            method="direct",
        )
    return fixed.requires_grad_(False)


def _sequences(count: int, seed: int) -> Tensor:
    return random_task(N_TOKENS, VOCABULARY, count, D, D, seed)[0]


def teacher(rank: int, seed: int) -> Draw:
    """The output of an attention layer whose scores `x_q . A x_k` have this rank.

    Tokens are normal. A has `rank` equal singular values, scaled so that the scores have a standard
    deviation of 2 for every rank.
    """
    basis = torch.randn(2, D, D, generator=torch.Generator().manual_seed(seed))
    left, right = torch.linalg.qr(basis).Q[:, :, :rank]
    form = 2 / rank**0.5 * left @ right.T

    def draw(sets: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(sets, N_TOKENS, D, generator=generator)
        return x, torch.softmax(x @ form @ x.transpose(-1, -2), -1) @ x

    return draw


def measure(
    task: str, model: str, parameters: int, count: int, steps: int, seeds: int, seed: int
) -> list[Row]:
    numbers = model_seeds(seed, seeds)

    def make(number: int) -> nn.Module:
        return build(model, parameters, count, number)

    if task == "labels":
        rows = learn_labels(
            make,
            numbers,
            n=N_TOKENS,
            vocabulary=VOCABULARY,
            count=count,
            d=D,
            classes=D,
            steps=steps,
        )
    else:
        draw = teacher(int(task.removeprefix("imitate rank ")), seed)
        rows = learn_function(make, numbers, draw=draw, batch=count, steps=steps, rate=3e-2)
    return [{"true_parameters": count_parameters(make(0)), **row} for row in rows]


def judge(rows: list[Row]) -> list[Finding]:
    full, one, heads = f"scores {D}, values {D}", f"scores 1, values {D}", f"{D} heads of 1"
    alone, trained = "constructed vector", "scores 1, values 1"
    hard, easy = f"imitate rank {D}", "imitate rank 1"
    findings = [
        as_good(rows, claim, task, first, second)
        for claim, task, first, second in (
            ("rank-1 scores memorize as many labels as full-rank scores", "labels", one, full),
            ("rank-1 values memorize as many labels as full-rank values", "labels", trained, one),
            ("rank-1 scores imitate rank-1 attention as well as full-rank scores", easy, one, full),
            (
                "rank-1 scores imitate full-rank attention as well as full-rank scores",
                hard,
                one,
                full,
            ),
            (
                f"{D} heads of rank 1 memorize as many labels as one head of rank {D}",
                "labels",
                heads,
                full,
            ),
            (
                f"{D} heads of rank 1 imitate full-rank attention as well as one head of rank {D}",
                hard,
                heads,
                full,
            ),
            (
                "with the constructed vector, training only the network learns as much as "
                "training all",
                "labels",
                alone,
                trained,
            ),
        )
    ]
    others = (f"{mean_and_range(found(rows, 'labels', m))} ({m})" for m in ALONE if m != alone)
    findings[-1] = replace(findings[-1], evidence=", ".join((findings[-1].evidence, *others)))
    return findings


def draw(rows: list[Row], figure: Any) -> None:
    draw_bars(
        figure,
        rows,
        {
            "labels": "Memorization (more is better)",
            f"imitate rank {D}": f"Imitating attention of rank {D} (less is better)",
        },
        lambda model: GREEN if "heads" in model else BLUE if model in TRAINED else ORANGE,
    )


_PAIRS = [
    *(("labels", model) for model in (*TRAINED, *ALONE)),
    # The construction is for finitely many sequences, not for a function.
    *((f"imitate rank {D}", m) for m in (*TRAINED, *ALONE) if m != "constructed vector"),
    *(("imitate rank 1", f"scores {r}, values {D}") for r in (1, D)),
]


EXPERIMENT = Experiment(
    name="rank",
    question="Which rank do trained scores and values need, and are many heads of rank 1 as good?",
    refuted_if="every seed of rank 1 does worse than every seed of full rank, at equal parameters",
    cases={
        "tiny": model_cases(_PAIRS, parameters=1500, count=8, steps=10, seeds=2),
        "quick": model_cases(_PAIRS, parameters=1500, count=64, steps=400, seeds=3),
    },
    measure=measure,
    judge=judge,
    table=model_table,
    draw=draw,
)
