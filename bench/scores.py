"""Key biases, Gaussian scores, ALiBi and causal calls of rank 1 against dense attention.

    python -m bench.scores                        # n = 256 to 16,384
    python -m bench.scores --sizes 65536 1048576  # dense attention is extrapolated beyond 16,384

Times are the best of several calls that allocate their results, in milliseconds. Ratios are to the
faster of SDPA and of the formula in torch. SDPA gets queries and keys padded to the width of the
values, which is faster than as they are, and a bias as a mask that is expanded over the rows. A
time marked ~ is extrapolated by n^2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import boltzattn
import torch
import torch.nn.functional as F
from torch import Tensor

DV = 64
LARGEST_DENSE = 16_384
SECONDS = 0.5  # spent on each case


def best(run: Callable[[], Any]) -> float:
    """Milliseconds of the fastest of a few calls."""
    run()
    fastest, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - start)
    return 1e3 * fastest


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


def sdpa(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    pad = (0, DV - query.shape[-1])
    if bias is not None:
        n = query.shape[-2]
        options["attn_mask"] = bias.detach()[..., None, :].expand(*bias.shape[:-1], n, n)
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
        return self._dense(sdpa, *inputs)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096, 16_384])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="rows whose name contains this")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    print(f"fp32, dv = {DV}, {asked.threads} threads")
    print(
        f"{'':24} {'n':>9}  {'forward':>9} {'SDPA':>10} {'formula':>10} {'ratio':>8}"
        f"  {'both':>9} {'SDPA':>10} {'formula':>10} {'ratio':>8}"
    )
    for n in asked.sizes:
        for case in cases(n):
            if asked.only not in case.name:
                continue
            # ALiBi's mask has n^2 numbers a head.
            most = min(n, LARGEST_DENSE // (8 if case.slopes is not None else 1))
            part = [
                x[..., :most] if i == 3 else x[..., :most, :] for i, x in enumerate(case.inputs)
            ]
            larger = (n / most) ** 2
            mark = "~" if larger > 1 else ""
            line = f"{case.name:24} {n:9,}"
            for passes in (forward, both):
                own = best(passes(case.ours, *case.inputs))
                dense = [best(passes(one, *part)) * larger for one in (case.sdpa, case.formula)]
                shown = " ".join(f"{mark + format(one, '.1f'):>10}" for one in dense)
                line += f"  {own:9.3f} {shown} {min(dense) / own:7.1f}x"
            print(line, flush=True)


if __name__ == "__main__":
    main()
