// Gradients of a scan. Included inside an ISA's namespace.
//
// With e_ij the weight of a pair relative to the row's top key, z_i = sum_j e_ij, P = e / z, g the
// gradient of out and delta_i = g_i . out_i - grad_lse_i:
//   dt_i = sum_j P_ij (s_j - o_i) (g_i . v_j - delta_i) + grad_lse_i o_i   for any o_i,
//   ds_j = sum_i P_ij t_i (g_i . v_j - delta_i),   dv_j = sum_i P_ij g_i.
// Rows first: z and the part of dt that comes from earlier chunks, by one scan with two tables, of
// v_j and of (s_j - o) v_j. Then keys, by a scan from the end to the start with a table over rows,
//   G[a] = sum_i l_a(t_i) exp(t_i (end - top_i)) / z_i (g_i, delta_i),
// which keys read by exp(t_a (s_j - end)). That pass does the pairs within a chunk, too.
//
// When one key takes all the weight of a row, g . v_j - delta is a small difference. So values are
// measured from a centre (see table.h), and delta_i is g_i . (out_i - centre) - grad_lse_i. Within
// a chunk rows have different top keys; there sum_j P_ij (g_i . v_j - delta_i) = grad_lse_i
// corrects delta_i. Everything is a sum over columns, so columns can be worked on in blocks.

// Scratch of a segment; each pass takes what it needs.
template <class T>
struct ScanBackwardWork {
  Scratch scratch;
  ScanChunk& chunk;
  int32_t* start;                 // [panels + 1]
  T *weight, *sloped;             // [kScanChunk][kScanChunk]
  T *values, *grads, *outs, *dv;  // [kScanChunk][width]
  T* transposed;                  // [width][kScanChunk]: values
  T* measured;                    // the same, from a centre
  T* node_sloped;                 // [nodes of a panel][kScanChunk]
  Centres<T> centres;
  Features<T> features;
  ScanTable<T> table, slopes;

  ScanBackwardWork(const ScanLayout& layout, int64_t begin, int64_t columns, int64_t width)
      : scratch(int64_t(sizeof(ScanChunk)) + 4 * (layout.panels() + 1) +
                    kScanChunk * int64_t(sizeof(T)) * (2 * kScanChunk + 6 * width + layout.nodes) +
                    Centres<T>::bytes(width) + Features<T>::bytes(layout) +
                    2 * ScanTable<T>::bytes(layout.features(), width),
                11 + Centres<T>::kPieces + Features<T>::kPieces + 2 * ScanTable<T>::kPieces),
        chunk(*scratch.take<ScanChunk>(1)),
        start(scratch.take<int32_t>(layout.panels() + 1)),
        weight(scratch.take<T>(kScanChunk * kScanChunk)),
        sloped(scratch.take<T>(kScanChunk * kScanChunk)),
        values(scratch.take<T>(kScanChunk * width)),
        grads(scratch.take<T>(kScanChunk * width)),
        outs(scratch.take<T>(kScanChunk * width)),
        dv(scratch.take<T>(kScanChunk * width)),
        transposed(scratch.take<T>(width * kScanChunk)),
        measured(scratch.take<T>(width * kScanChunk)),
        node_sloped(scratch.take<T>(layout.nodes * kScanChunk)),
        centres(begin, columns, width, scratch),
        features(layout, scratch),
        table(layout.features(), width, scratch),
        slopes(layout.features(), width, scratch) {}
};

template <class T>
struct ScanBackward {
  const AttentionGradient& g;
  ScanHead& head;
  const Attention& call = g.call;
  const ScanLayout& layout = head.layout;
  const int64_t h = head.h, segments = head.segments;
  const ScanBasis<T> basis{layout};
  const int64_t features = layout.features();
  const int64_t widest = round_up(least(kScanColumns, call.dv), kLanes<T>);
  int64_t begin = 0, columns = 0, width = 0;

  // Tables of segments and their last column, see `ScanForward`.
  Buffer<double> sums{segments * features * widest}, z{segments * features};
  Buffer<double> slope_sums{segments * features * widest}, slope_z{segments * features};
  // Of rows: z, and over earlier chunks sum_j e_ij (g . v_j - delta), the same times (s_j - top).
  const int64_t padded = head.chunks * kScanChunk;
  Buffer<double> row_z{padded}, row_sum{padded}, row_slope{padded};
  Buffer<double> dt{padded}, ds{padded};
  Buffer<double> odd{segments};  // NaN if a result is not finite

