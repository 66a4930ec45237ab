// torch's side of the CPU kernels: operators by the stable ABI, tensors to plain descriptions.
// Shapes and dtypes have been checked by the Python side; what is checked here again is what would
// make a kernel read outside its memory.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace boltzattn {

int64_t thread_count() {
  return torch::stable::get_num_threads();
}

void throw_bad_alloc() {
  throw std::bad_alloc();
}

void run_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context) {
  const int64_t threads = std::min(tasks, thread_count());
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; ++task) body(context, task);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
      body(context, task);
  });
}

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

DType dtype_of(const Tensor& x) {
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

// Keeps the lists of head offsets alive while kernels run.
class Descriptions {
 public:
  explicit Descriptions(const Tensor& query) {
    for (int64_t d = 0; d + 2 < query.dim(); ++d) lead_.push_back(query.size(d));
    heads_ = 1;
    for (int64_t size : lead_) heads_ *= size;
  }

  int64_t heads() const { return heads_; }

  // `inner` is the number of trailing dimensions that are not leading ones: 2 for a matrix,
  // 1 for a vector along rows or columns, 0 for a scalar per head.
  Matrix matrix(const Tensor& x, int64_t rows, int64_t columns) {
    check(x, {rows, columns});
    return {x.data_ptr(), dtype_of(x), offsets(x), x.stride(x.dim() - 2), x.stride(x.dim() - 1)};
  }
  Matrix row_vector(const OptionalTensor& x, int64_t columns) {
    if (!x) return {};
    check(*x, {columns});
    return {x->data_ptr(), dtype_of(*x), offsets(*x), 0, x->stride(x->dim() - 1)};
  }
  Matrix column_vector(const OptionalTensor& x, int64_t rows) {
    if (!x) return {};
    check(*x, {rows});
    return {x->data_ptr(), dtype_of(*x), offsets(*x), x->stride(x->dim() - 1), 0};
  }
  Matrix scalar(const OptionalTensor& x) {
    if (!x) return {};
    check(*x, {});
    return {x->data_ptr(), dtype_of(*x), offsets(*x), 0, 0};
  }

 private:
  void check(const Tensor& x, const std::vector<int64_t>& inner) const {
    const int64_t lead = int64_t(lead_.size());
    bool same = x.dim() == lead + int64_t(inner.size());
    for (int64_t d = 0; same && d < x.dim(); ++d)
      same = x.size(d) == (d < lead ? lead_[size_t(d)] : inner[size_t(d - lead)]);
    STD_TORCH_CHECK(same && x.is_cpu(), "boltzattn: a tensor has another shape or device");
  }

  const int64_t* offsets(const Tensor& x) {
    std::vector<int64_t> offset(1, 0);
    for (size_t d = 0; d < lead_.size(); ++d) {
      std::vector<int64_t> next;
      next.reserve(offset.size() * size_t(lead_[d]));
      for (int64_t base : offset)
        for (int64_t i = 0; i < lead_[d]; ++i) next.push_back(base + i * x.stride(int64_t(d)));
      offset.swap(next);
    }
    kept_.push_back(std::make_unique<std::vector<int64_t>>(std::move(offset)));
    return kept_.back()->data();
  }

  std::vector<int64_t> lead_;
  int64_t heads_;
  std::vector<std::unique_ptr<std::vector<int64_t>>> kept_;
};

Attention describe(Descriptions& d, const Tensor& query, const Tensor& key, const Tensor& value,
                   const OptionalTensor& attn_mask, const OptionalTensor& key_mask,
                   const OptionalTensor& seed, double scale, double dropout_p, bool is_causal,
                   const Tensor& out, const Tensor& lse) {
  Attention call{};
  call.heads = d.heads();
  call.n_q = query.size(query.dim() - 2);
  call.n_k = key.size(key.dim() - 2);
  call.rank = query.size(query.dim() - 1);
  call.dv = value.size(value.dim() - 1);
  call.scale = scale;
  call.dropout_p = dropout_p;
  call.is_causal = is_causal;
  call.query = d.matrix(query, call.n_q, call.rank);
  call.key = d.matrix(key, call.n_k, call.rank);
  call.value = d.matrix(value, call.n_k, call.dv);
  if (attn_mask) call.attn_mask = d.matrix(*attn_mask, call.n_q, call.n_k);
  call.key_mask = d.row_vector(key_mask, call.n_k);
  call.seed = d.scalar(seed);
  call.out = d.matrix(out, call.n_q, call.dv);
  STD_TORCH_CHECK(lse.is_contiguous() && lse.scalar_type() == ScalarType::Double,
                  "boltzattn: lse must be contiguous float64");
  d.column_vector(lse, call.n_q);  // checks its shape
  call.lse = static_cast<double*>(lse.data_ptr());
  return call;
}

std::vector<int64_t> shape_with(const Tensor& x, int64_t last) {
  const auto sizes = x.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = last;
  return shape;
}
std::vector<int64_t> shape_of(const Tensor& x) {
  const auto sizes = x.sizes();
  return {sizes.begin(), sizes.end()};
}
std::vector<int64_t> rows_of(const Tensor& x) {
  std::vector<int64_t> shape = shape_of(x);
  shape.pop_back();
  return shape;
}

using Forward = void (*)(const Attention&);
using Backward = void (*)(const AttentionGradient&);

template <Forward Kernels::* kernel>
std::tuple<Tensor, Tensor> forward(Tensor query, Tensor key, Tensor value, OptionalTensor attn_mask,
                                   OptionalTensor key_mask, OptionalTensor seed, double scale,
                                   double dropout_p, bool is_causal) {
  Tensor out = torch::stable::new_empty(query, shape_with(query, value.size(value.dim() - 1)));
  Tensor lse = torch::stable::new_empty(query, rows_of(query), ScalarType::Double);
  Descriptions d(query);
  (kernels().*kernel)(describe(d, query, key, value, attn_mask, key_mask, seed, scale, dropout_p,
                               is_causal, out, lse));
  return {out, lse};
}

template <Backward Kernels::* kernel>
std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad_out, OptionalTensor grad_lse, Tensor query,
                                            Tensor key, Tensor value, Tensor out, Tensor lse,
                                            OptionalTensor attn_mask, OptionalTensor key_mask,
                                            OptionalTensor seed, double scale, double dropout_p,
                                            bool is_causal) {
  Tensor grad_query = torch::stable::new_empty(query, shape_of(query));
  Tensor grad_key = torch::stable::new_empty(key, shape_of(key));
  Tensor grad_value = torch::stable::new_empty(value, shape_of(value));
  Descriptions d(query);
  AttentionGradient g{};
  g.call = describe(d, query, key, value, attn_mask, key_mask, seed, scale, dropout_p, is_causal,
                    out, lse);
  g.grad_out = d.matrix(grad_out, g.call.n_q, g.call.dv);
  g.grad_lse = d.column_vector(grad_lse, g.call.n_q);
  g.grad_query = d.matrix(grad_query, g.call.n_q, g.call.rank);
  g.grad_key = d.matrix(grad_key, g.call.n_k, g.call.rank);
  g.grad_value = d.matrix(grad_value, g.call.n_k, g.call.dv);
  (kernels().*kernel)(g);
  return {grad_query, grad_key, grad_value};
}

