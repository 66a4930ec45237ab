// What launchers share: kernels chosen by dtype, and a launch that is checked.
#pragma once

#include "cuda/direct.cuh"

namespace boltzattn::cuda {

inline int64_t element_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

inline int64_t arithmetic_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : 4;
}

// body(S{}) for the storage type S of this dtype.
template <class Body>
cudaError_t with_dtype(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat64:
      return body(double{});
    case DType::kFloat32:
      return body(float{});
    case DType::kBFloat16:
      return body(__nv_bfloat16{});
    case DType::kFloat16:
      return body(__half{});
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Argument>
cudaError_t launch(void (*kernel)(Argument), int64_t blocks, const Argument& argument,
                   cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  kernel<<<dim3(unsigned(blocks)), kThreads, 0, stream>>>(argument);
  return cudaGetLastError();
}

}  // namespace boltzattn::cuda
