// The tensors of an operator, by torch's stable ABI. All operators of all backends describe their
// tensors to the kernels through this file, which checks dtype, device and shape first. No kernel
// reads or writes a tensor that has not been checked.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <tuple>
#include <vector>

#include "spec/types.h"

namespace boltzattn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// As in python/boltzattn/problem.py.
struct Problem {
  const Tensor &query, &key, &value;
  const OptionalTensor &attn_mask, &key_mask, &slopes, &seed;
  double scale, dropout_p;
  bool is_causal, is_gaussian;
};

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
    default:
      return DType::kBool;  // not read as numbers
  }
}
inline bool is_floating(const Tensor& x) {
  return dtype_of(x) != DType::kBool;
}

inline std::vector<int64_t> shape_of(const Tensor& x) {
  const auto sizes = x.sizes();
  return {sizes.begin(), sizes.end()};
}
inline std::string text_of(const std::vector<int64_t>& shape) {
  std::ostringstream text;
  for (size_t d = 0; d < shape.size(); ++d) text << (d ? ", " : "[") << shape[d];
  text << (shape.empty() ? "[]" : "]");
  return text.str();
}

// Size of a dimension, counted from the last one.
inline int64_t size_from_last(const char* name, const Tensor& x, int64_t back) {
  STD_TORCH_CHECK(x.dim() > back, "boltzattn: ", name, " has only ", x.dim(), " dimensions");
  return x.size(x.dim() - 1 - back);
}

// A new contiguous tensor on the device of another. torch::stable::new_empty does the same by two
// trips through the dispatcher, which small calls would notice.
inline Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& shape,
                         std::optional<ScalarType> dtype = {}) {
  int32_t type, device, index;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  if (dtype) type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*dtype));
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0; stride *= std::max<int64_t>(shape[d], 1))
    strides[d] = stride;
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      int64_t(shape.size()), shape.data(), strides.data(), type, device, index, &made));
  return Tensor(made);
}

// What a tensor must hold.
enum class Holds { kNumbers, kMask, kFloat64, kInt64, kBool };  // kNumbers: same dtype as the first
constexpr int64_t kNone = -1;                                   // no such dimension
constexpr uint64_t kAll = ~uint64_t(0);

constexpr int64_t kExtentSize = sizeof(Extent) / sizeof(double);

struct Strides {
  std::vector<int64_t> lead;  // 0 along a dimension that heads share
  int64_t row = 0, column = 0;
};

// The tensors of one call. All of them are on the device of the first tensor and have its leading
// dimensions. The leading dimensions are all but the last two.
class Arguments {
 public:
  Arguments(const char* name, const Tensor& first, bool cuda)
      : name_(name), first_(first), cuda_(cuda) {
    STD_TORCH_CHECK(
        first.dim() >= 2 && is_floating(first) && (cuda ? first.is_cuda() : first.is_cpu()),
        "boltzattn: ", name, " must have at least 2 dimensions and a floating dtype, on ",
        cuda ? "cuda" : "cpu", ", got ", text_of(shape_of(first)), " of ",
        toString(first.scalar_type()));
    for (int64_t d = 0; d + 2 < first.dim(); ++d) {
      lead_.push_back(first.size(d));
      heads_ *= first.size(d);
    }
  }
  const std::vector<int64_t>& lead() const { return lead_; }
  int64_t heads() const { return heads_; }

