// Which attention weights survive dropout: a hash of (seed of the head, row, key), the same bits as
// reference.dropout_keep. Included inside an ISA's namespace.

BOLTZATTN_INLINE uint32_t mix32(uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

struct Dropout {
  uint64_t threshold;  // a draw below it is dropped
  double factor;
  uint32_t stream;

  Dropout(const Attention& call, int64_t h)
      : threshold(uint64_t(__builtin_rint(call.dropout_p * 4294967296.0))),
        factor(call.dropout_p < 1 ? 1 / (1 - call.dropout_p) : 0),
        stream(0) {
    if (!call.seed) return;
    const uint64_t seed = static_cast<const uint64_t*>(call.seed.data)[call.seed.head[h]];
    stream = mix32(uint32_t(seed) ^ mix32(uint32_t(seed >> 32)));
  }

  explicit operator bool() const { return threshold != 0; }

  // Multiplies `count` weights of row i from key j on by 0 or `factor`.
  template <class T>
  void apply(int64_t i, int64_t j, int64_t count, const T* from, T* to) const {
    const uint32_t line = mix32(stream + uint32_t(i) * 0x27d4eb2fu);
    for (int64_t c = 0; c < count; ++c) {
      const uint32_t draw = mix32(line ^ uint32_t(j + c) * 0x9e3779b1u);
      to[c] = draw >= threshold ? from[c] * T(factor) : T(0);
    }
  }
};
