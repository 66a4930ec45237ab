// Packed sequences, and the table of all kernels of an instruction set. See cpu/isa.h for how
// units are compiled.
namespace boltzattn::BOLTZATTN_ISA {

#include "cpu/units/common.h"
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

#define BOLTZATTN_STRING(x) #x
#define BOLTZATTN_NAME(x) BOLTZATTN_STRING(x)

// As fields of Kernels.
const Kernels kTable = {BOLTZATTN_NAME(BOLTZATTN_ISA),
                        [] { return bool(BOLTZATTN_SUPPORTED); },
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
                        stream_step,
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

}  // namespace boltzattn::BOLTZATTN_ISA
