"""Does a rank-1 head find the one informative token among many, and can linear attention?

Single-location regression (Marion, Berthier, Biau & Boyer 2024, arXiv:2410.01537): of L tokens in
R^d, all but one are standard normal. The other one, at a random place, has mean `sqrt(d / 2) k` and
variance 1/2 in every direction, so that its length does not give it away; the target is its
product with v. The directions k and v are orthogonal and unknown. One learnt query attends to all
tokens.

"Error" is the mean squared error divided by the variance of the target: 1 for a model that predicts
the mean. A trained model is measured at other lengths, too.
"""

from __future__ import annotations

from typing import Any

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
from boltzattn.experiments.training import model_seeds
from boltzattn.functional import attention
from boltzattn.theory.presentation import STYLES, Table

DIM = 32
RATE = 3e-2
STEP_TOKENS, TEST_TOKENS = 1 << 13, 1 << 17  # of a step, of a test
MODELS = {
    "softmax, rank 1": 1,
    "softmax, rank 8": 8,
    "softmax, full rank": DIM,
    "Gaussian, rank 1": 1,
    "linear attention": DIM,
    "mean": 1,
}
SOFTMAX = [name for name in MODELS if "rank" in name]


def draw_tokens(count: int, length: int, seed: int, generator: torch.Generator) -> Row:
    """`count` sequences: tokens `[count, length, DIM]` and targets `[count]`.

    The two directions follow from the seed.

    Example:
        >>> data = draw_tokens(5, 7, 0, torch.Generator())
        >>> data["x"].shape, data["y"].shape
        (torch.Size([5, 7, 32]), torch.Size([5]))
    """
    directions = torch.randn(DIM, 2, generator=torch.Generator().manual_seed(seed))
    k, v = torch.linalg.qr(directions).Q.T
    x = torch.randn(count, length, DIM, generator=generator)
    row, place = torch.arange(count), torch.randint(length, (count,), generator=generator)
    x[row, place] = x[row, place] * 0.5**0.5 + (DIM / 2) ** 0.5 * k
    return {"x": x, "y": x[row, place] @ v}


