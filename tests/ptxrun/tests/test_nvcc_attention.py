"""A hand-written CUDA flash-attention forward (cp.async double buffering, ldmatrix, mma.sync, online softmax), checked
for values and races, with planted defects."""

import numpy as np
import pytest

import ptxrun

SRC = r"""
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
typedef unsigned u32;
#define BM 64
#define BN 32
#define D 64
#define LD 72
#ifndef SYNC_AFTER_WAIT
#define SYNC_AFTER_WAIT __syncthreads()
#endif
#ifndef SYNC_END
#define SYNC_END __syncthreads()
#endif
#ifndef PENDING
#define PENDING 1
#endif
__device__ __forceinline__ u32 sptr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack(float x, float y) { half2 h = __floats2half2_rn(x, y); return *(u32*)&h; }

extern "C" __global__ void __launch_bounds__(128) attn(const half* __restrict__ q, const half* __restrict__ k, const half* __restrict__ v,
                                                       float* __restrict__ o, int N, float scale, int causal) {
  __shared__ __align__(16) half sq[BM * LD], sk[2][BN * LD], sv[2][BN * LD];
  int t = threadIdx.x, w = t / 32, l = t % 32, g = l / 4, c4 = l % 4, m0 = blockIdx.x * BM;
  auto load = [&](half* dst, const half* src, int row0, int rows) {
    for (int i = t; i < rows * D / 8; i += 128) {
      int r = i / (D / 8), c = i % (D / 8) * 8, ok = row0 + r < N;
      __pipeline_memcpy_async(dst + r * LD + c, src + (ok ? (row0 + r) * D + c : 0), 16, ok ? 0 : 16);
    }
  };
  load(sq, q, m0, BM); load(sk[0], k, 0, BN); load(sv[0], v, 0, BN); __pipeline_commit();
  int end = causal ? min(N, m0 + BM) : N, tiles = (end + BN - 1) / BN;
  float acc[8][4] = {}, mx[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  u32 qa[4][4];
  for (int it = 0; it < tiles; it++) {
    int b = it & 1;
    if (it + 1 < tiles) { load(sk[b ^ 1], k, (it + 1) * BN, BN); load(sv[b ^ 1], v, (it + 1) * BN, BN); }
    __pipeline_commit();
    __pipeline_wait_prior(PENDING);
    SYNC_AFTER_WAIT;
    if (it == 0)
      for (int j = 0; j < 4; j++) {
        u32 p = sptr(sq + (w * 16 + l % 16) * LD + j * 16 + l / 16 * 8);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(qa[j][0]), "=r"(qa[j][1]), "=r"(qa[j][2]), "=r"(qa[j][3]) : "r"(p));
      }
    float s[4][4] = {};
    for (int n = 0; n < 4; n++)
      for (int j = 0; j < 4; j++) {
        u32 b0, b1, p = sptr(sk[b] + (n * 8 + l % 8) * LD + j * 16 + (l / 8 & 1) * 8);
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(b0), "=r"(b1) : "r"(p));
        mma(s[n], qa[j], b0, b1);
      }
    for (int h = 0; h < 2; h++) {
      int row = m0 + w * 16 + g + h * 8;
      float m = mx[h];
      for (int n = 0; n < 4; n++)
        for (int e = 0; e < 2; e++) {
          int col = it * BN + n * 8 + c4 * 2 + e;
          float& x = s[n][h * 2 + e];
          x = col < N && (!causal || col <= row) ? x * scale : -INFINITY;
          m = fmaxf(m, x);
        }
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1)); m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      float ms = m == -INFINITY ? 0.f : m, a = exp2f(mx[h] - ms), z = 0;
      for (int n = 0; n < 4; n++) for (int e = 0; e < 2; e++) { float& x = s[n][h * 2 + e]; x = exp2f(x - ms); z += x; }
      sum[h] = sum[h] * a + z; mx[h] = m;
      for (int d = 0; d < 8; d++) { acc[d][h * 2] *= a; acc[d][h * 2 + 1] *= a; }
    }
    for (int j = 0; j < 2; j++) {
      u32 pa[4] = {pack(s[2 * j][0], s[2 * j][1]), pack(s[2 * j][2], s[2 * j][3]), pack(s[2 * j + 1][0], s[2 * j + 1][1]), pack(s[2 * j + 1][2], s[2 * j + 1][3])};
      for (int d = 0; d < 8; d++) {
        u32 b0, b1, p = sptr(sv[b] + (j * 16 + l % 16) * LD + d * 8);
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(b0), "=r"(b1) : "r"(p));
        mma(acc[d], pa, b0, b1);
      }
    }
    SYNC_END;
  }
  for (int h = 0; h < 2; h++) {
    float z = sum[h];
    z += __shfl_xor_sync(~0u, z, 1); z += __shfl_xor_sync(~0u, z, 2);
    int row = m0 + w * 16 + g + h * 8;
    if (row < N) for (int d = 0; d < 8; d++) *(float2*)(o + row * D + d * 8 + c4 * 2) = make_float2(acc[d][h * 2] / z, acc[d][h * 2 + 1] / z);
  }
}
"""


@pytest.fixture(scope="module")
def mod():
    return ptxrun.nvcc(SRC)


def launch(mod, N=100, causal=0, **kw):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, N, 64)).astype(np.float16)
    o = np.full((N, 64), np.nan, np.float32)
    kw.setdefault("uninit", "report")
    r = mod.kernel("attn").launch(
        grid=-(-N // 64), block=128, args=[q, k, v, o, N, 0.125 * 1.4426950408889634, causal], **kw
    )
    s = q.astype(np.float64) @ k.T.astype(np.float64) * 0.125
    if causal:
        s[np.triu_indices(N, 1)] = -np.inf
    p = np.exp(s - s.max(1, keepdims=True))
    return r, o, p / p.sum(1, keepdims=True) @ v.astype(np.float64)


@pytest.mark.parametrize(("N", "causal"), [(64, 0), (100, 0), (150, 1), (33, 1)])
@pytest.mark.parametrize("schedule", ["lockstep", "warps"])
def test_correct(mod, N, causal, schedule):
    r, o, ref = launch(mod, N, causal, schedule=schedule, globalcheck=True)
    assert np.abs(o - ref).max() < 2e-3
    assert not r.hazards
    assert r.counts["mma"] > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("flag", "kinds"),
    [
        ("-DSYNC_AFTER_WAIT=", {"RAW"}),
        ("-DSYNC_END=", {"WAR", "inflight"}),
        ("-DPENDING=2", {"inflight"}),
    ],
)
def test_defects_are_found(flag, kinds):
    r, _o, _ref = launch(ptxrun.nvcc(SRC, flags=(flag,)), 150, on_hazard="return")
    assert kinds & {h.kind for h in r.hazards}, [str(h) for h in r.hazards]
