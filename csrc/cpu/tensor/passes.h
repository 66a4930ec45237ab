// The passes over tokens of a head of rank 2 to 4: moments, evaluate, query_moments, and evaluate
// at the keys. Included inside an ISA's namespace.

// C: the type of the tables, fp32 for results of fp32 tokens, fp64 for gradients.
template <class T, class C>
struct TensorHead {
  const Attention& call;
  const int64_t h, dv;
  const int rank;
  const int64_t size;   // of a row over dv + 1 columns, in whole vectors of T and of fp64
  const double factor;  // of the coordinates of queries; for Gaussian scores of those of keys, too
  double origin[kMostAxes] = {};  // of both sides, for Gaussian scores
  TensorTokens query, key;
  Frame frame;
  TensorLayout layout{};
  double t_most[kMostAxes] = {}, s_most[kMostAxes] = {};  // without the tokens apart
  double cost = 0, direct_cost = 0;                       // nanoseconds on one thread
  TensorOrder query_order, key_order;
  Apart apart;
  Buffer<T> apart_value;  // [keys apart][size], from the centre of values
  double product = 0;     // the size of logits
  double certificate = 0;

  Buffer<int32_t> key_top;       // [key panels]: the key from whose value gradients are measured
  Buffer<double> key_log;        // [key panels]: the largest bias, -inf if there is no key
  Buffer<double> key_centre;     // [dv]: values are measured from here
  Buffer<C> moments;             // [key nodes][size]: sums of values and, in column dv, of weights
  Buffer<C> table[kMostTables];  // [query panels][nodes of a panel][size]: N, Z, and by axis
                                 // the same after a factor s
  Buffer<double> table_log;      // [query panels]: the unit of N and Z

  TensorHead(const Attention& a, int64_t head)
      : call(a),
        h(head),
        dv(a.dv),
        rank(int(a.rank)),
        size(most(round_up(dv, kLanes<T>), round_up(dv + 1, kLanes<C>))),
        factor(a.is_gaussian ? ::sqrt(a.scale) : a.scale) {}

  // Lines of weights of a query: the nodes of its panel, and the keys apart.
  int64_t lines() const { return panel_nodes() + apart.keys; }
  int64_t panel_nodes() const {
    int64_t all = 1;
    for (int a = 0; a < rank; ++a) all *= layout.nodes;
    return all;
  }
  // Where row b of a panel is in the table over all nodes of the axes, in rows.
  int64_t grid_row(const Axis* axes, int64_t panel, int64_t b) const {
    int64_t row = 0, unit = 1;
    for (int a = rank - 1; a >= 0; --a) {
      const int64_t n = layout.nodes;
      row += (panel % axes[a].panels * n + b % n) * unit;
      panel /= axes[a].panels;
      b /= n;
      unit *= int64_t(axes[a].panels) * n;
    }
    return row;
  }
  int64_t grid_rows(const Axis* axes) const {
    int64_t all = 1;
    for (int a = 0; a < rank; ++a) all *= int64_t(axes[a].panels) * layout.nodes;
    return all;
  }
  // A token as the caller has it, times the factor, measured from the origin.
  void original(const Matrix& m, int64_t token, double times, double* x) const {
    read_block(m, h, token, 0, 1, rank, x, 0, 1);
    for (int a = 0; a < rank; ++a) x[a] = (x[a] - origin[a]) * times;
  }
};

// to[node * size] += sum of weight[node][tokens] times last[tokens], which are 1 if there are none.
template <class T>
static void add_weights(int64_t nodes, int64_t tokens, const T* weight, const double* last,
                        double* to, int64_t size) {
  constexpr int L = kLanes<T>;
  for (int64_t a = 0; a < nodes; ++a) {
    if (last) {
      Vec<double> sum{};
      for (int64_t i = 0; i < tokens; i += kLanes<double>)
        sum += widened(weight + a * kTile + i) * load(last + i);
      to[a * size] += reduce_sum<double>(sum);
    } else {
      Vec<T> sum{};
      for (int64_t i = 0; i < tokens; i += L) sum += load(weight + a * kTile + i);
      to[a * size] += double(reduce_sum<T>(sum));
    }
  }
}