  double* sums_of(Buffer<double>& of, int64_t segment) const {
    return of.data + segment * features * width;
  }

  // `ahead`: kScanChunk, or its negative in passes from the end to the start.
  ChunkRows<T> rows_of(const Matrix& m, const ScanChunk& chunk, T* block, int64_t ahead) const {
    return {m, h, chunk.first, chunk.rows, nullptr, begin, columns, block, ahead};
  }
  ChunkRows<T> values_of(const ScanChunk& chunk, T* block, int64_t ahead) const {
    return {call.value, h,       chunk.first, chunk.keys, chunk.key_tokens(call),
            begin,      columns, block,       ahead};
  }
  double grad_lse(int64_t i) const {
    double x = 0;
    if (g.grad_lse && begin == 0) read_block(g.grad_lse, h, i, 0, 1, 1, &x, 0, 0);
    return x;
  }
  double dot(const T* a, const T* b) const {
    Vec<T> sum{};
    for (int64_t c = 0; c < width; c += kLanes<T>) sum += load(a + c) * load(b + c);
    return double(reduce_sum<T>(sum));
  }
  // grad . (x - centre)
  double dot_from(const T* centre, const T* grad, const T* x) const {
    Vec<T> sum{};
    for (int64_t c = 0; c < width; c += kLanes<T>)
      sum += load(grad + c) * (load(x + c) - load(centre + c));
    return double(reduce_sum<T>(sum));
  }
  // Where slopes are measured from: on the central panel the mean key, which is near the mean of
  // every row there.
  double origin_of(End end, const Ends& ends) const {
    return end == End::kMiddle ? head.mean : ends.at(end);
  }
  double origin_of_row(const ScanChunk& chunk, int64_t i) const {
    return chunk.panel[i] == 0 ? head.mean : chunk.top[i];
  }
  bool follow(Centres<T>& centres, const Ends& ends) const { return centres.follow(head, ends); }

  // ---- rows ----

  // Adds the rows of a chunk as far as they see the keys of the tables.
  void read_rows(ScanBackwardWork<T>& work, const Ends& ends, const ChunkRows<T>& grads,
                 const double* delta) {
    const ScanChunk& chunk = work.chunk;
    if (ends.none()) return;
    for (int p = 0; p < layout.panels(); ++p) {
      PanelRows<T> panel;
      if (!panel.weigh(layout, p, ends, chunk, work.start, basis, work.weight)) continue;
      const int64_t node = p * layout.nodes;
      const int32_t* order = panel.order;
      T z_part[kScanChunk], slope_part[kScanChunk];
      panel.dot(work.weight, work.table.z + node, layout.nodes, z_part);
      panel.dot(work.weight, work.slopes.z + node, layout.nodes, slope_part);
      double dots[2][kScanChunk] = {};
      const ScanTable<T>* tables[2] = {&work.table, &work.slopes};
      for (int which = 0; which < 2; ++which) {
        double* to = dots[which];
        panel.read(work.weight, tables[which]->node(node), width, layout.nodes,
                   [=](int v, int k, auto& sum) BOLTZATTN_INLINED {
                     const T* grad = grads[order[k]] + v * kLanes<T>;
                     Vec<T> product{};
                     for (auto& x : sum) product += x * load(grad), grad += kLanes<T>;
                     to[k] += double(reduce_sum<T>(product));
                   });
      }
      const double origin = origin_of(end_of(layout, p), ends);
      for (int64_t k = 0; k < panel.rows; ++k) {
        const int32_t i = order[k];
        const int64_t row = chunk.first + i;
        const double plain = dots[0][k] - delta[i] * double(z_part[k]);
        const double sloped = dots[1][k] - delta[i] * double(slope_part[k]);
        if (begin == 0) row_z.data[row] += double(z_part[k]);
        row_sum.data[row] += plain;
        row_slope.data[row] += sloped + (origin - origin_of_row(chunk, i)) * plain;
      }
    }
  }
  // Measured from the centres as they are.
  void find_delta(const ScanBackwardWork<T>& work, const ChunkRows<T>& grads,
                  const ChunkRows<T>& outs, double* delta) const {
    const ScanChunk& chunk = work.chunk;
    for (int64_t i = 0; i < chunk.rows; ++i)
      delta[i] = dot_from(work.centres.of(end_of(layout, chunk.panel[i])), grads[i], outs[i]) -
                 grad_lse(chunk.first + i);
  }

