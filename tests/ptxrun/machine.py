"""Kernel launches: argument packing, CTA scheduling, divergence, barriers, counters."""

import copy
import re
import struct
import time
from dataclasses import dataclass, field

import numpy as np

from . import memops, parser, warpops
from .errors import DeadlockError, Hazard, HazardError, PtxError, UnsupportedError
from .memory import GLOBAL_BASE, GUARD, UINT, Arena, Buffer, GlobalRace, Race, sectors, wavefronts
from .ops import OPS, SIZES, Compiler
from .parser import Imm

CONTROL = {"bra", "brx", "exit", "bar", "barrier"}
XYZ = "xyz"
SPECIAL32 = (
    ["%tid." + a for a in XYZ]
    + ["%ntid." + a for a in XYZ]
    + ["%ctaid." + a for a in XYZ]
    + ["%nctaid." + a for a in XYZ]
    + [
        "%laneid",
        "%warpid",
        "%nwarpid",
        "%smid",
        "%nsmid",
        "%gridid",
        "%lanemask_eq",
        "%lanemask_lt",
        "%lanemask_le",
        "%lanemask_gt",
        "%lanemask_ge",
        "%dynamic_smem_size",
        "%total_smem_size",
        "%clock",
        "%clock_hi",
        "%globaltimer_lo",
        "%is_explicit_cluster",
        "%cluster_ctarank",
        "%cluster_nctarank",
    ]
)
SPECIAL64 = ["%clock64", "%globaltimer"]


def is_control(ins):
    return ins.op in CONTROL


def is_sync(ins):
    return ins.op in warpops.SYNC_OPS


def classify(ins):
    o, mods = ins.op, ins.mods
    t = next((m for m in reversed(mods) if m in SIZES), "")
    if o in ("fma", "mad") and t in ("f32", "f64"):
        return "ffma" if t == "f32" else "dfma"
    if o in ("add", "sub", "mul", "min", "max", "neg", "abs") and t in ("f32", "f64"):
        return (
            {"add": "fadd", "sub": "fadd", "mul": "fmul"}.get(o, "fmnmx") if t == "f32" else "dfma"
        )
    if o in ("add", "sub", "mul", "min", "max", "neg", "abs", "fma") and t in (
        "f16",
        "bf16",
        "f16x2",
        "bf16x2",
    ):
        return "half"
    if o in ("ex2", "lg2", "rsqrt", "rcp", "sqrt", "sin", "cos", "tanh"):
        return "mufu"
    if o == "div":
        return "fdiv" if t[0] == "f" else "idiv"
    if o in ("mma", "wmma"):
        return "mma" if o == "mma" or mods[0] == "mma" else "wmma." + mods[0]
    if o in ("ld", "st", "atom", "red"):
        return f"{o}.{memops.space_of(ins)}"
    if o == "cp":
        return (
            "cp.async"
            if mods[-1] not in ("commit_group", "wait_group", "wait_all")
            else "cp.async.ctl"
        )
    if o in ("setp", "set", "selp", "slct"):
        return "cmp/sel"
    if o in ("mov", "cvta"):
        return "mov"
    if o in (
        "bra",
        "brx",
        "exit",
        "bar",
        "barrier",
        "cvt",
        "shfl",
        "ldmatrix",
        "stmatrix",
        "vote",
        "redux",
        "match",
    ):
        return {"bra": "branch", "brx": "branch", "barrier": "bar"}.get(o, o)
    if o in (
        "add",
        "sub",
        "mul",
        "mad",
        "addc",
        "subc",
        "madc",
        "and",
        "or",
        "xor",
        "not",
        "shl",
        "shr",
        "shf",
        "prmt",
        "lop3",
        "bfe",
        "bfi",
        "popc",
        "clz",
        "bfind",
        "brev",
        "min",
        "max",
        "abs",
        "neg",
        "rem",
        "sad",
        "mul24",
        "mad24",
        "dp4a",
    ):
        return "int"
    return "other"


class Struct:
    """A by-value struct argument that may hold pointers.

    Struct('PPif', q, o, n, scale): struct-module format with native alignment; 'P' fields take an array,
    a tensor or None. Append e.g. '0q' to pad the end to 8 bytes.
    """

    def __init__(self, fmt, *values):
        self.codes = re.findall(r"(\d*)([a-zA-Z?])", fmt)
        self.fmt, self.values = "@" + fmt, values

    def pack(self, buffers, fix, param, k):
        vals, pre, it = [], "@", iter(self.values)
        for cnt, code in self.codes:
            for _ in range(int(cnt) if cnt else 1):
                if code == "x":
                    pre += "x"
                    continue
                v = next(it)
                pre += code
                if code == "P":
                    if v is not None:
                        buf = Buffer(v, f"arg {k} field {len(vals)}")
                        buffers.append(buf)
                        fix.append((param.addr + struct.calcsize(pre) - 8, buf))
                    v = 0
                vals.append(v)
        return struct.pack(self.fmt, *vals)


