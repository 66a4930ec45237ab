// The kernels are compiled once per instruction set; this table of functions is what each offers.
#pragma once

#include "cpu/problem.h"

namespace boltzattn {

struct Kernels {
  const char* name;
  bool (*supported)();
  void (*direct_forward)(const Attention&);
  void (*direct_backward)(const AttentionGradient&);
  void (*transform_forward)(const Attention&);
  void (*transform_backward)(const AttentionGradient&);
};

extern const Kernels kAvx512, kAvx2, kPortable;

// The best supported table, unless a test has forced another by name.
const Kernels& kernels();
const char* force_isa(const char* name);  // nullptr: back to the best; returns an error or nullptr

}  // namespace boltzattn
