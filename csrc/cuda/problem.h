// The description of a call that a CUDA kernel receives by value: sizes and strided tensors. No
// torch.
#pragma once

#include "spec/types.h"

namespace boltzattn::cuda {

constexpr int kMostLead = 8;  // leading dimensions of more than one element

// A tensor [*lead, rows, columns]. Strides count elements.
struct Strided {
  void* data;
  int64_t row, column;
  int64_t lead[kMostLead];
  DType dtype;
  int32_t whole_vectors;  // every row starts on 16 bytes and may be read 16 bytes at a time
};

struct Call {
  int64_t heads, n_q, n_k, rank, dv;
  double scale, dropout_p;
  int64_t lead[kMostLead];  // sizes; the first `dims` count
  int32_t dims, is_causal, is_gaussian;
  Strided query, key, value;
  Strided attn_mask;      // data null: none; bool: true = may attend; floating: added to logits
  Strided key_mask;       // [heads, 1, n_k]; bool: true = ignored; floating: added to logits
  Strided slopes;         // [heads, 1, 1] fp64; -slope |i - j| is added to the logits
  Strided seed;           // [heads, 1, 1] int64
  Strided out;            // written by forward, read by backward
  double* lse;            // [heads, n_q]
  const int32_t* served;  // [heads] or null: heads that the transform has served
  void* totals;           // workspace, of `totals_bytes` bytes
};

struct Gradient {
  Call call;
  Strided grad_out;
  Strided grad_lse;  // [heads, n_q, 1] fp64; data null if lse was not used
  Strided grad_query, grad_key, grad_value;
  Strided grad_key_mask;  // [heads, 1, n_k], fp64 or fp32; data null unless the mask is floating
  Strided grad_slopes;    // [heads, 1, 1] fp64; data null without slopes
  void* row_norms;        // workspace: [heads, n_q] of (high, low, delta) in the arithmetic type
  double* slope_sums;     // workspace: [heads, n_q], the gradient of the slope by row
};

// Numbers of rank-1 queries and keys from tokens: out = weight x + bias.
struct Projected {
  int64_t batch, n, columns, outputs, chunks;
  Strided x;        // [batch, n, columns]
  Strided weight;   // [outputs, columns]
  Strided bias;     // [1, outputs]; data null: none
  void* out;        // [batch, outputs, n], dense
  Extent* parts;    // workspace: [batch, chunks, outputs]
  Extent* extents;  // [batch, outputs]
};

}  // namespace boltzattn::cuda
