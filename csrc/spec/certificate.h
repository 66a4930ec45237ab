// The certificate of a transform: bounds of both interpolation errors, computed from the layout
// and the data of a head. docs/transform.md derives them. Host and device; no torch.
#pragma once

#include "spec/layout.h"

namespace boltzattn {

// The error of interpolating exp(t s(w)) on a key panel is at most 4 M rho^(1-q) / (rho - 1) for
// every rho, M being its largest modulus on the Bernstein ellipse of rho. Ellipses 0 .. kEllipses
// reach up to the height of the strip and are the same for all panels.
constexpr int kEllipses = 6;

struct Ellipse {
  double height, reach;  // half axes

  BOLTZATTN_HD Ellipse(const Axis& axis, int index)
      : height(kKeyStrip * (index + 1) / kEllipses),
        reach(::sqrt(axis.half * axis.half + height * height)) {}

  BOLTZATTN_HD double log_factor(const Axis& axis) const {
    const double rho = bernstein_rho(height, axis.half);
    return ::log(4 / (rho - 1)) + (1 - axis.nodes) * ::log(rho);
  }

  // Re tanh(a + ib) = sinh 2a / (cosh 2a + cos 2b) grows with a, and with b where a > 0. A quarter
  // of the ellipse is covered by boxes, in each of which it has its largest value at a corner.
  static constexpr int kBoxes = 4;
  BOLTZATTN_HD double edge(int box) const { return reach * cos_pi(box, 2 * kBoxes); }  // a
  BOLTZATTN_HD double cosine(int box) const {                                          // cos 2b
    return cos_pi(2 * height * sin_pi(box + 1, 2 * kBoxes), kPi);
  }
  // The largest value in a box, from exp(2a) and cos 2b.
  static BOLTZATTN_HD double highest_tanh(double up, double cosine) {
    const double down = 1 / up;
    return (up - down) / (up + down + 2 * (up > 1 ? cosine : 1));
  }
};

// w in the middle of a key panel.
BOLTZATTN_HD double panel_middle(const Axis& axis, int panel) {
  return axis.origin + axis.half * (2 * panel + 1);
}

// Logarithm of the error bound for one key of a panel at t: the smallest over all ellipses.
// `extreme` is how far Re s reaches up (down for t < 0) on each ellipse; it and `reference` are
// measured from the middle of the keys.
BOLTZATTN_HD double key_log_error(const double* log_factor, const double* extreme, double t,
                                  double reference) {
  double least = INFINITY;
  for (int r = 0; r < kEllipses; ++r) {
    const double bound = log_factor[r] + t * (extreme[r] - reference);
    least = bound < least ? bound : least;
  }
  return least;
}

// F is analytic in the strip, so its Chebyshev coefficients on a query panel decay like rho^-k; the
// last four set the constant. A row of weights times the node values is coefficient k rho^(k-p).
constexpr int kLastCoefficients = 4;
BOLTZATTN_HD double decay_weight(const Layout& layout, int row, int i) {
  const int p = layout.query.nodes, k = p - kLastCoefficients + row;
  const double rho = bernstein_rho(layout.query_strip, layout.query.half);
  double power = 1;
  for (int n = k; n < p; ++n) power /= rho;
  return 2.0 / p * cos_pi(k * (2 * i + 1), 2 * p) * power;
}
BOLTZATTN_HD double decay_factor(const Layout& layout) {
  return 4 / (1 - 1 / bernstein_rho(layout.query_strip, layout.query.half));
}

// The bound of the error of out relative to the largest value, from the bound of the query-side
// error (relative to that value) and that of the key-side error of Z (relative to Z).
BOLTZATTN_HD double certificate_of(double query_error, double key_error, double rounding) {
  return query_error + 2 * key_error / (1 - (key_error < 0.5 ? key_error : 0.5)) + rounding;
}

}  // namespace boltzattn