// Sums over the tokens of every panel, at all nodes of the axes: grid[nodes][size]. Rows of panels
// without tokens are left as they are, and what others held before counts times keep[panel] (0 if
// it is not given). each(panel, tile, to[nodes of a panel][size]) adds a tile.
template <class T, class C, class G, class MakeEach>
static void sum_tensor_tiles(const TensorHead<T, C>& head, const TensorOrder& order,
                             const Axis* axes, G* grid, const double* keep, MakeEach make_each) {
  const int64_t nodes = head.panel_nodes(), size = head.size;
  const Segments segments(order.plain());
  // A panel that begins or ends in another segment is added up later, in order.
  Buffer<double> shared(segments.count * 2 * nodes * size);
  Buffer<int64_t> owner(segments.count * 2);
  for (int64_t k = 0; k < segments.count * 2; ++k) owner.data[k] = -1;
  const auto put = [&](int64_t panel, const double* sums, bool add) {
    const double share = add ? 1 : keep ? keep[panel] : 0;
    for (int64_t b = 0; b < nodes; b += head.layout.nodes) {
      G* to = grid + head.grid_row(axes, panel, b) * size;
      const double* from = sums + b * size;
      for (int64_t c = 0; c < head.layout.nodes * size; ++c)
        to[c] = G(share != 0 ? double(to[c]) * share + from[c] : from[c]);
    }
  };
  parallel(segments.count, [&](int64_t segment) {
    Buffer<double> sums(nodes * size);
    auto each = make_each(segment);
    int64_t panel = -1;
    const auto finish = [&] {
      if (panel < 0) return;
      const bool early = order.start.data[panel] < segments.begin(segment);
      const bool late = order.start.data[panel + 1] > segments.begin(segment + 1);
      if (!early && !late) return put(panel, sums.data, false);
      const int64_t slot = segment * 2 + (early ? 0 : 1);
      owner.data[slot] = panel;
      __builtin_memcpy(shared.data + slot * nodes * size, sums.data,
                       size_t(nodes * size) * sizeof(double));
    };
    for_tensor_tiles(order, segments, segment, [&](int64_t p, bool first, const Tile& tile) {
      if (first) {
        finish();
        set_zero(sums.data, nodes * size);
        panel = p;
        pause_point();
      }
      each(p, tile, sums.data);
    });
    finish();
  });
  for (int64_t slot = 0, last = -1; slot < segments.count * 2; ++slot) {
    if (owner.data[slot] < 0) continue;
    put(owner.data[slot], shared.data + slot * nodes * size, owner.data[slot] == last);
    last = owner.data[slot];
  }
}

// Whether the rows of all panels with tokens hold moderate numbers, NaN not being one.
template <class T, class C, class G>
static bool grid_is_moderate(const TensorHead<T, C>& head, const TensorOrder& order,
                             const Axis* axes, const G* grid) {
  int odd = 0;
  parallel(order.count, [&](int64_t i) {
    for (int64_t b = 0; b < head.panel_nodes(); b += head.layout.nodes) {
      const G* row = grid + head.grid_row(axes, order.occupied.data[i], b) * head.size;
      if (!(largest_of(row, head.layout.nodes * head.size) <= kLargestSum))
        __atomic_store_n(&odd, 1, __ATOMIC_RELAXED);
    }
  });
  return odd == 0;
}

// exp(bias of a token + unit), for the tokens of a tile; 0 for its padding.
static void token_factors(const double* bias, double unit, const Tile& tile, double* to) {
  for (int64_t i = 0; i < kTile; ++i)
    to[i] = i < tile.tokens ? (bias[tile.order[i]] + unit) * kLog2e : -1023.0;
  for (int64_t i = 0; i < tile.tokens; i += kLanes<double>) store(to + i, exp2_of(load(to + i)));
}

// Adds rows of tokens, measured from a centre, and in column dv their numbers `last` (1 if there
// are none), times exp(bias of the token - log of its panel).
template <class T, class C>
struct TokenSums {
  const TensorHead<T, C>& head;
  const Matrix& matrix;
  const T* centre;
  const double *bias, *log, *last;
  TensorWeights<T> weights;
  Buffer<T> block;

  TokenSums(const TensorHead<T, C>& of, const TensorOrder& order, const Matrix& rows, const T* from,
            const double* biases, const double* logs, const double* numbers)
      : head(of),
        matrix(rows),
        centre(from),
        bias(biases),
        log(logs),
        last(numbers),
        weights(order, of.layout.nodes),
        block(kColumns * kTile) {}

  void operator()(int64_t p, const Tile& tile, double* to) {
    alignas(64) double factor[kTile], of_tile[kTile] = {};
    token_factors(bias, -log[p], tile, factor);
    const T* weight = weights.find(p, tile.order, tile.tokens, factor);
    for_blocks(head.dv, [&](int64_t begin, int64_t width) {
      const Rows<T> rows = read_rows(matrix, head.h, tile, begin, width, block.data);
      sum_rows(int(head.panel_nodes()), tile.tokens, width, weight, rows, centre + begin,
               to + begin, head.size);
    });
    for (int64_t i = 0; last && i < tile.tokens; ++i) of_tile[i] = last[tile.order[i]];
    add_weights(head.panel_nodes(), tile.tokens, weight, last ? of_tile : nullptr, to + head.dv,
                head.size);
  }
};

