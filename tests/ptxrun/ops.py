"""Decoding of arithmetic, logic, conversion and data-movement instructions.

Each handler takes (Compiler, Instr) and returns a closure run(s, m): s is the CTA state (s.R the
register list, arrays of one element per thread; never modified in place), m is the active mask
(bool array) or None when every thread is active.
"""

import numpy as np

from . import fp
from .errors import UnsupportedError
from .fp import F16, F32, F64, U16, U32, U64
from .parser import SINK, SIZES, Imm, Label, Not, Pair, Reg, Special, Sym, Vec

NP = {
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": U16,
    "u16": U16,
    "s16": np.int16,
    "b32": U32,
    "u32": U32,
    "s32": np.int32,
    "b64": U64,
    "u64": U64,
    "s64": np.int64,
    "f32": F32,
    "f64": F64,
    "pred": np.bool_,
}
UINT = {1: np.uint8, 2: U16, 4: U32, 8: U64}
SINT = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")
TYPES = set(SIZES)
RND = ("rn", "rz", "rm", "rp", "rna")

OPS = {}


def op(*names):
    def deco(f):
        for n in names:
            OPS[n] = f
        return f

    return deco


def signed(t):
    return t[0] == "s"


def imm_bits_float(v):
    """Immediate tuple -> python float."""
    if v[0] == "f32":
        return float(np.array([v[1]], U32).view(F32)[0])
    return float(np.array([v[1]], U64).view(F64)[0])


class Compiler:
    """Turns a Program into closures for one block size."""

    def __init__(self, prog, n, special, sym_addr):
        self.prog, self.n = prog, n
        self.special = special  # name -> register index
        self.sym_addr = sym_addr  # Var -> address in its own space

    def bad(self, ins, why="unsupported instruction"):
        raise UnsupportedError(f"PTX line {ins.line}: {why} `{ins.opcode}` in `{ins.text}`")

    def types(self, ins):
        return [m for m in ins.mods if m in TYPES]

    def only(self, ins, *allowed):
        """Every modifier must be known: nothing is silently ignored."""
        for m in ins.mods:
            if m not in allowed and m not in TYPES:
                self.bad(ins, f"unsupported modifier .{m}")

    # ---- operands ------------------------------------------------------
    def const(self, o, t):
        n = self.n
        if isinstance(o, Sym):
            return np.full(
                n, (self.sym_addr(o.var) + o.off) & ((1 << (8 * SIZES[t])) - 1), UINT[SIZES[t]]
            ).view(NP[t])
        v = o.value
        if t in ("f32", "f64"):
            if isinstance(v, tuple):
                if v[0] == t:
                    return np.full(n, v[1], UINT[SIZES[t]]).view(NP[t])
                return np.full(n, imm_bits_float(v), NP[t])
            return np.full(n, v & ((1 << (8 * SIZES[t])) - 1), UINT[SIZES[t]]).view(NP[t])
        if isinstance(v, tuple):
            if t in ("f16", "bf16"):
                x = np.full(n, imm_bits_float(v), F32)
                return x
            v = v[1]
        if t == "pred":
            return np.full(n, bool(v))
        if t in ("f16", "f16x2", "bf16", "bf16x2"):
            u = np.full(n, v & ((1 << (8 * SIZES[t])) - 1), UINT[SIZES[t]])
            return self.decode_half(u, t)
        return np.full(n, v & ((1 << (8 * SIZES[t])) - 1), UINT[SIZES[t]]).view(NP[t])

    @staticmethod
    def decode_half(u, t):
        if t[0] == "f":
            return u.view(F16).astype(F32)
        return fp.bf16_to_f32(u.view(U16))

    def src(self, o, t, ins):
        """Getter g(R) -> array of the computation dtype of type t (half types come as float32)."""
        if isinstance(o, Not):
            g = self.src(o.a, "pred", ins)
            return lambda R: ~g(R)
        if isinstance(o, (Imm, Sym)):
            c = self.const(o, t)
            c.flags.writeable = False
            return lambda R: c
        if isinstance(o, Special):
            i, rt = self.special_index(o.name, ins), "u32"
            if o.name in ("%clock64", "%globaltimer"):
                rt = "u64"
        elif isinstance(o, Reg):
            i, rt = o.idx, o.type
        else:
            self.bad(ins, f"unsupported operand {o}")
        if t == "pred":
            if rt != "pred":
                self.bad(ins, "predicate operand expected")
            return lambda R: R[i]
        if rt == "pred":
            self.bad(ins, "predicate used as a value")
        sz, rsz = SIZES[t], SIZES[rt]
        if rsz == 16:
            self.bad(ins, "128-bit register operand")
        u = UINT[sz]
        if t in ("f16", "f16x2", "bf16", "bf16x2"):
            dec = self.decode_half
            if rsz == sz:
                return lambda R: dec(R[i], t)
            return lambda R: dec(R[i].astype(u), t)
        dt = NP[t]
        if sz == rsz:
            if dt is u:
                return lambda R: R[i]
            return lambda R: R[i].view(dt)
        if sz < rsz:
            if dt is u:
                return lambda R: R[i].astype(u)
            return lambda R: R[i].astype(u).view(dt)
        if signed(t):
            sd = SINT[rsz]
            return lambda R: R[i].view(sd).astype(dt)
        return lambda R: R[i].astype(u).view(dt)

    def special_index(self, name, ins):
        if name not in self.special:
            raise UnsupportedError(f"PTX line {ins.line}: special register {name} in `{ins.text}`")
        return self.special[name]

    def dst(self, o, t, ins):
        """Writer w(R, m, v): v in the computation dtype of t."""
        if o is SINK or (isinstance(o, Label) and o.name == "_"):
            return lambda R, m, v: None
        if not isinstance(o, Reg):
            self.bad(ins, f"bad destination {o}")
        i, rt = o.idx, o.type
        where = np.where
        if t == "pred":
            if rt != "pred":
                self.bad(ins, "predicate destination expected")

            def w(R, m, v):
                R[i] = v if m is None else where(m, v, R[i])

            return w
        if rt == "pred":
            self.bad(ins, "value written to a predicate")
        sz, rsz = SIZES[t], SIZES[rt]
        ru = UINT[rsz] if rsz < 16 else None
        if t in ("f16", "f16x2", "bf16", "bf16x2"):
            if t[0] == "f":

                def enc(v):
                    return v.astype(F16).view(UINT[sz])
            else:

                def enc(v):
                    return (fp.f64_to_bf16(v) if v.dtype == F64 else fp.f32_to_bf16(v)).view(
                        UINT[sz]
                    )

            def w(R, m, v):
                v = enc(v)
                if sz != rsz:
                    v = v.astype(ru)
                R[i] = v if m is None else where(m, v, R[i])

            return w
        if sz == rsz:
            if NP[t] is ru:

                def w(R, m, v):
                    R[i] = v if m is None else where(m, v, R[i])
            else:

                def w(R, m, v):
                    v = v.view(ru)
                    R[i] = v if m is None else where(m, v, R[i])

            return w
        if sz > rsz:
            self.bad(ins, f"{t} value does not fit register {o.name}")
        if signed(t):
            rs = SINT[rsz]

            def w(R, m, v):
                v = v.astype(rs).view(ru)
                R[i] = v if m is None else where(m, v, R[i])
        else:
            u = UINT[sz]

            def w(R, m, v):
                v = v.view(u).astype(ru)
                R[i] = v if m is None else where(m, v, R[i])

        return w

    # ---- closure shapes ------------------------------------------------
    def un(self, ins, t, fn, td=None):
        a, w = self.src(ins.args[1], t, ins), self.dst(ins.args[0], td or t, ins)

        def run(s, m):
            R = s.R
            w(R, m, fn(a(R)))

        return run

    def bi(self, ins, t, fn, td=None, tb=None):
        a, b = self.src(ins.args[1], t, ins), self.src(ins.args[2], tb or t, ins)
        w = self.dst(ins.args[0], td or t, ins)

        def run(s, m):
            R = s.R
            w(R, m, fn(a(R), b(R)))

        return run

    def tri(self, ins, t, fn, td=None, tc=None):
        a, b = self.src(ins.args[1], t, ins), self.src(ins.args[2], t, ins)
        c = self.src(ins.args[3], tc or t, ins)
        w = self.dst(ins.args[0], td or t, ins)

        def run(s, m):
            R = s.R
            w(R, m, fn(a(R), b(R), c(R)))

        return run

    def fpost(self, ins, t, fn):
        """Apply ftz / sat / relu around a float function."""
        ftz = "ftz" in ins.mods and t == "f32"
        sat = "sat" in ins.mods
        relu = "relu" in ins.mods
        if not (ftz or sat or relu):
            return fn

        def g(*xs):
            if ftz:
                xs = [fp.ftz32(x) for x in xs]
            r = fn(*xs)
            if ftz:
                r = fp.ftz32(r)
            if sat:
                r = np.where(
                    np.isnan(r), r.dtype.type(0), np.clip(r, r.dtype.type(0), r.dtype.type(1))
                )
            if relu:
                r = np.where(np.isnan(r), r, np.maximum(r, r.dtype.type(0)))
            return r

        return g


