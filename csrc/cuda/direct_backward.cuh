// Gradients of attention over all pairs. No torch.
//
// With P the weights, D the dropout factors and g = grad_out:
//   dV = (P D)^T g,  dP = D (g V^T),  dS = P (dP - delta),  delta_i = g_i . out_i - grad_lse_i,
//   dQ = scale dS K,  dK = scale dS^T Q,  dbias_j = sum of dS_ij,  dslope = -sum of dS_ij |i - j|;
// Gaussian scores have K_j - Q_i in the place of K_j, and Q_i - K_j in that of Q_i.
// dV, dQ and dK are three launches, each of which recomputes P, so blocks share nothing.
#pragma once

#include "cuda/direct.cuh"

namespace boltzattn::cuda {

// What a row's weights are rebuilt from: 2^(logit - high - low). The maximum and the sum of the row
// are found again, by the same operations as in forward: an lse, even in fp64, has lost the digits
// that weights of large logits need.
template <class T>
struct RowNorm {
  T high, low, delta;
};

template <class S, bool Gaussian>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    direct_row_norms(const __grid_constant__ Gradient g) {
  using T = Arithmetic<S>;
  constexpr int N = kTile<T>;
  __shared__ __align__(16) Logits<S, Gaussian> logits;
  __shared__ WarpTable<S> tables[kWarps];
  const Call& call = g.call;
  const Place at(call.n_q, kThreads, 1, 1);
  if (call.served && call.served[at.head]) return;
  const int64_t row = at.first + threadIdx.x, rows = least(kThreads, call.n_q - at.first);
  const Vectors<S> queries(call, call.query, at.head, call.n_q, query_factor<Gaussian>(call));
  const Vectors<S> keys(call, call.key, at.head, call.n_k, 1);
  Masks<T> masks(call, at.head);
  OnlineSoftmax<T> state;
  int turn = 0;
  const int64_t end = call.is_causal ? least(call.n_k, at.first + rows) : call.n_k;
  for (int64_t key = 0; key < end; key += N) {
    T logit[N];
    logits.tile(call, queries, row, keys, key, key == 0, turn, logit);
    if (!masks.all_plain(at.first, kThreads, key, N))
      tables[threadIdx.x / 32].edit(logit,
                                    [&](T x, int j) { return masks.apply(x, row, key + j); });
    T top = -INFINITY;
#pragma unroll
    for (int j = 0; j < N; ++j) top = logit[j] > top ? logit[j] : top;
    state.raise(top);
    const T reference = state.reference();
    T sum = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) sum += OnlineSoftmax<T>::power_of_2(logit[j] - reference);
    state.sum += double(sum);
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
      state.reference(), state.sum == 0 ? T(INFINITY) : T(::log2(state.sum)), delta};
}

template <class T>
__device__ __forceinline__ RowNorm<T> row_norm(const Gradient& g, int64_t head, int64_t row) {
  if (row >= g.call.n_q) return {0, 0, 0};
  return static_cast<const RowNorm<T>*>(g.row_norms)[head * g.call.n_q + row];
}

