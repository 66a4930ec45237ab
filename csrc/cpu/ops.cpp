// torch's side of the CPU kernels: operators by the stable ABI, tensors to plain descriptions.
// Shapes and dtypes have been checked by the Python side; what is checked here again is what would
// make a kernel read outside its memory.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <atomic>
#include <memory>
#include <new>
#include <tuple>
#include <vector>

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "tensors.h"

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

// Keeps the lists of head offsets alive while kernels run.
class Descriptions {
 public:
  explicit Descriptions(const Tensor& query) {
    for (int64_t d = 0; d + 2 < query.dim(); ++d) lead_.push_back(query.size(d));
    heads_ = 1;
    for (int64_t size : lead_) heads_ *= size;
  }

  int64_t heads() const { return heads_; }

  // Heads share this tensor, or a row of it: `across` says which leading dimensions it has.
  Matrix shared(const OptionalTensor& x, std::vector<bool> across, int64_t rows, int64_t columns) {
    if (!x) return {};
    const int64_t inner = rows > 0 ? 2 : 1;
    bool same = x->is_cpu() && x->size(x->dim() - 1) == columns &&
                (rows == 0 || x->size(x->dim() - 2) == rows);
    std::vector<int64_t> stride;
    int64_t d = 0;
    for (size_t k = 0; k < lead_.size(); ++k) {
      same = same && (!across[k] || (d < x->dim() - inner && x->size(d) == lead_[k]));
      stride.push_back(across[k] && same ? x->stride(d++) : 0);
    }
    STD_TORCH_CHECK(same && d == x->dim() - inner,
                    "boltzattn: a tensor has another shape or device");
    return {x->data_ptr(), dtype_of(*x), offsets(stride), rows > 0 ? x->stride(x->dim() - 2) : 0,
            x->stride(x->dim() - 1)};
  }

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
    std::vector<int64_t> stride;
    for (size_t d = 0; d < lead_.size(); ++d) stride.push_back(x.stride(int64_t(d)));
    return offsets(stride);
  }
  const int64_t* offsets(const std::vector<int64_t>& stride) {
    std::vector<int64_t> offset(1, 0);
    for (size_t d = 0; d < lead_.size(); ++d) {
      std::vector<int64_t> next;
      next.reserve(offset.size() * size_t(lead_[d]));
      for (int64_t base : offset)
        for (int64_t i = 0; i < lead_[d]; ++i) next.push_back(base + i * stride[d]);
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
  call.lse = d.column_vector(lse, call.n_q);
  call.value_columns = call.dv;
  call.summed = 1;
  return call;
}

// A new tensor that will be written row by row. A large one is fresh memory, and most of the time
// of a first write to small pages is the kernel's: huge pages need a five-hundredth of its faults.
Tensor new_rows(const Tensor& like, std::vector<int64_t> shape,
                std::optional<ScalarType> dtype = {}) {
  Tensor x = torch::stable::new_empty(like, std::move(shape), dtype);
#ifdef __linux__
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x.data_ptr());
  const uintptr_t end = begin + uintptr_t(x.numel()) * x.element_size();
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = end / kHugePage * kHugePage;
  if (first + 4 * kHugePage <= last)  // advice only: failure changes nothing
    (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return x;
}

using Forward = void (*)(const Attention&);
using Backward = void (*)(const AttentionGradient&);

template <Forward Kernels::* kernel>
std::tuple<Tensor, Tensor> forward(Tensor query, Tensor key, Tensor value, OptionalTensor attn_mask,
                                   OptionalTensor key_mask, OptionalTensor seed, double scale,
                                   double dropout_p, bool is_causal) {
  Tensor out = new_rows(query, shape_with(query, value.size(value.dim() - 1)));
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
  Tensor grad_value = new_rows(value, shape_of(value));
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

// The sequences of a packed call from where they begin, int64 [count + 1] each, and which of them
// the transform serves, bool [count].
std::vector<Sequence> sequences_of(const Attention& call, const Tensor& query_starts,
                                   const Tensor& key_starts, const Tensor& by_transform) {
  const int64_t count = by_transform.numel();
  for (const Tensor* starts : {&query_starts, &key_starts})
    STD_TORCH_CHECK(starts->is_cpu() && starts->is_contiguous() && starts->numel() == count + 1 &&
                        starts->scalar_type() == ScalarType::Long,
                    "boltzattn: starts of sequences must be contiguous int64 [count + 1]");
  STD_TORCH_CHECK(by_transform.is_cpu() && by_transform.is_contiguous() &&
                      by_transform.scalar_type() == ScalarType::Bool,
                  "boltzattn: by_transform must be contiguous bool");
  const int64_t* query = static_cast<const int64_t*>(query_starts.data_ptr());
  const int64_t* key = static_cast<const int64_t*>(key_starts.data_ptr());
  const bool* served = static_cast<const bool*>(by_transform.data_ptr());
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n_q = query[i + 1] - query[i], n_k = key[i + 1] - key[i];
    STD_TORCH_CHECK(n_q >= 0 && n_k >= 0, "boltzattn: starts of sequences must not decrease");
    sequences.push_back({query[i], n_q, key[i], n_k, served[i]});
  }
  STD_TORCH_CHECK(
      query[0] == 0 && query[count] == call.n_q && key[0] == 0 && key[count] == call.n_k,
      "boltzattn: sequences must cover all rows");
  return sequences;
}

// Like `forward`, of sequences end to end; out has the strides it is given.
Tensor packed_forward(Tensor query, Tensor key, Tensor value, Tensor query_starts,
                      Tensor key_starts, Tensor by_transform, double scale, bool is_causal,
                      Tensor out) {
  Tensor lse = torch::stable::new_empty(query, rows_of(query), ScalarType::Double);
  Descriptions d(query);
  const Attention call = describe(d, query, key, value, {}, {}, {}, scale, 0, is_causal, out, lse);
  const auto sequences = sequences_of(call, query_starts, key_starts, by_transform);
  kernels().packed_forward(call, sequences.data(), int64_t(sequences.size()));
  return lse;
}

void packed_backward(Tensor grad_out, OptionalTensor grad_lse, Tensor query, Tensor key,
                     Tensor value, Tensor out, Tensor lse, Tensor query_starts, Tensor key_starts,
                     Tensor by_transform, double scale, bool is_causal, Tensor grad_query,
                     Tensor grad_key, Tensor grad_value) {
  Descriptions d(query);
  AttentionGradient g{};
  g.call = describe(d, query, key, value, {}, {}, {}, scale, 0, is_causal, out, lse);
  g.grad_out = d.matrix(grad_out, g.call.n_q, g.call.dv);
  g.grad_lse = d.column_vector(grad_lse, g.call.n_q);
  g.grad_query = d.matrix(grad_query, g.call.n_q, g.call.rank);
  g.grad_key = d.matrix(grad_key, g.call.n_k, g.call.rank);
  g.grad_value = d.matrix(grad_value, g.call.n_k, g.call.dv);
  const auto sequences = sequences_of(g.call, query_starts, key_starts, by_transform);
  kernels().packed_backward(g, sequences.data(), int64_t(sequences.size()));
}

constexpr int64_t kExtentSize = sizeof(Extent) / sizeof(double);

// x: [batch, n, d]; weight: [outputs, d]; bias: [outputs]. Returns [batch, outputs, n] and the
// extents [batch, outputs, 6].
std::tuple<Tensor, Tensor> project(Tensor x, Tensor weight, OptionalTensor bias) {
  STD_TORCH_CHECK(
      x.dim() == 3 && weight.dim() == 2 && x.size(2) == weight.size(1) && x.is_cpu() &&
          weight.is_cpu() &&
          (!bias || (bias->dim() == 1 && bias->is_cpu() && bias->size(0) == weight.size(0))),
      "boltzattn: a tensor of a projection has another shape or device");
  Tensor out = torch::stable::new_empty(x, {x.size(0), weight.size(0), x.size(1)});
  Tensor extents =
      torch::stable::new_empty(x, {x.size(0), weight.size(0), kExtentSize}, ScalarType::Double);
  std::vector<int64_t> of_x, of_out;
  for (int64_t b = 0; b < x.size(0); ++b) {
    of_x.push_back(b * x.stride(0));
    of_out.push_back(b * out.stride(0));
  }
  const int64_t start = 0;
  Projection p{};
  p.batch = x.size(0);
  p.n = x.size(1);
  p.columns = x.size(2);
  p.outputs = weight.size(0);
  p.x = {x.data_ptr(), dtype_of(x), of_x.data(), x.stride(1), x.stride(2)};
  p.weight = {weight.data_ptr(), dtype_of(weight), &start, weight.stride(0), weight.stride(1)};
  if (bias) p.bias = {bias->data_ptr(), dtype_of(*bias), &start, 0, bias->stride(0)};
  p.out = {out.data_ptr(), dtype_of(out), of_out.data(), out.stride(1), out.stride(2)};
  p.extents = static_cast<Extent*>(extents.data_ptr());
  kernels().project(p);
  return {out, extents};
}

// A call of rank 1 that returns no outputs.
Attention describe_tokens(Descriptions& d, const Tensor& query, const Tensor& key,
                          const Tensor& value, const OptionalTensor& key_mask, double scale) {
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
  call.value_columns = call.dv;
  call.summed = 1;
  call.key_mask = d.row_vector(key_mask, call.n_k);
  return call;
}

// [heads, 7] in the order of TransformReport.
Tensor transform_report(Tensor query, Tensor key, Tensor value, OptionalTensor key_mask,
                        double scale) {
  Descriptions d(query);
  const Attention call = describe_tokens(d, query, key, value, key_mask, scale);
  Tensor reports = torch::stable::new_empty(
      query, {call.heads, int64_t(sizeof(TransformReport) / sizeof(double))}, ScalarType::Double);
  kernels().transform_report(call, static_cast<TransformReport*>(reports.data_ptr()));
  return reports;
}

// ---- the transform in stages: see cpu/stages.h ----

// Of queries and of keys: [heads, 2, 6].
Tensor stage_extents(Tensor query, Tensor key, Tensor value, OptionalTensor key_mask) {
  Descriptions d(query);
  const Attention call = describe_tokens(d, query, key, value, key_mask, 1);
  Tensor extents =
      torch::stable::new_empty(query, {call.heads, 2, kExtentSize}, ScalarType::Double);
  kernels().stage_extents(call, static_cast<Extent*>(extents.data_ptr()));
  return extents;
}

// Checked tensors of doubles that were shared between machines.
const double* shared_numbers(const Tensor& x, int64_t size) {
  STD_TORCH_CHECK(
      x.is_cpu() && x.is_contiguous() && x.scalar_type() == ScalarType::Double && x.numel() == size,
      "boltzattn: shared numbers must be contiguous float64 of the agreed size");
  return static_cast<const double*>(x.data_ptr());
}

struct SharedCall {
  Descriptions d;
  AttentionGradient g{};
  const SharedRange* range;
  int64_t sizes[2];  // of sums over keys, of sums over queries

  SharedCall(const Tensor& query, const Tensor& key, const Tensor& value,
             const OptionalTensor& key_mask, const Tensor& shared, double scale)
      : d(query) {
    g.call = describe_tokens(d, query, key, value, key_mask, scale);
    range = reinterpret_cast<const SharedRange*>(
        shared_numbers(shared, g.call.heads * int64_t(sizeof(SharedRange) / sizeof(double))));
    kernels().stage_sizes(g, range, sizes);
  }
};

// (numbers of sums over keys, numbers of sums over queries) that are shared.
std::tuple<int64_t, int64_t> stage_sizes(Tensor query, Tensor key, Tensor value, Tensor shared) {
  const SharedCall one(query, key, value, {}, shared, 1);
  return {one.sizes[0], one.sizes[1]};
}

Tensor stage_sum_keys(Tensor query, Tensor key, Tensor value, OptionalTensor key_mask,
                      Tensor extents, Tensor shared, double scale) {
  SharedCall one(query, key, value, key_mask, shared, scale);
  const double* found = shared_numbers(extents, one.g.call.heads * 2 * kExtentSize);
  Tensor sums = torch::stable::new_empty(query, {one.sizes[0]}, ScalarType::Double);
  kernels().stage_sum_keys(one.g, one.range, reinterpret_cast<const Extent*>(found),
                           static_cast<double*>(sums.data_ptr()));
  return sums;
}

std::tuple<Tensor, Tensor, Tensor> stage_forward(Tensor query, Tensor key, Tensor value,
                                                 OptionalTensor key_mask, Tensor shared,
                                                 Tensor sums, double scale) {
  SharedCall one(query, key, value, key_mask, shared, scale);
  Attention& call = one.g.call;
  Tensor out = new_rows(query, shape_with(query, call.dv));
  Tensor lse = torch::stable::new_empty(query, rows_of(query), ScalarType::Double);
  Tensor served = torch::stable::new_empty(query, {call.heads}, ScalarType::Bool);
  call.out = one.d.matrix(out, call.n_q, call.dv);
  call.lse = one.d.column_vector(lse, call.n_q);
  kernels().stage_forward(one.g, one.range, shared_numbers(sums, one.sizes[0]),
                          static_cast<bool*>(served.data_ptr()));
  return {out, lse, served};
}

std::tuple<Tensor, Tensor> stage_sum_queries(Tensor grad_out, OptionalTensor grad_lse, Tensor query,
                                             Tensor key, Tensor value, Tensor shared, Tensor sums,
                                             double scale) {
  SharedCall one(query, key, value, {}, shared, scale);
  AttentionGradient& g = one.g;
  Tensor grad_query = torch::stable::new_empty(query, shape_of(query));
  Tensor query_sums = torch::stable::new_empty(query, {one.sizes[1]}, ScalarType::Double);
  g.grad_out = one.d.matrix(grad_out, g.call.n_q, g.call.dv);
  g.grad_lse = one.d.column_vector(grad_lse, g.call.n_q);
  g.grad_query = one.d.matrix(grad_query, g.call.n_q, 1);
  kernels().stage_sum_queries(g, one.range, shared_numbers(sums, one.sizes[0]),
                              static_cast<double*>(query_sums.data_ptr()));
  return {grad_query, query_sums};
}

std::tuple<Tensor, Tensor> stage_key_gradients(Tensor query, Tensor key, Tensor value,
                                               OptionalTensor key_mask, Tensor shared, Tensor sums,
                                               Tensor query_sums, double scale) {
  SharedCall one(query, key, value, key_mask, shared, scale);
  AttentionGradient& g = one.g;
  Tensor grad_key = torch::stable::new_empty(key, shape_of(key));
  Tensor grad_value = new_rows(value, shape_of(value));
  g.grad_key = one.d.matrix(grad_key, g.call.n_k, 1);
  g.grad_value = one.d.matrix(grad_value, g.call.n_k, g.call.dv);
  kernels().stage_key_gradients(g, one.range, shared_numbers(sums, one.sizes[0]),
                                shared_numbers(query_sums, one.sizes[1]));
  return {grad_key, grad_value};
}

// A layer whose values are projected at the nodes. query, key: [batch, heads, n, 1];
// value: [batch, n_k, d]; weight: [heads, dv, d]; weight_bias: [heads, dv]; out_bias: [dv];
// key_mask: [batch, n_k]. The results of the heads add up: out is [batch, n_q, dv].
Attention describe_layer(Descriptions& d, const Tensor& query, const Tensor& key,
                         const Tensor& value, const Tensor& weight,
                         const OptionalTensor& weight_bias, const OptionalTensor& out_bias,
                         const OptionalTensor& key_mask, const OptionalTensor& extents,
                         double scale) {
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 3 && weight.dim() == 3,
                  "boltzattn: a tensor of a layer has another number of dimensions");
  Attention call{};
  call.heads = d.heads();
  call.n_q = query.size(2);
  call.n_k = key.size(2);
  call.rank = 1;
  call.dv = weight.size(1);
  call.value_columns = weight.size(2);
  call.summed = query.size(1);
  call.scale = scale;
  call.query = d.matrix(query, call.n_q, 1);
  call.key = d.matrix(key, call.n_k, 1);
  call.value = d.shared(value, {true, false}, call.n_k, call.value_columns);
  call.weight = d.shared(weight, {false, true}, call.dv, call.value_columns);
  call.weight_bias = d.shared(weight_bias, {false, true}, 0, call.dv);
  call.out_bias = d.shared(out_bias, {false, false}, 0, call.dv);
  call.key_mask = d.shared(key_mask, {true, false}, 0, call.n_k);
  if (extents) {
    STD_TORCH_CHECK(extents->is_contiguous() && extents->scalar_type() == ScalarType::Double &&
                        extents->numel() == 2 * call.heads * kExtentSize,
                    "boltzattn: extents must be contiguous float64 [batch, 2 * heads, 6]");
    call.extents = static_cast<const Extent*>(extents->data_ptr());
  }
  return call;
}