  void scan_rows(int64_t s) {
    ScanBackwardWork<T> work(layout, begin, columns, width);
    ScanChunk& chunk = work.chunk;
    follow(work.centres, head.before_segment(s));
    start_tables(work, s);
    head.for_chunks(s, [&](int64_t c) {
      chunk.read(head, c);
      chunk.sort(layout, work.start);
      const ChunkRows<T> grads = rows_of(g.grad_out, chunk, work.grads, kScanChunk);
      const ChunkRows<T> outs = rows_of(call.out, chunk, work.outs, kScanChunk);
      double delta[kScanChunk];
      find_delta(work, grads, outs, delta);
      if (begin == 0) weigh_pairs(chunk, head.unit, work.weight, row_z.data + chunk.first);
      for (int64_t i = 0; i < chunk.rows; ++i)
        row_sum.data[chunk.first + i] = row_slope.data[chunk.first + i] = 0;
      if (c > s * head.segment || s == 0) read_rows(work, chunk.before, grads, delta);
      add_chunk(work, c, true);
    });
    if (s + 1 < segments) save_tables(work, s);
  }
  // Tables of earlier shards, or empty ones. Values and keys of the former are measured from 0 and
  // from the ends; here they are measured from the centres and the origins.
  void start_tables(ScanBackwardWork<T>& work, int64_t s) const {
    if (s > 0 || !head.shard || !head.shard->slopes) {
      work.table.start();
      work.slopes.start();
      return;
    }
    start_from_earlier(head, work.centres, work.table);
    const Ends ends = head.earlier_ends();
    const double* from = head.of_shard(head.shard->table);
    const double* slope = head.of_shard(head.shard->slopes);
    for (int64_t a = 0; a < features; ++a, from += call.dv + 1, slope += call.dv + 1) {
      const End end = end_of(layout, int(a / layout.nodes));
      const T* centre = work.centres.of(end);
      const double by = ends.none() ? 0 : ends.at(end) - origin_of(end, ends);
      const double of_z = slope[call.dv] + by * from[call.dv];
      double* line = work.slopes.sums + a * width;
      for (int64_t c = 0; c < width; ++c)
        line[c] =
            c < columns ? slope[begin + c] + by * from[begin + c] - of_z * double(centre[c]) : 0;
      work.slopes.z[a] = of_z;
    }
    work.slopes.round();
  }
  void save_tables(const ScanBackwardWork<T>& work, int64_t s) {
    work.table.save(sums_of(sums, s), z.data + s * features);
    work.slopes.save(sums_of(slope_sums, s), slope_z.data + s * features);
  }
  // Adds the keys of a chunk to the tables.
  void add_chunk(ScanBackwardWork<T>& work, int64_t c, bool with_slopes) {
    const ScanChunk& chunk = work.chunk;
    if (chunk.keys == 0) return;
    const ChunkRows<T> values = values_of(chunk, work.values, kScanChunk);
    const T* shift = follow(work.centres, chunk.after) ? work.centres.shift : nullptr;
    work.features.compute(head, chunk, c);
    if (with_slopes) add_slopes(work, values, shift);
    work.table.add_keys(work.features, values, work.centres.value, chunk.keys, shift);
  }

