"""Ranks 1 to 4: the transform, `direct`, what `auto` takes, and SDPA.

    python -m bench.ranks                        # n = 256 to 16,384
    python -m bench.ranks --sizes 65536 1048576  # quadratic methods are extrapolated beyond 16,384
    python -m bench.ranks --causal --backward --sizes 16384 --ranks 2 --products 5 20

Times are the best of several calls that allocate their results, in milliseconds. B is the larger
2 max|q_a| max|k_a| of the axes, queries scaled; t3 is Student's t with 3 degrees of freedom,
unscaled. SDPA is the faster of queries and keys as they are and padded to the width of the values.
A time marked ~ is extrapolated by n^2. `regret` is the time of `auto` over that of the faster of
transform and direct. `clone` is the time of `auto` over that of `value.clone()`, with fresh pages
for the results of both.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import boltzattn
import torch
import torch.nn.functional as F
from boltzattn.dispatch.extension import extension
from torch import Tensor

from bench.measure import settle_allocator
from bench.scores import DV, LARGEST_DENSE, best, both, forward

STUDENT = math.inf  # in the place of B
PRODUCTS = {
    1: (1.0, 20.0, 200.0),
    2: (1.0, 5.0, 20.0, 50.0, 100.0, 200.0, STUDENT),
    3: (1.0, 5.0, 10.0, 50.0, 200.0, STUDENT),
    4: (1.0, 2.0, 20.0, 200.0, STUDENT),
}
FOREVER = 2e9  # nanoseconds: transforms that are estimated to take longer are not timed


class Row(NamedTuple):
    """Milliseconds; infinite for what was not timed."""

    rank: int
    n: int
    product: float
    transform: float
    direct: float
    auto: float
    sdpa: float
    clone: float
    extrapolated: bool

    @property
    def regret(self) -> float:
        return self.auto / min(self.transform, self.direct)

    def __str__(self) -> str:
        name = "t3" if self.product == STUDENT else f"{self.product:g}"
        mark = "~" if self.extrapolated else ""
        return (
            f"{self.rank:4} {self.n:9,} {name:>6} {self.transform:10.2f}"
            f" {mark + f'{self.direct:.2f}':>10} {self.auto:10.2f} {mark + f'{self.sdpa:.2f}':>10}"
            f" {self.sdpa / self.auto:10.1f}x {self.regret:7.2f} {self.auto / self.clone:6.1f}x"
        )


HEADER = (
    f"{'rank':>4} {'n':>9} {'B':>6} {'transform':>10} {'direct':>10} {'auto':>10} {'SDPA':>10}"
    f" {'SDPA / auto':>11} {'regret':>7} {'clone':>7}"
)


def problem(n: int, rank: int, product: float) -> list[Tensor]:
    """Normal tokens with this B, or Student's t."""
    if product == STUDENT:
        student = torch.distributions.StudentT(3.0)
        return [*(student.sample((1, 1, n, rank)) for _ in range(2)), torch.randn(1, 1, n, DV)]
    query, key = (torch.randn(1, 1, n, rank) for _ in range(2))
    reach = 2 * query.abs().amax((0, 1, 2)) * key.abs().amax((0, 1, 2))
    return [query * (product / reach.max()), key, torch.randn(1, 1, n, DV)]


def measure(rank: int, n: int, product: float, causal: bool = False, backward: bool = False) -> Row:
    passes = both if backward else forward

    def ours(method: str):
        return lambda q, k, v: boltzattn.attention(
            q, k, v, scale=1.0, method=method, is_causal=causal
        )

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=1.0, is_causal=causal)

    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pad = (0, DV - q.shape[-1])
        return sdpa(F.pad(q, pad), F.pad(k, pad), v)

    inputs = problem(n, rank, product)
    most = min(n, LARGEST_DENSE)
    part, larger = [x[..., :most, :] for x in inputs], (n / most) ** 2
    extension().set_transform_budget(FOREVER)
    try:
        served = True
        if rank > 1:
            report = torch.ops.boltzattn.cpu_transform_report
            arguments = (*inputs, None, None, None, None, 1.0, 0.0, causal, False)
            served = report(*arguments)[0, 0].item() == 1.0
        transform = best(passes(ours("transform"), *inputs)) if served else math.inf
    finally:
        extension().set_transform_budget(0.0)
    return Row(
        rank,
        n,
        product,
        transform,
        best(passes(ours("direct"), *part)) * larger,
        best(passes(ours("auto"), *inputs)),
        min(best(passes(one, *part)) for one in (sdpa, padded)) * larger,
        best(inputs[2].clone),
        n > most,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096, 16_384])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--products", type=float, nargs="+", help="B; inf for Student's t")
    parser.add_argument("--backward", action="store_true", help="forward + backward")
    parser.add_argument("--causal", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    settle_allocator(fresh_pages=True)
    print(f"fp32, dv = {DV}, {torch.get_num_threads()} threads, one head")
    print(HEADER)
    for rank in asked.ranks:
        for n in asked.sizes:
            for product in asked.products or PRODUCTS[rank]:
                print(measure(rank, n, product, asked.causal, asked.backward), flush=True)


if __name__ == "__main__":
    main()
