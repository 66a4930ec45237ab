// Sequences of different lengths, end to end in the rows of one set of tensors. Included inside an
// ISA's namespace.
//
// Each sequence is a separate call on some rows, without padding or copies. `direct` takes what is
// added to scores; distances are counted within a sequence.

// The call on the rows of one sequence.
struct SequenceGradient {
  Buffer<int64_t> offsets;  // of heads
  AttentionGradient g;

  SequenceGradient(const AttentionGradient& whole, const Sequence& s)
      : offsets(12 * whole.call.heads), g(whole) {
    Attention& call = g.call;
    call.n_q = s.n_q;
    call.n_k = s.n_k;
    int64_t* next = offsets.data;
    auto start_at = [&](Matrix& m, int64_t row, int64_t column = 0) {
      if (!m) return;
      for (int64_t h = 0; h < call.heads; ++h)
        next[h] = m.head[h] + row * m.row + column * m.column;
      m.head = next;
      next += call.heads;
    };
    for (Matrix* m : {&call.query, &call.out, &call.lse, &g.grad_out, &g.grad_lse, &g.grad_query})
      start_at(*m, s.query);
    for (Matrix* m : {&call.key, &call.value, &g.grad_key, &g.grad_value}) start_at(*m, s.key);
    for (Matrix* m : {&call.key_mask, &g.grad_key_mask}) start_at(*m, 0, s.key);
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
void varlen_forward(const Attention& whole, const Sequence* sequences, int64_t count) {
  AttentionGradient none{};
  none.call = whole;
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
void varlen_backward(const AttentionGradient& whole, const Sequence* sequences, int64_t count) {
  // Each sequence has its own gradient of the slopes, so that they are added up in order.
  const int64_t heads = whole.call.heads;
  const Matrix& slopes = whole.grad_slopes;
  Buffer<double> of_slopes(slopes ? count * heads : 0);
  Buffer<int64_t> each_head(heads);
  for (int64_t h = 0; h < heads; ++h) each_head.data[h] = h;
  for_sequences(sequences, count, [&](const Sequence& s) {
    SequenceGradient one(whole, s);
    if (slopes)
      one.g.grad_slopes = {of_slopes.data + (&s - sequences) * heads, DType::kFloat64,
                           each_head.data, 0, 0};
    if (!s.by_transform)
      direct_backward<T>(one.g);
    else if (whole.call.is_causal)
      scan_backward<T>(one.g);
    else
      transform_backward<T>(one.g);
  });
  for (int64_t h = 0; slopes && h < heads; ++h) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += of_slopes.data[i * heads + h];
    static_cast<double*>(slopes.data)[slopes.head[h]] = sum;
  }
}
