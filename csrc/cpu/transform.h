// Rank-1 attention in linear time: moments of the keys, a core without n, evaluation at the
// queries. docs/transform.md derives it. Included inside an ISA's namespace.
//
// Tokens are handled in the arithmetic type T (fp32, or fp64 for fp64 tensors); coordinates, the
// core and every sum that runs over more than a few hundred tokens are fp64. Chunks and the order
// of sums depend on sizes alone, so results are bitwise the same for any number of threads.

constexpr int64_t kFlush =
    kTile;  // tokens summed in T before they go to fp64: equal ones round in step
constexpr double kNegligible = -80;  // exponent below which a key node adds nothing
constexpr int kLevels = 3;           // precisions tried before a head goes to `direct`

// Interpolation error aimed at: below the rounding of T at first, then tighter. Half precision
// needs no more than its own rounding.
BOLTZATTN_INLINE double precision_of(DType dtype, int level) {
  const double first = dtype == DType::kFloat64 ? 1e-17 : dtype == DType::kFloat32 ? 1e-8 : 1e-5;
  return level == 0 ? first : level == 1 ? first * 1e-3 : first * 1e-6;
}
BOLTZATTN_INLINE double tolerance_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-10;
    case DType::kFloat32:
      return 5e-6;
    case DType::kBFloat16:
      return 4.0 / 256;
    default:
      return 4.0 / 2048;
  }
}
// Rounding of the token passes and, for fp64, of logits of size B.
BOLTZATTN_INLINE double rounding_of(DType dtype, double product) {
  switch (dtype) {
    case DType::kFloat64:
      return 8e-15 + 4e-16 * product;
    case DType::kFloat32:
      return 3e-6;
    case DType::kBFloat16:
      return 1.0 / 256;
    default:
      return 1.0 / 2048;
  }
}

// The rounding of a weight in T counts by the largest kernel value on its panel: in single
// precision panels must not be wide.
BOLTZATTN_INLINE int most_key_nodes(DType dtype) {
  return dtype == DType::kFloat64 ? kMostNodes : 12;
}

// Tokens of a chunk, from sizes alone: enough chunks to share out, and two of them (the one worked
// on and the one being fetched) within a second-level cache.
constexpr int64_t kChunkBytes = 192 * 1024;
BOLTZATTN_INLINE int64_t chunk_of(int64_t n, int64_t row_bytes) {
  const int64_t fitting = most(256, kChunkBytes / row_bytes / 256 * 256);
  return least(least(kChunk, fitting), most(512, round_up(ceil_div(n, 16), 256)));
}

template <class T>
struct Transform {
  const Attention& call;
  int64_t h;
  Range range{};
  Layout layout{};
  int64_t width;   // of a table row in T: dv, padded
  int64_t dwidth;  // of a moment row in fp64: dv + 1, padded
  double certificate = 0;

  int64_t end_key[2]{};  // where the largest and the smallest key stand
  Buffer<T> centre;      // [2][width]: their values

  // At low temperature the largest key (for t > 0) or the smallest takes all the weight, and what
  // gradients are made of, v_j - F, is a small difference. So values are measured from the value of
  // the end key on their half of the key axis, and F from that of the reference key of its panel.
  Buffer<double> moments[2];  // from either end: [key panels][q][dwidth]; column dv counts keys
  Buffer<double> node_out;    // [query panels][p][dwidth]: F - centre, and log Z in column dv
  Buffer<double> node_slope;  // the same of F', and mean key - reference in column dv
  Buffer<double> inverse_z;   // [query panels][p]

  Transform(const Attention& a, int64_t head)
      : call(a),
        h(head),
        width(round_up(a.dv, kLanes<T>)),
        dwidth(round_up(a.dv + 1, kLanes<double>)) {}

  // 0: measured from the largest key, 1: from the smallest.
  int end_of_query_panel(int64_t panel) const {
    return reference_key(layout, int(panel)) == layout.s_max ? 0 : 1;
  }
  int end_of_key_panel(int64_t panel) const {
    return layout.key.origin + layout.key.half * (2 * panel + 1) >= 0 ? 0 : 1;
  }
  const T* centre_of(int end) const { return centre.data + end * width; }

  int query_nodes() const { return layout.query.panels * layout.query.nodes; }
  int key_nodes() const { return layout.key.panels * layout.key.nodes; }

  // Masked keys; false if a number is neither "kept" nor "masked".
  bool read_mask(int64_t first, int64_t count, uint8_t* skip) const {
    const Matrix& m = call.key_mask;
    if (!m) return true;
    if (m.dtype == DType::kBool) {
      const uint8_t* from = static_cast<const uint8_t*>(m.data) + m.head[h] + first * m.column;
      for (int64_t j = 0; j < count; ++j) skip[j] = from[j * m.column] != 0;
      return true;
    }
    double bias[kChunk];
    read_block(m, h, 0, first, 1, count, bias, 0, 1);
    bool plain = true;
    for (int64_t j = 0; j < count; ++j) {
      skip[j] = bias[j] == -INFINITY;
      plain &= bias[j] == 0 || bias[j] == -INFINITY;
    }
    return plain;
  }

