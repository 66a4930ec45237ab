// Weighted sums of rows for the 128 tokens of a block: P V of forward, P^T dO of backward. No
// torch.
//
// A thread computes the weights of one token for a tile of the other side's rows; then the threads
// of its warp share the products of the warp's 32 tokens. 16-bit rows are multiplied by tensor
// cores, with weights rounded to 16 bits: an error of at most half an ulp of the largest value.
// fp32 and fp64 do not use tensor cores, which would round fp32 weights to 10 bits or, with three
// products, to 21 bits.
#pragma once

#include <type_traits>

#include "cuda/tensor_core.cuh"

namespace boltzattn::cuda {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
// Blocks on a multiprocessor. Without this, ptxas spills registers to make room for more blocks.
constexpr int kLeastBlocks = 1;
template <class T>
constexpr int kTile = sizeof(T) == 4 ? 32 : 16;  // rows streamed at once
template <class T>
constexpr int kWide = sizeof(T) == 4 ? 64 : 32;  // columns of a block
constexpr int kNarrow = 16;                      // the same where there are few
template <class T>
constexpr int kVector = 16 / int(sizeof(T));  // numbers in 16 bytes
template <class S>
constexpr bool kTensorCores = sizeof(S) == 2;

// Shared rows of 16-bit numbers are 16 bytes longer, so that 8 of them touch all banks.
template <class S>
constexpr int kPad = kTensorCores<S> ? 8 : 0;

// fp16 has no numbers between 0 and 2^-24, so its weights, at most 1, are multiplied by this.
template <class S>
constexpr float kWeightUnit = std::is_same<S, __half>::value ? 32768.0f : 1.0f;

// Starts to copy columns column, column + 1, ... of rows first .. first + Rows, padded with zeros.
// They have arrived for this thread after copies_arrived(), for the block after a barrier.
template <class S, int Rows, int Columns>
__device__ __forceinline__ void load_rows(const S* head, const Strided& m, int64_t first,
                                          int64_t count, int64_t column, int64_t columns,
                                          S (*to)[Columns]) {
  constexpr int kHere = Columns - kPad<S>;
  if (m.whole_vectors) {
    constexpr int V = 16 / int(sizeof(S)), kPieces = kHere / V;
#pragma unroll 1
    for (int e = threadIdx.x; e < Rows * kPieces; e += kThreads) {
      const int64_t token = first + e / kPieces, at = column + e % kPieces * V;
      const bool exists = token < count && at < columns;
      copy_async(to[e / kPieces] + e % kPieces * V, exists ? head + token * m.row + at : head,
                 exists);
    }
  } else {
#pragma unroll 1
    for (int e = threadIdx.x; e < Rows * kHere; e += kThreads) {
      const int64_t token = first + e / kHere, at = column + e % kHere;
      to[e / kHere][e % kHere] = token < count && at < columns ? head[token * m.row + at * m.column]
                                                               : narrow<S>(Arithmetic<S>(0));
    }
  }
}

// Whether there is NaN or infinity among the rows of a tile; the whole warp looks for it.
template <class S, int Rows, int Columns>
__device__ __forceinline__ bool not_finite(const S (*row)[Columns]) {
  constexpr int V = 16 / int(sizeof(S)), kPieces = (Columns - kPad<S>) / V;
  bool found = false;
#pragma unroll 1
  for (int e = threadIdx.x % 32; e < Rows * kPieces; e += 32) {
    const auto pack = *reinterpret_cast<const Pack<S, V>*>(row[e / kPieces] + e % kPieces * V);
#pragma unroll
    for (int v = 0; v < V; ++v) found |= !is_finite(widen(pack.at[v]));
  }
  return __any_sync(~0u, found);
}

// A warp's weights in shared memory: a column has a lane's own numbers, and tensor cores read rows.
template <class S>
union WarpTable {
  using T = Arithmetic<S>;
  static constexpr int N = kTile<T>;
  T column[N][32];
  S row[kTensorCores<S> ? 32 : 1][N + kPad<S>];

  // Applies change(x, j) to the lane's numbers in its column: a loop over registers would have to
  // be unrolled, and `change` is long.
  template <class Edit>
  __device__ __forceinline__ void edit(T* x, Edit change) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N; ++j) column[j][lane] = x[j];
#pragma unroll 1
    for (int j = 0; j < N; ++j) column[j][lane] = change(column[j][lane], j);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = column[j][lane];
    if (kTensorCores<S>) __syncwarp();  // rows lie where other lanes' columns do
  }

  // The same where `change` is short: in registers. Exponentials of fp64 are not, and would spill
  // them.
  template <class Edit>
  __device__ __forceinline__ void edit_short(T* x, Edit change) {
    if constexpr (sizeof(T) == 8) {
      edit(x, change);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] = change(x[j], j);
    }
  }

  // The weight of number j for the token of a lane.
  __device__ __forceinline__ T at(int j, int lane) const {
    if constexpr (kTensorCores<S>)
      return widen(row[lane][j]);
    else
      return column[j][lane];
  }

  // Weights of the lane's token, for the warp to use after __syncwarp.
  __device__ __forceinline__ void put(const T* weight) {
    const int lane = threadIdx.x % 32;
    if constexpr (kTensorCores<S>) {
#pragma unroll
      for (int j = 0; j < N; j += 8) {
        Pack<uint32_t, 4> pack;
#pragma unroll
        for (int e = 0; e < 4; ++e)
          pack.at[e] = pack_two<S>(weight[j + 2 * e] * kWeightUnit<S>,
                                   weight[j + 2 * e + 1] * kWeightUnit<S>);
        *reinterpret_cast<Pack<uint32_t, 4>*>(row[lane] + j) = pack;
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) column[j][lane] = weight[j];
    }
  }
};

