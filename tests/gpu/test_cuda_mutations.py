"""Would the checks of test_cuda_kernels notice? Kernels are damaged one place at a time.

Taken out of the PTX, each in turn: every barrier of a block or a warp, every wait for asynchronous
copies, and every guard, that is a branch around an access to memory or the predicate that turns an
asynchronous copy into zeros. A guard is a line of the sources: the copies of it that unrolling has
made in a kernel go together. The launch is then repeated with what it was given before, and must
fail (out of bounds, a race, memory never written, divergence, 20 times as many steps) or leave
other bytes behind. What is left is listed with the reason why it is redundant.

fp32 and bf16 are treated: they are the two ways through the sources. fp64 and fp16 differ by types,
kernels for many columns by a constant.
"""

from __future__ import annotations

import functools
import math
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

MOST_LAUNCHES = 5  # that a guard is tried with, the shortest first


class Case(NamedTuple):
    """A call, forward and backward."""

    method: str
    problem: dict[str, Any]
    lse_gradient: bool = True
    odd: str = ""  # a NaN among the values of the first head, or queries that are all the same


DIRECT = (
    Case(
        "direct",
        {"sizes": (40, 70), "dv": 5, "rank": 2, "mask": "bool", "dropout": 0.3, "strides": "gaps"},
    ),
    Case("direct", {"sizes": (130, 40), "dv": 16, "rank": 20, "mask": "causal"}),
    Case("direct", {"sizes": (20, 135), "dv": 3, "mask": "causal", "heads": 1}),  # keys unseen
    Case("direct", {"sizes": (33, 135), "dv": 8, "rank": 3, "mask": "key bias"}),
    Case("direct", {"sizes": (20, 33), "dv": 3, "mask": "padding"}, lse_gradient=False),
    Case("direct", {"sizes": (20, 33), "dv": 3, "mask": "bias"}),
    Case(
        "direct",
        {"sizes": (70, 33), "dv": 3, "rank": 2, "mask": "key bias"}
        | {"score": "gaussian", "slopes": True},
    ),
    Case("direct", {"sizes": (33, 40), "dv": 3, "mask": "causal", "slopes": True}),
    Case("direct", {"sizes": (33, 40), "dv": 3, "mask": "causal"}, odd="nan"),  # hidden from some
    Case("direct", {"sizes": (128, 128), "dv": 3, "heads": 1}),  # whole tiles, nothing masked
    Case("direct", {"sizes": (3, 2100), "dv": 3, "heads": 1}),  # longer than one running sum,
    Case("direct", {"sizes": (2100, 3), "dv": 3, "heads": 1}),  # on either side
    Case("transform", {"sizes": (20, 40), "dv": 3}),  # served: nothing is left to do
)
TRANSFORM = (
    Case("transform", {"sizes": (70, 150), "dv": 5, "mask": "padding", "strides": "gaps"}),
    Case("transform", {"sizes": (530, 30), "dv": 72}),
    Case("transform", {"sizes": (30, 530), "dv": 8, "mask": "infinite", "heads": 1}),
    Case("transform", {"sizes": (20, 40), "dv": 4}, lse_gradient=False, odd="nan"),
    Case("transform", {"sizes": (20, 40), "dv": 4}, odd="equal"),
    Case("transform", {"sizes": (20, 40), "dv": 3, "scale": 1e5, "heads": 1}),  # too many panels
    Case("transform", {"sizes": (20, 40), "dv": 3, "mask": "key bias"}),  # not for the transform
)
# Kernels of either method that the dtypes have in common are treated once.
KERNELS = {
    "project": r"project<float>|project_extents",
    "direct float32": r"direct_\w+<float(, 16)?(, true|, false)+>|direct_slope_gradient",
    "direct bfloat16": r"direct_\w+<bfloat16(, 16)?(, true|, false)+>",
    "transform float32": r"transform_\w+(<float(, true|, false)?>)?",
    "transform bfloat16": r"transform_\w+<bfloat16>",
}


class Site(NamedTuple):
    """Instructions to change together."""

    family: str
    kernel: str
    kind: str  # "barrier", "wait" or "guard"
    source: str  # the line it comes from
    changes: dict[int, str]  # as ptxrun's Kernel.changed takes them


