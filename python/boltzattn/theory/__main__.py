"""Show every result of the theory once, with a table and a figure."""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from boltzattn.boltz_operator import boltz
from boltzattn.theory.approximation import TARGETS, EquivarianceWarning, approximate
from boltzattn.theory.boltzmann import (
    boltz_gradient,
    boltz_hessian,
    decreasing_below,
    max_deficit,
    tempered_mean,
)
from boltzattn.theory.construction import construct_attention, evaluate
from boltzattn.theory.hardmax import prouhet_pair, search_hardmax_weights, temperature_scan
from boltzattn.theory.loops import looped_square
from boltzattn.theory.memorization import memorize, random_task
from boltzattn.theory.next_token import memorize_next
from boltzattn.theory.packed import memorize_packed, random_sequences
from boltzattn.theory.presentation import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    STYLES,
    format_table,
    save_figure,
)
from boltzattn.theory.rank import id_gap
from boltzattn.theory.separation import ResolutionWarning
from boltzattn.theory.symmetric import Polynomial, evaluate_polynomial, symmetric_polynomial


def main(arguments: list[str] | None = None, prog: str = "python -m boltzattn.theory") -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("theory-figures"), help="folder for the figures"
    )
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    results: dict[str, Callable[[Any], None]] = {
        "boltzmann": show_boltzmann,
        "contextual": show_contextual,
        "hardmax": show_hardmax,
        "memorization": show_memorization,
        "approximation": show_approximation,
        "packed": show_packed,
        "next-token": show_next_token,
        "loops": show_loops,
        "polynomials": show_polynomials,
        "rank": show_rank,
    }
    for name, show in results.items():
        with warnings.catch_warnings():
            # The tables show what these warnings are about.
            warnings.simplefilter("ignore", ResolutionWarning)
            warnings.simplefilter("ignore", EquivarianceWarning)
            save_figure(show, out / f"{name}.png")
        print(f"wrote {out / name}.png\n")
    print(f"{time.perf_counter() - start:.1f} s in total")


def show_boltzmann(figure: Any) -> None:
    print("1. The Boltzmann operator, boltz(a) = sum a_i softmax(a)_i")
    a = 3 * torch.randn(10_000, 8, dtype=torch.float64, generator=_generator())
    p = torch.softmax(a, -1)
    value, gradient = boltz(a), boltz_gradient(a)
    entropy = -(p * p.log()).sum(-1)
    few = a[:200]
    deficit = a.amax(-1) - value
    far = a < a.amax(-1, keepdim=True) - decreasing_below(8)
    hessian = torch.func.vmap(torch.func.hessian(lambda z: (z * torch.softmax(z, -1)).sum()))(few)
    _table(
        ("identity or bound, 10000 random vectors of 8", "worst"),
        [
            ("boltz = logsumexp - entropy, error", _worst(value - a.logsumexp(-1) + entropy)),
            ("gradient sums to 1, error", _worst(gradient.sum(-1) - 1)),
            ("Hessian formula against autodiff, error", _worst(boltz_hessian(few) - hessian)),
            (
                f"max - boltz, at most W(7/e) = {max_deficit(8):.4f}",
                f"{float(deficit.max()):.4f}",
            ),
            (
                f"derivative for entries {decreasing_below(8):.2f} below the max, negative",
                f"{float(gradient[far].max()):.1e}",
            ),
        ],
    )
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-8, 2, 400, dtype=torch.float64)
    for count, colour, style in ((1, BLUE, "-"), (7, ORANGE, "--"), (63, GREEN, "-.")):
        vectors = torch.cat([torch.zeros(400, 1), x[:, None].expand(400, count)], 1)
        label = f"one entry at 0, {count} at x"
        left.plot(x, boltz(vectors), style, color=colour, label=label)
    left.set(xlabel="x", ylabel="boltz", title="Raising small entries lowers the value")
    left.legend()
    t = np.geomspace(1e-2, 20, 200)
    for values, colour, style in (((1, 2, 5, 6), BLUE, "-"), ((1, 3, 4, 6), ORANGE, "--")):
        vector = torch.tensor(values, dtype=torch.float64)
        means = [tempered_mean(vector, s) for s in t]
        right.semilogx(t, means, style, color=colour, label=str(values))
    right.set(xlabel="t", ylabel="boltz(t a) / t", title="From the mean to the maximum")
    right.legend()