FMODS = (*RND, "ftz", "sat", "approx", "full")


def rounding(ins):
    return next((m for m in ins.mods if m in RND), "rn")


# ---- add / sub / mul / mad / fma / div -------------------------------------
def _fadd(c, ins, t, neg):
    mode = rounding(ins)
    if t == "f32" and mode != "rn":

        def f(a, b):
            return fp.narrow32(fp.add_odd(a.astype(F64), (-b if neg else b).astype(F64)), mode)
    elif t == "f64" and mode != "rn":

        def f(a, b):
            return fp.narrow64(*fp.two_sum(a, -b if neg else b), mode)
    else:
        f = np.subtract if neg else np.add
    return c.bi(ins, t, c.fpost(ins, t, f))


def _carry(c, ins, t, fn):
    """add.cc / addc / sub.cc / subc; fn(a, b, cin) -> (result, carry_out)."""
    use, out = ins.op in ("addc", "subc"), "cc" in ins.mods
    u = UINT[SIZES[t]]
    ut = "b%d" % (8 * SIZES[t])
    a, b = c.src(ins.args[1], ut, ins), c.src(ins.args[2], ut, ins)
    w = c.dst(ins.args[0], ut, ins)
    n = c.n

    def run(s, m):
        R = s.R
        cin = s.cc.astype(u) if use else np.zeros(n, u)
        r, co = fn(a(R), b(R), cin)
        if out:
            s.cc = co if m is None else np.where(m, co, s.cc)
        w(R, m, r)

    return run


def _add_c(a, b, ci):
    r = a + b
    c1 = r < a
    r2 = r + ci
    return r2, c1 | (r2 < r)


def _sub_c(a, b, ci):
    r = a - b
    c1 = a < b
    r2 = r - ci
    return r2, c1 | (r < ci)


