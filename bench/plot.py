"""Draw the figures and write `tables.md` from a CSV of a full run."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from bench import report, results
from bench.cases import PASS_NAMES, Case
from bench.results import Record, Records

# Okabe and Ito's colours, safe for colour-blind readers; markers differ as well.
STYLE = {
    "naive": ("#CC79A7", "s"),
    "sdpa": ("#E69F00", "^"),
    "sdpa padded": ("#009E73", "v"),
    "flex compiled": ("#B8A800", "P"),
    "pykeops": ("#8A8A8A", "X"),
    "nystrom": ("#A0522D", "<"),
    "performer": ("#7B68C8", ">"),
    "boltzattn direct": ("#0072B2", "o"),
    "boltzattn direct, rank 8": ("#56B4E9", "o"),
    "boltzattn transform": ("#D55E00", "D"),
    "clone": ("#8A8A8A", None),
}
NAMES = {"clone": "value.clone()", "sdpa": "SDPA", "sdpa padded": "SDPA, q and k padded"}
THEMES = {
    "light": {"paper": "#ffffff", "ink": "#24292f", "grid": "#d8dee4"},
    "dark": {"paper": "#0d1117", "ink": "#e6edf3", "grid": "#30363d"},
}
SHOWN = "one head, dv = 64, fp32"
HOLLOW = "hollow: approximate, or error above the limit"


@dataclass
class Series:
    """One curve of the scaling figure."""

    name: str
    n: list[int]
    seconds: list[float]
    exact: list[bool]  # False: an approximation, or failed the accuracy check
    growth: int

    @property
    def slope(self) -> float | None:
        """The exponent of n over the last three lengths; None for fewer than two."""
        if len(self.n) < 2:
            return None
        return float(np.polyfit(np.log(self.n[-3:]), np.log(self.seconds[-3:]), 1)[0])


def figures(records: Records, out: Path, prefix: str = "") -> list[Path]:
    """Draw what the records allow in both themes; return the files written."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for theme in THEMES:
        for name, draw in (("scaling", scaling), ("accuracy", accuracy)):
            figure = draw(records, theme)
            if figure is None:
                continue
            path = out / f"{prefix}{name}{'' if theme == 'light' else '-dark'}.png"
            figure.savefig(path, dpi=160)
            written.append(path)
    return written


def scaling_series(records: Records, passes: str) -> list[Series]:
    """Time against n for one head, dv 64, fp32, rank 1; the direct method also at rank 8."""
    found: dict[str, list[Record]] = {}
    for record in records:
        rank = record.case.rank
        if not record.row.measured or rank not in (1, 8):
            continue
        if replace(record.case, n=1, rank=1) != Case(1, passes=passes, device=record.case.device):
            continue
        name = _plain(record.row.provider)
        if rank == 8:
            if name != "boltzattn direct":
                continue
            name += ", rank 8"
        found.setdefault(name, []).append(record)
    series = []
    for name, rows in found.items():
        rows.sort(key=lambda r: r.case.n)
        lengths, times = [r.case.n for r in rows], [r.row.seconds for r in rows]
        exact = [r.row.accurate or r.row.kind == "yardstick" for r in rows]
        series.append(Series(name, lengths, times, exact, rows[0].row.growth))
    return series


def scaling(records: Records, theme: str) -> Figure | None:
    """Time against n, with the exponents beside the names; dashed where extrapolated."""
    panels = {p: scaling_series(records, p) for p in ("forward", "both")}
    panels = {p: series for p, series in panels.items() if series}
    if not panels:
        return None
    with _themed(theme):
        figure = Figure(figsize=(7.2 * len(panels), 5.6))
        axes = figure.subplots(1, len(panels), squeeze=False)
        for axis, (passes, series) in zip(axes[0], panels.items(), strict=True):
            _draw_scaling(axis, series, THEMES[theme])
            axis.set_title(PASS_NAMES[passes], loc="left", fontweight="bold")
        axes[0, 0].set_ylabel("time per call")
        _caption(figure, records, f"{SHOWN}, rank 1 unless noted; dashed: extrapolated; {HOLLOW}")
    return figure


