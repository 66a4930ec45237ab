// Forward of a scan. Included inside an ISA's namespace.
//
// A head is cut into segments, which threads share. Each is scanned from an empty table; then the
// tables of earlier segments are added up, and every row reads that sum.

// weight[i][j] = exp(t_i (s_j - top_i)) for the keys of the chunk that row i sees, else 0;
// z[i] = their sum.
template <class T>
static void weigh_pairs(const ScanChunk& chunk, double unit, T* weight, double* z) {
  constexpr int L = kLanes<T>;
  KeyGaps<T> from_low, from_high;
  const double factor = kLog2e / unit;
  for (int64_t i = 0; i < chunk.rows; ++i) {
    T* line = weight + i * kScanChunk;
    const int64_t seen = chunk.seen[i];
    KeyGaps<T>& gaps = chunk.t[i] >= 0 ? from_high : from_low;
    gaps.measure(chunk.key, chunk.top[i], unit);
    z[i] = powers_of_gaps(gaps, chunk.t[i] * factor, seen, line);
    for (int64_t j = round_up(seen, L); j < kScanChunk; j += L) store(line + j, Vec<T>{});
  }
}

// sums[i] = weight[i] values
template <class T>
static void sum_pairs(const ScanChunk& chunk, const T* weight, const ChunkRows<T>& values,
                      int64_t width, const RowSums<T>& to) {
  constexpr int L = kLanes<T>;
  for (int64_t i = 0; i < chunk.rows; i += kTileRows) {
    const int64_t rows = least(kTileRows, chunk.rows - i);
    gemm<T, false>(rows, width / L, chunk.seen[i + rows - 1],
                   {weight + i * kScanChunk, kScanChunk, 1}, values.data, values.row, to[i],
                   to.row);
  }
}

// Starts the first segment of a shard from the table of earlier shards. Values in it are measured
// from 0; here they are measured from the centres.
template <class T>
static void start_from_earlier(const ScanHead& head, const Centres<T>& centres,
                               const ScanTable<T>& table) {
  const int64_t features = table.features, width = table.width, dv = head.call.dv;
  const double* from = head.of_shard(head.shard->table);
  for (int64_t a = 0; a < features; ++a, from += dv + 1) {
    const T* centre = centres.of(end_of(head.layout, int(a / head.layout.nodes)));
    double* line = table.sums + a * width;
    for (int64_t c = 0; c < width; ++c)
      line[c] = c < centres.columns ? from[centres.begin + c] - from[dv] * double(centre[c]) : 0;
    table.z[a] = from[dv];
  }
  table.round();
}

// Scratch of a segment.
template <class T>
struct ScanWork {
  Scratch scratch;
  ScanChunk& chunk;
  int32_t* start;  // [panels + 1]
  T* weight;       // [kScanChunk][kScanChunk]: of pairs, or of nodes
  T* block;        // [kScanChunk][width]: values
  RowSums<T> sums;
  Centres<T> centres;
  Features<T> features;
  ScanTable<T> table;

  ScanWork(const ScanLayout& layout, int64_t begin, int64_t columns, int64_t width)
      : scratch(int64_t(sizeof(ScanChunk)) + 4 * (layout.panels() + 1) +
                    kScanChunk * ((kScanChunk + 2 * width) * int64_t(sizeof(T)) + 8) +
                    Centres<T>::bytes(width) + Features<T>::bytes(layout) +
                    ScanTable<T>::bytes(layout.features(), width),
                6 + Centres<T>::kPieces + Features<T>::kPieces + ScanTable<T>::kPieces),
        chunk(*scratch.take<ScanChunk>(1)),
        start(scratch.take<int32_t>(layout.panels() + 1)),
        weight(scratch.take<T>(kScanChunk * kScanChunk)),
        block(scratch.take<T>(kScanChunk * width)),
        sums{scratch.take<T>(kScanChunk * width), width, scratch.take<double>(kScanChunk)},
        centres(begin, columns, width, scratch),
        features(layout, scratch),
        table(layout.features(), width, scratch) {}
};

