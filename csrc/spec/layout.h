// The layout of a transform: panels and nodes on the query axis and on the key axis of one head.
// docs/transform.md derives it. Host and device; no torch. python/boltzattn/transform/layout.py is
// the same mathematics in Python, and a test compares the two.
//
// Queries t live in [t_min, t_max], keys s in [s_min, s_max]; R = s_max - s_min, B = max|t| R.
//   query axis: t = tau sinh(u), panels uniform in u;
//   key axis:   s - middle = (R / 2) tanh(w) / tanh(W), panels uniform in w on [-W, W].
// In these coordinates everything that is interpolated is analytic in a strip of fixed height, so
// Chebyshev interpolation with p nodes on panels of half width h errs by about rho^-p, where
// rho = r + sqrt(r^2 + 1) and r = height / h.
#pragma once

#include "spec/tolerances.h"

namespace boltzattn {

constexpr double kPi = 3.14159265358979323846;
constexpr double kKeyStrip = kPi / 4;  // height of the strip on the key axis

// What the layout of a head depends on.
struct Range {
  double t_min, t_max, s_min, s_max;
  int64_t keys;  // that are not masked
};

// One axis: `panels` panels of half width `half` from `origin` on, with `nodes` nodes each.
struct Axis {
  int panels, nodes;
  double origin, half;
};

struct Layout {
  Axis query, key;
  double tau;     // scale of the query axis
  double middle;  // of the keys
  double radius;  // (R / 2) / tanh(W)
  double s_min, s_max;
  double query_strip;  // height of the strip on the query axis
};

// cos and sin of pi times a fraction. The device functions need no argument reduction.
BOLTZATTN_HD double cos_pi(double numerator, double denominator) {
#ifdef __CUDA_ARCH__
  return ::cospi(numerator / denominator);
#else
  return ::cos(numerator * kPi / denominator);
#endif
}
BOLTZATTN_HD double sin_pi(double numerator, double denominator) {
#ifdef __CUDA_ARCH__
  return ::sinpi(numerator / denominator);
#else
  return ::sin(numerator * kPi / denominator);
#endif
}

BOLTZATTN_HD double chebyshev_node(int nodes, int i) {
  return cos_pi(2 * i + 1, 2 * nodes);
}

// Half width of a panel on which `nodes` nodes reach `precision` in a strip of this height.
BOLTZATTN_HD double panel_half_width(double strip, int nodes, double precision) {
#ifdef __CUDA_ARCH__
  const double rho = ::exp(-::log(precision) / nodes);  // pow would spill registers
#else
  const double rho = ::pow(1 / precision, 1.0 / nodes);
#endif
  return 2 * strip / (rho - 1 / rho);
}

BOLTZATTN_HD double bernstein_rho(double strip, double half) {
  const double r = strip / half;
  return r + ::sqrt(r * r + 1);
}

BOLTZATTN_HD Axis make_axis(double low, double high, double strip, int nodes, double precision) {
  const double widest = panel_half_width(strip, nodes, precision);
  const double panels = ::fmax(1.0, ::ceil((high - low) / (2 * widest)));
  if (high > low) return {int(panels), nodes, low, (high - low) / (2 * panels)};
  // All tokens are equal: place the nodes around them, no farther away than 0 is.
  const double half = low == 0 ? widest : ::fmin(widest, ::fabs(low) / 2);
  return {1, nodes, low - half, half};
}

// A degenerate range (one key, or all keys equal) gets a width on which B is at most 1.
BOLTZATTN_HD double key_extent(const Range& range) {
  const double t_most = ::fmax(::fabs(range.t_min), ::fabs(range.t_max));
  const double extent = range.s_max - range.s_min;
  if (extent > 0) return extent;
  return t_most > 1 ? 1 / t_most : 1;
}

BOLTZATTN_HD double largest_product(const Range& range) {
  return ::fmax(::fabs(range.t_min), ::fabs(range.t_max)) * key_extent(range);
}

// `hope`: assume the strip of the queries is this many times higher than for the worst keys.
BOLTZATTN_HD Layout make_layout(const Range& range, int query_nodes, int key_nodes,
                                double precision, double hope = 1) {
  const double extent = key_extent(range);
  const double product = largest_product(range);
  Layout layout;
  layout.query_strip = kPi / (4 * ::log(double(range.keys) + 2));
  layout.tau = 2 / (extent * sin_pi(0.25, ::log(double(range.keys) + 2)));
  layout.query = make_axis(::asinh(range.t_min / layout.tau), ::asinh(range.t_max / layout.tau),
                           hope * layout.query_strip, query_nodes, precision);
  const double edge = 0.5 * ::log(::fmax(product, 4.0));
  // The a-priori bound on this side adds up over the keys; see docs/transform.md.
  layout.key = make_axis(-edge, edge, kKeyStrip, key_nodes, precision / ::sqrt(double(range.keys)));
  layout.middle = 0.5 * range.s_min + 0.5 * range.s_max;
  layout.radius = extent / 2 / ::tanh(edge);
  layout.s_min = range.s_min;
  layout.s_max = range.s_max;
  return layout;
}

// Multiply-adds of a forward pass, which the choice of nodes minimizes. An entry of the core costs
// an exponential in addition to its products.
BOLTZATTN_HD double layout_cost(const Layout& layout, int64_t n_q, int64_t n_k, int64_t dv) {
  const double core = double(layout.query.panels) * layout.query.nodes * layout.key.panels *
                      layout.key.nodes * (2.0 * (dv + 1) + 50);
  return core +
         double(dv + 1) * (double(n_q) * layout.query.nodes + double(n_k) * layout.key.nodes);
}

// The cheapest layout that reaches `precision`.
inline Layout choose_layout(const Range& range, int64_t n_q, int64_t n_k, int64_t dv,
                            double precision, int most_key_nodes = kMostNodes, double hope = 1) {
  Layout best = make_layout(range, kLeastNodes, kLeastNodes, precision, hope);
  double best_cost = layout_cost(best, n_q, n_k, dv);
  for (int p = kLeastNodes; p <= kMostNodes; p += kNodeStep) {
    for (int q = kLeastNodes; q <= most_key_nodes; q += kNodeStep) {
      const Layout layout = make_layout(range, p, q, precision, hope);
      const double cost = layout_cost(layout, n_q, n_k, dv);
      if (cost < best_cost) {
        best = layout;
        best_cost = cost;
      }
    }
  }
  return best;
}

// The query at `place` in [-1, 1] on a panel.
BOLTZATTN_HD double query_at(const Layout& layout, int panel, double place) {
  const Axis& axis = layout.query;
  return layout.tau * ::sinh(axis.origin + axis.half * (2 * panel + 1 + place));
}
// The key at `place` on a panel, measured from layout.middle.
BOLTZATTN_HD double key_at(const Layout& layout, int panel, double place) {
  const Axis& axis = layout.key;
  return layout.radius * ::tanh(axis.origin + axis.half * (2 * panel + 1 + place));
}
BOLTZATTN_HD double query_node(const Layout& layout, int panel, int i) {
  return query_at(layout, panel, chebyshev_node(layout.query.nodes, i));
}
BOLTZATTN_HD double key_node(const Layout& layout, int panel, int i) {
  return key_at(layout, panel, chebyshev_node(layout.key.nodes, i));
}

// The key from which logits of a query panel are measured: the one with the largest weight. On the
// panel around t = 0 both ends work, because B is small there.
BOLTZATTN_HD double reference_key(const Layout& layout, int query_panel) {
  const Axis& axis = layout.query;
  return axis.origin + axis.half * (2 * query_panel + 1) >= 0 ? layout.s_max : layout.s_min;
}

}  // namespace boltzattn