  // Fills `range`; false if this head is not for the transform.
  bool find_range() {
    struct Part {
      double t_min, t_max, s_min, s_max;
      int64_t keys;
      bool regular;
      int64_t at_max, at_min;
    };
    const int64_t chunks = most(1, ceil_div(most(call.n_q, call.n_k), kChunk));
    Buffer<Part> parts(chunks);
    auto body = [&](int64_t c) {
      Part part{INFINITY, -INFINITY, INFINITY, -INFINITY, 0, true, 0, 0};
      double number[kChunk];
      const int64_t first = c * kChunk;
      const int64_t queries = most(0, least(kChunk, call.n_q - first));
      read_column(call.query, h, first, queries, number);
      double odd = 0;  // becomes NaN if any number is not finite
      for (int64_t i = 0; i < queries; ++i) {
        const double t = number[i] * call.scale;
        part.t_min = t < part.t_min ? t : part.t_min;
        part.t_max = t > part.t_max ? t : part.t_max;
        odd += t * 0;
      }
      const int64_t keys = most(0, least(kChunk, call.n_k - first));
      uint8_t skip[kChunk] = {};
      part.regular = read_mask(first, keys, skip);
      read_column(call.key, h, first, keys, number);
      for (int64_t j = 0; j < keys; ++j) {
        const bool kept = !skip[j];
        part.keys += kept;
        part.s_min = kept && number[j] < part.s_min ? number[j] : part.s_min;
        part.s_max = kept && number[j] > part.s_max ? number[j] : part.s_max;
        odd += kept ? number[j] * 0 : 0;
      }
      part.regular &= odd == 0;
      for (int64_t j = keys - 1; j >= 0; --j) {
        part.at_max = number[j] == part.s_max && !skip[j] ? first + j : part.at_max;
        part.at_min = number[j] == part.s_min && !skip[j] ? first + j : part.at_min;
      }
      parts.data[c] = part;
    };
    chunks > 8 ? parallel(chunks, body) : serial(chunks, body);
    range = {INFINITY, -INFINITY, INFINITY, -INFINITY, 0};
    bool regular = true;
    for (int64_t c = 0; c < chunks; ++c) {
      const Part& part = parts.data[c];
      range.t_min = part.t_min < range.t_min ? part.t_min : range.t_min;
      range.t_max = part.t_max > range.t_max ? part.t_max : range.t_max;
      end_key[0] = part.s_max > range.s_max ? part.at_max : end_key[0];
      end_key[1] = part.s_min < range.s_min ? part.at_min : end_key[1];
      range.s_min = part.s_min < range.s_min ? part.s_min : range.s_min;
      range.s_max = part.s_max > range.s_max ? part.s_max : range.s_max;
      range.keys += part.keys;
      regular &= part.regular;
    }
    return regular;
  }

  template <class Body>
  static void serial(int64_t tasks, Body&& body) {
    for (int64_t task = 0; task < tasks; ++task) body(task);
  }

  // A task takes a run of chunks one after the other, so that each finds its rows fetched ahead.
  template <class Body>
  static void parallel_runs(int64_t chunks, Body body) {
    const int64_t run = most(1, chunks / (8 * thread_count()));
    parallel(ceil_div(chunks, run), [&](int64_t task) {
      for (int64_t c = task * run; c < least(chunks, (task + 1) * run); ++c) body(c);
    });
  }

  // Scratch of a token pass; `rows` copies of a tile of rows.
  static int64_t pass_bytes(int64_t panels, int64_t width, int64_t rows) {
    return int64_t(sizeof(Coordinates)) + (panels + 1) * 4 + kTile * 8 +
           (kMostNodes + rows * width) * kTile * int64_t(sizeof(T));
  }
  struct Pass {
    Scratch<Slot::kTask> scratch;
    Coordinates& at;
    int32_t* start;
    double* place;
    T* weight;
    Pass(const Axis& axis, int64_t width, int64_t rows, int64_t more = 0)
        : scratch(pass_bytes(axis.panels, width, rows) + more, 8 + rows),
          at(*scratch.take<Coordinates>(1)),
          start(scratch.take<int32_t>(axis.panels + 1)),
          place(scratch.take<double>(kTile)),
          weight(scratch.take<T>(kMostNodes * kTile)) {}
    T* take_rows(int64_t width) { return scratch.take<T>(kTile * width); }
  };

  // Visits the tokens of a chunk tile by tile, each tile on one panel:
  // visit(panel, order, tokens, weights, number of tokens visited before).
  template <class Visit>
  void for_tiles(Pass& pass, bool keys, int64_t first, int64_t count, const Lagrange<T>& basis,
                 Visit visit) {
    const Axis& axis = keys ? layout.key : layout.query;
    Coordinates& at = pass.at;
    const bool masked = keys && call.key_mask;
    read_column(keys ? call.key : call.query, h, first, count, at.u);
    for (int64_t i = count; i < round_up(count, kLanes<double>); ++i) at.u[i] = layout.middle;
    if (masked) {
      read_mask(first, count, at.skip);
      // A masked key may be anything, NaN too: put it where it does no harm.
      for (int64_t i = 0; i < count; ++i) at.u[i] = at.skip[i] ? layout.middle : at.u[i];
    }
    if (keys) {
      at.warp_keys(layout, count);
    } else {
      for (int64_t i = 0; i < count; ++i) at.u[i] *= call.scale;
      at.warp_queries(layout, count);
    }
    at.locate(axis, count);
    at.sort(masked, count, axis.panels, pass.start);
    for (int p = 0; p < axis.panels; ++p) {
      for (int64_t i = pass.start[p]; i < pass.start[p + 1]; i += kTile) {
        const int64_t tokens = least(kTile, pass.start[p + 1] - i);
        const int32_t* order = at.order + i;
        for (int64_t k = 0; k < tokens; ++k) pass.place[k] = at.place[order[k]];
        for (int64_t k = tokens; k < round_up(tokens, 8); ++k) pass.place[k] = 0;
        basis.weigh(pass.place, tokens, pass.weight);
        visit(p, order, tokens, pass.weight, i);
      }
    }
  }

