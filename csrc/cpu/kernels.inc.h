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
#include "cpu/coordinates.h"
#include "cpu/rows.h"
#include "cpu/transform.h"

static void direct_forward_any(const Attention& a) {
  a.query.dtype == DType::kFloat64 ? direct_forward<double>(a, 0, a.heads)
                                   : direct_forward<float>(a, 0, a.heads);
}
static void direct_backward_any(const AttentionGradient& g) {
  g.call.query.dtype == DType::kFloat64 ? direct_backward<double>(g, 0, g.call.heads)
                                        : direct_backward<float>(g, 0, g.call.heads);
}
static void transform_forward_any(const Attention& a) {
  a.query.dtype == DType::kFloat64 ? transform_forward<double>(a) : transform_forward<float>(a);
}
static void transform_backward_any(const AttentionGradient& g) {
  g.call.query.dtype == DType::kFloat64 ? transform_backward<double>(g)
                                        : transform_backward<float>(g);
}

static void transform_report_any(const Attention& a, TransformReport* reports) {
  a.query.dtype == DType::kFloat64 ? transform_report<double>(a, reports)
                                   : transform_report<float>(a, reports);
}

}  // namespace BOLTZATTN_ISA
}  // namespace boltzattn
