// Causal heads of rank 2 to 4. Included inside an ISA's namespace.
//
// The layout bounds the error of every pair, so one layout serves every prefix of the keys. Rows of
// a chunk see the keys of their own chunk by `direct`, and earlier ones by moments that are added
// up from chunk to chunk; each part has its lse, by which they are merged. In backward, the
// gradients of each part are those of attention over fewer keys for the share of the rows' weight
// that it has; sums over later rows run from the end.

// Chunks of rows, with the keys that have the same places. Rows behind all keys are one chunk.
struct Chunks {
  int64_t size, n_q, both, count;

  Chunks(const Attention& call, int64_t tokens)
      : size(tokens),
        n_q(call.n_q),
        both(least(call.n_q, call.n_k)),
        count(ceil_div(both, tokens) + (n_q > both)) {}
  int64_t first(int64_t c) const { return least(both, c * size); }
  int64_t key_end(int64_t c) const { return least(both, (c + 1) * size); }
  int64_t row_end(int64_t c) const { return first(c) == both ? n_q : key_end(c); }
};

// Calls body(call) for the rows and keys of all chunks, chunks of the same size as heads of a call.
template <class Body>
static void for_diagonal(const AttentionGradient& whole, int64_t h, const Chunks& chunks,
                         Body body) {
  const auto run = [&](int64_t first, int64_t number, int64_t n_q, int64_t n_k) {
    if (number == 0 || n_q == 0) return;
    AttentionGradient g = whole;
    g.call.heads = number;
    g.call.n_q = n_q;
    g.call.n_k = n_k;
    Buffer<int64_t> offsets(12 * number);
    int64_t* next = offsets.data;
    const auto start = [&](Matrix& m, int64_t row, int64_t column) {
      if (!m) return;
      for (int64_t c = 0; c < number; ++c)
        next[c] = m.head[h] + (first + c * n_q) * (row * m.row + column * m.column);
      m.head = next;
      next += number;
    };
    Attention& call = g.call;
    for (Matrix* m : {&call.query, &call.key, &call.value, &call.out, &call.lse, &g.grad_out,
                      &g.grad_lse, &g.grad_query, &g.grad_key, &g.grad_value})
      start(*m, 1, 0);
    for (Matrix* m : {&call.key_mask, &g.grad_key_mask}) start(*m, 0, 1);
    body(g);
  };
  const int64_t size = chunks.size, full = chunks.both / size, rest = chunks.both % size;
  run(0, full, size, size);
  run(full * size, 1, rest, rest);
  run(chunks.both, 1, chunks.n_q - chunks.both, 0);
}

// Sums over the tokens of the chunks so far, at the nodes of one side: grid[nodes][size] in units
// exp(log[panel]).
struct RunningSums {
  Buffer<double> grid, log, keep;
  int64_t size = 0, tokens = 0;

  template <class T, class C>
  void start(const TensorHead<T, C>& head, const Axis* axes) {
    int64_t panels = 1;
    for (int a = 0; a < head.rank; ++a) panels *= axes[a].panels;
    size = head.grid_rows(axes) * head.size;
    grid.resize(size);
    set_all_zero(grid.data, size);
    log.resize(panels);
    keep.resize(panels);
    for (int64_t p = 0; p < panels; ++p) log.data[p] = -INFINITY;
  }
  // Adds what `order` lists, as TokenSums does; false if a sum is not finite.
  template <class T, class C>
  bool add(const TensorHead<T, C>& head, const TensorOrder& order, const Matrix& rows,
           const T* centre, const double* bias, const double* last) {
    for (int64_t k = 0; k < order.count; ++k) {
      const int64_t p = order.occupied.data[k];
      keep.data[p] = log.data[p];
    }
    raise_logs(order, bias, log.data);
    for (int64_t k = 0; k < order.count; ++k) {
      const int64_t p = order.occupied.data[k];
      keep.data[p] = ::exp(keep.data[p] - log.data[p]);
    }
    sum_tensor_tiles(head, order, order.axis, grid.data, keep.data, [&](int64_t) {
      return TokenSums<T, C>(head, order, rows, centre, bias, log.data, last);
    });
    tokens += order.plain();
    return grid_is_moderate(head, order, order.axis, grid.data);
  }
  // The sums in C; those of panels without tokens are void.
  template <class C>
  const C* in(Buffer<C>& buffer) const {
    if constexpr (sizeof(C) == sizeof(double)) {
      return grid.data;
    } else {
      buffer.resize(size);
      for_parts(size, kPart, [&](int64_t first, int64_t end) {
        for (int64_t c = first; c < end; ++c) buffer.data[c] = C(grid.data[c]);
      });
      return buffer.data;
    }
  }
};

