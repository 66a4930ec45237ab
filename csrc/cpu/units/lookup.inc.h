// The same with a bias per key or Gaussian scores. See cpu/isa.h for how units are compiled.
namespace boltzattn::BOLTZATTN_ISA {

#include "cpu/units/common.h"
#include "cpu/transform/extents.h"
#include "cpu/transform/coordinates.h"
#include "cpu/transform/rows.h"
#include "cpu/transform/head.h"
#include "cpu/transform/evaluate.h"
#include "cpu/transform/for_heads.h"
#include "cpu/envelope/sites.h"
#include "cpu/envelope/layout.h"
#include "cpu/envelope/tokens.h"
#include "cpu/envelope/passes.h"
#include "cpu/envelope/core.h"
#include "cpu/envelope/entry.h"

BOLTZATTN_OFFER(lookup_forward)
BOLTZATTN_OFFER(lookup_backward)
BOLTZATTN_OFFER(lookup_report)

}  // namespace boltzattn::BOLTZATTN_ISA
