// Streaming attention over all pairs, any rank: O(n_q n_k) time, O(n) memory.
// Included inside an ISA's namespace.
//
// A task owns some query rows (forward) or some keys (backward) and streams the other side past
// them in tiles. Every result is summed by one task in one fixed order, so it is bitwise the same
// for any number of threads.

constexpr int64_t kRowSpan = 16;  // blocks of rows whose gradients are summed apart
constexpr int64_t kDistances = kRowBlock - 1 + kKeyBlock;  // of the pairs of a tile

// Logits that are exact must stay so: they may be ties.
template <class T>
using RowSoftmax = OnlineSoftmax<T, false>;

template <class T>
static void add_bool_mask(const uint8_t* mask, int64_t stride, int64_t count, bool allowed, T* to) {
  for (int64_t j = 0; j < count; ++j)
    to[j] = (mask[j * stride] != 0) == allowed ? to[j] : T(-INFINITY);
}

// A logit that a mask hides is -inf, whatever its key holds.
template <class T>
BOLTZATTN_INLINE T add_bias(T score, T bias) {
  return bias == T(-INFINITY) ? bias : score + bias;
}

// Everything that forbids or shifts logits of the tile (first_row, first_key).
//
// What is hidden does not count, whatever it holds. A key that key_mask hides is read as 0. A key
// that is hidden from some rows only, by is_causal or attn_mask, has weight 0 there, but
// 0 * NaN = NaN; so where a tile holds NaN or infinity its visible pairs are added up one by one.
template <class T>
struct TileMask {
  const Attention& call;
  int64_t h;
  T* key_bias;       // [kKeyBlock]
  T* row_bias;       // [kKeyBlock]
  T* distance_bias;  // [kDistances]: slope times distance
  double* distance;  // [kDistances]: -|i - j| of the pairs of the last tile, see distances_of_row
  double slope;

  TileMask(const Attention& call_, int64_t h_, Scratch& scratch)
      : call(call_),
        h(h_),
        key_bias(scratch.take<T>(kKeyBlock)),
        row_bias(scratch.take<T>(kKeyBlock)),
        distance_bias(scratch.take<T>(kDistances)),
        distance(scratch.take<double>(kDistances)),
        slope(call_.slopes ? static_cast<double*>(call_.slopes.data)[call_.slopes.head[h_]] : 0) {}

  // What the constructor takes.
  static constexpr int64_t kBytes =
      int64_t(sizeof(T)) * (2 * kKeyBlock + kDistances) + int64_t(sizeof(double)) * kDistances;
  static constexpr int64_t kPieces = 4;

  void start_keys(int64_t first_key, int64_t keys) {
    const Matrix& m = call.key_mask;
    if (!m) return;
    for (int64_t j = 0; j < keys; ++j) key_bias[j] = 0;
    if (m.dtype == DType::kBool) {
      add_bool_mask(static_cast<const uint8_t*>(m.data) + m.head[h] + first_key * m.column,
                    m.column, keys, false, key_bias);
    } else {
      read_block(m, h, 0, first_key, 1, keys, key_bias, 0, 1);
    }
  }

  // A tile has few distances, and those of a row lie next to each other, by key.
  static int64_t distances_of_row(int64_t i) { return kRowBlock - 1 - i; }

  void find_distances(int64_t first_row, int64_t first_key, int64_t width) {
    const int64_t at_first = first_key - first_row - (kRowBlock - 1);
    for (int64_t c = 0; c < kRowBlock - 1 + width; ++c) {
      const int64_t gap = at_first + c;
      distance[c] = double(gap < 0 ? gap : -gap);
      distance_bias[c] = T(slope * distance[c]);
    }
  }

  void apply(int64_t first_row, int64_t rows, int64_t first_key, int64_t keys, T* scores) {
    const Matrix& m = call.attn_mask;
    if (call.slopes) find_distances(first_row, first_key, width_of<T>(keys));
    for (int64_t i = 0; i < rows; ++i) {
      T* row = scores + i * kKeyBlock;
      if (call.slopes) {
        // Added to each other first: a sum with a large score rounds more.
        const T* bias = distance_bias + distances_of_row(i);
        for (int64_t j = 0; j < keys; ++j)
          row[j] = add_bias(row[j], call.key_mask ? add_bias(bias[j], key_bias[j]) : bias[j]);
      } else if (call.key_mask) {
        for (int64_t j = 0; j < keys; ++j) row[j] = add_bias(row[j], key_bias[j]);
      }
      if (m && m.dtype == DType::kBool) {
        const int64_t at = m.head[h] + (first_row + i) * m.row + first_key * m.column;
        add_bool_mask(static_cast<const uint8_t*>(m.data) + at, m.column, keys, true, row);
      } else if (m) {
        read_block(m, h, first_row + i, first_key, 1, keys, row_bias, 0, 1);
        for (int64_t j = 0; j < keys; ++j) row[j] = add_bias(row[j], row_bias[j]);
      }
      if (call.is_causal)
        for (int64_t j = first_row + i + 1 - first_key; j < keys; ++j)
          if (j >= 0) row[j] = T(-INFINITY);
      for (int64_t j = keys; j < width_of<T>(keys); ++j) row[j] = T(-INFINITY);
    }
  }