@dataclass
class Result:
    kernel: str
    hazards: list = field(default_factory=list)
    counts: dict = field(default_factory=dict)  # class -> warp instructions issued
    thread_counts: dict = field(default_factory=dict)  # class -> thread instructions
    bytes: dict = field(default_factory=dict)  # 'ld.global', 'st.shared', ... -> bytes
    mma_flops: int = 0
    shared_wavefronts: int = 0  # with profile=True
    shared_wavefronts_ideal: int = 0
    sectors: dict = field(
        default_factory=dict
    )  # 32-byte global sectors, 'ld' / 'st', with profile=True
    instructions: int = 0  # interpreter steps (CTA-wide instructions)
    executed: set = field(default_factory=set)  # instructions, by their number in the kernel
    branched: set = field(default_factory=set)  # (branch, taken): what some thread did there
    ctas: int = 0
    seconds: float = 0.0

    def report(self):
        out = [f"{self.kernel}: {self.ctas} CTAs, {self.instructions} steps, {self.seconds:.2f} s"]
        out += [
            f"  {k:14s} {v:12d} warp instr"
            for k, v in sorted(self.counts.items(), key=lambda x: -x[1])
        ]
        out += [f"  {k:14s} {v:12d} bytes" for k, v in sorted(self.bytes.items())]
        if self.mma_flops:
            out.append(f"  mma flops      {self.mma_flops:12d}")
        if self.shared_wavefronts:
            out.append(
                f"  shared wavefronts {self.shared_wavefronts} (conflict-free {self.shared_wavefronts_ideal})"
            )
        out += [f"  global sectors {k} {v}" for k, v in self.sectors.items()]
        out += [f"  {h}" for h in self.hazards]
        return "\n".join(out)


