// What all units of an instruction set build on. Included inside an ISA's namespace.
#include "cpu/simd/vector.h"
#include "cpu/simd/workspace.h"
#include "cpu/simd/gemm.h"
#include "cpu/simd/pack.h"
#include "cpu/units/entries.h"