// The keys from whose values gradients are measured: on every panel the largest bias, and of those
// with the same one the farthest out.
template <class T, class C>
static void find_top_keys(TensorHead<T, C>& head) {
  const TensorOrder& order = head.key_order;
  head.key_top.resize(order.panels);
  for_parts(order.count, 64, [&](int64_t first, int64_t end) {
    for (int64_t k = first; k < end; ++k) {
      const int64_t p = order.occupied.data[k];
      double top = -INFINITY, far = -1;
      for (int64_t i = order.start.data[p]; i < order.start.data[p + 1]; ++i) {
        const int32_t token = order.order.data[i];
        double norm = 0;
        for (int a = 0; a < head.rank; ++a) {
          const double x = head.key.at.data[int64_t(token) * head.rank + a];
          norm += x * x;
        }
        const double bias = head.key.bias.data[token];
        if (bias > top || (bias == top && norm > far))
          head.key_top.data[p] = token, top = bias, far = norm;
      }
    }
  });
}

// Raises log[panel] to the largest bias of a token on the panel.
static void raise_logs(const TensorOrder& order, const double* bias, double* log) {
  for_parts(order.count, 64, [&](int64_t first, int64_t end) {
    for (int64_t k = first; k < end; ++k) {
      const int64_t p = order.occupied.data[k];
      for (int64_t i = order.start.data[p]; i < order.start.data[p + 1]; ++i)
        log[p] = larger_of(log[p], bias[order.order.data[i]]);
    }
  });
}

// Values are measured from that of a plain key; false if it is not finite.
template <class T, class C>
static bool find_key_centre(TensorHead<T, C>& head, int64_t key) {
  head.key_centre.resize(head.size);
  set_zero(head.key_centre.data, head.size);
  read_block(head.call.value, head.h, key, 0, 1, head.dv, head.key_centre.data, 0, 1);
  return all_finite(head.key_centre.data, head.dv);
}

// Sums of weights times (v - centre, 1) at the key nodes; false if a value is not finite.
template <class T, class C>
static bool sum_tensor_moments(TensorHead<T, C>& head) {
  const Attention& call = head.call;
  const int64_t dv = head.dv, size = head.size;
  const TensorOrder& order = head.key_order;
  find_top_keys(head);
  head.key_log.resize(order.panels);
  for (int64_t p = 0; p < order.panels; ++p) head.key_log.data[p] = -INFINITY;
  raise_logs(order, head.key.bias.data, head.key_log.data);
  if (!find_key_centre(head, order.order.data[0])) return false;
  Buffer<T> centre(size);
  for (int64_t c = 0; c < size; ++c) centre.data[c] = T(head.key_centre.data[c]);
  head.apart_value.resize(head.apart.keys * size);
  set_zero(head.apart_value.data, head.apart.keys * size);
  for (int64_t j = 0; j < head.apart.keys; ++j) {
    T* row = head.apart_value.data + j * size;
    read_block(call.value, head.h, head.apart.key.data[j], 0, 1, dv, row, 0, 1);
    if (!all_finite(row, dv)) return false;
    for (int64_t c = 0; c < dv; ++c) row[c] -= centre.data[c];
  }
  head.moments.resize(head.grid_rows(head.layout.key) * size);
  sum_tensor_tiles(head, order, head.layout.key, head.moments.data, nullptr, [&](int64_t) {
    return TokenSums<T, C>(head, order, call.value, centre.data, head.key.bias.data,
                           head.key_log.data, nullptr);
  });
  return grid_is_moderate(head, order, head.layout.key, head.moments.data);
}

// A value and a key in the middle of a query panel, the keys apart included: N / Z there, from the
// centre of values, and the mean key if slopes are there. index: of the panel among those with
// queries.
template <class T, class C>
static void find_middle(const TensorHead<T, C>& head, int64_t index, bool slopes, T* value,
                        double* mean) {
  const int64_t dv = head.dv, size = head.size, nodes = head.panel_nodes();
  const int64_t at = (index * nodes + nodes / 2) * size;
  const C* plain = head.table[0].data + at;
  const int64_t keys = head.apart.keys;
  Buffer<double> weight(keys);
  double t[kMostAxes], top = 0;
  head.query_order.centre(head.query_order.occupied.data[index], t);
  for (int64_t j = 0; j < keys; ++j) {
    const int64_t token = head.apart.key.data[j];
    double x = head.key.bias.data[token] - head.table_log.data[index];
    for (int a = 0; a < head.rank; ++a) x += t[a] * head.key.at.data[token * head.rank + a];
    weight.data[j] = x;
    top = larger_of(top, x);
  }
  const double of_nodes = ::exp(-top);
  double z = double(plain[dv]) * of_nodes;
  for (int64_t j = 0; j < keys; ++j) z += weight.data[j] = ::exp(weight.data[j] - top);
  for (int64_t c = 0; c < size; ++c) {
    double sum = double(plain[c]) * of_nodes;
    for (int64_t j = 0; j < keys; ++j)
      sum += weight.data[j] * double(head.apart_value.data[j * size + c]);
    value[c] = c < dv ? T(sum / z) : T(0);
  }
  for (int a = 0; slopes && a < head.rank; ++a) {
    double sum = double(head.table[1 + a].data[at + dv]) * of_nodes;
    for (int64_t j = 0; j < keys; ++j)
      sum += weight.data[j] * head.key.at.data[int64_t(head.apart.key.data[j]) * head.rank + a];
    mean[a] = sum / z;
  }
}

