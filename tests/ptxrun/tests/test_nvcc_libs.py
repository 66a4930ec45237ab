"""Library-heavy nvcc kernels: cooperative groups, CUB, cuda::pipeline/barrier, half/bf16/fp8 math, wmma variants, libdevice."""

import math

import numpy as np
import pytest
import torch

import ptxrun

pytestmark = pytest.mark.full  # compiling the library headers is slow

SRC = r"""
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/memcpy_async.h>
#include <cub/cub.cuh>
#include <cuda/pipeline>
#include <cuda/barrier>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <mma.h>
#include <cstdio>
#include <cassert>
namespace cg = cooperative_groups;
using namespace nvcuda;
extern "C" __global__ void cgred(const float*x,float*o){ auto b=cg::this_thread_block(); auto t=cg::tiled_partition<32>(b); float v=cg::reduce(t,x[b.thread_rank()],cg::plus<float>()); if(t.thread_rank()==0) atomicAdd(o,v); auto t8=cg::tiled_partition<8>(t); float m=cg::reduce(t8,x[b.thread_rank()],cg::greater<float>()); o[1+b.thread_rank()]=m; auto c=cg::coalesced_threads(); if(c.thread_rank()==0) o[0]+=0; }
extern "C" __global__ void cubred(const int*x,int*o){ typedef cub::BlockReduce<int,128> BR; __shared__ typename BR::TempStorage ts; int s=BR(ts).Sum(x[threadIdx.x]); if(threadIdx.x==0)o[0]=s; __syncthreads(); typedef cub::BlockScan<int,128> BS; __shared__ typename BS::TempStorage t2; int e; BS(t2).ExclusiveSum(x[threadIdx.x],e); o[1+threadIdx.x]=e; }
extern "C" __global__ void cubsort(int*x){ typedef cub::BlockRadixSort<int,128,4> B; __shared__ typename B::TempStorage ts; int k[4]; for(int i=0;i<4;i++)k[i]=x[threadIdx.x*4+i]; B(ts).Sort(k); for(int i=0;i<4;i++)x[threadIdx.x*4+i]=k[i]; }
extern "C" __global__ void cgasync(const float*x,float*o){ extern __shared__ float s[]; auto b=cg::this_thread_block(); cg::memcpy_async(b,s,x,sizeof(float)*512); cg::wait(b); o[threadIdx.x]=s[511-threadIdx.x]; }
extern "C" __global__ void pipek(const float4*x,float4*o,int n){ __shared__ float4 s[2][128]; auto p=cuda::make_pipeline(); p.producer_acquire(); cuda::memcpy_async(&s[0][threadIdx.x],x+threadIdx.x,sizeof(float4),p); p.producer_commit(); for(int i=0;i<n;i++){ if(i+1<n){p.producer_acquire(); cuda::memcpy_async(&s[(i+1)&1][threadIdx.x],x+(i+1)*128+threadIdx.x,sizeof(float4),p); p.producer_commit(); cuda::pipeline_consumer_wait_prior<1>(p);} else cuda::pipeline_consumer_wait_prior<0>(p); __syncthreads(); o[i*128+threadIdx.x]=s[i&1][127-threadIdx.x]; __syncthreads(); p.consumer_release(); } }
extern "C" __global__ void mbar(const float*x,float*o){ __shared__ cuda::barrier<cuda::thread_scope_block> b; __shared__ float s[128]; if(threadIdx.x==0) init(&b,blockDim.x); __syncthreads(); s[threadIdx.x]=x[threadIdx.x]; b.arrive_and_wait(); o[threadIdx.x]=s[127-threadIdx.x]; }
extern "C" __global__ void halfm(const __half*a,const __nv_bfloat16*b,__half*o,__nv_bfloat16*p){ int i=threadIdx.x; __half v=a[i]; o[i]=hexp(v)+hsin(v)+hrsqrt(__habs(v))+hlog2(__habs(v))+htanh(v)+__hmax(v,__float2half(0.3f))+hfloor(v)+__int2half_rn(i)+ (__hgt(v,__float2half(0.f))?v:__hneg(v)); p[i]=hexp(b[i])+hsqrt(__habs(b[i]))+__hmin(b[i],__float2bfloat16(0.1f))+__hmax_nan(b[i],b[i])+ __float2bfloat16_rz(1.2345f*i)+hceil(b[i]); atomicAdd(o+64,v); atomicAdd((__half2*)(o+66),__halves2half2(v,v)); atomicAdd((__nv_bfloat162*)(p+66),__halves2bfloat162(b[i],b[i])); }
extern "C" __global__ void fp8(const float*a,unsigned char*o,float*p){ int i=threadIdx.x; __nv_fp8_e4m3 x(a[i]); __nv_fp8_e5m2 y(a[i]); o[i]=x.__x; o[i+64]=y.__x; p[i]=float(x)+float(y); }
extern "C" __global__ void prn(int*x){ if(threadIdx.x==3) printf("hello %d\n",x[0]); assert(x[threadIdx.x]>=0); x[threadIdx.x]+=1; }
extern "C" __global__ void imma(const signed char*a,const signed char*b,int*c){ wmma::fragment<wmma::matrix_a,16,16,16,signed char,wmma::row_major> fa; wmma::fragment<wmma::matrix_b,16,16,16,signed char,wmma::col_major> fb; wmma::fragment<wmma::accumulator,16,16,16,int> fc; wmma::fill_fragment(fc,0); wmma::load_matrix_sync(fa,a,16); wmma::load_matrix_sync(fb,b,16); wmma::mma_sync(fc,fa,fb,fc); wmma::store_matrix_sync(c,fc,16,wmma::mem_row_major);}
extern "C" __global__ void wm32(const __half*a,const __half*b,__half*c){ wmma::fragment<wmma::matrix_a,32,8,16,__half,wmma::col_major> fa; wmma::fragment<wmma::matrix_b,32,8,16,__half,wmma::row_major> fb; wmma::fragment<wmma::accumulator,32,8,16,__half> fc; wmma::fill_fragment(fc,__float2half(0.f)); wmma::load_matrix_sync(fa,a,32); wmma::load_matrix_sync(fb,b,8); wmma::mma_sync(fc,fa,fb,fc); wmma::store_matrix_sync(c,fc,8,wmma::mem_row_major);}
extern "C" __global__ void wmtf(const float*a,const float*b,float*c){ wmma::fragment<wmma::matrix_a,16,16,8,wmma::precision::tf32,wmma::row_major> fa; wmma::fragment<wmma::matrix_b,16,16,8,wmma::precision::tf32,wmma::col_major> fb; wmma::fragment<wmma::accumulator,16,16,8,float> fc; wmma::fill_fragment(fc,0.f); wmma::load_matrix_sync(fa,a,8); wmma::load_matrix_sync(fb,b,8); for(int i=0;i<fa.num_elements;i++)fa.x[i]=wmma::__float_to_tf32(fa.x[i]); wmma::mma_sync(fc,fa,fb,fc); wmma::store_matrix_sync(c,fc,16,wmma::mem_row_major);}
extern "C" __global__ void wmbf(const __nv_bfloat16*a,const __nv_bfloat16*b,float*c){ __shared__ __nv_bfloat16 s[256]; for(int i=threadIdx.x;i<256;i+=32)s[i]=a[i]; __syncwarp(); wmma::fragment<wmma::matrix_a,16,16,16,__nv_bfloat16,wmma::row_major> fa; wmma::fragment<wmma::matrix_b,16,16,16,__nv_bfloat16,wmma::row_major> fb; wmma::fragment<wmma::accumulator,16,16,16,float> fc; wmma::fill_fragment(fc,0.f); wmma::load_matrix_sync(fa,s,16); wmma::load_matrix_sync(fb,b,16); wmma::mma_sync(fc,fa,fb,fc); wmma::store_matrix_sync(c,fc,16,wmma::mem_col_major);}
extern "C" __global__ void mathf(const float*x,float*o){ int i=threadIdx.x; float v=x[i]; o[i]=__expf(v)+__logf(fabsf(v))+__fdividef(v,3.f)+rsqrtf(fabsf(v))+exp2f(v)+cbrtf(v)+asinf(v/10)+atan2f(v,2)+fmodf(v,0.7f)+erfcf(v)+lgammaf(fabsf(v))+ldexpf(v,3)+rintf(v)+roundf(v)+copysignf(1,v)+hypotf(v,1)+sinhf(v)+expm1f(v)+__fadd_rz(v,1e-9f)+__fmul_ru(v,1.1f)+__frcp_rd(v)+__saturatef(v)+nearbyintf(v)+(float)__float2int_rn(v)+(float)__double2float_rz(v*1.1)+__fsqrt_rn(fabsf(v))+tgammaf(fabsf(v)+1)+j0f(v)+normcdff(v)+remainderf(v,0.3f); }
struct Prm{ const float*q; float*o; int n; float s; long long st[3]; };
extern "C" __global__ void byval(const __grid_constant__ Prm p){ int i=threadIdx.x; if(i<p.n) p.o[i]=p.q[i*p.st[i%3]]*p.s; }
extern "C" __global__ void byval2(Prm p){ int i=threadIdx.x; p.st[i%3]+=i; if(i<p.n) p.o[i]=p.q[i]*p.s+p.st[(i+1)%3]+p.st[i%3]; }
extern "C" __global__ void lane(int*o){ unsigned e,l,g; asm("mov.u32 %0,%%lanemask_lt;":"=r"(l)); asm("mov.u32 %0,%%laneid;":"=r"(e)); asm volatile("mov.u32 %0,%%clock;":"=r"(g)); o[threadIdx.x]=l+e+(g&0); }
"""


