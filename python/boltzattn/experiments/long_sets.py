"""Can attention be trained on sets that are too long for full attention, and is it worth it?

Every element of a set has a value a_i and an inverse temperature s_i. Its target is the soft
extremum of the set at that temperature, `sum_j a_j softmax_j(s_i a_j)`: close to the minimum at
s = -2, the mean at 0, close to the maximum at 2. Values have exponential tails and a random scale
for every set, so at |s| = 2 the target depends on the few largest elements of the whole set.

The experiment compares eight heads of rank 1 (the transform, linear time), full attention
(quadratic), mean pooling (rank 1 with zero queries), and full attention on a sample of the set, the
usual remedy if a set is too long. "Skill" is the explained share of the variance between sets: 0
for the average answer at each temperature, 1 for the truth. In the quick run the training on the
largest sets starts from the model trained on smaller ones.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from boltzattn.experiments.experiment import Experiment, Finding, Row, select, slope, values
from boltzattn.nn import OneLayerTransformer
from boltzattn.theory.presentation import STYLES, Table

DIM = 4  # value, inverse temperature, and two free coordinates
TEMPERATURES = torch.linspace(-2, 2, 9)  # few, so that the targets are cheap
SAMPLE = 1024
RATE = 3e-2
RATE_ON = 3e-3  # for continuing with larger sets
STEP_ELEMENTS = 1 << 12  # elements per step at least: several sets if they are small
TEST_SETS, LEAST_TEST_SETS, TEST_ELEMENTS = 24, 8, 1 << 22
KINDS = {
    "rank 1": "8 heads of rank 1, transform",
    "full": "full attention",
    "sample": f"full attention on {SAMPLE} elements",
    "mean": "mean pooling",
}


def draw_set(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Elements `[size, DIM]`, targets `[size]`, and the target at each of TEMPERATURES.

    Example:
        >>> x, answers, table = draw_set(100, torch.Generator().manual_seed(0))
        >>> bool((table.diff() >= 0).all())
        True
    """
    u = torch.rand(size, generator=generator).clamp(1e-9, 1 - 1e-7)
    scale = 0.5 + torch.rand((), generator=generator)
    value = scale * torch.where(u < 0.5, (2 * u).log(), -(2 - 2 * u).log())
    answers = torch.softmax(TEMPERATURES[:, None] * value, dim=1) @ value
    which = torch.randint(len(TEMPERATURES), (size,), generator=generator)
    x = torch.zeros(size, DIM)
    x[:, 0], x[:, 1] = value, TEMPERATURES[which]
    return x, answers[which], answers