// The tables of a query panel as its tokens read them, in T, measured from a value and a key of the
// panel: N - v Z and Z; by axis the same of their slopes. The keys apart follow the nodes.
template <class T, class C>
struct PanelTables {
  const int64_t nodes, lines, width;
  Buffer<T> wide[kMostTables], last[kMostTables];  // [lines][width], [lines]
  Buffer<T> centre;                                // [size]: the value, from the centre of values
  double mean[kMostAxes];                          // the key
  double log = 0;

  PanelTables(const TensorHead<T, C>& head, bool slopes)
      : nodes(head.panel_nodes()),
        lines(head.lines()),
        width(round_up(head.dv, kLanes<T>)),
        centre(head.size) {
    for (int k = 0; k <= (slopes ? head.rank : 0); ++k)
      wide[k].resize(lines * width), last[k].resize(lines);
  }

  // index: of the panel among those with queries.
  void read(const TensorHead<T, C>& head, int64_t index, bool slopes) {
    const int64_t dv = head.dv, size = head.size, at = index * nodes * size;
    const C* plain = head.table[0].data + at;
    find_middle(head, index, slopes, centre.data, mean);
    log = head.table_log.data[index];
    for (int64_t b = 0; b < nodes; ++b) {
      const C* row = plain + b * size;
      for (int64_t c = 0; c < width; ++c)
        wide[0].data[b * width + c] = c < dv ? T(row[c] - C(centre.data[c]) * row[dv]) : T(0);
      last[0].data[b] = T(row[dv]);
    }
    for (int a = 0; slopes && a < head.rank; ++a) {
      const C* moved = head.table[1 + a].data + at;
      for (int64_t b = 0; b < nodes; ++b) {
        const C *row = plain + b * size, *slope = moved + b * size;
        const double z = double(slope[dv]) - mean[a] * double(row[dv]);
        for (int64_t c = 0; c < width; ++c)
          wide[1 + a].data[b * width + c] =
              c < dv ? T(double(slope[c]) - mean[a] * double(row[c]) - double(centre.data[c]) * z)
                     : T(0);
        last[1 + a].data[b] = T(z);
      }
    }
    for (int64_t j = 0; j < head.apart.keys; ++j) {
      const T* value = head.apart_value.data + j * size;
      const double* key = head.key.at.data + int64_t(head.apart.key.data[j]) * head.rank;
      for (int k = 0; k <= (slopes ? head.rank : 0); ++k) {
        const T factor = k == 0 ? T(1) : T(key[k - 1] - mean[k - 1]);
        last[k].data[nodes + j] = factor;
        for (int64_t c = 0; c < width; ++c)
          wide[k].data[(nodes + j) * width + c] =
              c < dv ? (value[c] - centre.data[c]) * factor : T(0);
      }
    }
  }
};

// The weights of the keys apart for the queries of a tile, in the lines after those of the nodes,
// and all weights in the unit exp(log + shift) of their row.
template <class T, class C>
static void weigh_apart(const TensorHead<T, C>& head, const Tile& tile, double log, T* weight,
                        double* shift) {
  constexpr int L = kLanes<double>;
  const int rank = head.rank;
  const int64_t nodes = head.panel_nodes(), keys = head.apart.keys;
  const int64_t padded = round_up(tile.tokens, kLanes<T>);
  for (int64_t i = 0; i < kTile; ++i) shift[i] = 0;
  if (keys == 0) return;
  Buffer<double> x(keys * kTile);
  alignas(64) double t[kMostAxes][kTile] = {};
  for (int64_t i = 0; i < tile.tokens; ++i)
    for (int a = 0; a < rank; ++a) t[a][i] = head.query.at.data[int64_t(tile.order[i]) * rank + a];
  for (int64_t i = 0; i < padded; i += L) {
    Vec<double> top{};
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t token = head.apart.key.data[j];
      Vec<double> sum = splat(head.key.bias.data[token] - log);
      for (int a = 0; a < rank; ++a) sum += load(t[a] + i) * head.key.at.data[token * rank + a];
      store(x.data + j * kTile + i, sum);
      top = larger<double>(top, sum);
    }
    store(shift + i, top);
    for (int64_t j = 0; j < keys; ++j) {
      const Vec<double> e = exp2_of((load(x.data + j * kTile + i) - top) * kLog2e);
      store(x.data + j * kTile + i, e);
    }
  }
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t i = 0; i < padded; ++i)
      weight[(nodes + j) * kTile + i] = i < tile.tokens ? T(x.data[j * kTile + i]) : T(0);
  alignas(64) T factor[kTile];
  for (int64_t i = 0; i < padded; ++i) factor[i] = T(::exp(-shift[i]));
  for (int64_t b = 0; b < nodes; ++b)
    for (int64_t i = 0; i < padded; i += kLanes<T>)
      store(weight + b * kTile + i, load(weight + b * kTile + i) * load(factor + i));
}

