// The kernels with vectors as wide as those of AVX-512, in instructions that every machine has:
// what depends on the number of lanes is executed even where AVX-512 is not. The Makefile compiles
// it once for each unit; see cpu/isa.h.
#include "cpu/isa.h"
#include "spec/envelope.h"
#include "spec/tensor.h"

namespace boltzattn::wide {
extern const Kernels kTable;
}

#define BOLTZATTN_ISA wide
#define BOLTZATTN_VECTOR_BYTES 64
#define BOLTZATTN_TILE_ROWS 12
#define BOLTZATTN_SUPPORTED true
#include BOLTZATTN_UNIT