  // Sums a matrix over the panels of an axis: sums[panels][nodes][dwidth] in fp64, column dv taking
  // `last` (the number of tokens, or a vector). What `make_also` returns sees every tile.
  template <class MakeAlso>
  void sum_moments(bool keys, const Matrix& matrix, const Matrix* last, double* sums,
                   MakeAlso make_also) {
    const Axis& axis = keys ? layout.key : layout.query;
    const int64_t n = keys ? call.n_k : call.n_q;
    const int64_t table = int64_t(axis.panels) * axis.nodes * dwidth;
    const int64_t chunk = chunk_of(n, width * int64_t(sizeof(T))), chunks = ceil_div(n, chunk);
    // Partial sums are kept within a few megabytes, whatever the layout.
    const int64_t most_parts = most(1, least(64, (int64_t(1) << 20) / table));
    const int64_t per_part = ceil_div(chunks, least(chunks, most_parts));
    const int64_t parts = ceil_div(chunks, per_part);
    Buffer<double> partial(parts * table);
    const Lagrange<T> basis(axis.nodes);
    parallel(parts, [&](int64_t part) {
      double* to = partial.data + part * table;
      set_zero(to, table);
      auto also = make_also();
      const int64_t acc_size = int64_t(axis.nodes) * width;
      Pass pass(axis, width, 1, acc_size * int64_t(sizeof(T)) + kChunk * 8);
      T* acc = pass.scratch.template take<T>(acc_size);
      double* column = pass.scratch.template take<double>(kChunk);
      set_zero(acc, acc_size);
      RowReader<T> reader(matrix, h, call.dv, pass.take_rows(width));
      for (int64_t c = part * per_part; c < least(chunks, (part + 1) * per_part); ++c) {
        const int64_t first = c * chunk, count = least(chunk, n - first);
        if (last) read_column(*last, h, first, count, column);
        int panel = 0;
        int64_t pending = 0;
        auto flush = [&] {
          double* target = to + int64_t(panel) * axis.nodes * dwidth;
          for (int a = 0; a < axis.nodes; ++a)
            for (int64_t k = 0; k < call.dv; ++k)
              target[a * dwidth + k] += double(acc[a * width + k]);
          set_zero(acc, acc_size);
          pending = 0;
        };
        for_tiles(pass, keys, first, count, basis,
                  [&](int p, const int32_t* order, int64_t tokens, const T* weight, int64_t done) {
                    if (pending && (p != panel || pending >= kFlush)) flush();
                    panel = p;
                    pending += tokens;
                    reader.read(first, order, tokens);
                    reader.prefetch(first + chunk + done, least(tokens, n - first - chunk - done));
                    if (keys) {
                      add_moments<T, true>(axis.nodes, int(tokens), weight, reader.row,
                                           centre_of(end_of_key_panel(p)), acc, width);
                    } else {
                      add_moments<T, false>(axis.nodes, int(tokens), weight, reader.row, nullptr,
                                            acc, width);
                    }
                    double* target = to + int64_t(p) * axis.nodes * dwidth + call.dv;
                    for (int a = 0; a < axis.nodes; ++a) {
                      T sum = 0;
                      if (last) {
                        for (int64_t i = 0; i < tokens; ++i)
                          sum += weight[a * kTile + i] * T(column[order[i]]);
                      } else if (keys) {
                        for (int64_t i = 0; i < tokens; ++i) sum += weight[a * kTile + i];
                      }
                      target[a * dwidth] += double(sum);
                    }
                    also(p, first, order, tokens, weight, reader);
                  });
        if (pending) flush();
      }
    });
    const int64_t block = 4096;
    auto add = [&](int64_t b) {
      for (int64_t k = b * block; k < least(table, (b + 1) * block); ++k) {
        double sum = 0;
        for (int64_t part = 0; part < parts; ++part) sum += partial.data[part * table + k];
        sums[k] = sum;
      }
    };
    const int64_t blocks = ceil_div(table, block);
    parts* blocks > 64 ? parallel(blocks, add) : serial(blocks, add);
  }

  // moments[0] holds sums of v - centre of the key's own half; turns them into sums of
  // v - centre[0] and, in moments[1], of v - centre[1].
  void measure_from_ends() {
    const int64_t rows = key_nodes();
    moments[1].resize(rows * dwidth);
    for (int64_t r = 0; r < rows; ++r) {
      const int own = end_of_key_panel(r / layout.key.nodes);
      double* to[2] = {moments[0].data + r * dwidth, moments[1].data + r * dwidth};
      const double keys = to[0][call.dv];
      for (int64_t c = 0; c < dwidth; ++c) to[1][c] = to[0][c];
      const T* from = centre_of(own);
      const T* other = centre_of(1 - own);
      for (int64_t c = 0; c < call.dv; ++c)
        to[1 - own][c] += keys * (double(from[c]) - double(other[c]));
    }
  }

