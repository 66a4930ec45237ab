// The coordinates of the tokens of a head of rank 2 to 4. Included inside an ISA's namespace.
//
// Any invertible A leaves the logits as they are: (A^-T t) . (A s) = t . s. The one that makes both
// covariances diagonal makes panels few if queries or keys are correlated.

struct Square {
  double a[kMostAxes][kMostAxes];
};

static Square identity_of(int rank) {
  Square one{};
  for (int i = 0; i < rank; ++i) one.a[i][i] = 1;
  return one;
}
static Square product_of(int rank, const Square& x, const Square& y) {
  Square z{};
  for (int i = 0; i < rank; ++i)
    for (int j = 0; j < rank; ++j)
      for (int k = 0; k < rank; ++k) z.a[i][j] += x.a[i][k] * y.a[k][j];
  return z;
}

// Eigenvalues of a symmetric matrix and, in columns, its eigenvectors, by rotations.
static void find_eigenvectors(int rank, Square m, double* value, Square& vector) {
  vector = identity_of(rank);
  for (int sweep = 0; sweep < 30; ++sweep) {
    double off = 0, all = 0;
    for (int i = 0; i < rank; ++i)
      for (int j = 0; j < rank; ++j) {
        all += m.a[i][j] * m.a[i][j];
        if (i != j) off += m.a[i][j] * m.a[i][j];
      }
    if (!(off > 1e-30 * all)) break;
    for (int p = 0; p < rank; ++p)
      for (int q = p + 1; q < rank; ++q) {
        if (m.a[p][q] == 0) continue;
        const double theta = (m.a[q][q] - m.a[p][p]) / (2 * m.a[p][q]);
        const double t = (theta < 0 ? -1 : 1) / (::fabs(theta) + ::sqrt(theta * theta + 1));
        const double c = 1 / ::sqrt(t * t + 1), s = t * c;
        for (int k = 0; k < rank; ++k) {
          const double x = m.a[k][p], y = m.a[k][q];
          m.a[k][p] = c * x - s * y;
          m.a[k][q] = s * x + c * y;
        }
        for (int k = 0; k < rank; ++k) {
          const double x = m.a[p][k], y = m.a[q][k];
          m.a[p][k] = c * x - s * y;
          m.a[q][k] = s * x + c * y;
        }
        for (int k = 0; k < rank; ++k) {
          const double x = vector.a[k][p], y = vector.a[k][q];
          vector.a[k][p] = c * x - s * y;
          vector.a[k][q] = s * x + c * y;
        }
      }
  }
  for (int i = 0; i < rank; ++i) value[i] = m.a[i][i];
}

// What is known of some tokens: their number, sums and products measured from `origin`, ranges, and
// whether all are finite. Added up chunk by chunk, in order.
struct Cloud {
  double count = 0, sum[kMostAxes] = {}, low[kMostAxes], high[kMostAxes], odd = 0;
  Square products{};

  Cloud() {
    for (int a = 0; a < kMostAxes; ++a) low[a] = INFINITY, high[a] = -INFINITY;
  }
  void extend(int rank, const double* x) {
    ++count;
    for (int a = 0; a < rank; ++a) {
      low[a] = x[a] < low[a] ? x[a] : low[a];
      high[a] = x[a] > high[a] ? x[a] : high[a];
      odd += x[a] * 0;
    }
  }
  void add(int rank, const double* x, const double* origin) {
    extend(rank, x);
    for (int a = 0; a < rank; ++a) {
      sum[a] += x[a] - origin[a];
      for (int b = 0; b <= a; ++b) products.a[a][b] += (x[a] - origin[a]) * (x[b] - origin[b]);
    }
  }
  void join(int rank, const Cloud& later) {
    count += later.count;
    odd += later.odd;
    for (int a = 0; a < rank; ++a) {
      sum[a] += later.sum[a];
      low[a] = later.low[a] < low[a] ? later.low[a] : low[a];
      high[a] = later.high[a] > high[a] ? later.high[a] : high[a];
      for (int b = 0; b <= a; ++b) products.a[a][b] += later.products.a[a][b];
    }
  }
  bool regular() const { return odd == 0; }  // false for NaN
  double middle(int a) const { return 0.5 * (low[a] + high[a]); }
  double reach(int a) const { return 0.5 * (high[a] - low[a]); }
  Square covariance(int rank) const {
    Square c{};
    for (int a = 0; a < rank; ++a)
      for (int b = 0; b <= a; ++b)
        c.a[a][b] = c.a[b][a] = products.a[a][b] / count - sum[a] / count * (sum[b] / count);
    return c;
  }
};

// Tokens of one side: queries (times the scale) or keys.
struct TensorTokens {
  int rank = 0;
  int64_t n = 0;
  Buffer<double> at;      // [n][rank]
  Buffer<double> bias;    // [n]: of keys
  Buffer<uint8_t> state;  // [n]

  enum : uint8_t { kPlain, kHidden, kApart };  // kApart: computed pair by pair, see apart.h
  bool is_plain(int64_t i) const { return state.data[i] == kPlain; }