def show_contextual(figure: Any) -> None:
    print("2. Rank-1 attention as a contextual mapping: log10 of the gap between context ids")
    rows, sizes = [], [(2, 3, 3, 1), (3, 6, 20, 4), (4, 12, 100, 8), (6, 20, 200, 16)]
    for n, vocabulary, count, d in sizes:
        x, _ = random_task(n, vocabulary, count, d)
        heads = {s: construct_attention(x, s) for s in ("theorem", "measured", "practical")}
        theorem, measured, practical = heads.values()
        rows.append(
            (
                f"n={n} |V|={vocabulary} N={count} d={d}",
                f"{theorem.log10_promised:.0f}",
                f"{theorem.log10_measured:.0f}",
                f"{theorem.measured.delta:g}",
                f"{measured.log10_measured:.0f}",
                f"{practical.log10_measured:.1f}",
                f"{practical.measured.bits:.1f}",
            )
        )
    _table(
        (
            "data",
            "theorem promises",
            "theorem, exact",
            "theorem, in fp64",
            "measured, exact",
            "practical",
            "bits",
        ),
        rows,
    )
    print("In fp64 the weights of the theorem are a hardmax: floats do not resolve the gap.")
    axis = figure.subplots()
    columns = (
        ("theorem: promised", 1, RED, -0.3),
        ("theorem: exact", 2, ORANGE, -0.1),
        ("measured scale: exact", 4, BLUE, 0.1),
        ("practical: in the module", 5, GREEN, 0.3),
    )
    for label, column, colour, shift in columns:
        digits = [max(0.05, -float(row[column])) for row in rows]
        axis.bar(np.arange(len(rows)) + shift, digits, 0.2, color=colour, label=label)
    axis.axhline(15.95, color=GREY, linestyle="--", linewidth=1)
    axis.set_xlim(-0.6, len(rows) - 0.2)
    axis.text(len(rows) - 0.22, 18, "fp64 ends", color=GREY, va="bottom", ha="right")
    axis.set_yscale("log")
    axis.set_xticks(range(len(rows)), [row[0] for row in rows])
    axis.set(ylabel="digits, -log10(gap)", title="Digits needed to distinguish two context ids")
    axis.set_ylim(top=1e10)
    axis.legend(ncols=4, loc="upper center")


def show_hardmax(figure: Any) -> None:
    print("3. Hardmax and the mean fail, softmax does not")
    found = search_hardmax_weights(500)
    _table(
        ("(1, 2, 5, 6)x against (1, 3, 4, 6)x, 500 random layers of 1-4 heads", "relative gap"),
        [
            ("hardmax attention, largest gap at a shared token", f"{found.hardmax_max:.1e}"),
            ("softmax attention, median", f"{found.softmax_median:.1e}"),
            ("softmax attention, share above 1e-6", f"{100 * found.softmax_separates:.0f}%"),
        ],
    )
    betas = np.geomspace(1e-4, 10, 160)
    axis = figure.subplots()
    rows = []
    for degree, colour, style in ((1, BLUE, "-"), (3, ORANGE, "--"), (5, GREEN, "-.")):
        pair = prouhet_pair(degree)
        top = float(pair.first.max())
        gaps = temperature_scan(pair, betas / top)[:, 1]
        best = int(gaps.argmax())
        rows.append(
            (degree, len(pair.first), f"{betas[best]:.2f}", f"{gaps[best]:.2g}", f"{gaps[-1]:.1g}")
        )
        # Smaller gaps are rounding noise.
        seen = gaps > 1e-14 * top
        label = f"equal power sums up to degree {degree}"
        axis.loglog(betas[seen], gaps[seen], color=colour, linestyle=style, label=label)
    header = ("equal power sums up to degree", "tokens", "best t", "gap at best t", "gap at t = 10")
    _table(header, rows)
    axis.set(
        xlabel="t = inverse temperature of the shared token (0: mean, infinity: hardmax)",
        ylabel="gap at the shared token",
        title="Intermediate temperatures separate best",
        ylim=(1e-14, 10),
    )
    axis.legend(loc="lower right")


