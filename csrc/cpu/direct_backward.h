// Gradients of the streaming attention. Included inside an ISA's namespace.
//
// With P the weights, D the dropout factors and g = grad_out:
//   dV = (P D)^T g,  dP = D (g V^T),  dS = P (dP - delta),  delta_i = g_i . out_i - grad_lse_i,
//   dQ = scale dS K,  dK = scale dS^T Q.
// A task owns a range of keys and streams all queries past it, one tile of keys after another.
// dQ alone is summed over tasks: each writes its share, and a second step adds them in order.

// Sums over many rows are added in steps, because each addition to a running sum rounds relative to
// the whole sum.
template <class T>
static void join_total(T* sum, T* total, int64_t size) {
  for (int64_t c = 0; c < size; ++c) total[c] += sum[c];
  set_zero(sum, size);
}

// dq[rows][rank] += ds[rows][width] k[rank][width]^T
template <class T>
static void add_query_gradient(int64_t rows, int64_t width, int64_t rank, const T* ds, const T* k,
                               T* dq) {
  constexpr int L = kLanes<T>;
  constexpr int kAtOnce = 4;
  for (int64_t i = 0; i < rows; ++i) {
    int64_t r = 0;
    for (; r + kAtOnce <= rank; r += kAtOnce) {
      Vec<T> sum[kAtOnce] = {};
      for (int64_t j = 0; j < width; j += L) {
        const Vec<T> x = load(ds + i * kKeyBlock + j);
#pragma GCC unroll 4
        for (int c = 0; c < kAtOnce; ++c) sum[c] += x * load(k + (r + c) * kKeyBlock + j);
      }
      for (int c = 0; c < kAtOnce; ++c) dq[i * rank + r + c] += reduce_sum<T>(sum[c]);
    }
    for (; r < rank; ++r) {
      Vec<T> sum{};
      for (int64_t j = 0; j < width; j += L)
        sum += load(ds + i * kKeyBlock + j) * load(k + r * kKeyBlock + j);
      dq[i * rank + r] += reduce_sum<T>(sum);
    }
  }
}

// What a row's weights are rebuilt from: 2^(score - high - low). The maximum and the sum of the row
// are found again, by the same operations as in forward: an lse, even in fp64, has lost the digits
// that weights of large logits need.
template <class T>
struct RowNorm {
  T high, low;
};

template <class T>
static void row_norms(const Attention& call, int64_t h, int64_t first, int64_t rows,
                      RowNorm<T>* norms) {
  Scratch scratch(
      int64_t(sizeof(T)) * (kRowBlock * call.rank + kKeyBlock * (call.rank + kRowBlock + 2)) +
          kRowBlock * int64_t(sizeof(OnlineSoftmax<T>)),
      6);
  T* q = scratch.take<T>(kRowBlock * call.rank);
  T* k = scratch.take<T>(call.rank * kKeyBlock);
  T* scores = scratch.take<T>(kRowBlock * kKeyBlock);
  auto* state = scratch.take<OnlineSoftmax<T>>(kRowBlock);
  TileMask<T> mask{call, h, scratch.take<T>(kKeyBlock), scratch.take<T>(kKeyBlock)};
  const ScoreTile<T> score = score_tile_for<T>(call.rank);
  read_queries(call, h, first, rows, q);
  for (int64_t i = 0; i < rows; ++i) state[i] = {};
  const int64_t key_end = call.is_causal ? least(call.n_k, first + rows) : call.n_k;
  for (int64_t key = 0; key < key_end; key += kKeyBlock) {
    const int64_t keys = least(kKeyBlock, key_end - key), width = width_of<T>(keys);
    read_keys(call, h, key, keys, k);
    mask.start_keys(key, keys);
    score(rows, width, call.rank, q, k, scores);
    mask.apply(first, rows, key, keys, scores);
    for (int64_t i = 0; i < rows; ++i) state[i].raise(top_of_row(scores + i * kKeyBlock, width));
    for (int64_t i = 0; i < rows; ++i) weigh_row(state[i], scores + i * kKeyBlock, width);
  }
  for (int64_t i = 0; i < rows; ++i)
    norms[i] = {state[i].reference(), state[i].sum == 0 ? T(0) : T(::log2(state[i].sum))};
}

