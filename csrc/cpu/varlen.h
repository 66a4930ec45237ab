// Sequences of different lengths, end to end in the rows of one set of tensors. Included inside an
// ISA's namespace.
//
// Each sequence is a separate call on some rows, without padding or copies.

struct SequenceGradient {
  Cuts cuts;
  AttentionGradient g;

  SequenceGradient(const AttentionGradient& whole, const Sequence& s)
      : cuts{whole.call.heads, 1, 0, 0, Buffer<int64_t>(10 * whole.call.heads)}, g(whole) {
    Attention& call = g.call;
    call.n_q = s.n_q;
    call.n_k = s.n_k;
    for (Matrix* m : {&call.query, &call.out, &call.lse, &g.grad_out, &g.grad_lse, &g.grad_query})
      cuts.cut(*m, s.query, m->row);
    for (Matrix* m : {&call.key, &call.value, &g.grad_key, &g.grad_value})
      cuts.cut(*m, s.key, m->row);
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
      causal_forward<T>(one.g.call);
    else
      transform_forward<T>(one.g.call);
  });
}

// Skips causal sequences that the transform serves: the caller computes their gradients.
template <class T>
static void varlen_backward(const AttentionGradient& whole, const Sequence* sequences,
                            int64_t count) {
  for_sequences(sequences, count, [&](const Sequence& s) {
    if (s.by_transform && whole.call.is_causal) return;
    const SequenceGradient one(whole, s);
    s.by_transform ? transform_backward<T>(one.g) : direct_backward<T>(one.g);
  });
}
