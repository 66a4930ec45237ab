// Scans: causal attention of rank 1 in one pass over the tokens. spec/scan.h has the layout,
// docs/transform.md the derivation. Included inside an ISA's namespace.
//
// Tokens are worked on in chunks. A row sees the keys of its own chunk pair by pair, and those of
// earlier chunks through the table (table.h). The weights of a row are measured from its own top
// key, which has weight 1, so its parts add up without an lse. Keys and queries are fp64: the
// difference of two keys is exact to rounding, and so is every logit that matters, for logits of
// any size.

constexpr int64_t kScanChunk = 64;
// Columns that are worked on together: tables stay in cache.
constexpr int64_t kScanColumns = 256;

// to[j] = 2^x[j] in whole vectors, for x below 128.
BOLTZATTN_INLINE void powers_of_2(const double* x, int64_t count, double* to) {
  for (int64_t j = 0; j < count; j += kLanes<double>) store(to + j, exp2_of(load(x + j)));
}
BOLTZATTN_INLINE void powers_of_2(const double* x, int64_t count, float* to) {
  for (int64_t j = 0; j < count; j += kLanes<float>) {
    HalfVec whole[2], rest[2];
#pragma GCC unroll 2
    for (int u = 0; u < 2; ++u) {
      const Vec<double> y = larger<double>(splat(-127.0), load(x + j + u * kLanes<double>));
      const double kShift = 6755399441055744.0;
      const Vec<double> k = (y + kShift) - kShift;
      whole[u] = __builtin_convertvector(k, HalfVec);
      rest[u] = __builtin_convertvector(y - k, HalfVec);
    }
    store(to + j, exp2_of_parts(joined(whole) + 12582912.0f, joined(rest)));
  }
}

// Gaps between the keys of a chunk and one of them, in some unit, for powers 2^(t gap).
template <class T>
struct KeyGaps {
  double from = NAN;
  double gap[kScanChunk];

  void measure(const double* key, double from_key, double unit) {
    if (from == from_key) return;
    from = from_key;
    for (int64_t j = 0; j < kScanChunk; ++j) gap[j] = (key[j] - from) * unit;
  }
  BOLTZATTN_INLINED auto power(double t) const {
    return [=](int64_t j) BOLTZATTN_INLINED { return exp2_of(load(gap + j) * t); };
  }
};
// Products of fp32 numbers are not exact enough for an exponent, and fp64 vectors are slow. So
// factors are split: twelve bits times twelve bits is exact, and the rest is small. In a unit in
// which t is 1 at most, all numbers are in range.
template <>
struct KeyGaps<float> {
  double from = NAN;
  float whole[kScanChunk], head[kScanChunk], rest[kScanChunk];  // whole = head + rest

  static float head_of(float x) { return from_bits(to_bits(x) & 0xfffff000u); }

  void measure(const double* key, double from_key, double unit) {
    if (from == from_key) return;
    from = from_key;
    for (int64_t j = 0; j < kScanChunk; ++j) {
      const double gap = (key[j] - from) * unit;
      whole[j] = float(gap);
      head[j] = head_of(whole[j]);
      rest[j] = float(gap - double(head[j]));
    }
  }
  BOLTZATTN_INLINED auto power(double t) const {
    const float t_head = head_of(float(t)), t_rest = float(t - double(t_head));
    return [=](int64_t j) BOLTZATTN_INLINED {
      const float kShift = 12582912.0f;
      const Vec<float> high = load(head + j) * t_head;
      const Vec<float> low = load(rest + j) * t_head + load(whole + j) * t_rest;
      const Vec<float> shifted = larger<float>(splat(-127.0f), high + low) + kShift;
      // Below -127 the power is 0, whatever is left here, if it is finite.
      const Vec<float> left = (high - (shifted - kShift)) + low;
      return exp2_of_parts(shifted, larger<float>(splat(-1.0f), left));
    };
  }
};

