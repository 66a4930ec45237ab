// Copies between strided tensors of any dtype and dense tiles of the arithmetic type.
// Included inside an ISA's namespace.

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

BOLTZATTN_INLINE float from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
BOLTZATTN_INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

template <class T>
BOLTZATTN_INLINE T widen(double x) {
  return T(x);
}
template <class T>
BOLTZATTN_INLINE T widen(float x) {
  return T(x);
}
template <class T>
BOLTZATTN_INLINE T widen(BFloat16 x) {
  return T(from_bits(uint32_t(x.bits) << 16));
}
// After the shift the exponent is 112 too small. One multiplication corrects it and normalizes
// subnormal numbers. Infinity and NaN have the largest exponent, which must be raised.
template <class T>
BOLTZATTN_INLINE T widen(Float16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  float f = from_bits(magnitude) * 5.192296858534828e33f;  // 2^112
  f = magnitude >= 0x0f800000u ? from_bits(magnitude | 0x7f800000u) : f;
  return T(from_bits(to_bits(f) | uint32_t(x.bits & 0x8000) << 16));
}

BOLTZATTN_INLINE void narrow(double x, double* to) {
  *to = x;
}
BOLTZATTN_INLINE void narrow(float x, float* to) {
  *to = x;
}
// Round to nearest, ties to even; NaN stays a (quiet) NaN.
BOLTZATTN_INLINE void narrow(float x, BFloat16* to) {
  const uint32_t bits = to_bits(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to->bits = uint16_t(x != x ? (bits >> 16 | 0x40) : rounded);
}
BOLTZATTN_INLINE void narrow(float x, Float16* to) {
  const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  // Subnormal results: adding 0.5 aligns the last kept bit with fp32's own rounding.
  const uint32_t tiny = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  const uint32_t usual = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  uint32_t half = magnitude < (113u << 23) ? tiny : usual;
  half = magnitude >= (143u << 23) ? 0x7c00 : half;
  half = magnitude > 0x7f800000u ? 0x7e00 : half;
  to->bits = uint16_t(sign | half);
}

template <class Source, class T>
static void read_block(const Source* from, int64_t row, int64_t column, int64_t rows,
                       int64_t columns, T* to, int64_t to_row, int64_t to_column) {
  for (int64_t i = 0; i < rows; ++i, from += row, to += to_row) {
    if (column == 1 && to_column == 1) {
      for (int64_t j = 0; j < columns; ++j) to[j] = widen<T>(from[j]);
    } else {
      for (int64_t j = 0; j < columns; ++j) to[j * to_column] = widen<T>(from[j * column]);
    }
  }
}

// Calls go(pointer to the element at (row, column) of head h, typed).
template <class Go>
BOLTZATTN_INLINE void with_type(const Matrix& m, int64_t h, int64_t row, int64_t column, Go go) {
  const int64_t offset = m.head[h] + row * m.row + column * m.column;
  switch (m.dtype) {
    case DType::kFloat64:
      return go(static_cast<double*>(m.data) + offset);
    case DType::kFloat32:
      return go(static_cast<float*>(m.data) + offset);
    case DType::kBFloat16:
      return go(static_cast<BFloat16*>(m.data) + offset);
    case DType::kFloat16:
      return go(static_cast<Float16*>(m.data) + offset);
    case DType::kBool:
      return;  // bool masks are read elsewhere
  }
}

// Block [rows, columns] of head h from (first_row, first_column), with any strides in the tile.
template <class T>
static void read_block(const Matrix& m, int64_t h, int64_t first_row, int64_t first_column,
                       int64_t rows, int64_t columns, T* to, int64_t to_row, int64_t to_column) {
  with_type(m, h, first_row, first_column, [&](auto* from) {
    read_block(from, m.row, m.column, rows, columns, to, to_row, to_column);
  });
}

// Column 0 of `count` rows: the numbers of rank-1 queries and keys, or a vector over rows.
template <class T>
static void read_column(const Matrix& m, int64_t h, int64_t first, int64_t count, T* to) {
  with_type(m, h, first, 0, [&](auto* from) {
    if (m.row == 1) {
      for (int64_t i = 0; i < count; ++i) to[i] = widen<T>(from[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = widen<T>(from[i * m.row]);
    }
  });
}

template <class T, class Target>
static void write_block(const T* from, int64_t from_row, int64_t from_column, int64_t rows,
                        int64_t columns, Target* to, int64_t row, int64_t column) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      narrow(from[i * from_row + j * from_column], to + i * row + j * column);
    }
  }
}

