// The wide side of the transform: tokens' rows of values, taken in the order of panels.
// Included inside an ISA's namespace.
//
// A tile of rows is gathered into a dense block (converted and measured from a centre on the way),
// multiplied there, and scattered back; so products see one layout whatever the tensor's.

constexpr int64_t kColumns = 256;  // columns that are worked on together, at most

// Tokens first + order[0], first + order[1], ...
struct Tile {
  int64_t first;
  const int32_t* order;
  int64_t tokens;
};

// Where a tensor's rows can be read and written as vectors of T.
template <class T>
BOLTZATTN_INLINE bool in_vectors(const Matrix& m, int64_t columns) {
  return m.dtype == (sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32) && m.column == 1 &&
         columns % kLanes<T> == 0;
}
// Rows of a block of this many columns are this far apart.
template <class T>
BOLTZATTN_INLINE int64_t block_row(int64_t columns) {
  return least(kColumns, round_up(columns, kLanes<T>));
}

// to[token][to_row] = columns begin .. begin + columns of the tile's rows, minus `centre`; what is
// missing to whole vectors becomes 0.
template <class T>
static void gather(const Matrix& m, int64_t h, const Tile& tile, int64_t begin, int64_t columns,
                   const T* centre, T* to, int64_t to_row) {
  if (in_vectors<T>(m, columns)) {
    const T* base = static_cast<const T*>(m.data) + m.head[h] + tile.first * m.row + begin;
    for (int64_t i = 0; i < tile.tokens; ++i, to += to_row) {
      const T* from = base + tile.order[i] * m.row;
#pragma GCC unroll 4
      for (int64_t c = 0; c < columns; c += kLanes<T>)
        store(to + c, load(from + c) - load(centre + c));
    }
    return;
  }
  const int64_t padded = round_up(columns, kLanes<T>);
  with_type(m, h, tile.first, begin, [&](auto* base) {
    for (int64_t i = 0; i < tile.tokens; ++i, to += to_row) {
      const auto* from = base + tile.order[i] * m.row;
      if (m.column == 1) {
        for (int64_t c = 0; c < columns; ++c) to[c] = widen<T>(from[c]) - centre[c];
      } else {
        for (int64_t c = 0; c < columns; ++c) to[c] = widen<T>(from[c * m.column]) - centre[c];
      }
      for (int64_t c = columns; c < padded; ++c) to[c] = 0;
    }
  });
}

// How a block is written: in place of what was there, past the caches (for outputs too large to
// stay in them anyway), or blended with it.
enum class Write { kStore, kStream, kBlend };

// By which factors a tile's old and new rows count where they are blended; 1 and 1 at first.
template <class T>
struct Shares {
  T kept[kTile], added[kTile];

  explicit Shares(int64_t tokens) {
    for (int64_t i = 0; i < tokens; ++i) kept[i] = added[i] = 1;
  }
  // Attention over more keys: *lse over those so far, `other` over the new ones.
  void join(int64_t i, double* lse, double other) {
    if (other == -INFINITY) {
      added[i] = 0;
      return;
    }
    const double top = *lse > other ? *lse : other;
    const double sum = ::exp(*lse - top) + ::exp(other - top);
    kept[i] = T(::exp(*lse - top) / sum);
    added[i] = T(::exp(other - top) / sum);
    *lse = top + ::log(sum);
  }
};

template <class T>
static void scatter(const T* from, int64_t from_row, const Tile& tile, int64_t begin,
                    int64_t columns, const Shares<T>& shares, const Matrix& m, int64_t h,
                    Write write) {
  constexpr int L = kLanes<T>;
  if (in_vectors<T>(m, columns)) {
    T* base = static_cast<T*>(m.data) + m.head[h] + tile.first * m.row + begin;
    for (int64_t i = 0; i < tile.tokens; ++i, from += from_row) {
      T* to = base + tile.order[i] * m.row;
      if (write == Write::kStore) {
        for (int64_t c = 0; c < columns; c += L) store(to + c, load(from + c));
      } else if (write == Write::kStream) {
        for (int64_t c = 0; c < columns; c += L) stream(to + c, load(from + c));
      } else {
        for (int64_t c = 0; c < columns; c += L)
          store(to + c, shares.added[i] * load(from + c) + shares.kept[i] * load(to + c));
      }
    }
    return;
  }
  with_type(m, h, tile.first, begin, [&](auto* base) {
    // fp64 results exist exactly where the tensors are fp64.
    if constexpr ((sizeof(*base) == 8) == (sizeof(T) == 8)) {
      for (int64_t i = 0; i < tile.tokens; ++i, from += from_row) {
        auto* to = base + tile.order[i] * m.row;
        if (write == Write::kBlend) {
          for (int64_t c = 0; c < columns; ++c)
            narrow(shares.added[i] * from[c] + shares.kept[i] * widen<T>(to[c * m.column]),
                   to + c * m.column);
        } else if (m.column == 1) {
          for (int64_t c = 0; c < columns; ++c) narrow(from[c], to + c);
        } else {
          for (int64_t c = 0; c < columns; ++c) narrow(from[c], to + c * m.column);
        }
      }
    }
  });
}

