// A head of the transform: what its stages hand to each other, and how they visit its tokens.
// docs/transform.md derives them. Included inside an ISA's namespace.
//
//   extents -> layout -> moments -> core -> evaluate;
//   for gradients query_moments -> adjoint -> evaluate at the keys.
//
// Tokens are handled in the arithmetic type T (fp32, or fp64 for fp64 tensors), in tiles of kTile:
// equal tokens round in step, so longer sums must be fp64. So are coordinates and the core. Chunks
// and the order of sums depend on sizes alone: results are bitwise the same for any number of
// threads.

template <class T>
struct Head {
  const Attention& call;
  const Layer* layer;  // none: plain attention
  const int64_t h;
  const int64_t dv;        // columns of the results
  const int64_t columns;   // of the tensor of values; another number than dv in a layer
  const int64_t row_size;  // of a row over dv + 1 columns, in fp64
  const int64_t raw_size;  // of a row over columns + 1
  Range range{};
  Layout layout{};
  double certificate = 0;

  // At low temperature the largest key (for t > 0) or the smallest takes all the weight, and what
  // gradients are made of, v_j - F, is a small difference. So values are measured from the value of
  // the end key on their half of the key axis, and F from that of the reference key of its panel.
  int64_t end_key[2]{};    // indices of the largest and the smallest key
  Buffer<T> raw_centre;    // [2][raw_size]: their rows of the tensor of values
  Buffer<double> centre;   // [2][row_size]: their values
  Buffer<double> raw;      // [key nodes][raw_size]: moments as summed; the last column counts keys
  Buffer<double> keys_on;  // [key panels]: their number

  Buffer<double> moments[2];  // measured from either end: [key nodes][row_size]
  Buffer<double> node_out;    // [query nodes][row_size]: F - centre, and log Z in column dv
  Buffer<double> node_slope;  // the same of scale F', and in column dv mean key - panel_mean
  Buffer<double> panel_mean;  // [query panels]: the mean key at the middle node of the panel
  Buffer<double> inverse_z;   // [query nodes]

  Head(const Attention& a, int64_t head, const Layer* of = nullptr)
      : call(a),
        layer(of),
        h(head),
        dv(a.dv),
        columns(of ? of->columns : a.dv),
        row_size(round_up(dv + 1, kLanes<T>)),
        raw_size(round_up(columns + 1, kLanes<T>)) {}

  void clear_centres() {
    raw_centre.resize(2 * raw_size);
    centre.resize(2 * row_size);
    set_zero(raw_centre.data, 2 * raw_size);
    set_zero(centre.data, 2 * row_size);
  }

  // 0: measured from the largest key, 1: from the smallest.
  int end_of_query_panel(int64_t panel) const {
    return reference_key(layout, int(panel)) == layout.s_max ? 0 : 1;
  }
  int end_of_key_panel(int64_t panel) const {
    return layout.key.origin + layout.key.half * (2 * panel + 1) >= 0 ? 0 : 1;
  }
  const T* raw_centre_of(int64_t key_panel) const {
    return raw_centre.data + end_of_key_panel(key_panel) * raw_size;
  }
  const double* centre_of(int end) const { return centre.data + end * row_size; }

  int64_t query_nodes() const { return int64_t(layout.query.panels) * layout.query.nodes; }
  int64_t key_nodes() const { return int64_t(layout.key.panels) * layout.key.nodes; }
  bool empty() const { return range.keys == 0 || call.n_q == 0; }
  // In a layer the first head of a group writes, and the others add.
  bool first_of_group() const { return !layer || h % layer->summed == 0; }
};

// Tokens of a chunk: small enough for several chunks per thread.
BOLTZATTN_INLINE int64_t chunk_of(int64_t n) {
  return least(kChunk, most(512, round_up(ceil_div(n, 8), 256)));
}

// Scratch of a pass over tokens: coordinates of a chunk, weights of a tile, a block of a tile's
// rows.
template <class T>
struct Pass {
  Scratch scratch;
  Coordinates& at;
  int32_t* start;
  double* place;
  T* weight;
  T* block;

  explicit Pass(const Axis& axis)
      : scratch(int64_t(sizeof(Coordinates)) + (axis.panels + 1) * 4 + kTile * 8 +
                    (kMostNodes + kColumns) * kTile * int64_t(sizeof(T)),
                5),
        at(*scratch.take<Coordinates>(1)),
        start(scratch.take<int32_t>(axis.panels + 1)),
        place(scratch.take<double>(kTile)),
        weight(scratch.take<T>(kMostNodes * kTile)),
        block(scratch.take<T>(kColumns * kTile)) {}
};

// Visits the tokens of a chunk in tiles that lie on one panel:
// visit(panel, tile, weights[node][kTile]).
template <class T, class Visit>
static void for_tiles(const Head<T>& head, Pass<T>& pass, bool keys, int64_t first, int64_t count,
                      const Lagrange<T>& basis, Visit visit) {
  const Attention& call = head.call;
  const Layout& layout = head.layout;
  const Axis& axis = keys ? layout.key : layout.query;
  Coordinates& at = pass.at;
  const bool masked = keys && call.key_mask;
  read_column(keys ? call.key : call.query, head.h, first, count, at.u);
  for (int64_t i = count; i < round_up(count, kLanes<double>); ++i) at.u[i] = layout.middle;
  if (masked) {
    read_mask(call, head.h, first, count, at.skip);
    // A masked key may be any number, even NaN: replace it by a harmless one.
    for (int64_t i = 0; i < count; ++i) at.u[i] = at.skip[i] ? layout.middle : at.u[i];
  }
  if (keys) {
    at.warp_keys(layout, count);
  } else {
    for (int64_t i = 0; i < count; ++i) at.t[i] = at.u[i] *= call.scale;
    at.warp_queries(layout, count);
  }
  at.locate(axis, count);
  at.sort(masked, count, axis.panels, pass.start);
  for (int p = 0; p < axis.panels; ++p) {
    for (int64_t i = pass.start[p]; i < pass.start[p + 1]; i += kTile) {
      const int64_t tokens = least(kTile, pass.start[p + 1] - i);
      const int32_t* order = at.order + i;
      for (int64_t k = 0; k < tokens; ++k) pass.place[k] = at.place[order[k]];
      const int64_t padded = round_up(tokens, kLanes<T>);
      for (int64_t k = tokens; k < padded; ++k) pass.place[k] = 0;
      basis.weigh(pass.place, padded, pass.weight);
      visit(p, Tile{first, order, tokens}, pass.weight);
    }
  }
}

// Visits columns in blocks: visit(first column, number of columns).
template <class Visit>
static void for_blocks(int64_t size, Visit visit) {
  for (int64_t begin = 0; begin < size; begin += kColumns)
    visit(begin, least(kColumns, size - begin));
}
