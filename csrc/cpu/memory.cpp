// Memory that tasks work in. No torch.
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

}  // namespace

void throw_out_of_memory(int64_t bytes) {
  throw OutOfMemory(bytes);
}

char* thread_scratch(int64_t bytes) {
  if (block.bytes < bytes) {
    block.release();
    const int64_t whole = (bytes + kPage - 1) / kPage * kPage;
    block.data = static_cast<char*>(std::aligned_alloc(size_t(kAlignment), size_t(whole)));
    if (!block.data) throw_out_of_memory(whole);
    block.bytes = whole;
  }
  return block.data;
}

void trim_thread_scratch() {
  if (block.bytes > kKept) block.release();
}

}  // namespace boltzattn
