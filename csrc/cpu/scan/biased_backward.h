// Gradients of a scan with biases. Included inside an ISA's namespace.
//
// With P_ij the weights, g the gradient of out, delta_i = g_i . out_i - grad_lse_i and
// dS_ij = P_ij (g_i . v_j - delta_i), whose sum over the keys is grad_lse_i:
//   dt_i = sum_j dS_ij s_j,   ds_j = sum_i dS_ij t_i,   dv_j = sum_i P_ij g_i,
//   dc_j = sum_i dS_ij,       dslope = -sum_ij dS_ij (i - j).
// Rows first, by a scan with a table of (s_j - mean) v_j: an error of delta_i counts for dt_i as
// far as the row's keys are from the mean. Then keys, by a scan from the end to the start with a
// table over later rows,
//   G[a] = sum_i l_a(t_i) exp(reference - lse_i) (g_i, delta_i),
// where the reference of a panel is the smallest lse of its rows so far, so no weight overflows.
// Keys read it by q_a = G[a] . v_j - (its last column), times exp(t_a s_j + c_j - reference): once
// for dc, and times t_a for ds. Distances have a table of their own, (i - end of the chunk) times
// the terms of G: as sum_j j dc_j minus sum_i i grad_lse_i they would be lost in rounding errors.

template <class T>
struct BiasedBackward {
  const AttentionGradient& g;
  const BiasedHead& head;
  const Attention& call = g.call;
  const int64_t h = head.h;
  const Lagrange<T> basis{head.nodes};
  const int64_t features_count = head.features();
  const bool with_slopes = bool(g.grad_slopes);
  int64_t begin = 0, columns = 0, width = 0;
  const int64_t padded = head.padded;
  Buffer<double> dt{padded}, ds{padded}, dc{padded};
  Buffer<double> delta{padded};
  Buffer<double> lse{padded};  // as the logits of the row's chunk, in units of ln 2
  double by_distance = 0;      // sum_ij dS_ij (i - j)
  double odd = 0;              // NaN if a result is not finite

  // Scratch; each pass takes what it needs.
  struct Work {
    Scratch scratch;
    BiasedChunk& chunk;
    int32_t* start;                 // [panels + 1]
    T *weight, *sloped;             // [kScanChunk][kScanChunk]
    T *values, *grads, *outs, *dv;  // [kScanChunk][width]
    T* transposed;                  // [width][kScanChunk]: values
    T* pulls;                       // [nodes][kScanChunk]: q_a of a panel
    BiasedFeatures<T> features;
    ScanTable<T> table, distances;

    Work(const BiasedHead& head, int64_t width)
        : scratch(int64_t(sizeof(BiasedChunk)) + 4 * (head.panels + 1) +
                      kScanChunk * int64_t(sizeof(T)) * (2 * kScanChunk + 5 * width + head.nodes) +
                      BiasedFeatures<T>::bytes(head) +
                      2 * ScanTable<T>::bytes(head.features(), width),
                  10 + BiasedFeatures<T>::kPieces + 2 * ScanTable<T>::kPieces),
          chunk(*scratch.take<BiasedChunk>(1)),
          start(scratch.take<int32_t>(head.panels + 1)),
          weight(scratch.take<T>(kScanChunk * kScanChunk)),
          sloped(scratch.take<T>(kScanChunk * kScanChunk)),
          values(scratch.take<T>(kScanChunk * width)),
          grads(scratch.take<T>(kScanChunk * width)),
          outs(scratch.take<T>(kScanChunk * width)),
          dv(scratch.take<T>(kScanChunk * width)),
          transposed(scratch.take<T>(width * kScanChunk)),
          pulls(scratch.take<T>(head.nodes * kScanChunk)),
          features(head, scratch),
          table(head.features(), width, scratch),
          distances(head.features(), width, scratch) {}
  };

