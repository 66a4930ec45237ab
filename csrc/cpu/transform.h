// Rank-1 attention in linear time: moments of the keys, a core without n, evaluation at the
// queries. docs/transform.md derives it. Included inside an ISA's namespace.
//
// Tokens are handled in the arithmetic type T (fp32, or fp64 for fp64 tensors), in tiles of kTile:
// equal tokens round in step, so longer sums must be fp64. So are coordinates and the core. Chunks
// and the order of sums depend on sizes alone: results are bitwise the same for any number of
// threads.

constexpr double kLargestSum = 1e300;
constexpr int kLevels = 3;  // precisions tried before a head goes to `direct`
// The strip in which F is analytic is that of the worst keys, and most keys are far from it: panels
// of the query axis are first made this many times wider, and the bound of the error says whether
// that was too bold.
constexpr double kHope = 3;

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

// Tokens of a chunk: enough chunks to share out.
BOLTZATTN_INLINE int64_t chunk_of(int64_t n) {
  return least(kChunk, most(512, round_up(ceil_div(n, 8), 256)));
}

template <class Body>
static void serial(int64_t tasks, Body&& body) {
  for (int64_t task = 0; task < tasks; ++task) body(task);
}

template <class T>
struct Transform {
  const Attention& call;
  const int64_t h;
  const int64_t dv;        // columns of the results
  const int64_t columns;   // of the tensor of values; another number than dv in a layer
  const int64_t row_size;  // of a row over dv + 1 columns, in fp64
  const int64_t raw_size;  // of a row over columns + 1
  Range range{};
  Layout layout{};
  double certificate = 0;

  // At low temperature the largest key (for t > 0) or the smallest takes all the weight, and what
  // gradients are made of, v_j - F, is a small difference. So values are measured from the value of
  // the end key on their half of the key axis, and F from that of the reference key of its panel.
  int64_t end_key[2]{};    // where the largest and the smallest key stand
  Buffer<T> raw_centre;    // [2][raw_size]: their rows of the tensor of values
  Buffer<double> centre;   // [2][row_size]: their values
  Buffer<double> raw;      // [key nodes][raw_size]: moments as summed; the last column counts keys
  Buffer<double> keys_on;  // [key panels]: their number

  Buffer<double> moments[2];  // measured from either end: [key nodes][row_size]
  Buffer<double> node_out;    // [query nodes][row_size]: F - centre, and log Z in column dv
  Buffer<double> node_slope;  // the same of F', and mean key - reference in column dv
  Buffer<double> inverse_z;   // [query nodes]

  Transform(const Attention& a, int64_t head)
      : call(a),
        h(head),
        dv(a.dv),
        columns(a.value_columns),
        row_size(round_up(a.dv + 1, kLanes<T>)),
        raw_size(round_up(a.value_columns + 1, kLanes<T>)) {}

  // 0: measured from the largest key, 1: from the smallest.
  int end_of_query_panel(int64_t panel) const {
    return reference_key(layout, int(panel)) == layout.s_max ? 0 : 1;
  }
  int end_of_key_panel(int64_t panel) const {
    return layout.key.origin + layout.key.half * (2 * panel + 1) >= 0 ? 0 : 1;
  }
  const T* raw_centre_of(int64_t key_panel) const {
    return raw_centre.data + end_of_key_panel(key_panel) * raw_size;
  }
  const double* centre_of(int end) const { return centre.data + end * row_size; }

