// The wide side of the transform: sums of tokens' rows onto the nodes of a panel, and the other way
// round. No torch.
//
// A block works on a segment: some tokens of one panel of one head. Each has kNodes weights, in
// shared memory; its row of numbers is read where it lies. Rows are summed in the arithmetic type
// T for a few tokens, then in fp64.
#pragma once

#include "cuda/direct.cuh"

namespace boltzattn {
namespace cuda {

template <class T>
constexpr int kNodes = sizeof(T) == 4 ? 16 : 32;  // on a panel, of either axis
template <class T>
constexpr int kSegment = sizeof(T) == 4 ? 512 : 128;  // tokens
constexpr int kWarps = kThreads / 32;
constexpr int kFlush = 32;  // tokens summed in T before they go to fp64: equal ones round in step

template <class T>
struct Segment {
  T weight[kNodes<T>][kSegment<T> + kVector<T>];  // padded: a column is read across the banks
  uint32_t token[kSegment<T>];
};

// A warp's 32 lanes over nodes and columns: lane = (4 nodes) x (8 columns).
template <class T>
struct NodeLanes {
  static constexpr int kNodesEach = 4, kColumnsEach = 8;
  static constexpr int kGroups = 32 / (kNodes<T> / kNodesEach);  // of columns
  static constexpr int kColumns = kGroups * kColumnsEach;        // at once: 64, in fp64 32
  static __device__ __forceinline__ int node() { return threadIdx.x % 32 / kGroups * kNodesEach; }
  // Columns c .. c + kVector of the lane: neighbours read neighbouring 16 bytes.
  static __device__ __forceinline__ int column(int c) {
    return (c / kVector<T> * kGroups + threadIdx.x % kGroups) * kVector<T> + c % kVector<T>;
  }
};

// The tokens of a segment that a warp sums: the warps take turns of equal length.
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
template <class T>
struct NodeSums {
  using Lanes = NodeLanes<T>;
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
            double* to = space[Lanes::node() + a] + Lanes::column(c);
            *to = warp == 0 ? sum[a][c] : *to + sum[a][c];
          }
        }
      }
      __syncthreads();
    }
  }
};

// sums += weight^T (row - centre) over the warp's tokens and columns column .. of a matrix.
// `visit(i, x)` sees token i of the segment and its numbers x[kColumnsEach] before centring.
template <class S, class Visit>
__device__ __forceinline__ void sum_rows(const Segment<Arithmetic<S>>& segment, int count,
                                         const S* head, const Strided& m, int64_t column,
                                         int64_t columns, const double* centre,
                                         NodeSums<Arithmetic<S>>& sums, Visit visit) {
  using T = Arithmetic<S>;
  using Lanes = NodeLanes<T>;
  constexpr int N = Lanes::kColumnsEach;
  T middle[N];
#pragma unroll
  for (int c = 0; c < N; ++c) {
    const int64_t at = column + Lanes::column(c);
    middle[c] = centre && at < columns ? T(centre[at]) : T(0);
  }
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
        const T w = segment.weight[Lanes::node() + a][i];
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

// A warp's 32 lanes over tokens and columns: lane = (4 tokens) x (8 columns).
template <class T>
struct TokenLanes {
  static constexpr int kTokensEach = 4, kColumnsEach = 8;
  static constexpr int kGroups = NodeLanes<T>::kGroups;
  static constexpr int kColumns = kGroups * kColumnsEach;
  static constexpr int kTokens = 32 / kGroups * kTokensEach;  // of a warp at once
  static __device__ __forceinline__ int token() { return threadIdx.x % 32 / kGroups * kTokensEach; }
  static __device__ __forceinline__ int group() { return threadIdx.x % kGroups; }
  // Columns c .. c + kVector of the lane: neighbours read neighbouring 16 bytes.
  static __device__ __forceinline__ int column(int c) {
    return (c / kVector<T> * kGroups + group()) * kVector<T>;
  }
};

// row[t][.] = sum_a weight[a][first + t] table[a][.] for the lane's tokens and columns.
template <class T>
__device__ __forceinline__ void spread(const Segment<T>& segment, int first,
                                       const T (*table)[TokenLanes<T>::kColumns],
                                       T (*row)[TokenLanes<T>::kColumnsEach]) {
  using Lanes = TokenLanes<T>;
#pragma unroll
  for (int t = 0; t < Lanes::kTokensEach; ++t)
#pragma unroll
    for (int c = 0; c < Lanes::kColumnsEach; ++c) row[t][c] = 0;
#pragma unroll 4
  for (int a = 0; a < kNodes<T>; ++a) {
    T w[Lanes::kTokensEach], x[Lanes::kColumnsEach];
#pragma unroll
    for (int t = 0; t < Lanes::kTokensEach; ++t) w[t] = segment.weight[a][first + t];
#pragma unroll
    for (int c = 0; c < Lanes::kColumnsEach; c += kVector<T>) {
      const auto pack = *reinterpret_cast<const Pack<T, kVector<T>>*>(table[a] + Lanes::column(c));
#pragma unroll
      for (int e = 0; e < kVector<T>; ++e) x[c + e] = pack.at[e];
    }
#pragma unroll
    for (int t = 0; t < Lanes::kTokensEach; ++t)
#pragma unroll
      for (int c = 0; c < Lanes::kColumnsEach; ++c) row[t][c] += w[t] * x[c];
  }
}

// Columns column .. of kNodes rows of a table [., columns], zero past the last.
template <class T>
__device__ __forceinline__ void load_table(const T* from, int64_t column, int64_t columns,
                                           T (*to)[TokenLanes<T>::kColumns]) {
  constexpr int N = TokenLanes<T>::kColumns;
  for (int e = threadIdx.x; e < kNodes<T> * N; e += kThreads)
    to[e / N][e % N] = column + e % N < columns ? from[e / N * columns + column + e % N] : T(0);
}

}  // namespace cuda
}  // namespace boltzattn
