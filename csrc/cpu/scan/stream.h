// Streams: the table of a scan as the state of attention over all tokens so far. Included inside an
// ISA's namespace. Everything is fp64: a state takes in ten million tokens.
//
// A token changes every node of the table, but a query reads those of one panel. So tokens that
// come one by one wait beside the table, where rows see them pair by pair, and are added to it
// together. As in a scan, all weights of a row are measured from its own top key.

// Tokens are the rows of call.key and call.value, or of call.query.
static void start_stream_head(ScanHead& head, const Stream& s, const Ends& ends) {
  head.layout = s.layout;
  const int panels = s.layout.panels(), nodes = s.layout.nodes;
  head.last_row.resize(panels);
  for (int p = 0; p < panels; ++p) head.last_row.data[p] = INT32_MAX;
  head.node.resize(panels * nodes);
  for (int a = 0; a < panels * nodes; ++a) head.node.data[a] = s.positions[a] * kLog2e;
  for (int64_t c = 0; c <= head.chunks; ++c) head.before.data[c] = ends;
}
static Ends ends_of_table(const Stream& s, int64_t h) {
  Ends ends;
  ends.high = s.ends[2 * h];
  ends.low = s.ends[2 * h + 1];
  return ends;
}
static Ends ends_of_all(const Stream& s, int64_t h) {
  Ends ends = ends_of_table(s, h);
  for (int64_t j = 0; j < *s.waiting; ++j) ends.extend(s.keys[h * kStreamRoom + j], 0);
  return ends;
}
static ScanTable<double> table_of(const Stream& s, int64_t h) {
  const int64_t features = s.layout.features();
  return {features, s.width, s.sums + h * features * s.width, s.z + h * features};
}

// Whether keys and values are finite; and the largest extent of a head's keys with these.
void stream_extent(const Attention& call, const Stream& s, bool* finite, double* extent) {
  Buffer<double> odd(call.heads), wide(call.heads);
  const auto measure = [&](int64_t h) {
    Ends ends = ends_of_all(s, h);
    double strange = 0;
    Scratch scratch(call.dv * 8, 1);
    double* row = scratch.take<double>(call.dv);
    for (int64_t j = 0; j < call.n_k; ++j) {
      double key;
      read_column(call.key, h, j, 1, &key);
      ends.extend(key, 0);
      strange += key * 0;
      read_block(call.value, h, j, 0, 1, call.dv, row, 0, 1);
      for (int64_t c = 0; c < call.dv; ++c) strange += row[c] * 0;
    }
    odd.data[h] = strange;
    wide.data[h] = ends.none() ? 0 : ends.high - ends.low;
  };
  call.n_k == 1 ? serial(call.heads, measure) : for_heads(call.heads, measure);
  *finite = true;
  *extent = 0;
  for (int64_t h = 0; h < call.heads; ++h) {
    *finite &= odd.data[h] == 0;
    *extent = larger_of(*extent, wide.data[h]);
  }
}

double stream_largest(const Attention& call) {
  double largest = 0, odd = 0;
  for (int64_t h = 0; h < call.heads; ++h)
    for (int64_t i = 0; i < call.n_q; ++i) {
      double query;
      read_column(call.query, h, i, 1, &query);
      largest = larger_of(largest, ::fabs(query * call.scale));
      odd += query * 0;
    }
  return largest + odd;
}

// One token: as a chunk, but the weights of all nodes are computed together.
static void append_one(const Attention& call, const Stream& s, int64_t h) {
  constexpr int L = kLanes<double>;
  const int nodes = s.layout.nodes, features = s.layout.features();
  const ScanTable<double> table = table_of(s, h);
  const Ends before = ends_of_table(s, h);
  Ends after = before;
  double key;
  read_column(call.key, h, 0, 1, &key);
  after.extend(key, 0);
  Scratch scratch((s.width + 2 * round_up(features, L)) * 8, 3);
  double* value = scratch.take<double>(s.width);
  double* exponent = scratch.take<double>(round_up(features, L));
  double* weight = scratch.take<double>(round_up(features, L));
  set_zero(value, s.width);
  read_block(call.value, h, 0, 0, 1, call.dv, value, 0, 1);
  for (int a = 0; a < features; ++a)
    exponent[a] = s.positions[a] * (key - after.at(end_of(s.layout, a / nodes))) * kLog2e;
  for (int a = features; a < round_up(features, L); ++a) exponent[a] = 0;
  powers_of_2(exponent, features, weight);
  const bool moves = before.high != after.high || before.low != after.low;
  for (int a = 0; a < features; ++a) {
    double moved = 1;
    if (moves) {
      const End end = end_of(s.layout, a / nodes);
      moved = before.none() ? 0 : ::exp(s.positions[a] * (before.at(end) - after.at(end)));
    }
    double* line = table.sums + a * s.width;
    for (int64_t c = 0; c < s.width; c += L)
      store(line + c, load(line + c) * moved + load(value + c) * weight[a]);
    table.z[a] = table.z[a] * moved + weight[a];
  }
  s.ends[2 * h] = after.high;
  s.ends[2 * h + 1] = after.low;
}