  // Calls visit(j) for the keys of the tile that are hidden from all rows.
  template <class Visit>
  void for_hidden_keys(int64_t keys, Visit visit) const {
    for (int64_t j = 0; call.key_mask && j < keys; ++j)
      if (key_bias[j] == T(-INFINITY)) visit(j);
  }

  // Whether some pairs of the tile may be hidden while their keys are not.
  bool hides_pairs(int64_t first_row, int64_t first_key, int64_t keys) const {
    return call.attn_mask || (call.is_causal && first_key + keys > first_row + 1);
  }
  bool hides_pair(int64_t row, int64_t key) const {
    const Matrix& m = call.attn_mask;
    if (!m) return call.is_causal && key > row;
    if (m.dtype == DType::kBool)
      return !static_cast<const uint8_t*>(m.data)[m.head[h] + row * m.row + key * m.column];
    T bias;
    read_block(m, h, row, key, 1, 1, &bias, 0, 0);
    return bias == T(-INFINITY);
  }
  // Calls visit(i, j) for the visible pairs of a tile.
  template <class Visit>
  void for_visible_pairs(int64_t first_row, int64_t rows, int64_t first_key, int64_t keys,
                         Visit visit) const {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < keys; ++j)
        if (!hides_pair(first_row + i, first_key + j)) visit(i, j);
  }
};

// Which weights of a head survive dropout.
struct Dropout {
  uint64_t threshold;
  double factor;
  uint32_t stream;

  Dropout(const Attention& call, int64_t h)
      : threshold(dropout_threshold(call.dropout_p)),
        factor(dropout_factor(call.dropout_p)),
        stream(0) {
    if (call.seed)
      stream = dropout_stream(static_cast<const uint64_t*>(call.seed.data)[call.seed.head[h]]);
  }

  explicit operator bool() const { return threshold != 0; }

  // Multiplies `count` weights of row i from key j on by 0 or `factor`.
  template <class T>
  void apply(int64_t i, int64_t j, int64_t count, const T* from, T* to) const {
    const uint32_t row = dropout_row(stream, i);
    for (int64_t c = 0; c < count; ++c)
      to[c] = dropout_draw(row, j + c) >= threshold ? from[c] * T(factor) : T(0);
  }
};

// The largest score of a row.
template <class T>
BOLTZATTN_INLINE T top_of_row(const T* row, int64_t width) {
  constexpr int L = kLanes<T>;
  Vec<T> top = load(row);
#pragma GCC unroll 4
  for (int64_t j = L; j < width; j += L) top = larger<T>(load(row + j), top);
  return reduce_max<T>(top);
}

// scores -> unnormalised weights, in place. A running sum of a whole tile would round kKeyBlock / L
// times relative to all of it, so few vectors are summed at a time.
template <class T>
BOLTZATTN_INLINE void weigh_row(RowSoftmax<T>& state, T* row, int64_t width) {
  constexpr int L = kLanes<T>;
  constexpr int64_t kAtOnce = 8 * L;
  const T reference = state.reference();
  Vec<T> total{};
  for (int64_t first = 0; first < width; first += kAtOnce) {
    const int64_t end = least(width, first + kAtOnce);
    Vec<T> sum{};
#pragma GCC unroll 4
    for (int64_t j = first; j < end; j += L) {
      const Vec<T> weight = exp2_of((load(row + j) - reference) * T(kLog2e));
      store(row + j, weight);
      sum += weight;
    }
    total += sum;
  }
  state.sum += double(reduce_sum<T>(total));
}