// What the frame adds to the logarithm of Z at a query: t . s_middle, and for Gaussian scores
// -|t|^2 / 2.
template <class T, class C>
static double lse_offset(const TensorHead<T, C>& head, int64_t token) {
  double sum = 0, t[kMostAxes];
  for (int a = 0; a < head.rank; ++a)
    sum += (head.query.at.data[token * head.rank + a] + head.frame.t_middle[a]) *
           head.frame.s_middle[a];
  if (!head.call.is_gaussian) return sum;
  head.original(head.call.query, token, head.factor, t);
  for (int a = 0; a < head.rank; ++a) sum -= 0.5 * t[a] * t[a];
  return sum;
}

// log(exp(a) + exp(b)) for finite a; b may be -inf.
static double log_of_sum(double a, double b) {
  const double top = larger_of(a, b);
  return top + ::log(::exp(a - top) + ::exp(b - top));
}

// Which of the panels with queries panel p is.
static int64_t index_of(const TensorOrder& order, int64_t p) {
  int64_t low = 0, high = order.count - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    order.occupied.data[middle] < p ? low = middle + 1 : high = middle;
  }
  return low;
}

// out and lse of all plain queries in the order. kMerge: out and lse hold those over other keys,
// and become those over all.
template <bool kMerge = false, class T, class C>
static void evaluate_tensor(const TensorHead<T, C>& head) {
  const Attention& call = head.call;
  const int64_t dv = head.dv, lines = head.lines();
  const TensorOrder& order = head.query_order;
  const Segments segments(order.plain());
  const Write write = kMerge ? Write::kStore : choose_write<T>(call.out, head.h, call.n_q, dv);
  double* lse = lse_of(call, head.h);
  parallel(segments.count, [&](int64_t segment) {
    constexpr int L = kLanes<T>;
    PanelTables<T, C> table(head, false);
    TensorWeights<T> weights(order, head.layout.nodes, head.apart.keys);
    Buffer<T> block(kColumns * kTile), others(kMerge ? kColumns * kTile : 0), centre(head.size);
    for_tensor_tiles(order, segments, segment, [&](int64_t p, bool first, const Tile& tile) {
      if (first) {
        pause_point();
        table.read(head, index_of(order, p), false);
        for (int64_t c = 0; c < head.size; ++c)
          centre.data[c] = T(double(table.centre.data[c]) + (c < dv ? head.key_centre.data[c] : 0));
      }
      T* weight = weights.find(p, tile.order, tile.tokens, nullptr);
      alignas(64) double shift[kTile];
      weigh_apart(head, tile, table.log, weight, shift);
      alignas(64) T z[kTile], inverse[kTile];
      blend(int(lines), tile.tokens, weight, table.last[0].data, z);
      alignas(64) double log_z[kTile];
      for (int64_t i = 0; i < kTile; ++i) log_z[i] = i < tile.tokens ? double(z[i]) : 1;
      for (int64_t i = 0; i < tile.tokens; i += kLanes<double>)
        store(log_z + i, log_of(load(log_z + i)));
      T own[kTile], other[kTile];  // shares of these keys and of the others
      for (int64_t i = 0; i < tile.tokens; ++i) {
        inverse[i] = 1 / z[i];
        double& of_row = lse[tile.order[i]];
        const double found = log_z[i] + (table.log + shift[i]) + lse_offset(head, tile.order[i]);
        if constexpr (kMerge) {
          const double all = log_of_sum(found, of_row);
          own[i] = T(::exp(found - all));
          other[i] = T(::exp(of_row - all));
          inverse[i] *= own[i];
          of_row = all;
        } else {
          of_row = found;
        }
      }
      for_blocks(dv, [&](int64_t begin, int64_t width) {
        Rows<T> rows{};
        if constexpr (kMerge) rows = read_rows(call.out, head.h, tile, begin, width, others.data);
        write_rows(call.out, head.h, tile, begin, width, write, block.data,
                   [&](auto finish) BOLTZATTN_INLINED {
                     spread_table(int(lines), tile.tokens, width, weight,
                                  table.wide[0].data + begin, table.width,
                                  [&](int v, int i, auto& sum) BOLTZATTN_INLINED {
                                    int64_t c = begin + v * L;
                                    for (auto& x : sum) {
                                      x *= inverse[i];
                                      if constexpr (kMerge)
                                        x += load(centre.data + c) * own[i] +
                                             load(rows[i] + c - begin) * other[i];
                                      else
                                        x += load(centre.data + c);
                                      c += L;
                                    }
                                    finish(v, i, sum);
                                  });
                   });
      });
    });
    if (write == Write::kStream) stream_end();
  });
}

