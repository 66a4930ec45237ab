// The low-rank projection: reads each token once and returns a few numbers per token and their
// extents. Included inside an ISA's namespace.

constexpr int64_t kProjectTokens = 64;  // of a task

// out[o][i] = row[i] . weight[o], for a few tokens and outputs at a time.
template <class T, int Tokens, int Outputs>
BOLTZATTN_INLINE void project_tile(int64_t width, const T* const* row, const T* weight, T* out) {
  Vec<T> sum[Tokens][Outputs] = {};
  for (int64_t c = 0; c < width; c += kLanes<T>) {
    Vec<T> line[Tokens];
#pragma GCC unroll 4
    for (int i = 0; i < Tokens; ++i) line[i] = load(row[i] + c);
#pragma GCC unroll 4
    for (int o = 0; o < Outputs; ++o) {
      const Vec<T> w = load(weight + o * width + c);
#pragma GCC unroll 4
      for (int i = 0; i < Tokens; ++i) sum[i][o] += line[i] * w;
    }
  }
  for (int o = 0; o < Outputs; ++o)
    for (int i = 0; i < Tokens; ++i) out[o * kProjectTokens + i] = reduce_sum<T>(sum[i][o]);
}

template <class T>
void project(const Projection& p) {
  const int64_t width = round_up(p.columns, kLanes<T>), chunks = ceil_div(p.n, kProjectTokens);
  const int64_t outputs = round_up(p.outputs, 2);
  Buffer<T> weight(outputs * width), bias(outputs);
  set_zero(weight.data, outputs * width);
  set_zero(bias.data, outputs);
  read_block(p.weight, 0, 0, 0, p.outputs, p.columns, weight.data, width, 1);
  if (p.bias) read_block(p.bias, 0, 0, 0, 1, p.outputs, bias.data, 0, 1);
  Buffer<Extent> parts(p.batch * chunks * p.outputs);
  const bool in_place = p.x.dtype == (sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32) &&
                        p.x.column == 1 && width == p.columns;
  parallel(p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, first = task % chunks * kProjectTokens;
    const int64_t tokens = least(kProjectTokens, p.n - first);
    Scratch scratch(
        (4 * width + outputs * kProjectTokens) * int64_t(sizeof(T)) + kProjectTokens * 8, 3);
    T* copy = scratch.take<T>(4 * width);
    T* out = scratch.take<T>(outputs * kProjectTokens);
    double* number = scratch.take<double>(kProjectTokens);
    if (!in_place) set_zero(copy, 4 * width);
    for (int64_t i = 0; i < tokens; i += 4) {
      const T* row[4];
      for (int64_t k = 0; k < 4; ++k) {
        const int64_t token =
            first + least(i + k, tokens - 1);  // the result past the end is not used
        row[k] = static_cast<const T*>(p.x.data) + p.x.head[b] + token * p.x.row;
        if (in_place) continue;
        read_block(p.x, b, token, 0, 1, p.columns, copy + k * width, 0, 1);
        row[k] = copy + k * width;
      }
      for (int64_t o = 0; o < outputs; o += 2)
        project_tile<T, 4, 2>(width, row, weight.data + o * width, out + o * kProjectTokens + i);
    }
    for (int64_t o = 0; o < p.outputs; ++o) {
      T* line = out + o * kProjectTokens;
      for (int64_t i = 0; i < tokens; ++i) line[i] += bias.data[o];
      write_block(line, 0, 1, 1, tokens, p.out, b, o, first);
      read_block(p.out, b, o, first, 1, tokens, number, 0, 1);  // as rounded to the tensor's dtype
      Extent extent;
      extend(extent, number, tokens, first, nullptr);
      parts.data[task * p.outputs + o] = extent;
    }
  });
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t o = 0; o < p.outputs; ++o) {
      Extent& extent = p.extents[b * p.outputs + o];
      extent = Extent();
      for (int64_t c = 0; c < chunks; ++c)
        join(extent, parts.data[(b * chunks + c) * p.outputs + o]);
    }
  }
}