def show_memorization(figure: Any) -> None:
    print("4. Memorization: random labels, 10 classes")
    rows, ids, gaps, right = [], [], [], []
    sizes = [(3, 6, 20, 4), (4, 12, 100, 8), (6, 20, 200, 16), (8, 30, 300, 16), (8, 40, 600, 16)]
    for n, vocabulary, count, d in [*sizes, (16, 60, 1000, 16)]:
        x, y = random_task(n, vocabulary, count, d)
        model = memorize(x, y)
        report = model.report
        shares = [report.accuracy or 0.0]  # never None: the labels are integers
        for dtype in (torch.float32, torch.bfloat16):
            if dtype == torch.bfloat16 and report.ids > 2000:
                shares.append(math.nan)  # slow on a CPU, and wrong for fewer ids already
                continue
            outputs = torch.stack(evaluate(model.to(dtype), x))
            shares.append(float((outputs[..., 0].round() == y).double().mean()))
        ids.append(report.ids)
        gaps.append(report.relative_gap)
        right.append(shares)
        rows.append(
            (
                f"n={n} |V|={vocabulary} N={count} d={d}",
                report.ids,
                f"{report.relative_gap:.1e}",
                f"{report.max_error:.1e}",
                *("-" if math.isnan(share) else f"{100 * share:.4g}%" for share in shares),
                report.parameters,
                report.paper_parameters,
            )
        )
    _table(
        ("data", "ids", "gap", "error fp64", "fp64", "fp32", "bf16", "parameters", "paper"), rows
    )
    left, other = figure.subplots(1, 2)
    m = np.array(ids)
    left.loglog(m, gaps, "o-", color=BLUE, label="practical construction")
    left.loglog(m, 5.0 / m**2, "--", color=GREY, label="5 / ids$^2$")
    left.set(xlabel="context ids", ylabel="smallest gap / range", title="Gaps between ids")
    left.legend()
    styles = (("fp64", BLUE, "o-"), ("fp32", ORANGE, "s--"), ("bf16", GREEN, "^:"))
    for column, (label, colour, style) in enumerate(styles):
        other.semilogx(m, [100 * row[column] for row in right], style, color=colour, label=label)
    other.set(xlabel="context ids", ylabel="correct labels, %", title="The same weights, rounded")
    other.set_ylim(-3, 105)
    other.legend(loc=(0.05, 0.5))


def show_approximation(figure: Any) -> None:
    print("5. Universal approximation: L2 distance between the module and f, by grid")
    left, right = figure.subplots(1, 2)
    Curve = tuple[str, str, int, int, tuple[int, ...], dict[str, bool], str, str]
    smooth: tuple[Curve, ...] = (
        ("wave, d=1 n=2", "wave", 1, 2, (4, 8, 16, 32), {}, BLUE, "o-"),
        ("wave, d=1 n=3", "wave", 1, 3, (4, 8, 16), {}, ORANGE, "s-"),
        ("same, no repeated cells", "wave", 1, 3, (4, 8, 16), {"repeats": False}, RED, "x:"),
        ("wave, d=2 n=2", "wave", 2, 2, (2, 4, 8), {}, GREEN, "^-"),
    )
    rest: tuple[Curve, ...] = (
        ("k x_k, not equivariant", "position", 1, 2, (4, 8, 16, 32), {}, RED, "o-"),
        ("k x_k, with positions", "position", 1, 2, (4, 8, 16), {"positions": True}, BLUE, "s-"),
        ("rank, discontinuous", "rank", 1, 2, (4, 8, 16, 32), {}, GREEN, "^-"),
    )
    rows = []
    for axis, curves in ((left, smooth), (right, rest)):
        for label, name, d, n, grids, options, colour, style in curves:
            reports = [
                approximate(TARGETS[name], d, n, grid, samples=4000, **options).report
                for grid in grids
            ]
            errors = [report.error for report in reports]
            slope = np.polyfit(np.log(grids[-2:]), np.log(errors[-2:]), 1)[0]
            errors_text = " ".join(f"{g}:{e:.3f}" for g, e in zip(grids, errors, strict=True))
            rows.append((label, reports[-1].ids, errors_text, f"{slope:.2f}"))
            axis.loglog(grids, errors, style, color=colour, label=label, base=2)
            if reports[-1].asymmetry:
                axis.axhline(reports[-1].asymmetry, color=GREY, linestyle="--", linewidth=1)
                axis.text(4, 0.95 * reports[-1].asymmetry, "asymmetry of f", color=GREY, va="top")
        axis.set(xlabel="cells per coordinate", ylabel="$L_2$ error")
        axis.legend()
    right.set_ylim(bottom=0.018)
    left.set_title("Lipschitz f: slope -1")
    right.set_title("Controls")
    _table(("f", "ids", "grid:error", "last slope"), rows)


