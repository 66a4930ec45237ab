// The distinct numbers among the queries or the keys of a head, in rising order. Included inside an
// ISA's namespace.

// Bits that compare like the numbers they stand for: those of tensors in fp32 and below have 32.
// Those of keys come with the tokens they belong to.
template <class Bits>
struct KeyNumber {
  Bits bits;
  int32_t token;
};
template <class Bits>
struct QueryNumber {
  Bits bits;
};

template <class Bits>
using NumberOf = std::conditional_t<sizeof(Bits) == 8, double, float>;
template <class Bits>
constexpr Bits kSign = Bits(1) << (8 * sizeof(Bits) - 1);

template <class Bits>
BOLTZATTN_INLINE Bits sortable(double number) {
  const NumberOf<Bits> x = NumberOf<Bits>(number) + 0;  // -0 becomes 0
  Bits bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits & kSign<Bits> ? ~bits : bits | kSign<Bits>;
}
template <class Bits>
BOLTZATTN_INLINE double number_of(Bits bits) {
  bits = bits & kSign<Bits> ? bits & ~kSign<Bits> : ~bits;
  NumberOf<Bits> x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return double(x);
}

// Sorts by digits, from the last; tokens with equal numbers keep their order. A digit that all
// numbers share costs one look. Returns the buffer that holds the result.
template <class Number>
static Number* radix_sort(Number* from, Number* to, int64_t count) {
  using Bits = decltype(from->bits);
  constexpr int kBits = 8 * int(sizeof(Bits));
  const int width = count < (1 << 13) ? 8 : 11, digits = (kBits + width - 1) / width;
  const Bits mask = (Bits(1) << width) - 1;
  Bits all = ~Bits(0), any = 0;
  for (int64_t i = 0; i < count; ++i) all &= from[i].bits, any |= from[i].bits;
  Buffer<int32_t> start(int64_t(mask) + 1);
  for (int d = 0; d < digits; ++d) {
    const int shift = d * width;
    if (((all ^ any) >> shift & mask) == 0) continue;
    set_zero(start.data, int64_t(mask) + 1);
    for (int64_t i = 0; i < count; ++i) ++start.data[from[i].bits >> shift & mask];
    int32_t sum = 0;
    for (Bits b = 0; b <= mask; ++b) {
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
  Buffer<double> bias;                      // of keys
  Buffer<int32_t> token;                    // of keys: the one with the largest bias
  double low = INFINITY, high = -INFINITY;  // of all numbers, also those that are left out
  bool regular = true;   // false if a number is infinite or NaN, or a bias is NaN or +inf
  double most_bias = 0;  // the largest |bias|

  double operator[](int64_t i) const { return at.data[i]; }
};

// Calls visit(token, number) for the tokens of an axis.
template <class Visit>
static void for_numbers(const Matrix& m, int64_t h, int64_t n, Visit visit) {
  for (int64_t first = 0; first < n; first += kChunk) {
    double number[kChunk];
    const int64_t here = least(kChunk, n - first);
    read_column(m, h, first, here, number);
    for (int64_t j = 0; j < here; ++j) visit(first + j, number[j]);
  }
}

template <class Bits>
static void find_query_sites(const Attention& call, int64_t h, const Coordinate& coordinate,
                             Sites& sites) {
  const int64_t n = call.n_q;
  Buffer<QueryNumber<Bits>> numbers(n), other(n);
  double odd = 0;
  for_numbers(call.query, h, n, [&](int64_t i, double x) {
    odd += coordinate.of(x) * 0;
    numbers.data[i] = {sortable<Bits>(x)};
  });
  sites.regular = odd == 0;
  if (!sites.regular) return;
  const QueryNumber<Bits>* sorted = radix_sort(numbers.data, other.data, n);
  sites.at.resize(n);
  const bool falls = coordinate.factor < 0;
  for (int64_t i = 0; i < n; ++i) {
    const double x = coordinate.of(number_of(sorted[falls ? n - 1 - i : i].bits));
    if (i == 0 || x != sites.at.data[sites.count - 1]) sites.at.data[sites.count++] = x;
  }
}

// Which keys stay far below the envelope of the logits, for any query. In the order of their
// places, a key lies between two others, so at every t one of these has a logit that is at least
// what the line between the two says at the key. Slots stand for the places.
class Hidden {
 public:
  Hidden(double low, double high, double gauge)
      : low_(low), inverse_(high > low ? kSlots / (high - low) : 0), gauge_(gauge) {
    for (double& one : level_) one = -INFINITY;
    if (!(inverse_ < INFINITY)) inverse_ = 0;
  }
  void add(double s, double bias) {
    double& top = level_[slot(s)];
    top = larger_of(top, height(s, bias));
  }
  // Turns the largest heights of slots into what a key of the slot has to reach.
  void finish(double depth) {
    double before[kSlots], after = -INFINITY;
    before[0] = -INFINITY;
    for (int i = 1; i < kSlots; ++i) before[i] = larger_of(before[i - 1], level_[i - 1]);
    for (int i = kSlots - 1; i >= 0; --i) {
      const double own = level_[i];
      level_[i] = (before[i] < after ? before[i] : after) - depth;
      after = larger_of(after, own);
    }
  }
  bool operator()(double s, double bias) const { return height(s, bias) < level_[slot(s)]; }

 private:
  static constexpr int kSlots = 256;
  double level_[kSlots];
  double low_, inverse_, gauge_;

  // Gaussian logits are t s - s^2 / 2, but for what depends on t alone.
  double height(double s, double bias) const { return bias - 0.5 * gauge_ * s * s; }
  int slot(double s) const {
    const int i = int((s - low_) * inverse_);
    return i < kSlots ? i : kSlots - 1;
  }
};

// Keys that the mask hides are left out, and so are those that stay `depth` below the envelope.
template <class Bits>
static void find_key_sites(const Attention& call, int64_t h, const Coordinate& coordinate,
                           double depth, Sites& sites) {
  const int64_t n = call.n_k;
  Buffer<KeyNumber<Bits>> numbers(n), other(n);
  Buffer<double> bias(n);
  Buffer<uint8_t> skip(n);
  set_zero(skip.data, n);
  for (int64_t first = 0; first < n; first += kChunk)
    read_bias(call, h, first, least(kChunk, n - first), bias.data + first, skip.data + first);
  int64_t count = 0;
  double odd = 0;
  for_numbers(call.key, h, n, [&](int64_t j, double x) {
    if (skip.data[j]) return;
    const double s = coordinate.of(x);
    odd += s * 0 + bias.data[j] * 0;
    if (s < sites.low) sites.low = s;
    if (s > sites.high) sites.high = s;
    sites.most_bias = larger_of(sites.most_bias, ::fabs(bias.data[j]));
    numbers.data[count++] = {sortable<Bits>(x), int32_t(j)};
  });
  sites.regular = odd == 0;
  if (!sites.regular) return;
  const auto place = [&](const KeyNumber<Bits>& one) { return coordinate.of(number_of(one.bits)); };
  if (call.is_biased() && sites.most_bias > 0.5 * depth) {
    Hidden hidden(sites.low, sites.high, call.is_gaussian ? 1 : 0);
    const KeyNumber<Bits>* const all = numbers.data;
    for (int64_t i = 0; i < count; ++i) hidden.add(place(all[i]), bias.data[all[i].token]);
    hidden.finish(depth);
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i)
      if (!hidden(place(all[i]), bias.data[all[i].token])) numbers.data[left++] = all[i];
    count = left;
  }
  const KeyNumber<Bits>* sorted = radix_sort(numbers.data, other.data, count);
  sites.at.resize(count);
  sites.bias.resize(count);
  sites.token.resize(count);
  constexpr int64_t kAhead = 32;  // biases lie in another order
  for (int64_t i = 0, end; i < count; i = end) {
    __builtin_prefetch(bias.data + sorted[least(count - 1, i + kAhead)].token);
    const double x = place(sorted[i]);
    int32_t top = sorted[i].token;
    for (end = i + 1; end < count && place(sorted[end]) == x; ++end)
      if (bias.data[sorted[end].token] > bias.data[top]) top = sorted[end].token;
    double sum = 1;
    if (end - i > 1) {
      sum = 0;
      for (int64_t k = i; k < end; ++k) sum += ::exp(bias.data[sorted[k].token] - bias.data[top]);
    }
    sites.at.data[sites.count] = x;
    sites.bias.data[sites.count] = bias.data[top] + (sum == 1 ? 0 : ::log(sum));
    sites.token.data[sites.count++] = top;
  }
}