// Writes a gradient in the frame as one of the caller's tokens: times m, less `own` times the token
// itself (Gaussian scores), times the factor.
template <class T, class C>
static void write_turned(const TensorHead<T, C>& head, const Square& m, const double* in_frame,
                         double own, double times, const Matrix& tokens, int64_t token,
                         const Matrix& to, bool add = false) {
  double x[kMostAxes] = {};
  T result[kMostAxes], before[kMostAxes] = {};
  if (add) read_block(to, head.h, token, 0, 1, head.rank, before, 0, 1);
  if (own != 0) head.original(tokens, token, head.factor, x);
  for (int a = 0; a < head.rank; ++a) {
    double sum = -own * x[a];
    for (int b = 0; b < head.rank; ++b) sum += m.a[a][b] * in_frame[b];
    result[a] = T(sum * times) + before[a];
  }
  write_block(result, 0, 1, 1, head.rank, to, head.h, token, 0);
}

// Sums over queries for the keys apart: gradients of values [keys apart][size], and of logits
// [keys apart][1 + rank], plain and after a factor t_a.
struct ApartSums {
  const int64_t segments, values, logits;
  Buffer<double> sums;

  ApartSums(int rank, int64_t keys, int64_t row, int64_t number)
      : segments(number),
        values(keys * row),
        logits(keys * (1 + rank)),
        sums(number * (values + logits)) {
    set_zero(sums.data, number * (values + logits));
  }
  double* of_values(int64_t segment) { return sums.data + segment * (values + logits); }
  double* of_logits(int64_t segment) { return of_values(segment) + values; }
  void join() {
    for (int64_t k = 1; k < segments; ++k)
      for (int64_t c = 0; c < values + logits; ++c) sums.data[c] += of_values(k)[c];
  }
};

// The gradient of the queries, and at the query nodes the sums of
// (dO_i, dlse_i - dO_i . (out_i - centre)) / Z_i.
template <class T, class C>
struct QueryGradients {
  const TensorHead<T, C>& head;
  const AttentionGradient& g;
  ApartSums& apart;
  const int64_t segment;
  PanelTables<T, C> table;
  TensorWeights<T> weights;
  Buffer<T> block, zero, scaled;
  Buffer<double> pull;  // [keys apart][kTile]
  int64_t panel = -1;

  QueryGradients(const TensorHead<T, C>& of, const AttentionGradient& gradient, ApartSums& sums,
                 int64_t number)
      : head(of),
        g(gradient),
        apart(sums),
        segment(number),
        table(of, true),
        weights(of.query_order, of.layout.nodes, of.apart.keys),
        block(kColumns * kTile),
        zero(kColumns),
        scaled(of.lines() * kTile),
        pull(of.apart.keys * kTile) {
    set_zero(zero.data, kColumns);
  }

