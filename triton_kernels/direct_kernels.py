"""The kernels of `direct`: programs over blocks of pairs of queries and keys.

A program owns a block of query rows (forward, dq) or of keys (dk, dv) and up to 128 columns of the
values, and streams the other side past them. There are no atomics. Scores are outer products in
fp32: a rank is too short for a matrix unit. They are held as [keys, queries], because Triton then
gives a thread one query and all keys of a block, and sums over keys stay inside the thread. Wider
values take several programs that share nothing: the gradients of queries, keys and whatever is
added to scores are linear in the columns, and the shares are added at the end.

Gaussian scores and their gradients are computed from differences q - k, one column of the rank
after the other: in products of queries with keys, an offset that they share would leave nothing but
rounding.

What a mask hides does not count, whatever it holds. Keys that key_mask hides are read as zeros. A
pair that is_causal or attn_mask hides has weight 0, but 0 * NaN is NaN. So a program whose results
are not finite computes them again, in small blocks and with care: without what is hidden. Calls
without these masks are compiled without it.

`served` [heads] marks the heads that the transform has computed, which these kernels leave alone:
the host need not know which they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from boltzattn.triton_kernels.heads import (
    head_of,
    inside,
    load_column,
    load_matrix,
    load_vector,
    span_of,
    start_of,
    store_matrix,
    transposed,
)

RANK_TILE = tl.constexpr(16)  # columns of dq and dk in a matrix product
NO_ROW = tl.constexpr(2.0**126)  # lse of rows past the end: it leaves them no weight


class Sizes(NamedTuple):
    total: int  # as in Lead
    middle: int
    inner: int
    n_q: int
    n_k: int
    dv: int
    scale: float


class Dropout(NamedTuple):
    pointer: Any  # of the seeds, as in Strided
    outer: int
    middle: int
    inner: int
    dropped_below: int  # a draw of 32 bits
    kept_factor: float


@triton.jit
def program_of(sizes, n, BLOCK: tl.constexpr):
    """(head, first row or key) of this program, where blocks of BLOCK share out n.

    Its columns are for after the kernel may have returned: before, they would cost a spill.
    """
    blocks = tl.cdiv(n, BLOCK)
    return head_of(tl.program_id(0) // blocks, sizes), tl.program_id(0) % blocks * BLOCK


@triton.jit
def mix32(x):
    """A bijective 32-bit hash."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def dropout_factor(dropout, head, rows, keys):
    """What a block of weights is multiplied by; the same bits as reference.dropout_keep."""
    number = tl.load(start_of(dropout, head)).to(tl.uint64)
    low, high = (number & 0xFFFFFFFF).to(tl.uint32), (number >> 32).to(tl.uint32)
    row, key = rows.first + rows.local, keys.first + keys.local
    line = mix32(mix32(low ^ mix32(high)) + row.to(tl.uint32) * 0x27D4EB2F)
    draw = mix32(line[None, :] ^ (key.to(tl.uint32) * 0x9E3779B1)[:, None])
    return tl.where(draw.to(tl.int64) >= dropout.dropped_below, dropout.kept_factor, 0.0)


@triton.jit
def distances(rows, keys):
    """|i - j| of a block of pairs, [BLOCK_K, BLOCK_Q]; exact for 2^24 tokens."""
    gap = (rows.first - keys.first) + rows.local[None, :] - keys.local[:, None]
    return tl.abs(gap).to(tl.float32)


@triton.jit
def distance_bias(slopes, head, rows, keys):
    """-slope |i - j|, rounded once: the slope is the sum of two fp32 numbers."""
    slope = -tl.load(start_of(slopes, head))
    high = slope.to(tl.float32)
    low = (slope - high.to(tl.float64)).to(tl.float32)
    distance = distances(rows, keys)
    return tl.fma(distance, high, distance * low)