@op("add", "sub", "addc", "subc")
def _addsub(c, ins):
    c.only(ins, *FMODS, "cc")
    t = c.types(ins)[-1]
    neg = ins.op.startswith("sub")
    if t in FLOATS:
        return _fadd(c, ins, t, neg)
    if "cc" in ins.mods or ins.op.endswith("c"):
        return _carry(c, ins, t, _sub_c if neg else _add_c)
    if "sat" in ins.mods:
        if t != "s32":
            c.bad(ins)
        f = np.subtract if neg else np.add
        return c.bi(
            ins,
            t,
            lambda a, b: np.clip(
                f(a.astype(np.int64), b.astype(np.int64)), -(2**31), 2**31 - 1
            ).astype(np.int32),
        )
    ut = "b%d" % (8 * SIZES[t])
    return c.bi(ins, ut, np.subtract if neg else np.add, td=ut)


def mulhi(a, b, t):
    sz = SIZES[t]
    if sz < 8:
        wd = (SINT if signed(t) else UINT)[sz * 2]
        return ((a.astype(wd) * b.astype(wd)) >> wd(8 * sz)).astype(NP[t])
    m32, sh = U64(0xFFFFFFFF), U64(32)
    ua, ub = a.view(U64), b.view(U64)
    al, ah, bl, bh = ua & m32, ua >> sh, ub & m32, ub >> sh
    ll, lh, hl = al * bl, al * bh, ah * bl
    mid = (ll >> sh) + (lh & m32) + (hl & m32)
    hi = ah * bh + (lh >> sh) + (hl >> sh) + (mid >> sh)
    if signed(t):
        hi = (
            hi
            - np.where(a.view(np.int64) < 0, ub, U64(0))
            - np.where(b.view(np.int64) < 0, ua, U64(0))
        )
    return hi.view(NP[t])


def _fmul(c, ins, t):
    mode = rounding(ins)
    if t == "f32" and mode != "rn":
        return lambda a, b: fp.narrow32(a.astype(F64) * b, mode)
    if t == "f64" and mode != "rn":
        return lambda a, b: fp.narrow64(*fp.two_prod(a, b), mode)
    return np.multiply


@op("mul")
def _mul(c, ins):
    c.only(ins, *FMODS, "lo", "hi", "wide")
    t = c.types(ins)[-1]
    if t in FLOATS:
        return c.bi(ins, t, c.fpost(ins, t, _fmul(c, ins, t)))
    if "wide" in ins.mods:
        wt = t[0] + str(16 * SIZES[t])
        wd = NP[wt]
        return c.bi(ins, t, lambda a, b: a.astype(wd) * b.astype(wd), td=wt)
    if "hi" in ins.mods:
        return c.bi(ins, t, lambda a, b: mulhi(a, b, t))
    return c.bi(ins, t, np.multiply)


def ffma(c, ins, t):
    mode = rounding(ins)
    if t == "f32":
        if mode == "rn":
            return fp.fma32
        return lambda a, b, d: fp.narrow32(fp.add_odd(a.astype(F64) * b, d.astype(F64)), mode)
    if t == "f64":
        if mode != "rn":
            c.bad(ins, "unsupported rounding of fma.f64")
        return fp.fma64
    return lambda a, b, d: a.astype(F64) * b + d  # half types: rounded once by the writer


@op("fma")
def _fma(c, ins):
    c.only(ins, *FMODS, "relu")
    t = c.types(ins)[-1]
    return c.tri(ins, t, c.fpost(ins, t, ffma(c, ins, t)))


@op("mad", "madc")
def _mad(c, ins):
    c.only(ins, *FMODS, "lo", "hi", "wide", "cc")
    t = c.types(ins)[-1]
    if t in FLOATS:
        return c.tri(ins, t, c.fpost(ins, t, ffma(c, ins, t)))
    if "cc" in ins.mods or ins.op == "madc":
        u, hi = UINT[SIZES[t]], "hi" in ins.mods
        a, b, d = (c.src(x, t, ins) for x in ins.args[1:4])
        w = c.dst(ins.args[0], "b%d" % (8 * SIZES[t]), ins)
        use, out = ins.op == "madc", "cc" in ins.mods

        def run(s, m):
            R = s.R
            x, y = a(R), b(R)
            p = (mulhi(x, y, t) if hi else x * y).view(u)
            r, co = _add_c(p, d(R).view(u), s.cc.astype(u) if use else np.zeros(len(p), u))
            if out:
                s.cc = co if m is None else np.where(m, co, s.cc)
            w(R, m, r)

        return run
    if "wide" in ins.mods:
        wt = t[0] + str(16 * SIZES[t])
        wd = NP[wt]
        return c.tri(ins, t, lambda a, b, d: a.astype(wd) * b.astype(wd) + d, td=wt, tc=wt)
    if "hi" in ins.mods:
        return c.tri(ins, t, lambda a, b, d: mulhi(a, b, t) + d)
    return c.tri(ins, t, lambda a, b, d: a * b + d)


@op("mul24", "mad24")
def _mul24(c, ins):
    c.only(ins, "lo")
    t = c.types(ins)[-1]
    sh = NP[t](8)

    def cut(x):
        return (x << sh) >> sh

    if ins.op == "mul24":
        return c.bi(ins, t, lambda a, b: cut(a) * cut(b))
    return c.tri(ins, t, lambda a, b, d: cut(a) * cut(b) + d)


def int_div(a, b, t):
    dt = NP[t]
    if not signed(t):
        z = b == 0
        q = a // np.where(z, dt(1), b)
        return np.where(z, dt(np.iinfo(dt).max), q)
    u = UINT[SIZES[t]]
    ua, ub = (
        np.where(a < 0, (u(0) - a.view(u)), a.view(u)),
        np.where(b < 0, u(0) - b.view(u), b.view(u)),
    )
    z = ub == 0
    q = ua // np.where(z, u(1), ub)
    q = np.where((a < 0) != (b < 0), u(0) - q, q)
    return np.where(z, u(np.iinfo(u).max), q).view(dt)


