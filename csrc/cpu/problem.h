// What a kernel is told: sizes, and where the strided tensors lie. No torch.
#pragma once

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
  double* lse;       // [heads, n_q]
};

struct AttentionGradient {
  Attention call;
  Matrix grad_out;
  Matrix grad_lse;  // [heads, n_q, 1], fp64; absent if lse was not used
  Matrix grad_query, grad_key, grad_value;
};

}  // namespace boltzattn
