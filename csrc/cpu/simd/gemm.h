// Products A[m, k] B[k, n] of tiles that live in cache. Included inside an ISA's namespace.
// A is read element by element with any strides; the caller reads rows of B and takes rows of the
// product.

// Accumulators that fit the register file beside kPanel vectors of B and one of A.
constexpr int kTileRows = BOLTZATTN_TILE_ROWS;
constexpr int kPanel = 2;

template <class T>
struct Strided {
  const T* data;
  int64_t row, column;
};

// Rows i .. i + Rows - 1 of the product, vectors v .. v + Vectors - 1 of each:
//   line(v, p, to)    reads row p of B,
//   finish(v, i, sum) takes row i of the product.
// Depth 0 means `k` is known only at run time; a rank is known when the kernel is compiled.
// Fused: products are not rounded before they are added, which is faster and more accurate, but
// a b + c d and c d + a b may differ.
// Gaps: the squares (a - b)^2 are added up, not the products a b.
template <class T, int Rows, int Vectors, int Depth, bool Fused, bool Gaps, class Line,
          class Finish>
BOLTZATTN_INLINE void product_tile(int i, int v, int k, Strided<T> a, Line line, Finish finish) {
  Vec<T> sum[Rows][Vectors] = {};
  const int depth = Depth ? Depth : k;
  auto add = [&](Vec<T>(&to)[Rows][Vectors], int p) BOLTZATTN_INLINED {
    Vec<T> of_b[Vectors];
    line(v, p, of_b);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec<T> x = splat(a.data[r * a.row]);
#pragma GCC unroll 4
      for (int u = 0; u < Vectors; ++u) {
        const Vec<T> one = Gaps ? x - of_b[u] : x, other = Gaps ? one : of_b[u];
        if constexpr (Fused)
          to[r][u] += one * other;
        else
          to[r][u] += rounded_product<T>(one, other);
      }
    }
    a.data += a.column;
  };
  int p = 0;
  if constexpr (Vectors < kPanel && Depth == 0) {
    // There are registers to spare, and two sums of half the length round less than one.
    Vec<T> other[Rows][Vectors] = {};
    for (; p + 2 <= depth; p += 2) add(sum, p), add(other, p + 1);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
      for (int u = 0; u < Vectors; ++u) sum[r][u] += other[r][u];
  }
  for (; p < depth; ++p) add(sum, p);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) finish(v, i + r, sum[r]);
}

template <class T, int Rows, int Depth, bool Fused = true, bool Gaps = false, class Line,
          class Finish>
BOLTZATTN_INLINE void product_rows(int i, int vectors, int k, Strided<T> a, Line line,
                                   Finish finish) {
  a.data += int64_t(i) * a.row;
  int v = 0;
  for (; v + kPanel <= vectors; v += kPanel)
    product_tile<T, Rows, kPanel, Depth, Fused, Gaps>(i, v, k, a, line, finish);
  for (; v < vectors; ++v) product_tile<T, Rows, 1, Depth, Fused, Gaps>(i, v, k, a, line, finish);
}

// All rows, in tiles as tall as the registers allow. The remaining rows are split evenly, because a
// single row would wait for its own sums.
template <class T, class Line, class Finish>
BOLTZATTN_INLINE void product(int m, int vectors, int k, Strided<T> a, Line line, Finish finish) {
  constexpr int kSmall = 4;  // with two vectors, as many sums as keep the units busy
  int i = 0;
  for (; m - i >= kTileRows && m - i != 2 * kSmall && m - i != 2 * kSmall - 1; i += kTileRows)
    product_rows<T, kTileRows, 0>(i, vectors, k, a, line, finish);
  for (; m - i >= kSmall; i += kSmall) product_rows<T, kSmall, 0>(i, vectors, k, a, line, finish);
  for (; m - i >= 2; i += 2) product_rows<T, 2, 0>(i, vectors, k, a, line, finish);
  if (m > i) product_rows<T, 1, 0>(i, vectors, k, a, line, finish);
}

// C[m, n] (+)= A B with B and C in rows of whole vectors. The product is summed before it
// is added, because each addition to a running sum rounds relative to the whole sum.
template <class T, bool Accumulate>
static void gemm(int64_t m, int64_t vectors, int64_t k, Strided<T> a, const T* b, int64_t b_row,
                 T* c, int64_t c_row) {
  constexpr int L = kLanes<T>;
  product<T>(
      int(m), int(vectors), int(k), a,
      [=](int v, int p, auto& line) BOLTZATTN_INLINED { load(b + p * b_row + v * L, line); },
      [=](int v, int i, auto& sum) BOLTZATTN_INLINED {
        T* to = c + i * c_row + v * L;
        for (auto& x : sum) store(to, Accumulate ? load(to) + x : x), to += L;
      });
}
