"""Draw the figures of transform.md, lookup.md, tensor.md and theory.md: <name>-*.png."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from boltzattn.transform.layout import Axis, Range, make_layout
from boltzattn.transform.scan_layout import make_scan_layout
from boltzattn.transform.tensor import choose_tensor_layout
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


def draw_scan(to: Path) -> None:
    """Features of queries and of keys, and how a causal row reads the table of earlier keys."""
    t_most, keys = 60.0, 400
    layout = make_scan_layout(torch.float32, t_most, 1.0, keys)
    assert layout is not None
    nodes = layout.nodes_of_panels().numpy()  # [panels, nodes]
    positive = range(layout.levels + 1)
    edges = np.array((-layout.edges[0], *layout.edges))
    figure, ((of_query, of_key), (chunks, read)) = plt.subplots(
        2, 2, figsize=(11, 6.8), layout="constrained"
    )

    t = np.linspace(-layout.edges[0], t_most, 4001)
    panel, basis = (x.numpy() for x in layout.locate(torch.from_numpy(t)))
    shown = layout.nodes // 2
    for p in positive:
        here = panel == p
        colour = BLUE if p % 2 == 0 else ORANGE
        for a in range(layout.nodes):
            style = (
                dict(color=colour, lw=0.7, alpha=0.35) if a != shown else dict(color=colour, lw=2)
            )
            of_query.plot(t[here], basis[here, a], **style)
        of_query.plot(nodes[p], np.zeros(layout.nodes), ".", color=RED, ms=4, zorder=4)
    mark_edges(of_query, edges)
    of_query.set(
        xlim=(-layout.edges[0], t_most),
        xlabel=r"query $t$  (panels of $t < 0$ mirror these)",
        ylabel=r"$\ell_a(t)$",
        title=f"a query: the {layout.nodes} features of its panel",
    )

    s = np.linspace(0, 1, 600)
    for p in positive[1:]:
        colour = BLUE if p % 2 == 0 else ORANGE
        for a in range(layout.nodes):
            bold = a == shown
            of_key.plot(
                s,
                np.exp(nodes[p, a] * (s - 1)),
                color=colour,
                lw=2 if bold else 0.7,
                alpha=1 if bold else 0.35,
            )
    of_key.set(
        xlim=(0, 1),
        ylim=(-0.02, 1.05),
        xlabel=r"key $s$  (here $e = 1$ is the largest so far)",
        ylabel=r"$e^{t_a (s - e)}$",
        title=r"a key: one feature per node, at most 1",
    )

    size, row = 8, 21  # tokens of a chunk, and the row that is looked at
    for i in range(4 * size):
        start = i // size * size
        chunks.add_patch(plt.Rectangle((0, i), start, 1, color=PALE_BLUE, lw=0))
        for j in range(start, i + 1):
            square = dict(facecolor=PALE_ORANGE, edgecolor="white", lw=0.6)
            chunks.add_patch(plt.Rectangle((j, i), 1, 1, **square))
    first = row // size * size
    chunks.add_patch(
        plt.Rectangle((0, row), row + 1, 1, facecolor="none", edgecolor=RED, lw=1.6, zorder=5)
    )
    chunks.annotate(
        "table of earlier chunks\n" r"$A_a = \sum_j e^{t_a (s_j - e)} (v_j - c, 1)$",
        (first / 2, row + 5.2),
        ha="center",
        va="center",
        fontsize=9,
        color=BLUE,
    )
    chunks.annotate(
        "own chunk:\npair by pair",
        (first + 4.0, row - 1.2),
        xytext=(first + 9.0, row - 9.5),
        ha="center",
        fontsize=9,
        color="#8a5a00",
        arrowprops={"arrowstyle": "->", "color": "#8a5a00"},
    )
    chunks.annotate("a row", (row + 1.4, row + 0.5), va="center", fontsize=9, color=RED)
    chunks.set(
        xlim=(0, 4 * size),
        ylim=(4 * size, 0),
        xlabel="key (token)",
        ylabel="row (token)",
        xticks=range(0, 4 * size + 1, size),
        yticks=range(0, 4 * size + 1, size),
        title="a causal row is the sum of two parts",
    )

    draw = np.random.default_rng(4)
    earlier = draw.uniform(size=keys)
    value = np.sin(7 * earlier) + 0.5 * draw.standard_normal(keys)
    end = earlier.max()

    def sums(at: Array) -> Array:
        return np.exp(np.outer(at, earlier - end)) @ value

    p, at = layout.levels - 1, 0.8 * layout.edges[layout.levels - 1]
    low, high = layout.edges[p - 1], layout.edges[p]
    near = np.linspace(0.8 * low, 1.15 * high, 500)
    read.plot(near, sums(near), color=BLUE, lw=1.8, label=r"$\sum_j e^{t (s_j - e)} v_j$")
    read.plot(nodes[p], sums(nodes[p]), ".", color=RED, ms=7, zorder=4, label="table at the nodes")
    for node, height in zip(nodes[p], sums(nodes[p]), strict=True):
        read.plot([node, node], [0, height], color=RED, lw=0.7, alpha=0.5)
    _, weight = layout.locate(torch.tensor([at], dtype=torch.float64))
    found, exact = float(weight[0].numpy() @ sums(nodes[p])), float(sums(np.array([at]))[0])
    read.plot([at], [found], "D", color=GREEN, ms=8, zorder=5, label=r"$\sum_a \ell_a(t) A_a$")
    read.axhline(0, color="black", lw=0.8)
    mark_edges(read, np.array([low, high]))
    read.legend(loc="center", frameon=True, facecolor="white", edgecolor="none", framealpha=0.95)
    power = math.floor(math.log10(abs(found / exact - 1) + 1e-17))
    read.set(
        xlim=(near[0], near[-1]),
        xlabel=r"query $t$, on one panel",
        title=rf"what the row reads: {layout.nodes} nodes, exact to $10^{{{power + 1}}}$",
    )
    title = rf"a scan in fp32: $B = {t_most:g}$, {layout.panels} panels, {layout.features} features"
    figure.suptitle(title, fontsize=11)
    figure.savefig(to)
    plt.close(figure)


def log_bound(nodes: int, kappa: Array) -> Array:
    """log of the error of interpolating exp(kappa x) on [-1, 1] in Chebyshev nodes, at most."""
    kappa = np.maximum(kappa, 1e-100)
    ratio = kappa / (2 * (nodes + 1))
    fine = nodes * np.log(kappa / 2) - math.lgamma(nodes + 1) + kappa**2 / (4 * (nodes + 1))
    fine -= np.log1p(-np.minimum(ratio, 0.9))
    return math.log(4) + np.where(ratio < 0.9, np.minimum(fine, kappa), kappa)


class SmallHead:
    """A head of few keys, whose log Z is computed from all of them, and its panels."""

    def __init__(self, keys: Array, bias: Array, queries: Array, nodes: int, error: float) -> None:
        self.keys, self.bias, self.queries = keys, bias, queries
        self.nodes, self.log_error = nodes, math.log(error)
        self.query_panels = self._greedy(queries, self._query_panel_is_good)
        ends = queries[np.array(self.query_panels)]
        self.spots = np.unique(np.column_stack([ends, ends.mean(1)]))
        self.spot_log_z = np.logaddexp.reduce(self.logits(self.spots), 1)
        # Keys that matter nowhere are left out of the panels.
        self.kept = self.matters(queries).any(0)
        self.key_panels = self._greedy(keys[self.kept], self._key_panel_is_good)

    def logits(self, t: Array) -> Array:
        return np.outer(t, self.keys) + self.bias

    def matters(self, t: Array) -> NDArray[np.bool_]:
        logits = self.logits(t)
        return logits >= logits.max(1, keepdims=True) + self.log_error

    @staticmethod
    def _greedy(sites: Array, good: Callable[[Array], bool]) -> list[tuple[int, int]]:
        """First and last site of panels, each as wide as it may be."""
        found, first = [], 0
        for last in range(len(sites)):
            if last > first and not good(sites[first : last + 1]):
                found.append((first, last - 1))
                first = last
        return [*found, (first, len(sites) - 1)]

    def _query_panel_is_good(self, t: Array) -> bool:
        middle, half = (t[0] + t[-1]) / 2, (t[-1] - t[0]) / 2
        weight = self.logits(np.array([middle]))[0]
        weight = np.exp(weight - np.logaddexp.reduce(weight))
        kappa = np.abs(self.keys - weight @ self.keys) * half
        return bool(np.log(weight @ np.exp(log_bound(self.nodes, kappa))) <= self.log_error)

    def _key_panel_is_good(self, s: Array) -> bool:
        middle, half = (s[0] + s[-1]) / 2, (s[-1] - s[0]) / 2
        inside = (self.keys >= s[0]) & (self.keys <= s[-1]) & self.kept
        g = self.spots * middle - self.spot_log_z
        near = self.spots[g >= g.max() - 1]
        tilt = (near[0] + near[-1]) / 2
        g += np.logaddexp.reduce(tilt * (self.keys - middle)[inside] + self.bias[inside])
        bound = g + log_bound(self.nodes, np.abs(self.spots - tilt) * half)
        return bool(bound.max() <= self.log_error)


def draw_envelope(to: Path) -> None:
    """The logits of a small biased head under their envelope, and the blocks that matter."""
    draw = np.random.default_rng(5)
    keys = np.sort(draw.uniform(-2, 2, 60))
    bias = 2 * draw.standard_normal(60) - 4 * keys**2
    queries = np.linspace(-16, 16, 801)
    head = SmallHead(keys, bias, queries, nodes=6, error=1e-2)
    logits, matters = head.logits(queries), head.matters(queries)
    envelope = logits.max(1)
    kept = keys[head.kept]
    edges = [queries[a] for a, _ in head.query_panels[1:]]

    figure, (under, plane) = plt.subplots(
        1, 2, figsize=(11, 4.8), width_ratios=(1, 1.1), layout="constrained"
    )
    low = envelope + head.log_error
    under.fill_between(queries, low, envelope, color=PALE_ORANGE, lw=0, zorder=0)
    for j in range(len(keys)):
        colour, width = (BLUE, 0.8) if head.kept[j] else ("#bbbbbb", 0.6)
        under.plot(queries, logits[:, j], color=colour, lw=width, zorder=2 if head.kept[j] else 1)
    under.plot(queries, envelope, color=RED, lw=2.2, zorder=4, label=r"envelope $E(t)$")
    log_z = np.logaddexp.reduce(logits, 1)
    under.plot(queries, log_z, color="black", lw=1.4, ls="--", zorder=5, label=r"$\log Z(t)$")
    under.plot([], [], color=BLUE, lw=0.8, label=r"keys that matter somewhere")
    under.plot([], [], color="#bbbbbb", lw=0.6, label="keys that matter nowhere")
    mark_edges(under, np.array(edges))
    under.set(
        xlim=(queries[0], queries[-1]),
        ylim=(envelope.min() - 12, envelope.max() + 1),
        xlabel=r"query $t$, and the edges of query panels",
        ylabel=r"logit $t s_j + c_j$",
        title="one line per key",
    )
    under.legend(loc="upper center", fontsize=9)

    for a, z in head.key_panels:
        inside = (keys >= kept[a]) & (keys <= kept[z]) & head.kept
        for first, last in head.query_panels:
            if not matters[first : last + 1, inside].any():
                continue
            corner, pad = (kept[a] - 0.02, queries[first]), 0.04
            size = kept[z] - kept[a] + pad, queries[last] - queries[first]
            style = dict(facecolor=PALE_BLUE, edgecolor=BLUE, lw=0.9)
            plane.add_patch(plt.Rectangle(corner, *size, **style))
    for j in np.flatnonzero(head.kept):
        seen = queries[matters[:, j]]
        plane.plot([keys[j]] * 2, [seen[0], seen[-1]], color=ORANGE, lw=2.4, solid_capstyle="butt")
    mean = (np.exp(logits - log_z[:, None]) * keys).sum(1)
    plane.plot(mean, queries, color=RED, lw=2, label="mean key, the slope of $\\log Z$")
    plane.plot([], [], color=ORANGE, lw=2.4, label="where a key matters")
    plane.plot([], [], "s", color=PALE_BLUE, mec=BLUE, ms=9, label="blocks of two panels")
    plane.set(
        ylim=(queries[0], queries[-1]),
        xlim=(kept[0] - 0.15, kept[-1] + 0.15),
        xlabel=r"key $s$",
        ylabel=r"query $t$",
        title=f"{len(head.query_panels)} query panels, {len(head.key_panels)} key panels, "
        f"{head.nodes} nodes, error {math.exp(head.log_error):.0%}",
    )
    plane.legend(loc="lower right", fontsize=9, frameon=True, edgecolor="none", framealpha=0.9)
    figure.savefig(to)
    plt.close(figure)


def draw_weights(to: Path) -> None:
    """What heads of rank 1 attend to: attention weights of a few queries."""
    keys = np.linspace(-2, 2, 161)
    bias = 2 * np.cos(7 * keys) - 1.2 * keys**2
    queries = np.array([-1.5, 0.0, 1.5])
    styles = [(BLUE, "--"), (GREEN, "-"), (RED, "-.")]
    kinds = [
        ("dot: an end, or the average", 2 * np.outer(queries, keys)),
        ("dot with a key bias: any key, but in order", 2 * np.outer(queries, keys) + bias),
        ("Gaussian: what is near", -0.5 * ((queries[:, None] - keys) / 0.25) ** 2),
    ]
    figure, all_axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for axes, (title, logits) in zip(all_axes, kinds, strict=True):
        weight = np.exp(logits - np.logaddexp.reduce(logits, 1)[:, None])
        for (colour, line), query, row in zip(styles, queries, weight, strict=True):
            axes.plot(keys, row, color=colour, ls=line, lw=1.8, label=f"query {query:g}")
            axes.fill_between(keys, 0, row, color=colour, alpha=0.12, lw=0)
        if "bias" in title:
            shown = bias - bias.min()
            axes.plot(
                keys, 0.2 * weight.max() * shown / shown.max(), color=GREY, lw=1, label="bias"
            )
        axes.set(title=title, xlabel="key", xlim=(-2, 2), ylim=(0, 1.25 * weight.max()))
        axes.legend(fontsize=8, loc="upper center", ncols=4, handlelength=1.4, columnspacing=1)
    all_axes[0].set_ylabel("attention weight")
    figure.savefig(to)
    plt.close(figure)


def draw_rank(to: Path) -> None:
    """Ranks 1, 2 and 3, dot and Gaussian, on all tasks: from saved runs of `scores` and on text."""
    rows = []
    for path in sorted((HERE / "experiments").glob("scores*.json")):
        rows += json.loads(path.read_text())["rows"]
    text = [
        json.loads(line) for line in (HERE / "quality" / "text-64.jsonl").read_text().splitlines()
    ]
    panels = (
        ("random labels, % not learned", lambda row: 100 * (1 - row["accuracy"]), "labels"),
        ('equivariant function "wave", error', lambda row: row["error"], "wave"),
        ("local average in the plane, error", lambda row: row["error"], "local, plane"),
    )
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained")
    for score, colour, line, shift in (
        ("dot", BLUE, "o-", -0.04),
        ("gaussian", ORANGE, "s--", 0.04),
    ):
        for panel, (title, number, task) in zip(axes, panels, strict=False):
            found = {
                rank: [
                    number(r)
                    for r in rows
                    if (r["task"], r["score"], r["rank"]) == (task, score, rank)
                ]
                for rank in (1, 2, 3)
            }
            show_ranks(panel, found, title, colour, line, shift, score)
        found = {
            rank: [row["bits"] for row in text if row["model"] == f"rank-{rank}-{score}"]
            for rank in (1, 2, 3, 4, 8)
        }
        show_ranks(axes[3], found, "text, bits per character", colour, line, shift, score)
    full = [row["bits"] for row in text if row["model"] == "full"]
    axes[3].axhline(np.mean(full), color=GREY, lw=1, ls=":")
    axes[3].text(1, np.mean(full), "full rank", color=GREY, fontsize=9, va="bottom")
    axes[3].set_xscale("log", base=2)
    axes[3].set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    for panel in axes[:3]:
        panel.set_ylim(bottom=0)
    axes[0].legend()
    figure.savefig(to)
    plt.close(figure)


def speeds() -> tuple[Array, Array]:
    """B, and SDPA's time over that of `auto`: the rows of docs/tensor.md of rank 2, n = 16,384."""
    rows = [line.split("|")[1:-1] for line in (HERE / "tensor.md").read_text().splitlines()]
    wanted = [row for row in rows if len(row) == 8 and row[:2] == [" 2 ", " 16,384 "]]
    found = [(float(row[2]), float(row[7].strip(" x"))) for row in wanted if "t3" not in row[2]]
    return tuple(np.array(found).T)  # type: ignore[return-value]