// dV: forward with the sides exchanged; a thread weighs the queries for one key.
template <class S, int Columns, bool Gaussian>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    direct_value_gradient(const __grid_constant__ Gradient g) {
  using T = Arithmetic<S>;
  constexpr int N = kTile<T>;
  __shared__ __align__(16) Logits<S, Gaussian> logits;
  __shared__ __align__(16) S grad_rows[2][N][Columns + kPad<S>];
  __shared__ __align__(16) WarpTable<S> tables[kWarps];
  __shared__ RowNorm<T> norms[2][N];

  const Call& call = g.call;
  const Place at(call.n_k, kThreads, call.dv, Columns);
  if (call.served && call.served[at.head]) return;
  const int64_t key = at.first + threadIdx.x, keys_here = least(kThreads, call.n_k - at.first);
  const Vectors<S> queries(call, call.query, at.head, call.n_q, query_factor<Gaussian>(call));
  const Vectors<S> keys(call, call.key, at.head, call.n_k, 1);
  const S* grad_out = head_of<const S>(call, g.grad_out, at.head);
  T* totals = static_cast<T*>(call.totals) + (at.head * call.n_k + at.first) * call.dv;
  WarpTable<S>& table = tables[threadIdx.x / 32];
  Masks<T> masks(call, at.head);
  const Dropout<T> dropout(call, at.head);
  Sums<S, Columns> sums;
  sums.clear();
  int turn = 0, half = 0;

  const int64_t start = call.is_causal ? at.first / N * N : 0;
  const auto load = [&](int64_t row) {
    load_rows<S, N>(grad_out, g.grad_out, row, call.n_q, at.column, call.dv, grad_rows[half]);
    if (threadIdx.x < N) norms[half][threadIdx.x] = row_norm<T>(g, at.head, row + threadIdx.x);
  };
  load(start);
  for (int64_t row = start; row < call.n_q; row += N) {
    if (row > start && (row - start) % kSpan == 0)
      sums.flush(totals, nullptr, row - start == kSpan, keys_here, at.column, call.dv);
    T logit[N];
    copies_arrived();
    logits.tile(call, keys, key, queries, row, row == start, turn, logit);
    const auto& here = grad_rows[half];
    const auto& norm = norms[half];
    half ^= 1;
    if (row + N < call.n_q) load(row + N);
    const bool plain = masks.all_plain(row, N, at.first, kThreads);
    if (!plain) table.edit(logit, [&](T x, int i) { return masks.apply(x, row + i, key); });
    table.edit_short(logit, [&](T x, int i) {
      return OnlineSoftmax<T>::power_of_2((x - norm[i].high) - norm[i].low);
    });
    if (dropout.threshold)
      table.edit(logit, [&](T x, int i) { return dropout.keeps(row + i, key) ? x : T(0); });
    table.put(logit);
    __syncwarp();
    // The weights of a row whose sum is NaN are NaN, even those of hidden keys.
    if (!plain && (__any_sync(~0u, isnan(norm[threadIdx.x % N].low)) || not_finite<S, N>(here)))
      sums.add_visible(table, here, [&](int i) { return masks.hides(row + i, key); });
    else
      sums.add(table, here);
  }

  if (call.n_q - start > kSpan) sums.take_totals(totals, nullptr, keys_here, at.column, call.dv);
  sums.scale(dropout.kept / T(kWeightUnit<S>));
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

  static __device__ __forceinline__ int owner_at(int a) {
    return threadIdx.x / 16 * kOwnersEach + a;
  }
  static __device__ __forceinline__ int other_at(int b) {
    return threadIdx.x % 16 * kOthersEach + b;
  }

  // to[r][t] = entry chunk + r of token first + t
  template <class S, int Width>
  static __device__ __forceinline__ void load(const Vectors<S>& from, int64_t first, int tokens,
                                              int64_t chunk, int64_t depth, T (*to)[Width]) {
    for (int e = threadIdx.x; e < tokens * kRankChunk; e += kThreads) {
      const int t = e / kRankChunk, r = e % kRankChunk;
      to[r][t] = chunk + r < depth ? from.at(first + t, chunk + r) : T(0);
    }
  }

  // sum[a][b] = <owner a, other b> over `depth` entries, or the square of their distance. Ends with
  // a barrier.
  template <bool Gaussian, class S>
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
        for (int a = 0; a < kOwnersEach; ++a) x[a] = owner[r][owner_at(a)];
#pragma unroll
        for (int b = 0; b < kOthersEach; ++b) y[b] = other[r][other_at(b)];
#pragma unroll
        for (int a = 0; a < kOwnersEach; ++a)
#pragma unroll
          for (int b = 0; b < kOthersEach; ++b)
            sum[a][b] = add_term<Gaussian>(sum[a][b], x[a], y[b]);
      }
      __syncthreads();
    }
  }
};

// The same product of 16-bit rows on tensor cores: dP, over dv. Factors are exact, and
// sums are in fp32. Logits use `Product`, because they must round as in direct_row_norms.
template <class S>
struct TensorProduct {
  static constexpr int kDepth = 32, N = kOthers<float>;
  static constexpr int kOwnersEach = 2, kOthersEach = N / 4;
  S owner[kOwners][kDepth + kPad<S>];
  S other[N][kDepth + kPad<S>];