  void operator()(int64_t p, const Tile& tile, double* to) {
    const int rank = head.rank, lines = int(table.lines);
    const int64_t dv = head.dv, tokens = tile.tokens, padded = round_up(tokens, kLanes<T>);
    if (p != panel) table.read(head, index_of(head.query_order, p), true), panel = p;
    T* weight = weights.find(p, tile.order, tokens, nullptr);
    alignas(64) double shift[kTile];
    weigh_apart(head, tile, table.log, weight, shift);
    alignas(64) T z[kTile], inverse[kTile], moved[kMostAxes][kTile];
    blend(lines, tokens, weight, table.last[0].data, z);
    for (int64_t i = 0; i < padded; ++i) inverse[i] = i < tokens ? 1 / z[i] : T(0);
    for (int a = 0; a < rank; ++a) blend(lines, tokens, weight, table.last[1 + a].data, moved[a]);
    for (int64_t b = 0; b < lines; ++b)
      for (int64_t i = 0; i < padded; i += kLanes<T>)
        store(scaled.data + b * kTile + i, load(weight + b * kTile + i) * load(inverse + i));
    double of_lse[kTile] = {}, by_out[kTile] = {}, by_slope[kMostAxes][kTile] = {};
    for (int64_t i = 0; g.grad_lse && i < tokens; ++i)
      read_column(g.grad_lse, head.h, tile.order[i], 1, of_lse + i);
    alignas(64) double last[kTile] = {};
    if (head.apart.keys > 0) set_zero(pull.data, head.apart.keys * kTile);
    for_blocks(dv, [&](int64_t begin, int64_t width) {
      const Rows<T> rows = read_rows(g.grad_out, head.h, tile, begin, width, block.data);
      const auto dot_with = [&](int k, double* to_dot) {
        dot_with_table(lines, tokens, width, scaled.data, table.wide[k].data + begin, table.width,
                       rows, zero.data, to_dot);
      };
      dot_with(0, by_out);
      for (int a = 0; a < rank; ++a) dot_with(1 + a, by_slope[a]);
      sum_rows(int(table.nodes), tokens, width, scaled.data, rows, zero.data, to + begin,
               head.size);
      if (head.apart.keys > 0) add_apart(rows, tokens, begin, width);
    });
    for (int64_t i = 0; i < tokens; ++i) {
      double dt[kMostAxes];
      for (int a = 0; a < rank; ++a) {
        const double mean = double(moved[a][i]) * double(inverse[i]);
        dt[a] = by_slope[a][i] - by_out[i] * mean;
        if (g.grad_lse) dt[a] += of_lse[i] * (mean + table.mean[a] + head.frame.s_middle[a]);
      }
      last[i] = of_lse[i] - by_out[i];
      write_turned(head, head.frame.inverse, dt, head.call.is_gaussian ? of_lse[i] : 0, head.factor,
                   head.call.query, tile.order[i], g.grad_query);
    }
    add_weights(table.nodes, padded, scaled.data, last, to + dv, head.size);
    for (int64_t j = 0; j < head.apart.keys; ++j) {
      const T* own = scaled.data + (table.nodes + j) * kTile;
      double* to_logit = apart.of_logits(segment) + j * (1 + rank);
      for (int64_t i = 0; i < tokens; ++i) {
        const double x = double(own[i]) * (last[i] + pull.data[j * kTile + i]);
        to_logit[0] += x;
        for (int a = 0; a < rank; ++a)
          to_logit[1 + a] += x * head.query.at.data[int64_t(tile.order[i]) * rank + a];
      }
    }
  }

 private:
  // The gradients of the values of the keys apart, and pull[key][token], dO . (v - centre).
  void add_apart(const Rows<T>& rows, int64_t tokens, int64_t begin, int64_t width) {
    const int64_t keys = head.apart.keys;
    sum_rows(int(keys), tokens, width, scaled.data + table.nodes * kTile, rows, zero.data,
             apart.of_values(segment) + begin, head.size);
    for (int64_t j = 0; j < keys; ++j) {
      const T* value = table.wide[0].data + (table.nodes + j) * table.width + begin;
      for (int64_t i = 0; i < tokens; ++i)
        pull.data[j * kTile + i] += double(dot(rows[i], value, round_up(width, kLanes<T>)));
    }
  }
};

template <class T, class C>
static void sum_tensor_gradients(const TensorHead<T, C>& head, const AttentionGradient& g, C* grid,
                                 ApartSums& apart) {
  const TensorOrder& order = head.query_order;
  sum_tensor_tiles(head, order, head.layout.query, grid, nullptr,
                   [&](int64_t segment) { return QueryGradients<T, C>(head, g, apart, segment); });
  // Column dv goes with values measured from the panel's; make it the centre of all values.
  const int64_t nodes = head.panel_nodes(), dv = head.dv, size = head.size;
  parallel(order.count, [&](int64_t index) {
    Buffer<T> middle(size);
    find_middle(head, index, false, middle.data, (double*)nullptr);
    for (int64_t b = 0; b < nodes; ++b) {
      C* row = grid + head.grid_row(head.layout.query, order.occupied.data[index], b) * size;
      for (int64_t c = 0; c < dv; ++c) row[dv] -= row[c] * C(middle.data[c]);
    }
  });
}

// Writes the gradients of a key and of its bias, or adds to them: found[0] is that of its logits,
// found[1 + a] the same with a factor t_a.
template <class T, class C>
static void write_key(const TensorHead<T, C>& head, const AttentionGradient& g, const double* found,
                      int64_t token, bool add) {
  const bool gaussian = head.call.is_gaussian;
  double ds[kMostAxes];
  for (int a = 0; a < head.rank; ++a) ds[a] = found[1 + a] + head.frame.t_middle[a] * found[0];
  write_turned(head, transposed(head.rank, head.frame.matrix), ds, gaussian ? found[0] : 0,
               gaussian ? head.factor : 1, head.call.key, token, g.grad_key, add);
  if (!g.grad_key_mask) return;
  T before = 0;
  if (add) read_block(g.grad_key_mask, head.h, 0, token, 1, 1, &before, 0, 0);
  const T of_bias = T(found[0]) + before;
  write_block(&of_bias, 0, 0, 1, 1, g.grad_key_mask, head.h, 0, token);
}

