// What a layer adds to the transform: its weight is applied to moments, not to tokens. Included
// inside an ISA's namespace.

// rows[., dv] = rows[., columns] weight^T, or back: rows[., columns] = rows[., dv] weight.
template <class T>
static void apply_weight(const Head<T>& head, const double* from, int64_t from_size, int64_t rows,
                         bool back, double* to, int64_t to_size) {
  constexpr int64_t kBlock = 8 * kLanes<double>, kDepth = 256;
  const Matrix& weight = head.layer->weight;
  const int64_t depth = back ? head.dv : head.columns, width = back ? head.columns : head.dv;
  parallel(ceil_div(width, kBlock), [&](int64_t block) {
    const int64_t begin = block * kBlock, here = least(kBlock, width - begin);
    Buffer<double> block_weight(kDepth * kBlock), sum(rows * kBlock);
    set_zero(sum.data, rows * kBlock);
    for (int64_t k = 0; k < depth; k += kDepth) {
      const int64_t deep = least(kDepth, depth - k);
      set_zero(block_weight.data, deep * kBlock);
      if (back) {
        read_block(weight, head.h, k, begin, deep, here, block_weight.data, kBlock, 1);
      } else {
        read_block(weight, head.h, begin, k, here, deep, block_weight.data, 1, kBlock);
      }
      gemm<double, true>(rows, 8, deep, {from + k, from_size, 1}, block_weight.data, kBlock,
                         sum.data, kBlock);
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < here; ++c) to[r * to_size + begin + c] = sum.data[r * kBlock + c];
  });
}

// Adds a bias to the values of both end keys.
template <class T>
static void add_to_centres(Head<T>& head, const Matrix& bias) {
  if (!bias) return;
  Buffer<double> row(head.dv);
  read_block(bias, head.h, 0, 0, 1, head.dv, row.data, 0, 1);
  for (int end = 0; end < 2; ++end)
    for (int64_t c = 0; c < head.dv; ++c) head.centre.data[end * head.row_size + c] += row.data[c];
}

// Adds sum_b value_table[b]^T (moments of the raw rows)[b].
template <class T>
static void add_weight_gradient(const Head<T>& head, const double* value_table) {
  const int64_t rows = head.key_nodes(), raw_size = head.raw_size, columns = head.columns;
  const Matrix& grad_weight = head.layer->grad_weight;
  Buffer<double> sums(rows * raw_size);
  for (int64_t r = 0; r < rows; ++r) {
    const double* from = head.raw.data + r * raw_size;
    const T* centre = head.raw_centre_of(r / head.layout.key.nodes);
    for (int64_t c = 0; c < raw_size; ++c)
      sums.data[r * raw_size + c] = c < columns ? from[c] + from[columns] * double(centre[c]) : 0;
  }
  constexpr int64_t kBlock = 32;
  parallel(ceil_div(head.dv, kBlock), [&](int64_t block) {
    const int64_t first = block * kBlock, here = least(kBlock, head.dv - first);
    Buffer<double> product(kBlock * raw_size);
    Buffer<T> row(columns);
    gemm<double, false>(here, raw_size / kLanes<double>, rows,
                        {value_table + first, 1, head.row_size}, sums.data, raw_size, product.data,
                        raw_size);
    for (int64_t o = 0; o < here; ++o) {
      read_block(grad_weight, head.h, first + o, 0, 1, columns, row.data, 0, 1);
      for (int64_t c = 0; c < columns; ++c)
        row.data[c] = T(double(row.data[c]) + product.data[o * raw_size + c]);
      write_block(row.data, 0, 1, 1, columns, grad_weight, head.h, first + o, 0);
    }
  });
}

// The table for rows of the tensor of values, from a table over the key nodes for values. The last
// column is copied or zero.
template <class T>
static void table_of_rows(const Head<T>& head, const double* table, bool keep_last,
                          Buffer<double>& to) {
  const int64_t rows = head.key_nodes();
  to.resize(rows * head.raw_size);
  apply_weight(head, table, head.row_size, rows, true, to.data, head.raw_size);
  for (int64_t r = 0; r < rows; ++r)
    to.data[r * head.raw_size + head.columns] = keep_last ? table[r * head.row_size + head.dv] : 0;
}
