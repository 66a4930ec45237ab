// Scans of heads with a bias per key, slopes or Gaussian scores. Included inside an ISA's
// namespace.
//
// Logits are t s_j + c_j up to a function of the row: Gaussian scores put -s_j^2 / 2 into c_j, and
// slopes add slope * j. With a bias any key may have the most weight, so the panels of a plain
// scan, which grow away from t = 0, lose their argument. Here panels are uniform, |t - middle| <=
// half, and keys are measured from the middle of their range R, so that with kappa = half R / 2
//   exp(t_i s_j) = sum_a l_a(t_i) exp(t_a s_j)
// holds to the same relative error for every pair, and hence for every prefix and any bias. There
// are about |t| R / (2 kappa) panels; a head that needs too many goes to `direct`.
//
// All panels have the same offsets t_a - middle, so a key has one exponential per node,
// exp((t_a - middle) s_j), and one per panel, exp(middle s_j + c_j - reference). The reference of a
// panel is its largest logit so far, at the middle; the table is moved when it grows. Positions are
// counted from the first token of a chunk, so logits stay small however long the sequence is.
//
// A head is one task: threads share the heads of a call, not the tokens of a head.

constexpr int kMostBiasedFeatures = 640;

// Nodes of a panel, and the error of a weight relative to itself.
BOLTZATTN_INLINE EnvelopePrecision biased_precision(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 ? envelope_precision(dtype)
                                                              : EnvelopePrecision{8, 1e-5};
}
// Numbers on a panel differ by factors up to exp(kappa) from that at the middle.
static double biased_kappa(const EnvelopePrecision& precision) {
  const InterpolationError error(precision.nodes);
  double low = 0, high = 2.0 * precision.nodes;
  for (int i = 0; i < 40; ++i) {
    const double kappa = 0.5 * (low + high);
    (error.log_bound(kappa) + kappa <= ::log(precision.error) ? low : high) = kappa;
  }
  return low;
}

// A head: its numbers in fp64, and its panels.
struct BiasedHead {
  const Attention& call;
  const int64_t h;
  const int64_t chunks = ceil_div(call.n_q, kScanChunk), padded = chunks * kScanChunk;
  const double key_factor = call.is_gaussian ? ::sqrt(call.scale) : 1;
  const double query_factor = call.is_gaussian ? ::sqrt(call.scale) : call.scale;
  double slope = 0;
  double middle = 0;  // of the keys, as they are in memory
  double mean = 0;    // of the keys that remain, measured from there, by the weight of their biases
  int nodes = 0, panels = 0;
  double first_t = 0, half = 0;  // panels begin here; half the width of one
  Buffer<double> t{padded};      // of rows
  Buffer<double> key{padded};    // measured from the middle
  Buffer<double> bias{padded};   // without slopes; -inf: hidden, or no key
  Buffer<int32_t> last_row{};    // [panels]: the last chunk with a query on the panel, or -1

  int features() const { return nodes * panels; }
  double panel_middle(int p) const { return first_t + (2 * p + 1) * half; }
  double node(int a) const { return half * chebyshev_node(nodes, a); }  // from the panel's middle
  int32_t panel_of(double t_of_row) const {
    const double f = half > 0 ? (t_of_row - first_t) / (2 * half) : 0;
    return int32_t(f > 0 ? f < panels - 1 ? f : panels - 1 : 0);
  }
  double place_of(double t_of_row, int32_t panel) const {
    return half > 0 ? (t_of_row - panel_middle(panel)) / half : 0;
  }
  // What the logits of a row have in common beside its distances.
  double of_row(double t_of_row) const {
    return call.is_gaussian ? -0.5 * t_of_row * t_of_row : t_of_row * middle;
  }

