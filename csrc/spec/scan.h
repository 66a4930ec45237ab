// The layout of a scan: panels and nodes on the query axis alone. docs/transform.md derives it.
// Host and device; no torch. python/boltzattn/transform/scan_layout.py is the same mathematics in
// Python, and a test compares the two.
//
// A causal row sees the keys before it, so keys cannot be gathered on nodes that are chosen once
// and for all. Queries can: exp(t s) = sum_a l_a(t) exp(t_a s) for nodes t_a on the panel of t, so
// all that later rows need to know of earlier keys is the table sum_j exp(t_a s_j) (v_j, 1).
//
// Panels: one of half width `inner` around t = 0, where keys are measured from their middle, and on
// either side `levels` panels [a, ratio a], where they are measured from the end of most weight.
//   outer panels: l_a are rational, with poles at the mirror images -t_a of the nodes: the best
//     approximation of exp(-t d) over d >= 0 in L2. With nodes that are Chebyshev's in log t, p of
//     them err by at most 3 q^p a key for every d, q = (sqrt(ratio) - 1) / (2 (sqrt(ratio) + 1)).
//   central panel: weights differ by factors of at most exp(2 kappa), kappa = inner R / 2, so the
//     error relative to a weight is at most 4 rho^-p / (rho - 1) exp(kappa (rho + 1 / rho) / 2 +
//     kappa) for every rho.
// The outermost panels end at the largest |t|. More levels split the central panel and leave the
// others as they are.
#pragma once

#include "spec/layout.h"

namespace boltzattn {

constexpr int kMostLevels = 64;

struct ScanLayout {
  int nodes;   // of a panel
  int levels;  // panels on either side of the central one
  double ratio;
  double edge[kMostLevels + 1];  // [levels + 1]: `inner`, then the outer ends of the panels
  BOLTZATTN_HD int panels() const { return 2 * levels + 1; }
  BOLTZATTN_HD int features() const { return panels() * nodes; }
};

// Panel 0 is the central one; 1 to levels are those of t > 0, outwards, then those of t < 0.
enum class End { kMiddle, kHigh, kLow };  // where keys are measured from
BOLTZATTN_HD End end_of(const ScanLayout& layout, int panel) {
  return panel == 0 ? End::kMiddle : panel <= layout.levels ? End::kHigh : End::kLow;
}
BOLTZATTN_HD int level_of(const ScanLayout& layout, int panel) {
  return panel <= layout.levels ? panel : panel - layout.levels;
}

constexpr double kWidestRatio = 3.5;  // rounding errors of the nodes grow with it
constexpr int kScanNodeChoices = (kMostNodes - kLeastNodes) / kNodeStep + 1;

// The error of interpolation that a scan may have, relative to the largest value.
BOLTZATTN_HD double scan_precision(DType dtype) {
  return by_dtype(dtype, 1e-15, 1e-7, 1e-4, 1e-5);
}

// The error of one key on an outer panel.
BOLTZATTN_HD double scan_error(int nodes, double ratio) {
  const double root = ::sqrt(ratio);
  return 3 * ::pow((root - 1) / (2 * (root + 1)), double(nodes));
}
// The largest ratio for which `keys` such errors add up to the precision at most.
BOLTZATTN_HD double scan_ratio(DType dtype, int nodes, double keys) {
  const double q = ::pow(scan_precision(dtype) / (3 * ::fmax(1.0, keys)), 1.0 / nodes);
  if (q >= 0.25) return kWidestRatio;
  const double root = (1 + 2 * q) / (1 - 2 * q);
  return ::fmin(kWidestRatio, root * root);
}

// The largest kappa for which the central panel reaches the precision, by number of nodes; at most
// 3, because rounding errors of the nodes grow like exp(2 kappa).
BOLTZATTN_HD double scan_kappa(DType dtype, int nodes) {
  constexpr double kMost = 3;
  constexpr double kappa[4][kScanNodeChoices] = {
      {0.0100, 0.3108, 1.3690, 2.4674, kMost, kMost, kMost},
      {0.8545, 2.0915, kMost, kMost, kMost, kMost, kMost},
      {1.6636, kMost, kMost, kMost, kMost, kMost, kMost},
      {1.3418, 2.8016, kMost, kMost, kMost, kMost, kMost}};
  return kappa[int(dtype)][(nodes - kLeastNodes) / kNodeStep];
}

// A layout of given sizes.
BOLTZATTN_HD ScanLayout scan_layout_of(double t_most, int nodes, int levels, double ratio) {
  ScanLayout layout{};
  layout.nodes = nodes;
  layout.levels = levels;
  layout.ratio = ratio;
  for (int k = 0; k <= levels; ++k) layout.edge[k] = t_most * ::pow(ratio, double(k - levels));
  return layout;
}

// The layout for queries |t| <= t_most and this many keys, which lie `extent` apart at most. A
// token is added to all nodes and reads those of one panel, so their sum is smallest.
BOLTZATTN_HD ScanLayout make_scan_layout(DType dtype, double t_most, double extent, int64_t keys) {
  ScanLayout best{};
  for (int nodes = kLeastNodes; nodes <= kMostNodes; nodes += kNodeStep) {
    const double ratio = scan_ratio(dtype, nodes, double(keys));
    const double reach = t_most * extent / 2 / scan_kappa(dtype, nodes);
    const double levels = reach > 1 ? ::ceil(::log(reach) / ::log(ratio)) : 0;
    if (levels > kMostLevels ||
        (best.nodes > 0 && nodes * (2 * levels + 2) >= best.features() + best.nodes))
      continue;
    best.nodes = nodes;
    best.levels = int(levels);
    best.ratio = levels > 0 ? ::pow(reach, 1 / levels) : ratio;  // no wider than necessary
  }
  return scan_layout_of(t_most, best.nodes, best.levels, best.ratio);
}

// Node i of an outer panel, relative to the panel's outer end.
BOLTZATTN_HD double outer_node(int nodes, double ratio, int i) {
  return ::pow(ratio, 0.5 * (chebyshev_node(nodes, i) - 1));
}

// Node i of a panel: t_a.
BOLTZATTN_HD double scan_node(const ScanLayout& layout, int panel, int i) {
  if (panel == 0) return layout.edge[0] * chebyshev_node(layout.nodes, i);
  const double t = layout.edge[level_of(layout, panel)] * outer_node(layout.nodes, layout.ratio, i);
  return end_of(layout, panel) == End::kHigh ? t : -t;
}

// The place of t on its panel: in [-1, 1] on the central one, else |t| relative to the outer end.
BOLTZATTN_HD double scan_place(const ScanLayout& layout, int panel, double t) {
  if (panel == 0) return layout.edge[0] > 0 ? t / layout.edge[0] : 0;
  return ::fabs(t) / layout.edge[level_of(layout, panel)];
}

}  // namespace boltzattn
