// Rank 1 in linear time. See cpu/isa.h for how units are compiled.
namespace boltzattn::BOLTZATTN_ISA {

#include "cpu/units/common.h"
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
#include "cpu/transform/entry.h"
#include "cpu/transform/stages.h"

BOLTZATTN_OFFER(transform_forward)
BOLTZATTN_OFFER(transform_backward)
BOLTZATTN_OFFER(transform_report)
BOLTZATTN_OFFER(layer_forward)
BOLTZATTN_OFFER(layer_backward)
BOLTZATTN_OFFER(project)
BOLTZATTN_OFFER(stage_extents)
BOLTZATTN_OFFER(stage_sizes)
BOLTZATTN_OFFER(stage_moments)
BOLTZATTN_OFFER(stage_evaluate)
BOLTZATTN_OFFER(stage_query_moments)
BOLTZATTN_OFFER(stage_adjoint)

}  // namespace boltzattn::BOLTZATTN_ISA
