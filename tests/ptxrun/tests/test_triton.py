"""Triton kernels compiled for sm_80 and run from their PTX, checked against torch."""

import math
import re

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

import ptxrun  # noqa: E402

DT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32}


def compile(fn, sig, const, aligned=True, **opts):
    sig = {**sig, **{k: "constexpr" for k in const}}
    attrs = (
        {(i,): [["tt.divisibility", 16]] for i, t in enumerate(sig.values()) if t[0] == "*"}
        if aligned
        else {}
    )
    src = ASTSource(fn=fn, signature=sig, constexprs=const, attrs=attrs)
    k = ptxrun.from_triton(triton.compile(src, target=GPUTarget("cuda", 80, 32), options=opts))
    assert not k.kernel.unsupported()
    return k


@triton.jit
def k_add(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(o + i, tl.load(x + i, m) + tl.load(y + i, m), m)


@triton.jit
def k_softmax(x, o, cols, stride, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + r * stride + i, i < cols, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(o + r * stride + i, e / tl.sum(e, 0), i < cols)


@triton.jit
def k_matmul(
    a,
    b,
    c,
    M,
    N,
    K,
    sa,
    sb,
    sc,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PREC: tl.constexpr,
):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        rk = k0 + tl.arange(0, BK)
        A = tl.load(
            a + rm[:, None] * sa + rk[None, :], (rm[:, None] < M) & (rk[None, :] < K), other=0.0
        )
        B = tl.load(
            b + rk[:, None] * sb + rn[None, :], (rk[:, None] < K) & (rn[None, :] < N), other=0.0
        )
        acc = tl.dot(A, B, acc, input_precision=PREC)
    tl.store(c + rm[:, None] * sc + rn[None, :], acc, (rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def k_attn(
    q,
    k,
    v,
    o,
    lse,
    N,
    scale,
    CAUSAL: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    PREC: tl.constexpr,
):
    pid = tl.program_id(0)
    h = tl.program_id(1)
    om, od, on = pid * M + tl.arange(0, M), tl.arange(0, D), tl.arange(0, BN)
    q += h * N * D
    k += h * N * D
    v += h * N * D
    o += h * N * D
    Q = tl.load(q + om[:, None] * D + od[None, :], mask=om[:, None] < N, other=0.0)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    hi = tl.minimum((pid + 1) * M, N) if CAUSAL else N
    for s in range(0, hi, BN):
        nn = s + on
        K = tl.load(k + nn[:, None] * D + od[None, :], mask=nn[:, None] < N, other=0.0)
        V = tl.load(v + nn[:, None] * D + od[None, :], mask=nn[:, None] < N, other=0.0)
        S = tl.dot(Q, tl.trans(K), input_precision=PREC) * scale
        ok = nn[None, :] < N
        if CAUSAL:
            ok = ok & (nn[None, :] <= om[:, None])
        S = tl.where(ok, S, float("-inf"))
        mn = tl.maximum(m, tl.max(S, 1))
        p = tl.exp2(S - mn[:, None])
        a = tl.exp2(m - mn)
        l = l * a + tl.sum(p, 1)
        acc = acc * a[:, None] + tl.dot(p.to(V.dtype), V, input_precision=PREC)
        m = mn
    tl.store(o + om[:, None] * D + od[None, :], acc / l[:, None], mask=om[:, None] < N)
    tl.store(lse + h * N + om, m + tl.log2(l), mask=om < N)


@triton.jit
def k_reduce(x, o, am, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    v = tl.load(x + i[:, None] * N + j[None, :])
    tl.store(o + j, tl.sum(v, 0))
    tl.store(o + N + i, tl.max(v, 1))
    tl.store(am + i, tl.argmin(v, 1))
    tl.store(o + N + M + tl.arange(0, 1), tl.sum(tl.sum(v * v, 1), 0))


@triton.jit
def comb(a, b):
    return a * 0.5 + b


@triton.jit
def k_scan(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(o + i, tl.cumsum(v, 0))
    tl.store(o + B + i, tl.sort(v))


@triton.jit
def lin(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def k_assoc(x, y, o, B: tl.constexpr):
    i = tl.arange(0, B)
    _a, b = tl.associative_scan((tl.load(x + i), tl.load(y + i)), 0, lin)
    tl.store(o + i, b)


@triton.jit
def k_atomic(idx, v, o, c, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    j = tl.load(idx + i, m, other=0)
    tl.atomic_add(o + j, tl.load(v + i, m), m)
    tl.atomic_max(c + 1 + j * 0, i, m)
    tl.atomic_add(c, 1)
    h = tl.histogram(i % 16, 16)
    tl.atomic_add(c + 2 + tl.arange(0, 16), h)


@triton.jit
def k_math(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(o + i, tl.exp(v))
    tl.store(o + B + i, tl.log(tl.abs(v) + 1))
    tl.store(o + 2 * B + i, tl.sin(v) + tl.cos(v))
    tl.store(o + 3 * B + i, tl.rsqrt(v * v + 1) + tl.sqrt(tl.abs(v)))
    tl.store(o + 4 * B + i, tl.erf(v) + tl.sigmoid(v) + tl.floor(v) + tl.ceil(v))
    tl.store(o + 5 * B + i, v / (1.5 + v * v) + tl.fdiv(v, 3.0))


@triton.jit
def k_cast(x, b, h, i8, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(b + i, v.to(tl.bfloat16))
    tl.store(h + i, v.to(tl.float16))
    tl.store(i8 + i, v.to(tl.int8))


@triton.jit
def k_rand(o, seed, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.rand(seed, i))


@pytest.mark.parametrize("aligned", [False, True])
def test_add(aligned):
    n = 1000
    x, y, o = torch.randn(n), torch.randn(n), torch.zeros(n)
    compile(k_add, dict(x="*fp32", y="*fp32", o="*fp32", n="i32"), dict(B=256), aligned).launch(
        (4,), [x, y, o, n]
    )
    assert torch.equal(o, x + y)


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("dt", ["fp32", "bf16"])
def test_softmax(dt, warps):
    x = torch.randn(5, 300).to(DT[dt])
    o = torch.zeros_like(x)
    k = compile(
        k_softmax,
        dict(x="*" + dt, o="*" + dt, cols="i32", stride="i32"),
        dict(B=512),
        num_warps=warps,
    )
    k.launch((5,), [x, o, 300, 300], uninit="report") if dt == "bf16" else compile(
        k_softmax,
        dict(x="*" + dt, o="*" + dt, cols="i32", stride="i32"),
        dict(B=512),
        False,
        num_warps=warps,
    ).launch((5,), [x, o, 300, 300], uninit="report")
    torch.testing.assert_close(
        o.float(), torch.softmax(x.float(), 1), rtol=1e-2 if dt == "bf16" else 1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("dt", "prec", "aligned", "stages"),
    [
        pytest.param("fp32", "ieee", True, 2, marks=pytest.mark.full),
        pytest.param("fp32", "tf32", True, 3, marks=pytest.mark.full),
        pytest.param("fp32", "tf32x3", False, 2, marks=pytest.mark.full),
        ("bf16", "tf32", True, 3),
        ("fp16", "tf32", True, 2),
        ("fp16", "tf32", False, 1),
    ],
)
def test_matmul(dt, prec, aligned, stages):
    M, N, K = 100, 72, 136
    a, b = torch.randn(M, K).to(DT[dt]), torch.randn(K, N).to(DT[dt])
    c = torch.full((M, N), float("nan"))
    sig = dict(
        a="*" + dt, b="*" + dt, c="*fp32", M="i32", N="i32", K="i32", sa="i32", sb="i32", sc="i32"
    )
    k = compile(
        k_matmul, sig, dict(BM=64, BN=64, BK=32, PREC=prec), aligned, num_warps=4, num_stages=stages
    )
    r = k.launch((2, 2), [a, b, c, M, N, K, K, N, N], uninit="report")
    tol = {"ieee": 3e-5, "tf32x3": 3e-5}.get(prec, 5e-2 if dt == "fp32" else 1e-4)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=0, atol=tol)
    assert ("mma" in r.counts) == (prec != "ieee")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dt", "prec", "stages"),
    [
        pytest.param("fp32", "ieee", 2, marks=pytest.mark.full),
        pytest.param("fp32", "tf32", 2, marks=pytest.mark.full),
        ("bf16", "tf32", 2),
        pytest.param("fp16", "tf32", 3, marks=pytest.mark.full),
        pytest.param("fp32", "tf32x3", 1, marks=pytest.mark.full),
    ],
)
def test_attention(dt, prec, stages, causal):
    H, N, D = 2, 150, 64
    q, k, v = (torch.randn(H, N, D).to(DT[dt]) for _ in range(3))
    o, lse = torch.full((H, N, D), float("nan")), torch.full((H, N), float("nan"))
    sig = dict(q="*" + dt, k="*" + dt, v="*" + dt, o="*fp32", lse="*fp32", N="i32", scale="fp32")
    kr = compile(
        k_attn,
        sig,
        dict(CAUSAL=causal, M=64, BN=64, D=D, PREC=prec),
        num_warps=4,
        num_stages=stages,
    )
    r = kr.launch((3, H), [q, k, v, o, lse, N, D**-0.5 * math.log2(math.e)], uninit="report")
    s = q.double() @ k.double().transpose(1, 2) * D**-0.5
    if causal:
        s = s.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -math.inf)
    tol = {
        ("fp32", "ieee"): 3e-6,
        ("fp32", "tf32x3"): 3e-6,
        ("fp32", "tf32"): 5e-3,
        ("bf16", "tf32"): 2e-2,
        ("fp16", "tf32"): 2e-3,
    }[dt, prec]
    torch.testing.assert_close(o.double(), torch.softmax(s, -1) @ v.double(), rtol=0, atol=tol)
    torch.testing.assert_close(lse.double() * math.log(2), torch.logsumexp(s, -1), rtol=0, atol=tol)
    assert r.seconds < 10


def test_reductions():
    M, N = 32, 64
    x = torch.randn(M, N)
    o, am = torch.zeros(M + N + 1), torch.zeros(M, dtype=torch.int32)
    compile(k_reduce, dict(x="*fp32", o="*fp32", am="*i32"), dict(M=M, N=N)).launch(
        (1,), [x, o, am], uninit="report"
    )
    torch.testing.assert_close(o[:N], x.sum(0), rtol=1e-4, atol=1e-5)
    assert torch.equal(o[N : N + M], x.amax(1))
    assert torch.equal(am.long(), x.argmin(1))
    torch.testing.assert_close(o[-1], (x * x).sum(), rtol=1e-5, atol=0)


def test_cumsum_sort():
    B = 512
    x = torch.randint(-9, 9, (B,)).float()
    o = torch.zeros(2 * B)
    compile(k_scan, dict(x="*fp32", o="*fp32"), dict(B=B)).launch((1,), [x, o])
    assert torch.equal(o[:B], x.cumsum(0))
    assert torch.equal(o[B:], x.sort().values)


def test_associative_scan():
    B = 512
    x, y, o = torch.rand(B), torch.randn(B), torch.zeros(B)
    compile(k_assoc, dict(x="*fp32", y="*fp32", o="*fp32"), dict(B=B)).launch((1,), [x, y, o])
    ref, s = [], 0.0
    for a, b in zip(x.tolist(), y.tolist(), strict=False):
        s = s * a + b
        ref.append(s)
    torch.testing.assert_close(o, torch.tensor(ref), rtol=1e-4, atol=1e-5)


def test_atomics():
    n = 300
    idx = torch.randint(0, 7, (n,), dtype=torch.int32)
    v = torch.randint(-5, 5, (n,)).float()
    o, c = torch.zeros(7), torch.zeros(18, dtype=torch.int32)
    compile(
        k_atomic, dict(idx="*i32", v="*fp32", o="*fp32", c="*i32", n="i32"), dict(B=128)
    ).launch((3,), [idx, v, o, c, n])
    assert torch.equal(o, torch.zeros(7).index_add(0, idx.long(), v))
    assert c[0] == 3
    assert c[1] == n - 1
    assert c[2:].tolist() == [24] * 16


def test_math():
    B = 256
    x, o = torch.randn(B) * 3, torch.zeros(6, B)
    compile(k_math, dict(x="*fp32", o="*fp32"), dict(B=B)).launch((1,), [x, o])
    d = x.double()
    ref = [
        d.exp(),
        (d.abs() + 1).log(),
        d.sin() + d.cos(),
        (d * d + 1).rsqrt() + d.abs().sqrt(),
        torch.erf(d) + torch.sigmoid(d) + d.floor() + d.ceil(),
        d / (1.5 + d * d) + d / 3,
    ]
    torch.testing.assert_close(o.double(), torch.stack(ref), rtol=3e-6, atol=1e-6)


def test_cast():
    B = 128
    x = torch.randn(B) * 50
    b, h, i8 = (
        torch.zeros(B, dtype=torch.bfloat16),
        torch.zeros(B, dtype=torch.float16),
        torch.zeros(B, dtype=torch.int8),
    )
    compile(k_cast, dict(x="*fp32", b="*bf16", h="*fp16", i8="*i8"), dict(B=B)).launch(
        (1,), [x.clamp(-127, 127), b, h, i8]
    )
    x = x.clamp(-127, 127)
    assert torch.equal(b, x.bfloat16())
    assert torch.equal(h, x.half())
    assert torch.equal(i8, x.to(torch.int8))


def test_philox():
    B = 256
    o = torch.full((B,), -1.0)
    compile(k_rand, dict(o="*fp32", seed="i32"), dict(B=B)).launch((1,), [o, 42])
    assert (o >= 0).all()
    assert (o < 1).all()
    assert abs(o.mean() - 0.5) < 0.08
    assert len(set(o.tolist())) == B


# ---- mutations of real Triton code: drop each barrier / wait in turn ---------------------------
def test_triton_mutations():
    sig = dict(q="*bf16", k="*bf16", v="*bf16", o="*fp32", lse="*fp32", N="i32", scale="fp32")
    src = ASTSource(
        fn=k_attn,
        signature={**sig, **{c: "constexpr" for c in ("CAUSAL", "M", "BN", "D", "PREC")}},
        constexprs=dict(CAUSAL=False, M=64, BN=32, D=32, PREC="tf32"),
        attrs={(i,): [["tt.divisibility", 16]] for i in range(5)},
    )
    k = triton.compile(
        src, target=GPUTarget("cuda", 80, 32), options=dict(num_warps=4, num_stages=2)
    )
    ptx = k.asm["ptx"]
    lines = ptx.split("\n")
    targets = [
        i for i, l in enumerate(lines) if re.match(r"\s*(bar\.sync|cp\.async\.wait_group)", l)
    ]
    assert len(targets) >= 4
    N = 128
    q, kk, v = (torch.randn(N, 32).bfloat16() for _ in range(3))

    def go(text):
        o, lse = torch.zeros(N, 32), torch.zeros(N)
        kr = ptxrun.load(text).kernel()
        r = kr.launch(
            grid=(2,),
            args=[q, kk, v, o, lse, N, 32**-0.5 * math.log2(math.e)],
            smem=k.metadata.shared,
            on_hazard="return",
            uninit="report",
        )
        return r

    assert not go(ptx).hazards
    missed = []
    for i in targets:
        mut = [*lines[:i], "//" + lines[i], *lines[i + 1 :]]
        if not go("\n".join(mut)).hazards:
            missed.append((i + 1, lines[i].strip()))
    assert not missed, missed
