// Vectors of the width of the instruction set this is compiled for, by the compiler's own vector
// types: one source, no intrinsics. Included inside an ISA's namespace (see cpu/isa.h).

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(BOLTZATTN_VECTOR_BYTES)));
  typedef int32_t bits __attribute__((vector_size(BOLTZATTN_VECTOR_BYTES)));
  typedef uint32_t word __attribute__((vector_size(BOLTZATTN_VECTOR_BYTES)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(BOLTZATTN_VECTOR_BYTES)));
  typedef int64_t bits __attribute__((vector_size(BOLTZATTN_VECTOR_BYTES)));
  typedef uint64_t word __attribute__((vector_size(BOLTZATTN_VECTOR_BYTES)));
};
template <class T>
using Vec = typename VectorOf<T>::type;
template <class T>
using Bits = typename VectorOf<T>::bits;
template <class T>
using Word = typename VectorOf<T>::word;  // bits that may overflow
typedef float HalfVec
    __attribute__((vector_size(BOLTZATTN_VECTOR_BYTES / 2)));  // as many as Vec<double>
template <class T>
constexpr int kLanes = BOLTZATTN_VECTOR_BYTES / int(sizeof(T));

#define BOLTZATTN_INLINE static inline __attribute__((always_inline))
#define BOLTZATTN_INLINED __attribute__((always_inline))  // of a lambda, before its body