  // Calls visit(cloud, token) for every plain token, and joins the clouds of all chunks.
  template <class Visit>
  Cloud gather(Visit visit) const {
    const int64_t chunks = ceil_div(n, kChunk);
    Buffer<Cloud> part(chunks);
    const auto one = [&](int64_t c) {
      Cloud cloud;
      for (int64_t i = c * kChunk; i < least(n, (c + 1) * kChunk); ++i)
        if (is_plain(i)) visit(cloud, i);
      part.data[c] = cloud;
    };
    chunks > 2 ? parallel(chunks, one) : serial(chunks, one);
    Cloud all;
    for (int64_t c = 0; c < chunks; ++c) all.join(rank, part.data[c]);
    return all;
  }
  // The largest magnitude of plain tokens on every axis.
  void find_most(double* most_of) const {
    const Cloud all =
        gather([&](Cloud& cloud, int64_t i) { cloud.extend(rank, at.data + i * rank); });
    for (int a = 0; a < rank; ++a)
      most_of[a] = all.count > 0 ? larger_of(-all.low[a], all.high[a]) : 0;
  }
  // Every token x becomes m x - offset.
  void move(const Square& m, const double* offset) {
    for_parts(n, kChunk, [&](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; ++i) {
        double* x = at.data + i * rank;
        double y[kMostAxes];
        for (int a = 0; a < rank; ++a) {
          y[a] = -offset[a];
          for (int b = 0; b < rank; ++b) y[a] += m.a[a][b] * x[b];
        }
        for (int a = 0; a < rank; ++a) x[a] = y[a];
      }
    });
  }
};

// The frame of a head: t' = inverse^T t - t_middle, s' = matrix s - s_middle.
struct Frame {
  Square matrix, inverse;
  double t_middle[kMostAxes], s_middle[kMostAxes];
};

static Square transposed(int rank, const Square& m) {
  Square t{};
  for (int i = 0; i < rank; ++i)
    for (int j = 0; j < rank; ++j) t.a[i][j] = m.a[j][i];
  return t;
}

// A, its inverse; the identity if a covariance is singular or has no meaning.
static void find_frame(int rank, const Square& of_query, const Square& of_key, Frame& frame) {
  frame.matrix = frame.inverse = identity_of(rank);
  Square ridge = of_key, vector;
  double trace = 0, value[kMostAxes];
  for (int a = 0; a < rank; ++a) trace += of_key.a[a][a];
  // With less, A would be so far from a rotation that it costs digits of fp64.
  for (int a = 0; a < rank; ++a) ridge.a[a][a] += 1e-6 * trace;
  if (!(trace > 0)) return;
  find_eigenvectors(rank, ridge, value, vector);
  Square root{}, inverse_root{};
  for (int i = 0; i < rank; ++i)
    for (int j = 0; j < rank; ++j)
      for (int k = 0; k < rank; ++k) {
        if (!(value[k] > 0)) return;
        const double x = vector.a[i][k] * vector.a[j][k];
        root.a[i][j] += x * ::sqrt(value[k]);
        inverse_root.a[i][j] += x / ::sqrt(value[k]);
      }
  find_eigenvectors(rank, product_of(rank, product_of(rank, root, of_query), root), value, vector);
  frame.matrix = product_of(rank, transposed(rank, vector), inverse_root);
  frame.inverse = product_of(rank, root, vector);
  double odd = 0;
  for (int i = 0; i < rank; ++i)
    for (int j = 0; j < rank; ++j) odd += (frame.matrix.a[i][j] + frame.inverse.a[i][j]) * 0;
  if (odd != 0) frame.matrix = frame.inverse = identity_of(rank);
}

// Puts both sides into their frame; false if a token is not finite.
static bool choose_frame(TensorTokens& query, TensorTokens& key, Frame& frame, double* t_most,
                         double* s_most) {
  const int rank = query.rank;
  const double* first_key = nullptr;
  for (int64_t j = 0; j < key.n && !first_key; ++j)
    if (key.is_plain(j)) first_key = key.at.data + j * rank;
  if (!first_key) return true;
  double origin[2][kMostAxes];
  for (int a = 0; a < rank; ++a) origin[0][a] = query.at.data[a], origin[1][a] = first_key[a];
  const auto measure = [&](const TensorTokens& side, const double* from) {
    return side.gather(
        [&](Cloud& cloud, int64_t i) { cloud.add(rank, side.at.data + i * rank, from); });
  };
  Cloud of_query = measure(query, origin[0]), of_key = measure(key, origin[1]);
  if (!of_query.regular() || !of_key.regular()) return false;
  find_frame(rank, of_query.covariance(rank), of_key.covariance(rank), frame);
  const auto turned = [&](const TensorTokens& side, const Square& m) {
    return side.gather([&](Cloud& cloud, int64_t i) {
      double y[kMostAxes] = {};
      for (int a = 0; a < rank; ++a)
        for (int b = 0; b < rank; ++b) y[a] += m.a[a][b] * side.at.data[i * rank + b];
      cloud.extend(rank, y);
    });
  };
  const auto size = [&](const Cloud& t, const Cloud& s) {
    double all = 1;
    for (int a = 0; a < rank; ++a) all *= 1 + 4 * t.reach(a) * s.reach(a);
    return all;
  };
  const Square of_t = transposed(rank, frame.inverse);
  const Cloud t = turned(query, of_t), s = turned(key, frame.matrix);
  if (size(t, s) < 0.9 * size(of_query, of_key)) {
    of_query = t, of_key = s;
  } else {
    frame.matrix = frame.inverse = identity_of(rank);
  }
  for (int a = 0; a < rank; ++a) {
    frame.t_middle[a] = of_query.middle(a);
    frame.s_middle[a] = of_key.middle(a);
  }
  query.move(transposed(rank, frame.inverse), frame.t_middle);
  key.move(frame.matrix, frame.s_middle);
  query.find_most(t_most);
  key.find_most(s_most);
  return true;
}
