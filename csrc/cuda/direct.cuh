// Streaming attention over all pairs, any rank: O(n_q n_k) time, O(n) memory. No torch.
//
// A block owns some tokens of one side and streams the other side past them in tiles. Every result
// is summed by one thread in one fixed order, so it is bitwise the same from run to run.
#pragma once

#include "cuda/element.cuh"
#include "online_softmax.h"

namespace boltzattn {
namespace cuda {

constexpr int kThreads = 128;
constexpr int kRankChunk = 16;   // entries of the query and key vectors held at once
constexpr int64_t kSpan = 2048;  // tokens summed in T before they join the total
template <class T>
constexpr int kTile = sizeof(T) == 4 ? 32 : 16;  // tokens streamed at once
template <class T>
constexpr int kWide = sizeof(T) == 4 ? 64 : 32;  // columns of values of a block
constexpr int kNarrow = 16;                      // the same where there are few
template <class T>
constexpr int kVector = 16 / int(sizeof(T));  // numbers in 16 bytes

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
__device__ __forceinline__ int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Which weights survive dropout: the same bits as cpu/dropout.h and reference.dropout_keep.
__device__ __forceinline__ uint32_t mix32(uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}
template <class T>
struct Dropout {
  uint64_t threshold = 0;  // a draw below it is dropped
  T kept = 0;
  uint32_t stream = 0;

  __device__ Dropout(const Call& call, int64_t h) {
    if (call.seed.data == nullptr) return;
    threshold = uint64_t(::rint(call.dropout_p * 4294967296.0));
    kept = call.dropout_p < 1 ? T(1 / (1 - call.dropout_p)) : T(0);
    const uint64_t seed = *head_of<const uint64_t>(call, call.seed, h);
    stream = mix32(uint32_t(seed) ^ mix32(uint32_t(seed >> 32)));
  }
  // What the weight of (query i, key j) is multiplied by.
  __device__ T factor(int64_t i, int64_t j) const {
    const uint32_t line = mix32(stream + uint32_t(i) * 0x27d4eb2fu);
    return mix32(line ^ uint32_t(j) * 0x9e3779b1u) >= threshold ? kept : T(0);
  }
};

// Everything that forbids or shifts logits, which are in units of ln 2.
template <class T>
struct Masks {
  const Call& call;
  int64_t attn_offset = 0, key_offset = 0;
  T clamped = OnlineSoftmax<T>::kLowest;  // what a bias was before it was kept in range

  __device__ Masks(const Call& c, int64_t h) : call(c) {
    if (call.attn_mask.data) attn_offset = head_offset(call, call.attn_mask, h);
    if (call.key_mask.data) key_offset = head_offset(call, call.key_mask, h);
  }

  // The lowest finite number stays finite: a row full of it is not a row that may attend to
  // nothing.
  __device__ __forceinline__ T scaled(double number) {
    const T x = T(number), bias = x * T(kLog2e);
    if (bias != T(-INFINITY) || x == T(-INFINITY)) return bias;
    clamped = x;
    return OnlineSoftmax<T>::kLowest;
  }

  // Whether queries i .. i + rows and keys j .. j + keys exist and see each other unmasked.
  __device__ __forceinline__ bool all_plain(int64_t i, int64_t rows, int64_t j,
                                            int64_t keys) const {
    return !call.key_mask.data && !call.attn_mask.data && i + rows <= call.n_q &&
           j + keys <= call.n_k && !(call.is_causal && j + keys - 1 > i);
  }