// to[j] = 2^(t gap[j]) for the first `count` keys, then 0 to the end of the vector; their sum.
template <class T>
BOLTZATTN_INLINE double powers_of_gaps(const KeyGaps<T>& gaps, double t, int64_t count, T* to) {
  constexpr int L = kLanes<T>;
  const auto power = gaps.power(t);
  Vec<T> sum{};
  int64_t j = 0;
#pragma GCC unroll 4
  for (; j + L <= count; j += L) {
    const Vec<T> x = power(j);
    store(to + j, x);
    sum += x;
  }
  if (j < count) {
    const Vec<T> x = first_lanes(power(j), count - j);
    store(to + j, x);
    sum += x;
  }
  return double(reduce_sum<T>(sum));
}

// Stands for the token of an end key that lies in an earlier shard.
constexpr int64_t kEarlier = -2;

// The largest and the smallest of some keys, and the first tokens that have them.
struct Ends {
  double high = -INFINITY, low = INFINITY;
  int64_t at_high = 0, at_low = 0;

  bool none() const { return !(low <= high); }
  void extend(double key, int64_t token) {
    if (key > high) high = key, at_high = token;
    if (key < low) low = key, at_low = token;
  }
  double at(End end) const {
    return end == End::kHigh ? high : end == End::kLow ? low : 0.5 * low + 0.5 * high;
  }
};

// Chunks in a segment. A row of a later segment reads a table twice, so a segment is long, and
// there is one if the heads alone keep all cores busy. Depends on sizes alone.
static int64_t segment_of(int64_t heads, int64_t chunks) {
  constexpr int64_t kTasks = 16, kShortest = 16;
  return most(kShortest, ceil_div(chunks, ceil_div(kTasks, heads)));
}

// A head, and what its segments share.
struct ScanHead {
  const Attention& call;
  const int64_t h;
  const ScanShard* shard = nullptr;  // none: the sequence is here as a whole
  const int64_t chunks = ceil_div(call.n_q, kScanChunk);
  const int64_t segment = segment_of(call.heads, chunks);  // chunks in a segment
  const int64_t segments = ceil_div(chunks, segment);
  ScanLayout layout{};
  int64_t count = 0;                // keys that some row sees
  double mean = 0;                  // of these keys
  Buffer<Ends> before{chunks + 1};  // of the keys before a chunk
  Buffer<int32_t> last_row{};       // [panels]: the last chunk with a query on the panel, or -1;
                                    // INT32_MAX if later shards may have one
  Buffer<double> node{};            // [features]: t_a, in units of ln 2
  double unit = 1;                  // a power of 2: no query or node is larger, in units of ln 2

  // The ends of the keys before segment g, or of all.
  const Ends& before_segment(int64_t g) const { return before.data[least(chunks, g * segment)]; }
  Ends earlier_ends() const {
    Ends ends;
    if (!shard) return ends;
    ends.high = shard->ends[2 * h];
    ends.low = shard->ends[2 * h + 1];
    ends.at_high = ends.at_low = kEarlier;
    return ends;
  }
  // The part of this head in tables of a shard.
  template <class Number>
  Number* of_shard(Number* tables) const {
    return tables + h * layout.features() * (call.dv + 1);
  }

  template <class Body>
  void for_segments(int64_t first, Body body) const {
    auto later = [&](int64_t g) { body(first + g); };
    segments > 1 ? parallel(segments - first, later) : serial(segments - first, later);
  }
  template <class Body>
  void for_chunks(int64_t g, Body body) const {
    for (int64_t c = g * segment; c < least(chunks, (g + 1) * segment); ++c) body(c);
  }
  template <class Body>
  void for_chunks_backwards(int64_t g, Body body) const {
    for (int64_t c = least(chunks, (g + 1) * segment) - 1; c >= g * segment; --c) body(c);
  }
};

// The panels of up to kScanChunk queries.
static void find_panels(const ScanLayout& layout, const double* t, int64_t count, int32_t* panel) {
  for (int64_t i = 0; i < count; ++i) panel[i] = 0;
  for (int k = 0; k < layout.levels; ++k) {
    const double edge = layout.edge[k];
    for (int64_t i = 0; i < count; ++i) panel[i] += ::fabs(t[i]) > edge;
  }
  const int32_t levels = layout.levels;  // without branches: signs are hard to predict
  for (int64_t i = 0; i < count; ++i) panel[i] += levels & -int32_t((panel[i] > 0) & (t[i] < 0));
}

