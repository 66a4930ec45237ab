// The passes over tokens of a head with a bias: moments, evaluate, query_moments, and evaluate at
// the keys. Included inside an ISA's namespace.

// Sums over the tokens of every panel, sums[nodes][row_size], in fp64.
// each(panel, tile, coordinates, to[all nodes][row_size], scratch) adds a tile; tokens on no panel
// have the panel after the last.
template <class T, class Each>
static void sum_tiles(const Lookup<T>& head, bool keys, double* sums, Each each) {
  const int64_t panels = head.panels(keys), table = head.nodes(keys) * head.row_size;
  // Partial sums take at most a few megabytes.
  const Division division(panels, head.tokens(keys),
                          most(4, least(64, (int64_t(1) << 18) / table)));
  const int64_t parts = division.by_panel ? 1 : division.tasks;
  Buffer<double> partial(parts > 1 ? parts * table : 0);
  double* const base = parts > 1 ? partial.data : sums;
  set_all_zero(base, parts * table);
  for_all_tiles(
      head, keys, division,
      [&](int64_t task, int64_t p, const Tile& tile, const double* at, TileScratch<T>& scratch) {
        if (p > panels) return;
        each(p, tile, at, base + (parts > 1 ? task : 0) * table, scratch);
      });
  if (parts == 1) return;
  for_parts(table, 4096, [&](int64_t first, int64_t end) {
    set_zero(sums + first, end - first);
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t k = first; k < end; ++k) sums[k] += partial.data[part * table + k];
  });
}

// Whether no number exceeds what sums may be, and none is NaN.
static bool all_moderate(const double* x, int64_t size) {
  int odd = 0;
  for_parts(size, kPart, [&](int64_t first, int64_t end) {
    if (!(largest_of(x + first, end - first) <= kLargestSum))
      __atomic_store_n(&odd, 1, __ATOMIC_RELAXED);
  });
  return odd == 0;
}

// Column `column` of a panel's rows += sums of weight[node][token] x[token].
template <class T, class X>
static void add_column(int nodes, int64_t tokens, const T* weight, X x, double* to, int64_t size) {
  for (int a = 0; a < nodes; ++a) {
    double sum = 0;
    for (int64_t i = 0; i < tokens; ++i) sum += double(weight[a * kTile + i]) * x(i);
    to[a * size] += sum;
  }
}

// Sums of weights times (v, 1) at the key nodes; false if a value is not finite. (That of a key
// without weight would be lost, and dense softmax keeps it.)
template <class T>
static bool sum_key_moments(Lookup<T>& head) {
  const Attention& call = head.call;
  const int64_t panels = head.layout.key.size, size = head.row_size, dv = head.dv;
  head.key_centre.resize(panels * size);
  set_zero(head.key_centre.data, panels * size);
  for_parts(panels, 1024, [&](int64_t first, int64_t end) {
    for (int64_t p = first; p < end; ++p)
      read_block(call.value, head.h, head.layout.key[p].top, 0, 1, dv,
                 head.key_centre.data + p * size, 0, 1);
  });
  head.moments.resize(head.layout.key_node.size * size);
  int odd = 0;  // 1 if a value is not finite
  sum_tiles(
      head, true, head.moments.data,
      [&](int64_t p, const Tile& tile, const double*, double* sums, TileScratch<T>& scratch) {
        const TileWeights<T>& weights = scratch.weights;
        const auto look = [&](const T* row, int64_t width) {
          if (!all_finite(row, width)) __atomic_store_n(&odd, 1, __ATOMIC_RELAXED);
        };
        if (p == panels) {
          for_blocks(dv, [&](int64_t begin, int64_t width) {
            const Rows<T> rows = read_rows(call.value, head.h, tile, begin, width, scratch.block);
            for (int64_t i = 0; i < tile.tokens; ++i) look(rows[i], width);
          });
          return;
        }
        const KeyPanel& panel = head.layout.key[p];
        double* to = sums + panel.first_node * size;
        for_blocks(dv, [&](int64_t begin, int64_t width) {
          const Rows<T> rows = read_rows(call.value, head.h, tile, begin, width, scratch.block);
          if (!weights.direct)
            return sum_rows(panel.nodes, tile.tokens, width, weights.weight, rows,
                            head.key_centre.data + p * size + begin, to + begin, size);
          for (int64_t i = 0; i < tile.tokens; ++i) {
            if (weights.node[i] < 0) {
              look(rows[i], width);
              continue;
            }
            double* row = sums + weights.node[i] * size + begin;
            for (int64_t c = 0; c < width; ++c) row[c] += weights.factor[i] * double(rows[i][c]);
          }
        });
        if (!weights.direct)
          return add_column(
              panel.nodes, tile.tokens, weights.weight, [](int64_t) { return 1.0; }, to + dv, size);
        for (int64_t i = 0; i < tile.tokens; ++i)
          if (weights.node[i] >= 0) sums[weights.node[i] * size + dv] += weights.factor[i];
      });
  if (odd || !all_moderate(head.moments.data, head.layout.key_node.size * size)) return false;
  for (int64_t p = 0; p < panels; ++p) {  // from the centre to the values as they are
    const KeyPanel& panel = head.layout.key[p];
    const T* centre = head.key_centre.data + p * size;
    for (int64_t b = 0; b < panel.nodes && !panel.direct; ++b) {
      double* row = head.moments.data + (panel.first_node + b) * size;
      for (int64_t c = 0; c < dv; ++c) row[c] += row[dv] * double(centre[c]);
    }
  }
  return true;
}

