// The low-rank projection: reads each token once and returns a few numbers per token and their
// extents. No torch.
#pragma once

#include "cuda/direct.cuh"

namespace boltzattn::cuda {

constexpr int kProjectTokens = 64;   // of a block
constexpr int kProjectOutputs = 8;   // at once
constexpr int kProjectTogether = 4;  // tokens of a warp at once

__device__ __forceinline__ Extent extent_of(double x, double token) {
  const bool regular = ::fabs(x) < INFINITY;
  // A NaN is neither the smallest nor the largest number.
  return {x == x ? x : INFINITY, x == x ? x : -INFINITY, token, token, 1, regular ? 1.0 : 0.0};
}

// out[b][o][i] = x[b][i] . weight[o] + bias[o]. The lanes of a warp share the columns.
template <class S>
__global__ void __launch_bounds__(kThreads) project(const __grid_constant__ Projected p) {
  using T = Arithmetic<S>;
  constexpr int V = 16 / int(sizeof(S)), kWarpTokens = kProjectTokens / (kThreads / 32);
  __shared__ T result[kProjectOutputs][kProjectTokens];
  const int64_t b = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks;
  const int64_t first = chunk * kProjectTokens, tokens = least(kProjectTokens, p.n - first);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const S* x = static_cast<const S*>(p.x.data) + b * p.x.lead[0];
  const S* weight = static_cast<const S*>(p.weight.data);
  S* out = static_cast<S*>(p.out) + b * p.outputs * p.n;

  for (int64_t output = 0; output < p.outputs; output += kProjectOutputs) {
    for (int start = 0; start < kWarpTokens; start += kProjectTogether) {
      const int i0 = warp * kWarpTokens + start;
      T sum[kProjectTogether][kProjectOutputs] = {};
      for (int64_t column = lane * V; column < p.columns; column += 32 * V) {
        T row[kProjectTogether][V];
#pragma unroll
        for (int i = 0; i < kProjectTogether; ++i) {
          // Past the end the last token is read again, and the result is not used.
          const int64_t token = least(first + i0 + i, p.n - 1);
          read_columns<S, V>(x + token * p.x.row, p.x, column, p.columns, row[i]);
        }
#pragma unroll
        for (int o = 0; o < kProjectOutputs; ++o) {
          if (output + o >= p.outputs) break;
          T w[V];
          read_columns<S, V>(weight + (output + o) * p.weight.row, p.weight, column, p.columns, w);
#pragma unroll
          for (int i = 0; i < kProjectTogether; ++i)
#pragma unroll
            for (int c = 0; c < V; ++c) sum[i][o] += row[i][c] * w[c];
        }
      }
#pragma unroll
      for (int i = 0; i < kProjectTogether; ++i) {
#pragma unroll
        for (int o = 0; o < kProjectOutputs; ++o) {
          T total = sum[i][o];
#pragma unroll
          for (int step = 16; step > 0; step /= 2)
            total += __shfl_xor_sync(0xffffffffu, total, step);
          if (lane == 0) result[o][i0 + i] = total;
        }
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < kProjectOutputs * kProjectTokens; e += kThreads) {
      const int o = e / kProjectTokens, i = e % kProjectTokens;
      if (output + o >= p.outputs || i >= tokens) continue;
      const T bias = p.bias.data
                         ? widen(static_cast<const S*>(p.bias.data)[(output + o) * p.bias.column])
                         : T(0);
      const S rounded = narrow<S>(result[o][i] + bias);
      out[(output + o) * p.n + first + i] = rounded;
      result[o][i] = widen(rounded);
    }
    __syncthreads();
    if (threadIdx.x < kProjectOutputs && output + threadIdx.x < p.outputs) {
      Extent extent{INFINITY, -INFINITY, 0, 0, 0, 1};
      for (int i = 0; i < tokens; ++i)
        join(extent, extent_of(double(result[threadIdx.x][i]), double(first + i)));
      p.parts[blockIdx.x * p.outputs + output + threadIdx.x] = extent;
    }
    __syncthreads();
  }
}

// One block per batch and output: joins the extents of all chunks.
__global__ void __launch_bounds__(kThreads) project_extents(const __grid_constant__ Projected p) {
  __shared__ Extent extent[kThreads];
  const int64_t b = blockIdx.x / p.outputs, o = blockIdx.x % p.outputs;
  Extent mine{INFINITY, -INFINITY, 0, 0, 0, 1};
  const int64_t share = ceil_div(p.chunks, kThreads);  // neighbours, so that order is kept
  for (int64_t c = threadIdx.x * share; c < least(p.chunks, (threadIdx.x + 1) * share); ++c)
    join(mine, p.parts[(b * p.chunks + c) * p.outputs + o]);
  extent[threadIdx.x] = mine;
  for (int step = 1; step < kThreads; step *= 2) {
    __syncthreads();
    if (threadIdx.x % (2 * step) == 0) join(extent[threadIdx.x], extent[threadIdx.x + step]);
  }
  if (threadIdx.x == 0) p.extents[blockIdx.x] = extent[0];
}

}  // namespace boltzattn::cuda