  // Moves the slopes to the chunk's ends and adds its keys; before the table itself is moved:
  // sum (s_j - new) w = moved (sum (s_j - old) w + (old - new) sum w).
  void add_slopes(ScanBackwardWork<T>& work, const ChunkRows<T>& values, const T* shift) {
    const ScanChunk& chunk = work.chunk;
    const Features<T>& at = work.features;
    T gap[3][kScanChunk];
    double moved_by[3];
    for (const End end : {End::kMiddle, End::kHigh, End::kLow}) {
      const double from = origin_of(end, chunk.after);
      for (int64_t j = 0; j < kScanChunk; ++j) gap[int(end)][j] = T(chunk.key[j] - from);
      moved_by[int(end)] = chunk.before.none() ? 0 : origin_of(end, chunk.before) - from;
    }
    double by[kScanChunk];  // of a panel's nodes
    double* slope_z = work.slopes.z;
    const double *slope_sums = work.slopes.sums, *table_sums = work.table.sums,
                 *table_z = work.table.z;
    const int64_t row = width;
    for (int first = 0; first < at.count; first += layout.nodes) {
      const int32_t* node = at.node + first;
      const double* moved = at.moved + first;
      const End end = end_of(layout, int(node[0] / layout.nodes));
      T* sloped = work.node_sloped;
      for (int i = 0; i < layout.nodes; ++i) {
        const T* from = at.weight + (first + i) * kScanChunk;
        Vec<T> total{};
        for (int64_t j = 0; j < chunk.keys; j += kLanes<T>) {
          const Vec<T> x = load(from + j) * load(gap[int(end)] + j);
          store(sloped + i * kScanChunk + j, x);
          total += x;
        }
        by[i] = double(reduce_sum<T>(total));
      }
      const double moves = moved_by[int(end)];
      const ChunkValues<T> measured{values, work.centres.of(end)};
      const Strided<T> weights{sloped, kScanChunk, 1};
      const auto of_node = [=](int i) { return int64_t(node[i]); };
      const T* shifted = shift && end != End::kMiddle ? shift + int(end) * row : nullptr;
      if (moves == 0 && !shifted && chunk.before.at(end) == chunk.after.at(end))
        work.slopes.add(layout.nodes, chunk.keys, weights, measured, of_node,
                        [=](int i, int64_t column) BOLTZATTN_INLINED {
                          return load(slope_sums + node[i] * row + column);
                        });
      else
        work.slopes.add(layout.nodes, chunk.keys, weights, measured, of_node,
                        [=](int i, int64_t column) BOLTZATTN_INLINED {
                          const int64_t a = node[i], from = a * row + column;
                          Vec<double> x = load(slope_sums + from) + load(table_sums + from) * moves;
                          if (shifted)
                            x += widened(shifted + column) * (slope_z[a] + table_z[a] * moves);
                          return x * moved[i];
                        });
      for (int i = 0; i < layout.nodes; ++i)
        slope_z[node[i]] = (slope_z[node[i]] + table_z[node[i]] * moves) * moved[i] + by[i];
    }
  }

  // Makes the tables of each of the first `count` segments those of all segments up to it.
  void join_rows(int64_t count) {
    Scratch scratch(Centres<T>::bytes(width), Centres<T>::kPieces);
    Centres<T> centres(begin, columns, width, scratch);
    for (int64_t s = 1; s < count; ++s) {
      const Ends& old = head.before_segment(s);
      const Ends& now = head.before_segment(s + 1);
      if (old.none()) continue;
      follow(centres, old);
      const bool moved = follow(centres, now);
      for (int64_t a = 0; a < features; ++a) {
        const End end = end_of(layout, int(a / layout.nodes));
        const double factor = ::exp2(head.node.data[a] * (old.at(end) - now.at(end)));
        const double by = origin_of(end, old) - origin_of(end, now);
        const int64_t to = s * features + a, before = to - features;
        const double of_z = z.data[before], of_slope = slope_z.data[before];
        const T* shift = centres.shift + int(end) * width;
        for (int64_t c = 0; c < width; ++c) {
          const double shifted = moved ? double(shift[c]) : 0;
          const double sum = sums.data[before * width + c] + shifted * of_z;
          const double slope = slope_sums.data[before * width + c] + shifted * of_slope;
          slope_sums.data[to * width + c] += (slope + sum * by) * factor;
          sums.data[to * width + c] += sum * factor;
        }
        slope_z.data[to] += (of_slope + of_z * by) * factor;
        z.data[to] += of_z * factor;
      }
    }
  }
  void finish_rows(int64_t s) {
    ScanBackwardWork<T> work(layout, begin, columns, width);
    ScanChunk& chunk = work.chunk;
    const Ends& ends = head.before.data[s * head.segment];
    work.table.start(sums_of(sums, s - 1), z.data + (s - 1) * features);
    work.slopes.start(sums_of(slope_sums, s - 1), slope_z.data + (s - 1) * features);
    follow(work.centres, ends);
    head.for_chunks(s, [&](int64_t c) {
      chunk.read(head, c);
      chunk.sort(layout, work.start);
      const ChunkRows<T> grads = rows_of(g.grad_out, chunk, work.grads, kScanChunk);
      const ChunkRows<T> outs = rows_of(call.out, chunk, work.outs, kScanChunk);
      double delta[kScanChunk];
      find_delta(work, grads, outs, delta);
      read_rows(work, ends, grads, delta);
    });
  }