// The tokens of a chunk.
struct ScanChunk {
  int64_t first, rows;        // queries first .. first + rows
  int64_t keys;               // that are not masked and that some row sees
  Ends before, after;         // of the keys before the chunk, and with it
  double t[kScanChunk];       // scale * q
  double top[kScanChunk];     // the key of most weight among those that the row sees
  double key[kScanChunk];     // the rest is 0
  int32_t token[kScanChunk];  // of each key, counted from `first`
  int32_t seen[kScanChunk];   // how many keys of the chunk the row sees
  int32_t panel[kScanChunk];
  int32_t order[kScanChunk];  // rows by panel
  double place[kScanChunk];   // in that order

  // None if the keys are all tokens in their order.
  const int32_t* key_tokens(const Attention& call) const { return call.key_mask ? token : nullptr; }

  void read(const ScanHead& head, int64_t c) {
    const Attention& call = head.call;
    first = c * kScanChunk;
    rows = least(kScanChunk, call.n_q - first);
    before = after = head.before.data[c];
    double number[kScanChunk];
    uint8_t skip[kScanChunk];
    const int64_t tokens = most(0, least(rows, call.n_k - first));
    read_column(call.query, head.h, first, rows, t);
    read_column(call.key, head.h, first, tokens, number);
    if (call.key_mask) read_mask(call, head.h, first, tokens, skip);
    keys = 0;
    for (int64_t i = 0; i < rows; ++i) {
      if (i < tokens && !(call.key_mask && skip[i])) {
        after.extend(number[i], first + i);
        token[keys] = int32_t(i);
        key[keys++] = number[i];
      }
      t[i] *= call.scale;
      top[i] = after.none() ? 0 : t[i] >= 0 ? after.high : after.low;
      seen[i] = int32_t(keys);
    }
    for (int64_t j = keys; j < kScanChunk; ++j) key[j] = 0;
  }

  // Orders the rows by panel: those of panel p are order[start[p]] .. order[start[p + 1] - 1].
  void sort(const ScanLayout& layout, int32_t* start) {
    const int panels = layout.panels();
    find_panels(layout, t, rows, panel);
    for (int p = 0; p <= panels; ++p) start[p] = 0;
    for (int64_t i = 0; i < rows; ++i) start[panel[i]] += 1;
    for (int p = 0, sum = 0; p <= panels; ++p) sum += start[p], start[p] = sum;
    for (int64_t i = rows - 1; i >= 0; --i) order[--start[panel[i]]] = int32_t(i);
    for (int64_t k = 0; k < rows; ++k) place[k] = scan_place(layout, panel[order[k]], t[order[k]]);
  }
};