  ChunkRows<T> rows_of(const Matrix& m, const BiasedChunk& chunk, T* block) const {
    return {m, h, chunk.first, chunk.rows, nullptr, begin, columns, block};
  }
  ChunkRows<T> values_of(const BiasedChunk& chunk, T* block) const {
    return {call.value, h, chunk.first, chunk.keys, chunk.key_tokens(call), begin, columns, block};
  }
  double grad_lse(int64_t i) const {
    double x = 0;
    if (g.grad_lse && begin == 0) read_block(g.grad_lse, h, i, 0, 1, 1, &x, 0, 0);
    return x;
  }

  // ---- rows ----

  void find_lse() {
    const double* given = lse_of(call, h);
    for (int64_t i = 0; i < call.n_q; ++i) {
      const double x = given[i] - head.of_row(head.t.data[i]);
      lse.data[i] = (x + head.slope * double(i % kScanChunk)) * kLog2e;
      if (given[i] != -INFINITY) odd += given[i] * 0;
    }
  }

  void scan_rows() {
    Work work(head, width);
    BiasedChunk& chunk = work.chunk;
    work.table.start();
    work.features.start(head, -INFINITY);
    for (int64_t c = 0; c < head.chunks; ++c) {
      pause_point();
      if (c > 0) work.features.move(head, double(kScanChunk));
      chunk.read(head, c, work.start);
      const ChunkRows<T> grads = rows_of(g.grad_out, chunk, work.grads);
      const ChunkRows<T> outs = rows_of(call.out, chunk, work.outs);
      for (int64_t i = 0; i < chunk.rows; ++i) {
        Vec<T> sum{};
        for (int64_t k = 0; k < width; k += kLanes<T>)
          sum += load(grads[i] + k) * load(outs[i] + k);
        delta.data[chunk.first + i] = double(reduce_sum<T>(sum)) - grad_lse(chunk.first + i);
      }
      read_rows(work, grads);
      if (chunk.keys == 0) continue;
      work.features.compute(head, chunk, true, [&](int p) { return head.last_row.data[p] > c; });
      // Weights of keys, times the keys.
      T key[kScanChunk];
      for (int64_t j = 0; j < kScanChunk; ++j) key[j] = T(chunk.key[j] - head.mean);
      for (int i = 0; i < work.features.count; ++i) {
        T* line = work.features.weight + i * kScanChunk;
        for (int64_t j = 0; j < chunk.keys; j += kLanes<T>)
          store(line + j, load(line + j) * load(key + j));
      }
      const ChunkRows<T> values = values_of(chunk, work.values);
      work.features.add_to(work.table, chunk.keys, [=](int j, int64_t column) BOLTZATTN_INLINED {
        return load(values[j] + column);
      });
    }
  }

  // Adds to dt what rows have from the keys of earlier chunks.
  void read_rows(Work& work, const ChunkRows<T>& grads) {
    const BiasedChunk& chunk = work.chunk;
    const double* reference = work.features.reference;
    for (int p = 0; p < head.panels; ++p) {
      BiasedRows<T> panel;
      if (reference[p] == -INFINITY || !panel.weigh(chunk, work.start, p, reference[p],
                                                    lse.data + chunk.first, basis, work.weight))
        continue;
      const int64_t node = int64_t(p) * head.nodes;
      const int32_t* order = panel.order;
      T part[kScanChunk];
      double dots[kScanChunk] = {};
      panel.dot(work.weight, work.table.z + node, head.nodes, part);
      panel.read(work.weight, work.table.node(node), width, head.nodes,
                 [=, &dots](int v, int k, auto& sum) BOLTZATTN_INLINED {
                   const T* grad = grads[order[k]] + v * kLanes<T>;
                   Vec<T> product{};
                   for (auto& x : sum) product += x * load(grad), grad += kLanes<T>;
                   dots[k] += double(reduce_sum<T>(product));
                 });
      for (int64_t k = 0; k < panel.rows; ++k) {
        const int64_t row = chunk.first + order[k];
        dt.data[row] += dots[k] - delta.data[row] * double(part[k]);
      }
    }
  }

  // ---- keys ----

