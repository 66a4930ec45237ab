// The stage `extents`: the ranges of the numbers of rank-1 queries and keys. Included inside an
// ISA's namespace.

constexpr int64_t kChunk = 2048;  // tokens that are worked on together, at most

// Adds the numbers of tokens first, first + 1, ..., except those in `skip` (if given).
static void extend(Extent& extent, const double* number, int64_t count, int64_t first,
                   const uint8_t* skip) {
  constexpr int L = kLanes<double>;
  double low = INFINITY, high = -INFINITY, odd = 0;  // odd: NaN if a number is infinite or NaN
  int64_t i = 0, kept = count;
  if (!skip) {
    Vec<double> lows = splat<double>(INFINITY), highs = -lows, odds{};
    for (; i + L <= count; i += L) {
      const Vec<double> x = load(number + i);
      lows = x < lows ? x : lows;
      highs = x > highs ? x : highs;
      odds += x * 0.0;
    }
    low = -reduce_max<double>(-lows);
    high = reduce_max<double>(highs);
    odd = reduce_sum<double>(odds);
  } else {
    kept = 0;
  }
  for (; i < count; ++i) {
    if (skip && skip[i]) continue;
    kept += skip != nullptr;
    low = number[i] < low ? number[i] : low;
    high = number[i] > high ? number[i] : high;
    odd += number[i] * 0;
  }
  auto where = [&](double wanted) {
    for (int64_t j = 0; j < count; ++j)
      if (number[j] == wanted && !(skip && skip[j])) return double(first + j);
    return 0.0;
  };
  if (low < extent.low) extent.at_low = where(low), extent.low = low;
  if (high > extent.high) extent.at_high = where(high), extent.high = high;
  extent.count += double(kept);
  if (odd != 0) extent.regular = 0;  // NaN too
}

template <class Body>
static void serial(int64_t tasks, Body&& body) {
  for (int64_t task = 0; task < tasks; ++task) body(task);
}

// Reads which keys are masked; false if the mask is floating, a bias.
inline bool read_mask(const Attention& call, int64_t h, int64_t first, int64_t count,
                      uint8_t* skip) {
  const Matrix& m = call.key_mask;
  if (!m) return true;
  if (m.dtype == DType::kBool) {
    const uint8_t* from = static_cast<const uint8_t*>(m.data) + m.head[h] + first * m.column;
    for (int64_t j = 0; j < count; ++j) skip[j] = from[j * m.column] != 0;
    return true;
  }
  double bias[kChunk];
  read_block(m, h, 0, first, 1, count, bias, 0, 1);
  for (int64_t j = 0; j < count; ++j) skip[j] = bias[j] == -INFINITY;
  return false;
}

// Reads what is added to the logits of keys, and which keys are hidden.
inline void read_bias(const Attention& call, int64_t h, int64_t first, int64_t count, double* bias,
                      uint8_t* skip) {
  read_mask(call, h, first, count, skip);
  if (call.key_mask && call.key_mask.dtype != DType::kBool) {
    read_block(call.key_mask, h, 0, first, 1, count, bias, 0, 1);
  } else {
    for (int64_t j = 0; j < count; ++j) bias[j] = 0;
  }
  for (int64_t j = 0; j < count; ++j)
    if (skip[j]) bias[j] = 0;
}

inline void find_extents(const Attention& call, int64_t h, Extent& queries, Extent& keys) {
  const int64_t chunks = ceil_div(most(call.n_q, call.n_k), kChunk);
  Buffer<Extent> parts(2 * chunks);
  auto body = [&](int64_t c) {
    const int64_t first = c * kChunk;
    double number[kChunk];
    uint8_t skip[kChunk];
    Extent extent;
    int64_t count = most(0, least(kChunk, call.n_q - first));
    read_column(call.query, h, first, count, number);
    extend(extent, number, count, first, nullptr);
    parts.data[2 * c] = extent;
    extent = Extent();
    count = most(0, least(kChunk, call.n_k - first));
    if (!read_mask(call, h, first, count, skip)) extent.regular = 0;
    read_column(call.key, h, first, count, number);
    extend(extent, number, count, first, call.key_mask ? skip : nullptr);
    parts.data[2 * c + 1] = extent;
  };
  chunks > 4 ? parallel(chunks, body) : serial(chunks, body);
  for (int64_t c = 0; c < chunks; ++c) {
    join(queries, parts.data[2 * c]);
    join(keys, parts.data[2 * c + 1]);
  }
}