// 1 / Z of the tokens of a tile, in T, and Z.
template <class T>
static void blend_z(const QueryPanel& panel, const Tile& tile, const T* weight, const T* node_z,
                    T* z, T* inverse) {
  blend(panel.nodes, tile.tokens, weight, node_z, z);
  for (int64_t i = 0; i < tile.tokens; ++i) inverse[i] = 1 / z[i];
}

template <class T>
static void evaluate_lookup(const Lookup<T>& head) {
  const Attention& call = head.call;
  const int64_t dv = head.dv, size = head.row_size, nodes = head.layout.query_node.size;
  const Table<T> table(head.node_out.data, size, nodes, dv);
  const Write write = choose_write<T>(call.out, head.h, call.n_q, dv);
  const int64_t panels = head.layout.query.size;
  double* lse = lse_of(call, head.h);
  for_all_tiles(
      head, false, Division(panels, call.n_q, INT64_MAX),
      [&](int64_t, int64_t p, const Tile& tile, const double* at, TileScratch<T>& scratch) {
        if (p >= panels) return;
        constexpr int L = kLanes<T>;
        const QueryPanel& panel = head.layout.query[p];
        const TileWeights<T>& weights = scratch.weights;
        const T* centre = head.query_centre.data + p * size;
        if (weights.direct) {
          for (int64_t i = 0; i < tile.tokens; ++i) {
            const int64_t token = tile.first + tile.order[i], node = weights.node[i];
            const double* row = head.node_out.data + node * size;
            lse[token] =
                ::log(row[dv]) + head.node_shift.data[node] + head.moved() * at[tile.order[i]];

            for_blocks(dv, [&](int64_t begin, int64_t width) {
              for (int64_t c = 0; c < width; ++c)
                scratch.block[c] = T(row[begin + c] / row[dv] + double(centre[begin + c]));
              write_block(scratch.block, 0, 1, 1, width, call.out, head.h, token, begin);
            });
          }
          return;
        }
        const T* weight = weights.weight;
        alignas(64) T z[kTile], inverse[kTile];
        blend_z(panel, tile, weight, table.last.data + panel.first_node, z, inverse);
        alignas(64) double log_z[kTile];
        for (int64_t i = 0; i < kTile; ++i) log_z[i] = i < tile.tokens ? double(z[i]) : 1;
        for (int64_t i = 0; i < tile.tokens; i += kLanes<double>)
          store(log_z + i, log_of(load(log_z + i)));
        for (int64_t i = 0; i < tile.tokens; ++i) {
          const int32_t token = tile.order[i];
          lse[tile.first + token] =
              log_z[i] + head.shift_at(panel, at[token]) + head.moved() * at[token];
        }
        for_blocks(dv, [&](int64_t begin, int64_t width) {
          write_rows(call.out, head.h, tile, begin, width, write, scratch.block,
                     [&](auto finish) BOLTZATTN_INLINED {
                       spread_table(panel.nodes, tile.tokens, width, weight,
                                    table.wide.data + panel.first_node * table.size + begin,
                                    table.size, [&](int v, int i, auto& sum) BOLTZATTN_INLINED {
                                      int64_t c = begin + v * L;
                                      for (auto& x : sum)
                                        x = x * inverse[i] + load(centre + c), c += L;
                                      finish(v, i, sum);
                                    });
                     });
        });
      });
}

