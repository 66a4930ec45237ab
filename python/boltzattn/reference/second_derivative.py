"""The second derivative of one head of rank 1, by the stages of the transform."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from boltzattn.problem import OutputGradients
from boltzattn.reference.head import Half, Head, dot

Moves = tuple[Tensor, Tensor, Tensor]  # of t, s and v


def double_backward(
    head: Head, directions: Moves, grads: OutputGradients
) -> tuple[OutputGradients, Moves]:
    """Gradients of D = <directions, backward(grads)>, for grads and for (t, s, v).

    D is the derivative of <g, out> + <h, lse> in the direction (to_t, to_s, to_v):

        D = sum_i g_i . (to_t_i F' + t_i P + W) + h_i (to_t_i E[s] + t_i A),
        F = E[v],  P = E[to_s v] - A F,  W = E[to_v],  A = E[to_s]      all at t_i.

    Directions are measured from the end key, too: moving all keys, or all values, by the same
    amount moves lse by t times that, or out by that.
    """
    dv, (to_t, to_s, to_v), (g, h) = head.dv, directions, grads
    assert h is not None
    ends = head.end_values()
    core = head.core(head.moments(ends), ends, ends)
    widths = [dv, 1, 1, dv, dv]  # of x = v - end value, 1, y, y x, to_v, where y is to_s
    short, wide = dv + 1, sum(widths)  # x, 1
    grad_g, grad_h, grad_t = torch.empty_like(g), torch.empty_like(h), torch.empty_like(head.t)
    grad_s, grad_v = torch.zeros_like(head.s), torch.zeros_like(head.v)
    for half, end_key in zip(core.halves, (head.s.argmin(), head.s.argmax()), strict=True):
        gap = head.s - half.end
        to_end, to_end_value = to_s[end_key], to_v[end_key]
        moves = torch.cat([to_s - to_end, to_v - to_end_value], 1)

        def key_row(j: Tensor, half: Half = half, moves: Tensor = moves) -> Tensor:
            x, (y, w) = head.v[j] - half.end_value, moves[j].split([1, dv], 1)
            return torch.cat([x, torch.ones_like(y), y, y * x, w], 1)

        def key_columns(
            _: slice, j: Tensor, gap: Tensor = gap, key_row: Callable = key_row
        ) -> Tensor:
            row = key_row(j)
            return torch.cat([row, gap[j] * row, gap[j] * gap[j] * row[:, :short]], 1)

        def query_columns(_: slice, i: Tensor) -> Tensor:
            t, row = head.t[i], torch.cat([g[i], h[i]], 1)
            row = torch.cat([to_t[i] * row, t * row, g[i]], 1)
            return torch.cat([row, t * row], 1)

        node = half.kernel @ head.keys.sums(2 * wide + short, key_columns)
        plain, once, twice = node.split([wide, wide, short], 1)

        # Queries: the means of D and their derivatives by t.
        table = torch.cat(_means_and_slopes(plain, once, twice, widths), 1)
        for nodes, i, weight in head.queries.tiles(half.panels):
            t, to = head.t[i], to_t[i]
            here = slice(nodes.start - half.nodes.start, nodes.stop - half.nodes.start)
            f1, p, w, f2, p1, w1, m, a, m1, a1 = (weight @ table[here]).split([dv] * 6 + [1] * 4, 1)
            grad_g[i] = to * f1 + t * p + (w + to_end_value)
            grad_h[i] = to * (m + half.end) + t * (a + to_end)
            grad_t[i] = dot(g[i], to * f2 + t * p1 + p + w1)
            grad_t[i] += h[i] * (to * m1 + t * a1 + (a + to_end))

        # Keys: D as a function of the sums `plain` and `once`, and from there to the keys. The
        # derivative of an exponential by s_j brings t_i down, hence the second set of columns.
        both = head.queries.sums(2 * (2 * short + dv), query_columns, half.panels)[half.nodes]
        back = [
            _pull_back(plain, once[:, :short], part, widths)
            for part in both.split(2 * short + dv, 1)
        ]
        table = half.kernel.T @ torch.cat([*back[0], *back[1]], 1)
        for nodes, j, weight in head.keys.tiles():
            to_row, to_gap_row, by_s, by_s_gap = (weight @ table[nodes]).split([wide, short] * 2, 1)
            row = key_row(j)
            to_row[:, :short] += gap[j] * to_gap_row
            by_s[:, :short] += gap[j] * by_s_gap + to_gap_row
            to_x, _, _, to_product, _ = to_row.split(widths, 1)
            grad_v[j] += to_x + moves[j, :1] * to_product
            grad_s[j] += dot(row, by_s)
    return OutputGradients(grad_g, grad_h), (grad_t, grad_s, grad_v)


def _means_and_slopes(
    plain: Tensor, once: Tensor, twice: Tensor, widths: list[int]
) -> tuple[Tensor, ...]:
    """F', P, W, F'', P', W' [nodes, dv] and E[s], A, E[s]', A' [nodes, 1] from the sums of D."""
    z = plain.split(widths, 1)[1]
    f, _, a, c, w = (plain / z).split(widths, 1)
    fs, m, as_, cs, ws = (once / z).split(widths, 1)
    fss, ms = (twice / z).split(widths[:2], 1)
    f1, m1, a1 = fs - f * m, ms - m * m, as_ - a * m
    f2 = fss - fs * m - f1 * m - f * m1
    p1 = cs - c * m - f1 * a - f * a1
    return f1, c - f * a, w, f2, p1, ws - w * m, m, a, m1, a1


def _pull_back(
    plain: Tensor, once: Tensor, sums: Tensor, widths: list[int]
) -> tuple[Tensor, Tensor]:
    """Gradient of D for the sums over keys; D is linear in the sums over queries, `sums`."""
    dv = widths[0]
    to_slope, to_mean, to_p, to_a, to_w = sums.split([dv, 1, dv, 1, dv], 1)
    with torch.enable_grad():
        plain, once = plain.detach().requires_grad_(), once.detach().requires_grad_()
        total, z, a, c, w = plain.split(widths, 1)
        total_slope, z_slope = once.split([dv, 1], 1)
        f, a, m = total / z, a / z, z_slope / z
        d = (to_slope * (total_slope / z - f * m)).sum() + (to_mean * m).sum()
        d = d + (to_p * (c / z - f * a)).sum() + (to_a * a).sum() + (to_w * w / z).sum()
    to_plain, to_once = torch.autograd.grad(d, (plain, once))
    return to_plain, to_once
