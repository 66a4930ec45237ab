// Task parallelism on torch's thread pool. Threads take tasks one by one, so uneven tasks balance.
// Results must not depend on which thread runs a task.
#pragma once

#include <cstdint>

namespace boltzattn {

// Calls body(context, task) for every task below `tasks`; implemented in ops.cpp.
void run_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context);

int64_t thread_count();

[[noreturn]] void throw_bad_alloc();

template <class Body>
static void parallel(int64_t tasks, Body body) {
  run_tasks(
      tasks, [](void* context, int64_t task) { (*static_cast<Body*>(context))(task); }, &body);
}

}  // namespace boltzattn