  // Positions of all nodes, computed once per layout.
  struct Nodes {
    Buffer<double> query, key;
    explicit Nodes(const Layout& layout)
        : query(int64_t(layout.query.panels) * layout.query.nodes),
          key(int64_t(layout.key.panels) * layout.key.nodes) {
      for (int k = 0; k < layout.query.panels; ++k)
        for (int i = 0; i < layout.query.nodes; ++i)
          query.data[k * layout.query.nodes + i] = query_node(layout, k, i);
      for (int k = 0; k < layout.key.panels; ++k)
        for (int b = 0; b < layout.key.nodes; ++b)
          key.data[k * layout.key.nodes + b] = key_node(layout, k, b);
    }
  };

  // E[i][b] = exp(t_i (s_b - reference)) for the nodes of one query panel and one key panel;
  // false if all of them are negligible.
  bool kernel(const Nodes& nodes, int64_t query_panel, int64_t key_panel, double* e) const {
    const int p = layout.query.nodes, q = layout.key.nodes;
    const double* t = nodes.query.data + query_panel * p;
    const double* s = nodes.key.data + key_panel * q;
    const double reference = reference_key(layout, int(query_panel)) - layout.middle;
    // A linear function of s for each t, so its largest value lies at an end of both.
    double top = -INFINITY;
    for (const double x : {t[0], t[p - 1]}) {
      for (const double y : {s[0], s[q - 1]}) {
        const double exponent = x * (y - reference);
        top = exponent > top ? exponent : top;
      }
    }
    if (top < kNegligible) return false;
    for (int i = 0; i < p; ++i) {
      const double x = t[i] * kLog2e;
      for (int b = 0; b < q; b += kLanes<double>)
        store(e + i * kMostNodes + b, exp2_of((load(s + b) - reference) * x));
    }
    return true;
  }

  // The error of interpolating exp(t s(w)) on a key panel is at most 4 M rho^(1-q) / (rho - 1) for
  // every rho, M being its largest modulus on the Bernstein ellipse of rho. Here are the logarithm
  // of that factor and, panel by panel, how far Re s reaches up and down on the ellipse.
  static constexpr int kEllipses = 6;
  struct Ellipses {
    double log_factor[kEllipses];
    Buffer<double> up, down, keys;  // [panels][kEllipses], [panels][kEllipses], [panels]

    Ellipses(const Layout& layout, const double* moments, int64_t dwidth, int64_t dv)
        : up(layout.key.panels * kEllipses),
          down(layout.key.panels * kEllipses),
          keys(layout.key.panels) {
      const Axis& axis = layout.key;
      for (int r = 0; r < kEllipses; ++r) {
        const double height = kKeyStrip * (r + 1) / kEllipses;
        const double rho = bernstein_rho(height, axis.half);
        const double reach = ::sqrt(axis.half * axis.half + height * height);
        log_factor[r] = ::log(4 / (rho - 1)) + (1 - axis.nodes) * ::log(rho);
        for (int k = 0; k < axis.panels; ++k) {
          const double centre = axis.origin + axis.half * (2 * k + 1);
          up.data[k * kEllipses + r] = layout.radius * highest(centre, reach, height);
          down.data[k * kEllipses + r] = -layout.radius * highest(-centre, reach, height);
        }
      }
      for (int k = 0; k < axis.panels; ++k) {
        keys.data[k] = 0;
        for (int b = 0; b < axis.nodes; ++b)
          keys.data[k] += moments[(int64_t(k) * axis.nodes + b) * dwidth + dv];
      }
    }

    // Upper bound of Re tanh(w) on an ellipse. Re tanh(a + ib) = sinh 2a / (cosh 2a + cos 2b) grows
    // with a, and with b where a > 0; the quarter ellipse is covered by boxes.
    static double highest(double centre, double reach, double height) {
      constexpr int kBoxes = 4;
      double most = -1;
      for (int k = 0; k < kBoxes; ++k) {
        const double a = centre + reach * ::cos(k * kPi / (2 * kBoxes));
        const double b = height * ::sin((a > 0 ? k + 1 : 0) * kPi / (2 * kBoxes));
        const double re = ::sinh(2 * a) / (::cosh(2 * a) + ::cos(2 * b));
        most = re > most ? re : most;
      }
      return most;
    }
  };

  // Bound of the key-side error of Z at t, relative to Z.
  double key_error(const Ellipses& ellipses, double t, double z, double reference) const {
    double sum = 0;
    for (int k = 0; k < layout.key.panels; ++k) {
      if (!(ellipses.keys.data[k] > 0.5)) continue;
      const double* extreme = (t >= 0 ? ellipses.up.data : ellipses.down.data) + k * kEllipses;
      double least_log = INFINITY;
      for (int r = 0; r < kEllipses; ++r) {
        const double bound =
            ellipses.log_factor[r] + t * (extreme[r] - (reference - layout.middle));
        least_log = bound < least_log ? bound : least_log;
      }
      if (least_log > kNegligible) sum += ellipses.keys.data[k] * ::exp(least_log);
    }
    return sum / z;
  }

