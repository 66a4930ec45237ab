#define BOLTZATTN_UNIT "cpu/units/table.inc.h"
#include "cpu/isa/portable.h"
