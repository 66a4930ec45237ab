// Streaming attention over all pairs, any rank: O(n_q n_k) time, O(n) memory. No torch.
//
// A block owns some tokens of one side and streams the other side past them in tiles. Every result
// is summed by one thread in one fixed order, so it is bitwise the same from run to run.
//
// Gaussian scores are computed from differences q - k: in |q|^2 - 2 q . k + |k|^2 an offset common
// to all queries and keys would leave nothing but rounding.
//
// What a mask hides does not count, whatever it holds. Hidden pairs have weight 0, but 0 * NaN is
// NaN; where a product meets NaN or infinity, the pairs that are visible are added one by one.
#pragma once

#include "cuda/sums.cuh"
#include "spec/dropout.h"
#include "spec/online_softmax.h"

namespace boltzattn::cuda {

constexpr int kRankChunk = 16;   // entries of the query and key vectors held at once
constexpr int64_t kSpan = 2048;  // tokens summed in T before they join the total

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
__host__ __device__ inline int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Which weights of a head survive dropout.
template <class T>
struct Dropout {
  uint64_t threshold = 0;
  T kept = 1;  // what those that survive are multiplied by
  uint32_t stream = 0;

  __device__ Dropout(const Call& call, int64_t h) {
    if (call.seed.data == nullptr) return;
    threshold = dropout_threshold(call.dropout_p);
    kept = T(dropout_factor(call.dropout_p));
    stream = dropout_stream(*head_of<const uint64_t>(call, call.seed, h));
  }
  // Whether the weight of (query i, key j) survives.
  __device__ bool keeps(int64_t i, int64_t j) const {
    return dropout_draw(dropout_row(stream, i), j) >= threshold;
  }
};

// Everything that forbids or shifts logits, which are in units of ln 2.
template <class T>
struct Masks {
  const Call& call;
  int64_t attn_offset = 0, key_offset = 0;
  T high = 0, low = 0;                    // their sum is the slope of the distance
  T clamped = OnlineSoftmax<T>::kLowest;  // the bias before it was clamped

  __device__ Masks(const Call& c, int64_t h) : call(c) {
    if (call.attn_mask.data) attn_offset = head_offset(call, call.attn_mask, h);
    if (call.key_mask.data) key_offset = head_offset(call, call.key_mask, h);
    if (call.slopes.data) {
      const double slope = *head_of<const double>(call, call.slopes, h) * -kLog2e;
      high = T(slope);
      low = T(slope - double(high));
    }
  }

  // The lowest finite number stays finite, because a row that contains only this number still
  // attends to all keys.
  __device__ __forceinline__ T scaled(double number) {
    const T x = T(number), bias = x * T(kLog2e);
    if (bias != T(-INFINITY) || x == T(-INFINITY)) return bias;
    clamped = x;
    return OnlineSoftmax<T>::kLowest;
  }

  // A logit that a mask hides is -inf, whatever its query and key hold.
  __device__ __forceinline__ static T added(T logit, T bias) {
    return bias == T(-INFINITY) ? bias : logit + bias;
  }

  // Whether an entry of a mask hides; `hiding` is what true means.
  __device__ static bool hides(const Strided& mask, int64_t at, bool hiding) {
    if (!mask.data) return false;
    if (mask.dtype == DType::kBool)
      return (static_cast<const uint8_t*>(mask.data)[at] != 0) == hiding;
    return T(number_at(mask, at)) == T(-INFINITY);
  }
  // Whether key_mask hides key j from all queries.
  __device__ bool hides(int64_t j) const {
    return hides(call.key_mask, key_offset + j * call.key_mask.column, true);
  }
  // Whether query i may not attend to key j, or one of them does not exist.
  __device__ bool hides(int64_t i, int64_t j) const {
    return i >= call.n_q || j >= call.n_k || (call.is_causal && j > i) || hides(j) ||
           hides(call.attn_mask, attn_offset + i * call.attn_mask.row + j * call.attn_mask.column,
                 false);
  }

  // Whether queries i .. i + rows and keys j .. j + keys exist and see each other unmasked.
  __device__ __forceinline__ bool all_plain(int64_t i, int64_t rows, int64_t j,
                                            int64_t keys) const {
    return !call.key_mask.data && !call.attn_mask.data && !call.slopes.data &&
           i + rows <= call.n_q && j + keys <= call.n_k && !(call.is_causal && j + keys - 1 > i);
  }