// Visits the chunks in order: visit(chunk, whether there are keys before it) with its queries and
// keys in the head's orders, and the tables over these keys if there are any. False if a value is
// not finite.
template <class T, class C, class Visit>
static bool for_chunks(TensorHead<T, C>& head, const Chunks& chunks, bool slopes, Visit visit) {
  RunningSums sums;
  sums.start(head, head.layout.key);
  Buffer<T> centre(head.size);
  for (int64_t c = 0; c < head.size; ++c) centre.data[c] = T(head.key_centre.data[c]);
  for (int64_t k = 0; k < chunks.count; ++k) {
    pause_point();
    head.query_order.sort(head.query, head.layout.query, chunks.first(k), chunks.row_end(k));
    if (sums.tokens > 0 && head.query_order.count > 0) {
      SeparableCore<C> core = core_of(head, false, sums.tokens);
      core.run(sums.in(head.moments), sums.log.data, slopes, head.table, head.table_log);
      visit(k);
    }
    head.key_order.sort(head.key, head.layout.key, chunks.first(k), chunks.key_end(k));
    if (k + 1 < chunks.count && head.key_order.count > 0 &&
        !sums.add(head, head.key_order, head.call.value, centre.data, head.key.bias.data, nullptr))
      return false;
  }
  return true;
}

// Values are measured from that of the first plain key; false if it is not finite.
template <class T, class C>
static bool start_causal(TensorHead<T, C>& head) {
  int64_t j = 0;
  while (!head.key.is_plain(j)) ++j;
  return find_key_centre(head, j);
}

// false, with results void, if a value is not finite.
template <class T>
static bool causal_forward(TensorHead<T, T>& head) {
  const Chunks chunks(head.call, head.layout.chunk);
  AttentionGradient g{};
  g.call = head.call;
  for_diagonal(g, head.h, chunks, [](const AttentionGradient& one) {
    direct_forward_heads<T>(one.call, 0, one.call.heads);
  });
  return start_causal(head) &&
         for_chunks(head, chunks, false, [&](int64_t) { evaluate_tensor<true>(head); });
}

// Of every row, what backward asks for.
template <class T>
struct CausalRows {
  Buffer<double> bias;  // -log Z in the frame: of all keys that the row sees
  Buffer<double> rest;  // grad_lse - grad_out . (out - the centre of values)
  // `direct` over the keys of its own chunk: results, and their gradients.
  Buffer<T> out, grad_out;
  Buffer<double> lse, grad_lse;
  Buffer<int64_t> begin;  // of heads

  CausalRows(const Attention& call)
      : bias(call.n_q),
        rest(call.n_q),
        out(call.n_q * call.dv),
        grad_out(call.n_q * call.dv),
        lse(call.n_q),
        grad_lse(call.n_q),
        begin(call.heads) {
    for (int64_t h = 0; h < call.heads; ++h) begin.data[h] = 0;
  }
  // The gradient of a head with these in the place of the caller's.
  AttentionGradient in_place_of(const AttentionGradient& g) {
    constexpr DType kType = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
    const int64_t dv = g.call.dv;
    AttentionGradient own = g;
    own.call.out = {out.data, kType, begin.data, dv, 1};
    own.call.lse = {lse.data, DType::kFloat64, begin.data, 1, 0};
    own.grad_out = {grad_out.data, kType, begin.data, dv, 1};
    own.grad_lse = {grad_lse.data, DType::kFloat64, begin.data, 1, 0};
    return own;
  }
};

// Fills `rows` once the results of `direct` are there; false if a gradient of out is not finite.
template <class T, class C>
static bool share_gradients(TensorHead<T, C>& head, const AttentionGradient& g,
                            CausalRows<T>& rows) {
  const Attention& call = g.call;
  const int64_t dv = call.dv, h = head.h;
  int odd = 0;
  for_parts(call.n_q, kChunk, [&](int64_t first, int64_t end) {
    Buffer<T> out(dv), grad(dv);
    for (int64_t i = first; i < end; ++i) {
      read_block(call.out, h, i, 0, 1, dv, out.data, 0, 1);
      read_block(g.grad_out, h, i, 0, 1, dv, grad.data, 0, 1);
      if (!all_finite(grad.data, dv)) __atomic_store_n(&odd, 1, __ATOMIC_RELAXED);
      const double lse = lse_of(call, h)[i];
      const bool seeing = lse > -INFINITY;
      // A row that sees nothing has no part in anything.
      if (!seeing) head.query.state.data[i] = TensorTokens::kHidden;
      const double share = seeing ? ::exp(rows.lse.data[i] - lse) : 0;
      double of_lse = 0, by_out = 0, gap = 0;
      if (g.grad_lse) read_column(g.grad_lse, h, i, 1, &of_lse);
      const T* own = rows.out.data + i * dv;
      for (int64_t c = 0; c < dv; ++c) {
        const double x = double(grad.data[c]);
        by_out += x * (double(out.data[c]) - head.key_centre.data[c]);
        gap += x * (double(own[c]) - double(out.data[c]));
        rows.grad_out.data[i * dv + c] = T(share * x);
      }
      rows.grad_lse.data[i] = share * (gap + of_lse);
      rows.rest.data[i] = of_lse - by_out;
      rows.bias.data[i] = seeing ? lse_offset(head, i) - lse : 0;
    }
  });
  return odd == 0;
}