  // Reads the numbers and makes the panels; false if the head is not for this scan.
  bool prepare() {
    if (call.is_gaussian && !(call.scale > 0)) return false;
    if (call.slopes) slope = static_cast<const double*>(call.slopes.data)[call.slopes.head[h]];
    const int64_t keys = least(call.n_q, call.n_k);
    double odd = slope * 0, low = INFINITY, high = -INFINITY, most_bias = 64 * ::fabs(slope);
    for (int64_t i = 0; i < padded; ++i) t.data[i] = key.data[i] = 0, bias.data[i] = -INFINITY;
    for (int64_t first = 0; first < keys; first += kScanChunk) {
      const int64_t here = least(kScanChunk, keys - first);
      uint8_t skip[kScanChunk] = {};
      double* number = key.data + first;
      read_column(call.key, h, first, here, number);
      read_bias(call, h, first, here, bias.data + first, skip);
      for (int64_t j = 0; j < here; ++j) {
        if (skip[j]) {
          number[j] = 0;
          bias.data[first + j] = -INFINITY;
          continue;
        }
        odd += number[j] * 0 + bias.data[first + j] * 0;
        low = number[j] < low ? number[j] : low;
        high = number[j] > high ? number[j] : high;
      }
    }
    if (odd != 0) return false;  // NaN too
    if (low <= high) middle = 0.5 * low + 0.5 * high;
    double top = -INFINITY, total = 0;
    for (int64_t j = 0; j < keys; ++j) top = larger_of(top, bias.data[j]);
    for (int64_t j = 0; j < keys; ++j) {
      if (bias.data[j] == -INFINITY) continue;
      key.data[j] = (key.data[j] - middle) * key_factor;
      const double weight = call.key_mask ? ::exp(bias.data[j] - top) : 1;
      mean += weight * key.data[j];
      total += weight;
      if (call.is_gaussian) bias.data[j] -= 0.5 * key.data[j] * key.data[j];
      most_bias = larger_of(most_bias, ::fabs(bias.data[j]));
    }
    if (total > 0) mean /= total;
    read_column(call.query, h, 0, call.n_q, t.data);
    double least_t = INFINITY, most_t = -INFINITY;
    for (int64_t i = 0; i < call.n_q; ++i) {
      t.data[i] = (t.data[i] - (call.is_gaussian ? middle : 0)) * query_factor;
      odd += t.data[i] * 0;
      least_t = t.data[i] < least_t ? t.data[i] : least_t;
      most_t = t.data[i] > most_t ? t.data[i] : most_t;
    }
    const double radius = low <= high ? (0.5 * high - 0.5 * low) * key_factor : 0;
    const double largest_t = larger_of(::fabs(least_t), ::fabs(most_t));
    const double range = most_t - least_t;
    const double product = largest_t * radius + most_bias;
    if (odd != 0 || !(product <= kLargestProduct) || range * 0 != 0) return false;
    const EnvelopePrecision precision = biased_precision(call.query.dtype);
    // Gradients are made from lse, which is rounded as the logits are, not as their differences.
    const double logit = product + (call.is_gaussian ? 0 : largest_t * ::fabs(middle));
    if (!(rounding_of(call.query.dtype, logit) <= tolerance_of(call.query.dtype))) return false;
    nodes = precision.nodes;
    const double wanted = ::ceil(0.5 * range * radius / biased_kappa(precision));
    if (!(wanted * nodes <= kMostBiasedFeatures)) return false;
    panels = wanted > 1 ? int(wanted) : 1;
    first_t = least_t;
    half = 0.5 * range / panels;
    last_row.resize(panels);
    for (int p = 0; p < panels; ++p) last_row.data[p] = -1;
    for (int64_t i = 0; i < call.n_q; ++i)
      last_row.data[panel_of(t.data[i])] = int32_t(i / kScanChunk);
    return true;
  }
};

// The tokens of a chunk. Logits are in units of ln 2.
struct BiasedChunk {
  int64_t first, rows, keys;  // keys that are not hidden
  double t[kScanChunk];       // in units of ln 2
  double key[kScanChunk];     // the rest is 0
  double bias[kScanChunk];    // in units of ln 2, with slope * (j - first); the rest is -inf
  double position[kScanChunk];
  int32_t token[kScanChunk];  // of each key, counted from `first`
  int32_t seen[kScanChunk];   // how many keys of the chunk the row sees
  int32_t panel[kScanChunk];
  int32_t order[kScanChunk];  // rows by panel
  double place[kScanChunk];   // in that order

  const int32_t* key_tokens(const Attention& call) const { return call.key_mask ? token : nullptr; }

