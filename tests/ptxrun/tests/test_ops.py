"""Single instructions in hand-written PTX against independent (exact, Python-level) references."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

import ptxrun

REG = {
    "b8": ".b16",
    "u8": ".u16",
    "s8": ".s16",
    "b16": ".b16",
    "u16": ".u16",
    "s16": ".s16",
    "f16": ".b16",
    "bf16": ".b16",
    "b32": ".b32",
    "u32": ".u32",
    "s32": ".s32",
    "f32": ".f32",
    "f16x2": ".b32",
    "bf16x2": ".b32",
    "tf32": ".b32",
    "b64": ".b64",
    "u64": ".u64",
    "s64": ".s64",
    "f64": ".f64",
    "pred": ".pred",
}
SZ = {"8": 1, "16": 2, "32": 4, "64": 8}


def size(t):
    return 4 if "x2" in t or t == "tf32" else SZ[t.lstrip("busft")]


def run_op(text, out_t, in_ts, ins):
    """Run `text` (operands: d, a, b, c) on every element of the inputs."""
    n = len(ins[0])
    names = "abce"
    reg = "\n".join(f".reg {REG[t]} {names[i]};" for i, t in enumerate(in_ts))
    ld = "\n".join(
        f"mul.lo.u64 off, i, {size(t)}; ld.param.u64 p, [k_{i + 1}]; add.u64 p, p, off; ld.global.b{8 * size(t)} {names[i]}, [p];"
        for i, t in enumerate(in_ts)
    )
    par = ", ".join(f".param .u64 k_{i}" for i in range(len(in_ts) + 1))
    ptx = f""".version 8.0
