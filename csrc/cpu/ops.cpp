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
#include "schema.h"
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
std::tuple<Tensor, Tensor> forward(BOLTZATTN_PROBLEM_PARAMETERS) {
  Tensor out = new_rows(query, shape_with(query, value.size(value.dim() - 1)));
  Tensor lse = torch::stable::new_empty(query, rows_of(query), ScalarType::Double);
  Descriptions d(query);
  (kernels().*kernel)(describe(d, BOLTZATTN_PROBLEM_ARGUMENTS, out, lse));
  return {out, lse};
}

template <Backward Kernels::* kernel>
std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad_out, OptionalTensor grad_lse, Tensor out,
                                            Tensor lse, BOLTZATTN_PROBLEM_PARAMETERS) {
  Tensor grad_query = torch::stable::new_empty(query, shape_of(query));
  Tensor grad_key = torch::stable::new_empty(key, shape_of(key));
  Tensor grad_value = new_rows(value, shape_of(value));
  Descriptions d(query);
  AttentionGradient g{};
  g.call = describe(d, BOLTZATTN_PROBLEM_ARGUMENTS, out, lse);
  g.grad_out = d.matrix(grad_out, g.call.n_q, g.call.dv);
  g.grad_lse = d.column_vector(grad_lse, g.call.n_q);
  g.grad_query = d.matrix(grad_query, g.call.n_q, g.call.rank);
  g.grad_key = d.matrix(grad_key, g.call.n_k, g.call.rank);
  g.grad_value = d.matrix(grad_value, g.call.n_k, g.call.dv);
  (kernels().*kernel)(g);
  return {grad_query, grad_key, grad_value};
}

// Sequences end to end take no masks and no dropout.
void check_plain(const Attention& call) {
  STD_TORCH_CHECK(!call.attn_mask && !call.key_mask && call.dropout_p == 0,
                  "boltzattn: varlen takes no attn_mask, no key_mask and no dropout");
}

// The sequences of a varlen call from where they begin, int64 [count + 1] each, and which of them
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
Tensor varlen_forward(BOLTZATTN_PROBLEM_PARAMETERS, Tensor query_starts, Tensor key_starts,
                      Tensor by_transform, Tensor out) {
  Tensor lse = torch::stable::new_empty(query, rows_of(query), ScalarType::Double);
  Descriptions d(query);
  const Attention call = describe(d, BOLTZATTN_PROBLEM_ARGUMENTS, out, lse);
  check_plain(call);
  const auto sequences = sequences_of(call, query_starts, key_starts, by_transform);
  kernels().varlen_forward(call, sequences.data(), int64_t(sequences.size()));
  return lse;
}

