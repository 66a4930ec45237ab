// The stages `extents` and `layout`. No torch.
#pragma once

#include "cuda/transform/head.cuh"

namespace boltzattn::cuda {

constexpr int64_t kExtentChunk = 4096;  // tokens

__device__ __forceinline__ void join(ExtentPart& a, const ExtentPart& b) {
  a.t_min = b.t_min < a.t_min ? b.t_min : a.t_min;
  a.t_max = b.t_max > a.t_max ? b.t_max : a.t_max;
  // Keeps the first of equal keys, so that the order of joining does not matter.
  if (b.s_max > a.s_max || (b.s_max == a.s_max && b.at_max < a.at_max)) a.at_max = b.at_max;
  if (b.s_min < a.s_min || (b.s_min == a.s_min && b.at_min < a.at_min)) a.at_min = b.at_min;
  a.s_max = b.s_max > a.s_max ? b.s_max : a.s_max;
  a.s_min = b.s_min < a.s_min ? b.s_min : a.s_min;
  a.keys += b.keys;
  a.regular &= b.regular;
}
__device__ __forceinline__ ExtentPart nothing() {
  return {INFINITY, -INFINITY, INFINITY, -INFINITY, 0, INT64_MAX, INT64_MAX, 1};
}
// part[0] = all parts joined; valid in the first thread.
__device__ __forceinline__ void join_block(ExtentPart* part) {
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < step) join(part[threadIdx.x], part[threadIdx.x + step]);
  }
}

__global__ void __launch_bounds__(kThreads) transform_extents(const __grid_constant__ Work work) {
  __shared__ ExtentPart part[kThreads];
  const Call& call = work.g.call;
  const int64_t h = blockIdx.x / work.extent_chunks;
  const int64_t first = blockIdx.x % work.extent_chunks * kExtentChunk;
  const Numbers queries(call, false, h), keys(call, true, h);
  const int64_t mask_offset = call.key_mask.data ? head_offset(call, call.key_mask, h) : 0;
  ExtentPart mine = nothing();
  for (int64_t i = first + threadIdx.x; i < least(first + kExtentChunk, call.n_q); i += kThreads) {
    const double t = queries.at(i);
    mine.t_min = t < mine.t_min ? t : mine.t_min;
    mine.t_max = t > mine.t_max ? t : mine.t_max;
    if (!(::fabs(t) < INFINITY)) mine.regular = 0;
  }
  for (int64_t j = first + threadIdx.x; j < least(first + kExtentChunk, call.n_k); j += kThreads) {
    const int state = key_state(call, mask_offset, j);
    if (state < 0) mine.regular = 0;
    if (state != 1) continue;
    const double s = keys.at(j);
    if (!(::fabs(s) < INFINITY)) mine.regular = 0;
    join(mine, {INFINITY, -INFINITY, s, s, 1, j, j, 1});
  }
  part[threadIdx.x] = mine;
  join_block(part);
  if (threadIdx.x == 0) work.parts[blockIdx.x] = part[0];
}

// One block per head: the layout, and the tables that depend on it only.
__global__ void __launch_bounds__(kThreads) transform_layout(const __grid_constant__ Work work) {
  __shared__ ExtentPart part[kThreads];
  __shared__ HeadLayout head;
  const Call& call = work.g.call;
  const int64_t h = blockIdx.x;
  part[threadIdx.x] = nothing();
  for (int64_t c = threadIdx.x; c < work.extent_chunks; c += kThreads)
    join(part[threadIdx.x], work.parts[h * work.extent_chunks + c]);
  join_block(part);
  if (threadIdx.x == 0) {
    const ExtentPart& all = part[0];
    head.range = {all.t_min, all.t_max, all.s_min, all.s_max, all.keys};
    head.end_key[0] = all.at_max;
    head.end_key[1] = all.at_min;
    head.served = 0;
    head.layout = {};
    if (all.regular && all.keys > 0 && largest_product(head.range) <= kLargestProduct) {
      const int nodes = int(work.nodes);
      head.layout = make_layout(head.range, nodes, nodes, work.precision);
      head.served = head.layout.query.panels <= work.side[0].panels &&
                    head.layout.key.panels <= work.side[1].panels;
    }
    work.heads[h] = head;
  }
  __syncthreads();
  if (!head.served) return;
  const Layout& layout = head.layout;
  const int nodes = int(work.nodes);
  for (int a = threadIdx.x; a < layout.query.panels * nodes; a += kThreads)
    work.side[0].node[h * work.side[0].panels * nodes + a] =
        query_node(layout, a / nodes, a % nodes);
  for (int b = threadIdx.x; b < layout.key.panels * nodes; b += kThreads)
    work.side[1].node[h * work.side[1].panels * nodes + b] = key_node(layout, b / nodes, b % nodes);
  if (int(threadIdx.x) < nodes) {
    const int a = threadIdx.x;
    double factor = 1;
    for (int b = 0; b < nodes; ++b)
      if (b != a) factor /= chebyshev_node(nodes, a) - chebyshev_node(nodes, b);
    work.basis[(2 * h) * nodes + a] = chebyshev_node(nodes, a);
    work.basis[(2 * h + 1) * nodes + a] = factor;
  }
  for (int e = threadIdx.x; e < layout.key.panels * 2 * kEllipses; e += kThreads) {
    const Ellipse ellipse(layout.key, e % kEllipses);
    const double sign = e / kEllipses % 2 == 0 ? 1 : -1;
    const double middle = sign * panel_middle(layout.key, e / (2 * kEllipses));
    double most = -1;
    for (int b = 0; b < Ellipse::kBoxes; ++b)
      most = ::fmax(
          most, Ellipse::highest_tanh(::exp(2 * (middle + ellipse.edge(b))), ellipse.cosine(b)));
    work.extremes[h * work.side[1].panels * 2 * kEllipses + e] = sign * layout.radius * most;
  }
  if (threadIdx.x < kEllipses)
    work.log_factor[h * kEllipses + threadIdx.x] =
        Ellipse(layout.key, threadIdx.x).log_factor(layout.key);
  for (int e = threadIdx.x; e < kLastCoefficients * nodes; e += kThreads)
    work.decay[h * kLastCoefficients * nodes + e] =
        decay_weight(layout, e / nodes, e % nodes) * decay_factor(layout);
  const int64_t value = head_offset(call, call.value, h);
  for (int64_t e = threadIdx.x; e < 2 * call.dv; e += kThreads)
    work.centre[2 * h * call.dv + e] =
        number_at(call.value, value + head.end_key[e / call.dv] * call.value.row +
                                  e % call.dv * call.value.column);
}

}  // namespace boltzattn::cuda
