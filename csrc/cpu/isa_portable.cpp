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
const Kernels kPortable = {"portable",
                           supported,
                           portable::direct_forward_any,
                           portable::direct_backward_any,
                           portable::transform_forward_any,
                           portable::transform_backward_any,
                           portable::transform_report_any};
}  // namespace boltzattn