// Finds the ends of the keys before each chunk and the layout; false if the head is not for the
// scan.
inline bool prepare(ScanHead& head) {
  const Attention& call = head.call;
  const int64_t segments = head.segments;
  struct Found {
    double t_most = 0, odd = 0, sum = 0;
    int64_t count = 0;
    bool plain = true;
  };
  Buffer<Found> found(segments);
  head.for_segments(0, [&](int64_t g) {
    Found here;
    head.for_chunks(g, [&](int64_t c) {
      const int64_t first = c * kScanChunk;
      double number[kScanChunk];
      uint8_t skip[kScanChunk] = {};
      const int64_t rows = least(kScanChunk, call.n_q - first);
      read_column(call.query, head.h, first, rows, number);
      for (int64_t i = 0; i < rows; ++i) {
        here.t_most = larger_of(here.t_most, ::fabs(number[i] * call.scale));
        here.odd += number[i] * 0;
      }
      const int64_t tokens = most(0, least(rows, call.n_k - first));
      if (call.key_mask) here.plain &= read_mask(call, head.h, first, tokens, skip);
      read_column(call.key, head.h, first, tokens, number);
      Ends ends;
      for (int64_t j = 0; j < tokens; ++j) {
        if (skip[j]) continue;
        ends.extend(number[j], first + j);
        here.odd += number[j] * 0;
        here.sum += number[j];
        here.count += 1;
      }
      head.before.data[c + 1] = ends;
    });
    found.data[g] = here;
  });
  double t_most = 0;
  for (int64_t g = 0; g < segments; ++g) {
    const Found& one = found.data[g];
    if (one.odd != 0 || !one.plain) return false;  // NaN too
    t_most = larger_of(t_most, one.t_most);
    head.count += one.count;
    head.mean += one.sum;
  }
  const double earlier = head.shard ? head.shard->keys[3 * head.h] : 0;
  if (earlier > 0) head.mean += head.shard->keys[3 * head.h + 1];
  if (head.count + earlier > 0) head.mean /= double(head.count) + earlier;
  Ends all = head.earlier_ends();
  head.before.data[0] = all;
  for (int64_t c = 1; c <= head.chunks; ++c) {
    const Ends& here = head.before.data[c];
    if (!here.none()) {
      all.extend(here.high, here.at_high);
      all.extend(here.low, here.at_low);
    }
    head.before.data[c] = all;
  }
  if (const ScanShard* shard = head.shard) {
    const double most_of_all = shard->t_most[head.h];
    if (!(t_most <= most_of_all)) return false;
    head.layout = scan_layout_of(most_of_all, shard->nodes, shard->levels, shard->ratio);
  } else {
    const double extent = all.none() ? 0 : all.high - all.low;
    head.layout = make_scan_layout(call.query.dtype, t_most, extent, head.count);
  }
  if (head.layout.nodes == 0) return false;

  int exponent = 0;
  ::frexp(t_most * kLog2e, &exponent);
  head.unit = ::ldexp(1.0, exponent);

  const ScanLayout& layout = head.layout;
  const int panels = layout.panels();
  head.last_row.resize(panels);
  for (int p = 0; p < panels; ++p) head.last_row.data[p] = -1;
  Buffer<int32_t> last(segments * panels);
  head.for_segments(0, [&](int64_t g) {
    int32_t* of_segment = last.data + g * panels;
    for (int p = 0; p < panels; ++p) of_segment[p] = -1;
    head.for_chunks(g, [&](int64_t c) {
      double number[kScanChunk];
      int32_t panel[kScanChunk];
      const int64_t rows = least(kScanChunk, call.n_q - c * kScanChunk);
      read_column(call.query, head.h, c * kScanChunk, rows, number);
      for (int64_t i = 0; i < rows; ++i) number[i] *= call.scale;
      find_panels(layout, number, rows, panel);
      for (int64_t i = 0; i < rows; ++i) of_segment[panel[i]] = int32_t(c);
    });
  });
  for (int64_t g = 0; g < segments; ++g)
    for (int p = 0; p < panels; ++p)
      if (last.data[g * panels + p] >= 0) head.last_row.data[p] = last.data[g * panels + p];
  if (head.shard && head.shard->open)
    for (int p = 0; p < panels; ++p) head.last_row.data[p] = INT32_MAX;
  head.node.resize(layout.features());
  for (int p = 0; p < panels; ++p)
    for (int i = 0; i < layout.nodes; ++i)
      head.node.data[p * layout.nodes + i] = scan_node(layout, p, i) * kLog2e;
  return true;
}

// Writes the gradients of numbers, times a factor, as the column of a matrix.
template <class T>
static void write_numbers(const double* from, int64_t count, const Matrix& m, int64_t h,
                          double factor) {
  T block[kScanChunk];
  for (int64_t first = 0; first < count; first += kScanChunk) {
    const int64_t here = least(kScanChunk, count - first);
    for (int64_t i = 0; i < here; ++i) block[i] = T(from[first + i] * factor);
    write_block(block, 1, 0, here, 1, m, h, first, 0);
  }
}
// Keys after the last query have no gradient.
template <class T>
static void zero_keys_from(const AttentionGradient& g, int64_t h, int64_t first) {
  const T zero = 0;
  for (int64_t j = first; j < g.call.n_k; ++j) {
    write_block(&zero, 0, 0, 1, 1, g.grad_key, h, j, 0);
    write_block(&zero, 0, 0, 1, g.call.dv, g.grad_value, h, j, 0);
  }
}
