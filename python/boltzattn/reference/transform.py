"""Rank-1 attention in linear time, in plain torch: forward, backward and double backward.

With t_i = scale q_i and s_j = k_j, everything attention and its derivatives are made of is a mean
E_t[y] = sum_j y_j exp(t s_j) / sum_j exp(t s_j), a smooth function of the one variable t (see
`layout`). For one head, in fp64:

    moments:  M[b] = sum_j l_b(s_j) y_j       one pass over the keys, onto the key nodes
    core:     E_t[y] at the query nodes       from M and exp(t_a s_b), no n in it
    evaluate: sum_a l_a(t_i) E_a[y]           one pass over the queries

Derivatives are means of other columns (E_t[y]' = E_t[s y] - E_t[s] E_t[y]), never derivatives of
the basis l; factors t_i and s_j are multiplied in token by token, where they are exact. Gradients
of keys and values run the same way back: sums over queries onto the query nodes, through the core
transposed, evaluated at the keys.

Query panels with t < 0 and with t > 0 are worked on apart, each measuring keys from the end key
that takes the largest weight there, and values from that key's value: at low temperature all that
remains is such small differences.

Tensors are canonical, as in `reference`, with rank 1. Memory is linear in n.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from boltzattn.reference import direct as reference
from boltzattn.transform.layout import (
    LARGEST_PRODUCT,
    Axis,
    Layout,
    Range,
    choose_layout,
    lagrange_weights,
)

PRECISION = 1e-17  # of interpolation, below the rounding of fp64
TOKENS_PER_TILE = 4096
LARGEST_SUM = 1e300  # of |v| over the keys: sums of values must not overflow
LEAST_EXTENT = 1e-290  # of the keys: its inverse must not overflow


class Tokens:
    """The tokens of an axis, ordered by panel."""

    def __init__(self, axis: Axis, u: Tensor) -> None:
        self.axis = axis
        panel, self.place = axis.locate(u)
        self.order = panel.argsort(stable=True)
        self.counts = panel.bincount(minlength=axis.panels).tolist()

    def tiles(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(nodes of a panel, some tokens on it, their Lagrange weights [tokens, nodes])."""
        nodes, first = self.axis.nodes, 0
        for panel, count in enumerate(self.counts):
            if count == 0:
                continue
            for tokens in self.order[first : first + count].split(TOKENS_PER_TILE):
                weight = lagrange_weights(nodes, self.place[tokens])
                yield slice(panel * nodes, (panel + 1) * nodes), tokens, weight
            first += count

    def moments(self, columns: Callable[[Tensor], list[Tensor]]) -> Tensor:
        """Sums over the tokens onto the nodes, [axis.size, c], of columns(tokens) [tokens, c]."""
        sums: Tensor | None = None
        for nodes, tokens, weight in self.tiles():
            part = weight.T @ torch.cat(columns(tokens), 1)
            if sums is None:
                sums = part.new_zeros(self.axis.size, part.shape[1])
            sums[nodes] += part
        assert sums is not None, "a head without tokens has no moments"
        return sums


@dataclass
class _Half:
    """The query panels that measure keys and values from one end key."""

    queries: Tensor  # [m] which of the head's queries fall on these panels
    tokens: Tokens  # these queries
    kernel: Tensor  # [query nodes, key nodes] exp(t_a (s_b - s_end))
    end: float  # s_end
    end_key: Tensor  # [] where it stands among the kept keys
    gap: Tensor  # [keys, 1] s_j - s_end
    end_value: Tensor  # [dv]