// [heads, 7] in the order of TransformReport.
Tensor transform_report(Tensor query, Tensor key, Tensor value, OptionalTensor key_mask,
                        double scale) {
  Descriptions d(query);
  Attention call{};
  call.heads = d.heads();
  call.n_q = query.size(query.dim() - 2);
  call.n_k = key.size(key.dim() - 2);
  call.rank = 1;
  call.dv = value.size(value.dim() - 1);
  call.scale = scale;
  call.query = d.matrix(query, call.n_q, 1);
  call.key = d.matrix(key, call.n_k, 1);
  call.value = d.matrix(value, call.n_k, call.dv);
  call.key_mask = d.row_vector(key_mask, call.n_k);
  Tensor reports = torch::stable::new_empty(
      query, {call.heads, int64_t(sizeof(TransformReport) / sizeof(double))}, ScalarType::Double);
  kernels().transform_report(call, static_cast<TransformReport*>(reports.data_ptr()));
  return reports;
}

}  // namespace
}  // namespace boltzattn

#define BOLTZATTN_FORWARD                                                                        \
  "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_mask, Tensor? seed, " \
  "float scale, float dropout_p, bool is_causal) -> (Tensor, Tensor)"
#define BOLTZATTN_BACKWARD                                                                        \
  "(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "      \
  "Tensor lse, Tensor? attn_mask, Tensor? key_mask, Tensor? seed, float scale, float dropout_p, " \
  "bool is_causal) -> (Tensor, Tensor, Tensor)"

STABLE_TORCH_LIBRARY_FRAGMENT(boltzattn, m) {
  m.def("cpu_direct_forward" BOLTZATTN_FORWARD);
  m.def("cpu_direct_backward" BOLTZATTN_BACKWARD);
  m.def("cpu_transform_forward" BOLTZATTN_FORWARD);
  m.def("cpu_transform_backward" BOLTZATTN_BACKWARD);
  m.def(
      "cpu_transform_report(Tensor query, Tensor key, Tensor value, Tensor? key_mask, float scale) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(boltzattn, CompositeExplicitAutograd, m) {
  using boltzattn::Kernels;
  m.impl("cpu_direct_forward", TORCH_BOX(&boltzattn::forward<&Kernels::direct_forward>));
  m.impl("cpu_direct_backward", TORCH_BOX(&boltzattn::backward<&Kernels::direct_backward>));
  m.impl("cpu_transform_forward", TORCH_BOX(&boltzattn::forward<&Kernels::transform_forward>));
  m.impl("cpu_transform_report", TORCH_BOX(&boltzattn::transform_report));
  m.impl("cpu_transform_backward", TORCH_BOX(&boltzattn::backward<&Kernels::transform_backward>));
}
