"""More Triton: attention backward, int8/fp16-accumulate dots, fp8, locks, casts, while loops, device_assert, gather, philox dropout."""

import math

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

import ptxrun  # noqa: E402
from ptxrun.tests.test_triton import compile  # noqa: E402


@triton.jit
def k_bwd(q, k, v, do, lse, delta, dq, dk, dv, N, scale, M: tl.constexpr, D: tl.constexpr):
    """One CTA per key block: dk, dv in registers, dq by atomics."""
    on = tl.program_id(0) * M + tl.arange(0, M)
    od = tl.arange(0, D)
    kn = on[:, None] * D + od[None, :]
    mk = on[:, None] < N
    K = tl.load(k + kn, mask=mk, other=0.0)
    V = tl.load(v + kn, mask=mk, other=0.0)
    DK = tl.zeros([M, D], tl.float32)
    DV = tl.zeros([M, D], tl.float32)
    for s in range(0, N, M):
        om = s + tl.arange(0, M)
        qn = om[:, None] * D + od[None, :]
        mq = om[:, None] < N
        Q = tl.load(q + qn, mask=mq, other=0.0)
        DO = tl.load(do + qn, mask=mq, other=0.0)
        L = tl.load(lse + om, mask=om < N, other=0.0)
        DE = tl.load(delta + om, mask=om < N, other=0.0)
        S = tl.dot(Q, tl.trans(K)) * scale
        P = tl.where(
            (on[None, :] < N) & (om[:, None] < N) & (on[None, :] <= om[:, None]),
            tl.exp(S - L[:, None]),
            0.0,
        )
        DV += tl.dot(tl.trans(P.to(DO.dtype)), DO)
        DP = tl.dot(DO, tl.trans(V))
        DS = (P * (DP - DE[:, None]) * scale).to(Q.dtype)
        DK += tl.dot(tl.trans(DS), Q)
        tl.atomic_add(dq + qn, tl.dot(DS, K), mask=mq)
    tl.store(dk + kn, DK, mask=mk)
    tl.store(dv + kn, DV, mask=mk)


@triton.jit
def k_idot(a, b, c, M: tl.constexpr):
    i = tl.arange(0, M)
    x = i[:, None] * M + i[None, :]
    tl.store(c + x, tl.dot(tl.load(a + x), tl.load(b + x)))


@triton.jit
def k_hdot(a, b, c, M: tl.constexpr):
    i = tl.arange(0, M)
    x = i[:, None] * M + i[None, :]
    tl.store(c + x, tl.dot(tl.load(a + x), tl.load(b + x), out_dtype=tl.float16))


@triton.jit
def k_ddot(a, b, c, M: tl.constexpr):
    i = tl.arange(0, M)
    x = i[:, None] * M + i[None, :]
    tl.store(c + x, tl.dot(tl.load(a + x), tl.load(b + x), out_dtype=tl.float64))


