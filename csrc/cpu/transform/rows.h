// Rows of values or gradients, read and written in the order of panels.
// Included inside an ISA's namespace.
//
// Rows that are vectors of T in memory are read and written in place; others are copied through a
// dense block.

constexpr int64_t kColumns = 256;  // columns that are worked on together, at most

// Tokens first + order[0], first + order[1], ...; the tokens of the next tiles follow in `order`.
struct Tile {
  int64_t first;
  const int32_t* order;  // [tokens + kTile] can be read
  int64_t tokens;
};

// Row i is data + order[i] * stride. Code that uses row i prefetches row i + kTile, because
// hardware prefetching does not work for random access.
template <class T>
struct Rows {
  T* data;
  const int32_t* order;
  int64_t stride;

  T* operator[](int64_t i) const { return data + order[i] * stride; }
};

// Rows of a block that follow each other.
template <class T>
static Rows<T> rows_of_block(T* block, int64_t row) {
  struct Counted {
    int32_t number[2 * kTile];
    constexpr Counted() : number() {
      for (int32_t i = 0; i < 2 * kTile; ++i) number[i] = i;
    }
  };
  static constexpr Counted counted;
  return {block, counted.number, row};
}

// Whether the rows of a tensor can be read and written as vectors of T.
template <class T>
BOLTZATTN_INLINE bool in_vectors(const Matrix& m, int64_t columns) {
  return m.dtype == (sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32) && m.column == 1 &&
         columns % kLanes<T> == 0;
}
template <class T>
BOLTZATTN_INLINE Rows<T> rows_in_place(const Matrix& m, int64_t h, const Tile& tile,
                                       int64_t begin) {
  return {static_cast<T*>(m.data) + m.head[h] + tile.first * m.row + begin, tile.order, m.row};
}

// Reads columns begin .. begin + columns of the tile's rows. Rows are padded with zeros to whole
// vectors.
template <class T>
static Rows<T> read_rows(const Matrix& m, int64_t h, const Tile& tile, int64_t begin,
                         int64_t columns, T* block) {
  if (in_vectors<T>(m, columns)) return rows_in_place<T>(m, h, tile, begin);
  const int64_t padded = round_up(columns, kLanes<T>);
  T* to = block;
  with_type(m, h, tile.first, begin, [&](auto* base) {
    for (int64_t i = 0; i < tile.tokens; ++i, to += padded) {
      const auto* from = base + tile.order[i] * m.row;
      if (m.column == 1) {
        const auto* later = base + tile.order[i + kTile] * m.row;
        for (int64_t c = 0; c < columns; c += kCacheLine / int64_t(sizeof(*later)))
          __builtin_prefetch(later + c, 0, 2);
        for (int64_t c = 0; c < columns; ++c) to[c] = widen<T>(from[c]);
      } else {
        for (int64_t c = 0; c < columns; ++c) to[c] = widen<T>(from[c * m.column]);
      }
      for (int64_t c = columns; c < padded; ++c) to[c] = 0;
    }
  });
  return rows_of_block(block, padded);
}

// How rows are written: stored, stored past the caches (for outputs larger than the caches), or
// added to the previous rows.
enum class Write { kStore, kStream, kAdd };

// Streaming needs whole cache lines and is faster for outputs larger than the caches.
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

// Writes the rows of a block to the tile's rows, converted.
template <class T>
static void scatter(const T* block, int64_t row, const Tile& tile, int64_t begin, int64_t columns,
                    const Matrix& m, int64_t h, Write write) {
  with_type(m, h, tile.first, begin, [&](auto* base) {
    // Results are fp64 if and only if the tensors are.
    if constexpr ((sizeof(*base) == 8) == (sizeof(T) == 8)) {
      const T* from = block;
      for (int64_t i = 0; i < tile.tokens; ++i, from += row) {
        auto* to = base + tile.order[i] * m.row;
        if (write == Write::kAdd) {
          for (int64_t c = 0; c < columns; ++c)
            narrow(from[c] + widen<T>(to[c * m.column]), to + c * m.column);
        } else if (m.column == 1) {
          for (int64_t c = 0; c < columns; ++c) narrow(from[c], to + c);
        } else {
          for (int64_t c = 0; c < columns; ++c) narrow(from[c], to + c * m.column);
        }
      }
    }
  });
}

