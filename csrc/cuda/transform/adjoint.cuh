// The stages `query_moments` and `adjoint`. No torch.
#pragma once

#include "cuda/transform/core.cuh"
#include "cuda/transform/segments.cuh"

namespace boltzattn::cuda {

// dF at the query nodes (column dv: the gradient of lse), and the gradient of the queries:
// dt_i = dO_i . F'(t_i) + dlse_i E[s].
template <class S>
__global__ void __launch_bounds__(kThreads)
    transform_query_moments(const __grid_constant__ Work work) {
  using T = Arithmetic<S>;
  using Lanes = NodeLanes<T, false>;
  constexpr int N = Lanes::kColumns;
  __shared__ __align__(16) Segment<T> segment;
  __shared__ double space[kNodes<T>][N];
  __shared__ T grad_lse[kSegment<T>];
  __shared__ T grad_t[kSegment<T>];
  const Gradient& g = work.g;
  const Call& call = g.call;
  const Side& side = work.side[0];
  const Cut<T> cut(work, side, false);
  if (cut.count == 0 || !work.served[cut.head]) return;
  const double reference = reference_key(work.heads[cut.head].layout, cut.panel);
  const double* lse_grads =
      g.grad_lse.data ? head_of<const double>(call, g.grad_lse, cut.head) : nullptr;
  weigh(work, side, cut, work.last, segment, [&](int i, uint32_t token, double mean) {
    const double dlse = lse_grads ? lse_grads[token * g.grad_lse.row] : 0;
    grad_lse[i] = T(dlse);
    grad_t[i] = T(dlse * (reference + mean));
  });
  const S* grad_out = head_of<const S>(call, g.grad_out, cut.head);
  const T* slopes = static_cast<const T*>(work.table) +
                    (cut.head * side.panels + cut.panel) * kNodes<T> * call.dv;
  T* to = partial_of(side, cut, call.dv);
  __syncthreads();
  for (int64_t column = 0; column < call.dv; column += N) {
    T slope[Lanes::kNodesEach][Lanes::kColumnsEach];
#pragma unroll
    for (int a = 0; a < Lanes::kNodesEach; ++a) {
#pragma unroll
      for (int c = 0; c < Lanes::kColumnsEach; ++c) {
        const int64_t at = column + Lanes::column(c);
        slope[a][c] = at < call.dv ? slopes[Lanes::node(a) * call.dv + at] : T(0);
      }
    }
    NodeSums<T, false> sums;
    sums.clear();
    sum_rows(segment, cut.count, grad_out, g.grad_out, column, call.dv, nullptr, sums,
             [&](int i, const T* x) {
               T dot = 0;
#pragma unroll
               for (int a = 0; a < Lanes::kNodesEach; ++a) {
                 T part = 0;
#pragma unroll
                 for (int c = 0; c < Lanes::kColumnsEach; ++c) part += slope[a][c] * x[c];
                 dot += segment.weight[Lanes::node(a)][i] * part;
               }
#pragma unroll
               for (int step = 16; step > 0; step /= 2)
                 dot += __shfl_xor_sync(kAllLanes, dot, step);
               if (threadIdx.x % 32 == 0) grad_t[i] += dot;
             });
    sums.join(space);
    write_partial<T>(space, column, call.dv, to);
    __syncthreads();
  }
  sum_column(segment, cut.count, to + call.dv, call.dv + 1, space[0],
             [&](int i) { return double(grad_lse[i]); });
  S* grad_query = head_of<S>(call, g.grad_query, cut.head);
  for (int i = threadIdx.x; i < cut.count; i += kThreads)
    grad_query[segment.token[i] * g.grad_query.row] = narrow<S>(grad_t[i] * T(call.scale));
}

// pull_a = dlse_a + dF_a . (centre - F_a) for the centre of either end. A warp takes a node.
__global__ void __launch_bounds__(kThreads) transform_pull(const __grid_constant__ Work work) {
  const Call& call = work.g.call;
  const int64_t nodes = work.side[0].panels * work.nodes;
  const int64_t at = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t h = at / nodes, a = at % nodes;
  if (h >= call.heads || !work.served[h]) return;
  const Layout& layout = work.heads[h].layout;
  const int panel = int(a / work.nodes);
  if (panel >= layout.query.panels) return;
  const double* from = work.centre + (2 * h + end_of_query_panel(layout, panel)) * call.dv;
  const double* gradient = work.side[0].sums + at * (call.dv + 1);
  for (int end = 0; end < 2; ++end) {
    const double* own = work.centre + (2 * h + end) * call.dv;
    double sum = 0;
    for (int64_t c = threadIdx.x % 32; c < call.dv; c += 32)
      sum += gradient[c] * ((own[c] - from[c]) - work.node_out[at * call.dv + c]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (threadIdx.x % 32 == 0) work.pull[(2 * h + end) * nodes + a] = sum + gradient[call.dv];
  }
}

// The transpose of the core: tables over the key nodes for dv and for ds (which is multiplied by
// v - centre; `slope_last` is added):
// ds_j = sum_a t_a E_aj / Z_a (dF_a . (v_j - F_a) + dlse_a).
template <class T>
__global__ void __launch_bounds__(kThreads) transform_adjoint(const __grid_constant__ Work work) {
  using Lanes = CoreLanes<T>;
  constexpr int P = Lanes::P, N = Lanes::kColumns;
  __shared__ double e[P][P + 1];
  __shared__ double gradient[P][N];
  const Call& call = work.g.call;
  const int64_t tiles = ceil_div(call.dv, N), tile = blockIdx.x % tiles;
  const int64_t panel = blockIdx.x / tiles % work.side[1].panels;
  const int64_t h = blockIdx.x / tiles / work.side[1].panels;
  const HeadLayout& head = work.heads[h];
  if (!work.served[h] || panel >= head.layout.key.panels) return;
  const Layout& layout = head.layout;
  const int own = end_of_key_panel(layout, int(panel)), b = Lanes::node();
  const int64_t key = (h * work.side[1].panels + panel) * P + b, column = tile * N;
  const double* s = work.side[1].node + key - b;
  const bool felt = head.range.t_min < 0 || head.range.t_max > 0;  // otherwise every query is 0
  double value[Lanes::kEach] = {}, slope[Lanes::kEach] = {}, rest = 0;
  for (int k = 0; k < layout.query.panels; ++k) {
    const int64_t a0 = (h * work.side[0].panels + k) * P;
    const double* t = work.side[0].node + a0;
    const double* from = work.side[0].sums + a0 * (call.dv + 1);
    const double* pull = work.pull + (2 * h + own) * work.side[0].panels * P + int64_t(k) * P;
    kernel_tile<P>(t, s, reference_key(layout, k) - layout.middle, e);
    for (int at = threadIdx.x; at < P * N; at += kThreads)
      gradient[at / N][at % N] =
          column + at % N < call.dv
              ? from[at / N * (call.dv + 1) + column + at % N] * work.inverse_z[a0 + at / N]
              : 0;
    __syncthreads();
#pragma unroll 2
    for (int a = 0; a < P; ++a) {
      const double x = e[a][b], y = x * t[a];
      rest += y * work.inverse_z[a0 + a] * pull[a];
#pragma unroll
      for (int c = 0; c < Lanes::kEach; ++c) {
        value[c] += x * gradient[a][Lanes::column(c)];
        slope[c] += y * gradient[a][Lanes::column(c)];
      }
    }
    __syncthreads();
  }
  T* values = static_cast<T*>(work.value_table) + key * call.dv;
  T* slopes = static_cast<T*>(work.slope_table) + key * call.dv;
#pragma unroll
  for (int c = 0; c < Lanes::kEach; ++c) {
    const int64_t at = column + Lanes::column(c);
    if (at >= call.dv) continue;
    values[at] = T(value[c]);
    slopes[at] = T(felt ? slope[c] : 0);
  }
  if (tile == 0 && threadIdx.x % Lanes::kGroups == 0) work.slope_last[key] = felt ? rest : 0;
}

}  // namespace boltzattn::cuda