static void append_some(const Attention& call, const Stream& s, int64_t h) {
  if (call.n_k == 1) return append_one(call, s, h);
  ScanHead head{call, h};
  start_stream_head(head, s, ends_of_table(s, h));
  const ScanTable<double> table = table_of(s, h);
  const int64_t block = 1 + kScanChunk * s.width;
  Scratch scratch(
      int64_t(sizeof(ScanChunk)) + (block + 3 * s.width) * 8 + Features<double>::bytes(s.layout),
      3 + Features<double>::kPieces);
  ScanChunk& chunk = *scratch.take<ScanChunk>(1);
  double* rows = scratch.take<double>(block);
  double* centres = scratch.take<double>(3 * s.width);  // 0: there are no gradients
  set_zero(centres, 3 * s.width);
  Features<double> features(s.layout, scratch);
  for (int64_t c = 0; c < head.chunks; ++c) {
    chunk.read(head, c);
    const ChunkRows<double> values(call.value, h, chunk.first, chunk.keys, nullptr, 0, call.dv,
                                   rows);
    features.compute(head, chunk, c);
    table.add_keys(features, values, centres, chunk.keys, nullptr);
    head.before.data[c + 1] = chunk.after;
  }
  s.ends[2 * h] = chunk.after.high;
  s.ends[2 * h + 1] = chunk.after.low;
}

// Adds the tokens that wait to the table.
static void fold(const Stream& s, int64_t heads) {
  if (*s.waiting == 0) return;
  Buffer<int64_t> keys(heads), values(heads);
  for (int64_t h = 0; h < heads; ++h) {
    keys.data[h] = h * kStreamRoom;
    values.data[h] = h * kStreamRoom * s.width;
  }
  Attention call{};
  call.heads = heads;
  call.n_q = call.n_k = *s.waiting;
  call.rank = 1;
  call.dv = s.width;
  call.scale = 1;
  call.query = call.key = {s.keys, DType::kFloat64, keys.data, 1, 1};
  call.value = {s.values, DType::kFloat64, values.data, s.width, 1};
  for_heads(heads, [&](int64_t h) { append_some(call, s, h); });
  *s.waiting = 0;
}

// The basis of the layout of the last call, which is mostly that of this one.
static const ScanBasis<double>& basis_of(const ScanLayout& layout) {
  static thread_local ScanBasis<double> basis(layout);
  static thread_local double ratio = layout.ratio;
  if (basis.central.nodes != layout.nodes || ratio != layout.ratio) {
    basis = ScanBasis<double>(layout);
    ratio = layout.ratio;
  }
  return basis;
}

// What `narrow` takes to write a number: fp64 for fp64, else fp32.
template <class Reference>
using Wide = std::conditional_t<sizeof(std::remove_reference_t<Reference>) == 8, double, float>;

// Sums of values and of weights, relative to the weight of the row's top key, as out and, if it is
// asked for, lse.
static void write_row(const Attention& call, int64_t h, int64_t i, double t, double top,
                      const double* sums, double z) {
  const double inverse = z > 0 ? 1 / z : 0;
  if (call.lse) lse_of(call, h)[i] = z > 0 ? t * top + ::log(z) : -INFINITY;
  with_type(call.out, h, i, 0, [&](auto* to) {
    for (int64_t column = 0; column < call.dv; ++column)
      narrow(Wide<decltype(*to)>(sums[column] * inverse), to + column * call.out.column);
  });
}

// sums += sum_j weight[j] rows[j]
static void add_rows(const double* weight, const double* rows, int64_t count, int64_t width,
                     double* sums) {
  for (int64_t c = 0; c < width; c += kLanes<double>) {
    Vec<double> sum = load(sums + c);
    for (int64_t j = 0; j < count; ++j) sum += load(rows + j * width + c) * weight[j];
    store(sums + c, sum);
  }
}

// Adds the tokens that wait to the sums of a row; returns the sum of their weights.
static double add_waiting(const Stream& s, int64_t h, double t, double top, double* sums) {
  const int64_t count = *s.waiting;
  if (count == 0) return 0;
  double exponent[kStreamRoom] = {}, weight[kStreamRoom], z = 0;
  for (int64_t j = 0; j < count; ++j)
    exponent[j] = t * (s.keys[h * kStreamRoom + j] - top) * kLog2e;
  powers_of_2(exponent, count, weight);
  for (int64_t j = 0; j < count; ++j) z += weight[j];
  add_rows(weight, s.values + h * kStreamRoom * s.width, count, s.width, sums);
  return z;
}

