"""Planted bugs must be found; correct variants of the same kernels must be clean."""

import numpy as np
import pytest

import ptxrun

SRC = r"""
#include <cuda_pipeline.h>
#ifndef SYNC
#define SYNC __syncthreads()
#endif
extern "C" __global__ void reverse_bad(float* x) { __shared__ float s[128]; int t = threadIdx.x; s[t] = x[t]; x[t] = s[127 - t]; }
extern "C" __global__ void reverse_ok(float* x) { __shared__ float s[128]; int t = threadIdx.x; s[t] = x[t]; __syncthreads(); x[t] = s[127 - t]; }
extern "C" __global__ void war_bad(float* x) {           // second round overwrites before everybody has read
  __shared__ float s[128]; int t = threadIdx.x;
  for (int i = 0; i < 2; i++) { s[t] = x[t] + i; __syncthreads(); x[t] = s[127 - t]; }
}
extern "C" __global__ void waw_bad(float* x) { __shared__ float s[1]; s[0] = threadIdx.x; __syncthreads(); x[threadIdx.x] = s[0]; }
extern "C" __global__ void waw_benign(float* x) { __shared__ float s[1]; s[0] = 7; __syncthreads(); x[threadIdx.x] = s[0]; }
extern "C" __global__ void warp_bad(float* x) { __shared__ float s[32]; int t = threadIdx.x; s[t] = x[t]; x[t] = s[31 - t]; }
extern "C" __global__ void warp_ok(float* x) { __shared__ float s[32]; int t = threadIdx.x; s[t] = x[t]; __syncwarp(); x[t] = s[31 - t]; }
extern "C" __global__ void warp_shuffled(float* x) {
  __shared__ float s[32]; int t = threadIdx.x; s[t] = x[t]; float y = __shfl_xor_sync(~0u, x[t], 1); x[t] = s[31 - t] + y;
}
extern "C" __global__ void next_variable(float* x, int n) {
  __shared__ float a[32], b[32]; int t = threadIdx.x; a[t + n] = x[t]; b[t] = x[t]; __syncwarp(); x[t] = a[31 - t] + b[31 - t];
}
extern "C" __global__ void oob(float* x, int n) { x[(int)threadIdx.x + n] = 1.f; }
extern "C" __global__ void copy4(const float4* x, float4* o) { o[threadIdx.x] = x[threadIdx.x]; }
extern "C" __global__ void misaligned(char* x) { *(float4*)(x + 4 * threadIdx.x) = make_float4(0, 0, 0, 0); }
extern "C" __global__ void smem_oob(float* x) { extern __shared__ float d[]; d[threadIdx.x] = 1; __syncthreads(); x[threadIdx.x] = d[threadIdx.x]; }
extern "C" __global__ void uninit(float* x) { __shared__ float s[64]; int t = threadIdx.x; if (t != 5) s[t] = 1.f; __syncthreads(); x[t] = s[t]; }
extern "C" __global__ void nowait(const float* g, float* x) {
  __shared__ __align__(16) float s[128]; int t = threadIdx.x;
  __pipeline_memcpy_async(&s[t * 4], g + t * 4, 16); __pipeline_commit();
  x[t] = s[t * 4];
  __pipeline_wait_prior(0);
}
extern "C" __global__ void waitn(const float* g, float* x, int late) {      // reads stage 1 although only stage 0 is complete
  __shared__ __align__(16) float s[2][128]; int t = threadIdx.x;
  __pipeline_memcpy_async(&s[0][t * 4], g + t * 4, 16); __pipeline_commit();
  __pipeline_memcpy_async(&s[1][t * 4], g + 128 + t * 4, 16); __pipeline_commit();
  __pipeline_wait_prior(1);
  x[t] = s[late][t * 4];
  __pipeline_wait_prior(0);
}
extern "C" __global__ void nosync(const float* g, float* x) {      // waits, but no barrier before reading others' data
  __shared__ __align__(16) float s[512]; int t = threadIdx.x;
  __pipeline_memcpy_async(&s[t * 4], g + t * 4, 16); __pipeline_commit();
  __pipeline_wait_prior(0);
  x[t] = s[511 - t * 4];
}
extern "C" __global__ void divbar(float* x) {
  int t = threadIdx.x;
  if (t & 1) { x[t] = 1; asm volatile("bar.sync 0;"); x[t] += 1; } else { x[t] = 2; asm volatile("bar.sync 0;"); x[t] *= 3; }
}
extern "C" __global__ void deadlock(float* x) {
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;");
  x[threadIdx.x] = 1;
}
extern "C" __global__ void spin(volatile int* x) { while (x[0] == 0) {} }
extern "C" __global__ void unsupported(unsigned* x) {
  unsigned v = x[threadIdx.x], r = 0;
  if (v > 1000) asm volatile("vadd4.u32.u32.u32 %0, %1, %1, %1;" : "=r"(r) : "r"(v));
  x[threadIdx.x] = r;
}
extern "C" __global__ void badmask(int* x) { if (threadIdx.x < 16) x[threadIdx.x] = __shfl_xor_sync(0xffff0000u, x[threadIdx.x], 1); }
extern "C" __global__ void wsdesc(float* x) {            // producer / consumer warps with named barriers: clean
  __shared__ float s[32]; int t = threadIdx.x;
  if (t < 32) { s[t] = x[t]; asm volatile("bar.arrive 1, 64;"); }
  else { asm volatile("bar.sync 1, 64;"); x[t] = s[63 - t]; }
}
"""


