"""One look for all figures: colours, markers, and how a figure comes to be a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, distinguishable with any colour vision; markers differ as well.
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


def save_figure(draw: Callable[[Any], None], path: Path) -> None:
    """A figure of one or two axes, drawn by `draw(figure)`, as a PNG."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(
            "python -m boltzattn.experiments draws figures with matplotlib; "
            "install it with pip install 'boltzattn[experiments]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.markersize": 5,
    }
    with pyplot.rc_context(settings):
        figure = pyplot.figure(figsize=(9.6, 4.0), layout="constrained")
        figure.get_layout_engine().set(wspace=0.06)
        draw(figure)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
