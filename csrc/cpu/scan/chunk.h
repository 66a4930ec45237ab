// Scans: causal attention of rank 1 in one pass over the tokens. spec/scan.h has the layout,
// docs/transform.md the derivation. Included inside an ISA's namespace.
//
// Tokens are worked on in chunks. A row sees the keys of its own chunk pair by pair, and those of
// earlier chunks through the table (table.h). The weights of a row are measured from its own top
// key, which has weight 1, so its parts add up without an lse. Keys and queries are fp64: the
// difference of two keys is exact to rounding, and so is every logit that matters, for logits of
// any size.

constexpr int64_t kScanChunk = 64;

// 2^x rounded to T for `kLanes<T>` arguments below 128; the argument is reduced in fp64.
BOLTZATTN_INLINE void powers_of_2(const Vec<double> (&x)[1], double* to) {
  store(to, exp2_of(x[0]));
}
BOLTZATTN_INLINE void powers_of_2(const Vec<double> (&x)[2], float* to) {
  HalfVec whole[2], rest[2];
#pragma GCC unroll 2
  for (int u = 0; u < 2; ++u) {
    const Vec<double> y = larger<double>(splat(-127.0), x[u]);
    const double kShift = 6755399441055744.0;
    const Vec<double> k = (y + kShift) - kShift;
    whole[u] = __builtin_convertvector(k, HalfVec);
    rest[u] = __builtin_convertvector(y - k, HalfVec);
  }
  store(to, exp2_of_parts(joined(whole) + 12582912.0f, joined(rest)));
}

// to[j] = 2^(t (key[j] - from)) in whole vectors.
template <class T>
BOLTZATTN_INLINE void scan_weights(double t, const double* key, double from, int64_t count, T* to) {
  constexpr int kPairs = int(sizeof(double) / sizeof(T));
  for (int64_t j = 0; j < count; j += kLanes<T>) {
    Vec<double> x[kPairs];
    load(key + j, x);
#pragma GCC unroll 2
    for (auto& one : x) one = (one - from) * t;
    powers_of_2(x, to + j);
  }
}

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
  const int64_t chunks = ceil_div(call.n_q, kScanChunk);
  const int64_t segment = segment_of(call.heads, chunks);  // chunks in a segment
  const int64_t segments = ceil_div(chunks, segment);
  ScanLayout layout{};
  int64_t count = 0;                // keys that some row sees
  double mean = 0;                  // of these keys
  Buffer<Ends> before{chunks + 1};  // of the keys before a chunk
  Buffer<int32_t> last_row{};       // [panels]: the last chunk with a query on the panel, or -1
  Buffer<double> node{};            // [features]: t_a, in units of ln 2

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
  int64_t level[kScanChunk] = {};
  for (int k = 0; k < layout.levels; ++k) {
    const double edge = layout.edge[k];
    for (int64_t i = 0; i < count; ++i) level[i] += ::fabs(t[i]) > edge;
  }
  for (int64_t i = 0; i < count; ++i)
    panel[i] = int32_t(level[i] == 0 || t[i] > 0 ? level[i] : layout.levels + level[i]);
}

// The tokens of a chunk.
struct ScanChunk {
  int64_t first, rows;        // queries first .. first + rows
  int64_t keys;               // that are not masked
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
    const int64_t tokens = most(0, least(kScanChunk, call.n_k - first));
    read_column(call.query, head.h, first, rows, t);
    read_column(call.key, head.h, first, tokens, number);
    if (call.key_mask) read_mask(call, head.h, first, tokens, skip);
    keys = 0;
    for (int64_t i = 0; i < most(rows, tokens); ++i) {
      if (i < tokens && !(call.key_mask && skip[i])) {
        after.extend(number[i], first + i);
        token[keys] = int32_t(i);
        key[keys++] = number[i];
      }
      if (i >= rows) continue;
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
static bool prepare(ScanHead& head) {
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
      uint8_t skip[kScanChunk];
      const int64_t rows = least(kScanChunk, call.n_q - first);
      read_column(call.query, head.h, first, rows, number);
      for (int64_t i = 0; i < rows; ++i) {
        here.t_most = larger_of(here.t_most, ::fabs(number[i] * call.scale));
        here.odd += number[i] * 0;
      }
      const int64_t tokens = most(0, least(kScanChunk, call.n_k - first));
      if (call.key_mask) here.plain &= read_mask(call, head.h, first, tokens, skip);
      read_column(call.key, head.h, first, tokens, number);
      Ends ends;
      for (int64_t j = 0; j < tokens; ++j) {
        if (call.key_mask && skip[j]) continue;
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
  if (head.count > 0) head.mean /= double(head.count);
  Ends all;
  head.before.data[0] = all;
  for (int64_t c = 1; c <= head.chunks; ++c) {
    const Ends& here = head.before.data[c];
    if (!here.none()) {
      all.extend(here.high, here.at_high);
      all.extend(here.low, here.at_low);
    }
    head.before.data[c] = all;
  }
  const double extent = all.none() ? 0 : all.high - all.low;
  head.layout = make_scan_layout(call.query.dtype, t_most, extent, head.count);
  if (head.layout.nodes == 0) return false;

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
  head.node.resize(layout.features());
  for (int p = 0; p < panels; ++p)
    for (int i = 0; i < layout.nodes; ++i)
      head.node.data[p * layout.nodes + i] = scan_node(layout, p, i) * kLog2e;
  return true;
}
