// Heads of rank 2 to 4 in linear time; a head that would cost more than over all pairs, or is not
// served, goes to `direct`. Included inside an ISA's namespace.

// Reads queries and keys; false if a bias or a scale is not for the transform. Keys that no causal
// row sees are hidden.
template <class T, class C>
static bool read_tokens(TensorHead<T, C>& head) {
  const Attention& call = head.call;
  const int rank = head.rank;
  if (call.is_gaussian && !(call.scale > 0)) return false;
  if (most(call.n_q, call.n_k) > INT32_MAX - kTile) return false;
  for (TensorTokens* side : {&head.query, &head.key}) {
    side->rank = rank;
    side->n = side == &head.query ? call.n_q : call.n_k;
    side->at.resize(side->n * rank);
    side->state.resize(side->n);
    set_zero(side->state.data, side->n);
  }
  head.key.bias.resize(call.n_k);
  int odd = 0;
  const auto read = [&](TensorTokens& side, const Matrix& m, double times, bool keys) {
    for_parts(side.n, kChunk, [&](int64_t first, int64_t end) {
      double* x = side.at.data + first * rank;
      if (keys) {
        double* bias = head.key.bias.data + first;
        read_bias(call, head.h, first, end - first, bias, side.state.data + first);
        for (int64_t j = most(first, call.n_q); call.is_causal && j < end; ++j)
          side.state.data[j] = TensorTokens::kHidden;
        for (int64_t j = 0; j < end - first; ++j)
          if (!(::fabs(bias[j]) <= kLargestProduct)) __atomic_store_n(&odd, 1, __ATOMIC_RELAXED);
      }
      read_block(m, head.h, first, 0, end - first, rank, x, rank, 1);
      for (int64_t i = 0; i < end - first; ++i)
        for (int a = 0; a < rank; ++a) {
          double& number = x[i * rank + a];
          number = side.state.data[first + i] ? 0 : (number - head.origin[a]) * times;
        }
    });
  };
  read(head.key, call.key, 1, true);
  if (call.is_gaussian) {
    // Both sides are measured from a visible key, so that squares are no larger than they must be.
    for (int64_t j = 0; j < call.n_k; ++j)
      if (head.key.is_plain(j)) {
        read_block(call.key, head.h, j, 0, 1, rank, head.origin, 0, 1);
        break;
      }
    read(head.key, call.key, head.factor, true);
  }
  read(head.query, call.query, head.factor, false);
  return odd == 0;
}

// Looking for tokens that should go apart takes a while, and pays only if the core does not.
constexpr double kApartShare = 12;
constexpr int64_t kLeastForApart = 2048;  // tokens of a side

// Frame, layout and the order of tokens; false if the head is not served. An empty layout: there is
// nothing to attend to.
template <class T, class C>
static bool make_tensor_layout(TensorHead<T, C>& head) {
  const Attention& call = head.call;
  const DType dtype = call.value.dtype;
  const int rank = head.rank;
  if (!read_tokens(head)) return false;
  bool any = false;
  for (int64_t j = 0; j < call.n_k && !any; ++j) any = head.key.is_plain(j);
  if (!any || call.n_q == 0) return true;
  double* t_most = head.t_most;
  double* s_most = head.s_most;
  const double n_q = double(call.n_q), n_k = double(call.n_k), tokens = n_q + n_k;
  if (!choose_frame(head.query, head.key, head.frame, t_most, s_most)) return false;
  head.layout = choose_tensor_layout(dtype, rank, t_most, s_most, tokens, head.dv,
                                     call.is_causal ? (n_q < n_k ? n_q : n_k) : 0);
  const double direct =
      tensor_direct_cost(dtype, visible_pairs(n_q, n_k, call.is_causal), rank, head.dv);
  double& cost = head.cost;
  cost = head.layout.cost;
  head.direct_cost = direct;
  if (!call.is_causal && cost > kApartShare * tokens * kTokenOverhead &&
      least(call.n_q, call.n_k) >= kLeastForApart) {
    const Farthest of_query(head.query), of_key(head.key);
    if (choose_apart(dtype, head.dv, of_query, of_key, t_most, s_most, n_q, n_k, rank,
                     cost < direct ? cost : direct, head.apart)) {
      if (!read_tokens(head)) return false;  // as they were before the frame
      of_query.take(head.apart.queries, head.query, head.apart.query);
      of_key.take(head.apart.keys, head.key, head.apart.key);
      if (!choose_frame(head.query, head.key, head.frame, t_most, s_most)) return false;
      head.layout = choose_tensor_layout(dtype, rank, t_most, s_most, tokens, head.dv);
      const double pairs = double(head.apart.keys) * n_q + double(head.apart.queries) * n_k;
      cost = head.layout.cost + tensor_direct_cost(dtype, 1.5 * pairs, rank, head.dv);
    }
  }
  if (!(cost < larger_of(direct, transform_budget()))) return false;
  if (call.is_gaussian) {
    // The frame has moved the keys, so their squares are taken from the caller's.
    for_parts(call.n_k, kChunk, [&](int64_t first, int64_t end) {
      for (int64_t j = first; j < end; ++j) {
        double s[kMostAxes], sum = 0;
        head.original(call.key, j, head.factor, s);
        for (int a = 0; a < rank; ++a) sum += s[a] * s[a];
        if (head.key.state.data[j] != TensorTokens::kHidden) head.key.bias.data[j] -= 0.5 * sum;
      }
    });
  }
  // A mean query is a bias of the keys.
  double most_bias = 0;
  for (int64_t j = 0; j < call.n_k; ++j) {
    double sum = 0;
    for (int a = 0; a < rank; ++a) sum += head.frame.t_middle[a] * head.key.at.data[j * rank + a];
    head.key.bias.data[j] += sum;
    if (head.key.state.data[j] != TensorTokens::kHidden)
      most_bias = larger_of(most_bias, ::fabs(head.key.bias.data[j]));
  }
  for (int a = 0; a < rank; ++a) head.product += 2 * t_most[a] * s_most[a];
  head.product += most_bias;
  if (!(head.product <= kLargestProduct)) return false;
  double errors = 1;
  for (int k = 0; k < 2 * rank; ++k) errors *= 1 + tensor_precision(dtype).error;
  head.certificate = rounding_of(dtype, head.product) + 2 * (errors - 1);
  return head.certificate <= tolerance_of(dtype);
}