def draw_tensor(to: Path) -> None:
    """Panels of a head of rank 2, and its speed against the range of the logits."""
    draw = np.random.default_rng(0)
    queries, keys = draw.standard_normal((2, 1200, 2)) * [1.0, 0.5]
    product = 20.0
    queries *= product / (2 * np.abs(queries[:, 0]).max() * np.abs(keys[:, 0]).max())
    t_most, s_most = (np.abs(x).max(0).tolist() for x in (queries, keys))
    layout = choose_tensor_layout(torch.float32, t_most, s_most, 2 * 16_384, 64)
    assert layout is not None
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.7), layout="constrained")
    sides = [(left, queries, layout.query, "queries $t$"), (middle, keys, layout.key, "keys $s$")]
    for axes, tokens, panels, name in sides:
        axes.plot(*tokens.T, ".", ms=2, color=ORANGE, zorder=2)
        lines = [axis.origin + 2 * axis.half * np.arange(axis.panels + 1) for axis in panels]
        for at in lines[0]:
            axes.plot([at, at], lines[1][[0, -1]], color=BLUE, lw=0.8, zorder=1)
        for at in lines[1]:
            axes.plot(lines[0][[0, -1]], [at, at], color=BLUE, lw=0.8, zorder=1)
        # The nodes of one panel.
        node = np.cos((2 * np.arange(layout.nodes) + 1) * np.pi / (2 * layout.nodes))
        centre = [axis.half * (2 * (axis.panels // 2) + 1 - axis.panels) for axis in panels]
        x, y = np.meshgrid(*(c + axis.half * node for c, axis in zip(centre, panels, strict=True)))
        axes.plot(x.ravel(), y.ravel(), "o", ms=2, color=RED, zorder=3)
        axes.set(title=f"{panels[0].panels} x {panels[1].panels} panels of {name}")
        axes.set(xlabel="axis 1", ylabel="axis 2")
    reach, speed = speeds()
    right.loglog(reach, speed, "o-", color=BLUE, lw=1.8)
    right.axhline(1, color=GREY, lw=1, ls="--")
    right.set_xticks(reach, [f"{x:g}" for x in reach])
    right.minorticks_off()
    right.set(title="n = 16,384: speed against SDPA", xlabel="B", ylabel="SDPA's time / time")
    figure.savefig(to)
    plt.close(figure)


def show_ranks(
    axis: Axes,
    found: dict[int, list[float]],
    title: str,
    colour: str,
    line: str,
    shift: float,
    label: str,
) -> None:
    """The mean of every rank as a line, and a dot for every seed."""
    found = {rank: numbers for rank, numbers in found.items() if numbers}
    for rank, numbers in found.items():
        axis.plot([rank + shift] * len(numbers), numbers, ".", color=colour, ms=4, alpha=0.6)
    axis.plot(list(found), [np.mean(n) for n in found.values()], line, color=colour, label=label)
    axis.set(title=title, xlabel="rank", xticks=list(found))
    axis.title.set_fontsize(10)


if __name__ == "__main__":
    draw_region(HERE / "transform-region.png")
    draw_panels(HERE / "transform-panels.png")
    draw_scan(HERE / "transform-scan.png")
    draw_envelope(HERE / "lookup-envelope.png")
    draw_weights(HERE / "lookup-weights.png")
    draw_rank(HERE / "theory-rank.png")
    draw_tensor(HERE / "tensor-panels.png")