class Head(nn.Module):
    """One head with a learnt query, one number as value, and a bias."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model, rank = model, MODELS[model]
        self.query = nn.Parameter(torch.randn(1, rank))
        self.key = nn.Linear(DIM, rank, bias=False)
        self.value = nn.Linear(DIM, 1)
        nn.init.orthogonal_(self.key.weight)

    def forward(self, x: Tensor) -> Tensor:
        key, value = self.key(x), self.value(x)
        if self.model == "mean":
            return value.mean((-2, -1))
        if self.model == "linear attention":
            return ((key @ self.query.T) * value).mean((-2, -1))
        query = self.query.expand(len(x), 1, -1)
        score = "gaussian" if self.model.startswith("Gaussian") else "dot"
        return attention(query, key, value, score=score)[:, 0, 0]


def measure(
    model: str, length: int, steps: int, seeds: int, then: list[int], seed: int
) -> list[Row]:
    """Train on fresh sequences of `length` tokens; measure there and at the lengths of `then`."""
    rows: list[Row] = []
    for number in model_seeds(seed, seeds):
        torch.manual_seed(number)
        head = Head(model)
        generator = torch.Generator().manual_seed(number)
        optimizer = torch.optim.Adam(head.parameters(), lr=RATE, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
        for _ in range(steps):
            data = draw_tokens(STEP_TOKENS // length, length, number, generator)
            loss = (head(data["x"]) - data["y"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        for at in (length, *then):
            rows.append({"model_seed": number, "at": at, "error": error(head, at, number)})
    return rows


@torch.no_grad()
def error(head: Head, length: int, seed: int) -> float:
    """Mean squared error on unseen sequences, divided by the variance of the target."""
    generator = torch.Generator().manual_seed(2**31 + seed)
    squares = []
    for _ in range(max(1, 64 * length // TEST_TOKENS)):
        count = max(1, min(512, TEST_TOKENS // length))
        data = draw_tokens(count, length, seed, generator)
        squares.append((head(data["x"]) - data["y"]).square())
    return float(torch.cat(squares).mean() / 0.5)


def _errors(rows: list[Row], model: str, length: int, at: int) -> list[float]:
    return [row["error"] for row in select(rows, model=model, length=length, at=at)]


def _show(rows: list[Row], model: str, pairs: list[tuple[int, int]]) -> str:
    shown = ((mean_and_range(_errors(rows, model, *pair)), pair[1]) for pair in pairs)
    return ", ".join(f"{errors} at {at:,}" for errors, at in shown)


def judge(rows: list[Row]) -> list[Finding]:
    lengths = values(rows, "length")
    here = [(length, length) for length in lengths]
    longest = max(lengths)
    findings = [
        Finding(
            f"{model} finds the token at every length",
            all(max(_errors(rows, model, *pair)) < 0.2 for pair in here),
            f"error {_show(rows, model, here)}",
        )
        for model in SOFTMAX
    ]
    one, full = (
        _errors(rows, model, longest, longest)
        for model in ("softmax, rank 1", "softmax, full rank")
    )
    findings.append(
        Finding(
            f"rank 1 is as good as full rank at {longest:,} tokens",
            min(one) <= max(full),
            f"error {mean_and_range(one)}, full rank {mean_and_range(full)}",
        )
    )
    for model in ("linear attention", "mean"):
        findings.append(
            Finding(
                f"{model} does not find it among {longest:,} tokens",
                min(_errors(rows, model, longest, longest)) > 0.8,
                f"error {_show(rows, model, here)}",
            )
        )
    beyond = sorted({(row["length"], row["at"]) for row in rows if row["at"] > row["length"]})
    findings.append(
        Finding(
            f"rank 1 trained at {beyond[-1][0]:,} tokens finds it at {beyond[-1][1]:,}",
            max(_errors(rows, "softmax, rank 1", *beyond[-1])) < 0.5,
            f"error {_show(rows, 'softmax, rank 1', beyond)}",
        )
    )
    return findings


def table(rows: list[Row]) -> Table:
    lines = []
    for model in values(rows, "model"):
        for length in values(select(rows, model=model), "length"):
            some = select(rows, model=model, length=length)
            for at in values(some, "at"):
                found = mean_and_range(_errors(rows, model, length, at))
                lines.append((model, f"{length:,}", f"{at:,}", found))
    return ("model", "trained at", "measured at", "error"), lines


def draw(rows: list[Row], figure: Any) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    beyond = max(row["length"] for row in rows if row["at"] > row["length"])
    for model, style in zip(MODELS, STYLES, strict=True):
        for axis, key, some in (
            (
                left,
                "length",
                [row for row in select(rows, model=model) if row["at"] == row["length"]],
            ),
            (right, "at", select(rows, model=model, length=beyond)),
        ):
            where = sorted(values(some, key))
            errors = [[row["error"] for row in select(some, **{key: at})] for at in where]
            means = [sum(e) / len(e) for e in errors]
            axis.loglog(where, means, **style, label=model)
            axis.fill_between(
                where,
                [min(e) for e in errors],
                [max(e) for e in errors],
                color=style["color"],
                alpha=0.15,
            )
    left.set(xlabel="tokens", ylabel="error", title="Trained and measured at")
    right.set(xlabel="tokens", title=f"Trained at {beyond:,}, measured at")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6)


def _cases(
    lengths: list[int], steps: int, seeds: int, then: dict[int, list[int]]
) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "length": length,
            "steps": steps,
            "seeds": seeds,
            "then": then.get(length, []),
        }
        for length in lengths
        for model in MODELS
    ]


EXPERIMENT = Experiment(
    name="single-location",
    question="Does a rank-1 head find the one informative token among many?",
    refuted_if="rank 1 does not learn where full rank does, or linear attention learns as well",
    cases={
        "tiny": _cases([8, 64], 30, 1, {64: [256]}),
        "quick": _cases([16, 64, 256], 600, 3, {256: [1024, 8192]}),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