@triton.jit
def masked_scores(
    query,
    key,
    attn_mask,
    key_mask,
    slopes,
    scale,
    head,
    rows,
    keys,
    IS_CAUSAL: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    RANK: tl.constexpr,
):
    """Logits [BLOCK_K, BLOCK_Q] of a block of pairs, -inf where a query may not attend; and the
    pairs where it may.

    Forward and backward share it, so that weights are rebuilt from the very same numbers. The loop
    over ranks is a loop: unrolled, it would hold all columns in registers.
    """
    if GAUSSIAN:
        gap = load_column(query, head, rows, 0)[None, :] - load_column(key, head, keys, 0)[:, None]
        score = gap * gap
        for r in range(1, RANK):
            q, k = load_column(query, head, rows, r), load_column(key, head, keys, r)
            gap = q[None, :] - k[:, None]
            score += gap * gap  # not fused: keys at the same distance stay ties
        score *= -0.5 * scale
    else:
        q = load_column(query, head, rows, 0) * scale
        score = load_column(key, head, keys, 0)[:, None] * q[None, :]
        for r in range(1, RANK):
            q = load_column(query, head, rows, r) * scale
            score = tl.fma(load_column(key, head, keys, r)[:, None], q[None, :], score)
    if slopes is not None:
        score += distance_bias(slopes, head, rows, keys)
    allowed = inside(keys)[:, None]
    if IS_CAUSAL:
        allowed = allowed & (keys.local[:, None] <= (rows.first - keys.first) + rows.local[None, :])
    if key_mask is not None:
        mask = load_vector(key_mask, head, keys)
        if mask.dtype == tl.uint8:
            allowed = allowed & (mask == 0)[:, None]
        else:
            bias = mask.to(tl.float32)[:, None]
            score += bias
            allowed = allowed & (bias != float("-inf"))
    if attn_mask is not None:
        mask = load_matrix(transposed(attn_mask), head, keys, rows)
        if mask.dtype == tl.uint8:
            allowed = allowed & (mask != 0)
        else:
            score += mask.to(tl.float32)
            allowed = allowed & (mask.to(tl.float32) != float("-inf"))
    return tl.where(allowed, score, float("-inf")), allowed


@triton.jit
def without_hidden(x, key_mask, head, keys):
    """A block [BLOCK_K] or [BLOCK_K, columns] with zeros for the keys that key_mask hides: they may
    hold NaN."""
    if key_mask is not None:
        mask = load_vector(key_mask, head, keys)
        hidden = mask != 0 if mask.dtype == tl.uint8 else mask.to(tl.float32) == float("-inf")
        if len(x.shape) == 2:
            hidden = hidden[:, None]
        x = tl.where(hidden, 0.0, x)
    return x


@triton.jit
def not_finite(x):
    """Whether a vector holds NaN or infinity."""
    return tl.max((x * 0.0 != 0.0).to(tl.int32)) != 0