  void scan_keys() {
    Work work(head, width);
    BiasedChunk& chunk = work.chunk;
    work.table.start();
    work.distances.start();
    work.features.start(head, INFINITY);
    for (int64_t c = head.chunks - 1; c >= 0; --c) {
      pause_point();
      work.features.move(head, -double(kScanChunk));
      chunk.read(head, c, work.start);
      const ChunkRows<T> values = values_of(chunk, work.values);
      const ChunkRows<T> grads = rows_of(g.grad_out, chunk, work.grads);
      double of_bias[kScanChunk] = {}, of_keys[kScanChunk] = {};
      set_zero(work.dv, chunk.keys * width);
      if (chunk.keys > 0) {
        set_zero(work.transposed, width * kScanChunk);
        for (int64_t j = 0; j < chunk.keys; ++j)
          for (int64_t k = 0; k < width; ++k) work.transposed[k * kScanChunk + j] = values[j][k];
        work.features.compute(head, chunk, false,
                              [&](int p) { return work.features.reference[p] != INFINITY; });
        read_keys(work, of_bias, of_keys);
        add_pairs(work, grads, of_bias, of_keys);
      }
      write_keys(work, of_bias, of_keys);
      add_rows(work, grads);
    }
  }

  // Adds what the keys of a chunk have from the rows of later chunks.
  void read_keys(Work& work, double* of_bias, double* of_keys) {
    constexpr int L = kLanes<T>;
    const BiasedChunk& chunk = work.chunk;
    const BiasedFeatures<T>& at = work.features;
    const ScanTable<T>& table = work.table;
    if (at.count == 0) return;
    const int64_t row = width, keys = round_up(chunk.keys, L);
    T* dv = work.dv;
    product<T>(
        int(chunk.keys), int(width / L), at.count, Strided<T>{at.weight, 1, kScanChunk},
        [=](int v, int i, auto& line)
            BOLTZATTN_INLINED { load(table.node(at.node[i]) + v * L, line); },
        [=](int v, int j, auto& sum) BOLTZATTN_INLINED { store(dv + j * row + v * L, sum); });
    double distances = 0;
    for (int first = 0; first < at.count; first += head.nodes) {
      const int64_t node = at.node[first];
      const double middle = head.panel_middle(int(node / head.nodes));
      // pulls[a][j] = G[a] . v_j
      const auto pull = [&](const ScanTable<T>& from) {
        gemm<T, false>(head.nodes, keys / L, width, {from.node(node), width, 1}, work.transposed,
                       kScanChunk, work.pulls, kScanChunk);
      };
      pull(table);
      for (int64_t j = 0; j < keys; j += L) {
        Vec<T> sum{}, sloped{};
        for (int a = 0; a < head.nodes; ++a) {
          const Vec<T> x = load(at.weight + (first + a) * kScanChunk + j) *
                           (load(work.pulls + a * kScanChunk + j) - T(table.z[node + a]));
          sum += x;
          sloped += x * T(head.node(a));
        }
        for (int u = 0; u < L; ++u) {
          of_bias[j + u] += double(sum[u]);
          of_keys[j + u] += double(sum[u]) * middle + double(sloped[u]);
        }
      }
      if (!with_slopes) continue;
      pull(work.distances);
      for (int a = 0; a < head.nodes; ++a) {
        const T of_rows = T(work.distances.z[node + a]);
        Vec<T> sum{};
        for (int64_t j = 0; j < keys; j += L)
          sum += load(at.weight + (first + a) * kScanChunk + j) *
                 (load(work.pulls + a * kScanChunk + j) - of_rows);
        distances += double(reduce_sum<T>(sum));
      }
    }
    // From the key to the end of the chunk, and from there to the row.
    for (int64_t j = 0; j < chunk.keys; ++j)
      distances += (double(kScanChunk) - chunk.position[j]) * of_bias[j];
    by_distance += distances;
  }

