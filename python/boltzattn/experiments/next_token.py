"""How many next tokens does a causal one-layer decoder memorize with k parameters?

Madden, Fox & Thrampoulidis (arXiv 2405.13718) prove that a one-layer decoder of k parameters can
interpolate arbitrary next-token distributions of about k / (V - 1) contexts, for V tokens, and not
more than a constant times that. `memorize_next` constructs such a decoder on the causal scan. If
only the most likely token is asked for, it is one of V names, and packed bits need far less. Then
decoders of several sizes are trained on random documents.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boltzattn.experiments.experiment import (
    Experiment,
    Finding,
    Row,
    mean_and_range,
    select,
    slope,
    values,
)
from boltzattn.experiments.training import build_all, count_parameters, model_seeds, train
from boltzattn.nn import OneLayerTransformer
from boltzattn.theory import ResolutionError, decoder_inputs, memorize_next
from boltzattn.theory.presentation import GREY, STYLES, Table

V, D = 8, 8  # tokens, width


class Decoder(nn.Module):
    """A causal one-layer transformer with one head of rank 1 and the logits of the next token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.block = OneLayerTransformer(
            D, out_dim=V, ff1_hidden_dim=0, ff2_hidden_dim=hidden, method="direct"
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, is_causal=True)


def measure(part: str, network: str, size: int, length: int, steps: int, seed: int) -> list[Row]:
    """`size` is the number of contexts of a construction, or of parameters of trained decoders."""
    if part == "trained":
        return _trained(size, length, steps, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (1, size), generator=generator)
    embedding = torch.randn(V + 1, D, dtype=torch.float64, generator=generator)
    targets = None
    if network == "distributions":
        targets = torch.randn(1, size, V - 1, dtype=torch.float64, generator=generator)
    kind = "linear" if network == "distributions" else network
    try:
        report = memorize_next(tokens, embedding, network=kind, targets=targets, seed=seed).report
    except ResolutionError as refused:
        return [{"contexts": size, "refused": str(refused)}]
    return [
        {
            "contexts": report.contexts,
            "parameters": report.parameters,
            "relative_gap": report.relative_gap,
            "max_error": report.max_error,
            "accuracy": report.accuracy,
        }
    ]


def _trained(size: int, length: int, steps: int, seed: int) -> list[Row]:
    """Decoders of about `size` parameters, each on 8 random documents of its own."""
    hidden = 1 + round((size - count_parameters(Decoder(1))) / (2 * D + 1))
    numbers = model_seeds(seed, 3)
    generators = [torch.Generator().manual_seed(number) for number in numbers]
    tokens = torch.stack([torch.randint(V, (8, length), generator=g) for g in generators])
    tables = [torch.randn(V + 1, D, generator=g) for g in generators]
    pairs = zip(tokens, tables, strict=True)
    x = torch.stack([decoder_inputs(t, embedding) for t, embedding in pairs])
    # The first tokens of random documents cannot be told from their prefix.
    start = 4

    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(out[:, start:].flatten(0, 1), wanted[:, start:].flatten())

    models = build_all(lambda _: Decoder(hidden), numbers)
    train(models, lambda _: (x, tokens), loss, steps)
    rows = []
    for i, (number, model) in enumerate(zip(numbers, models, strict=True)):
        with torch.no_grad():
            right = model(x[i])[:, start:].argmax(-1) == tokens[i][:, start:]
        rows.append(
            {
                "model_seed": number,
                "contexts": right.numel(),
                "parameters": count_parameters(model),
                "accuracy": float(right.double().mean()),
            }
        )
    return rows


def _built(rows: list[Row]) -> list[Row]:
    return [row for row in select(rows, part="built") if "refused" not in row]


