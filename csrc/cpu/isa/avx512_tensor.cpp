#include "spec/tensor.h"
#define BOLTZATTN_UNIT "cpu/units/tensor.inc.h"
#include "cpu/isa/avx512.h"