  // The pairs within a chunk.
  void add_pairs(Work& work, const ChunkRows<T>& grads, double* of_bias, double* of_keys) {
    constexpr int L = kLanes<T>;
    const BiasedChunk& chunk = work.chunk;
    double x[kScanChunk];
    for (int64_t i = 0; i < chunk.rows; i += kTileRows) {
      const int64_t rows = least(kTileRows, chunk.rows - i);
      gemm<T, false>(rows, ceil_div(chunk.seen[i + rows - 1], L), width, {grads[i], grads.row, 1},
                     work.transposed, kScanChunk, work.sloped + i * kScanChunk, kScanChunk);
    }
    for (int64_t i = 0; i < chunk.rows; ++i) {
      const int64_t row = chunk.first + i, seen = chunk.seen[i], end = round_up(seen, L);
      T* weight = work.weight + i * kScanChunk;
      T* sloped = work.sloped + i * kScanChunk;
      chunk.logits<T>(chunk.t[i], seen, x);
      powers_from(lse.data[row], x, end, weight);
      for (int64_t j = end; j < kScanChunk; j += L) store(weight + j, Vec<T>{});
      const T of_row = T(delta.data[row]);
      for (int64_t j = 0; j < end; j += L)
        store(sloped + j, load(weight + j) * (load(sloped + j) - of_row));
      const double t = head.t.data[row];
      double by_key = 0, by_position = 0;
      for (int64_t j = 0; j < seen; ++j) {
        const double one = double(sloped[j]);
        of_bias[j] += one;
        of_keys[j] += one * t;
        by_key += one * (chunk.key[j] - head.mean);
        by_position += one * (double(i) - chunk.position[j]);
      }
      dt.data[row] += by_key;
      by_distance += by_position;
    }
    // dv += weight^T g: row i counts for the keys that it sees
    for (int64_t j = 0; j < chunk.keys; j += kTileRows) {
      const int64_t count = least(kTileRows, chunk.keys - j);
      const int64_t first = chunk.token[j];  // rows before this one do not see the key
      gemm<T, true>(count, width / L, chunk.rows - first,
                    {work.weight + first * kScanChunk + j, 1, kScanChunk}, grads[first], grads.row,
                    work.dv + j * width, width);
    }
  }

  // Hidden keys have gradient 0.
  void write_keys(Work& work, const double* of_bias, const double* of_keys) {
    const BiasedChunk& chunk = work.chunk;
    const int64_t tokens = most(0, least(kScanChunk, call.n_k - chunk.first));
    Vec<T> strange{};
    for (int64_t i = 0; i < chunk.keys * width; i += kLanes<T>) strange += load(work.dv + i) * T(0);
    odd += double(reduce_sum<T>(strange));
    int64_t next = 0;
    T* zeros = work.outs;
    set_zero(zeros, width);
    for (int64_t j = 0; j < tokens; ++j) {
      const bool live = next < chunk.keys && chunk.token[next] == j;
      write_block(live ? work.dv + next * width : zeros, 0, 1, 1, columns, g.grad_value, h,
                  chunk.first + j, begin);
      if (!live) continue;
      dc.data[chunk.first + j] += of_bias[next];
      ds.data[chunk.first + j] += of_keys[next++];
    }
  }