void varlen_backward(Tensor grad_out, OptionalTensor grad_lse, Tensor out, Tensor lse,
                     BOLTZATTN_PROBLEM_PARAMETERS, Tensor query_starts, Tensor key_starts,
                     Tensor by_transform, Tensor grad_query, Tensor grad_key, Tensor grad_value) {
  Descriptions d(query);
  AttentionGradient g{};
  g.call = describe(d, BOLTZATTN_PROBLEM_ARGUMENTS, out, lse);
  check_plain(g.call);
  g.grad_out = d.matrix(grad_out, g.call.n_q, g.call.dv);
  g.grad_lse = d.column_vector(grad_lse, g.call.n_q);
  g.grad_query = d.matrix(grad_query, g.call.n_q, g.call.rank);
  g.grad_key = d.matrix(grad_key, g.call.n_k, g.call.rank);
  g.grad_value = d.matrix(grad_value, g.call.n_k, g.call.dv);
  const auto sequences = sequences_of(g.call, query_starts, key_starts, by_transform);
  kernels().varlen_backward(g, sequences.data(), int64_t(sequences.size()));
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

// A call of the transform that returns no outputs.
Attention describe_tokens(Descriptions& d, BOLTZATTN_PROBLEM_PARAMETERS) {
  STD_TORCH_CHECK(
      query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2 && query.size(query.dim() - 1) == 1 &&
          !attn_mask && dropout_p == 0 && !is_causal,
      "boltzattn: the transform takes rank 1, no attn_mask, no dropout and no causal mask");
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
Tensor transform_report(BOLTZATTN_PROBLEM_PARAMETERS) {
  Descriptions d(query);
  const Attention call = describe_tokens(d, BOLTZATTN_PROBLEM_ARGUMENTS);
  Tensor reports = torch::stable::new_empty(
      query, {call.heads, int64_t(sizeof(TransformReport) / sizeof(double))}, ScalarType::Double);
  kernels().transform_report(call, static_cast<TransformReport*>(reports.data_ptr()));
  return reports;
}

// ---- the transform in stages: see cpu/stages.h ----

// Of queries and of keys: [heads, 2, 6].
Tensor stage_extents(BOLTZATTN_PROBLEM_PARAMETERS) {
  Descriptions d(query);
  const Attention call = describe_tokens(d, BOLTZATTN_PROBLEM_ARGUMENTS);
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
  int64_t sizes[2];  // of moments, of query moments

  SharedCall(BOLTZATTN_PROBLEM_PARAMETERS, const Tensor& ranges) : d(query) {
    g.call = describe_tokens(d, BOLTZATTN_PROBLEM_ARGUMENTS);
    range = reinterpret_cast<const SharedRange*>(
        shared_numbers(ranges, g.call.heads * int64_t(sizeof(SharedRange) / sizeof(double))));
    kernels().stage_sizes(g, range, sizes);
  }
};

// How many numbers the moments and the query moments are.
std::tuple<int64_t, int64_t> stage_sizes(BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges) {
  const SharedCall one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  return {one.sizes[0], one.sizes[1]};
}

Tensor stage_moments(BOLTZATTN_PROBLEM_PARAMETERS, Tensor extents, Tensor ranges) {
  SharedCall one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  const double* found = shared_numbers(extents, one.g.call.heads * 2 * kExtentSize);
  Tensor moments = torch::stable::new_empty(query, {one.sizes[0]}, ScalarType::Double);
  kernels().stage_moments(one.g, one.range, reinterpret_cast<const Extent*>(found),
                          static_cast<double*>(moments.data_ptr()));
  return moments;
}

std::tuple<Tensor, Tensor, Tensor> stage_evaluate(BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges,
                                                  Tensor moments) {
  SharedCall one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  Attention& call = one.g.call;
  Tensor out = new_rows(query, shape_with(query, call.dv));
  Tensor lse = torch::stable::new_empty(query, rows_of(query), ScalarType::Double);
  Tensor served = torch::stable::new_empty(query, {call.heads}, ScalarType::Bool);
  call.out = one.d.matrix(out, call.n_q, call.dv);
  call.lse = one.d.column_vector(lse, call.n_q);
  kernels().stage_evaluate(one.g, one.range, shared_numbers(moments, one.sizes[0]),
                           static_cast<bool*>(served.data_ptr()));
  return {out, lse, served};
}

std::tuple<Tensor, Tensor> stage_query_moments(Tensor grad_out, OptionalTensor grad_lse,
                                               BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges,
                                               Tensor moments) {
  SharedCall one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  AttentionGradient& g = one.g;
  Tensor grad_query = torch::stable::new_empty(query, shape_of(query));
  Tensor query_moments = torch::stable::new_empty(query, {one.sizes[1]}, ScalarType::Double);
  g.grad_out = one.d.matrix(grad_out, g.call.n_q, g.call.dv);
  g.grad_lse = one.d.column_vector(grad_lse, g.call.n_q);
  g.grad_query = one.d.matrix(grad_query, g.call.n_q, 1);
  kernels().stage_query_moments(g, one.range, shared_numbers(moments, one.sizes[0]),
                                static_cast<double*>(query_moments.data_ptr()));
  return {grad_query, query_moments};
}

std::tuple<Tensor, Tensor> stage_adjoint(BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges,
                                         Tensor moments, Tensor query_moments) {
  SharedCall one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  AttentionGradient& g = one.g;
  Tensor grad_key = torch::stable::new_empty(key, shape_of(key));
  Tensor grad_value = new_rows(value, shape_of(value));
  g.grad_key = one.d.matrix(grad_key, g.call.n_k, 1);
  g.grad_value = one.d.matrix(grad_value, g.call.n_k, g.call.dv);
  kernels().stage_adjoint(g, one.range, shared_numbers(moments, one.sizes[0]),
                          shared_numbers(query_moments, one.sizes[1]));
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

std::tuple<Tensor, bool> layer_forward(BOLTZATTN_LAYER_PARAMETERS) {
  Descriptions d(query);
  Attention call = describe_layer(d, BOLTZATTN_LAYER_ARGUMENTS);
  Tensor out = new_rows(value, {query.size(0), call.n_q, call.dv}, sum_type(value, call));
  call.out = d.shared(out, {true, false}, call.n_q, call.dv);
  const bool served = kernels().layer_forward(call);
  return {out, served};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, bool> layer_backward(Tensor grad_out,
                                                                BOLTZATTN_LAYER_PARAMETERS) {
  Descriptions d(query);
  Tensor grad_query = torch::stable::new_empty(query, shape_of(query));
  Tensor grad_key = torch::stable::new_empty(key, shape_of(key));
  AttentionGradient g{};
  g.call = describe_layer(d, BOLTZATTN_LAYER_ARGUMENTS);
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

STABLE_TORCH_LIBRARY_FRAGMENT(boltzattn, m) {
  m.def("cpu_direct_forward" BOLTZATTN_FORWARD);
  m.def("cpu_direct_backward" BOLTZATTN_BACKWARD);
  m.def("cpu_transform_forward" BOLTZATTN_FORWARD);
  m.def("cpu_transform_backward" BOLTZATTN_BACKWARD);
  m.def("cpu_transform_report(" BOLTZATTN_PROBLEM ") -> Tensor");
  m.def("cpu_causal_forward" BOLTZATTN_FORWARD);
  m.def("cpu_varlen_forward(" BOLTZATTN_PROBLEM
        ", Tensor query_starts, Tensor key_starts, Tensor by_transform, Tensor(a!) out) -> Tensor");
  m.def("cpu_varlen_backward(" BOLTZATTN_SAVED BOLTZATTN_PROBLEM
        ", Tensor query_starts, Tensor key_starts, Tensor by_transform, Tensor(a!) grad_query, "
        "Tensor(b!) grad_key, Tensor(c!) grad_value) -> ()");
  m.def("cpu_project" BOLTZATTN_PROJECT);
  m.def("cpu_layer_forward(" BOLTZATTN_LAYER ") -> (Tensor, bool)");
  m.def("cpu_layer_backward(Tensor grad_out, " BOLTZATTN_LAYER
        ") -> (Tensor, Tensor, Tensor, Tensor, bool)");
  m.def("cpu_stage_extents(" BOLTZATTN_PROBLEM ") -> Tensor");
  m.def("cpu_stage_sizes(" BOLTZATTN_PROBLEM ", Tensor ranges) -> (int, int)");
  m.def("cpu_stage_moments(" BOLTZATTN_PROBLEM ", Tensor extents, Tensor ranges) -> Tensor");
  m.def("cpu_stage_evaluate(" BOLTZATTN_PROBLEM
        ", Tensor ranges, Tensor moments) -> (Tensor, Tensor, Tensor)");
  m.def("cpu_stage_query_moments(Tensor grad_out, Tensor? grad_lse, " BOLTZATTN_PROBLEM
        ", Tensor ranges, Tensor moments) -> (Tensor, Tensor)");
  m.def("cpu_stage_adjoint(" BOLTZATTN_PROBLEM
        ", Tensor ranges, Tensor moments, Tensor query_moments) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(boltzattn, CompositeExplicitAutograd, m) {
  using namespace boltzattn;
  m.impl("cpu_direct_forward", TORCH_BOX(&forward<&Kernels::direct_forward>));
  m.impl("cpu_direct_backward", TORCH_BOX(&backward<&Kernels::direct_backward>));
  m.impl("cpu_transform_forward", TORCH_BOX(&forward<&Kernels::transform_forward>));
  m.impl("cpu_transform_backward", TORCH_BOX(&backward<&Kernels::transform_backward>));
  m.impl("cpu_transform_report", TORCH_BOX(&transform_report));
  m.impl("cpu_causal_forward", TORCH_BOX(&forward<&Kernels::causal_forward>));
  m.impl("cpu_varlen_forward", TORCH_BOX(&varlen_forward));
  m.impl("cpu_varlen_backward", TORCH_BOX(&varlen_backward));
  m.impl("cpu_project", TORCH_BOX(&project));
  m.impl("cpu_layer_forward", TORCH_BOX(&layer_forward));
  m.impl("cpu_layer_backward", TORCH_BOX(&layer_backward));
  m.impl("cpu_stage_extents", TORCH_BOX(&stage_extents));
  m.impl("cpu_stage_sizes", TORCH_BOX(&stage_sizes));
  m.impl("cpu_stage_moments", TORCH_BOX(&stage_moments));
  m.impl("cpu_stage_evaluate", TORCH_BOX(&stage_evaluate));
  m.impl("cpu_stage_query_moments", TORCH_BOX(&stage_query_moments));
  m.impl("cpu_stage_adjoint", TORCH_BOX(&stage_adjoint));
}
