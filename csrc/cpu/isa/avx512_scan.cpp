#define BOLTZATTN_UNIT "cpu/units/scan.inc.h"
#include "cpu/isa/avx512.h"
