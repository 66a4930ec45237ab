// The table of a scan: sums over earlier keys at the nodes of the query axis. Included inside an
// ISA's namespace.
//
//   sums[a] = sum_j exp(t_a (s_j - end)) (v_j - centre),   z[a] = sum_j exp(t_a (s_j - end)),
// where `end` is the key that the panel of node a measures from, and `centre` the value of that
// key: where one key takes all the weight, results are exactly its value, and what gradients are
// made of, v_j - out_i, is no small difference. (On the central panel no key does, and the centre
// is 0.) When an end moves, so does the table: sums[a] = exp(t_a (old end - new end)) (sums[a] +
// (old - new centre) z[a]). A chunk is summed in T, chunks are added up in fp64.

// Weights of a chunk's keys at the nodes of the panels in use: exp(t_a (s_j - end)).
template <class T>
struct Features {
  int count = 0;
  int32_t* node;  // [count]: which node
  T* weight;      // [count][kScanChunk]
  double* sum;    // [count]: of the weights
  double* moved;  // [count]: the factor that moves a table from the old ends to the new ones
  int first[4];   // where the nodes of each End begin, and the end of all

  static int64_t bytes(const ScanLayout& layout) {
    return layout.features() * (4 + kScanChunk * int64_t(sizeof(T)) + 2 * 8);
  }
  static constexpr int kPieces = 4;
  Features(const ScanLayout& layout, Scratch& scratch)
      : node(scratch.take<int32_t>(layout.features())),
        weight(scratch.take<T>(layout.features() * kScanChunk)),
        sum(scratch.take<double>(layout.features())),
        moved(scratch.take<double>(layout.features())) {}

  // Of the panels on which rows of chunks after c lie.
  void compute(const ScanHead& head, const ScanChunk& chunk, int64_t c) {
    const ScanLayout& layout = head.layout;
    const double per_unit = 1 / head.unit;
    count = 0;
    for (int& one : first) one = 0;
    KeyGaps<T> gaps;
    for (int p = 0; p < layout.panels(); ++p) {
      const End end = end_of(layout, p);
      if (head.last_row.data[p] > c)
        for (int later = int(end) + 1; later < 4; ++later) first[later] += layout.nodes;
      else
        continue;
      const double from = chunk.after.at(end);
      gaps.measure(chunk.key, from, head.unit);
      const double back = chunk.before.none() ? -INFINITY : chunk.before.at(end) - from;
      for (int a = p * layout.nodes; a < (p + 1) * layout.nodes; ++a, ++count) {
        const double t = head.node.data[a];
        T* to = weight + count * kScanChunk;
        node[count] = a;
        sum[count] = powers_of_gaps(gaps, t * per_unit, chunk.keys, to);
        moved[count] = back == 0 ? 1 : back == -INFINITY ? 0 : ::exp2(t * back);
      }
    }
  }
};

// Rows of the tokens of a chunk: in place if they lie close together. Rows far apart would share
// few sets of a cache, and a chunk is read several times.
template <class T>
struct ChunkRows {
  const T* data;
  int64_t row;

  const T* operator[](int64_t i) const { return data + i * row; }

  // Columns begin .. begin + columns of `count` rows from `first` on, in whole vectors; of the rows
  // first + token[i] if `token` is given. The chunk that comes next begins `ahead` rows further.
  ChunkRows(const Matrix& m, int64_t h, int64_t first, int64_t count, const int32_t* token,
            int64_t begin, int64_t columns, T* block, int64_t ahead = kScanChunk) {
    const bool whole = !token && in_vectors<T>(m, columns);
    const T* from = static_cast<const T*>(m.data) + m.head[h] + first * m.row + begin;
    if (whole) {
      // A prefetch outside the tensor does nothing.
      const T* next = from + ahead * m.row;
      for (int64_t j = 0; j < count; ++j, next += m.row)
        for (int64_t c = 0; c < columns; c += kCacheLine / int64_t(sizeof(T)))
          __builtin_prefetch(next + c, 0, 2);
    }
    if (whole && m.row <= 2 * columns) {
      data = from;
      row = m.row;
      return;
    }
    row = round_up(columns, kLanes<T>);
    data = block;
    if (whole) {
      for (int64_t j = 0; j < count; ++j, block += row, from += m.row)
        for (int64_t c = 0; c < columns; c += kLanes<T>) store(block + c, load(from + c));
      return;
    }
    for (int64_t j = 0; j < count; ++j, block += row) {
      read_block(m, h, first + (token ? token[j] : j), begin, 1, columns, block, 0, 1);
      for (int64_t c = columns; c < row; ++c) block[c] = 0;
    }
  }
};