@functools.cache
def launches(family: str) -> dict[str, list[Launched]]:
    """What the kernels of a family were launched with, by name."""
    torch.manual_seed(0)
    found: dict[str, list[Launched]] = {}

    def keep(machine: Machine) -> None:
        for launch in machine.launched or ():
            name = readable(launch.kernel.name)
            if re.fullmatch(KERNELS[family], name):
                found.setdefault(name, []).append(launch)

    kind, _, dtype = family.partition(" ")
    for case in {"direct": DIRECT, "transform": TRANSFORM}.get(kind, ()):
        p = problem(getattr(torch, dtype), **{"scale": 0.25, **case.problem})
        if case.odd == "nan":
            p.tensors[2][0, 3, 1] = math.nan
        elif case.odd == "equal":
            p.tensors[0][:] = torch.tensor([-1.5, 0.0])[:, None, None]
        grad_out, grad_lse = p.grads
        ahead, back = Machine(record=True), Machine(record=True)
        out, lse = forward(case.method, ahead, *p.tensors, *p.options, **p.score)
        grads = (grad_out, grad_lse if case.lse_gradient else None)
        backward(case.method, back, *grads, out, lse, *p.tensors, *p.options, **p.score)
        keep(ahead)
        keep(back)
    for batch, n, columns, outputs in ((2, 70, 5, 9), (1, 64, 64, 2)) if kind == "project" else ():
        machine = Machine(record=True)
        # In the gaps between rows nothing may be read.
        x = strided(torch.randn(batch, n, columns), "gaps")
        weight = strided(torch.randn(outputs, columns), "gaps")
        project(machine, x, weight, torch.randn(outputs) if columns == 5 else None)
        keep(machine)
    return found


@functools.cache
def lines_of(name: str) -> list[str] | None:
    """The lines of one of our files."""
    paths = [path for folder in ("cuda", "spec") for path in (CSRC / folder).rglob(name or "-")]
    return paths[0].read_text().splitlines() if paths else None


def source_of(instructions: list[Instr], pc: int) -> str:
    """The line of our sources that an instruction comes from, of a barrier with the one before."""
    for place in (instructions[pc].src, instructions[pc].caller):
        file, _, line = place.rpartition(":")
        lines = lines_of(file.rpartition("/")[2])
        if lines is not None:
            break
    else:
        return ""
    at = int(line) - 1
    text = lines[at].strip()
    if not text.startswith("__sync"):
        return text
    before = next(x.strip() for x in reversed(lines[:at]) if re.search(r"\w.*[;{]", x))
    return f"{before} {text}"


def accesses(instructions: list[Instr]) -> bool:
    return any(x.op in ("ld", "st", "cp", "ldmatrix") for x in instructions)


def guard_of_copy(instructions: list[Instr], pc: int) -> int:
    """Where the predicate is computed that decides whether copy `pc` copies or writes zeros."""
    size = instructions[pc].args[3]
    select = next(i for i in range(pc, 0, -1) if instructions[i].args[:1] == [size])
    predicate = instructions[select].args[3]
    return next(i for i in range(select, 0, -1) if instructions[i].args[:1] == [predicate])


def sites(family: str, name: str) -> list[Site]:
    instructions = launches(family)[name][0].kernel.prog.instrs
    found = []
    guards: dict[str, dict[int, str]] = {}
    for pc, ins in enumerate(instructions):
        if ins.op in ("bar", "barrier"):
            found.append(Site(family, name, "barrier", source_of(instructions, pc), {pc: "out"}))
        elif ins.op == "cp" and "wait_all" in ins.mods:
            found.append(Site(family, name, "wait", source_of(instructions, pc), {pc: "out"}))
        elif ins.op == "cp" and "shared" in ins.mods:
            at = guard_of_copy(instructions, pc)
            guards.setdefault(instructions[at].src, {})[at] = "true"
        elif ins.op == "bra" and ins.guard and ins.target > pc:
            around = instructions[pc + 1 : ins.target]
            if accesses(around):
                guards.setdefault(ins.src, {})[pc] = "out"
                continue
            # Perhaps the access is in the other branch.
            end = around[-1].target if around and around[-1].op == "bra" else pc
            if isinstance(end, int) and accesses(instructions[ins.target : end]):
                guards.setdefault(ins.src, {})[pc] = "taken"
    for changes in guards.values():
        found.append(Site(family, name, "guard", source_of(instructions, min(changes)), changes))
    return found


