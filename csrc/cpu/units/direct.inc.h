// Attention over all pairs. See cpu/isa.h for how units are compiled.
namespace boltzattn::BOLTZATTN_ISA {

#include "cpu/units/common.h"
#include "cpu/scores.h"
#include "cpu/direct.h"
#include "cpu/direct_backward.h"
#include "cpu/small_layer.h"

BOLTZATTN_OFFER(direct_forward)
BOLTZATTN_OFFER(direct_backward)
BOLTZATTN_OFFER(direct_forward_heads)
BOLTZATTN_OFFER(direct_backward_heads)
BOLTZATTN_OFFER(small_layer_forward)
BOLTZATTN_OFFER(small_layer_backward)

}  // namespace boltzattn::BOLTZATTN_ISA
