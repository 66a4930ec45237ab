// Types that host and device share. No torch.
#pragma once

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define BOLTZATTN_HD __host__ __device__ __forceinline__
#else
#define BOLTZATTN_HD inline __attribute__((always_inline))
#endif

namespace boltzattn {

constexpr int kMostAxes = 4;  // the largest rank that has a transform

enum class DType { kFloat64, kFloat32, kBFloat16, kFloat16, kBool };

// The range of some numbers: the smallest and the largest, which tokens they belong to, how many
// were counted, and whether all were finite. Doubles throughout, so that a tensor can hold it.
struct Extent {
  double low = INFINITY, high = -INFINITY, at_low = 0, at_high = 0, count = 0, regular = 1;
};

// Keeps the earlier token if numbers are equal.
BOLTZATTN_HD void join(Extent& extent, const Extent& later) {
  if (later.low < extent.low) extent.at_low = later.at_low, extent.low = later.low;
  if (later.high > extent.high) extent.at_high = later.at_high, extent.high = later.high;
  extent.count += later.count;
  if (later.regular == 0) extent.regular = 0;
}

}  // namespace boltzattn
