// Every tolerance of the transform, by dtype: what interpolation aims at, what the certificate adds
// for rounding and allows in all, and the limits beyond which a head goes to `direct`. Host and
// device; no torch. python/boltzattn/transform/tolerances.py is the same table in Python, and a
// test holds the two equal.
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

// The strip in which F is analytic is that of the worst keys, and most keys are far from it: panels
// of the query axis are first made this many times wider, and the bound of the error says whether
// that was too bold.
constexpr double kHope = 3;

// Bound of the query-side error, as a share of the rounding, up to which wider panels are kept.
// Slopes are interpolated, too, where gradients are asked for, so less is allowed.
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

// Rounding of the passes over tokens and, in fp64, of logits of size B = `product`.
constexpr double kRoundingOfProduct = 4e-16;
BOLTZATTN_HD double rounding_of(DType dtype, double product) {
  return by_dtype(dtype, 8e-15 + kRoundingOfProduct * product, 3e-6, 1.0 / 256, 1.0 / 2048);
}

// Interpolation error aimed at: below the rounding of the arithmetic at first, then tighter. Half
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

// The rounding of a weight counts by the largest kernel value on its panel: in single precision
// panels must not be wide.
BOLTZATTN_HD int most_key_nodes(DType dtype) {
  return dtype == DType::kFloat64 ? kMostNodes : 12;
}

}  // namespace boltzattn