// The gradient of the queries, and at the query nodes the sums of
// (dO_i, dlse_i - dO_i . (out_i - centre)) / Z_i: the gradients of N and Z.
template <class T>
static void sum_lookup_gradients(const Lookup<T>& head, const AttentionGradient& g,
                                 double* query_moments) {
  const int64_t dv = head.dv, size = head.row_size, nodes = head.layout.query_node.size;
  const Table<T> table(head.node_out.data, size, nodes, dv);
  const Table<T> slopes(head.node_slope.data, size, nodes, dv);
  Buffer<T> zero(kColumns);
  set_zero(zero.data, kColumns);
  sum_tiles(
      head, false, query_moments,
      [&](int64_t p, const Tile& tile, const double* at, double* sums, TileScratch<T>& scratch) {
        if (p == head.layout.query.size) return;
        const QueryPanel& panel = head.layout.query[p];
        const TileWeights<T>& weights = scratch.weights;
        double of_lse[kTile] = {}, by_out[kTile] = {}, by_slope[kTile] = {}, mean[kTile];
        for (int64_t i = 0; g.grad_lse && i < tile.tokens; ++i)
          read_column(g.grad_lse, head.h, tile.first + tile.order[i], 1, of_lse + i);
        alignas(64) T scaled[kMostNodes * kTile];
        if (!weights.direct) {
          alignas(64) T z[kTile], inverse[kTile], slope_z[kTile];
          const T* weight = weights.weight;
          blend_z(panel, tile, weight, table.last.data + panel.first_node, z, inverse);
          blend(panel.nodes, tile.tokens, weight, slopes.last.data + panel.first_node, slope_z);
          const int64_t padded = round_up(tile.tokens, kLanes<T>);
          for (int64_t i = tile.tokens; i < padded; ++i) inverse[i] = 0;
          for (int32_t a = 0; a < panel.nodes; ++a)
            for (int64_t i = 0; i < padded; ++i)
              scaled[a * kTile + i] = weight[a * kTile + i] * inverse[i];
          for (int64_t i = 0; i < tile.tokens; ++i)
            mean[i] = double(slope_z[i]) * double(inverse[i]);
        }
        for_blocks(dv, [&](int64_t begin, int64_t width) {
          const Rows<T> rows = read_rows(g.grad_out, head.h, tile, begin, width, scratch.block);
          if (!weights.direct) {
            const int64_t from = panel.first_node * table.size + begin;
            dot_with_table(panel.nodes, tile.tokens, width, scaled, table.wide.data + from,
                           table.size, rows, zero.data, by_out);
            dot_with_table(panel.nodes, tile.tokens, width, scaled, slopes.wide.data + from,
                           slopes.size, rows, zero.data, by_slope);
            return sum_rows(panel.nodes, tile.tokens, width, scaled, rows, zero.data,
                            sums + panel.first_node * size + begin, size);
          }
          for (int64_t i = 0; i < tile.tokens; ++i) {
            const int64_t at_node = weights.node[i] * size;
            const double* out = head.node_out.data + at_node;
            const double* slope = head.node_slope.data + at_node;
            const double inverse = 1 / out[dv];
            for (int64_t c = begin; c < begin + width; ++c) {
              const double x = double(rows[i][c - begin]) * inverse;
              by_out[i] += x * out[c];
              by_slope[i] += x * slope[c];
              sums[at_node + c] += x;
            }
            mean[i] = slope[dv];
          }
        });
        for (int64_t i = 0; i < tile.tokens; ++i) {
          // On a direct panel, slopes are those of out, and `mean` is the mean key itself.
          double dt = by_slope[i] - (weights.direct ? 0 : by_out[i] * mean[i]);
          const double own = head.layout.gauge * at[tile.order[i]];
          if (g.grad_lse)
            dt += of_lse[i] *
                  ((weights.direct ? mean[i] - own : (panel.mean - own) + mean[i]) + head.moved());

          const T dq = T(dt * head.query_coordinate.factor);
          write_block(&dq, 0, 0, 1, 1, g.grad_query, head.h, tile.first + tile.order[i], 0);
        }
        const auto last = [&](int64_t i) { return of_lse[i] - by_out[i]; };
        if (!weights.direct)
          return add_column(panel.nodes, tile.tokens, scaled, last,
                            sums + panel.first_node * size + dv, size);
        for (int64_t i = 0; i < tile.tokens; ++i) {
          const int64_t row = weights.node[i] * size + dv;
          sums[row] += last(i) / head.node_out.data[row];
        }
      });
}

