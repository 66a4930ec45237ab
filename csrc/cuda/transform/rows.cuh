// Sums of tokens' rows onto the nodes of a panel, and rows from the nodes. No torch.
//
// A block works on a segment: some tokens of one panel of one head. Each has kNodes weights, in
// shared memory; its row is read from global memory. Rows are summed in the arithmetic type
// T for a few tokens, then in fp64.
//
// 16-bit rows are multiplied by tensor cores. Factors with more bits (weights, tables, values
// measured from a centre) are split into two bf16 numbers, and the three larger parts of a product
// are kept: 16 bits of precision, while results are rounded to 8 or 11. One bf16 number per factor
// would not be enough, because gradients are differences of such sums.
#pragma once

#include "cuda/direct.cuh"
#include "spec/tolerances.h"

namespace boltzattn::cuda {

template <class T>
constexpr int kNodes =
    cuda_nodes(sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64);  // on a panel, of either axis
template <class T>
constexpr int kSegment = sizeof(T) == 4 ? 512 : 128;  // tokens
constexpr int kFlush = 32;                            // tokens summed in T, then in fp64

template <class T>
struct Segment {
  T weight[kNodes<T>][kSegment<T> + kVector<T>];  // padded: a column is read across the banks
  uint32_t token[kSegment<T>];
};

// Two fp32 numbers as sums of two bf16 numbers each.
struct Halves {
  uint32_t high, low;
};
__device__ __forceinline__ Halves halves(float first, float second) {
  const uint32_t high = pack_two<__nv_bfloat16>(first, second);
  return {high, pack_two<__nv_bfloat16>(first - __uint_as_float(high << 16),
                                        second - __uint_as_float(high & 0xffff0000u))};
}
__device__ __forceinline__ void multiply_halves(float* low, float* high, const Halves* left,
                                                const Halves* right) {
  const uint32_t left_high[4] = {left[0].high, left[1].high, left[2].high, left[3].high};
  const uint32_t left_low[4] = {left[0].low, left[1].low, left[2].low, left[3].low};
  const uint32_t right_high[2] = {right[0].high, right[1].high};
  const uint32_t right_low[2] = {right[0].low, right[1].low};
  multiply_add<__nv_bfloat16>(low, high, left_low, right_high);
  multiply_add<__nv_bfloat16>(low, high, left_high, right_low);
  multiply_add<__nv_bfloat16>(low, high, left_high, right_high);
}

// A warp's 32 lanes over nodes and columns: lane = (4 nodes) x (8 columns), or (2) x (16) for
// tensor cores.
template <class T, bool Tensor>
struct NodeLanes {
  static constexpr int kNodesEach = Tensor ? 2 : 4, kColumnsEach = Tensor ? 16 : 8;
  static constexpr int kGroups = 32 / (kNodes<T> / 4);  // of columns
  static constexpr int kColumns = kGroups * 8;          // at once: 64, in fp64 32
  static __device__ __forceinline__ int node(int a) {
    const int lane = threadIdx.x % 32;
    return Tensor ? lane / 4 + 8 * a : lane / kGroups * kNodesEach + a;
  }
  // Column c of the lane. Where it reads rows, neighbours read neighbouring 16 bytes.
  static __device__ __forceinline__ int column(int c) {
    return Tensor
               ? (threadIdx.x % 4 * 2 + c % 2) * 8 + c / 2
               : (c / kVector<T> * kGroups + threadIdx.x % kGroups) * kVector<T> + c % kVector<T>;
  }
};

// The tokens of a segment that a warp sums: an equal share.
template <class T>
struct WarpTokens {
  int first, end;
  __device__ explicit WarpTokens(int count) {
    constexpr int kShare = kSegment<T> / kWarps;
    first = int(threadIdx.x) / 32 * kShare;
    end = count < first + kShare ? count : first + kShare;
  }
};

// Adds up what the four warps have summed, in a fixed order, and writes it: to[node * width +
// column]. `space` is shared memory for one warp's sums.
template <class T, bool Tensor>
struct NodeSums {
  using Lanes = NodeLanes<T, Tensor>;
  double sum[Lanes::kNodesEach][Lanes::kColumnsEach];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int a = 0; a < Lanes::kNodesEach; ++a)
#pragma unroll
      for (int c = 0; c < Lanes::kColumnsEach; ++c) sum[a][c] = 0;
  }
  __device__ __forceinline__ void join(double (*space)[Lanes::kColumns]) {
    for (int warp = 0; warp < kWarps; ++warp) {
      if (int(threadIdx.x) / 32 == warp) {
#pragma unroll
        for (int a = 0; a < Lanes::kNodesEach; ++a) {
#pragma unroll
          for (int c = 0; c < Lanes::kColumnsEach; ++c) {
            double* to = space[Lanes::node(a)] + Lanes::column(c);
            *to = warp == 0 ? sum[a][c] : *to + sum[a][c];
          }
        }
      }
      __syncthreads();
    }
  }
};

