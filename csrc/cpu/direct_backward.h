// Gradients of the streaming attention. Included inside an ISA's namespace.
//
// With P the weights, D the dropout factors and g = grad_out:
//   dV = (P D)^T g,  dP = D (g V^T),  dS = P (dP - delta),  delta_i = g_i . out_i - grad_lse_i,
//   dQ = scale dS K,  dK = scale dS^T Q,  dslope = -sum of dS_ij |i - j|;
// Gaussian scores have K_j - Q_i in the place of K_j, and Q_i - K_j in that of Q_i.
// A task owns a range of keys and streams all queries past it, one tile of keys after another.
// dQ and dslope alone are summed over tasks: each writes its share, and a second step adds them in
// order.
//
// Rounding leaves in dS an error of P times the rounding of dP and delta, which is nothing to dS if
// P is small. But where one key has nearly all the weight, its dP - delta is 0 except for rounding.
// The sum of dS over a row is grad_lse, so that key gets what the other keys leave of it.

// Sums over many rows are added in steps, because each addition to a running sum rounds relative to
// the whole sum.
template <class T>
static void join_total(T* sum, T* total, int64_t size) {
  for (int64_t c = 0; c < size; ++c) total[c] += sum[c];
  set_zero(sum, size);
}

template <class T>
BOLTZATTN_INLINE T sum_of_row(const T* row, int64_t width) {
  Vec<T> sum{};
  for (int64_t j = 0; j < width; j += kLanes<T>) sum += load(row + j);
  return reduce_sum<T>(sum);
}

// The sum of ds_ij times -|i - j| over the tile that `mask` was last applied to, in fp64.
template <class T>
static double sum_by_distance(const TileMask<T>& mask, int64_t rows, int64_t width, const T* ds) {
  Vec<double> sum{};
  for (int64_t i = 0; i < rows; ++i) {
    const double* distance = mask.distance + mask.distances_of_row(i);
    for (int64_t j = 0; j < width; j += kLanes<double>)
      sum += widened(ds + i * kKeyBlock + j) * load(distance + j);
  }
  return reduce_sum<double>(sum);
}

// dS times a key may overflow where the gradient, which is `scale` times that, does not. So large
// keys are multiplied by this first, and sums by the rest of the scale. It is a power of 2 (or 0,
// as the scale may be), so that nothing is rounded; small keys, which could underflow, are left
// alone. So are Gaussian scores: they are infinite where differences are that large.
template <class T>
static T key_factor(const Attention& call, int64_t h) {
  const double scale = ::fabs(call.scale);
  if (call.is_gaussian) return T(1);
  if (scale >= 1 || scale == 0) return T(scale == 0 ? 0 : 1);
  constexpr int64_t kAtOnce = 64;
  T number[kAtOnce];
  for (int64_t first = 0; first < call.n_k; first += kAtOnce) {
    const int64_t keys = least(kAtOnce, call.n_k - first);
    for (int64_t r = 0; r < call.rank; ++r) {
      read_block(call.key, h, first, r, keys, 1, number, 1, 0);
      for (int64_t j = 0; j < keys; ++j)
        if (number[j] > T(1) || number[j] < T(-1)) return T(::ldexp(1.0, ::ilogb(scale)));
    }
  }
  return T(1);
}

// Products of values below 1 / kRoom of the largest number with gradients that are dv times smaller
// add up to finite numbers.
template <class T>
constexpr T kRoom = sizeof(T) == 8 ? T(1.3407807929942597e154) : T(1.8446744073709552e19);

// What is known of a row before its gradients are summed. Its weights are rebuilt as
// exp(score - top_score) / sum. The maximum and the sum of the row are found again, by the same
// operations as in forward: an lse, even in fp64, has lost the digits that weights of large logits
// need.
template <class T>
struct RowState {
  T top_score, over_sum, delta;  // over_sum is 1 / sum, or 0 for a row without weight
  bool odd;          // NaN or infinity among its numbers, or numbers that could become infinite
  bool empty;        // without any weight
  int64_t top_tile;  // the first key of the tile with a key that has more than half of the weight
  int64_t top;       // this key; both are -1 if there is none
};