template <class T>
BOLTZATTN_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
BOLTZATTN_INLINE void store(T* p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof v);
}
template <class T, int N>
BOLTZATTN_INLINE void load(const T* p, Vec<T> (&to)[N]) {
#pragma GCC unroll 4
  for (int u = 0; u < N; ++u) to[u] = load(p + u * kLanes<T>);
}
template <class T, int N>
BOLTZATTN_INLINE void store(T* p, const Vec<T> (&from)[N]) {
#pragma GCC unroll 4
  for (int u = 0; u < N; ++u) store(p + u * kLanes<T>, from[u]);
}
// As many numbers as Vec<double> has, in fp64.
BOLTZATTN_INLINE Vec<double> widened(const double* p) {
  return load(p);
}
BOLTZATTN_INLINE Vec<double> widened(const float* p) {
  HalfVec v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Vec<double>);
}
// Stores an aligned vector past the caches. Call `stream_end` before another thread reads it.
BOLTZATTN_INLINE void stream(float* p, Vec<float> v) {
#if defined(__clang__)
  __builtin_nontemporal_store(v, reinterpret_cast<Vec<float>*>(p));
#elif defined(__AVX512F__) && BOLTZATTN_VECTOR_BYTES == 64
  __builtin_ia32_movntps512(p, v);
#elif defined(__AVX__) && BOLTZATTN_VECTOR_BYTES == 32
  __builtin_ia32_movntps256(p, v);
#elif defined(__x86_64__) && BOLTZATTN_VECTOR_BYTES == 16
  __builtin_ia32_movntps(p, v);
#else
  store(p, v);
#endif
}
BOLTZATTN_INLINE void stream(double* p, Vec<double> v) {
  stream(reinterpret_cast<float*>(p), (Vec<float>)v);
}
BOLTZATTN_INLINE void stream_end() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}
// One vector of two halves. (Through memory, a load would wait for two stores.)
template <int... I>
BOLTZATTN_INLINE Vec<float> joined(const HalfVec (&half)[2], std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(half[0], half[1], I...);
}
BOLTZATTN_INLINE Vec<float> joined(const HalfVec (&half)[2]) {
  return joined(half, std::make_integer_sequence<int, kLanes<float>>{});
}
// Half 0 or 1 of a vector.
template <int... I>
BOLTZATTN_INLINE HalfVec half_of(Vec<float> x, int which, std::integer_sequence<int, I...>) {
  return which == 0 ? __builtin_shufflevector(x, x, I...)
                    : __builtin_shufflevector(x, x, (I + int(sizeof...(I)))...);
}
BOLTZATTN_INLINE HalfVec half_of(Vec<float> x, int which) {
  return half_of(x, which, std::make_integer_sequence<int, kLanes<double>>{});
}
template <class T>
BOLTZATTN_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}
// The product, rounded before anything is added to it: not fused with the addition.
template <class T>
BOLTZATTN_INLINE Vec<T> rounded_product(Vec<T> a, Vec<T> b) {
  Vec<T> product = a * b;
  // An empty instruction that the product passes through. (clang fuses within an expression only;
  // GCC takes vectors apart for __builtin_assoc_barrier.)
#if defined(__GNUC__) && !defined(__clang__) && defined(BOLTZATTN_FUSED_PRODUCTS)
  asm("" : "+v"(product));
#elif defined(__GNUC__) && !defined(__clang__) && defined(__aarch64__) && \
    BOLTZATTN_VECTOR_BYTES == 16
  asm("" : "+w"(product));
#endif
  return product;
}
template <class T>
BOLTZATTN_INLINE Vec<T> larger(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}
// The lanes with numbers below `count` keep x, the others become 0.
template <int... I>
BOLTZATTN_INLINE Bits<float> lane_numbers(std::integer_sequence<int, I...>) {
  return Bits<float>{I...};
}
template <int... I>
BOLTZATTN_INLINE Bits<double> wide_lane_numbers(std::integer_sequence<int, I...>) {
  return Bits<double>{I...};
}
BOLTZATTN_INLINE Vec<float> first_lanes(Vec<float> x, int64_t count) {
  const auto lane = lane_numbers(std::make_integer_sequence<int, kLanes<float>>{});
  return lane < int32_t(count) ? x : Vec<float>{};
}
BOLTZATTN_INLINE Vec<double> first_lanes(Vec<double> x, int64_t count) {
  const auto lane = wide_lane_numbers(std::make_integer_sequence<int, kLanes<double>>{});
  return lane < count ? x : Vec<double>{};
}
// Folds a vector in halves: log2(lanes) steps in a fixed order. (By shuffles: through memory, each
// step would wait for a store.)
template <class T, int N>
struct Fold {
  template <class V, class Op, int... I>
  BOLTZATTN_INLINE T run(V v, Op op, std::integer_sequence<int, I...>) {
    return Fold<T, N / 2>::run(
        op(__builtin_shufflevector(v, v, I...), __builtin_shufflevector(v, v, (I + N / 2)...)), op);
  }
  template <class V, class Op>
  BOLTZATTN_INLINE T run(V v, Op op) {
    return run(v, op, std::make_integer_sequence<int, N / 2>{});
  }
};
template <class T>
struct Fold<T, 2> {
  template <class V, class Op>
  BOLTZATTN_INLINE T run(V v, Op op) {
    return op(v[0], v[1]);
  }
};
template <class T>
BOLTZATTN_INLINE T reduce_max(Vec<T> v) {
  return Fold<T, kLanes<T>>::run(v, [](auto a, auto b) { return a > b ? a : b; });
}
template <class T>
BOLTZATTN_INLINE T reduce_sum(Vec<T> v) {
  return Fold<T, kLanes<T>>::run(v, [](auto a, auto b) { return a + b; });
}

