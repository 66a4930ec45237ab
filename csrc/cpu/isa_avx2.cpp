#include "cpu/isa.h"

#ifdef __x86_64__

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,prfchw"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,prfchw")
#endif
#define BOLTZATTN_ISA avx2
#define BOLTZATTN_VECTOR_BYTES 32
#define BOLTZATTN_TILE_ROWS 6
#define BOLTZATTN_FUSED_PRODUCTS  // GCC 12 does not define __FMA__ for the pragma above
#include "cpu/kernels.inc.h"
#ifdef __clang__
#pragma clang attribute pop
#endif

namespace boltzattn {
const Kernels kAvx2 = avx2::table(
    "avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); });
}  // namespace boltzattn

#endif
