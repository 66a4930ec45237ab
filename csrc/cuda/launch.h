// Launchers: from a description of tensors to kernels on a stream. No torch, so that nvcc alone
// compiles them and tests can look at exactly the kernels that are shipped.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/problem.h"

namespace boltzattn {
namespace cuda {

// Bytes of Call.totals: forward sums over keys for every query, backward the other way round.
int64_t totals_bytes(const Call& call, bool backward);
int64_t row_norms_bytes(const Call& call);

cudaError_t direct_forward(const Call& call, cudaStream_t stream);
cudaError_t direct_backward(const Gradient& g, cudaStream_t stream);

}  // namespace cuda
}  // namespace boltzattn