  void check(const char* name, const Tensor& x, const std::vector<int64_t>& shape,
             Holds holds) const {
    const ScalarType type = x.scalar_type();
    const bool typed = holds == Holds::kNumbers   ? type == first_.scalar_type()
                       : holds == Holds::kMask    ? is_floating(x) || type == ScalarType::Bool
                       : holds == Holds::kFloat64 ? type == ScalarType::Double
                       : holds == Holds::kInt64   ? type == ScalarType::Long
                                                  : type == ScalarType::Bool;
    static constexpr const char* kNames[] = {"", "bool or a floating dtype", "float64", "int64",
                                             "bool"};
    STD_TORCH_CHECK(
        typed, "boltzattn: ", name, " must have ",
        holds == Holds::kNumbers ? std::string("the dtype of ") + name_ : kNames[int(holds)],
        ", got ", toString(type));
    const auto sizes = x.sizes();
    STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()),
                    "boltzattn: ", name, " must have shape ", text_of(shape), ", got ",
                    text_of(shape_of(x)));
    STD_TORCH_CHECK(
        cuda_ ? x.is_cuda() && x.get_device_index() == first_.get_device_index() : x.is_cpu(),
        "boltzattn: ", name, " must be on the device of ", name_);
  }

  // Checks a tensor [*lead, rows, columns] and returns its strides. `across` has a bit for each
  // leading dimension that the tensor has.
  Strides strides(const char* name, const Tensor& x, int64_t rows, int64_t columns, Holds holds,
                  uint64_t across) const {
    std::vector<int64_t> shape;
    shape.reserve(lead_.size() + 2);
    for (size_t k = 0; k < lead_.size(); ++k)
      if (across >> k & 1) shape.push_back(lead_[k]);
    if (rows != kNone) shape.push_back(rows);
    if (columns != kNone) shape.push_back(columns);
    check(name, x, shape, holds);
    Strides found{std::vector<int64_t>(lead_.size()), 0, 0};
    int64_t d = 0;
    for (size_t k = 0; k < lead_.size(); ++k)
      if (across >> k & 1) found.lead[k] = x.stride(d++);
    if (rows != kNone) found.row = x.stride(d++);
    if (columns != kNone) found.column = x.stride(d);
    return found;
  }

  // The memory of a contiguous tensor.
  template <class T>
  T* dense(const char* name, const Tensor& x, const std::vector<int64_t>& shape,
           Holds holds) const {
    check(name, x, shape, holds);
    STD_TORCH_CHECK(x.is_contiguous(), "boltzattn: ", name, " must be contiguous");
    return static_cast<T*>(x.data_ptr());
  }

  // New tensors on the same device. `result` has the leading dimensions.
  Tensor result(std::initializer_list<int64_t> inner, std::optional<ScalarType> dtype = {}) const {
    std::vector<int64_t> shape = lead_;
    shape.insert(shape.end(), inner);
    return new_tensor(first_, shape, dtype);
  }
  Tensor doubles(const std::vector<int64_t>& shape) const {
    return new_tensor(first_, shape, ScalarType::Double);
  }

 private:
  const char* name_;
  const Tensor first_;
  bool cuda_;
  std::vector<int64_t> lead_;
  int64_t heads_ = 1;
};

// Describes the inputs of a call. `view(name, tensor, rows, columns, holds)` checks a tensor and
// returns the backend's description of it.
template <class View, class Call>
void describe(View& view, const Problem& p, Call& call) {
  call.heads = view.heads();
  call.n_q = size_from_last("query", p.query, 1);
  call.n_k = size_from_last("key", p.key, 1);
  call.rank = size_from_last("query", p.query, 0);
  call.dv = size_from_last("value", p.value, 0);
  call.scale = p.scale;
  call.dropout_p = p.dropout_p;
  call.is_causal = p.is_causal;
  call.is_gaussian = p.is_gaussian;
  STD_TORCH_CHECK(call.rank > 0 && call.dv > 0, "boltzattn: rank and dv must be at least 1");
  STD_TORCH_CHECK(p.dropout_p >= 0 && p.dropout_p <= 1 && (p.dropout_p == 0 || p.seed),
                  "boltzattn: dropout_p must be from 0 to 1, with a seed if it is not 0, got ",
                  p.dropout_p);
  call.query = view("query", p.query, call.n_q, call.rank);
  call.key = view("key", p.key, call.n_k, call.rank);
  call.value = view("value", p.value, call.n_k, call.dv);
  call.attn_mask = view("attn_mask", p.attn_mask, call.n_q, call.n_k, Holds::kMask);
  call.key_mask = view("key_mask", p.key_mask, kNone, call.n_k, Holds::kMask);
  call.slopes = view("slopes", p.slopes, kNone, kNone, Holds::kFloat64);
  if (p.dropout_p > 0) call.seed = view("seed", p.seed, kNone, kNone, Holds::kInt64);
}

