// The CPU kernels are compiled once per instruction set, and each set provides this table of
// functions.
//
// isa/avx2.h and its like include this file before they enable instructions: inline functions that
// other files share must not be compiled with instructions that the machine may not have. Then they
// define BOLTZATTN_ISA (a namespace), BOLTZATTN_SUPPORTED and the sizes of vectors and tiles, and
// include one of units/*.inc.h. The files isa/*.cpp, one for each instruction set and unit, say
// which, and include first what a unit alone needs of spec/. Units are compiled apart so that
// compilers run side by side and a change costs one unit's time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "cpu/parallel.h"
#include "cpu/problem.h"
#include "spec/certificate.h"
#include "spec/dropout.h"
#include "spec/online_softmax.h"
#include "spec/scan.h"

namespace boltzattn {

// What the transform makes of a head.
struct TransformReport {
  double served;       // 0: the head goes to `direct`
  double certificate;  // bound of the error of out, relative to max|value|
  double product;      // B = max|t| R
  double query_panels, query_nodes, key_panels, key_nodes;
  // Of ranks 2 to 4, by axis: the largest difference of logits, and panels; then tokens that are
  // computed pair by pair, estimated nanoseconds on one thread, and rows of a chunk if causal.
  double axis_product[kMostAxes] = {}, axis_query_panels[kMostAxes] = {},
         axis_key_panels[kMostAxes] = {};
  double apart_queries = 0, apart_keys = 0, cost = 0, direct_cost = 0, chunk = 0;
};

struct Kernels {
  const char* name;
  bool (*supported)();
  void (*direct_forward)(const Attention&);
  void (*direct_backward)(const AttentionGradient&);
  void (*transform_forward)(const Attention&);
  void (*transform_backward)(const AttentionGradient&);
  void (*transform_report)(const Attention&, TransformReport*);  // one per head
  void (*scan_forward)(const Attention&);                        // causal, rank 1
  void (*scan_backward)(const AttentionGradient&);
  void (*stream_extent)(const Attention&, const Stream&, bool* finite, double* extent);
  void (*stream_append)(const Attention&, const Stream&);
  void (*stream_query)(const Attention&, const Stream&);
  void (*stream_step)(const Attention& tokens, const Attention& queries, const Stream&);
  double (*stream_largest)(const Attention&);  // |t|, or NaN
  void (*varlen_forward)(const Attention&, const Sequence*, int64_t count);
  void (*varlen_backward)(const AttentionGradient&, const Sequence*, int64_t count);
  bool (*layer_forward)(const Attention&, const Layer&);  // false: not served, results void
  bool (*layer_backward)(const AttentionGradient&, const Layer&);
  void (*project)(const Projection&);
  void (*small_layer_forward)(const SmallLayer&);
  void (*small_layer_backward)(const SmallLayerGradient&);
  // The transform in stages, for tokens on several machines: see transform/stages.h. Sizes are the
  // numbers of elements of the moments and of the query moments of all heads.
  void (*stage_extents)(const Attention&, Extent*);  // queries and keys of every head
  void (*stage_sizes)(const Attention&, const SharedRange*, int64_t* sizes);
  void (*stage_moments)(const Attention&, const SharedRange*, const Extent*, double* moments);
  void (*stage_evaluate)(const Attention&, const SharedRange*, const double* moments, bool* served);
  void (*stage_query_moments)(const AttentionGradient&, const SharedRange*, const double* moments,
                              double* query_moments);
  void (*stage_adjoint)(const AttentionGradient&, const SharedRange*, const double* moments,
                        const double* query_moments);
  // A scan in stages, for sequences on several machines: see scan/shards.h.
  void (*shard_tables)(const Attention&, const ScanShard&, const ShardTables&);
  void (*shard_forward)(const Attention&, const ScanShard&, double* z);  // z: [heads][n_q]
  void (*shard_rows)(const AttentionGradient&, const ScanShard&, const double* z, double* table);
  void (*shard_backward)(const AttentionGradient&, const ScanShard&);
};

namespace avx512 {
extern const Kernels kTable;
}
namespace avx2 {
extern const Kernels kTable;
}
namespace portable {
extern const Kernels kTable;
}

// The tables for this architecture, best first.
constexpr const Kernels* kTables[] = {
#ifdef __x86_64__
    &avx512::kTable, &avx2::kTable,
#endif
    &portable::kTable};

// The best supported table, unless a test has forced another by name.
const Kernels& kernels();
const char* force_isa(const char* name);  // nullptr: the best; returns an error or nullptr

// Heads of rank 2 to 4 that cost fewer nanoseconds than this are transformed even if `direct` is
// faster: 0, unless a test has set it.
double transform_budget();
void set_transform_budget(double nanoseconds);

}  // namespace boltzattn