  static __device__ __forceinline__ int owner_at(int a) {
    return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * a;
  }
  static __device__ __forceinline__ int other_at(int b) {
    return b / 2 * 8 + threadIdx.x % 4 * 2 + b % 2;
  }

  __device__ __forceinline__ void run(const Vectors<S>& owners, const Strided& owner_rows,
                                      int64_t first_o, const Vectors<S>& others,
                                      const Strided& other_rows, int64_t first_n, int64_t depth,
                                      float (*sum)[kOthersEach]) {
#pragma unroll
    for (int a = 0; a < kOwnersEach; ++a)
#pragma unroll
      for (int b = 0; b < kOthersEach; ++b) sum[a][b] = 0;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t chunk = 0; chunk < depth; chunk += kDepth) {
      load_rows<S, kOwners>(owners.data, owner_rows, first_o, owners.count, chunk, depth, owner);
      load_rows<S, N>(others.data, other_rows, first_n, others.count, chunk, depth, other);
      copies_arrived();
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kDepth; k += 16) {
        uint32_t left[4];
        load_matrices(owner[warp * 16 + lane % 16] + k + lane / 16 * 8, left);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
          uint32_t right[4];
          load_matrices(other[n + lane % 8 + lane / 16 * 8] + k + lane / 8 % 2 * 8, right);
          multiply_add<S>(sum[0] + n / 4, sum[1] + n / 4, left, right);
          multiply_add<S>(sum[0] + n / 4 + 2, sum[1] + n / 4 + 2, left, right + 2);
        }
      }
      __syncthreads();
    }
  }
};

