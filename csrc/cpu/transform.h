// Rank-1 attention in linear time: moments of the keys, a core without n, evaluation at the queries.
// docs/transform.md derives it. Included inside an ISA's namespace.
//
// Tokens are handled in the arithmetic type T (fp32, or fp64 for fp64 tensors); coordinates, the
// core and every sum that runs over more than a few hundred tokens are fp64. Chunks and the order
// of sums depend on sizes alone, so results are bitwise the same for any number of threads.

constexpr int64_t kFlush = 8 * kTile;    // tokens summed in T before they go to fp64
constexpr double kNegligible = -80;      // exponent below which a key node adds nothing
constexpr int kLevels = 3;               // precisions tried before a head goes to `direct`

// Interpolation error aimed at: below the rounding of T at first, then tighter. Half precision
// needs no more than its own rounding.
BOLTZATTN_INLINE double precision_of(DType dtype, int level) {
  const double first = dtype == DType::kFloat64 ? 1e-17 : dtype == DType::kFloat32 ? 1e-8 : 1e-5;
  const double step = dtype == DType::kFloat64 ? 1e-3 : 1e-3;
  return level == 0 ? first : level == 1 ? first * step : first * step * step;
}
BOLTZATTN_INLINE double tolerance_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 1e-10;
    case DType::kFloat32: return 5e-6;
    case DType::kBFloat16: return 4.0 / 256;
    default: return 4.0 / 2048;
  }
}
// Rounding of the token passes and, for fp64, of logits of size B.
BOLTZATTN_INLINE double rounding_of(DType dtype, double product) {
  switch (dtype) {
    case DType::kFloat64: return 8e-15 + 4e-16 * product;
    case DType::kFloat32: return 1.5e-6;
    case DType::kBFloat16: return 1.0 / 256;
    default: return 1.0 / 2048;
  }
}

