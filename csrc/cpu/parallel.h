// Task parallelism on torch's thread pool. Threads take tasks one by one, so uneven tasks balance.
// Results must not depend on which thread runs a task.
#pragma once

#include <cstdint>

namespace boltzattn {

// Calls body(context, task) for every task below `tasks`; implemented in threads.cpp. If a task
// throws, the others stop at their next pause, and the exception is thrown again.
void run_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context);

int64_t thread_count();

// Long tasks call this every few milliseconds or more often: here they stop if another task has
// failed, or if the user has interrupted the call. Implemented in threads.cpp.
void pause_point();

// What `pause_point` asks about every tenth of a second, on any thread: throws to end the call.
using InterruptCheck = void (*)();
void set_interrupt_check(InterruptCheck check);

// Scratch memory of the calling thread, which its next call of this function may move.
char* thread_scratch(int64_t bytes);
// Gives back scratch memory that is too large to keep; called when a thread has run its tasks.
void trim_thread_scratch();

// Memory of a call, in whole cache lines and aligned to them. Some blocks of middle size are kept,
// and `bytes` becomes the size of the block, which may be larger.
char* take_block(int64_t& bytes);
void give_block(char* data, int64_t bytes);

[[noreturn]] void throw_out_of_memory(int64_t bytes);

template <class Body>
static void parallel(int64_t tasks, Body body) {
  run_tasks(
      tasks, [](void* context, int64_t task) { (*static_cast<Body*>(context))(task); }, &body);
}

}  // namespace boltzattn