template <class S, bool Keys, bool Gaussian>
__global__ void __launch_bounds__(kThreads)
    direct_logit_gradient(const __grid_constant__ Gradient g) {
  using T = Arithmetic<S>;
  constexpr int N = kOthers<T>, kHalf = N / 2;
  using Slopes = std::conditional_t<kTensorCores<S>, TensorProduct<S>, Product<T>>;
  __shared__ __align__(16) union {
    Product<T> product;
    Slopes slopes;
  } tiles;
  Product<T>& product = tiles.product;
  __shared__ __align__(16) T grad_logit[N][kOwners + 4];  // padded: lanes read it both ways
  __shared__ double sum[kRankChunk][kThreads];
  __shared__ RowNorm<T> norms[Keys ? N : kOwners];

  const Call& call = g.call;
  const Place at(Keys ? call.n_k : call.n_q, kOwners, call.rank, kRankChunk);
  if (call.served && call.served[at.head]) return;
  const Vectors<S> queries(call, call.query, at.head, call.n_q, query_factor<Gaussian>(call));
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
  // What is added to the scores of the token: its bias, or a slope times distances.
  const bool has_bias = at.column == 0 && (Keys ? g.grad_key_mask.data : g.grad_slopes.data);
  double of_bias = 0;
  if (!Keys && threadIdx.x < kOwners)
    norms[threadIdx.x] = row_norm<T>(g, at.head, at.first + threadIdx.x);

  const int64_t n = Keys ? call.n_q : call.n_k;
  const int64_t start = Keys && call.is_causal ? at.first / N * N : 0;
  const int64_t end = !Keys && call.is_causal ? least(n, at.first + kOwners) : n;
  for (int64_t first = start; first < end; first += N) {
    if (Keys && threadIdx.x < N) norms[threadIdx.x] = row_norm<T>(g, at.head, first + threadIdx.x);
    T logit[Product<T>::kOwnersEach][Product<T>::kOthersEach];
    product.template run<Gaussian>(Keys ? keys : queries, at.first, Keys ? queries : keys, first,
                                   call.rank, logit);
#pragma unroll
    for (int b = 0; b < Product<T>::kOthersEach; ++b)
#pragma unroll
      for (int a = 0; a < Product<T>::kOwnersEach; ++a)
        grad_logit[product.other_at(b)][product.owner_at(a)] =
            Gaussian ? logit[a][b] * square_factor<T>(call) : logit[a][b];
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
    T slopes[Slopes::kOwnersEach][Slopes::kOthersEach];
    if constexpr (kTensorCores<S>) {
      tiles.slopes.run(Keys ? values : grads, Keys ? call.value : g.grad_out, at.first,
                       Keys ? grads : values, Keys ? g.grad_out : call.value, first, call.dv,
                       slopes);
    } else {
      product.template run<false>(Keys ? values : grads, at.first, Keys ? grads : values, first,
                                  call.dv, slopes);
    }
#pragma unroll
    for (int b = 0; b < Slopes::kOthersEach; ++b) {
#pragma unroll
      for (int a = 0; a < Slopes::kOwnersEach; ++a) {
        const int mine = Slopes::owner_at(a), other = Slopes::other_at(b);
        T slope = slopes[a][b];
        if (dropout.threshold)
          slope = dropout.keeps(Keys ? first + other : at.first + mine,
                                Keys ? at.first + mine : first + other)
                      ? slope * dropout.kept
                      : T(0);
        grad_logit[other][mine] *= slope - norms[Keys ? other : mine].delta;
      }
    }
    product.load(Keys ? plain_queries : keys, first, N, at.column, call.rank, product.other);
    if (Gaussian)
      product.load(Keys ? keys : queries, at.first, kOwners, at.column, call.rank, product.owner);
    __syncthreads();
    T x[kHalf];
#pragma unroll
    for (int o = 0; o < kHalf; ++o) x[o] = grad_logit[half + o][owner];
    // The sum of term(o, gradient of logit o) over the thread's others; over those that are visible
    // if a hidden one may have spoilt it.
    const auto sum_terms = [&](auto term) {
      T part = 0;
#pragma unroll
      for (int o = 0; o < kHalf; ++o) part += term(half + o, x[o]);
      if (plain || is_finite(part)) return part;
      part = 0;
#pragma unroll 1
      for (int o = half; o < half + kHalf; ++o)
        if (!masks.hides(Keys ? first + o : token, Keys ? token : first + o))
          part += term(o, grad_logit[o][owner]);
      return part;
    };
    for (int r = 0; r < depth; ++r)
      sum[r][threadIdx.x] += double(sum_terms([&](int o, T slope) {
        const T y = product.other[r][o];
        return slope * (Gaussian ? y - product.owner[r][owner] : y);
      }));
    if (has_bias)
      of_bias += double(sum_terms([&](int o, T slope) {
        return Keys ? slope : -slope * masks.distance(token, first + o);
      }));
    __syncthreads();
  }

  double* biases = reinterpret_cast<double*>(grad_logit);  // no longer needed
  if (has_bias) biases[threadIdx.x] = of_bias;
  __syncthreads();
  const Strided& to = Keys ? g.grad_key : g.grad_query;
  if (half > 0 || token >= (Keys ? call.n_k : call.n_q)) return;
  S* line = head_of<S>(call, to, at.head) + token * to.row;
  for (int r = 0; r < depth; ++r)
    line[(at.column + r) * to.column] =
        narrow<S>(T((sum[r][owner] + sum[r][owner + kOwners]) * call.scale));
  if (!has_bias) return;
  const double total = biases[owner] + biases[owner + kOwners];
  if (Keys)
    head_of<T>(call, g.grad_key_mask, at.head)[token * g.grad_key_mask.column] =
        masks.hides(token) ? T(0) : T(total);
  else
    g.slope_sums[at.head * call.n_q + token] = total;
}

// The gradient of a head's slope from its rows: a thread adds every 128th, the first all of these.
__global__ void __launch_bounds__(kThreads)
    direct_slope_gradient(const __grid_constant__ Gradient g) {
  __shared__ double sums[kThreads];
  const Call& call = g.call;
  const int64_t head = blockIdx.x;
  if (call.served && call.served[head]) return;
  double sum = 0;
  for (int64_t row = threadIdx.x; row < call.n_q; row += kThreads)
    sum += g.slope_sums[head * call.n_q + row];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int t = 1; t < kThreads; ++t) sum += sums[t];
  *head_of<double>(call, g.grad_slopes, head) = sum;
}

}  // namespace boltzattn::cuda