@triton.jit
def k_lock(x, o, lock, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.sum(tl.load(x + i, i < n, other=0.0), 0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(o, tl.load(o) + v)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def k_layernorm(x, w, b, o, cols, eps, B: tl.constexpr):
    r = tl.program_id(0)
    acc = tl.zeros([B], tl.float32)
    for s in range(0, cols, B):
        i = s + tl.arange(0, B)
        acc += tl.load(x + r * cols + i, i < cols, other=0.0).to(tl.float32)
    mu = tl.sum(acc, 0) / cols
    acc = tl.zeros([B], tl.float32)
    for s in range(0, cols, B):
        i = s + tl.arange(0, B)
        d = tl.where(
            i < cols, tl.load(x + r * cols + i, i < cols, other=0.0).to(tl.float32) - mu, 0.0
        )
        acc += d * d
    rs = 1 / tl.sqrt(tl.sum(acc, 0) / cols + eps)
    for s in range(0, cols, B):
        i = s + tl.arange(0, B)
        m = i < cols
        y = (tl.load(x + r * cols + i, m).to(tl.float32) - mu) * rs * tl.load(w + i, m) + tl.load(
            b + i, m
        )
        tl.store(o + r * cols + i, y, m)


@triton.jit
def k_shapes(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    a, b = tl.split(tl.reshape(v, [N // 2, 2]))
    tl.store(o + i, tl.interleave(b, a))
    tl.store(o + N + i, tl.flip(v, 0))
    t = tl.trans(tl.reshape(v, [16, N // 16]))
    tl.store(o + 2 * N + i, tl.reshape(t, [N]))
    tl.store(o + 3 * N + i, tl.gather(v, (i * 7 + 3) % N, 0))


@triton.jit
def k_fp8(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(o + i, v.to(tl.float8e5).to(tl.float32))


@triton.jit
def k_ints(x, y, o, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(o + i, a // b)
    tl.store(o + B + i, a % b)
    tl.store(o + 2 * B + i, tl.umulhi(a.to(tl.uint32), b.to(tl.uint32)).to(tl.int32))
    tl.store(o + 3 * B + i, (a.to(tl.int64) * b.to(tl.int64) >> 7).to(tl.int32))
    tl.store(o + 4 * B + i, (a << (b & 31)) ^ (a >> 3))
    tl.store(o + 5 * B + i, tl.cumsum((a > 0).to(tl.int32), 0))


@triton.jit
def k_assert(x, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.device_assert(v >= 0, "negative")
    tl.store(x + i, v + 1)


@pytest.mark.full
def test_attention_backward():
    torch.manual_seed(0)
    N, D = 100, 32
    q, k, v = (torch.randn(N, D).bfloat16().requires_grad_() for _ in range(3))
    qf, kf, vf = (t.detach().double().requires_grad_() for t in (q, k, v))
    s = (qf @ kf.T * D**-0.5).masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -math.inf)
    out = torch.softmax(s, -1) @ vf
    do = torch.randn(N, D).bfloat16()
    out.backward(do.double())
    lse, delta = (
        torch.logsumexp(s, -1).detach().float(),
        (out * do.double()).sum(-1).detach().float(),
    )
    dq, dk, dv = torch.zeros(N, D), torch.full((N, D), math.nan), torch.full((N, D), math.nan)
    sig = dict(
        q="*bf16",
        k="*bf16",
        v="*bf16",
        do="*bf16",
        lse="*fp32",
        delta="*fp32",
        dq="*fp32",
        dk="*fp32",
        dv="*fp32",
        N="i32",
        scale="fp32",
    )
    kr = compile(k_bwd, sig, dict(M=64, D=D), num_warps=4, num_stages=2)
    kr.launch(
        (2,),
        [q.detach(), k.detach(), v.detach(), do, lse, delta, dq, dk, dv, N, D**-0.5],
        uninit="report",
    )
    for g, r in ((dq, qf.grad), (dk, kf.grad), (dv, vf.grad)):
        torch.testing.assert_close(g.double(), r, rtol=0, atol=3e-2)


def test_int8_dot():
    a, b = torch.randint(-9, 9, (2, 32, 32), dtype=torch.int8)
    c = torch.zeros(32, 32, dtype=torch.int32)
    r = compile(k_idot, dict(a="*i8", b="*i8", c="*i32"), dict(M=32)).launch(
        (1,), [a, b, c], uninit="report"
    )
    assert torch.equal(c, a.int() @ b.int())
    assert r.counts["mma"]


def test_fp16_accumulate():
    a, b = torch.randint(-3, 4, (2, 32, 32)).half()
    c = torch.zeros(32, 32).half()
    r = compile(k_hdot, dict(a="*fp16", b="*fp16", c="*fp16"), dict(M=32)).launch((1,), [a, b, c])
    assert torch.equal(c, (a.float() @ b.float()).half())
    assert r.counts["mma"]


def test_fp64_dot():
    a, b = torch.randn(2, 16, 16, dtype=torch.float64)
    c = torch.zeros(16, 16, dtype=torch.float64)
    compile(k_ddot, dict(a="*fp64", b="*fp64", c="*fp64"), dict(M=16)).launch((1,), [a, b, c])
    torch.testing.assert_close(c, a @ b, rtol=1e-13, atol=1e-13)


def test_spin_lock_across_ctas():
    x = torch.randint(-5, 5, (500,)).float()
    o, lock = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    compile(k_lock, dict(x="*fp32", o="*fp32", lock="*i32", n="i32"), dict(B=128)).launch(
        (4,), [x, o, lock, 500]
    )
    assert o[0] == x.sum()
    assert lock[0] == 0


def test_layernorm():
    x, w, b = torch.randn(3, 300), torch.randn(300), torch.randn(300)
    o = torch.zeros(3, 300)
    compile(
        k_layernorm,
        dict(x="*fp32", w="*fp32", b="*fp32", o="*fp32", cols="i32", eps="fp32"),
        dict(B=256),
        False,
    ).launch((3,), [x, w, b, o, 300, 1e-5])
    torch.testing.assert_close(
        o, torch.nn.functional.layer_norm(x, (300,), w, b), rtol=1e-4, atol=1e-5
    )


def test_shapes():
    N = 256
    x, o = torch.randn(N), torch.zeros(4, N)
    compile(k_shapes, dict(x="*fp32", o="*fp32"), dict(N=N)).launch((1,), [x, o], uninit="report")
    assert torch.equal(o[0], x.view(-1, 2).flip(1).reshape(-1))
    assert torch.equal(o[1], x.flip(0))
    assert torch.equal(o[2], x.view(16, -1).T.reshape(-1))
    assert torch.equal(o[3], x[(torch.arange(N) * 7 + 3) % N])


def test_fp8():
    x, o = torch.randn(256) * 30, torch.zeros(256)
    compile(k_fp8, dict(x="*fp32", o="*fp32"), dict(B=256)).launch((1,), [x, o])
    assert torch.equal(o, x.to(torch.float8_e5m2).float())


def test_ints():
    B = 128
    x, y = torch.randint(-(2**31), 2**31, (B,)).int(), torch.randint(1, 2**20, (B,)).int()
    o = torch.zeros(6, B, dtype=torch.int32)
    compile(k_ints, dict(x="*i32", y="*i32", o="*i32"), dict(B=B)).launch((1,), [x, y, o])
    xl, yl = x.long(), y.long()

    def wrap(v):
        return ((v + 2**31) % 2**32 - 2**31).int()

    ref = [
        wrap(torch.div(xl, yl, rounding_mode="trunc")),
        wrap(torch.fmod(xl, yl)),
        wrap((xl % 2**32) * yl >> 32),
        wrap(xl * yl >> 7),
        wrap(xl << (yl & 31)) ^ (x >> 3),
        torch.cumsum((x > 0).int(), 0).int(),
    ]
    for g, r in zip(o, ref, strict=False):
        assert torch.equal(g, r)


def test_device_assert():
    k = compile(k_assert, dict(x="*i32"), dict(B=128), debug=True)
    x = torch.zeros(128, dtype=torch.int32)
    k.launch((1,), [x])
    assert (x == 1).all()
    x[77] = -4
    with pytest.raises(ptxrun.PtxError, match="device assert failed"):
        k.launch((1,), [x])


def test_strided_views_and_bounds():
    """A non-contiguous view: elements between its rows are out of bounds."""
    from ptxrun.tests.test_triton import k_softmax

    base = torch.randn(4, 64)
    x = base[:, :40]
    o = torch.zeros(4, 64)
    k = compile(k_softmax, dict(x="*fp32", o="*fp32", cols="i32", stride="i32"), dict(B=64), False)
    k.launch((4,), [x, o, 40, 64])
    torch.testing.assert_close(o[:, :40], torch.softmax(x, 1), rtol=1e-5, atol=1e-6)
    with pytest.raises(ptxrun.MemoryFault, match="not on one of its elements"):
        k.launch((4,), [x, o, 41, 64])
