// The transform in stages, for keys and queries that lie on several machines. Included inside an
// ISA's namespace.
//
// Between the stages the caller adds up what every machine found: extents, sums over the keys, and
// in backward sums over the queries. Their sizes do not depend on the number of tokens. All
// machines work with the same layout, since it follows from the shared range alone.

template <class T>
struct Stage : TransformGradient<T> {
  using Base = TransformGradient<T>;
  using Base::call;
  using Base::centre;
  using Base::dv;
  using Base::g;
  using Base::layout;
  using Base::range;
  using Base::raw;
  using Base::raw_centre;
  using Base::raw_size;
  using Base::row_size;
  const int64_t width = dv + 1;  // of a row of shared sums
  const bool served;             // so far

  Stage(const AttentionGradient& gradient, int64_t head, const SharedRange& shared)
      : Base(gradient, head), served(shared.level >= 0) {
    const bool nothing = shared.n_q == 0 || shared.keys == 0;
    range = {shared.t_min, shared.t_max, shared.s_min, shared.s_max,
             nothing ? 0 : int64_t(shared.keys)};
    if (nothing || !served) return;
    const DType dtype = call.value.dtype;
    layout = choose_layout(range, int64_t(shared.n_q), int64_t(shared.n_k), dv,
                           precision_of(dtype, int(shared.level)), most_key_nodes(dtype));
  }

  bool nothing() const { return range.keys == 0 || !served; }
  // Sums over the keys: a row per key node and one for either end, whose last column counts.
  int64_t key_sums() const { return nothing() ? 0 : (this->key_nodes() + 2) * width; }
  int64_t query_sums() const { return nothing() ? 0 : this->query_nodes() * width; }

  // This machine's part of the sums; values are summed from its own end keys, and shared as they
  // are. An end key that is here gives its values as the centre.
  void sum_keys(const Extent& keys, double* to) {
    const int64_t rows = this->key_nodes();
    set_zero(to, key_sums());
    if (nothing() || keys.count == 0) return;
    this->end_key[0] = int64_t(keys.at_high);
    this->end_key[1] = int64_t(keys.at_low);
    this->find_centres();
    raw.resize(rows * raw_size);
    this->sum_moments(true, call.value, dv, nullptr, raw_size, raw.data, [](auto...) {});
    for (int64_t r = 0; r < rows; ++r, to += width) {
      const double* from = raw.data + r * raw_size;
      const double* own = this->centre_of(this->end_of_key_panel(r / layout.key.nodes));
      for (int64_t c = 0; c < dv; ++c) to[c] = from[c] + from[dv] * own[c];
      to[dv] = from[dv];
    }
    const bool here[2] = {keys.high == range.s_max, keys.low == range.s_min};
    for (int end = 0; end < 2; ++end, to += width) {
      if (!here[end]) continue;
      for (int64_t c = 0; c < dv; ++c) to[c] = this->centre_of(end)[c];
      to[dv] = 1;
    }
  }

  // Node values from everybody's sums; false: the certificate is missed.
  bool build_from(const double* sums, bool slopes) {
    const int64_t rows = this->key_nodes();
    raw.resize(rows * raw_size);
    raw_centre.resize(2 * raw_size);
    centre.resize(2 * row_size);
    set_zero(raw_centre.data, 2 * raw_size);
    set_zero(centre.data, 2 * row_size);
    // Equal end keys on several machines: the mean of their values.
    for (int end = 0; end < 2; ++end) {
      const double* from = sums + (rows + end) * width;
      for (int64_t c = 0; c < dv; ++c) {
        const T mean = T(from[c] / from[dv]);
        raw_centre.data[end * raw_size + c] = mean;
        centre.data[end * row_size + c] = double(mean);
      }
    }
    for (int64_t r = 0; r < rows; ++r, sums += width) {
      double* to = raw.data + r * raw_size;
      const double* own = this->centre_of(this->end_of_key_panel(r / layout.key.nodes));
      for (int64_t c = 0; c < dv; ++c) to[c] = sums[c] - sums[dv] * own[c];
      to[dv] = sums[dv];
      for (int64_t c = width; c < raw_size; ++c) to[c] = 0;
    }
    if (!this->finite_sums()) return false;
    this->measure_from_ends();
    const auto bounds = this->run_core(slopes);
    if (!(bounds.largest <= kLargestSum)) return false;
    // The centres are values (or means of them), so no larger than the largest.
    const double size = larger_of(bounds.largest / 2, largest_of(centre.data, 2 * row_size));
    return this->certify(bounds, size);
  }

