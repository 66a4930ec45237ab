// The stage `evaluate`, at the queries and at the keys. No torch.
#pragma once

#include "cuda/transform/segments.cuh"

namespace boltzattn::cuda {

// out and lse.
template <class S>
__global__ void __launch_bounds__(kThreads) transform_evaluate(const __grid_constant__ Work work) {
  using T = Arithmetic<S>;
  using Lanes = TokenLanes<S>;
  __shared__ __align__(16) Segment<T> segment;
  __shared__ __align__(16) NodeTable<S> table;
  const Call& call = work.g.call;
  const Side& side = work.side[0];
  const Cut<T> cut(work, side, false);
  if (cut.count == 0 || !work.served[cut.head]) return;
  const double reference = reference_key(work.heads[cut.head].layout, cut.panel);
  const Numbers queries(call, false, cut.head);
  weigh(work, side, cut, work.last, segment, [&](int, uint32_t token, double log_z) {
    call.lse[cut.head * call.n_q + token] = queries.at(token) * reference + log_z;
  });
  S* out = head_of<S>(call, call.out, cut.head);
  const T* from = static_cast<const T*>(work.table) +
                  (cut.head * side.panels + cut.panel) * kNodes<T> * call.dv;
  const WarpTokens<T> mine(cut.count);
  for (int64_t column = 0; column < call.dv; column += Lanes::kColumns) {
    table.load(from, column, call.dv);
    __syncthreads();
    for (int first = mine.first; first < mine.end; first += Lanes::kTokens) {
      T row[Lanes::kTokensEach][Lanes::kColumnsEach];
      table.spread(segment, first, row);
#pragma unroll
      for (int t = 0; t < Lanes::kTokensEach; ++t) {
        const int i = first + Lanes::token(t);
        if (i >= mine.end) break;
#pragma unroll
        for (int c = 0; c < Lanes::kColumnsEach; c += Lanes::V)
          write_columns<S, Lanes::V>(row[t] + c, out + segment.token[i] * call.out.row, call.out,
                                     column + Lanes::column(c), call.dv);
      }
    }
    __syncthreads();
  }
}

// dv and ds.
template <class S>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    transform_evaluate_keys(const __grid_constant__ Work work) {
  using T = Arithmetic<S>;
  using Lanes = TokenLanes<S>;
  __shared__ __align__(16) Segment<T> segment;
  __shared__ __align__(16) NodeTable<S> table;
  __shared__ T grad_s[kSegment<T>];
  __shared__ T centre[Lanes::kColumns];
  const Gradient& g = work.g;
  const Call& call = g.call;
  const Side& side = work.side[1];
  const Cut<T> cut(work, side, true);
  if (cut.count == 0 || !work.served[cut.head]) return;
  weigh(work, side, cut, work.slope_last, segment,
        [&](int i, uint32_t, double rest) { grad_s[i] = T(rest); });
  const S* value = head_of<const S>(call, call.value, cut.head);
  S* grad_value = head_of<S>(call, g.grad_value, cut.head);
  const int64_t offset = (cut.head * side.panels + cut.panel) * kNodes<T> * call.dv;
  const WarpTokens<T> mine(cut.count);
  for (int64_t column = 0; column < call.dv; column += Lanes::kColumns) {
    load_centre(work, cut, column, centre);
    for (int slopes = 0; slopes < 2; ++slopes) {
      table.load(static_cast<const T*>(slopes ? work.slope_table : work.value_table) + offset,
                 column, call.dv);
      __syncthreads();
      for (int first = mine.first; first < mine.end; first += Lanes::kTokens) {
        T row[Lanes::kTokensEach][Lanes::kColumnsEach];
        table.spread(segment, first, row);
#pragma unroll
        for (int t = 0; t < Lanes::kTokensEach; ++t) {
          const int i = first + Lanes::token(t);
          const bool here = i < mine.end;
          T dot = 0;
#pragma unroll
          for (int c = 0; c < Lanes::kColumnsEach; c += Lanes::V) {
            const int64_t at = column + Lanes::column(c);
            if (!here) continue;
            if (!slopes) {
              write_columns<S, Lanes::V>(row[t] + c,
                                         grad_value + segment.token[i] * g.grad_value.row,
                                         g.grad_value, at, call.dv);
              continue;
            }
            T x[Lanes::V];
            read_columns<S, Lanes::V>(value + segment.token[i] * call.value.row, call.value, at,
                                      call.dv, x);
#pragma unroll
            for (int k = 0; k < Lanes::V; ++k)
              dot += (x[k] - centre[Lanes::column(c) + k]) * row[t][c + k];
          }
          if (!slopes) continue;
#pragma unroll
          for (int step = Lanes::kGroups / 2; step > 0; step /= 2)
            dot += __shfl_xor_sync(kAllLanes, dot, step);
          if (here && Lanes::group() == 0) grad_s[i] += dot;
        }
      }
      __syncthreads();
    }
  }
  S* grad_key = head_of<S>(call, g.grad_key, cut.head);
  for (int i = threadIdx.x; i < cut.count; i += kThreads)
    grad_key[segment.token[i] * g.grad_key.row] = narrow<S>(grad_s[i]);
}

}  // namespace boltzattn::cuda
