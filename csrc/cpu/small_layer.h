// A self-attention layer of few tokens in one kernel: projections, attention and output projection.
// Included inside an ISA's namespace.
//
// A task computes a whole sequence, so that its projections are still in cache when they are used.
// Sums over tokens are made by one task in one order for any number of threads.

// A right factor [depth, width] in panels.
template <class T>
struct Factor {
  Panels<T> panels;
  Buffer<T> data;

  Factor(int64_t depth, int64_t width) : panels{width, depth}, data(panels.size()) {
    if (width % kPanelWidth<T> != 0) set_zero(data.data, panels.size());
  }
  // Rows `first` and following are those of a matrix of `count` rows.
  void read(const Matrix& m, int64_t first, int64_t count) {
    for (int64_t p = 0; p < panels.count(); ++p)
      read_block(m, 0, 0, p * kPanelWidth<T>, count, panels.columns(p),
                 data.data + panels.offset(p) + first * kPanelWidth<T>, kPanelWidth<T>, 1);
  }
  // Columns `first` and following are the rows of a matrix of `count` rows.
  void read_transposed(const Matrix& m, int64_t first, int64_t count) {
    constexpr int64_t kDepth = 64;  // rows of a panel that stay in cache while they are filled
    for (int64_t row = 0; row < count;) {
      const int64_t at = first + row, lane = at % kPanelWidth<T>;
      const int64_t here = least(kPanelWidth<T> - lane, count - row);
      T* to = data.data + panels.offset(at / kPanelWidth<T>) + lane;
      for (int64_t k = 0; k < panels.rows; k += kDepth)
        read_block(m, 0, row, k, here, least(kDepth, panels.rows - k), to + k * kPanelWidth<T>, 1,
                   kPanelWidth<T>);
      row += here;
    }
  }
};

template <class T>
constexpr DType kDType = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;

// to[b] = from[b] factor + bias for the `n` rows of one sequence.
template <class T>
static void multiply(const Matrix& from, int64_t b, int64_t n, const Factor<T>& factor,
                     const T* bias, const Matrix& to, int64_t first_column = 0) {
  constexpr int64_t kRows = 48;
  const Panels<T>& panels = factor.panels;
  const int64_t depth = panels.rows;
  const bool in_place = from.dtype == kDType<T>;
  parallel(ceil_div(n, kRows), [&](int64_t block) {
    const int64_t first = block * kRows, rows = least(kRows, n - first);
    Scratch scratch(int64_t(sizeof(T)) * kRows * (depth + kPanelWidth<T>), 2);
    T* copy = scratch.take<T>(in_place ? 0 : kRows * depth);
    T* product = scratch.take<T>(kRows * kPanelWidth<T>);
    Strided<T> a{static_cast<const T*>(from.data) + from.head[b] + first * from.row, from.row,
                 from.column};
    if (!in_place) {
      read_block(from, b, first, 0, rows, depth, copy, depth, 1);
      a = {copy, depth, 1};
    }
    for (int64_t p = 0; p < panels.count(); ++p) {
      const int64_t columns = panels.columns(p), column = p * kPanelWidth<T>;
      gemm<T, false>(rows, panels.vectors(p), depth, a, factor.data.data + panels.offset(p),
                     kPanelWidth<T>, product, kPanelWidth<T>);
      if (bias)
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t c = 0; c < columns; ++c) product[i * kPanelWidth<T> + c] += bias[column + c];
      write_block(product, kPanelWidth<T>, 1, rows, columns, to, b, first, first_column + column);
    }
  });
}

// The widths of a layer and its tensors as matrices. Rows are contiguous.
template <class T>
struct SmallLayerView {
  const SmallLayer& layer;
  const int64_t heads, numbers, width;  // of queries (or keys), of values
  Buffer<int64_t> offsets;
  int64_t* next;

  explicit SmallLayerView(const SmallLayer& of)
      : layer(of),
        heads(of.batch * of.num_heads),
        numbers(of.num_heads * of.rank),
        width(of.num_heads * of.dv),
        offsets(16 * most(heads, 1)),
        next(offsets.data) {}

  // [batch, n, columns]
  Matrix rows(void* data, DType dtype, int64_t columns) {
    int64_t* at = next;
    next += layer.batch;
    for (int64_t b = 0; b < layer.batch; ++b) at[b] = b * layer.n * columns;
    return {data, dtype, at, columns, 1};
  }
  // [batch * num_heads, n, width] within rows of `columns`
  Matrix by_head(void* data, DType dtype, int64_t columns, int64_t first, int64_t of_head) {
    int64_t* at = next;
    next += heads;
    for (int64_t h = 0; h < heads; ++h)
      at[h] = h / layer.num_heads * layer.n * columns + first + h % layer.num_heads * of_head;
    return {data, dtype, at, columns, 1};
  }