@triton.jit
def add_product(
    acc,
    weight,
    x,
    span,
    visible,
    AXIS: tl.constexpr,
    PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """acc plus the product of x [s, columns], the rows `span` of a matrix, with weights [s, t] or,
    for AXIS 1, [t, s]; a tile [columns, t] or [t, columns]. With CAREFUL only pairs that are
    visible count: rows of x are added one after the other."""
    if CAREFUL:
        # Not simply as many as x has rows: unrolled, the loop would take too many registers.
        for s in range(tl.minimum(x.shape[0], span.size - span.first)):
            here = tl.arange(0, x.shape[0]) == s
            y = tl.sum(tl.where(here[:, None], x.to(tl.float32), 0.0), 0)
            chosen = tl.expand_dims(here, 1 - AXIS)
            w = tl.sum(tl.where(chosen, weight, 0.0), AXIS)
            seen = tl.max((visible & chosen).to(tl.int32), AXIS) != 0
            terms = tl.expand_dims(y, 1 - AXIS) * tl.expand_dims(w, AXIS)
            acc += tl.where(tl.expand_dims(seen, AXIS), terms, 0.0)
    elif AXIS == 0:
        acc = tl.dot(tl.trans(x), weight.to(x.dtype), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(weight.to(x.dtype), x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def weight_gradients(value, grad_out, head, keys, rows, columns):
    """Products of values and gradients of out, [BLOCK_K, BLOCK_Q], where registers are few."""
    product = tl.zeros([keys.local.shape[0], rows.local.shape[0]], tl.float32)
    for c in range(columns.first, tl.minimum(columns.first + columns.local.shape[0], columns.size)):
        v, g = load_column(value, head, keys, c), load_column(grad_out, head, rows, c)
        product += v[:, None] * g[None, :]
    return product


@triton.jit
def pulls(grad_score, visible, query, key, head, rows, keys, r):
    """grad_score times q - k in column r of the rank: terms of Gaussian gradients, up to the scale.

    A weight of 0 times NaN is NaN, so hidden pairs are left out.
    """
    q, k = load_column(query, head, rows, r), load_column(key, head, keys, r)
    return tl.where(visible, grad_score * (q[None, :] - k[:, None]), 0.0)


@triton.jit
def forward_rows(
    query,
    key,
    value,
    attn_mask,
    key_mask,
    slopes,
    dropout,
    sizes,
    out,
    lse,
    head,
    row,
    IS_CAUSAL: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """out and lse of a block of rows. True if they are not finite and are to be computed again
    with care."""
    columns = span_of(tl.program_id(1) * BLOCK_DV, sizes.dv, BLOCK_DV)
    rows = span_of(row, sizes.n_q, BLOCK_Q)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float64)  # long rows outgrow fp32
    acc = tl.zeros([BLOCK_DV, BLOCK_Q], tl.float32)
    end = tl.minimum(sizes.n_k, row + BLOCK_Q) if IS_CAUSAL else sizes.n_k
    for first_key in range(0, end, BLOCK_K):
        keys = span_of(first_key, sizes.n_k, BLOCK_K)
        v = without_hidden(load_matrix(value, head, keys, columns).to(DOT), key_mask, head, keys)
        score, visible = masked_scores(
            query,
            key,
            attn_mask,
            key_mask,
            slopes,
            sizes.scale,
            head,
            rows,
            keys,
            IS_CAUSAL,
            GAUSSIAN,
            RANK,
        )
        higher = tl.maximum(top, tl.max(score, 0))
        # A row that has met no finite logit is measured from 0: exp(-inf - 0) is 0.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - reference[None, :])
        shrink = tl.exp(top - reference)
        total = total * shrink.to(tl.float64) + tl.sum(weight, 0).to(tl.float64)
        if dropout is not None:
            weight *= dropout_factor(dropout, head, rows, keys)
        acc *= shrink[None, :]
        acc = add_product(acc, weight, v, keys, visible, 0, PRECISION, CAREFUL)
        top = higher
    normaliser = tl.where(total == 0.0, 0.0, 1.0 / total).to(tl.float32)
    line = head.number * sizes.n_q
    store_matrix(out + line * sizes.dv, tl.trans(acc * normaliser[None, :]), rows, columns)
    if tl.program_id(1) == 0:
        tl.store(lse + line + row + rows.local, top.to(tl.float64) + tl.log(total), inside(rows))
    spoilt = False
    if (IS_CAUSAL or attn_mask is not None) and not CAREFUL:
        spoilt = not_finite(tl.sum(acc, 0))
    return spoilt


@triton.jit
def direct_forward_kernel(
    query,
    key,
    value,
    attn_mask,
    key_mask,
    slopes,
    dropout,
    served,
    sizes,
    out,  # [heads, n_q, dv], written
    lse,  # [heads, n_q] fp64, written
    IS_CAUSAL: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_CAREFUL: tl.constexpr,
):
    head, row = program_of(sizes, sizes.n_q, BLOCK_Q)
    if served is not None:
        if tl.load(served + head.number) != 0:
            return
    spoilt = forward_rows(
        query,
        key,
        value,
        attn_mask,
        key_mask,
        slopes,
        dropout,
        sizes,
        out,
        lse,
        head,
        row,
        IS_CAUSAL,
        GAUSSIAN,
        RANK,
        BLOCK_Q,
        BLOCK_K,
        BLOCK_DV,
        DOT,
        PRECISION,
        False,
    )
    if IS_CAUSAL or attn_mask is not None:
        if spoilt:
            tl.debug_barrier()  # the same numbers are stored again, by other threads
            end = tl.minimum(row + BLOCK_Q, sizes.n_q)
            for first in range(row, end, BLOCK_CAREFUL):
                forward_rows(
                    query,
                    key,
                    value,
                    attn_mask,
                    key_mask,
                    slopes,
                    dropout,
                    sizes,
                    out,
                    lse,
                    head,
                    first,
                    IS_CAUSAL,
                    GAUSSIAN,
                    RANK,
                    BLOCK_CAREFUL,
                    BLOCK_CAREFUL,
                    BLOCK_DV,
                    DOT,
                    PRECISION,
                    True,
                )


@triton.jit
def rebuilt_weights(score, lse):
    """exp(score - lse) from the fp64 lse, whose digits do not fit into one fp32."""
    lse = tl.where(lse == float("-inf"), 0.0, lse)  # an empty row: all its scores are -inf
    high = lse.to(tl.float32)
    low = (lse - high.to(tl.float64)).to(tl.float32)
    return tl.exp((score - high[None, :]) - low[None, :])


@triton.jit
def gradients_of_queries(
    query,
    key,
    value,
    attn_mask,
    key_mask,
    slopes,
    dropout,
    sizes,
    grad_out,
    grad_lse,
    out,
    lse,
    delta,
    grad_query,
    head,
    row,
    IS_CAUSAL: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """The share of a block of rows in the gradient of the slope; and True if gradients are not
    finite and remain to be computed with care. Else those of the queries are stored."""
    columns = span_of(tl.program_id(1) * BLOCK_DV, sizes.dv, BLOCK_DV)
    rows, ranks = span_of(row, sizes.n_q, BLOCK_Q), span_of(0, RANK, RANK_TILE)
    share = (tl.program_id(1).to(tl.int64) * sizes.total + head.number) * sizes.n_q

    g = load_matrix(grad_out, head, rows, columns).to(DOT)
    o = load_matrix(out, head, rows, columns)
    shift = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    if grad_lse is not None:
        if tl.program_id(1) == 0:
            shift -= load_vector(grad_lse, head, rows).to(tl.float32)
    if not CAREFUL:
        tl.store(delta + share + row + rows.local, shift, inside(rows))
    lse += head.number * sizes.n_q
    row_lse = tl.load(lse + row + rows.local, inside(rows), other=NO_ROW)
    to_slope = tl.zeros([BLOCK_Q], tl.float64)
    acc = tl.zeros([RANK_TILE, BLOCK_Q], tl.float32)
    end = tl.minimum(sizes.n_k, row + BLOCK_Q) if IS_CAUSAL else sizes.n_k
    for first_key in range(0, end, BLOCK_K):
        keys = span_of(first_key, sizes.n_k, BLOCK_K)
        v = without_hidden(load_matrix(value, head, keys, columns).to(DOT), key_mask, head, keys)
        score, visible = masked_scores(
            query,
            key,
            attn_mask,
            key_mask,
            slopes,
            sizes.scale,
            head,
            rows,
            keys,
            IS_CAUSAL,
            GAUSSIAN,
            RANK,
        )
        weight = rebuilt_weights(score, row_lse)
        if CAREFUL:
            grad_weight = weight_gradients(value, grad_out, head, keys, rows, columns)
        else:
            grad_weight = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        if dropout is not None:
            grad_weight *= dropout_factor(dropout, head, rows, keys)
        grad_score = weight * (grad_weight - shift[None, :])
        if CAREFUL:
            grad_score = tl.where(visible, grad_score, 0.0)
        if slopes is not None:
            to_slope -= tl.sum(grad_score * distances(rows, keys), 0).to(tl.float64)
        if GAUSSIAN:
            for r in range(RANK):
                pulled = pulls(grad_score, visible, query, key, head, rows, keys, r)
                acc -= tl.where(ranks.local[:, None] == r, tl.sum(pulled, 0)[None, :], 0.0)
        else:
            k = load_matrix(key, head, keys, ranks).to(tl.float32)
            k = without_hidden(k, key_mask, head, keys)
            acc = add_product(acc, grad_score, k, keys, visible, 0, PRECISION, CAREFUL)
    store_matrix(grad_query + share * RANK, tl.trans(acc * sizes.scale), rows, ranks)
    spoilt = False
    if (IS_CAUSAL or attn_mask is not None) and not CAREFUL:
        spoilt = not_finite(tl.sum(acc, 0) + to_slope)
    return tl.sum(to_slope, 0), spoilt


@triton.jit
def direct_query_gradient_kernel(
    query,
    key,
    value,
    attn_mask,
    key_mask,
    slopes,
    dropout,
    served,
    sizes,
    grad_out,
    grad_lse,
    out,
    lse,  # [heads, n_q] fp64
    delta,  # [column blocks, heads, n_q] fp32, written: grad_out . out - grad_lse
    grad_query,  # [column blocks, heads, n_q, RANK] fp32, written
    grad_slopes,  # [column blocks, heads, row blocks] fp64, written; None without slopes
    IS_CAUSAL: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_CAREFUL: tl.constexpr,
):
    head, row = program_of(sizes, sizes.n_q, BLOCK_Q)
    if served is not None:
        if tl.load(served + head.number) != 0:
            return
    to_slope, spoilt = gradients_of_queries(
        query,
        key,
        value,
        attn_mask,
        key_mask,
        slopes,
        dropout,
        sizes,
        grad_out,
        grad_lse,
        out,
        lse,
        delta,
        grad_query,
        head,
        row,
        IS_CAUSAL,
        GAUSSIAN,
        RANK,
        BLOCK_Q,
        BLOCK_K,
        BLOCK_DV,
        DOT,
        PRECISION,
        False,
    )
    if IS_CAUSAL or attn_mask is not None:
        if spoilt:
            tl.debug_barrier()  # the same numbers are stored again, by other threads
            to_slope = tl.zeros_like(to_slope)
            end = tl.minimum(row + BLOCK_Q, sizes.n_q)
            for first in range(row, end, BLOCK_CAREFUL):
                of_rows, _ = gradients_of_queries(
                    query,
                    key,
                    value,
                    attn_mask,
                    key_mask,
                    slopes,
                    dropout,
                    sizes,
                    grad_out,
                    grad_lse,
                    out,
                    lse,
                    delta,
                    grad_query,
                    head,
                    first,
                    IS_CAUSAL,
                    GAUSSIAN,
                    RANK,
                    BLOCK_CAREFUL,
                    BLOCK_CAREFUL,
                    BLOCK_DV,
                    DOT,
                    PRECISION,
                    True,
                )
                to_slope += of_rows
    if slopes is not None:
        blocks = tl.cdiv(sizes.n_q, BLOCK_Q)
        first = tl.program_id(1).to(tl.int64) * sizes.total * blocks
        tl.store(grad_slopes + first + tl.program_id(0), to_slope)


@triton.jit
def gradients_of_keys(
    query,
    key,
    value,
    attn_mask,
    key_mask,
    slopes,
    dropout,
    sizes,
    grad_out,
    lse,
    delta,
    grad_key,
    grad_value,
    grad_bias,
    head,
    first_key,
    IS_CAUSAL: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Gradients of a block of keys, their values and biases. True if they are not finite and remain
    to be computed with care; else they are stored."""
    columns = span_of(tl.program_id(1) * BLOCK_DV, sizes.dv, BLOCK_DV)
    keys, ranks = span_of(first_key, sizes.n_k, BLOCK_K), span_of(0, RANK, RANK_TILE)
    share = tl.program_id(1).to(tl.int64) * sizes.total + head.number
    lse += head.number * sizes.n_q
    delta += share * sizes.n_q

    v = without_hidden(load_matrix(value, head, keys, columns).to(DOT), key_mask, head, keys)
    to_key = tl.zeros([BLOCK_K, RANK_TILE], tl.float32)
    to_value = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    to_bias = tl.zeros([BLOCK_K], tl.float32)
    for row in range(first_key // BLOCK_Q * BLOCK_Q if IS_CAUSAL else 0, sizes.n_q, BLOCK_Q):
        rows = span_of(row, sizes.n_q, BLOCK_Q)
        g = load_matrix(grad_out, head, rows, columns).to(DOT)
        score, visible = masked_scores(
            query,
            key,
            attn_mask,
            key_mask,
            slopes,
            sizes.scale,
            head,
            rows,
            keys,
            IS_CAUSAL,
            GAUSSIAN,
            RANK,
        )
        row_lse = tl.load(lse + row + rows.local, inside(rows), other=NO_ROW)
        weight = rebuilt_weights(score, row_lse)
        shift = tl.load(delta + row + rows.local, inside(rows), other=0.0)
        if CAREFUL:
            grad_weight = weight_gradients(value, grad_out, head, keys, rows, columns)
        else:
            grad_weight = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        kept = weight
        if dropout is not None:
            factor = dropout_factor(dropout, head, rows, keys)
            grad_weight *= factor
            kept *= factor
        grad_score = weight * (grad_weight - shift[None, :])
        if CAREFUL:
            visible = visible & inside(rows)[None, :]  # a row past the end sees a key of NaN
            grad_score = tl.where(visible, grad_score, 0.0)
        to_value = add_product(to_value, kept, g, rows, visible, 1, PRECISION, CAREFUL)
        if grad_bias is not None:
            to_bias += tl.sum(grad_score, 1)
        if GAUSSIAN:
            for r in range(RANK):
                pulled = pulls(grad_score, visible, query, key, head, rows, keys, r)
                to_key += tl.where(ranks.local[None, :] == r, tl.sum(pulled, 1)[:, None], 0.0)
        else:
            q = load_matrix(query, head, rows, ranks).to(tl.float32)
            to_key = add_product(to_key, grad_score, q, rows, visible, 1, PRECISION, CAREFUL)
    to_value = without_hidden(to_value, key_mask, head, keys)
    to_key = without_hidden(to_key, key_mask, head, keys)
    store_matrix(grad_value + head.number * sizes.n_k * sizes.dv, to_value, keys, columns)
    store_matrix(grad_key + share * sizes.n_k * RANK, to_key * sizes.scale, keys, ranks)
    if grad_bias is not None:
        to_bias = without_hidden(to_bias, key_mask, head, keys)
        line = grad_bias + share * sizes.n_k + first_key
        tl.store(line + keys.local, to_bias, inside(keys))
    spoilt = False
    if (IS_CAUSAL or attn_mask is not None) and not CAREFUL:
        spoilt = not_finite(tl.sum(to_key, 1) + tl.sum(to_value, 1) + to_bias)
    return spoilt


@triton.jit
def direct_key_gradient_kernel(
    query,
    key,
    value,
    attn_mask,
    key_mask,
    slopes,
    dropout,
    served,
    sizes,
    grad_out,
    lse,  # [heads, n_q] fp64
    delta,  # [column blocks, heads, n_q] fp32
    grad_key,  # [column blocks, heads, n_k, RANK] fp32, written
    grad_value,  # [heads, n_k, dv], written
    grad_bias,  # [column blocks, heads, n_k] fp32, written; None without a floating key_mask
    IS_CAUSAL: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_CAREFUL: tl.constexpr,
):
    head, first_key = program_of(sizes, sizes.n_k, BLOCK_K)
    if served is not None:
        if tl.load(served + head.number) != 0:
            return
    spoilt = gradients_of_keys(
        query,
        key,
        value,
        attn_mask,
        key_mask,
        slopes,
        dropout,
        sizes,
        grad_out,
        lse,
        delta,
        grad_key,
        grad_value,
        grad_bias,
        head,
        first_key,
        IS_CAUSAL,
        GAUSSIAN,
        RANK,
        BLOCK_Q,
        BLOCK_K,
        BLOCK_DV,
        DOT,
        PRECISION,
        False,
    )
    if IS_CAUSAL or attn_mask is not None:
        if spoilt:
            tl.debug_barrier()  # the same numbers are stored again, by other threads
            end = tl.minimum(first_key + BLOCK_K, sizes.n_k)
            for first in range(first_key, end, BLOCK_CAREFUL):
                gradients_of_keys(
                    query,
                    key,
                    value,
                    attn_mask,
                    key_mask,
                    slopes,
                    dropout,
                    sizes,
                    grad_out,
                    lse,
                    delta,
                    grad_key,
                    grad_value,
                    grad_bias,
                    head,
                    first,
                    IS_CAUSAL,
                    GAUSSIAN,
                    RANK,
                    BLOCK_CAREFUL,
                    BLOCK_CAREFUL,
                    BLOCK_DV,
                    DOT,
                    PRECISION,
                    True,
                )