// Adds to the gradients of the queries of a tile what keys of earlier chunks contribute.
template <class T, class C>
static void add_query_gradients(const TensorHead<T, C>& head, const AttentionGradient& g,
                                const CausalRows<T>& rows) {
  const Attention& call = head.call;
  const TensorOrder& order = head.query_order;
  const Segments segments(order.plain());
  const int rank = head.rank;
  parallel(segments.count, [&](int64_t segment) {
    PanelTables<T, C> table(head, true);
    TensorWeights<T> weights(order, head.layout.nodes);
    Buffer<T> block(kColumns * kTile), zero(kColumns);
    set_zero(zero.data, kColumns);
    const int lines = int(table.lines);
    for_tensor_tiles(order, segments, segment, [&](int64_t p, bool first, const Tile& tile) {
      const int64_t tokens = tile.tokens;
      if (first) {
        pause_point();
        table.read(head, index_of(order, p), true);
      }
      alignas(64) double factor[kTile];
      token_factors(rows.bias.data, table.log, tile, factor);
      const T* weight = weights.find(p, tile.order, tokens, factor);
      alignas(64) T share[kTile], moved[kMostAxes][kTile];
      blend(lines, tokens, weight, table.last[0].data, share);
      for (int a = 0; a < rank; ++a) blend(lines, tokens, weight, table.last[1 + a].data, moved[a]);
      double by_out[kTile] = {}, by_slope[kMostAxes][kTile] = {}, by_centre[kTile] = {};
      for_blocks(head.dv, [&](int64_t begin, int64_t width) {
        const Rows<T> grad = read_rows(g.grad_out, head.h, tile, begin, width, block.data);
        const auto dot_with = [&](int k, double* to) {
          dot_with_table(lines, tokens, width, weight, table.wide[k].data + begin, table.width,
                         grad, zero.data, to);
        };
        dot_with(0, by_out);
        for (int a = 0; a < rank; ++a) dot_with(1 + a, by_slope[a]);
        for (int64_t i = 0; i < tokens; ++i)
          by_centre[i] +=
              double(dot(grad[i], table.centre.data + begin, round_up(width, kLanes<T>)));
      });
      for (int64_t i = 0; i < tokens; ++i) {
        // grad_out . (out - the panel's value) - grad_lse, of the whole row
        const double whole = -rows.rest.data[tile.order[i]] - by_centre[i];
        const double of_logits = by_out[i] - whole * double(share[i]);
        double dt[kMostAxes];
        for (int a = 0; a < rank; ++a)
          dt[a] = by_slope[a][i] - whole * double(moved[a][i]) +
                  of_logits * (table.mean[a] + head.frame.s_middle[a]);
        write_turned(head, head.frame.inverse, dt, call.is_gaussian ? of_logits : 0, head.factor,
                     call.query, tile.order[i], g.grad_query, true);
      }
    });
  });
}

// false, with gradients void, if a number is not finite.
template <class T>
static bool causal_backward(TensorHead<T, double>& head, const AttentionGradient& g) {
  const Attention& call = g.call;
  // The core takes longer than in forward by more than pairs do.
  const Chunks chunks(call, 2 * head.layout.chunk);
  if (!start_causal(head)) return false;
  CausalRows<T> rows(call);
  const AttentionGradient own = rows.in_place_of(g);
  for_diagonal(own, head.h, chunks, [](const AttentionGradient& one) {
    direct_forward_heads<T>(one.call, 0, one.call.heads);
  });
  if (!share_gradients(head, g, rows)) return false;
  zero_rows<T>(g.grad_key, head.h, call.n_k, call.rank);
  zero_rows<T>(g.grad_value, head.h, call.n_k, call.dv);
  if (g.grad_key_mask) zero_rows<T>(g.grad_key_mask, head.h, 1, call.n_k);
  for_diagonal(own, head.h, chunks, [](const AttentionGradient& one) {
    direct_backward_heads<T>(one, 0, one.call.heads);
  });
  if (!for_chunks(head, chunks, true, [&](int64_t) { add_query_gradients(head, g, rows); }))
    return false;
  RunningSums later;
  later.start(head, head.layout.query);
  Buffer<T> zero(head.size);
  set_zero(zero.data, head.size);
  Buffer<double> tables[kMostTables], key_log, none;
  for (int64_t k = chunks.count - 1; k >= 0; --k) {
    pause_point();
    head.key_order.sort(head.key, head.layout.key, chunks.first(k), chunks.key_end(k));
    if (later.tokens > 0 && head.key_order.count > 0) {
      find_top_keys(head);
      SeparableCore<double> core = core_of(head, true, later.tokens);
      core.run(later.in(none), later.log.data, true, tables, key_log);
      evaluate_tensor_keys(head, g, tables, key_log.data, true);
    }
    head.query_order.sort(head.query, head.layout.query, chunks.first(k), chunks.row_end(k));
    if (k > 0 && head.query_order.count > 0 &&
        !later.add(head, head.query_order, g.grad_out, zero.data, rows.bias.data, rows.rest.data))
      return false;
  }
  return true;
}
