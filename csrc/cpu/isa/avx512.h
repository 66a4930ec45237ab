// AVX-512: compiles BOLTZATTN_UNIT. See cpu/isa.h.
#include "cpu/isa.h"

#ifdef __x86_64__

#ifdef __clang__
#pragma clang attribute push(                                                      \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prfchw"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prfchw")
#endif
#define BOLTZATTN_ISA avx512
#define BOLTZATTN_VECTOR_BYTES 64
#define BOLTZATTN_TILE_ROWS 12
#define BOLTZATTN_FUSED_PRODUCTS  // GCC 12 does not define __FMA__ for the pragma above
#define BOLTZATTN_SUPPORTED                                                   \
  (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && \
   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#include BOLTZATTN_UNIT
#ifdef __clang__
#pragma clang attribute pop
#endif

#endif
