// The tokens of a head of rank 2 to 4 in the order of their panels, and their weights on the nodes.
// Included inside an ISA's namespace.

// Some tokens, first .. first + n, ordered by panel. Tokens that are not plain come after the last
// panel.
struct TensorOrder {
  const TensorTokens* tokens = nullptr;
  const Axis* axis = nullptr;
  int64_t first = 0, n = 0;
  int64_t panels = 1;        // of all axes
  Buffer<int32_t> panel;     // [n]
  Buffer<int32_t> order;     // [n + kTile]
  Buffer<int32_t> start;     // [panels + 2]
  Buffer<int32_t> occupied;  // panels with tokens
  int64_t count = 0;         // of these

  void sort(const TensorTokens& of, const Axis* axes, int64_t begin, int64_t end) {
    tokens = &of;
    axis = axes;
    first = begin;
    n = end - begin;
    const int rank = of.rank;
    panels = 1;
    for (int a = 0; a < rank; ++a) panels *= axes[a].panels;
    panel.resize(n);
    order.resize(n + kTile);
    start.resize(panels + 2);
    for_parts(n, kChunk, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        int64_t at = 0;
        for (int a = 0; a < rank; ++a) {
          const double x = of.at.data[(first + i) * rank + a];
          const double f = (x - axes[a].origin) * (0.5 / axes[a].half);
          const double last = axes[a].panels - 1;
          at = at * axes[a].panels + int64_t(f > 0 ? f < last ? f : last : 0);
        }
        panel.data[i] = int32_t(of.is_plain(first + i) ? at : panels);
      }
    });
    set_zero(start.data, panels + 2);
    for (int64_t i = 0; i < n; ++i) ++start.data[panel.data[i]];
    int32_t sum = 0;
    for (int64_t p = 0; p < panels + 2; ++p) sum += start.data[p], start.data[p] = sum;
    for (int64_t k = n; k < n + kTile; ++k) order.data[k] = 0;
    for (int64_t i = n - 1; i >= 0; --i)
      order.data[--start.data[panel.data[i]]] = int32_t(first + i);
    occupied.resize(panels);
    count = 0;
    for (int64_t p = 0; p < panels; ++p)
      if (start.data[p + 1] > start.data[p]) occupied.data[count++] = int32_t(p);
  }
  int64_t plain() const { return start.data[panels]; }
  int64_t rest() const { return n - plain(); }
  int64_t panel_of(int64_t token) const { return panel.data[token - first]; }
  void centre(int64_t p, double* to) const {
    for (int a = tokens->rank - 1; a >= 0; --a) {
      to[a] = tensor_centre(axis[a], p % axis[a].panels);
      p /= axis[a].panels;
    }
  }
};

// Tasks take runs of tokens in the order of panels; their number depends on sizes alone.
struct Segments {
  int64_t tokens, count, each;

  explicit Segments(int64_t n)
      : tokens(n), count(most(1, least(32, n / 512))), each(ceil_div(n, count)) {}
  int64_t begin(int64_t k) const { return least(tokens, k * each); }
};

// Weights of tokens on the nodes of their panel: products of those of every axis.
template <class T>
struct TensorWeights {
  const TensorOrder& order;
  const int rank, nodes;
  const Lagrange<double> basis;
  Buffer<double> place, axis_weight;  // [kTile], [rank][nodes][kTile]
  Buffer<double> product[2];          // of some axes
  Buffer<T> weight;                   // [nodes^rank][kTile]

  // more: lines that the caller fills after those of the nodes.
  TensorWeights(const TensorOrder& of, int nodes_on_axis, int64_t more = 0)
      : order(of),
        rank(of.tokens->rank),
        nodes(nodes_on_axis),
        basis(nodes_on_axis),
        place(kTile),
        axis_weight(rank * nodes * kTile),
        weight((size() + more) * kTile) {
    for (int a = 1; a + 1 < rank; ++a) product[a % 2].resize(size() * kTile);
  }

  int size() const {
    int all = 1;
    for (int a = 0; a < rank; ++a) all *= nodes;
    return all;
  }

  // Weights of some tokens of a panel, times factor[i] if it is given. Padding has weight 0.
  T* find(int64_t panel, const int32_t* token, int64_t count, const double* factor) {
    constexpr int L = kLanes<double>;
    const int64_t padded = round_up(count, kLanes<T>);
    double centre[kMostAxes];
    order.centre(panel, centre);
    for (int a = 0; a < rank; ++a) {
      const double inverse = 1 / order.axis[a].half;
      for (int64_t i = 0; i < count; ++i)
        place.data[i] = (order.tokens->at.data[token[i] * int64_t(rank) + a] - centre[a]) * inverse;
      for (int64_t i = count; i < padded; ++i) place.data[i] = 0;
      basis.weigh(place.data, padded, axis_weight.data + a * nodes * kTile);
    }
    alignas(64) double scale[kTile];
    for (int64_t i = 0; i < padded; ++i) scale[i] = i < count ? factor ? factor[i] : 1 : 0;
    for (int b = 0; b < nodes; ++b) {
      double* line = axis_weight.data + b * kTile;
      for (int64_t i = 0; i < padded; i += L) store(line + i, load(line + i) * load(scale + i));
    }
    // The product of all axes but the last in fp64, times the last one.
    const double* left = axis_weight.data;
    int64_t lines = nodes;
    for (int a = 1; a + 1 < rank; ++a) {
      double* to = product[a % 2].data;
      multiply(left, lines, a, padded, to);
      left = to;
      lines *= nodes;
    }
    multiply(left, lines, rank - 1, padded, weight.data);
    return weight.data;
  }

 private:
  // to[line * nodes + b] = left[line] times the weights of node b of axis a.
  template <class To>
  void multiply(const double* left, int64_t lines, int a, int64_t padded, To* to) const {
    constexpr int L = kLanes<double>;
    typedef To Narrow __attribute__((vector_size(L * sizeof(To))));
    const double* right = axis_weight.data + a * nodes * kTile;
    for (int64_t i = 0; i < padded; i += L)
      for (int64_t l = 0; l < lines; ++l) {
        const Vec<double> x = load(left + l * kTile + i);
        for (int b = 0; b < nodes; ++b) {
          const Narrow w = __builtin_convertvector(x * load(right + b * kTile + i), Narrow);
          __builtin_memcpy(to + (l * nodes + b) * kTile + i, &w, sizeof w);
        }
      }
  }
};

// Visits the tokens of a segment in tiles that lie on one panel:
// visit(panel, whether it is the first tile of the panel here, tile).
template <class Visit>
static void for_tensor_tiles(const TensorOrder& order, const Segments& segments, int64_t segment,
                             Visit visit) {
  const int64_t begin = segments.begin(segment), end = segments.begin(segment + 1);
  if (begin >= end) return;
  int64_t p = order.panel_of(order.order.data[begin]);
  for (int64_t i = begin; i < end;) {
    while (order.start.data[p + 1] <= i) ++p;
    const int64_t stop = least(end, order.start.data[p + 1]);
    for (bool first = true; i < stop; first = false) {
      const int64_t here = least(kTile, stop - i);
      visit(p, first, Tile{0, order.order.data + i, here});
      i += here;
    }
  }
}