  __device__ T apply(T logit, int64_t i, int64_t j) {
    if (i >= call.n_q || j >= call.n_k || (call.is_causal && j > i)) return T(-INFINITY);
    if (call.key_mask.data) {
      const int64_t at = key_offset + j * call.key_mask.column;
      if (call.key_mask.dtype == DType::kBool) {
        if (static_cast<const uint8_t*>(call.key_mask.data)[at]) return T(-INFINITY);
      } else {
        logit += scaled(number_at(call.key_mask, at));
      }
    }
    if (call.attn_mask.data) {
      const int64_t at = attn_offset + i * call.attn_mask.row + j * call.attn_mask.column;
      if (call.attn_mask.dtype == DType::kBool) {
        if (!static_cast<const uint8_t*>(call.attn_mask.data)[at]) return T(-INFINITY);
      } else {
        logit += scaled(number_at(call.attn_mask, at));
      }
    }
    return logit;
  }
};

// Runs edit(x, j) over the thread's numbers, by way of its column of a shared table: a loop over
// registers would have to be unrolled, and `edit` is long.
template <int N, class T, class Edit>
__device__ __forceinline__ void edit_column(T (*table)[kThreads], T* x, Edit edit) {
#pragma unroll
  for (int j = 0; j < N; ++j) table[j][threadIdx.x] = x[j];
#pragma unroll 1
  for (int j = 0; j < N; ++j) table[j][threadIdx.x] = edit(table[j][threadIdx.x], j);
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] = table[j][threadIdx.x];
}

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

// The logits of the thread's own token with a tile of the other side. Leaves after a barrier, so
// whatever the caller has put into shared memory before is visible too.
template <class S>
struct Logits {
  using T = Arithmetic<S>;
  T own[kRankChunk][kThreads];
  T other[kRankChunk][kTile<T>];

  __device__ __forceinline__ void tile(const Vectors<S>& mine, int64_t token,
                                       const Vectors<S>& others, int64_t first, int64_t rank,
                                       bool fresh, T* logit) {
    constexpr int N = kTile<T>;
#pragma unroll
    for (int c = 0; c < N; ++c) logit[c] = 0;
    for (int64_t chunk = 0; chunk < rank; chunk += kRankChunk) {
      const int depth = int(least(kRankChunk, rank - chunk));
      if (chunk > 0) __syncthreads();  // everyone has read the chunk before
      if (fresh || rank > kRankChunk)
        for (int r = 0; r < depth; ++r) own[r][threadIdx.x] = mine.at(token, chunk + r);
      for (int e = threadIdx.x; e < depth * N; e += kThreads)
        other[e / N][e % N] = others.at(first + e % N, chunk + e / N);
      __syncthreads();
      for (int r = 0; r < depth; ++r) {
        const T x = own[r][threadIdx.x];
#pragma unroll
        for (int c = 0; c < N; ++c) logit[c] += x * other[r][c];
      }
    }
  }
};

// Rows of `columns` numbers of a tile of tokens, zero where there are none.
template <class S, int Columns>
__device__ __forceinline__ void load_rows(const S* head, const Strided& m, int64_t first,
                                          int64_t count, int64_t column, int64_t columns,
                                          Arithmetic<S> (*to)[Columns]) {
  constexpr int V = 16 / int(sizeof(S)) < Columns ? 16 / int(sizeof(S)) : Columns;
  constexpr int kPieces = Columns / V;
  for (int e = threadIdx.x; e < kTile<Arithmetic<S>> * kPieces; e += kThreads) {
    const int64_t token = first + e / kPieces;
    Arithmetic<S>* line = to[e / kPieces] + e % kPieces * V;
    if (token < count) {
      Arithmetic<S> piece[V];
      read_columns<S, V>(head + token * m.row, m, column + e % kPieces * V, columns, piece);
#pragma unroll
      for (int c = 0; c < V; ++c) line[c] = piece[c];
    } else {
#pragma unroll
      for (int c = 0; c < V; ++c) line[c] = 0;
    }
  }
}

// Weighted sums of rows for the 128 tokens of a block: a thread owns 8 tokens times Columns / 8
// columns. The tokens of a warp's threads are those whose weights the same warp has computed.
template <class S, int Columns>
struct Sums {
  using T = Arithmetic<S>;
  static constexpr int kTokens = 8;
  static constexpr int kColumns = Columns / 8;
  static constexpr int V = kVector<T> < kColumns ? kVector<T> : kColumns;
  T sum[kTokens][kColumns];