@op("div")
def _div(c, ins):
    c.only(ins, *FMODS)
    t = c.types(ins)[-1]
    if t in FLOATS:
        mode = rounding(ins)
        if mode != "rn":
            if t != "f32":
                c.bad(ins, "unsupported rounding")

            def f(a, b):
                q = a.astype(F64) / b  # 53 bits never land on a float32 tie by accident
                return fp.narrow32(q, mode)
        else:
            f = np.divide
        return c.bi(ins, t, c.fpost(ins, t, f))
    return c.bi(ins, t, lambda a, b: int_div(a, b, t))


@op("rem")
def _rem(c, ins):
    t = c.types(ins)[-1]
    c.only(ins)

    def f(a, b):
        q = int_div(a, b, t)
        return np.where(b == 0, a, a - q * b)

    return c.bi(ins, t, f)


@op("neg")
def _neg(c, ins):
    c.only(ins, "ftz")
    t = c.types(ins)[-1]
    return c.un(ins, t, c.fpost(ins, t, np.negative))


@op("abs")
def _abs(c, ins):
    c.only(ins, "ftz")
    t = c.types(ins)[-1]
    return c.un(ins, t, c.fpost(ins, t, np.abs))


@op("min", "max")
def _minmax(c, ins):
    c.only(ins, "ftz", "NaN", "relu", "xorsign", "abs")
    t = c.types(ins)[-1]
    if t in FLOATS:
        xs = "xorsign" in ins.mods
        if xs != ("abs" in ins.mods) or (xs and len(ins.args) != 3):
            c.bad(ins)
        lo = ins.op == "min"
        f = (np.minimum if lo else np.maximum) if "NaN" in ins.mods else np.fmin if lo else np.fmax
        if xs:
            f0 = f

            def f(a, b):
                return np.copysign(
                    f0(np.abs(a), np.abs(b)),
                    np.where(np.signbit(a) != np.signbit(b), F32(-1), F32(1)),
                )

        f = c.fpost(ins, t, f)
        if len(ins.args) == 4:
            return c.tri(ins, t, lambda a, b, d: f(f(a, b), d))
        return c.bi(ins, t, f)
    return c.bi(ins, t, np.minimum if ins.op == "min" else np.maximum)


@op("sad")
def _sad(c, ins):
    c.only(ins)
    t = c.types(ins)[-1]
    return c.tri(ins, t, lambda a, b, d: d + np.where(a < b, b - a, a - b))


@op("copysign")
def _copysign(c, ins):
    c.only(ins)
    t = c.types(ins)[-1]
    return c.bi(ins, t, lambda a, b: np.copysign(b, a))


@op("testp")
def _testp(c, ins):
    t = c.types(ins)[-1]
    k = ins.mods[0]
    tiny = np.finfo(NP[t]).tiny
    fn = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "notanumber": np.isnan,
        "number": lambda x: ~np.isnan(x),
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (np.abs(x) < tiny) & (x != 0),
    }.get(k)
    if fn is None:
        c.bad(ins)
    return c.un(ins, t, fn, td="pred")


# ---- transcendental ---------------------------------------------------------
def _f64fn(f):
    return lambda x: f(x.astype(F64)).astype(F32)


_MUFU = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@op("ex2", "lg2", "rsqrt", "rcp", "sqrt", "sin", "cos", "tanh")
def _mufu(c, ins):
    c.only(ins, *FMODS)
    t = c.types(ins)[-1]
    f = _MUFU[ins.op]
    if t == "f64":
        if "approx" in ins.mods and ins.op in ("rcp", "rsqrt"):
            # hardware returns ~20 good bits in the upper word
            return c.un(ins, t, lambda x: (f(x).view(U64) & U64(0xFFFFFFFF00000000)).view(F64))
        if rounding(ins) != "rn":
            c.bad(ins, "unsupported rounding")
        return c.un(ins, t, f)
    mode = rounding(ins)
    g = _f64fn(f) if mode == "rn" else (lambda x: fp.narrow32(f(x.astype(F64)), mode))
    return c.un(ins, t, c.fpost(ins, t, g))


# ---- logic and bits -----------------------------------------------------------
@op("and", "or", "xor")
def _logic(c, ins):
    c.only(ins)
    t = c.types(ins)[-1]
    f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[ins.op]
    return c.bi(ins, t, f)


@op("not")
def _not(c, ins):
    c.only(ins)
    return c.un(ins, c.types(ins)[-1], np.invert)


@op("cnot")
def _cnot(c, ins):
    c.only(ins)
    t = c.types(ins)[-1]
    return c.un(ins, t, lambda a: (a == 0).astype(NP[t]))


@op("shl", "shr")
def _shift(c, ins):
    c.only(ins)
    t = c.types(ins)[-1]
    dt, bits = NP[t], 8 * SIZES[t]
    left = ins.op == "shl"
    a, b = c.src(ins.args[1], t, ins), c.src(ins.args[2], "u32", ins)
    w = c.dst(ins.args[0], t, ins)
    sh_op = np.left_shift if left else np.right_shift
    if isinstance(ins.args[2], Imm) and 0 <= ins.args[2].value < bits:
        k = dt(ins.args[2].value)

        def run(s, m):
            R = s.R
            w(R, m, sh_op(a(R), k))

        return run

    def run(s, m):
        R = s.R
        x, k = a(R), b(R)
        big = k >= bits
        if signed(t) and not left:
            r = x >> np.minimum(k, bits - 1).astype(dt)
        else:
            r = np.where(big, dt(0), sh_op(x, np.where(big, U32(0), k).astype(dt)))
        w(R, m, r)

    return run


