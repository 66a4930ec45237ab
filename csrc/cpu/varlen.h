// Sequences of different lengths, end to end in the rows of one set of tensors. Included inside an
// ISA's namespace.
//
// Each sequence is a separate call on some rows, without padding or copies.

// The call on the rows of one sequence.
struct SequenceGradient {
  Buffer<int64_t> offsets;  // of heads
  AttentionGradient g;

  SequenceGradient(const AttentionGradient& whole, const Sequence& s)
      : offsets(10 * whole.call.heads), g(whole) {
    Attention& call = g.call;
    call.n_q = s.n_q;
    call.n_k = s.n_k;
    int64_t* next = offsets.data;
    auto start_at = [&](Matrix& m, int64_t row) {
      if (!m) return;
      for (int64_t h = 0; h < call.heads; ++h) next[h] = m.head[h] + row * m.row;
      m.head = next;
      next += call.heads;
    };
    for (Matrix* m : {&call.query, &call.out, &call.lse, &g.grad_out, &g.grad_lse, &g.grad_query})
      start_at(*m, s.query);
    for (Matrix* m : {&call.key, &call.value, &g.grad_key, &g.grad_value}) start_at(*m, s.key);
  }
};

// All threads share a sequence that is more than a fair share of the work; each thread takes whole
// sequences of the rest.
template <class Body>
static void for_sequences(const Sequence* sequences, int64_t count, Body body) {
  auto work = [](const Sequence& s) {
    return s.by_transform ? 1e5 + 64.0 * double(s.n_q + s.n_k) : double(s.n_q) * double(s.n_k);
  };
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += work(sequences[i]);
  const double share = total / double(2 * thread_count());
  for (int64_t i = 0; i < count; ++i)
    if (work(sequences[i]) > share) body(sequences[i]);
  parallel(count, [&](int64_t i) {
    if (!(work(sequences[i]) > share)) body(sequences[i]);
  });
}

template <class T>
static void varlen_forward(const Attention& whole, const Sequence* sequences, int64_t count) {
  const AttentionGradient none{whole, {}, {}, {}, {}, {}};
  for_sequences(sequences, count, [&](const Sequence& s) {
    const SequenceGradient one(none, s);
    if (!s.by_transform)
      direct_forward<T>(one.g.call);
    else if (whole.is_causal)
      scan_forward<T>(one.g.call);
    else
      transform_forward<T>(one.g.call);
  });
}

template <class T>
static void varlen_backward(const AttentionGradient& whole, const Sequence* sequences,
                            int64_t count) {
  for_sequences(sequences, count, [&](const Sequence& s) {
    const SequenceGradient one(whole, s);
    if (!s.by_transform)
      direct_backward<T>(one.g);
    else if (whole.call.is_causal)
      scan_backward<T>(one.g);
    else
      transform_backward<T>(one.g);
  });
}