template <class T>
static void direct_backward_keys(const AttentionGradient& g, const T* delta,
                                 const RowNorm<T>* norms, int64_t h, int64_t first_key,
                                 int64_t key_end, T* dq_share) {
  const Attention& call = g.call;
  const Panels<T> by_value{call.dv, kKeyBlock};   // dV
  const Panels<T> by_key{kKeyBlock, call.dv};     // V^T
  const Panels<T> grad_tile{call.dv, kRowBlock};  // grad_out as the right factor of dV
  Scratch scratch(int64_t(sizeof(T)) *
                      (2 * by_value.size() + by_key.size() + grad_tile.size() +
                       kRowBlock * call.dv + 3 * call.rank * kKeyBlock +
                       kRowBlock * (call.rank + 2) + 3 * kRowBlock * kKeyBlock + 2 * kKeyBlock),
                  16);
  T* k = scratch.take<T>(call.rank * kKeyBlock);
  T* dk = scratch.take<T>(call.rank * kKeyBlock);
  T* dk_total = scratch.take<T>(call.rank * kKeyBlock);
  T* v = scratch.take<T>(by_key.size());
  T* dv = scratch.take<T>(by_value.size());
  T* dv_total = scratch.take<T>(by_value.size());
  T* q = scratch.take<T>(kRowBlock * call.rank);
  T* grad_panels = scratch.take<T>(grad_tile.size());
  T* grad_rows = scratch.take<T>(kRowBlock * call.dv);
  T* p = scratch.take<T>(kRowBlock * kKeyBlock);
  T* ds = scratch.take<T>(kRowBlock * kKeyBlock);
  T* factor = scratch.take<T>(kRowBlock * kKeyBlock);
  TileMask<T> mask{call, h, scratch.take<T>(kKeyBlock), scratch.take<T>(kKeyBlock)};
  const Dropout dropout(call, h);
  const ScoreTile<T> score = score_tile_for<T>(call.rank);
  constexpr int L = kLanes<T>;

  for (int64_t key = first_key; key < key_end; key += kKeyBlock) {
    const int64_t keys = least(kKeyBlock, key_end - key), width = width_of<T>(keys);
    read_keys(call, h, key, keys, k);
    by_key.read_transposed(call.value, h, key, keys, v);
    for (T* x : {dk, dk_total}) set_zero(x, call.rank * kKeyBlock);
    for (T* x : {dv, dv_total}) set_zero(x, by_value.size());
    mask.start_keys(key, keys);

    const int64_t first_row = call.is_causal ? key / kRowBlock * kRowBlock : 0;
    for (int64_t row = first_row; row < call.n_q; row += kRowBlock) {
      const int64_t rows = least(kRowBlock, call.n_q - row);
      read_queries(call, h, row, rows, q);
      grad_tile.read(g.grad_out, h, row, rows, grad_panels);
      read_block(g.grad_out, h, row, 0, rows, call.dv, grad_rows, call.dv, 1);
      score(rows, width, call.rank, q, k, p);
      mask.apply(row, rows, key, keys, p);
      for (int64_t panel = 0; panel < width / kPanelWidth<T>; ++panel)
        gemm<T, false>(rows, kPanel, call.dv, {grad_rows, call.dv, 1}, v + by_key.offset(panel),
                       kPanelWidth<T>, ds + panel * kPanelWidth<T>, kKeyBlock);
      for (int64_t i = 0; i < rows; ++i) {
        T* p_row = p + i * kKeyBlock;
        T* ds_row = ds + i * kKeyBlock;
        if (dropout) dropout.apply(row + i, key, width, ds_row, ds_row);
        const T shift = delta[row + i];
        const RowNorm<T> norm = norms[row + i];
#pragma GCC unroll 4
        for (int64_t j = 0; j < width; j += L) {
          const Vec<T> weight = exp2_of((load(p_row + j) - norm.high) - norm.low);
          store(p_row + j, weight);
          store(ds_row + j, weight * (load(ds_row + j) - shift));
        }
      }
      const T* kept = p;
      if (dropout) {
        for (int64_t i = 0; i < rows; ++i)
          dropout.apply(row + i, key, width, p + i * kKeyBlock, factor + i * kKeyBlock);
        kept = factor;
      }
      for (int64_t panel = 0; panel < by_value.count(); ++panel)
        gemm<T, true>(keys, by_value.vectors(panel), rows, {kept, 1, kKeyBlock},
                      grad_panels + grad_tile.offset(panel), kPanelWidth<T>,
                      dv + by_value.offset(panel), kPanelWidth<T>);
      gemm<T, true>(call.rank, width / L, rows, {q, 1, call.rank}, ds, kKeyBlock, dk, kKeyBlock);
      add_query_gradient(rows, width, call.rank, ds, k, dq_share + row * call.rank);
      if ((row / kRowBlock + 1) % kRowSpan == 0 || row + kRowBlock >= call.n_q) {
        join_total(dk, dk_total, call.rank * kKeyBlock);
        join_total(dv, dv_total, by_value.size());
      }
    }
    by_value.write(dv_total, keys, g.grad_value, h, key);
    for (int64_t c = 0; c < call.rank * kKeyBlock; ++c)
      dk_total[c] *= T(kLn2);  // q held scale * log2(e)
    write_block(dk_total, 1, kKeyBlock, keys, call.rank, g.grad_key, h, key, 0);
  }
}