@op("shf")
def _shf(c, ins):
    c.only(ins, "l", "r", "wrap", "clamp")
    left, wrap = "l" in ins.mods, "wrap" in ins.mods

    def f(lo, hi, k):
        v = lo.astype(U64) | (hi.astype(U64) << U64(32))
        k = (k & U32(31)) if wrap else np.minimum(k, U32(32))
        k = k.astype(U64)
        return ((v >> (U64(32) - k)) if left else (v >> k)).astype(U32)

    return c.tri(ins, "b32", f)


# selector nibbles (byte 3 .. byte 0) of the prmt modes for control value 0..3
PRMT = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}
PRMT = {m: np.array(v, U32) for m, v in PRMT.items()}


@op("prmt")
def _prmt(c, ins):
    c.only(ins, *PRMT)
    mode = next((PRMT[x] for x in ins.mods if x in PRMT), None)
    a, b, k = (c.src(x, "b32", ins) for x in ins.args[1:4])
    w = c.dst(ins.args[0], "b32", ins)

    def run(s, m):
        R = s.R
        v = a(R).astype(U64) | (b(R).astype(U64) << U64(32))
        sel = k(R)
        if mode is not None:
            sel = mode[sel & U32(3)]
        r = np.zeros(len(v), U32)
        for j in range(4):
            q = (sel >> U32(4 * j)) & U32(15)
            byte = ((v >> ((q & U32(7)).astype(U64) * U64(8))) & U64(255)).astype(U32)
            byte = np.where(q & U32(8), np.where(byte & U32(128), U32(255), U32(0)), byte)
            r |= byte << U32(8 * j)
        w(R, m, r)

    return run


@op("lop3")
def _lop3(c, ins):
    if "BoolOp" in ins.mods or len(ins.args) != 5:
        c.bad(ins)
    c.only(ins)
    lut = ins.args[4].value

    def f(a, b, d):
        r = np.zeros_like(a)
        for i in range(8):
            if lut >> i & 1:
                r |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (d if i & 1 else ~d)
        return r

    return c.tri(ins, "b32", f)


@op("bfe")
def _bfe(c, ins):
    c.only(ins)
    t = c.types(ins)[-1]
    bits = 8 * SIZES[t]
    ut, u = "b%d" % bits, UINT[SIZES[t]]
    a = c.src(ins.args[1], ut, ins)
    p, l = c.src(ins.args[2], "u32", ins), c.src(ins.args[3], "u32", ins)
    w = c.dst(ins.args[0], ut, ins)

    def run(s, m):
        R = s.R
        x = a(R)
        pos, ln = p(R) & U32(255), l(R) & U32(255)
        pos_c = np.minimum(pos, bits - 1).astype(u)
        sh = np.where(pos >= bits, u(0), x >> pos_c)
        full = ln >= bits
        mask = np.where(full, ~u(0), (u(1) << np.where(full, 0, ln).astype(u)) - u(1))
        r = sh & mask
        if signed(t):
            top = np.minimum(pos + ln - U32(1), bits - 1).astype(u)
            sb = np.where(ln == 0, u(0), (x >> top) & u(1)).astype(bool)
            eff = np.where(ln == 0, u(0), mask)
            avail = np.where(pos >= bits, u(0), ~u(0) >> pos_c)
            r = np.where(ln == 0, u(0), np.where(sb, (r & eff & avail) | ~(eff & avail), r))
        w(R, m, r)

    return run


@op("bfi")
def _bfi(c, ins):
    c.only(ins)
    t = c.types(ins)[-1]
    bits, u = 8 * SIZES[t], UINT[SIZES[t]]
    a, b = c.src(ins.args[1], t, ins), c.src(ins.args[2], t, ins)
    p, l = c.src(ins.args[3], "u32", ins), c.src(ins.args[4], "u32", ins)
    w = c.dst(ins.args[0], t, ins)

    def run(s, m):
        R = s.R
        pos, ln = p(R) & U32(255), l(R) & U32(255)
        full = ln >= bits
        mask = np.where(full, ~u(0), (u(1) << np.where(full, 0, ln).astype(u)) - u(1))
        over = pos >= bits
        k = np.where(over, 0, pos).astype(u)
        mask = np.where(over, u(0), mask << k)
        w(R, m, (b(R) & ~mask) | ((a(R) << k) & mask))

    return run


def popcount(x):
    return np.bitwise_count(x).astype(U32)


def clz(x, bits):
    """Leading zeros of an unsigned array."""
    x = x.astype(U64)
    for k in (1, 2, 4, 8, 16, 32):
        x = x | (x >> U64(k))
    return (U32(bits) - popcount(x)).astype(U32)


@op("popc")
def _popc(c, ins):
    c.only(ins)
    return c.un(ins, c.types(ins)[-1], popcount, td="u32")


@op("clz")
def _clz(c, ins):
    c.only(ins)
    t = c.types(ins)[-1]
    return c.un(ins, t, lambda x: clz(x, 8 * SIZES[t]), td="u32")


@op("bfind")
def _bfind(c, ins):
    c.only(ins, "shiftamt")
    t = c.types(ins)[-1]
    bits, u = 8 * SIZES[t], UINT[SIZES[t]]
    amt = "shiftamt" in ins.mods

    def f(x):
        if signed(t):
            x = np.where(x < 0, ~x, x).view(u)
        z = clz(x, bits)
        r = z if amt else U32(bits - 1) - z
        return np.where(x == 0, U32(0xFFFFFFFF), r).astype(U32)

    return c.un(ins, t, f, td="u32")


