"""Floating-point helpers: exact FMA, directed rounding, bf16/tf32 conversion, saturating casts."""

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
S32, S64 = np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64
TINY32 = F32(2.0**-126)
_ONE = U64(1)


def ftz32(x):
    """Flush float32 subnormals to sign-preserving zero."""
    t = np.abs(x) < TINY32
    if np.count_nonzero(t):
        return np.where(t, np.copysign(F32(0), x), x)
    return x


def two_sum(a, b):
    s = a + b
    bb = s - a
    return s, (a - (s - bb)) + (b - bb)


def add_odd(a, b):
    """float64 a + b rounded to odd (the base for every correctly rounded narrowing)."""
    s, e = two_sum(a, b)
    bits = s.view(U64)
    fix = (e != 0) & ((bits & _ONE) == 0) & np.isfinite(s)
    if np.count_nonzero(fix):
        up = (e > 0) == (s > 0)  # magnitude grows
        nb = np.where(up, bits + _ONE, bits - _ONE)
        # s == 0 cannot happen with e != 0
        s = np.where(fix, nb, bits).view(F64)
    return s


_LOW29 = U64(0x1FFFFFFF)
_HALF29 = U64(0x10000000)


def fma32(a, b, c):
    """Correctly rounded (nearest even) float32 FMA (double rounding only in float32 subnormals)."""
    p = a.astype(F64) * b
    s = p + c
    if np.count_nonzero((s.view(U64) & _LOW29) == _HALF29):
        s = add_odd(p, c.astype(F64))
    return s.astype(F32)


_SPLIT = F64(134217729.0)


def two_prod(a, b):
    p = a * b
    t = _SPLIT * a
    ah = t - (t - a)
    al = a - ah
    t = _SPLIT * b
    bh = t - (t - b)
    bl = b - bh
    e = ((ah * bh - p) + ah * bl + al * bh) + al * bl
    return p, e


def fma64(a, b, c):
    """float64 FMA (Boldo-Melquiond); exact when nothing over/underflows in the intermediate steps."""
    # keep the splitting away from overflow by scaling with powers of two
    _, ea = np.frexp(a)
    _, eb = np.frexp(b)
    _, ec = np.frexp(c)
    sa, sb = np.ldexp(a, -ea), np.ldexp(b, -eb)
    sh = ea.astype(S64) + eb
    d = ec.astype(S64) - sh
    plain = ~(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)) | (a == 0) | (b == 0) | (c == 0)
    far_c = d > 900
    sc = np.ldexp(c, np.clip(-sh, -5000, 5000).astype(S32))
    tiny_c = d < -900
    sc = np.where(tiny_c, np.copysign(F64(2.0**-900), c), sc)
    uh, ul = two_prod(sa, sb)
    th, tl = two_sum(sc, ul)
    vh, vl = two_sum(uh, th)
    z = add_odd(tl, vl)
    r = np.ldexp(vh + z, np.clip(sh, -5000, 5000).astype(S32))
    r = np.where(far_c, c, r)
    # exact product with c == 0, or a zero/inf/nan operand: the plain expression is right
    return np.where(plain, a * b + c, r)


def narrow32(s, mode):
    """Round a (round-to-odd or exact) float64 array to float32 with mode rn/rz/rm/rp."""
    r = s.astype(F32)
    if mode == "rn":
        return r
    d = r.astype(F64)
    if mode == "rz":
        bad = np.abs(d) > np.abs(s)
        tgt = F32(0)
    elif mode == "rm":
        bad, tgt = d > s, F32(-np.inf)
    else:
        bad, tgt = d < s, F32(np.inf)
    return np.where(bad, np.nextafter(r, tgt), r) if np.count_nonzero(bad) else r


def narrow64(s, e, mode):
    """s + e (|e| <= ulp/2) rounded to float64 by mode."""
    if mode == "rn":
        return s
    if mode == "rz":
        bad, tgt = ((s > 0) & (e < 0)) | ((s < 0) & (e > 0)), F64(0)
    elif mode == "rm":
        bad, tgt = e < 0, F64(-np.inf)
    else:
        bad, tgt = e > 0, F64(np.inf)
    return np.where(bad, np.nextafter(s, tgt), s)


# ---- bf16 / tf32 -----------------------------------------------------------
def bf16_to_f32(u16):
    return (u16.astype(U32) << U32(16)).view(F32)


def f32_to_bf16(x, mode="rn"):
    b = x.view(U32)
    if mode == "rz":
        r = b >> U32(16)
    elif mode == "rna":
        r = (b + U32(0x8000)) >> U32(16)
    else:
        r = (b + U32(0x7FFF) + ((b >> U32(16)) & U32(1))) >> U32(16)
    nan = np.isnan(x)
    if np.count_nonzero(nan):
        r = np.where(nan, U32(0x7FFF), r)
    return r.astype(U16)


def f64_to_bf16(x):
    """Through a round-to-odd float32 so the result is rounded once."""
    r = x.astype(F32)
    b = r.view(U32)
    d = r.astype(F64)
    odd = (d != x) & ((b & U32(1)) == 0) & np.isfinite(d)
    b = np.where(odd, np.where(np.abs(d) > np.abs(x), b - U32(1), b + U32(1)), b)
    return f32_to_bf16(b.view(F32))


def f32_to_f16(x, mode="rn"):
    r = x.astype(F16)
    if mode == "rz":
        bad = np.abs(r.astype(F64)) > np.abs(x.astype(F64))
        r = np.where(bad, np.nextafter(r, F16(0)), r)
    return r


def f32_to_tf32(x, mode="rna"):
    b = x.view(U32)
    if mode == "rna":
        r = (b + U32(0x1000)) & U32(0xFFFFE000)
    elif mode == "rz":
        r = b & U32(0xFFFFE000)
    else:
        r = (b + U32(0x0FFF) + ((b >> U32(13)) & U32(1))) & U32(0xFFFFE000)
    return np.where(np.isfinite(x), r, b)


def round_int(x, mode):
    """Round to an integral value in the same float type."""
    if mode == "rni":
        return np.rint(x)
    if mode == "rzi":
        return np.trunc(x)
    if mode == "rmi":
        return np.floor(x)
    return np.ceil(x)


def float_to_int(x, dt, nan_value=0):
    """Saturating conversion of an integral-valued float array to an integer dtype."""
    info = np.iinfo(dt)
    x = x.astype(F64)
    hi = float(info.max) + (1.0 if info.bits == 64 else 0.0)
    over = x >= hi if info.bits == 64 else x > hi
    under = x < float(info.min)
    nan = np.isnan(x)
    r = np.where(over | under | nan, 0, x)
    if dt == np.uint64:
        big = r >= 2.0**63
        v = np.where(big, r - 2.0**63, r).astype(S64).astype(U64)
        v = np.where(big, v + U64(1 << 63), v)
    else:
        v = r.astype(S64).astype(dt)
    v = np.where(over, dt(info.max), v)
    v = np.where(under, dt(info.min), v)
    return np.where(nan, dt(nan_value), v)
