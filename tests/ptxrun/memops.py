"""Loads, stores, atomics, cp.async, ldmatrix/stmatrix."""

import numpy as np

from . import fp
from .errors import PtxError
from .fp import F16, U16, U32, U64
from .memory import GLOBAL_BASE, UINT, WINDOW, WINDOW_SIZE, fault, global_off, local_off, shared_off
from .ops import NP, SIZES, TYPES, op, signed
from .parser import Imm, Mem, Reg, Sym, Vec

IGNORED = {
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "nc",
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "weak",
    "mmio",
    "sys",
    "gpu",
    "cta",
    "cluster",
    "ordered",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
    "unified",
    "seq_cst",
    "async",
}
SPACES = ("global", "shared", "local", "param", "const")


def space_of(ins):
    for m in ins.mods:
        b = m.split("::")[0]
        if b in SPACES and m not in ("L1", "L2"):
            return b
    return "generic"


def check_mods(c, ins, *extra):
    for m in ins.mods:
        if m in TYPES or m in IGNORED or m in extra or m.split("::")[0] in SPACES:
            continue
        c.bad(ins, f"unsupported modifier .{m}")


def address(c, mem, ins):
    """Getter of the byte address (uint64 array); returns (getter, param Var or None, static offset)."""
    if not isinstance(mem, Mem):
        c.bad(ins, "memory operand expected")
    off = U64(mem.off & (2**64 - 1))
    b = mem.base
    if isinstance(b, Reg):
        i = b.idx
        if SIZES[b.type] == 8:
            if mem.off == 0:
                return (lambda R: R[i]), None
            return (lambda R: R[i] + off), None
        o32 = U32(mem.off & 0xFFFFFFFF)
        return (lambda R: (R[i] + o32).astype(U64)), None
    if isinstance(b, Sym):
        a = np.full(c.n, c.sym_addr(b.var) + b.off + mem.off, U64)
        return (lambda R: a), b.var
    if b is None:
        a = np.full(c.n, off, U64)
        return (lambda R: a), None
    c.bad(ins, f"unsupported address {b}")


def resolve_space(c, ins, mem, sp):
    """Function-call .param variables live in local memory; a named symbol fixes a generic access."""
    if isinstance(mem.base, Sym):
        v = mem.base.var
        if sp == "generic" or (sp == "param" and v.space == "local"):
            return "global" if v.space == "const" else v.space
    return "global" if sp == "const" else sp


