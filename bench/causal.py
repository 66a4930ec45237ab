"""Causal attention of rank 1 beside SDPA, in one run: python -m bench.causal

Queries 1.7 times standard normal, keys and values standard normal, scale 1, so that the logits of a
row differ by up to about 50. Times are the best of several calls that allocate their results, in
milliseconds. SDPA is the faster of queries and keys as they are and padded to the width of the
values; a time marked ~ is that of n = 16,384 times the square of the lengths.

The last lines are the time that four times as many tokens take, the time with logits 185 times as
large, and the multiply-adds of a forward call over the rate of a product of matrices.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import boltzattn
import torch
import torch.nn.functional as F
from boltzattn.transform.scan_layout import make_scan_layout
from torch import Tensor

from bench.scores import DV, LARGEST_DENSE, best, both, forward

SPREAD = 1.7
CHUNK = 64  # csrc/cpu/scan/chunk.h


def inputs(n: int, batch: int = 1, heads: int = 1, spread: float = SPREAD) -> list[Tensor]:
    query, key = (torch.randn(batch, heads, n, 1) for _ in range(2))
    return [spread * query, key, torch.randn(batch, heads, n, DV)]


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return boltzattn.attention(query, key, value, is_causal=True, scale=1.0, method="transform")


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)


def padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    pad = (0, DV - 1)
    return sdpa(F.pad(query, pad), F.pad(key, pad), value)


Pass = Callable[..., Callable[[], Any]]


def row(name: str, n: int, passes: Pass, **sizes: int) -> float:
    part = inputs(min(n, LARGEST_DENSE), **sizes)
    larger = (n / part[0].shape[-2]) ** 2
    own = best(passes(ours, *inputs(n, **sizes)))
    dense = min(best(passes(one, *part)) for one in (sdpa, padded)) * larger
    mark = "~" if larger > 1 else ""
    print(f"{name:32} {n:9,} {own:9.2f} {mark + format(dense, '.0f'):>8} {dense / own:7.1f}x")
    return own


def multiply_adds(tensors: list[Tensor]) -> float:
    """Of a forward call, for each token: to the table, from it, and within a chunk."""
    query, key, _ = tensors
    extent = float(key.max() - key.min())
    layout = make_scan_layout(torch.float32, float(query.abs().max()), extent, key.shape[-2])
    assert layout is not None
    return (layout.features + layout.nodes + (CHUNK + 1) / 2) * DV


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    print(f"fp32, dv = {DV}, {threads} threads")
    print(f"{'':32} {'n':>9} {'ms':>9} {'SDPA':>8} {'ratio':>8}")
    row("forward", 4_096, forward)
    middle = row("forward", 16_384, forward)
    large = row("forward", 65_536, forward)
    row("forward, 4 x 8 heads", 4_096, forward, batch=4, heads=8)
    passes = row("forward + backward", 16_384, both)

    print(f"65,536 tokens over 16,384: {large / middle:.2f}")
    larger = best(forward(ours, *inputs(262_144)))
    print(f"262,144 tokens over 65,536: {larger / large:.2f}")
    sharp = inputs(16_384, spread=185 * SPREAD)
    print(
        f"logits times 185, n = 16,384: forward {best(forward(ours, *sharp)) / middle:.2f}, "
        f"forward + backward {best(both(ours, *sharp)) / passes:.2f}"
    )
    square = torch.randn(1024, 1024)
    rate = 1024**3 / best(lambda: square @ square)  # multiply-adds a millisecond
    adds = multiply_adds(inputs(16_384))
    print(
        f"n = 16,384: {adds:,.0f} multiply-adds a token; at {rate / 1e6:.0f} G/s, the rate of a "
        f"product of matrices, {100 * adds * 16_384 / rate / middle:.0f} % of the time"
    )


if __name__ == "__main__":
    main()