template <class T>
static void find_norms(const Attention& call, int64_t h, int64_t first, int64_t rows,
                       RowState<T>* found) {
  Scratch scratch(
      int64_t(sizeof(T)) * (kRowBlock * call.rank + kKeyBlock * (call.rank + kRowBlock)) +
          kRowBlock * int64_t(sizeof(RowSoftmax<T>)) + TileMask<T>::kBytes,
      4 + TileMask<T>::kPieces);
  T* q = scratch.take<T>(kRowBlock * call.rank);
  T* k = scratch.take<T>(call.rank * kKeyBlock);
  T* scores = scratch.take<T>(kRowBlock * kKeyBlock);
  auto* state = scratch.take<RowSoftmax<T>>(kRowBlock);
  TileMask<T> mask(call, h, scratch);
  const Scores<T> score(call);
  read_queries(call, h, first, rows, q);
  for (int64_t i = 0; i < rows; ++i) state[i] = {}, found[i].top = found[i].top_tile = -1;
  const int64_t key_end = call.is_causal ? least(call.n_k, first + rows) : call.n_k;
  for (int64_t key = 0; key < key_end; key += kKeyBlock) {
    const int64_t keys = least(kKeyBlock, key_end - key), width = width_of<T>(keys);
    pause_point();
    read_keys(call, h, key, keys, k);
    mask.start_keys(key, keys);
    score(rows, width, q, k, scores);
    mask.apply(first, rows, key, keys, scores);
    for (int64_t i = 0; i < rows; ++i) {
      const T top = top_of_row(scores + i * kKeyBlock, width);
      if (top > state[i].max) found[i].top_tile = key;
      state[i].raise(top);
    }
    for (int64_t i = 0; i < rows; ++i) weigh_row(state[i], scores + i * kKeyBlock, width);
  }
  for (int64_t i = 0; i < rows; ++i) {
    found[i].top_score = state[i].reference();
    found[i].over_sum = state[i].normaliser();
    found[i].empty = state[i].sum == 0;
    found[i].odd = mask.hides_pairs(first, 0, call.n_k) &&
                   !(all_finite(q + i * call.rank, call.rank, score.room()) &&
                     all_finite(&found[i].top_score, 1) && all_finite(&found[i].over_sum, 1));
    if (!(state[i].sum < 2)) found[i].top_tile = -1;  // the weight of the largest logit is 1 / sum
  }
}

// delta, summed in fp64: if one key takes all the weight, dP - delta is 0 except for rounding.
template <class T>
static void find_deltas(const AttentionGradient& g, int64_t h, int64_t first, int64_t rows,
                        RowState<T>* found) {
  const Attention& call = g.call;
  Scratch scratch(int64_t(sizeof(T)) * 2 * call.dv, 2);
  T* out = scratch.take<T>(call.dv);
  T* grad = scratch.take<T>(call.dv);
  for (int64_t i = 0; i < rows; ++i) {
    read_block(call.out, h, first + i, 0, 1, call.dv, out, 0, 1);
    read_block(g.grad_out, h, first + i, 0, 1, call.dv, grad, 0, 1);
    double sum = 0, lse_gradient = 0;
    for (int64_t c = 0; c < call.dv; ++c) sum += double(out[c]) * double(grad[c]);
    if (g.grad_lse) read_block(g.grad_lse, h, first + i, 0, 1, 1, &lse_gradient, 0, 0);
    found[i].delta = T(sum - lse_gradient);
    if (call.attn_mask || call.is_causal)
      found[i].odd |=
          !(all_finite(grad, call.dv, kRoom<T> * T(call.dv)) && all_finite(&found[i].delta, 1));
  }
}

