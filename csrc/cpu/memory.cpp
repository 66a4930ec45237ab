// Memory that tasks work in. No torch.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "cpu/parallel.h"

namespace boltzattn {

namespace {

class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(int64_t bytes) {
    std::snprintf(
        text_, sizeof text_,
        "boltzattn: cannot allocate %lld bytes of memory to work in; use shorter tensors, "
        "smaller dv or fewer threads",
        static_cast<long long>(bytes));
  }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[160];
};

// Outlives a call, so that calls do not touch new pages.
struct ThreadBlock {
  char* data = nullptr;
  int64_t bytes = 0;

  ~ThreadBlock() { std::free(data); }
  void release() {
    std::free(data);
    data = nullptr;
    bytes = 0;
  }
};
thread_local ThreadBlock block;

constexpr int64_t kKept = 16 << 20;  // a thread keeps at most this; dv = 4,096 takes about as much
constexpr int64_t kAlignment = 64, kPage = 4096;

char* new_block(int64_t bytes) {
  char* data = static_cast<char*>(std::aligned_alloc(size_t(kAlignment), size_t(bytes)));
  if (!data) throw_out_of_memory(bytes);
  return data;
}

#ifndef __SANITIZE_ADDRESS__  // which watches blocks that are free
// Blocks that calls have given back, for the next ones: the system clears a new block page by page.
// The C library keeps smaller ones itself, and larger ones are used for longer than that takes.
// Nobody waits for the lock: a process that was forked while a thread held it would wait forever.
class SpareBlocks {
 public:
  // The smallest that is large enough, unless most of it would be wasted.
  char* take(int64_t& bytes) {
    if (bytes < kLeast || bytes > kMost) return nullptr;
    const Guard guard(busy_);
    if (!guard.held) return nullptr;
    Spare* best = nullptr;
    for (Spare& one : spare_)
      if (one.bytes >= bytes && one.bytes <= 2 * bytes && (!best || one.bytes < best->bytes))
        best = &one;
    if (!best) return nullptr;
    char* const data = best->data;
    bytes = best->bytes;
    total_ -= bytes;
    *best = {};
    return data;
  }
  // Whether it is kept.
  bool keep(char* data, int64_t bytes) {
    if (bytes < kLeast || bytes > kMost) return false;
    const Guard guard(busy_);
    if (!guard.held || total_ + bytes > kMostTotal) return false;
    for (Spare& one : spare_)
      if (!one.data) {
        one = {data, bytes};
        total_ += bytes;
        return true;
      }
    return false;
  }

 private:
  // Gives up where a mutex would wait, and needs nothing of pthread, whose symbols are as new as
  // the glibc of the build.
  struct Guard {
    explicit Guard(std::atomic_flag& busy)
        : flag(busy), held(!busy.test_and_set(std::memory_order_acquire)) {}
    ~Guard() {
      if (held) flag.clear(std::memory_order_release);
    }
    std::atomic_flag& flag;
    const bool held;
  };
  struct Spare {
    char* data = nullptr;
    int64_t bytes = 0;
  };
  static constexpr int64_t kLeast = 1 << 20, kMost = 16 << 20, kMostTotal = 32 << 20;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  Spare spare_[16];
  int64_t total_ = 0;
};
SpareBlocks& spare_blocks() {
  static SpareBlocks* const blocks = new SpareBlocks;  // outlives threads that end after main
  return *blocks;
}
#endif

}  // namespace

void throw_out_of_memory(int64_t bytes) {
  throw OutOfMemory(bytes);
}

char* thread_scratch(int64_t bytes) {
  if (block.bytes < bytes) {
    block.release();
    const int64_t whole = (bytes + kPage - 1) / kPage * kPage;
    block.data = new_block(whole);
    block.bytes = whole;
  }
  return block.data;
}

#ifdef __SANITIZE_ADDRESS__
char* take_block(int64_t& bytes) {
  return new_block(bytes);
}
void give_block(char* data, int64_t) {
  std::free(data);
}
#else
char* take_block(int64_t& bytes) {
  char* const spare = spare_blocks().take(bytes);
  return spare ? spare : new_block(bytes);
}
void give_block(char* data, int64_t bytes) {
  if (!spare_blocks().keep(data, bytes)) std::free(data);
}
#endif

void trim_thread_scratch() {
  if (block.bytes > kKept) block.release();
}

}  // namespace boltzattn
