// The distinct numbers among the queries or the keys of a head, in rising order. Included inside an
// ISA's namespace.

// Bits that compare like the numbers they stand for; those of keys with the tokens they belong to.
struct KeyNumber {
  uint64_t bits;
  int32_t token;
};
struct QueryNumber {
  uint64_t bits;
};

BOLTZATTN_INLINE uint64_t sortable(double x) {
  uint64_t bits;
  x += 0.0;  // -0 becomes 0
  __builtin_memcpy(&bits, &x, 8);
  return bits >> 63 ? ~bits : bits | uint64_t(1) << 63;
}
BOLTZATTN_INLINE double number_of(uint64_t bits) {
  bits = bits >> 63 ? bits & ~(uint64_t(1) << 63) : ~bits;
  double x;
  __builtin_memcpy(&x, &bits, 8);
  return x;
}

// Sorts by digits, from the last; tokens with equal numbers keep their order. A digit that all
// numbers share costs one look: fp32 numbers have no more than 35 bits that differ. Returns the
// buffer that holds the result.
template <class Number>
static Number* radix_sort(Number* from, Number* to, int64_t count) {
  const int width = count < (1 << 13) ? 8 : 11, digits = (64 + width - 1) / width;
  const uint64_t mask = (uint64_t(1) << width) - 1;
  uint64_t all = ~uint64_t(0), any = 0;
  for (int64_t i = 0; i < count; ++i) all &= from[i].bits, any |= from[i].bits;
  Buffer<int32_t> start(int64_t(mask) + 1);
  for (int d = 0; d < digits; ++d) {
    const int shift = d * width;
    if (((all ^ any) >> shift & mask) == 0) continue;
    set_zero(start.data, int64_t(mask) + 1);
    for (int64_t i = 0; i < count; ++i) ++start.data[from[i].bits >> shift & mask];
    int32_t sum = 0;
    for (uint64_t b = 0; b <= mask; ++b) {
      const int32_t here = start.data[b];
      start.data[b] = sum;
      sum += here;
    }
    for (int64_t i = 0; i < count; ++i) to[start.data[from[i].bits >> shift & mask]++] = from[i];
    Number* const swap = from;
    from = to;
    to = swap;
  }
  return from;
}

// t = factor (q - origin), s likewise. A common origin of a Gaussian's queries and keys moves no
// logit; one of keys alone moves a row's logits by t origin. It keeps the digits of keys with a
// large offset.
struct Coordinate {
  double factor, origin;

  double of(double number) const { return (number - origin) * factor + 0.0; }
};

// Tokens with equal numbers are one site, with the logarithm of the sum of their weights as bias.
struct Sites {
  int64_t count = 0;
  Buffer<double> at;
  Buffer<double> bias;    // of keys
  Buffer<int32_t> token;  // of keys: the one with the largest bias
  bool regular = true;    // false if a number is infinite or NaN, or a bias is NaN or +inf
  double most_bias = 0;   // the largest |bias|

  double operator[](int64_t i) const { return at.data[i]; }
};

// Calls visit(token, coordinate) for the tokens of an axis.
template <class Visit>
static void for_numbers(const Matrix& m, int64_t h, int64_t n, const Coordinate& coordinate,
                        Visit visit) {
  for (int64_t first = 0; first < n; first += kChunk) {
    double number[kChunk];
    const int64_t here = least(kChunk, n - first);
    read_column(m, h, first, here, number);
    for (int64_t j = 0; j < here; ++j) visit(first + j, coordinate.of(number[j]));
  }
}

static void find_query_sites(const Attention& call, int64_t h, const Coordinate& coordinate,
                             Sites& sites) {
  Buffer<QueryNumber> numbers(call.n_q), other(call.n_q);
  double odd = 0;
  for_numbers(call.query, h, call.n_q, coordinate, [&](int64_t i, double x) {
    odd += x * 0;
    numbers.data[i] = {sortable(x)};
  });
  sites.regular = odd == 0;
  if (!sites.regular) return;
  const QueryNumber* sorted = radix_sort(numbers.data, other.data, call.n_q);
  sites.at.resize(call.n_q);
  for (int64_t i = 0; i < call.n_q; ++i)
    if (i == 0 || sorted[i].bits != sorted[i - 1].bits)
      sites.at.data[sites.count++] = number_of(sorted[i].bits);
}

// Keys that the mask hides are left out.
static void find_key_sites(const Attention& call, int64_t h, const Coordinate& coordinate,
                           Sites& sites) {
  const int64_t n = call.n_k;
  Buffer<KeyNumber> numbers(n), other(n);
  Buffer<double> bias(n);
  Buffer<uint8_t> skip(n);
  set_zero(skip.data, n);
  for (int64_t first = 0; first < n; first += kChunk)
    read_bias(call, h, first, least(kChunk, n - first), bias.data + first, skip.data + first);
  int64_t count = 0;
  double odd = 0;
  for_numbers(call.key, h, n, coordinate, [&](int64_t j, double x) {
    if (skip.data[j]) return;
    odd += x * 0 + bias.data[j] * 0;
    numbers.data[count++] = {sortable(x), int32_t(j)};
  });
  sites.regular = odd == 0;
  if (!sites.regular) return;
  const KeyNumber* sorted = radix_sort(numbers.data, other.data, count);
  sites.at.resize(count);
  sites.bias.resize(count);
  sites.token.resize(count);
  for (int64_t i = 0, end; i < count; i = end) {
    int32_t top = sorted[i].token;
    for (end = i + 1; end < count && sorted[end].bits == sorted[i].bits; ++end)
      if (bias.data[sorted[end].token] > bias.data[top]) top = sorted[end].token;
    double sum = 1;
    if (end - i > 1) {
      sum = 0;
      for (int64_t k = i; k < end; ++k) sum += ::exp(bias.data[sorted[k].token] - bias.data[top]);
    }
    sites.at.data[sites.count] = number_of(sorted[i].bits);
    sites.bias.data[sites.count] = bias.data[top] + (sum == 1 ? 0 : ::log(sum));
    sites.token.data[sites.count++] = top;
    sites.most_bias = larger_of(sites.most_bias, ::fabs(bias.data[top]));
  }
}
