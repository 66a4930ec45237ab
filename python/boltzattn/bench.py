"""Times attention on this machine, against scaled_dot_product_attention.

Prints a line for each number of tokens: the median time of a call, forward and with backward,
and how many times as long SDPA takes. SDPA is the faster of two: as it is, and with query and key
padded to the width of the values, for which it has better kernels; the first is left out where its
weights would take more than a gigabyte. The default takes under a minute on two CPU cores. The
benchmarks of the repository, with other packages and a million tokens, are `make bench` and
`make bench-full`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import boltzattn
from boltzattn.timing import positive, times

LENGTHS = (256, 1024, 4096, 8192)
REPEATS, PATIENCE = 9, 2.0  # calls, and seconds for all of them
MOST_WEIGHTS = 1 << 30  # bytes
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _padded(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    more = value.shape[-1] - query.shape[-1]
    query, key = (F.pad(x, (0, more)) for x in (query, key))
    return F.scaled_dot_product_attention(query, key, value, **options)


def _milliseconds(attend: Attend, tensors: list[Tensor], grad: Tensor) -> dict[str, float]:
    variables = [x.detach().requires_grad_() for x in tensors]

    def median(run: Callable[[], object]) -> float:
        return 1e3 * statistics.median(times(run, grad.device.type, REPEATS, PATIENCE))

    return {
        "forward": median(lambda: attend(*tensors)),
        "both": median(lambda: torch.autograd.grad(attend(*variables), variables, grad)),
    }


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What was measured for each number of tokens; times in milliseconds."""
    dtype, causal = getattr(torch, asked.dtype), asked.causal
    for n in asked.lengths:
        generator = torch.Generator().manual_seed(0)
        query, key, value, grad = (
            torch.randn(1, asked.heads, n, width, generator=generator).to(asked.device, dtype)
            for width in (asked.rank, asked.rank, asked.dv, asked.dv)
        )
        options: dict[str, Any] = {"is_causal": causal, "scale": asked.rank**-0.5}
        peers: list[Attend] = []
        if asked.dv > asked.rank:
            peers.append(partial(_padded, **options))
        if not peers or asked.heads * n * n * value.element_size() <= MOST_WEIGHTS:
            peers.append(partial(F.scaled_dot_product_attention, **options))
        tensors = [query, key, value]
        found = [_milliseconds(attend, tensors, grad) for attend in peers]
        sdpa = {name: min(times[name] for times in found) for name in ("forward", "both")}
        ours = _milliseconds(partial(boltzattn.attention, is_causal=causal), tensors, grad)
        taken = boltzattn.explain(query, key, value, is_causal=causal).partition("\n")[0]
        yield {"tokens": n, "sdpa": sdpa, "boltzattn": ours, "taken": taken}


def main(arguments: list[str] | None = None, prog: str = "python -m boltzattn.bench") -> int:
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog=prog, description=summary, epilog=more)

    dtypes = ("float32", "float64", "bfloat16", "float16")
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        default=LENGTHS,
        metavar="N",
        help="numbers of tokens (256 1024 4096 8192)",
    )
    parser.add_argument("--rank", type=positive, default=1, help="of queries and keys (1)")
    parser.add_argument("--heads", type=positive, default=4, help="number of heads (4)")
    parser.add_argument("--dv", type=positive, default=64, help="width of the values (64)")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="default float32")
    parser.add_argument(
        "--device", default="cpu", help="cpu, cuda, or another device of torch (cpu)"
    )
    parser.add_argument("--causal", action="store_true", help="with a causal mask")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    asked = parser.parse_args(arguments)
    try:
        torch.empty(0, device=asked.device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        parser.error(f"--device {asked.device}: {str(error).splitlines()[0]}")
    if not asked.json:
        print(
            f"{asked.heads} heads of rank {asked.rank}, dv {asked.dv}, {asked.dtype} on "
            f"{asked.device}, {torch.get_num_threads()} threads; times in ms\n"
            f"{'':8}{'forward':^30}{'forward + backward':^30}\n{'tokens':>8}"
            + f"{'SDPA':>10}{'boltzattn':>11}{'ratio':>9}"
            * 2
        )
    for row in rows(asked):
        if asked.json:
            print(json.dumps(row), flush=True)
            continue
        line = f"{row['tokens']:>8}"
        for name in ("forward", "both"):
            sdpa, ours = row["sdpa"][name], row["boltzattn"][name]
            line += f"{sdpa:>10.3f}{ours:>11.3f}{sdpa / ours:>8.1f}x"
        print(f"{line}  {row['taken']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
