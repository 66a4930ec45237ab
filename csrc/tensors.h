// What the operators of every backend ask of a tensor, by torch's stable ABI.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "cpu/problem.h"  // DType

namespace boltzattn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Bool:
    case ScalarType::Long:
      return DType::kBool;  // opaque to the readers of numbers
    default:
      STD_TORCH_CHECK(false, "boltzattn: unsupported dtype");
  }
}

inline std::vector<int64_t> shape_of(const Tensor& x) {
  const auto sizes = x.sizes();
  return {sizes.begin(), sizes.end()};
}
inline std::vector<int64_t> shape_with(const Tensor& x, int64_t last) {
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = last;
  return shape;
}
inline std::vector<int64_t> rows_of(const Tensor& x) {
  std::vector<int64_t> shape = shape_of(x);
  shape.pop_back();
  return shape;
}

}  // namespace boltzattn
