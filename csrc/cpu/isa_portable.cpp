#include "cpu/isa.h"

#define BOLTZATTN_ISA portable
#define BOLTZATTN_VECTOR_BYTES 16
#define BOLTZATTN_TILE_ROWS 6
#include "cpu/kernels.inc.h"

namespace boltzattn {
const Kernels kPortable = portable::table("portable", [] { return true; });
}  // namespace boltzattn