class _Head:
    """One head that the transform can serve."""

    def __init__(self, t: Tensor, s: Tensor, v: Tensor, layout: Layout) -> None:
        self.t, self.v = t[:, None], v
        self.keys = Tokens(layout.key, layout.warp_keys(s))
        u = layout.warp_queries(t)
        panel, _ = layout.query.locate(u)
        split = layout.first_positive_panel()
        self.halves = []
        for first, last, at_end in (
            (0, split, s.argmin()),
            (split, layout.query.panels, s.argmax()),
        ):
            queries = ((panel >= first) & (panel < last)).nonzero().squeeze(1)
            if queries.numel() == 0:
                continue
            whole = layout.query
            origin = whole.origin + 2 * whole.half * first
            axis = Axis(last - first, whole.nodes, origin, whole.half)
            end = float(s[at_end])
            node_t = layout.query_nodes(t.device)[first * axis.nodes : last * axis.nodes]
            node_gap = layout.key_nodes(t.device) - (end - layout.middle)
            self.halves.append(
                _Half(
                    queries=queries,
                    tokens=Tokens(axis, u[queries]),
                    kernel=(node_t[:, None] * node_gap).exp(),
                    end=end,
                    end_key=at_end,
                    gap=(s - end)[:, None],
                    end_value=v[at_end],
                )
            )

    def forward(self) -> tuple[Tensor, Tensor]:
        dv = self.v.shape[1]
        out, lse = self.v.new_empty(len(self.t), dv), self.v.new_empty(len(self.t))
        for half in self.halves:

            def columns(j: Tensor, half: _Half = half) -> list[Tensor]:
                return [self.v[j] - half.end_value, torch.ones_like(half.gap[j])]

            total, z = (half.kernel @ self.keys.moments(columns)).split([dv, 1], 1)
            table = torch.cat([total / z + half.end_value, z.log()], 1)
            for nodes, tokens, weight in half.tokens.tiles():
                i = half.queries[tokens]
                out[i], log_z = (weight @ table[nodes]).split([dv, 1], 1)
                lse[i] = (self.t[i] * half.end + log_z).squeeze(1)
        return out, lse

    def backward(self, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of t [n_q, 1], s [n_k, 1] and v for those of out, g, and of lse, h [n_q, 1]."""
        dv = self.v.shape[1]
        grad_t = torch.empty_like(self.t)
        grad_s, grad_v = self.v.new_zeros(len(self.v), 1), torch.zeros_like(self.v)
        for half in self.halves:

            def key_columns(j: Tensor, half: _Half = half) -> list[Tensor]:
                x, gap = self.v[j] - half.end_value, half.gap[j]
                return [x, torch.ones_like(gap), gap * x, gap]

            def query_columns(tokens: Tensor, half: _Half = half) -> list[Tensor]:
                i = half.queries[tokens]
                return [g[i], self.t[i] * g[i], self.t[i] * h[i]]

            # At the query nodes: means, their slopes, and back again.
            node = half.kernel @ self.keys.moments(key_columns)
            total, z, total_slope, z_slope = node.split([dv, 1, dv, 1], 1)
            f, mean = total / z, z_slope / z
            table = torch.cat([total_slope / z - f * mean, mean], 1)
            for nodes, tokens, weight in half.tokens.tiles():
                i = half.queries[tokens]
                slope, mean_gap = (weight @ table[nodes]).split([dv, 1], 1)
                grad_t[i] = dot(g[i], slope) + h[i] * (half.end + mean_gap)
            g0, gt, ht = half.tokens.moments(query_columns).split([dv, dv, 1], 1)
            adjoint = torch.cat([g0, gt, ht - dot(f, gt)], 1) / z

            # At the key nodes: ds_j = sum_i t_i P_ij (g_i . (v_j - F_i) + h_i).
            table = half.kernel.T @ adjoint
            for nodes, j, weight in self.keys.tiles():
                to_v, pull, rest = (weight @ table[nodes]).split([dv, dv, 1], 1)
                grad_v[j] += to_v
                grad_s[j] += dot(self.v[j] - half.end_value, pull) + rest
        return grad_t, grad_s, grad_v

    def double_backward(
        self, to_t: Tensor, to_s: Tensor, to_v: Tensor, g: Tensor, h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients for g, h, t, s and v of D = <(to_t, to_s, to_v), backward(g, h)>.

        D is the derivative of <g, out> + <h, lse> in the direction (to_t, to_s, to_v):

            D = sum_i g_i . (to_t_i F' + t_i P + W) + h_i (to_t_i E[s] + t_i A),
            F = E[v],  P = E[to_s v] - A F,  W = E[to_v],  A = E[to_s]      all at t_i.

        Directions are measured from the end key too: moving all keys, or all values, by the same
        amount moves lse by t times that, or out by that.
        """
        dv = self.v.shape[1]
        widths = [dv, 1, 1, dv, dv]  # of x = v - end value, 1, y, y x, to_v, where y is to_s
        short = dv + 1  # x, 1
        wide = sum(widths)
        grad_g, grad_h, grad_t = torch.empty_like(g), torch.empty_like(h), torch.empty_like(self.t)
        grad_s, grad_v = self.v.new_zeros(len(self.v), 1), torch.zeros_like(self.v)
        for half in self.halves:
            to_end, to_end_value = to_s[half.end_key], to_v[half.end_key]
            moves = torch.cat([to_s - to_end, to_v - to_end_value], 1)

            def key_row(j: Tensor, half: _Half = half, moves: Tensor = moves) -> Tensor:
                x, (y, w) = self.v[j] - half.end_value, moves[j].split([1, dv], 1)
                return torch.cat([x, torch.ones_like(y), y, y * x, w], 1)

            def key_columns(
                j: Tensor, half: _Half = half, key_row: Callable = key_row
            ) -> list[Tensor]:
                row, gap = key_row(j), half.gap[j]
                return [row, gap * row, gap * gap * row[:, :short]]

            def query_columns(tokens: Tensor, half: _Half = half) -> list[Tensor]:
                i = half.queries[tokens]
                t, row = self.t[i], torch.cat([g[i], h[i]], 1)
                row = torch.cat([to_t[i] * row, t * row, g[i]], 1)
                return [row, t * row]

            node = half.kernel @ self.keys.moments(key_columns)
            plain, once, twice = node.split([wide, wide, short], 1)

            # Queries: the means of D and their derivatives by t.
            table = torch.cat(_means_and_slopes(plain, once, twice, widths), 1)
            for nodes, tokens, weight in half.tokens.tiles():
                i = half.queries[tokens]
                t, to = self.t[i], to_t[i]
                f1, p, w, f2, p1, w1, m, a, m1, a1 = (weight @ table[nodes]).split(
                    [dv] * 6 + [1] * 4, 1
                )
                grad_g[i] = to * f1 + t * p + (w + to_end_value)
                grad_h[i] = to * (m + half.end) + t * (a + to_end)
                grad_t[i] = dot(g[i], to * f2 + t * p1 + p + w1)
                grad_t[i] += h[i] * (to * m1 + t * a1 + (a + to_end))

            # Keys: D as a function of the sums `plain` and `once`, and from there to the keys. An
            # exponential's derivative by s_j brings t_i down, hence the second set of columns.
            sums = half.tokens.moments(query_columns).split([2 * short + dv] * 2, 1)
            back = [_pull_back(plain, once[:, :short], part, widths) for part in sums]
            table = half.kernel.T @ torch.cat([*back[0], *back[1]], 1)
            for nodes, j, weight in self.keys.tiles():
                to_row, to_gap_row, by_s, by_s_gap = (weight @ table[nodes]).split(
                    [wide, short] * 2, 1
                )
                row, gap = key_row(j), half.gap[j]
                to_row[:, :short] += gap * to_gap_row
                by_s[:, :short] += gap * by_s_gap + to_gap_row
                to_x, _, _, to_product, _ = to_row.split(widths, 1)
                grad_v[j] += to_x + moves[j, :1] * to_product
                grad_s[j] += dot(row, by_s)
        return grad_g, grad_h, grad_t, grad_s, grad_v


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)


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


