"""Warp-level instructions: shuffles, votes, reductions, tensor-core MMA and WMMA."""

import numpy as np

from . import fp
from .fp import F16, F32, F64, U16, U32, U64
from .memops import _warps, address, load, resolve_space, space_of, store
from .ops import NP, SIZES, op, signed
from .parser import Imm, Pair, Vec

LANE = np.arange(32)
# instructions that need their named lanes converged
SYNC_OPS = {
    "shfl",
    "vote",
    "match",
    "redux",
    "mma",
    "ldmatrix",
    "stmatrix",
    "wmma",
    "elect",
    "movmatrix",
}


def membermask(c, ins):
    """Getter of the membermask operand, or None (all lanes) for aligned instructions."""
    if ins.op in ("shfl", "vote", "match", "redux") and "sync" in ins.mods:
        return c.src(ins.args[-1], "u32", ins)
    if ins.op == "bar" and "warp" in ins.mods:
        return c.src(ins.args[0], "u32", ins)
    if ins.op == "elect":
        return c.src(ins.args[-1], "u32", ins)
    return None


def _pair(d):
    return (d.a, d.b) if isinstance(d, Pair) else (d, None)


@op("shfl")
def _shfl(c, ins):
    if "sync" not in ins.mods:
        c.bad(ins, "shfl without .sync")
    mode = next((m for m in ins.mods if m in ("up", "down", "bfly", "idx")), None)
    if mode is None:
        c.bad(ins)
    d, p = _pair(ins.args[0])
    w, wp = c.dst(d, "b32", ins), c.dst(p, "pred", ins) if p is not None else None
    a, b, cc = (
        c.src(x, t, ins) for x, t in zip(ins.args[1:4], ("b32", "u32", "u32"), strict=False)
    )
    lane = np.tile(LANE, c.n // 32)
    base = np.arange(c.n) - lane
    const = isinstance(ins.args[2], Imm) and isinstance(ins.args[3], Imm)
    cache = []

    def index(R):
        bv, cv = b(R).astype(np.int64) & 31, cc(R).astype(np.int64)
        clamp, seg = cv & 31, (cv >> 8) & 31
        maxl = (lane & seg) | (clamp & ~seg)
        if mode == "up":
            j = lane - bv
            ok = j >= maxl
        elif mode == "down":
            j = lane + bv
            ok = j <= maxl
        elif mode == "bfly":
            j = lane ^ bv
            ok = j <= maxl
        else:
            j = (lane & seg) | (bv & ~seg)
            ok = j <= maxl
        return base + np.where(ok, j, lane), ok

    def run(s, m):
        R = s.R
        if const:
            if not cache:
                cache.append(index(R))
            j, ok = cache[0]
        else:
            j, ok = index(R)
        v = a(R)[j]
        if m is not None:
            v = np.where(m[j], v, U32(0xFFFFFFFF))  # inactive source lane: undefined
        w(R, m, v)
        if wp:
            wp(R, m, ok)
        if s.race:
            s.warp_sync(s.warps_of(m))

    return run


def _ballot(p, m):
    if m is not None:
        p = p & m
    bits = (p.reshape(-1, 32).astype(U64) << np.arange(32, dtype=U64)).sum(1).astype(U32)
    return np.repeat(bits, 32)


@op("vote")
def _vote(c, ins):
    kind = next((m for m in ins.mods if m in ("all", "any", "uni", "ballot")), None)
    if kind is None or "sync" not in ins.mods:
        c.bad(ins)
    p = c.src(ins.args[1], "pred", ins)
    w = c.dst(ins.args[0], "b32" if kind == "ballot" else "pred", ins)

    def run(s, m):
        R = s.R
        v = p(R)
        yes = _ballot(v, m)
        if kind == "ballot":
            r = yes
        else:
            act = _ballot(np.ones_like(v), m)
            r = {
                "all": lambda: yes == act,
                "any": lambda: yes != 0,
                "uni": lambda: (yes == act) | (yes == 0),
            }[kind]()
        w(R, m, r)
        s.warp_sync(s.warps_of(m))

    return run


@op("activemask")
def _activemask(c, ins):
    w, n = c.dst(ins.args[0], "b32", ins), c.n
    return lambda s, m: w(s.R, m, _ballot(np.ones(n, bool), m))


@op("elect")
def _elect(c, ins):
    d, p = _pair(ins.args[0])
    w, wp, n = c.dst(d, "b32", ins), c.dst(p, "pred", ins), c.n

    def run(s, m):
        act = np.ones((n // 32, 32), bool) if m is None else m.reshape(-1, 32)
        first = act.argmax(1)
        w(s.R, m, np.repeat(first, 32).astype(U32))
        wp(s.R, m, (LANE[None] == first[:, None]).reshape(-1))

    return run


@op("match")
def _match(c, ins):
    t = c.types(ins)[-1]
    a = c.src(ins.args[1], t, ins)
    d, p = _pair(ins.args[0])
    w, wp = c.dst(d, "b32", ins), c.dst(p, "pred", ins) if p is not None else None
    every = "all" in ins.mods

    def run(s, m):
        R = s.R
        v = a(R).reshape(-1, 32)
        act = np.ones_like(v, bool) if m is None else m.reshape(-1, 32)
        eq = (v[:, :, None] == v[:, None, :]) & act[:, None, :]
        bits = (eq.astype(U64) << np.arange(32, dtype=U64)).sum(2).astype(U32)
        if every:
            full = (act.astype(U64) << np.arange(32, dtype=U64)).sum(1).astype(U32)[:, None]
            ok = bits == full
            bits = np.where(ok, full, U32(0))
            if wp:
                wp(R, m, ok.reshape(-1))
        w(R, m, bits.reshape(-1))
        s.warp_sync(s.warps_of(m))

    return run


@op("redux")
def _redux(c, ins):
    t = c.types(ins)[-1]
    o = next((m for m in ins.mods if m in ("add", "min", "max", "and", "or", "xor")), None)
    if o is None or t == "f32":
        c.bad(ins)
    a, w = c.src(ins.args[1], t, ins), c.dst(ins.args[0], t, ins)
    dt = NP[t]
    info = np.iinfo(dt)
    ident = {
        "add": 0,
        "or": 0,
        "xor": 0,
        "and": -1 if signed(t) else info.max,
        "min": info.max,
        "max": info.min,
    }[o]
    f = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[o]

    def run(s, m):
        v = a(s.R)
        if m is not None:
            v = np.where(m, v, dt(ident))
        r = f.reduce(v.reshape(-1, 32), axis=1, dtype=dt)
        w(s.R, m, np.repeat(r, 32))
        s.warp_sync(s.warps_of(m))

    return run


# ---- mma.sync --------------------------------------------------------------------------
# A fragment is described by (row, col) of element e of register r for every lane.
G, T = LANE >> 2, LANE & 3


def frag_a(M, K, per, nregs):
    """Index arrays [nregs, per, 32] of rows and columns of the A operand."""
    r = np.zeros((nregs, per, 32), int)
    k = np.zeros_like(r)
    rows8 = M // 8
    for i in range(nregs):
        for e in range(per):
            r[i, e] = G + 8 * (i % rows8)
            k[i, e] = T * per + e + 4 * per * (i // rows8)
    return r, k


def frag_b(K, per, nregs):
    k = np.zeros((nregs, per, 32), int)
    n = np.zeros_like(k)
    for i in range(nregs):
        for e in range(per):
            k[i, e] = T * per + e + 4 * per * i
            n[i, e] = G
    return k, n


def frag_c(M):
    nr = M // 8 * 2
    r = np.zeros((nr, 32), int)
    n = np.zeros_like(r)
    for i in range(nr):
        r[i], n[i] = G + 8 * (i // 2), T * 2 + (i & 1)
    return r, n


def unpack(v, t):
    """[..., 32] uint register values -> [..., per, 32] numbers (float64 or int64)."""
    if t == "tf32":
        return (v & U32(0xFFFFE000)).view(F32).astype(F64)[..., None, :]
    if t == "f64":
        return v.view(F64)[..., None, :]
    if t in ("f16", "bf16"):
        h = np.stack([v & U32(0xFFFF), v >> U32(16)], -2).astype(U16)
        return h.view(F16).astype(F64) if t == "f16" else fp.bf16_to_f32(h).astype(F64)
    b = np.stack([(v >> U32(8 * i)) & U32(255) for i in range(4)], -2).astype(np.uint8)
    return (b.view(np.int8) if t == "s8" else b).astype(np.int64)


PER = {"tf32": 1, "f64": 1, "f16": 2, "bf16": 2, "s8": 4, "u8": 4}


@op("mma")
def _mma(c, ins):
    mods = [m for m in ins.mods if m not in ("sync", "aligned", "satfinite")]
    if len(mods) != 7 or ("satfinite" in ins.mods and mods[3] != "s32"):
        c.bad(ins)
    shape, la, lb, td, ta, tb, tc = mods
    if (la, lb) != ("row", "col") or ta not in PER or tb not in PER or PER[ta] != PER[tb]:
        c.bad(ins)
    M, rest = shape[1:].split("n")
    N, K = rest.split("k")
    M, N, K = int(M), int(N), int(K)
    if N != 8 or M not in (8, 16) or (ta in ("f16", "bf16") and (M, K) not in ((16, 8), (16, 16))):
        c.bad(ins)
    D, A, B, C = ([x for x in a.items] if isinstance(a, Vec) else [a] for a in ins.args[:4])
    per = PER[ta]
    na, nb = M * K // (32 * per), K * N // (32 * per)
    half_c = tc == "f16"
    nc = M * N // 32 // (2 if half_c else 1)
    if len(A) != na or len(B) != nb or len(C) != nc or len(D) != nc or (td == "f16") != half_c:
        c.bad(ins, "unexpected fragment size")
    rt = "b64" if ta == "f64" else "b32"
    ga = [c.src(x, rt, ins) for x in A]
    gb = [c.src(x, rt, ins) for x in B]
    ct = "f64" if tc == "f64" else "s32" if tc == "s32" else "b32" if half_c else "f32"
    gc = [c.src(x, ct, ins) for x in C]
    wd = [c.dst(x, ct, ins) for x in D]
    ra, ka = frag_a(M, K, per, na)
    kb, nb_ = frag_b(K, per, nb)
    rc, ncol = frag_c(M)
    isint = ta in ("s8", "u8")
    acc = np.int64 if isint else F64
    n = c.n

    def run(s, m):
        R = s.R
        wi = _warps(s, m, ins)
        W = len(wi)
        pick = (lambda v: v.reshape(-1, 32)) if m is None else (lambda v: v.reshape(-1, 32)[wi])
        a = np.empty((W, M, K), acc)
        b = np.empty((W, K, N), acc)
        cm = np.empty((W, M, N), acc)
        a[:, ra, ka] = unpack(np.stack([pick(g(R)) for g in ga], 1), ta)
        b[:, kb, nb_] = unpack(np.stack([pick(g(R)) for g in gb], 1), tb)
        cv = np.stack([pick(g(R)) for g in gc], 1)
        if half_c:
            cv = unpack(cv, "f16").reshape(W, 4, 32)
        cm[:, rc, ncol] = cv
        r = np.matmul(a, b) + cm
        out = r[:, rc, ncol]  # [W, nregs, 32]
        if half_c:
            h = out.astype(F16).view(U16).astype(U32).reshape(W, 2, 2, 32)
            out = h[:, :, 0] | (h[:, :, 1] << U32(16))
        elif isint:
            out = (np.clip(out, -(2**31), 2**31 - 1) if "satfinite" in ins.mods else out).astype(
                np.int32
            )
        elif ct == "f32":
            out = out.astype(F32)
        for i, w in enumerate(wd):
            v = np.ascontiguousarray(out[:, i])
            if m is not None:
                full = np.zeros((n // 32, 32), v.dtype)
                full[wi] = v
                v = full
            w(R, m, v.reshape(-1))
        s.count_mma(W, M * N * K)
        if s.race:
            s.warp_sync(wi)

    return run


@op("movmatrix")
def _movmatrix(c, ins):
    a, w = c.src(ins.args[1], "b32", ins), c.dst(ins.args[0], "b32", ins)

    def run(s, m):
        _warps(s, m, ins)
        v = a(s.R).view(U16).reshape(-1, 8, 8).transpose(0, 2, 1)
        w(s.R, m, np.ascontiguousarray(v).reshape(-1).view(U32))

    return run


# ---- wmma: fragment layouts are implementation defined; these are self-consistent and the
# accumulator layout equals two m16n8 mma accumulators side by side ---------------------------
def _wmma_shape(ins):
    s = next(m for m in ins.mods if m[0] == "m" and "n" in m and "k" in m and m != "mma")
    a, b = s[1:].split("n")
    b, k = b.split("k")
    return int(a), int(b), int(k)


def _wmma_layout(kind, M, N, K, t):
    """(rows, cols) index arrays [nelem_per_thread, 32]; elements may be held twice."""
    if kind == "c":
        H, Wd = M, N
    elif kind == "a":
        H, Wd = M, K
    else:
        H, Wd = K, N
    cnt = H * Wd // 32
    if kind == "c" and (M, N) == (16, 16) and t != "f64":
        rr, cc = frag_c(16)
        return np.concatenate([rr, rr]), np.concatenate([cc, cc + 8])
    e = np.arange(cnt)[:, None] + LANE[None] * cnt
    r, col = e // Wd, e % Wd
    if kind != "c" and t == "f16":  # sm_70 style duplication: 16 halves per thread
        reps = 16 // cnt
        r, col = np.concatenate([r] * reps), np.concatenate([col] * reps)
    return r, col


@op("wmma")
def _wmma(c, ins):
    mods = ins.mods
    M, N, K = _wmma_shape(ins)
    n = c.n
    types = c.types(ins)
    per = {"f16": 2, "bf16": 2, "s8": 4, "u8": 4}
    if mods[0] in ("load", "store"):
        kind = mods[1] if mods[1] != "d" else "c"
        t = types[-1]
        ld = mods[0] == "load"
        vec, mem = (ins.args[0], ins.args[1]) if ld else (ins.args[1], ins.args[0])
        stride = c.src(ins.args[2], "u32", ins) if len(ins.args) > 2 else None
        rowm = "row" in mods
        es = SIZES[t]
        p = per.get(t, 1)
        rr, cc = _wmma_layout(kind, M, N, K, t)
        items = vec.items
        if len(rr) != len(items) * p:
            c.bad(ins, "unsupported wmma shape")
        sp = resolve_space(c, ins, mem, space_of(ins))
        g, _ = address(c, mem, ins)
        rt = "b64" if t == "f64" else "b32"
        pc = ins.pc
        dflt = {"a": K if rowm else M, "b": N if rowm else K, "c": N if rowm else M}[kind]
        if ld:
            ws = [c.dst(x, rt, ins) for x in items]
        else:
            gs = [c.src(x, rt, ins) for x in items]

        def run(s, m):
            R = s.R
            wi = _warps(s, m, ins)
            lanes = (wi[:, None] * 32 + LANE).reshape(-1)
            a = g(R)[lanes]
            st = stride(R)[lanes].astype(np.int64) if stride else np.full(len(lanes), dflt)
            W = len(wi)
            r, q = np.tile(rr, (1, W)), np.tile(cc, (1, W))  # [elems, lanes]
            off = (r * st + q if rowm else q * st + r) * es
            addr = a[None] + off.astype(U64)
            if ld:
                vals = np.stack(
                    [load(s, ins, pc, sp, addr[e], lanes, es, 1)[:, 0] for e in range(len(rr))], 1
                )
                regs = np.ascontiguousarray(vals).view(
                    U64 if rt == "b64" else U32
                )  # [lanes, nregs]
                for i, w in enumerate(ws):
                    full = np.zeros(n, regs.dtype)
                    full[lanes] = regs[:, i]
                    w(R, m, full)
            else:
                v = np.stack([f(R)[lanes] for f in gs], 1)
                if p == 2:
                    v = v.view(U16)
                for e in range(len(rr)):
                    store(
                        s, ins, pc, sp, addr[e], lanes, np.ascontiguousarray(v[:, e : e + 1]), es, 1
                    )
            s.warp_sync(wi)

        return run
    if mods[0] != "mma" or "satfinite" in mods:
        c.bad(ins)
    _la, _lb = [m for m in mods if m in ("row", "col")]
    if len(types) == 2:
        td, tc = types
        ta = tb = "f16"
    else:
        td, ta, tb, tc = types
    D, A, B, C = (x.items for x in ins.args)
    rt = "b64" if ta == "f64" else "b32"
    LA, LB, LC = (_wmma_layout(k, M, N, K, t) for k, t in (("a", ta), ("b", tb), ("c", tc)))
    ga, gb = [c.src(x, rt, ins) for x in A], [c.src(x, rt, ins) for x in B]
    ct = {"f32": "f32", "f64": "f64", "s32": "s32", "f16": "b32"}
    if tc not in ct or td not in ct or ta not in PER:
        c.bad(ins)
    gc, wd = [c.src(x, ct[tc], ins) for x in C], [c.dst(x, ct[td], ins) for x in D]
    acc = np.int64 if ta in ("s8", "u8") else F64

    def elems(R, gs, t, pick):
        v = unpack(np.stack([pick(g(R)) for g in gs], 1), t)
        return v.reshape(v.shape[0], -1, 32)

    def run(s, m):
        R = s.R
        wi = _warps(s, m, ins)
        W = len(wi)

        def pick(v):
            return v.reshape(-1, 32)[wi]

        a, b, cm = np.zeros((W, M, K), acc), np.zeros((W, K, N), acc), np.zeros((W, M, N), acc)
        a[:, LA[0], LA[1]] = elems(R, ga, ta, pick)
        b[:, LB[0], LB[1]] = elems(R, gb, tb, pick)
        cv = np.stack([pick(g(R)) for g in gc], 1)
        cm[:, LC[0], LC[1]] = unpack(cv, "f16").reshape(W, -1, 32) if tc == "f16" else cv
        out = (np.matmul(a, b) + cm)[:, LC[0], LC[1]]
        if td == "f16":
            h = out.astype(F16).view(U16).astype(U32).reshape(W, -1, 2, 32)
            out = h[:, :, 0] | (h[:, :, 1] << U32(16))
        else:
            out = out.astype(NP[td])
        for i, w in enumerate(wd):
            full = np.zeros((n // 32, 32), out.dtype)
            full[wi] = out[:, i]
            w(R, m, full.reshape(-1))
        s.count_mma(W, M * N * K)
        s.warp_sync(wi)

    return run