@pytest.fixture(scope="module")
def mod():
    return ptxrun.nvcc(SRC)


def run(mod, name, *args, block=128, **kw):
    return mod.kernel(name).launch(grid=1, block=block, args=list(args), **kw)


def kinds(r):
    return {(h.kind, h.scope) for h in r.hazards}


@pytest.mark.parametrize("schedule", ["lockstep", "warps"])
def test_missing_syncthreads(mod, schedule):
    x = np.arange(128, dtype=np.float32)
    with pytest.raises(ptxrun.HazardError, match="inter-warp hazard in reverse_bad") as e:
        run(mod, "reverse_bad", x, schedule=schedule, intrawarp=False)
    h = e.value.result.hazards[0]
    assert h.kind in ("RAW", "WAR")
    assert "shared" in h.text
    assert h.line > 0
    assert h.other_line > 0
    y = np.arange(128, dtype=np.float32)
    assert not run(mod, "reverse_ok", y, schedule=schedule, uninit="report").hazards
    assert np.array_equal(y, np.arange(128)[::-1])


def test_serial_schedule_shows_wrong_values(mod):
    x = np.arange(128, dtype=np.float32)
    run(mod, "reverse_bad", x, schedule="warps", on_hazard="return")
    assert np.isnan(x).any()


def test_missing_second_barrier(mod):
    assert ("WAR", "inter-warp") in kinds(
        run(mod, "war_bad", np.zeros(128, np.float32), on_hazard="return")
    )


def test_write_write(mod):
    assert ("WAW", "inter-warp") in kinds(
        run(mod, "waw_bad", np.zeros(128, np.float32), on_hazard="return")
    )
    assert not run(mod, "waw_benign", np.zeros(128, np.float32)).hazards


def test_missing_syncwarp(mod):
    x = np.zeros(32, np.float32)
    assert kinds(run(mod, "warp_bad", x, block=32, on_hazard="return")) == {("RAW", "intra-warp")}
    assert not run(mod, "warp_bad", x, block=32, intrawarp=False).hazards
    assert not run(mod, "warp_ok", x, block=32).hazards


def test_only_barriers_order_memory(mod):
    x = np.zeros(32, np.float32)
    assert not run(mod, "warp_shuffled", x, block=32).hazards
    strict = run(mod, "warp_shuffled", x, block=32, intrawarp="barriers", on_hazard="return")
    assert kinds(strict) == {("RAW", "intra-warp")}
    assert not run(mod, "warp_ok", x, block=32, intrawarp="barriers").hazards


def test_leaving_a_shared_variable_is_no_way_into_the_next(mod):
    x = np.arange(32, dtype=np.float32)
    run(mod, "next_variable", x, 0, block=32)
    assert np.array_equal(x, 2 * np.arange(32)[::-1])
    for by in (1, -1):
        with pytest.raises(ptxrun.MemoryFault, match="out-of-bounds 4-byte shared access"):
            run(mod, "next_variable", x, by, block=32)


