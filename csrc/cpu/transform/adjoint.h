// The stages `query_moments` and `adjoint`: from the gradient of out to tables over the key nodes.
// Included inside an ISA's namespace.
//
// Derivatives are formed in the core and not by differentiating the basis, so that interpolation
// loses no accuracy.

// dF at the query nodes (column dv: the gradient of lse), and the gradient of the queries:
// dq_i = scale (dO_i . F'(t_i) + dlse_i E[s]).
template <class T>
static void sum_query_moments(const Head<T>& head, const AttentionGradient& g,
                              double* query_moments) {
  const int p = head.layout.query.nodes;
  const int64_t h = head.h, dv = head.dv;
  const Table<T> slopes(head.node_slope.data, head.row_size, head.query_nodes(), dv);
  sum_over_panels(
      head, false, g.grad_out, dv, g.grad_lse ? &g.grad_lse : nullptr, head.row_size, query_moments,
      [&](int panel, const Tile& tile, int64_t begin, int64_t width, const T* weight, Rows<T> rows,
          const T* centre, double* dq) {
        const T* table = slopes.wide.data + int64_t(panel) * p * slopes.size;
        dot_with_table(p, tile.tokens, width, weight, table + begin, slopes.size, rows, centre, dq);
        if (begin + width < dv) return;
        alignas(64) T from_mean[kTile];
        if (g.grad_lse) blend(p, tile.tokens, weight, slopes.last.data + panel * p, from_mean);
        const double mean = head.panel_mean.data[panel];
        for (int64_t i = 0; i < tile.tokens; ++i) {
          const int64_t at = tile.first + tile.order[i];
          double grad_lse = 0;
          if (g.grad_lse) read_column(g.grad_lse, h, at, 1, &grad_lse);
          const double from_lse = g.grad_lse ? grad_lse * (mean + double(from_mean[i])) : 0;
          const T gradient = T(dq[i] + from_lse * head.call.scale);
          write_block(&gradient, 0, 0, 1, 1, g.grad_query, h, at, 0);
        }
      });
}

// The transpose of the core: tables [key nodes][row_size] for dv and for ds. The latter is
// multiplied by v - centre, and its column dv is added:
// ds_j = sum_a t_a E_aj / Z_a (dF_a . (v_j - F_a) + dlse_a).
struct KeyTables {
  Buffer<double> values, slopes;
};

template <class T>
static void adjoint(const Head<T>& head, const double* query_moments, KeyTables& tables) {
  const Layout& layout = head.layout;
  const int p = layout.query.nodes, q = layout.key.nodes;
  const int64_t dv = head.dv, row_size = head.row_size, vectors = row_size / kLanes<double>;
  const int64_t rows = head.query_nodes();
  const Nodes nodes(layout);
  tables.values.resize(head.key_nodes() * row_size);
  tables.slopes.resize(head.key_nodes() * row_size);
  // dF_a / Z_a, the same times t_a, and for either half of the keys the column of the latter that
  // does not depend on v_j.
  Buffer<double> left(rows * row_size), scaled[2];
  for (auto& s : scaled) s.resize(rows * row_size);
  for (int64_t a = 0; a < rows; ++a) {
    const double* gradient = query_moments + a * row_size;
    const double* f = head.node_out.data + a * row_size;
    const double* from = head.centre_of(head.end_of_query_panel(a / p));
    const double weight = head.inverse_z.data[a], t = nodes.query.data[a];
    for (int64_t c = 0; c < row_size; ++c) left.data[a * row_size + c] = gradient[c] * weight;
    for (int end = 0; end < 2; ++end) {
      const double* own = head.centre_of(end);
      double* to = scaled[end].data + a * row_size;
      double pull = gradient[dv];
      for (int64_t c = 0; c < dv; ++c) pull += gradient[c] * ((own[c] - from[c]) - f[c]);
      for (int64_t c = 0; c < row_size; ++c) to[c] = left.data[a * row_size + c] * t;
      to[dv] = pull * weight * t;
    }
  }
  parallel(layout.key.panels, [&](int64_t k) {
    double* values = tables.values.data + k * q * row_size;
    double* slopes = tables.slopes.data + k * q * row_size;
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
      if (head.range.t_min < 0 || head.range.t_max > 0)  // if not, all queries are 0
        gemm<double, true>(q, vectors, count * p, {e.data, 1, e_row},
                           scaled[head.end_of_key_panel(k)].data + from, row_size, slopes,
                           row_size);
    });
  });
}

// All gradients of a head whose core has run with slopes.
template <class T>
static void write_gradients(const Head<T>& head, const AttentionGradient& g) {
  const Attention& call = head.call;
  if (head.empty()) {
    zero_rows<T>(g.grad_query, head.h, call.n_q, 1);
    zero_rows<T>(g.grad_key, head.h, call.n_k, 1);
    if (head.first_of_group()) zero_rows<T>(g.grad_value, head.h, call.n_k, head.columns);
    return;
  }
  Buffer<double> query_moments(head.query_nodes() * head.row_size);
  sum_query_moments(head, g, query_moments.data);
  KeyTables tables;
  adjoint(head, query_moments.data, tables);
  if (!head.layer)
    return evaluate_keys(head, g, tables.values.data, tables.slopes.data, head.row_size);
  add_weight_gradient(head, tables.values.data);
  KeyTables of_rows;
  table_of_rows(head, tables.values.data, false, of_rows.values);
  table_of_rows(head, tables.slopes.data, true, of_rows.slopes);
  evaluate_keys(head, g, of_rows.values.data, of_rows.slopes.data, head.raw_size);
}