// Sizes that follow from n alone.
BOLTZATTN_INLINE int64_t chunk_of(int64_t n) {
  return least(kChunk, most(256, round_up(ceil_div(n, 16), 256)));
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

  Buffer<double> moments;     // [key panels][q][dwidth]; column dv counts keys
  Buffer<double> node_out;    // [query panels][p][dwidth]: F, and log Z in column dv
  Buffer<double> node_slope;  // the same of F', and mean key - reference in column dv
  Buffer<double> inverse_z;   // [query panels][p]

  Transform(const Attention& a, int64_t head)
      : call(a),
        h(head),
        width(round_up(a.dv, kLanes<T>)),
        dwidth(round_up(a.dv + 1, kLanes<double>)) {}

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
    };
    const int64_t chunks = most(1, ceil_div(most(call.n_q, call.n_k), kChunk));
    Buffer<Part> parts(chunks);
    auto body = [&](int64_t c) {
      Part part{INFINITY, -INFINITY, INFINITY, -INFINITY, 0, true};
      double number[kChunk];
      const int64_t first = c * kChunk;
      const int64_t queries = most(0, least(kChunk, call.n_q - first));
      read_block(call.query, h, first, 0, queries, 1, number, 1, 1);
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
      read_block(call.key, h, first, 0, keys, 1, number, 1, 1);
      for (int64_t j = 0; j < keys; ++j) {
        const bool kept = !skip[j];
        part.keys += kept;
        part.s_min = kept && number[j] < part.s_min ? number[j] : part.s_min;
        part.s_max = kept && number[j] > part.s_max ? number[j] : part.s_max;
        odd += kept ? number[j] * 0 : 0;
      }
      part.regular &= odd == 0;
      parts.data[c] = part;
    };
    chunks > 8 ? parallel(chunks, body) : serial(chunks, body);
    range = {INFINITY, -INFINITY, INFINITY, -INFINITY, 0};
    bool regular = true;
    for (int64_t c = 0; c < chunks; ++c) {
      const Part& part = parts.data[c];
      range.t_min = part.t_min < range.t_min ? part.t_min : range.t_min;
      range.t_max = part.t_max > range.t_max ? part.t_max : range.t_max;
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

  // One chunk of tokens on an axis: `visit(panel, first, order, tokens, weights)` for every tile.
  template <class Visit>
  void for_tiles(bool keys, int64_t first, int64_t count, const Lagrange<T>& basis, Visit visit) {
    const Axis& axis = keys ? layout.key : layout.query;
    Coordinates at;
    T place[kChunk];
    uint8_t skip[kChunk];
    Sorted sorted;
    Buffer<int32_t> counts(axis.panels + 1);
    read_block(keys ? call.key : call.query, h, first, 0, count, 1, at.u, 1, 1);
    for (int64_t i = count; i < round_up(count, kLanes<double>); ++i) at.u[i] = 0;
    const bool masked = keys && call.key_mask;
    if (masked) {
      read_mask(first, count, skip);
      // A masked key may be anything, NaN too: put it where it does no harm.
      for (int64_t i = 0; i < count; ++i) at.u[i] = skip[i] ? layout.middle : at.u[i];
    }
    if (keys) {
      at.warp_keys(layout, count);
    } else {
      for (int64_t i = 0; i < count; ++i) at.u[i] *= call.scale;
      at.warp_queries(layout, count);
    }
    at.locate(axis, count, place);
    sorted.sort(at.panel, masked ? skip : nullptr, count, axis.panels, counts.data);
    alignas(64) T local[kTile];
    alignas(64) T weight[kMostNodes * kTile];
    const int64_t total = sorted.start[axis.panels];
    for (int p = 0; p < axis.panels; ++p) {
      for (int64_t i = sorted.start[p]; i < sorted.start[p + 1]; i += kTile) {
        const int64_t tokens = least(kTile, sorted.start[p + 1] - i);
        const int32_t* order = sorted.order + i;
        for (int64_t k = 0; k < tokens; ++k) local[k] = place[order[k]];
        for (int64_t k = tokens; k < kTile; ++k) local[k] = 0;
        basis.weigh(local, tokens, weight);
        const int64_t after = least(kTile, total - i - tokens);
        visit(p, order, tokens, weight, after);
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
    const int64_t chunk = chunk_of(n), chunks = ceil_div(n, chunk);
    // Partial sums are kept within a few megabytes, whatever the layout.
    const int64_t most_parts = most(1, least(64, (int64_t(1) << 20) / table));
    const int64_t per_part = ceil_div(chunks, least(chunks, most_parts));
    const int64_t parts = ceil_div(chunks, per_part);
    Buffer<double> partial(parts * table);
    const Lagrange<T> basis(axis.nodes);
    parallel(parts, [&](int64_t part) {
      double* to = partial.data + part * table;
      set_zero(to, table);
      Buffer<T> acc(int64_t(axis.nodes) * width);
      set_zero(acc.data, int64_t(axis.nodes) * width);
      auto also = make_also();
      Buffer<T> copy(kTile * width);
      Buffer<double> column(kChunk);
      RowReader<T> reader(matrix, h, call.dv, copy.data);
      for (int64_t c = part * per_part; c < least(chunks, (part + 1) * per_part); ++c) {
        const int64_t first = c * chunk, count = least(chunk, n - first);
        if (last) read_block(*last, h, first, 0, count, 1, column.data, 1, 1);
        int panel = -1;
        int64_t pending = 0;
        auto flush = [&] {
          if (panel < 0 || pending == 0) return;
          double* target = to + int64_t(panel) * axis.nodes * dwidth;
          for (int a = 0; a < axis.nodes; ++a) {
            for (int64_t k = 0; k < call.dv; ++k) {
              target[a * dwidth + k] += double(acc.data[a * width + k]);
              acc.data[a * width + k] = 0;
            }
          }
          pending = 0;
        };
        for_tiles(keys, first, count, basis,
                  [&](int p, const int32_t* order, int64_t tokens, const T* weight, int64_t after) {
                    if (p != panel || pending >= kFlush) flush();
                    panel = p;
                    pending += tokens;
                    reader.read(first, order, tokens);
                    reader.prefetch(first, order + tokens, after);
                    add_moments(axis.nodes, int(tokens), weight, reader.row, acc.data, width);
                    double* target = to + int64_t(p) * axis.nodes * dwidth + call.dv;
                    for (int a = 0; a < axis.nodes; ++a) {
                      T sum = 0;
                      if (last) {
                        for (int64_t i = 0; i < tokens; ++i)
                          sum += weight[a * kTile + i] * T(column.data[order[i]]);
                      } else if (keys) {
                        for (int64_t i = 0; i < tokens; ++i) sum += weight[a * kTile + i];
                      }
                      target[a * dwidth] += double(sum);
                    }
                    also(p, first, order, tokens, weight, reader);
                  });
        flush();
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
    parts * blocks > 64 ? parallel(blocks, add) : serial(blocks, add);
  }

  // E[i][b] = exp(t_i (s_b - reference)) for the nodes of one query panel and one key panel;
  // false if all of them are negligible.
  bool kernel(const double* t, double reference, int key_panel, double* e) const {
    const int p = layout.query.nodes, q = layout.key.nodes;
    double offset[kMostNodes];
    for (int b = 0; b < q; ++b)
      offset[b] = key_node(layout, key_panel, b) - (reference - layout.middle);
    double top = -INFINITY;
    for (int i = 0; i < p; ++i) {
      for (int b = 0; b < q; ++b) {
        const double x = t[i] * offset[b];
        top = x > top ? x : top;
        e[i * kMostNodes + b] = x * kLog2e;
      }
    }
    if (top < kNegligible) return false;
    for (int i = 0; i < p; ++i)
      for (int b = 0; b < q; b += kLanes<double>)
        store(e + i * kMostNodes + b, exp2_of(load(e + i * kMostNodes + b)));
    return true;
  }

  // Bound of the key-side error of Z relative to Z, for each node of a query panel: the error of
  // interpolating exp(t s(w)) on a key panel is at most 4 M rho^(1-q) / (rho - 1), M its largest
  // modulus in the ellipse that touches the edge of the strip, where |tanh| <= tanh(2 Re w).
  double key_error(const double* t, const double* z, double reference) const {
    const Axis& axis = layout.key;
    const double rho = bernstein_rho(kKeyStrip, axis.half);
    const double factor = 4 * ::pow(rho, 1 - axis.nodes) / (rho - 1);
    const double reach = ::sqrt(axis.half * axis.half + kKeyStrip * kKeyStrip);
    double worst = 0;
    for (int i = 0; i < layout.query.nodes; ++i) {
      double sum = 0;
      for (int panel = 0; panel < axis.panels; ++panel) {
        double keys = 0;
        for (int b = 0; b < axis.nodes; ++b)
          keys += moments.data[(int64_t(panel) * axis.nodes + b) * dwidth + call.dv];
        if (!(keys > 0.5)) continue;
        const double centre = axis.origin + axis.half * (2 * panel + 1);
        const double towards = t[i] >= 0 ? centre + reach : centre - reach;
        const double most_extreme = layout.radius * ::tanh(2 * towards);
        sum += keys * ::exp(t[i] * (most_extreme - (reference - layout.middle)));
      }
      worst = ::fmax(worst, factor * sum / z[i]);
    }
    return worst;
  }

  // Bound of the query-side error on a panel, absolute: F is analytic in the strip, so its
  // Chebyshev coefficients decay like rho^-k; the last four set the constant.
  double query_error(const double* f) const {
    const Axis& axis = layout.query;
    const int p = axis.nodes;
    const double rho = bernstein_rho(layout.query_strip, axis.half);
    double worst = 0;
    for (int k = p - 4; k < p; ++k) {
      double coefficient[kMostNodes];
      for (int i = 0; i < p; ++i) coefficient[i] = 2.0 / p * ::cos(k * (2 * i + 1) * kPi / (2 * p));
      double largest = 0;
      for (int64_t c = 0; c < call.dv; ++c) {
        double sum = 0;
        for (int i = 0; i < p; ++i) sum += coefficient[i] * f[i * dwidth + c];
        largest = ::fmax(largest, ::fabs(sum));
      }
      worst = ::fmax(worst, largest * ::pow(rho, k - p));
    }
    return 4 * worst / (1 - 1 / rho);
  }

  // Node values from the moments; with slopes for backward. Returns (largest |F|, error bounds).
  struct Bounds {
    double largest, query, key;
  };
  Bounds run_core(bool slopes) {
    const int p = layout.query.nodes, q = layout.key.nodes, panels = layout.query.panels;
    Buffer<Bounds> bounds(panels);
    node_out.resize(int64_t(panels) * p * dwidth);
    inverse_z.resize(int64_t(panels) * p);
    if (slopes) node_slope.resize(int64_t(panels) * p * dwidth);
    auto body = [&](int64_t panel) {
      double t[kMostNodes], z[kMostNodes];
      alignas(64) double e[kMostNodes * kMostNodes] = {};
      const double reference = reference_key(layout, int(panel));
      for (int i = 0; i < p; ++i) t[i] = query_node(layout, int(panel), i);
      double* f = node_out.data + panel * p * dwidth;
      double* slope = slopes ? node_slope.data + panel * p * dwidth : nullptr;
      __builtin_memset(f, 0, size_t(p * dwidth) * 8);
      if (slopes) __builtin_memset(slope, 0, size_t(p * dwidth) * 8);
      for (int k = 0; k < layout.key.panels; ++k) {
        if (!kernel(t, reference, k, e)) continue;
        const double* m = moments.data + int64_t(k) * q * dwidth;
        gemm<double, true>(p, dwidth / kLanes<double>, q, {e, kMostNodes, 1}, m, dwidth, f, dwidth);
        if (!slopes) continue;
        for (int b = 0; b < q; ++b) {
          const double offset = key_node(layout, k, b) - (reference - layout.middle);
          for (int i = 0; i < p; ++i) e[i * kMostNodes + b] *= offset;
        }
        gemm<double, true>(p, dwidth / kLanes<double>, q, {e, kMostNodes, 1}, m, dwidth, slope,
                           dwidth);
      }
      double largest = 0;
      for (int i = 0; i < p; ++i) {
        z[i] = f[i * dwidth + call.dv];
        const double inverse = 1 / z[i];
        inverse_z.data[panel * p + i] = inverse;
        for (int64_t c = 0; c < call.dv; ++c) {
          f[i * dwidth + c] *= inverse;
          largest = ::fmax(largest, ::fabs(f[i * dwidth + c]));
        }
        f[i * dwidth + call.dv] = ::log(z[i]);
        if (!slopes) continue;
        const double mean = slope[i * dwidth + call.dv] * inverse;
        slope[i * dwidth + call.dv] = mean;
        for (int64_t c = 0; c < call.dv; ++c)
          slope[i * dwidth + c] = slope[i * dwidth + c] * inverse - f[i * dwidth + c] * mean;
      }
      bounds.data[panel] = {largest, query_error(f), key_error(t, z, reference)};
    };
    parallel(panels, body);
    Bounds worst{0, 0, 0};
    for (int panel = 0; panel < panels; ++panel) {
      worst.largest = ::fmax(worst.largest, bounds.data[panel].largest);
      worst.query = ::fmax(worst.query, bounds.data[panel].query);
      worst.key = ::fmax(worst.key, bounds.data[panel].key);
    }
    return worst;
  }

  double largest_value() const {
    const int64_t chunks = ceil_div(call.n_k, kChunk);
    Buffer<double> part(chunks);
    parallel(chunks, [&](int64_t c) {
      Buffer<double> row(call.dv);
      double largest = 0;
      for (int64_t j = c * kChunk; j < least(call.n_k, (c + 1) * kChunk); ++j) {
        read_block(call.value, h, j, 0, 1, call.dv, row.data, 0, 1);
        for (int64_t k = 0; k < call.dv; ++k) largest = ::fmax(largest, ::fabs(row.data[k]));
      }
      part.data[c] = largest;
    });
    double largest = 0;
    for (int64_t c = 0; c < chunks; ++c) largest = ::fmax(largest, part.data[c]);
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
    double largest = 0;
    for (int level = 0; level < kLevels; ++level) {
      layout = choose_layout(range, call.n_q, call.n_k, call.dv, precision_of(dtype, level));
      if (layout_cost(layout, call.n_q, call.n_k, call.dv) > 4e9) return false;
      moments.resize(int64_t(key_nodes()) * dwidth);
      sum_moments(true, call.value, nullptr, moments.data, [] {
        return [](int, int64_t, const int32_t*, int64_t, const T*, const RowReader<T>&) {};
      });
      const Bounds bounds = run_core(slopes);
      if (!(bounds.largest <= 1e300)) return false;  // NaN or inf among the values
      // |F| <= max|v|, so dividing by the largest |F| can only overstate the error; the values
      // themselves are looked at only if that is not good enough.
      for (const bool exact : {false, true}) {
        if (exact && largest == 0) largest = largest_value();
        const double size = exact ? largest : bounds.largest;
        const double relative = bounds.query == 0 ? 0 : bounds.query / size;
        certificate = relative + 2 * bounds.key / (1 - ::fmin(bounds.key, 0.5)) +
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
    const Table table(node_out.data, query_nodes(), call.dv, dwidth, width);
    const Lagrange<T> basis(p);
    const int64_t chunk = chunk_of(call.n_q), chunks = ceil_div(call.n_q, chunk);
    parallel(chunks, [&](int64_t c) {
      const int64_t first = c * chunk, count = least(chunk, call.n_q - first);
      Buffer<T> copy(kTile * width);
      Buffer<double> t(count);
      RowWriter<T> writer(call.out, h, call.dv, copy.data);
      read_block(call.query, h, first, 0, count, 1, t.data, 1, 1);
      alignas(64) T log_z[kTile];
      for_tiles(false, first, count, basis,
                [&](int panel, const int32_t* order, int64_t tokens, const T* weight, int64_t) {
                  writer.point(first, order, tokens);
                  evaluate(p, int(tokens), weight, table.wide.data + int64_t(panel) * p * width,
                           width, writer.row);
                  writer.write(first, order, tokens);
                  blend(p, tokens, weight, table.last.data + panel * p, log_z);
                  const double reference = reference_key(layout, panel);
                  double* lse = call.lse + h * call.n_q + first;
                  for (int64_t i = 0; i < tokens; ++i)
                    lse[order[i]] = t.data[order[i]] * call.scale * reference + double(log_z[i]);
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
    for (int64_t k = 0; k < width; k += kLanes<T>)
      sum += (load(a + k) - load(c + k)) * load(b + k);
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
  // (`slope_table`, to be multiplied by v - centre of the panel; column dv is added).
  //
  // ds_j = sum_a t_a E_aj / Z_a (dF_a . (v_j - F_a) + dlse_a). Where one key dominates, v_j and F_a
  // agree to many digits: both are taken relative to the mean value of the key's panel.
  void key_tables(const double* node_gradient, double* value_table, double* slope_table,
                  double* centres) {
    const int p = layout.query.nodes, q = layout.key.nodes;
    const int64_t vectors = dwidth / kLanes<double>;
    parallel(layout.key.panels, [&](int64_t k) {
      double* values = value_table + k * q * dwidth;
      double* slopes = slope_table + k * q * dwidth;
      double* centre = centres + k * dwidth;
      const double* m = moments.data + k * q * dwidth;
      set_zero(values, q * dwidth);
      set_zero(slopes, q * dwidth);
      set_zero(centre, dwidth);
      for (int b = 0; b < q; ++b)
        for (int64_t c = 0; c <= call.dv; ++c) centre[c] += m[b * dwidth + c];
      const double keys = centre[call.dv];
      if (!(keys > 0.5)) return;
      for (int64_t c = 0; c < call.dv; ++c) centre[c] /= keys;
      Buffer<double> left(p * dwidth), scaled(p * dwidth);
      alignas(64) double e[kMostNodes * kMostNodes];
      double t[kMostNodes];
      for (int panel = 0; panel < layout.query.panels; ++panel) {
        for (int i = 0; i < p; ++i) t[i] = query_node(layout, panel, i);
        if (!kernel(t, reference_key(layout, panel), int(k), e)) continue;
        for (int i = 0; i < p; ++i) {
          const int64_t a = int64_t(panel) * p + i;
          const double* gradient = node_gradient + a * dwidth;
          const double* f = node_out.data + a * dwidth;
          const double inverse = inverse_z.data[a];
          double pull = gradient[call.dv];
          for (int64_t c = 0; c < dwidth; ++c) {
            left.data[i * dwidth + c] = gradient[c] * inverse;
            scaled.data[i * dwidth + c] = gradient[c] * inverse * t[i];
          }
          for (int64_t c = 0; c < call.dv; ++c) pull += gradient[c] * (centre[c] - f[c]);
          scaled.data[i * dwidth + call.dv] = pull * inverse * t[i];
        }
        gemm<double, true>(q, vectors, p, {e, 1, kMostNodes}, left.data, dwidth, values, dwidth);
        gemm<double, true>(q, vectors, p, {e, 1, kMostNodes}, scaled.data, dwidth, slopes, dwidth);
      }
    });
  }

  void key_gradients(const AttentionGradient& g, const double* value_table,
                     const double* slope_table, const double* centres) {
    const int q = layout.key.nodes;
    const Table values(value_table, key_nodes(), call.dv, dwidth, width);
    const Table slopes(slope_table, key_nodes(), call.dv, dwidth, width);
    const Table centre(centres, layout.key.panels, call.dv, dwidth, width);
    const Lagrange<T> basis(q);
    const int64_t chunk = chunk_of(call.n_k), chunks = ceil_div(call.n_k, chunk);
    parallel(chunks, [&](int64_t c) {
      const int64_t first = c * chunk, count = least(chunk, call.n_k - first);
      Buffer<T> read_copy(kTile * width), write_copy(kTile * width);
      RowReader<T> reader(call.value, h, call.dv, read_copy.data);
      RowWriter<T> writer(g.grad_value, h, call.dv, write_copy.data);
      Spread spread(width);
      if (call.key_mask) zero_masked(g, first, count);
      for_tiles(true, first, count, basis,
                [&](int panel, const int32_t* order, int64_t tokens, const T* weight,
                    int64_t after) {
                  reader.read(first, order, tokens);
                  reader.prefetch(first, order + tokens, after);
                  writer.point(first, order, tokens);
                  evaluate(q, int(tokens), weight, values.wide.data + int64_t(panel) * q * width,
                           width, writer.row);
                  writer.write(first, order, tokens);
                  evaluate(q, int(tokens), weight, slopes.wide.data + int64_t(panel) * q * width,
                           width, spread.row);
                  alignas(64) T rest[kTile];
                  blend(q, tokens, weight, slopes.last.data + panel * q, rest);
                  for (int64_t i = 0; i < tokens; ++i) {
                    const T ds = rest[i] + centred_dot(reader.row[i],
                                                       centre.wide.data + int64_t(panel) * width,
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
    Buffer<double> centres(int64_t(layout.key.panels) * dwidth);
    key_tables(node_gradient.data, value_table.data, slope_table.data, centres.data);
    key_gradients(g, value_table.data, slope_table.data, centres.data);
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
