"""Key biases, Gaussian scores, ALiBi and causal calls of rank 1 against dense attention.

    python -m bench.scores                        # n = 256 to 16,384
    python -m bench.scores --sizes 65536 1048576  # dense attention is extrapolated beyond 16,384
    python -m bench.scores --million              # beside a copy, in memory that is used again

Times are the best of several calls that allocate their results, in milliseconds. `ratio` is that to
the faster of SDPA with the bias as a mask of n x n numbers and the formula in torch. `expanded` is
SDPA with the same mask as a view of stride 0, which takes no memory and has no gradient for the
bias, and the ratio to it. SDPA gets queries and keys padded to the width of the values, which is
faster than as they are. A time marked ~ is extrapolated by n^2.

--million: forward calls with 1,048,576 tokens, which write into memory that the process has used
before. Beside the time are its ratio to `value.clone()`, and the peak of the memory that a call
needs beyond its results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import boltzattn
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import child
from bench.measure import peak_bytes, resident_bytes, settle_allocator

DV = 64
LARGEST_DENSE = 16_384
MILLION = 1_048_576
SECONDS, LEAST_CALLS = 0.5, 2  # spent on each case


def best(run: Callable[[], Any]) -> float:
    """Milliseconds of the fastest of a few calls."""
    run()
    taken: list[float] = []
    while sum(taken) < SECONDS or len(taken) < LEAST_CALLS:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return 1e3 * min(taken)


def forward(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad():
            function(*inputs)

    return run


def both(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    grad = torch.randn_like(leaves[2])
    # SDPA has no gradient for a bias that is expanded over the rows.
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad, allow_unused=True)


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dense: bool, **options: Any
) -> Tensor:
    pad = (0, DV - query.shape[-1])
    if bias is not None:
        n = query.shape[-2]
        # With four dimensions: SDPA takes several times as long with three.
        rows = bias.detach().expand(*query.shape[:-2], n)[..., None, :]
        mask = rows.expand(*rows.shape[:-2], n, n)
        options["attn_mask"] = mask.contiguous() if dense else mask
    return F.scaled_dot_product_attention(F.pad(query, pad), F.pad(key, pad), value, **options)


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    logits = scale * query @ key.mT
    if bias is not None:
        logits = logits + bias[..., None, :]
    if attn_mask is not None:
        logits = logits + attn_mask
    if is_causal:
        n = query.shape[-2]
        logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1) @ value


class Case:
    """One row: a call of ours, and the same by dense attention."""

    def __init__(
        self,
        name: str,
        n: int,
        heads: int = 1,
        bias: float = 0.0,
        ratio: float = 0.0,  # R / bandwidth of Gaussian scores
        product: float = 50.0,  # B
        causal: bool = False,
        slopes: bool = False,
    ) -> None:
        query, key = (torch.randn(1, heads, n, 1) for _ in range(2))
        query *= product / (query.abs().max() * (key.max() - key.min()))
        if ratio:
            query, key = (torch.rand(1, heads, n, 1) * ratio for _ in range(2))
        self.name, self.n, self.causal = name, n, causal
        self.score = "gaussian" if ratio else "dot"
        self.inputs = [query, key, torch.randn(1, heads, n, DV)]
        if bias:
            self.inputs.append(bias * torch.randn(heads, n))
        self.slopes = 2.0 ** -torch.arange(1, heads + 1) if slopes else None

    def ours(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return boltzattn.attention(
            query,
            key,
            value,
            is_causal=self.causal,
            scale=1.0,
            key_bias=bias,
            score=self.score,
            alibi_slopes=self.slopes,
        )

    def sdpa(self, *inputs: Tensor) -> Tensor:
        return self._dense(partial(sdpa, dense=True), *inputs)

    def expanded(self, *inputs: Tensor) -> Tensor:
        return self._dense(partial(sdpa, dense=False), *inputs)

    def formula(self, *inputs: Tensor) -> Tensor:
        return self._dense(formula, *inputs)

    def _dense(
        self,
        function: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        options: dict[str, Any] = {"scale": 1.0}
        if self.slopes is not None:
            i = torch.arange(query.shape[-2])
            mask = -self.slopes[:, None, None] * (i[:, None] - i)
            options["attn_mask"] = mask.masked_fill(i > i[:, None], -torch.inf)
        elif self.causal:
            options["is_causal"] = True
        if self.score == "gaussian":
            bias = -0.5 * key.squeeze(-1).square()
        return function(query, key, value, bias, **options)


def cases(n: int) -> list[Case]:
    return [
        Case("plain", n),
        Case("key bias N(0, 1)", n, bias=1.0),
        Case("key bias N(0, 10)", n, bias=10.0),
        Case("Gaussian, R / 100", n, ratio=1e2),
        Case("Gaussian, R / 1,000", n, ratio=1e3),
        Case("Gaussian, R / 10,000", n, ratio=1e4),
        Case("causal", n, causal=True),
        Case("ALiBi, 8 heads, B = 20", n, heads=8, product=20.0, causal=True, slopes=True),
    ]


def _line(name: str, n: int, *numbers: tuple[float, float, float, float], mark: str) -> str:
    line = f"{name:24} {n:9,}"
    for own, dense, plain, expanded in numbers:
        shown = " ".join(f"{mark + format(one, '.0f'):>8}" for one in (dense, plain))
        line += f"  {own:9.3f} {shown} {min(dense, plain) / own:7.1f}x"
        line += f" {mark + format(expanded, '.0f'):>8} {expanded / own:7.1f}x"
    return line


def beside_dense(sizes: list[int], only: str) -> None:
    heading = f"{'':>9} {'SDPA':>8} {'formula':>8} {'ratio':>8} {'expanded':>8} {'ratio':>8}"
    print(f"{'':24} {'n':>9}  {heading}".replace(f"n  {'':>9}", f"n  {'forward':>9}", 1), end="")
    print(f"  {heading}".replace(f"  {'':>9}", f"  {'both':>9}", 1))
    for n in sizes:
        for case in cases(n):
            if only not in case.name:
                continue
            # ALiBi's mask has n^2 numbers a head.
            most = min(n, LARGEST_DENSE // (8 if case.slopes is not None else 1))
            part = [
                x[..., :most] if i == 3 else x[..., :most, :] for i, x in enumerate(case.inputs)
            ]
            larger = (n / most) ** 2
            numbers = []
            for passes in (forward, both):
                dense = (case.sdpa, case.formula, case.expanded)
                own = best(passes(case.ours, *case.inputs))
                numbers.append((own, *(best(passes(one, *part)) * larger for one in dense)))
            print(_line(case.name, n, *numbers, mark="~" if larger > 1 else ""), flush=True)


def _million(row: int, threads: int) -> tuple[Case, Callable[[], Any]]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    small, case = cases(64)[row], cases(MILLION)[row]
    forward(small.ours, *small.inputs)()  # starts threads
    return case, forward(case.ours, *case.inputs)


def _times(row: int, threads: int) -> tuple[float, float]:
    """Milliseconds of a call and of a copy. Runs in a child."""
    settle_allocator(fresh_pages=False)
    case, run = _million(row, threads)
    return best(run), best(case.inputs[2].clone)


def _memory(row: int, threads: int) -> float:
    """Megabytes, with the allocator's own settings. Runs in a child."""
    case, run = _million(row, threads)
    before = resident_bytes()
    run()
    return (peak_bytes() - before - case.inputs[2].nbytes) / 2**20


def million(only: str) -> None:
    print(f"{'':24} {'n':>9}  {'forward':>9} {'of clone':>9} {'extra':>9}")
    for row, case in enumerate(cases(1)):
        if only in case.name and case.slopes is None:
            own, copy = child.run(_times, row, torch.get_num_threads())
            extra = child.run(_memory, row, torch.get_num_threads())
            print(
                f"{case.name:24} {MILLION:9,}  {own:9.1f} {own / copy:8.1f}x {extra:6.0f} MB",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096, 16_384])
    parser.add_argument("--million", action="store_true", help="a million tokens beside a copy")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="rows whose name contains this")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    print(f"fp32, dv = {DV}, {asked.threads} threads")
    million(asked.only) if asked.million else beside_dense(asked.sizes, asked.only)


if __name__ == "__main__":
    main()
