#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/problem.h"
#include "layout.h"
#include "online_softmax.h"

#define BOLTZATTN_ISA portable
#define BOLTZATTN_VECTOR_BYTES 16
#define BOLTZATTN_TILE_ROWS 6
#include "cpu/kernels.inc.h"

namespace boltzattn {
static bool supported() {
  return true;
}
const Kernels kPortable = {"portable", supported, BOLTZATTN_KERNELS(portable)};
}  // namespace boltzattn
