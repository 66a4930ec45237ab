#define BOLTZATTN_UNIT "cpu/units/transform.inc.h"
#include "cpu/isa/avx2.h"