def matters(site: Site, launch: Launched) -> bool:
    """Whether anything at the site was of consequence for this launch."""
    result, instructions = launch.result, launch.kernel.prog.instrs
    if site.kind == "wait":
        return any(
            instructions[pc].op == "cp" and "shared" in instructions[pc].mods
            for pc in result.executed
        )
    return any(
        (pc, how == "out") in result.branched
        or (pc in result.executed and instructions[pc].op != "bra")
        for pc, how in site.changes.items()
    )


def verdict(site: Site) -> str:
    """ "seen", "unreached" (nothing here makes use of it) or "unseen"."""
    useful = [x for x in launches(site.family)[site.kernel] if matters(site, x)]
    useful.sort(key=lambda x: x.result.instructions)
    for launch in useful[: MOST_LAUNCHES if site.kind == "guard" else None]:
        try:
            same = launch.repeat(launch.kernel.changed(site.changes))
        except PtxError:
            return "seen"
        if not same:
            return "seen"
    return "unseen" if useful else "unreached"


# (kernel, source line) of what may be taken out unnoticed, and why.
REDUNDANT: dict[tuple[str, str], str] = {
    ("project", "if (lane == 0) result[o][i0 + i] = total;"): (
        "after the shuffles every lane has the same total: all of them would write it"
    ),
    ("project", "for (int64_t column = lane * V; column < p.columns; column += 32 * V) {"): (
        "past the last column read_columns gives zeros"
    ),
    ("project", "if (first + c < columns) {"): (
        "steps as long as the vectors: a whole number of them is in a row"
    ),
    ("*", "if (call.attn_mask.data) attn_offset = head_offset(call, call.attn_mask, h);"): (
        "of no mask the strides are 0, and nobody uses the offset"
    ),
    ("*", "if (call.key_mask.data) key_offset = head_offset(call, call.key_mask, h);"): (
        "of no mask the strides are 0, and nobody uses the offset"
    ),
    (
        "*",
        "const int64_t mask_offset = call.key_mask.data ? head_offset(call, call.key_mask, h) : 0;",
    ): "of no mask the strides are 0, and nobody uses the offset",
    ("*", "return call.dims > 0 ? offset + h * m.lead[0] : 0;"): (
        "where there are no leading dimensions h is 0, and so are the strides"
    ),
    (
        "transform_layout",
        "const double rho = ::exp(-::log(precision) / nodes);  // pow would spill registers",
    ): "a step that log takes for denormal numbers; others stay as they are",
    ("*", "if (fresh || rank > kRankChunk)"): "would write again what is there; saves time",
    ("*", "if (key + N < end) load(key + N);"): (
        "past the last token there are zeros, and nobody uses them; saves time"
    ),
    ("*", "if (row + N < call.n_q) load(row + N);"): (
        "past the last token there are zeros, and nobody uses them; saves time"
    ),
    ("direct_value_gradient", "for (int64_t row = start; row < call.n_q; row += N) {"): (
        "past the last query there are no weights, and nothing is added; saves time"
    ),
    ("direct_logit_gradient", "for (int64_t first = start; first < end; first += N) {"): (
        "past the last query there are no weights, and nothing is added; saves time"
    ),
    ("*", "if (dropout.threshold)"): "below a threshold of 0 is nothing; saves time",
    ("*", "if (!masks.all_plain(at.first, kThreads, key, N))"): (
        "masks leave such a tile as it is; saves time"
    ),
    (
        "*",
        "if (!plain) table.edit(logit, [&](T x, int j) { return masks.apply(x, row, key + j); });",
    ): "masks leave such a tile as it is; saves time",
    (
        "*",
        "if (!plain) table.edit(logit, [&](T x, int i) { return masks.apply(x, row + i, key); });",
    ): "masks leave such a tile as it is; saves time",
    ("*", "if (!plain && not_finite<S, N>(here))"): "adds the same terms one by one; saves time",
    (
        "*",
        "if (!plain && (__any_sync(~0u, isnan(norm[threadIdx.x % N].low)) || not_finite<S, "
        "N>(here)))",
    ): "adds the same terms one by one; saves time",
    ("direct_logit_gradient", "if (plain || is_finite(part)) return part;"): (
        "adds the same terms again; saves time"
    ),
    ("*", "const T x = factor ? factor[token(i)] : T(1);"): (
        "forward has factors, backward has none: no choice in either"
    ),
    ("*", "switch (m.dtype) {"): "a choice among dtypes: launches of one family have one",
    (
        "direct_row_norms",
        "if (kTensorCores<S>) __syncwarp();  // rows lie where other lanes' columns do",
    ): "has no use for rows",
    (
        "direct_logit_gradient",
        "if (!plain) x = masks.apply(x, Keys ? first + o : token, Keys ? token : first + o);",
    ): "masks leave such a tile as it is; saves time",
    ("*", "g.grad_lse.data ? head_of<const double>(call, g.grad_lse, cut.head) : nullptr;"): (
        "of no tensor the strides are 0: head_of is null, too"
    ),
    ("direct_row_norms", "if (first + c < columns) {"): (
        "steps as long as the vectors: a whole number of them is in a row"
    ),
    (
        "*",
        "column[threadIdx.x] = last ? last[(cut.head * side.panels + cut.panel) * P + "
        "threadIdx.x] : 0;",
    ): "a kernel has this column or has it not: no choice in either",
    ("*", "for (int start = tokens.first; start < tokens.end; start += kFlush) {"): (
        "past the last token weights are 0; saves time"
    ),
    ("*", "for (int start = mine.first; start < mine.end; start += kFlush) {"): (
        "past the last token the inner loop is empty, too"
    ),
    ("*", "if (i < tokens.end) {"): "past the last token weights are 0, and token 0 is read",
    ("*", "for (int first = mine.first; first < mine.end; first += Lanes::kTokens) {"): (
        "past the last token nothing is written; saves time"
    ),
    ("transform_evaluate_keys", "if (!slopes) continue;"): "adds nothing but zeros; saves time",
    ("transform_evaluate_keys", "if (!at.served) return;"): (
        "a head without a layout is not served either, which is asked next"
    ),
    ("*", "while (high - panel > 1) {  // starts[panel] <= index < starts[high]"): (
        "where there is one panel, the search finds that"
    ),
    ("transform_key_error", "if (panel >= layout.query.panels) return;"): (
        "of panels that are not in use nobody reads the error; saves time"
    ),
    ("transform_pull", "if (panel >= layout.query.panels) return;"): (
        "of panels that are not in use nobody reads the pull; saves time"
    ),
    (
        "transform_pull",
        "if (threadIdx.x % 32 == 0) work.pull[(2 * h + end) * nodes + a] = sum + "
        "gradient[call.dv];",
    ): "after the shuffles every lane has the same sum: all of them would write it",
    ("transform_core", "if (tile == 0 && threadIdx.x % Lanes::kGroups == 0) {"): (
        "all threads of a node, in every tile, have the same sum: all of them would write it"
    ),
    (
        "transform_adjoint",
        "if (tile == 0 && threadIdx.x % Lanes::kGroups == 0) work.slope_last[key] = felt ? rest : "
        "0;",
    ): "all threads of a node, in every tile, have the same sum: all of them would write it",
}


