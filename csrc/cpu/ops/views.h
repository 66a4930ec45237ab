// What the operators of all files here share: tensors are checked and described to the kernels.
//
// Every file registers its operators itself. They are several because torch's headers and its
// boxing of arguments take a compiler most of its time, once for each operator.
#pragma once

#include <torch/csrc/stable/library.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <list>
#include <tuple>
#include <vector>

#include "cpu/isa.h"
#include "schema.h"
#include "tensors.h"

namespace boltzattn {

// Keeps the lists of head offsets alive while kernels run.
class Views : public Arguments {
 public:
  Views(const char* name, const Tensor& first) : Arguments(name, first, false) {}
  explicit Views(const Tensor& query) : Views("query", query) {}

  Matrix operator()(const char* name, const OptionalTensor& x, int64_t rows, int64_t columns,
                    Holds holds = Holds::kNumbers, uint64_t across = kAll) {
    if (!x) return {};
    const Strides found = strides(name, *x, rows, columns, holds, across);
    std::vector<int64_t> offset(1, 0);
    for (size_t d = 0; d < lead().size(); ++d) {
      std::vector<int64_t> next;
      next.reserve(offset.size() * size_t(lead()[d]));
      for (int64_t base : offset)
        for (int64_t i = 0; i < lead()[d]; ++i) next.push_back(base + i * found.lead[d]);
      offset.swap(next);
    }
    kept_.push_back(std::move(offset));
    return {x->data_ptr(), dtype_of(*x), kept_.back().data(), found.row, found.column};
  }

 private:
  std::list<std::vector<int64_t>> kept_;
};

// Asks for huge pages for a new tensor. A large tensor is fresh memory, and the first write to it
// spends most of its time in page faults; huge pages need a five-hundredth of them.
inline Tensor in_huge_pages(Tensor x) {
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

// Which problems an operator takes.
enum class Takes { kAll, kTransform, kReport, kStages, kScan, kShards, kVarlen };

// A problem, checked and described.
struct Described {
  Views view;
  AttentionGradient g{};
  Attention& call = g.call;

  Described(Takes takes, BOLTZATTN_PROBLEM_PARAMETERS) : view(query) {
    const Problem p{BOLTZATTN_PROBLEM_ARGUMENTS};
    describe(view, p, call);
    if (takes == Takes::kTransform) check_transform(p, false, kMostAxes);
    if (takes == Takes::kStages) check_transform(p, false, 1);
    if (takes == Takes::kReport) check_transform(p, call.is_causal && call.rank > 1, kMostAxes);
    if (takes == Takes::kScan) check_transform(p, true, slopes ? 1 : kMostAxes);
    if (takes == Takes::kShards) check_transform(p, true, 1);
    STD_TORCH_CHECK(takes != Takes::kVarlen || (!attn_mask && dropout_p == 0),
                    "boltzattn: varlen takes no attn_mask and no dropout");
    STD_TORCH_CHECK(!slopes || (takes != Takes::kTransform && takes != Takes::kReport &&
                                takes != Takes::kStages),
                    "boltzattn: the transform takes slopes only with is_causal");
  }

  // Raises unless all that is known of the scores is their dot products.
  void check_dot(const char* what) const {
    STD_TORCH_CHECK(!call.slopes && !call.is_gaussian, "boltzattn: ", what,
                    " takes no slopes and no Gaussian score");
  }

  // Describes the results of forward, new or saved.
  void set_results(const Tensor& out, const Tensor& lse) {
    call.out = view("out", out, call.n_q, call.dv);
    call.lse = view("lse", lse, call.n_q, kNone, Holds::kFloat64);
    STD_TORCH_CHECK(lse.is_contiguous(), "boltzattn: lse must be contiguous");
  }
  std::tuple<Tensor, Tensor> new_results() {
    Tensor out = in_huge_pages(view.result({call.n_q, call.dv}));
    Tensor lse = view.result({call.n_q}, ScalarType::Double);
    set_results(out, lse);
    return {out, lse};
  }
};

// Reads the extents that the caller passes: `group` rows for queries, `group` rows for keys, and so
// on in turn. Raises unless every extent points at tokens that exist.
inline const Extent* extents_of(const Views& view, const Attention& call, const Tensor& x,
                                const std::vector<int64_t>& shape, int64_t group) {
  const Extent* extents =
      reinterpret_cast<const Extent*>(view.dense<double>("extents", x, shape, Holds::kFloat64));
  const auto within = [](double at, int64_t n) {
    return at >= 0 && at < double(n);
  };  // false for NaN
  for (int64_t i = 0; i < x.numel() / kExtentSize; ++i) {
    const Extent& e = extents[i];
    const int64_t n = i / group % 2 ? call.n_k : call.n_q;
    STD_TORCH_CHECK(
        within(e.count, n + 1) && (e.count == 0 || (within(e.at_low, n) && within(e.at_high, n))),
        "boltzattn: extents must count tokens and point at them");
  }
  return extents;
}

// Raises unless a scan could have this layout.
inline void check_layout(int64_t nodes, int64_t levels, double ratio) {
  STD_TORCH_CHECK(nodes >= kLeastNodes && nodes <= kMostNodes && levels >= 0 &&
                      levels <= kMostLevels && ratio > 1 && ratio <= kWidestRatio,
                  "boltzattn: nodes, levels and ratio must be those of a layout");
}

}  // namespace boltzattn