def _draw_scaling(axis: Axes, series: Sequence[Series], theme: dict[str, str]) -> None:
    last = max(s.n[-1] for s in series)
    ends = []
    for s in series:
        color, marker = STYLE.get(s.name, (theme["ink"], "o"))
        ours = s.name.startswith("boltzattn")
        axis.plot(
            s.n,
            s.seconds,
            ":" if s.name == "clone" else "-",
            color=color,
            linewidth=2.4 if ours else 1.4,
            zorder=3 if ours else 2,
        )
        if marker:
            fills = [color if exact else theme["paper"] for exact in s.exact]
            axis.scatter(s.n, s.seconds, 28, fills, marker=marker, edgecolors=color, zorder=4)
        end = s.seconds[-1] * (last / s.n[-1]) ** s.growth
        if s.n[-1] < last:
            axis.plot(
                [s.n[-1], last], [s.seconds[-1], end], "--", color=color, linewidth=1, zorder=1
            )
        slope = "" if s.slope is None or s.name == "clone" else f"   n^{s.slope:.1f}"
        ends.append((end, NAMES.get(s.name, s.name) + slope, color, ours))
    axis.set_xscale("log", base=4)
    axis.set_yscale("log")
    first = min(s.n[0] for s in series)
    axis.set_xlim(first / 1.3, last * 1.3)
    axis.xaxis.set_major_locator(LogLocator(base=4))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda n, _: _length(n)))
    _time_axis(axis.yaxis)
    axis.set_xlabel("tokens n")
    axis.grid(True, which="major", color=theme["grid"], linewidth=0.6)
    _labels_beside(axis, ends)


def _labels_beside(axis: Axes, ends: list[tuple[float, str, str, bool]]) -> None:
    """Names at the right ends of the curves, moved apart so that they do not overlap."""
    low, high = np.log(axis.get_ylim())
    places = sorted(((np.log(y) - low) / (high - low), *rest) for y, *rest in ends)
    heights = spread_out([place[0] for place in places], gap=0.05)
    for height, (place, text, color, ours) in zip(heights, places, strict=True):
        beside = {"transform": axis.transAxes, "color": color, "clip_on": False}
        axis.plot([1.0, 1.04], [place, height], linewidth=0.7, **beside)
        axis.text(
            1.05,
            height,
            text,
            va="center",
            fontsize=9.5,
            fontweight="bold" if ours else "normal",
            **beside,
        )


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Increasing heights, moved in one sweep up and one down to be `gap` apart and at most 1."""
    apart = list(heights)
    for i in range(1, len(apart)):
        apart[i] = max(apart[i], apart[i - 1] + gap)
    ceiling = 1.0
    for i in reversed(range(len(apart))):
        apart[i] = min(apart[i], ceiling)
        ceiling = apart[i] - gap
    return apart


def accuracy(records: Records, theme: str) -> Figure | None:
    """Error against time at n = 4,096, a panel for each pass."""
    panels = {}
    for passes in ("forward", "both"):
        case = Case(4096, passes=passes)
        rows = [r for r in records if r.case == case and r.row.max_error and r.row.measured]
        if rows:
            panels[passes] = rows
    if not panels:
        return None
    with _themed(theme):
        figure = Figure(figsize=(5.6 * len(panels) + 1.6, 4.8))
        axes = figure.subplots(1, len(panels), squeeze=False)
        shown: dict[str, Line2D] = {}
        for axis, (passes, rows) in zip(axes[0], panels.items(), strict=True):
            for r in rows:
                name = _plain(r.row.provider)
                color, marker = STYLE.get(name, (THEMES[theme]["ink"], "o"))
                fill = color if r.row.accurate else THEMES[theme]["paper"]
                shown[NAMES.get(name, name)] = Line2D(
                    [], [], linestyle="", color=color, marker=marker
                )
                axis.scatter(
                    r.row.seconds,
                    r.row.max_error,
                    s=70,
                    facecolors=fill,
                    edgecolors=color,
                    marker=marker,
                    zorder=3,
                )
            _whole_decades(axis, [r.row.seconds for r in rows], [r.row.max_error for r in rows])
            _time_axis(axis.xaxis)
            axis.set_xlabel("time per call")
            axis.set_title(PASS_NAMES[passes], loc="left", fontweight="bold")
            axis.grid(True, which="major", color=THEMES[theme]["grid"], linewidth=0.6)
        axes[0, 0].set_ylabel("largest error against fp64")
        figure.legend(
            shown.values(), shown.keys(), loc="outside right center", frameon=False, fontsize=9.5
        )
        _caption(figure, records, f"{SHOWN}, rank 1, n = 4,096; lower left is better; {HOLLOW}")
    return figure


def _whole_decades(axis: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    """Log axes that end at powers of ten, so that they have labels."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    for values, set_limits in ((x, axis.set_xlim), (y, axis.set_ylim)):
        low, high = np.log10(min(values)), np.log10(max(values))
        set_limits(10 ** np.floor(low - 0.1), 10 ** np.ceil(high + 0.1))
    axis.yaxis.set_minor_formatter(NullFormatter())