  static __device__ __forceinline__ int first_token() { return threadIdx.x / 8 * kTokens; }
  // Columns c .. c + V of the thread lie here: neighbours in a warp read neighbouring 16 bytes.
  static __device__ __forceinline__ int column(int c) { return (c / V * 8 + threadIdx.x % 8) * V; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[i][c] = 0;
  }
  __device__ __forceinline__ void scale(const T* factor) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const T x = factor[first_token() + i];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[i][c] *= x;
    }
  }
  __device__ __forceinline__ void add(const T (*weight)[kThreads], const T (*row)[Columns]) {
#pragma unroll 2
    for (int j = 0; j < kTile<T>; ++j) {
      T w[kTokens], x[kColumns];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) w[i] = weight[j][first_token() + i];
#pragma unroll
      for (int c = 0; c < kColumns; c += V) {
        const auto pack = *reinterpret_cast<const Pack<T, V>*>(row[j] + column(c));
#pragma unroll
        for (int e = 0; e < V; ++e) x[c + e] = pack.at[e];
      }
#pragma unroll
      for (int i = 0; i < kTokens; ++i)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[i][c] += w[i] * x[c];
    }
  }

  // Long sums would lose digits in one running number. total = total factor + sum; sum = 0.
  // A total is only ever touched by the thread that owns it.
  __device__ __forceinline__ void flush(T* totals, const T* factor, bool first, int64_t tokens,
                                        int64_t column0, int64_t columns) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int token = first_token() + i;
      if (token >= tokens) break;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int64_t at = column0 + column(c) + c % V;
        if (at >= columns) continue;
        T* total = totals + token * columns + at;
        *total = first ? sum[i][c] : *total * factor[token] + sum[i][c];
      }
    }
    clear();
  }
  __device__ __forceinline__ void take_totals(const T* totals, const T* factor, int64_t tokens,
                                              int64_t column0, int64_t columns) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int token = first_token() + i;
      if (token >= tokens) break;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int64_t at = column0 + column(c) + c % V;
        if (at < columns) sum[i][c] += totals[token * columns + at] * factor[token];
      }
    }
  }
  // `rows` points at the block's first row.
  __device__ __forceinline__ void write(S* rows, const Strided& m, int64_t tokens, int64_t column0,
                                        int64_t columns) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (first_token() + i >= tokens) break;
#pragma unroll
      for (int c = 0; c < kColumns; c += V)
        write_columns<S, V>(sum[i] + c, rows + (first_token() + i) * m.row, m, column0 + column(c),
                            columns);
    }
  }
};

