"""Would the checks of test_cuda_kernels notice? Barriers are taken out one at a time.

Every `bar.sync` and `bar.warp.sync` of a kernel's PTX is removed in turn, and the run must then
fail: by a race, by numbers that are off, or by the machine's complaint about divergence. Guards of
indices are taken out of the source.
"""

from __future__ import annotations

import contextlib
import re

import cuda_launch
import ptxrun
import pytest
import torch
from cuda_compile import CSRC, compile_cuda
from cuda_launch import Machine, backward, forward
from ptxrun.errors import PtxError
from test_cuda_kernels import Problem, problem

pytestmark = pytest.mark.nvcc

BARRIER = re.compile(r"^\s*(barrier|bar)\.(warp\.)?sync[^;]*;", re.MULTILINE)


def entry(text: str, kernel: str) -> str:
    """The PTX of one kernel alone: what stands before the first kernel, and the kernel."""
    head = text[: text.index(".visible .entry")]
    start = text.index(f".visible .entry {kernel}(")
    end = text.index("\n}\n", start) + 3
    return head + text[start:end]


def run(method: str, p: Problem, gradient: bool) -> list[torch.Tensor]:
    out, lse = forward(method, Machine(), *p.tensors, *p.options)
    if not gradient:
        return [out, lse]
    return list(backward(method, Machine(), *p.grads, *p.tensors, out, lse, *p.options))


# Cheap problems first; a barrier must be missed in one of them. Among them they go through every
# branch: more than 16 entries of a vector, more keys than two spans, two tiles of columns.
PROBLEMS = {
    "direct": (
        {"sizes": (40, 70), "dv": 5, "rank": 20},
        {"sizes": (3, 4200), "dv": 3, "rank": 1},
    ),
    "transform": ({"sizes": (40, 70), "dv": 70, "scale": 0.25},),
}
# (method, kernel, whether backward runs it, barriers that are redundant)
KERNELS = [
    ("direct", "direct_forwardIfLi16", False, set()),
    ("transform", "transform_momentsIf", False, {5}),  # the last one: nothing comes after it
    ("transform", "transform_sortILb1", False, set()),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "kernel", "gradient", "redundant"),
    [pytest.param(*case, id=case[1]) for case in KERNELS],
)
def test_every_barrier_is_missed(
    method: str, kernel: str, gradient: bool, redundant: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = dict(cuda_launch.modules())
    name = next(x for x in known if kernel in x)
    text = entry(compile_cuda(method).ptx.read_text(), name)
    barriers = list(BARRIER.finditer(text))
    unseen = set(range(len(barriers)))
    assert unseen
    for settings in PROBLEMS[method]:
        p = problem(torch.float32, **settings)
        monkeypatch.setattr(cuda_launch, "modules", lambda: known)
        truth = run(method, p, gradient)
        for number in sorted(unseen):
            barrier = barriers[number]
            module = ptxrun.load(text[: barrier.start()] + text[barrier.end() :])
            monkeypatch.setattr(cuda_launch, "modules", lambda m=module: {**known, name: (m, name)})
            try:
                noticed = not all(map(torch.equal, run(method, p, gradient), truth))
            except PtxError:
                noticed = True
            if noticed:
                unseen.remove(number)
    assert unseen == redundant, f"of {len(barriers)} barriers"


GUARDS = {
    "a query past the last": ("direct", "i >= call.n_q || ", ""),
    "a key past the last": ("direct", "j >= call.n_k || ", ""),
    "a token past the last": ("direct", "return token < count ? widen", "return true ? widen"),
    "a column past the last": ("direct", "if (first + c >= columns) break;", ""),
}


@pytest.mark.full
@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_is_missed(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, old, new = GUARDS[guard]
    sources = {path.name: path.read_text() for path in (CSRC / "cuda").glob("*.cuh")}
    (changed,) = [name for name, text in sources.items() if old in text]
    text = sources["element.cuh"] + sources["direct.cuh"]
    text = re.sub(r'#include "cuda/element.cuh"|#pragma once', "", text)
    assert changed in ("element.cuh", "direct.cuh")
    text = text.replace(old, new)
    body = text + (
        "\nnamespace boltzattn { namespace cuda {\n"
        "template __global__ void direct_forward<float, 16>(const __grid_constant__ Call);\n}}"
    )
    module = ptxrun.nvcc(body, flags=("-std=c++17", "-I", str(CSRC)))
    known = dict(cuda_launch.modules())
    name = next(x for x in known if "direct_forwardIfLi16" in x)
    (mutant,) = module.kernels()
    # 12 columns are whole vectors of 4 but not a whole tile of 16.
    p = problem(torch.float32, (40, 70), 12, rank=2)
    truth = run(method, p, False)
    monkeypatch.setattr(cuda_launch, "modules", lambda: {**known, name: (module, mutant)})
    with contextlib.suppress(PtxError):
        assert not all(map(torch.equal, run(method, p, False), truth))
