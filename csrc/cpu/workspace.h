// Scratch memory. Included inside an ISA's namespace, and free of std:: containers on purpose:
// their shared inline code must not be compiled with instructions the machine might lack.

BOLTZATTN_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
BOLTZATTN_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
BOLTZATTN_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
BOLTZATTN_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

constexpr int64_t kCacheLine = 64;

// Zeroed memory of one call, cache-line aligned.
template <class T>
struct Buffer {
  T* data;
  explicit Buffer(int64_t size) {
    const size_t bytes = size_t(round_up(size * int64_t(sizeof(T)) + 1, kCacheLine));
    data = static_cast<T*>(std::aligned_alloc(size_t(kCacheLine), bytes));
    if (!data) throw_bad_alloc();
    __builtin_memset(data, 0, bytes);
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

// Memory of one task, cut from a per-thread block that outlives the call: a call touches no new
// pages.
struct ThreadBlock {
  char* data = nullptr;
  int64_t bytes = 0;
  ~ThreadBlock() { std::free(data); }
  char* reserve(int64_t wanted) {
    if (bytes < wanted) {
      std::free(data);
      bytes = round_up(wanted, 4096);
      data = static_cast<char*>(std::aligned_alloc(size_t(kCacheLine), size_t(bytes)));
      if (!data) {
        bytes = 0;
        throw_bad_alloc();
      }
    }
    return data;
  }
};

// Two passes over the same `take` calls would be needed to know the size exactly; instead the
// caller states what it takes and the arena adds the alignment of each piece.
template <class T>
struct Arena {
  char* next;
  char* end;
  explicit Arena(int64_t elements, int64_t pieces) {
    static thread_local ThreadBlock block;
    const int64_t bytes = elements * int64_t(sizeof(T)) + pieces * kCacheLine;
    next = block.reserve(bytes);
    end = next + bytes;
  }
  template <class U = T>
  U* take(int64_t size) {
    char* taken = next;
    next += round_up(size * int64_t(sizeof(U)), kCacheLine);
    if (next > end) __builtin_trap();
    return reinterpret_cast<U*>(taken);
  }
};
