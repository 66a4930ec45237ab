// Every CPU kernel, once per instruction set: an isa_*.cpp file defines BOLTZATTN_ISA (a
// namespace), BOLTZATTN_VECTOR_BYTES and BOLTZATTN_TILE_ROWS, turns the instructions on and
// includes this file. Standard headers come first, outside the region of the target pragma: nothing
// inline that other files share may be compiled with instructions the machine might lack.

namespace boltzattn {
namespace BOLTZATTN_ISA {

// In the order in which they build on each other.
#include "cpu/simd.h"
#include "cpu/workspace.h"
#include "cpu/gemm.h"
#include "cpu/pack.h"
#include "cpu/dropout.h"
#include "cpu/direct.h"
#include "cpu/extent.h"
#include "cpu/project.h"
#include "cpu/coordinates.h"
#include "cpu/rows.h"
#include "cpu/core.h"
#include "cpu/transform.h"
#include "cpu/transform_gradient.h"
#include "cpu/causal.h"
#include "cpu/varlen.h"
#include "cpu/stages.h"

static bool is_double(const Attention& a) {
  return a.query.dtype == DType::kFloat64;
}
static void direct_forward_any(const Attention& a) {
  is_double(a) ? direct_forward<double>(a, 0, a.heads) : direct_forward<float>(a, 0, a.heads);
}
static void direct_backward_any(const AttentionGradient& g) {
  is_double(g.call) ? direct_backward<double>(g, 0, g.call.heads)
                    : direct_backward<float>(g, 0, g.call.heads);
}
static void transform_forward_any(const Attention& a) {
  is_double(a) ? transform_forward<double>(a) : transform_forward<float>(a);
}
static void transform_backward_any(const AttentionGradient& g) {
  is_double(g.call) ? transform_backward<double>(g) : transform_backward<float>(g);
}
static void varlen_forward_any(const Attention& a, const Sequence* sequences, int64_t count) {
  is_double(a) ? varlen_forward<double>(a, sequences, count)
               : varlen_forward<float>(a, sequences, count);
}
static void varlen_backward_any(const AttentionGradient& g, const Sequence* sequences,
                                int64_t count) {
  is_double(g.call) ? varlen_backward<double>(g, sequences, count)
                    : varlen_backward<float>(g, sequences, count);
}
static void causal_forward_any(const Attention& a) {
  is_double(a) ? causal_forward<double>(a) : causal_forward<float>(a);
}
static bool layer_forward_any(const Attention& a) {
  return is_double(a) ? layer_forward<double>(a) : layer_forward<float>(a);
}
static bool layer_backward_any(const AttentionGradient& g) {
  return is_double(g.call) ? layer_backward<double>(g) : layer_backward<float>(g);
}
static void project_any(const Projection& p) {
  p.x.dtype == DType::kFloat64 ? project<double>(p) : project<float>(p);
}
static void stage_extents_any(const Attention& a, Extent* extents) {
  is_double(a) ? stage_extents<double>(a, extents) : stage_extents<float>(a, extents);
}
static void stage_sizes_any(const AttentionGradient& g, const SharedRange* shared, int64_t* sizes) {
  is_double(g.call) ? stage_sizes<double>(g, shared, sizes) : stage_sizes<float>(g, shared, sizes);
}
static void stage_moments_any(const AttentionGradient& g, const SharedRange* shared,
                              const Extent* extents, double* sums) {
  is_double(g.call) ? stage_moments<double>(g, shared, extents, sums)
                    : stage_moments<float>(g, shared, extents, sums);
}
static void stage_evaluate_any(const AttentionGradient& g, const SharedRange* shared,
                               const double* sums, bool* served) {
  is_double(g.call) ? stage_evaluate<double>(g, shared, sums, served)
                    : stage_evaluate<float>(g, shared, sums, served);
}
static void stage_query_moments_any(const AttentionGradient& g, const SharedRange* shared,
                                    const double* sums, double* query_sums) {
  is_double(g.call) ? stage_query_moments<double>(g, shared, sums, query_sums)
                    : stage_query_moments<float>(g, shared, sums, query_sums);
}
static void stage_adjoint_any(const AttentionGradient& g, const SharedRange* shared,
                              const double* sums, const double* query_sums) {
  is_double(g.call) ? stage_adjoint<double>(g, shared, sums, query_sums)
                    : stage_adjoint<float>(g, shared, sums, query_sums);
}
static void transform_report_any(const Attention& a, TransformReport* reports) {
  is_double(a) ? transform_report<double>(a, reports) : transform_report<float>(a, reports);
}

// Of the functions above, in the order of `Kernels`.
#define BOLTZATTN_KERNELS(isa)                                                                    \
  isa::direct_forward_any, isa::direct_backward_any, isa::transform_forward_any,                  \
      isa::transform_backward_any, isa::varlen_forward_any, isa::varlen_backward_any,             \
      isa::causal_forward_any, isa::layer_forward_any, isa::layer_backward_any, isa::project_any, \
      isa::stage_extents_any, isa::stage_sizes_any, isa::stage_moments_any,                       \
      isa::stage_evaluate_any, isa::stage_query_moments_any, isa::stage_adjoint_any,              \
      isa::transform_report_any

}  // namespace BOLTZATTN_ISA
}  // namespace boltzattn