// One query: as a chunk, but without its bookkeeping.
static void query_one(const Attention& call, const Stream& s, int64_t h,
                      const ScanBasis<double>& basis) {
  constexpr int L = kLanes<double>;
  const ScanLayout& layout = s.layout;
  const ScanTable<double> table = table_of(s, h);
  const Ends ends = ends_of_table(s, h), all = ends_of_all(s, h);
  double query;
  read_column(call.query, h, 0, 1, &query);
  const double t = query * call.scale, top = t < 0 ? all.low : all.high;
  Scratch scratch((s.width + kMostNodes * (L + 1)) * 8, 3);
  double* sums = scratch.take<double>(s.width);
  double* basis_at = scratch.take<double>(kMostNodes * L);
  double* weight = scratch.take<double>(kMostNodes);
  set_zero(sums, s.width);
  double z = 0;
  if (!ends.none()) {
    int32_t panel;
    find_panels(layout, &t, 1, &panel);
    double place[L], exponent[L] = {}, factor[L];
    for (double& x : place) x = scan_place(layout, panel, t);
    exponent[0] = t * (ends.at(end_of(layout, panel)) - top) * kLog2e;
    powers_of_2(exponent, L, factor);
    panel == 0 ? basis.central.weigh(place, L, basis_at, L)
               : basis.outer.weigh(place, L, basis_at, L);
    const int64_t first = panel * layout.nodes;
    for (int a = 0; a < layout.nodes; ++a) {
      weight[a] = basis_at[a * L] * factor[0];
      z += table.z[first + a] * weight[a];
    }
    add_rows(weight, table.node(first), layout.nodes, s.width, sums);
  }
  z += add_waiting(s, h, t, top, sums);
  write_row(call, h, 0, t, top, sums, z);
}

static void query_some(const Attention& call, const Stream& s, int64_t h,
                       const ScanBasis<double>& basis) {
  if (call.n_q == 1) return query_one(call, s, h, basis);
  ScanHead head{call, h};
  start_stream_head(head, s, ends_of_all(s, h));
  const Ends ends = ends_of_table(s, h);
  const ScanTable<double> table = table_of(s, h);
  Scratch scratch(int64_t(sizeof(ScanChunk)) + 4 * (s.layout.panels() + 1) +
                      kScanChunk * (kScanChunk + s.width + 1) * 8,
                  5);
  ScanChunk& chunk = *scratch.take<ScanChunk>(1);
  int32_t* start = scratch.take<int32_t>(s.layout.panels() + 1);
  double* weight = scratch.take<double>(kScanChunk * kScanChunk);
  const RowSums<double> sums{scratch.take<double>(kScanChunk * s.width), s.width,
                             scratch.take<double>(kScanChunk)};
  for (int64_t c = 0; c < head.chunks; ++c) {
    chunk.read(head, c);
    chunk.sort(s.layout, start);
    set_zero(sums.data, chunk.rows * s.width);
    set_zero(sums.z, kScanChunk);
    read_table(head, table, ends, chunk, start, basis, weight, sums);
    for (int64_t i = 0; i < chunk.rows; ++i) {
      sums.z[i] += add_waiting(s, h, chunk.t[i], chunk.top[i], sums[i]);
      write_row(call, h, chunk.first + i, chunk.t[i], chunk.top[i], sums[i], sums.z[i]);
    }
  }
}

// A chunk has rows and keys, which nobody reads here.
static Attention as_tokens(Attention call) {
  call.n_q = call.n_k;
  call.query = call.key;
  return call;
}
static Attention as_queries(Attention call) {
  call.n_k = 0;
  call.key = call.query;
  return call;
}

// Nothing waits then, also if there are no new tokens.
void stream_append(const Attention& tokens, const Stream& s) {
  const Attention call = as_tokens(tokens);
  fold(s, call.heads);
  if (call.n_k > 0) for_heads(call.heads, [&](int64_t h) { append_some(call, s, h); });
}

// out and lse of the queries over all tokens so far.
void stream_query(const Attention& queries, const Stream& s) {
  const Attention call = as_queries(queries);
  const ScanBasis<double>& basis = basis_of(s.layout);
  if (call.n_q > 0) for_heads(call.heads, [&](int64_t h) { query_some(call, s, h, basis); });
}

// One token and its query. The token waits, and the table is only read, but when the room is full.
static void step_one(const Attention& call, const Attention& asked, const Stream& s) {
  // Numbers to read; a step of a few heads takes no longer than it takes to wake a thread.
  constexpr int64_t kAlone = 1 << 17;
  if (*s.waiting == kStreamRoom) fold(s, call.heads);
  const ScanBasis<double>& basis = basis_of(s.layout);
  const int64_t at = *s.waiting;
  *s.waiting = at + 1;
  const auto step = [&](int64_t h) {
    read_column(call.key, h, 0, 1, s.keys + h * kStreamRoom + at);
    double* value = s.values + (h * kStreamRoom + at) * s.width;
    read_block(call.value, h, 0, 0, 1, call.dv, value, 0, 1);
    query_one(asked, s, h, basis);
  };
  const int64_t work = call.heads * (s.layout.nodes + kStreamRoom) * s.width;
  work < kAlone ? serial(call.heads, step) : for_heads(call.heads, step);
}

// Both, one after the other.
void stream_step(const Attention& tokens, const Attention& queries, const Stream& s) {
  const Attention call = as_tokens(tokens), asked = as_queries(queries);
  if (call.n_k == 1 && asked.n_q == 1) return step_one(call, asked, s);
  stream_append(tokens, s);
  stream_query(queries, s);
}
