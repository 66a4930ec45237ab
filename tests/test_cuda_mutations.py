"""Would the checks of test_cuda_kernels notice? Kernels are damaged one instruction at a time.

Taken out of the PTX, each in turn: every barrier of a block or a warp, every wait for asynchronous
copies, and every guard, that is a branch around an access to memory. The launch is then repeated
with what it was given before, and must fail (out of bounds, a race, memory never written,
divergence) or leave other bytes behind. What is left is listed with the reason why it is redundant;
a guard that no launch here makes use of is counted as unreached, and a barrier must not be.

fp32 and bf16 are treated: they are the two ways through the sources. fp64 and fp16 differ by types.
"""

from __future__ import annotations

import functools
import linecache
import random
import re
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from boltzattn.cuda_report import readable
from cuda_compile import CSRC
from cuda_launch import Launched, Machine, backward, forward, project
from ptxrun.errors import PtxError
from ptxrun.parser import Instr
from test_cuda_kernels import problem, strided

pytestmark = pytest.mark.nvcc

DIRECT: tuple[dict[str, Any], ...] = (
    {"sizes": (40, 70), "dv": 5, "rank": 2, "mask": "bool", "dropout": 0.3, "strides": "gaps"},
    {"sizes": (130, 40), "dv": 16, "rank": 20, "mask": "causal"},
    {"sizes": (33, 135), "dv": 8, "rank": 3, "mask": "key bias"},
    {"sizes": (3, 2100), "dv": 3},  # more tokens than one running sum takes,
    {"sizes": (2100, 3), "dv": 3},  # on either side
)
TRANSFORM: tuple[dict[str, Any], ...] = (
    {"sizes": (70, 150), "dv": 5, "mask": "padding", "strides": "gaps"},
    {"sizes": (530, 30), "dv": 72, "mask": "none"},
    {"sizes": (30, 530), "dv": 8, "mask": "infinite"},
    {"sizes": (20, 40), "dv": 3, "mask": "key bias"},  # not for the transform
)
# Kernels of either method that the dtypes have in common are treated once.
KERNELS = re.compile(
    r"direct_\w+<(float|bfloat16)(, 16|, true|, false)?>|transform_\w+(<(?!double|half).*>)?|"
    r"project(<float>|_extents)"
)


class Site(NamedTuple):
    """An instruction to take out."""

    family: str
    kernel: str
    pc: int
    kind: str  # "barrier", "wait" or "guard"
    source: str  # the line it comes from


FAMILIES = ("project",)  # also known: "direct <dtype>", "transform <dtype>"


@functools.cache
def launches(family: str) -> dict[str, list[Launched]]:
    """What the kernels of a family were launched with, by name."""
    torch.manual_seed(0)
    found: dict[str, list[Launched]] = {}

    def keep(machine: Machine) -> None:
        for launch in machine.launched or ():
            name = readable(launch.kernel.name)
            if KERNELS.fullmatch(name):
                found.setdefault(name, []).append(launch)

    method, _, dtype = family.partition(" ")
    for case in {"direct": DIRECT, "transform": TRANSFORM}.get(method, ()):
        p = problem(getattr(torch, dtype), **{"scale": 0.25, **case})
        ahead, back = Machine(record=True), Machine(record=True)
        out, lse = forward(method, ahead, *p.tensors, *p.options)
        backward(method, back, *p.grads, *p.tensors, out, lse, *p.options)
        keep(ahead)
        keep(back)
    for batch, n, columns, outputs in ((2, 70, 5, 9), (1, 64, 64, 2)) if not dtype else ():
        machine = Machine(record=True)
        # In the gaps between rows nothing may be read.
        x = strided(torch.randn(batch, n, columns), "gaps")
        weight = strided(torch.randn(outputs, columns), "gaps")
        project(machine, x, weight, torch.randn(outputs))
        keep(machine)
    # The transform ends with the kernels of the direct method, and its own that know no dtype run
    # in fp32 already.
    own = method if family != "transform bfloat16" else re.compile("transform.*<bfloat16>")
    return {name: x for name, x in found.items() if re.match(own, name)}


def source_of(instruction: Instr) -> str:
    file, _, line = instruction.src.rpartition(":")
    name = file.rpartition("/")[2]
    (path,) = [*CSRC.glob(f"cuda/{name}"), *CSRC.glob(name)][:1] or [file]
    return linecache.getline(str(path), int(line)).strip()


def sites(family: str, name: str) -> list[Site]:
    instructions = launches(family)[name][0].kernel.prog.instrs
    found = []
    for pc, ins in enumerate(instructions):
        if ins.op in ("bar", "barrier"):
            kind = "barrier"
        elif ins.op == "cp" and "wait_all" in ins.mods:
            kind = "wait"
        elif ins.op == "bra" and ins.guard and ins.target > pc:
            around = instructions[pc + 1 : ins.target]
            if not any(x.op in ("ld", "st", "cp", "ldmatrix") for x in around):
                continue
            kind = "guard"
        else:
            continue
        found.append(Site(family, name, pc, kind, source_of(ins)))
    return found


def verdict(site: Site) -> str:
    """ "seen", "unreached" (nothing here makes use of it) or "unseen"."""
    for launch in launches(site.family)[site.kernel]:
        try:
            same = launch.repeat(launch.kernel.without(site.pc))
        except PtxError:
            return "seen"
        if not same:
            return "seen"
    for launch in launches(site.family)[site.kernel]:
        try:
            launch.repeat(launch.kernel.without(site.pc, watch=True))
        except PtxError:
            return "unseen"
    return "unreached"


# (kernel, source line) of what may be taken out unnoticed, and why.
REDUNDANT: dict[tuple[str, str], str] = {
    ("project", "if (lane == 0) result[o][i0 + i] = total;"): (
        "after the shuffles every lane has the same total: all of them would write it"
    ),
}


def redundant(site: Site) -> bool:
    base = site.kernel.partition("<")[0]
    return any(
        site.source == source and (base == kernel or kernel == "*") for kernel, source in REDUNDANT
    )


def judge(chosen: list[Site]) -> Counter[str]:
    """How many were seen, unreached, redundant; none may be unseen for no known reason."""
    count: Counter[str] = Counter()
    unexplained = []
    for site in chosen:
        found = verdict(site)
        if found == "unseen" or (found == "unreached" and site.kind != "guard"):
            found = "redundant" if redundant(site) else found
            if found != "redundant":
                unexplained.append((found, *site))
        count[f"{site.kind} {found}"] += 1
    assert not unexplained, "\n".join(map(str, unexplained))
    return count


def test_a_sample_of_damage_is_noticed() -> None:
    """Of the smallest kernels; the rest is for the full run."""
    everything = [site for name in launches("project") for site in sites("project", name)]
    assert judge(random.Random(0).sample(everything, 8)).total() == 8


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_barrier_is_noticed(family: str) -> None:
    every = [site for name in launches(family) for site in sites(family, name)]
    count = judge([site for site in every if site.kind != "guard"])
    assert count["barrier seen"] > 0
    print(family, dict(count))