template <class T>
static void direct_backward_heads(const AttentionGradient& g, int64_t first_head,
                                  int64_t head_end) {
  const Attention& call = g.call;
  const int64_t n_q = call.n_q, rank = call.rank, heads = head_end - first_head;
  // Depends on the sizes only, not on the number of threads: the order of sums must stay the same.
  const int64_t parts =
      most(1, least(ceil_div(call.n_k, 4 * kKeyBlock), ceil_div(32, most(heads, 1))));
  const int64_t keys = round_up(ceil_div(call.n_k, parts), kKeyBlock);
  const int64_t shares = call.n_k == 0 ? 0 : ceil_div(call.n_k, keys);
  Buffer<T> delta(heads * n_q);
  Buffer<T> dq(heads * shares * n_q * rank);

  const int64_t delta_rows = 256, delta_blocks = ceil_div(n_q, delta_rows);
  parallel(heads * delta_blocks, [&](int64_t task) {
    const int64_t h = first_head + task / delta_blocks, first = task % delta_blocks * delta_rows;
    const int64_t rows = least(delta_rows, n_q - first);
    Scratch scratch(int64_t(sizeof(T)) * 2 * call.dv, 2);
    T* out = scratch.take<T>(call.dv);
    T* grad = scratch.take<T>(call.dv);
    for (int64_t i = first; i < first + rows; ++i) {
      read_block(call.out, h, i, 0, 1, call.dv, out, 0, 1);
      read_block(g.grad_out, h, i, 0, 1, call.dv, grad, 0, 1);
      // In fp64: if one key takes all the weight, dP - delta is 0 except for rounding.
      double sum = 0;
      for (int64_t c = 0; c < call.dv; ++c) sum += double(out[c]) * double(grad[c]);
      double lse_gradient = 0;
      if (g.grad_lse) read_block(g.grad_lse, h, i, 0, 1, 1, &lse_gradient, 0, 0);
      delta.data[(h - first_head) * n_q + i] = T(sum - lse_gradient);
    }
  });
  Buffer<RowNorm<T>> norms(heads * n_q);
  const int64_t norm_blocks = ceil_div(n_q, kRowBlock);
  parallel(heads * norm_blocks, [&](int64_t task) {
    const int64_t index = task / norm_blocks, first = task % norm_blocks * kRowBlock;
    row_norms<T>(call, first_head + index, first, least(kRowBlock, n_q - first),
                 norms.data + index * n_q + first);
  });
  parallel(heads * shares, [&](int64_t task) {
    const int64_t h = first_head + task / shares, first = task % shares * keys;
    T* dq_share = dq.data + task * n_q * rank;
    set_zero(dq_share, n_q * rank);
    direct_backward_keys<T>(g, delta.data + task / shares * n_q, norms.data + task / shares * n_q,
                            h, first, least(first + keys, call.n_k), dq_share);
  });
  const int64_t rows = 1024, blocks = ceil_div(n_q, rows);
  parallel(heads * blocks, [&](int64_t task) {
    const int64_t index = task / blocks, first = task % blocks * rows;
    const int64_t size = least(rows, n_q - first) * rank;
    Scratch scratch(int64_t(sizeof(T)) * size, 1);
    T* sum = scratch.take<T>(size);
    for (int64_t c = 0; c < size; ++c) sum[c] = 0;
    for (int64_t s = 0; s < shares; ++s) {
      const T* share = dq.data + (index * shares + s) * n_q * rank + first * rank;
      for (int64_t c = 0; c < size; ++c) sum[c] += share[c];
    }
    for (int64_t c = 0; c < size; ++c) sum[c] *= T(call.scale);
    write_block(sum, rank, 1, least(rows, n_q - first), rank, g.grad_query, first_head + index,
                first, 0);
  });
}

template <class T>
static void direct_backward(const AttentionGradient& g) {
  direct_backward_heads<T>(g, 0, g.call.heads);
}