  // ---- keys ----

  // Adds the rows of a chunk to the table, which is measured from the ends before the chunk.
  void add_rows(ScanBackwardWork<T>& work, const ChunkRows<T>& grads, const ChunkRows<T>& outs) {
    const ScanChunk& chunk = work.chunk;
    if (chunk.before.none()) return;
    double delta[kScanChunk];
    find_delta(work, grads, outs, delta);
    for (int p = 0; p < layout.panels(); ++p) {
      PanelRows<T> panel;
      if (!panel.weigh(layout, p, chunk.before, chunk, work.start, basis, work.weight)) continue;
      const int32_t* order = panel.order;
      const int64_t first = p * layout.nodes, row = width;
      T inverse[kScanChunk];
      double of_row[kScanChunk];
      for (int64_t k = 0; k < panel.padded; ++k) {
        const int32_t i = order[k < panel.rows ? k : 0];
        inverse[k] = k < panel.rows ? T(1 / row_z.data[chunk.first + i]) : T(0);
        of_row[k] = delta[i];
      }
      for (int a = 0; a < layout.nodes; ++a) {
        T* line = work.weight + a * kScanChunk;
        for (int64_t k = 0; k < panel.padded; k += kLanes<T>)
          store(line + k, load(line + k) * load(inverse + k));
        double sum = 0;
        for (int64_t k = 0; k < panel.rows; ++k) sum += double(line[k]) * of_row[k];
        work.table.z[first + a] += sum;
      }
      const double* of_table = work.table.sums;
      work.table.add(
          layout.nodes, panel.rows, {work.weight, kScanChunk, 1},
          [=](int k, int64_t column) BOLTZATTN_INLINED { return load(grads[order[k]] + column); },
          [=](int i) { return first + i; },
          [=](int i, int64_t column)
              BOLTZATTN_INLINED { return load(of_table + (first + i) * row + column); });
    }
  }

  // Moves a row of a table over rows from the ends `old` to the earlier ends `now`; its delta is
  // measured from another centre, too, if `shift` is given.
  void move_node(int64_t a, const Ends& old, const Ends& now, const T* shift, double* of_sums,
                 double* of_z) const {
    const End end = end_of(layout, int(a / layout.nodes));
    const double factor = ::exp2(head.node.data[a] * (now.at(end) - old.at(end)));
    double moved = *of_z;
    if (shift) {
      shift += int(end) * width;
      for (int64_t c = 0; c < width; ++c) moved += of_sums[c] * double(shift[c]);
    }
    for (int64_t c = 0; c < width; ++c) of_sums[c] *= factor;
    *of_z = moved * factor;
  }
  void move_rows(ScanBackwardWork<T>& work, const Ends& old, const Ends& now) {
    if (now.none()) return;
    const T* shift = follow(work.centres, now) ? work.centres.shift : nullptr;
    if (!shift) return;  // the same keys
    for (int64_t a = 0; a < features; ++a) {
      double* line = work.table.sums + a * width;
      move_node(a, old, now, shift, line, work.table.z + a);
      for (int64_t c = 0; c < width; ++c) work.table.rounded[a * width + c] = T(line[c]);
    }
  }

