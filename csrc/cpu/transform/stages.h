// The transform stage by stage, for queries and keys that lie on several machines. Included inside
// an ISA's namespace.
//
// Between the stages the caller adds up what every machine found: extents, moments, and in backward
// query moments. Their sizes do not depend on the number of tokens. All machines work with the same
// layout, since it follows from the shared range alone.

template <class T>
struct SharedHead : Head<T> {
  const int64_t width;  // of a row of shared moments
  const bool served;    // so far

  SharedHead(const Attention& call, int64_t h, const SharedRange& shared)
      : Head<T>(call, h), width(call.dv + 1), served(shared.level >= 0) {
    const bool nothing = shared.n_q == 0 || shared.keys == 0;
    this->range = {shared.t_min, shared.t_max, shared.s_min, shared.s_max,
                   nothing ? 0 : int64_t(shared.keys)};
    if (nothing || !served) return;
    const DType dtype = call.value.dtype;
    this->layout = choose_layout(this->range, int64_t(shared.n_q), int64_t(shared.n_k), call.dv,
                                 precision_of(dtype, int(shared.level)), most_key_nodes(dtype));
  }

  bool nothing() const { return this->range.keys == 0 || !served; }
  // Moments: a row per key node and one per end; the last column counts keys.
  int64_t moments_size() const { return nothing() ? 0 : (this->key_nodes() + 2) * width; }
  int64_t query_moments_size() const { return nothing() ? 0 : this->query_nodes() * width; }
};

// This machine's part of the moments. Values are measured from its own end keys while they are
// summed, but not in the result. An end key that is on this machine adds its value to the centre.
template <class T>
static void give_moments(SharedHead<T>& head, const Extent& keys, double* to) {
  const int64_t rows = head.key_nodes(), dv = head.dv, width = head.width;
  set_zero(to, head.moments_size());
  if (head.nothing() || keys.count == 0) return;
  head.end_key[0] = int64_t(keys.at_high);
  head.end_key[1] = int64_t(keys.at_low);
  find_centres(head);
  sum_moments(head);
  for (int64_t r = 0; r < rows; ++r, to += width) {
    const double* from = head.raw.data + r * head.raw_size;
    const double* own = head.centre_of(head.end_of_key_panel(r / head.layout.key.nodes));
    for (int64_t c = 0; c < dv; ++c) to[c] = from[c] + from[dv] * own[c];
    to[dv] = from[dv];
  }
  const bool here[2] = {keys.high == head.range.s_max, keys.low == head.range.s_min};
  for (int end = 0; end < 2; ++end, to += width) {
    if (!here[end]) continue;
    for (int64_t c = 0; c < dv; ++c) to[c] = head.centre_of(end)[c];
    to[dv] = 1;
  }
}

// Node values from the moments of all machines; whether the head is served.
template <class T>
static bool build_from(SharedHead<T>& head, const double* moments, bool slopes) {
  const int64_t rows = head.key_nodes(), dv = head.dv, width = head.width;
  const int64_t raw_size = head.raw_size, row_size = head.row_size;
  head.raw.resize(rows * raw_size);
  head.clear_centres();
  // Several processes may have the same end key. The centre is the mean of their values.
  for (int end = 0; end < 2; ++end) {
    const double* from = moments + (rows + end) * width;
    for (int64_t c = 0; c < dv; ++c) {
      const T mean = T(from[c] / from[dv]);
      head.raw_centre.data[end * raw_size + c] = mean;
      head.centre.data[end * row_size + c] = double(mean);
    }
  }
  for (int64_t r = 0; r < rows; ++r, moments += width) {
    double* to = head.raw.data + r * raw_size;
    const double* own = head.centre_of(head.end_of_key_panel(r / head.layout.key.nodes));
    for (int64_t c = 0; c < dv; ++c) to[c] = moments[c] - moments[dv] * own[c];
    to[dv] = moments[dv];
    for (int64_t c = width; c < raw_size; ++c) to[c] = 0;
  }
  if (!finite_sums(head)) return false;
  measure_from_ends(head);
  const Bounds bounds = run_core(head, slopes);
  if (!(bounds.largest <= kLargestSum)) return false;
  // The centres are values, or means of values, so they are not larger than the largest value.
  return certify(head, bounds,
                 larger_of(bounds.largest / 2, largest_of(head.centre.data, 2 * row_size)));
}

