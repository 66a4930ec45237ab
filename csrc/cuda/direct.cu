// Launcher of the direct method, forward.
#include "cuda/direct.cuh"

#include "cuda/dispatch.cuh"
#include "cuda/launch.h"

namespace boltzattn::cuda {

int64_t totals_bytes(const Call& call, bool backward) {
  const int64_t streamed = backward ? call.n_q : call.n_k;
  if (streamed <= kSpan) return 0;
  return call.heads * (backward ? call.n_k : call.n_q) * call.dv *
         arithmetic_bytes(call.query.dtype);
}

cudaError_t direct_forward(const Call& call, cudaStream_t stream) {
  return with_dtype(call.query.dtype, [&](auto zero) {
    using S = decltype(zero);
    const int64_t blocks = call.heads * ceil_div(call.n_q, kThreads);
    return with_columns<S>(call.dv, [&](auto columns) {
      return with_score(call, [&](auto gaussian) {
        return launch(direct_forward<S, columns, gaussian>, blocks * ceil_div(call.dv, columns),
                      call, stream);
      });
    });
  });
}

}  // namespace boltzattn::cuda