// Values of the end keys, columns begin .. begin + columns of them.
template <class T>
struct Centres {
  int64_t begin, columns, width;
  T* value;  // [3][width], by End
  T* shift;  // [3][width]: by how much `follow` moved them: old - new
  int64_t at_high = -1, at_low = -1;

  static constexpr int kPieces = 2;
  static int64_t bytes(int64_t width) { return 6 * width * int64_t(sizeof(T)); }
  Centres(int64_t begin, int64_t columns, int64_t width, Scratch& scratch)
      : begin(begin),
        columns(columns),
        width(width),
        value(scratch.take<T>(3 * width)),
        shift(scratch.take<T>(3 * width)) {
    set_zero(value, 3 * width);
  }

  const T* of(End end) const { return value + int(end) * width; }
  bool are_of(const Ends& ends) const { return at_high == ends.at_high && at_low == ends.at_low; }

  // Moves to the values of the keys at `ends`; whether that changes them.
  bool follow(const ScanHead& head, const Ends& ends) {
    if (ends.none() || are_of(ends)) return false;
    for (int64_t c = 0; c < 3 * width; ++c) shift[c] = value[c];
    at_high = ends.at_high;
    at_low = ends.at_low;
    read(head, at_high, 0, value + int(End::kHigh) * width);
    read(head, at_low, 1, value + int(End::kLow) * width);
    for (int64_t c = 0; c < 3 * width; ++c) shift[c] -= value[c];
    return true;
  }

 private:
  void read(const ScanHead& head, int64_t token, int64_t end, T* to) const {
    const Attention& call = head.call;
    if (token != kEarlier)
      return read_block(call.value, head.h, token, begin, 1, columns, to, 0, 1);
    const double* from = head.shard->centres + (2 * head.h + end) * call.dv + begin;
    for (int64_t c = 0; c < columns; ++c) to[c] = T(from[c]);
  }
};

// The values of a chunk's keys, measured from the centre of an End.
template <class T>
struct ChunkValues {
  ChunkRows<T> rows;
  const T* centre;

  BOLTZATTN_INLINED Vec<T> operator()(int j, int64_t column) const {
    return load(rows[j] + column) - load(centre + column);
  }
};

template <class T>
struct ScanTable {
  const int64_t features, width;  // width: columns, in whole vectors
  double* sums;                   // [features][width]
  T* rounded;                     // the same in T, which rows are computed from
  double* z;                      // [features]

  static constexpr bool kCopied = sizeof(T) < sizeof(double);
  static int64_t bytes(int64_t features, int64_t width) {
    return features * (width * (8 + (kCopied ? int64_t(sizeof(T)) : 0)) + 8);
  }
  static constexpr int kPieces = 3;
  // A table in fp64 that lies in memory already.
  ScanTable(int64_t features, int64_t width, double* sums, double* z)
      : features(features), width(width), sums(sums), rounded(sums), z(z) {}
  ScanTable(int64_t features, int64_t width, Scratch& scratch)
      : features(features), width(width), sums(scratch.take<double>(features * width)) {
    if constexpr (kCopied)
      rounded = scratch.take<T>(features * width);
    else
      rounded = sums;
    z = scratch.take<double>(features);
  }

  // Starts from sums in memory, or from zeros.
  void start(const double* from_sums = nullptr, const double* from_z = nullptr) {
    if (!from_sums) {
      set_zero(sums, features * width);
      set_zero(rounded, features * width);
      set_zero(z, features);
      return;
    }
    for (int64_t i = 0; i < features * width; ++i) sums[i] = from_sums[i];
    for (int64_t i = 0; i < features * width; ++i) rounded[i] = T(from_sums[i]);
    for (int64_t a = 0; a < features; ++a) z[a] = from_z[a];
  }
  // After a change of `sums`.
  void round() const {
    for (int64_t i = 0; i < features * width; ++i) rounded[i] = T(sums[i]);
  }
  void save(double* to_sums, double* to_z) const {
    __builtin_memcpy(to_sums, sums, size_t(features * width) * 8);
    __builtin_memcpy(to_z, z, size_t(features) * 8);
  }

  const T* node(int64_t a) const { return rounded + a * width; }

