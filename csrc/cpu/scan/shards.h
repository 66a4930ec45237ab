// Stages of a scan over one shard of causal sequences, between which machines exchange tables.
// Included inside an ISA's namespace.
//
// A shard is a segment of the scan. The caller adds up the tables of earlier shards and those of
// later ones (python/boltzattn/transform/scan_shards.py). In the tables that travel, values are
// measured from 0 and keys from the ends; while a shard sums and reads them, they are measured from
// the centres and the origins of slopes (table.h, backward.h). A head with numbers that are not
// finite is not served: the largest |value| of `shard_tables` tells, as NaN.

// Tables of the keys of a shard.
template <class T>
struct ShardSums : ScanBackward<T> {
  using Base = ScanBackward<T>;
  using Base::begin, Base::call, Base::columns, Base::features, Base::head, Base::layout,
      Base::segments, Base::width;

  void scan(int64_t s, bool with_slopes, double* largest) {
    ScanBackwardWork<T> work(layout, begin, columns, width);
    ScanChunk& chunk = work.chunk;
    work.table.start();
    work.slopes.start();
    this->follow(work.centres, head.before_segment(s));
    head.for_chunks(s, [&](int64_t c) {
      chunk.read(head, c);
      this->add_chunk(work, c, with_slopes);
      const ChunkRows<T> values = this->values_of(chunk, work.values, kScanChunk);
      Vec<T> most{};
      for (int64_t j = 0; j < chunk.keys; ++j)
        for (int64_t c = 0; c < width; c += kLanes<T>) {
          const Vec<T> x = load(values[j] + c);
          most = larger<T>(most, larger<T>(x, -x));
        }
      for (int u = 0; u < kLanes<T>; ++u) *largest = larger_of(*largest, double(most[u]));
    });
    this->save_tables(work, s);
  }

  void write(const Ends& ends, const ShardTables& to) {
    Scratch scratch(Centres<T>::bytes(width), Centres<T>::kPieces);
    Centres<T> centres(begin, columns, width, scratch);
    this->follow(centres, ends);
    double* values = to.centres + 2 * head.h * call.dv + begin;
    for (int64_t c = 0; c < columns; ++c) {
      values[c] = double(centres.of(End::kHigh)[c]);
      values[call.dv + c] = double(centres.of(End::kLow)[c]);
    }
    const double* sums = this->sums_of(this->sums, segments - 1);
    const double* slopes = this->sums_of(this->slope_sums, segments - 1);
    double* table = head.of_shard(to.table);
    double* slope_table = to.slopes ? head.of_shard(to.slopes) : nullptr;
    for (int64_t a = 0; a < features; ++a, table += call.dv + 1) {
      const End end = end_of(layout, int(a / layout.nodes));
      const T* centre = centres.of(end);
      const double z = this->z.data[(segments - 1) * features + a];
      for (int64_t c = 0; c < columns; ++c)
        table[begin + c] = sums[a * width + c] + z * double(centre[c]);
      table[call.dv] = z;
      if (!slope_table) continue;
      const double of_z = this->slope_z.data[(segments - 1) * features + a];
      const double by = this->origin_of(end, ends) - ends.at(end);
      double* line = slope_table + a * (call.dv + 1);
      for (int64_t c = 0; c < columns; ++c)
        line[begin + c] = slopes[a * width + c] + of_z * double(centre[c]) + by * table[begin + c];
      line[call.dv] = of_z + by * z;
    }
  }

  void run(const ShardTables& to) {
    const Ends& ends = head.before.data[head.chunks];
    if (ends.none()) return;
    Buffer<double> largest(segments);
    set_zero(largest.data, segments);
    this->for_columns([&] {
      head.for_segments(0, [&](int64_t s) { scan(s, to.slopes, largest.data + s); });
      this->join_rows(segments);
      write(ends, to);
    });
    double* keys = to.keys + 3 * head.h;
    keys[0] = double(head.count);
    keys[1] = head.mean * double(head.count);
    for (int64_t s = 0; s < segments; ++s) keys[2] = larger_of(keys[2], largest.data[s]);
    to.ends[2 * head.h] = ends.high;
    to.ends[2 * head.h + 1] = ends.low;
  }
};

// The table over the rows of a shard, for the keys of earlier ones.
template <class T>
struct ShardRows : ScanBackward<T> {
  using Base = ScanBackward<T>;
  using Base::begin, Base::call, Base::columns, Base::features, Base::head, Base::layout,
      Base::width;

  // z: that of the rows, from forward.
  void run(const double* z, double* to) {
    const Ends& ends = head.before.data[0];
    if (ends.none()) return;
    for (int64_t i = 0; i < call.n_q; ++i) this->row_z.data[i] = z[i];
    this->for_columns([&] {
      head.for_segments(0, [&](int64_t s) { this->sum_rows(s); });
      this->join_keys(0);
      Scratch scratch(Centres<T>::bytes(width), Centres<T>::kPieces);
      Centres<T> centres(begin, columns, width, scratch);
      this->follow(centres, ends);
      for (int64_t a = 0; a < features; ++a) {
        const T* centre = centres.of(end_of(layout, int(a / layout.nodes)));
        const double* from = this->sums.data + a * width;
        double* line = to + a * (call.dv + 1);
        double delta = this->z.data[a];
        for (int64_t c = 0; c < columns; ++c) {
          line[begin + c] = from[c];
          delta += from[c] * double(centre[c]);
        }
        line[call.dv] -= delta;
      }
    });
  }
};

// `to` is full of zeros, with the ends of no keys.
template <class T>
void shard_tables(const Attention& call, const ScanShard& shard, const ShardTables& to) {
  if (call.n_q == 0) return;
  for_heads(call.heads, [&](int64_t h) {
    ScanHead head{call, h, &shard};
    AttentionGradient g{};
    g.call = call;
    if (prepare(head))
      ShardSums<T>{{g, head}}.run(to);
    else
      to.keys[3 * h + 2] = NAN;
  });
}

template <class T>
void shard_forward(const Attention& call, const ScanShard& shard, double* z) {
  if (call.n_q == 0) return;
  for_heads(call.heads, [&](int64_t h) {
    ScanHead head{call, h, &shard};
    if (prepare(head)) {
      ScanForward<T>{head, z + h * call.n_q}.run();
      return;
    }
    zero_rows<T>(call.out, h, call.n_q, call.dv);
    for (int64_t i = 0; i < call.n_q; ++i) lse_of(call, h)[i] = z[h * call.n_q + i] = NAN;
  });
}

// `to` is full of zeros.
template <class T>
void shard_rows(const AttentionGradient& g, const ScanShard& shard, const double* z, double* to) {
  if (g.call.n_q == 0) return;
  for_heads(g.call.heads, [&](int64_t h) {
    ScanHead head{g.call, h, &shard};
    if (prepare(head)) ShardRows<T>{{g, head}}.run(z + h * g.call.n_q, head.of_shard(to));
  });
}

template <class T>
void shard_backward(const AttentionGradient& g, const ScanShard& shard) {
  if (g.call.n_q == 0) return;
  for_heads(g.call.heads, [&](int64_t h) {
    ScanHead head{g.call, h, &shard};
    if (prepare(head)) {
      ScanBackward<T>{g, head}.run();
      return;
    }
    zero_rows<T>(g.grad_query, h, g.call.n_q, 1);
    zero_rows<T>(g.grad_key, h, g.call.n_k, 1);
    zero_rows<T>(g.grad_value, h, g.call.n_k, g.call.dv);
  });
}
