"""The truth of a case in extended precision, and how large the terms are that it is a sum of.

Numbers narrower than fp64 are computed in fp64, and fp64 in numpy's long double, which has 64 bits
of mantissa on x86. Logits are measured from the largest one of their row, `q . (k_j - k_top)`, so
that what is rounded is small wherever a weight is not 0: at rank 1 the weights are good to 1e-17
for logits of any size, which is what fp64 results need. It shares no line with the package, and
the derivatives are written out by hand.

A truth comes with a magnitude, the largest sum of the absolute values of its terms, with every
value as large as the largest one: |g| |v| |k| for a gradient. Rounding the inputs alone, by half an
eps each, moves the result by that many eps.

It also comes with the most that a relative change of the logits does to it, to first order and per
unit of the change. With |dl_ij| <= |l_ij| it is, for A = g . (v_j - out_i) + h_i,

    out         sum_j P_ij |l_ij| |v_j - out_i|
    grad_value  sum_i w_ij |g_i|,   w_ij = P_ij (|l_ij| + sum_m P_im |l_im|)
    grad_query  scale sum_j x_ij |k_j|,   grad_key  scale sum_i x_ij |q_i|,
                x_ij = w_ij |A_ij| + P_ij sum_m P_im |l_im| |A_im - h_i|

because dP_ij = P_ij (dl_ij - sum_m P_im dl_im), and A changes by -sum_m P_im dl_im (A_im - h_i).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fuzz.cases import Case, Inputs, scale_of

assert np.finfo(np.longdouble).nmant >= 63, "the oracle needs a long double of 64 bits"

Array = np.ndarray


class Truth(NamedTuple):
    results: dict[str, Tensor]  # fp64
    magnitudes: dict[str, float]
    by_logits: dict[str, float]  # where it is known


class Found(NamedTuple):
    """A result, the sums of the absolute values of its terms, and what moving logits does to it."""

    exact: Array
    size: Array
    by_logits: Array | None = None


def _long(x: Tensor) -> Array:
    """In long double; in fp64 what is narrower, which then has 29 bits more than fp32, too."""
    wide = np.longdouble if x.dtype == torch.float64 else np.float64
    return x.detach().double().numpy().astype(wide)


def _t(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def _largest_of_column(x: Array) -> Array:
    """What every value may be: methods that sum values before they weigh them round the largest."""
    return np.broadcast_to(x.max(-2, keepdims=True, initial=0.0), x.shape)


class Softmax:
    """Attention of heads [L, n, width] over all pairs."""

    def __init__(
        self, q: Array, k: Array, v: Array, bias: Array, scale: float, gaussian: bool = False
    ) -> None:
        self.gaussian = gaussian
        self.q, self.k, self.v, self.scale = q, k, v, q.dtype.type(scale)
        n_k = k.shape[-2]
        size_q, size_k, size_v = (np.abs(x).astype(np.float64) for x in (q, k, v))
        self.sizes = size_q, size_k, _largest_of_column(size_v)
        if n_k == 0:
            self.p = np.zeros((*q.shape[:-1], 0), q.dtype)
            self.lse = np.full(q.shape[:-1], -np.inf, q.dtype)
            self.size_logits = np.zeros(self.p.shape)
        else:
            about = self._logits() + bias
            top = about.argmax(-1)
            dead = np.take_along_axis(about, top[..., None], -1) == -np.inf
            gaps = np.zeros_like(about)
            for r in range(q.shape[-1]):
                key = k[..., None, :, r]
                key_top = np.take_along_axis(k[..., r], top, -1)[..., None]
                query = q[..., r, None]
                # (q - k)^2 - (q - k_top)^2 = (k_top - k) ((q - k) + (q - k_top))
                half = ((query - key) + (query - key_top)) / 2 if gaussian else query
                gaps += half * (key - key_top)
            gaps *= self.scale
            bias = np.broadcast_to(bias, gaps.shape)
            bias_top = np.take_along_axis(bias, top[..., None], -1)
            gaps = gaps + (bias - np.where(dead, 0, bias_top))
            # `about` was rounded; what was taken for the largest logit may not be quite that.
            more = np.where(dead, 0, gaps.max(-1, keepdims=True))
            p = np.exp(gaps - more)
            total = p.sum(-1, keepdims=True)
            self.p = p / np.where(dead, 1, total)
            at_top = np.take_along_axis(about, top[..., None], -1)
            lse = at_top + more + np.log(np.where(dead, 1, total))
            self.lse = np.where(dead, -np.inf, lse)[..., 0]
            self.size_logits = np.where(self.p > 0, np.abs(about), 0).astype(np.float64)
        self.weights = self.p.astype(np.float64)

    def _logits(self) -> Array:
        if not self.gaussian:
            return self.scale * (self.q @ _t(self.k))
        gaps = (self.q[..., r, None] - self.k[..., None, :, r] for r in range(self.q.shape[-1]))
        return -self.scale / 2 * sum(gap * gap for gap in gaps)

    def _pull(self, x: Array, *sizes: Array) -> tuple[Found, Found]:
        """Gradients of queries and keys for that of the logits, and the sizes of its terms."""
        scale, s, (aq, ak, _) = self.scale, abs(float(self.scale)), self.sizes
        if not self.gaussian:
            of_query = Found(x @ self.k * scale, *(size @ ak * s for size in sizes))
            return of_query, Found(_t(x) @ self.q * scale, *(_t(size) @ aq * s for size in sizes))
        columns: list[tuple[list[Array], list[Array]]] = []
        for r in range(self.q.shape[-1]):
            gap = self.q[..., r, None] - self.k[..., None, :, r]
            far = np.abs(gap).astype(float) * s
            pulled = [x * gap * scale, *(size * far for size in sizes)]
            of_query = [-pulled[0].sum(-1), *(each.sum(-1) for each in pulled[1:])]
            columns.append((of_query, [each.sum(-2) for each in pulled]))

        def joined(which: int) -> Found:
            parts = zip(*(column[which] for column in columns), strict=True)
            return Found(*(np.stack(each, -1) for each in parts))

        return joined(0), joined(1)

    def forward(self) -> dict[str, Found]:
        size = self.weights @ self.sizes[2]
        # The rule: 4 ulp of the largest value, and of lse, a logarithm, at least of 1.
        if self.v.size:
            size = np.maximum(size, self.sizes[2].max())
        lse = np.maximum(1.0, np.abs(np.where(np.isinf(self.lse), 0, self.lse)))
        out = self.p @ self.v
        return {"out": Found(out, size, self._moved_out(out)), "lse": Found(self.lse, lse)}

    def _moved_out(self, out: Array) -> Array:
        """sum_j P_ij |l_ij| |v_j - out_i|, or a little more: by Cauchy and Schwarz."""
        middle = self.v.mean(-2, keepdims=True) if self.v.size else 0.0
        v, f = (self.v - middle).astype(float), (out - middle).astype(float)
        moved = self.weights * self.size_logits
        total = moved.sum(-1, keepdims=True)
        squares = moved @ (v * v) - 2 * f * (moved @ v) + f * f * total
        return np.sqrt(total * np.maximum(squares, 0))

    def _centred(self, x: Array) -> tuple[Array, Array]:
        mean = (self.p * x).sum(-1, keepdims=True)
        return x - mean, mean

    def _spread(self, x: Array) -> Array:
        """The absolute terms of a centred quantity."""
        return x + (self.weights * x).sum(-1, keepdims=True)

    def vjp(self, g: Array, h: Array) -> dict[str, Found]:
        ag, ah = np.abs(g).astype(float), np.abs(h).astype(float)
        slopes = self._centred(g @ _t(self.v))[0]
        a = slopes + h[..., None]
        grad_logits = self.p * a
        moved = self.weights * self.size_logits
        w = moved + self.weights * moved.sum(-1, keepdims=True)
        x = w * np.abs(a).astype(float)
        x += self.weights * (moved * np.abs(slopes).astype(float)).sum(-1, keepdims=True)
        size = self.weights * (ag @ _t(self.sizes[2]) + ah[..., None])
        grad_query, grad_key = self._pull(grad_logits, size, x)
        far, terms = _distance(*size.shape[-2:]), (grad_logits, size, x)
        of_slopes = [(each * far).sum((-2, -1)) for each in terms]
        return {
            "grad_query": grad_query,
            "grad_key": grad_key,
            "grad_value": Found(_t(self.p) @ g, _t(self.weights) @ ag, _t(w) @ ag),
            "grad_key_bias": Found(*(each.sum(-2) for each in terms)),
            "grad_alibi_slopes": Found(-of_slopes[0], *of_slopes[1:]),
        }

    def _slopes(self, moves: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        """Of the logits along the moves: centred, their mean, and the size of their terms."""
        to_q, to_k, _ = moves
        slope = (to_q @ _t(self.k) + self.q @ _t(to_k)) * self.scale
        (aq, ak, _), (mq, mk) = self.sizes, (np.abs(x).astype(float) for x in (to_q, to_k))
        size = (mq @ _t(ak) + aq @ _t(mk)) * abs(float(self.scale))
        centred, mean = self._centred(slope)
        return centred, mean[..., 0], size

    def jvp(self, moves: tuple[Array, ...]) -> dict[str, Found]:
        slope, mean, size = self._slopes(moves)
        move, av = moves[2], self.sizes[2]
        out = (self.p * slope) @ self.v + self.p @ move
        out_size = (self.weights * self._spread(size)) @ av
        out_size = out_size + self.weights @ np.abs(move).astype(float)
        lse_size = (self.weights * size).sum(-1)
        lse = Found(mean, lse_size, self._moved_mean(slope))
        return {"tangent_out": Found(out, out_size), "tangent_lse": lse}

    def _moved_mean(self, centred: Array) -> Array:
        """sum_j P_ij |l_ij| |x_ij - mean_i|, for x measured from its mean."""
        return (self.weights * self.size_logits * np.abs(centred).astype(float)).sum(-1)

    def double(self, g: Array, h: Array, moves: tuple[Array, ...]) -> dict[str, Found]:
        """Gradients of D = <moves, vjp(g, h)> = sum_ij P_ij (S_ij A_ij + B_ij).

        S are the slopes of the logits along the moves, A the centred products of g and the values
        plus h, B those of g with the moves of the values.
        """
        p, w, scale, s = self.p, self.weights, self.scale, abs(float(self.scale))
        to_q, to_k, to_v = moves
        mq, mk, mv = (np.abs(x).astype(float) for x in moves)
        (aq, ak, av), ag, ah = self.sizes, np.abs(g).astype(float), np.abs(h).astype(float)
        slope, mean, slope_size = self._slopes(moves)
        slope_size = self._spread(slope_size)
        a = self._centred(g @ _t(self.v))[0] + h[..., None]
        a_size = self._spread(ag @ _t(av)) + ah[..., None]
        worth = self._centred(slope * a + g @ _t(to_v))[0]
        worth_size = self._spread(slope_size * a_size + ag @ _t(mv))
        z, z_size, y, y_size = p * worth, w * worth_size, p * a, w * a_size
        moved, moved_size = p * slope, w * slope_size
        return {
            "double_grad_out": Found(moved @ self.v + p @ to_v, moved_size @ av + w @ mv),
            "double_grad_lse": Found(mean, (w * slope_size).sum(-1), self._moved_mean(slope)),
            "double_query": Found((z @ self.k + y @ to_k) * scale, (z_size @ ak + y_size @ mk) * s),
            "double_key": Found(
                (_t(z) @ self.q + _t(y) @ to_q) * scale, (_t(z_size) @ aq + _t(y_size) @ mq) * s
            ),
            "double_value": Found(_t(moved) @ g, _t(moved_size) @ ag),
        }


def _derive(case: Case, softmax: Softmax, g: Array, h: Array, moves: tuple) -> dict[str, Found]:
    found = softmax.forward()
    if case.derivative == "vjp":
        found |= softmax.vjp(g, h)
        for name, given in (("grad_key_bias", case.key_bias), ("grad_alibi_slopes", case.alibi)):
            if not given:
                del found[name]
    elif case.derivative == "jvp":
        found |= softmax.jvp(moves)
    elif case.derivative == "double":
        found |= softmax.double(g, h, moves)
    return found


def _distance(n_q: int, n_k: int) -> Array:
    return np.abs(np.arange(n_k) - np.arange(n_q)[:, None])


def _bias(case: Case, inputs: Inputs, n_q: int, columns: slice) -> Array:
    """[*batch, heads, n_q, n_k] or what broadcasts to it: what is added to logits of some keys."""
    n_k = columns.stop - columns.start
    bias = np.zeros((n_q, n_k))
    if case.key_bias:
        bias = bias + _long(inputs.tensors["key_bias"])[..., None, columns]
    if case.alibi:
        slopes = _long(inputs.tensors["alibi_slopes"])[..., None, None]
        bias = bias - slopes * _distance(n_q, n_k)
    if case.causal:
        bias[..., ~np.tri(n_q, n_k, dtype=bool)] = -np.inf
    mask, padding = inputs.attn_mask, inputs.key_padding_mask
    if mask is not None:
        bool_mask = mask.dtype == torch.bool
        bias = bias + (np.where(mask.numpy(), 0.0, -np.inf) if bool_mask else _long(mask))
    if padding is not None:
        bool_mask = padding.dtype == torch.bool
        ignored = np.where(padding.numpy(), -np.inf, 0.0) if bool_mask else _long(padding)
        bias = bias + ignored[..., None, None, :]
    return bias


class _Heads:
    """Key heads repeated for the query heads that share them, and their gradients summed."""

    def __init__(self, heads: int, key_heads: int) -> None:
        self.repeats = heads // key_heads

    def spread(self, name: str, x: Array) -> Array:
        return x if name == "query" or self.repeats == 1 else np.repeat(x, self.repeats, -3)

    def gather(self, name: str, x: Array) -> Array:
        if self.repeats == 1 or not name.endswith(("_key", "_value")):
            return x
        *lead, heads, n, width = x.shape
        return x.reshape(*lead, heads // self.repeats, self.repeats, n, width).sum(-3)


def _attention(case: Case, inputs: Inputs) -> dict[str, Found]:
    def long(x: Tensor, axes: int = 2) -> Array:
        return _long(x) if case.lead else _long(x)[None]

    heads = _Heads(case.heads, case.key_heads or case.heads)
    names = "query", "key", "value"
    q, k, v = (heads.spread(name, long(inputs.tensors[name])) for name in names)
    moves = tuple(heads.spread(n, long(inputs.moves[n])) for n in names) if inputs.moves else ()
    g = long(inputs.grad_out)
    h = np.zeros(g.shape[:-1], g.dtype) if inputs.grad_lse is None else long(inputs.grad_lse)
    if case.kind != "varlen":
        bias = _bias(case, inputs, case.n_q, slice(0, case.n_k))
        softmax = Softmax(q, k, v, bias, scale_of(case), case.score == "gaussian")
        found = _derive(case, softmax, g, h, moves)
    else:
        found = _packed(case, inputs, (q, k, v, g, h, moves))
    found = {name: _each(one, lambda x, n=name: heads.gather(n, x)) for name, one in found.items()}
    return found if case.lead else {n: _each(one, lambda x: x[0]) for n, one in found.items()}


def _each(found: Found, change: Callable[[Array], Array]) -> Found:
    return Found(*(None if x is None else change(x) for x in found))


def _packed(case: Case, inputs: Inputs, arrays: tuple) -> dict[str, Found]:
    q, k, v, g, h, moves = arrays
    parts: list[dict[str, Found]] = []
    for b in range(case.pieces):
        rows = slice(inputs.starts_q[b], inputs.starts_q[b + 1])
        columns = slice(inputs.starts_k[b], inputs.starts_k[b + 1])
        cut = tuple(x[:, r] for x, r in zip(moves, (rows, columns, columns), strict=False))
        bias = _bias(case, inputs, rows.stop - rows.start, columns)
        cut_keys = k[:, columns], v[:, columns]
        softmax = Softmax(q[:, rows], *cut_keys, bias, scale_of(case), case.score == "gaussian")
        parts.append(_derive(case, softmax, g[:, rows], h[:, rows], cut))

    def whole(name: str, of_parts: tuple[Array | None, ...]) -> Array | None:
        if of_parts[0] is None:
            return None
        return sum(of_parts) if name == "grad_alibi_slopes" else np.concatenate(of_parts, 1)

    return {
        name: Found(*(whole(name, x) for x in zip(*(p[name] for p in parts), strict=True)))
        for name in parts[0]
    }


def _layer(case: Case, inputs: Inputs) -> dict[str, Found]:
    """x and its projections; the size of a gradient follows from those of its factors."""
    t = {name: _long(x) for name, x in inputs.tensors.items()}
    a = {name: np.abs(x).astype(np.float64) for name, x in t.items()}
    lead, heads = case.lead[:-1], case.heads

    def split(x: Array) -> Array:
        return np.swapaxes(x.reshape(*lead, case.n_k, heads, -1), -2, -3)

    def joined(x: Array) -> Array:
        return np.swapaxes(x, -2, -3).reshape(*lead, case.n_k, -1)

    def project(of: dict[str, Array], name: str) -> Array:
        return split(of["x"] @ of[f"w_{name}"].T + of.get(f"b_{name}", 0.0))

    q, k, v = (project(t, name) for name in "qkv")
    sizes = tuple(project(a, name) for name in "qkv")
    scale = case.rank**-0.5 if case.scale is None else case.scale
    softmax = Softmax(q, k, v, _bias(case, inputs, case.n_k, slice(0, case.n_k)), scale)
    softmax.sizes = *sizes[:2], _largest_of_column(sizes[2])
    heads_out, heads_size = (joined(x) for x in softmax.forward()["out"][:2])
    out = heads_out @ t["w_o"].T + t.get("b_o", 0.0)
    found = {"out": Found(out, heads_size @ a["w_o"].T + a.get("b_o", 0.0))}
    if case.derivative == "forward":
        return found
    g = _long(inputs.grad_out)
    ag = np.abs(g).astype(np.float64)
    to_heads, to_heads_size = split(g @ t["w_o"]), split(ag @ a["w_o"])
    # The gradients of one tensor: (gradient of a product's result, its size).
    of_heads = softmax.vjp(to_heads, np.zeros(to_heads.shape[:-1], g.dtype))
    bound = softmax.vjp(to_heads_size.astype(g.dtype), np.zeros(to_heads.shape[:-1]))

    def rows(x: Array) -> Array:
        return x.reshape(-1, x.shape[-1])

    x_grad, x_size = np.zeros_like(t["x"]), np.zeros_like(a["x"])
    for name, full in zip("qkv", ("query", "key", "value"), strict=True):
        grad, size = joined(of_heads[f"grad_{full}"].exact), joined(bound[f"grad_{full}"].size)
        x_grad, x_size = x_grad + grad @ t[f"w_{name}"], x_size + size @ a[f"w_{name}"]
        found[f"grad_w_{name}"] = Found(rows(grad).T @ rows(t["x"]), rows(size).T @ rows(a["x"]))
        if f"b_{name}" in t:
            found[f"grad_b_{name}"] = Found(rows(grad).sum(0), rows(size).sum(0))
    found["grad_x"] = Found(x_grad, x_size)
    found["grad_w_o"] = Found(rows(g).T @ rows(heads_out), rows(ag).T @ rows(heads_size))
    if "b_o" in t:
        found["grad_b_o"] = Found(rows(g).sum(0), rows(ag).sum(0))
    return found


def truth(case: Case, inputs: Inputs) -> Truth:
    """Every result of the case, rounded to fp64."""
    with np.errstate(all="ignore"):
        found = (_layer if case.kind == "layer" else _attention)(case, inputs)
        results, magnitudes, by_logits = {}, {}, {}
        for name, (exact, size, moved) in found.items():
            results[name] = torch.from_numpy(np.asarray(exact, dtype=np.float64))
            magnitudes[name] = float(np.max(size, initial=0.0))
            assert not math.isnan(magnitudes[name]), name
            if moved is not None:
                by_logits[name] = float(np.max(moved, initial=0.0))
    return Truth(results, magnitudes, by_logits)