  void read(const BiasedHead& head, int64_t c, int32_t* start) {
    first = c * kScanChunk;
    rows = least(kScanChunk, head.call.n_q - first);
    keys = 0;
    const double slope = head.slope * kLog2e;
    for (int64_t i = 0; i < kScanChunk; ++i) {
      if (head.bias.data[first + i] != -INFINITY) {
        token[keys] = int32_t(i);
        position[keys] = double(i);
        key[keys] = head.key.data[first + i];
        bias[keys++] = head.bias.data[first + i] * kLog2e + slope * double(i);
      }
      t[i] = head.t.data[first + i] * kLog2e;
      seen[i] = int32_t(keys);
    }
    for (int64_t j = keys; j < kScanChunk; ++j) key[j] = position[j] = 0, bias[j] = -INFINITY;
    for (int p = 0; p <= head.panels; ++p) start[p] = 0;
    for (int64_t i = 0; i < rows; ++i) ++start[panel[i] = head.panel_of(head.t.data[first + i])];
    for (int p = 0, sum = 0; p <= head.panels; ++p) sum += start[p], start[p] = sum;
    for (int64_t i = rows - 1; i >= 0; --i) order[--start[panel[i]]] = int32_t(i);
    for (int64_t k = 0; k < rows; ++k)
      place[k] = head.place_of(head.t.data[first + order[k]], panel[order[k]]);
  }

  // The logits of the first `count` keys for a query, then -inf to the end of the vector; the
  // largest.
  template <class T>
  double logits(double at, int64_t count, double* to) const {
    constexpr int L = kLanes<double>;
    const int64_t end = round_up(count, kLanes<T>);
    for (int64_t j = 0; j < end; j += L) store(to + j, load(key + j) * at + load(bias + j));
    for (int64_t j = count; j < end; ++j) to[j] = -INFINITY;
    Vec<double> top = splat<double>(-INFINITY);
    for (int64_t j = 0; j < end; j += L) top = larger<double>(load(to + j), top);
    return reduce_max<double>(top);
  }
};

// to[j] = 2^(x[j] - from), in whole vectors; x is lost.
template <class T>
static void powers_from(double from, double* x, int64_t count, T* to) {
  for (int64_t j = 0; j < count; j += kLanes<double>) store(x + j, load(x + j) - from);
  powers_of_2(x, count, to);
}

template <class T>
static double sum_of(const T* x, int64_t count) {
  Vec<T> sum{};
  for (int64_t j = 0; j < count; j += kLanes<T>) sum += load(x + j);
  return double(reduce_sum<T>(sum));
}

// Weights of a chunk's keys at the nodes of some panels, relative to the panels' references.
template <class T>
struct BiasedFeatures {
  int count = 0;      // nodes of these panels
  int32_t* node;      // [count]: which node
  T* weight;          // [count][kScanChunk]
  double* moved;      // [count]: the factor that moves a table to the new reference
  T* of_node;         // [nodes][kScanChunk]: what panels share
  double* reference;  // [panels], in units of ln 2; -inf: nothing yet

  static int64_t bytes(const BiasedHead& head) {
    return head.features() * (4 + kScanChunk * int64_t(sizeof(T)) + 8) +
           head.nodes * kScanChunk * int64_t(sizeof(T)) + head.panels * 8;
  }
  static constexpr int kPieces = 5;
  BiasedFeatures(const BiasedHead& head, Scratch& scratch)
      : node(scratch.take<int32_t>(head.features())),
        weight(scratch.take<T>(head.features() * kScanChunk)),
        moved(scratch.take<double>(head.features())),
        of_node(scratch.take<T>(head.nodes * kScanChunk)),
        reference(scratch.take<double>(head.panels)) {}

  void start(const BiasedHead& head, double from) const {
    for (int p = 0; p < head.panels; ++p) reference[p] = from;
  }
  // Counts positions from another token, `by` tokens later.
  void move(const BiasedHead& head, double by) const {
    for (int p = 0; p < head.panels; ++p) reference[p] -= head.slope * kLog2e * by;
  }

  // Of the panels for which uses(p); `raise`: references become the largest logits.
  template <class Uses>
  void compute(const BiasedHead& head, const BiasedChunk& chunk, bool raise, Uses uses) {
    constexpr int L = kLanes<T>;
    const int64_t keys = round_up(chunk.keys, L);
    double x[kScanChunk];
    T of_panel[kScanChunk];
    for (int a = 0; a < head.nodes; ++a) {
      const double at = head.node(a) * kLog2e;
      for (int64_t j = 0; j < keys; ++j) x[j] = chunk.key[j] * at;
      powers_of_2(x, keys, of_node + a * kScanChunk);
    }
    count = 0;
    for (int p = 0; p < head.panels; ++p) {
      if (!uses(p)) continue;
      const double top = chunk.logits<T>(head.panel_middle(p) * kLog2e, chunk.keys, x);
      double factor = 1;
      if (raise && top > reference[p]) {
        factor = ::exp2(reference[p] - top);
        reference[p] = top;
      }
      powers_from(reference[p], x, keys, of_panel);
      for (int a = 0; a < head.nodes; ++a, ++count) {
        node[count] = p * head.nodes + a;
        moved[count] = factor;
        for (int64_t j = 0; j < keys; j += L)
          store(weight + count * kScanChunk + j,
                load(of_node + a * kScanChunk + j) * load(of_panel + j));
      }
    }
  }

