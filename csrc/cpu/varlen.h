// Sequences of different lengths, end to end in the rows of one set of tensors. Included inside an
// ISA's namespace.
//
// A sequence is a call of its own on some rows: nothing is padded and nothing is copied.

// The rows [first, first + ..) of every head of a matrix; `offset` keeps their list.
static void cut_rows(Matrix& m, int64_t heads, int64_t first, Buffer<int64_t>& offset) {
  if (!m) return;
  offset.resize(heads);
  for (int64_t h = 0; h < heads; ++h) offset.data[h] = m.head[h] + first * m.row;
  m.head = offset.data;
}

struct SequenceGradient {
  Buffer<int64_t> offset[10];
  AttentionGradient g;

  SequenceGradient(const AttentionGradient& whole, const Sequence& s) : g(whole) {
    Attention& call = g.call;
    call.n_q = s.n_q;
    call.n_k = s.n_k;
    Buffer<int64_t>* next = offset;
    for (Matrix* m : {&call.query, &call.out, &call.lse, &g.grad_out, &g.grad_lse, &g.grad_query})
      cut_rows(*m, call.heads, s.query, *next++);
    for (Matrix* m : {&call.key, &call.value, &g.grad_key, &g.grad_value})
      cut_rows(*m, call.heads, s.key, *next++);
  }
};

// A sequence with more than its share of the work is worked on by all threads together; the others
// are shared out whole.
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
  const AttentionGradient none{whole, {}, {}, {}, {}, {}, {}};
  for_sequences(sequences, count, [&](const Sequence& s) {
    const SequenceGradient one(none, s);
    if (!s.by_transform)
      direct_forward<T>(one.g.call, 0, whole.heads);
    else if (whole.is_causal)
      causal_forward<T>(one.g.call);
    else
      transform_forward<T>(one.g.call);
  });
}

// Causal sequences of the transform are left out: their backward is put together by the caller.

template <class T>
static void varlen_backward(const AttentionGradient& whole, const Sequence* sequences,
                            int64_t count) {
  for_sequences(sequences, count, [&](const Sequence& s) {
    if (s.by_transform && whole.call.is_causal) return;
    const SequenceGradient one(whole, s);
    s.by_transform ? transform_backward<T>(one.g) : direct_backward<T>(one.g, 0, whole.call.heads);
  });
}
