// The layout of attention of rank 2 to 4: uniform panels on every axis, tensor products of
// Chebyshev nodes. docs/tensor.md derives it. No torch.
//
//   logits t . s + c; on axis a, |t_a| <= T_a and |s_a| <= S_a after centring
// A panel of half width h on the key axis interpolates exp(t_a s) with |t_a h| <= kappa, and one on
// the query axis likewise. Each of the 2 r interpolations errs by at most `error` relative to the
// exponential itself, so every pair has its weight to (1 + error)^(2 r).
#pragma once

#include "spec/layout.h"

namespace boltzattn {

// The largest kappa for which interpolating exp(kappa x) on [-1, 1] in this many Chebyshev nodes
// errs by at most `error` exp(kappa x) at every x; a test computes them again.
struct TensorReach {
  int nodes;
  double kappa;
};
constexpr int kTensorChoices = 7;
struct TensorPrecision {
  double error;
  TensorReach reach[kTensorChoices];
};
constexpr TensorPrecision kTensorDouble = {
    1e-14,
    {{8, 0.121}, {10, 0.326}, {12, 0.646}, {14, 1.07}, {16, 1.579}, {18, 2.157}, {20, 2.789}}};
constexpr TensorPrecision kTensorSingle = {
    1e-7, {{4, 0.065}, {5, 0.175}, {6, 0.345}, {7, 0.569}, {8, 0.836}, {10, 1.468}, {12, 2.185}}};
constexpr TensorPrecision kTensorHalf = {
    1e-5, {{3, 0.061}, {4, 0.2}, {5, 0.422}, {6, 0.705}, {8, 1.393}, {10, 2.17}, {12, 2.994}}};

inline const TensorPrecision& tensor_precision(DType dtype) {
  return dtype == DType::kFloat64   ? kTensorDouble
         : dtype == DType::kFloat32 ? kTensorSingle
                                    : kTensorHalf;
}

constexpr int kMostTensorNodes = 700;  // on one panel: nodes^rank

// Interpolation multiplies the rounding of a weight by the largest weight on a panel over the
// smallest, exp(2 kappa) on every axis.
constexpr double kMostTensorSwing = 9;

// Panel pairs whose largest weight is below exp(-kTensorSkip) of the best pair's smallest one are
// left out.
inline double tensor_skip(DType dtype) {
  return dtype == DType::kFloat64 ? 40 : dtype == DType::kFloat32 ? 24 : 18;
}

struct TensorLayout {
  int rank, nodes;  // nodes on every panel of every axis
  double kappa;
  Axis query[kMostAxes], key[kMostAxes];
  bool flat_query[kMostAxes], flat_key[kMostAxes];  // whether all tokens are in the middle
  double cost;                                      // nanoseconds on one thread
  int64_t chunk;  // rows and keys that causal heads compute pair by pair; 0 if not causal
};

inline double tensor_centre(const Axis& axis, int64_t panel) {
  return axis.half * double(2 * panel + 1 - axis.panels);
}
inline double tensor_node(const Axis& axis, int64_t node) {
  return tensor_centre(axis, node / axis.nodes) +
         axis.half * chebyshev_node(axis.nodes, int(node % axis.nodes));
}

// Nanoseconds of a multiply-add in the passes over tokens and in the core, by the type of either,
// of an entry of a table that a chunk reads and writes, of one pair of `direct`, and of each of its
// columns: one core of an AMD EPYC (Zen 3).
constexpr double kTokenProduct = 0.045, kTokenProductDouble = 0.1, kCoreProduct = 0.075;
constexpr double kTokenOverhead = 60, kTensorHead = 40000, kChunkEntry = 0.6;
constexpr double kDirectPair = 0.75, kDirectPairColumn = 0.022, kDirectDouble = 2.3;

inline double tensor_direct_cost(DType dtype, double pairs, int64_t rank, int64_t dv) {
  return pairs * (kDirectPair + kDirectPairColumn * double(rank + dv)) *
         (dtype == DType::kFloat64 ? kDirectDouble : 1);
}

// Pairs that a call has; causal rows see the keys up to their own place.
inline double visible_pairs(double n_q, double n_k, bool is_causal) {
  const double both = n_q < n_k ? n_q : n_k;
  return is_causal ? both * (n_q - 0.5 * both) : n_q * n_k;
}

// Causal heads go through the core once for every chunk of tokens, and compute pair by pair within
// one: how many tokens make both cost the same. `once`: nanoseconds of a chunk.
inline int64_t tensor_chunk(DType dtype, double rows, double once, int64_t rank, int64_t dv) {
  constexpr double kUnit = 64;
  const double best = ::sqrt(2 * once / tensor_direct_cost(dtype, 1, rank, dv));
  const double largest = kUnit * ::ceil(rows / (4 * kUnit));
  const double chunk = kUnit * ::floor(best / kUnit + 0.5);
  return int64_t(chunk < largest ? chunk > kUnit ? chunk : kUnit : largest);
}

// Axes with half * other <= kappa.
inline Axis tensor_axis(double extent, double other, double kappa, int nodes) {
  const double panels = ::ceil(extent * other / kappa);
  Axis axis{};
  axis.panels = panels > 1 ? int(panels) : 1;
  axis.nodes = nodes;
  axis.half = extent * (1 + 1e-12) / axis.panels;
  // All tokens in one place: any half width that the bound allows.
  if (!(axis.half > 0)) axis.half = other > 0 ? kappa / other : kappa < 1 ? kappa : 1;
  axis.origin = -axis.half * axis.panels;
  return axis;
}

constexpr double kLargestTensorProduct = 1e4;  // T_a S_a
constexpr double kMostTensorBytes = 1e9;       // of the tables of a head, for backward

// The cheapest number of nodes. t_most, s_most: T_a and S_a. rows: queries with a key of their own
// place in causal calls, else 0. The cost is infinite if no number serves.
inline TensorLayout choose_tensor_layout(DType dtype, int rank, const double* t_most,
                                         const double* s_most, double tokens, int64_t dv,
                                         double rows = 0) {
  const TensorPrecision& precision = tensor_precision(dtype);
  TensorLayout best{};
  best.rank = rank;
  best.cost = INFINITY;
  for (int a = 0; a < rank; ++a)
    if (!(t_most[a] * s_most[a] <= kLargestTensorProduct)) return best;
  for (const TensorReach& reach : precision.reach) {
    if (2 * reach.kappa * rank > kMostTensorSwing || ::pow(reach.nodes, rank) > kMostTensorNodes)
      break;
    TensorLayout one{};
    one.rank = rank;
    one.nodes = reach.nodes;
    one.kappa = reach.kappa;
    double per_panel = 1, source = 1, core = 0;
    for (int a = 0; a < rank; ++a) {
      one.query[a] = tensor_axis(t_most[a], s_most[a], reach.kappa, reach.nodes);
      one.key[a] = tensor_axis(s_most[a], t_most[a], reach.kappa, reach.nodes);
      one.flat_query[a] = t_most[a] == 0;
      one.flat_key[a] = s_most[a] == 0;
      per_panel *= reach.nodes;
      source *= double(one.key[a].panels) * reach.nodes;
    }
    if (source * double(dv + 1) * 8 * (2 + rank) > kMostTensorBytes) continue;
    const double entries = source;
    // Axis by axis, from the last: a row of the source meets all nodes of the target.
    for (int a = rank - 1; a >= 0; --a) {
      core += source * double(one.query[a].panels) * reach.nodes;
      source *= double(one.query[a].panels) / double(one.key[a].panels);
    }
    // Clouds leave the corners of the tensor empty, and far panels are left out.
    const double width = double(dv + 1),
                 token = dtype == DType::kFloat64 ? kTokenProductDouble : kTokenProduct;
    double once = 0.6 * core * width * kCoreProduct;
    if (rows > 0) {
      once += entries * width * kChunkEntry;
      one.chunk = tensor_chunk(dtype, rows, once, rank, dv);
      once = once * ::ceil(rows / double(one.chunk)) +
             tensor_direct_cost(dtype, 0.5 * rows * double(one.chunk), rank, dv);
    }
    one.cost = kTensorHead + tokens * (per_panel * width * token + kTokenOverhead) + once;
    if (one.cost < best.cost) best = one;
  }
  return best;
}

}  // namespace boltzattn