@op("brev")
def _brev(c, ins):
    c.only(ins)
    t = c.types(ins)[-1]
    bits, u = 8 * SIZES[t], UINT[SIZES[t]]

    def f(x):
        r = np.zeros_like(x)
        for i in range(bits):
            r |= ((x >> u(i)) & u(1)) << u(bits - 1 - i)
        return r

    return c.un(ins, t, f)


@op("bmsk")
def _bmsk(c, ins):
    c.only(ins, "clamp", "wrap")

    def f(a, b):
        if "wrap" in ins.mods:
            a, b = a & U32(31), b & U32(31)
        a64, b64 = np.minimum(a, 64).astype(U64), np.minimum(b, 32).astype(U64)
        ones = (U64(1) << b64) - U64(1)
        return np.where(a64 >= 32, U64(0), ones << np.minimum(a64, U64(31))).astype(U32)

    return c.bi(ins, "b32", f)


@op("dp4a", "dp2a")
def _dp(c, ins):
    c.only(ins, "lo", "hi")
    ta, tb = c.types(ins)
    wide = np.int64

    def lanes(x, t):
        return x.view(np.int8 if t == "s32" else np.uint8).reshape(-1, 4).astype(wide)

    def f(a, b, d):
        xb = lanes(b, tb)
        if ins.op == "dp4a":
            acc = (lanes(a, ta) * xb).sum(1)
        else:
            h = a.view(np.int16 if ta == "s32" else U16).reshape(-1, 2).astype(wide)
            acc = (h * (xb[:, 2:] if "hi" in ins.mods else xb[:, :2])).sum(1)
        return (acc + d.astype(wide)).astype(U32)

    return c.tri(ins, "b32", f)


# ---- compare and select ---------------------------------------------------------
def compare(ins, op_, t, c):
    if t in FLOATS:
        tab = {
            "eq": np.equal,
            "ne": lambda a, b: (a < b) | (a > b),
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
            "equ": lambda a, b: ~((a < b) | (a > b)),
            "neu": np.not_equal,
            "ltu": lambda a, b: ~(a >= b),
            "leu": lambda a, b: ~(a > b),
            "gtu": lambda a, b: ~(a <= b),
            "geu": lambda a, b: ~(a < b),
            "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
            "nan": lambda a, b: np.isnan(a) | np.isnan(b),
        }
    else:
        tab = {
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
            "lo": np.less,
            "ls": np.less_equal,
            "hi": np.greater,
            "hs": np.greater_equal,
        }
    if op_ not in tab:
        c.bad(ins, f"unsupported comparison .{op_}")
    return tab[op_]


BOOL = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@op("setp")
def _setp(c, ins):
    t = c.types(ins)[-1]
    mods = [x for x in ins.mods if x not in TYPES and x != "ftz"]
    cmp_, comb = mods[0], mods[1:]
    if len(comb) > 1 or (comb and comb[0] not in BOOL):
        c.bad(ins)
    f = compare(ins, cmp_, t, c)
    if "ftz" in ins.mods and t == "f32":
        f0 = f

        def f(a, b):
            return f0(fp.ftz32(a), fp.ftz32(b))

    a, b = c.src(ins.args[1], t, ins), c.src(ins.args[2], t, ins)
    d = ins.args[0]
    w1 = c.dst(d.a if isinstance(d, Pair) else d, "pred", ins)
    w2 = c.dst(d.b, "pred", ins) if isinstance(d, Pair) else None
    x2 = t in ("f16x2", "bf16x2")
    pc = c.src(ins.args[3], "pred", ins) if comb else None
    bf = BOOL[comb[0]] if comb else None
    if not comb and not w2 and not x2:

        def run(s, m):
            R = s.R
            w1(R, m, f(a(R), b(R)))

        return run

    def run(s, m):
        R = s.R
        r = f(a(R), b(R))
        if x2:
            r, q = r[0::2], r[1::2]
        else:
            q = ~r
        if bf is not None:
            p = pc(R)
            r, q = bf(r, p), bf(q, p)
        w1(R, m, r)
        if w2:
            w2(R, m, q)

    return run


@op("set")
def _set(c, ins):
    mods = [x for x in ins.mods if x not in TYPES and x != "ftz"]
    td, t = c.types(ins)
    if len(mods) != 1:
        c.bad(ins)
    f = compare(ins, mods[0], t, c)
    if td in ("f16x2", "bf16x2", "f16", "bf16"):

        def g(a, b):
            return f(a, b).astype(F32)
    elif t in ("f16x2", "bf16x2"):

        def g(a, b):
            return np.where(f(a, b), U16(0xFFFF), U16(0)).view(U32)
    elif td == "f32":

        def g(a, b):
            return f(a, b).astype(F32)
    else:

        def g(a, b):
            return np.where(f(a, b), NP[td](-1 if signed(td) else np.iinfo(NP[td]).max), NP[td](0))

    return c.bi(ins, t, g, td=td)


@op("selp")
def _selp(c, ins):
    c.only(ins)
    t = "b%d" % (8 * SIZES[c.types(ins)[-1]])
    a, b = c.src(ins.args[1], t, ins), c.src(ins.args[2], t, ins)
    p = c.src(ins.args[3], "pred", ins)
    if isinstance(ins.args[1], Imm):
        a = c.src(ins.args[1], c.types(ins)[-1], ins) if c.types(ins)[-1] in ("f32", "f64") else a
    if isinstance(ins.args[2], Imm):
        b = c.src(ins.args[2], c.types(ins)[-1], ins) if c.types(ins)[-1] in ("f32", "f64") else b
    u = UINT[SIZES[t]]
    w = c.dst(ins.args[0], t, ins)

    def run(s, m):
        R = s.R
        w(R, m, np.where(p(R), a(R).view(u), b(R).view(u)))

    return run