  // Moves a table to the references and adds the keys, in rows row(k, column).
  template <class Row>
  void add_to(const ScanTable<T>& table, int64_t keys, Row row) const {
    const double* sums = table.sums;
    const int64_t width = table.width;
    const int32_t* nodes = node;
    const double* factor = moved;
    table.add(
        count, keys, {weight, kScanChunk, 1}, row, [=](int i) { return int64_t(nodes[i]); },
        [=](int i, int64_t column)
            BOLTZATTN_INLINED { return load(sums + nodes[i] * width + column) * factor[i]; });
    for (int i = 0; i < count; ++i) {
      double& z = table.z[node[i]];
      z = z * moved[i] + sum_of(weight + i * kScanChunk, round_up(keys, kLanes<T>));
    }
  }
};

// Weights times 2^(reference - shift of the row).
template <class T>
struct BiasedRows : WeighedRows<T> {
  using WeighedRows<T>::order, WeighedRows<T>::rows, WeighedRows<T>::padded;

  // False if no row lies on the panel.
  bool weigh(const BiasedChunk& chunk, const int32_t* start, int p, double reference,
             const double* shift, const Lagrange<T>& basis, T* weight) {
    if (!this->choose(chunk.order, start, p)) return false;
    double place[kScanChunk], exponent[kScanChunk];
    T factor[kScanChunk];
    for (int64_t k = 0; k < padded; ++k) {
      const int64_t at = k < rows ? k : 0;
      place[k] = chunk.place[start[p] + at];
      exponent[k] = k < rows ? reference - shift[order[at]] : -INFINITY;
    }
    powers_of_2(exponent, padded, factor);
    basis.weigh(place, padded, weight, kScanChunk);
    this->multiply(weight, factor, basis.nodes);
    return true;
  }
};

// Forward of one head, up to kScanColumns columns at a time.
template <class T>
struct BiasedForward {
  const BiasedHead& head;
  const Attention& call = head.call;
  const Lagrange<T> basis{head.nodes};
  int64_t begin = 0, columns = 0, width = 0;
  double odd = 0;  // NaN if a result is not finite

  void scan() {
    Scratch scratch(int64_t(sizeof(BiasedChunk)) + 4 * (head.panels + 1) +
                        kScanChunk * (kScanChunk + 2 * width) * int64_t(sizeof(T)) +
                        BiasedFeatures<T>::bytes(head) +
                        ScanTable<T>::bytes(head.features(), width),
                    5 + BiasedFeatures<T>::kPieces + ScanTable<T>::kPieces);
    BiasedChunk& chunk = *scratch.take<BiasedChunk>(1);
    int32_t* start = scratch.take<int32_t>(head.panels + 1);
    T* weight = scratch.take<T>(kScanChunk * kScanChunk);  // of pairs, or of nodes
    T* block = scratch.take<T>(kScanChunk * width);
    T* sums = scratch.take<T>(kScanChunk * width);
    BiasedFeatures<T> features(head, scratch);
    ScanTable<T> table(head.features(), width, scratch);
    table.start();
    features.start(head, -INFINITY);
    for (int64_t c = 0; c < head.chunks; ++c) {
      pause_point();
      if (c > 0) features.move(head, double(kScanChunk));
      chunk.read(head, c, start);
      const ChunkRows<T> values(call.value, head.h, chunk.first, chunk.keys, chunk.key_tokens(call),
                                begin, columns, block);
      double shift[kScanChunk], z[kScanChunk];
      weigh_pairs(chunk, features.reference, weight, shift, z);
      sum_pairs(chunk, weight, values, sums);
      read_table(chunk, start, features.reference, table, shift, weight, sums, z);
      write(chunk, shift, z, sums);
      if (chunk.keys == 0) continue;
      features.compute(head, chunk, true, [&](int p) { return head.last_row.data[p] > c; });
      features.add_to(table, chunk.keys, [=](int j, int64_t column) BOLTZATTN_INLINED {
        return load(values[j] + column);
      });
    }
  }