// out and lse: a thread weighs the keys for one query row, a block sums 128 rows of values.
template <class S, int Columns>
__global__ void __launch_bounds__(kThreads) direct_forward(const __grid_constant__ Call call) {
  using T = Arithmetic<S>;
  constexpr int N = kTile<T>;
  __shared__ __align__(16) Logits<S> logits;
  __shared__ __align__(16) T values[N][Columns];
  __shared__ __align__(16) T weight[N][kThreads];
  __shared__ T factor[kThreads];

  const Place at(call.n_q, kThreads, call.dv, Columns);
  if (call.served && call.served[at.head]) return;
  const int64_t row = at.first + threadIdx.x, rows = least(kThreads, call.n_q - at.first);
  const Vectors<S> queries(call, call.query, at.head, call.n_q, call.scale * kLog2e);
  const Vectors<S> keys(call, call.key, at.head, call.n_k, 1);
  const S* value = head_of<const S>(call, call.value, at.head);
  T* totals = static_cast<T*>(call.totals) + (at.head * call.n_q + at.first) * call.dv;
  Masks<T> masks(call, at.head);
  const Dropout<T> dropout(call, at.head);
  OnlineSoftmax<T> state;
  Sums<S, Columns> sums;
  sums.clear();
  T pending = 1;  // what the total has yet to be multiplied by

  const int64_t end = call.is_causal ? least(call.n_k, at.first + rows) : call.n_k;
  for (int64_t key = 0; key < end; key += N) {
    if (key > 0 && key % kSpan == 0) {
      factor[threadIdx.x] = pending;
      __syncwarp();
      sums.flush(totals, factor, key == kSpan, rows, at.column, call.dv);
      __syncwarp();
      pending = 1;
    }
    T logit[N];
    load_rows<S, Columns>(value, call.value, key, call.n_k, at.column, call.dv, values);
    logits.tile(queries, row, keys, key, call.rank, key == 0, logit);
    if (!masks.all_plain(at.first, kThreads, key, N))
      edit_column<N>(weight, logit, [&](T x, int j) { return masks.apply(x, row, key + j); });
    T top = -INFINITY;
#pragma unroll
    for (int j = 0; j < N; ++j) top = logit[j] > top ? logit[j] : top;
    factor[threadIdx.x] = state.raise(top);
    pending *= factor[threadIdx.x];
    const T reference = state.reference();
    T sum = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const T x = OnlineSoftmax<T>::power_of_2(logit[j] - reference);
      sum += x;
      weight[j][threadIdx.x] = x;
    }
    state.sum += double(sum);
    if (dropout.threshold)
#pragma unroll 1
      for (int j = 0; j < N; ++j) weight[j][threadIdx.x] *= dropout.factor(row, key + j);
    __syncwarp();
    sums.scale(factor);
    sums.add(weight, values);
    __syncthreads();
  }

  if (end > kSpan) {
    factor[threadIdx.x] = pending;
    __syncwarp();
    sums.take_totals(totals, factor, rows, at.column, call.dv);
    __syncwarp();
  }
  factor[threadIdx.x] = state.normaliser();
  __syncwarp();
  sums.scale(factor);
  S* out = head_of<S>(call, call.out, at.head) + at.first * call.out.row;
  sums.write(out, call.out, rows, at.column, call.dv);
  if (at.column == 0 && row < call.n_q)
    call.lse[at.head * call.n_q + row] = state.lse(masks.clamped);
}

// ---- backward ----
//
// With P the weights, D the dropout factors and g = grad_out:
//   dV = (P D)^T g,  dP = D (g V^T),  dS = P (dP - delta),  delta_i = g_i . out_i - grad_lse_i,
//   dQ = scale dS K,  dK = scale dS^T Q.
// dV, dQ and dK are three launches that rebuild P each; so nothing is shared between blocks.

// What a row's weights are rebuilt from: 2^(logit - high - low). The maximum and the sum of the row
// are found again, by the same operations as in forward: an lse, even in fp64, has lost the digits
// that weights of large logits need.
template <class T>
struct RowNorm {
  T high, low, delta;
};

template <class S>
__global__ void __launch_bounds__(kThreads) direct_row_norms(const __grid_constant__ Gradient g) {
  using T = Arithmetic<S>;
  constexpr int N = kTile<T>;
  __shared__ __align__(16) Logits<S> logits;
  __shared__ T edited[N][kThreads];
  const Call& call = g.call;
  const Place at(call.n_q, kThreads, 1, 1);
  if (call.served && call.served[at.head]) return;
  const int64_t row = at.first + threadIdx.x, rows = least(kThreads, call.n_q - at.first);
  const Vectors<S> queries(call, call.query, at.head, call.n_q, call.scale * kLog2e);
  const Vectors<S> keys(call, call.key, at.head, call.n_k, 1);
  Masks<T> masks(call, at.head);
  OnlineSoftmax<T> state;
  const int64_t end = call.is_causal ? least(call.n_k, at.first + rows) : call.n_k;
  for (int64_t key = 0; key < end; key += N) {
    T logit[N];
    logits.tile(queries, row, keys, key, call.rank, key == 0, logit);
    if (!masks.all_plain(at.first, kThreads, key, N))
      edit_column<N>(edited, logit, [&](T x, int j) { return masks.apply(x, row, key + j); });
    T top = -INFINITY;
#pragma unroll
    for (int j = 0; j < N; ++j) top = logit[j] > top ? logit[j] : top;
    state.raise(top);
    const T reference = state.reference();
    T sum = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) sum += OnlineSoftmax<T>::power_of_2(logit[j] - reference);
    state.sum += double(sum);
    __syncthreads();
  }
  if (row >= call.n_q) return;

  constexpr int V = 16 / int(sizeof(S));
  const S* out = head_of<const S>(call, call.out, at.head) + row * call.out.row;
  const S* grad = head_of<const S>(call, g.grad_out, at.head) + row * g.grad_out.row;
  T delta = 0;
  for (int64_t c = 0; c < call.dv; c += V) {
    T x[V], y[V];
    read_columns<S, V>(out, call.out, c, call.dv, x);
    read_columns<S, V>(grad, g.grad_out, c, call.dv, y);
#pragma unroll
    for (int e = 0; e < V; ++e) delta += x[e] * y[e];
  }
  if (g.grad_lse.data)
    delta -= T(head_of<const double>(call, g.grad_lse, at.head)[row * g.grad_lse.row]);
  static_cast<RowNorm<T>*>(g.row_norms)[at.head * call.n_q + row] = {
      state.reference(), state.sum == 0 ? T(0) : T(::log2(state.sum)), delta};
}

