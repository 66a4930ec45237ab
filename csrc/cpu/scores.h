// Scores of pairs, and how gradients of scores reach queries and keys. Included inside an ISA's
// namespace.
//
// A score is scale q . k, or -scale / 2 |q - k|^2 (Gaussian). Gaussian scores and their gradients
// are computed from differences q - k: in |q|^2 - 2 q . k + |k|^2 an offset common to all queries
// and keys would leave nothing but rounding.
//
// Tiles hold q[rows][rank] and k[rank][kKeyBlock]; lines of scores and of their gradients are
// kKeyBlock apart. The queries of dot scores are scaled when they are read, those of Gaussian
// scores are not.

constexpr int64_t kRowBlock = 48;   // query rows whose scores are held at once: whole tiles
constexpr int64_t kKeyBlock = 256;  // keys in a tile
constexpr int kLargestRank = 16;    // ranks up to this have their own score kernel
static_assert(kRowBlock % kTileRows == 0, "a block of rows is whole tiles");

// A tile of up to kKeyBlock keys is computed in whole panels; the padding is masked.
template <class T>
BOLTZATTN_INLINE int64_t width_of(int64_t keys) {
  return round_up(keys, kPanelWidth<T>);
}

template <class T>
static void read_queries(const Attention& call, int64_t h, int64_t first, int64_t rows, T* q) {
  read_block(call.query, h, first, 0, rows, call.rank, q, call.rank, 1);
  if (call.is_gaussian) return;
  for (int64_t i = 0; i < rows * call.rank; ++i) q[i] *= T(call.scale);
}
// The rest of the tile becomes 0.
template <class T>
static void read_keys(const Attention& call, int64_t h, int64_t first, int64_t keys, T* k) {
  if (keys < kKeyBlock) set_zero(k, call.rank * kKeyBlock);
  read_block(call.key, h, first, 0, keys, call.rank, k, 1, kKeyBlock);
}

// A coordinate of the derivative of a score for its query, up to the scale.
template <class V>
BOLTZATTN_INLINE V pull_of_query(bool gaussian, V q, V k) {
  return gaussian ? k - q : k;
}
// The same for its key.
template <class V>
BOLTZATTN_INLINE V pull_of_key(bool gaussian, V q, V k) {
  return gaussian ? q - k : q;
}

// scores[rows][width], with `rows` rounded up to whole tiles: the rows past the end hold arbitrary
// numbers, and their scores are not used. Up to kLargestRank products are rounded before they are
// added, so that keys that tie stay ties: q a + q b is q b + q a, and multiples of one product are
// multiples. Fused, they would differ by a bit of the score, which is much of a weight if logits
// are large. Longer sums seldom tie, and lose more by rounding each product.
template <class T, bool Gaussian, int Rank>
static void score_tile(int64_t rows, int64_t width, int64_t rank, T scale, const T* q, const T* k,
                       T* scores) {
  constexpr int L = kLanes<T>;
  const T factor = T(-0.5) * scale;
  for (int64_t i = 0; i < rows; i += kTileRows)
    product_rows<T, kTileRows, Rank, (Rank < 2), Gaussian>(
        int(i), int(width / L), int(rank), Strided<T>{q, rank, 1},
        [=](int v, int r, auto& line) BOLTZATTN_INLINED { load(k + r * kKeyBlock + v * L, line); },
        [=](int v, int row, auto& sum) BOLTZATTN_INLINED {
          if constexpr (Gaussian)
            for (auto& x : sum) x *= factor;
          store(scores + row * kKeyBlock + v * L, sum);
        });
}