@op("slct")
def _slct(c, ins):
    c.only(ins, "ftz")
    t, tc = c.types(ins)
    return c.tri(ins, t, lambda a, b, d: np.where(d >= 0, a, b), tc=tc)


# ---- mov / cvt ---------------------------------------------------------------------
@op("mov")
def _mov(c, ins):
    c.only(ins)
    t = c.types(ins)[-1]
    d, a = ins.args
    if isinstance(a, Special) and a.name in (
        "%clock",
        "%clock64",
        "%globaltimer",
        "%clock_hi",
        "%globaltimer_lo",
    ):
        w = c.dst(d, t, ins)
        dt, n = NP[t], c.n

        def run(s, m):
            w(s.R, m, np.full(n, s.steps & ((1 << (8 * SIZES[t])) - 1), dt))

        return run
    if t == "b128":
        return _mov128(c, ins)
    if isinstance(d, Vec):
        k = len(d.items)
        sz = SIZES[t] // k
        ws = [c.dst(x, "b%d" % (8 * sz), ins) for x in d.items]
        g, u = c.src(a, "b%d" % (8 * SIZES[t]), ins), UINT[sz]

        def run(s, m):
            R = s.R
            v = g(R).view(u).reshape(-1, k)
            for j, w in enumerate(ws):
                w(R, m, np.ascontiguousarray(v[:, j]))

        return run
    if isinstance(a, Vec):
        k = len(a.items)
        sz = SIZES[t] // k
        gs = [c.src(x, "b%d" % (8 * sz), ins) for x in a.items]
        w, u, n = c.dst(d, "b%d" % (8 * SIZES[t]), ins), UINT[sz], c.n

        def run(s, m):
            R = s.R
            v = np.empty((n, k), u)
            for j, g in enumerate(gs):
                v[:, j] = g(R)
            w(R, m, v.reshape(-1).view(UINT[SIZES[t]]))

        return run
    if t != "pred" and not (isinstance(a, Imm) and isinstance(a.value, tuple)):
        t = "b%d" % (8 * SIZES[t])
    if isinstance(a, Imm) and isinstance(a.value, tuple) and t in ("b32", "b64", "u32", "u64"):
        t = "f32" if SIZES[t] == 4 else "f64"
    g, w = c.src(a, t, ins), c.dst(d, t, ins)

    def run(s, m):
        R = s.R
        w(R, m, g(R))

    return run


def _mov128(c, ins):
    d, a = ins.args
    if isinstance(d, Vec) and isinstance(a, Reg):
        ws = [c.dst(x, "b64", ins) for x in d.items]

        def run(s, m):
            v = s.R[a.idx]
            for j, w in enumerate(ws):
                w(s.R, m, np.ascontiguousarray(v[:, j]))

        return run
    if isinstance(d, Reg) and d.type == "b128":
        if isinstance(a, Vec):
            gs = [c.src(x, "b64", ins) for x in a.items]

            def get(R):
                return np.stack([g(R) for g in gs], 1)
        elif isinstance(a, Reg):

            def get(R):
                return R[a.idx]
        else:
            c.bad(ins)

        def run(s, m):
            v = get(s.R)
            s.R[d.idx] = v if m is None else np.where(m[:, None], v, s.R[d.idx])

        return run
    c.bad(ins)


@op("cvta")
def _cvta(c, ins):
    to = "to" in ins.mods
    space = next(
        (
            x.split("::")[0]
            for x in ins.mods
            if x.split("::")[0] in ("global", "shared", "local", "const", "param")
        ),
        None,
    )
    t = c.types(ins)[-1]
    if space is None:
        c.bad(ins)
    from .memory import WINDOW

    base = NP["u64"](WINDOW.get(space, 0))
    if t != "u64":
        c.bad(ins, "only 64-bit addresses are supported")
    if to:
        return c.un(ins, "u64", lambda x: x - base)
    return c.un(ins, "u64", lambda x: x + base)


@op("isspacep")
def _isspacep(c, ins):
    from .memory import WINDOW, WINDOW_SIZE

    sp = ins.mods[0].split("::")[0]
    w = c.dst(ins.args[0], "pred", ins)
    a = c.src(ins.args[1], "u64", ins)
    if sp in ("shared", "local", "param"):
        lo = U64(WINDOW[sp])

        def f(x):
            return (x >= lo) & (x < lo + U64(WINDOW_SIZE))
    else:

        def f(x):
            return x >= U64(WINDOW["param"] + WINDOW_SIZE)

    def run(s, m):
        w(s.R, m, f(a(s.R)))

    return run


INTR = ("rni", "rzi", "rmi", "rpi")