  // Bound of the query-side error on a panel, absolute: F is analytic in the strip, so its
  // Chebyshev coefficients decay like rho^-k; the last four set the constant.
  static constexpr int kLastCoefficients = 4;
  struct Decay {
    double row[kLastCoefficients * kMostNodes];  // node values -> coefficient k, times rho^(k-p)
    double factor;

    explicit Decay(const Layout& layout) {
      const int p = layout.query.nodes;
      const double rho = bernstein_rho(layout.query_strip, layout.query.half);
      for (int k = p - kLastCoefficients; k < p; ++k)
        for (int i = 0; i < p; ++i)
          row[(k - p + kLastCoefficients) * kMostNodes + i] =
              2.0 / p * ::cos(k * (2 * i + 1) * kPi / (2 * p)) * ::pow(rho, k - p);
      factor = 4 / (1 - 1 / rho);
    }
  };
  double query_error(const Decay& decay, const double* f, double* scratch) const {
    set_zero(scratch, kLastCoefficients * dwidth);
    gemm<double, true>(kLastCoefficients, dwidth / kLanes<double>, layout.query.nodes,
                       {decay.row, kMostNodes, 1}, f, dwidth, scratch, dwidth);
    double largest = 0;
    for (int k = 0; k < kLastCoefficients; ++k)
      largest = larger_of(largest, largest_of(scratch + k * dwidth, call.dv));
    return decay.factor * largest;
  }

  static double larger_of(double a, double b) { return a > b ? a : b; }
  // NaN anywhere gives NaN.
  template <class U>
  static double largest_of(const U* x, int64_t size) {
    U largest = 0, odd = 0;
    for (int64_t c = 0; c < size; ++c) {
      const U magnitude = x[c] < 0 ? -x[c] : x[c];
      largest = magnitude > largest ? magnitude : largest;
      odd += x[c] * 0;
    }
    return double(largest + odd);
  }

  // Node values from the moments; with slopes for backward.
  struct Bounds {
    double largest, query, key;  // largest |F|; bounds of the errors
  };
  Bounds run_core(bool slopes) {
    const int p = layout.query.nodes, q = layout.key.nodes, panels = layout.query.panels;
    const int64_t vectors = dwidth / kLanes<double>;
    const Nodes nodes(layout);
    const Ellipses ellipses(layout, moments[0].data, dwidth, call.dv);
    const Decay decay(layout);
    Buffer<Bounds> bounds(panels);
    node_out.resize(int64_t(panels) * p * dwidth);
    inverse_z.resize(int64_t(panels) * p);
    if (slopes) node_slope.resize(int64_t(panels) * p * dwidth);
    const int64_t per_task = 4;
    parallel(ceil_div(panels, per_task), [&](int64_t task) {
      alignas(64) double e[kMostNodes * kMostNodes];
      Buffer<double> scratch(kLastCoefficients * dwidth);
      for (int64_t panel = task * per_task; panel < least(panels, (task + 1) * per_task); ++panel) {
        const double reference = reference_key(layout, int(panel));
        const double* t = nodes.query.data + panel * p;
        double* f = node_out.data + panel * p * dwidth;
        double* slope = slopes ? node_slope.data + panel * p * dwidth : nullptr;
        double* inverse = inverse_z.data + panel * p;
        set_zero(f, p * dwidth);
        if (slopes) set_zero(slope, p * dwidth);
        for (int k = 0; k < layout.key.panels; ++k) {
          if (!(ellipses.keys.data[k] > 0.5) || !kernel(nodes, panel, k, e)) continue;
          const double* m = moments[end_of_query_panel(panel)].data + int64_t(k) * q * dwidth;
          gemm<double, true>(p, vectors, q, {e, kMostNodes, 1}, m, dwidth, f, dwidth);
          if (!slopes || range.s_min == range.s_max) continue;  // equal keys: F is constant
          const double* s = nodes.key.data + k * q;
          for (int i = 0; i < p; ++i)
            for (int b = 0; b < q; ++b) e[i * kMostNodes + b] *= s[b] - (reference - layout.middle);
          gemm<double, true>(p, vectors, q, {e, kMostNodes, 1}, m, dwidth, slope, dwidth);
        }
        Bounds& bound = bounds.data[panel];
        bound = {0, 0, 0};
        for (int i = 0; i < p; ++i) {
          double* row = f + i * dwidth;
          const double z = row[call.dv];
          inverse[i] = 1 / z;
          for (int64_t c = 0; c < call.dv; ++c) row[c] *= inverse[i];
          row[call.dv] = ::log(z);
          const double largest = largest_of(row, call.dv) + row[call.dv] * 0;
          bound.largest = largest <= bound.largest ? bound.largest : largest;  // keeps a NaN
          if (i == 0 || i == p - 1 || i == p / 2)
            bound.key = larger_of(bound.key, key_error(ellipses, t[i], z, reference));
          if (!slopes) continue;
          double* derivative = slope + i * dwidth;
          for (int64_t c = 0; c <= call.dv; ++c) derivative[c] *= inverse[i];
          const double mean = derivative[call.dv];
          for (int64_t c = 0; c < call.dv; ++c) derivative[c] -= row[c] * mean;
        }
        bound.query = query_error(decay, f, scratch.data);
      }
    });
    Bounds worst{0, 0, 0};
    for (int panel = 0; panel < panels; ++panel) {
      const Bounds& bound = bounds.data[panel];
      worst.largest = bound.largest <= worst.largest ? worst.largest : bound.largest;
      worst.query = larger_of(worst.query, bound.query);
      worst.key = larger_of(worst.key, bound.key);
    }
    return worst;
  }

