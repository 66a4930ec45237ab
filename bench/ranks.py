"""Ranks 2 to 4: the transform, `direct`, what `auto` takes, and SDPA.

    python -m bench.ranks                        # n = 256 to 16,384
    python -m bench.ranks --sizes 65536 1048576  # quadratic methods are extrapolated beyond 16,384

Forward times are the best of several calls that allocate their results, in milliseconds. B is the
larger 2 max|q_a| max|k_a| of the axes, queries scaled. SDPA is the faster of queries and keys as
they are and padded to the width of the values. A time marked ~ is extrapolated by n^2. `regret` is
the time of `auto` over that of the faster of transform and direct.
"""

from __future__ import annotations

import argparse

import boltzattn
import torch
import torch.nn.functional as F
from boltzattn.dispatch.extension import extension
from torch import Tensor

from bench.scores import DV, LARGEST_DENSE, best, both, forward

PRODUCTS = {2: (1.0, 5.0, 20.0, 50.0, 100.0, 200.0), 3: (1.0, 5.0, 10.0), 4: (1.0, 2.0)}
FOREVER = 2e9  # nanoseconds: transforms that are estimated to take longer are not timed


def problem(n: int, rank: int, product: float | None) -> list[Tensor]:
    """Normal tokens with this B; Student's t with 3 degrees of freedom for None."""
    if product is None:
        student = torch.distributions.StudentT(3.0)
        return [*(student.sample((1, 1, n, rank)) for _ in range(2)), torch.randn(1, 1, n, DV)]
    query, key = (torch.randn(1, 1, n, rank) for _ in range(2))
    reach = 2 * query.abs().amax((0, 1, 2)) * key.abs().amax((0, 1, 2))
    return [query * (product / reach.max()), key, torch.randn(1, 1, n, DV)]


def _ours(method: str):
    return lambda q, k, v: boltzattn.attention(q, k, v, scale=1.0, method=method)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def _padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pad = (0, DV - q.shape[-1])
    return F.scaled_dot_product_attention(F.pad(q, pad), F.pad(k, pad), v, scale=1.0)


def _report(inputs: list[Tensor]) -> list[float]:
    report = torch.ops.boltzattn.cpu_transform_report
    return report(*inputs, None, None, None, None, 1.0, 0.0, False, False)[0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096, 16_384])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--backward", action="store_true", help="forward + backward")
    asked = parser.parse_args()
    passes = both if asked.backward else forward
    torch.manual_seed(0)
    print(f"fp32, dv = {DV}, {torch.get_num_threads()} threads, one head")
    print(
        f"{'rank':>4} {'n':>9} {'B':>6} {'transform':>10} {'direct':>10} {'auto':>10} {'SDPA':>10}"
        f" {'SDPA / auto':>11} {'regret':>7}"
    )
    for rank in asked.ranks:
        for n in asked.sizes:
            most = min(n, LARGEST_DENSE)
            larger, mark = (n / most) ** 2, "~" if n > most else ""
            for product in (*PRODUCTS[rank], None):
                inputs = problem(n, rank, product)
                part = [x[..., :most, :] for x in inputs]
                extension().set_transform_budget(FOREVER)
                served = _report(inputs)[0] == 1.0
                transform = best(passes(_ours("transform"), *inputs)) if served else float("inf")
                extension().set_transform_budget(0.0)
                direct = best(passes(_ours("direct"), *part)) * larger
                auto = best(passes(_ours("auto"), *inputs))
                sdpa = min(best(passes(one, *part)) for one in (_sdpa, _padded)) * larger
                print(
                    f"{rank:4} {n:9,} {'t3' if product is None else f'{product:g}':>6}"
                    f" {transform:10.2f} {mark + f'{direct:.2f}':>10} {auto:10.2f}"
                    f" {mark + f'{sdpa:.2f}':>10} {sdpa / auto:10.1f}x"
                    f" {auto / min(transform, direct):7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