  __device__ __forceinline__ static T distance(int64_t i, int64_t j) {
    return T(i < j ? j - i : i - j);
  }

  __device__ T apply(T logit, int64_t i, int64_t j) {
    if (i >= call.n_q || j >= call.n_k || (call.is_causal && j > i)) return T(-INFINITY);
    if (call.slopes.data) logit += fma(distance(i, j), high, distance(i, j) * low);
    if (call.key_mask.data) {
      const int64_t at = key_offset + j * call.key_mask.column;
      if (call.key_mask.dtype == DType::kBool) {
        if (static_cast<const uint8_t*>(call.key_mask.data)[at]) return T(-INFINITY);
      } else {
        logit = added(logit, scaled(number_at(call.key_mask, at)));
      }
    }
    if (call.attn_mask.data) {
      const int64_t at = attn_offset + i * call.attn_mask.row + j * call.attn_mask.column;
      if (call.attn_mask.dtype == DType::kBool) {
        if (!static_cast<const uint8_t*>(call.attn_mask.data)[at]) return T(-INFINITY);
      } else {
        logit = added(logit, scaled(number_at(call.attn_mask, at)));
      }
    }
    return logit;
  }
};

// The head and the tile of tokens and columns that a block works on.
struct Place {
  int64_t head, first, column;
  __device__ Place(int64_t tokens, int64_t per_block, int64_t columns, int64_t columns_per_block) {
    const int64_t tiles = ceil_div(columns, columns_per_block);
    const int64_t blocks = ceil_div(tokens, per_block);
    const int64_t block = blockIdx.x / tiles;
    column = blockIdx.x % tiles * columns_per_block;
    head = block / blocks;
    first = block % blocks * per_block;
  }
};

// What the queries are multiplied by: of Gaussian scores the sum of squares has the factor.
template <bool Gaussian>
__device__ __forceinline__ double query_factor(const Call& call) {
  return Gaussian ? 1 : call.scale * kLog2e;
}
template <class T>
__device__ __forceinline__ T square_factor(const Call& call) {
  return T(-0.5 * call.scale * kLog2e);
}

// The term of one coordinate joins a score. Explicitly fused, so that all passes round alike.
template <bool Gaussian, class T>
__device__ __forceinline__ T add_term(T score, T x, T y) {
  return Gaussian ? fma(x - y, x - y, score) : score + x * y;
}

// Query and key vectors. `scale` folds the scale of the logits into the queries.
template <class S>
struct Vectors {
  const S* data;
  int64_t row, column, count;
  Arithmetic<S> scale;

  __device__ Vectors(const Call& call, const Strided& m, int64_t h, int64_t n, double factor)
      : data(head_of<const S>(call, m, h)), row(m.row), column(m.column), count(n), scale(factor) {}

  __device__ __forceinline__ Arithmetic<S> at(int64_t token, int64_t r) const {
    return token < count ? widen(data[token * row + r * column]) * scale : Arithmetic<S>(0);
  }
};

// The logits of the thread's own token with a tile of the other side. The last step is a barrier,
// so everything that the caller has written to shared memory before is visible after it. A thread
// past the barrier no longer needs the previous tile, which may be overwritten then.
template <class S, bool Gaussian>
struct Logits {
  using T = Arithmetic<S>;
  T own[kRankChunk][kThreads];
  T other[2][kRankChunk][kTile<T>];