  // The row of node a, vectors at `v`: old(column) + x. old gives fp64 vectors.
  template <class Old>
  BOLTZATTN_INLINED void put(int64_t a, int64_t column, Vec<double> x, Old old) const {
    store(sums + a * width + column, old(column) + x);
  }
  template <class Old>
  BOLTZATTN_INLINED void put(int64_t a, int64_t column, Vec<float> x, Old old) const {
    constexpr int L = kLanes<double>;
    HalfVec result[2];
#pragma GCC unroll 2
    for (int u = 0; u < 2; ++u) {
      const Vec<double> sum =
          old(column + u * L) + __builtin_convertvector(half_of(x, u), Vec<double>);
      store(sums + a * width + column + u * L, sum);
      result[u] = __builtin_convertvector(sum, HalfVec);
    }
    store(rounded + a * width + column, joined(result));
  }

  // Rows of the table += weight rows, for `count` nodes: weight[i][k] is that of row k for node(i),
  // row(k, column) a vector of row k, and old(i, column) what the row of node(i) was before.
  template <class Row, class Node, class Old>
  void add(int count, int64_t rows, Strided<T> weight, Row row, Node node, Old old) const {
    constexpr int L = kLanes<T>;
    product<T>(
        count, int(width / L), int(rows), weight,
        [=](int v, int k, auto& line) BOLTZATTN_INLINED {
          int u = 0;
          for (auto& x : line) x = row(k, (v + u) * L), ++u;
        },
        [=](int v, int i, auto& sum) BOLTZATTN_INLINED {
          int u = 0;
          for (auto& x : sum) {
            put(node(i), (v + u) * L, x,
                [=](int64_t column) BOLTZATTN_INLINED { return old(i, column); });
            ++u;
          }
        });
  }

  // Moves to the chunk's ends and adds its keys. centre: [3][width], by End; `shift`: by how much
  // the centres moved, or none.
  void add_keys(const Features<T>& at, const ChunkRows<T>& values, const T* centre, int64_t keys,
                const T* shift) const {
    for (int end = 0; end < 3; ++end)
      add_keys(at, at.first[end], at.first[end + 1], {values, centre + end * width}, keys,
               shift && end > 0 ? shift + end * width : nullptr);
    for (int i = 0; i < at.count; ++i) z[at.node[i]] = z[at.node[i]] * at.moved[i] + at.sum[i];
  }

 private:
  void add_keys(const Features<T>& at, int first, int last, const ChunkValues<T>& values,
                int64_t keys, const T* shift) const {
    const double *old_sums = sums, *old_z = z;
    const int64_t row = width;
    const int32_t* node = at.node + first;
    const double* moved = at.moved + first;
    const auto of_node = [=](int i) { return int64_t(node[i]); };
    const Strided<T> weights{at.weight + first * kScanChunk, kScanChunk, 1};
    if (shift)
      add(last - first, keys, weights, values, of_node,
          [=](int i, int64_t column) BOLTZATTN_INLINED {
            return (load(old_sums + node[i] * row + column) +
                    widened(shift + column) * old_z[node[i]]) *
                   moved[i];
          });
    else
      add(last - first, keys, weights, values, of_node,
          [=](int i, int64_t column)
              BOLTZATTN_INLINED { return load(old_sums + node[i] * row + column) * moved[i]; });
  }
};

// The basis of outer panels: Lagrange's with poles at the mirror images of the nodes,
//   weight[a] = prod_{b != a} (x - x_b) / (x_a - x_b) prod_b (x_a + x_b) / (x + x_b).
template <class T>
struct MirrorLagrange : Lagrange<T> {
  MirrorLagrange(int count, double ratio) {
    this->nodes = count;
    for (int a = 0; a < count; ++a) this->node[a] = outer_node(count, ratio, a);
    this->find_factors();
    for (int a = 0; a < count; ++a)
      for (int b = 0; b < count; ++b) this->factor[a] *= this->node[a] + this->node[b];
  }
  void weigh(const double* place, int64_t count, T* weight, int64_t stride) const {
    Lagrange<T>::weigh(place, count, weight, stride, [&](Vec<double> x) {
      Vec<double> poles = splat<double>(1);
      for (int b = 0; b < this->nodes; ++b) poles *= x + this->node[b];
      return 1.0 / poles;
    });
  }
};

template <class T>
struct ScanBasis {
  Lagrange<T> central;
  MirrorLagrange<T> outer;
  explicit ScanBasis(const ScanLayout& layout)
      : central(layout.nodes), outer(layout.nodes, layout.ratio) {}
};

