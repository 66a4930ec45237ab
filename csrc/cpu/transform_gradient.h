// The gradient of the transform. Included inside an ISA's namespace.
//
// Derivatives are formed in the core, never by differentiating the basis: interpolation loses
// nothing then.

template <class T>
struct TransformGradient : Transform<T> {
  using Base = Transform<T>;
  using Base::call;
  using Base::columns;
  using Base::dv;
  using Base::h;
  using Base::layout;
  using Base::range;
  using Base::raw_size;
  using Base::row_size;
  using typename Base::Pass;
  using typename Base::Table;
  const AttentionGradient& g;

  TransformGradient(const AttentionGradient& gradient, int64_t head)
      : Base(gradient.call, head), g(gradient) {}

  // dF at the query nodes (column dv: the gradient of lse), and the gradient of the queries:
  // dt_i = dO_i . F'(t_i) + dlse_i E[s].
  void query_gradients(double* node_gradient) {
    const int p = layout.query.nodes;
    const Table slopes(this->node_slope.data, row_size, this->query_nodes(), dv);
    this->sum_moments(
        false, g.grad_out, dv, g.grad_lse ? &g.grad_lse : nullptr, row_size, node_gradient,
        [&](int panel, const Tile& tile, int64_t begin, int64_t width, const T* weight,
            Rows<T> rows, const T* centre, double* dt) {
          const T* table = slopes.wide.data + int64_t(panel) * p * slopes.size;
          dot_with_table(p, tile.tokens, width, weight, table + begin, slopes.size, rows, centre,
                         dt);
          if (begin + width < dv) return;
          alignas(64) T mean[kTile];
          if (g.grad_lse) Base::blend(p, tile.tokens, weight, slopes.last.data + panel * p, mean);
          const double reference = reference_key(layout, panel);
          for (int64_t i = 0; i < tile.tokens; ++i) {
            const int64_t at = tile.first + tile.order[i];
            double grad_lse = 0;
            if (g.grad_lse) read_column(g.grad_lse, h, at, 1, &grad_lse);
            const double from_lse = g.grad_lse ? grad_lse * (reference + double(mean[i])) : 0;
            const T dq = T((dt[i] + from_lse) * call.scale);
            write_block(&dq, 0, 0, 1, 1, g.grad_query, h, at, 0);
          }
        });
  }

  // The core read backwards: tables over the key nodes for dv (`value_table`) and for ds
  // (`slope_table`, to be multiplied by v - centre; column dv is added):
  // ds_j = sum_a t_a E_aj / Z_a (dF_a . (v_j - F_a) + dlse_a).
  void key_tables(const double* node_gradient, double* value_table, double* slope_table) {
    const int p = layout.query.nodes, q = layout.key.nodes;
    const int64_t vectors = row_size / kLanes<double>, rows = this->query_nodes();
    const Nodes nodes(layout);
    // dF_a / Z_a, the same times t_a, and for either half of the keys the column of the latter that
    // has no v_j in it.
    Buffer<double> left(rows * row_size), scaled[2];
    for (auto& s : scaled) s.resize(rows * row_size);
    for (int64_t a = 0; a < rows; ++a) {
      const double* gradient = node_gradient + a * row_size;
      const double* f = this->node_out.data + a * row_size;
      const double* from = this->centre_of(this->end_of_query_panel(a / p));
      const double weight = this->inverse_z.data[a], t = nodes.query.data[a];
      for (int64_t c = 0; c < row_size; ++c) left.data[a * row_size + c] = gradient[c] * weight;
      for (int end = 0; end < 2; ++end) {
        const double* own = this->centre_of(end);
        double* to = scaled[end].data + a * row_size;
        double pull = gradient[dv];
        for (int64_t c = 0; c < dv; ++c) pull += gradient[c] * ((own[c] - from[c]) - f[c]);
        for (int64_t c = 0; c < row_size; ++c) to[c] = left.data[a * row_size + c] * t;
        to[dv] = pull * weight * t;
      }
    }
    parallel(layout.key.panels, [&](int64_t k) {
      double* values = value_table + k * q * row_size;
      double* slopes = slope_table + k * q * row_size;
      set_zero(values, q * row_size);
      set_zero(slopes, q * row_size);
      const int64_t e_row = Nodes::row_of(q);
      Buffer<double> e(kRun * p * e_row);
      auto matters = [&](int64_t panel) { return nodes.matters(layout, panel, k); };
      for_runs(layout.query.panels, matters, [&](int64_t first, int64_t count) {
        for (int64_t panel = 0; panel < count; ++panel)
          nodes.kernel(layout, first + panel, k, 1, e.data + panel * p * e_row, e_row);
        const int64_t from = first * p * row_size;
        gemm<double, true>(q, vectors, count * p, {e.data, 1, e_row}, left.data + from, row_size,
                           values, row_size);
        if (range.t_min < 0 || range.t_max > 0)  // else every query is 0 and no key is felt
          gemm<double, true>(q, vectors, count * p, {e.data, 1, e_row},
                             scaled[this->end_of_key_panel(k)].data + from, row_size, slopes,
                             row_size);
      });
    });
  }

