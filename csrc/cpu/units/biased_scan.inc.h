// The same with a bias per key, slopes or Gaussian scores. See cpu/isa.h for how units are
// compiled.
namespace boltzattn::BOLTZATTN_ISA {

#include "cpu/units/common.h"
#include "cpu/transform/extents.h"
#include "cpu/transform/coordinates.h"
#include "cpu/transform/rows.h"
#include "cpu/transform/for_heads.h"
#include "cpu/scan/chunk.h"
#include "cpu/scan/table.h"
#include "cpu/scan/biased.h"
#include "cpu/scan/biased_backward.h"

BOLTZATTN_OFFER(biased_forward)
BOLTZATTN_OFFER(biased_backward)

}  // namespace boltzattn::BOLTZATTN_ISA