  void sum_rows(int64_t s) {
    ScanBackwardWork<T> work(layout, begin, columns, width);
    ScanChunk& chunk = work.chunk;
    follow(work.centres, head.before_segment(s + 1));
    if (s + 1 < segments)
      work.table.start();
    else
      start_from_later(work);
    head.for_chunks_backwards(s, [&](int64_t c) {
      chunk.read(head, c);
      chunk.sort(layout, work.start);
      move_rows(work, head.before.data[c + 1], chunk.before);
      add_rows(work, rows_of(g.grad_out, chunk, work.grads, -kScanChunk),
               rows_of(call.out, chunk, work.outs, -kScanChunk));
    });
    work.table.save(sums_of(sums, s), z.data + s * features);
  }
  // Makes the table of each segment from `first` on that of all segments from it on.
  void join_keys(int64_t first) {
    Scratch scratch(Centres<T>::bytes(width) + width * 8, Centres<T>::kPieces + 1);
    Centres<T> centres(begin, columns, width, scratch);
    double* moved = scratch.take<double>(width);
    for (int64_t s = segments - 2; s >= first; --s) {
      const Ends& old = head.before_segment(s + 1);
      const Ends& now = head.before_segment(s);
      if (now.none()) continue;
      follow(centres, old);
      const T* shift = follow(centres, now) ? centres.shift : nullptr;
      for (int64_t a = 0; a < features; ++a) {
        const int64_t to = s * features + a, from = to + features;
        for (int64_t c = 0; c < width; ++c) moved[c] = sums.data[from * width + c];
        double moved_z = z.data[from];
        move_node(a, old, now, shift, moved, &moved_z);
        for (int64_t c = 0; c < width; ++c) sums.data[to * width + c] += moved[c];
        z.data[to] += moved_z;
      }
    }
  }

  void scan_keys(int64_t s) {
    ScanBackwardWork<T> work(layout, begin, columns, width);
    ScanChunk& chunk = work.chunk;
    follow(work.centres, head.before_segment(s + 1));
    if (s + 1 < segments)
      work.table.start(sums_of(sums, s + 1), z.data + (s + 1) * features);
    else
      start_from_later(work);
    head.for_chunks_backwards(s, [&](int64_t c) {
      chunk.read(head, c);
      chunk.sort(layout, work.start);
      const ChunkRows<T> values = values_of(chunk, work.values, -kScanChunk);
      const ChunkRows<T> grads = rows_of(g.grad_out, chunk, work.grads, -kScanChunk);
      const ChunkRows<T> outs = rows_of(call.out, chunk, work.outs, -kScanChunk);
      double of_keys[kScanChunk] = {};
      set_zero(work.dv, chunk.keys * width);
      const int64_t padded_keys = round_up(chunk.keys, kLanes<T>);
      for (int64_t c = 0; c < width; ++c)
        for (int64_t j = 0; j < padded_keys; ++j)
          work.transposed[c * kScanChunk + j] = j < chunk.keys ? values[j][c] : T(0);
      if (chunk.keys > 0) {
        work.features.compute(head, chunk, c);
        read_keys(work, of_keys);
      }
      add_pairs(work, grads, outs, of_keys);
      write_keys(work, of_keys, s);
      move_rows(work, chunk.after, chunk.before);
      add_rows(work, grads, outs);
    });
  }

  // The table over the rows of later shards, or an empty one. Its last column is -delta of all
  // columns together, measured from 0; the first block of columns gets it.
  void start_from_later(ScanBackwardWork<T>& work) const {
    work.table.start();
    if (!head.shard || !head.shard->later) return;
    const double* from = head.of_shard(head.shard->later);
    for (int64_t a = 0; a < features; ++a, from += call.dv + 1) {
      const T* centre = work.centres.of(end_of(layout, int(a / layout.nodes)));
      double delta = begin == 0 ? -from[call.dv] : 0;
      for (int64_t c = 0; c < columns; ++c) {
        work.table.sums[a * width + c] = from[begin + c];
        delta -= from[begin + c] * double(centre[c]);
      }
      work.table.z[a] = delta;
    }
    work.table.round();
  }

  // Adds what the keys of a chunk have from the rows of later chunks.
  void read_keys(ScanBackwardWork<T>& work, double* of_keys) {
    constexpr int L = kLanes<T>;
    const ScanChunk& chunk = work.chunk;
    const Features<T>& at = work.features;
    const ScanTable<T>& table = work.table;
    if (at.count == 0) return;
    const int64_t row = width;
    T* dv = work.dv;
    product<T>(
        int(chunk.keys), int(width / L), at.count, Strided<T>{at.weight, 1, kScanChunk},
        [=](int v, int i, auto& line)
            BOLTZATTN_INLINED { load(table.node(at.node[i]) + v * L, line); },
        [=](int v, int j, auto& sum) BOLTZATTN_INLINED { store(dv + j * row + v * L, sum); });
    for (int first = 0; first < at.count; first += layout.nodes)
      add_slopes_of_keys(work, first, of_keys);
  }

