"""Streams and packed causal sequences, in one run.

    python -m bench.streaming

1. A decoding step (append a token, query it) after 1,000 to 1,000,000 tokens, beside SDPA over a
   cache of 256 tokens: its time does not depend on the number of tokens. Every 16th step takes
   longer: it adds the last tokens to the table. So the average of 16 steps is what counts.
2. A million tokens appended and queried in blocks of 1,000, and the size of the state.
3. 256 causal sequences of 1,000 tokens in one packed call, forward and backward, beside SDPA with
   queries and keys padded to the width of the values.

Eight heads, values of width 64, float32. Times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import boltzattn
import torch
import torch.nn.functional as F
from torch import Tensor

HEADS, DV = 8, 64
BLOCK = 1_000
ROUND, ROUNDS = 16, 200  # steps in a round, one of which folds; rounds, in turn with those of SDPA
QUERY_SPREAD = 1.7


def seconds(run: Callable[[], Any], times: int) -> float:
    """The median of several calls, after one that is not counted."""
    run()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def tokens(n: int, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    query = (QUERY_SPREAD * torch.randn(HEADS, n, 1)).clamp(-bound, bound)
    return query, torch.randn(HEADS, n, 1), torch.randn(HEADS, n, DV)


def each(run: Callable[[int], Any]) -> list[float]:
    """Microseconds of each call of a round."""
    taken = []
    for i in range(ROUND):
        start = time.perf_counter()
        run(i)
        taken.append(1e6 * (time.perf_counter() - start))
    return taken


@torch.no_grad()
def steps(largest: int, bound: float) -> None:
    cache = [torch.randn(1, HEADS, length, DV) for length in (1, 256, 256)]
    stream = boltzattn.StreamingAttention(HEADS, DV, query_bound=bound)
    query, key, value = (x.split(1, 1) for x in tokens(ROUND, bound))
    appended = 0
    print("a decoding step of 8 heads, microseconds")
    print("                           average   most steps   each 16th   SDPA over 256 tokens")
    while appended < largest:
        block = tokens(BLOCK, bound)
        stream.append(*block[1:])
        appended += BLOCK
        if appended in (1_000, 10_000, 100_000, 1_000_000):
            ours, theirs = [], []
            for _ in range(ROUNDS):
                ours.append(each(lambda i: stream.step(query[i], key[i], value[i])))
                theirs.append(each(lambda i: F.scaled_dot_product_attention(*cache)))
            average, dense = (
                statistics.median(statistics.mean(one) for one in rounds[1:])
                for rounds in (ours, theirs)
            )
            most = statistics.median(x for one in ours[1:] for x in one)
            slow = statistics.median(max(one) for one in ours[1:])
            print(
                f"  after {appended:9,} tokens {average:10.1f} {most:12.1f} {slow:11.1f} "
                f"{dense:22.1f}"
            )


@torch.no_grad()
def blocks(total: int, bound: float) -> None:
    stream = boltzattn.StreamingAttention(HEADS, DV, query_bound=bound)
    query, key, value = tokens(BLOCK, bound)
    start = time.perf_counter()
    for _ in range(total // BLOCK):
        stream.append(key, value)
        stream.query(query)
    taken = time.perf_counter() - start
    state = sum(
        x.numel() * x.element_size() for x in stream.state_dict().values() if isinstance(x, Tensor)
    )
    print(
        f"{total:,} tokens appended and queried in blocks of {BLOCK:,}: {taken:.2f} s, "
        f"state {state / HEADS / 1e3:.1f} kB a head"
    )


def packed(sequences: int, length: int) -> None:
    n = sequences * length
    query, key, value, grad = (torch.randn(n, HEADS, width) for width in (1, 1, DV, DV))
    leaves = [x.requires_grad_() for x in (QUERY_SPREAD * query, key, value)]
    starts = torch.arange(0, n + 1, length, dtype=torch.int32)

    def ours() -> None:
        out = boltzattn.attention_varlen(*leaves, starts, starts, scale=1.0, is_causal=True)
        torch.autograd.grad(out, leaves, grad)

    def rows(x: Tensor) -> Tensor:
        x = x.detach().view(sequences, length, HEADS, -1).transpose(1, 2)
        return F.pad(x, (0, DV - x.shape[-1])).contiguous().requires_grad_()

    dense, dense_grad = [rows(x) for x in leaves], rows(grad).detach()

    def theirs() -> None:
        out = F.scaled_dot_product_attention(*dense, is_causal=True, scale=1.0)
        torch.autograd.grad(out, dense, dense_grad)

    fast, slow = seconds(ours, 3), seconds(theirs, 3)
    print(
        f"{sequences} causal sequences of {length:,}, forward + backward: {fast:.2f} s, "
        f"SDPA {slow:.2f} s, {slow / fast:.1f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--sequences", type=int, default=256)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bound = 4 * QUERY_SPREAD
    steps(arguments.tokens, bound)
    blocks(arguments.tokens, bound)
    packed(arguments.sequences, BLOCK)


if __name__ == "__main__":
    main()