def speedup_table(records: Records, passes: str) -> str:
    """Markdown: time for every n, with the speed-up over the faster SDPA; `~` extrapolated."""
    section = [
        r for r in records if replace(r.case, n=1) == Case(1, passes=passes, device=r.case.device)
    ]
    names = list(dict.fromkeys(r.row.provider for r in section if r.row.measured))
    lines = ["| n | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    by_key = {(r.case.n, r.row.provider): r for r in section}
    for n in sorted({r.case.n for r in section}):
        cells = [_cell(records, by_key.get((n, name))) for name in names]
        lines.append(f"| {n:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(records: Records) -> str:
    """The tables that the README quotes, and the machine they were measured on."""
    blocks = [f"{records[0].environment}; `make bench-full`"]
    for passes in ("forward", "both"):
        blocks.append(
            f"{PASS_NAMES[passes]}, rank 1, one head, dv = 64, fp32\n\n"
            + speedup_table(records, passes)
        )
    blocks.append("```\n" + report.target_table(records) + "\n```")
    return "\n\n".join(blocks) + "\n"


def _cell(records: Records, record: Record | None) -> str:
    if record is None:
        return ""
    if not record.row.measured:
        guess = report.estimate(records, record)
        return f"~{report.seconds(guess)}" if guess else "-"
    ratio = report.speedup(records, record)
    ratio = {"": "", "-": " (inaccurate)"}.get(ratio, f" ({ratio})")
    return report.seconds(record.row.seconds) + ratio


def _plain(provider: str) -> str:
    """`boltzattn direct (cpu)` without the backend, which is the same for the whole figure."""
    return provider.split(" (")[0]


def _length(n: float) -> str:
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if n >= size:
            return f"{n / size:.0f}{unit}"
    return f"{n:.0f}"


def _time_axis(axis: mpl.axis.Axis) -> None:
    axis.set_major_locator(LogLocator(base=10, numticks=20))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda s, _: _round_seconds(s)))


def _round_seconds(value: float) -> str:
    """A power of ten with a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 0.999:
            return f"{value * factor:,.0f} {unit}"
    return f"{value * 1e9:.0f} ns"


def _caption(figure: Figure, records: Records, text: str) -> None:
    e = records[0].environment
    versions = f"torch {e.torch}, boltzattn {e.boltzattn} ({e.commit})"
    where = f"{e.cpu}, {e.default_threads} threads, {versions}"
    figure.supxlabel(f"{text}\n{where}", fontsize=8.5, x=0.01, ha="left")


def _themed(theme: str) -> contextlib.AbstractContextManager[None]:
    colors = THEMES[theme]
    return mpl.rc_context(
        {
            "figure.facecolor": colors["paper"],
            "axes.facecolor": colors["paper"],
            "savefig.facecolor": colors["paper"],
            "axes.edgecolor": colors["grid"],
            "axes.labelcolor": colors["ink"],
            "text.color": colors["ink"],
            "xtick.color": colors["ink"],
            "ytick.color": colors["ink"],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "figure.constrained_layout.use": True,
            "font.size": 10,
        }
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, help="output directory; default: that of the CSV")
    options = parser.parse_args(arguments)
    records = results.load(options.csv)
    out = options.out or options.csv.parent
    for path in figures(records, out):
        print(f"wrote {path}")
    text = tables(records)
    (out / "tables.md").write_text(text)
    print(f"wrote {out / 'tables.md'}\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
