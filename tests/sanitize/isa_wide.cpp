// The kernels with vectors as wide as those of AVX-512, in instructions that every machine has:
// what depends on the number of lanes is executed even where AVX-512 is not.
#include "cpu/isa.h"

#define BOLTZATTN_ISA wide
#define BOLTZATTN_VECTOR_BYTES 64
#define BOLTZATTN_TILE_ROWS 12
#include "cpu/kernels.inc.h"

namespace boltzattn {
extern const Kernels kWide = wide::table("wide", [] { return true; });
}  // namespace boltzattn
