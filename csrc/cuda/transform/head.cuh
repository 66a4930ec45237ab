// What the stages of the transform share. docs/transform.md derives them, and csrc/cpu/transform
// has the same stages. No torch.
//
// Nothing waits for the host: layouts are made on the device, memory is allocated for the largest
// possible layout, and a head that the transform cannot serve is flagged for `direct`.
// Tokens are sorted by panel, stably and without atomics, so results are bitwise reproducible.
#pragma once

#include "cuda/transform/rows.cuh"
#include "cuda/transform/work.h"

namespace boltzattn::cuda {

constexpr unsigned kAllLanes = 0xffffffff;

// 0: measured from the largest key, 1: from the smallest.
__device__ __forceinline__ int end_of_query_panel(const Layout& layout, int panel) {
  return reference_key(layout, panel) == layout.s_max ? 0 : 1;
}
__device__ __forceinline__ int end_of_key_panel(const Layout& layout, int panel) {
  return layout.key.origin + layout.key.half * (2 * panel + 1) >= 0 ? 0 : 1;
}

// NaN if one of them is NaN.
__device__ __forceinline__ double largest_or_nan(double a, double b) {
  return a != a || a > b ? a : b;
}

// Queries as t, keys as s, of any dtype.
struct Numbers {
  const Strided& m;
  int64_t offset;
  double scale;
  __device__ Numbers(const Call& call, bool keys, int64_t h)
      : m(keys ? call.key : call.query),
        offset(head_offset(call, keys ? call.key : call.query, h)),
        scale(keys ? 1 : call.scale) {}
  __device__ __forceinline__ double at(int64_t i) const {
    return number_at(m, offset + i * m.row) * scale;
  }
};

// 0: masked, 1: kept, -1: the mask is a bias.
__device__ __forceinline__ int key_state(const Call& call, int64_t mask_offset, int64_t j) {
  const Strided& m = call.key_mask;
  if (!m.data) return 1;
  const int64_t at = mask_offset + j * m.column;
  if (m.dtype == DType::kBool) return static_cast<const uint8_t*>(m.data)[at] ? 0 : 1;
  const double bias = number_at(m, at);
  return bias == -INFINITY ? 0 : bias == 0 ? 1 : -1;
}

}  // namespace boltzattn::cuda
