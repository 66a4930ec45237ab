// All tolerances of the transform by dtype: the target precision of interpolation, the rounding
// that the certificate adds, the largest certificate, and the limits beyond which `direct` takes a
// head. Host and device; no torch. python/boltzattn/transform/tolerances.py is the same table in
// Python, and a test compares the two.
#pragma once

#include "spec/types.h"

namespace boltzattn {

constexpr double kLargestProduct = 3e7;  // B beyond which fp64 itself loses the logits
constexpr double kLargestSum = 1e300;    // of values over the keys: sums must not overflow
constexpr double kNegligible = -80;      // exponent below which a panel of key nodes adds nothing

// Nodes on a panel.
constexpr int kLeastNodes = 8;
constexpr int kMostNodes = 32;
constexpr int kNodeStep = 4;

constexpr int kLevels = 3;  // precisions that are tried before a head goes to `direct`

// The strip in which F is analytic is computed for the worst keys, and most keys are far from it.
// So panels of the query axis are first made this many times wider, and the error bound decides
// whether that was acceptable.
constexpr double kHope = 3;

// The wider panels are kept if the query-side error bound is at most this share of the rounding.
// The limit is lower for gradients, which interpolate slopes, too.
constexpr double kHopeShare = 1.0 / 8, kHopeShareSlopes = 1.0 / 64;

BOLTZATTN_HD constexpr double by_dtype(DType dtype, double float64, double float32, double bfloat16,
                                       double float16) {
  return dtype == DType::kFloat64    ? float64
         : dtype == DType::kFloat32  ? float32
         : dtype == DType::kBFloat16 ? bfloat16
                                     : float16;
}

// The largest certificate of a head that the transform serves.
BOLTZATTN_HD double tolerance_of(DType dtype) {
  return by_dtype(dtype, 1e-10, 5e-6, 4.0 / 256, 4.0 / 2048);
}

// Rounding error of the passes over tokens and, in fp64, of logits of size B = `product`.
constexpr double kRoundingOfProduct = 4e-16;
BOLTZATTN_HD double rounding_of(DType dtype, double product) {
  return by_dtype(dtype, 8e-15 + kRoundingOfProduct * product, 3e-6, 1.0 / 256, 1.0 / 2048);
}

// Target interpolation error: first below the rounding of the arithmetic type, then tighter. Half
// precision needs no more than its own rounding.
BOLTZATTN_HD double precision_of(DType dtype, int level) {
  const double first = by_dtype(dtype, 1e-17, 1e-8, 1e-5, 1e-5);
  return level == 0 ? first : level == 1 ? first * 1e-3 : first * 1e-6;
}
// Backend "cuda" has one level, well below the rounding of the passes over tokens, and one number
// of nodes.
BOLTZATTN_HD double cuda_precision_of(DType dtype) {
  return by_dtype(dtype, 1e-17, 1e-11, 1e-8, 1e-8);
}
BOLTZATTN_HD constexpr int cuda_nodes(DType dtype) {
  return dtype == DType::kFloat64 ? 32 : 16;
}

// The rounding error of a weight is multiplied by the largest kernel value on its panel, so panels
// must not be wide in single precision.
BOLTZATTN_HD int most_key_nodes(DType dtype) {
  return dtype == DType::kFloat64 ? kMostNodes : 12;
}

}  // namespace boltzattn
