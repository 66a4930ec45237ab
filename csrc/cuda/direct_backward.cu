// Launcher of the direct method, backward. A file of its own: half the time of the compiler.
#include "cuda/direct_backward.cuh"

#include "cuda/dispatch.cuh"
#include "cuda/launch.h"

namespace boltzattn::cuda {
namespace {

template <class S>
cudaError_t value_gradient(const Gradient& g, cudaStream_t stream) {
  constexpr int kColumns = kWide<Arithmetic<S>>;
  const int64_t blocks = g.call.heads * ceil_div(g.call.n_k, kThreads);
  if constexpr (kColumns > 2 * kNarrow)
    if (g.call.dv <= kNarrow) return launch(direct_value_gradient<S, kNarrow>, blocks, g, stream);
  return launch(direct_value_gradient<S, kColumns>, blocks * ceil_div(g.call.dv, kColumns), g,
                stream);
}

}  // namespace

int64_t row_norms_bytes(const Call& call) {
  return call.heads * call.n_q * 3 * arithmetic_bytes(call.query.dtype);
}

cudaError_t direct_backward(const Gradient& g, cudaStream_t stream) {
  const Call& call = g.call;
  return with_dtype(call.query.dtype, [&](auto zero) {
    using S = decltype(zero);
    const int64_t entries = call.heads * ceil_div(call.rank, kRankChunk);
    cudaError_t error =
        launch(direct_row_norms<S>, call.heads * ceil_div(call.n_q, kThreads), g, stream);
    if (error != cudaSuccess) return error;
    error = value_gradient<S>(g, stream);
    if (error != cudaSuccess) return error;
    error =
        launch(direct_logit_gradient<S, false>, entries * ceil_div(call.n_q, kOwners), g, stream);
    if (error != cudaSuccess) return error;
    return launch(direct_logit_gradient<S, true>, entries * ceil_div(call.n_k, kOwners), g, stream);
  });
}

}  // namespace boltzattn::cuda