// Copies rows to rows of another width. Only the columns that both have are copied.
static void copy_rows(int64_t rows, const double* from, int64_t from_width, double* to,
                      int64_t to_width) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < least(from_width, to_width); ++c)
      to[r * to_width + c] = from[r * from_width + c];
}

template <class T>
void stage_extents(const Attention& call, Extent* extents) {
  for_heads(call.heads, [&](int64_t h) {
    extents[2 * h] = extents[2 * h + 1] = Extent();
    find_extents(call, h, extents[2 * h], extents[2 * h + 1]);
  });
}

// Where the moments and the query moments of each head start, [heads + 1][2].
template <class T>
static void find_starts(const Attention& call, const SharedRange* shared, int64_t* starts) {
  starts[0] = starts[1] = 0;
  for (int64_t h = 0; h < call.heads; ++h, starts += 2) {
    const SharedHead<T> head(call, h, shared[h]);
    starts[2] = starts[0] + head.moments_size();
    starts[3] = starts[1] + head.query_moments_size();
  }
}

template <class T>
void stage_sizes(const Attention& call, const SharedRange* shared, int64_t* sizes) {
  Buffer<int64_t> starts(2 * (call.heads + 1));
  find_starts<T>(call, shared, starts.data);
  sizes[0] = starts.data[2 * call.heads];
  sizes[1] = starts.data[2 * call.heads + 1];
}

// Calls body(head, where its moments start, where its query moments start).
template <class T, class Body>
static void for_shared_heads(const Attention& call, const SharedRange* shared, Body body) {
  Buffer<int64_t> starts(2 * (call.heads + 1));
  find_starts<T>(call, shared, starts.data);
  for_heads(call.heads, [&](int64_t h) {
    SharedHead<T> head(call, h, shared[h]);
    body(head, starts.data[2 * h], starts.data[2 * h + 1]);
  });
}

template <class T>
void stage_moments(const Attention& call, const SharedRange* shared, const Extent* extents,
                   double* moments) {
  for_shared_heads<T>(call, shared, [&](SharedHead<T>& head, int64_t first, int64_t) {
    if (!head.nothing()) give_moments(head, extents[2 * head.h + 1], moments + first);
  });
}

template <class T>
void stage_evaluate(const Attention& call, const SharedRange* shared, const double* moments,
                    bool* served) {
  for_shared_heads<T>(call, shared, [&](SharedHead<T>& head, int64_t first, int64_t) {
    served[head.h] = head.served && (head.nothing() || build_from(head, moments + first, false));
    if (served[head.h]) evaluate(head);
  });
}

// A head that is not served gets no gradients; `evaluate` has reported it.
template <class T>
void stage_query_moments(const AttentionGradient& g, const SharedRange* shared,
                         const double* moments, double* query_moments) {
  for_shared_heads<T>(g.call, shared, [&](SharedHead<T>& head, int64_t first, int64_t start) {
    double* to = query_moments + start;
    if (head.nothing() || g.call.n_q == 0 || !build_from(head, moments + first, true)) {
      set_zero(to, head.query_moments_size());
      return zero_rows<T>(g.grad_query, head.h, g.call.n_q, 1);
    }
    const int64_t rows = head.query_nodes();
    Buffer<double> sums(rows * head.row_size);
    sum_query_moments(head, g, sums.data);
    copy_rows(rows, sums.data, head.row_size, to, head.width);
  });
}

template <class T>
void stage_adjoint(const AttentionGradient& g, const SharedRange* shared, const double* moments,
                   const double* query_moments) {
  for_shared_heads<T>(g.call, shared, [&](SharedHead<T>& head, int64_t first, int64_t start) {
    if (head.nothing() || !build_from(head, moments + first, false)) {
      zero_rows<T>(g.grad_key, head.h, g.call.n_k, 1);
      return zero_rows<T>(g.grad_value, head.h, g.call.n_k, g.call.dv);
    }
    const int64_t rows = head.query_nodes();
    Buffer<double> sums(rows * head.row_size);
    set_zero(sums.data, rows * head.row_size);
    copy_rows(rows, query_moments + start, head.width, sums.data, head.row_size);
    KeyTables tables;
    adjoint(head, sums.data, tables);
    evaluate_keys(head, g, tables.values.data, tables.slopes.data, head.row_size);
  });
}
