// The transform in stages: see transform/stages.h.
#include <tuple>

#include "cpu/ops/views.h"

namespace boltzattn {
namespace {

// The call of one process among several. The processes have agreed on the ranges.
struct Shared : Described {
  const SharedRange* ranges;
  int64_t sizes[2];  // the number of moments, and of query moments

  Shared(BOLTZATTN_PROBLEM_PARAMETERS, const Tensor& agreed)
      : Described(Takes::kStages, BOLTZATTN_PROBLEM_ARGUMENTS) {
    const int64_t size = sizeof(SharedRange) / sizeof(double);
    ranges = reinterpret_cast<const SharedRange*>(
        view.dense<double>("ranges", agreed, {call.heads, size}, Holds::kFloat64));
    for (int64_t h = 0; h < call.heads; ++h) check(ranges[h]);
    kernels().stage_sizes(call, ranges, sizes);
  }

  // Raises unless the transform itself could choose a layout for this range.
  static void check(const SharedRange& r) {
    constexpr double kMost = 1LL << 53;
    const auto counts = [](double x) { return x >= 0 && x <= kMost; };  // false for NaN
    STD_TORCH_CHECK(counts(r.keys) && counts(r.n_q) && counts(r.n_k) && r.level < kLevels,
                    "boltzattn: ranges must have counts of tokens and a level below ", kLevels);
    if (r.level < 0 || r.keys == 0 || r.n_q == 0) return;
    const Range range{r.t_min, r.t_max, r.s_min, r.s_max, int64_t(r.keys)};
    STD_TORCH_CHECK(
        r.t_min <= r.t_max && r.s_min <= r.s_max && largest_product(range) <= kLargestProduct,
        "boltzattn: ranges must be in order, with a product of at most ", kLargestProduct);
  }

  const double* moments(const Tensor& x) const {
    return view.dense<double>("moments", x, {sizes[0]}, Holds::kFloat64);
  }
};

// The extents of the queries and of the keys, [heads, 2, 6].
Tensor stage_extents(BOLTZATTN_PROBLEM_PARAMETERS) {
  const Described one(Takes::kStages, BOLTZATTN_PROBLEM_ARGUMENTS);
  Tensor extents = one.view.doubles({one.call.heads, 2, kExtentSize});
  kernels().stage_extents(one.call, static_cast<Extent*>(extents.data_ptr()));
  return extents;
}

// The numbers of elements of the moments and of the query moments.
std::tuple<int64_t, int64_t> stage_sizes(BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges) {
  const Shared one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  return {one.sizes[0], one.sizes[1]};
}

Tensor stage_moments(BOLTZATTN_PROBLEM_PARAMETERS, Tensor extents, Tensor ranges) {
  const Shared one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  const Extent* found =
      extents_of(one.view, one.call, extents, {one.call.heads, 2, kExtentSize}, 1);
  Tensor moments = one.view.doubles({one.sizes[0]});
  kernels().stage_moments(one.call, one.ranges, found, static_cast<double*>(moments.data_ptr()));
  return moments;
}

std::tuple<Tensor, Tensor, Tensor> stage_evaluate(BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges,
                                                  Tensor moments) {
  Shared one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  const auto [out, lse] = one.new_results();
  Tensor served = torch::stable::new_empty(query, {one.call.heads}, ScalarType::Bool);
  kernels().stage_evaluate(one.call, one.ranges, one.moments(moments),
                           static_cast<bool*>(served.data_ptr()));
  return {out, lse, served};
}

std::tuple<Tensor, Tensor> stage_query_moments(Tensor grad_out, OptionalTensor grad_lse,
                                               BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges,
                                               Tensor moments) {
  Shared one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  Tensor grad_query = one.view.result({one.call.n_q, 1});
  Tensor query_moments = one.view.doubles({one.sizes[1]});
  one.g.grad_out = one.view("grad_out", grad_out, one.call.n_q, one.call.dv);
  one.g.grad_lse = one.view("grad_lse", grad_lse, one.call.n_q, kNone, Holds::kFloat64);
  one.g.grad_query = one.view("grad_query", grad_query, one.call.n_q, 1);
  kernels().stage_query_moments(one.g, one.ranges, one.moments(moments),
                                static_cast<double*>(query_moments.data_ptr()));
  return {grad_query, query_moments};
}

std::tuple<Tensor, Tensor> stage_adjoint(BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges,
                                         Tensor moments, Tensor query_moments) {
  Shared one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  Tensor grad_key = one.view.result({one.call.n_k, 1});
  Tensor grad_value = in_huge_pages(one.view.result({one.call.n_k, one.call.dv}));
  one.g.grad_key = one.view("grad_key", grad_key, one.call.n_k, 1);
  one.g.grad_value = one.view("grad_value", grad_value, one.call.n_k, one.call.dv);
  kernels().stage_adjoint(
      one.g, one.ranges, one.moments(moments),
      one.view.dense<double>("query_moments", query_moments, {one.sizes[1]}, Holds::kFloat64));
  return {grad_key, grad_value};
}

}  // namespace
}  // namespace boltzattn

BOLTZATTN_DEFINE(m) {
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

BOLTZATTN_IMPLEMENT(CompositeExplicitAutograd, m) {
  using namespace boltzattn;
  m.impl("cpu_stage_extents", TORCH_BOX(&stage_extents));
  m.impl("cpu_stage_sizes", TORCH_BOX(&stage_sizes));
  m.impl("cpu_stage_moments", TORCH_BOX(&stage_moments));
  m.impl("cpu_stage_evaluate", TORCH_BOX(&stage_evaluate));
  m.impl("cpu_stage_query_moments", TORCH_BOX(&stage_query_moments));
  m.impl("cpu_stage_adjoint", TORCH_BOX(&stage_adjoint));
}
