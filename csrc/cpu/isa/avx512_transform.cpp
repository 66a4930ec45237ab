#define BOLTZATTN_UNIT "cpu/units/transform.inc.h"
#include "cpu/isa/avx512.h"
