// C[m, n] (+)= A[m, k] B[k, n] for tiles that live in cache. Included inside an ISA's namespace.
// A is read element by element with any strides, B and C in rows of whole vectors.

// Accumulators that fit the register file beside kPanel vectors of B and one of A.
constexpr int kTileRows = BOLTZATTN_TILE_ROWS;
constexpr int kPanel = 2;

template <class T>
struct Strided {
  const T* data;
  int64_t row, column;
};

// Depth 0 means `k` is known only at run time; a rank is known when the kernel is compiled.
template <class T, int Rows, int Vectors, bool Accumulate, int Depth>
BOLTZATTN_INLINE void gemm_tile(int k, Strided<T> a, const T* b, int64_t b_row, T* c,
                                int64_t c_row) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[Rows][Vectors];
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      sum[i][v] = Accumulate ? load(c + i * c_row + v * L) : Vec<T>{};
  const int depth = Depth ? Depth : k;
  for (int p = 0; p < depth; ++p) {
    Vec<T> line[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) line[v] = load(b + v * L);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const Vec<T> x = splat(a.data[i * a.row]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[i][v] += x * line[v];
    }
    a.data += a.column;
    b += b_row;
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(c + i * c_row + v * L, sum[i][v]);
}

template <class T, int Rows, bool Accumulate, int Depth>
static void gemm_rows(int vectors, int k, Strided<T> a, const T* b, int64_t b_row, T* c,
                      int64_t c_row) {
  constexpr int L = kLanes<T>;
  int v = 0;
  for (; v + kPanel <= vectors; v += kPanel)
    gemm_tile<T, Rows, kPanel, Accumulate, Depth>(k, a, b + v * L, b_row, c + v * L, c_row);
  for (; v < vectors; ++v)
    gemm_tile<T, Rows, 1, Accumulate, Depth>(k, a, b + v * L, b_row, c + v * L, c_row);
}

// Rows of C in tiles as tall as the registers allow, and the rest in tiles as even as can be: a
// single row would wait for its own sums.
template <class T, bool Accumulate>
static void gemm(int64_t m, int64_t vectors, int64_t k, Strided<T> a, const T* b, int64_t b_row,
                 T* c, int64_t c_row) {
  auto advance = [&](auto rows) {
    constexpr int Rows = decltype(rows)::value;
    gemm_rows<T, Rows, Accumulate, 0>(int(vectors), int(k), a, b, b_row, c, c_row);
    a.data += Rows * a.row;
    c += Rows * c_row;
    m -= Rows;
  };
  constexpr int kSmall = 4;  // with two vectors, as many sums as keep the units busy
  while (m >= kTileRows && m != 2 * kSmall && m != 2 * kSmall - 1)
    advance(std::integral_constant<int, kTileRows>());
  while (m >= kSmall) advance(std::integral_constant<int, kSmall>());
  while (m >= 2) advance(std::integral_constant<int, 2>());
  if (m == 1) advance(std::integral_constant<int, 1>());
}