// What is summed over heads is summed in at least fp32.
ScalarType sum_type(const Tensor& x, const Attention& call) {
  const bool half = x.scalar_type() != ScalarType::Double;
  return call.summed > 1 && half ? ScalarType::Float : x.scalar_type();
}

std::tuple<Tensor, bool> layer_forward(Tensor query, Tensor key, Tensor value, Tensor weight,
                                       OptionalTensor weight_bias, OptionalTensor out_bias,
                                       OptionalTensor key_mask, OptionalTensor extents,
                                       double scale) {
  Descriptions d(query);
  Attention call =
      describe_layer(d, query, key, value, weight, weight_bias, out_bias, key_mask, extents, scale);
  Tensor out = new_rows(value, {query.size(0), call.n_q, call.dv}, sum_type(value, call));
  call.out = d.shared(out, {true, false}, call.n_q, call.dv);
  const bool served = kernels().layer_forward(call);
  return {out, served};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, bool> layer_backward(
    Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor weight,
    OptionalTensor weight_bias, OptionalTensor key_mask, OptionalTensor extents, double scale) {
  Descriptions d(query);
  Tensor grad_query = torch::stable::new_empty(query, shape_of(query));
  Tensor grad_key = torch::stable::new_empty(key, shape_of(key));
  AttentionGradient g{};
  g.call = describe_layer(d, query, key, value, weight, weight_bias, {}, key_mask, extents, scale);
  Tensor grad_value = new_rows(value, shape_of(value), sum_type(value, g.call));
  Tensor grad_weight =
      torch::stable::new_zeros(weight, shape_of(weight),
                               query.size(0) > 1 ? sum_type(weight, g.call) : weight.scalar_type());
  g.grad_out = d.shared(grad_out, {true, false}, g.call.n_q, g.call.dv);
  g.grad_query = d.matrix(grad_query, g.call.n_q, 1);
  g.grad_key = d.matrix(grad_key, g.call.n_k, 1);
  g.grad_value = d.shared(grad_value, {true, false}, g.call.n_k, g.call.value_columns);
  g.grad_weight = d.shared(grad_weight, {false, true}, g.call.dv, g.call.value_columns);
  const bool served = kernels().layer_backward(g);
  return {grad_query, grad_key, grad_value, grad_weight, served};
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
  m.def("cpu_causal_forward" BOLTZATTN_FORWARD);
  m.def(
      "cpu_packed_forward(Tensor query, Tensor key, Tensor value, Tensor query_starts, "
      "Tensor key_starts, Tensor by_transform, float scale, bool is_causal, Tensor(a!) out) "
      "-> Tensor");
  m.def(
      "cpu_packed_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, "
      "Tensor value, Tensor out, Tensor lse, Tensor query_starts, Tensor key_starts, "
      "Tensor by_transform, float scale, bool is_causal, Tensor(a!) grad_query, "
      "Tensor(b!) grad_key, Tensor(c!) grad_value) -> ()");
  m.def(
      "cpu_layer_forward(Tensor query, Tensor key, Tensor value, Tensor weight, "
      "Tensor? weight_bias, Tensor? out_bias, Tensor? key_mask, Tensor? extents, float scale) "
      "-> (Tensor, bool)");
  m.def("cpu_project(Tensor x, Tensor weight, Tensor? bias) -> (Tensor, Tensor)");
  m.def(
      "cpu_layer_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor weight, "
      "Tensor? weight_bias, Tensor? key_mask, Tensor? extents, float scale) "
      "-> (Tensor, Tensor, Tensor, Tensor, bool)");
  m.def("cpu_stage_extents(Tensor query, Tensor key, Tensor value, Tensor? key_mask) -> Tensor");
  m.def("cpu_stage_sizes(Tensor query, Tensor key, Tensor value, Tensor shared) -> (int, int)");
  m.def(
      "cpu_stage_sum_keys(Tensor query, Tensor key, Tensor value, Tensor? key_mask, "
      "Tensor extents, Tensor shared, float scale) -> Tensor");
  m.def(
      "cpu_stage_forward(Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor shared, "
      "Tensor sums, float scale) -> (Tensor, Tensor, Tensor)");
  m.def(
      "cpu_stage_sum_queries(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, "
      "Tensor value, Tensor shared, Tensor sums, float scale) -> (Tensor, Tensor)");
  m.def(
      "cpu_stage_key_gradients(Tensor query, Tensor key, Tensor value, Tensor? key_mask, "
      "Tensor shared, Tensor sums, Tensor query_sums, float scale) -> (Tensor, Tensor)");
  m.def(
      "cpu_transform_report(Tensor query, Tensor key, Tensor value, Tensor? key_mask, float scale) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(boltzattn, CompositeExplicitAutograd, m) {
  using boltzattn::Kernels;
  m.impl("cpu_direct_forward", TORCH_BOX(&boltzattn::forward<&Kernels::direct_forward>));
  m.impl("cpu_direct_backward", TORCH_BOX(&boltzattn::backward<&Kernels::direct_backward>));
  m.impl("cpu_transform_forward", TORCH_BOX(&boltzattn::forward<&Kernels::transform_forward>));
  m.impl("cpu_causal_forward", TORCH_BOX(&boltzattn::forward<&Kernels::causal_forward>));
  m.impl("cpu_packed_forward", TORCH_BOX(&boltzattn::packed_forward));
  m.impl("cpu_packed_backward", TORCH_BOX(&boltzattn::packed_backward));
  m.impl("cpu_layer_forward", TORCH_BOX(&boltzattn::layer_forward));
  m.impl("cpu_layer_backward", TORCH_BOX(&boltzattn::layer_backward));
  m.impl("cpu_project", TORCH_BOX(&boltzattn::project));
  m.impl("cpu_stage_extents", TORCH_BOX(&boltzattn::stage_extents));
  m.impl("cpu_stage_sizes", TORCH_BOX(&boltzattn::stage_sizes));
  m.impl("cpu_stage_sum_keys", TORCH_BOX(&boltzattn::stage_sum_keys));
  m.impl("cpu_stage_forward", TORCH_BOX(&boltzattn::stage_forward));
  m.impl("cpu_stage_sum_queries", TORCH_BOX(&boltzattn::stage_sum_queries));
  m.impl("cpu_stage_key_gradients", TORCH_BOX(&boltzattn::stage_key_gradients));
  m.impl("cpu_transform_report", TORCH_BOX(&boltzattn::transform_report));
  m.impl("cpu_transform_backward", TORCH_BOX(&boltzattn::backward<&Kernels::transform_backward>));
}