def draw_sets(kind: str, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The sets of one step, `[sets, elements, DIM]`, and targets `[sets, elements]`."""
    count = max(1, STEP_ELEMENTS // size)
    sets, answers, _ = zip(*(draw_set(size, generator) for _ in range(count)), strict=True)
    # The elements are in random order, so the first ones are a sample.
    shown = SAMPLE if kind == "sample" else size
    return torch.stack(sets)[:, :shown], torch.stack(answers)[:, :shown]


def build(kind: str) -> OneLayerTransformer:
    """The paper's block, with several heads, because a head with a bad start learns nothing."""
    full = kind in ("full", "sample")
    model = OneLayerTransformer(
        DIM,
        form="paper",
        num_heads=2 if full else 8,
        rank=DIM if full else 1,
        head_dim=DIM if full else 1,
        ff1_hidden_dim=8,
        ff2_hidden_dim=16,
        # "auto" would choose the same at these sizes.
        method="direct" if full else "transform",
    )
    if kind == "mean":
        torch.nn.init.zeros_(model.attention.q_proj_weight)
        model.attention.q_proj_weight.requires_grad_(False)
    return model


def measure(
    kind: str, size: int, steps: int, trained: bool, then: list[list[int]], seed: int
) -> list[Row]:
    """Train on fresh sets in every step; `trained=False` only times the steps.

    `then` lists (elements, steps) for continuing with the same model, a row for each.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = build(kind)
    seconds = train_on_sets(model, kind, size, steps, RATE, generator)
    found = skill(model, kind, size, seed) if trained else None
    rows: list[Row] = [{"before": None, "skill": found, "seconds_per_step": seconds}]
    for larger, more in then:
        before = skill(model, kind, larger, seed)
        seconds = train_on_sets(model, kind, larger, more, RATE_ON, generator)
        rows.append(
            {
                "size": larger,
                "steps": more,
                "before": before,
                "skill": skill(model, kind, larger, seed),
                "seconds_per_step": seconds,
            }
        )
    return rows


def train_on_sets(
    model: torch.nn.Module,
    kind: str,
    size: int,
    steps: int,
    rate: float,
    generator: torch.Generator,
) -> float:
    """Train; return the median seconds of a step, per set."""
    free = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(free, lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.1
    )
    seconds = []
    for _ in range(steps):
        x, answers = draw_sets(kind, size, generator)
        start = time.perf_counter()
        loss = (model(x)[..., 0] - answers).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(free, 1.0)
        optimizer.step()
        schedule.step()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2] / max(1, STEP_ELEMENTS // size)


@torch.no_grad()
def skill(model: OneLayerTransformer, kind: str, size: int, seed: int) -> float:
    """1 - mean squared error / variance between sets, on unseen sets."""
    generator = torch.Generator().manual_seed(2**31 + seed)
    errors, answers = [], []
    for _ in range(max(LEAST_TEST_SETS, min(TEST_SETS, TEST_ELEMENTS // size))):
        x, wanted, everywhere = draw_set(size, generator)
        if kind == "sample":
            x, wanted = x[:SAMPLE], wanted[:SAMPLE]
        errors.append((model(x)[:, 0] - wanted).square().mean())
        answers.append(everywhere)
    return float(1 - torch.stack(errors).mean() / torch.stack(answers).var(dim=0).mean())


def judge(rows: list[Row]) -> list[Finding]:
    def skills(kind: str) -> dict[int, float]:
        return {r["size"]: r["skill"] for r in select(rows, kind=kind) if r["skill"] is not None}

    def show(kind: str) -> str:
        return ", ".join(f"{value:.3f} at {size:,}" for size, value in skills(kind).items())

    one, full, sample, mean = map(skills, ("rank 1", "full", "sample", "mean"))
    findings = [
        Finding(
            "rank-1 heads learn the task at every size",
            min(one.values()) > 0.9,
            f"skill {show('rank 1')}",
        ),
        Finding(
            "full attention is not better at the sizes where it can be trained",
            all(full[size] < one[size] + 0.02 for size in full.keys() & one.keys()),
            f"skill {show('full')}",
        ),
        Finding(
            f"full attention on a sample of {SAMPLE} elements gets worse as sets grow",
            sample[max(sample)] < min(0.9, one[max(sample)] - 0.1),
            f"skill {show('sample')}",
        ),
        Finding(
            "mean pooling does not learn the task",
            max(mean.values()) < 0.5,
            f"skill {show('mean')}",
        ),
    ]
    times = {
        kind: sorted((r["size"], r["seconds_per_step"]) for r in select(rows, kind=kind))
        for kind in ("rank 1", "full")
    }
    exponents = {kind: slope(*zip(*some[-3:], strict=True)) for kind, some in times.items()}
    (largest, linear), (longest, quadratic) = times["rank 1"][-1], times["full"][-1]
    findings.append(
        # Caches and the overhead of a step change the exponents a little.
        Finding(
            "a step takes linear time with rank 1 and quadratic time with full attention",
            exponents["rank 1"] < 1.25 and exponents["full"] > 1.5,
            f"exponents {exponents['rank 1']:.2f} and {exponents['full']:.2f}; {linear:.2g} s at "
            f"{largest:,} elements, {quadratic:.2g} s at {longest:,}",
        )
    )
    return findings


def table(rows: list[Row]) -> Table:
    lines = [
        (
            KINDS[row["kind"]],
            f"{row['size']:,}",
            f"{row['steps']}" + ("" if row["before"] is None else " more"),
            "-" if row["before"] is None else f"{row['before']:.3f}",
            "-" if row["skill"] is None else f"{row['skill']:.3f}",
            f"{1000 * row['seconds_per_step']:.3g}",
        )
        for row in rows
    ]
    return ("attention", "elements", "steps", "skill before", "skill", "ms per set"), lines


def draw(rows: list[Row], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for kind, style in zip(KINDS, STYLES, strict=False):
        some = sorted(select(rows, kind=kind), key=lambda row: row["size"])
        trained = [row for row in some if row["skill"] is not None]
        sizes = [row["size"] for row in trained]
        left.semilogx(sizes, [row["skill"] for row in trained], **style, base=2, label=KINDS[kind])
        if kind in ("rank 1", "full"):
            seconds = [row["seconds_per_step"] for row in some]
            right.loglog([row["size"] for row in some], seconds, **style, label=KINDS[kind])
    for axis, some in ((left, select(rows, trained=True)), (right, rows)):
        ticks = sorted(values(some, "size"))
        names = [f"{s >> 20}M" if s >= 1 << 20 else f"{s >> 10}k" for s in ticks]
        axis.set_xticks(ticks, names)
        axis.set_xticks([], minor=True)
        axis.set(xlabel="elements in a set")
    left.axhline(0, color="black", linewidth=0.6)
    left.set(ylabel="skill on unseen sets", title="Trained (1: perfect)", ylim=(None, 1.05))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    right.set(ylabel="seconds", title="Time of a training step, per set")


def _cases(
    sizes: dict[str, list[tuple[int, int]]],
    then: list[list[int]],
    timed: list[int],
) -> list[dict[str, Any]]:
    """The cases of one size.

    Args:
        sizes: (elements, steps) to train, for each kind.
        then: (elements, steps) for continuing with the last model of rank 1.
        timed: elements at which three steps of full attention are timed.
    """
    cases = [
        {"kind": kind, "size": size, "steps": steps, "trained": True, "then": []}
        for kind, some in sizes.items()
        for size, steps in some
    ]
    last = [case for case in cases if case["kind"] == "rank 1"][-1]
    last["then"] = then
    return cases + [
        {"kind": "full", "size": size, "steps": 3, "trained": False, "then": []} for size in timed
    ]


_K, _M = 1 << 10, 1 << 20

EXPERIMENT = Experiment(
    name="long-sets",
    question="Can rank-1 attention be trained on sets too long for full attention, and is it "
    "worth it?",
    refuted_if="rank 1 does not learn the task at some size, or a sample of the set is enough",
    cases={
        "tiny": _cases(
            {
                "rank 1": [(512, 80), (2 * _K, 80)],
                "full": [(512, 40)],
                "sample": [(2 * _K, 20)],
                "mean": [(512, 40)],
            },
            [[8 * _K, 3]],
            [_K, 2 * _K],
        ),
        "quick": _cases(
            {
                "rank 1": [(_K, 200), (2 * _K, 200), (4 * _K, 200), (16 * _K, 200)],
                "full": [(_K, 200), (2 * _K, 200)],
                "sample": [(_K, 200), (4 * _K, 200), (16 * _K, 200)],
                "mean": [(_K, 200), (4 * _K, 200)],
            },
            [[64 * _K, 20], [256 * _K, 8], [_M, 5]],
            [4 * _K, 8 * _K],
        ),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
