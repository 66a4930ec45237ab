// Instructions that every machine of the architecture has: compiles BOLTZATTN_UNIT. See cpu/isa.h.
#include "cpu/isa.h"

#define BOLTZATTN_ISA portable
#define BOLTZATTN_VECTOR_BYTES 16
#define BOLTZATTN_TILE_ROWS 6
#define BOLTZATTN_SUPPORTED true
#include BOLTZATTN_UNIT