// Orders, moments and core; false if a value is not finite.
template <class T, class C>
static bool build(TensorHead<T, C>& head, bool slopes) {
  head.query_order.sort(head.query, head.layout.query, 0, head.query.n);
  head.key_order.sort(head.key, head.layout.key, 0, head.key.n);
  if (!sum_tensor_moments(head)) return false;
  SeparableCore<C> core = core_of(head, false, head.key_order.plain());
  core.run(head.moments.data, head.key_log.data, slopes, head.table, head.table_log);
  head.moments.resize(0);
  return true;
}

template <class T>
void tensor_forward(const Attention& call) {
  for_heads(call.heads, [&](int64_t h) {
    TensorHead<T, T> head(call, h);
    bool served = make_tensor_layout(head);
    if (!served) return direct_forward_heads<T>(call, h, h + 1);
    if (head.layout.nodes == 0) {
      for (int64_t i = 0; i < call.n_q; ++i) lse_of(call, h)[i] = -INFINITY;
      return zero_rows<T>(call.out, h, call.n_q, call.dv);
    }
    if (call.is_causal) {
      served = causal_forward(head);
    } else if ((served = build(head, false))) {
      evaluate_tensor(head);
      if (head.apart.queries > 0) ApartQueries<T>(call, h, head.apart).forward(call);
    }
    if (!served) direct_forward_heads<T>(call, h, h + 1);
  });
}

// false, with gradients void, if a gradient of out is not finite.
template <class T, class C>
static bool write_gradients(const TensorHead<T, C>& head, const AttentionGradient& g) {
  const Attention& call = g.call;
  const bool empty = head.layout.nodes == 0, add = head.apart.queries > 0;
  if (add) {
    ApartQueries<T>(call, head.h, head.apart).backward(g);
  } else if (empty || head.key_order.rest() > 0) {
    zero_rows<T>(g.grad_key, head.h, call.n_k, call.rank);
    zero_rows<T>(g.grad_value, head.h, call.n_k, call.dv);
    if (g.grad_key_mask) zero_rows<T>(g.grad_key_mask, head.h, 1, call.n_k);
  }
  if (empty) {
    zero_rows<T>(g.grad_query, head.h, call.n_q, call.rank);
    return true;
  }
  Buffer<C> query_moments(head.grid_rows(head.layout.query) * head.size);
  const int64_t segments = Segments(head.query_order.plain()).count;
  ApartSums apart(head.rank, head.apart.keys, head.size, segments);
  sum_tensor_gradients(head, g, query_moments.data, apart);
  if (!grid_is_moderate(head, head.query_order, head.layout.query, query_moments.data))
    return false;
  apart.join();
  write_apart_keys(head, g, apart, add);
  // exp(-log) is what 1 / Z lacks.
  Buffer<double> log(head.query_order.panels), key_log;
  Buffer<C> tables[kMostTables];
  for (int64_t p = 0; p < head.query_order.panels; ++p) log.data[p] = -INFINITY;
  for (int64_t i = 0; i < head.query_order.count; ++i)
    log.data[head.query_order.occupied.data[i]] = -head.table_log.data[i];
  SeparableCore<C> core = core_of(head, true, head.query_order.plain());
  core.run(query_moments.data, log.data, true, tables, key_log);
  evaluate_tensor_keys(head, g, tables, key_log.data, add);
  return true;
}

template <class T>
void tensor_backward(const AttentionGradient& g) {
  for_heads(g.call.heads, [&](int64_t h) {
    TensorHead<T, double> head(g.call, h);
    bool served = make_tensor_layout(head);
    if (served && g.call.is_causal && head.layout.nodes > 0)
      served = causal_backward(head, g);
    else
      served = served && (head.layout.nodes == 0 || build(head, true)) && write_gradients(head, g);
    if (!served) direct_backward_heads<T>(g, h, h + 1);
  });
}

template <class T>
void tensor_report(const Attention& call, TransformReport* reports) {
  for_heads(call.heads, [&](int64_t h) {
    TensorHead<T, T> head(call, h);
    const TensorLayout& layout = head.layout;
    TransformReport& report = reports[h];
    const bool served = make_tensor_layout(head) && (layout.nodes == 0 || build(head, false));
    const double nodes = double(layout.nodes);
    report = {double(served), head.certificate, head.product, 1, nodes, 1, nodes};
    report.apart_queries = double(head.apart.queries);
    report.apart_keys = double(head.apart.keys);
    report.cost = head.cost;
    report.direct_cost = head.direct_cost;
    report.chunk = double(layout.chunk);
    for (int a = 0; a < head.rank && layout.nodes > 0; ++a) {
      report.query_panels *= layout.query[a].panels;
      report.key_panels *= layout.key[a].panels;
      report.axis_product[a] = 2 * head.t_most[a] * head.s_most[a];
      report.axis_query_panels[a] = layout.query[a].panels;
      report.axis_key_panels[a] = layout.key[a].panels;
    }
  });
}