template <class T>
static void direct_backward_keys(const AttentionGradient& g, RowState<T>* states, int64_t h,
                                 int64_t first_key, int64_t key_end, T* dq_share, double* dk_rows,
                                 double* slope_share) {
  // dk_rows[n_k][rank + 1]: dS^T Q, and in the last column the sum of dS, the gradient of a bias.
  const Attention& call = g.call;
  const int64_t dk_size = (call.rank + 1) * kKeyBlock;
  const Panels<T> by_value{call.dv, kKeyBlock};   // dV
  const Panels<T> by_key{kKeyBlock, call.dv};     // V^T
  const Panels<T> grad_tile{call.dv, kRowBlock};  // grad_out as the right factor of dV
  Scratch scratch(
      int64_t(sizeof(T)) * (2 * by_value.size() + by_key.size() + grad_tile.size() +
                            kRowBlock * call.dv + 2 * call.rank * kKeyBlock + 2 * dk_size +
                            kRowBlock * (call.rank + 2) + 3 * kRowBlock * kKeyBlock) +
          TileMask<T>::kBytes,
      15 + TileMask<T>::kPieces);
  T* k = scratch.take<T>(call.rank * kKeyBlock);
  T* scaled_k = scratch.take<T>(call.rank * kKeyBlock);
  T* dk = scratch.take<T>(dk_size);
  T* dk_total = scratch.take<T>(dk_size);
  T* v = scratch.take<T>(by_key.size());
  T* dv = scratch.take<T>(by_value.size());
  T* dv_total = scratch.take<T>(by_value.size());
  T* q = scratch.take<T>(kRowBlock * call.rank);
  T* grad_panels = scratch.take<T>(grad_tile.size());
  T* grad_rows = scratch.take<T>(kRowBlock * call.dv);
  T* p = scratch.take<T>(kRowBlock * kKeyBlock);
  T* ds = scratch.take<T>(kRowBlock * kKeyBlock);
  T* factor = scratch.take<T>(kRowBlock * kKeyBlock);
  TileMask<T> mask(call, h, scratch);
  const Dropout dropout(call, h);
  const Scores<T> score(call);
  constexpr int L = kLanes<T>;
  T* bias = dk + call.rank * kKeyBlock;
  const T of_key = key_factor<T>(call, h);
  // Dot scores have the scale in their queries.
  const double factor_of_keys = call.is_gaussian ? call.scale : 1;
  *slope_share = 0;

  for (int64_t key = first_key; key < key_end; key += kKeyBlock) {
    const int64_t keys = least(kKeyBlock, key_end - key), width = width_of<T>(keys);
    read_keys(call, h, key, keys, k);
    by_key.read_transposed(call.value, h, key, keys, v);
    for (T* x : {dk, dk_total}) set_zero(x, dk_size);
    for (T* x : {dv, dv_total}) set_zero(x, by_value.size());
    mask.start_keys(key, keys);
    mask.for_hidden_keys(keys, [&](int64_t j) {
      for (int64_t r = 0; r < call.rank; ++r) k[r * kKeyBlock + j] = 0;
      for (int64_t c = 0; c < call.dv; ++c) v[by_key.at(c, j)] = 0;
    });
    for (int64_t c = 0; c < call.rank * kKeyBlock; ++c) scaled_k[c] = k[c] * of_key;
    const bool odd_keys =
        mask.hides_pairs(0, key, keys) && !(all_finite(k, call.rank * kKeyBlock, score.room()) &&
                                            all_finite(v, by_key.size(), kRoom<T>));

    const int64_t first_row = call.is_causal ? key / kRowBlock * kRowBlock : 0;
    for (int64_t row = first_row; row < call.n_q; row += kRowBlock) {
      const int64_t rows = least(kRowBlock, call.n_q - row);
      T* dq = dq_share + row * (call.rank + 1);
      pause_point();
      read_queries(call, h, row, rows, q);
      grad_tile.read(g.grad_out, h, row, rows, grad_panels);
      read_block(g.grad_out, h, row, 0, rows, call.dv, grad_rows, call.dv, 1);
      score(rows, width, q, k, p);
      mask.apply(row, rows, key, keys, p);
      // All keys of an empty row may be hidden, and a difference to a query of NaN is NaN.
      for (int64_t i = 0; call.is_gaussian && i < rows; ++i)
        if (states[row + i].empty) set_zero(q + i * call.rank, call.rank);
      for (int64_t panel = 0; panel < width / kPanelWidth<T>; ++panel)
        gemm<T, false>(rows, kPanel, call.dv, {grad_rows, call.dv, 1}, v + by_key.offset(panel),
                       kPanelWidth<T>, ds + panel * kPanelWidth<T>, kKeyBlock);
      bool odd = false;
      if (mask.hides_pairs(row, key, keys)) {
        odd = odd_keys;
        for (int64_t i = 0; i < rows; ++i) odd |= states[row + i].odd;
      }
      for (int64_t i = 0; i < rows; ++i) {
        T* p_row = p + i * kKeyBlock;
        T* ds_row = ds + i * kKeyBlock;
        if (dropout) dropout.apply(row + i, key, width, ds_row, ds_row);
        RowState<T>& state = states[row + i];
        const T reference = state.top_score, over_sum = state.over_sum, delta = state.delta;
        int64_t top = state.top_tile == key ? 0 : -1;
        if (top == 0)
          while (top < keys && p_row[top] != reference) ++top;
#pragma GCC unroll 4
        for (int64_t j = 0; j < width; j += L) {
          const Vec<T> weight = exp2_of((load(p_row + j) - reference) * T(kLog2e)) * over_sum;
          store(p_row + j, weight);
          store(ds_row + j, weight * (load(ds_row + j) - delta));
        }
        for (int64_t j = 0; odd && j < width; ++j)
          if (j >= keys || mask.hides_pair(row + i, key + j)) p_row[j] = ds_row[j] = 0;
        if (top >= 0 && top < keys) ds_row[top] = 0, state.top = key + top;
        if (state.top_tile >= 0) dq[i * (call.rank + 1) + call.rank] += sum_of_row(ds_row, width);
      }
      const T* kept = p;
      if (dropout) {
        for (int64_t i = 0; i < rows; ++i)
          dropout.apply(row + i, key, width, p + i * kKeyBlock, factor + i * kKeyBlock);
        kept = factor;
      }
      if (odd) {
        mask.for_visible_pairs(row, rows, key, keys, [&](int64_t i, int64_t j) {
          const int64_t at = i * kKeyBlock + j;
          for (int64_t c = 0; c < call.dv; ++c)
            dv[by_value.at(j, c)] += kept[at] * grad_rows[i * call.dv + c];
          for (int64_t r = 0; r < call.rank; ++r) {
            const T x = q[i * call.rank + r], y = k[r * kKeyBlock + j];
            dk[r * kKeyBlock + j] += ds[at] * pull_of_key(call.is_gaussian, x, y);
            dq[i * (call.rank + 1) + r] +=
                ds[at] * pull_of_query(call.is_gaussian, x, scaled_k[r * kKeyBlock + j]);
          }
        });
      } else {
        for (int64_t panel = 0; panel < by_value.count(); ++panel)
          gemm<T, true>(keys, by_value.vectors(panel), rows, {kept, 1, kKeyBlock},
                        grad_panels + grad_tile.offset(panel), kPanelWidth<T>,
                        dv + by_value.offset(panel), kPanelWidth<T>);
        score.key_gradient(rows, width, call.rank, ds, q, k, dk);
        score.query_gradient(rows, width, call.rank, ds, q, scaled_k, dq);
      }
      if (g.grad_key_mask)
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t j = 0; j < width; j += L)
            store(bias + j, load(bias + j) + load(ds + i * kKeyBlock + j));
      if (g.grad_slopes) *slope_share += sum_by_distance(mask, rows, width, ds);
      if ((row / kRowBlock + 1) % kRowSpan == 0 || row + kRowBlock >= call.n_q) {
        join_total(dk, dk_total, dk_size);
        join_total(dv, dv_total, by_value.size());
      }
    }
    mask.for_hidden_keys(keys, [&](int64_t j) {
      for (int64_t r = 0; r <= call.rank; ++r) dk_total[r * kKeyBlock + j] = 0;
      for (int64_t c = 0; c < call.dv; ++c) dv_total[by_value.at(j, c)] = 0;
    });
    by_value.write(dv_total, keys, g.grad_value, h, key);
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t r = 0; r <= call.rank; ++r)
        dk_rows[(key + j) * (call.rank + 1) + r] =
            double(dk_total[r * kKeyBlock + j]) * (r < call.rank ? factor_of_keys : 1);
  }
}

