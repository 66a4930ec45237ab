// Elements of tensors: conversion to the arithmetic type, strided and vectorised access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/problem.h"

namespace boltzattn::cuda {

// Sums are carried in fp32, for fp64 tensors in fp64.
template <class S>
struct ArithmeticOf {
  using type = float;
};
template <>
struct ArithmeticOf<double> {
  using type = double;
};
template <class S>
using Arithmetic = typename ArithmeticOf<S>::type;

__device__ __forceinline__ double widen(double x) {
  return x;
}
__device__ __forceinline__ float widen(float x) {
  return x;
}
__device__ __forceinline__ float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ __forceinline__ float widen(__half x) {
  return __half2float(x);
}

template <class T>
__device__ __forceinline__ bool is_finite(T x) {
  return x - x == 0;
}

template <class S>
__device__ __forceinline__ S narrow(Arithmetic<S> x) {
  return S(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

// N numbers that lie side by side and are read or written at once.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

// The compiler loads a Pack at once, but splits its stores; hence the inline PTX.
template <class T, int N>
__device__ __forceinline__ void store_global(T* to, const Pack<T, N>& pack) {
  constexpr int kWords = int(sizeof(pack)) / 4;
  uint32_t w[kWords];
  memcpy(w, &pack, sizeof(pack));
  const size_t at = __cvta_generic_to_global(to);
  if constexpr (kWords == 4) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(w[0]), "r"(w[1]) : "memory");
  } else {
    static_assert(kWords == 1, "rows are written 4, 8 or 16 bytes at a time");
    asm volatile("st.global.b32 [%0], %1;" ::"l"(at), "r"(w[0]) : "memory");
  }
}

// The offset of head h, the last leading dimension running fastest.
__device__ __forceinline__ int64_t head_offset(const Call& call, const Strided& m, int64_t h) {
  int64_t offset = 0;
  for (int d = call.dims - 1; d > 0; --d) {
    offset += h % call.lead[d] * m.lead[d];
    h /= call.lead[d];
  }
  return call.dims > 0 ? offset + h * m.lead[0] : 0;
}

template <class S>
__device__ __forceinline__ S* head_of(const Call& call, const Strided& m, int64_t h) {
  return static_cast<S*>(m.data) + head_offset(call, m, h);
}

// A number of any floating dtype: masks need not have the dtype of the queries.
__device__ __forceinline__ double number_at(const Strided& m, int64_t offset) {
  switch (m.dtype) {
    case DType::kFloat64:
      return static_cast<const double*>(m.data)[offset];
    case DType::kFloat32:
      return static_cast<const float*>(m.data)[offset];
    case DType::kBFloat16:
      return widen(static_cast<const __nv_bfloat16*>(m.data)[offset]);
    default:
      return widen(static_cast<const __half*>(m.data)[offset]);
  }
}

// to[0 .. N) = columns first .. first + N of a row, zero past `columns`. N fills whole 16 bytes of
// S.
template <class S, int N>
__device__ __forceinline__ void read_columns(const S* row, const Strided& m, int64_t first,
                                             int64_t columns, Arithmetic<S>* to) {
  constexpr int kVector = 16 / int(sizeof(S)) < N ? 16 / int(sizeof(S)) : N;
  if (m.whole_vectors) {
#pragma unroll
    for (int c = 0; c < N; c += kVector) {
      if (first + c < columns) {
        const auto pack = *reinterpret_cast<const Pack<S, kVector>*>(row + first + c);
#pragma unroll
        for (int e = 0; e < kVector; ++e) to[c + e] = widen(pack.at[e]);
      } else {
#pragma unroll
        for (int e = 0; e < kVector; ++e) to[c + e] = 0;
      }
    }
  } else {
#pragma unroll
    for (int c = 0; c < N; ++c)
      to[c] = first + c < columns ? widen(row[(first + c) * m.column]) : Arithmetic<S>(0);
  }
}

// Writes columns first .. first + N of a row, but none past `columns`.
template <class S, int N>
__device__ __forceinline__ void write_columns(const Arithmetic<S>* from, S* row, const Strided& m,
                                              int64_t first, int64_t columns) {
  constexpr int kVector = 16 / int(sizeof(S)) < N ? 16 / int(sizeof(S)) : N;
  if (m.whole_vectors) {
#pragma unroll
    for (int c = 0; c < N; c += kVector) {
      if (first + c >= columns) break;
      Pack<S, kVector> pack;
#pragma unroll
      for (int e = 0; e < kVector; ++e) pack.at[e] = narrow<S>(from[c + e]);
      store_global(row + first + c, pack);
    }
  } else {
#pragma unroll
    for (int c = 0; c < N; ++c)
      if (first + c < columns) row[(first + c) * m.column] = narrow<S>(from[c]);
  }
}

}  // namespace boltzattn::cuda