def kept_keys(key_mask: Tensor | None, n_k: int, device: torch.device) -> Tensor | None:
    """Indices of the keys that are not masked; None if the mask is a bias."""
    if key_mask is None:
        return torch.arange(n_k, device=device)
    if key_mask.dtype == torch.bool:
        return (~key_mask).nonzero().squeeze(1)
    masked = key_mask == -torch.inf
    if not bool((masked | (key_mask == 0)).all()):
        return None
    return (~masked).nonzero().squeeze(1)


def _prepare(query: Tensor, key: Tensor, value: Tensor, kept: Tensor, scale: float) -> _Head | None:
    """The head of query [n_q, 1], key [n_k, 1] and value [n_k, dv]; None: a case for `direct`."""
    t = query.detach().double().squeeze(1) * scale
    s = key.detach()[kept].double().squeeze(1)
    v = value.detach()[kept].double()
    # Comparisons with NaN are false, so every one of these also asks for finite numbers.
    if not float(v.abs().amax()) * len(v) <= LARGEST_SUM:
        return None
    span = Range(float(t.min()), float(t.max()), float(s.min()), float(s.max()), len(s))
    if not (span.largest_product <= LARGEST_PRODUCT and span.key_extent >= LEAST_EXTENT):
        return None
    return _Head(t, s, v, choose_layout(span, len(t), len(s), v.shape[1], PRECISION))


def _heads(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float
) -> Iterator[tuple[tuple[int, ...], Tensor | None, _Head | None]]:
    """(index, kept keys, head) of every head that has queries and keys; head None: `direct`."""
    for index in itertools.product(*map(range, query.shape[:-2])):
        mask = None if key_mask is None else key_mask[index]
        kept = kept_keys(mask, key.shape[-2], key.device)
        if kept is None:
            yield index, None, None
        elif query.shape[-2] > 0 and kept.numel() > 0:
            yield index, kept, _prepare(query[index], key[index], value[index], kept, scale)


