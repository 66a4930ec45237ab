#include "spec/envelope.h"
#define BOLTZATTN_UNIT "cpu/units/biased_scan.inc.h"
#include "cpu/isa/portable.h"
