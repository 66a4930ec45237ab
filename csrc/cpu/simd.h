// Vectors of the width of the instruction set this is compiled for, by the compiler's own vector
// types: one source, no intrinsics. Included inside an ISA's namespace (see kernels.inc.h).

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(BOLTZATTN_VECTOR_BYTES)));
  typedef int32_t bits __attribute__((vector_size(BOLTZATTN_VECTOR_BYTES)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(BOLTZATTN_VECTOR_BYTES)));
  typedef int64_t bits __attribute__((vector_size(BOLTZATTN_VECTOR_BYTES)));
};
template <class T>
using Vec = typename VectorOf<T>::type;
template <class T>
using Bits = typename VectorOf<T>::bits;
template <class T>
constexpr int kLanes = BOLTZATTN_VECTOR_BYTES / int(sizeof(T));

#define BOLTZATTN_INLINE static inline __attribute__((always_inline))

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
template <class T>
BOLTZATTN_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}
template <class T>
BOLTZATTN_INLINE Vec<T> larger(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}
template <class T>
BOLTZATTN_INLINE T reduce_max(Vec<T> v) {
  T m = v[0];
  for (int i = 1; i < kLanes<T>; ++i) m = v[i] > m ? v[i] : m;
  return m;
}
template <class T>
BOLTZATTN_INLINE T reduce_sum(Vec<T> v) {
  T s = v[0];
  for (int i = 1; i < kLanes<T>; ++i) s += v[i];
  return s;
}

// exp(x) for x <= 0 up to rounding; 0 below the smallest normal number (what softmax adds to a sum
// of at least 1), NaN for NaN. x = k ln2 + r, exp(r) by a Taylor polynomial on |r| <= ln2 / 2,
// 2^k put together from bits: adding 1.5 * 2^(mantissa bits) rounds k into the low bits.
BOLTZATTN_INLINE Vec<float> exponential(Vec<float> x) {
  const float kShift = 12582912.0f;
  const Vec<float> shifted = x * 1.44269504088896341f + kShift;
  const Vec<float> k = shifted - kShift;
  const Vec<float> r = (x - k * 0.693359375f) - k * -2.12194440054690583e-4f;
  Vec<float> e = splat<float>(1.0f / 5040);
  e = e * r + 1.0f / 720;
  e = e * r + 1.0f / 120;
  e = e * r + 1.0f / 24;
  e = e * r + 1.0f / 6;
  e = e * r + 0.5f;
  e = e * (r * r) + r + 1.0f;
  const Vec<float> power = (Vec<float>)(((Bits<float>)shifted << 23) + (127 << 23));
  return x < -87.3365402f ? Vec<float>{} : e * power;
}
BOLTZATTN_INLINE Vec<double> exponential(Vec<double> x) {
  const double kShift = 6755399441055744.0;
  const Vec<double> shifted = x * 1.44269504088896340736 + kShift;
  const Vec<double> k = shifted - kShift;
  const Vec<double> r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
  Vec<double> e = splat<double>(1.0 / 6227020800);
  e = e * r + 1.0 / 479001600;
  e = e * r + 1.0 / 39916800;
  e = e * r + 1.0 / 3628800;
  e = e * r + 1.0 / 362880;
  e = e * r + 1.0 / 40320;
  e = e * r + 1.0 / 5040;
  e = e * r + 1.0 / 720;
  e = e * r + 1.0 / 120;
  e = e * r + 1.0 / 24;
  e = e * r + 1.0 / 6;
  e = e * r + 0.5;
  e = e * (r * r) + r + 1.0;
  const Vec<double> power = (Vec<double>)(((Bits<double>)shifted << 52) + (int64_t(1023) << 52));
  return x < -708.3 ? Vec<double>{} : e * power;
}
