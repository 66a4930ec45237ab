// The core of the transform: from the moments at the key nodes to node values on the query axis,
// and bounds of the interpolation errors on both. No token appears here, so all of it is fp64.
// Included inside an ISA's namespace. docs/transform.md derives the bounds.

constexpr double kNegligible = -80;  // exponent below which a panel of key nodes adds nothing

BOLTZATTN_INLINE double larger_of(double a, double b) {
  return a > b ? a : b;
}
// The largest magnitude; NaN if there is a NaN or an infinity.
template <class T>
static double largest_of(const T* x, int64_t size) {
  constexpr int L = kLanes<T>;
  Vec<T> largest{}, odd{};
  int64_t c = 0;
  for (; c + L <= size; c += L) {
    const Vec<T> v = load(x + c);
    largest = larger<T>(largest, v < T(0) ? -v : v);
    odd += v * T(0);
  }
  double most = double(reduce_max<T>(largest)), rest = double(reduce_sum<T>(odd));
  for (; c < size; ++c) {
    most = larger_of(most, x[c] < 0 ? -double(x[c]) : double(x[c]));
    rest += double(x[c]) * 0;
  }
  return most + rest;
}

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
    // The kernel of the last panel reads whole vectors, too.
    set_zero(key.data + int64_t(layout.key.panels) * layout.key.nodes, kLanes<double>);
  }

  // Whether some exp(t_i (s_b - reference)) on this pair of panels is not negligible. A linear
  // function of s for each t, so the largest exponent lies at an end of both.
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

// The error of interpolating exp(t s(w)) on a key panel is at most 4 M rho^(1-q) / (rho - 1) for
// every rho, M being its largest modulus on the Bernstein ellipse of rho. Here are the logarithm of
// that factor and, panel by panel, how far Re s reaches up and down on the ellipse.
struct Ellipses {
  static constexpr int kEllipses = 6;
  double log_factor[kEllipses];
  Buffer<double> up, down;  // [panels][kEllipses]

  explicit Ellipses(const Layout& layout)
      : up(layout.key.panels * kEllipses), down(layout.key.panels * kEllipses) {
    const Axis& axis = layout.key;
    for (int r = 0; r < kEllipses; ++r) {
      const double height = kKeyStrip * (r + 1) / kEllipses;
      const double rho = bernstein_rho(height, axis.half);
      log_factor[r] = ::log(4 / (rho - 1)) + (1 - axis.nodes) * ::log(rho);
      const Boxes boxes(::sqrt(axis.half * axis.half + height * height), height);
      for (int k = 0; k < axis.panels; ++k) {
        const double centre = axis.origin + axis.half * (2 * k + 1);
        up.data[k * kEllipses + r] = layout.radius * boxes.highest(centre);
        down.data[k * kEllipses + r] = -layout.radius * boxes.highest(-centre);
      }
    }
  }

  // Upper bound of Re tanh(w) on an ellipse. Re tanh(a + ib) = sinh 2a / (cosh 2a + cos 2b) grows
  // with a, and with b where a > 0; the quarter ellipse is covered by boxes.
  struct Boxes {
    static constexpr int kBoxes = 4;
    double grown[kBoxes], cosine[kBoxes];  // exp(2 reach_k), and cos 2b where a > 0

    Boxes(double reach, double height) {
      for (int k = 0; k < kBoxes; ++k) {
        grown[k] = ::exp(2 * reach * ::cos(k * kPi / (2 * kBoxes)));
        cosine[k] = ::cos(2 * height * ::sin((k + 1) * kPi / (2 * kBoxes)));
      }
    }
    double highest(double centre) const {
      double most = -1;
      const double shift = ::exp(2 * centre);
      for (int k = 0; k < kBoxes; ++k) {
        const double up = shift * grown[k], down = 1 / up;  // exp(2a), exp(-2a)
        most = larger_of(most, (up - down) / (up + down + 2 * (up > 1 ? cosine[k] : 1)));
      }
      return most;
    }
  };

  // Bound of the key-side error of Z at t, relative to Z; keys[panel] counts the keys there.
  double error(const Layout& layout, const double* keys, double t, double z,
               double reference) const {
    double sum = 0;
    for (int k = 0; k < layout.key.panels; ++k) {
      if (!(keys[k] > 0.5)) continue;
      const double* extreme = (t >= 0 ? up.data : down.data) + k * kEllipses;
      double least_log = INFINITY;
      for (int r = 0; r < kEllipses; ++r) {
        const double bound = log_factor[r] + t * (extreme[r] - (reference - layout.middle));
        least_log = bound < least_log ? bound : least_log;
      }
      if (least_log > kNegligible) sum += keys[k] * ::exp(least_log);
    }
    return sum / z;
  }
};

// Bound of the query-side error on a panel, absolute: F is analytic in the strip, so its Chebyshev
// coefficients decay like rho^-k; the last four set the constant.
struct Decay {
  static constexpr int kLast = 4;
  double row[kLast * kMostNodes];  // node values -> coefficient k, times rho^(k-p)
  double factor;

  explicit Decay(const Layout& layout) {
    const int p = layout.query.nodes;
    const double rho = bernstein_rho(layout.query_strip, layout.query.half);
    for (int k = p - kLast; k < p; ++k)
      for (int i = 0; i < p; ++i)
        row[(k - p + kLast) * kMostNodes + i] =
            2.0 / p * ::cos(k * (2 * i + 1) * kPi / (2 * p)) * ::pow(rho, k - p);
    factor = 4 / (1 - 1 / rho);
  }

  // f: [nodes][row_size]; scratch: [kLast][row_size].
  double error(const Layout& layout, const double* f, int64_t row_size, int64_t columns,
               double* scratch) const {
    gemm<double, false>(kLast, row_size / kLanes<double>, layout.query.nodes, {row, kMostNodes, 1},
                        f, row_size, scratch, row_size);
    double largest = 0;
    for (int k = 0; k < kLast; ++k)
      largest = larger_of(largest, largest_of(scratch + k * row_size, columns));
    return factor * largest;
  }
};
