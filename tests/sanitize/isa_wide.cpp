// The kernels with vectors as wide as those of AVX-512, in instructions that every machine has:
// what depends on the number of lanes is executed even where AVX-512 is not.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/problem.h"
#include "layout.h"
#include "online_softmax.h"

#define BOLTZATTN_ISA wide
#define BOLTZATTN_VECTOR_BYTES 64
#define BOLTZATTN_TILE_ROWS 12
#include "cpu/kernels.inc.h"

namespace boltzattn {
static bool supported() {
  return true;
}
extern const Kernels kWide = {"wide", supported, BOLTZATTN_KERNELS(wide)};
}  // namespace boltzattn
