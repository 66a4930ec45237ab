// How far a transform may be off: bounds of both interpolation errors, computed from the layout and
// the data of a head. docs/transform.md derives them. Host and device; no torch.
#pragma once

#include "layout.h"

namespace boltzattn {

// The error of interpolating exp(t s(w)) on a key panel is at most 4 M rho^(1-q) / (rho - 1) for
// every rho, M being its largest modulus on the Bernstein ellipse of rho. Ellipses 0 .. kEllipses
// reach up to the height of the strip.
constexpr int kEllipses = 6;

BOLTZATTN_HD double ellipse_height(int ellipse) {
  return kKeyStrip * (ellipse + 1) / kEllipses;
}
BOLTZATTN_HD double ellipse_log_factor(const Axis& axis, int ellipse) {
  const double rho = bernstein_rho(ellipse_height(ellipse), axis.half);
  return ::log(4 / (rho - 1)) + (1 - axis.nodes) * ::log(rho);
}

// Upper bound of Re tanh(w) on an ellipse. Re tanh(a + ib) = sinh 2a / (cosh 2a + cos 2b) grows
// with a, and with b where a > 0; the quarter ellipse is covered by boxes.
BOLTZATTN_HD double highest_tanh(double centre, double reach, double height) {
  constexpr int kBoxes = 4;
  double most = -1;
  for (int k = 0; k < kBoxes; ++k) {
    const double a = centre + reach * cos_pi(k, 2 * kBoxes);
    const double b = height * sin_pi(a > 0 ? k + 1 : 0, 2 * kBoxes);
    const double re = ::sinh(2 * a) / (::cosh(2 * a) + cos_pi(2 * b, kPi));
    most = re > most ? re : most;
  }
  return most;
}
// How far Re s, measured from the middle, reaches on an ellipse around a key panel: up for
// sign = 1, down for sign = -1.
BOLTZATTN_HD double ellipse_extreme(const Layout& layout, int panel, int ellipse, double sign) {
  const Axis& axis = layout.key;
  const double height = ellipse_height(ellipse);
  const double reach = ::sqrt(axis.half * axis.half + height * height);
  const double centre = axis.origin + axis.half * (2 * panel + 1);
  return sign * layout.radius * highest_tanh(sign * centre, reach, height);
}

// F is analytic in the strip, so its Chebyshev coefficients on a query panel decay like rho^-k; the
// last four set the constant. Row k of the last four, times node values: coefficient k rho^(k-p).
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

}  // namespace boltzattn
