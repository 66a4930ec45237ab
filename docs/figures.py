"""Draw transform-region.png and transform-panels.png, the figures of docs/transform.md."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from boltzattn.transform.layout import Axis, Range, make_layout
from matplotlib.axes import Axes
from numpy.typing import NDArray

Array = NDArray[np.float64]
HERE = Path(__file__).parent

# Okabe and Ito's colours, safe for colour-blind readers; shape or lightness differ as well.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
PALE_BLUE, PALE_ORANGE = "#cfe3f2", "#fbe7c0"

mpl.rcParams.update(
    {
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "savefig.dpi": 160,
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "legend.frameon": False,
    }
)


def zeros(distinct: Array, counts: Array, x_most: float, y_most: float) -> NDArray[np.complex128]:
    """Zeros of sum_j counts_j exp(t distinct_j) with |Re t| < x_most, 0 < Im t < y_most.

    Newton's method from a grid; converged points are kept once.
    """
    x, y = np.meshgrid(np.linspace(-x_most, x_most, 161), np.linspace(0.02, y_most, 81))
    t = (x + 1j * y).ravel()
    for _ in range(60):
        # Every term relative to the largest, so that nothing overflows.
        exponent = t[:, None] * distinct
        exponent -= exponent.real.max(1, keepdims=True)
        weight = counts * np.exp(exponent)
        z, slope = weight.sum(1), (weight * distinct).sum(1)
        with np.errstate(all="ignore"):
            step = z / slope
            step *= np.minimum(1, 0.5 / np.abs(step))
        t = np.where(np.isfinite(step), t - step, t)
    exponent = t[:, None] * distinct
    exponent -= exponent.real.max(1, keepdims=True)
    residual = np.abs((counts * np.exp(exponent)).sum(1)) / counts.sum()
    inside = (np.abs(t.real) < x_most) & (t.imag > 0) & (t.imag < y_most) & (residual < 1e-12)
    found: list[complex] = []
    for candidate in t[inside]:
        if all(abs(candidate - other) > 1e-4 for other in found):
            found.append(candidate)
    return np.array(found)


def key_sets(keys: int) -> list[tuple[str, str, str, Array, Array]]:
    """(label, colour, marker, distinct keys, how often each occurs), each on [0, 1]."""
    draw = np.random.default_rng(3)
    gauss = np.sort(draw.standard_normal(keys))
    gauss = (gauss - gauss[0]) / (gauss[-1] - gauss[0])
    once = np.ones(keys)
    crowd = np.array([1.0, keys - 2, 1.0])
    return [
        ("two values, half the keys each", BLUE, "o", np.array([0.0, 1.0]), np.full(2, keys / 2)),
        ("one key above equal keys", RED, "^", np.array([0.0, 1.0]), np.array([keys - 1, 1.0])),
        ("equal keys between two single keys", GREEN, "s", np.array([0.0, 0.6, 1.0]), crowd),
        ("Gaussian", ORANGE, "D", gauss, once),
    ]


def draw_region(to: Path) -> None:
    """Zeros of Z, and the region without zeros for every set of `keys` keys."""
    keys, x_most, y_most = 64, 24.0, 10.5
    layout = make_layout(Range(-x_most, x_most, 0.0, 1.0, keys), 16, 16, 1e-8)
    height, tau = layout.query_strip, layout.tau
    figure, (plane, warped) = plt.subplots(
        1, 2, figsize=(11, 4.9), width_ratios=(1.25, 1), layout="constrained"
    )
    x = np.linspace(-x_most, x_most, 801)
    cone = math.pi * np.abs(x) / (2 * math.log(keys))
    free = np.maximum(math.pi, cone)
    plane.fill_between(x, -free, free, color=PALE_BLUE, lw=0, zorder=0)
    plane.plot(x, free, color=BLUE, lw=1, zorder=1)
    plane.plot(x, -free, color=BLUE, lw=1, zorder=1)

    u = np.linspace(-2.2, 2.2, 400)
    image = tau * np.sinh(u + 1j * height)
    keep = np.abs(image.real) <= x_most
    plane.fill_between(
        image.real[keep], -image.imag[keep], image.imag[keep], color=PALE_ORANGE, lw=0, zorder=2
    )
    for sign in (1, -1):
        plane.plot(
            image.real[keep], sign * image.imag[keep], color=ORANGE, lw=1.6, ls="--", zorder=3
        )
        warped.axhline(sign * height, color=ORANGE, lw=1.6, ls="--", zorder=3)
    u_most = math.asinh(x_most / tau)
    warped.fill_between([-u_most, u_most], -height, height, color=PALE_ORANGE, lw=0)

    for label, colour, marker, distinct, counts in key_sets(keys):
        t = zeros(distinct, counts, x_most, y_most)
        t = np.concatenate([t, t.conj()])
        style = dict(color=colour, marker=marker, ls="", ms=5, mec="white", mew=0.5, zorder=5)
        plane.plot(t.real, t.imag, label=label, **style)
        pre_image = np.arcsinh(t / tau)
        warped.plot(pre_image.real, pre_image.imag, **style)

    for axes in (plane, warped):
        axes.axhline(0, color="black", lw=1.4, zorder=4)
    plane.annotate("queries are real", (-x_most * 0.97, 0.25), fontsize=9, zorder=6, color="black")
    plane.annotate(
        "strip and cone:\nno zeros, for any keys",
        (-17.5, 4.9),
        xytext=(-15.5, 9.2),
        ha="center",
        va="center",
        fontsize=9,
        color=BLUE,
        zorder=6,
        arrowprops={"arrowstyle": "->", "color": BLUE},
    )
    plane.annotate(
        r"image of the strip $|\mathrm{Im}\,u| < y_0$",
        (0, -1.0),
        ha="center",
        va="center",
        fontsize=9,
        color="#8a5a00",
        zorder=6,
    )
    plane.set(
        xlim=(-x_most, x_most),
        ylim=(-y_most, y_most),
        xlabel=r"Re $t$   (keys on $[0, 1]$, so $R = 1$)",
        ylabel=r"Im $t$",
        title=r"Zeros of $Z(t) = \sum_j e^{t s_j}$, 64 keys",
    )
    warped.set(
        xlim=(-u_most, u_most),
        ylim=(-1.25, 1.25),
        xlabel=r"Re $u$",
        ylabel=r"Im $u$",
        title=r"The same zeros in $u = \mathrm{arcsinh}(t/\tau)$",
    )
    warped.annotate(
        rf"$|\mathrm{{Im}}\,u| < y_0 = \pi / (4 \ln(n+2)) = {height:.2f}$",
        (0, 0.09),
        ha="center",
        va="center",
        fontsize=9,
        color="#8a5a00",
        zorder=6,
    )
    figure.legend(*plane.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(to)
    plt.close(figure)


def edges(axis: Axis) -> Array:
    return axis.origin + 2 * axis.half * np.arange(axis.panels + 1)


def mark_edges(axes: Axes, edges: Array) -> None:
    for edge in edges:
        axes.axvline(edge, color="#b0b0b0", lw=0.7, zorder=0)


def draw_panels(to: Path) -> None:
    """Panels and nodes on both axes, in the original coordinate and in the warped one."""
    draw = np.random.default_rng(5)
    keys, product, precision, nodes = 1000, 300.0, 1e-8, 16
    s = np.sort(draw.standard_normal(keys))
    s = (s - s[0]) / (s[-1] - s[0]) - 0.5
    value = np.sin(9 * s) + 0.6 * draw.standard_normal(keys)
    layout = make_layout(Range(-product, product, -0.5, 0.5, keys), nodes, nodes, precision)
    query, key, tau, radius = layout.query, layout.key, layout.tau, layout.radius
    u_most, edge = -query.origin, -key.origin

    def f(t: Array) -> Array:
        logits = np.outer(t, s)
        weight = np.exp(logits - logits.max(1, keepdims=True))
        return weight @ value / weight.sum(1)

    figure, ((f_t, kernel_s), (f_u, kernel_w)) = plt.subplots(
        2, 2, figsize=(11, 6.4), layout="constrained"
    )
    u = np.linspace(-u_most, u_most, 1500)
    f_t.plot(tau * np.sinh(u), f(tau * np.sinh(u)), color=BLUE, lw=1.8)
    mark_edges(f_t, tau * np.sinh(edges(query)))
    f_t.set(
        xlim=(-product, product),
        xlabel=r"query $t$",
        ylabel=r"$F$",
        title=f"$F$ and the edges of its {query.panels} panels: dense at $t = 0$",
    )
    shown = (-0.9, 0.9)
    u = np.linspace(*shown, 600)
    u_nodes = query.positions().numpy()
    u_nodes = u_nodes[(u_nodes > shown[0]) & (u_nodes < shown[1])]
    f_u.plot(u, f(tau * np.sinh(u)), color=BLUE, lw=1.8)
    f_u.plot(u_nodes, f(tau * np.sinh(u_nodes)), ".", color=RED, ms=5)
    mark_edges(f_u, edges(query))
    f_u.set(
        xlim=shown,
        xlabel=r"$u = \mathrm{arcsinh}(t/\tau)$  (the middle of the axis)",
        ylabel=r"$F$",
        title=f"in $u$ the panels are equal; {nodes} nodes on each",
    )

    w, w_nodes = np.linspace(-edge, edge, 1500), key.positions().numpy()
    for t, colour, style in ((3.0, GREEN, "-."), (30.0, ORANGE, "--"), (300.0, BLUE, "-")):
        line = dict(color=colour, ls=style, lw=1.8, label=f"$t = {t:g}$")
        kernel_s.plot(radius * np.tanh(w), np.exp(t * (radius * np.tanh(w) - 0.5)), **line)
        kernel_w.plot(w, np.exp(t * (radius * np.tanh(w) - 0.5)), **line)
        on_nodes = np.exp(t * (radius * np.tanh(w_nodes) - 0.5))
        kernel_w.plot(w_nodes, on_nodes, ".", color=RED, ms=5, zorder=4)
    mark_edges(kernel_s, radius * np.tanh(edges(key)))
    mark_edges(kernel_w, edges(key))
    for axes in (kernel_s, kernel_w):
        axes.legend(loc="upper left")
        axes.set(ylim=(-0.05, 1.05), ylabel=r"$e^{t (s - s_{\max})}$")
    kernel_s.set(
        xlim=(-0.5, 0.5),
        xlabel=r"key $s$, measured from the middle ($R = 1$)",
        title=f"the kernel and {key.panels} key panels: dense at both ends",
    )
    kernel_w.set(
        xlim=(-edge, edge),
        xlabel=r"$w$, where $s = (R/2)\,\tanh(w)/\tanh(W)$",
        title="in $w$ it is smooth on every panel, at every temperature",
    )
    title = r"1,000 Gaussian keys, $B = \max|t|\,R = 300$, precision $10^{-8}$"
    figure.suptitle(title, fontsize=11)
    figure.savefig(to)
    plt.close(figure)


if __name__ == "__main__":
    draw_region(HERE / "transform-region.png")
    draw_panels(HERE / "transform-panels.png")
