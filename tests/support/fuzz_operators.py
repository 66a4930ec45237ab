"""Calls every operator torch.ops.boltzattn.* with wrong arguments: an exception or a result each
time, never a signal.

    python tests/support/fuzz_operators.py --calls 20000

A call is drawn from its number alone: valid arguments, of which one to three are then spoilt
(dtype, rank, size, strides, device, NaN and huge numbers, None, other types). Calls run in a
subprocess that writes down the number of each call first; after a crash the next subprocess goes on
behind it. `make fuzz-operators` does this under AddressSanitizer.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SECONDS_PER_CALL = 60  # at most; under AddressSanitizer on a busy machine
SECONDS_TO_START = 600  # until the first call: torch is loaded before
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OTHER_DTYPES = [torch.int64, torch.int32, torch.bool, torch.uint8, torch.complex64]
NUMBERS = [math.nan, math.inf, -math.inf, 0.0, -1.0, 0.5, 1e-320, 1e30, 1e308, -3.7, 2.0**53, 1e5]


def operators() -> list[Any]:
    """All of them, by name."""
    names = torch._C._dispatch_get_all_op_names()
    found = sorted({name.split(".")[0] for name in names if name.startswith("boltzattn::")})
    return [
        getattr(torch.ops.boltzattn, name.removeprefix("boltzattn::")).default for name in found
    ]


class Draw:
    """Valid arguments of one call, by the names they have in every schema."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.dtype = self.random.choice(DTYPES)
        self.heads, self.n_q, self.n_k = (self.random.randint(1, 3) for _ in range(3))
        if self.random.random() < 0.5:
            self.n_q, self.n_k = self.random.randint(1, 300), self.random.randint(1, 300)
        self.dv = self.random.choice([1, 3, 8, 33])

    def numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype or self.dtype)

    def key_mask(self, *shape: int) -> Tensor:
        ignored = torch.rand(shape) < 0.5
        return ignored if self.random.random() < 0.5 else self.numbers(*shape)

    def extents(self, *shape: int) -> Tensor:
        rows = torch.tensor([-3.0, 3.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
        return rows.expand(*shape, 6).contiguous()

    def starts(self, total: int) -> Tensor:
        return torch.tensor([0, total // 2, total])

    def arguments(self, operator: Any) -> dict[str, Any]:
        """For a problem, a layer or a projection, whichever the operator takes."""
        names = [a.name for a in operator._schema.arguments]
        heads, n_q, n_k, dv = self.heads, self.n_q, self.n_k, self.dv
        direct = "direct" in operator.name()
        if "cpu_varlen" in operator.name():  # all sequences by it, or not
            direct = self.random.random() < 0.5
        rank = self.random.choice([1, 1, 2, 17]) if direct else 1
        sharded = "shard" in operator.name()
        causal = sharded or "scan" in operator.name()
        if sharded:
            n_k = n_q
        lead, outer = (heads,), (heads,)
        sums = torch.float64 if self.dtype == torch.float64 else torch.float32
        columns = dv
        if "weight" in names and "query" in names:  # a layer
            n_k = n_q
            lead, outer, columns = (2, heads), (2,), self.random.choice([1, 5, 16])
        ranges = [-3.0, 3.0, -3.0, 3.0, n_k, n_q, n_k, 0.0]
        valid = {
            "query": self.numbers(*lead, n_q, rank),
            "key": self.numbers(*lead, n_k, rank),
            "value": self.numbers(*outer, n_k, columns),
            "scale": 1.0,
            "dropout_p": 0.0,
            "is_causal": causal,
            "is_gaussian": direct and self.random.random() < 0.5,
            "slopes": None,
            "out": self.numbers(*outer, n_q, dv),
            "lse": self.numbers(*outer, n_q, dtype=torch.float64),
            "grad_out": self.numbers(*outer, n_q, dv),
            "grad_query": self.numbers(*lead, n_q, rank),
            "grad_key": self.numbers(*lead, n_k, rank),
            "grad_value": self.numbers(*outer, n_k, columns),
            "grad_key_mask": self.numbers(*lead, n_k, dtype=sums),
            "grad_slopes": self.numbers(*lead, dtype=torch.float64),
            "weight": self.numbers(heads, dv, columns),
            "query_starts": self.starts(n_q),
            "key_starts": self.starts(n_k),
            "cu_seqlens_q": self.starts(n_q),
            "cu_seqlens_k": self.starts(n_k),
            "by_transform": torch.tensor([not direct, False]),
            "extents": self.extents(heads, 2),
            "ranges": torch.tensor([ranges] * heads, dtype=torch.float64),
            "method": self.random.choice(["auto", "direct", "transform"]),
            "backend": self.random.choice(["auto", "cpu", "reference"]),
        }
        if "x" in names:
            valid |= {"x": self.numbers(2, n_q, 5), "weight": self.numbers(4, 5)}
        if "w_q" in names:
            valid |= self.layer()
        if sharded:
            valid |= self.shard()
        if "positions" in names:
            valid |= self.stream()
        if lead != outer:
            valid["extents"] = self.extents(2, 2 * heads)
        optional = {
            "attn_mask": self.numbers(*lead, n_q, n_k),
            "key_mask": self.key_mask(*outer, n_k),
            "seed": torch.arange(heads),
            "grad_lse": self.numbers(*outer, n_q, dtype=torch.float64),
            "bias": self.numbers(4),
            "weight_bias": self.numbers(heads, dv),
            "out_bias": self.numbers(dv),
        }
        if "w_q" in names:
            n, width = self.n_q, heads * dv
            optional |= {
                "w_o": self.numbers(5, width),
                "b_in": self.numbers(2 * heads + width),
                "b_o": self.numbers(5),
                "key_mask": torch.rand(2, n) < 0.5,
            }
        if direct:
            optional["slopes"] = self.numbers(*lead, dtype=torch.float64)
        for name, x in optional.items():
            valid[name] = x if self.random.random() < 0.3 else None
        if {"moments", "query_moments"} & set(names):
            sizes = (
                torch.ops.boltzattn.cpu_stage_sizes(
                    *(valid[name] for name in _problem()), valid["ranges"]
                )
                if _accepted(valid)
                else (7, 7)
            )
            valid["moments"] = self.numbers(sizes[0], dtype=torch.float64)
            valid["query_moments"] = self.numbers(sizes[1], dtype=torch.float64)
        return {name: valid[name] for name in names}

    def shard(self) -> dict[str, Any]:
        """The layout of shards, and what is known of earlier and later ones."""
        heads, dv, features = self.heads, self.dv, 3 * 12
        ends = torch.tensor([1.0, -1.0], dtype=torch.float64)
        return {
            "nodes": 12,
            "levels": 1,
            "ratio": 2.0,
            "t_most": torch.full((heads,), 10.0, dtype=torch.float64),
            "with_slopes": self.random.random() < 0.5,
            "ends": ends.expand(heads, 2).contiguous(),
            "keys": torch.ones(heads, 3, dtype=torch.float64),
            "centres": self.numbers(heads, 2, dv, dtype=torch.float64),
            "table": self.numbers(heads, features, dv + 1, dtype=torch.float64),
            "slope_table": self.numbers(heads, features, dv + 1, dtype=torch.float64),
            "later": self.numbers(heads, features, dv + 1, dtype=torch.float64),
            "z": torch.rand(heads, self.n_q, dtype=torch.float64) + 1.0,
        }

    def layer(self) -> dict[str, Any]:
        heads, n, width = self.heads, self.n_q, self.heads * self.dv
        return {
            "w_q": self.numbers(heads, 5),
            "w_k": self.numbers(heads, 5),
            "w_v": self.numbers(width, 5),
            "num_heads": heads,
            "keep": True,
            "want_x": True,
            "want_weights": True,
            "grad_out": self.numbers(2, n, width),
            "query_key": self.numbers(2, n, 2 * heads),
            "value": self.numbers(2, n, width),
            "heads": self.numbers(2, n, width),
            "lse": self.numbers(2, heads, n, dtype=torch.float64),
        }

    def stream(self) -> dict[str, Any]:
        levels, width = self.random.choice([0, 2]), -(-self.dv // 8) * 8
        features = 16 * (2 * levels + 1)
        return {
            "sums": torch.zeros(self.heads, features, width, dtype=torch.float64),
            "z": torch.zeros(self.heads, features, dtype=torch.float64),
            "ends": torch.tensor([-math.inf, math.inf]).double().repeat(self.heads, 1),
            "keys": torch.zeros(self.heads, 16, dtype=torch.float64),
            "values": torch.zeros(self.heads, 16, width, dtype=torch.float64),
            "waiting": torch.tensor([self.random.randint(0, 16)]),
            "positions": torch.linspace(-9, 9, features, dtype=torch.float64),
            "most": 1e3,
            "head_dim": self.dv,
            "t_most": 9.0,
            "ratio": 2.0,
            "nodes": 16,
            "levels": levels,
        }

    def spoil(self, x: Any) -> Any:
        """A wrong argument in the place of this one."""
        if not isinstance(x, Tensor):
            if isinstance(x, bool):
                return self.random.choice([not x, None, 2])
            if isinstance(x, int):
                return self.random.choice([-1, 0, 1, 7, 65, 1000, 2**31, 2**62, None, 0.5])
            if isinstance(x, float):
                return self.random.choice([*NUMBERS, None, "1"])
            if isinstance(x, str):
                return self.random.choice(["", "cuda", "triton", "direct", None, 3])
            return self.tensor()
        return self.random.choice(
            [
                self.other_dtype,
                self.other_dtype,
                self.other_rank,
                self.other_size,
                self.other_size,
                self.other_strides,
                self.other_numbers,
                self.other_numbers,
                lambda x: x.to("meta"),
                lambda x: None,
                lambda x: self.tensor(),
                lambda x: [x],
                lambda x: x.to_sparse() if x.is_floating_point() else x,
            ]
        )(x)

    def tensor(self) -> Tensor:
        shape = [self.random.choice([0, 1, 2, 3, 40]) for _ in range(self.random.randint(0, 4))]
        return self.numbers(*shape).to(self.random.choice(DTYPES + OTHER_DTYPES))

    def other_dtype(self, x: Tensor) -> Tensor:
        return x.to(self.random.choice(DTYPES + OTHER_DTYPES))

    def other_rank(self, x: Tensor) -> Tensor:
        return self.random.choice(
            [x.flatten(), x.unsqueeze(0), x.unsqueeze(-1), x[:1].squeeze(), x.reshape(-1)[:0]]
        )

    def other_size(self, x: Tensor) -> Tensor:
        if x.ndim == 0:
            return x.expand(3)
        d = self.random.randrange(x.ndim)
        size = self.random.choice([0, 1, 2, 7, 299, 300])
        return x.index_select(d, torch.arange(size) % max(1, x.shape[d])) if x.shape[d] else x

    def other_strides(self, x: Tensor) -> Tensor:
        ways = [lambda: x.expand(2, *x.shape)[1], lambda: x.flip(0) if x.ndim else x]
        if x.ndim >= 2:
            ways.append(lambda: x.mT.contiguous().mT)
            ways.append(lambda: x[..., :1].expand(x.shape))
        return self.random.choice(ways)()

    def other_numbers(self, x: Tensor) -> Tensor:
        x = x.clone()
        if x.numel() and x.dtype != torch.bool:
            flat = x.view(-1)
            for _ in range(self.random.choice([1, 2, x.numel()])):
                number = self.random.choice(NUMBERS)
                if not x.is_floating_point():
                    number = self.random.choice([-1, 0, 1, 7, 299, 2**31, 2**62, -(2**62)])
                    number = max(torch.iinfo(x.dtype).min, min(torch.iinfo(x.dtype).max, number))
                wide = torch.float64 if x.is_floating_point() else torch.int64
                flat[self.random.randrange(len(flat))] = torch.tensor(number, dtype=wide)
        return x


def _problem() -> list[str]:
    from boltzattn.problem import Problem

    return list(Problem._fields)


def _accepted(valid: dict[str, Any]) -> bool:
    return valid["attn_mask"] is None


def touch(x: Any) -> None:
    """Reads a result, so that memory that is not there would be noticed."""
    if isinstance(x, (tuple, list)):
        for part in x:
            touch(part)
    elif isinstance(x, Tensor) and x.device.type == "cpu":
        x.double().sum().item() if x.dtype != torch.complex64 else x.abs().sum().item()


def call(number: int, all_operators: list[Any]) -> str:
    """Draws and makes one call; "raised" or "returned"."""
    draw = Draw(number)
    operator = draw.random.choice(all_operators)
    arguments = draw.arguments(operator)
    for _ in range(draw.random.choice([1, 1, 2, 3])):
        name = draw.random.choice(list(arguments))
        with contextlib.suppress(Exception):  # what was spoilt before may not bear it again
            arguments[name] = draw.spoil(arguments[name])
    try:
        touch(operator(*arguments.values()))
    except Exception:
        return "raised"
    return "returned"


def work(first: int, calls: int, seconds: float, journal: Path) -> None:
    """The subprocess: from call `first` on; the journal holds "number raised returned"."""
    from boltzattn.dispatch import extension

    if library := os.environ.get("BOLTZATTN_FUZZED_EXTENSION"):
        extension.CPU_LIBRARY = Path(library)
    assert extension.cpu_unavailable() is None  # loads the library
    torch.set_num_threads(2)
    found = operators()
    counts = {"raised": 0, "returned": 0}
    end = time.monotonic() + seconds
    with journal.open("w") as file:
        for number in range(first, calls):
            if time.monotonic() > end:
                break
            file.seek(0)
            file.write(f"{number} {counts['raised']} {counts['returned']} running\n")
            file.flush()
            counts[call(number, found)] += 1
        file.seek(0)
        file.write(f"{number} {counts['raised']} {counts['returned']} done   \n")


def fuzz(first: int, calls: int, seconds: float = math.inf) -> tuple[dict[str, int], list[str]]:
    """(counts, what went wrong) of calls `first` to `first + calls`."""
    total, wrong = {"raised": 0, "returned": 0}, []
    end, last = time.monotonic() + seconds, first + calls
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        while first < last and (left := end - time.monotonic()) > 0:
            command = [sys.executable, __file__, "--work", str(journal), "--first", str(first)]
            command += ["--calls", str(last), "--seconds", str(left)]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output = _wait(child, journal)
            if not journal.exists():
                raise RuntimeError(f"the calls did not start: {output}")
            number, raised, returned, state = journal.read_text().split()[:4]
            total["raised"] += int(raised)
            total["returned"] += int(returned)
            if child.returncode != 0:
                wrong.append(f"call {number} ended with code {child.returncode}: {output[:3000]}")
            elif state == "done":
                break
            first = int(number) + 1
            journal.unlink()
    return total, wrong


def _wait(child: subprocess.Popen, journal: Path) -> str:
    """Waits for the child as long as it makes calls; returns what it printed."""
    last, since = "", time.monotonic()
    while True:
        try:
            return child.communicate(timeout=1)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            now = journal.read_text() if journal.exists() else ""
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > (SECONDS_PER_CALL if now else SECONDS_TO_START):
                child.kill()
                since = math.inf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.first, options.calls, options.seconds, options.work)
        return 0
    counts, wrong = fuzz(options.first, options.calls, options.seconds)
    for one in wrong:
        print(one, flush=True)
    print(f"{sum(counts.values())} calls: {counts}, {len(wrong)} signals")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
