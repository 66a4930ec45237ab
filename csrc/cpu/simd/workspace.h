// Scratch memory. Included inside an ISA's namespace, and free of std:: containers on purpose:
// their shared inline code must not be compiled with instructions the machine might lack.

BOLTZATTN_INLINE int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
BOLTZATTN_INLINE int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}
BOLTZATTN_INLINE int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}
BOLTZATTN_INLINE int64_t most(int64_t a, int64_t b) {
  return a > b ? a : b;
}

constexpr int64_t kCacheLine = 64;

// AddressSanitizer (`make sanitize`) knows the blocks that it allocates, but not the pieces into
// which they are cut here, so these are declared to it.
#ifdef __SANITIZE_ADDRESS__
extern "C" void __asan_poison_memory_region(const volatile void*, size_t);
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t);
constexpr int64_t kGap = kCacheLine;  // between pieces
BOLTZATTN_INLINE void forbid(const void* data, int64_t bytes) {
  __asan_poison_memory_region(data, size_t(bytes));
}
BOLTZATTN_INLINE void allow(const void* data, int64_t bytes) {
  __asan_unpoison_memory_region(data, size_t(bytes));
}
#else
constexpr int64_t kGap = 0;
BOLTZATTN_INLINE void forbid(const void*, int64_t) {}
BOLTZATTN_INLINE void allow(const void*, int64_t) {}
#endif

// Memory of one call, cache-line aligned.
template <class T>
struct Buffer {
  T* data = nullptr;
  Buffer() = default;
  explicit Buffer(int64_t size) { resize(size); }
  ~Buffer() { release(); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void resize(int64_t size) {
    release();
    bytes = round_up(size * int64_t(sizeof(T)) + 1, kCacheLine);
    data = reinterpret_cast<T*>(take_block(bytes));
    forbid(data, bytes);
    allow(data, size * int64_t(sizeof(T)));
  }

 private:
  int64_t bytes = 0;

  void release() {
    if (data) give_block(reinterpret_cast<char*>(data), bytes);
    data = nullptr;
  }
};
// An array that grows.
template <class T>
struct List {
  T* data = nullptr;
  int64_t size = 0, room = 0;
  List() = default;
  ~List() { std::free(data); }
  List(const List&) = delete;
  List& operator=(const List&) = delete;

  T& operator[](int64_t i) { return data[i]; }
  const T& operator[](int64_t i) const { return data[i]; }
  const T& back() const { return data[size - 1]; }
  void pop() { --size; }
  void push(const T& x) {
    if (size == room) {
      room = room ? 2 * room : 64;
      void* grown = std::realloc(data, size_t(room) * sizeof(T));
      if (!grown) throw_out_of_memory(room * int64_t(sizeof(T)));
      data = static_cast<T*>(grown);
    }
    data[size++] = x;
  }
};

template <class T>
BOLTZATTN_INLINE void set_zero(T* data, int64_t size) {
  __builtin_memset(data, 0, size_t(size) * sizeof(T));
}

// Calls body(first, end) for parts of a long array, side by side.
template <class Body>
static void for_parts(int64_t size, int64_t part, Body body) {
  if (size <= part) return body(int64_t(0), size);
  parallel(ceil_div(size, part), [&](int64_t k) { body(k * part, least(size, (k + 1) * part)); });
}
constexpr int64_t kPart = 1 << 16;  // numbers
template <class T>
static void set_all_zero(T* data, int64_t size) {
  for_parts(size, kPart, [&](int64_t first, int64_t end) { set_zero(data + first, end - first); });
}

// Memory of one task, cut from that of its thread. The caller states how many bytes it takes in how
// many pieces; every piece is aligned. A thread has one at a time.
struct Scratch {
  char* next;
  char* end;
  Scratch(int64_t bytes, int64_t pieces) {
    bytes += pieces * (kCacheLine + kGap);
    next = thread_scratch(bytes);
    end = next + bytes;
    forbid(next, bytes);
  }
  template <class T>
  T* take(int64_t size) {
    char* taken = next;
    next += round_up(size * int64_t(sizeof(T)), kCacheLine) + kGap;
    if (next > end) __builtin_trap();
    allow(taken, size * int64_t(sizeof(T)));
    return reinterpret_cast<T*>(taken);
  }
};