  Attention attention(void* query_key, void* value, void* out, double* lse) {
    const DType dtype = layer.x.dtype;
    Attention call{};
    call.heads = heads;
    call.n_q = call.n_k = layer.n;
    call.rank = layer.rank;
    call.dv = layer.dv;
    call.scale = layer.scale;
    call.is_causal = layer.is_causal;
    call.query = by_head(query_key, dtype, 2 * numbers, 0, layer.rank);
    call.key = by_head(query_key, dtype, 2 * numbers, numbers, layer.rank);
    call.value = by_head(value, dtype, width, 0, layer.dv);
    call.out = by_head(out, dtype, width, 0, layer.dv);
    int64_t* at = next;
    next += heads;
    for (int64_t h = 0; h < heads; ++h) at[h] = h * layer.n;
    call.lse = {lse, DType::kFloat64, at, 1, 0};
    if (layer.key_mask) {
      call.key_mask = layer.key_mask;
      call.key_mask.head = next;
      for (int64_t h = 0; h < heads; ++h) *next++ = layer.key_mask.head[h / layer.num_heads];
    }
    return call;
  }
};

template <class T>
static void read_bias(const Matrix& bias, int64_t count, Buffer<T>& to) {
  if (!bias) return;
  to.resize(count);
  read_block(bias, 0, 0, 0, 1, count, to.data, 0, 1);
}

template <class T>
void small_layer_forward(const SmallLayer& layer) {
  SmallLayerView<T> view(layer);
  const int64_t tokens = layer.batch * layer.n, numbers = view.numbers, width = view.width;
  const DType dtype = layer.x.dtype;
  const bool projects_out = bool(layer.w_o);
  // What is not kept is as wide as the widest dtype allows.
  Buffer<T> own_query_key, own_value, own_heads;
  Buffer<double> own_lse;
  const auto memory = [&](void* kept, auto& own, int64_t size) -> void* {
    if (!kept) own.resize(size);
    return kept ? kept : own.data;
  };
  void* query_key = memory(layer.query_key, own_query_key, tokens * 2 * numbers);
  void* value = memory(layer.value, own_value, tokens * width);
  void* heads = projects_out ? memory(layer.heads, own_heads, tokens * width) : layer.out.data;
  void* lse = memory(layer.lse, own_lse, view.heads * layer.n);
  const Attention call = view.attention(query_key, value, heads, static_cast<double*>(lse));

  Factor<T> to_numbers(layer.d, 2 * numbers), to_value(layer.d, width);
  to_numbers.read_transposed(layer.w_q, 0, numbers);
  to_numbers.read_transposed(layer.w_k, numbers, numbers);
  to_value.read_transposed(layer.w_v, 0, width);
  Factor<T> to_out(projects_out ? width : 0, layer.d_out);
  if (projects_out) to_out.read_transposed(layer.w_o, 0, layer.d_out);
  Buffer<T> b_in, b_o;
  read_bias(layer.b_in, 2 * numbers + width, b_in);
  read_bias(layer.b_o, layer.d_out, b_o);
  const Matrix query_key_rows = view.rows(query_key, dtype, 2 * numbers);
  const Matrix value_rows = view.rows(value, dtype, width);
  const Matrix heads_rows = view.rows(heads, dtype, width);

  parallel(layer.batch, [&](int64_t b) {
    multiply(layer.x, b, layer.n, to_numbers, b_in.data, query_key_rows);
    multiply(layer.x, b, layer.n, to_value, b_in.data ? b_in.data + 2 * numbers : nullptr,
             value_rows);
    direct_forward_heads<T>(call, b * layer.num_heads, (b + 1) * layer.num_heads);
    if (projects_out) multiply(heads_rows, b, layer.n, to_out, b_o.data, layer.out);
  });
}

// to[outputs, columns] = sum over tokens of left[token][output] right[token][column], with the
// rows of `left` one after the other, `left_row` apart.
template <class T>
static void sum_over_tokens(const SmallLayer& layer, const T* left, int64_t left_row,
                            int64_t outputs, const Matrix& right, int64_t columns,
                            const Matrix& to) {
  constexpr int64_t kTokens = 256;
  parallel(ceil_div(columns, kPanelWidth<T>), [&](int64_t p) {
    const int64_t first = p * kPanelWidth<T>, here = least(kPanelWidth<T>, columns - first);
    Scratch scratch(int64_t(sizeof(T)) * kPanelWidth<T> * (kTokens + outputs), 2);
    T* panel = scratch.take<T>(kTokens * kPanelWidth<T>);
    T* sum = scratch.take<T>(outputs * kPanelWidth<T>);
    set_zero(panel, kTokens * kPanelWidth<T>);
    set_zero(sum, outputs * kPanelWidth<T>);
    const int64_t vectors = ceil_div(here, kLanes<T>);
    for (int64_t b = 0; b < layer.batch; ++b) {
      for (int64_t i = 0; i < layer.n; i += kTokens) {
        const int64_t tokens = least(kTokens, layer.n - i);
        read_block(right, b, i, first, tokens, here, panel, kPanelWidth<T>, 1);
        gemm<T, true>(outputs, vectors, tokens, {left + (b * layer.n + i) * left_row, 1, left_row},
                      panel, kPanelWidth<T>, sum, kPanelWidth<T>);
      }
    }
    write_block(sum, kPanelWidth<T>, 1, outputs, here, to, 0, 0, first);
  });
}

