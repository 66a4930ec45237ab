// The wide side of the transform: tokens' rows of values, gathered in the order of panels.
// Included inside an ISA's namespace.
//
// A product either sums rows into the nodes of a panel (moments) or spreads a panel's table over
// rows (evaluate). Rows are addressed by pointers, so tokens are never copied just to be sorted.

constexpr int kNodeRows = 4;  // nodes, or tokens, of one register tile

// acc[kNodeRows][.] += sum over tokens of weight[.][token] (row[token] - centre)
template <class T, int Vectors, bool Centred>
BOLTZATTN_INLINE void moments_tile(int tokens, const T* weight, const T* const* rows,
                                   const T* centre, int64_t offset, T* acc, int64_t width) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[kNodeRows][Vectors];
#pragma GCC unroll 4
  for (int a = 0; a < kNodeRows; ++a)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sum[a][v] = load(acc + a * width + v * L);
  for (int i = 0; i < tokens; ++i) {
    const T* row = rows[i] + offset;
    Vec<T> line[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      line[v] = Centred ? load(row + v * L) - load(centre + offset + v * L) : load(row + v * L);
#pragma GCC unroll 4
    for (int a = 0; a < kNodeRows; ++a) {
      const Vec<T> x = splat(weight[a * kTile + i]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[a][v] += x * line[v];
    }
  }
#pragma GCC unroll 4
  for (int a = 0; a < kNodeRows; ++a)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(acc + a * width + v * L, sum[a][v]);
}

// row[token] = sum over nodes of weight[node][token] table[node]
template <class T, int Vectors>
BOLTZATTN_INLINE void evaluate_tile(int nodes, const T* weight, const T* table, int64_t width,
                                    T* const* rows, int64_t offset) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[kNodeRows][Vectors] = {};
  for (int a = 0; a < nodes; ++a) {
    Vec<T> line[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) line[v] = load(table + a * width + v * L);
#pragma GCC unroll 4
    for (int i = 0; i < kNodeRows; ++i) {
      const Vec<T> x = splat(weight[a * kTile + i]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[i][v] += x * line[v];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kNodeRows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(rows[i] + offset + v * L, sum[i][v]);
}

// `width` is a whole number of vectors, `nodes` of kNodeRows.
template <class T, bool Centred>
static void add_moments(int nodes, int tokens, const T* weight, const T* const* rows,
                        const T* centre, T* acc, int64_t width) {
  constexpr int L = kLanes<T>;
  for (int a = 0; a < nodes;
       a += kNodeRows, weight += kNodeRows * kTile, acc += kNodeRows * width) {
    int64_t c = 0;
    for (; c + 3 * L <= width; c += 3 * L)
      moments_tile<T, 3, Centred>(tokens, weight, rows, centre, c, acc + c, width);
    if (c + 2 * L <= width) {
      moments_tile<T, 2, Centred>(tokens, weight, rows, centre, c, acc + c, width);
    } else if (c < width) {
      moments_tile<T, 1, Centred>(tokens, weight, rows, centre, c, acc + c, width);
    }
  }
}

// Row pointers come in whole groups of kNodeRows; the last may repeat a row nobody reads.
template <class T>
static void evaluate(int nodes, int tokens, const T* weight, const T* table, int64_t width,
                     T* const* rows) {
  constexpr int L = kLanes<T>;
  for (int i = 0; i < tokens; i += kNodeRows, weight += kNodeRows, rows += kNodeRows) {
    int64_t c = 0;
    for (; c + 3 * L <= width; c += 3 * L)
      evaluate_tile<T, 3>(nodes, weight, table + c, width, rows, c);
    if (c + 2 * L <= width) {
      evaluate_tile<T, 2>(nodes, weight, table + c, width, rows, c);
    } else if (c < width) {
      evaluate_tile<T, 1>(nodes, weight, table + c, width, rows, c);
    }
  }
}

// Rows of the arithmetic type, a whole number of vectors wide, can be used where they lie.
template <class T>
BOLTZATTN_INLINE bool in_place(const Matrix& m, int64_t columns) {
  const DType wanted = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
  return m.dtype == wanted && m.column == 1 && columns % kLanes<T> == 0;
}

// Fetches rows in the order of memory, long before they are used in the order of panels: random
// access defeats the hardware's own guesses.
template <class T, bool Write>
BOLTZATTN_INLINE void prefetch_rows(const Matrix& m, int64_t h, int64_t columns, int64_t first,
                                    int64_t rows) {
  const T* base = static_cast<const T*>(m.data) + m.head[h];
  for (int64_t i = first; i < first + rows; ++i) {
    const char* p = reinterpret_cast<const char*>(base + i * m.row);
    for (int64_t b = 0; b < columns * int64_t(sizeof(T)); b += kCacheLine)
      __builtin_prefetch(p + b, Write, 2);
  }
}

// Pointers to the rows of a tile of tokens: into the tensor, or into a copy that is converted and
// padded with zeros.
template <class T>
struct RowReader {
  const Matrix& m;
  int64_t h, columns, width;
  T* copy;  // [kTile][width]
  bool direct;
  const T* row[kTile];

  RowReader(const Matrix& matrix, int64_t head, int64_t count, T* space)
      : m(matrix),
        h(head),
        columns(count),
        width(round_up(count, kLanes<T>)),
        copy(space),
        direct(in_place<T>(matrix, count)) {}

  void read(int64_t first, const int32_t* order, int64_t tokens) {
    if (direct) {
      const T* base = static_cast<const T*>(m.data) + m.head[h];
      for (int64_t i = 0; i < tokens; ++i) row[i] = base + (first + order[i]) * m.row;
      return;
    }
    for (int64_t i = 0; i < tokens; ++i) {
      T* to = copy + i * width;
      for (int64_t c = columns; c < width; ++c) to[c] = 0;
      read_block(m, h, first + order[i], 0, 1, columns, to, 0, 1);
      row[i] = to;
    }
  }
  void prefetch(int64_t first, int64_t rows) const {
    if (direct) prefetch_rows<T, false>(m, h, columns, first, rows);
  }
};

template <class T>
struct RowWriter {
  const Matrix& m;
  int64_t h, columns, width;
  T* copy;  // [kTile][width]; its last row also takes what nobody reads
  bool direct;
  T* row[kTile];

  RowWriter(const Matrix& matrix, int64_t head, int64_t count, T* space)
      : m(matrix),
        h(head),
        columns(count),
        width(round_up(count, kLanes<T>)),
        copy(space),
        direct(in_place<T>(matrix, count)) {}

  void point(int64_t first, const int32_t* order, int64_t tokens) {
    T* base = static_cast<T*>(m.data) + m.head[h];
    for (int64_t i = 0; i < tokens; ++i)
      row[i] = direct ? base + (first + order[i]) * m.row : copy + i * width;
    for (int64_t i = tokens; i < round_up(tokens, kNodeRows); ++i)
      row[i] = copy + (kTile - 1) * width;
  }
  void prefetch(int64_t first, int64_t rows) const {
    if (direct) prefetch_rows<T, true>(m, h, columns, first, rows);
  }
  void write(int64_t first, const int32_t* order, int64_t tokens) {
    if (direct) return;
    for (int64_t i = 0; i < tokens; ++i)
      write_block(copy + i * width, 0, 1, 1, columns, m, h, first + order[i], 0);
  }
};
