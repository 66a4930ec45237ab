// Launchers of the direct method.
#include "cuda/dispatch.cuh"
#include "cuda/launch.h"

namespace boltzattn {
namespace cuda {
namespace {

int64_t arithmetic_bytes(const Call& call) {
  return call.query.dtype == DType::kFloat64 ? 8 : 4;
}

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

int64_t totals_bytes(const Call& call, bool backward) {
  const int64_t streamed = backward ? call.n_q : call.n_k;
  if (streamed <= kSpan) return 0;
  return call.heads * (backward ? call.n_k : call.n_q) * call.dv * arithmetic_bytes(call);
}

int64_t row_norms_bytes(const Call& call) {
  return call.heads * call.n_q * 3 * arithmetic_bytes(call);
}

cudaError_t direct_forward(const Call& call, cudaStream_t stream) {
  return with_dtype(call.query.dtype, [&](auto zero) {
    using S = decltype(zero);
    constexpr int kColumns = kWide<Arithmetic<S>>;
    const int64_t blocks = call.heads * ceil_div(call.n_q, kThreads);
    if constexpr (kColumns > 2 * kNarrow)
      if (call.dv <= kNarrow) return launch(direct_forward<S, kNarrow>, blocks, call, stream);
    return launch(direct_forward<S, kColumns>, blocks * ceil_div(call.dv, kColumns), call, stream);
  });
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

}  // namespace cuda
}  // namespace boltzattn