  // weight[i][j] of the keys of the chunk that row i sees, relative to 2^shift[i], and their sum.
  // The shift is the largest of their logits and of the reference of the row's panel.
  void weigh_pairs(const BiasedChunk& chunk, const double* reference, T* weight, double* shift,
                   double* z) const {
    constexpr int L = kLanes<T>;
    double x[kScanChunk];
    for (int64_t i = 0; i < chunk.rows; ++i) {
      T* line = weight + i * kScanChunk;
      const int64_t seen = chunk.seen[i], end = round_up(seen, L);
      shift[i] = larger_of(chunk.logits<T>(chunk.t[i], seen, x), reference[chunk.panel[i]]);
      powers_from(shift[i], x, end, line);
      z[i] = sum_of(line, end);
      for (int64_t j = end; j < kScanChunk; j += L) store(line + j, Vec<T>{});
    }
  }

  void sum_pairs(const BiasedChunk& chunk, const T* weight, const ChunkRows<T>& values,
                 T* sums) const {
    for (int64_t i = 0; i < chunk.rows; i += kTileRows) {
      const int64_t rows = least(kTileRows, chunk.rows - i);
      gemm<T, false>(rows, width / kLanes<T>, chunk.seen[i + rows - 1],
                     {weight + i * kScanChunk, kScanChunk, 1}, values.data, values.row,
                     sums + i * width, width);
    }
  }

  // Adds what the table holds for the rows.
  void read_table(const BiasedChunk& chunk, const int32_t* start, const double* reference,
                  const ScanTable<T>& table, const double* shift, T* weight, T* sums,
                  double* z) const {
    const int64_t row = width;
    for (int p = 0; p < head.panels; ++p) {
      BiasedRows<T> panel;
      if (reference[p] == -INFINITY ||
          !panel.weigh(chunk, start, p, reference[p], shift, basis, weight))
        continue;
      const int64_t node = int64_t(p) * head.nodes;
      const int32_t* order = panel.order;
      T part[kScanChunk];
      panel.dot(weight, table.z + node, head.nodes, part);
      for (int64_t k = 0; k < panel.rows; ++k) z[order[k]] += double(part[k]);
      panel.read(weight, table.node(node), width, head.nodes,
                 [=](int v, int k, auto& sum) BOLTZATTN_INLINED {
                   T* line = sums + order[k] * row + v * kLanes<T>;
                   for (auto& x : sum) store(line, load(line) + x), line += kLanes<T>;
                 });
    }
  }

  void write(const BiasedChunk& chunk, const double* shift, const double* z, T* sums) {
    double* lse = lse_of(call, head.h) + chunk.first;
    Vec<T> strange{};
    for (int64_t i = 0; i < chunk.rows; ++i) {
      const bool sees = shift[i] != -INFINITY;
      lse[i] = sees ? shift[i] * kLn2 + ::log(z[i]) + head.of_row(head.t.data[chunk.first + i]) -
                          head.slope * double(i)
                    : -INFINITY;
      const T inverse = sees ? T(1 / z[i]) : T(0);
      T* line = sums + i * width;
      for (int64_t c = 0; c < width; c += kLanes<T>) {
        const Vec<T> x = sees ? load(line + c) * inverse : Vec<T>{};
        strange += x * T(0);
        store(line + c, x);
      }
      if (sees) odd += lse[i] * 0;
    }
    write_block(sums, width, 1, chunk.rows, columns, call.out, head.h, chunk.first, begin);
    odd += double(reduce_sum<T>(strange));
  }

  // Whether all results are finite.
  bool run() {
    do {
      columns = least(kScanColumns, call.dv - begin);
      width = round_up(columns, kLanes<T>);
      scan();
      begin += kScanColumns;
    } while (begin < call.dv);
    return odd == 0;
  }
};

// Calls serve(h), which may refuse, for all heads in parallel, then direct(h) for the others.
template <class Serve, class Direct>
static void for_biased_heads(int64_t heads, Serve serve, Direct direct) {
  Buffer<uint8_t> served(heads);
  parallel(heads, [&](int64_t h) { served.data[h] = serve(h); });
  for (int64_t h = 0; h < heads; ++h)
    if (!served.data[h]) direct(h);
}

template <class T>
void biased_forward(const Attention& call) {
  for_biased_heads(
      call.heads,
      [&](int64_t h) {
        BiasedHead head{call, h};
        return head.prepare() && BiasedForward<T>{head}.run();
      },
      [&](int64_t h) { direct_forward_heads<T>(call, h, h + 1); });
}
