// The core of the transform: from the moments at the key nodes to node values on the query axis,
// and bounds of the interpolation errors on both. No token appears here, so all of it is fp64.
// Included inside an ISA's namespace. docs/transform.md derives the bounds.

// Positions of all nodes, keys measured from layout.middle.
struct Nodes {
  Buffer<double> query, key;

  explicit Nodes(const Layout& layout)
      : query(int64_t(layout.query.panels) * layout.query.nodes),
        key(int64_t(layout.key.panels) * layout.key.nodes + kLanes<double>) {
    double place[kMostNodes];
    for (int i = 0; i < layout.query.nodes; ++i) place[i] = chebyshev_node(layout.query.nodes, i);
    for (int k = 0; k < layout.query.panels; ++k)
      for (int i = 0; i < layout.query.nodes; ++i)
        query.data[k * layout.query.nodes + i] = query_at(layout, k, place[i]);
    for (int b = 0; b < layout.key.nodes; ++b) place[b] = chebyshev_node(layout.key.nodes, b);
    for (int k = 0; k < layout.key.panels; ++k)
      for (int b = 0; b < layout.key.nodes; ++b)
        key.data[k * layout.key.nodes + b] = key_at(layout, k, place[b]);
    // `kernel` reads whole vectors on the last panel, too.
    set_zero(key.data + int64_t(layout.key.panels) * layout.key.nodes, kLanes<double>);
  }

  // Whether some exp(t_i (s_b - reference)) on this pair of panels is not negligible. The exponent
  // is linear in s for each t, so it is largest at an end of both.
  bool matters(const Layout& layout, int64_t query_panel, int64_t key_panel) const {
    const int p = layout.query.nodes, q = layout.key.nodes;
    const double* t = query.data + query_panel * p;
    const double* s = key.data + key_panel * q;
    const double reference = reference_key(layout, int(query_panel)) - layout.middle;
    double top = -INFINITY;
    for (const double x : {t[0], t[p - 1]})
      for (const double y : {s[0], s[q - 1]}) top = larger_of(top, x * (y - reference));
    return top >= kNegligible;
  }

  // E[i][b] = exp(t_i (s_b - reference)) for the nodes of a query panel and `count` neighbouring
  // key panels. Rows are `row` apart and are written in whole vectors: row >= row_of(count * q).
  void kernel(const Layout& layout, int64_t query_panel, int64_t key_panel, int64_t count,
              double* e, int64_t row) const {
    const int p = layout.query.nodes, q = layout.key.nodes;
    const double* t = query.data + query_panel * p;
    const double* s = key.data + key_panel * q;
    const double reference = reference_key(layout, int(query_panel)) - layout.middle;
    for (int i = 0; i < p; ++i) {
      const double x = t[i] * kLog2e;
      for (int64_t b = 0; b < count * q; b += kLanes<double>)
        store(e + i * row + b, exp2_of((load(s + b) - reference) * x));
    }
  }
  static int64_t row_of(int64_t key_nodes) { return round_up(key_nodes, kLanes<double>); }
};

// Panels whose products are taken together: long sums cost less than many short ones.
constexpr int kRun = 8;

// Calls visit(first, count) for every run of at most kRun neighbouring panels that `matters`.
template <class Matters, class Visit>
static void for_runs(int64_t panels, Matters matters, Visit visit) {
  for (int64_t first = 0, end; first < panels; first = end) {
    for (end = first; end < panels && end - first < kRun && matters(end);) ++end;
    end > first ? visit(first, end - first) : void(end = first + 1);
  }
}

// Bounds of the key-side error: spec/certificate.h, with everything that needs no moments.
struct KeyErrors {
  double log_factor[kEllipses];
  Buffer<double> up, down;  // [panels][kEllipses]