@pytest.fixture(scope="module")
def mod():
    return ptxrun.nvcc(SRC, flags=("-std=c++17",))


def run(mod, name, *args, block=128, **kw):
    return mod.kernel(name).launch(grid=1, block=block, args=list(args), **kw)


def test_no_unsupported(mod):
    bad = {k: mod.kernel(k).unsupported() for k in mod.kernels()}
    assert not any(bad.values()), bad


def test_cooperative_groups(mod, rng):
    x = rng.integers(-9, 9, 128).astype(np.float32)
    o = np.zeros(129, np.float32)
    run(mod, "cgred", x, o)
    assert o[0] == x.sum()
    assert np.array_equal(o[1:], np.repeat(x.reshape(16, 8).max(1), 8))


def test_cub(mod, rng):
    x = rng.integers(-9, 9, 128).astype(np.int32)
    o = np.zeros(129, np.int32)
    run(mod, "cubred", x, o)
    assert o[0] == x.sum()
    assert np.array_equal(o[1:], np.cumsum(x) - x)
    k = rng.integers(-(2**31), 2**31, 512).astype(np.int32)
    ref = np.sort(k)
    run(mod, "cubsort", k)
    assert np.array_equal(k, ref)


@pytest.mark.parametrize("schedule", ["lockstep", "warps"])
def test_async_copies_and_mbarrier(mod, rng, schedule):
    x = rng.standard_normal(512).astype(np.float32)
    o = np.zeros(512, np.float32)
    run(mod, "cgasync", x, o, smem=2048, uninit="report", schedule=schedule)
    assert np.array_equal(o[:128], x[::-1][:128])
    x = rng.standard_normal((5, 128, 4)).astype(np.float32)
    o = np.zeros_like(x)
    run(mod, "pipek", x, o, 5, uninit="report", schedule=schedule)
    assert np.array_equal(o, x[:, ::-1])
    x = rng.standard_normal(128).astype(np.float32)
    o = np.zeros(128, np.float32)
    run(mod, "mbar", x, o, schedule=schedule)
    assert np.array_equal(o, x[::-1])