template <class T>
static void write_block(const T* from, int64_t from_row, int64_t from_column, int64_t rows,
                        int64_t columns, const Matrix& m, int64_t h, int64_t first_row,
                        int64_t first_column) {
  with_type(m, h, first_row, first_column, [&](auto* to) {
    // Results are fp64 if and only if the tensors are.
    if constexpr ((sizeof(*to) == 8) == (sizeof(T) == 8))
      write_block(from, from_row, from_column, rows, columns, to, m.row, m.column);
  });
}

// No NaN, and no number that times `room` is infinite.
template <class T>
static bool all_finite(const T* x, int64_t size, T room = 1) {
  constexpr int L = kLanes<T>;
  Vec<T> odds{};  // NaN where a number is infinite or NaN
  int64_t i = 0;
  for (; i + L <= size; i += L) odds += load(x + i) * room * T(0);
  T odd = reduce_sum<T>(odds);
  for (; i < size; ++i) odd += x[i] * room * T(0);
  return odd == 0;
}

// A width in vectors, cut into panels [width / kPanelWidth][rows][kPanelWidth]: the innermost loop
// of a product then walks memory contiguously.
template <class T>
constexpr int64_t kPanelWidth = kPanel * kLanes<T>;

template <class T>
struct Panels {
  int64_t width, rows;

  int64_t count() const { return ceil_div(width, kPanelWidth<T>); }
  int64_t size() const { return count() * rows * kPanelWidth<T>; }
  int64_t offset(int64_t panel) const { return panel * rows * kPanelWidth<T>; }
  int64_t columns(int64_t panel) const {
    return least(kPanelWidth<T>, width - panel * kPanelWidth<T>);
  }
  int64_t vectors(int64_t panel) const { return ceil_div(columns(panel), kLanes<T>); }
  // Where an element is.
  int64_t at(int64_t row, int64_t column) const {
    return offset(column / kPanelWidth<T>) + row * kPanelWidth<T> + column % kPanelWidth<T>;
  }

  // Reads `count` rows of a matrix, row i of the tile being row first + i; the rest becomes 0.
  void read(const Matrix& m, int64_t h, int64_t first, int64_t count, T* to) const {
    const int64_t whole = m.column == 1 ? width / kPanelWidth<T> : 0;
    if (width % kPanelWidth<T> != 0 || count < rows)
      __builtin_memset(to, 0, size_t(size()) * sizeof(T));
    with_type(m, h, first, 0, [&](auto* from) {
      for (int64_t i = 0; i < count; ++i, from += m.row) {
        T* line = to + i * kPanelWidth<T>;
        for (int64_t p = 0; p < whole; ++p)  // of constant width: whole vectors
          for (int64_t c = 0; c < kPanelWidth<T>; ++c)
            line[offset(p) + c] = widen<T>(from[p * kPanelWidth<T> + c]);
        for (int64_t p = whole; p < this->count(); ++p)
          for (int64_t c = 0; c < columns(p); ++c)
            line[offset(p) + c] = widen<T>(from[(p * kPanelWidth<T> + c) * m.column]);
      }
    });
  }
  // The transpose of the same block: columns of the matrix are rows of the tile.
  void read_transposed(const Matrix& m, int64_t h, int64_t first, int64_t count, T* to) const {
    for (int64_t p = 0; p < this->count(); ++p, to += rows * kPanelWidth<T>) {
      const int64_t begin = p * kPanelWidth<T>;
      const int64_t here = least(kPanelWidth<T>, count - begin);
      if (here < kPanelWidth<T>) __builtin_memset(to, 0, size_t(rows * kPanelWidth<T>) * sizeof(T));
      if (here > 0) read_block(m, h, first + begin, 0, here, rows, to, 1, kPanelWidth<T>);
    }
  }
  void multiply_row(T* data, int64_t row, T factor) const {
    for (int64_t p = 0; p < count(); ++p) {
      T* line = data + offset(p) + row * kPanelWidth<T>;
      for (int u = 0; u < kPanel; ++u)
        store(line + u * kLanes<T>, load(line + u * kLanes<T>) * factor);
    }
  }
  void write(const T* from, int64_t count, const Matrix& m, int64_t h, int64_t first) const {
    for (int64_t p = 0; p < this->count(); ++p, from += rows * kPanelWidth<T>)
      write_block(from, kPanelWidth<T>, 1, count, columns(p), m, h, first, p * kPanelWidth<T>);
  }
};