// The gradients of the keys apart.
template <class T, class C>
static void write_apart_keys(const TensorHead<T, C>& head, const AttentionGradient& g,
                             ApartSums& sums, bool add) {
  const int64_t dv = head.dv;
  Buffer<T> row(dv), before(dv);
  for (int64_t j = 0; j < head.apart.keys; ++j) {
    const int64_t token = head.apart.key.data[j];
    set_zero(before.data, dv);
    if (add) read_block(g.grad_value, head.h, token, 0, 1, dv, before.data, 0, 1);
    for (int64_t c = 0; c < dv; ++c)
      row.data[c] = T(sums.of_values(0)[j * head.size + c]) + before.data[c];
    write_block(row.data, 0, 1, 1, dv, g.grad_value, head.h, token, 0);
    write_key(head, g, sums.of_logits(0) + j * (1 + head.rank), token, add);
  }
}

// The gradients of keys, values and biases from tables over the panels with keys: plain, and by
// axis after a factor t.
template <class T, class C>
static void evaluate_tensor_keys(const TensorHead<T, C>& head, const AttentionGradient& g,
                                 const Buffer<C>* tables, const double* log, bool add) {
  const Attention& call = head.call;
  const int64_t dv = head.dv, nodes = head.panel_nodes(), size = head.size;
  const int rank = head.rank;
  const TensorOrder& order = head.key_order;
  const Segments segments(order.plain());
  const Write write = add ? Write::kAdd : choose_write<T>(g.grad_value, head.h, call.n_k, dv);
  parallel(segments.count, [&](int64_t segment) {
    const int64_t row = round_up(dv, kLanes<T>);
    Buffer<T> wide[kMostTables], centre(size), block(kColumns * kTile), results(kColumns * kTile);
    Buffer<double> last[kMostTables];
    for (int k = 0; k <= rank; ++k) wide[k].resize(nodes * row), last[k].resize(nodes);
    TensorWeights<T> weights(order, head.layout.nodes);
    double unit = 0;  // of the tables' panel
    for_tensor_tiles(order, segments, segment, [&](int64_t p, bool first, const Tile& tile) {
      if (first) {
        pause_point();
        const int64_t index = index_of(order, p);
        unit = log[index];
        // Values are measured from one of the panel: dO . (v - out) is small where a key has nearly
        // all the weight.
        set_zero(centre.data, size);
        read_block(call.value, head.h, head.key_top.data[p], 0, 1, dv, centre.data, 0, 1);
        for (int k = 0; k <= rank; ++k)
          for (int64_t b = 0; b < nodes; ++b) {
            const C* from = tables[k].data + (index * nodes + b) * size;
            double sum = from[dv];
            for (int64_t c = 0; c < row; ++c)
              wide[k].data[b * row + c] = c < dv ? T(from[c]) : T(0);
            for (int64_t c = 0; c < dv; ++c)
              sum += from[c] * (double(centre.data[c]) - head.key_centre.data[c]);
            last[k].data[b] = sum;
          }
      }
      alignas(64) double factor[kTile];
      token_factors(head.key.bias.data, unit, tile, factor);
      const T* weight = weights.find(p, tile.order, tile.tokens, factor);
      double found[kMostTables][kTile] = {};
      for_blocks(dv, [&](int64_t begin, int64_t width) {
        const Rows<T> rows = read_rows(call.value, head.h, tile, begin, width, block.data);
        for (int k = 0; k <= rank; ++k)
          dot_with_table(int(nodes), tile.tokens, width, weight, wide[k].data + begin, row, rows,
                         centre.data + begin, found[k]);
        write_rows(g.grad_value, head.h, tile, begin, width, write, results.data,
                   [&](auto finish) BOLTZATTN_INLINED {
                     spread_table(int(nodes), tile.tokens, width, weight, wide[0].data + begin, row,
                                  finish);
                   });
      });
      for (int k = 0; k <= rank; ++k)
        for (int64_t b = 0; b < nodes; ++b)
          for (int64_t i = 0; i < tile.tokens; ++i)
            found[k][i] += double(weight[b * kTile + i]) * last[k].data[b];
      for (int64_t i = 0; i < tile.tokens; ++i) {
        double of_token[kMostTables];
        for (int k = 0; k <= rank; ++k) of_token[k] = found[k][i];
        write_key(head, g, of_token, tile.order[i], add);
      }
    });
    if (write == Write::kStream) stream_end();
  });
}

// From the key nodes to the panels with queries, or, for the adjoint, from the query nodes to those
// with keys; tokens: how many the source's sums are over.
template <class T, class C>
static SeparableCore<C> core_of(const TensorHead<T, C>& head, bool adjoint, int64_t tokens) {
  const Axis *query = head.layout.query, *key = head.layout.key;
  return {head.rank,
          adjoint ? query : key,
          adjoint ? key : query,
          adjoint ? head.layout.flat_query : head.layout.flat_key,
          head.size,
          tensor_skip(head.call.value.dtype) + 5 * head.layout.kappa * head.rank +
              ::log(double(tokens)),
          adjoint ? head.key_order : head.query_order,
          {}};
}