// Forward of one head, `width` columns from `begin` on at a time.
template <class T>
struct ScanForward {
  ScanHead& head;
  double* const kept_z = nullptr;  // [n_q]: z of the rows is kept here, if it is given
  const Attention& call = head.call;
  const ScanLayout& layout = head.layout;
  const int64_t segment = head.segment, segments = head.segments;
  const ScanBasis<T> basis{layout};
  const int64_t features = layout.features();
  const int64_t widest = round_up(least(kScanColumns, call.dv), kLanes<T>);
  int64_t begin = 0, columns = 0, width = 0;

  // Of each segment but the last: its table, then that of all segments up to it.
  Buffer<double> sums{(segments - 1) * features * widest}, z{(segments - 1) * features};
  // The rows of segments but the first, until they have read it: in `out` where that is possible.
  const bool in_out = in_vectors<T>(call.out, call.dv);
  Buffer<T> row_sums{segments > 1 && !in_out ? call.n_q * widest : 0};
  Buffer<double> row_z{segments > 1 ? head.chunks * kScanChunk : 0};
  Buffer<double> odd{segments};  // NaN if a result is not finite

  RowSums<T> waiting(int64_t first) const {
    if (!in_out) return {row_sums.data + first * width, width, row_z.data + first};
    T* out = static_cast<T*>(call.out.data) + call.out.head[head.h] + begin;
    return {out + first * call.out.row, call.out.row, row_z.data + first};
  }

  // Scans a segment from an empty table.
  void scan(int64_t g) {
    ScanWork<T> work(layout, begin, columns, width);
    ScanChunk& chunk = work.chunk;
    work.centres.follow(head, head.before_segment(g));
    if (g == 0 && head.shard)
      start_from_earlier(head, work.centres, work.table);
    else
      work.table.start();
    head.for_chunks(g, [&](int64_t c) {
      chunk.read(head, c);
      chunk.sort(layout, work.start);
      const ChunkRows<T> values(call.value, head.h, chunk.first, chunk.keys, chunk.key_tokens(call),
                                begin, columns, work.block);
      const RowSums<T> to = g == 0 ? work.sums : waiting(chunk.first);
      weigh_pairs(chunk, head.unit, work.weight, to.z);
      sum_pairs(chunk, work.weight, values, width, to);
      for (int64_t i = 0; i < chunk.rows; ++i)
        subtract(to[i], centre_of(work.centres, chunk, i), T(to.z[i]));
      if (c > g * segment || g == 0)
        read_table(head, work.table, chunk.before, chunk, work.start, basis, work.weight, to);
      if (g == 0) write(chunk, work.centres, to, g);
      if (chunk.keys == 0) return;
      const bool moved = work.centres.follow(head, chunk.after);
      work.features.compute(head, chunk, c);
      work.table.add_keys(work.features, values, work.centres.value, chunk.keys,
                          moved ? work.centres.shift : nullptr);
    });
    if (g + 1 == segments) return;
    work.table.save(sums.data + g * features * width, z.data + g * features);
  }

  const T* centre_of(const Centres<T>& centres, const ScanChunk& chunk, int64_t i) const {
    return centres.of(end_of(layout, chunk.panel[i]));
  }
  void subtract(T* line, const T* centre, T factor) const {
    for (int64_t c = 0; c < width; c += kLanes<T>)
      store(line + c, load(line + c) - load(centre + c) * factor);
  }

  // Makes the table of each segment that of all segments up to it.
  void join() {
    Scratch scratch(Centres<T>::bytes(width), Centres<T>::kPieces);
    Centres<T> centres(begin, columns, width, scratch);
    for (int64_t g = 1; g + 1 < segments; ++g) {
      const Ends& old = head.before.data[g * segment];
      const Ends& now = head.before.data[(g + 1) * segment];
      if (old.none()) continue;
      centres.follow(head, old);
      const bool moved = centres.follow(head, now);
      for (int64_t a = 0; a < features; ++a) {
        const End end = end_of(layout, int(a / layout.nodes));
        const double factor = ::exp2(head.node.data[a] * (old.at(end) - now.at(end)));
        const double of_z = z.data[(g - 1) * features + a];
        const T* shift = centres.shift + int(end) * width;
        double* to = sums.data + (g * features + a) * width;
        const double* from = to - features * width;
        for (int64_t c = 0; c < width; ++c)
          to[c] += (from[c] + (moved ? double(shift[c]) * of_z : 0)) * factor;
        z.data[g * features + a] += of_z * factor;
      }
    }
  }

