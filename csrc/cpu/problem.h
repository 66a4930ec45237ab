// What a kernel is told: sizes, and where the strided tensors lie. No torch.
#pragma once

#include <cmath>
#include <cstdint>

namespace boltzattn {

enum class DType { kFloat64, kFloat32, kBFloat16, kFloat16, kBool };

// A tensor [heads, rows, columns]; `head` lists the element offset of every head, so leading
// dimensions may be any number, permuted or expanded. Strides count elements.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  const int64_t* head = nullptr;
  int64_t row = 0;
  int64_t column = 0;

  explicit operator bool() const { return data != nullptr; }
};

// The range of some numbers: the least and the largest, which tokens they belong to, how many
// counted, and whether all were finite. Doubles throughout, so that a tensor can hold it.
struct Extent {
  double low = INFINITY, high = -INFINITY, at_low = 0, at_high = 0, count = 0, regular = 1;
};

struct Attention {
  int64_t heads, n_q, n_k, rank, dv;
  double scale;
  double dropout_p;
  bool is_causal;
  Matrix query, key, value;
  Matrix attn_mask;  // bool: true = may attend; floating: added to the logits
  Matrix key_mask;   // [heads, 1, n_k]; bool: true = ignored; floating: added to the logits
  Matrix seed;       // [heads, 1, 1] int64, read through `seed_of`
  Matrix out;        // written by forward, read by backward
  Matrix lse;        // [heads, n_q, 1], fp64; none for a layer
  bool merge;        // forward joins its results with what out and lse hold (transform only)

  // A layer: values are weight v_j + weight_bias with v_j of value_columns numbers, and the results
  // of `summed` consecutive heads are added up, to out_bias. Without weight: value_columns = dv,
  // summed = 1.
  int64_t value_columns;
  int64_t summed;
  Matrix weight;          // [heads, dv, value_columns]
  Matrix weight_bias;     // [heads, 1, dv]
  Matrix out_bias;        // [heads, 1, dv]
  const Extent* extents;  // [batch, 2, summed]: of queries and keys; none: to be found
};

inline double* lse_of(const Attention& call, int64_t h) {
  return static_cast<double*>(call.lse.data) + call.lse.head[h];
}

struct AttentionGradient {
  Attention call;
  Matrix grad_out;
  Matrix grad_lse;  // [heads, n_q, 1], fp64; absent if lse was not used
  Matrix grad_query, grad_key, grad_value;
  Matrix grad_weight;  // [heads, dv, value_columns], added to
};

// One of several sequences that stand end to end in the rows of the tensors of a call.
struct Sequence {
  int64_t query, n_q, key, n_k;  // its queries are rows [query, query + n_q); keys likewise
  bool by_transform;             // else by `direct`
};

// What machines that share a head agree on: the range of all queries and keys, and of these at
// most how many there are. Doubles throughout, so that a tensor can hold it.
struct SharedRange {
  double t_min, t_max, s_min, s_max, keys;
  double n_q, n_k;  // of one machine: what the layout's cost is weighed by
  double level;     // of precision; negative: not for the transform
};

// Numbers of rank-1 queries and keys from tokens: out = weight x + bias.
struct Projection {
  int64_t batch, n, columns, outputs;
  Matrix x;         // [batch, n, columns]
  Matrix weight;    // [1, outputs, columns]
  Matrix bias;      // [1, 1, outputs]
  Matrix out;       // [batch, outputs, n]
  Extent* extents;  // [batch, outputs]
};

}  // namespace boltzattn