def gather(view, off, es, cnt):
    if cnt == 1:
        return view[off // es if es > 1 else off].reshape(-1, 1)
    return view.reshape(-1, cnt)[off // (es * cnt)]


def split_generic(s, ins, addr, lanes):
    """Yield (space, positions, offset-in-space addresses)."""
    if np.count_nonzero(addr >= U64(WINDOW["param"] + WINDOW_SIZE)) == len(addr):
        yield "global", None, addr
        return
    left = np.ones(len(addr), bool)
    for sp in ("shared", "local", "param"):
        lo = U64(WINDOW[sp])
        m = (addr >= lo) & (addr < lo + U64(WINDOW_SIZE))
        if np.count_nonzero(m):
            j = np.flatnonzero(m)
            yield sp, j, addr[j] - lo
            left[j] = False
    if np.count_nonzero(left):
        j = np.flatnonzero(left)
        yield "global", j, addr[j]


def load(s, ins, pc, sp, addr, lanes, es, cnt):
    """Values [k, cnt] of es-byte elements."""
    nb = es * cnt
    if sp == "shared":
        off = shared_off(s, ins, lanes, addr, nb)
        if s.race:
            s.race.read(off, nb, lanes, pc)
        if s.profile:
            s.count_waves(off, nb, lanes)
        s.count_bytes("ld.shared", len(lanes) * nb)
        return gather(s.smem_views[es], off, es, cnt)
    if sp == "global":
        off = global_off(s, ins, lanes, addr, nb)
        if s.grace:
            s.grace.read(off, nb, lanes, pc)
        if s.profile:
            s.count_sectors("ld", off, nb, lanes)
        s.count_bytes("ld.global", len(lanes) * nb)
        return gather(s.arena.views[es], off, es, cnt)
    if sp == "local":
        off = local_off(s, ins, lanes, addr, nb)
        s.count_bytes("ld.local", len(lanes) * nb)
        return gather(s.local_views[es], off, es, cnt)
    if sp == "param":
        off = addr.astype(np.int64)
        bad = (off < 0) | (off > s.param_size - nb)
        if bad.any():
            fault(s, ins, lanes, addr, bad, nb, "param", "out-of-bounds")
        idx = off[:, None] + np.arange(nb)
        return s.param[idx].view(UINT[es])
    out = None
    for sp2, j, a in split_generic(s, ins, addr, lanes):
        v = load(s, ins, pc, sp2, a, lanes if j is None else lanes[j], es, cnt)
        if j is None:
            return v
        if out is None:
            out = np.zeros((len(addr), cnt), UINT[es])
        out[j] = v
    return out


def store(s, ins, pc, sp, addr, lanes, vals, es, cnt):
    nb = es * cnt
    if sp == "shared":
        off = shared_off(s, ins, lanes, addr, nb)
        if s.race:
            s.race.write(
                off,
                nb,
                lanes,
                pc,
                np.ascontiguousarray(vals),
                lambda: np.ascontiguousarray(gather(s.smem_views[es], off, es, cnt)),
            )
        if s.profile:
            s.count_waves(off, nb, lanes)
        s.count_bytes("st.shared", len(lanes) * nb)
        view = s.smem_views[es]
    elif sp == "global":
        off = global_off(s, ins, lanes, addr, nb)
        if s.grace:
            s.grace.write(off, nb, lanes, pc, vals, lambda: gather(s.arena.views[es], off, es, cnt))
        if s.profile:
            s.count_sectors("st", off, nb, lanes)
        s.count_bytes("st.global", len(lanes) * nb)
        view = s.arena.views[es]
    elif sp == "local":
        off = local_off(s, ins, lanes, addr, nb)
        s.count_bytes("st.local", len(lanes) * nb)
        view = s.local_views[es]
    elif sp == "generic":
        for sp2, j, a in split_generic(s, ins, addr, lanes):
            if j is None:
                store(s, ins, pc, sp2, a, lanes, vals, es, cnt)
            else:
                store(s, ins, pc, sp2, a, lanes[j], vals[j], es, cnt)
        return
    else:
        raise PtxError(f"PTX line {ins.line}: store to {sp} space")
    if cnt == 1:
        view[off // es if es > 1 else off] = vals[:, 0]
    else:
        view.reshape(-1, cnt)[off // nb] = vals


def vec_count(ins):
    return next((int(m[1:]) for m in ins.mods if m in ("v2", "v4", "v8")), 1)


@op("ld", "ldu")
def _ld(c, ins):
    check_mods(c, ins, "v2", "v4", "v8")
    t = c.types(ins)[-1]
    cnt, es = vec_count(ins), SIZES[t]
    sp = resolve_space(c, ins, ins.args[1], space_of(ins))
    g, _ = address(c, ins.args[1], ins)
    d = ins.args[0]
    items = d.items if isinstance(d, Vec) else (d,)
    if len(items) != cnt:
        c.bad(ins, "vector size mismatch")
    pc = ins.pc
    allv = c.lanes
    n = c.n
    if t == "b128":
        di = d.idx

        def run(s, m):
            R = s.R
            lanes = allv if m is None else np.flatnonzero(m)
            v = load(s, ins, pc, sp, g(R)[lanes], lanes, 8, 2)
            full = R[di].copy()
            full[lanes] = v
            R[di] = full

        return run
    bt = t if signed(t) else "b%d" % (8 * es)
    dt = NP[bt]
    ws = [c.dst(x, bt, ins) for x in items]

    def run(s, m):
        R = s.R
        if m is None:
            v = load(s, ins, pc, sp, g(R), allv, es, cnt)
            for j, w in enumerate(ws):
                w(R, None, np.ascontiguousarray(v[:, j]).view(dt))
        else:
            lanes = np.flatnonzero(m)
            v = load(s, ins, pc, sp, g(R)[lanes], lanes, es, cnt)
            for j, w in enumerate(ws):
                full = np.zeros(n, dt)
                full[lanes] = (
                    v[:, j].view(dt) if cnt == 1 else np.ascontiguousarray(v[:, j]).view(dt)
                )
                w(R, m, full)

    return run


@op("st")
def _st(c, ins):
    check_mods(c, ins, "v2", "v4", "v8")
    t = c.types(ins)[-1]
    cnt, es = vec_count(ins), SIZES[t]
    sp = resolve_space(c, ins, ins.args[0], space_of(ins))
    g, _ = address(c, ins.args[0], ins)
    d = ins.args[1]
    pc, allv = ins.pc, c.lanes
    if t == "b128":
        di = d.idx

        def run(s, m):
            lanes = allv if m is None else np.flatnonzero(m)
            store(s, ins, pc, sp, g(s.R)[lanes], lanes, s.R[di][lanes], 8, 2)

        return run
    items = d.items if isinstance(d, Vec) else (d,)
    if len(items) != cnt:
        c.bad(ins, "vector size mismatch")
    bt = "b%d" % (8 * es)
    u = UINT[es]
    gs = [c.src(x, t if isinstance(x, Imm) and t in ("f32", "f64") else bt, ins) for x in items]

    def run(s, m):
        R = s.R
        a = g(R)
        lanes = allv
        if m is not None:
            lanes = np.flatnonzero(m)
            a = a[lanes]
        vals = np.empty((len(lanes), cnt), u)
        for j, f in enumerate(gs):
            x = f(R).view(u)
            vals[:, j] = x if m is None else x[lanes]
        store(s, ins, pc, sp, a, lanes, vals, es, cnt)

    return run


# ---- atomics -------------------------------------------------------------------
def atomic_fn(c, ins, o, t):
    """fn(old, b, c) on unsigned bit patterns of one element type."""
    dt = NP.get(t)
    if o == "exch":
        return lambda old, b, d: b
    if o == "cas":
        return lambda old, b, d: np.where(old == b, d, old)
    if o in ("and", "or", "xor"):
        f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[o]
        return lambda old, b, d: f(old, b)
    if t in ("f16", "f16x2", "bf16", "bf16x2"):
        dec = c.decode_half
        f = {"add": np.add, "min": np.fmin, "max": np.fmax}.get(o)
        if f is None:
            c.bad(ins)
        u = UINT[SIZES[t]]

        def g(old, b, d):
            r = f(dec(np.ascontiguousarray(old), t), dec(np.ascontiguousarray(b), t))
            return r.astype(F16).view(u) if t[0] == "f" else fp.f32_to_bf16(r).view(u)

        return g
    f = {
        "add": np.add,
        "min": np.fmin if t[0] == "f" else np.minimum,
        "max": np.fmax if t[0] == "f" else np.maximum,
    }.get(o)
    if f is not None:
        return lambda old, b, d: f(old.view(dt), b.view(dt)).view(old.dtype)
    if o == "inc":
        return lambda old, b, d: np.where(old >= b, old.dtype.type(0), old + old.dtype.type(1))
    if o == "dec":
        return lambda old, b, d: np.where((old == 0) | (old > b), b, old - old.dtype.type(1))
    c.bad(ins)


ATOM_OPS = ("add", "exch", "cas", "min", "max", "and", "or", "xor", "inc", "dec")


@op("atom", "red")
def _atom(c, ins):
    check_mods(c, ins, *ATOM_OPS, "noftz", "v2", "v4", "v8")
    o = next((m for m in ins.mods if m in ATOM_OPS), None)
    t = c.types(ins)[-1]
    es, cnt = SIZES[t], vec_count(ins)
    if o is None or cnt != 1 or es == 16:
        c.bad(ins)
    ret = ins.op == "atom"
    args = ins.args if ret else [None, *ins.args]
    d, mem = args[0], args[1]
    sp = resolve_space(c, ins, mem, space_of(ins))
    g, _ = address(c, mem, ins)
    bt = "b%d" % (8 * es)
    u = UINT[es]

    def get(x):
        return c.src(x, t if isinstance(x, Imm) and t in ("f32", "f64") else bt, ins)

    gb = get(args[2])
    gc = get(args[3]) if o == "cas" else None
    w = c.dst(d, bt, ins) if ret else None
    fn = atomic_fn(c, ins, o, t)
    pc, n = ins.pc, c.n

    def space_ref(s, sp, addr, lanes):
        if sp == "shared":
            off = shared_off(s, ins, lanes, addr, es)
            if s.race:
                s.race.read(off, es, lanes, pc, atomic=True)
                s.race.write(off, es, lanes, pc, atomic=True)
            return s.smem_views[es], off // es
        if sp == "global":
            off = global_off(s, ins, lanes, addr, es)
            if s.grace:
                s.grace.write(off, es, lanes, pc, atomic=True)
            return s.arena.views[es], off // es
        raise PtxError(f"PTX line {ins.line}: atomic on {sp} space")

    def apply(s, sp, addr, lanes, b, cc, out, where):
        view, idx = space_ref(s, sp, addr, lanes)
        s.count_bytes("atom." + sp, len(lanes) * es)
        todo = np.arange(len(idx))
        if s.rng is not None:
            todo = s.rng.permutation(todo)
        # lanes that hit the same address are applied one after the other
        while len(todo):
            _, first = np.unique(idx[todo], return_index=True)
            k = todo[first]
            old = view[idx[k]]
            view[idx[k]] = fn(old, b[k], cc[k] if cc is not None else None)
            out[where[k]] = old
            if len(first) == len(todo):
                break
            todo = np.delete(todo, first)

    def run(s, m):
        R = s.R
        lanes = c.lanes if m is None else np.flatnonzero(m)
        addr, b = g(R)[lanes], gb(R).view(u)[lanes]
        cc = gc(R).view(u)[lanes] if gc else None
        out = np.zeros(n, u)
        if sp == "generic":
            for sp2, j, a in split_generic(s, ins, addr, lanes):
                if j is None:
                    apply(s, sp2, a, lanes, b, cc, out, lanes)
                else:
                    apply(
                        s, sp2, a, lanes[j], b[j], cc[j] if cc is not None else None, out, lanes[j]
                    )
        else:
            apply(s, sp, addr, lanes, b, cc, out, lanes)
        if w:
            w(R, m, out)

    return run


# ---- cp.async ---------------------------------------------------------------------
POISON = np.uint8(0xFF)


def cp_async_complete(s, upto):
    """Perform the pending copies of every thread whose group index is < upto[thread]."""
    keep = []
    for ins, pc, lanes, dst, src, cp, srcsz, grp in s.pending:
        go = grp < upto[lanes]
        if np.count_nonzero(go):
            j = np.flatnonzero(go)
            do_copy(s, ins, pc, lanes[j], dst[j], src[j], cp, srcsz[j])
            j = np.flatnonzero(~go)
            if len(j) == 0:
                continue
            keep.append((ins, pc, lanes[j], dst[j], src[j], cp, srcsz[j], grp[j]))
        else:
            keep.append((ins, pc, lanes, dst, src, cp, srcsz, grp))
    s.pending = keep


def do_copy(s, ins, pc, lanes, dst, src, cp, srcsz):
    data = np.zeros((len(lanes), cp), np.uint8)
    full = srcsz == cp
    j = np.flatnonzero(full)
    if len(j):
        off = global_off(s, ins, lanes[j], src[j], cp)
        if s.grace:
            s.grace.read(off, cp, lanes[j], pc)
        if s.profile:
            s.count_sectors("ld", off, cp, lanes[j])
        data[j] = s.arena.data.reshape(-1, cp)[off // cp]
    for k in np.flatnonzero(~full & (srcsz > 0)):
        off = int(src[k]) - GLOBAL_BASE
        if not s.arena.valid[off : off + int(srcsz[k])].all():
            fault(
                s,
                ins,
                lanes[k : k + 1],
                src[k : k + 1],
                np.array([True]),
                int(srcsz[k]),
                "global",
                "out-of-bounds",
            )
        data[k, : srcsz[k]] = s.arena.data[off : off + int(srcsz[k])]
    s.count_bytes("ld.global", int(srcsz.sum()))
    s.count_bytes("st.shared", len(lanes) * cp)
    if s.race:
        s.race.landed(dst, cp, lanes)
        s.race.write(
            dst,
            cp,
            lanes,
            pc,
            data,
            lambda: np.ascontiguousarray(s.smem.reshape(-1, cp)[dst // cp]),
        )
    s.smem.reshape(-1, cp)[dst // cp] = data


@op("cp")
def _cp(c, ins):
    if not ins.mods or ins.mods[0] != "async":
        c.bad(ins)
    mods = ins.mods[1:]
    if "bulk" in mods or "mbarrier" in mods or "reduce" in mods:
        c.bad(ins)
    if mods == ("commit_group",):

        def run(s, m):
            s.groups = s.groups + 1 if m is None else s.groups + m

        return run
    if mods in (("wait_group",), ("wait_all",)):
        k = ins.args[0].value if ins.args else None

        def run(s, m):
            if k is None:
                up = s.groups + 1
                s.groups = s.groups + 1 if m is None else s.groups + m
            else:
                up = s.groups - k
            if m is not None:
                up = np.where(m, up, 0)
            cp_async_complete(s, up)

        return run
    check_mods(c, ins)
    size = ins.args[2].value
    if size not in (4, 8, 16) or ("cg" in mods and size != 16):
        c.bad(ins, "bad cp.async size")
    gd, _ = address(c, ins.args[0], ins)
    gs, _ = address(c, ins.args[1], ins)
    rest = ins.args[3:]
    if "L2::cache_hint" in ins.mods:
        rest = rest[:-1]
    gz = None
    if rest:
        a = rest[0]
        if isinstance(a, Reg) and a.type == "pred":
            gp = c.src(a, "pred", ins)  # ignore-src predicate

            def gz(R):
                return np.where(gp(R), 0, size)
        else:
            gi = c.src(a, "u32", ins)

            def gz(R):
                return gi(R).astype(np.int64)

    pc = ins.pc

    def run(s, m):
        R = s.R
        lanes = c.lanes if m is None else np.flatnonzero(m)
        dst = shared_off(s, ins, lanes, gd(R)[lanes], size)
        src = gs(R)[lanes]
        sz = gz(R)[lanes] if gz else np.full(len(lanes), size)
        if (sz > size).any():
            raise PtxError(f"PTX line {ins.line}: cp.async src-size larger than cp-size")
        # poison the destination now: reading it before the wait must not look right
        if s.race:
            s.race.write(dst, size, lanes, pc, flight=True)
        s.smem.reshape(-1, size)[dst // size] = POISON
        s.pending.append((ins, pc, lanes, dst, src, size, sz, s.groups[lanes]))

    return run


# ---- ldmatrix / stmatrix ---------------------------------------------------------------
def _matrix_setup(c, ins, d):
    k = next((int(m[1]) for m in ins.mods if m in ("x1", "x2", "x4")), 1)
    for m in ins.mods:
        if m not in (
            "sync",
            "aligned",
            "m8n8",
            "x1",
            "x2",
            "x4",
            "trans",
            "b16",
        ) and not m.startswith("shared"):
            c.bad(ins, f"unsupported modifier .{m}")
    items = d.items if isinstance(d, Vec) else (d,)
    if len(items) != k:
        c.bad(ins, "vector size mismatch")
    return k, items


def _warps(s, m, ins):
    """Indices of the executing warps; every alive lane of them must take part (aligned instruction)."""
    if m is None:
        return s.all_warps
    mm = m.reshape(-1, 32)
    w = np.flatnonzero(mm.any(1))
    if not mm[w].all():
        raise PtxError(
            f"{s.name}: `{ins.opcode}` at PTX line {ins.line} executed by a partial warp (CTA {s.cta})"
        )
    return w


@op("ldmatrix")
def _ldmatrix(c, ins):
    k, items = _matrix_setup(c, ins, ins.args[0])
    ws = [c.dst(x, "b32", ins) for x in items]
    g, _ = address(c, ins.args[1], ins)
    trans = "trans" in ins.mods
    pc, n = ins.pc, c.n

    def run(s, m):
        R = s.R
        wi = _warps(s, m, ins)
        W = len(wi)
        lanes = (wi[:, None] * 32 + np.arange(8 * k)).reshape(-1)
        addr = g(R)[lanes]
        if space_of(ins) == "generic":
            addr = addr - U64(WINDOW["shared"])
        off = shared_off(s, ins, lanes, addr, 16)
        if s.race:
            s.race.read(off, 16, lanes, pc)
            s.warp_sync(wi)
        if s.profile:
            s.count_waves(off, 16, lanes)
        s.count_bytes("ld.shared", len(lanes) * 16)
        rows = s.smem_views[2].reshape(-1, 8)[off // 16].reshape(W, k, 8, 8)
        if trans:
            rows = rows.transpose(0, 1, 3, 2)
        v = (
            np.ascontiguousarray(rows.transpose(1, 0, 2, 3)).view(U32).reshape(k, W, 32)
        )  # lane = row*4 + col pair
        for j, w in enumerate(ws):
            if m is None:
                w(R, None, v[j].reshape(-1))
            else:
                full = np.zeros((n // 32, 32), U32)
                full[wi] = v[j]
                w(R, m, full.reshape(-1))

    return run


@op("stmatrix")
def _stmatrix(c, ins):
    k, items = _matrix_setup(c, ins, ins.args[1])
    gs = [c.src(x, "b32", ins) for x in items]
    g, _ = address(c, ins.args[0], ins)
    trans = "trans" in ins.mods
    pc = ins.pc

    def run(s, m):
        R = s.R
        wi = _warps(s, m, ins)
        W = len(wi)
        lanes = (wi[:, None] * 32 + np.arange(8 * k)).reshape(-1)
        v = np.stack([f(R).reshape(-1, 32)[wi] for f in gs], 1)  # [W, k, 32]
        rows = np.ascontiguousarray(v).view(U16).reshape(W, k, 8, 8)
        if trans:
            rows = rows.transpose(0, 1, 3, 2)
        store(
            s,
            ins,
            pc,
            "shared",
            g(R)[lanes],
            lanes,
            np.ascontiguousarray(rows).reshape(-1, 8),
            2,
            8,
        )
        s.warp_sync(wi)

    return run


# ---- mbarrier (thread arrivals only; no transaction counts) ----------------------------------
@op("mbarrier")
def _mbarrier(c, ins):
    """State is kept beside shared memory, keyed by the offset of the 64-bit object."""
    kind = ins.mods[0]
    if (
        kind not in ("init", "inval", "arrive", "arrive_drop", "test_wait", "try_wait")
        or "expect_tx" in ins.mods
        or "noComplete" in ins.mods
    ):
        c.bad(ins)
    has_dst = kind not in ("init", "inval")
    mem = ins.args[1] if has_dst else ins.args[0]
    rest = ins.args[2 if has_dst else 1 :]
    g, _ = address(c, mem, ins)
    generic = space_of(ins) == "generic"
    parity = "parity" in ins.mods
    if kind in ("test_wait", "try_wait"):
        w = c.dst(ins.args[0], "pred", ins)
        ga = c.src(rest[0], "u32" if parity else "b64", ins)
    elif has_dst:
        w = c.dst(ins.args[0], "b64", ins)
        ga = c.src(rest[0], "u32", ins) if rest else None
    else:
        ga = c.src(rest[0], "u32", ins) if rest else None
    n = c.n

    def run(s, m):
        R = s.R
        lanes = c.lanes if m is None else np.flatnonzero(m)
        addr = g(R)[lanes]
        if generic:
            addr = addr - U64(WINDOW["shared"])
        off = shared_off(s, ins, lanes, addr, 8)
        if kind == "init":
            cnt = ga(R)
            for t, o in zip(lanes, off, strict=False):
                s.mbar[int(o)] = {
                    "count": int(cnt[t]),
                    "left": int(cnt[t]),
                    "phase": 0,
                    "acc": None,
                    "vc": None,
                }
            return
        if kind == "inval":
            for o in off:
                s.mbar.pop(int(o), None)
            return
        arg = ga(R) if ga is not None else None
        out = np.zeros(n, bool if kind in ("test_wait", "try_wait") else U64)
        for t, o in zip(lanes, off, strict=False):
            b = s.mbar.get(int(o))
            if b is None:
                raise PtxError(
                    f"{s.name}: mbarrier at shared 0x{int(o):x} used before init, PTX line {ins.line}, thread {t}"
                )
            wp = int(t) >> 5
            if kind in ("test_wait", "try_wait"):
                done = (b["phase"] & 1) != (int(arg[t]) & 1) if parity else b["phase"] > int(arg[t])
                out[t] = done
                if done and s.race and b["vc"] is not None:
                    s.race.vc[wp] = np.maximum(s.race.vc[wp], b["vc"])
                    s.race.ep[wp] += 1
                continue
            out[t] = b["phase"]
            if s.race:
                v = s.race.vc[wp].copy()
                b["acc"] = v if b["acc"] is None else np.maximum(b["acc"], v)
            b["left"] -= int(arg[t]) if arg is not None else 1
            if kind == "arrive_drop":
                b["count"] -= 1
            if b["left"] < 0:
                raise PtxError(
                    f"{s.name}: too many arrivals on mbarrier 0x{int(o):x}, PTX line {ins.line}"
                )
            if b["left"] == 0:
                b["phase"] += 1
                b["left"], b["vc"], b["acc"] = b["count"], b["acc"], None
        if s.race and kind.startswith("arrive"):
            wi = np.unique(lanes >> 5)
            s.race.vc[wi, wi] += 1
        w(R, m, out)
        if kind in ("test_wait", "try_wait"):
            late = np.zeros(n, bool)
            late[lanes] = ~out[lanes]
            if late.any():
                s.lazy = late if s.lazy is None else s.lazy | late

    return run