// Adds up the shares of dq and of the gradient of the slope, gives the keys that have most of a
// row's weight their part, and writes the gradients of queries, keys and what is added to their
// scores. The last column of dq holds the sum of ds over all other keys.
template <class T>
static void finish_head(const AttentionGradient& g, int64_t h, int64_t shares,
                        const RowState<T>* states, T* dq, double* dk, const double* slope_shares) {
  const Attention& call = g.call;
  const int64_t n_q = call.n_q, rank = call.rank, width = rank + 1;
  const int64_t size = n_q * width, at_once = 256;
  const T of_key = key_factor<T>(call, h);
  for (int64_t s = 1; s < shares; ++s)
    for (int64_t c = 0; c < size; ++c) dq[c] += dq[s * size + c];
  double of_slope = 0;
  for (int64_t s = 0; s < shares; ++s) of_slope += slope_shares[s];
  Scratch scratch(int64_t(sizeof(T)) * (2 * rank + at_once * width), 3);
  T* q = scratch.take<T>(rank);
  T* k = scratch.take<T>(rank);
  T* rows = scratch.take<T>(at_once * width);
  for (int64_t i = 0; i < n_q; ++i) {
    const int64_t top = states[i].top;
    if (top < 0) continue;
    double lse_gradient = 0;
    if (g.grad_lse) read_block(g.grad_lse, h, i, 0, 1, 1, &lse_gradient, 0, 0);
    const T ds = T(lse_gradient - double(dq[i * width + rank]));
    read_block(call.query, h, i, 0, 1, rank, q, 0, 1);
    read_block(call.key, h, top, 0, 1, rank, k, 0, 1);
    for (int64_t r = 0; r < rank; ++r) {
      dq[i * width + r] += ds * (pull_of_query(call.is_gaussian, q[r], k[r]) * of_key);
      const T pull = pull_of_key(call.is_gaussian, q[r], k[r]);
      dk[top * width + r] += double(ds) * double(pull) * call.scale;
    }
    dk[top * width + rank] += double(ds);
    of_slope -= double(ds) * double(top < i ? i - top : top - i);
  }
  const T rest = of_key == T(0) ? T(0) : T(call.scale / double(of_key));
  for (int64_t c = 0; c < size; ++c) dq[c] *= rest;
  write_block(dq, width, 1, n_q, rank, g.grad_query, h, 0, 0);
  for (int64_t j = 0; j < call.n_k; j += at_once) {
    const int64_t here = least(at_once, call.n_k - j);
    for (int64_t c = 0; c < here * width; ++c) rows[c] = T(dk[j * width + c]);
    write_block(rows, width, 1, here, rank, g.grad_key, h, j, 0);
    if (g.grad_key_mask) write_block(rows + rank, 0, width, 1, here, g.grad_key_mask, h, 0, j);
  }
  if (g.grad_slopes) static_cast<double*>(g.grad_slopes.data)[g.grad_slopes.head[h]] = of_slope;
}