  // ds_j += sum_a t_a e_aj (G_a . (v_j - centre) - G_a^delta) over the nodes of a panel
  void add_slopes_of_keys(ScanBackwardWork<T>& work, int first, double* of_keys) {
    constexpr int L = kLanes<T>;
    const Features<T>& at = work.features;
    const int64_t keys = round_up(work.chunk.keys, L), node = at.node[first];
    const End end = end_of(layout, int(node / layout.nodes));
    if (first == at.first[int(end)]) {
      const T* centre = work.centres.of(end);
      for (int64_t c = 0; c < width; ++c)
        for (int64_t j = 0; j < keys; j += L) {
          const int64_t to = c * kScanChunk + j;
          store(work.measured + to, load(work.transposed + to) - centre[c]);
        }
    }
    const T *measured = work.measured, *weight = at.weight + first * kScanChunk;
    const double *z = work.table.z + node, *t = head.node.data + node;
    T sums[kScanChunk] = {};
    T* const to = sums;
    product<T>(
        layout.nodes, int(keys / L), int(width), Strided<T>{work.table.node(node), width, 1},
        [=](int v, int c, auto& line)
            BOLTZATTN_INLINED { load(measured + c * kScanChunk + v * L, line); },
        [=](int v, int a, auto& sum) BOLTZATTN_INLINED {
          const T factor = T(t[a] * kLn2), delta = T(z[a]);
          int64_t j = v * L;
          for (auto& x : sum) {
            const Vec<T> w = load(weight + a * kScanChunk + j) * factor;
            store(to + j, load(to + j) + w * (x - delta));
            j += L;
          }
        });
    for (int64_t j = 0; j < keys; j += kLanes<double>)
      store(of_keys + j, load(of_keys + j) + widened(sums + j));
  }

  // The pairs within a chunk.
  void add_pairs(ScanBackwardWork<T>& work, const ChunkRows<T>& grads, const ChunkRows<T>& outs,
                 double* of_keys) {
    constexpr int L = kLanes<T>;
    const ScanChunk& chunk = work.chunk;
    double z_of_pairs[kScanChunk], delta[kScanChunk];
    weigh_pairs(chunk, head.unit, work.weight, z_of_pairs);
    // Any delta will do, because it is corrected; this one is of the size of g . v_j.
    for (int64_t i = 0; i < chunk.rows; ++i)
      delta[i] = dot(grads[i], outs[i]) - grad_lse(chunk.first + i);
    const int64_t keys = round_up(chunk.keys, L);
    for (int64_t i = 0; i < chunk.rows; i += kTileRows) {
      const int64_t rows = least(kTileRows, chunk.rows - i);
      gemm<T, false>(rows, ceil_div(chunk.seen[i + rows - 1], L), width, {grads[i], grads.row, 1},
                     work.transposed, kScanChunk, work.sloped + i * kScanChunk, kScanChunk);
    }
    for (int64_t i = 0; i < chunk.rows; ++i) {
      const int64_t row = chunk.first + i, seen = chunk.seen[i];
      const double z_of_row = row_z.data[row];
      const bool seen_any = z_of_row > 0;
      const double inverse = seen_any ? 1 / z_of_row : 0;
      T* weight = work.weight + i * kScanChunk;
      T* sloped = work.sloped + i * kScanChunk;
      for (int64_t j = seen; j < keys; ++j) sloped[j] = 0;
      // delta, corrected so that the weighted sum over all keys is 0
      double sum = row_sum.data[row];
      Vec<T> of_pairs{};
      for (int64_t j = 0; j < seen; j += L) {
        const Vec<T> x = load(sloped + j) - T(delta[i]);
        store(sloped + j, x);
        of_pairs += x * load(weight + j);
      }
      sum = (sum + double(reduce_sum<T>(of_pairs))) * inverse;
      const double of_row = row_slope.data[row] * inverse;
      const double t = chunk.t[i], gl = seen_any ? grad_lse(row) : 0,
                   origin = origin_of_row(chunk, i);
      sum -= gl;
      for (int64_t j = 0; j < seen; j += L) {
        const Vec<T> w = load(weight + j) * T(inverse);
        store(weight + j, w);
        store(sloped + j, w * (load(sloped + j) - T(sum)));
      }
      Vec<double> of_seen{};
      for (int64_t j = 0; j < seen; j += kLanes<double>) {  // 0 for keys that are not seen
        const Vec<double> x = widened(sloped + j);
        of_seen += x * (load(chunk.key + j) - origin);
        store(of_keys + j, load(of_keys + j) + x * t);
      }
      dt.data[row] += of_row + reduce_sum<double>(of_seen) + gl * origin;
    }
    // dv += weight^T g: row i counts for the keys that it sees
    for (int64_t j = 0; j < chunk.keys; j += kTileRows) {
      const int64_t count = least(kTileRows, chunk.keys - j);
      const int64_t first = chunk.token[j];  // rows before this one do not see the key
      if (first >= chunk.rows) break;
      gemm<T, true>(count, width / L, chunk.rows - first,
                    {work.weight + first * kScanChunk + j, 1, kScanChunk}, grads[first], grads.row,
                    work.dv + j * width, width);
    }
  }