// The gradients of keys, values and biases from tables over the key nodes. Column dv goes with
// values measured from the panel's centre; on direct panels with the values as they are.
template <class T>
static void evaluate_lookup_keys(const Lookup<T>& head, const AttentionGradient& g,
                                 const double* value_table, const double* slope_table) {
  const Attention& call = head.call;
  const int64_t dv = head.dv, size = head.row_size, nodes = head.layout.key_node.size;
  const int64_t panels = head.layout.key.size;
  const Table<T> values(value_table, size, nodes, dv), slopes(slope_table, size, nodes, dv);
  const Write write = choose_write<T>(g.grad_value, head.h, call.n_k, dv);
  const auto put = [&](int64_t token, double key, double bias) {
    const T of_key = T(key), of_bias = T(bias);
    write_block(&of_key, 0, 0, 1, 1, g.grad_key, head.h, token, 0);
    if (g.grad_key_mask) write_block(&of_bias, 0, 0, 1, 1, g.grad_key_mask, head.h, 0, token);
  };
  const auto put_zeros = [&](int64_t token, T* block) {
    put(token, 0, 0);
    set_zero(block, kColumns);
    for_blocks(dv, [&](int64_t begin, int64_t width) {
      write_block(block, 0, 1, 1, width, g.grad_value, head.h, token, begin);
    });
  };
  for_all_tiles(
      head, true, Division(panels, call.n_k, INT64_MAX),
      [&](int64_t, int64_t p, const Tile& tile, const double* at, TileScratch<T>& scratch) {
        const TileWeights<T>& weights = scratch.weights;
        T* const results = scratch.block + kColumns * kTile;
        if (p >= panels) {
          for (int64_t i = 0; i < tile.tokens; ++i) put_zeros(tile.first + tile.order[i], results);
          return;
        }
        const KeyPanel& panel = head.layout.key[p];
        const T* centre = head.key_centre.data + p * size;
        const int64_t from = panel.first_node * values.size;
        double by_bias[kTile] = {}, by_key[kTile] = {};
        for_blocks(dv, [&](int64_t begin, int64_t width) {
          const Rows<T> rows = read_rows(call.value, head.h, tile, begin, width, scratch.block);
          if (!weights.direct) {
            dot_with_table(panel.nodes, tile.tokens, width, weights.weight,
                           values.wide.data + from + begin, values.size, rows, centre + begin,
                           by_bias);
            dot_with_table(panel.nodes, tile.tokens, width, weights.weight,
                           slopes.wide.data + from + begin, slopes.size, rows, centre + begin,
                           by_key);
            return write_rows(g.grad_value, head.h, tile, begin, width, write, results,
                              [&](auto finish) BOLTZATTN_INLINED {
                                spread_table(panel.nodes, tile.tokens, width, weights.weight,
                                             values.wide.data + from + begin, values.size, finish);
                              });
          }
          for (int64_t i = 0; i < tile.tokens; ++i) {
            if (weights.node[i] < 0) continue;
            const double* value = value_table + weights.node[i] * size + begin;
            const double* slope = slope_table + weights.node[i] * size + begin;
            for (int64_t c = 0; c < width; ++c) {
              by_bias[i] += value[c] * double(rows[i][c]);
              by_key[i] += slope[c] * double(rows[i][c]);
              results[c] = T(value[c] * weights.factor[i]);
            }
            write_block(results, 0, 1, 1, width, g.grad_value, head.h, tile.first + tile.order[i],
                        begin);
          }
        });
        for (int64_t i = 0; i < tile.tokens; ++i) {
          const int64_t token = tile.first + tile.order[i];
          double bias = by_bias[i], slope = by_key[i];
          if (weights.direct && weights.node[i] < 0) {
            put_zeros(token, results);
            continue;
          }
          if (weights.direct) {
            const int64_t row = weights.node[i] * size + dv;
            bias = (bias + value_table[row]) * weights.factor[i];
            slope = (slope + slope_table[row]) * weights.factor[i];
            if (head.layout.gauge == 0) slope += panel.tilt * bias;
          } else {
            for (int32_t b = 0; b < panel.nodes; ++b) {
              const double w = double(weights.weight[b * kTile + i]);
              const int64_t row = (panel.first_node + b) * size + dv;
              bias += w * value_table[row];
              slope += w * slope_table[row];
            }
            slope += (panel.tilt - head.layout.gauge * at[tile.order[i]]) * bias;
          }
          put(token, slope * head.key_coordinate.factor, bias);
        }
      });
}
