"""How results are shown: tables on the terminal, and figures in one style."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Table = tuple[Sequence[str], Iterable[Sequence[object]]]

# Okabe and Ito's colours, safe for colour-blind readers; markers differ as well.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#666666",
)
STYLES = (
    {"color": BLUE, "marker": "o", "linestyle": "-"},
    {"color": ORANGE, "marker": "s", "linestyle": "--"},
    {"color": GREEN, "marker": "^", "linestyle": "-."},
    {"color": RED, "marker": "D", "linestyle": ":"},
    {"color": PURPLE, "marker": "v", "linestyle": "-"},
    {"color": SKY, "marker": "P", "linestyle": "--"},
)


def format_table(table: Table) -> str:
    """Header and lines in columns, the first column to the left and the others to the right.

    Example:
        >>> print(format_table((("name", "n"), [("a", 10), ("bc", 2)])))
          name   n
          a     10
          bc     2
    """
    header, lines = table
    cells = [list(header), *([str(cell) for cell in line] for line in lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(["", line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in cells
    )


def save_figure(draw: Callable[[Any], None], path: Path) -> None:
    """Save a figure of one or two axes, drawn by `draw(figure)`, as a PNG."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(
            "the figures need matplotlib; install it with pip install 'boltzattn[theory]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    settings: Any = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.markersize": 5,
    }
    with pyplot.rc_context(settings):
        figure = pyplot.figure(figsize=(9.6, 4.0), layout=ConstrainedLayoutEngine(wspace=0.06))
        draw(figure)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