def show_packed(figure: Any) -> None:
    print("6. Memorization with about sqrt(N) parameters: labels of one bit, in packed words")
    rows = []
    sizes = {"breakpoints": (104, 304, 1000, 3000), "packed": (100, 300, 1000, 3000, 10_000)}
    sizes["looped"] = (100, 300, 1000, 3000)
    axis = figure.subplots()
    for (kind, counts), style in zip(sizes.items(), STYLES, strict=False):
        found = []
        for count in counts:
            if kind == "breakpoints":
                x, y = random_task(8, 64, count // 8, 4, classes=2)
                report: Any = memorize(x, y).report
                ids, words = report.ids, ""
            else:
                x, y = random_sequences(8, 64, count, 4)
                report = memorize_packed(x, y, tied=kind == "looped").report
                code = report.code
                ids, words = code.ids, f"{code.groups} x {code.words} x {code.word_bits} bits"
            right = f"{100 * report.accuracy:.4g}%"
            rows.append((kind, ids, report.parameters, f"{ids / 64:.0f}", words, right))
            found.append((ids, report.parameters))
        axis.loglog(*zip(*found, strict=True), **style, label=kind)
    header = ("network", "labels", "parameters", "N / 64", "groups x words", "correct in fp64")
    _table(header, rows)
    n = np.geomspace(100, 10_000, 20)
    axis.loglog(n, n**0.5, "-", color=GREY, linewidth=1, label=r"$\sqrt{N}$")
    axis.loglog(n, n / 64, ":", color=GREY, linewidth=1, label="N / 64")
    axis.set(xlabel="labels N", ylabel="nonzero parameters", title="Parameters to memorize N bits")
    axis.legend()


def show_next_token(figure: Any) -> None:
    print("7. Next tokens of one document of 8 tokens, by a causal rank-1 head on the scan")
    rows = []
    axis = figure.subplots()
    for network, style in zip(("linear", "packed", "looped"), STYLES, strict=False):
        found = []
        for length in (100, 300, 1000, 3000):
            tokens = torch.randint(8, (1, length), generator=_generator())
            embedding = torch.randn(9, 8, dtype=torch.float64, generator=_generator())
            report = memorize_next(tokens, embedding, network=network).report
            gap, right = f"{report.relative_gap:.1e}", f"{100 * report.accuracy:.4g}%"
            rows.append((network, report.contexts, gap, report.parameters, right))
            found.append((report.parameters, report.contexts))
        axis.loglog(*zip(*found, strict=True), **style, label=network)
    _table(("network", "contexts", "gap", "parameters", "correct"), rows)
    axis.set(xlabel="parameters", ylabel="next tokens memorized", title="Capacity of a decoder")
    axis.legend()


def show_loops(figure: Any) -> None:
    print("8. Looped layers: the square of a number, a series of tent maps")
    y = torch.linspace(0, 1, 1001, dtype=torch.float64)[:, None].expand(1001, 2)
    counts = (1, 2, 4, 8, 12, 16, 20)
    axis = figure.subplots()
    errors = {}
    for encoding, style in (("table", STYLES[0]), (None, STYLES[3])):
        with torch.no_grad():
            outputs = [looped_square(k, encoding)(y)[:, 1] for k in counts]
        errors[encoding] = [float((out - y[:, 0] ** 2).abs().max()) for out in outputs]
        label = "scales 4^-l in loop l" if encoding else "the same scales in every loop"
        axis.semilogy(counts, errors[encoding], **style, label=label)
    _table(
        ("loops", "error with scales", "4^-(loops + 1)", "error without scales"),
        [
            (k, f"{e:.1e}", f"{4.0 ** -(k + 1):.1e}", f"{same:.2g}")
            for k, e, same in zip(counts, errors["table"], errors[None], strict=True)
        ],
    )
    axis.set(xlabel="loops", ylabel="largest error", title="Two neurons, the same in every loop")
    axis.legend()


def show_polynomials(figure: Any) -> None:
    print("9. A symmetric polynomial, the variance, of sets of any size")
    variance: Polynomial = {((2,),): 1.0, ((1,), (1,)): -1.0}
    model = symmetric_polynomial(variance, d=1, depth=10)
    rows, sizes, errors = [], (10, 1000, 100_000, 1_000_000), []
    for n in sizes:
        x = torch.rand(n, 1, dtype=torch.float64, generator=_generator())
        with torch.no_grad():
            errors.append(_worst(model(x)[:, 0] - evaluate_polynomial(variance, x)))
        bound = f"{model.report.error_bound:.1e}"
        rows.append((f"{n:,}", model.report.parameters, errors[-1], bound))
    _table(("elements", "parameters", "error", "bound"), rows)
    axis = figure.subplots()
    axis.loglog(sizes, [float(e) for e in errors], **STYLES[0], label="error")
    axis.axhline(model.report.error_bound, color=GREY, linestyle="--", linewidth=1, label="bound")
    axis.set(xlabel="elements of the set", ylabel="largest error")
    axis.set_title(f"The variance with {model.report.parameters} parameters")
    axis.legend()


def show_rank(figure: Any) -> None:
    print("10. Rank and kind of the scores: smallest gap between context ids, of the range")
    sizes = ((3, 6, 20, 4), (4, 12, 100, 8), (6, 20, 200, 16))
    data = [_distinct(random_task(*size)[0]) for size in sizes]
    ids = [x.shape[0] * x.shape[1] for x in data]
    temperatures = [float(t) for t in np.geomspace(1e-2, 1e2, 9)]
    left, right = figure.subplots(1, 2)
    rows, styles = [], iter(STYLES)
    for score in ("dot", "gaussian"):
        for rank in (1, 2, 3):
            name, style = f"{score}, rank {rank}", next(styles)
            best = [id_gap(x, score, rank) for x in data]
            at = [id_gap(data[-1], score, rank, t) for t in temperatures]
            rows.append((name, *(f"{gap:.1e}" for gap in (*best, *at[2:-1:2]))))
            left.loglog(ids, best, **style, label=name)
            right.loglog(temperatures, np.maximum(at, 1e-17), **style)
    header = (*(f"{count} ids" for count in ids), *(f"at {t:.2g}" for t in temperatures[2:-1:2]))
    _table(("scores", *header), rows)
    left.set(xlabel="context ids", ylabel="smallest gap / range", title="At the best temperature")
    left.legend()
    right.set(xlabel="inverse temperature, relative", title=f"{ids[-1]} ids")


def _distinct(x: torch.Tensor) -> torch.Tensor:
    """The sequences of `x` without those that hold the same tokens as an earlier one."""
    sums = np.sort(x[..., 0].numpy(), 1)
    return x[np.sort(np.unique(sums, axis=0, return_index=True)[1])]


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print(format_table((header, rows)))


def _worst(error: torch.Tensor) -> str:
    return f"{float(error.abs().max()):.1e}"


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


if __name__ == "__main__":
    main()
