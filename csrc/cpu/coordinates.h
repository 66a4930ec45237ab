// Where tokens fall on an axis of the layout: panel, place on the panel, Lagrange weights there.
// Included inside an ISA's namespace.

// log(x) for positive normal x, to rounding: x = 2^e m with m in [sqrt(1/2), sqrt(2)], and
// log(m) = 2 atanh((m - 1) / (m + 1)).
BOLTZATTN_INLINE Vec<double> log_of(Vec<double> x) {
  const Bits<double> bits = (Bits<double>)x;
  const Bits<double> low = bits & 0x000fffffffffffffll;
  const Bits<double> upper = low > 0x0006a09e667f3bcdll;  // mantissa above sqrt(2): all ones
  const Vec<double> m = (Vec<double>)(low | (0x3ff0000000000000ll + (upper << 52)));
  const Vec<double> e =
      (Vec<double>)(((bits >> 52) - upper) | 0x4330000000000000ll) - (4503599627370496.0 + 1023.0);
  const Vec<double> z = (m - 1.0) / (m + 1.0), y = z * z;
  Vec<double> sum = y * (2.0 / 21) + 2.0 / 19;
  sum = sum * y + 2.0 / 17;
  sum = sum * y + 2.0 / 15;
  sum = sum * y + 2.0 / 13;
  sum = sum * y + 2.0 / 11;
  sum = sum * y + 2.0 / 9;
  sum = sum * y + 2.0 / 7;
  sum = sum * y + 2.0 / 5;
  sum = sum * y + 2.0 / 3;
  return e * kLn2 + (z * 2.0 + z * y * sum);
}

constexpr int64_t kChunk = 1024;  // tokens whose rows stay in the second-level cache
constexpr int64_t kTile = 48;     // tokens of one panel that are worked on together

struct Coordinates {
  double u[kChunk];  // the token's number on entry, its warped coordinate afterwards
  int32_t panel[kChunk];

  // u = asinh(t / tau); absolute accuracy is what counts, so no care is taken near 0.
  void warp_queries(const Layout& layout, int64_t count) {
    const double inverse = 1 / layout.tau;
    double root[kChunk];
    for (int64_t i = 0; i < count; ++i) {
      u[i] *= inverse;
      root[i] = __builtin_sqrt(u[i] * u[i] + 1);
    }
    for (int64_t i = 0; i < round_up(count, kLanes<double>); i += kLanes<double>) {
      const Vec<double> x = load(u + i), magnitude = x < 0.0 ? -x : x;
      const Vec<double> w = log_of(magnitude + load(root + i));
      store(u + i, x < 0.0 ? -w : w);
    }
  }

  // w = atanh((s - middle) / radius)
  void warp_keys(const Layout& layout, int64_t count) {
    const double inverse = 1 / layout.radius;
    for (int64_t i = 0; i < round_up(count, kLanes<double>); i += kLanes<double>) {
      const Vec<double> y = (load(u + i) - layout.middle) * inverse;
      store(u + i, log_of((1.0 + y) / (1.0 - y)) * 0.5);
    }
  }

  // Splits u into a panel and a place in [-1, 1] on it.
  template <class T>
  void locate(const Axis& axis, int64_t count, T* place) {
    const double inverse = 0.5 / axis.half, origin = axis.origin;
    const int32_t last = axis.panels - 1;
    for (int64_t i = 0; i < count; ++i) {
      const double f = (u[i] - origin) * inverse;
      int32_t p = int32_t(f);
      p = p < 0 ? 0 : p;
      p = p > last ? last : p;
      panel[i] = p;
      place[i] = T(2 * (f - p) - 1);
    }
  }
};

// Weights of the Lagrange basis: weight[a][i] = prod_{b != a} (x_i - x_b) / (x_a - x_b).
// Products from both ends keep every factor and need no division.
template <class T>
struct Lagrange {
  int nodes;
  T node[kMostNodes];
  T factor[kMostNodes];  // 1 / prod_{b != a} (x_a - x_b)

  explicit Lagrange(int count) : nodes(count) {
    for (int a = 0; a < nodes; ++a) {
      double product = 1;
      for (int b = 0; b < nodes; ++b)
        if (b != a) product *= chebyshev_node(nodes, a) - chebyshev_node(nodes, b);
      node[a] = T(chebyshev_node(nodes, a));
      factor[a] = T(1 / product);
    }
  }

  // place[kTile] -> weight[nodes][kTile]; places past `count` are padding and get weight 0.
  void weigh(const T* place, int64_t count, T* weight) const {
    constexpr int L = kLanes<T>;
    for (int64_t i = 0; i < round_up(count, L); i += L) {
      const Vec<T> x = load(place + i);
      Vec<T> product = splat<T>(1);
      for (int a = 0; a < nodes; ++a) {
        store(weight + a * kTile + i, product * factor[a]);
        product *= x - node[a];
      }
      product = splat<T>(1);
      for (int a = nodes - 1; a >= 0; --a) {
        store(weight + a * kTile + i, load(weight + a * kTile + i) * product);
        product *= x - node[a];
      }
    }
    for (int a = 0; a < nodes; ++a)
      for (int64_t i = count; i < kTile; ++i) weight[a * kTile + i] = 0;
  }
};

// Tokens of a chunk in the order of their panels.
struct Sorted {
  int32_t order[kChunk];
  const int32_t* start;  // [panels + 1]

  // Tokens with skip[i] != 0 are left out. `counts` holds panels + 1 numbers.
  void sort(const int32_t* panel, const uint8_t* skip, int64_t count, int panels, int32_t* counts) {
    for (int p = 0; p <= panels; ++p) counts[p] = 0;
    for (int64_t i = 0; i < count; ++i) counts[panel[i] + 1] += !(skip && skip[i]);
    for (int p = 0; p < panels; ++p) counts[p + 1] += counts[p];
    for (int64_t i = count - 1; i >= 0; --i)
      if (!(skip && skip[i])) order[--counts[panel[i] + 1]] = int32_t(i);
    // Each counter has run down to the start of its panel; shift them into place.
    int32_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += !(skip && skip[i]);
    for (int p = 0; p < panels; ++p) counts[p] = counts[p + 1];
    counts[panels] = total;
    start = counts;
  }
};