template <class T>
__device__ __forceinline__ RowNorm<T> row_norm(const Gradient& g, int64_t head, int64_t row) {
  if (row >= g.call.n_q) return {0, 0, 0};
  return static_cast<const RowNorm<T>*>(g.row_norms)[head * g.call.n_q + row];
}

// dV: forward with the sides exchanged; a thread weighs the queries for one key.
template <class S, int Columns>
__global__ void __launch_bounds__(kThreads)
    direct_value_gradient(const __grid_constant__ Gradient g) {
  using T = Arithmetic<S>;
  constexpr int N = kTile<T>;
  __shared__ __align__(16) Logits<S> logits;
  __shared__ __align__(16) T grad_rows[N][Columns];
  __shared__ __align__(16) T weight[N][kThreads];
  __shared__ RowNorm<T> norms[N];
  __shared__ T ones[kThreads];

  const Call& call = g.call;
  const Place at(call.n_k, kThreads, call.dv, Columns);
  if (call.served && call.served[at.head]) return;
  const int64_t key = at.first + threadIdx.x, keys_here = least(kThreads, call.n_k - at.first);
  const Vectors<S> queries(call, call.query, at.head, call.n_q, call.scale * kLog2e);
  const Vectors<S> keys(call, call.key, at.head, call.n_k, 1);
  const S* grad_out = head_of<const S>(call, g.grad_out, at.head);
  T* totals = static_cast<T*>(call.totals) + (at.head * call.n_k + at.first) * call.dv;
  Masks<T> masks(call, at.head);
  const Dropout<T> dropout(call, at.head);
  Sums<S, Columns> sums;
  sums.clear();
  ones[threadIdx.x] = 1;
  __syncwarp();

  const int64_t start = call.is_causal ? at.first / N * N : 0;
  for (int64_t row = start; row < call.n_q; row += N) {
    if (row > start && (row - start) % kSpan == 0)
      sums.flush(totals, ones, row - start == kSpan, keys_here, at.column, call.dv);
    T logit[N];
    load_rows<S, Columns>(grad_out, g.grad_out, row, call.n_q, at.column, call.dv, grad_rows);
    if (threadIdx.x < N) norms[threadIdx.x] = row_norm<T>(g, at.head, row + threadIdx.x);
    logits.tile(keys, key, queries, row, call.rank, row == start, logit);
    if (!masks.all_plain(row, N, at.first, kThreads))
      edit_column<N>(weight, logit, [&](T x, int i) { return masks.apply(x, row + i, key); });
#pragma unroll
    for (int i = 0; i < N; ++i)
      weight[i][threadIdx.x] =
          OnlineSoftmax<T>::power_of_2((logit[i] - norms[i].high) - norms[i].low);
    if (dropout.threshold)
#pragma unroll 1
      for (int i = 0; i < N; ++i) weight[i][threadIdx.x] *= dropout.factor(row + i, key);
    __syncwarp();
    sums.add(weight, grad_rows);
    __syncthreads();
  }

  if (call.n_q - start > kSpan) sums.take_totals(totals, ones, keys_here, at.column, call.dv);
  S* grad_value = head_of<S>(call, g.grad_value, at.head) + at.first * g.grad_value.row;
  sums.write(grad_value, g.grad_value, keys_here, at.column, call.dv);
}