def test_half_math(mod):
    torch.manual_seed(0)
    a, b = torch.rand(70).half() + 0.25, torch.rand(70).bfloat16() + 0.25
    o, p = torch.zeros(68).half(), torch.zeros(68).bfloat16()
    run(mod, "halfm", a, b, o, p, block=64)
    v = a[:64].double()
    i = torch.arange(64)
    ref = v.exp() + v.sin() + v.rsqrt() + v.log2() + v.tanh() + v.clamp(min=0.3) + v.floor() + i + v
    torch.testing.assert_close(o[:64].double(), ref, rtol=5e-3, atol=5e-3)
    v = b[:64].double()
    ref = v.exp() + v.sqrt() + v.clamp(max=0.1) + v + 1.2345 * i + v.ceil()
    torch.testing.assert_close(p[:64].double(), ref, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(o[64].double(), a[:64].double().sum(), rtol=1e-2, atol=0)
    torch.testing.assert_close(
        o[66:68].double(), a[:64].double().sum().expand(2), rtol=1e-2, atol=0
    )
    torch.testing.assert_close(
        p[66:68].double(), b[:64].double().sum().expand(2), rtol=5e-2, atol=0
    )


def test_fp8_emulation(mod):
    a = torch.cat([torch.randn(60) * 20, torch.tensor([0.0, -0.001, 400.0, 1000.0])])
    o, p = torch.zeros(128, dtype=torch.uint8), torch.zeros(64)
    run(mod, "fp8", a, o, p, block=64)
    e4 = a.clamp(-448, 448).to(torch.float8_e4m3fn)
    e5 = a.to(torch.float8_e5m2)
    assert torch.equal(o[:64], e4.view(torch.uint8))
    assert torch.equal(o[64:], e5.view(torch.uint8))
    assert torch.equal(p, e4.float() + e5.float())


def test_printf_and_assert(mod):
    x = np.zeros(32, np.int32)
    run(mod, "prn", x, block=32)
    assert (x == 1).all()
    x[7] = -1
    with pytest.raises(ptxrun.PtxError, match=r"device assert failed.*thread 7"):
        run(mod, "prn", x, block=32)


def test_wmma_variants(mod, rng):
    a, b = rng.integers(-9, 9, (2, 16, 16)).astype(np.int8)
    c = np.zeros((16, 16), np.int32)
    run(mod, "imma", a, b, c, block=32)
    assert np.array_equal(c, a.astype(int) @ b.T.astype(int))
    a, b = (
        rng.integers(-4, 4, (16, 32)).astype(np.float16),
        rng.integers(-4, 4, (16, 8)).astype(np.float16),
    )
    c = np.zeros((32, 8), np.float16)
    run(mod, "wm32", a, b, c, block=32)
    assert np.array_equal(c, a.T @ b)
    a, b = rng.integers(-4, 4, (2, 16, 8)).astype(np.float32)
    c = np.zeros((16, 16), np.float32)
    run(mod, "wmtf", a, b, c, block=32)
    assert np.array_equal(c, a @ b.T)
    f = rng.integers(-8, 8, (2, 16, 16)).astype(np.float32)
    u = (f.view(np.uint32) >> 16).astype(np.uint16)
    run(mod, "wmbf", u[0].copy(), u[1].copy(), c, block=32)
    assert np.array_equal(c.T, f[0] @ f[1])


def test_libdevice(mod, rng):
    x = rng.uniform(0.1, 4, 64).astype(np.float32)
    x[::2] *= -1
    o = np.zeros(64, np.float32)
    run(mod, "mathf", x, o, block=64)
    ref = []
    for f in x.tolist():
        v, a = f, abs(f)
        rnd = math.floor(a + 0.5) * math.copysign(1, v)
        ref.append(
            math.exp(v)
            + math.log(a)
            + v / 3
            + a**-0.5
            + 2**v
            + math.copysign(a ** (1 / 3), v)
            + math.asin(v / 10)
            + math.atan2(v, 2)
            + math.fmod(v, 0.699999988079071)
            + math.erfc(v)
            + math.lgamma(a)
            + 8 * v
            + round(v)
            + rnd
            + math.copysign(1, v)
            + math.hypot(v, 1)
            + math.sinh(v)
            + math.expm1(v)
            + v
            + v * 1.1
            + 1 / v
            + min(max(v, 0), 1)
            + round(v)
            + round(v)
            + v * 1.1
            + math.sqrt(a)
            + math.gamma(a + 1)
            + float(torch.special.bessel_j0(torch.tensor(v, dtype=torch.float64)))
            + 0.5 * math.erfc(-v / math.sqrt(2))
            + math.remainder(v, 0.30000001192092896)
        )
    np.testing.assert_allclose(o, ref, rtol=3e-5, atol=3e-5)


def test_struct_with_pointers(mod, rng):
    q, o = rng.standard_normal(400).astype(np.float32), np.zeros(64, np.float32)
    run(mod, "byval", ptxrun.Struct("PPif3q", q, o, 60, 2.0, 1, 2, 3), block=64)
    i = np.arange(60)
    assert np.array_equal(o[:60], q[i * (i % 3 + 1)] * 2)
    assert not o[60:].any()
    run(mod, "byval2", ptxrun.Struct("PPif3q", q, o, 60, 2.0, 1, 2, 3), block=64)
    st = np.array([1, 2, 3])
    ref = q[i] * np.float32(2) + st[(i + 1) % 3].astype(np.float32)
    np.testing.assert_allclose(o[:60], ref + (st[i % 3] + i), rtol=1e-6)


def test_special_registers(mod):
    o = np.zeros(64, np.int32)
    run(mod, "lane", o, block=64)
    lane = np.arange(64) % 32
    assert np.array_equal(o, ((1 << lane) - 1 + lane).astype(np.int64).astype(np.int32))