// sums += weight^T (row - centre) over the warp's tokens and columns column .. of a matrix;
// `centre` starts there, too, and may be null.
// `visit(i, x)` sees token i of the segment and its numbers x[kColumnsEach] before centring.
template <class S, class Visit>
__device__ __forceinline__ void sum_rows(const Segment<Arithmetic<S>>& segment, int count,
                                         const S* head, const Strided& m, int64_t column,
                                         int64_t columns, const Arithmetic<S>* centre,
                                         NodeSums<Arithmetic<S>, false>& sums, Visit visit) {
  using T = Arithmetic<S>;
  using Lanes = NodeLanes<T, false>;
  constexpr int N = Lanes::kColumnsEach;
  T middle[N];
#pragma unroll
  for (int c = 0; c < N; ++c) middle[c] = centre ? centre[Lanes::column(c)] : T(0);
  const WarpTokens<T> mine(count);
#pragma unroll 1
  for (int start = mine.first; start < mine.end; start += kFlush) {
    T part[Lanes::kNodesEach][N] = {};  // fp64 needs no such step
    const int stop = mine.end < start + kFlush ? mine.end : start + kFlush;
#pragma unroll(sizeof(T) == 4 ? 2 : 1)
    for (int i = start; i < stop; ++i) {
      T x[N];
#pragma unroll
      for (int c = 0; c < N; c += kVector<T>)
        read_columns<S, kVector<T>>(head + segment.token[i] * m.row, m, column + Lanes::column(c),
                                    columns, x + c);
      visit(i, x);
#pragma unroll
      for (int a = 0; a < Lanes::kNodesEach; ++a) {
        const T w = segment.weight[Lanes::node(a)][i];
#pragma unroll
        for (int c = 0; c < N; ++c)
          (sizeof(T) == 8 ? reinterpret_cast<T&>(sums.sum[a][c]) : part[a][c]) +=
              w * (x[c] - middle[c]);
      }
    }
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int a = 0; a < Lanes::kNodesEach; ++a)
#pragma unroll
        for (int c = 0; c < N; ++c) sums.sum[a][c] += double(part[a][c]);
    }
  }
}

// The same for 16-bit rows, on tensor cores: nodes x tokens times tokens x columns. A lane reads 16
// bytes of four rows, exactly the numbers that it holds of the right factors.
template <class S>
__device__ __forceinline__ void sum_rows(const Segment<float>& segment, int count, const S* head,
                                         const Strided& m, int64_t column, int64_t columns,
                                         const float* centre, NodeSums<float, true>& sums) {
  using Lanes = NodeLanes<float, true>;
  constexpr int kTokens = 16, kEach = 4, V = 8, kTiles = Lanes::kColumns / 8;
  const int lane = threadIdx.x % 32, group = lane / 4, mine = lane % 4 * kEach;
  float middle[V];
#pragma unroll
  for (int c = 0; c < V; ++c) middle[c] = centre[group * V + c];
  const WarpTokens<float> tokens(count);
#pragma unroll 1
  for (int start = tokens.first; start < tokens.end; start += kFlush) {
    float part[Lanes::kNodesEach][Lanes::kColumnsEach] = {};
#pragma unroll 1
    for (int first = start; first < start + kFlush && first < tokens.end; first += kTokens) {
      float x[kEach][V];
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int i = first + mine + k;
        if (i < tokens.end) {
          read_columns<S, V>(head + segment.token[i] * m.row, m, column + group * V, columns, x[k]);
#pragma unroll
          for (int c = 0; c < V; ++c) x[k][c] -= middle[c];
        } else {
#pragma unroll
          for (int c = 0; c < V; ++c) x[k][c] = 0;
        }
      }
      Halves left[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* w = segment.weight[group + k % 2 * 8] + first + mine + k / 2 * 2;
        left[k] = halves(w[0], w[1]);
      }
#pragma unroll
      for (int c = 0; c < kTiles; ++c) {
        const Halves right[2] = {halves(x[0][c], x[1][c]), halves(x[2][c], x[3][c])};
        multiply_halves(part[0] + 2 * c, part[1] + 2 * c, left, right);
      }
    }
#pragma unroll
    for (int a = 0; a < Lanes::kNodesEach; ++a)
#pragma unroll
      for (int c = 0; c < Lanes::kColumnsEach; ++c) sums.sum[a][c] += double(part[a][c]);
  }
}

