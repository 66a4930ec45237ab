// Heads with a bias per key or Gaussian scores. Included inside an ISA's namespace.

// The largest distance of a query to its nearest key.
static double farthest_lookup(const Sites& queries, const Sites& keys) {
  double most = 0;
  for (int64_t i = 0, j = 0; i < queries.count; ++i) {
    while (j + 1 < keys.count && keys[j + 1] <= queries[i]) ++j;
    double gap = ::fabs(queries[i] - keys[j]);
    if (j + 1 < keys.count && keys[j + 1] - queries[i] < gap) gap = keys[j + 1] - queries[i];
    most = larger_of(most, gap);
  }
  return most;
}

// Leaves the layout empty if there is nothing to attend to; false if the head is not served.
template <class T>
static bool make_layout(Lookup<T>& head) {
  const Attention& call = head.call;
  if (call.is_gaussian && !(call.scale > 0)) return false;
  if (call.n_q == 0 || call.n_k == 0) return true;
  const EnvelopePrecision precision = envelope_precision(call.value.dtype);
  Sites sites[2];
  const bool apart = call.heads < thread_count();
  const auto find = [&](int64_t axis) {
    using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    axis == 0 ? find_query_sites<Bits>(call, head.h, head.query_coordinate, sites[0])
              : find_key_sites<Bits>(call, head.h, head.key_coordinate,
                                     envelope_depth(precision, call.n_k), sites[1]);
  };
  apart ? parallel(2, find) : serial(2, find);
  const Sites &queries = sites[0], &keys = sites[1];
  if (!queries.regular || !keys.regular) return false;
  if (keys.count == 0) return true;
  EnvelopeMaker maker(queries, keys, call.is_gaussian ? 1 : 0, precision, head.layout);
  double nearest = 0;
  const auto compare = [&](int64_t task) {
    if (task == 0)
      maker.find_sites();
    else if (call.is_gaussian)
      nearest = farthest_lookup(queries, keys);
  };
  apart ? parallel(2, compare) : serial(2, compare);
  // The size of the logits of keys that matter, which their rounding errors follow.
  const double first = queries[0], last = queries[queries.count - 1];
  const double low = keys.low, high = keys.high;
  const double t_most = larger_of(::fabs(first), ::fabs(last));
  if (call.is_gaussian) {
    // A logit moves by the rounding of a position times the distance, too.
    const double reach = ::sqrt(nearest * nearest + 4 * keys.most_bias) + 2;
    const double position = larger_of(t_most, larger_of(::fabs(low), ::fabs(high)));
    head.product = 0.5 * nearest * nearest + position * reach + kLargestRise + keys.most_bias;
  } else {
    head.product = t_most * (high - low) + keys.most_bias;
  }
  if (!(head.product <= kLargestProduct)) return false;
  maker.make_layout();
  return true;
}

// Layout, moments and core; whether the head is served.
template <class T>
static bool build(Lookup<T>& head, bool slopes) {
  if (!make_layout(head)) return false;
  if (head.layout.query.size == 0) return true;
  const bool served = sum_key_moments(head) && run_lookup_core(head, slopes);
  head.moments.resize(0);
  return served;
}

template <class T>
static void write_empty(const Lookup<T>& head) {
  const Attention& call = head.call;
  for (int64_t i = 0; i < call.n_q; ++i) lse_of(call, head.h)[i] = -INFINITY;
  zero_rows<T>(call.out, head.h, call.n_q, call.dv);
}

template <class T>
void lookup_forward(const Attention& call) {
  for_heads(call.heads, [&](int64_t h) {
    Lookup<T> head(call, h);
    if (!build(head, false)) return direct_forward_heads<T>(call, h, h + 1);
    head.empty() ? write_empty(head) : evaluate_lookup(head);
  });
}

// false, with gradients void, if a gradient of out is not finite: blocks would keep it from keys
// that have no weight for its query, and dense softmax does not.
template <class T>
static bool write_gradients(const Lookup<T>& head, const AttentionGradient& g) {
  const Attention& call = g.call;
  if (head.empty()) {
    zero_rows<T>(g.grad_query, head.h, call.n_q, 1);
    zero_rows<T>(g.grad_key, head.h, call.n_k, 1);
    zero_rows<T>(g.grad_value, head.h, call.n_k, call.dv);
    if (g.grad_key_mask) zero_rows<T>(g.grad_key_mask, head.h, 1, call.n_k);
    return true;
  }
  Buffer<double> query_moments(head.layout.query_node.size * head.row_size), values, slopes;
  sum_lookup_gradients(head, g, query_moments.data);
  if (!all_moderate(query_moments.data, head.layout.query_node.size * head.row_size)) return false;
  lookup_adjoint(head, query_moments.data, values, slopes);
  evaluate_lookup_keys(head, g, values.data, slopes.data);
  return true;
}

template <class T>
void lookup_backward(const AttentionGradient& g) {
  for_heads(g.call.heads, [&](int64_t h) {
    Lookup<T> head(g.call, h);
    if (!build(head, true) || !write_gradients(head, g)) direct_backward_heads<T>(g, h, h + 1);
  });
}

template <class T>
void lookup_report(const Attention& call, TransformReport* reports) {
  for_heads(call.heads, [&](int64_t h) {
    Lookup<T> head(call, h);
    const bool served = build(head, false);
    const double nodes = envelope_precision(call.value.dtype).nodes;
    reports[h] = {double(served), head.certificate,
                  head.product,   double(head.layout.query.size),
                  nodes,          double(head.layout.key.size),
                  nodes};
  });
}