// The rows of a chunk that lie on one panel, with weights on its nodes: weight[a][k] is that of
// node a for row order[k].
template <class T>
struct WeighedRows {
  int64_t rows, padded;
  const int32_t* order;

  // to[k] = sum_a weight[a][k] of_node[a]
  void dot(const T* weight, const double* of_node, int nodes, T* to) const {
    constexpr int L = kLanes<T>;
    for (int64_t k = 0; k < padded; k += L) {
      Vec<T> sum{};
      for (int a = 0; a < nodes; ++a) sum += load(weight + a * kScanChunk + k) * T(of_node[a]);
      store(to + k, sum);
    }
  }

  // finish(v, k, vectors of sum_a weight[a][k] table[a])
  template <class Finish>
  void read(const T* weight, const T* table, int64_t width, int nodes, Finish finish) const {
    constexpr int L = kLanes<T>;
    product<T>(
        int(rows), int(width / L), nodes, Strided<T>{weight, 1, kScanChunk},
        [=](int v, int a, auto& line) BOLTZATTN_INLINED { load(table + a * width + v * L, line); },
        finish);
  }

 protected:
  // False if no row lies on the panel.
  bool choose(const int32_t* of_chunk, const int32_t* start, int panel) {
    order = of_chunk + start[panel];
    rows = start[panel + 1] - start[panel];
    padded = round_up(rows, kLanes<T>);
    return rows > 0;
  }
  void multiply(T* weight, const T* factor, int nodes) const {
    for (int a = 0; a < nodes; ++a)
      for (int64_t k = 0; k < padded; k += kLanes<T>)
        store(weight + a * kScanChunk + k, load(weight + a * kScanChunk + k) * load(factor + k));
  }
};

// What these rows read from a table, or add to it, relative to the row's top key. `ends` are those
// of the table.
template <class T>
struct PanelRows : WeighedRows<T> {
  using WeighedRows<T>::order, WeighedRows<T>::rows, WeighedRows<T>::padded;

  // False if no row lies on the panel.
  bool weigh(const ScanLayout& layout, int panel, const Ends& ends, const ScanChunk& chunk,
             const int32_t* start, const ScanBasis<T>& basis, T* weight) {
    if (!this->choose(chunk.order, start, panel)) return false;
    double place[kScanChunk], exponent[kScanChunk];
    T factor[kScanChunk];
    const double from = ends.at(end_of(layout, panel));
    for (int64_t k = 0; k < padded; ++k) {
      const int64_t at = k < rows ? k : 0;
      place[k] = chunk.place[start[panel] + at];
      exponent[k] = chunk.t[order[at]] * (from - chunk.top[order[at]]) * kLog2e;
    }
    powers_of_2(exponent, padded, factor);
    if (panel == 0)
      basis.central.weigh(place, padded, weight, kScanChunk);
    else
      basis.outer.weigh(place, padded, weight, kScanChunk);
    this->multiply(weight, factor, layout.nodes);
    return true;
  }
};

// Sums of the rows of a chunk, relative to the weight of their top keys.
template <class T>
struct RowSums {
  T* data;
  int64_t row;
  double* z;

  T* operator[](int64_t i) const { return data + i * row; }
};

// Adds what a table holds for the rows of a chunk.
template <class T>
static void read_table(const ScanHead& head, const ScanTable<T>& table, const Ends& ends,
                       const ScanChunk& chunk, const int32_t* start, const ScanBasis<T>& basis,
                       T* weight, const RowSums<T>& to) {
  constexpr int L = kLanes<T>;
  const ScanLayout& layout = head.layout;
  if (ends.none()) return;
  for (int p = 0; p < layout.panels(); ++p) {
    PanelRows<T> panel;
    if (!panel.weigh(layout, p, ends, chunk, start, basis, weight)) continue;
    const int64_t first = p * layout.nodes;
    const int32_t* order = panel.order;
    T z[kScanChunk];
    panel.dot(weight, table.z + first, layout.nodes, z);
    for (int64_t k = 0; k < panel.rows; ++k) to.z[order[k]] += double(z[k]);
    panel.read(weight, table.node(first), table.width, layout.nodes,
               [=](int v, int k, auto& sum) BOLTZATTN_INLINED {
                 T* line = to[order[k]] + v * L;
                 for (auto& x : sum) store(line, load(line) + x), line += L;
               });
  }
}
