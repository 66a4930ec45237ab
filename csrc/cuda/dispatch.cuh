// Helpers of the launchers: kernels by dtype and width, and launches with error checks.
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

// body(columns of a block, as a constant) for values of dv columns.
template <class S, class Body>
cudaError_t with_columns(int64_t dv, Body body) {
  constexpr int kColumns = kWide<Arithmetic<S>>;
  if constexpr (kColumns > 2 * kNarrow)
    if (dv <= kNarrow) return body(std::integral_constant<int, kNarrow>{});
  return body(std::integral_constant<int, kColumns>{});
}

// body(whether scores are Gaussian, as a constant).
template <class Body>
cudaError_t with_score(const Call& call, Body body) {
  return call.is_gaussian ? body(std::true_type{}) : body(std::false_type{});
}

template <class Argument>
cudaError_t launch(void (*kernel)(Argument), int64_t blocks, const Argument& argument,
                   cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  kernel<<<dim3(unsigned(blocks)), kThreads, 0, stream>>>(argument);
  return cudaGetLastError();
}

// Kernels in their order, all with the same argument; stops at the first that cannot be launched.
template <class Argument>
struct Sequence {
  Argument& argument;
  cudaStream_t stream;
  cudaError_t error = cudaSuccess;

  void run(void (*kernel)(Argument), int64_t blocks) {
    if (error == cudaSuccess) error = launch(kernel, blocks, argument, stream);
  }
};

}  // namespace boltzattn::cuda
