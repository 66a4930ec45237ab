// Attention: direct, by the transform, by a scan; and sequences end to end.
#include <tuple>

#include "cpu/ops/views.h"

namespace boltzattn {
namespace {

template <void (*Kernels::*kernel)(const Attention&), Takes takes>
std::tuple<Tensor, Tensor> forward(BOLTZATTN_PROBLEM_PARAMETERS) {
  Described one(takes, BOLTZATTN_PROBLEM_ARGUMENTS);
  auto results = one.new_results();
  (kernels().*kernel)(one.call);
  return results;
}

template <void (*Kernels::*kernel)(const AttentionGradient&), Takes takes>
Gradients backward(BOLTZATTN_SAVED_PARAMETERS, BOLTZATTN_PROBLEM_PARAMETERS) {
  Described one(takes, BOLTZATTN_PROBLEM_ARGUMENTS);
  one.set_results(out, lse);
  Tensor grad_query = one.view.result({one.call.n_q, one.call.rank});
  Tensor grad_key = one.view.result({one.call.n_k, one.call.rank});
  Tensor grad_value = in_huge_pages(one.view.result({one.call.n_k, one.call.dv}));
  describe_gradients(one.view, grad_out, grad_lse, grad_query, grad_key, grad_value, one.g);
  auto [grad_key_mask, grad_slopes] =
      new_bias_gradients(one.view, Problem{BOLTZATTN_PROBLEM_ARGUMENTS}, one.g);
  (kernels().*kernel)(one.g);
  return {grad_query, grad_key, grad_value, grad_key_mask, grad_slopes};
}

// [heads, numbers] in the order of TransformReport.
Tensor transform_report(BOLTZATTN_PROBLEM_PARAMETERS) {
  const Described one(Takes::kReport, BOLTZATTN_PROBLEM_ARGUMENTS);
  Tensor reports =
      one.view.doubles({one.call.heads, int64_t(sizeof(TransformReport) / sizeof(double))});
  kernels().transform_report(one.call, static_cast<TransformReport*>(reports.data_ptr()));
  return reports;
}

// ---- sequences end to end ----

// The sequences of a call from where they begin, int64 [count + 1] each, and which of them the
// transform serves, bool [count].
std::vector<Sequence> sequences_of(const Described& one, const Tensor& query_starts,
                                   const Tensor& key_starts, const Tensor& by_transform) {
  const int64_t count = by_transform.numel();
  const bool* served = one.view.dense<bool>("by_transform", by_transform, {count}, Holds::kBool);
  const int64_t* query =
      one.view.dense<int64_t>("query_starts", query_starts, {count + 1}, Holds::kInt64);
  const int64_t* key =
      one.view.dense<int64_t>("key_starts", key_starts, {count + 1}, Holds::kInt64);
  STD_TORCH_CHECK(
      query[0] == 0 && query[count] == one.call.n_q && key[0] == 0 && key[count] == one.call.n_k,
      "boltzattn: sequences must cover all rows");
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n_q = query[i + 1] - query[i], n_k = key[i + 1] - key[i];
    STD_TORCH_CHECK(n_q >= 0 && n_k >= 0, "boltzattn: starts of sequences must not decrease");
    STD_TORCH_CHECK(!served[i] || one.call.rank <= kMostAxes,
                    "boltzattn: the transform takes ranks up to ", kMostAxes);
    if (served[i]) one.check_dot("the transform of a sequence");
    sequences.push_back({query[i], n_q, key[i], n_k, served[i]});
  }
  return sequences;
}

// Like `forward`; out has the strides it is given.
Tensor varlen_forward(BOLTZATTN_PROBLEM_PARAMETERS, Tensor query_starts, Tensor key_starts,
                      Tensor by_transform, Tensor out) {
  Described one(Takes::kVarlen, BOLTZATTN_PROBLEM_ARGUMENTS);
  const auto sequences = sequences_of(one, query_starts, key_starts, by_transform);
  Tensor lse = one.view.result({one.call.n_q}, ScalarType::Double);
  one.set_results(in_huge_pages(out), lse);
  kernels().varlen_forward(one.call, sequences.data(), int64_t(sequences.size()));
  return lse;
}

void varlen_backward(BOLTZATTN_SAVED_PARAMETERS, BOLTZATTN_PROBLEM_PARAMETERS, Tensor query_starts,
                     Tensor key_starts, Tensor by_transform, Tensor grad_query, Tensor grad_key,
                     Tensor grad_value, Tensor grad_key_mask, Tensor grad_slopes) {
  Described one(Takes::kVarlen, BOLTZATTN_PROBLEM_ARGUMENTS);
  const auto sequences = sequences_of(one, query_starts, key_starts, by_transform);
  one.set_results(out, lse);
  describe_gradients(one.view, grad_out, grad_lse, grad_query, grad_key, in_huge_pages(grad_value),
                     one.g);
  describe_bias_gradients(one.view, Problem{BOLTZATTN_PROBLEM_ARGUMENTS}, grad_key_mask,
                          grad_slopes, one.g);
  kernels().varlen_backward(one.g, sequences.data(), int64_t(sequences.size()));
}

}  // namespace
}  // namespace boltzattn

BOLTZATTN_DEFINE(m) {
  m.def("cpu_direct_forward" BOLTZATTN_FORWARD);
  m.def("cpu_direct_backward" BOLTZATTN_BACKWARD);
  m.def("cpu_transform_forward" BOLTZATTN_FORWARD);
  m.def("cpu_transform_backward" BOLTZATTN_BACKWARD);
  m.def("cpu_transform_report(" BOLTZATTN_PROBLEM ") -> Tensor");
  m.def("cpu_scan_forward" BOLTZATTN_FORWARD);
  m.def("cpu_scan_backward" BOLTZATTN_BACKWARD);
  m.def("cpu_varlen_forward(" BOLTZATTN_PROBLEM
        ", Tensor query_starts, Tensor key_starts, Tensor by_transform, Tensor(a!) out) -> Tensor");
  m.def("cpu_varlen_backward(" BOLTZATTN_SAVED BOLTZATTN_PROBLEM
        ", Tensor query_starts, Tensor key_starts, Tensor by_transform, Tensor(a!) grad_query, "
        "Tensor(b!) grad_key, Tensor(c!) grad_value, Tensor(d!) grad_key_mask, "
        "Tensor(e!) grad_slopes) -> ()");
}

BOLTZATTN_IMPLEMENT(CompositeExplicitAutograd, m) {
  using namespace boltzattn;
  m.impl("cpu_direct_forward", TORCH_BOX((&forward<&Kernels::direct_forward, Takes::kAll>)));
  m.impl("cpu_direct_backward", TORCH_BOX((&backward<&Kernels::direct_backward, Takes::kAll>)));
  m.impl("cpu_transform_forward",
         TORCH_BOX((&forward<&Kernels::transform_forward, Takes::kTransform>)));
  m.impl("cpu_transform_backward",
         TORCH_BOX((&backward<&Kernels::transform_backward, Takes::kTransform>)));
  m.impl("cpu_transform_report", TORCH_BOX(&transform_report));
  m.impl("cpu_scan_forward", TORCH_BOX((&forward<&Kernels::scan_forward, Takes::kScan>)));
  m.impl("cpu_scan_backward", TORCH_BOX((&backward<&Kernels::scan_backward, Takes::kScan>)));
  m.impl("cpu_varlen_forward", TORCH_BOX(&varlen_forward));
  m.impl("cpu_varlen_backward", TORCH_BOX(&varlen_backward));
}
