// The running softmax of a row: its largest logit and the sum of its weights.
// Binary: logits are in units of ln 2 (queries were multiplied by log2(e) beforehand), so weights
// are powers of 2 and the multiplication is cheap, but it rounds logits that would be exact. `lse`
// is in natural units again. Host and device; no torch.
#pragma once

#include "spec/types.h"

namespace boltzattn {

constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

template <class T, bool kBinary = true>
struct OnlineSoftmax {
  static constexpr T kLowest =
      sizeof(T) == 8 ? T(-1.7976931348623157e308) : T(-3.4028234663852886e38);

  T max = -INFINITY;
  double sum = 0;  // fp32 is too short for long rows

  // Subtracted from logits. It is 0 for a row without a finite logit, so that 2^(-inf - reference)
  // is 0 and not 2^(-inf + inf).
  BOLTZATTN_HD T reference() const { return max == -INFINITY ? T(0) : max; }

  // Raises the maximum to `top`; returns the factor that rescales everything summed so far.
  BOLTZATTN_HD T raise(T top) {
    if (!(top > max)) return T(1);
    const T factor = sum == 0 ? T(0) : power_of_2((max - top) * T(kBinary ? 1 : kLog2e));
    max = top;
    sum *= double(factor);
    return factor;
  }

  BOLTZATTN_HD T normaliser() const { return sum == 0 ? T(0) : T(1 / sum); }

  // In fp64: fp32 cannot resolve the logarithm of a sum next to logits of 1e5.
  BOLTZATTN_HD double lse(T lowest = kLowest) const {
    if (sum == 0) return -INFINITY;
    // A row that contains only the lowest number, as masks do, was clamped to stay finite.
    return (max <= kLowest ? double(lowest) : double(max) * (kBinary ? kLn2 : 1)) + ::log(sum);
  }

  BOLTZATTN_HD static T power_of_2(T x) {
    return sizeof(T) == 4 ? T(::exp2f(float(x))) : T(::exp2(double(x)));
  }
};

}  // namespace boltzattn
