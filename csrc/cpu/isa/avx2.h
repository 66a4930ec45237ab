// AVX2 and FMA: compiles BOLTZATTN_UNIT. See cpu/isa.h.
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
#define BOLTZATTN_SUPPORTED (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#include BOLTZATTN_UNIT
#ifdef __clang__
#pragma clang attribute pop
#endif

#endif