// What backward returns, in the order of Gradients in python/boltzattn/problem.py.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

inline ScalarType type_of_sums(const Problem& p) {
  return p.query.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}
inline bool has_key_bias(const Problem& p) {
  return p.key_mask && is_floating(*p.key_mask);
}

// Describes the gradients of key_mask and of slopes, where the mask is floating and where there are
// slopes.
template <class View, class Gradient>
void describe_bias_gradients(View& view, const Problem& p, const Tensor& grad_key_mask,
                             const Tensor& grad_slopes, Gradient& g) {
  if (has_key_bias(p)) {
    g.grad_key_mask = view("grad_key_mask", grad_key_mask, kNone, g.call.n_k, Holds::kMask);
    STD_TORCH_CHECK(grad_key_mask.scalar_type() == type_of_sums(p),
                    "boltzattn: grad_key_mask must have dtype ", toString(type_of_sums(p)),
                    ", got ", toString(grad_key_mask.scalar_type()));
  }
  if (p.slopes) g.grad_slopes = view("grad_slopes", grad_slopes, kNone, kNone, Holds::kFloat64);
}

// The same for new ones. They have no elements if they are not described.
template <class View, class Gradient>
std::tuple<Tensor, Tensor> new_bias_gradients(View& view, const Problem& p, Gradient& g) {
  const ScalarType sums = type_of_sums(p);
  Tensor grad_key_mask =
      has_key_bias(p) ? view.result({g.call.n_k}, sums) : new_tensor(p.query, {0}, sums);
  Tensor grad_slopes =
      p.slopes ? view.result({}, ScalarType::Double) : new_tensor(p.query, {0}, ScalarType::Double);
  describe_bias_gradients(view, p, grad_key_mask, grad_slopes, g);
  return {grad_key_mask, grad_slopes};
}

// Describes the gradients that backward starts from and those it returns.
template <class View, class Gradient>
void describe_gradients(View& view, const Tensor& grad_out, const OptionalTensor& grad_lse,
                        const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value,
                        Gradient& g) {
  const auto& call = g.call;
  g.grad_out = view("grad_out", grad_out, call.n_q, call.dv);
  g.grad_lse = view("grad_lse", grad_lse, call.n_q, kNone, Holds::kFloat64);
  g.grad_query = view("grad_query", grad_query, call.n_q, call.rank);
  g.grad_key = view("grad_key", grad_key, call.n_k, call.rank);
  g.grad_value = view("grad_value", grad_value, call.n_k, call.dv);
}

// Describes a projection without its results. x: [batch, n, d]; weight: [outputs, d]; bias:
// [outputs].
template <class View, class Projection>
void describe_projection(View& view, const Tensor& x, const Tensor& weight,
                         const OptionalTensor& bias, Projection& p) {
  STD_TORCH_CHECK(x.dim() == 3, "boltzattn: x must have 3 dimensions, got ", x.dim());
  p.batch = x.size(0);
  p.n = x.size(1);
  p.columns = x.size(2);
  p.outputs = size_from_last("weight", weight, 1);
  p.x = view("x", x, p.n, p.columns);
  p.weight = view("weight", weight, p.outputs, p.columns, Holds::kNumbers, 0);
  p.bias = view("bias", bias, kNone, p.outputs, Holds::kNumbers, 0);
}

// Raises unless the transform can compute the problem.
inline void check_transform(const Problem& p, bool is_causal, int64_t largest_rank) {
  STD_TORCH_CHECK(size_from_last("query", p.query, 0) <= largest_rank && !p.attn_mask &&
                      p.dropout_p == 0 && p.is_causal == is_causal,
                  "boltzattn: the transform takes ranks up to ", largest_rank,
                  ", no attn_mask, no dropout and is_causal=", is_causal ? "True" : "False");
}

}  // namespace boltzattn