class Module:
    """A loaded PTX module. `globals` maps .global/.const names to their raw bytes (numpy uint8)."""

    def __init__(self, text):
        self.ast = parser.Module(text)
        self.globals = {}
        self._vars = []
        self._pos = GUARD
        self._kernels = {}
        self._layout()

    def _layout(self):
        for name, v in self.ast.vars.items():
            if v.space == "shared" or v.addr is not None:
                continue
            if v.extern and not v.size:
                raise UnsupportedError(f"unresolved extern variable {name}")
            a = max(v.align, 16)
            self._pos = -(-self._pos // a) * a
            v.addr = GLOBAL_BASE + self._pos
            self._pos += v.size + GUARD
            st = np.zeros(v.size, np.uint8)
            if v.init is not None:
                st[: len(v.init)] = np.frombuffer(v.init, np.uint8)
            self.globals[name] = st
            self._vars.append((v, st))
        for v, st in self._vars:
            for off, name, add in v.fixups:
                if (
                    name in self.ast.vars
                ):  # function addresses stay 0: indirect calls are unsupported
                    st[off : off + 8] = np.array([self.ast.vars[name].addr + add], np.uint64).view(
                        np.uint8
                    )
            v.fixups = []

    def kernels(self):
        return [f.name for f in self.ast.entries()]

    def kernel(self, name=None):
        names = self.kernels()
        if name is None:
            if len(names) != 1:
                raise PtxError(f"module has {len(names)} kernels, name one of {names}")
            name = names[0]
        if name not in names:
            hits = [k for k in names if name in k]
            if len(hits) != 1:
                raise PtxError(f"kernel {name!r} not found (or ambiguous); module has {names}")
            name = hits[0]
        if name not in self._kernels:
            self._kernels[name] = Kernel(self, name)
        return self._kernels[name]


class Kernel:
    def __init__(self, module, name):
        self.module, self.name = module, name
        self.decl = module.ast.funcs[name]
        self.prog = module.ast.parse_kernel(name)
        module._layout()
        for i, ins in enumerate(self.prog.instrs):
            ins.pc = i
        self._shared_layout()
        self._compiled = {}
        ins = self.prog.instrs
        self.full_next = self._next(lambda i: is_control(i))
        self.div_next = self._next(lambda i: is_control(i) or is_sync(i))
        gran = 4
        self.ggran = min(
            [4]
            + [
                SIZES[m]
                for i in ins
                if i.op in ("ld", "st", "atom", "red", "wmma")
                for m in i.mods
                if SIZES.get(m)
            ]
        )
        for i in ins:
            if i.op in ("ld", "st", "atom", "red") and memops.space_of(i) in ("shared", "generic"):
                gran = min(gran, max(1, min(SIZES[m] for m in i.mods if m in SIZES)))
            elif i.op in ("wmma", "stmatrix"):
                gran = min(gran, 2)
        self.gran = gran

    def _next(self, pred):
        ins = self.prog.instrs
        nxt, cur = [0] * len(ins), len(ins)
        for i in range(len(ins) - 1, -1, -1):
            if pred(ins[i]):
                cur = i
            nxt[i] = cur
        return nxt

    def _shared_layout(self):
        """Static variables with gaps between them: whoever leaves one does not land in the next.

        Gaps are multiples of what all banks take, so bank conflicts are those of a dense layout.
        """
        pos, gaps, self.shared_addr, self.shared_gaps = 0, 0, {}, []
        for v in self.prog.shared:
            if v.extern:
                continue
            if self.shared_addr:
                self.shared_gaps.append((pos, pos + GUARD))
                pos += GUARD
                gaps += GUARD
            pos = -(-pos // v.align) * v.align
            self.shared_addr[id(v)] = pos
            pos += v.size
        self.static_shared = pos - gaps
        self.has_dynamic = any(v.extern for v in self.prog.shared)
        self.static_end = self.dyn_base = pos
        for v in self.prog.shared:
            if v.extern:
                self.dyn_base = -(-self.dyn_base // max(v.align, 16)) * max(v.align, 16)
        for v in self.prog.shared:
            if v.extern:
                self.shared_addr[id(v)] = self.dyn_base

    def sym_addr(self, v):
        return self.shared_addr[id(v)] if v.space == "shared" else v.addr

    def compile(self, n):
        if n in self._compiled:
            return self._compiled[n]
        prog = self.prog
        base = len(prog.regs)
        special = {k: base + i for i, k in enumerate(SPECIAL32)}
        special.update({k: base + len(SPECIAL32) + i for i, k in enumerate(SPECIAL64)})
        c = Compiler(prog, n, special, self.sym_addr)
        c.lanes = np.arange(n)
        fns = []
        for ins in prog.instrs:
            fns.append(None if is_control(ins) else self._decode(c, ins))
        sync = {
            i: warpops.membermask(c, ins)
            for i, ins in enumerate(prog.instrs)
            if is_sync(ins) or (ins.op == "bar" and "warp" in ins.mods)
        }
        ctl = {
            i: self._decode_control(c, ins) for i, ins in enumerate(prog.instrs) if is_control(ins)
        }
        self._compiled[n] = (c, fns, sync, ctl)
        return self._compiled[n]

    def _decode(self, c, ins):
        h = OPS.get(ins.op)
        try:
            if h is None:
                c.bad(ins)
            f = h(c, ins)
        except UnsupportedError as e:
            return self._raiser(e)
        except (IndexError, KeyError, AttributeError, StopIteration, ValueError) as e:
            return self._raiser(
                UnsupportedError(
                    f"PTX line {ins.line}: cannot decode `{ins.text}` ({type(e).__name__}: {e})"
                )
            )
        if ins.guard is None:
            return f
        p, neg = ins.guard[0].idx, ins.guard[1]
        n = c.n

        def guarded(s, m):
            g = s.R[p]
            if neg:
                g = ~g
            if m is not None:
                g = g & m
            k = np.count_nonzero(g)
            if k == n:
                f(s, None)
            elif k:
                f(s, g)

        return guarded

    @staticmethod
    def _raiser(e):
        def run(s, m):
            raise e

        run.unsupported = str(e)
        return run

    def _decode_control(self, c, ins):
        """Operand getters of barrier and indexed-branch instructions."""
        if ins.op == "brx":
            return c.src(ins.args[0], "u32", ins)
        if ins.op in ("bar", "barrier"):
            if "warp" in ins.mods:
                return None
            kind = next((m for m in ins.mods if m in ("sync", "arrive", "red")), None)
            if kind is None or "cluster" in ins.mods:
                return self._raiser(
                    UnsupportedError(f"PTX line {ins.line}: unsupported `{ins.opcode}`")
                )
            if kind == "red":
                rop = next((m for m in ins.mods if m in ("popc", "and", "or")), None)
                args = list(ins.args)
                w = c.dst(args[0], "b32" if rop == "popc" else "pred", ins)
                p = c.src(args[-1], "pred", ins)
                mid = args[1:-1]
                return (
                    kind,
                    c.src(mid[0], "u32", ins),
                    c.src(mid[1], "u32", ins) if len(mid) > 1 else None,
                    (rop, w, p),
                )
            args = ins.args or [Imm(0)]
            return (
                kind,
                c.src(args[0], "u32", ins),
                c.src(args[1], "u32", ins) if len(args) > 1 else None,
                None,
            )
        return None

    def changed(self, changes):
        """This kernel with some instructions changed: what a test of tests runs.

        changes: {pc: how}; 'out' leaves the instruction out, 'taken' makes a branch unconditional,
        'true' makes the predicate that the instruction computes true.
        """
        if not self._compiled:
            raise PtxError(f"{self.name}: launch the kernel as it is before changing something")
        other = copy.copy(self)
        other.prog = copy.copy(self.prog)
        instrs = other.prog.instrs = list(self.prog.instrs)
        other._compiled = {
            n: (c, list(fns), dict(sync), dict(ctl))
            for n, (c, fns, sync, ctl) in self._compiled.items()
        }
        for pc, how in changes.items():
            ins = instrs[pc]
            if how == "taken":
                instrs[pc] = copy.copy(ins)
                instrs[pc].guard = None
                continue
            text = f"({how}) {ins.text}"
            instrs[pc] = parser.Instr(
                "membar", ("cta",), [], None, ins.line, text, pc=pc, src=ins.src
            )
            for c, fns, sync, ctl in other._compiled.values():
                fns[pc] = self._set_true(c, ins) if how == "true" else lambda s, m: None
                sync.pop(pc, None)
                ctl.pop(pc, None)
        other.full_next = other._next(is_control)
        other.div_next = other._next(lambda i: is_control(i) or is_sync(i))
        return other

    @staticmethod
    def _set_true(c, ins):
        write = c.dst(ins.args[0], "pred", ins)
        return lambda s, m: write(s.R, m, np.ones(s.n, bool))

    def unsupported(self):
        """[(line, message)] of everything in this kernel the interpreter cannot execute."""
        _, fns, _, ctl = self.compile(32)
        bad = []
        for i, f in enumerate(fns):
            g = f if f is not None else ctl.get(i)
            if hasattr(g, "unsupported"):
                bad.append((self.prog.instrs[i].line, g.unsupported))
        return bad

    # ---- launch ----------------------------------------------------------
    def _pack(self, args, buffers):
        params = self.prog.params
        args = list(args)
        if len(args) < len(params):
            extra = params[len(args) :]
            if len(extra) <= 2 and all(p.ptr and p.size == 8 for p in extra):
                args += [None] * len(extra)  # Triton's scratch pointers
        if len(args) != len(params):
            raise PtxError(f"{self.name} takes {len(params)} arguments, got {len(args)}")
        size = max([p.addr + p.size for p in params], default=0)
        raw = np.zeros(-(-max(size, 1) // 16) * 16, np.uint8)
        fix = []
        for k, (p, a) in enumerate(zip(params, args, strict=False)):
            if a is None:
                b = bytes(p.size)
            elif isinstance(a, (bytes, bytearray)):
                if len(a) != p.size:
                    raise PtxError(f"argument {k} ({p.name}) needs {p.size} bytes, got {len(a)}")
                b = bytes(a)
            elif isinstance(a, Struct):
                b = bytearray(a.pack(buffers, fix, p, k))
                if len(b) != p.size:
                    raise PtxError(
                        f"argument {k} ({p.name}) needs {p.size} bytes, Struct has {len(b)}"
                    )
            elif hasattr(a, "data_ptr") or (isinstance(a, np.ndarray) and a.ndim >= 1):
                if p.size != 8:
                    raise PtxError(
                        f"argument {k} ({p.name}) is a {p.size}-byte scalar, got an array"
                    )
                buf = Buffer(a, f"arg {k}")
                buffers.append(buf)
                fix.append((p.addr, buf))
                b = bytes(8)
            else:
                b = self._scalar(k, p, a)
            raw[p.addr : p.addr + p.size] = np.frombuffer(b, np.uint8)
        return raw, fix, size

    def _scalar(self, k, p, a):
        fts = {2: np.float16, 4: np.float32, 8: np.float64}
        if isinstance(a, (np.generic, np.ndarray)) and not isinstance(a, float):
            if a.dtype.itemsize == p.size and (p.type[0] != "f" or a.dtype.kind == "f"):
                return a.tobytes()
            a = a.item()
        if isinstance(a, bool):
            a = int(a)
        if p.type in ("f32", "f64", "f16") or isinstance(a, float):
            if p.size not in fts or (
                p.type[0] in "us" and isinstance(a, float) and not p.type.startswith("b")
            ):
                raise PtxError(f"argument {k} ({p.name}, .{p.type}) cannot take the float {a}")
            return np.array([a], fts[p.size]).tobytes()
        if not isinstance(a, int):
            raise PtxError(f"argument {k} ({p.name}): cannot pass a {type(a).__name__}")
        if not -(1 << (8 * p.size - 1)) <= a < 1 << (8 * p.size):
            raise PtxError(f"argument {k} ({p.name}): {a} does not fit .{p.type}")
        return (a & ((1 << (8 * p.size)) - 1)).to_bytes(p.size, "little")

    def launch(
        self,
        grid=(1, 1, 1),
        block=None,
        args=(),
        smem=0,
        order="shuffled",
        seed=0,
        racecheck=True,
        intrawarp=True,
        uninit="poison",
        on_hazard="raise",
        schedule="lockstep",
        max_steps=3_000_000,
        max_total_steps=None,
        only_ctas=None,
        globalcheck=False,
        profile=False,
    ):
        """Run the kernel; arrays in args are modified in place.

        order: 'shuffled' or 'linear' CTA order.  schedule: 'lockstep' runs all warps of a CTA together,
        'warps' runs one randomly chosen warp at a time up to its next barrier (slower, shows the value
        effects of missing barriers).  uninit: 'poison', or 'report' to record reads of uninitialised
        shared memory as hazards.  on_hazard: 'raise' (HazardError) or 'return'.  max_steps: limit per CTA;
        max_total_steps: of all CTAs together, looked at after each.
        globalcheck: also report conflicting global accesses of different CTAs ('inter-CTA' hazards).
        profile: also count shared-memory wavefronts (bank conflicts) and 32-byte global sectors.
        """
        t0 = time.perf_counter()
        grid = _dim3(grid)
        if block is None:
            req = self.decl.directives.get("reqntid")
            if not req:
                raise PtxError(f"{self.name}: block size required")
            block = req
        block = _dim3(block)
        req = self.decl.directives.get("reqntid")
        if req and _dim3(req) != block:
            raise PtxError(
                f"{self.name}: compiled for block {_dim3(req)} (.reqntid), launched with {block}"
            )
        mx = self.decl.directives.get("maxntid")
        if mx and np.prod(_dim3(mx)) < np.prod(block):
            raise PtxError(f"{self.name}: block {block} larger than .maxntid {mx}")
        if np.prod(block) > 1024:
            raise PtxError(f"{self.name}: block {block} has more than 1024 threads")
        if (
            order not in ("shuffled", "linear")
            or schedule not in ("lockstep", "warps")
            or uninit not in ("poison", "report")
            or intrawarp not in (True, False, "barriers")
        ):
            raise PtxError("bad launch option")
        buffers = []
        raw, fix, psize = self._pack(args, buffers)
        arena = Arena(self.module._vars, buffers)
        for off, buf in fix:
            raw[off : off + 8] = np.array([arena.addr[id(buf)]], np.uint64).view(np.uint8)
        nthreads = int(np.prod(block))
        n = -(-nthreads // 32) * 32
        compiled = self.compile(n)
        rng = np.random.default_rng(seed)
        ctas = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        if only_ctas is not None:
            ctas = [c for c in ctas if c in only_ctas]
        if order == "shuffled":
            ctas = [ctas[i] for i in rng.permutation(len(ctas))]
        res = Result(self.name)
        st = Launch(
            self,
            compiled,
            arena,
            raw,
            psize,
            grid,
            block,
            nthreads,
            n,
            smem,
            rng,
            res,
            racecheck,
            intrawarp,
            uninit == "report",
            schedule,
            max_steps,
        )
        st.profile = profile
        st.grace = GlobalRace(arena.size, min(self.gran, self.ggran), st) if globalcheck else None
        try:
            with np.errstate(all="ignore"):
                for st.cta_no, cta in enumerate(ctas):
                    st.run_cta(cta)
                    if max_total_steps is not None and st.steps > max_total_steps:
                        raise PtxError(f"{self.name}: more than max_total_steps={max_total_steps}")
        finally:
            arena.write_back()
        st.finish()
        res.ctas = len(ctas)
        res.seconds = time.perf_counter() - t0
        if res.hazards and on_hazard == "raise":
            raise HazardError(
                f"{len(res.hazards)} hazard(s):\n" + "\n".join(str(h) for h in res.hazards[:10]),
                res,
            )
        return res


def _dim3(d):
    d = (d,) if isinstance(d, (int, np.integer)) else tuple(d)
    return tuple(int(x) for x in d) + (1,) * (3 - len(d))


class Launch:
    """State of a launch and of the CTA that is running."""

    def __init__(
        self,
        kernel,
        compiled,
        arena,
        param,
        psize,
        grid,
        block,
        nthreads,
        n,
        smem,
        rng,
        res,
        racecheck,
        intra,
        uninit,
        schedule,
        max_steps,
    ):
        self.k, self.name = kernel, kernel.name
        self.c, self.fns, self.sync, self.ctl = compiled
        self.arena, self.param, self.param_size = arena, param, psize
        self.grid, self.block, self.nthreads, self.n = grid, block, nthreads, n
        self.smem_size = (
            kernel.dyn_base if kernel.has_dynamic or smem else kernel.static_end
        ) + smem
        self.smem_valid = None
        if kernel.shared_gaps:
            self.smem_valid = np.ones(self.smem_size, bool)
            for a, b in kernel.shared_gaps:
                self.smem_valid[a:b] = False
        self.dyn = smem
        self.local_size = kernel.prog.local_size
        self.rng, self.res = rng, res
        self.racecheck, self.intra, self.uninit = racecheck, intra, uninit
        self.schedule, self.max_steps = schedule, max_steps
        self.all_warps = np.arange(n // 32)
        self.nbytes = {}
        self.hz = {}
        self.steps = 0
        ni = len(kernel.prog.instrs)
        self.wdiff = [0] * (ni + 1)
        self.tdiff = [0] * (ni + 1)
        self.fn_pc = {id(f): i for i, f in enumerate(self.fns) if f is not None}
        self._static_special()

    def _static_special(self):
        n, (bx, by, bz) = self.n, self.block
        t = np.arange(n)
        sp = self.c.special
        u = np.uint32
        one = u(1)
        lane = (t & 31).astype(u)
        vals = {
            "%tid.x": t % bx,
            "%tid.y": t // bx % by,
            "%tid.z": t // (bx * by),
            "%ntid.x": bx,
            "%ntid.y": by,
            "%ntid.z": bz,
            "%nctaid.x": self.grid[0],
            "%nctaid.y": self.grid[1],
            "%nctaid.z": self.grid[2],
            "%laneid": lane,
            "%warpid": t >> 5,
            "%nwarpid": n // 32,
            "%smid": 0,
            "%nsmid": 108,
            "%gridid": 0,
            "%lanemask_eq": one << lane,
            "%lanemask_lt": (one << lane) - one,
            "%lanemask_le": (one << lane) | ((one << lane) - one),
            "%lanemask_ge": ~((one << lane) - one),
            "%lanemask_gt": ~((one << lane) | ((one << lane) - one)),
            "%dynamic_smem_size": self.dyn,
            "%total_smem_size": self.smem_size,
            "%clock": 0,
            "%clock_hi": 0,
            "%globaltimer_lo": 0,
            "%is_explicit_cluster": 0,
            "%cluster_ctarank": 0,
            "%cluster_nctarank": 1,
        }
        self.special_vals = [
            (sp[k], np.broadcast_to(np.asarray(v).astype(u), n).copy()) for k, v in vals.items()
        ]
        self.special_vals += [(sp[k], np.zeros(n, np.uint64)) for k in SPECIAL64]
        poison = {
            2: np.full(n, 0xFFFF, np.uint16),
            4: np.full(n, 0xFFFFFFFF, np.uint32),
            8: np.full(n, 0xFFFFFFFFFFFFFFFF, np.uint64),
            1: np.full(n, 0xFF, np.uint8),
            0: np.zeros(n, bool),
            16: np.full((n, 2), 0xFFFFFFFFFFFFFFFF, np.uint64),
        }
        self.reg_init = [poison[SIZES[t]] for t in self.k.prog.regs]

    # ---- services used by the instruction closures ---------------------------
    def space_size(self, sp):
        return {"shared": self.smem_size, "local": self.local_size, "param": self.param_size}.get(
            sp, 0
        )

    def count_bytes(self, key, nb):
        self.nbytes[key] = self.nbytes.get(key, 0) + nb

    def count_waves(self, off, nb, lanes):
        a, b = wavefronts(off, nb, lanes)
        self.res.shared_wavefronts += a
        self.res.shared_wavefronts_ideal += b

    def count_sectors(self, key, off, nb, lanes):
        self.res.sectors[key] = self.res.sectors.get(key, 0) + sectors(off, nb, lanes)

    def count_mma(self, warps, mnk):
        self.res.mma_flops += 2 * warps * mnk

    def warps_of(self, m):
        return self.all_warps if m is None else np.flatnonzero(m.reshape(-1, 32).any(1))

    def warp_sync(self, warps, barrier=False):
        if self.race and (barrier or self.intra != "barriers"):
            self.race.warp_sync(warps)

    def hazard(self, kind, scope, pc, opc, thread, other, addr, count):
        key = (kind, scope, pc, opc)
        h = self.hz.get(key)
        if h is not None:
            h.count += count
            return
        ins = self.k.prog.instrs
        o = ins[opc] if opc >= 0 else None
        h = Hazard(
            kind,
            scope,
            self.name,
            self.cta,
            ins[pc].line,
            ins[pc].text,
            o.line if o else 0,
            o.text if o else "",
            thread,
            other,
            addr,
            count,
            ins[pc].src,
            o.src if o else "",
        )
        self.hz[key] = h
        self.res.hazards.append(h)

    # ---- one CTA ---------------------------------------------------------------
    def run_cta(self, cta):
        n = self.n
        self.cta = cta
        self.steps0 = self.steps
        R = self.R = list(self.reg_init) + [None] * (len(SPECIAL32) + len(SPECIAL64))
        for i, v in self.special_vals:
            R[i] = v
        for a, v in zip(XYZ, cta, strict=False):
            R[self.c.special["%ctaid." + a]] = np.full(n, v, np.uint32)
        pad = -(-max(self.smem_size, 1) // 16) * 16
        self.smem = np.full(pad, 0xFF, np.uint8)
        self.smem_views = {k: self.smem.view(UINT[k]) for k in UINT}
        self.local = np.full((n, self.local_size), 0xFF, np.uint8)
        self.local_views = (
            {k: self.local.reshape(-1).view(UINT[k]) for k in UINT} if self.local_size else {}
        )
        self.race = (
            Race(pad, self.k.gran, n // 32, self, self.intra, self.uninit)
            if self.racecheck and self.smem_size
            else None
        )
        self.pending, self.groups = [], np.zeros(n, np.int64)
        self.cc = np.zeros(n, bool)
        self.pc = np.zeros(n, np.int64)
        self.alive = np.arange(n) < self.nthreads
        self.bar = np.full(n, -1, np.int64)
        self.bar_pc = np.zeros(n, np.int64)
        self.bar_state = {}
        self.wblk = np.zeros(n, bool)
        self.lazy = None
        self.mbar = {}
        self._loop()

    def _loop(self):
        fns, n, pc, bar, wblk = self.fns, self.n, self.pc, self.bar, self.wblk
        full_next, div_next = self.k.full_next, self.k.div_next
        warp_of = np.arange(n) >> 5
        serial = self.schedule == "warps"
        cur = -1
        picks = 0
        wdiff, tdiff = self.wdiff, self.tdiff
        while True:
            ready = self.alive & (bar < 0)
            run = ready & ~wblk
            if not np.count_nonzero(run):
                if not np.count_nonzero(self.alive):
                    return
                self._deadlock()
            if serial:
                sel = run & (warp_of == cur)
                idle = self.lazy is not None and not np.count_nonzero(sel & ~self.lazy)
                if not np.count_nonzero(sel) or idle or picks & 255 == 255:
                    self.lazy = None if idle else self.lazy
                    cur = int(self.rng.choice(np.unique(warp_of[run])))
                    sel = run & (warp_of == cur)
                run, ready = sel, ready & (warp_of == cur)
            pcs = pc[run]
            p = int(pcs.min())
            picks += 1
            if self.lazy is not None:  # threads that just polled in vain let the others go first
                hot = run & ~self.lazy
                if np.count_nonzero(hot):
                    run = hot
                    pcs = pc[run]
                    p = int(pcs.min())
                else:
                    self.lazy = None
            if picks & 63 == 0:  # fairness: spinning threads must not starve the others
                p = int(self.rng.choice(np.unique(pcs)))
            grp = ready & (pc == p)
            k = np.count_nonzero(grp)
            m = None if k == n else grp
            # Lanes that wait at a .sync instruction count too: a group that comes to them by falling
            # through must stop there and be joined with them.
            meeting = pc[ready & wblk]
            above = np.concatenate([pcs[pcs > p], meeting[meeting > p]])
            limit = int(above.min()) if len(above) else 1 << 60
            ctl = (full_next if m is None else div_next)[p]
            end = min(ctl, limit)
            if end > p:
                nw = n // 32 if m is None else len(self.warps_of(m))
                wdiff[p] += nw
                wdiff[end] -= nw
                tdiff[p] += k
                tdiff[end] -= k
                self.steps += end - p
                try:
                    for self.cur in fns[p:end]:
                        self.cur(self, m)
                except PtxError:
                    raise
                except Exception as e:
                    ins = self.k.prog.instrs[self.fn_pc.get(id(self.cur), p)]
                    raise PtxError(
                        f"internal error at PTX line {ins.line} `{ins.text}`: {type(e).__name__}: {e}"
                    ) from e
                if self.steps - self.steps0 > self.max_steps:
                    raise PtxError(
                        f"{self.name}: more than max_steps={self.max_steps} steps (endless loop?) near PTX line "
                        f"{self.k.prog.instrs[p].line}"
                    )
            if limit <= ctl:
                pc[grp] = limit
                wblk[grp] = False
                continue
            self._control(ctl, grp, k)

    def _control(self, e, grp, k):
        ins = self.k.prog.instrs[e]
        pc = self.pc
        nw = len(self.warps_of(grp))
        self.wdiff[e] += nw
        self.wdiff[e + 1] -= nw
        self.tdiff[e] += k
        self.tdiff[e + 1] -= k
        self.steps += 1
        self.wblk[grp] = False
        if ins.guard is None:
            act = grp
        else:
            g = self.R[ins.guard[0].idx]
            act = grp & (~g if ins.guard[1] else g)
        if ins.op == "bra":
            pc[grp] = e + 1
            pc[act] = ins.target
            took = np.count_nonzero(act)
            if took:
                self.res.branched.add((e, True))
            if took < k:
                self.res.branched.add((e, False))
            if self.steps - self.steps0 > self.max_steps:
                raise PtxError(
                    f"{self.name}: more than max_steps={self.max_steps} steps (endless loop?) near PTX line {ins.line}"
                )
        elif ins.op == "exit":
            pc[grp] = e + 1
            self.alive = self.alive & ~act
            self._release()
        elif ins.op == "brx":
            idx = self.ctl[e](self.R)[act]
            if len(idx) and idx.max() >= len(ins.target):
                raise PtxError(f"PTX line {ins.line}: brx index out of range")
            pc[grp] = e + 1
            pc[act] = np.array(ins.target)[idx]
        elif e in self.sync:
            self._sync_op(e, ins, grp, act)
        else:
            pc[grp] = e + 1
            if np.count_nonzero(act):
                self._barrier(e, ins, act)

    def _sync_op(self, e, ins, grp, act):
        """A warp-level .sync instruction reached by a diverged group: wait until its lanes are together."""
        mask = self.sync[e]
        n = self.n
        avail = warpops._ballot(np.ones(n, bool), act) | ~warpops._ballot(self.alive, None)
        if mask is None:
            need = np.full(n, 0xFFFFFFFF, np.uint32)
        else:
            need = mask(self.R)
            own = (need >> (np.arange(n) & 31).astype(np.uint32)) & np.uint32(1)
            if np.count_nonzero(act & (own == 0)):
                t = int(np.flatnonzero(act & (own == 0))[0])
                raise PtxError(
                    f"{self.name}: thread {t} executes `{ins.opcode}` at PTX line {ins.line} but is not in its membermask"
                )
        missing = act & ((need & ~avail) != 0)
        wait_w = missing.reshape(-1, 32).any(1)
        waiting = grp & np.repeat(wait_w, 32)
        go = grp & ~waiting
        if np.count_nonzero(waiting):
            self.pc[waiting] = e
            self.wblk[waiting] = True
        if np.count_nonzero(go):
            f = self.fns[e]
            if f is None:  # bar.warp.sync
                self.warp_sync(self.warps_of(go & act), barrier=True)
            else:
                f(self, go)
            self.pc[go] = e + 1

    # ---- CTA barriers ----------------------------------------------------------------
    def _barrier(self, e, ins, act):
        d = self.ctl[e]
        if callable(d):
            d(self, act)
        kind, gid, gcount, red = d
        ids = gid(self.R)[act]
        if not (ids == ids[0]).all():
            raise UnsupportedError(f"PTX line {ins.line}: barrier id differs between threads")
        b = int(ids[0])
        st = self.bar_state.setdefault(b, {"count": None, "arrive": set(), "vc": None, "red": []})
        if gcount is not None:
            st["count"] = int(gcount(self.R)[act][0])
        warps = self.warps_of(act)
        if kind == "arrive":
            st["arrive"] |= {int(w) for w in warps}
            if self.race:
                v = self.race.vc[warps].max(0)
                st["vc"] = v if st["vc"] is None else np.maximum(st["vc"], v)
                self.race.vc[warps, warps] += 1
        else:
            self.bar[act] = b
            self.bar_pc[act] = e
            if red:
                st["red"].append((red, act))
        self._release()

    def _release(self):
        for b, st in list(self.bar_state.items()):
            waiting = self.bar == b
            k = np.count_nonzero(waiting)
            if not k:
                continue
            warps = self.warps_of(waiting)
            if st["count"] is None:
                if k < np.count_nonzero(self.alive):
                    continue
            else:
                if len(set(warps.tolist()) | st["arrive"]) * 32 < st["count"]:
                    continue
                part = self.alive & np.repeat(np.isin(self.all_warps, warps), 32) & ~waiting
                if np.count_nonzero(part):
                    continue
            self._check_aligned(waiting)
            for (rop, w, p), act in st["red"]:
                allact = np.zeros(self.n, bool)
                for _, a in st["red"]:
                    allact |= a
                v = p(self.R)[allact]
                if rop == "popc":
                    w(self.R, act, np.full(self.n, int(v.sum()), np.uint32))
                else:
                    w(self.R, act, np.full(self.n, bool(v.all() if rop == "and" else v.any())))
            if self.race:
                if st["vc"] is not None:
                    self.race.vc[warps] = np.maximum(self.race.vc[warps], st["vc"])
                self.race.barrier(warps)
            self.bar[waiting] = -1
            del self.bar_state[b]

    def _check_aligned(self, waiting):
        """All lanes of a warp must wait at the same barrier instruction (bar.sync is .aligned)."""
        pcs = np.where(waiting, self.bar_pc, -1).reshape(-1, 32)
        hi = pcs.max(1)
        bad = ((pcs != hi[:, None]) & (pcs >= 0)).any(1)
        for w in np.flatnonzero(bad):
            a = int(hi[w])
            b = int(pcs[w][(pcs[w] >= 0) & (pcs[w] != a)][0])
            t = int(w * 32 + np.flatnonzero(pcs[w] == a)[0])
            self.hazard("divergent-barrier", "intra-warp", a, b, t, -1, -1, 1)

    def _deadlock(self):
        ins = self.k.prog.instrs
        msg = []
        for t in np.flatnonzero(self.alive):
            p = int(self.bar_pc[t]) if self.bar[t] >= 0 else int(self.pc[t])
            msg.append((ins[p].line, ins[p].text))
        uniq = {}
        for x in msg:
            uniq[x] = uniq.get(x, 0) + 1
        raise DeadlockError(
            f"{self.name} CTA {self.cta}: deadlock; waiting threads: "
            + "; ".join(f"{c} at PTX line {l} `{t}`" for (l, t), c in uniq.items())
            + f"; {int(self.nthreads - self.alive.sum())} exited"
        )

    def finish(self):
        w = t = 0
        for i, ins in enumerate(self.k.prog.instrs):
            w += self.wdiff[i]
            t += self.tdiff[i]
            if w:
                self.res.executed.add(i)
                k = classify(ins)
                self.res.counts[k] = self.res.counts.get(k, 0) + w
                self.res.thread_counts[k] = self.res.thread_counts.get(k, 0) + t
        self.res.bytes = dict(self.nbytes)
        self.res.instructions = self.steps
