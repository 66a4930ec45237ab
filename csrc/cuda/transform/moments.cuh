// The stage `moments`. No torch.
#pragma once

#include "cuda/transform/segments.cuh"

namespace boltzattn::cuda {

// Moments of the keys. At low temperature the largest key (for t > 0) or the smallest takes all the
// weight, and what gradients are made of, v_j - F, is a small difference. So values are measured
// from the value of the end key on their half of the key axis.
template <class S>
__global__ void __launch_bounds__(kThreads) transform_moments(const __grid_constant__ Work work) {
  using T = Arithmetic<S>;
  constexpr int N = NodeLanes<T, kTensorCores<S>>::kColumns;
  __shared__ __align__(16) Segment<T> segment;
  __shared__ double space[kNodes<T>][N];
  __shared__ T centre[N];
  const Call& call = work.g.call;
  const Side& side = work.side[1];
  const Cut<T> cut(work, side, true);
  if (cut.count == 0) return;
  weigh(work, side, cut, nullptr, segment, [](int, uint32_t, double) {});
  const S* value = head_of<const S>(call, call.value, cut.head);
  T* to = partial_of(side, cut, call.dv);
  __syncthreads();
  sum_column(segment, cut.count, to + call.dv, call.dv + 1, space[0], [](int) { return 1.0; });
  for (int64_t column = 0; column < call.dv; column += N) {
    load_centre(work, cut, column, centre);
    __syncthreads();  // and all threads have read `space`
    NodeSums<T, kTensorCores<S>> sums;
    sums.clear();
    if constexpr (kTensorCores<S>) {
      sum_rows(segment, cut.count, value, call.value, column, call.dv, centre, sums);
    } else {
      sum_rows(segment, cut.count, value, call.value, column, call.dv, centre, sums,
               [](int, const T*) {});
    }
    sums.join(space);
    write_partial<T>(space, column, call.dv, to);
  }
}

// Adds up the segments of a panel, in order.
template <class T>
__global__ void __launch_bounds__(kThreads) transform_join(const __grid_constant__ Work work) {
  const Side& side = work.side[work.keys];
  const int64_t entries = work.nodes * (work.g.call.dv + 1), tiles = ceil_div(entries, kThreads);
  const int64_t e = blockIdx.x % tiles * kThreads + threadIdx.x;
  const int64_t panel = blockIdx.x / tiles % side.panels, h = blockIdx.x / tiles / side.panels;
  const HeadLayout& head = work.heads[h];
  if (!head.served || e >= entries) return;
  if (panel >= (work.keys ? head.layout.key.panels : head.layout.query.panels)) return;
  const uint32_t* starts = side.segment_start + h * (side.panels + 1) + panel;
  double sum = 0;
#pragma unroll 8
  for (uint32_t s = starts[0]; s < starts[1]; ++s)
    sum += static_cast<const T*>(side.partial)[(h * side.segments + s) * entries + e];
  side.sums[(h * side.panels + panel) * entries + e] = sum;
}

}  // namespace boltzattn::cuda
