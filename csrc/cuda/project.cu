// Launcher of the projection.
#include "cuda/dispatch.cuh"
#include "cuda/launch.h"
#include "cuda/project.cuh"

namespace boltzattn::cuda {

int64_t project_chunks(int64_t n) {
  return ceil_div(n, kProjectTokens);
}

cudaError_t project_forward(const Projected& p, cudaStream_t stream) {
  const cudaError_t error = with_dtype(p.x.dtype, [&](auto zero) {
    return launch(project<decltype(zero)>, p.batch * p.chunks, p, stream);
  });
  return error == cudaSuccess ? launch(project_extents, p.batch * p.outputs, p, stream) : error;
}

}  // namespace boltzattn::cuda
