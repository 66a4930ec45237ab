#define BOLTZATTN_UNIT "cpu/units/table.inc.h"
#include "cpu/isa/avx2.h"