.target sm_80
.address_size 64
.visible .entry k({par}) {{
  .reg .u64 p, off, i; .reg .u32 t, u, w; .reg .pred q, q2, q3; .reg {REG[out_t]} d;
  {reg}
  mov.u32 t, %tid.x; mov.u32 u, %ctaid.x; mov.u32 w, %ntid.x; mad.lo.u32 t, u, w, t; cvt.u64.u32 i, t;
  setp.ge.u32 q, t, {n}; @q ret;
  {ld}
  {text}
  mul.lo.u64 off, i, {size(out_t)}; ld.param.u64 p, [k_0]; add.u64 p, p, off; st.global.b{8 * size(out_t)} [p], d;
  ret;
}}"""
    dt = {"f16": np.uint16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64}.get(
        out_t, np.dtype(("i" if out_t[0] == "s" else "u") + str(size(out_t))).type
    )
    out = np.zeros(n, dt)
    ptxrun.load(ptx).kernel().launch(
        grid=-(-n // 128), block=128, args=[out] + [np.ascontiguousarray(x) for x in ins]
    )
    return out


rng = np.random.default_rng(7)
I32 = np.concatenate(
    [[0, 1, 2**31 - 1, 2**31, 2**32 - 1, 31, 32, 33, 255, 0x80], rng.integers(0, 2**32, 118)]
).astype(np.uint32)
J32 = rng.permutation(I32)
I64 = np.concatenate(
    [
        np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64),
        rng.integers(0, 2**64, 123, dtype=np.uint64),
    ]
)
J64 = rng.permutation(I64)
F32S = np.concatenate(
    [
        np.array(
            [
                0.0,
                -0.0,
                np.inf,
                -np.inf,
                np.nan,
                1e-42,
                -3e-40,
                1.5,
                2.5,
                -2.5,
                3.4e38,
                0.5,
                -0.5,
                1.17549435e-38,
            ],
            np.float32,
        ),
        (rng.standard_normal(114) * 10.0 ** rng.integers(-6, 12, 114)).astype(np.float32),
    ]
)
FIN = rng.standard_normal(128).astype(np.float32) * np.float32(10.0) ** rng.integers(
    -6, 6, 128
).astype(np.float32)


def s32(v):
    v &= 2**32 - 1
    return v - 2**32 if v >> 31 else v


def frac_round32(x, mode):
    """Exact Fraction -> float32 by rounding mode."""
    if x == 0:
        return np.float32(0)
    s, a = (-1, -x) if x < 0 else (1, x)
    e = math.floor(math.log2(a.numerator) - math.log2(a.denominator))
    while Fraction(2) ** e > a:
        e -= 1
    while Fraction(2) ** (e + 1) <= a:
        e += 1
    q = Fraction(2) ** (max(e, -126) - 23)
    k = a / q
    f = k.numerator // k.denominator
    r = k - f
    up = {
        "rn": r > Fraction(1, 2) or (r == Fraction(1, 2) and f & 1),
        "rz": False,
        "rm": s < 0 and r > 0,
        "rp": s > 0 and r > 0,
    }[mode]
    return np.float32(s * float((f + up) * q))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["add", "mul", "fma"])
def test_rounding_modes(op, mode):
    a, b, c = FIN, rng.permutation(FIN), rng.permutation(FIN)
    c[:40] = -(a[:40] * b[:40])  # cancellation
    if op == "fma":
        d = run_op(f"fma.{mode}.f32 d, a, b, c;", "f32", ["f32"] * 3, [a, b, c])
        ex = [
            Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            for x, y, z in zip(a, b, c, strict=False)
        ]
    else:
        d = run_op(f"{op}.{mode}.f32 d, a, b;", "f32", ["f32"] * 2, [a, b])
        ex = [
            Fraction(float(x)) + Fraction(float(y))
            if op == "add"
            else Fraction(float(x)) * Fraction(float(y))
            for x, y in zip(a, b, strict=False)
        ]
    ref = np.array([frac_round32(x, mode) for x in ex])
    assert np.array_equal(d, ref)


def test_fma32_double_rounding_case():
    # product + addend sits one bit past a float32 tie: a float64 sum would round to the tie
    a, b, c = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(2.0**-60)
    x = [np.full(4, v, np.float32) for v in (a, b, c)]
    d = run_op("fma.rn.f32 d, a, b, c;", "f32", ["f32"] * 3, x)
    ref = frac_round32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)), "rn")
    assert (d == ref).all()


def test_fma64_exact():
    a = rng.standard_normal(128) * 10.0 ** rng.integers(-150, 150, 128)
    b = rng.permutation(a)
    c = rng.permutation(a)
    c[:60] = -(a[:60] * b[:60])
    c[60:70] = 0
    d = run_op("fma.rn.f64 d, a, b, c;", "f64", ["f64"] * 3, [a, b, c])
    for i in range(128):
        x = (
            Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
            if np.isfinite(c[i])
            else None
        )
        try:
            ref = float(x) if x is not None else c[i]
        except OverflowError:
            ref = math.copysign(math.inf, x)
        assert d[i] == ref, i


def test_int_ops():
    a, b = I32, J32
    for t, op, f in [
        ("u32", "mul.hi.u32", lambda x, y: x * y >> 32),
        ("u32", "add.u32", lambda x, y: x + y),
        ("u32", "sub.u32", lambda x, y: x - y),
        ("u32", "mul.lo.u32", lambda x, y: x * y),
        ("u32", "min.u32", min),
        ("u32", "max.u32", max),
        ("u32", "shl.b32", lambda x, y: x << y if y < 32 else 0),
        ("u32", "shr.u32", lambda x, y: x >> y if y < 32 else 0),
        ("u32", "xor.b32", lambda x, y: x ^ y),
        ("u32", "bfind.u32", None),
    ]:
        if f is None:
            continue
        for bb in (b, b % 40):
            d = run_op(f"{op} d, a, b;", t, [t, t], [a, bb])
            assert d.tolist() == [
                f(int(x), int(y)) & (2**32 - 1) for x, y in zip(a, bb, strict=False)
            ], op
    for op, f in [
        ("mul.hi.s32", lambda x, y: x * y >> 32),
        ("min.s32", min),
        ("max.s32", max),
        ("add.sat.s32", lambda x, y: max(-(2**31), min(2**31 - 1, x + y))),
        (
            "div.s32",
            lambda x, y: int(abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1) if y else -1,
        ),
        ("rem.s32", lambda x, y: (abs(x) % abs(y)) * (-1 if x < 0 else 1) if y else x),
    ]:
        d = run_op(f"{op} d, a, b;", "s32", ["s32", "s32"], [a.view(np.int32), b.view(np.int32)])
        assert d.tolist() == [
            s32(f(int(x), int(y))) for x, y in zip(a.view(np.int32), b.view(np.int32), strict=False)
        ], op
    d = run_op("shr.s32 d, a, b;", "s32", ["s32", "u32"], [a.view(np.int32), b % 40])
    assert d.tolist() == [
        int(x) >> min(int(y), 31) for x, y in zip(a.view(np.int32), b % 40, strict=False)
    ]


def test_int64_ops():
    a, b = I64, J64
    M = 2**64 - 1

    def sg(v):
        return int(v) - 2**64 if int(v) >> 63 else int(v)

    for op, f in [
        ("mul.hi.u64", lambda x, y: x * y >> 64),
        ("mul.lo.u64", lambda x, y: x * y),
        ("add.u64", lambda x, y: x + y),
        ("div.u64", lambda x, y: x // y if y else M),
        ("rem.u64", lambda x, y: x % y if y else x),
    ]:
        d = run_op(f"{op} d, a, b;", "u64", ["u64"] * 2, [a, b])
        assert d.tolist() == [f(int(x), int(y)) & M for x, y in zip(a, b, strict=False)], op
    d = run_op("mul.hi.s64 d, a, b;", "u64", ["u64"] * 2, [a, b])
    assert d.tolist() == [(sg(x) * sg(y) >> 64) & M for x, y in zip(a, b, strict=False)]
    d = run_op(
        "mul.wide.s32 d, a, b;", "s64", ["s32"] * 2, [I32.view(np.int32), J32.view(np.int32)]
    )
    assert d.tolist() == [
        int(x) * int(y) for x, y in zip(I32.view(np.int32), J32.view(np.int32), strict=False)
    ]
    d = run_op("mad.wide.u32 d, a, b, c;", "u64", ["u32", "u32", "u64"], [I32, J32, I64])
    assert d.tolist() == [
        (int(x) * int(y) + int(z)) & M for x, y, z in zip(I32, J32, I64, strict=False)
    ]


def test_bit_ops():
    a, b, c = I32, J32, rng.permutation(I32)
    for lut in (0x80, 0xFE, 0x96, 0xE8, 0x1B, 0xCA):
        d = run_op(f"lop3.b32 d, a, b, c, {lut};", "b32", ["b32"] * 3, [a, b, c])
        ref = [
            sum(
                ((lut >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | (z >> i & 1))) & 1) << i
                for i in range(32)
            )
            for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=False)
        ]
        assert d.tolist() == ref
    d = run_op("prmt.b32 d, a, b, c;", "b32", ["b32"] * 3, [a, b, c])

    def prmt(x, y, s):
        by = (x | y << 32).to_bytes(8, "little")
        r = 0
        for j in range(4):
            q = s >> 4 * j & 15
            v = by[q & 7]
            r |= ((0xFF if v & 0x80 else 0) if q & 8 else v) << 8 * j
        return r

    assert d.tolist() == [
        prmt(x, y, z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=False)
    ]
    for m, f in [
        ("l.wrap", lambda x, y, k: (y << 32 | x) << (k & 31) >> 32),
        ("l.clamp", lambda x, y, k: (y << 32 | x) << min(k, 32) >> 32),
        ("r.wrap", lambda x, y, k: (y << 32 | x) >> (k & 31)),
        ("r.clamp", lambda x, y, k: (y << 32 | x) >> min(k, 32)),
    ]:
        k = (c % 40).astype(np.uint32)
        d = run_op(f"shf.{m}.b32 d, a, b, c;", "b32", ["b32"] * 3, [a, b, k])
        assert d.tolist() == [
            f(x, y, z) & (2**32 - 1)
            for x, y, z in zip(a.tolist(), b.tolist(), k.tolist(), strict=False)
        ], m
    for op, f in [
        ("popc.b32", lambda x: bin(x).count("1")),
        ("clz.b32", lambda x: 32 - x.bit_length()),
        ("brev.b32", lambda x: int(f"{x:032b}"[::-1], 2)),
        ("bfind.u32", lambda x: x.bit_length() - 1 & 2**32 - 1),
        ("not.b32", lambda x: ~x & 2**32 - 1),
    ]:
        assert run_op(f"{op} d, a;", "b32", ["b32"], [a]).tolist() == [f(x) for x in a.tolist()], op


@pytest.mark.parametrize(("t", "bits"), [("u32", 32), ("s32", 32), ("u64", 64), ("s64", 64)])
def test_bfe_bfi(t, bits):
    a = I32 if bits == 32 else I64
    b2 = J32 if bits == 32 else J64
    p, l = (
        rng.integers(0, bits + 6, 128).astype(np.uint32),
        rng.integers(0, bits + 6, 128).astype(np.uint32),
    )
    d = run_op(f"bfe.{t} d, a, b, c;", "b%d" % bits, ["b%d" % bits, "b32", "b32"], [a, p, l])

    def bfe(x, pos, ln):  # the loop of the PTX specification
        msb = bits - 1
        sb = 0 if t[0] == "u" or ln == 0 else x >> min(pos + ln - 1, msb) & 1
        r = 0
        for i in range(bits):
            bit = x >> (pos + i) & 1 if i < ln and pos + i <= msb else sb
            r |= bit << i
        return r

    assert d.tolist() == [bfe(int(x), int(y), int(z)) for x, y, z in zip(a, p, l, strict=False)]
    if t[0] == "u":
        w = "b%d" % bits
        d = run_op(f"bfi.{w} d, a, b, c, e;", w, [w, w, "b32", "b32"], [a, b2, p, l])

        def bfi(x, y, pos, ln):
            for i in range(ln):
                if pos + i < bits:
                    y = y & ~(1 << pos + i) | (x >> i & 1) << pos + i
            return y

        assert d.tolist() == [
            bfi(int(x), int(y), int(z), int(q)) for x, y, z, q in zip(a, b2, p, l, strict=False)
        ]


def test_carry_chain():
    text = """{ .reg .u32 a0, a1, b0, b1, r0, r1; mov.b64 {a0, a1}, a; mov.b64 {b0, b1}, b;
      add.cc.u32 r0, a0, b0; addc.u32 r1, a1, b1; mov.b64 d, {r0, r1}; }"""
    d = run_op(text, "u64", ["u64"] * 2, [I64, J64])
    assert d.tolist() == [(int(x) + int(y)) % 2**64 for x, y in zip(I64, J64, strict=False)]
    d = run_op(
        text.replace("add.cc", "sub.cc").replace("addc", "subc"), "u64", ["u64"] * 2, [I64, J64]
    )
    assert d.tolist() == [(int(x) - int(y)) % 2**64 for x, y in zip(I64, J64, strict=False)]


def test_carry_propagates_through_all_ones():
    text = """{ .reg .u32 l, h, z; .reg .u32 r0, r1, r2; mov.b64 {l, h}, a; mov.u32 z, 0;
      add.cc.u32 r0, l, b; addc.cc.u32 r1, h, z; addc.u32 r2, z, z; mov.b64 d, {r1, r2}; }"""
    a = np.array([2**64 - 1, 2**64 - 2, 0xFFFFFFFF00000001, 5, 2**32 - 1], np.uint64)
    b = np.array([1, 1, 0xFFFFFFFF, 7, 1], np.uint32)
    d = run_op(text, "u64", ["u64", "u32"], [a, b])
    assert d.tolist() == [(int(x) + int(y)) >> 32 for x, y in zip(a, b, strict=False)]
    text = text.replace("add.cc", "sub.cc").replace("addc", "subc")
    d = run_op(
        text,
        "u64",
        ["u64", "u32"],
        [np.array([0, 5, 2**32], np.uint64), np.array([1, 3, 1], np.uint32)],
    )
    assert d.tolist() == [2**64 - 1, 0, 0]


@pytest.mark.parametrize("td", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_int(td, mode):
    x = F32S
    d = run_op(f"cvt.{mode}.{td}.f32 d, a;", td if size(td) > 1 else td[0] + "16", ["f32"], [x])
    bits = int(td[1:])
    lo, hi = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if td[0] == "s" else (0, 2**bits - 1)
    for v, g in zip(x.tolist(), d.tolist(), strict=False):
        if math.isnan(v):
            if bits < 64:
                assert g == 0
            continue
        r = (
            v
            if math.isinf(v)
            else {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](v)
        )
        r = hi if r > hi else lo if r < lo else int(r)
        assert g == r, (v, g, r)


def test_int_conversions():
    a = I32
    assert run_op("cvt.s64.s32 d, a;", "s64", ["s32"], [a]).tolist() == a.view(np.int32).tolist()
    assert run_op("cvt.u16.u32 d, a;", "u16", ["u32"], [a]).tolist() == (a & 0xFFFF).tolist()
    assert (
        run_op("cvt.s32.s8 d, a;", "s32", ["u32"], [a]).tolist()
        == a.astype(np.uint8).view(np.int8).tolist()
    )
    assert (
        run_op("cvt.sat.s16.s32 d, a;", "s16", ["s32"], [a]).tolist()
        == np.clip(a.view(np.int32), -(2**15), 2**15 - 1).tolist()
    )
    assert (
        run_op("cvt.sat.u8.s32 d, a;", "u16", ["s32"], [a]).tolist()
        == np.clip(a.view(np.int32), 0, 255).tolist()
    )
    assert run_op("cvt.rn.f32.u64 d, a;", "f32", ["u64"], [I64]).tolist() == [
        float(frac_round32(Fraction(int(x)), "rn")) for x in I64
    ]
    for m in ("rn", "rz", "rm", "rp"):
        assert run_op(f"cvt.{m}.f32.s32 d, a;", "f32", ["s32"], [a]).tolist() == [
            float(frac_round32(Fraction(int(x)), m)) for x in a.view(np.int32)
        ], m
        assert run_op(f"cvt.{m}.f32.u64 d, a;", "f32", ["u64"], [I64]).tolist() == [
            float(frac_round32(Fraction(int(x)), m)) for x in I64
        ], m
    assert run_op("cvt.rn.f64.u64 d, a;", "f64", ["u64"], [I64]).tolist() == [
        float(int(x)) for x in I64
    ]


def test_float_conversions():
    x = F32S
    tx = torch.from_numpy(x)

    def eq(g, r):
        return ((g == r) | (np.isnan(g) & np.isnan(r))).all()

    bf = run_op("cvt.rn.bf16.f32 d, a;", "bf16", ["f32"], [x])
    assert eq((bf.astype(np.uint32) << 16).view(np.float32), tx.bfloat16().float().numpy())
    h = run_op("cvt.rn.f16.f32 d, a;", "f16", ["f32"], [x]).view(np.float16)
    with np.errstate(over="ignore"):
        assert eq(h, x.astype(np.float16))
    p = run_op("cvt.rn.bf16x2.f32 d, a, b;", "b32", ["f32"] * 2, [x, FIN])
    assert eq((p & 0xFFFF0000).view(np.float32), tx.bfloat16().float().numpy())
    assert eq((p << 16).view(np.float32), torch.from_numpy(FIN).bfloat16().float().numpy())
    t = run_op("cvt.rna.tf32.f32 d, a;", "b32", ["f32"], [FIN])
    for v, g in zip(FIN, t, strict=False):
        fx = Fraction(float(v))
        q = Fraction(2) ** (math.frexp(abs(float(v)))[1] - 11)
        k = abs(fx) / q
        ref = float((1 if fx > 0 else -1) * q * math.floor(k + Fraction(1, 2)))
        assert np.array([g], np.uint32).view(np.float32)[0] == np.float32(ref)
    d = np.concatenate(
        [rng.standard_normal(100) * 10.0 ** rng.integers(-30, 30, 100), [0.1, 1 / 3, -1e-41]]
    )
    for m in ("rn", "rz", "rm", "rp"):
        g = run_op(f"cvt.{m}.f32.f64 d, a;", "f32", ["f64"], [d])
        assert g.tolist() == [float(frac_round32(Fraction(v), m)) for v in d.tolist()], m
    g = run_op("cvt.f32.bf16 d, a;", "f32", ["bf16"], [bf])
    assert eq(g, tx.bfloat16().float().numpy())
    g = run_op("cvt.sat.f32.f32 d, a;", "f32", ["f32"], [x])
    assert eq(g, np.where(np.isnan(x), 0, np.clip(x, 0, 1)))
    g = run_op("cvt.rzi.f32.f32 d, a;", "f32", ["f32"], [x])
    assert eq(g, np.trunc(x))


@pytest.mark.parametrize(
    "c",
    ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"],
)
def test_setp_float(c):
    a, b = F32S, rng.permutation(F32S)
    b[:30] = a[:30]
    d = run_op(f"setp.{c}.f32 q, a, b; selp.u32 d, 1, 0, q;", "u32", ["f32"] * 2, [a, b])
    base = {
        "eq": lambda x, y: x == y,
        "ne": lambda x, y: x != y,
        "lt": lambda x, y: x < y,
        "le": lambda x, y: x <= y,
        "gt": lambda x, y: x > y,
        "ge": lambda x, y: x >= y,
    }
    for x, y, g in zip(a.tolist(), b.tolist(), d.tolist(), strict=False):
        nan = math.isnan(x) or math.isnan(y)
        if c in ("num", "nan"):
            r = nan == (c == "nan")
        else:
            r = (len(c) == 3) if nan else base[c[:2]](x, y)
        assert g == int(r), (c, x, y)


def test_setp_combine_two_dests():
    a, b = I32.view(np.int32), J32.view(np.int32)
    d = run_op(
        "setp.lt.s32 q3, a, 0; setp.gt.and.s32 q|q2, a, b, q3; selp.u32 d, 1, 0, q; @q2 add.u32 d, d, 2; @!q3 add.u32 d, d, 4;",
        "u32",
        ["s32"] * 2,
        [a, b],
    )
    ref = [
        (1 if x > y and x < 0 else 0) + (2 if not x > y and x < 0 else 0) + (0 if x < 0 else 4)
        for x, y in zip(a.tolist(), b.tolist(), strict=False)
    ]
    assert d.tolist() == ref


def test_minmax_nan_and_ftz():
    a, b = F32S, rng.permutation(F32S)

    def eq(g, r):
        return ((g == r) | (np.isnan(g) & np.isnan(r))).all()

    assert eq(run_op("min.f32 d, a, b;", "f32", ["f32"] * 2, [a, b]), np.fmin(a, b))
    assert eq(run_op("max.NaN.f32 d, a, b;", "f32", ["f32"] * 2, [a, b]), np.maximum(a, b))
    g = run_op("add.ftz.f32 d, a, 0f00000000;", "f32", ["f32"], [a])
    assert eq(g, np.where(np.abs(a) < np.float32(2**-126), np.float32(0), a))


def test_mufu():
    x = np.abs(FIN)
    for op, f in [
        ("ex2.approx.ftz.f32", np.exp2),
        ("lg2.approx.f32", np.log2),
        ("rcp.rn.f32", lambda v: 1 / v),
        ("rsqrt.approx.f32", lambda v: v**-0.5),
        ("sqrt.rn.f32", np.sqrt),
        ("tanh.approx.f32", np.tanh),
    ]:
        v = x % 50 if "ex2" in op else x
        np.testing.assert_allclose(
            run_op(f"{op} d, a;", "f32", ["f32"], [v]), f(v.astype(np.float64)), rtol=2e-7
        )
    assert run_op(
        "ex2.approx.ftz.f32 d, a;", "f32", ["f32"], [np.array([-np.inf, 0, -200, 130], np.float32)]
    ).tolist() == [0, 1, 0, np.inf]


def test_half_packed():
    a, b, c = (torch.randn(256).half() for _ in range(3))

    def u(t):
        return t.view(torch.int16).numpy().view(np.uint32)

    d = run_op("fma.rn.f16x2 d, a, b, c;", "b32", ["b32"] * 3, [u(a), u(b), u(c)])
    assert np.array_equal(d.view(np.float16), (a.double() * b.double() + c.double()).half().numpy())
    d = run_op("add.f16x2 d, a, b;", "b32", ["b32"] * 2, [u(a), u(b)])
    assert np.array_equal(d.view(np.float16), (a + b).numpy())
    a, b, c = (torch.randn(256).bfloat16() for _ in range(3))
    d = run_op("fma.rn.bf16x2 d, a, b, c;", "b32", ["b32"] * 3, [u(a), u(b), u(c)])
    ref = (a.double() * b.double() + c.double()).bfloat16()
    assert np.array_equal(d.view(np.int16), ref.view(torch.int16).numpy())


def _frag(M, N, K, per):
    """Element coordinates straight from the tables of the PTX ISA (written independently of the library)."""
    A = {}
    B = {}
    C = {}
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i in range(M * K // 32):
            r, e = divmod(i, per)
            row = g if (M == 8 or r % 2 == 0) else g + 8
            col = t * per + e + (4 * per if (r >= 2 if M == 16 else r >= 1) else 0)
            A[lane, i] = row, col
        for i in range(K * N // 32):
            r, e = divmod(i, per)
            B[lane, i] = t * per + e + 4 * per * r, g
        for i in range(M * N // 32):
            C[lane, i] = (g if i < 2 else g + 8), t * 2 + (i & 1)
    return A, B, C


@pytest.mark.parametrize(
    ("shape", "ta", "tc"),
    [
        ((16, 8, 4), "tf32", "f32"),
        ((16, 8, 8), "tf32", "f32"),
        ((16, 8, 8), "bf16", "f32"),
        ((16, 8, 16), "bf16", "f32"),
        ((16, 8, 8), "f16", "f16"),
        ((16, 8, 16), "f16", "f16"),
        ((16, 8, 16), "f16", "f32"),
        ((8, 8, 4), "f64", "f64"),
        ((16, 8, 16), "s8", "s32"),
        ((16, 8, 32), "s8", "s32"),
        ((16, 8, 32), "u8", "s32"),
        ((8, 8, 16), "s8", "s32"),
    ],
)
def test_mma_shapes(shape, ta, tc):
    M, N, K = shape
    per = {"tf32": 1, "f64": 1, "bf16": 2, "f16": 2}.get(ta, 4)
    a, b = (
        rng.integers(-4 if ta != "u8" else 0, 5, (M, K)),
        rng.integers(-4 if ta != "u8" else 0, 5, (K, N)),
    )
    c = rng.integers(-9, 9, (M, N))
    fa, fb, fc = _frag(M, N, K, per)

    def enc(v, t):
        return {
            "tf32": lambda: struct.pack("<f", v),
            "f32": lambda: struct.pack("<f", v),
            "f64": lambda: struct.pack("<d", v),
            "s32": lambda: struct.pack("<i", v),
            "bf16": lambda: struct.pack("<f", v)[2:],
            "f16": lambda: struct.pack("<e", v),
            "s8": lambda: struct.pack("<b", v),
            "u8": lambda: struct.pack("<B", v),
        }[t]()

    def pack(fr, mat, t):
        n = max(i for _, i in fr) + 1
        raw = b"".join(enc(int(mat[fr[l, i]]), t) for l in range(32) for i in range(n))
        return np.frombuffer(raw, np.uint64 if t == "f64" else np.uint32).reshape(32, -1).copy()

    ra, rb, rc = pack(fa, a, ta), pack(fb, b, ta), pack(fc, c, tc)
    w = 64 if ta == "f64" else 32

    def regs(p, k):
        return "{" + ",".join(f"{p}{i}" for i in range(k)) + "}"

    na, nb, nc = ra.shape[1], rb.shape[1], rc.shape[1]
    lds = "\n".join(
        f"ld.global.b{w} {p}{i}, [{ptr}+{i * w // 8}];"
        for p, ptr, k in (("a", "pa", na), ("b", "pb", nb), ("c", "pc", nc))
        for i in range(k)
    )
    ptrs = "\n".join(
        f"ld.param.u64 {p}, [k_{j}]; mad.wide.u32 {p}, t, {k * w // 8}, {p};"
        for j, (p, k) in enumerate((("pa", na), ("pb", nb), ("pc", nc)))
    )
    ptx = f""".version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 k_0, .param .u64 k_1, .param .u64 k_2) {{
 .reg .u64 pa, pb, pc; .reg .u32 t; .reg .b{w} a<8>, b<8>, c<8>;
 mov.u32 t, %tid.x; {ptrs} {lds}
 mma.sync.aligned.m{M}n{N}k{K}.row.col.{tc}.{ta}.{ta}.{tc} {regs("c", nc)}, {regs("a", na)}, {regs("b", nb)}, {regs("c", nc)};
 {" ".join(f"st.global.b{w} [pc+{i * w // 8}], c{i};" for i in range(nc))}
 ret;
}}"""
    ptxrun.load(ptx).kernel().launch(grid=1, block=32, args=[ra, rb, rc])
    assert np.array_equal(rc, pack(fc, a @ b + c, tc))


def test_vector_and_b128_and_generic():
    ptx = """.version 8.3
