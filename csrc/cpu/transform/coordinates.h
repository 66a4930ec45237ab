// Where tokens fall on an axis of the layout: panel, place on the panel, Lagrange weights there.
// Included inside an ISA's namespace.

constexpr int64_t kTile = 48;  // tokens of one panel that are worked on together

// Where the tokens of a chunk fall. Kept in scratch memory, because it is too large for the stack.
struct Coordinates {
  double u[kChunk];      // the token's number on entry, then its warped coordinate
  double place[kChunk];  // in [-1, 1] on its panel
  double t[kChunk];      // of queries: scale * q
  int32_t panel[kChunk];
  uint8_t skip[kChunk];
  int32_t order[kChunk + kTile];

  // u = asinh(t / tau), by its series near 0: where all queries are small, so are the panels.
  void warp_queries(const Layout& layout, int64_t count) {
    const double inverse = 1 / layout.tau;
    double* root = place;
    for (int64_t i = 0; i < count; ++i) {
      u[i] *= inverse;
      root[i] = __builtin_sqrt(u[i] * u[i] + 1);
    }
    for (int64_t i = 0; i < count; i += kLanes<double>) {
      const Vec<double> x = load(u + i), magnitude = x < 0.0 ? -x : x, y = x * x;
      const Vec<double> w = log_of(magnitude + load(root + i));
      const Vec<double> series = x * (1.0 + y * (y * 0.075 - 1.0 / 6));
      store(u + i, magnitude < 1e-3 ? series : x < 0.0 ? -w : w);
    }
  }

  // w = atanh((s - middle) / radius)
  void warp_keys(const Layout& layout, int64_t count) {
    const double inverse = 1 / layout.radius;
    for (int64_t i = 0; i < count; i += kLanes<double>) {
      const Vec<double> y = (load(u + i) - layout.middle) * inverse;
      store(u + i, log_of((1.0 + y) / (1.0 - y)) * 0.5);
    }
  }

  // Splits u into a panel and a place on it.
  void locate(const Axis& axis, int64_t count) {
    const double inverse = 0.5 / axis.half, origin = axis.origin;
    const double last = axis.panels - 1;
    for (int64_t i = 0; i < count; ++i) {
      const double f = (u[i] - origin) * inverse;
      // A token outside the range, or NaN, is assigned to a panel, too.
      const int32_t p = int32_t(f > 0 ? f < last ? f : last : 0);
      panel[i] = p;
      place[i] = 2 * (f - p) - 1;
    }
  }

  // Orders the tokens by panel, leaving out masked ones: those of panel p are
  // order[start[p]] .. order[start[p + 1] - 1], in their old order. Token 0 fills the entries after
  // the last token.
  void sort(bool masked, int64_t count, int panels, int32_t* start) {
    for (int p = 0; p <= panels; ++p) start[p] = 0;
    if (masked) {
      for (int64_t i = 0; i < count; ++i) start[panel[i]] += !skip[i];
    } else {
      for (int64_t i = 0; i < count; ++i) start[panel[i]] += 1;
    }
    for (int p = 0, sum = 0; p <= panels; ++p) sum += start[p], start[p] = sum;
    for (int64_t k = start[panels]; k < start[panels] + kTile; ++k) order[k] = 0;
    for (int64_t i = count - 1; i >= 0; --i)
      if (!masked || !skip[i]) order[--start[panel[i]]] = int32_t(i);
  }
};

// Weights of the Lagrange basis: weight[a][i] = prod_{b != a} (x_i - x_b) / (x_a - x_b).
// Products from both ends keep every factor and need no division. In fp64, because nodes
// rounded to fp32 would not be those of the tables.
template <class T>
struct Lagrange {
  int nodes;
  double node[kMostNodes];
  double factor[kMostNodes];  // 1 / prod_{b != a} (x_a - x_b)

  explicit Lagrange(int count) : nodes(count) {
    for (int a = 0; a < nodes; ++a) node[a] = chebyshev_node(nodes, a);
    find_factors();
  }

  // place[count] -> weight[nodes][stride]
  void weigh(const double* place, int64_t count, T* weight, int64_t stride = kTile) const {
    weigh(place, count, weight, stride, [](Vec<double>) { return splat<double>(1); });
  }

 protected:
  Lagrange() = default;
  void find_factors() {
    for (int a = 0; a < nodes; ++a) {
      factor[a] = 1;
      for (int b = 0; b < nodes; ++b)
        if (b != a) factor[a] /= node[a] - node[b];
    }
  }
  // All weights times common(x).
  template <class Common>
  void weigh(const double* place, int64_t count, T* weight, int64_t stride, Common common) const {
    constexpr int L = kLanes<double>;
    typedef T Narrow __attribute__((vector_size(L * sizeof(T))));
    Vec<double> left[kMostNodes];
    for (int64_t i = 0; i < count; i += L) {
      const Vec<double> x = load(place + i);
      Vec<double> product = common(x);
      for (int a = 0; a < nodes; ++a) {
        left[a] = product * factor[a];
        product *= x - node[a];
      }
      product = splat<double>(1);
      for (int a = nodes - 1; a >= 0; --a) {
        const Narrow w = __builtin_convertvector(left[a] * product, Narrow);
        __builtin_memcpy(weight + a * stride + i, &w, sizeof w);
        product *= x - node[a];
      }
    }
  }
};