  double largest_value() const {
    const int64_t chunks = ceil_div(call.n_k, kChunk);
    Buffer<double> part(chunks);
    parallel(chunks, [&](int64_t c) {
      Buffer<T> row(call.dv);
      part.data[c] = 0;
      uint8_t skip[kChunk] = {};
      read_mask(c * kChunk, least(kChunk, call.n_k - c * kChunk), skip);
      for (int64_t j = c * kChunk; j < least(call.n_k, (c + 1) * kChunk); ++j) {
        if (skip[j - c * kChunk]) continue;
        read_block(call.value, h, j, 0, 1, call.dv, row.data, 0, 1);
        part.data[c] = larger_of(part.data[c], largest_of(row.data, call.dv));
      }
    });
    double largest = 0;
    for (int64_t c = 0; c < chunks; ++c) largest = larger_of(largest, part.data[c]);
    return largest;
  }

  // Range, layout, moments and node values, refined until the certificate is within tolerance.
  // False: the head must be computed by `direct`.
  bool build(bool slopes) {
    if (!find_range()) return false;
    if (range.keys == 0 || call.n_q == 0) return true;
    const double product = largest_product(range);
    if (!(product <= kLargestProduct)) return false;
    const DType dtype = call.value.dtype;
    centre.resize(2 * width);
    set_zero(centre.data, 2 * width);
    for (int end = 0; end < 2; ++end)
      read_block(call.value, h, end_key[end], 0, 1, call.dv, centre.data + end * width, 0, 1);
    double largest = 0;
    for (int level = 0; level < kLevels; ++level) {
      layout = choose_layout(range, call.n_q, call.n_k, call.dv, precision_of(dtype, level),
                             most_key_nodes(dtype));
      moments[0].resize(int64_t(key_nodes()) * dwidth);
      sum_moments(true, call.value, nullptr, moments[0].data, [] {
        return [](int, int64_t, const int32_t*, int64_t, const T*, const RowReader<T>&) {};
      });
      // NaN or inf among the values would be lost where a key has no weight; dense softmax keeps
      // it.
      if (!(largest_of(moments[0].data, int64_t(key_nodes()) * dwidth) <= 1e300)) return false;
      measure_from_ends();
      const Bounds bounds = run_core(slopes);
      if (!(bounds.largest <= 1e300)) return false;
      // |F - centre| <= 2 max|v|, so half of its largest can only overstate the relative error;
      // the values themselves are looked at only if that is not good enough.
      for (const bool exact : {false, true}) {
        if (exact && largest == 0) largest = largest_value();
        const double size = exact ? largest : bounds.largest / 2;
        const double relative = bounds.query == 0 ? 0 : bounds.query / size;
        certificate = relative + 2 * bounds.key / (1 - (bounds.key < 0.5 ? bounds.key : 0.5)) +
                      rounding_of(dtype, product);
        if (certificate <= tolerance_of(dtype)) return true;
      }
    }
    return false;
  }

  bool empty() const { return range.keys == 0 || call.n_q == 0; }

