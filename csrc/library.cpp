// The C interface of the library, which python/boltzattn/dispatch/library.py calls by ctypes. The
// library itself knows nothing of Python, so one file serves every version of it.
#include <pthread.h>

#include <stdexcept>
#include <string>

#include "cpu/isa.h"

#define BOLTZATTN_EXPORT extern "C" __attribute__((visibility("default")))

// The instruction set the kernels run with.
BOLTZATTN_EXPORT const char* boltzattn_isa() {
  return boltzattn::kernels().name;
}

// The instruction sets this machine can run, best first, with spaces in between.
BOLTZATTN_EXPORT const char* boltzattn_supported_isas() {
  static const std::string names = [] {
    std::string all;
    for (const auto* table : boltzattn::kTables)
      if (table->supported()) all += (all.empty() ? "" : " ") + std::string(table->name);
    return all;
  }();
  return names.c_str();
}

// Runs the kernels with another instruction set, or the best for a null pointer; returns an error
// or a null pointer.
BOLTZATTN_EXPORT const char* boltzattn_force_isa(const char* name) {
  return boltzattn::force_isa(name);
}

// Heads of rank 2 to 4 that cost less than this by the transform take it even if `direct` is
// faster.
BOLTZATTN_EXPORT void boltzattn_set_transform_budget(double nanoseconds) {
  boltzattn::set_transform_budget(nanoseconds);
}

// Lets Ctrl-C, or any signal whose handler raises, end a call. These are functions of Python's
// stable C API, of the same names.
namespace {
struct {
  unsigned long main_thread;
  int (*gil_ensure)();
  void (*gil_release)(int);
  int (*check_signals)();
  void (*fetch)(void**, void**, void**);
} python;
void* raised[3];  // what the handler raised: type, value and traceback

// Only the main thread handles signals; it may have released the GIL. No other thread may wait for
// the GIL here, because the main thread may hold it while it waits for that thread.
void check_signals() {
  if ((unsigned long)pthread_self() != python.main_thread) return;
  const int gil = python.gil_ensure();
  const bool interrupted = python.check_signals() != 0;
  if (interrupted) python.fetch(&raised[0], &raised[1], &raised[2]);
  python.gil_release(gil);
  if (interrupted) throw std::runtime_error("boltzattn: interrupted by a signal");
}
}  // namespace

BOLTZATTN_EXPORT void boltzattn_handle_signals(unsigned long main_thread, int (*gil_ensure)(),
                                               void (*gil_release)(int), int (*check)(),
                                               void (*fetch)(void**, void**, void**)) {
  python = {main_thread, gil_ensure, gil_release, check, fetch};
  boltzattn::set_interrupt_check(check_signals);
}

// Hands over what the handler has raised, which is then the caller's.
BOLTZATTN_EXPORT void boltzattn_take_raised(void** type_value_traceback) {
  for (int i = 0; i < 3; ++i) {
    type_value_traceback[i] = raised[i];
    raised[i] = nullptr;
  }
}