template <class T>
static void direct_forward_rows(const Attention& call, int64_t h, int64_t first_row,
                                int64_t row_end) {
  const Panels<T> value_tile{call.dv, kKeyBlock};
  const Panels<T> sums{call.dv, row_end - first_row};
  const int64_t rows = sums.rows;
  Scratch scratch(
      int64_t(sizeof(T)) * (round_up(rows, kTileRows) * call.rank +
                            kKeyBlock * (call.rank + kRowBlock) + value_tile.size() + sums.size()) +
          rows * int64_t(sizeof(RowSoftmax<T>)) + TileMask<T>::kBytes,
      6 + TileMask<T>::kPieces);
  T* q = scratch.take<T>(round_up(rows, kTileRows) * call.rank);
  T* k = scratch.take<T>(call.rank * kKeyBlock);
  T* v = scratch.take<T>(value_tile.size());
  T* scores = scratch.take<T>(kRowBlock * kKeyBlock);
  T* sum = scratch.take<T>(sums.size());
  auto* state = scratch.take<RowSoftmax<T>>(rows);
  TileMask<T> mask(call, h, scratch);
  const Dropout dropout(call, h);
  const Scores<T> score(call);

  read_queries(call, h, first_row, rows, q);
  set_zero(sum, sums.size());
  for (int64_t i = 0; i < rows; ++i) state[i] = {};

  const int64_t key_end = call.is_causal ? least(call.n_k, row_end) : call.n_k;
  for (int64_t key = 0; key < key_end; key += kKeyBlock) {
    const int64_t keys = least(kKeyBlock, key_end - key), width = width_of<T>(keys);
    read_keys(call, h, key, keys, k);
    value_tile.read(call.value, h, key, keys, v);
    mask.start_keys(key, keys);
    mask.for_hidden_keys(keys, [&](int64_t j) {
      for (int64_t c = 0; c < call.dv; ++c) v[value_tile.at(j, c)] = 0;
    });
    const bool odd = mask.hides_pairs(first_row, key, keys) && !all_finite(v, value_tile.size());
    for (int64_t block = 0; block < rows; block += kRowBlock) {
      const int64_t here = least(kRowBlock, rows - block), row = first_row + block;
      if (call.is_causal && row + here <= key) continue;
      pause_point();
      score(here, width, q + block * call.rank, k, scores);
      mask.apply(row, here, key, keys, scores);
      // First all maxima, then all weights: the weights of a row depend on its own maximum only, so
      // rows overlap.
      for (int64_t i = 0; i < here; ++i) {
        const T factor = state[block + i].raise(top_of_row(scores + i * kKeyBlock, width));
        if (factor != T(1)) sums.multiply_row(sum, block + i, factor);
      }
      for (int64_t i = 0; i < here; ++i) {
        weigh_row(state[block + i], scores + i * kKeyBlock, width);
        if (dropout)
          dropout.apply(row + i, key, width, scores + i * kKeyBlock, scores + i * kKeyBlock);
      }
      if (odd && mask.hides_pairs(row, key, keys)) {
        mask.for_visible_pairs(row, here, key, keys, [&](int64_t i, int64_t j) {
          for (int64_t c = 0; c < call.dv; ++c)
            sum[sums.at(block + i, c)] += scores[i * kKeyBlock + j] * v[value_tile.at(j, c)];
        });
        continue;
      }
      for (int64_t p = 0; p < sums.count(); ++p)
        gemm<T, true>(here, sums.vectors(p), keys, {scores, kKeyBlock, 1}, v + value_tile.offset(p),
                      kPanelWidth<T>, sum + sums.offset(p) + block * kPanelWidth<T>,
                      kPanelWidth<T>);
    }
  }

  for (int64_t i = 0; i < rows; ++i) {
    lse_of(call, h)[first_row + i] = state[i].lse();
    sums.multiply_row(sum, i, state[i].normaliser());
  }
  sums.write(sum, rows, call.out, h, first_row);
}

// Only heads `first_head` to `head_end`: the transform passes on single heads it cannot serve.
template <class T>
void direct_forward_heads(const Attention& call, int64_t first_head, int64_t head_end) {
  const int64_t heads = head_end - first_head;
  // Rows of one task share the packing of keys and values, so tasks are as large as threads can
  // share evenly. A row's result does not depend on the rows beside it.
  const int64_t even = ceil_div(heads * call.n_q, 4 * thread_count());
  const int64_t rows = least(most(round_up(even, kTileRows), kRowBlock), 12 * kRowBlock);
  const int64_t blocks = ceil_div(call.n_q, rows);
  parallel(heads * blocks, [&](int64_t task) {
    const int64_t h = first_head + task / blocks, first = task % blocks * rows;
    direct_forward_rows<T>(call, h, first, least(first + rows, call.n_q));
  });
}

template <class T>
void direct_forward(const Attention& call) {
  direct_forward_heads<T>(call, 0, call.heads);
}