  // Adds sum_b value_table[b]^T (moments of the raw rows)[b].
  void add_weight_gradient(const double* value_table) {
    const int64_t rows = this->key_nodes();
    Buffer<double> sums(rows * raw_size);
    for (int64_t r = 0; r < rows; ++r) {
      const double* from = this->raw.data + r * raw_size;
      const T* centre = this->raw_centre_of(r / layout.key.nodes);
      for (int64_t c = 0; c < raw_size; ++c)
        sums.data[r * raw_size + c] = c < columns ? from[c] + from[columns] * double(centre[c]) : 0;
    }
    constexpr int64_t kBlock = 32;
    parallel(ceil_div(dv, kBlock), [&](int64_t block) {
      const int64_t first = block * kBlock, here = least(kBlock, dv - first);
      Buffer<double> product(kBlock * raw_size);
      Buffer<T> row(columns);
      gemm<double, false>(here, raw_size / kLanes<double>, rows, {value_table + first, 1, row_size},
                          sums.data, raw_size, product.data, raw_size);
      for (int64_t o = 0; o < here; ++o) {
        read_block(g.grad_weight, h, first + o, 0, 1, columns, row.data, 0, 1);
        for (int64_t c = 0; c < columns; ++c)
          row.data[c] = T(double(row.data[c]) + product.data[o * raw_size + c]);
        write_block(row.data, 0, 1, 1, columns, g.grad_weight, h, first + o, 0);
      }
    });
  }

  // value_table and slope_table over the columns of the tensor of values.
  void key_gradients(const double* value_table, const double* slope_table, int64_t size) {
    const int q = layout.key.nodes;
    const Table values(value_table, size, this->key_nodes(), columns);
    const Table slopes(slope_table, size, this->key_nodes(), columns);
    const Shares<T> shares(kTile);
    const Write write = !this->first_of_group()
                            ? Write::kBlend
                            : choose_write<T>(g.grad_value, h, call.n_k, columns);
    const Lagrange<T> basis(q);
    const int64_t chunk = chunk_of(call.n_k);
    parallel(ceil_div(call.n_k, chunk), [&](int64_t task) {
      const int64_t first = task * chunk, count = least(chunk, call.n_k - first);
      Pass pass(layout.key);
      if (call.key_mask) zero_masked(first, count);
      this->for_tiles(
          pass, true, first, count, basis, [&](int panel, const Tile& tile, const T* weight) {
            const int64_t table = int64_t(panel) * q * values.size;
            double ds[kTile] = {};
            this->for_blocks(columns, [&](int64_t begin, int64_t width) {
              const Rows<T> rows = read_rows(call.value, h, tile, begin, width, pass.block);
              dot_with_table(q, tile.tokens, width, weight, slopes.wide.data + table + begin,
                             slopes.size, rows, this->raw_centre_of(panel) + begin, ds);
              write_rows(g.grad_value, h, tile, begin, width, shares, write, pass.block,
                         [&](auto finish) BOLTZATTN_INLINED {
                           spread_table(q, tile.tokens, width, weight,
                                        values.wide.data + table + begin, values.size, finish);
                         });
            });
            alignas(64) T rest[kTile];
            Base::blend(q, tile.tokens, weight, slopes.last.data + panel * q, rest);
            for (int64_t i = 0; i < tile.tokens; ++i) {
              const T dk = T(ds[i] + double(rest[i]));
              write_block(&dk, 0, 0, 1, 1, g.grad_key, h, first + tile.order[i], 0);
            }
          });
      if (write == Write::kStream) stream_end();
    });
  }

  void zero_masked(int64_t first, int64_t count) const {
    uint8_t skip[kChunk];
    this->read_mask(first, count, skip);
    Buffer<T> zero(columns);
    set_zero(zero.data, columns);
    for (int64_t j = 0; j < count; ++j) {
      if (!skip[j]) continue;
      if (this->first_of_group())
        write_block(zero.data, 0, 1, 1, columns, g.grad_value, h, first + j, 0);
      write_block(zero.data, 0, 1, 1, 1, g.grad_key, h, first + j, 0);
    }
  }