def _at(tensor: Tensor | None, index: tuple[int, ...]) -> Tensor | None:
    return None if tensor is None else tensor[index]


def _column(tensor: Tensor | None, index: tuple[int, ...], like: Tensor) -> Tensor:
    """A vector over the queries as an fp64 column; zeros for None."""
    if tensor is None:
        return torch.zeros(like.shape[-2], 1, dtype=torch.float64, device=like.device)
    return tensor[index].detach().double()[:, None]


def _check_plain(attn_mask: Tensor | None, seed: Tensor | None, is_causal: bool) -> None:
    if attn_mask is not None or seed is not None or is_causal:
        raise ValueError(
            "the transform takes no attn_mask, dropout or is_causal; use reference.direct_*"
        )


def transform_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """(out [*L, n_q, dv] in the dtype of query, lse [*L, n_q] fp64).

    Example:
        >>> q, k, v = torch.randn(3, 5000, 1), torch.randn(3, 5000, 1), torch.randn(3, 5000, 4)
        >>> out, lse = transform_forward(q, k, v, None, None, None, 1.0, 0.0, False)
        >>> out.shape, lse.shape
        (torch.Size([3, 5000, 4]), torch.Size([3, 5000]))
    """
    _check_plain(attn_mask, seed, is_causal)
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float64)
    for index, _, head in _heads(query, key, value, key_mask, scale):
        if head is None:
            out[index], lse[index] = reference.direct_forward(
                query[index],
                key[index],
                value[index],
                None,
                _at(key_mask, index),
                None,
                scale,
                0.0,
                False,
            )
        else:
            out[index], lse[index] = head.forward()
    return out, lse


def transform_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    _check_plain(attn_mask, seed, is_causal)
    grad_query, grad_key, grad_value = (x.new_zeros(x.shape) for x in (query, key, value))
    for index, kept, head in _heads(query, key, value, key_mask, scale):
        if head is None:
            grad_query[index], grad_key[index], grad_value[index] = reference.direct_backward(
                grad_out[index],
                _at(grad_lse, index),
                query[index],
                key[index],
                value[index],
                out[index],
                lse[index],
                None,
                _at(key_mask, index),
                None,
                scale,
                0.0,
                False,
            )
        else:
            g, h = grad_out[index].detach().double(), _column(grad_lse, index, query)
            grad_t, grad_s, grad_v = head.backward(g, h)
            grad_query[index] = grad_t * scale
            grad_key[index][kept] = grad_s.to(key.dtype)
            grad_value[index][kept] = grad_v.to(value.dtype)
    return grad_query, grad_key, grad_value


def transform_double_backward(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of <grads, backward(...)> for grad_out, grad_lse, query, key and value."""
    to_out, to_q, to_k, to_v = (x.new_zeros(x.shape) for x in (grad_out, query, key, value))
    to_lse = None if grad_lse is None else grad_lse.new_zeros(grad_lse.shape)
    for index, kept, head in _heads(query, key, value, key_mask, scale):
        if head is None:
            of_out, of_lse, of_q, of_k, of_v = reference.direct_double_backward(
                (_at(grads[0], index), _at(grads[1], index), _at(grads[2], index)),
                grad_out[index],
                _at(grad_lse, index),
                query[index],
                key[index],
                value[index],
                None,
                _at(key_mask, index),
                None,
                scale,
                0.0,
                False,
            )
            to_out[index], to_q[index], to_k[index], to_v[index] = of_out, of_q, of_k, of_v
            if to_lse is not None and of_lse is not None:
                to_lse[index] = of_lse
            continue
        move_q, move_k, move_v = (
            torch.zeros_like(x[index], dtype=torch.float64)
            if move is None
            else move[index].detach().double()
            for move, x in zip(grads, (query, key, value), strict=True)
        )
        g, h = grad_out[index].detach().double(), _column(grad_lse, index, query)
        of_out, of_h, of_t, of_s, of_v = head.double_backward(
            move_q * scale, move_k[kept], move_v[kept], g, h
        )
        to_out[index], to_q[index] = of_out, of_t * scale
        to_k[index][kept], to_v[index][kept] = of_s.to(key.dtype), of_v.to(value.dtype)
        if to_lse is not None:
            to_lse[index] = of_h.squeeze(1)
    return to_out, to_lse, to_q, to_k, to_v