def judge(chosen: list[Site]) -> Counter[str]:
    """How many were seen and how many are redundant; none may be unseen for no known reason."""
    count: Counter[str] = Counter()
    unexplained = []
    for site in chosen:
        found = verdict(site)
        names = (site.kernel, site.kernel.partition("<")[0], "*")
        if found == "unreached" and site.source.startswith(("for (", "while (")):
            found = "never empty"  # a loop; what would skip it is what ends it
        elif found != "seen" and any((name, site.source) in REDUNDANT for name in names):
            found = "redundant"
        count[f"{site.kind} {found}"] += 1
        if found in ("unseen", "unreached"):
            unexplained.append(f"{found} {site.kind} in {site.kernel}: {site.source}")
    assert not unexplained, "\n".join(unexplained)
    return count


def test_a_sample_of_damage_is_noticed() -> None:
    """Of the smallest kernels; the rest is for the full run."""
    everything = [site for name in launches("project") for site in sites("project", name)]
    assert judge(random.Random(0).sample(everything, 8)).total() == 8


@pytest.mark.full
@pytest.mark.parametrize("family", KERNELS)
def test_all_damage_is_noticed(family: str) -> None:
    count = judge([site for name in launches(family) for site in sites(family, name)])
    assert count["barrier seen"] > 0
    assert count["guard seen"] > 0
    print(family, dict(count))