  // Tables in T, as the token passes read them: [panels][nodes][width] and column dv apart.
  struct Table {
    Buffer<T> wide;
    Buffer<T> last;
    Table(const double* from, int64_t rows, int64_t dv, int64_t dwidth, int64_t width)
        : wide(rows * width), last(rows) {
      if (dv < width) set_zero(wide.data, rows * width);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < dv; ++c) wide.data[r * width + c] = T(from[r * dwidth + c]);
        last.data[r] = T(from[r * dwidth + dv]);
      }
    }
  };

  static void blend(int nodes, int64_t tokens, const T* weight, const T* table, T* to) {
    constexpr int L = kLanes<T>;
    for (int64_t i = 0; i < round_up(tokens, L); i += L) {
      Vec<T> sum{};
      for (int a = 0; a < nodes; ++a) sum += load(weight + a * kTile + i) * table[a];
      store(to + i, sum);
    }
  }

  void write_empty() const {
    for (int64_t i = 0; i < call.n_q; ++i) call.lse[h * call.n_q + i] = -INFINITY;
    zero_rows(call.out, call.n_q, call.dv);
  }
  void zero_rows(const Matrix& m, int64_t rows, int64_t columns) const {
    Buffer<T> zero(columns);
    set_zero(zero.data, columns);
    for (int64_t i = 0; i < rows; ++i) write_block(zero.data, 0, 1, 1, columns, m, h, i, 0);
  }

  void write_outputs() {
    const int p = layout.query.nodes;
    Table table(node_out.data, query_nodes(), call.dv, dwidth, width);
    for (int64_t r = 0; r < query_nodes(); ++r) {
      const T* from = centre_of(end_of_query_panel(r / p));
      for (int64_t c = 0; c < call.dv; ++c)
        table.wide.data[r * width + c] = T(node_out.data[r * dwidth + c] + double(from[c]));
    }
    const Lagrange<T> basis(p);
    const int64_t chunk = chunk_of(call.n_q, width * int64_t(sizeof(T)));
    const int64_t chunks = ceil_div(call.n_q, chunk);
    parallel_runs(chunks, [&](int64_t c) {
      const int64_t first = c * chunk, count = least(chunk, call.n_q - first);
      Pass pass(layout.query, width, 1, count * 8);
      double* t = pass.scratch.template take<double>(count);
      RowWriter<T> writer(call.out, h, call.dv, pass.take_rows(width));
      read_column(call.query, h, first, count, t);
      alignas(64) T log_z[kTile];
      for_tiles(
          pass, false, first, count, basis,
          [&](int panel, const int32_t* order, int64_t tokens, const T* weight, int64_t done) {
            writer.prefetch(first + chunk + done, least(tokens, call.n_q - first - chunk - done));
            writer.point(first, order, tokens);
            evaluate(p, int(tokens), weight, table.wide.data + int64_t(panel) * p * width, width,
                     writer.row);
            writer.write(first, order, tokens);
            blend(p, tokens, weight, table.last.data + panel * p, log_z);
            const double reference = reference_key(layout, panel);
            double* lse = call.lse + h * call.n_q + first;
            for (int64_t i = 0; i < tokens; ++i)
              lse[order[i]] = t[order[i]] * call.scale * reference + double(log_z[i]);
          });
    });
  }

  // ---- backward ----

  // A tile of a table spread over tokens: row i is sum_a weight[a][i] table[a].
  struct Spread {
    Buffer<T> rows;
    T* row[kTile];
    explicit Spread(int64_t width) : rows(kTile * width) {
      for (int64_t i = 0; i < kTile; ++i) row[i] = rows.data + i * width;
    }
  };

  static T dot(const T* a, const T* b, int64_t width) {
    Vec<T> sum{};
    for (int64_t c = 0; c < width; c += kLanes<T>) sum += load(a + c) * load(b + c);
    return reduce_sum<T>(sum);
  }
  // (a - c) . b
  static T centred_dot(const T* a, const T* c, const T* b, int64_t width) {
    Vec<T> sum{};
    for (int64_t k = 0; k < width; k += kLanes<T>) sum += (load(a + k) - load(c + k)) * load(b + k);
    return reduce_sum<T>(sum);
  }

  // dF at the query nodes (column dv: the gradient of lse), and the gradient of the queries:
  // dt_i = dO_i . F'(t_i) + dlse_i E[s].
  void query_gradients(const AttentionGradient& g, double* node_gradient) {
    const int p = layout.query.nodes;
    const Table slopes(node_slope.data, query_nodes(), call.dv, dwidth, width);
    sum_moments(false, g.grad_out, g.grad_lse ? &g.grad_lse : nullptr, node_gradient, [&] {
      return [&, spread = Spread(width)](int panel, int64_t first, const int32_t* order,
                                         int64_t tokens, const T* weight,
                                         const RowReader<T>& reader) mutable {
        evaluate(p, int(tokens), weight, slopes.wide.data + int64_t(panel) * p * width, width,
                 spread.row);
        alignas(64) T mean[kTile];
        if (g.grad_lse) blend(p, tokens, weight, slopes.last.data + panel * p, mean);
        const double reference = reference_key(layout, panel);
        for (int64_t i = 0; i < tokens; ++i) {
          const int64_t at = first + order[i];
          double dt = double(dot(reader.row[i], spread.row[i], width));
          if (g.grad_lse) {
            double grad_lse;
            read_block(g.grad_lse, h, at, 0, 1, 1, &grad_lse, 0, 0);
            dt += grad_lse * (reference + double(mean[i]));
          }
          const T dq = T(dt * call.scale);
          write_block(&dq, 0, 0, 1, 1, g.grad_query, h, at, 0);
        }
      };
    });
  }

  // The core read backwards: tables over the key nodes for dv (`value_table`) and for ds
  // (`slope_table`, to be multiplied by v - centre; column dv is added):
  // ds_j = sum_a t_a E_aj / Z_a (dF_a . (v_j - F_a) + dlse_a).
  void key_tables(const double* node_gradient, double* value_table, double* slope_table) {
    const int p = layout.query.nodes, q = layout.key.nodes;
    const int64_t vectors = dwidth / kLanes<double>;
    const Nodes nodes(layout);
    parallel(layout.key.panels, [&](int64_t k) {
      double* values = value_table + k * q * dwidth;
      double* slopes = slope_table + k * q * dwidth;
      set_zero(values, q * dwidth);
      set_zero(slopes, q * dwidth);
      const T* own = centre_of(end_of_key_panel(k));
      Buffer<double> left(p * dwidth), scaled(p * dwidth);
      alignas(64) double e[kMostNodes * kMostNodes];
      for (int panel = 0; panel < layout.query.panels; ++panel) {
        if (!kernel(nodes, panel, k, e)) continue;
        const double* t = nodes.query.data + panel * p;
        for (int i = 0; i < p; ++i) {
          const int64_t a = int64_t(panel) * p + i;
          const double* gradient = node_gradient + a * dwidth;
          const double* f = node_out.data + a * dwidth;
          const double inverse = inverse_z.data[a];
          const T* from = centre_of(end_of_query_panel(panel));
          double pull = gradient[call.dv];
          for (int64_t c = 0; c < dwidth; ++c) {
            left.data[i * dwidth + c] = gradient[c] * inverse;
            scaled.data[i * dwidth + c] = gradient[c] * inverse * t[i];
          }
          for (int64_t c = 0; c < call.dv; ++c)
            pull += gradient[c] * ((double(own[c]) - double(from[c])) - f[c]);
          scaled.data[i * dwidth + call.dv] = pull * inverse * t[i];
        }
        gemm<double, true>(q, vectors, p, {e, 1, kMostNodes}, left.data, dwidth, values, dwidth);
        if (range.t_min < 0 || range.t_max > 0)  // else every query is 0 and no key is felt
          gemm<double, true>(q, vectors, p, {e, 1, kMostNodes}, scaled.data, dwidth, slopes,
                             dwidth);
      }
    });
  }

  void key_gradients(const AttentionGradient& g, const double* value_table,
                     const double* slope_table) {
    const int q = layout.key.nodes;
    const Table values(value_table, key_nodes(), call.dv, dwidth, width);
    const Table slopes(slope_table, key_nodes(), call.dv, dwidth, width);
    const Lagrange<T> basis(q);
    const int64_t chunk = chunk_of(call.n_k, width * int64_t(sizeof(T)));
    const int64_t chunks = ceil_div(call.n_k, chunk);
    parallel_runs(chunks, [&](int64_t c) {
      const int64_t first = c * chunk, count = least(chunk, call.n_k - first);
      Pass pass(layout.key, width, 2);
      RowReader<T> reader(call.value, h, call.dv, pass.take_rows(width));
      RowWriter<T> writer(g.grad_value, h, call.dv, pass.take_rows(width));
      Spread spread(width);
      if (call.key_mask) zero_masked(g, first, count);
      for_tiles(
          pass, true, first, count, basis,
          [&](int panel, const int32_t* order, int64_t tokens, const T* weight, int64_t done) {
            reader.read(first, order, tokens);
            reader.prefetch(first + chunk + done, least(tokens, call.n_k - first - chunk - done));
            writer.point(first, order, tokens);
            evaluate(q, int(tokens), weight, values.wide.data + int64_t(panel) * q * width, width,
                     writer.row);
            writer.write(first, order, tokens);
            evaluate(q, int(tokens), weight, slopes.wide.data + int64_t(panel) * q * width, width,
                     spread.row);
            alignas(64) T rest[kTile];
            blend(q, tokens, weight, slopes.last.data + panel * q, rest);
            for (int64_t i = 0; i < tokens; ++i) {
              const T ds = rest[i] + centred_dot(reader.row[i], centre_of(end_of_key_panel(panel)),
                                                 spread.row[i], width);
              write_block(&ds, 0, 0, 1, 1, g.grad_key, h, first + order[i], 0);
            }
          });
    });
  }

  void zero_masked(const AttentionGradient& g, int64_t first, int64_t count) const {
    uint8_t skip[kChunk];
    read_mask(first, count, skip);
    Buffer<T> zero(call.dv);
    set_zero(zero.data, call.dv);
    for (int64_t j = 0; j < count; ++j) {
      if (!skip[j]) continue;
      write_block(zero.data, 0, 1, 1, call.dv, g.grad_value, h, first + j, 0);
      write_block(zero.data, 0, 1, 1, 1, g.grad_key, h, first + j, 0);
    }
  }

  void write_gradients(const AttentionGradient& g) {
    Buffer<double> node_gradient(int64_t(query_nodes()) * dwidth);
    query_gradients(g, node_gradient.data);
    Buffer<double> value_table(int64_t(key_nodes()) * dwidth);
    Buffer<double> slope_table(int64_t(key_nodes()) * dwidth);
    key_tables(node_gradient.data, value_table.data, slope_table.data);
    key_gradients(g, value_table.data, slope_table.data);
  }
};

// Many heads are shared out whole; few are worked on by all threads together.
template <class Body>
static void for_heads(int64_t heads, Body body) {
  if (heads >= thread_count()) {
    parallel(heads, body);
  } else {
    for (int64_t h = 0; h < heads; ++h) body(h);
  }
}

template <class T>
static void transform_forward(const Attention& call) {
  for_heads(call.heads, [&](int64_t h) {
    Transform<T> transform(call, h);
    if (!transform.build(false)) return direct_forward<T>(call, h, h + 1);
    transform.empty() ? transform.write_empty() : transform.write_outputs();
  });
}

template <class T>
static void transform_backward(const AttentionGradient& g) {
  for_heads(g.call.heads, [&](int64_t h) {
    Transform<T> transform(g.call, h);
    if (!transform.build(true)) return direct_backward<T>(g, h, h + 1);
    if (!transform.empty()) return transform.write_gradients(g);
    transform.zero_rows(g.grad_query, g.call.n_q, 1);
    transform.zero_rows(g.grad_key, g.call.n_k, 1);
    transform.zero_rows(g.grad_value, g.call.n_k, g.call.dv);
  });
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
