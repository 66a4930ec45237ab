#define BOLTZATTN_UNIT "cpu/units/direct.inc.h"
#include "cpu/isa/avx2.h"