  // Counts distances from the start of the chunk, and adds its rows.
  void add_rows(Work& work, const ChunkRows<T>& grads) {
    const BiasedChunk& chunk = work.chunk;
    const int64_t row = width;
    const ScanTable<T>&table = work.table, &distances = work.distances;
    if (with_slopes) {
      for (int i = 0; i < features_count * width; i += kLanes<double>)
        store(distances.sums + i,
              load(distances.sums + i) + load(table.sums + i) * double(kScanChunk));
      for (int64_t a = 0; a < features_count; ++a)
        distances.z[a] += table.z[a] * double(kScanChunk);
    }
    for (int p = 0; p < head.panels; ++p) {
      double& reference = work.features.reference[p];
      const int32_t* order = chunk.order + work.start[p];
      double smallest = reference;
      for (int64_t k = 0; k < work.start[p + 1] - work.start[p]; ++k) {
        const double one = lse.data[chunk.first + order[k]];
        if (one != -INFINITY && one < smallest) smallest = one;
      }
      const double moved = reference == smallest ? 1 : ::exp2(smallest - reference);
      reference = smallest;
      BiasedRows<T> panel;
      if (reference == INFINITY ||
          !panel.weigh(chunk, work.start, p, reference, lse.data + chunk.first, basis, work.weight))
        continue;
      const int64_t first = int64_t(p) * head.nodes;
      const auto add = [&](const ScanTable<T>& to) {
        for (int a = 0; a < head.nodes; ++a) {
          const T* line = work.weight + a * kScanChunk;
          double sum = 0;
          for (int64_t k = 0; k < panel.rows; ++k)
            sum += double(line[k]) * delta.data[chunk.first + order[k]];
          to.z[first + a] = to.z[first + a] * moved + sum;
        }
        const double* sums = to.sums;
        to.add(
            head.nodes, panel.rows, {work.weight, kScanChunk, 1},
            [=](int k, int64_t column) BOLTZATTN_INLINED { return load(grads[order[k]] + column); },
            [=](int i) { return first + i; },
            [=](int i, int64_t column)
                BOLTZATTN_INLINED { return load(sums + (first + i) * row + column) * moved; });
      };
      // Rows without a key have no weight.
      for (int64_t k = 0; k < panel.rows; ++k)
        if (lse.data[chunk.first + order[k]] == -INFINITY)
          for (int a = 0; a < head.nodes; ++a) work.weight[a * kScanChunk + k] = 0;
      add(table);
      if (!with_slopes) continue;
      for (int a = 0; a < head.nodes; ++a)
        for (int64_t k = 0; k < panel.rows; ++k) work.weight[a * kScanChunk + k] *= T(order[k]);
      add(distances);
    }
    if (with_slopes) distances.round();
  }

  // ---- results ----

  // Whether all results are finite.
  bool run() {
    for (Buffer<double>* one : {&dt, &ds, &dc}) set_zero(one->data, padded);
    find_lse();
    do {
      columns = least(kScanColumns, call.dv - begin);
      width = round_up(columns, kLanes<T>);
      scan_rows();
      scan_keys();
      begin += kScanColumns;
    } while (begin < call.dv);
    begin = 0;
    for (int64_t i = 0; i < call.n_q; ++i) {
      const double of_lse = lse.data[i] == -INFINITY ? 0 : grad_lse(i);
      dt.data[i] += of_lse * (head.mean + (call.is_gaussian ? -head.t.data[i] : head.middle));
    }
    for (int64_t j = 0; call.is_gaussian && j < padded; ++j)
      ds.data[j] -= head.key.data[j] * dc.data[j];
    odd += by_distance * 0;
    for (int64_t i = 0; i < padded; ++i) odd += (dt.data[i] + ds.data[i] + dc.data[i]) * 0;
    if (odd != 0) return false;
    const int64_t keys = least(call.n_k, padded);
    write_numbers<T>(dt.data, call.n_q, g.grad_query, h, head.query_factor);
    write_numbers<T>(ds.data, keys, g.grad_key, h, head.key_factor);
    if (g.grad_key_mask) {
      Matrix column = g.grad_key_mask;
      column.row = column.column;
      write_numbers<T>(dc.data, keys, column, h, 1);
      zero_columns(g.grad_key_mask, keys);
    }
    if (g.grad_slopes)
      static_cast<double*>(g.grad_slopes.data)[g.grad_slopes.head[h]] = -by_distance;
    zero_keys_from<T>(g, h, padded);
    return true;
  }
  void zero_columns(const Matrix& m, int64_t first) const {
    const T zero = 0;
    write_block(&zero, 0, 0, 1, call.n_k - first, m, h, 0, first);
  }
};

template <class T>
void biased_backward(const AttentionGradient& g) {
  for_biased_heads(
      g.call.heads,
      [&](int64_t h) {
        BiasedHead head{g.call, h};
        return head.prepare() && BiasedBackward<T>{g, head}.run();
      },
      [&](int64_t h) { direct_backward_heads<T>(g, h, h + 1); });
}
