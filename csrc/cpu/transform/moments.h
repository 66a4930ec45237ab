// The stage `moments`: sums of tokens' rows onto the nodes of their panels. Included inside an
// ISA's namespace.

// Sums the rows of a matrix over the panels of an axis: sums[panels][nodes][size]. The column after
// the last counts the keys, or sums `last`. also(panel, tile, first column, number
// of columns, weights, rows, their centre, one number per token, 0 at first) sees every block.
template <class T, class Also>
static void sum_over_panels(const Head<T>& head, bool keys, const Matrix& matrix, int64_t columns,
                            const Matrix* last, int64_t size, double* sums, Also also) {
  const Axis& axis = keys ? head.layout.key : head.layout.query;
  const int nodes = axis.nodes;
  const int64_t n = keys ? head.call.n_k : head.call.n_q;
  const int64_t table = int64_t(axis.panels) * nodes * size;
  const int64_t chunk = chunk_of(n), chunks = ceil_div(n, chunk);
  // Partial sums take at most a few megabytes for any layout.
  const int64_t most_parts = most(4, least(64, (int64_t(1) << 18) / table));
  const int64_t per_part = ceil_div(chunks, least(chunks, most_parts));
  const int64_t parts = ceil_div(chunks, per_part);
  Buffer<double> partial(parts * table);
  Buffer<T> zero(kColumns);
  set_zero(zero.data, kColumns);
  const Lagrange<T> basis(nodes);
  parallel(parts, [&](int64_t part) {
    double* to = partial.data + part * table;
    set_zero(to, table);
    Pass<T> pass(axis);
    for (int64_t c = part * per_part; c < least(chunks, (part + 1) * per_part); ++c) {
      const int64_t first = c * chunk, count = least(chunk, n - first);
      for_tiles(
          head, pass, keys, first, count, basis, [&](int panel, const Tile& tile, const T* weight) {
            double* target = to + int64_t(panel) * nodes * size;
            alignas(64) T number[kTile];
            for (int64_t i = 0; i < tile.tokens; ++i) number[i] = keys ? T(1) : T(0);
            if (last)
              for (int64_t i = 0; i < tile.tokens; ++i)
                read_column(*last, head.h, first + tile.order[i], 1, number + i);
            for (int64_t i = tile.tokens; i < round_up(tile.tokens, kLanes<T>); ++i) number[i] = 0;
            double dots[kTile] = {};
            for_blocks(columns, [&](int64_t begin, int64_t width) {
              const T* centre = keys ? head.raw_centre_of(panel) + begin : zero.data;
              const Rows<T> rows = read_rows(matrix, head.h, tile, begin, width, pass.block);
              sum_rows(nodes, tile.tokens, width, weight, rows, centre, target + begin, size);
              also(panel, tile, begin, width, weight, rows, centre, dots);
            });
            if (keys || last)
              for (int a = 0; a < nodes; ++a)
                target[a * size + columns] += double(dot(weight + a * kTile, number, tile.tokens));
          });
    }
  });
  // Part by part, so that the innermost loop runs along memory.
  const int64_t block = 1024, blocks = ceil_div(table, block);
  auto add = [&](int64_t b) {
    const int64_t first = b * block, end = least(table, first + block);
    set_zero(sums + first, end - first);
    for (int64_t part = 0; part < parts; ++part) {
      const double* from = partial.data + part * table;
      for (int64_t k = first; k < end; ++k) sums[k] += from[k];
    }
  };
  parts* blocks > 256 ? parallel(blocks, add) : serial(blocks, add);
}

// The values of the end keys, from which values are measured.
template <class T>
static void find_centres(Head<T>& head) {
  const int64_t row_size = head.row_size, raw_size = head.raw_size;
  head.clear_centres();
  Buffer<double> row(2 * raw_size);
  for (int end = 0; end < 2; ++end) {
    T* to = head.raw_centre.data + end * raw_size;
    read_block(head.call.value, head.h, head.end_key[end], 0, 1, head.columns, to, 0, 1);
    for (int64_t c = 0; c < head.columns; ++c) row.data[end * raw_size + c] = double(to[c]);
  }
  if (head.layer) {
    apply_weight(head, row.data, raw_size, 2, false, head.centre.data, row_size);
    add_to_centres(head, head.layer->weight_bias);
  } else {
    for (int end = 0; end < 2; ++end)
      for (int64_t c = 0; c < head.dv; ++c)
        head.centre.data[end * row_size + c] = row.data[end * raw_size + c];
  }
}

// Sums of v - centre of the key's own half.
template <class T>
static void sum_moments(Head<T>& head) {
  head.raw.resize(head.key_nodes() * head.raw_size);
  sum_over_panels(head, true, head.call.value, head.columns, nullptr, head.raw_size, head.raw.data,
                  [](auto...) {});
}

// A NaN or inf among the values would be lost if its key has no weight; dense softmax keeps it.
template <class T>
static bool finite_sums(const Head<T>& head) {
  return largest_of(head.raw.data, head.key_nodes() * head.raw_size) <= kLargestSum;
}

// From those sums to moments from either end.
template <class T>
static void measure_from_ends(Head<T>& head) {
  const int64_t rows = head.key_nodes(), dv = head.dv, row_size = head.row_size;
  head.keys_on.resize(head.layout.key.panels);
  set_zero(head.keys_on.data, head.layout.key.panels);
  for (auto& m : head.moments) m.resize(rows * row_size);
  if (head.layer)
    apply_weight(head, head.raw.data, head.raw_size, rows, false, head.moments[0].data, row_size);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t panel = r / head.layout.key.nodes;
    const int own = head.end_of_key_panel(panel);
    const double* raw = head.raw.data + r * head.raw_size;
    double* to[2] = {head.moments[0].data + r * row_size, head.moments[1].data + r * row_size};
    const double keys = raw[head.columns];
    if (!head.layer)
      for (int64_t c = 0; c < dv; ++c) to[0][c] = raw[c];
    to[0][dv] = keys;
    for (int64_t c = dv + 1; c < row_size; ++c) to[0][c] = 0;
    for (int64_t c = 0; c < row_size; ++c) to[1][c] = to[0][c];
    const double *from = head.centre_of(own), *other = head.centre_of(1 - own);
    for (int64_t c = 0; c < dv; ++c) to[1 - own][c] += keys * (from[c] - other[c]);
    head.keys_on.data[panel] += keys;
  }
}