// What a thread sums. On tensor cores 4 tokens times Columns / 4 columns, else 8 times Columns / 8;
// all of them tokens of its own warp. Sums are kWeightUnit times too large.
template <class S, int Columns>
struct Sums {
  using T = Arithmetic<S>;
  static constexpr bool kTensor = kTensorCores<S>;
  static constexpr int kTokens = kTensor ? 4 : 8;
  static constexpr int kColumns = kTensor ? Columns / 4 : Columns / 8;
  // Columns that lie side by side.
  static constexpr int V = kTensor ? 2 : kVector<T> < kColumns ? kVector<T> : kColumns;
  T sum[kTokens][kColumns];

  static __device__ __forceinline__ int token(int i) {
    const int lane = threadIdx.x % 32;
    return threadIdx.x / 32 * 32 + (kTensor ? lane / 4 + 8 * i : lane / 8 * kTokens + i);
  }
  // Column c of the thread is start() + offset(c): neighbours in a warp read neighbouring 16 bytes.
  static __device__ __forceinline__ int start() {
    return kTensor ? threadIdx.x % 4 * 2 : threadIdx.x % 8 * V;
  }
  static constexpr __device__ __forceinline__ int offset(int c) {
    return c / V * 8 * (kTensor ? 1 : V) + c % V;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[i][c] = 0;
  }
  __device__ __forceinline__ void scale(const T* factor) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const T x = factor[token(i)];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[i][c] *= x;
    }
  }
  __device__ __forceinline__ void scale(T factor) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[i][c] *= factor;
  }

  __device__ __forceinline__ void add(const WarpTable<S>& weight,
                                      const S (*row)[Columns + kPad<S>]) {
    if constexpr (kTensor) {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int j = 0; j < kTile<T>; j += 16) {
        uint32_t left[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
          load_matrices(weight.row[m * 16 + lane % 16] + j + lane / 16 * 8, left[m]);
#pragma unroll
        for (int c = 0; c < Columns; c += 16) {
          uint32_t right[4];
          load_transposed(row[j + lane % 16] + c + lane / 16 * 8, right);
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int k = 0; k < 2; ++k)
              multiply_add<S>(sum[2 * m] + c / 4 + 2 * k, sum[2 * m + 1] + c / 4 + 2 * k, left[m],
                              right + 2 * k);
        }
      }
    } else {
      const int first = threadIdx.x % 32 / 8 * kTokens;
#pragma unroll 2
      for (int j = 0; j < kTile<T>; ++j) {
        T w[kTokens], x[kColumns];
#pragma unroll
        for (int i = 0; i < kTokens; ++i) w[i] = weight.column[j][first + i];
#pragma unroll
        for (int c = 0; c < kColumns; c += V) {
          const auto pack = *reinterpret_cast<const Pack<T, V>*>(row[j] + start() + offset(c));
#pragma unroll
          for (int e = 0; e < V; ++e) x[c + e] = pack.at[e];
        }
#pragma unroll
        for (int i = 0; i < kTokens; ++i)
#pragma unroll
          for (int c = 0; c < kColumns; ++c) sum[i][c] += w[i] * x[c];
      }
    }
  }

  // The same one by one, without the rows that are hidden from a token; `hides(j)` says whether row
  // j is from the lane's own.
  template <class Hides>
  __device__ __forceinline__ void add_visible(const WarpTable<S>& weight,
                                              const S (*row)[Columns + kPad<S>], Hides hides) {
#pragma unroll 1
    for (int j = 0; j < kTile<T>; ++j) {
      const uint32_t hidden = __ballot_sync(~0u, hides(j));
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const int lane = token(i) % 32;
        if (hidden >> lane & 1) continue;
        const T w = weight.at(j, lane);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[i][c] += w * widen(row[j][start() + offset(c)]);
      }
    }
  }

  // total = total factor + sum; sum = 0: a single running sum would lose digits. A null `factor`
  // is 1. Only the thread that owns a total accesses it.
  __device__ __forceinline__ void flush(T* totals, const T* factor, bool first, int64_t tokens,
                                        int64_t column0, int64_t columns) {
    each_total(totals, factor, tokens, column0, columns,
               [&](T& total, T& x, T scale) { total = first ? x : total * scale + x; });
    clear();
  }
  __device__ __forceinline__ void take_totals(T* totals, const T* factor, int64_t tokens,
                                              int64_t column0, int64_t columns) {
    each_total(totals, factor, tokens, column0, columns,
               [](T& total, T& x, T scale) { x += total * scale; });
  }
  // body(total, sum, factor) for the totals of the thread. One address and one bound per row,
  // because more of them would take registers.
  template <class Body>
  __device__ __forceinline__ void each_total(T* totals, const T* factor, int64_t tokens,
                                             int64_t column0, int64_t columns, Body body) {
    const int64_t behind = columns - column0 - start();
    const int left = behind < Columns ? int(behind) : Columns;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (token(i) >= tokens) break;
      T* line = totals + token(i) * columns + column0 + start();
      const T x = factor ? factor[token(i)] : T(1);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (offset(c) < left) body(line[offset(c)], sum[i][c], x);
    }
  }
  // `rows` points at the block's first row.
  __device__ __forceinline__ void write(S* rows, const Strided& m, int64_t tokens, int64_t column0,
                                        int64_t columns) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (token(i) >= tokens) break;
#pragma unroll
      for (int c = 0; c < kColumns; c += V)
        write_columns<S, V>(sum[i] + c, rows + token(i) * m.row, m, column0 + start() + offset(c),
                            columns);
    }
  }
};

}  // namespace boltzattn::cuda
