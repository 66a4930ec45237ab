// Heads and threads. Included inside an ISA's namespace.

// Each thread takes whole heads if there are many; all threads share each head if there are few.
template <class Body>
static void for_heads(int64_t heads, Body body) {
  heads >= thread_count() ? parallel(heads, body) : serial(heads, body);
}
