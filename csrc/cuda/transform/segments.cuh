// Passes over the tokens: a block takes a segment of a panel. No torch.
#pragma once

#include "cuda/transform/head.cuh"

namespace boltzattn::cuda {

// The segment a block works on; count 0: none.
template <class T>
struct Cut {
  int64_t head, index;
  int panel, count;
  int64_t first;  // in the order of panels, over all heads

  __device__ explicit Cut(const Work& work, const Side& side, bool keys)
      : head(blockIdx.x / side.segments), index(blockIdx.x % side.segments), panel(0), count(0) {
    const HeadLayout& at = work.heads[head];
    if (!at.served) return;
    const uint32_t* starts = side.segment_start + head * (side.panels + 1);
    const uint32_t* tokens = side.panel_start + head * (side.panels + 1);
    int high = keys ? at.layout.key.panels : at.layout.query.panels;
    if (index >= starts[high]) return;
    while (high - panel > 1) {  // starts[panel] <= index < starts[high]
      const int middle = (panel + high) / 2;
      (starts[middle] <= index ? panel : high) = middle;
    }
    const uint32_t begin = tokens[panel] + uint32_t(index - starts[panel]) * kSegment<T>;
    count = int(least(kSegment<T>, tokens[panel + 1] - begin));
    first = head * side.n + begin;
  }
};

// Weights of the Lagrange basis: prod_{b != a} (x - x_b) / (x_a - x_b). Products from both ends
// keep every factor and need no division. In fp64, because nodes rounded to fp32 would not be those
// of the tables. each(i, token, sum_a weight[a] last[a]) sees every token.
// Other threads see the results after a barrier.
template <class T, class Each>
__device__ __forceinline__ void weigh(const Work& work, const Side& side, const Cut<T>& cut,
                                      const double* last, Segment<T>& segment, Each each) {
  constexpr int P = kNodes<T>;
  __shared__ double node[P], factor[P], column[P];
  if (threadIdx.x < P) {
    node[threadIdx.x] = work.basis[2 * cut.head * P + threadIdx.x];
    factor[threadIdx.x] = work.basis[(2 * cut.head + 1) * P + threadIdx.x];
    column[threadIdx.x] = last ? last[(cut.head * side.panels + cut.panel) * P + threadIdx.x] : 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kSegment<T>; i += kThreads) {
    if (i >= cut.count) {
#pragma unroll
      for (int a = 0; a < P; ++a) segment.weight[a][i] = 0;
      segment.token[i] = 0;
      continue;
    }
    const Placed<T> placed = static_cast<const Placed<T>*>(side.order)[cut.first + i];
    const double x = placed.place;
    double product = 1, sum = 0;
    // The products from the left are kept in registers, or in the table itself if it is fp64.
    double waiting[sizeof(T) == 4 ? P : 1];
#pragma unroll(sizeof(T) == 4 ? P : 2)
    for (int a = 0; a < P; ++a) {
      const double left = product * factor[a];
      if constexpr (sizeof(T) == 4) {
        waiting[a] = left;
      } else {
        segment.weight[a][i] = left;
      }
      product *= x - node[a];
    }
    product = 1;
#pragma unroll(sizeof(T) == 4 ? P : 2)
    for (int a = P - 1; a >= 0; --a) {
      double left;
      if constexpr (sizeof(T) == 4) {
        left = waiting[a];
      } else {
        left = segment.weight[a][i];
      }
      const double weight = left * product;
      segment.weight[a][i] = T(weight);
      sum += weight * column[a];
      product *= x - node[a];
    }
    segment.token[i] = uint32_t(placed.token);
    each(i, segment.token[i], sum);
  }
}

// Sums over the tokens of one column of numbers, number(i): to[a] for node a.
template <class T, class Number>
__device__ __forceinline__ void sum_column(const Segment<T>& segment, int count, T* to,
                                           int64_t stride, double* space, Number number) {
  constexpr int P = kNodes<T>, kParts = kThreads / P, kShare = kSegment<T> / kParts;
  const int a = threadIdx.x % P, part = threadIdx.x / P;
  double sum = 0;
#pragma unroll 4
  for (int i = part * kShare; i < part * kShare + kShare && i < count; ++i)
    sum += double(segment.weight[a][i]) * number(i);
  space[threadIdx.x] = sum;
  __syncthreads();
  if (part == 0) {
    for (int other = 1; other < kParts; ++other) sum += space[other * P + a];
    to[a * stride] = T(sum);
  }
}

// A block's partial table.
template <class T>
__device__ __forceinline__ T* partial_of(const Side& side, const Cut<T>& cut, int64_t columns) {
  return static_cast<T*>(side.partial) +
         (cut.head * side.segments + cut.index) * kNodes<T> * (columns + 1);
}

// Writes what a block has summed for a tile of columns into its partial table.
template <class T, int N>
__device__ __forceinline__ void write_partial(const double (*space)[N], int64_t column,
                                              int64_t columns, T* to) {
  for (int e = threadIdx.x; e < kNodes<T> * N; e += kThreads)
    if (column + e % N < columns)
      to[e / N * (columns + 1) + column + e % N] = T(space[e / N][e % N]);
}

// Columns column .. of the centre of a key panel, zero past the last.
template <class T, int N>
__device__ __forceinline__ void load_centre(const Work& work, const Cut<T>& cut, int64_t column,
                                            T (&to)[N]) {
  const int64_t at = column + threadIdx.x, dv = work.g.call.dv;
  if (threadIdx.x >= N) return;
  const int end = end_of_key_panel(work.heads[cut.head].layout, cut.panel);
  to[threadIdx.x] = at < dv ? T(work.centre[(2 * cut.head + end) * dv + at]) : T(0);
}

}  // namespace boltzattn::cuda
