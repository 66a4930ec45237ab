// The description of a call that a kernel receives: sizes and strided tensors. No torch.
#pragma once

#include "spec/scan.h"

namespace boltzattn {

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

struct Attention {
  int64_t heads, n_q, n_k, rank, dv;
  double scale;
  double dropout_p;
  bool is_causal;
  bool is_gaussian;  // logits are -scale / 2 |q - k|^2, not scale q . k
  Matrix query, key, value;
  Matrix attn_mask;  // bool: true = may attend; floating: added to the logits
  Matrix key_mask;   // [heads, 1, n_k]; bool: true = ignored; floating: added to the logits
  Matrix slopes;     // [heads, 1, 1] fp64; -slope |i - j| is added to the logits
  Matrix seed;       // [heads, 1, 1] int64
  Matrix out;        // written by forward, read by backward
  Matrix lse;        // [heads, n_q, 1], fp64, rows next to each other; none for a layer

  // Whether logits of rank 1 are more than products, whatever the pair's distance.
  bool is_lookup() const { return is_gaussian || (key_mask && key_mask.dtype != DType::kBool); }
  bool is_biased() const { return is_lookup() || slopes; }
};

inline double* lse_of(const Attention& call, int64_t h) {
  return static_cast<double*>(call.lse.data) + call.lse.head[h];
}

struct AttentionGradient {
  Attention call;
  Matrix grad_out;
  Matrix grad_lse;  // [heads, n_q, 1], fp64; absent if lse was not used
  Matrix grad_query, grad_key, grad_value;
  Matrix grad_key_mask;  // [heads, 1, n_k], fp64 or fp32; absent unless the mask is floating
  Matrix grad_slopes;    // [heads, 1, 1], fp64; absent without slopes
};

// What a layer adds to attention: values are weight v_j + weight_bias with rows v_j of `columns`
// numbers, and the results of `summed` consecutive heads are added up, plus out_bias.
struct Layer {
  int64_t columns, summed;
  Matrix weight;          // [heads, dv, columns]
  Matrix weight_bias;     // [heads, 1, dv]
  Matrix out_bias;        // [heads, 1, dv]
  const Extent* extents;  // [batch, 2, summed]: of queries and keys; none: to be found
  Matrix grad_weight;     // [heads, dv, columns]; backward adds to it
};

// One of several sequences that are stored end to end in the rows of the tensors of a call.
struct Sequence {
  int64_t query, n_q, key, n_k;  // its queries are rows [query, query + n_q); keys likewise
  bool by_transform;             // else by `direct`
};

// What the machines that share a head agree on: the range of all queries and keys, and an upper
// bound of the number of keys. Doubles throughout, so that a tensor can hold it.
struct SharedRange {
  double t_min, t_max, s_min, s_max, keys;
  double n_q, n_k;  // of one machine, for the cost of the layout
  double level;     // of precision; negative: not for the transform
};

// The state of streams, one per head: see scan/stream.h.
struct Stream {
  ScanLayout layout;
  int64_t width;            // columns of `sums`, a multiple of kStreamLanes
  double* sums;             // [heads][features][width]
  double* z;                // [heads][features]
  double* ends;             // [heads][2]: the largest and the smallest key of the table
  double* keys;             // [heads][kStreamRoom]: tokens that are not in the table yet
  double* values;           // [heads][kStreamRoom][width]
  int64_t* waiting;         // [1]: how many these are
  const double* positions;  // [features]: t of the nodes
};
constexpr int64_t kStreamRoom = 16;
constexpr int64_t kStreamLanes = 8;

// A shard of causal sequences, one per head: the layouts that all shards use, and what is known of
// the keys of earlier shards and of the rows of later ones. See scan/shards.h and
// python/boltzattn/transform/scan_shards.py.
struct ScanShard {
  int nodes, levels;
  double ratio;
  const double* t_most;   // [heads]
  const double* ends;     // [heads][2]: the largest and the smallest key
  const double* keys;     // [heads][3]: their number, their sum, and the largest |value|
  const double* centres;  // [heads][2][dv]: the values of the end keys
  const double* table;    // [heads][features][dv + 1]
  const double* slopes;   // the same; none without gradients
  const double* later;    // the same; none without later shards
  bool open;              // whether later shards read the tables of this one
};

// What a shard tells the later ones.
struct ShardTables {
  double *ends, *keys, *centres, *table, *slopes;  // as in ScanShard; slopes may be none
};

// Numbers of rank-1 queries and keys from tokens: out = weight x + bias.
struct Projection {
  int64_t batch, n, columns, outputs;
  Matrix x;         // [batch, n, columns]
  Matrix weight;    // [batch, outputs, columns], the same for all
  Matrix bias;      // [batch, 1, outputs], the same for all
  Matrix out;       // [batch, outputs, n]
  Extent* extents;  // [batch, outputs]
};

// A self-attention layer of few tokens, with its projections.
struct SmallLayer {
  int64_t batch, n, d, num_heads, rank, dv, d_out;
  double scale;
  bool is_causal;
  Matrix x;                   // [batch, n, d]
  Matrix w_q, w_k, w_v, w_o;  // [batch, outputs, inputs], the same for all; w_o may be absent
  Matrix b_in, b_o;           // [batch, 1, outputs], the same for all, or absent
  Matrix key_mask;            // [batch, 1, n]
  Matrix out;                 // [batch, n, d_out], contiguous
  // Contiguous and in the dtype of x: [batch, n, 2 num_heads rank], twice [batch, n, num_heads dv],
  // [batch, num_heads, n]. Forward keeps them if they are given; backward needs them.
  void *query_key, *value, *heads;
  double* lse;
};

// Gradients that are absent are not computed; those of the projections of tokens go together.
struct SmallLayerGradient {
  SmallLayer layer;
  Matrix grad_out;
  Matrix grad_x;
  Matrix grad_w_qk, grad_w_v, grad_w_o;
  Matrix grad_b_in, grad_b_o;
};

}  // namespace boltzattn
