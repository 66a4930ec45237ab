// Ranks 2 to 4 in linear time. See cpu/isa.h for how units are compiled.
namespace boltzattn::BOLTZATTN_ISA {

#include "cpu/units/common.h"
#include "cpu/transform/extents.h"
#include "cpu/transform/coordinates.h"
#include "cpu/transform/rows.h"
#include "cpu/transform/head.h"
#include "cpu/transform/evaluate.h"
#include "cpu/transform/for_heads.h"
#include "cpu/tensor/frame.h"
#include "cpu/tensor/tokens.h"
#include "cpu/tensor/core.h"
#include "cpu/tensor/apart.h"
#include "cpu/tensor/passes.h"
#include "cpu/tensor/causal.h"
#include "cpu/tensor/entry.h"

BOLTZATTN_OFFER(tensor_forward)
BOLTZATTN_OFFER(tensor_backward)
BOLTZATTN_OFFER(tensor_report)

}  // namespace boltzattn::BOLTZATTN_ISA