def test_racecheck_off(mod):
    assert not run(mod, "reverse_bad", np.zeros(128, np.float32), racecheck=False).hazards


def test_out_of_bounds_store(mod):
    x = np.zeros(128, np.float32)
    with pytest.raises(ptxrun.MemoryFault) as e:
        run(mod, "oob", x, 1)
    s = str(e.value)
    assert "oob" in s
    assert "PTX line" in s
    assert "thread (127, 0, 0)" in s
    assert "0 bytes past the end of arg 0" in s
    run(mod, "oob", x, 0)
    with pytest.raises(ptxrun.MemoryFault, match="before arg 0"):
        run(mod, "oob", x, -3)


def test_out_of_bounds_of_a_view(mod):
    """The array around a slice exists in memory, but is not part of the argument."""
    x = np.zeros((4, 128), np.float32)
    with pytest.raises(ptxrun.MemoryFault):
        run(mod, "oob", x[1], 1)
    with pytest.raises(ptxrun.MemoryFault, match="not on one of its elements"):
        run(mod, "oob", x[:, :100], 0)
    run(mod, "oob", x[2], 0)
    assert x[2].all()
    assert not x[[0, 1, 3]].any()


def test_access_that_straddles_the_end(mod):
    x, o = np.arange(6, dtype=np.float32), np.zeros(8, np.float32)
    with pytest.raises(ptxrun.MemoryFault, match="out-of-bounds 16-byte global"):
        run(mod, "copy4", x, o, block=2)
    run(mod, "copy4", np.arange(8, dtype=np.float32), o, block=2)
    assert np.array_equal(o, np.arange(8))


def test_source_positions():
    m = ptxrun.nvcc(SRC, flags=("-lineinfo",))
    line = 1 + next(i for i, l in enumerate(SRC.split("\n")) if "void reverse_bad" in l)
    r = run(m, "reverse_bad", np.zeros(128, np.float32), on_hazard="return")
    assert r.hazards[0].src == r.hazards[0].other_src == f"k.cu:{line}"
    assert f"(k.cu:{line})" in str(r.hazards[0])
    with pytest.raises(ptxrun.MemoryFault, match=r"\(k.cu:\d+\)"):
        run(m, "oob", np.zeros(4, np.float32), 1)


def test_misaligned(mod):
    with pytest.raises(ptxrun.MemoryFault, match="misaligned 16-byte global"):
        run(mod, "misaligned", np.zeros(1024, np.int8), block=32)


def test_shared_out_of_bounds(mod):
    with pytest.raises(ptxrun.MemoryFault, match="out-of-bounds 4-byte shared"):
        run(mod, "smem_oob", np.zeros(128, np.float32), smem=508)
    run(mod, "smem_oob", np.zeros(128, np.float32), smem=512)


def test_uninitialised_shared(mod):
    x = np.zeros(64, np.float32)
    run(mod, "uninit", x, block=64)
    assert np.isnan(x[5])
    assert np.isnan(x).sum() == 1
    r = run(mod, "uninit", x, block=64, uninit="report", on_hazard="return")
    assert [(h.kind, h.thread, h.address) for h in r.hazards] == [("uninit", 5, 20)]


def test_missing_cp_async_wait(mod):
    g, x = np.arange(512, dtype=np.float32), np.zeros(128, np.float32)
    r = run(mod, "nowait", g, x, block=32, on_hazard="return")
    assert "inflight" in {h.kind for h in r.hazards}
    assert np.isnan(x[:32]).all()
    r = run(mod, "nosync", g, x, block=128, on_hazard="return")
    assert ("RAW", "inter-warp") in kinds(r)


def test_wait_for_the_wrong_stage(mod):
    g, x = np.arange(256, dtype=np.float32), np.zeros(32, np.float32)
    assert not run(mod, "waitn", g, x, 0, block=32).hazards
    assert np.array_equal(x, g[:128:4])
    r = run(mod, "waitn", g, x, 1, block=32, on_hazard="return")
    assert [h.kind for h in r.hazards] == ["inflight"]
    assert np.isnan(x).all()


def test_divergent_barrier(mod):
    r = run(mod, "divbar", np.zeros(64, np.float32), block=64, on_hazard="return")
    assert "divergent-barrier" in {h.kind for h in r.hazards}