// dQ, or with `Keys` dK: a block owns 64 tokens of one side and 16 entries of their vectors.
// Tiles of logits and of dP are products over the rank and over dv.
constexpr int kOwners = 64;
template <class T>
constexpr int kOthers = sizeof(T) == 4 ? 64 : 32;

template <class T>
struct Product {
  static constexpr int kOwnersEach = 8, kOthersEach = kOthers<T> / 16;
  T owner[kRankChunk][kOwners + kVector<T>];  // padded: columns are written across the banks
  T other[kRankChunk][kOthers<T> + kVector<T>];

  static __device__ __forceinline__ int first_owner() { return threadIdx.x / 16 * kOwnersEach; }
  static __device__ __forceinline__ int first_other() { return threadIdx.x % 16 * kOthersEach; }

  // to[r][t] = entry chunk + r of token first + t
  template <class S, int Width>
  static __device__ __forceinline__ void load(const Vectors<S>& from, int64_t first, int tokens,
                                              int64_t chunk, int64_t depth, T (*to)[Width]) {
    for (int e = threadIdx.x; e < tokens * kRankChunk; e += kThreads) {
      const int t = e / kRankChunk, r = e % kRankChunk;
      to[r][t] = chunk + r < depth ? from.at(first + t, chunk + r) : T(0);
    }
  }

  // sum[a][b] = <owner a, other b> over `depth` entries. Ends with a barrier.
  template <class S>
  __device__ __forceinline__ void run(const Vectors<S>& owners, int64_t first_o,
                                      const Vectors<S>& others, int64_t first_n, int64_t depth,
                                      T (*sum)[kOthersEach]) {
#pragma unroll
    for (int a = 0; a < kOwnersEach; ++a)
#pragma unroll
      for (int b = 0; b < kOthersEach; ++b) sum[a][b] = 0;
    for (int64_t chunk = 0; chunk < depth; chunk += kRankChunk) {
      load(owners, first_o, kOwners, chunk, depth, owner);
      load(others, first_n, kOthers<T>, chunk, depth, other);
      __syncthreads();
      const int here = int(least(kRankChunk, depth - chunk));
      for (int r = 0; r < here; ++r) {
        T x[kOwnersEach], y[kOthersEach];
#pragma unroll
        for (int a = 0; a < kOwnersEach; ++a) x[a] = owner[r][first_owner() + a];
#pragma unroll
        for (int b = 0; b < kOthersEach; ++b) y[b] = other[r][first_other() + b];
#pragma unroll
        for (int a = 0; a < kOwnersEach; ++a)
#pragma unroll
          for (int b = 0; b < kOthersEach; ++b) sum[a][b] += x[a] * y[b];
      }
      __syncthreads();
    }
  }
};

