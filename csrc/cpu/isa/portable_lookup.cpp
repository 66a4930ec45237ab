#include "spec/envelope.h"
#define BOLTZATTN_UNIT "cpu/units/lookup.inc.h"
#include "cpu/isa/portable.h"
