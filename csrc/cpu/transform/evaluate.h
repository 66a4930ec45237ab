// The stage `evaluate`: results at the tokens from tables over the nodes. Included inside an ISA's
// namespace.

// A table in T, as the passes over tokens read it: [nodes][size], with the last column
// in an array of its own.
template <class T>
struct Table {
  int64_t size;
  Buffer<T> wide;
  Buffer<T> last;

  // offset_of(row): what is added to it, [count] numbers or none.
  template <class OffsetOf>
  Table(const double* from, int64_t from_size, int64_t rows, int64_t count, OffsetOf offset_of)
      : size(round_up(count, kLanes<T>)), wide(rows * size), last(rows) {
    for_parts(rows, 1024, [&](int64_t first, int64_t end) {
      for (int64_t r = first; r < end; ++r) {
        const double* row = from + r * from_size;
        T* to = wide.data + r * size;
        const double* offset = offset_of(r);
        if (offset) {
          for (int64_t c = 0; c < count; ++c) to[c] = T(row[c] + offset[c]);
        } else {
          for (int64_t c = 0; c < count; ++c) to[c] = T(row[c]);
        }
        for (int64_t c = count; c < size; ++c) to[c] = 0;
        last.data[r] = T(row[count]);
      }
    });
  }
  Table(const double* from, int64_t from_size, int64_t rows, int64_t count)
      : Table(from, from_size, rows, count, [](int64_t) { return (const double*)nullptr; }) {}
};

// to[token] = sum over nodes of weight[node][token] table[node]
template <class T>
static void blend(int nodes, int64_t tokens, const T* weight, const T* table, T* to) {
  constexpr int L = kLanes<T>;
  for (int64_t i = 0; i < round_up(tokens, L); i += L) {
    Vec<T> sum{};
    for (int a = 0; a < nodes; ++a) sum += load(weight + a * kTile + i) * table[a];
    store(to + i, sum);
  }
}

template <class T>
static void write_lse(const Head<T>& head, int panel, const Tile& tile, const T* weight,
                      const T* log_z, const double* t) {
  alignas(64) T blended[kTile];
  blend(head.layout.query.nodes, tile.tokens, weight, log_z, blended);
  const double reference = reference_key(head.layout, panel);
  double* lse = lse_of(head.call, head.h) + tile.first;
  for (int64_t i = 0; i < tile.tokens; ++i) {
    const int32_t token = tile.order[i];
    lse[token] = t[token] * reference + double(blended[i]);
  }
}

// No key, or no query: zeros, or the bias of a layer.
template <class T>
static void write_empty(const Head<T>& head) {
  const Attention& call = head.call;
  Buffer<T> bias(head.dv);
  set_zero(bias.data, head.dv);
  if (head.layer && head.layer->out_bias)
    read_block(head.layer->out_bias, head.h, 0, 0, 1, head.dv, bias.data, 0, 1);
  for (int64_t i = 0; call.lse && i < call.n_q; ++i) lse_of(call, head.h)[i] = -INFINITY;
  if (head.first_of_group()) fill_rows(call.out, head.h, call.n_q, head.dv, bias.data);
}

// out and lse.
template <class T>
static void evaluate(Head<T>& head) {
  if (head.empty()) return write_empty(head);
  const Attention& call = head.call;
  const int p = head.layout.query.nodes;
  const int64_t h = head.h, dv = head.dv;
  if (head.layer && head.first_of_group()) add_to_centres(head, head.layer->out_bias);
  const Table<T> table(head.node_out.data, head.row_size, head.query_nodes(), dv,
                       [&](int64_t r) { return head.centre_of(head.end_of_query_panel(r / p)); });
  const Write write =
      head.first_of_group() ? choose_write<T>(call.out, h, call.n_q, dv) : Write::kAdd;
  const Lagrange<T> basis(p);
  const int64_t chunk = chunk_of(call.n_q);
  parallel(ceil_div(call.n_q, chunk), [&](int64_t task) {
    const int64_t first = task * chunk, count = least(chunk, call.n_q - first);
    Pass<T> pass(head.layout.query);
    for_tiles(head, pass, false, first, count, basis,
              [&](int panel, const Tile& tile, const T* weight) {
                const T* rows = table.wide.data + int64_t(panel) * p * table.size;
                if (call.lse)
                  write_lse(head, panel, tile, weight, table.last.data + panel * p, pass.at.t);
                for_blocks(dv, [&](int64_t begin, int64_t width) {
                  write_rows(call.out, h, tile, begin, width, write, pass.block,
                             [&](auto finish) BOLTZATTN_INLINED {
                               spread_table(p, tile.tokens, width, weight, rows + begin, table.size,
                                            finish);
                             });
                });
              });
    if (write == Write::kStream) stream_end();
  });
}

template <class T>
static void zero_masked(const Head<T>& head, const AttentionGradient& g, int64_t first,
                        int64_t count) {
  uint8_t skip[kChunk];
  read_mask(head.call, head.h, first, count, skip);
  Buffer<T> zero(head.columns);
  set_zero(zero.data, head.columns);
  for (int64_t j = 0; j < count; ++j) {
    if (!skip[j]) continue;
    if (head.first_of_group())
      write_block(zero.data, 0, 1, 1, head.columns, g.grad_value, head.h, first + j, 0);
    write_block(zero.data, 0, 1, 1, 1, g.grad_key, head.h, first + j, 0);
  }
}

// The gradients of the values and of the keys, from tables [key nodes][size] over the columns of
// the tensor of values.
template <class T>
static void evaluate_keys(const Head<T>& head, const AttentionGradient& g,
                          const double* value_table, const double* slope_table, int64_t size) {
  const Attention& call = head.call;
  const int q = head.layout.key.nodes;
  const int64_t h = head.h, columns = head.columns;
  const Table<T> values(value_table, size, head.key_nodes(), columns);
  const Table<T> slopes(slope_table, size, head.key_nodes(), columns);
  const Write write =
      head.first_of_group() ? choose_write<T>(g.grad_value, h, call.n_k, columns) : Write::kAdd;
  const Lagrange<T> basis(q);
  const int64_t chunk = chunk_of(call.n_k);
  parallel(ceil_div(call.n_k, chunk), [&](int64_t task) {
    const int64_t first = task * chunk, count = least(chunk, call.n_k - first);
    Pass<T> pass(head.layout.key);
    if (call.key_mask) zero_masked(head, g, first, count);
    for_tiles(head, pass, true, first, count, basis,
              [&](int panel, const Tile& tile, const T* weight) {
                const int64_t table = int64_t(panel) * q * values.size;
                double ds[kTile] = {};
                for_blocks(columns, [&](int64_t begin, int64_t width) {
                  const Rows<T> rows = read_rows(call.value, h, tile, begin, width, pass.block);
                  dot_with_table(q, tile.tokens, width, weight, slopes.wide.data + table + begin,
                                 slopes.size, rows, head.raw_centre_of(panel) + begin, ds);
                  write_rows(g.grad_value, h, tile, begin, width, write, pass.block,
                             [&](auto finish) BOLTZATTN_INLINED {
                               spread_table(q, tile.tokens, width, weight,
                                            values.wide.data + table + begin, values.size, finish);
                             });
                });
                alignas(64) T rest[kTile];
                blend(q, tile.tokens, weight, slopes.last.data + panel * q, rest);
                for (int64_t i = 0; i < tile.tokens; ++i) {
                  const T dk = T(ds[i] + double(rest[i]));
                  write_block(&dk, 0, 0, 1, 1, g.grad_key, h, first + tile.order[i], 0);
                }
              });
    if (write == Write::kStream) stream_end();
  });
}
