"""The truth of a case in extended precision, and how large the terms are that it is a sum of.

Numbers narrower than fp64 are computed in fp64, and fp64 in numpy's long double, which has 64 bits
of mantissa on x86. Logits are measured from the largest one of their row, `q . (k_j - k_top)`, so
that what is rounded is small wherever a weight is not 0: at rank 1 the weights are good to 1e-17
for logits of any size, which is what fp64 results need. It shares no line with the package, and
the derivatives are written out by hand.

A truth comes with a magnitude, the largest sum of the absolute values of its terms, with every
value as large as the largest one: |g| |v| |k| for a gradient. Rounding the inputs alone, by half an
eps each, moves the result by that many eps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fuzz.cases import Case, Inputs

assert np.finfo(np.longdouble).nmant >= 63, "the oracle needs a long double of 64 bits"

Array = np.ndarray


class Truth(NamedTuple):
    results: dict[str, Tensor]  # fp64
    magnitudes: dict[str, float]


class Found(NamedTuple):
    """A result, and the sums of the absolute values of its terms."""

    exact: Array
    size: Array


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

    def __init__(self, q: Array, k: Array, v: Array, bias: Array, scale: float) -> None:
        self.q, self.k, self.v, self.scale = q, k, v, q.dtype.type(scale)
        n_k = k.shape[-2]
        size_q, size_k, size_v = (np.abs(x).astype(np.float64) for x in (q, k, v))
        self.sizes = size_q, size_k, _largest_of_column(size_v)
        if n_k == 0:
            self.p = np.zeros((*q.shape[:-1], 0), q.dtype)
            self.lse = np.full(q.shape[:-1], -np.inf, q.dtype)
        else:
            about = self.scale * (q @ _t(k)) + bias
            top = about.argmax(-1)
            dead = np.take_along_axis(about, top[..., None], -1) == -np.inf
            gaps = np.zeros_like(about)
            for r in range(q.shape[-1]):
                key = k[..., r]
                key_top = np.take_along_axis(key, top, -1)
                gaps += q[..., r, None] * (key[..., None, :] - key_top[..., None])
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
        self.weights = self.p.astype(np.float64)

    def forward(self) -> dict[str, Found]:
        size = self.weights @ self.sizes[2]
        # The rule: 4 ulp of the largest value, and of lse, a logarithm, at least of 1.
        if self.v.size:
            size = np.maximum(size, self.sizes[2].max())
        lse = np.maximum(1.0, np.abs(np.where(np.isinf(self.lse), 0, self.lse)))
        return {"out": Found(self.p @ self.v, size), "lse": Found(self.lse, lse)}

    def _centred(self, x: Array) -> tuple[Array, Array]:
        mean = (self.p * x).sum(-1, keepdims=True)
        return x - mean, mean

    def _spread(self, x: Array) -> Array:
        """The absolute terms of a centred quantity."""
        return x + (self.weights * x).sum(-1, keepdims=True)

    def vjp(self, g: Array, h: Array) -> dict[str, Found]:
        (aq, ak, av), ag, ah = self.sizes, np.abs(g).astype(float), np.abs(h).astype(float)
        grad_logits = self.p * (self._centred(g @ _t(self.v))[0] + h[..., None])
        size = self.weights * (ag @ _t(av) + ah[..., None])
        scale, s = self.scale, abs(float(self.scale))
        return {
            "grad_query": Found(grad_logits @ self.k * scale, size @ ak * s),
            "grad_key": Found(_t(grad_logits) @ self.q * scale, _t(size) @ aq * s),
            "grad_value": Found(_t(self.p) @ g, _t(self.weights) @ ag),
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
        return {"tangent_out": Found(out, out_size), "tangent_lse": Found(mean, lse_size)}

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
            "double_grad_lse": Found(mean, (w * slope_size).sum(-1)),
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
    elif case.derivative == "jvp":
        found |= softmax.jvp(moves)
    elif case.derivative == "double":
        found |= softmax.double(g, h, moves)
    return found


def _bias(case: Case, inputs: Inputs, n_q: int, n_k: int) -> Array:
    """[*batch, heads, n_q, n_k] or what broadcasts to it: what masks add to the logits."""
    bias = np.zeros((n_q, n_k))
    if case.causal:
        bias[~np.tri(n_q, n_k, dtype=bool)] = -np.inf
    mask, padding = inputs.attn_mask, inputs.key_padding_mask
    if mask is not None:
        bool_mask = mask.dtype == torch.bool
        bias = bias + (np.where(mask.numpy(), 0.0, -np.inf) if bool_mask else _long(mask))
    if padding is not None:
        bool_mask = padding.dtype == torch.bool
        columns = np.where(padding.numpy(), -np.inf, 0.0) if bool_mask else _long(padding)
        bias = bias + columns[..., None, None, :]
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
    scale = case.rank**-0.5 if case.scale is None else case.scale
    if case.kind != "varlen":
        bias = _bias(case, inputs, case.n_q, case.n_k)
        found = _derive(case, Softmax(q, k, v, bias, scale), g, h, moves)
    else:
        found = _packed(case, inputs, (q, k, v, g, h, moves), scale)
    found = {
        name: Found(heads.gather(name, x), heads.gather(name, size))
        for name, (x, size) in found.items()
    }
    return found if case.lead else {n: Found(x[0], size[0]) for n, (x, size) in found.items()}


def _packed(case: Case, inputs: Inputs, arrays: tuple, scale: float) -> dict[str, Found]:
    q, k, v, g, h, moves = arrays
    parts: list[dict[str, Found]] = []
    for b in range(case.pieces):
        rows = slice(inputs.starts_q[b], inputs.starts_q[b + 1])
        columns = slice(inputs.starts_k[b], inputs.starts_k[b + 1])
        cut = tuple(x[:, r] for x, r in zip(moves, (rows, columns, columns), strict=False))
        bias = _bias(case, inputs, rows.stop - rows.start, columns.stop - columns.start)
        softmax = Softmax(q[:, rows], k[:, columns], v[:, columns], bias, scale)
        parts.append(_derive(case, softmax, g[:, rows], h[:, rows], cut))
    return {
        name: Found(*(np.concatenate([p[name][i] for p in parts], 1) for i in range(2)))
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
    softmax = Softmax(q, k, v, _bias(case, inputs, case.n_k, case.n_k), scale)
    softmax.sizes = *sizes[:2], _largest_of_column(sizes[2])
    heads_out, heads_size = (joined(x) for x in softmax.forward()["out"])
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
        results, magnitudes = {}, {}
        for name, (exact, size) in found.items():
            results[name] = torch.from_numpy(np.asarray(exact, dtype=np.float64))
            magnitudes[name] = float(np.max(size, initial=0.0))
            assert not math.isnan(magnitudes[name]), name
    return Truth(results, magnitudes)