  // Masked keys, and those that no row sees, have gradient 0.
  void write_keys(ScanBackwardWork<T>& work, const double* of_keys, int64_t s) {
    const ScanChunk& chunk = work.chunk;
    const int64_t tokens = most(0, least(kScanChunk, call.n_k - chunk.first));
    Vec<T> strange{};
    for (int64_t i = 0; i < chunk.keys * width; i += kLanes<T>) strange += load(work.dv + i) * T(0);
    odd.data[s] += double(reduce_sum<T>(strange));
    int64_t next = 0;
    T* zeros = work.transposed;
    set_zero(zeros, width);
    for (int64_t j = 0; j < tokens; ++j) {
      const bool live = next < chunk.keys && chunk.token[next] == j;
      write_block(live ? work.dv + next * width : zeros, 0, 1, 1, columns, g.grad_value, h,
                  chunk.first + j, begin);
      if (live) ds.data[chunk.first + j] += of_keys[next++];
    }
  }

  // Calls body() for one block of columns after another.
  template <class Body>
  void for_columns(Body body) {
    for (begin = 0; begin < call.dv; begin += kScanColumns) {
      columns = least(kScanColumns, call.dv - begin);
      width = round_up(columns, kLanes<T>);
      body();
    }
  }

  // Whether all results are finite.
  bool run() {
    for (Buffer<double>* one : {&dt, &ds, &row_z}) set_zero(one->data, padded);
    set_zero(odd.data, segments);
    for_columns([&] {
      head.for_segments(0, [&](int64_t s) { scan_rows(s); });
      join_rows(segments - 1);
      head.for_segments(1, [&](int64_t s) { finish_rows(s); });
      head.for_segments(1, [&](int64_t s) { sum_rows(s); });
      join_keys(1);
      head.for_segments(0, [&](int64_t s) { scan_keys(s); });
    });
    double all = 0;
    for (int64_t s = 0; s < segments; ++s) all += odd.data[s];
    for (int64_t i = 0; i < padded; ++i) all += (dt.data[i] + ds.data[i]) * 0;
    // A shard has no other way to go.
    if (all != 0 && !head.shard) return false;
    write_numbers<T>(dt.data, call.n_q, g.grad_query, h, call.scale);
    write_numbers<T>(ds.data, least(call.n_k, padded), g.grad_key, h, 1);
    zero_keys_from<T>(g, h, padded);
    return true;
  }
};

template <class T>
void scan_backward(const AttentionGradient& g) {
  if (g.call.rank > 1) return tensor_backward<T>(g);
  if (g.call.is_biased() && g.call.n_q > 0) return biased_backward<T>(g);
  for_heads(g.call.heads, [&](int64_t h) {
    ScanHead head{g.call, h};
    if (head.chunks == 0 || !prepare(head) || !ScanBackward<T>{g, head}.run())
      direct_backward_heads<T>(g, h, h + 1);
  });
}
