// Every CPU kernel, once per instruction set: an isa_*.cpp file defines BOLTZATTN_ISA (a namespace),
// BOLTZATTN_VECTOR_BYTES and BOLTZATTN_TILE_ROWS, turns the instructions on and includes this file.
// Standard headers come first, outside the region of the target pragma: nothing inline that other
// files share may be compiled with instructions the machine might lack.

namespace boltzattn {
namespace BOLTZATTN_ISA {

#include "cpu/simd.h"

#include "cpu/workspace.h"

#include "cpu/gemm.h"

#include "cpu/pack.h"

#include "cpu/dropout.h"

#include "cpu/direct.h"

static void direct_forward_any(const Attention& call) {
  call.query.dtype == DType::kFloat64 ? direct_forward<double>(call) : direct_forward<float>(call);
}
static void direct_backward_any(const AttentionGradient& g) {
  g.call.query.dtype == DType::kFloat64 ? direct_backward<double>(g) : direct_backward<float>(g);
}

}  // namespace BOLTZATTN_ISA
}  // namespace boltzattn