template <class S, bool Keys>
__global__ void __launch_bounds__(kThreads)
    direct_logit_gradient(const __grid_constant__ Gradient g) {
  using T = Arithmetic<S>;
  constexpr int N = kOthers<T>, kHalf = N / 2;
  constexpr int kOwnersEach = Product<T>::kOwnersEach, kOthersEach = Product<T>::kOthersEach;
  __shared__ __align__(16) Product<T> product;
  __shared__ __align__(16) T grad_logit[N][kOwners];
  __shared__ double sum[kRankChunk][kThreads];
  __shared__ RowNorm<T> norms[Keys ? N : kOwners];

  const Call& call = g.call;
  const Place at(Keys ? call.n_k : call.n_q, kOwners, call.rank, kRankChunk);
  if (call.served && call.served[at.head]) return;
  const Vectors<S> queries(call, call.query, at.head, call.n_q, call.scale * kLog2e);
  const Vectors<S> plain_queries(call, call.query, at.head, call.n_q, 1);
  const Vectors<S> keys(call, call.key, at.head, call.n_k, 1);
  const Vectors<S> values(call, call.value, at.head, call.n_k, 1);
  const Vectors<S> grads(call, g.grad_out, at.head, call.n_q, 1);
  Masks<T> masks(call, at.head);
  const Dropout<T> dropout(call, at.head);
  const int depth = int(least(kRankChunk, call.rank - at.column));
  const int owner = threadIdx.x % kOwners, half = threadIdx.x / kOwners * kHalf;
  const int64_t token = at.first + owner;
  for (int r = 0; r < kRankChunk; ++r) sum[r][threadIdx.x] = 0;
  if (!Keys && threadIdx.x < kOwners)
    norms[threadIdx.x] = row_norm<T>(g, at.head, at.first + threadIdx.x);

  const int64_t n = Keys ? call.n_q : call.n_k;
  const int64_t start = Keys && call.is_causal ? at.first / N * N : 0;
  const int64_t end = !Keys && call.is_causal ? least(n, at.first + kOwners) : n;
  for (int64_t first = start; first < end; first += N) {
    if (Keys && threadIdx.x < N) norms[threadIdx.x] = row_norm<T>(g, at.head, first + threadIdx.x);
    T tile[kOwnersEach][kOthersEach];
    product.run(Keys ? keys : queries, at.first, Keys ? queries : keys, first, call.rank, tile);
#pragma unroll
    for (int b = 0; b < kOthersEach; ++b)
#pragma unroll
      for (int a = 0; a < kOwnersEach; ++a)
        grad_logit[product.first_other() + b][product.first_owner() + a] = tile[a][b];
    __syncthreads();
    const bool plain = masks.all_plain(Keys ? first : at.first, Keys ? N : kOwners,
                                       Keys ? at.first : first, Keys ? kOwners : N);
#pragma unroll 2
    for (int o = half; o < half + kHalf; ++o) {
      const RowNorm<T> norm = norms[Keys ? o : owner];
      T x = grad_logit[o][owner];
      if (!plain) x = masks.apply(x, Keys ? first + o : token, Keys ? token : first + o);
      grad_logit[o][owner] = OnlineSoftmax<T>::power_of_2((x - norm.high) - norm.low);
    }
    product.run(Keys ? values : grads, at.first, Keys ? grads : values, first, call.dv, tile);
#pragma unroll
    for (int b = 0; b < kOthersEach; ++b) {
#pragma unroll
      for (int a = 0; a < kOwnersEach; ++a) {
        const int mine = product.first_owner() + a, other = product.first_other() + b;
        T slope = tile[a][b];
        if (dropout.threshold)
          slope *= dropout.factor(Keys ? first + other : at.first + mine,
                                  Keys ? at.first + mine : first + other);
        grad_logit[other][mine] *= slope - norms[Keys ? other : mine].delta;
      }
    }
    product.load(Keys ? plain_queries : keys, first, N, at.column, call.rank, product.other);
    __syncthreads();
    T x[kHalf];
#pragma unroll
    for (int o = 0; o < kHalf; ++o) x[o] = grad_logit[half + o][owner];
    for (int r = 0; r < depth; ++r) {
      T part = 0;
#pragma unroll
      for (int o = 0; o < kHalf; ++o) part += x[o] * product.other[r][half + o];
      sum[r][threadIdx.x] += double(part);
    }
    __syncthreads();
  }

  __syncthreads();
  const Strided& to = Keys ? g.grad_key : g.grad_query;
  if (half > 0 || token >= (Keys ? call.n_k : call.n_q)) return;
  S* line = head_of<S>(call, to, at.head) + token * to.row;
  for (int r = 0; r < depth; ++r)
    line[(at.column + r) * to.column] =
        narrow<S>(T((sum[r][owner] + sum[r][owner + kOwners]) * call.scale));
}

}  // namespace cuda
}  // namespace boltzattn
