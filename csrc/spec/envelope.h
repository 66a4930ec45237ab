// The mathematics of rank-1 attention with a bias per key: scores, and bounds of interpolation
// errors. docs/lookup.md derives them. No torch.
//
//   logits k(t, s) + c,  k(t, s) = t s  (gauge 0)  or  -(t - s)^2 / 2  (gauge 1, Gaussian)
// Both are linear in t up to a function of t alone, so log Z(t) is convex up to that, whatever the
// biases c are.
#pragma once

#include "spec/tolerances.h"

namespace boltzattn {

BOLTZATTN_HD double score_of(double t, double s, double gauge) {
  return gauge != 0 ? -0.5 * (t - s) * (t - s) : t * s;
}
// k(t, s) - k(t, from), without cancellation.
BOLTZATTN_HD double rise(double t, double s, double from, double gauge) {
  return (s - from) * (t - gauge * 0.5 * (s + from));
}

// Nodes of a panel and the interpolation error that a layout aims at.
struct EnvelopePrecision {
  int nodes;
  double error;
};
BOLTZATTN_HD EnvelopePrecision envelope_precision(DType dtype) {
  return dtype == DType::kFloat64   ? EnvelopePrecision{24, 1e-14}
         : dtype == DType::kFloat32 ? EnvelopePrecision{12, 1e-8}
                                    : EnvelopePrecision{8, 1e-6};
}
// Keys whose logits stay this far below the largest one are left out; together they weigh less than
// the error.
BOLTZATTN_HD double envelope_depth(EnvelopePrecision precision, int64_t keys) {
  return ::log(double(keys) + 1) - ::log(precision.error);
}

// Interpolation multiplies rounding errors by the largest weight on a panel over the smallest;
// panels on which the logarithm of that exceeds this are not made.
constexpr double kMostAmplification = 3;

// Logits of a Gaussian's keys may differ by this, and by their biases, over a key panel: roundings
// of weights follow them. Keys so far apart do not both matter, unless biases say so.
constexpr double kLargestRise = 100;

// Interpolating exp(kappa x) on [-1, 1] in p Chebyshev nodes errs by at most 4 sum_{k >= p} I_k,
// and I_k <= (kappa / 2)^k / k! exp(kappa^2 / 4 (k + 1)); and by at most 4 exp(kappa) for any
// kappa.
struct InterpolationError {
  double nodes, factor, constant;  // factor = 4 / nodes!, constant = log(factor)

  explicit InterpolationError(int count) : nodes(count), factor(4) {
    for (int k = 2; k <= count; ++k) factor /= k;
    constant = ::log(factor);
  }
  // The logarithm of the bound.
  double log_bound(double kappa) const {
    const double crude = ::log(4.0) + kappa, ratio = kappa / (2 * (nodes + 1));
    if (ratio > 0.9) return crude;
    if (!(kappa > 0)) return -INFINITY;
    const double fine =
        constant + nodes * ::log(kappa / 2) + kappa * kappa / (4 * (nodes + 1)) - ::log(1 - ratio);
    return fine < crude ? fine : crude;
  }
  // The largest kappa with this bound.
  double reach(double log_error) const {
    double low = 0, high = 2 * nodes;
    for (int i = 0; i < 40; ++i) {
      const double middle = 0.5 * (low + high);
      (log_bound(middle) <= log_error ? low : high) = middle;
    }
    return low;
  }
};

}  // namespace boltzattn