// A warp's 32 lanes over tokens and columns: lane = (4 tokens) x (8 columns), on tensor cores
// (2) x (16).
template <class S>
struct TokenLanes {
  using T = Arithmetic<S>;
  static constexpr bool kTensor = kTensorCores<S>;
  static constexpr int kTokensEach = kTensor ? 2 : 4, kColumnsEach = kTensor ? 16 : 8;
  static constexpr int kColumns = NodeLanes<T, false>::kColumns;
  static constexpr int kGroups = kColumns / kColumnsEach;
  static constexpr int kTokens = 32 / kGroups * kTokensEach;  // of a warp at once
  static constexpr int V = kVector<S>;                        // columns that lie side by side
  static __device__ __forceinline__ int token(int t) {
    const int lane = threadIdx.x % 32;
    return kTensor ? lane / 4 + 8 * t : lane / kGroups * kTokensEach + t;
  }
  static __device__ __forceinline__ int group() { return threadIdx.x % kGroups; }
  // Columns c .. c + V of the lane: neighbours read neighbouring 16 bytes.
  static __device__ __forceinline__ int column(int c) { return (c / V * kGroups + group()) * V; }
};

// Columns of the node table of a panel, in shared memory; for tensor cores the numbers of nodes 2 i
// and 2 i + 1 side by side, in rows that 8 lanes times 4 read across the banks.
template <class S>
struct NodeTable {
  using T = Arithmetic<S>;
  using Lanes = TokenLanes<S>;
  static constexpr int N = Lanes::kColumns;
  static constexpr bool kTensor = kTensorCores<S>;
  T number[kTensor ? 1 : kNodes<T>][kTensor ? 1 : N];
  Halves pair[kTensor ? kNodes<T> / 2 : 1][kTensor ? N + 2 : 1];

  // Columns column .. of kNodes rows of a table [., columns], zero past the last.
  __device__ __forceinline__ void load(const T* from, int64_t column, int64_t columns) {
    if constexpr (kTensor) {
      for (int e = threadIdx.x; e < kNodes<T> / 2 * N; e += kThreads) {
        const int64_t at = column + e % N;
        const T* two = from + e / N * 2 * columns + at;
        pair[e / N][e % N] = at < columns ? halves(two[0], two[columns]) : halves(0, 0);
      }
    } else {
      for (int e = threadIdx.x; e < kNodes<T> * N; e += kThreads)
        number[e / N][e % N] =
            column + e % N < columns ? from[e / N * columns + column + e % N] : T(0);
    }
  }

  // row[t][.] = sum_a weight[a][first + t] table[a][.] for the lane's tokens and columns.
  __device__ __forceinline__ void spread(const Segment<T>& segment, int first,
                                         T (*row)[Lanes::kColumnsEach]) const {
#pragma unroll
    for (int t = 0; t < Lanes::kTokensEach; ++t)
#pragma unroll
      for (int c = 0; c < Lanes::kColumnsEach; ++c) row[t][c] = 0;
    if constexpr (kTensor) {
      const int group = threadIdx.x % 32 / 4, two = threadIdx.x % 4;
      Halves left[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int node = 2 * two + k / 2 * 8, i = first + Lanes::token(k % 2);
        left[k] = halves(segment.weight[node][i], segment.weight[node + 1][i]);
      }
#pragma unroll
      for (int c = 0; c < N / 8; ++c) {
        // Column `group` of the product's tile c lies so that a lane's columns are neighbours.
        const int at = (c / 4 * 4 + group / 2) * 8 + c % 4 * 2 + group % 2;
        const Halves right[2] = {pair[two][at], pair[two + 4][at]};
        multiply_halves(row[0] + 2 * c, row[1] + 2 * c, left, right);
      }
    } else {
#pragma unroll 4
      for (int a = 0; a < kNodes<T>; ++a) {
        T w[Lanes::kTokensEach], x[Lanes::kColumnsEach];
#pragma unroll
        for (int t = 0; t < Lanes::kTokensEach; ++t)
          w[t] = segment.weight[a][first + Lanes::token(t)];
#pragma unroll
        for (int c = 0; c < Lanes::kColumnsEach; c += kVector<T>) {
          const auto pack =
              *reinterpret_cast<const Pack<T, kVector<T>>*>(number[a] + Lanes::column(c));
#pragma unroll
          for (int e = 0; e < kVector<T>; ++e) x[c + e] = pack.at[e];
        }
#pragma unroll
        for (int t = 0; t < Lanes::kTokensEach; ++t)
#pragma unroll
          for (int c = 0; c < Lanes::kColumnsEach; ++c) row[t][c] += w[t] * x[c];
      }
    }
  }
};

}  // namespace boltzattn::cuda