def judge(rows: list[Row]) -> list[Finding]:
    built = _built(rows)
    tokens = [row for row in built if row["accuracy"] is not None]
    real = select(built, network="distributions")
    worst = max(row["max_error"] for row in real)
    findings = [
        Finding(
            "every next token comes back, and every distribution",
            all(row["accuracy"] == 1 for row in tokens) and worst < 1e-4,
            f"{len(tokens)} decoders, up to {max(r['contexts'] for r in tokens):,} places of one "
            f"document; logits to {worst:.0e}",
        )
    ]
    per = [row["parameters"] / (row["contexts"] * (V - 1)) for row in real]
    findings.append(
        Finding(
            "distributions take about V - 1 parameters per context",
            max(per[1:]) < 1.5,
            f"{per[-1]:.2f} times (V - 1) at {real[-1]['contexts']:,} contexts",
        )
    )
    for network, wanted in (("linear", 1.0), ("packed", 0.5)):
        some = [row for row in select(built, network=network) if row["contexts"] >= 500]
        found = slope([r["contexts"] for r in some], [r["parameters"] for r in some])
        findings.append(
            Finding(
                f"parameters for next tokens grow as contexts^{wanted:g} ({network})",
                abs(found - wanted) < 0.15,
                f"exponent {found:.2f}, {some[-1]['parameters']:,} parameters for "
                f"{some[-1]['contexts']:,} contexts",
            )
        )
    trained = select(rows, part="trained")
    enough = [r for r in trained if r["parameters"] >= 0.97 * r["contexts"] * (V - 1)]
    least = min((row["accuracy"] for row in enough), default=0.0)
    findings.append(
        Finding(
            "training memorizes 99% with V - 1 parameters per context",
            least >= 0.99,
            f"{100 * least:.3g}% at least; "
            + ", ".join(
                f"{mean_and_range([100 * r['accuracy'] for r in some])}% at "
                f"{some[0]['parameters'] / some[0]['contexts'] / (V - 1):.2g} of it"
                for some in (select(trained, size=s) for s in values(trained, "size"))
            ),
        )
    )
    return findings


def table(rows: list[Row]) -> Table:
    lines = []
    for row in _built(rows):
        lines.append(
            (
                f"{row['network']}, constructed",
                f"{row['contexts']:,}",
                f"{row['parameters']:,}",
                f"{row['relative_gap']:.1e}",
                "" if row["accuracy"] is None else f"{100 * row['accuracy']:.4g}",
                f"{row['max_error']:.0e}",
            )
        )
    trained = select(rows, part="trained")
    for size in values(trained, "size"):
        some = select(trained, size=size)
        learned = mean_and_range([100 * row["accuracy"] for row in some])
        lines.append(
            ("trained", some[0]["contexts"], f"{some[0]['parameters']:,}", "", learned, "")
        )
    return ("decoder", "contexts", "parameters", "gap", "% correct", "error"), lines


def draw(rows: list[Row], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    built = _built(rows)
    for network, style in zip(values(built, "network"), STYLES, strict=False):
        some = select(built, network=network)
        left.loglog(
            [r["parameters"] for r in some], [r["contexts"] for r in some], **style, label=network
        )
    k = np.geomspace(300, max(row["parameters"] for row in built), 50)
    left.loglog(k, k / (V - 1), "--", color=GREY, linewidth=1, label="k / (V - 1)")
    left.set(xlabel="parameters k", ylabel="contexts memorized", title="Constructed decoders")
    left.legend()
    trained = select(rows, part="trained")
    sizes = [row["parameters"] / row["contexts"] for row in trained]
    right.semilogx(sizes, [100 * row["accuracy"] for row in trained], "o", color=STYLES[0]["color"])
    shown = sorted({round(size, 1) for size in sizes})
    right.set_xticks(shown, [f"{size:.2g}" for size in shown])
    right.minorticks_off()
    right.axvline(V - 1, color=GREY, linestyle="--", linewidth=1)
    right.text(0.97 * (V - 1), 20, "V - 1 ", color=GREY, ha="right")
    right.set(xlabel="parameters per context", ylabel="next tokens learned, %", ylim=(0, 105))
    right.set_title("Trained decoders")


def _cases(
    sizes: dict[str, list[int]], parameters: list[int], length: int, steps: int
) -> list[dict[str, Any]]:
    built = [
        {"part": "built", "network": network, "size": size, "length": 0, "steps": 0}
        for network, some in sizes.items()
        for size in some
    ]
    return [
        *built,
        *(
            {"part": "trained", "network": "", "size": k, "length": length, "steps": steps}
            for k in parameters
        ),
    ]


_SIZES = [100, 300, 1000, 3000, 10_000]
_CONTEXTS = 8 * (32 - 4)

EXPERIMENT = Experiment(
    name="next-token",
    question="How many next tokens does a causal one-layer decoder memorize with k parameters?",
    refuted_if="a constructed decoder is wrong, or the sizes do not follow the bounds",
    cases={
        "tiny": _cases(
            {"distributions": [100, 300], "linear": [500, 1500], "packed": [500, 1500]},
            [300, 400],
            8,
            5,
        ),
        "quick": _cases(
            {
                "distributions": [100, 300, 1000, 3000],
                "linear": _SIZES,
                "packed": [*_SIZES, 30_000],
                "looped": _SIZES,
            },
            [round(share * _CONTEXTS * (V - 1)) for share in (0.25, 0.5, 1.0, 2.0, 4.0)],
            32,
            1000,
        ),
    },
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
)
