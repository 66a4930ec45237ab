// Which instruction set the kernels run with.
#include <atomic>
#include <cstring>

#include "cpu/isa.h"

namespace boltzattn {

static std::atomic<const Kernels*> forced{nullptr};

const Kernels& kernels() {
  if (const Kernels* table = forced.load()) return *table;
  static const Kernels* const best = [] {
    for (const Kernels* table : kTables)
      if (table->supported()) return table;
    return &portable::kTable;
  }();
  return *best;
}

const char* force_isa(const char* name) {
  if (!name) {
    forced = nullptr;
    return nullptr;
  }
  for (const Kernels* table : kTables) {
    if (std::strcmp(table->name, name)) continue;
    if (!table->supported()) return "this machine does not support that instruction set";
    forced = table;
    return nullptr;
  }
  return "unknown instruction set; there are avx512, avx2 and portable";
}

static std::atomic<double> budget{0};

double transform_budget() {
  return budget.load(std::memory_order_relaxed);
}
void set_transform_budget(double nanoseconds) {
  budget = nanoseconds;
}

}  // namespace boltzattn
