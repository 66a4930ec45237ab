"""Would the checks of test_cuda_kernels notice? Barriers are taken out of a kernel one at a time.

Every `bar.sync` and `bar.warp.sync` of the PTX is removed in turn, and the run must then fail: by a
race, by numbers that are off, or by the machine's complaint about divergence.
"""

from __future__ import annotations

import re

import cuda_launch
import ptxrun
import pytest
import torch
from cuda_compile import compile_cuda
from cuda_launch import Machine, forward
from ptxrun.errors import PtxError
from test_cuda_kernels import Problem, problem

BARRIER = re.compile(r"^\s*(barrier|bar)\.(warp\.)?sync[^;]*;", re.MULTILINE)
# Not reached by the problem below: long rows (two spans of keys), and ranks above 16.
UNREACHED = {0, 1, 6, 7} | {2}


def entry(text: str, kernel: str) -> str:
    """The PTX of one kernel alone: what stands before the first kernel, and the kernel."""
    head = text[: text.index(".visible .entry")]
    start = text.index(f".visible .entry {kernel}(")
    end = text.index("\n}\n", start) + 3
    return head + text[start:end]


def run(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    return forward("direct", Machine(), *p.tensors, *p.options)


@pytest.mark.nvcc
@pytest.mark.full
def test_every_barrier_of_direct_forward_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(torch.float32, (40, 70), 5, rank=2, scale=0.25)
    truth = run(p)
    known = dict(cuda_launch.modules())
    name = next(x for x in known if "direct_forwardIfLi16" in x)
    text = entry(compile_cuda("direct").ptx.read_text(), name)
    barriers = list(BARRIER.finditer(text))
    unseen = set()
    for number, barrier in enumerate(barriers):
        module = ptxrun.load(text[: barrier.start()] + text[barrier.end() :])
        monkeypatch.setattr(cuda_launch, "modules", lambda m=module: {**known, name: (m, name)})
        try:
            same = all(map(torch.equal, run(p), truth))
        except PtxError:
            continue
        if same:
            unseen.add(number)
    assert unseen == UNREACHED, f"of {len(barriers)} barriers"