.target sm_80
.address_size 64
.visible .entry k(.param .u64 k_0, .param .u64 k_1) {
 .reg .u64 p, q, s; .reg .u32 t; .reg .b32 r<8>; .reg .b64 x<4>; .reg .b128 w; .shared .align 16 .b8 sm[2048];
 ld.param.u64 p, [k_0]; ld.param.u64 q, [k_1]; mov.u32 t, %tid.x; mad.wide.u32 p, t, 16, p; mad.wide.u32 q, t, 16, q;
 ld.global.v4.u32 {r0, r1, r2, r3}, [p];
 mov.u64 s, sm; cvta.shared.u64 s, s; mad.wide.u32 s, t, 16, s;
 st.v4.b32 [s], {r3, r2, r1, r0};
 ld.v2.b64 {x0, x1}, [s];
 mov.b128 w, {x0, x1};
 mov.b128 {x2, x3}, w;
 st.global.v2.b64 [q], {x3, x2};
 ret;
}"""
    a = np.arange(256, dtype=np.uint32).reshape(64, 4)
    o = np.zeros_like(a)
    ptxrun.load(ptx).kernel().launch(grid=1, block=64, args=[a, o], uninit="report")
    assert np.array_equal(o, a[:, [1, 0, 3, 2]])


def test_stmatrix_movmatrix():
    ptx = """.version 8.3