template <class T>
void direct_backward_heads(const AttentionGradient& g, int64_t first_head, int64_t head_end) {
  const Attention& call = g.call;
  const int64_t n_q = call.n_q, rank = call.rank, heads = head_end - first_head;
  // Depends on the sizes only, not on the number of threads: the order of sums must stay the same.
  const int64_t parts =
      most(1, least(ceil_div(call.n_k, 4 * kKeyBlock), ceil_div(32, most(heads, 1))));
  const int64_t keys = round_up(most(1, ceil_div(call.n_k, parts)), kKeyBlock);
  const int64_t shares = most(1, ceil_div(call.n_k, keys));
  Buffer<RowState<T>> states(heads * n_q);
  Buffer<T> dq(heads * shares * n_q * (rank + 1));
  Buffer<double> dk(heads * call.n_k *
                    (rank + 1));  // fp64, because one key may be the top of all rows
  Buffer<double> slope_shares(heads * shares);

  const int64_t row_blocks = ceil_div(n_q, kRowBlock);
  parallel(heads * row_blocks, [&](int64_t task) {
    const int64_t index = task / row_blocks, first = task % row_blocks * kRowBlock;
    const int64_t here = least(kRowBlock, n_q - first);
    RowState<T>* found = states.data + index * n_q + first;
    find_norms<T>(call, first_head + index, first, here, found);
    find_deltas<T>(g, first_head + index, first, here, found);
  });
  parallel(heads * shares, [&](int64_t task) {
    const int64_t h = first_head + task / shares, first = task % shares * keys;
    T* dq_share = dq.data + task * n_q * (rank + 1);
    set_zero(dq_share, n_q * (rank + 1));
    direct_backward_keys<T>(
        g, states.data + task / shares * n_q, h, first, least(first + keys, call.n_k), dq_share,
        dk.data + task / shares * call.n_k * (rank + 1), slope_shares.data + task);
  });
  parallel(heads, [&](int64_t index) {
    finish_head<T>(g, first_head + index, shares, states.data + index * n_q,
                   dq.data + index * shares * n_q * (rank + 1),
                   dk.data + index * call.n_k * (rank + 1), slope_shares.data + index * shares);
  });
}

template <class T>
void direct_backward(const AttentionGradient& g) {
  direct_backward_heads<T>(g, 0, g.call.heads);
}
