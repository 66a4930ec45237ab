// Launchers: they run kernels on a stream for described tensors. No torch, so that nvcc alone
// compiles them and tests can run exactly the kernels that are shipped.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/problem.h"

namespace boltzattn::cuda {

// Bytes of Call.totals: forward has a sum for every query, backward one for every key.
int64_t totals_bytes(const Call& call, bool backward);
int64_t row_norms_bytes(const Call& call);
int64_t slope_sums_bytes(const Call& call);

cudaError_t direct_forward(const Call& call, cudaStream_t stream);
cudaError_t direct_backward(const Gradient& g, cudaStream_t stream);

// The transform's workspace consists of pieces, whose sizes depend on the sizes of the call only.
// The first piece is a result, the report [heads, 7] in fp64, as TransformReport in cpu/isa.h.
constexpr int kMostPieces = 64;
int transform_pieces(const Call& call, bool backward, int64_t* bytes);  // returns their number
cudaError_t transform_forward(const Call& call, void* const* pieces, cudaStream_t stream);
cudaError_t transform_backward(const Gradient& g, void* const* pieces, cudaStream_t stream);

int64_t project_chunks(int64_t n);
cudaError_t project_forward(const Projected& p, cudaStream_t stream);

}  // namespace boltzattn::cuda