.target sm_90
.address_size 64
.visible .entry k(.param .u64 k_0) {
 .reg .u64 p; .reg .u32 t, u, a; .reg .b32 r<4>; .shared .align 16 .b8 sm[128];
 ld.param.u64 p, [k_0]; mov.u32 t, %tid.x; mad.wide.u32 p, t, 4, p; ld.global.b32 r0, [p];
 movmatrix.sync.aligned.m8n8.trans.b16 r1, r0;
 and.b32 u, t, 7; shl.b32 u, u, 4; mov.u32 a, sm; add.u32 u, u, a;
 stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [u], {r1};
 bar.warp.sync -1;
 shl.b32 u, t, 2; add.u32 u, u, a; ld.shared.b32 r2, [u]; st.global.b32 [p], r2;
 st.global.b32 [p+128], r1;
 ret;
}"""
    a = np.concatenate([np.arange(64), np.zeros(64)]).astype(np.uint16)
    ptxrun.load(ptx).kernel().launch(grid=1, block=32, args=[a], uninit="report")
    assert np.array_equal(a[:64], np.arange(64))
    assert np.array_equal(a[64:].reshape(8, 8), np.arange(64).reshape(8, 8).T)


def test_shfl_predicate():
    d = run_op("shfl.sync.up.b32 d|q, a, 4, 0x1800, -1; @!q mov.b32 d, 77;", "b32", ["b32"], [I32])
    lane = np.arange(128)
    assert d.tolist() == [int(I32[i - 4]) if i % 8 >= 4 else 77 for i in lane]


def test_dp4a():
    d = run_op("dp4a.s32.u32 d, a, b, c;", "s32", ["s32", "u32", "s32"], [I32, J32, I32])
    ref = [
        s32(
            sum(
                x * y
                for x, y in zip(
                    struct.unpack("4b", int(p).to_bytes(4, "little")),
                    int(q).to_bytes(4, "little"),
                    strict=False,
                )
            )
            + s32(int(p))
        )
        for p, q in zip(I32, J32, strict=False)
    ]
    assert d.tolist() == ref


def test_prmt_modes_and_xorsign():
    # from the table in the PTX ISA: d bytes 3..0 for selector 0..3
    tab = {
        "f4e": ["3210", "4321", "5432", "6543"],
        "b4e": ["5670", "6701", "7012", "0123"],
        "rc8": ["0000", "1111", "2222", "3333"],
        "ecl": ["3210", "3211", "3222", "3333"],
        "ecr": ["0000", "1110", "2210", "3210"],
        "rc16": ["1010", "3232", "1010", "3232"],
    }
    sel = (np.arange(128) % 4).astype(np.uint32)
    for m, rows in tab.items():
        d = run_op(f"prmt.b32.{m} d, a, b, c;", "b32", ["b32"] * 3, [I32, J32, sel])
        for x, y, k, g in zip(I32.tolist(), J32.tolist(), sel.tolist(), d.tolist(), strict=False):
            by = (x | y << 32).to_bytes(8, "little")
            assert g == sum(by[int(ch)] << 8 * (3 - i) for i, ch in enumerate(rows[k])), m
    b = rng.permutation(FIN)
    d = run_op("max.xorsign.abs.f32 d, a, b;", "f32", ["f32"] * 2, [FIN, b])
    assert np.array_equal(d, np.maximum(abs(FIN), abs(b)) * np.sign(FIN) * np.sign(b))
