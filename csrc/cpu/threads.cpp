// Runs tasks on torch's threads, by the stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>

#include "cpu/parallel.h"

namespace boltzattn {

int64_t thread_count() {
  return torch::stable::get_num_threads();
}

namespace {

// The tasks of one call of run_tasks, which some threads take one by one.
struct Region {
  const int64_t tasks;
  void (*const body)(void*, int64_t);
  void* const context;
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
  std::exception_ptr failure{};  // of the task that failed first

  void work();
};
thread_local Region* region = nullptr;  // whose tasks this thread runs

// torch hands no exception on from its threads, so the first one is kept.
void Region::work() {
  Region* const outer = region;
  region = this;
  try {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      pause_point();
      body(context, task);
    }
  } catch (...) {
    if (!stop.exchange(true)) failure = std::current_exception();
  }
  region = outer;
  if (!outer) trim_thread_scratch();
}

struct Stopped {};

std::atomic<InterruptCheck> interrupt_check{nullptr};

}  // namespace

void set_interrupt_check(InterruptCheck check) {
  interrupt_check = check;
}

void pause_point() {
  using Clock = std::chrono::steady_clock;
  constexpr auto kBetweenChecks = std::chrono::milliseconds(100);
  if (region && region->stop.load(std::memory_order_relaxed)) throw Stopped();
  const InterruptCheck check = interrupt_check.load(std::memory_order_relaxed);
  if (!check) return;
  thread_local Clock::time_point last;
  const Clock::time_point now = Clock::now();
  if (now - last < kBetweenChecks) return;
  last = now;
  check();
}

void run_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context) {
  const int64_t threads = std::min(tasks, thread_count());
  if (region) {  // inside a task: torch would run these on this thread, too
    for (int64_t task = 0; task < tasks; ++task) body(context, task);
    return;
  }
  Region here{tasks, body, context};
  if (threads <= 1) {
    here.work();
  } else {
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { here.work(); });
  }
  if (here.failure) std::rethrow_exception(here.failure);
}

}  // namespace boltzattn