  int64_t query_nodes() const { return int64_t(layout.query.panels) * layout.query.nodes; }
  int64_t key_nodes() const { return int64_t(layout.key.panels) * layout.key.nodes; }
  bool empty() const { return range.keys == 0 || call.n_q == 0; }

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
    Extent queries, keys;
    if (call.extents && !call.key_mask) {
      const Extent* group = call.extents + h / call.summed * 2 * call.summed;
      queries = group[h % call.summed];
      keys = group[call.summed + h % call.summed];
    } else {
      find_extents(queries, keys);
    }
    const double ends[2] = {queries.low * call.scale, queries.high * call.scale};
    range.t_min = call.scale < 0 ? ends[1] : ends[0];
    range.t_max = call.scale < 0 ? ends[0] : ends[1];
    range.s_min = keys.low;
    range.s_max = keys.high;
    range.keys = int64_t(keys.count);
    end_key[0] = int64_t(keys.at_high);
    end_key[1] = int64_t(keys.at_low);
    return queries.regular != 0 && keys.regular != 0;
  }

  void find_extents(Extent& queries, Extent& keys) const {
    const int64_t chunks = ceil_div(most(call.n_q, call.n_k), kChunk);
    Buffer<Extent> parts(2 * chunks);
    auto body = [&](int64_t c) {
      const int64_t first = c * kChunk;
      double number[kChunk];
      uint8_t skip[kChunk];
      Extent extent;
      int64_t count = most(0, least(kChunk, call.n_q - first));
      read_column(call.query, h, first, count, number);
      extend(extent, number, count, first, nullptr);
      parts.data[2 * c] = extent;
      extent = Extent();
      count = most(0, least(kChunk, call.n_k - first));
      if (!read_mask(first, count, skip)) extent.regular = 0;
      read_column(call.key, h, first, count, number);
      extend(extent, number, count, first, call.key_mask ? skip : nullptr);
      parts.data[2 * c + 1] = extent;
    };
    chunks > 4 ? parallel(chunks, body) : serial(chunks, body);
    for (int64_t c = 0; c < chunks; ++c) {
      join(queries, parts.data[2 * c]);
      join(keys, parts.data[2 * c + 1]);
    }
  }

  // ---- passes over tokens ----

  // Scratch of a pass: coordinates of a chunk, weights of a tile, a block of a tile's rows.
  struct Pass {
    Scratch<Slot::kTask> scratch;
    Coordinates& at;
    int32_t* start;
    double* place;
    T* weight;
    T* block;

    explicit Pass(const Axis& axis)
        : scratch(int64_t(sizeof(Coordinates)) + (axis.panels + 1) * 4 + kTile * 8 +
                      (kMostNodes + kColumns) * kTile * int64_t(sizeof(T)),
                  5),
          at(*scratch.take<Coordinates>(1)),
          start(scratch.take<int32_t>(axis.panels + 1)),
          place(scratch.take<double>(kTile)),
          weight(scratch.take<T>(kMostNodes * kTile)),
          block(scratch.take<T>(kColumns * kTile)) {}
  };

  // Visits the tokens of a chunk in tiles that lie on one panel:
  // visit(panel, tile, weights[node][kTile]).
  template <class Visit>
  void for_tiles(Pass& pass, bool keys, int64_t first, int64_t count, const Lagrange<T>& basis,
                 Visit visit) const {
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
      for (int64_t i = 0; i < count; ++i) at.t[i] = at.u[i] *= call.scale;
      at.warp_queries(layout, count);
    }
    at.locate(axis, count);
    at.sort(masked, count, axis.panels, pass.start);
    for (int p = 0; p < axis.panels; ++p) {
      for (int64_t i = pass.start[p]; i < pass.start[p + 1]; i += kTile) {
        const int64_t tokens = least(kTile, pass.start[p + 1] - i);
        const int32_t* order = at.order + i;
        for (int64_t k = 0; k < tokens; ++k) pass.place[k] = at.place[order[k]];
        const int64_t padded = round_up(tokens, kLanes<T>);
        for (int64_t k = tokens; k < padded; ++k) pass.place[k] = 0;
        basis.weigh(pass.place, padded, pass.weight);
        visit(p, Tile{first, order, tokens}, pass.weight);
      }
    }
  }

  // Visits columns in blocks: visit(first column, number of columns).
  template <class Visit>
  static void for_blocks(int64_t size, Visit visit) {
    for (int64_t begin = 0; begin < size; begin += kColumns)
      visit(begin, least(kColumns, size - begin));
  }

  // Sums the rows of a matrix over the panels of an axis: sums[panels][nodes][size], the column
  // after the last taking the number of keys, or the sum of `last`. also(panel, tile, first column,
  // number of columns, weights, rows, their centre, one number per token, 0 at first) sees every
  // block.
  template <class Also>
  void sum_moments(bool keys, const Matrix& matrix, int64_t matrix_columns, const Matrix* last,
                   int64_t size, double* sums, Also also) const {
    const Axis& axis = keys ? layout.key : layout.query;
    const int nodes = axis.nodes;
    const int64_t n = keys ? call.n_k : call.n_q;
    const int64_t table = int64_t(axis.panels) * nodes * size;
    const int64_t chunk = chunk_of(n), chunks = ceil_div(n, chunk);
    // Partial sums are kept within a few megabytes, whatever the layout.
    const int64_t most_parts = most(4, least(64, (int64_t(1) << 18) / table));
    const int64_t per_part = ceil_div(chunks, least(chunks, most_parts));
    const int64_t parts = ceil_div(chunks, per_part);
    Buffer<double> partial(parts * table);
    Buffer<T> zero(kColumns);
    set_zero(zero.data, kColumns);
    const Lagrange<T> basis(nodes);
    parallel(parts, [&](int64_t part) {
      double* to = partial.data + part * table;
      set_zero(to, table);
      Pass pass(axis);
      for (int64_t c = part * per_part; c < least(chunks, (part + 1) * per_part); ++c) {
        const int64_t first = c * chunk, count = least(chunk, n - first);
        for_tiles(
            pass, keys, first, count, basis, [&](int panel, const Tile& tile, const T* weight) {
              double* target = to + int64_t(panel) * nodes * size;
              alignas(64) T number[kTile];
              for (int64_t i = 0; i < tile.tokens; ++i) number[i] = keys ? T(1) : T(0);
              if (last)
                for (int64_t i = 0; i < tile.tokens; ++i)
                  read_column(*last, h, first + tile.order[i], 1, number + i);
              for (int64_t i = tile.tokens; i < round_up(tile.tokens, kLanes<T>); ++i)
                number[i] = 0;
              double dots[kTile] = {};
              for_blocks(matrix_columns, [&](int64_t begin, int64_t width) {
                const T* centre = keys ? raw_centre_of(panel) + begin : zero.data;
                const Rows<T> rows = read_rows(matrix, h, tile, begin, width, pass.block);
                sum_rows(nodes, tile.tokens, width, weight, rows, centre, target + begin, size);
                also(panel, tile, begin, width, weight, rows, centre, dots);
              });
              if (keys || last)
                for (int a = 0; a < nodes; ++a)
                  target[a * size + matrix_columns] +=
                      double(dot(weight + a * kTile, number, tile.tokens));
            });
      }
    });
    // Part by part, so that the innermost loop runs along memory.
    const int64_t block = 1024, blocks = ceil_div(table, block);
    auto add = [&](int64_t b) {
      const int64_t first = b * block, end = least(table, first + block);
      set_zero(sums + first, end - first);
      for (int64_t part = 0; part < parts; ++part) {
        const double* from = partial.data + part * table;
        for (int64_t k = first; k < end; ++k) sums[k] += from[k];
      }
    };
    parts* blocks > 256 ? parallel(blocks, add) : serial(blocks, add);
  }

  // ---- the core ----

  // rows[., dv] = rows[., columns] weight^T, or back: rows[., columns] = rows[., dv] weight.
  void apply_weight(const double* from, int64_t from_size, int64_t rows, bool back, double* to,
                    int64_t to_size) const {
    constexpr int64_t kBlock = 8 * kLanes<double>, kDepth = 256;
    const int64_t depth = back ? dv : columns, width = back ? columns : dv;
    parallel(ceil_div(width, kBlock), [&](int64_t block) {
      const int64_t begin = block * kBlock, here = least(kBlock, width - begin);
      Buffer<double> packed(kDepth * kBlock), sum(rows * kBlock);
      set_zero(sum.data, rows * kBlock);
      for (int64_t k = 0; k < depth; k += kDepth) {
        const int64_t deep = least(kDepth, depth - k);
        set_zero(packed.data, deep * kBlock);
        if (back) {
          read_block(call.weight, h, k, begin, deep, here, packed.data, kBlock, 1);
        } else {
          read_block(call.weight, h, begin, k, here, deep, packed.data, 1, kBlock);
        }
        gemm<double, true>(rows, 8, deep, {from + k, from_size, 1}, packed.data, kBlock, sum.data,
                           kBlock);
      }
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < here; ++c) to[r * to_size + begin + c] = sum.data[r * kBlock + c];
    });
  }

  void find_centres() {
    raw_centre.resize(2 * raw_size);
    centre.resize(2 * row_size);
    set_zero(raw_centre.data, 2 * raw_size);
    set_zero(centre.data, 2 * row_size);
    Buffer<double> row(2 * raw_size);
    for (int end = 0; end < 2; ++end) {
      T* to = raw_centre.data + end * raw_size;
      read_block(call.value, h, end_key[end], 0, 1, columns, to, 0, 1);
      for (int64_t c = 0; c < columns; ++c) row.data[end * raw_size + c] = double(to[c]);
    }
    if (call.weight) {
      apply_weight(row.data, raw_size, 2, false, centre.data, row_size);
      Buffer<double> bias(dv);
      if (call.weight_bias) read_block(call.weight_bias, h, 0, 0, 1, dv, bias.data, 0, 1);
      for (int end = 0; call.weight_bias && end < 2; ++end)
        for (int64_t c = 0; c < dv; ++c) centre.data[end * row_size + c] += bias.data[c];
    } else {
      for (int end = 0; end < 2; ++end)
        for (int64_t c = 0; c < dv; ++c)
          centre.data[end * row_size + c] = row.data[end * raw_size + c];
    }
  }

  // From sums of v - centre of the key's own half to moments from either end.
  void measure_from_ends() {
    const int64_t rows = key_nodes();
    keys_on.resize(layout.key.panels);
    set_zero(keys_on.data, layout.key.panels);
    for (auto& m : moments) m.resize(rows * row_size);
    if (call.weight) apply_weight(raw.data, raw_size, rows, false, moments[0].data, row_size);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t panel = r / layout.key.nodes;
      const int own = end_of_key_panel(panel);
      double* to[2] = {moments[0].data + r * row_size, moments[1].data + r * row_size};
      const double keys = raw.data[r * raw_size + columns];
      if (!call.weight)
        for (int64_t c = 0; c < dv; ++c) to[0][c] = raw.data[r * raw_size + c];
      to[0][dv] = keys;
      for (int64_t c = dv + 1; c < row_size; ++c) to[0][c] = 0;
      for (int64_t c = 0; c < row_size; ++c) to[1][c] = to[0][c];
      const double *from = centre_of(own), *other = centre_of(1 - own);
      for (int64_t c = 0; c < dv; ++c) to[1 - own][c] += keys * (from[c] - other[c]);
      keys_on.data[panel] += keys;
    }
  }

  // Node values from the moments; with slopes for backward.
  struct Bounds {
    double largest, query, key;  // largest |F|; bounds of the errors
  };
  Bounds run_core(bool slopes) {
    const int p = layout.query.nodes, q = layout.key.nodes, panels = layout.query.panels;
    const int64_t vectors = row_size / kLanes<double>;
    const Nodes nodes(layout);
    const Ellipses ellipses(layout);
    const Decay decay(layout);
    Buffer<Bounds> bounds(panels);
    node_out.resize(query_nodes() * row_size);
    inverse_z.resize(query_nodes());
    if (slopes) node_slope.resize(query_nodes() * row_size);
    const int64_t per_task = 4;
    parallel(ceil_div(panels, per_task), [&](int64_t task) {
      const int64_t e_row = Nodes::row_of(kRun * q);
      Buffer<double> e(p * e_row), scratch(Decay::kLast * row_size);
      for (int64_t panel = task * per_task; panel < least(panels, (task + 1) * per_task); ++panel) {
        const double reference = reference_key(layout, int(panel));
        const double* t = nodes.query.data + panel * p;
        double* f = node_out.data + panel * p * row_size;
        double* slope = slopes ? node_slope.data + panel * p * row_size : nullptr;
        double* inverse = inverse_z.data + panel * p;
        set_zero(f, p * row_size);
        if (slopes) set_zero(slope, p * row_size);
        auto matters = [&](int64_t k) {
          return keys_on.data[k] > 0.5 && nodes.matters(layout, panel, k);
        };
        for_runs(layout.key.panels, matters, [&](int64_t first, int64_t count) {
          nodes.kernel(layout, panel, first, count, e.data, e_row);
          const double* m = moments[end_of_query_panel(panel)].data + first * q * row_size;
          const Strided<double> left{e.data, e_row, 1};
          gemm<double, true>(p, vectors, count * q, left, m, row_size, f, row_size);
          if (!slopes || range.s_min == range.s_max) return;  // equal keys: F is constant
          const double* s = nodes.key.data + first * q;
          for (int i = 0; i < p; ++i)
            for (int64_t b = 0; b < count * q; ++b)
              e.data[i * e_row + b] *= s[b] - (reference - layout.middle);
          gemm<double, true>(p, vectors, count * q, left, m, row_size, slope, row_size);
        });
        Bounds& bound = bounds.data[panel];
        bound = {0, 0, 0};
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
                larger_of(bound.key, ellipses.error(layout, keys_on.data, t[i], z, reference));
          if (!slopes) continue;
          double* derivative = slope + i * row_size;
          for (int64_t c = 0; c <= dv; ++c) derivative[c] *= inverse[i];
          const double mean = derivative[dv];
          for (int64_t c = 0; c < dv; ++c) derivative[c] -= row[c] * mean;
        }
        bound.query = decay.error(layout, f, row_size, dv, scratch.data);
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
      Buffer<T> row(dv);
      part.data[c] = 0;
      uint8_t skip[kChunk] = {};
      read_mask(c * kChunk, least(kChunk, call.n_k - c * kChunk), skip);
      for (int64_t j = c * kChunk; j < least(call.n_k, (c + 1) * kChunk); ++j) {
        if (skip[j - c * kChunk]) continue;
        read_block(call.value, h, j, 0, 1, dv, row.data, 0, 1);
        part.data[c] = larger_of(part.data[c], largest_of(row.data, dv));
      }
    });
    double largest = 0;
    for (int64_t c = 0; c < chunks; ++c) largest = larger_of(largest, part.data[c]);
    return largest;
  }

  // NaN or inf among the values would be lost where a key has no weight; dense softmax keeps it.
  bool finite_sums() const { return largest_of(raw.data, key_nodes() * raw_size) <= kLargestSum; }

  // Finds the certificate, relative to values of this size; whether it is within tolerance.
  bool certify(const Bounds& bounds, double size) {
    const DType dtype = call.value.dtype;
    const double relative = bounds.query == 0 ? 0 : bounds.query / size;
    certificate = relative + 2 * bounds.key / (1 - (bounds.key < 0.5 ? bounds.key : 0.5)) +
                  rounding_of(dtype, largest_product(range));
    return certificate <= tolerance_of(dtype);
  }

  // Range, layout, moments and node values, refined until the certificate is within tolerance.
  // False: the head must be computed by `direct`.
  bool build(bool slopes) {
    if (!find_range()) return false;
    if (empty()) return true;
    const double product = largest_product(range);
    if (!(product <= kLargestProduct)) return false;
    const DType dtype = call.value.dtype;
    find_centres();
    double largest = 0;
    for (int level = 0; level < kLevels; ++level) {
      const double precision = precision_of(dtype, level);
      const bool hopeful = level == 0 && dtype != DType::kFloat64;  // fp64 needs its last digits
      layout = choose_layout(range, call.n_q, call.n_k, dv, precision, most_key_nodes(dtype),
                             hopeful ? kHope : 1);
      raw.resize(key_nodes() * raw_size);
      sum_moments(true, call.value, columns, nullptr, raw_size, raw.data, [](auto...) {});
      if (!finite_sums()) return false;
      measure_from_ends();
      Bounds bounds = run_core(slopes);
      if (!(bounds.largest <= kLargestSum)) return false;
      // Next to rounding this must be small, and smaller where slopes are interpolated too.
      const double allowed = rounding_of(dtype, product) * bounds.largest / (slopes ? 64 : 8);
      if (hopeful && bounds.query > allowed) {
        layout.query = make_layout(range, layout.query.nodes, layout.key.nodes, precision).query;
        bounds = run_core(slopes);
      }
      // |F - centre| <= 2 max|v|, so half of its largest can only overstate the relative error;
      // the values themselves are looked at only if that is not good enough.
      for (const bool exact : {false, true}) {
        if (exact && call.weight) break;  // the values are not at hand
        if (exact && largest == 0) largest = largest_value();
        const double size = exact ? largest : bounds.largest / 2;
        if (certify(bounds, size)) return true;
      }
    }
    return false;
  }

  // ---- forward ----

  // A table in T, as the token passes read it: [nodes][size], the last of `count` columns apart.
  struct Table {
    int64_t size;
    Buffer<T> wide;
    Buffer<T> last;
    // offset_of(row): what is added to it, [count] numbers or none.
    template <class OffsetOf>
    Table(const double* from, int64_t from_size, int64_t rows, int64_t count, OffsetOf offset_of)
        : size(round_up(count, kLanes<T>)), wide(rows * size), last(rows) {
      for (int64_t r = 0; r < rows; ++r, from += from_size) {
        T* to = wide.data + r * size;
        const double* offset = offset_of(r);
        if (offset) {
          for (int64_t c = 0; c < count; ++c) to[c] = T(from[c] + offset[c]);
        } else {
          for (int64_t c = 0; c < count; ++c) to[c] = T(from[c]);
        }
        for (int64_t c = count; c < size; ++c) to[c] = 0;
        last.data[r] = T(from[count]);
      }
    }
    Table(const double* from, int64_t from_size, int64_t rows, int64_t count)
        : Table(from, from_size, rows, count, [](int64_t) { return (const double*)nullptr; }) {}
  };

  // to[token] = sum over nodes of weight[node][token] table[node]
  static void blend(int nodes, int64_t tokens, const T* weight, const T* table, T* to) {
    constexpr int L = kLanes<T>;
    for (int64_t i = 0; i < round_up(tokens, L); i += L) {
      Vec<T> sum{};
      for (int a = 0; a < nodes; ++a) sum += load(weight + a * kTile + i) * table[a];
      store(to + i, sum);
    }
  }

  // In a layer the heads of a group add up, the first of them writing.
  bool first_of_group() const { return h % call.summed == 0; }

  void fill_rows(const Matrix& m, int64_t rows, int64_t count, const T* row) const {
    for (int64_t i = 0; i < rows; ++i) write_block(row, 0, 1, 1, count, m, h, i, 0);
  }
  void zero_rows(const Matrix& m, int64_t rows, int64_t count) const {
    Buffer<T> zero(count);
    set_zero(zero.data, count);
    fill_rows(m, rows, count, zero.data);
  }

  void write_outputs() {
    if (empty()) {
      Buffer<T> bias(dv);
      set_zero(bias.data, dv);
      if (call.out_bias) read_block(call.out_bias, h, 0, 0, 1, dv, bias.data, 0, 1);
      if (call.merge) return;
      for (int64_t i = 0; call.lse && i < call.n_q; ++i) lse_of(call, h)[i] = -INFINITY;
      if (first_of_group()) fill_rows(call.out, call.n_q, dv, bias.data);
      return;
    }
    const int p = layout.query.nodes;
    if (call.out_bias && first_of_group()) {
      Buffer<double> bias(dv);
      read_block(call.out_bias, h, 0, 0, 1, dv, bias.data, 0, 1);
      for (int64_t c = 0; c < 2 * dv; ++c)
        centre.data[c / dv * row_size + c % dv] += bias.data[c % dv];
    }
    const Table table(node_out.data, row_size, query_nodes(), dv,
                      [&](int64_t r) { return centre_of(end_of_query_panel(r / p)); });
    const Write write = call.merge || !first_of_group()
                            ? Write::kBlend
                            : choose_write<T>(call.out, h, call.n_q, dv);
    const Lagrange<T> basis(p);
    const int64_t chunk = chunk_of(call.n_q);
    parallel(ceil_div(call.n_q, chunk), [&](int64_t task) {
      const int64_t first = task * chunk, count = least(chunk, call.n_q - first);
      Pass pass(layout.query);
      for_tiles(pass, false, first, count, basis,
                [&](int panel, const Tile& tile, const T* weight) {
                  const T* rows = table.wide.data + int64_t(panel) * p * table.size;
                  Shares<T> shares(tile.tokens);
                  if (call.lse)
                    write_lse(panel, tile, weight, table.last.data + panel * p, pass.at.t, shares);
                  for_blocks(dv, [&](int64_t begin, int64_t width) {
                    write_rows(call.out, h, tile, begin, width, shares, write, pass.block,
                               [&](auto finish) BOLTZATTN_INLINED {
                                 spread_table(p, tile.tokens, width, weight, rows + begin,
                                              table.size, finish);
                               });
                  });
                });
      if (write == Write::kStream) stream_end();
    });
  }

  // Writes lse, or joins it with what is there and finds the shares of either in the outputs.
  void write_lse(int panel, const Tile& tile, const T* weight, const T* log_z, const double* t,
                 Shares<T>& shares) const {
    alignas(64) T blended[kTile];
    blend(layout.query.nodes, tile.tokens, weight, log_z, blended);
    const double reference = reference_key(layout, panel);
    double* lse = lse_of(call, h) + tile.first;
    for (int64_t i = 0; i < tile.tokens; ++i) {
      double& at = lse[tile.order[i]];
      const double found = t[tile.order[i]] * reference + double(blended[i]);
      if (call.merge) shares.join(i, &at, found);
      at = call.merge ? at : found;
    }
  }
};
