"""A case is a function of one integer, its seed: what is called, on which numbers, and how.

`draw` chooses the settings of a case and `build` its numbers. A `Case` is printed as the few
settings that are not the default ones, so that it can be pasted into a test, and made smaller
setting by setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
FAMILIES = (
    "gaussian",
    "equal",
    "ties",
    "two_point",
    "grid",
    "far_grid",
    "needle",
    "heavy",
    "ladder",
    "offset",
    "denormal",
    "huge",
)
LARGEST_LOGIT = 1e10
LARGEST_GAUSSIAN = 1e3
# Every sixth seed is for the reference backend, which is slower.
REFERENCE_EVERY = 6


@dataclass(frozen=True)
class Case:
    """The settings of a case. The defaults are the plainest call there is."""

    seed: int = 0  # of the numbers
    kind: str = "attention"  # or varlen, merge, stream, layer
    method: str = "direct"
    backend: str = "cpu"
    dtype: str = "fp32"
    derivative: str = "vjp"  # or forward, jvp, double
    lead: tuple[int, ...] = ()
    key_heads: int = 0  # 0: as many as query heads; else they broadcast, or are a group's
    gqa: bool = False
    n_q: int = 1
    n_k: int = 1
    rank: int = 1
    dv: int = 1
    family: str = "gaussian"
    queries: str = "gaussian"  # or equal, positive, spread, sparse, whole
    values: str = "gaussian"  # or offset, tiny, large, one_hot
    amplitude: float = 1.0  # of the keys
    temperature: float = 1.0  # B: the largest difference of two logits at rank 1
    scale: float | None = None
    causal: bool = False
    mask: str = ""  # or padding, padding_bias, bool, bias
    score: str = "dot"  # or gaussian, at temperatures up to LARGEST_GAUSSIAN
    key_bias: float = 0.0  # its size; 0: none
    alibi: float = 0.0  # the largest slope; 0: none
    grad_lse: bool = False
    strides: str = "plain"  # or heads_last, sliced, every_second
    pieces: int = 1  # sequences of a packed call, appends of a stream, parts of a merge
    digits: int = 0  # round the numbers to so many; 0: not at all
    isa: str = ""  # or avx2, portable: the CPU kernels of lesser processors
    threads: int = 1
    compiled: bool = False

    def __repr__(self) -> str:
        changed = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"Case({', '.join(changed)})"

    @property
    def heads(self) -> int:
        return self.lead[-1] if self.lead else 1


@dataclass
class Inputs:
    """The numbers of a case: differentiable tensors by name, and what is done with them."""

    tensors: dict[str, Tensor]
    moves: dict[str, Tensor]  # directions, one for each tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    scale: float | None
    attn_mask: Tensor | None = None
    key_padding_mask: Tensor | None = None
    starts_q: list[int] = field(default_factory=list)
    starts_k: list[int] = field(default_factory=list)


def scale_of(case: Case) -> float:
    if case.scale is not None:
        return case.scale
    return 1.0 if case.score == "gaussian" else case.rank**-0.5


def _size(rng: np.random.Generator) -> int:
    if rng.random() < 0.5:
        return int(rng.choice([0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65]))
    return int(rng.integers(1, 70))


def _sizes(rng: np.random.Generator, heads: int) -> tuple[int, int]:
    """Mostly small: n_q n_k decides what a case costs."""
    luck = rng.random()
    if luck < 0.9:
        return _size(rng), _size(rng)
    if luck < 0.98:
        pair = int(rng.choice([129, 257, 300])), _size(rng)
    elif luck < 0.997:
        pair = int(rng.choice([513, 1025, 3000])), int(rng.integers(1, 40))
    else:
        n = int(rng.choice([600, 1100, 1500]))
        return (n, n) if heads == 1 else (n // 2, n // 2)
    return pair if rng.random() < 0.4 else (pair[1], pair[0])


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = np.random.default_rng(seed)

    def pick(*choices: Any, p: list[float] | None = None) -> Any:
        return choices[rng.choice(len(choices), p=p)]

    backend = "reference" if seed % REFERENCE_EVERY == REFERENCE_EVERY - 1 else "cpu"
    kind = pick("attention", "varlen", "merge", "stream", "layer", p=[0.64, 0.13, 0.06, 0.04, 0.13])
    dtype = pick(*DTYPES, p=[0.35, 0.4, 0.15, 0.1])
    method = pick("direct", "transform", "auto", p=[0.4, 0.4, 0.2])
    rank = 1
    if method != "transform" and kind != "stream" and rng.random() < 0.5:
        rank = pick(2, 3, 8)
    wide = np.random.default_rng((seed, 3))
    lead = pick((), (1,), (2,), (3,), (2, 2), (1, 4), p=[0.25, 0.2, 0.25, 0.1, 0.1, 0.1])
    if kind in ("varlen", "stream"):
        lead = (pick(1, 2, 4),)
    heads = lead[-1] if lead else 1
    n_q, n_k = _sizes(rng, math.prod(lead))
    derivative = pick("forward", "vjp", "jvp", "double", p=[0.1, 0.7, 0.1, 0.1])
    causal = kind in ("attention", "varlen", "layer") and rng.random() < 0.3
    long = np.random.default_rng((seed, 2))
    if causal and kind != "layer" and long.random() < 0.04:  # more than one block of anything
        lead, heads, rank, derivative = (1,), 1, 1, "vjp"
        n_q, n_k = (int(x) for x in long.integers(500, 700, 2))
    if method == "transform" and not causal and kind != "stream" and wide.random() < 0.3:
        rank = int(wide.choice([2, 2, 3, 4]))
    mask = pick("", "padding", "padding_bias", "bool", "bias", p=[0.6, 0.16, 0.06, 0.09, 0.09])
    if kind not in ("attention", "layer"):
        mask = ""
    if mask in ("bool", "bias") and (method == "transform" or causal):
        mask = "padding"
    key_heads, gqa = 0, False
    if kind in ("attention", "varlen", "merge") and heads > 1 and rng.random() < 0.25:
        gqa = kind == "varlen" or rng.random() < 0.6
        key_heads = heads // 2 if gqa and heads % 2 == 0 else 1
    if kind == "stream":
        derivative, n_q = "forward", max(1, min(n_q, 9))
        n_k = pick(1, 5, 511, 512, 513, 700, 1300)
        method = "auto"
    if kind == "layer":
        n_q = n_k = max(1, min(n_k, 400 // heads))
        derivative = pick("forward", "vjp", p=[0.1, 0.9])
    if kind == "merge" and derivative == "double":
        derivative = "vjp"
    temperature = 10.0 ** (rng.uniform(-1, 3) if rng.random() < 0.5 else rng.uniform(-6, 7))
    family = pick(*FAMILIES)
    scored = _score_of(seed, kind, method, derivative, causal)
    wide_causal = np.random.default_rng((seed, 4))
    if method == "transform" and causal and not scored.get("alibi") and wide_causal.random() < 0.3:
        rank = int(wide_causal.choice([2, 2, 3, 4]))
    squared = scored.get("score") == "gaussian"
    if (kind == "layer" or squared) and family in ("denormal", "huge"):
        family = "gaussian"
    return Case(
        seed=seed,
        kind=kind,
        method=method,
        backend=backend,
        dtype=dtype,
        derivative=derivative,
        lead=lead,
        key_heads=key_heads,
        gqa=gqa,
        n_q=n_q,
        n_k=n_k,
        rank=rank,
        dv=pick(1, 2, 3, 4, 5, 8, 16, 17),
        family=family,
        queries=pick("gaussian", "equal", "positive", "spread", "sparse", "whole"),
        values=pick("gaussian", "offset", "tiny", "large", "one_hot", p=[0.6, 0.1, 0.1, 0.1, 0.1]),
        amplitude=1.0 if rng.random() < 0.6 else 10.0 ** float(rng.integers(-3, 4)),
        temperature=float(f"{temperature:.3g}"),
        scale=pick(None, 1.0, 0.37, -2.0, 1e-3, 0.0, p=[0.5, 0.2, 0.1, 0.1, 0.08, 0.02]),
        causal=causal,
        mask=mask,
        **scored,
        grad_lse=kind != "layer" and rng.random() < 0.4,
        strides=pick("plain", "heads_last", "sliced", "every_second", p=[0.55, 0.15, 0.15, 0.15]),
        pieces=pick(1, 2, 3, 5) if kind in ("varlen", "stream") else 2 if kind == "merge" else 1,
        isa=pick("", "avx2", "portable", p=[0.5, 0.25, 0.25]) if backend == "cpu" else "",
        threads=pick(1, 2, 3, 7, p=[0.91, 0.03, 0.03, 0.03]) if derivative == "vjp" else 1,
        # A Function with a jvp cannot be compiled.
        compiled=kind in ("attention", "layer", "varlen")
        and derivative in ("forward", "vjp")
        and rng.random() < 0.0007,
    )


def _score_of(seed: int, kind: str, method: str, derivative: str, causal: bool) -> dict[str, Any]:
    """What is not a plain dot product, of half the calls that take it."""
    rng = np.random.default_rng((seed, 3))
    plain = kind not in ("attention", "varlen") or method == "auto"
    if plain or derivative not in ("forward", "vjp") or rng.random() < 0.5:
        return {}
    sizes = [0.0, 0.0, 0.01, 1.0, 30.0]
    found = {
        "score": str(rng.choice(["dot", "gaussian"])),
        "key_bias": float(rng.choice(sizes)),
        "alibi": float(rng.choice(sizes)),
    }
    if method == "direct":
        return found
    return {} if causal else {**found, "alibi": 0.0}


# ---- numbers ----


def _keys(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> np.ndarray:
    info = torch.finfo(DTYPES[case.dtype])
    normal = rng.standard_normal(shape)
    n = shape[-2]
    a = case.amplitude
    if case.family == "gaussian":
        return normal * a
    if case.family == "equal":
        return np.full(shape, rng.standard_normal() * a)
    if case.family == "ties":
        return rng.choice(rng.standard_normal(5), shape) * a
    if case.family == "two_point":
        return np.where(normal > 0, 1.0, -0.5) * a
    if case.family == "grid":
        return rng.integers(-8, 9, shape) * a
    if case.family == "far_grid":  # exact products, large logits, small differences
        far = {"fp16": 1e3, "bf16": 1e2}.get(case.dtype, 1e6)
        return rng.integers(-3, 4, shape) + float(far)
    if case.family == "needle":
        keys = 0.01 * normal
        if n:
            keys[..., rng.integers(n), :] = 3.0
        return keys * a
    if case.family == "heavy":
        return np.clip(rng.standard_cauchy(shape), -1e4, 1e4) * a
    if case.family == "ladder":
        steps = 2.0 ** -(rng.permutation(n) % 40.0)
        return np.broadcast_to(steps[:, None], shape) * np.where(normal[..., :1, :] > 0, a, -a)
    if case.family == "offset":
        return 1e4 + normal * a
    if case.family == "denormal":
        return np.where(normal > 0.5, 0.0, normal * info.smallest_normal / 4)
    assert case.family == "huge", case.family
    return normal * (1e30 if info.max > 1e30 else 300.0)


def _queries(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> np.ndarray:
    """Of size 1 at most."""
    normal = rng.standard_normal(shape).clip(-4, 4)
    if case.queries == "equal":
        return np.ones(shape)
    if case.queries == "positive":
        return np.abs(normal) / 4
    if case.queries == "spread":
        return rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(-6, 0, shape)
    if case.queries == "whole":
        return rng.integers(-2, 3, shape) / 2.0
    if case.queries == "sparse":
        return np.where(normal > 0, normal / 4, 0.0)
    return normal / 4


def _values(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> np.ndarray:
    normal = rng.standard_normal(shape)
    if case.values == "offset":
        return 100.0 + normal
    if case.values in ("tiny", "large"):
        # fp16 has little room; bf16 and fp32 have the same range.
        size = 10.0 if case.dtype == "fp16" else 1e12
        return normal * (size if case.values == "large" else 1 / size)
    if case.values == "one_hot":
        return (rng.integers(0, max(1, shape[-2]), shape) == 0).astype(np.float64)
    return normal


def _query_size(case: Case, keys: np.ndarray, scale: float) -> float:
    """The largest query: B is the temperature, and no logit is beyond what is allowed."""
    if keys.size == 0 or scale == 0.0:
        return 1.0
    extent = float((keys.max(-2) - keys.min(-2)).max())
    top = float(np.abs(keys).max())
    size = case.temperature / (extent or top or 1.0) / abs(scale)
    largest = 1e4 if case.dtype == "fp16" else LARGEST_LOGIT
    size = min(size, largest / (top * abs(scale) * case.rank) if top else size)
    # Room for gradients, which are sums of queries.
    room = 30.0 if case.dtype == "fp16" else float(torch.finfo(DTYPES[case.dtype]).max) * 1e-8
    size = min(size, room)
    # Whole numbers stay so: a power of 2.
    return 2.0 ** round(math.log2(size)) if case.queries == "whole" else size


def _gaussian(
    rng: np.random.Generator, case: Case, keys: np.ndarray, query: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and queries whose logits are about the temperature: queries are near some keys."""
    if keys.size == 0:
        return keys, query
    extent = float((keys.max(-2) - keys.min(-2)).max()) or float(np.abs(keys).max()) or 1.0
    wanted = min(case.temperature, LARGEST_GAUSSIAN) / (abs(scale_of(case)) or 1.0) / case.rank
    factor = 2.0 ** round(math.log2(math.sqrt(wanted) / extent))
    some = keys.reshape(-1, case.rank)[rng.integers(0, keys.size // case.rank, query.shape[:-1])]
    near = query * (0.3 * extent / (float(np.abs(query).max(initial=0.0)) or 1.0))
    return keys * factor, (some + near) * factor


def _rounded(x: np.ndarray, digits: int) -> np.ndarray:
    if not digits or x.size == 0:
        return x
    with np.errstate(divide="ignore", invalid="ignore"):
        unit = 10.0 ** (np.floor(np.log10(np.abs(x))) - digits + 1)
        return np.where(x == 0, 0.0, np.round(x / unit) * unit)


def _stride(x: Tensor, how: str) -> Tensor:
    """The same numbers, laid out in memory in another way."""
    if how == "heads_last" and x.ndim > 2:
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if how == "sliced":
        wide = x.new_full((*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 3), math.nan)
        wide[..., 1:-1, 2:-1] = x
        return wide[..., 1:-1, 2:-1]
    if how == "every_second":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


def _starts(rng: np.random.Generator, n: int, pieces: int) -> list[int]:
    return [0, *sorted(int(x) for x in rng.integers(0, n + 1, pieces - 1)), n]


def build(case: Case) -> Inputs:
    """The numbers of a case, rounded to its dtype."""
    rng = np.random.default_rng((case.seed, 1))
    dtype = DTYPES[case.dtype]
    wide = torch.float64 if case.dtype == "fp64" else torch.float32

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(_rounded(x, case.digits))).to(dtype)

    if case.kind == "layer":
        tensors = {name: tensor(x) for name, x in _layer(rng, case).items()}
        out_shape = (*case.lead[:-1], case.n_k, tensors["w_o"].shape[0])
    else:
        key_lead = (*case.lead[:-1], case.key_heads) if case.key_heads else case.lead
        most = float(torch.finfo(dtype).max) / 64
        keys = _keys(rng, case, (*key_lead, case.n_k, case.rank)).clip(-most, most)
        keys = tensor(keys).double().numpy()
        scale = scale_of(case)
        query = _queries(rng, case, (*case.lead, case.n_q, case.rank))
        if case.score == "gaussian":
            keys, query = _gaussian(rng, case, keys, query)
            keys = tensor(keys.clip(-most, most)).double().numpy()
            query = query.clip(-most, most)
        else:
            query = query * _query_size(case, keys, scale)
        value = _values(rng, case, (*key_lead, case.n_k, case.dv))
        tensors = {"query": tensor(query), "key": tensor(keys), "value": tensor(value)}
        if case.key_bias:
            tensors["key_bias"] = tensor(
                rng.standard_normal((*case.lead, case.n_k)) * case.key_bias
            )
        if case.alibi:
            tensors["alibi_slopes"] = tensor(np.asarray(rng.random(case.lead)) * case.alibi)
        strided = {name: _stride(tensors[name], case.strides) for name in ("query", "key", "value")}
        tensors |= strided
        out_shape = (*case.lead, case.n_q, case.dv)
    moves = {}
    if case.derivative in ("jvp", "double"):
        for name, x in tensors.items():
            size = float(x.double().abs().max()) if x.numel() else 1.0
            moves[name] = tensor(rng.standard_normal(x.shape) * min(size, 1.0))
    inputs = Inputs(
        tensors,
        moves,
        tensor(rng.standard_normal(out_shape)),
        torch.from_numpy(rng.standard_normal(out_shape[:-1])).to(wide) if case.grad_lse else None,
        case.scale,
    )
    _add_masks(rng, case, inputs)
    if case.kind == "varlen":
        inputs.starts_q = _starts(rng, case.n_q, case.pieces)
        inputs.starts_k = _starts(rng, case.n_k, case.pieces)
    elif case.kind in ("merge", "stream"):
        inputs.starts_k = _starts(rng, case.n_k, case.pieces)
    return inputs


def _layer(rng: np.random.Generator, case: Case) -> dict[str, np.ndarray]:
    """A layer whose first column of x has the keys of the family; d is drawn with the numbers."""
    d, n, heads = int(rng.choice([2, 3, 8, 16])), case.n_k, case.heads
    x = rng.standard_normal((*case.lead[:-1], n, d))
    first = _keys(rng, case, (*case.lead[:-1], n, 1))
    top = np.abs(first).max() or 1.0
    x[..., :1] = first / max(1.0, top / 30)
    w_k = rng.standard_normal((heads * case.rank, d)) * 0.1
    w_k[:, 0] = rng.standard_normal(heads * case.rank)
    w_q = _queries(rng, case, (heads * case.rank, d))
    b_k = rng.standard_normal(heads * case.rank)
    found = {
        "x": x,
        "w_q": w_q * _query_size(case, x @ w_k.T, case.scale or 1.0),
        "w_k": w_k,
        "w_v": rng.standard_normal((heads * case.dv, d)),
        "w_o": rng.standard_normal((int(rng.choice([1, 4, d])), heads * case.dv)),
    }
    if rng.random() < 0.5:
        found |= {
            "b_q": rng.standard_normal(heads * case.rank),
            "b_k": b_k,
            "b_v": rng.standard_normal(heads * case.dv),
            "b_o": rng.standard_normal(found["w_o"].shape[0]),
        }
    return found


def _add_masks(rng: np.random.Generator, case: Case, inputs: Inputs) -> None:
    n_q, n_k = case.n_q, case.n_k
    dtype = DTYPES[case.dtype]
    if case.mask.startswith("padding"):
        ignored = rng.random((*case.lead[:-1], n_k)) < rng.choice([0.1, 0.5, 0.95])
        if rng.random() < 0.1:
            ignored[...] = True
        inputs.key_padding_mask = torch.from_numpy(ignored)
        if case.mask == "padding_bias":
            bias = np.where(ignored, -np.inf, rng.choice([0.0, 1.0]) * rng.standard_normal(n_k))
            inputs.key_padding_mask = torch.from_numpy(bias).to(dtype)
    elif case.mask:
        lead = case.lead if rng.random() < 0.5 else ()
        allowed = rng.random((*lead, n_q, n_k)) < rng.choice([0.05, 0.5, 0.9])
        inputs.attn_mask = torch.from_numpy(allowed)
        if case.mask == "bias":
            low = -np.inf if rng.random() < 0.5 else float(torch.finfo(dtype).min)
            if low > -np.inf:  # in a row full of it, it depends on the precision what is added up
                allowed[..., :1] = True
            bias = np.where(allowed, rng.standard_normal(allowed.shape), low)
            inputs.attn_mask = torch.from_numpy(bias).to(dtype)