// Calls compute(finish), where finish(v, i, sum) takes vectors v, v + 1, ... of the tile's row i,
// and writes columns begin .. begin + columns of the tile's rows.
template <class T, class Compute>
BOLTZATTN_INLINE void write_rows(const Matrix& m, int64_t h, const Tile& tile, int64_t begin,
                                 int64_t columns, Write write, T* block, Compute compute) {
  constexpr int L = kLanes<T>;
  if (in_vectors<T>(m, columns)) {
    const Rows<T> rows = rows_in_place<T>(m, h, tile, begin);
    if (write == Write::kStream) {
      compute([=](int v, int i, auto& sum) BOLTZATTN_INLINED {
        T* to = rows[i] + v * L;
        for (auto& x : sum) stream(to, x), to += L;
      });
      return;
    }
    compute([=](int v, int i, auto& sum) BOLTZATTN_INLINED {
      T* to = rows[i] + v * L;
      __builtin_prefetch(rows[i + kTile] + v * L, 1, 3);
      for (auto& x : sum) {
        store(to, write == Write::kStore ? x : x + load(to));
        to += L;
      }
    });
    return;
  }
  const int64_t padded = round_up(columns, L);
  compute([=](int v, int i, auto& sum)
              BOLTZATTN_INLINED { store(block + i * padded + v * L, sum); });
  scatter(block, padded, tile, begin, columns, m, h, write);
}

BOLTZATTN_INLINE void add_wide(double* to, Vec<double> x) {
  store(to, load(to) + x);
}
BOLTZATTN_INLINE void add_wide(double* to, Vec<float> x) {
  typedef float Half __attribute__((vector_size(sizeof(x) / 2)));
  Half half[2];
  __builtin_memcpy(half, &x, sizeof x);
  for (int k = 0; k < 2; ++k)
    add_wide(to + k * kLanes<double>, __builtin_convertvector(half[k], Vec<double>));
}

// to[nodes][size] += weights times (rows - centre), in whole vectors; padding adds 0.
template <class T>
static void sum_rows(int nodes, int64_t tokens, int64_t columns, const T* weight, Rows<T> rows,
                     const T* centre, double* to, int64_t size) {
  constexpr int L = kLanes<T>;
  const int64_t vectors = ceil_div(columns, L);
  for (int64_t first = 0; first < vectors; first += kPanel) {  // a line of each row at a time
    const int64_t c = first * L;
    product<T>(
        nodes, int(least(kPanel, vectors - first)), int(tokens), {weight, kTile, 1},
        [=](int v, int i, auto& line) BOLTZATTN_INLINED {
          int64_t at = c + v * L;
          __builtin_prefetch(rows[i + kTile] + at, 0, 2);
          for (auto& x : line) x = load(rows[i] + at) - load(centre + at), at += L;
        },
        [=](int v, int a, auto& sum) BOLTZATTN_INLINED {
          int64_t at = c + v * L;
          for (auto& x : sum) add_wide(to + a * size + at, x), at += L;
        });
  }
}

// Rows of transposed weights times a panel's table, handed to finish(v, i, sum).
template <class T, class Finish>
BOLTZATTN_INLINE void spread_table(int nodes, int64_t tokens, int64_t columns, const T* weight,
                                   const T* table, int64_t table_row, Finish finish) {
  constexpr int L = kLanes<T>;
  product<T>(
      int(tokens), int(ceil_div(columns, L)), nodes, {weight, 1, kTile},
      [=](int v, int a, auto& line)
          BOLTZATTN_INLINED { load(table + a * table_row + v * L, line); },
      finish);
}

// to[i] += (row i of that product) . (rows[i] - centre)
template <class T>
static void dot_with_table(int nodes, int64_t tokens, int64_t columns, const T* weight,
                           const T* table, int64_t table_row, Rows<T> rows, const T* centre,
                           double* to) {
  constexpr int L = kLanes<T>;
  Vec<T> dot[kTile];
  for (int64_t i = 0; i < tokens; ++i) dot[i] = Vec<T>{};
  spread_table(nodes, tokens, columns, weight, table, table_row,
               [=, &dot](int v, int i, auto& sum) BOLTZATTN_INLINED {
                 int64_t c = v * L;
                 for (auto& x : sum) dot[i] += x * (load(rows[i] + c) - load(centre + c)), c += L;
               });
  for (int64_t i = 0; i < tokens; ++i) to[i] += double(reduce_sum<T>(dot[i]));
}

template <class T>
BOLTZATTN_INLINE T dot(const T* a, const T* b, int64_t columns) {
  Vec<T> sum{};
  for (int64_t c = 0; c < columns; c += kLanes<T>) sum += load(a + c) * load(b + c);
  return reduce_sum<T>(sum);
}

template <class T>
static void fill_rows(const Matrix& m, int64_t h, int64_t rows, int64_t count, const T* row) {
  for (int64_t i = 0; i < rows; ++i) write_block(row, 0, 1, 1, count, m, h, i, 0);
}
template <class T>
static void zero_rows(const Matrix& m, int64_t h, int64_t rows, int64_t count) {
  Buffer<T> zero(count);
  set_zero(zero.data, count);
  fill_rows(m, h, rows, count, zero.data);
}
