"""Checks every backend and method on this machine's devices, against fp64.

Prints one table to paste into an issue: what ran, how far it was from dense softmax in fp64, and
how long it took; before that what cannot run, and why. The exit status is 1 if anything was wrong.
It takes less than a minute on two CPU cores; more tokens take longer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import boltzattn
from boltzattn import info
from boltzattn.dispatch import backends
from boltzattn.dispatch.backends import Request, operation_of
from boltzattn.problem import DTYPES
from boltzattn.timing import positive, times

# What `transform` certifies, relative to the largest magnitude; `direct` is well within it too.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,  # gradients are sums of many terms
    torch.bfloat16: 8 / 256,
    torch.float16: 8 / 2048,
}
HEADS, DV = 4, 64
# Tokens of a head: several tiles of every kernel, and few enough for `reference`, in plain torch.
LENGTH = 512
# Seconds for which a call is repeated to time it.
PATIENCE = 0.05


@dataclass(frozen=True)
class Case:
    """A call: its rank and what is special about it."""

    rank: int
    is_causal: bool = False
    padded: bool = False

    def __str__(self) -> str:
        words = [f"rank {self.rank}"]
        words += ["causal"] if self.is_causal else []
        words += ["padded"] if self.padded else []
        return ", ".join(words)


Setting = tuple[str, torch.dtype, Case]  # device, dtype, call
Server = tuple[str, str]  # method, backend
CASES = (Case(1), Case(1, padded=True), Case(1, is_causal=True), Case(8))


def _dense(query: Tensor, key: Tensor, value: Tensor, case: Case, padding: Tensor) -> Tensor:
    logits = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if case.is_causal:
        n = logits.shape[-1]
        above = torch.ones(n, n, dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(above, -torch.inf)
    if case.padded:
        logits = logits.masked_fill(padding, -torch.inf)
    return logits.softmax(-1) @ value


def _relative(actual: Tensor, truth: Tensor) -> float:
    error = (actual.double() - truth).abs().max() / truth.abs().max()
    return float(error.nan_to_num(nan=torch.inf))


def _milliseconds(run: Callable[[], object], device: str) -> float:
    return 1e3 * statistics.median(times(run, device, repeats=5, patience=PATIENCE))


def devices() -> list[str]:
    """The CPU, and the accelerator torch can use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if found is None else ["cpu", found.type]


def servers(length: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> dict[Setting, list[Server]]:
    """The methods and backends that can serve each kind of call on this machine."""
    found = {}
    for device in devices():
        for dtype in dtypes:
            for case in CASES:
                request = Request(
                    device, dtype, HEADS, length, length, case.rank, DV, is_causal=case.is_causal
                )
                found[device, dtype, case] = [
                    (method, backend)
                    for method in boltzattn.METHODS
                    for backend in boltzattn.BACKENDS
                    if not backends.why_not(request, operation_of(method, request), backend)
                ]
    return found


def rows(length: int = LENGTH, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[str]:
    """The lines of the table; a line that starts with FAIL or ERROR is a fault."""
    for setting, able in servers(length, dtypes).items():
        yield from _case_rows(setting, able, length)


def _case_rows(setting: Setting, able: list[Server], length: int) -> Iterator[str]:
    device, dtype, case = setting
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = [(HEADS, length, case.rank)] * 2 + [(HEADS, length, DV)] * 2
    query, key, value, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)
        for shape in shapes
    )
    padding = (torch.rand(length, generator=generator, device="cpu") > 0.75).to(device)
    doubles = [x.double().requires_grad_() for x in (query, key, value)]
    truth = _dense(doubles[0], doubles[1], doubles[2], case, padding)
    truths = (truth.detach(), *torch.autograd.grad(truth, doubles, grad.double()))
    kind = f"{device:<5} {str(dtype).removeprefix('torch.'):<9} {case!s:<15}"
    for method, backend in able:
        name = f"{method:<10} {backend:<10}"
        try:
            yield _measure(
                kind + name, (query, key, value, grad), truths, case, padding, method, backend
            )
        except Exception as error:  # a report must come to its end
            yield f"ERROR {kind}{name} {type(error).__name__}: {str(error).splitlines()[0]}"


def _measure(
    label: str,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    truths: tuple[Tensor, ...],
    case: Case,
    padding: Tensor,
    method: str,
    backend: str,
) -> str:
    *inputs, grad = tensors
    variables = [x.detach().requires_grad_() for x in inputs]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return boltzattn.attention(
            query,
            key,
            value,
            is_causal=case.is_causal,
            key_padding_mask=padding if case.padded else None,
            method=method,
            backend=backend,
        )

    def both() -> tuple[Tensor, ...]:
        out = attend(*variables)
        return out.detach(), *torch.autograd.grad(out, variables, grad)

    errors = [_relative(x, truth) for x, truth in zip(both(), truths, strict=True)]
    device = inputs[0].device.type
    forward = _milliseconds(lambda: attend(*inputs), device)
    total = _milliseconds(both, device)
    verdict = "ok   " if max(errors) <= TOLERANCE[inputs[0].dtype] else "FAIL "
    return f"{verdict} {label} {errors[0]:8.1e} {max(errors[1:]):8.1e} {forward:9.3f} {total:9.3f}"


def main(arguments: list[str] | None = None, prog: str = "python -m boltzattn.selftest") -> int:
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog=prog, description=summary, epilog=more)
    parser.add_argument("--length", type=positive, default=LENGTH, help="tokens of a head (512)")
    options = parser.parse_args(arguments)
    print(info.report())
    if len(devices()) == 1:
        print("no accelerator: torch sees none, so only the CPU is tested")
    elif torch.cuda.is_available():
        print(f"accelerator: {torch.cuda.get_device_name()}")
    print(f"{HEADS} heads, {options.length} tokens, dv {DV}; errors relative to the largest value")
    print(
        f"{'':12}{'device':<5} {'dtype':<9} {'call':<15}{'method':<10} {'backend':<10} "
        f"{'out':>8} {'grads':>8} {'fwd ms':>9} {'both ms':>9}"
    )
    total = sum(map(len, servers(options.length).values()))
    start, faults, done = time.perf_counter(), 0, 0
    for done, row in enumerate(rows(options.length), 1):
        print(f"{done:>{len(str(total))}}/{total} {row}", flush=True)
        faults += row.startswith(("FAIL", "ERROR"))
    verdict = f"{faults} faults" if faults else "all ok"
    print(f"{verdict}: {done} of {total} calls in {time.perf_counter() - start:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