def test_deadlock(mod):
    with pytest.raises(ptxrun.DeadlockError, match=r"bar\.sync 1, 64"):
        run(mod, "deadlock", np.zeros(64, np.float32), block=64)


def test_endless_loop(mod):
    with pytest.raises(ptxrun.PtxError, match="max_steps"):
        run(mod, "spin", np.zeros(1, np.int32), block=32, max_steps=10000)


def test_unsupported_is_loud_but_lazy(mod):
    x = np.zeros(32, np.uint32)
    run(mod, "unsupported", x, block=32)  # not reached: fine
    x[3] = 2000
    with pytest.raises(ptxrun.UnsupportedError, match=r"PTX line \d+.*vadd4"):
        run(mod, "unsupported", x, block=32)
    assert "vadd4" in mod.kernel("unsupported").unsupported()[0][1]


def test_bad_membermask(mod):
    with pytest.raises(ptxrun.PtxError, match="membermask"):
        run(mod, "badmask", np.zeros(32, np.int32), block=32)


def test_named_barriers(mod):
    x = np.arange(64, dtype=np.float32)
    assert not run(mod, "wsdesc", x, block=64, uninit="report").hazards
    assert np.array_equal(x[32:], np.arange(32)[::-1])


def test_argument_checks(mod):
    k = mod.kernel("oob")
    with pytest.raises(ptxrun.PtxError, match="takes 2 arguments"):
        k.launch(grid=1, block=32, args=[np.zeros(4, np.float32)])
    with pytest.raises(ptxrun.PtxError, match="cannot take the float"):
        k.launch(grid=1, block=32, args=[np.zeros(4, np.float32), 1.5])
    with pytest.raises(ptxrun.PtxError, match="does not fit"):
        k.launch(grid=1, block=32, args=[np.zeros(4, np.float32), 2**40])
    ro = np.zeros(128, np.float32)
    ro.flags.writeable = False
    with pytest.raises(ptxrun.PtxError, match="read-only"):
        k.launch(grid=1, block=32, args=[ro, 0])


SRC2 = r"""
extern "C" __global__ void split_bad(const float* x, float* o, int n) {      // CTAs accumulate without atomics
  int i = threadIdx.x; o[i] += x[blockIdx.x * blockDim.x + i];
}
extern "C" __global__ void split_ok(const float* x, float* o, int n) { int i = threadIdx.x; atomicAdd(o + i, x[blockIdx.x * blockDim.x + i]); }
extern "C" __global__ void overlap(float* o) { o[blockIdx.x * (blockDim.x - 1) + threadIdx.x] = blockIdx.x; }
extern "C" __global__ void banks(const float* x, float* o, int stride) {
  extern __shared__ float s[]; int t = threadIdx.x;
  s[t * stride] = x[t]; __syncthreads(); o[t] = s[t * stride];
}
"""


@pytest.fixture(scope="module")
def mod2():
    return ptxrun.nvcc(SRC2)


def test_inter_cta_conflicts(mod2):
    x, o = np.ones(256, np.float32), np.zeros(64, np.float32)

    def go(k, *a, **kw):
        return mod2.kernel(k).launch(
            grid=4, block=64, args=list(a), on_hazard="return", globalcheck=True, **kw
        )

    assert {h.scope for h in go("split_bad", x, o, 0).hazards} == {"inter-CTA"}
    assert not go("split_ok", x, o, 0).hazards
    assert ("WAW", "inter-CTA") in kinds(go("overlap", np.zeros(256, np.float32)))
    assert not mod2.kernel("split_bad").launch(grid=4, block=64, args=[x, o, 0]).hazards  # opt-in


@pytest.mark.parametrize(("stride", "factor"), [(1, 1), (2, 2), (8, 8), (32, 32), (33, 1)])
def test_bank_conflict_counter(mod2, stride, factor):
    x, o = np.ones(64, np.float32), np.zeros(64, np.float32)
    r = mod2.kernel("banks").launch(
        grid=1, block=64, args=[x, o, stride], smem=64 * 33 * 4, profile=True
    )
    assert r.shared_wavefronts_ideal == 4
    assert r.shared_wavefronts == 4 * factor
    assert r.sectors == {"ld": 8, "st": 8}