// dq[rows][rank + 1] += ds[rows][width] times the pulls of the queries, without the scale; the last
// column is left alone.
template <class T, bool Gaussian>
static void add_query_gradient(int64_t rows, int64_t width, int64_t rank, const T* ds, const T* q,
                               const T* k, T* dq) {
  constexpr int L = kLanes<T>;
  constexpr int kAtOnce = 4;
  for (int64_t i = 0; i < rows; ++i) {
    const T* of_row = q + i * rank;
    int64_t r = 0;
    for (; r + kAtOnce <= rank; r += kAtOnce) {
      Vec<T> sum[kAtOnce] = {};
      for (int64_t j = 0; j < width; j += L) {
        const Vec<T> x = load(ds + i * kKeyBlock + j);
#pragma GCC unroll 4
        for (int c = 0; c < kAtOnce; ++c)
          sum[c] +=
              x * pull_of_query(Gaussian, splat(of_row[r + c]), load(k + (r + c) * kKeyBlock + j));
      }
      for (int c = 0; c < kAtOnce; ++c) dq[i * (rank + 1) + r + c] += reduce_sum<T>(sum[c]);
    }
    for (; r < rank; ++r) {
      Vec<T> sum{};
      for (int64_t j = 0; j < width; j += L)
        sum += load(ds + i * kKeyBlock + j) *
               pull_of_query(Gaussian, splat(of_row[r]), load(k + r * kKeyBlock + j));
      dq[i * (rank + 1) + r] += reduce_sum<T>(sum);
    }
  }
}

// dk[rank][width] += pulls of the keys times ds[rows][width]; with the scale for dot scores, whose
// queries are scaled, without it for Gaussian ones.
template <class T, bool Gaussian>
static void add_key_gradient(int64_t rows, int64_t width, int64_t rank, const T* ds, const T* q,
                             const T* k, T* dk) {
  constexpr int L = kLanes<T>;
  if constexpr (Gaussian) {
    for (int64_t r = 0; r < rank; ++r) {
      for (int64_t j = 0; j < width; j += kPanelWidth<T>) {
        Vec<T> of_key[kPanel], sum[kPanel] = {};
        load(k + r * kKeyBlock + j, of_key);
        for (int64_t i = 0; i < rows; ++i) {
          const Vec<T> of_query = splat(q[i * rank + r]);
#pragma GCC unroll 4
          for (int u = 0; u < kPanel; ++u)
            sum[u] +=
                load(ds + i * kKeyBlock + j + u * L) * pull_of_key(Gaussian, of_query, of_key[u]);
        }
        for (int u = 0; u < kPanel; ++u) {
          T* to = dk + r * kKeyBlock + j + u * L;
          store(to, load(to) + sum[u]);
        }
      }
    }
  } else {
    gemm<T, true>(rank, width / L, rows, {q, 1, rank}, ds, kKeyBlock, dk, kKeyBlock);
  }
}

// The kernels of one kind of scores, chosen once for a task.
template <class T>
struct Scores {
  using Tile = void (*)(int64_t rows, int64_t width, int64_t rank, T scale, const T* q, const T* k,
                        T* scores);
  using Pull = void (*)(int64_t rows, int64_t width, int64_t rank, const T* ds, const T* q,
                        const T* k, T* gradient);
  const int64_t rank;
  const bool is_gaussian;
  const T scale;
  const Tile tile;
  const Pull query_gradient, key_gradient;

  explicit Scores(const Attention& call)
      : rank(call.rank),
        is_gaussian(call.is_gaussian),
        scale(T(call.scale)),
        tile(call.is_gaussian ? tile_of<true>(call.rank) : tile_of<false>(call.rank)),
        query_gradient(call.is_gaussian ? add_query_gradient<T, true>
                                        : add_query_gradient<T, false>),
        key_gradient(call.is_gaussian ? add_key_gradient<T, true> : add_key_gradient<T, false>) {}

  void operator()(int64_t rows, int64_t width, const T* q, const T* k, T* scores) const {
    tile(rows, width, rank, scale, q, k, scores);
  }
  // Pulls of numbers below 1 / room() of the largest number are finite.
  T room() const { return is_gaussian ? T(2) : T(1); }

 private:
  template <bool Gaussian, int... Ranks>
  static Tile tile_of(int64_t rank, std::integer_sequence<int, Ranks...>) {
    static constexpr Tile table[] = {score_tile<T, Gaussian, Ranks>...};
    return table[rank <= kLargestRank ? rank : 0];
  }
  template <bool Gaussian>
  static Tile tile_of(int64_t rank) {
    return tile_of<Gaussian>(rank, std::make_integer_sequence<int, kLargestRank + 1>{});
  }
};
