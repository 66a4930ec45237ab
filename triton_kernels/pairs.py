"""The kernels of `direct`: programs over blocks of pairs of queries and keys.

A program owns a block of query rows (forward, dq) or of keys (dk, dv) and up to 128 columns of the
values, and streams the other side past them. There are no atomics. Scores are outer products in
fp32: a rank is too short for a matrix unit. They are held as [keys, queries], because Triton then
gives a thread one query and all keys of a block, and sums over keys stay inside the thread. Wider
values take several programs that share nothing: the gradients of queries and keys are linear in
the columns, and the shares are added at the end.

`done` [heads] marks heads that another method has computed; it is how the transform hands over
heads it cannot serve without the host knowing which.
"""

from __future__ import annotations

import triton
import triton.language as tl
from boltzattn.triton_kernels.heads import (
    head_offset,
    load_column,
    load_matrix,
    load_vector,
    store_matrix,
    transposed,
)

RANK_TILE = tl.constexpr(16)  # columns of dq and dk in a matrix product


@triton.jit
def mix32(x):
    """A bijective 32-bit hash."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def dropout_factor(dropout, head, lead, row, rows, first_key, keys):
    """What a block of weights is multiplied by; the same bits as reference.dropout_keep."""
    seed, dropped_below, kept_factor = dropout
    number = tl.load(seed[0] + head_offset(seed, head, lead)).to(tl.uint64)
    low, high = (number & 0xFFFFFFFF).to(tl.uint32), (number >> 32).to(tl.uint32)
    line = mix32(mix32(low ^ mix32(high)) + (row + rows).to(tl.uint32) * 0x27D4EB2F)
    draw = mix32(line[None, :] ^ ((first_key + keys).to(tl.uint32) * 0x9E3779B1)[:, None])
    return tl.where(draw.to(tl.int64) >= dropped_below, kept_factor, 0.0)


@triton.jit
def masked_scores(
    query,
    key,
    attn_mask,
    key_mask,
    head,
    lead,
    row,  # first of the block
    rows,  # within the block
    first_key,
    keys,
    n_q,
    n_k,
    scale,
    IS_CAUSAL: tl.constexpr,
    RANK: tl.constexpr,
):
    """Logits [BLOCK_K, BLOCK_Q] of a block of pairs, -inf where a query may not attend.

    Forward and backward share it, so that weights are rebuilt from the very same numbers. The loop
    over ranks is a loop: unrolled, it would hold all columns in registers.
    """
    q = load_column(query, head, lead, row, rows, n_q, 0) * scale
    score = load_column(key, head, lead, first_key, keys, n_k, 0)[:, None] * q[None, :]
    for r in range(1, RANK):
        q = load_column(query, head, lead, row, rows, n_q, r) * scale
        k = load_column(key, head, lead, first_key, keys, n_k, r)
        score = tl.fma(k[:, None], q[None, :], score)
    allowed = (keys < n_k - first_key)[:, None]
    if IS_CAUSAL:
        allowed = allowed & (keys[:, None] <= (row - first_key) + rows[None, :])
    if key_mask is not None:
        mask = load_vector(key_mask, head, lead, first_key, keys, n_k)
        if mask.dtype == tl.uint8:
            allowed = allowed & (mask == 0)[:, None]
        else:
            score += mask.to(tl.float32)[:, None]
    if attn_mask is not None:
        mask = load_matrix(transposed(attn_mask), head, lead, first_key, keys, n_k, row, rows, n_q)
        if mask.dtype == tl.uint8:
            allowed = allowed & (mask != 0)
        else:
            score += mask.to(tl.float32)
    return tl.where(allowed, score, float("-inf"))


@triton.jit
def forward_kernel(
    query,
    key,
    value,
    attn_mask,
    key_mask,
    dropout,
    done,
    out,  # [heads, n_q, dv]
    lse,  # [heads, n_q] fp64
    lead,
    n_q,
    n_k,
    dv,
    scale,
    IS_CAUSAL: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = tl.cdiv(n_q, BLOCK_Q)
    head = tl.program_id(0) // blocks
    if done is not None:
        if tl.load(done + head) != 0:
            return
    row = tl.program_id(0) % blocks * BLOCK_Q
    column = tl.program_id(1) * BLOCK_DV
    rows, keys, columns = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_DV)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float64)  # long rows outgrow fp32
    acc = tl.zeros([BLOCK_DV, BLOCK_Q], tl.float32)
    end = tl.minimum(n_k, row + BLOCK_Q) if IS_CAUSAL else n_k
    for first_key in range(0, end, BLOCK_K):
        v = load_matrix(value, head, lead, first_key, keys, n_k, column, columns, dv).to(DOT)
        score = masked_scores(
            query,
            key,
            attn_mask,
            key_mask,
            head,
            lead,
            row,
            rows,
            first_key,
            keys,
            n_q,
            n_k,
            scale,
            IS_CAUSAL,
            RANK,
        )
        higher = tl.maximum(top, tl.max(score, 0))
        # A row that has met no finite logit is measured from 0: exp(-inf - 0) is 0.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - reference[None, :])
        shrink = tl.exp(top - reference)
        total = total * shrink.to(tl.float64) + tl.sum(weight, 0).to(tl.float64)
        if dropout is not None:
            weight *= dropout_factor(dropout, head, lead, row, rows, first_key, keys)
        acc *= shrink[None, :]
        acc = tl.dot(tl.trans(v), weight.to(DOT), acc, input_precision=PRECISION)
        top = higher

    normaliser = tl.where(total == 0.0, 0.0, 1.0 / total).to(tl.float32)
    line = head.to(tl.int64) * n_q
    store_matrix(
        out + line * dv, tl.trans(acc * normaliser[None, :]), row, rows, n_q, column, columns, dv
    )
    if tl.program_id(1) == 0:
        tl.store(lse + line + row + rows, top.to(tl.float64) + tl.log(total), rows < n_q - row)


@triton.jit
def rebuilt_weights(score, lse):
    """exp(score - lse) from the fp64 lse, whose digits do not fit into one fp32."""
    lse = tl.where(lse == float("-inf"), 0.0, lse)  # an empty row: all its scores are -inf
    high = lse.to(tl.float32)
    low = (lse - high.to(tl.float64)).to(tl.float32)
    return tl.exp((score - high[None, :]) - low[None, :])


@triton.jit
def query_gradient_kernel(
    grad_out,
    grad_lse,
    query,
    key,
    value,
    attn_mask,
    key_mask,
    dropout,
    done,
    out,
    lse,  # [heads, n_q] fp64
    delta,  # [column blocks, heads, n_q] fp32, written: grad_out . out - grad_lse
    grad_query,  # [column blocks, heads, n_q, RANK] fp32, written
    lead,
    n_q,
    n_k,
    dv,
    scale,
    IS_CAUSAL: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = tl.cdiv(n_q, BLOCK_Q)
    head = tl.program_id(0) // blocks
    if done is not None:
        if tl.load(done + head) != 0:
            return
    row = tl.program_id(0) % blocks * BLOCK_Q
    column = tl.program_id(1) * BLOCK_DV
    rows, keys, columns = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_DV)
    ranks = tl.arange(0, RANK_TILE)
    share = (tl.program_id(1).to(tl.int64) * lead[0] + head) * n_q

    g = load_matrix(grad_out, head, lead, row, rows, n_q, column, columns, dv).to(DOT)
    o = load_matrix(out, head, lead, row, rows, n_q, column, columns, dv)
    shift = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    if grad_lse is not None:
        if tl.program_id(1) == 0:
            shift -= load_vector(grad_lse, head, lead, row, rows, n_q).to(tl.float32)
    tl.store(delta + share + row + rows, shift, rows < n_q - row)
    row_lse = tl.load(lse + head.to(tl.int64) * n_q + row + rows, rows < n_q - row, other=0.0)
    acc = tl.zeros([RANK_TILE, BLOCK_Q], tl.float32)
    end = tl.minimum(n_k, row + BLOCK_Q) if IS_CAUSAL else n_k
    for first_key in range(0, end, BLOCK_K):
        v = load_matrix(value, head, lead, first_key, keys, n_k, column, columns, dv).to(DOT)
        score = masked_scores(
            query,
            key,
            attn_mask,
            key_mask,
            head,
            lead,
            row,
            rows,
            first_key,
            keys,
            n_q,
            n_k,
            scale,
            IS_CAUSAL,
            RANK,
        )
        weight = rebuilt_weights(score, row_lse)
        grad_weight = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        if dropout is not None:
            grad_weight *= dropout_factor(dropout, head, lead, row, rows, first_key, keys)
        grad_score = weight * (grad_weight - shift[None, :])
        k_tile = load_matrix(key, head, lead, first_key, keys, n_k, 0, ranks, RANK).to(tl.float32)
        acc = tl.dot(tl.trans(k_tile), grad_score, acc, input_precision=PRECISION)
    store_matrix(grad_query + share * RANK, tl.trans(acc * scale), row, rows, n_q, 0, ranks, RANK)


@triton.jit
def key_gradient_kernel(
    grad_out,
    query,
    key,
    value,
    attn_mask,
    key_mask,
    dropout,
    done,
    lse,  # [heads, n_q] fp64
    delta,  # [column blocks, heads, n_q] fp32
    grad_key,  # [column blocks, heads, n_k, RANK] fp32, written
    grad_value,  # [heads, n_k, dv], written
    lead,
    n_q,
    n_k,
    dv,
    scale,
    IS_CAUSAL: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = tl.cdiv(n_k, BLOCK_K)
    head = tl.program_id(0) // blocks
    if done is not None:
        if tl.load(done + head) != 0:
            return
    first_key = tl.program_id(0) % blocks * BLOCK_K
    column = tl.program_id(1) * BLOCK_DV
    rows, keys, columns = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_DV)
    ranks = tl.arange(0, RANK_TILE)
    share = tl.program_id(1).to(tl.int64) * lead[0] + head
    lse += head.to(tl.int64) * n_q
    delta += share * n_q

    v = load_matrix(value, head, lead, first_key, keys, n_k, column, columns, dv).to(DOT)
    to_key = tl.zeros([BLOCK_K, RANK_TILE], tl.float32)
    to_value = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    for row in range(first_key // BLOCK_Q * BLOCK_Q if IS_CAUSAL else 0, n_q, BLOCK_Q):
        g = load_matrix(grad_out, head, lead, row, rows, n_q, column, columns, dv).to(DOT)
        score = masked_scores(
            query,
            key,
            attn_mask,
            key_mask,
            head,
            lead,
            row,
            rows,
            first_key,
            keys,
            n_q,
            n_k,
            scale,
            IS_CAUSAL,
            RANK,
        )
        # Rows past the end have weights, but neither a gradient nor a delta.
        weight = rebuilt_weights(score, tl.load(lse + row + rows, rows < n_q - row, other=0.0))
        shift = tl.load(delta + row + rows, rows < n_q - row, other=0.0)
        grad_weight = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        kept = weight
        if dropout is not None:
            factor = dropout_factor(dropout, head, lead, row, rows, first_key, keys)
            grad_weight *= factor
            kept *= factor
        grad_score = weight * (grad_weight - shift[None, :])
        to_value = tl.dot(kept.to(DOT), g, to_value, input_precision=PRECISION)
        q_tile = load_matrix(query, head, lead, row, rows, n_q, 0, ranks, RANK).to(tl.float32)
        to_key = tl.dot(grad_score, q_tile, to_key, input_precision=PRECISION)
    store_matrix(
        grad_value + head.to(tl.int64) * n_k * dv,
        to_value,
        first_key,
        keys,
        n_k,
        column,
        columns,
        dv,
    )
    store_matrix(
        grad_key + share * n_k * RANK, to_key * scale, first_key, keys, n_k, 0, ranks, RANK
    )