  // `turn` says which half of `other` is next.
  __device__ __forceinline__ void tile(const Call& call, const Vectors<S>& mine, int64_t token,
                                       const Vectors<S>& others, int64_t first, bool fresh,
                                       int& turn, T* logit) {
    constexpr int N = kTile<T>;
    const int64_t rank = call.rank;
#pragma unroll
    for (int c = 0; c < N; ++c) logit[c] = 0;
    for (int64_t chunk = 0; chunk < rank; chunk += kRankChunk, turn ^= 1) {
      const int depth = int(least(kRankChunk, rank - chunk));
      if (fresh || rank > kRankChunk)
        for (int r = 0; r < depth; ++r) own[r][threadIdx.x] = mine.at(token, chunk + r);
      for (int e = threadIdx.x; e < depth * N; e += kThreads)
        other[turn][e / N][e % N] = others.at(first + e % N, chunk + e / N);
      __syncthreads();
      for (int r = 0; r < depth; ++r) {
        const T x = own[r][threadIdx.x];
#pragma unroll
        for (int c = 0; c < N; ++c) logit[c] = add_term<Gaussian>(logit[c], x, other[turn][r][c]);
      }
    }
    if constexpr (Gaussian) {
      const T factor = square_factor<T>(call);
#pragma unroll
      for (int c = 0; c < N; ++c) logit[c] *= factor;
    }
  }
};

// out and lse: a thread weighs the keys for one query row, a block sums 128 rows of values. Values
// are copied one tile ahead.
template <class S, int Columns, bool Gaussian>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    direct_forward(const __grid_constant__ Call call) {
  using T = Arithmetic<S>;
  constexpr int N = kTile<T>;
  __shared__ __align__(16) Logits<S, Gaussian> logits;
  __shared__ __align__(16) S values[2][N][Columns + kPad<S>];
  __shared__ __align__(16) WarpTable<S> tables[kWarps];
  __shared__ T factor[kThreads];

  const Place at(call.n_q, kThreads, call.dv, Columns);
  if (call.served && call.served[at.head]) return;
  const int64_t row = at.first + threadIdx.x, rows = least(kThreads, call.n_q - at.first);
  const Vectors<S> queries(call, call.query, at.head, call.n_q, query_factor<Gaussian>(call));
  const Vectors<S> keys(call, call.key, at.head, call.n_k, 1);
  const S* value = head_of<const S>(call, call.value, at.head);
  T* totals = static_cast<T*>(call.totals) + (at.head * call.n_q + at.first) * call.dv;
  WarpTable<S>& table = tables[threadIdx.x / 32];
  Masks<T> masks(call, at.head);
  const Dropout<T> dropout(call, at.head);
  OnlineSoftmax<T> state;
  Sums<S, Columns> sums;
  sums.clear();
  T pending = 1;  // factor that the total still needs
  int turn = 0, half = 0;

  const int64_t end = call.is_causal ? least(call.n_k, at.first + rows) : call.n_k;
  const auto load = [&](int64_t key) {
    load_rows<S, N>(value, call.value, key, call.n_k, at.column, call.dv, values[half]);
  };
  load(0);
  for (int64_t key = 0; key < end; key += N) {
    if (key > 0 && key % kSpan == 0) {
      __syncwarp();  // all lanes have used the previous factors
      factor[threadIdx.x] = pending;
      __syncwarp();
      sums.flush(totals, factor, key == kSpan, rows, at.column, call.dv);
      pending = 1;
    }
    T logit[N];
    copies_arrived();
    logits.tile(call, queries, row, keys, key, key == 0, turn, logit);
    const auto& here = values[half];
    half ^= 1;
    if (key + N < end) load(key + N);
    const bool plain = masks.all_plain(at.first, kThreads, key, N);
    if (!plain) table.edit(logit, [&](T x, int j) { return masks.apply(x, row, key + j); });
    T top = -INFINITY;
#pragma unroll
    for (int j = 0; j < N; ++j) top = logit[j] > top ? logit[j] : top;
    factor[threadIdx.x] = state.raise(top);
    pending *= factor[threadIdx.x];
    const T reference = state.reference();
    table.edit_short(logit, [&](T x, int) { return state.power_of_2(x - reference); });
    T sum = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) sum += logit[j];
    state.sum += double(sum);
    if (dropout.threshold)
      table.edit(logit, [&](T x, int j) { return dropout.keeps(row, key + j) ? x : T(0); });
    table.put(logit);
    __syncwarp();
    sums.scale(factor);
    if (!plain && not_finite<S, N>(here))
      sums.add_visible(table, here, [&](int j) { return masks.hides(row, key + j); });
    else
      sums.add(table, here);
  }

  __syncwarp();
  if (end > kSpan) {
    factor[threadIdx.x] = pending;
    __syncwarp();
    sums.take_totals(totals, factor, rows, at.column, call.dv);
    __syncwarp();
  }
  factor[threadIdx.x] = state.normaliser() * (dropout.kept / T(kWeightUnit<S>));
  __syncwarp();
  sums.scale(factor);
  S* out = head_of<S>(call, call.out, at.head) + at.first * call.out.row;
  sums.write(out, call.out, rows, at.column, call.dv);
  if (at.column == 0 && row < call.n_q)
    call.lse[at.head * call.n_q + row] = state.lse(masks.clamped);
}

}  // namespace boltzattn::cuda
