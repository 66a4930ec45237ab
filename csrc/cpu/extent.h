// The range of the numbers of rank-1 queries or keys. Included inside an ISA's namespace.

// Adds `count` numbers, tokens first, first + 1, ...; those of `skip` (if given) do not count.
static void extend(Extent& extent, const double* number, int64_t count, int64_t first,
                   const uint8_t* skip) {
  constexpr int L = kLanes<double>;
  double low = INFINITY, high = -INFINITY, odd = 0;  // odd: NaN if a number is not finite
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

static void join(Extent& extent, const Extent& later) {
  if (later.low < extent.low) extent.at_low = later.at_low, extent.low = later.low;
  if (later.high > extent.high) extent.at_high = later.at_high, extent.high = later.high;
  extent.count += later.count;
  if (later.regular == 0) extent.regular = 0;
}