// to[column] = sum over tokens of rows[token][column]
template <class T>
static void sum_of_rows(const T* rows, int64_t tokens, int64_t columns, const Matrix& to) {
  Buffer<double> sum(columns);
  Buffer<T> rounded(columns);
  set_zero(sum.data, columns);
  for (int64_t i = 0; i < tokens; ++i)
    for (int64_t c = 0; c < columns; ++c) sum.data[c] += double(rows[i * columns + c]);
  for (int64_t c = 0; c < columns; ++c) rounded.data[c] = T(sum.data[c]);
  write_block(rounded.data, 0, 1, 1, columns, to, 0, 0, 0);
}

template <class T>
void small_layer_backward(const SmallLayerGradient& g) {
  const SmallLayer& layer = g.layer;
  SmallLayerView<T> view(layer);
  const int64_t tokens = layer.batch * layer.n, numbers = view.numbers, width = view.width;
  const int64_t projected = 2 * numbers + width;
  const bool projects_out = bool(layer.w_o);
  const int64_t d_out = projects_out ? layer.d_out : width;
  const DType dtype = layer.x.dtype;

  Buffer<T> grad_out(tokens * d_out), own_grad_heads, grad_projected(tokens * projected);
  if (projects_out) own_grad_heads.resize(tokens * width);
  T* grad_heads = projects_out ? own_grad_heads.data : grad_out.data;
  AttentionGradient attention{};
  attention.call = view.attention(layer.query_key, layer.value, layer.heads, layer.lse);
  attention.grad_out = view.by_head(grad_heads, kDType<T>, width, 0, layer.dv);
  const auto part = [&](int64_t first, int64_t of_head) {
    return view.by_head(grad_projected.data, kDType<T>, projected, first, of_head);
  };
  attention.grad_query = part(0, layer.rank);
  attention.grad_key = part(numbers, layer.rank);
  attention.grad_value = part(2 * numbers, layer.dv);

  Factor<T> to_heads(projects_out ? d_out : 0, width), to_x(g.grad_x ? projected : 0, layer.d);
  if (projects_out) to_heads.read(layer.w_o, 0, d_out);
  if (g.grad_x) {
    to_x.read(layer.w_q, 0, numbers);
    to_x.read(layer.w_k, numbers, numbers);
    to_x.read(layer.w_v, 2 * numbers, width);
  }
  const Matrix grad_out_rows = view.rows(grad_out.data, kDType<T>, d_out);
  const Matrix grad_heads_rows = view.rows(grad_heads, kDType<T>, width);
  const Matrix grad_projected_rows = view.rows(grad_projected.data, kDType<T>, projected);
  parallel(layer.batch, [&](int64_t b) {
    read_block(g.grad_out, b, 0, 0, layer.n, d_out, grad_out.data + b * layer.n * d_out, d_out, 1);
    if (projects_out) multiply<T>(grad_out_rows, b, layer.n, to_heads, nullptr, grad_heads_rows);
    direct_backward_heads<T>(attention, b * layer.num_heads, (b + 1) * layer.num_heads);
    if (g.grad_x) multiply<T>(grad_projected_rows, b, layer.n, to_x, nullptr, g.grad_x);
  });

  if (g.grad_w_qk) {
    const T* left = grad_projected.data;
    sum_over_tokens(layer, left, projected, 2 * numbers, layer.x, layer.d, g.grad_w_qk);
    sum_over_tokens(layer, left + 2 * numbers, projected, width, layer.x, layer.d, g.grad_w_v);
  }
  if (g.grad_w_o)
    sum_over_tokens(layer, grad_out.data, d_out, d_out, view.rows(layer.heads, dtype, width), width,
                    g.grad_w_o);
  if (g.grad_b_in) sum_of_rows(grad_projected.data, tokens, projected, g.grad_b_in);
  if (g.grad_b_o) sum_of_rows(grad_out.data, tokens, d_out, g.grad_b_o);
}