  explicit KeyErrors(const Layout& layout)
      : up(layout.key.panels * kEllipses), down(layout.key.panels * kEllipses) {
    const Axis& axis = layout.key;
    for (int r = 0; r < kEllipses; ++r) {
      const Ellipse ellipse(axis, r);
      log_factor[r] = ellipse.log_factor(axis);
      double grown[Ellipse::kBoxes], cosine[Ellipse::kBoxes];
      for (int b = 0; b < Ellipse::kBoxes; ++b) {
        grown[b] = ::exp(2 * ellipse.edge(b));
        cosine[b] = ellipse.cosine(b);
      }
      const auto highest = [&](double middle) {
        double most = -1;
        const double shift = ::exp(2 * middle);
        for (int b = 0; b < Ellipse::kBoxes; ++b)
          most = larger_of(most, Ellipse::highest_tanh(shift * grown[b], cosine[b]));
        return most;
      };
      for (int k = 0; k < axis.panels; ++k) {
        const double middle = panel_middle(axis, k);
        up.data[k * kEllipses + r] = layout.radius * highest(middle);
        down.data[k * kEllipses + r] = -layout.radius * highest(-middle);
      }
    }
  }

  // Bound of the error of Z at t, relative to Z; keys[panel] counts the keys there.
  double at(const Layout& layout, const double* keys, double t, double z, double reference) const {
    double sum = 0;
    for (int k = 0; k < layout.key.panels; ++k) {
      if (!(keys[k] > 0.5)) continue;
      const double* extreme = (t >= 0 ? up.data : down.data) + k * kEllipses;
      const double log_error = key_log_error(log_factor, extreme, t, reference - layout.middle);
      if (log_error > kNegligible) sum += keys[k] * ::exp(log_error);
    }
    return sum / z;
  }
};

// Bounds of the query-side error on a panel, absolute.
struct QueryErrors {
  double row[kLastCoefficients * kMostNodes];
  double factor;

  explicit QueryErrors(const Layout& layout) : factor(decay_factor(layout)) {
    for (int k = 0; k < kLastCoefficients; ++k)
      for (int i = 0; i < layout.query.nodes; ++i)
        row[k * kMostNodes + i] = decay_weight(layout, k, i);
  }

  // Of F, and of log Z behind it. f: [nodes][row_size]; scratch: [kLastCoefficients][row_size].
  void of(const Layout& layout, const double* f, int64_t row_size, int64_t dv, double* scratch,
          double& of_f, double& of_lse) const {
    gemm<double, false>(kLastCoefficients, row_size / kLanes<double>, layout.query.nodes,
                        {row, kMostNodes, 1}, f, row_size, scratch, row_size);
    of_f = of_lse = 0;
    for (int k = 0; k < kLastCoefficients; ++k) {
      of_f = larger_of(of_f, factor * largest_of(scratch + k * row_size, dv));
      of_lse = larger_of(of_lse, factor * ::fabs(scratch[k * row_size + dv]));
    }
  }
};

struct Bounds {
  double largest, query, lse, key;  // largest |F|; bounds of the errors
};

