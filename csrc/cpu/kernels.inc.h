// Every CPU kernel, once per instruction set: an isa_*.cpp file includes cpu/isa.h, defines
// BOLTZATTN_ISA (a namespace), BOLTZATTN_VECTOR_BYTES and BOLTZATTN_TILE_ROWS, enables
// the instructions and includes this file.

namespace boltzattn::BOLTZATTN_ISA {

// In the order in which they build on each other.
#include "cpu/simd/vector.h"
#include "cpu/simd/workspace.h"
#include "cpu/simd/gemm.h"
#include "cpu/simd/pack.h"
#include "cpu/scores.h"
#include "cpu/direct.h"
#include "cpu/direct_backward.h"
#include "cpu/small_layer.h"
#include "cpu/transform/extents.h"
#include "cpu/project.h"
#include "cpu/transform/coordinates.h"
#include "cpu/transform/rows.h"
#include "cpu/transform/head.h"
#include "cpu/transform/layer.h"
#include "cpu/transform/moments.h"
#include "cpu/transform/core.h"
#include "cpu/transform/evaluate.h"
#include "cpu/transform/adjoint.h"
#include "cpu/transform/for_heads.h"
#include "cpu/envelope/sites.h"
#include "cpu/envelope/layout.h"
#include "cpu/envelope/tokens.h"
#include "cpu/envelope/passes.h"
#include "cpu/envelope/core.h"
#include "cpu/envelope/entry.h"
#include "cpu/transform/entry.h"
#include "cpu/transform/stages.h"
#include "cpu/scan/chunk.h"
#include "cpu/scan/table.h"
#include "cpu/scan/biased.h"
#include "cpu/scan/biased_backward.h"
#include "cpu/scan/forward.h"
#include "cpu/scan/backward.h"
#include "cpu/scan/stream.h"
#include "cpu/scan/shards.h"
#include "cpu/varlen.h"

// Kernels are templates of the arithmetic type: fp64 for fp64 tensors, else fp32.
static bool in_double(const Attention& call) {
  return call.query.dtype == DType::kFloat64;
}
static bool in_double(const AttentionGradient& g) {
  return in_double(g.call);
}
static bool in_double(const Projection& p) {
  return p.x.dtype == DType::kFloat64;
}
static bool in_double(const SmallLayer& layer) {
  return layer.x.dtype == DType::kFloat64;
}
static bool in_double(const SmallLayerGradient& g) {
  return in_double(g.layer);
}
template <auto wide, auto narrow>
struct ByDType;
template <class Result, class First, class... Rest, Result (*wide)(First, Rest...),
          Result (*narrow)(First, Rest...)>
struct ByDType<wide, narrow> {
  static Result run(First first, Rest... rest) {
    return in_double(first) ? wide(first, rest...) : narrow(first, rest...);
  }
};
#define BOLTZATTN_BY_DTYPE(kernel) ByDType<kernel<double>, kernel<float>>::run

// As fields of Kernels.
static constexpr Kernels table(const char* name, bool (*supported)()) {
  return {name,
          supported,
          BOLTZATTN_BY_DTYPE(direct_forward),
          BOLTZATTN_BY_DTYPE(direct_backward),
          BOLTZATTN_BY_DTYPE(transform_forward),
          BOLTZATTN_BY_DTYPE(transform_backward),
          BOLTZATTN_BY_DTYPE(transform_report),
          BOLTZATTN_BY_DTYPE(scan_forward),
          BOLTZATTN_BY_DTYPE(scan_backward),
          stream_extent,
          stream_append,
          stream_query,
          stream_largest,
          BOLTZATTN_BY_DTYPE(varlen_forward),
          BOLTZATTN_BY_DTYPE(varlen_backward),
          BOLTZATTN_BY_DTYPE(layer_forward),
          BOLTZATTN_BY_DTYPE(layer_backward),
          BOLTZATTN_BY_DTYPE(project),
          BOLTZATTN_BY_DTYPE(small_layer_forward),
          BOLTZATTN_BY_DTYPE(small_layer_backward),
          BOLTZATTN_BY_DTYPE(stage_extents),
          BOLTZATTN_BY_DTYPE(stage_sizes),
          BOLTZATTN_BY_DTYPE(stage_moments),
          BOLTZATTN_BY_DTYPE(stage_evaluate),
          BOLTZATTN_BY_DTYPE(stage_query_moments),
          BOLTZATTN_BY_DTYPE(stage_adjoint),
          BOLTZATTN_BY_DTYPE(shard_tables),
          BOLTZATTN_BY_DTYPE(shard_forward),
          BOLTZATTN_BY_DTYPE(shard_rows),
          BOLTZATTN_BY_DTYPE(shard_backward)};
}

}  // namespace boltzattn::BOLTZATTN_ISA