  // Adds the earlier segments to the rows of this one.
  void finish(int64_t g) {
    ScanWork<T> work(layout, begin, columns, width);
    ScanChunk& chunk = work.chunk;
    const Ends& ends = head.before.data[g * segment];
    T* first_centres = work.block;
    work.table.start(sums.data + (g - 1) * features * width, z.data + (g - 1) * features);
    work.centres.follow(head, ends);
    for (int64_t c = 0; c < 3 * width; ++c) first_centres[c] = work.centres.value[c];
    head.for_chunks(g, [&](int64_t c) {
      chunk.read(head, c);
      chunk.sort(layout, work.start);
      const RowSums<T> to = waiting(chunk.first);
      double own_z[kScanChunk];
      for (int64_t i = 0; i < chunk.rows; ++i) own_z[i] = to.z[i];
      read_table(head, work.table, ends, chunk, work.start, basis, work.weight, to);
      work.centres.follow(head, chunk.before);
      // What was read is measured from the centres at the start of the segment.
      if (!work.centres.are_of(ends))
        for (int64_t i = 0; i < chunk.rows; ++i) {
          const T read = T(to.z[i] - own_z[i]);
          const int end = int(end_of(layout, chunk.panel[i]));
          subtract(to[i], first_centres + end * width, -read);
          subtract(to[i], centre_of(work.centres, chunk, i), read);
        }
      write(chunk, work.centres, to, g);
    });
  }

  // out and lse of a chunk's rows.
  void write(const ScanChunk& chunk, const Centres<T>& centres, const RowSums<T>& from, int64_t g) {
    constexpr int L = kLanes<T>;
    double log_z[kScanChunk];
    for (int64_t i = 0; i < chunk.rows; i += kLanes<double>)
      store(log_z + i, log_of(load(from.z + i)));
    double* lse = lse_of(call, head.h) + chunk.first;
    for (int64_t i = 0; i < chunk.rows; ++i)
      lse[i] = from.z[i] > 0 ? chunk.t[i] * chunk.top[i] + log_z[i] : -INFINITY;
    if (kept_z && begin == 0)
      for (int64_t i = 0; i < chunk.rows; ++i) kept_z[chunk.first + i] = from.z[i];
    Vec<T> strange{};
    const RowSums<T> to = in_out ? waiting(chunk.first) : from;
    for (int64_t i = 0; i < chunk.rows; ++i) {
      const T* centre = centre_of(centres, chunk, i);
      const T inverse = from.z[i] > 0 ? T(1 / from.z[i]) : T(0);
      for (int64_t c = 0; c < width; c += L) {
        const Vec<T> x = load(from[i] + c) * inverse + load(centre + c);
        strange += x * T(0);
        store(to[i] + c, x);
      }
    }
    if (!in_out)
      write_block(to.data, to.row, 1, chunk.rows, columns, call.out, head.h, chunk.first, begin);
    odd.data[g] += double(reduce_sum<T>(strange));
  }

  // Whether all results are finite.
  bool run() {
    set_zero(odd.data, segments);
    do {
      columns = least(kScanColumns, call.dv - begin);
      width = round_up(columns, kLanes<T>);
      head.for_segments(0, [&](int64_t g) { scan(g); });
      join();
      head.for_segments(1, [&](int64_t g) { finish(g); });
      begin += kScanColumns;
    } while (begin < call.dv);
    double all = 0;
    for (int64_t g = 0; g < segments; ++g) all += odd.data[g];
    return all == 0;
  }
};

// A head that is not for the scan, or has results that are not finite, goes to `direct`.
template <class T>
void scan_forward(const Attention& call) {
  if (call.n_q == 0) return;
  if (call.rank > 1) return tensor_forward<T>(call);
  if (call.is_biased()) return biased_forward<T>(call);
  for_heads(call.heads, [&](int64_t h) {
    ScanHead head{call, h};
    if (!prepare(head) || !ScanForward<T>{head}.run()) direct_forward_heads<T>(call, h, h + 1);
  });
}