// Node values from the moments; with slopes for backward.
template <class T>
static Bounds run_core(Head<T>& head, bool slopes) {
  const Layout& layout = head.layout;
  const int p = layout.query.nodes, q = layout.key.nodes, panels = layout.query.panels;
  const int64_t dv = head.dv, row_size = head.row_size, vectors = row_size / kLanes<double>;
  const Nodes nodes(layout);
  const KeyErrors key_errors(layout);
  const QueryErrors query_errors(layout);
  Buffer<Bounds> bounds(panels);
  head.node_out.resize(head.query_nodes() * row_size);
  head.inverse_z.resize(head.query_nodes());
  if (slopes) head.node_slope.resize(head.query_nodes() * row_size);
  if (slopes) head.panel_mean.resize(panels);
  const int64_t per_task = 4;
  parallel(ceil_div(panels, per_task), [&](int64_t task) {
    const int64_t e_row = Nodes::row_of(kRun * q);
    Buffer<double> e(p * e_row), scratch(kLastCoefficients * row_size);
    for (int64_t panel = task * per_task; panel < least(panels, (task + 1) * per_task); ++panel) {
      const double reference = reference_key(layout, int(panel));
      const double* t = nodes.query.data + panel * p;
      double* f = head.node_out.data + panel * p * row_size;
      double* slope = slopes ? head.node_slope.data + panel * p * row_size : nullptr;
      double* inverse = head.inverse_z.data + panel * p;
      set_zero(f, p * row_size);
      if (slopes) set_zero(slope, p * row_size);
      auto matters = [&](int64_t k) {
        return head.keys_on.data[k] > 0.5 && nodes.matters(layout, panel, k);
      };
      for_runs(layout.key.panels, matters, [&](int64_t first, int64_t count) {
        nodes.kernel(layout, panel, first, count, e.data, e_row);
        const double* m = head.moments[head.end_of_query_panel(panel)].data + first * q * row_size;
        const Strided<double> left{e.data, e_row, 1};
        gemm<double, true>(p, vectors, count * q, left, m, row_size, f, row_size);
        if (!slopes || head.range.s_min == head.range.s_max) return;  // equal keys: F is constant
        const double* s = nodes.key.data + first * q;
        for (int i = 0; i < p; ++i)
          for (int64_t b = 0; b < count * q; ++b)
            e.data[i * e_row + b] *= s[b] - (reference - layout.middle);
        gemm<double, true>(p, vectors, count * q, left, m, row_size, slope, row_size);
      });
      Bounds& bound = bounds.data[panel];
      bound = {0, 0, 0, 0};
      for (int i = 0; i < p; ++i) {
        double* row = f + i * row_size;
        const double z = row[dv];
        inverse[i] = 1 / z;
        for (int64_t c = 0; c < dv; ++c) row[c] *= inverse[i];
        row[dv] = ::log(z);
        const double largest = largest_of(row, dv) + row[dv] * 0;
        bound.largest = largest <= bound.largest ? bound.largest : largest;  // keeps a NaN
        if (i == 0 || i == p - 1 || i == p / 2)
          bound.key =
              larger_of(bound.key, key_errors.at(layout, head.keys_on.data, t[i], z, reference));
        if (!slopes) continue;
        double* derivative = slope + i * row_size;
        for (int64_t c = 0; c <= dv; ++c) derivative[c] *= inverse[i];
        const double mean = derivative[dv];
        // Scaled here: values times keys may overflow T where the gradient does not.
        for (int64_t c = 0; c < dv; ++c)
          derivative[c] = (derivative[c] - row[c] * mean) * head.call.scale;
      }
      if (slopes) {
        // Interpolation in T rounds relative to the table. An end key may be far from all keys that
        // have weight, so the mean key is measured from its value in the middle of the panel.
        const double middle = slope[p / 2 * row_size + dv];
        for (int i = 0; i < p; ++i) slope[i * row_size + dv] -= middle;
        head.panel_mean.data[panel] = reference + middle;
      }
      query_errors.of(layout, f, row_size, dv, scratch.data, bound.query, bound.lse);
    }
  });
  Bounds worst{0, 0, 0, 0};
  for (int panel = 0; panel < panels; ++panel) {
    const Bounds& bound = bounds.data[panel];
    worst.largest = bound.largest <= worst.largest ? worst.largest : bound.largest;
    worst.query = larger_of(worst.query, bound.query);
    worst.lse = larger_of(worst.lse, bound.lse);
    worst.key = larger_of(worst.key, bound.key);
  }
  return worst;
}

// Finds the certificate, relative to values of this size; whether it is within tolerance.
template <class T>
static bool certify(Head<T>& head, const Bounds& bounds, double size) {
  const DType dtype = head.call.value.dtype;
  head.certificate = certificate_of(bounds.query == 0 ? 0 : bounds.query / size, bounds.key,
                                    rounding_of(dtype, largest_product(head.range)));
  return head.certificate <= tolerance_of(dtype);
}