  void sum_queries(double* to) {
    Buffer<double> sums(this->query_nodes() * row_size);
    this->query_gradients(sums.data);
    for (int64_t r = 0; r < this->query_nodes(); ++r)
      for (int64_t c = 0; c < width; ++c) to[r * width + c] = sums.data[r * row_size + c];
  }

  void write_key_gradients(const double* from) {
    const int64_t rows = this->key_nodes();
    Buffer<double> sums(this->query_nodes() * row_size);
    set_zero(sums.data, this->query_nodes() * row_size);
    for (int64_t r = 0; r < this->query_nodes(); ++r)
      for (int64_t c = 0; c < width; ++c) sums.data[r * row_size + c] = from[r * width + c];
    Buffer<double> value_table(rows * row_size), slope_table(rows * row_size);
    this->key_tables(sums.data, value_table.data, slope_table.data);
    this->key_gradients(value_table.data, slope_table.data, row_size);
  }
};

template <class T>
static void stage_extents(const Attention& call, Extent* extents) {
  for_heads(call.heads, [&](int64_t h) {
    extents[2 * h] = extents[2 * h + 1] = Extent();
    Transform<T>(call, h).find_extents(extents[2 * h], extents[2 * h + 1]);
  });
}

// Calls body(stage, where its head's shared sums start).
template <class T, class Body>
static void for_stages(const AttentionGradient& g, const SharedRange* shared, Body body) {
  const int64_t heads = g.call.heads;
  Buffer<int64_t> starts(2 * (heads + 1));
  int64_t key_sums = 0, query_sums = 0;
  for (int64_t h = 0; h < heads; ++h) {
    const Stage<T> stage(g, h, shared[h]);
    starts.data[2 * h] = key_sums;
    starts.data[2 * h + 1] = query_sums;
    key_sums += stage.key_sums();
    query_sums += stage.query_sums();
  }
  for_heads(heads, [&](int64_t h) {
    Stage<T> stage(g, h, shared[h]);
    body(stage, starts.data[2 * h], starts.data[2 * h + 1]);
  });
}

template <class T>
static void stage_sizes(const AttentionGradient& g, const SharedRange* shared, int64_t* sizes) {
  sizes[0] = sizes[1] = 0;
  for (int64_t h = 0; h < g.call.heads; ++h) {
    const Stage<T> stage(g, h, shared[h]);
    sizes[0] += stage.key_sums();
    sizes[1] += stage.query_sums();
  }
}

template <class T>
static void stage_moments(const AttentionGradient& g, const SharedRange* shared,
                          const Extent* extents, double* sums) {
  for_stages<T>(g, shared, [&](Stage<T>& stage, int64_t first, int64_t) {
    if (stage.key_sums() > 0) stage.sum_keys(extents[2 * stage.h + 1], sums + first);
  });
}

template <class T>
static void stage_evaluate(const AttentionGradient& g, const SharedRange* shared,
                           const double* sums, bool* served) {
  for_stages<T>(g, shared, [&](Stage<T>& stage, int64_t first, int64_t) {
    served[stage.h] = stage.served && (stage.nothing() || stage.build_from(sums + first, false));
    if (served[stage.h]) stage.write_outputs();
  });
}

template <class T>
static void stage_query_moments(const AttentionGradient& g, const SharedRange* shared,
                                const double* sums, double* query_sums) {
  for_stages<T>(g, shared, [&](Stage<T>& stage, int64_t first, int64_t first_query) {
    if (stage.nothing() || g.call.n_q == 0) {
      set_zero(query_sums + first_query, stage.query_sums());
      stage.zero_rows(g.grad_query, g.call.n_q, 1);
      return;
    }
    stage.build_from(sums + first, true);
    stage.sum_queries(query_sums + first_query);
  });
}

template <class T>
static void stage_adjoint(const AttentionGradient& g, const SharedRange* shared, const double* sums,
                          const double* query_sums) {
  for_stages<T>(g, shared, [&](Stage<T>& stage, int64_t first, int64_t first_query) {
    if (stage.nothing()) {
      stage.zero_rows(g.grad_key, g.call.n_k, 1);
      stage.zero_rows(g.grad_value, g.call.n_k, g.call.dv);
      return;
    }
    stage.build_from(sums + first, false);
    stage.write_key_gradients(query_sums + first_query);
  });
}
