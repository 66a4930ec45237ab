// Causal attention of rank 1 by halving. Included inside an ISA's namespace.
//
// Cut the sequence into leaves; within a leaf the direct kernel applies the mask. At every size
// from the leaf up, the left block of a pair acts on all queries of the right block without any
// mask. The transform computes that, and its result is merged into the results of those queries.
// Query i sees keys 0 .. i, so queries past the last key see all of them.

constexpr int64_t kLeaf = 512;  // the direct kernel is faster for shorter blocks

// Head offsets of calls on some rows of each head: `count` blocks, which start at
// start + b * stride.
struct Cuts {
  int64_t heads, count, start, stride;
  Buffer<int64_t> offset;
  int64_t* next = offset.data;

  // Starts the tensor at token `first` of each block; `step` is its stride along tokens.
  void cut(Matrix& m, int64_t first, int64_t step) {
    if (!m) return;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t b = 0; b < count; ++b)
        next[h * count + b] = m.head[h] + (start + b * stride + first) * step;
    m.head = next;
    next += heads * count;
  }
};

// A call on blocks: queries and keys of each are [query, query + n_q) and [key, key + n_k).
struct Blocks {
  Cuts cuts;
  Attention call;

  Blocks(const Attention& whole, int64_t start, int64_t count, int64_t stride, int64_t query,
         int64_t n_q, int64_t key, int64_t n_k, bool masked)
      : cuts{whole.heads, count, start, stride, Buffer<int64_t>(6 * whole.heads * count)},
        call(whole) {
    call.heads = whole.heads * count;
    call.n_q = n_q;
    call.n_k = n_k;
    call.is_causal = masked;
    call.merge = !masked;
    for (Matrix* m : {&call.query, &call.out, &call.lse}) cuts.cut(*m, query, m->row);
    for (Matrix* m : {&call.key, &call.value}) cuts.cut(*m, key, m->row);
    cuts.cut(call.key_mask, key, call.key_mask.column);
  }
};

template <class T>
static void causal_forward(const Attention& call) {
  const int64_t n = least(call.n_q, call.n_k);
  const int64_t whole = n / kLeaf, rest = n - whole * kLeaf;
  auto leaves = [&](int64_t start, int64_t count, int64_t size) {
    const Blocks blocks(call, start, count, size, 0, size, 0, size, true);
    if (count > 0) direct_forward<T>(blocks.call);
  };
  leaves(0, whole, kLeaf);
  leaves(whole * kLeaf, rest > 0, rest);
  auto pairs = [&](int64_t start, int64_t count, int64_t half, int64_t queries) {
    if (count > 0 && queries > 0)
      transform_forward<T>(
          Blocks(call, start, count, 2 * half, half, queries, 0, half, false).call);
  };
  for (int64_t half = kLeaf; half < n; half *= 2) {
    const int64_t complete = n / (2 * half);
    pairs(0, complete, half, half);
    pairs(complete * 2 * half, 1, half, n - complete * 2 * half - half);
  }
  if (call.n_q > n) {  // these have not seen any key yet
    Blocks blocks(call, 0, 1, 0, n, call.n_q - n, 0, n, false);
    blocks.call.merge = false;
    transform_forward<T>(blocks.call);
  }
}
