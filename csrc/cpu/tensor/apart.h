// Tokens that lie far from the others. A few of them would widen the panels' range and multiply the
// cost of the core, so they are computed pair by pair: far keys are nodes of their own for every
// query panel, and far queries are rows of `direct`. Included inside an ISA's namespace.

constexpr int64_t kMostApart = 256;

struct Apart {
  Buffer<int32_t> query, key;  // tokens, ascending
  int64_t queries = 0, keys = 0;
};

// The tokens of a side that lie farthest from their mean, in units of the mean distance on every
// axis, the farthest first.
struct Farthest {
  double spread[kMostAxes] = {};
  int64_t count = 0;
  double distance[kMostApart + 1];
  int32_t token[kMostApart + 1];

  explicit Farthest(const TensorTokens& side) {
    const int rank = side.rank;
    const double zero[kMostAxes] = {};
    const Cloud all = side.gather(
        [&](Cloud& cloud, int64_t i) { cloud.add(rank, side.at.data + i * rank, zero); });
    double mean[kMostAxes];
    for (int a = 0; a < rank; ++a) mean[a] = all.sum[a] / all.count;
    const Cloud gaps = side.gather([&](Cloud& cloud, int64_t i) {
      double gap[kMostAxes];
      for (int a = 0; a < rank; ++a) gap[a] = ::fabs(side.at.data[i * rank + a] - mean[a]);
      cloud.add(rank, gap, zero);
    });
    for (int a = 0; a < rank; ++a) spread[a] = gaps.sum[a] / gaps.count;
    for (int64_t i = 0; i < side.n; ++i) {
      if (!side.is_plain(i)) continue;
      double far = 0;
      for (int a = 0; a < rank; ++a)
        if (spread[a] > 0)
          far = larger_of(far, ::fabs(side.at.data[i * rank + a] - mean[a]) / spread[a]);
      if (count > kMostApart && !(far > distance[count - 1])) continue;
      int64_t k = count <= kMostApart ? count++ : count - 1;
      for (; k > 0 && distance[k - 1] < far; --k)
        distance[k] = distance[k - 1], token[k] = token[k - 1];
      distance[k] = far;
      token[k] = int32_t(i);
    }
  }
  // A bound of the largest |x_a| without the first m tokens, of those that reach to `most_of`.
  double without(int64_t m, int a, double most_of) const {
    const double bound = distance[least(m, count - 1)] * spread[a];
    return m == 0 || most_of < bound ? most_of : bound;
  }
  // Marks the first m tokens and lists them.
  void take(int64_t m, TensorTokens& side, Buffer<int32_t>& list) const {
    list.resize(m);
    for (int64_t k = 0; k < m; ++k) {
      side.state.data[token[k]] = TensorTokens::kApart;
      int64_t at = k;
      for (; at > 0 && list.data[at - 1] > token[k]; --at) list.data[at] = list.data[at - 1];
      list.data[at] = token[k];
    }
  }
};

// How many queries and keys go apart, by the cost model; whether any do.
static bool choose_apart(DType dtype, int64_t dv, const Farthest& query, const Farthest& key,
                         const double* t_most, const double* s_most, double n_q, double n_k,
                         int rank, double cost, Apart& apart) {
  constexpr int64_t kChoices[] = {0, 16, 64, kMostApart};
  for (const int64_t queries : kChoices)
    for (const int64_t keys : kChoices) {
      // Enough plain tokens must be left for panels to make sense.
      if (4.0 * double(queries) > n_q || 4.0 * double(keys) > n_k) continue;
      double t[kMostAxes], s[kMostAxes];
      for (int a = 0; a < rank; ++a) {
        t[a] = query.without(queries, a, t_most[a]);
        s[a] = key.without(keys, a, s_most[a]);
      }
      const double pairs = double(keys) * n_q + double(queries) * n_k;
      const double one = choose_tensor_layout(dtype, rank, t, s, n_q + n_k, dv).cost +
                         tensor_direct_cost(dtype, 1.5 * pairs, rank, dv);
      if (!(one < 0.9 * cost)) continue;
      cost = one / 0.9;
      apart.queries = queries;
      apart.keys = keys;
    }
  return apart.queries + apart.keys > 0;
}

// Some queries of a head as a call of their own on all its keys.
template <class T>
struct ApartQueries {
  static constexpr DType kType = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
  const int64_t h, count, rank, dv;
  const int32_t* list;
  int64_t begin[8] = {};  // offsets of heads
  Buffer<T> query, out, grad_out, grad_query;
  Buffer<double> lse, grad_lse;
  AttentionGradient g;

  ApartQueries(const Attention& call, int64_t head, const Apart& apart)
      : h(head),
        count(apart.queries),
        rank(call.rank),
        dv(call.dv),
        list(apart.query.data),
        query(count * rank),
        out(count * dv),
        lse(count) {
    g.call = call;
    g.call.heads = 1;
    g.call.n_q = count;
    read(call.query, rank, query.data);
    g.call.query = {query.data, kType, begin, rank, 1};
    g.call.out = {out.data, kType, begin, dv, 1};
    g.call.lse = {lse.data, DType::kFloat64, begin, 1, 0};
    Matrix* of_keys[] = {&g.call.key, &g.call.value, &g.call.key_mask};
    for (int k = 0; k < 3; ++k) move(*of_keys[k], 1 + k);
  }
  void forward(const Attention& call) {
    direct_forward_heads<T>(g.call, 0, 1);
    for (int64_t i = 0; i < count; ++i) {
      write_block(out.data + i * dv, 0, 1, 1, dv, call.out, h, list[i], 0);
      lse_of(call, h)[list[i]] = lse.data[i];
    }
  }
  // Writes the gradients of all keys and values, as far as these queries contribute.
  void backward(const AttentionGradient& whole) {
    g.grad_key = whole.grad_key;
    g.grad_value = whole.grad_value;
    g.grad_key_mask = whole.grad_key_mask;
    Matrix* of_keys[] = {&g.grad_key, &g.grad_value, &g.grad_key_mask};
    for (int k = 0; k < 3; ++k) move(*of_keys[k], 4 + k);
    grad_out.resize(count * dv);
    grad_query.resize(count * rank);
    grad_lse.resize(count);
    read(whole.call.out, dv, out.data);
    read(whole.grad_out, dv, grad_out.data);
    g.grad_out = {grad_out.data, kType, begin, dv, 1};
    g.grad_query = {grad_query.data, kType, begin, rank, 1};
    for (int64_t i = 0; i < count; ++i) lse.data[i] = lse_of(whole.call, h)[list[i]];
    if (whole.grad_lse) {
      for (int64_t i = 0; i < count; ++i)
        read_column(whole.grad_lse, h, list[i], 1, grad_lse.data + i);
      g.grad_lse = {grad_lse.data, DType::kFloat64, begin, 1, 0};
    }
    direct_backward_heads<T>(g, 0, 1);
    for (int64_t i = 0; i < count; ++i)
      write_block(grad_query.data + i * rank, 0, 1, 1, rank, whole.grad_query, h, list[i], 0);
  }

 private:
  void read(const Matrix& m, int64_t columns, T* to) const {
    for (int64_t i = 0; i < count; ++i)
      read_block(m, h, list[i], 0, 1, columns, to + i * columns, 0, 1);
  }
  void move(Matrix& m, int slot) {
    if (!m) return;
    begin[slot] = m.head[h];
    m.head = begin + slot;
  }
};