// 2^x for x <= 0 up to rounding; 0 if the result would be subnormal (softmax adds it to a sum of at
// least 1), NaN for NaN. x = k + r with k an integer: adding 1.5 *
// 2^(mantissa bits) rounds x to k and leaves it in the low bits, from where it is shifted into the
// exponent; 2^r on |r| <= 1/2 is its Chebyshev interpolant (relative error 2.6e-9 and 4.3e-18). The
// lowest k gives the exponent of 0.
// 2^(k + r) for |r| <= 1/2 and an integer k >= -127, which is in the low bits of `shifted`.
BOLTZATTN_INLINE Vec<float> exp2_of_parts(Vec<float> shifted, Vec<float> r) {
  Vec<float> e = r * 1.5461444698569129e-4f + 1.3400428177615838e-3f;
  e = e * r + 9.6180566785246381e-3f;
  e = e * r + 5.5503272266703021e-2f;
  e = e * r + 2.4022650922288758e-1f;
  e = e * r + 6.9314720670283260e-1f;
  e = e * r + 1.0f;
  const Vec<float> power = (Vec<float>)(((Word<float>)shifted << 23) + (127u << 23));
  return e * power;
}
BOLTZATTN_INLINE Vec<float> exp2_of(Vec<float> x) {
  x = larger<float>(splat(-127.0f), x);
  const float kShift = 12582912.0f;
  const Vec<float> shifted = x + kShift;
  return exp2_of_parts(shifted, x - (shifted - kShift));
}
BOLTZATTN_INLINE Vec<double> exp2_of(Vec<double> x) {
  x = larger<double>(splat(-1023.0), x);
  const double kShift = 6755399441055744.0;
  const Vec<double> shifted = x + kShift;
  const Vec<double> r = x - (shifted - kShift);
  Vec<double> e = r * 4.455817908336064493e-10 + 7.0741942972885210056e-9;
  e = e * r + 1.0178057087733941105e-7;
  e = e * r + 1.3215432535912376166e-6;
  e = e * r + 1.5252733841556772589e-5;
  e = e * r + 1.5403530463724354209e-4;
  e = e * r + 1.3333558146406470697e-3;
  e = e * r + 9.6181291075872566681e-3;
  e = e * r + 5.5504108664821627039e-2;
  e = e * r + 2.4022650695910159567e-1;
  e = e * r + 6.9314718055994530925e-1;
  e = e * r + 1.0;
  const Vec<double> power = (Vec<double>)(((Word<double>)shifted << 52) + (uint64_t(1023) << 52));
  return e * power;
}

// log(x) for positive normal x, to rounding: x = 2^e m with m in [sqrt(1/2), sqrt(2)], and
// log(m) = 2 atanh((m - 1) / (m + 1)).
BOLTZATTN_INLINE Vec<double> log_of(Vec<double> x) {
  const Bits<double> bits = (Bits<double>)x;
  const Bits<double> low = bits & 0x000fffffffffffffll;
  const Bits<double> upper = low > 0x0006a09e667f3bcdll;  // mantissa above sqrt(2): all ones
  const Vec<double> m = (Vec<double>)(low | (0x3ff0000000000000ll + (upper << 52)));
  const Vec<double> e =
      (Vec<double>)(((bits >> 52) - upper) | 0x4330000000000000ll) - (4503599627370496.0 + 1023.0);
  const Vec<double> z = (m - 1.0) / (m + 1.0), y = z * z;
  Vec<double> sum = y * (2.0 / 21) + 2.0 / 19;
  sum = sum * y + 2.0 / 17;
  sum = sum * y + 2.0 / 15;
  sum = sum * y + 2.0 / 13;
  sum = sum * y + 2.0 / 11;
  sum = sum * y + 2.0 / 9;
  sum = sum * y + 2.0 / 7;
  sum = sum * y + 2.0 / 5;
  sum = sum * y + 2.0 / 3;
  return e * kLn2 + (z * 2.0 + z * y * sum);
}

BOLTZATTN_INLINE double larger_of(double a, double b) {
  return a > b ? a : b;
}
// The largest magnitude; NaN if there is a NaN or an infinity.
template <class T>
static double largest_of(const T* x, int64_t size) {
  constexpr int L = kLanes<T>;
  Vec<T> largest{}, odd{};
  int64_t c = 0;
  for (; c + L <= size; c += L) {
    const Vec<T> v = load(x + c);
    largest = larger<T>(largest, v < T(0) ? -v : v);
    odd += v * T(0);
  }
  double most = double(reduce_max<T>(largest)), rest = double(reduce_sum<T>(odd));
  for (; c < size; ++c) {
    most = larger_of(most, x[c] < 0 ? -double(x[c]) : double(x[c]));
    rest += double(x[c]) * 0;
  }
  return most + rest;
}