@op("cvt")
def _cvt(c, ins):
    c.only(ins, *RND, *INTR, "ftz", "sat", "relu", "satfinite", "pack")
    ts = c.types(ins)
    if len(ts) != 2 or "pack" in ins.mods:
        c.bad(ins)
    td, ta = ts
    mode = next((m for m in ins.mods if m in RND), None)
    intr = next((m for m in ins.mods if m in INTR), None)
    ftz, sat, relu = "ftz" in ins.mods, "sat" in ins.mods, "relu" in ins.mods
    if td in ("f16x2", "bf16x2"):
        if ta != "f32" or len(ins.args) != 3:
            c.bad(ins)
        a, b = c.src(ins.args[1], "f32", ins), c.src(ins.args[2], "f32", ins)
        w, n = c.dst(ins.args[0], "b32", ins), c.n
        enc = (
            (lambda x: fp.f32_to_f16(x, mode).view(U16))
            if td == "f16x2"
            else (lambda x: fp.f32_to_bf16(x, mode))
        )

        def run(s, m):
            R = s.R
            v = np.empty((n, 2), U16)
            hi, lo = a(R), b(R)
            if relu:
                hi, lo = np.fmax(hi, F32(0)), np.fmax(lo, F32(0))
            v[:, 1], v[:, 0] = enc(hi), enc(lo)
            w(R, m, v.reshape(-1).view(U32))

        return run
    g = c.src(ins.args[1], ta, ins)
    fa, fd = ta in FLOATS, td in FLOATS
    if td == "tf32":
        w = c.dst(ins.args[0], "b32", ins)

        def f(x):
            return fp.f32_to_tf32(np.fmax(x, F32(0)) if relu else x, mode or "rn")
    elif fa and fd:
        w = c.dst(ins.args[0], "b16" if td in ("f16", "bf16") else td, ins)

        def f(x):
            if ftz and x.dtype == F32:
                x = fp.ftz32(x)
            if intr:
                x = fp.round_int(x, intr)
            if sat:
                x = np.where(
                    np.isnan(x), x.dtype.type(0), np.clip(x, x.dtype.type(0), x.dtype.type(1))
                )
            if relu:
                x = np.fmax(x, x.dtype.type(0))
            if td == "f64":
                return x.astype(F64)
            if td == "f32":
                r = fp.narrow32(x, mode) if x.dtype == F64 and mode else x.astype(F32)
                return fp.ftz32(r) if ftz else r
            if td == "f16":
                return (fp.f32_to_f16(x, mode or "rn")).view(U16)
            return fp.f64_to_bf16(x) if x.dtype == F64 else fp.f32_to_bf16(x, mode or "rn")
    elif fa:
        w = c.dst(ins.args[0], td, ins)
        dt = NP[td]
        nanv = (
            0
            if SIZES[td] < 8 and ta != "f64"
            else (1 << 63 if td == "u64" else -(2**63) if td == "s64" else 0)
        )
        if ta == "f64" and SIZES[td] == 4:
            nanv = 0x80000000 if td == "u32" else -(2**31)

        def f(x):
            return fp.float_to_int(
                fp.round_int(fp.ftz32(x) if ftz and x.dtype == F32 else x, intr or "rzi"), dt, nanv
            )
    elif fd:
        w = c.dst(ins.args[0], "b16" if td in ("f16", "bf16") else td, ins)

        def f(x):
            if td == "f64":
                if mode not in (None, "rn") and SIZES[ta] == 8:
                    c.bad(ins, "unsupported rounding")
                return x.astype(F64)
            if td == "f32":
                if mode in (None, "rn"):
                    return x.astype(F32)
                r = x.astype(F32)
                if SIZES[ta] < 8:
                    return fp.narrow32(x.astype(F64), mode)
                return int64_to_f32(x, r, mode)
            y = x.astype(F64)
            return y.astype(F16).view(U16) if td == "f16" else fp.f64_to_bf16(y)

        if td == "f64" and mode not in (None, "rn") and SIZES[ta] == 8:
            c.bad(ins, "unsupported rounding")
    else:
        w = c.dst(ins.args[0], td, ins)
        dt = NP[td]
        if sat:
            lo, hi = int(np.iinfo(dt).min), int(np.iinfo(dt).max)
            alo, ahi = int(np.iinfo(NP[ta]).min), int(np.iinfo(NP[ta]).max)
            lo, hi = max(lo, alo), min(hi, ahi)

            def f(x):
                return np.clip(x, NP[ta](lo), NP[ta](hi)).astype(dt)
        else:

            def f(x):
                return x.astype(dt)

    def run(s, m):
        R = s.R
        w(R, m, f(g(R)))

    return run


def int64_to_f32(x, r, mode):
    """Directed rounding of 64-bit integers: compare through exact Python-size arithmetic."""
    out = r.copy()
    for i in range(len(x)):
        ri = int(r[i])
        xi = int(x[i])
        if (mode == "rz" and abs(ri) > abs(xi)) or (mode == "rm" and ri > xi):
            out[i] = np.nextafter(r[i], F32(0) if mode == "rz" else F32(-np.inf))
        elif mode == "rp" and ri < xi:
            out[i] = np.nextafter(r[i], F32(np.inf))
    return out


# ---- no effect in this model ----------------------------------------------------------
def _nop(c, ins):
    return lambda s, m: None


for _n in (
    "membar",
    "fence",
    "nanosleep",
    "prefetch",
    "prefetchu",
    "applypriority",
    "discard",
    "pmevent",
    "griddepcontrol",
    "setmaxnreg",
):
    OPS[_n] = _nop


@op("createpolicy")
def _policy(c, ins):
    w, n = c.dst(ins.args[0], "b64", ins), c.n
    return lambda s, m: w(s.R, m, np.zeros(n, U64))


@op("trap", "brkpt")
def _trap(c, ins):
    from .errors import PtxError

    def run(s, m):
        raise PtxError(f"{c.prog.name}: `{ins.op}` executed at PTX line {ins.line}, CTA {s.cta}")

    return run


@op("call")
def _call(c, ins):
    """Calls of functions without a body (everything else was inlined by the parser)."""
    name = ins.mods[0]
    from .errors import PtxError

    if name == "vprintf":

        def run(s, m):
            ret = ins.args[0].var
            s.local[:, ret.addr : ret.addr + 4] = 0

        return run
    if name == "__assertfail":

        def run(s, m):
            t = 0 if m is None else int(np.flatnonzero(m)[0])
            raise PtxError(
                f"{c.prog.name}: device assert failed at PTX line {ins.line}, CTA {s.cta}, thread {t}"
            )

        return run
    c.bad(ins, f"call of undefined function {name}")