  void write_gradients() {
    if (this->empty()) {
      this->zero_rows(g.grad_query, call.n_q, 1);
      this->zero_rows(g.grad_key, call.n_k, 1);
      if (this->first_of_group()) this->zero_rows(g.grad_value, call.n_k, columns);
      return;
    }
    const int64_t rows = this->key_nodes();
    Buffer<double> node_gradient(this->query_nodes() * row_size);
    query_gradients(node_gradient.data);
    Buffer<double> value_table(rows * row_size), slope_table(rows * row_size);
    key_tables(node_gradient.data, value_table.data, slope_table.data);
    if (!call.weight) return key_gradients(value_table.data, slope_table.data, row_size);
    add_weight_gradient(value_table.data);
    Buffer<double> raw_value(rows * raw_size), raw_slope(rows * raw_size);
    this->apply_weight(value_table.data, row_size, rows, true, raw_value.data, raw_size);
    this->apply_weight(slope_table.data, row_size, rows, true, raw_slope.data, raw_size);
    for (int64_t r = 0; r < rows; ++r) {
      raw_value.data[r * raw_size + columns] = 0;
      raw_slope.data[r * raw_size + columns] = slope_table.data[r * row_size + dv];
    }
    key_gradients(raw_value.data, raw_slope.data, raw_size);
  }
};

// Many heads are shared out whole; few are worked on by all threads together.
template <class Body>
static void for_heads(int64_t heads, Body body) {
  heads >= thread_count() ? parallel(heads, body) : serial(heads, body);
}

// One head by `direct`, joined with what out and lse hold.
template <class T>
static void merge_direct(const Attention& whole, int64_t h) {
  const int64_t start = 0;
  Buffer<T> out(whole.n_q * whole.dv);
  Buffer<double> lse(whole.n_q);
  Attention call = whole;
  call.heads = 1;
  for (Matrix* m : {&call.query, &call.key, &call.value, &call.key_mask}) m->head += h;
  const DType dtype = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
  call.out = {out.data, dtype, &start, whole.dv, 1};
  call.lse = {lse.data, DType::kFloat64, &start, 1, 0};
  direct_forward<T>(call, 0, 1);
  for (int64_t i = 0; i < whole.n_q; ++i) {
    const int32_t here = 0;
    Shares<T> shares(1);
    shares.join(0, lse_of(whole, h) + i, lse.data[i]);
    for (int64_t c = 0; c < whole.dv; c += kColumns)
      scatter(out.data + i * whole.dv + c, kColumns, Tile{i, &here, 1}, c,
              least(kColumns, whole.dv - c), shares, whole.out, h, Write::kBlend);
  }
}

template <class T>
static void transform_forward(const Attention& call) {
  for_heads(call.heads, [&](int64_t h) {
    Transform<T> transform(call, h);
    if (transform.build(false)) return transform.write_outputs();
    call.merge ? merge_direct<T>(call, h) : direct_forward<T>(call, h, h + 1);
  });
}

template <class T>
static void transform_backward(const AttentionGradient& g) {
  for_heads(g.call.heads, [&](int64_t h) {
    TransformGradient<T> transform(g, h);
    transform.build(true) ? transform.write_gradients() : direct_backward<T>(g, h, h + 1);
  });
}

// Heads that add up are taken one after the other. False: `direct` must do it.
template <class T>
static bool layer_forward(const Attention& call) {
  for (int64_t h = 0; h < call.heads; ++h) {
    Transform<T> transform(call, h);
    if (!transform.build(false)) return false;
    transform.write_outputs();
  }
  return true;
}

template <class T>
static bool layer_backward(const AttentionGradient& g) {
  for (int64_t h = 0; h < g.call.heads; ++h) {
    TransformGradient<T> transform(g, h);
    if (!transform.build(true)) return false;
    transform.write_gradients();
  }
  return true;
}

template <class T>
static void transform_report(const Attention& call, TransformReport* reports) {
  for_heads(call.heads, [&](int64_t h) {
    Transform<T> transform(call, h);
    const bool served = transform.build(false);
    const Layout& layout = transform.layout;
    reports[h] = {double(served),
                  transform.certificate,
                  transform.range.keys > 0 ? largest_product(transform.range) : 0,
                  double(layout.query.panels),
                  double(layout.query.nodes),
                  double(layout.key.panels),
                  double(layout.key.nodes)};
  });
}
