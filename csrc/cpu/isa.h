// The kernels are compiled once per instruction set; this table of functions is what each offers.
#pragma once

#include "cpu/problem.h"

namespace boltzattn {

// What the transform makes of a head, for `explain` and for tests.
struct TransformReport {
  double served;       // 0: the head goes to `direct`
  double certificate;  // bound of the error of out, relative to max|value|
  double product;      // B = max|t| R
  double query_panels, query_nodes, key_panels, key_nodes;
};

struct Kernels {
  const char* name;
  bool (*supported)();
  void (*direct_forward)(const Attention&);
  void (*direct_backward)(const AttentionGradient&);
  void (*transform_forward)(const Attention&);
  void (*transform_backward)(const AttentionGradient&);
  void (*varlen_forward)(const Attention&, const Sequence*, int64_t count);
  void (*varlen_backward)(const AttentionGradient&, const Sequence*, int64_t count);
  void (*causal_forward)(const Attention&);  // rank 1, by direct and transform
  bool (*layer_forward)(const Attention&);   // false: not served, results void
  bool (*layer_backward)(const AttentionGradient&);
  void (*project)(const Projection&);
  // The transform in stages; sizes are of sums over the keys and of sums over the queries.
  void (*stage_extents)(const Attention&, Extent*);  // queries and keys of every head
  void (*stage_sizes)(const AttentionGradient&, const SharedRange*, int64_t* sizes);
  void (*stage_moments)(const AttentionGradient&, const SharedRange*, const Extent*, double* sums);
  void (*stage_evaluate)(const AttentionGradient&, const SharedRange*, const double* sums,
                         bool* served);
  void (*stage_query_moments)(const AttentionGradient&, const SharedRange*, const double* sums,
                              double* query_sums);
  void (*stage_adjoint)(const AttentionGradient&, const SharedRange*, const double* sums,
                        const double* query_sums);
  void (*transform_report)(const Attention&, TransformReport*);  // one per head
};

extern const Kernels kAvx512, kAvx2, kPortable;

// The best supported table, unless a test has forced another by name.
const Kernels& kernels();
const char* force_isa(const char* name);  // nullptr: back to the best; returns an error or nullptr

}  // namespace boltzattn
