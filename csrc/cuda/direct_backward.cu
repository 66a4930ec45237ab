// Launcher of the direct method, backward. A separate file, to compile in parallel.
#include "cuda/direct_backward.cuh"

#include "cuda/dispatch.cuh"
#include "cuda/launch.h"

namespace boltzattn::cuda {
int64_t row_norms_bytes(const Call& call) {
  return call.heads * call.n_q * 3 * arithmetic_bytes(call.query.dtype);
}

int64_t slope_sums_bytes(const Call& call) {
  return call.slopes.data ? call.heads * call.n_q * int64_t(sizeof(double)) : 0;
}

cudaError_t direct_backward(const Gradient& g, cudaStream_t stream) {
  const Call& call = g.call;
  Sequence<const Gradient> sequence{g, stream};
  return with_dtype(call.query.dtype, [&](auto zero) {
    using S = decltype(zero);
    const int64_t entries = call.heads * ceil_div(call.rank, kRankChunk);
    return with_score(call, [&](auto gaussian) {
      sequence.run(direct_row_norms<S, gaussian>, call.heads * ceil_div(call.n_q, kThreads));
      with_columns<S>(call.dv, [&](auto columns) {
        sequence.run(direct_value_gradient<S, columns, gaussian>,
                     call.heads * ceil_div(call.n_k, kThreads) * ceil_div(call.dv, columns));
        return sequence.error;
      });
      sequence.run(direct_logit_gradient<S, false, gaussian>,
                   entries * ceil_div(call.n_q, kOwners));
      sequence.run(direct_logit_gradient<S, true, gaussian>, entries * ceil_div(call.n_k, kOwners));
      if (g.grad_slopes.data) sequence.run(direct_slope_gradient, call.heads);
      return sequence.error;
    });
  });
}

}  // namespace boltzattn::cuda