// Streaming needs whole cache lines; it pays for outputs larger than the caches.
constexpr int64_t kStreamBytes = 1 << 20;
template <class T>
static Write choose_write(const Matrix& m, int64_t h, int64_t rows, int64_t columns) {
  const int64_t row_bytes = columns * int64_t(sizeof(T));
  const T* base = static_cast<const T*>(m.data) + m.head[h];
  const bool aligned = reinterpret_cast<uintptr_t>(base) % kCacheLine == 0 &&
                       m.row * int64_t(sizeof(T)) % kCacheLine == 0 && row_bytes % kCacheLine == 0;
  return aligned && in_vectors<T>(m, columns) && rows * row_bytes >= kStreamBytes ? Write::kStream
                                                                                  : Write::kStore;
}

// Asks for part `part` of `parts` of the block that is needed next, long before it is: random
// access defeats the hardware's own guesses.
struct Ahead {
  const char* base = nullptr;  // of row tile.first, at the block's first column
  const int32_t* order = nullptr;
  int64_t tokens = 0;
  int64_t row_bytes = 0, block_bytes = 0;

  template <bool Writing>
  void fetch(int64_t part, int64_t parts) const {
    for (int64_t i = tokens * part / parts; i < tokens * (part + 1) / parts; ++i) {
      const char* row = base + order[i] * row_bytes;
      for (int64_t b = 0; b < block_bytes; b += kCacheLine)
        __builtin_prefetch(row + b, Writing, Writing ? 3 : 2);
    }
  }
};
BOLTZATTN_INLINE int64_t element_size(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}
static Ahead ahead_of(const Matrix& m, int64_t h, const Tile& tile, int64_t begin,
                      int64_t columns) {
  if (m.column != 1) return {};
  const int64_t size = element_size(m.dtype);
  const char* base = static_cast<const char*>(m.data);
  return {base + (m.head[h] + tile.first * m.row + begin) * size, tile.order, tile.tokens,
          m.row * size, least(columns - begin, kColumns) * size};
}

// block[nodes][row] = weights times rows[tokens][row]; fetches `ahead` meanwhile.
template <class T>
static void sum_rows(int nodes, int64_t tokens, int64_t columns, const T* weight, const T* rows,
                     int64_t row, const Ahead& ahead, T* block) {
  constexpr int L = kLanes<T>;
  const int64_t vectors = ceil_div(columns, L);
  for (int64_t v = 0; v < vectors; v += kPanel) {
    ahead.fetch<false>(v / kPanel, ceil_div(vectors, kPanel));
    gemm<T, false>(nodes, least(kPanel, vectors - v), tokens, {weight, kTile, 1}, rows + v * L, row,
                   block + v * L, row);
  }
}

// block[tokens][row] = transposed weights times a panel's table.
template <class T>
static void spread_table(int nodes, int64_t tokens, int64_t columns, const T* weight,
                         const T* table, int64_t table_row, T* block, int64_t row) {
  gemm<T, false>(tokens, ceil_div(columns, kLanes<T>), nodes, {weight, 1, kTile}, table, table_row,
                 block, row);
}

template <class T>
BOLTZATTN_INLINE T dot(const T* a, const T* b, int64_t columns) {
  Vec<T> sum{};
  for (int64_t c = 0; c < columns; c += kLanes<T>) sum += load(a + c) * load(b + c);
  return reduce_sum<T>(sum);
}
