// torch's side of the CUDA kernels: operators by the stable ABI.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "cuda/launch.h"
#include "schema.h"
#include "tensors.h"

namespace boltzattn::cuda {
namespace {

// The current stream of torch. It is in libtorch_cuda, which this library does not link, so that
// it can be built with a CPU torch; a process that has CUDA tensors has loaded it.
cudaStream_t current_stream(int32_t device) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? Getter(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  STD_TORCH_CHECK(getter, "boltzattn: this torch has no CUDA streams");
  void* stream = nullptr;
  STD_TORCH_CHECK(getter(device, &stream) == AOTI_TORCH_SUCCESS,
                  "boltzattn: torch did not tell its current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

void check(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess,
                  "boltzattn: CUDA kernel not launched: ", cudaGetErrorString(error));
}

class Views : public Arguments {
 public:
  Views(const char* name, const Tensor& first) : Arguments(name, first, true) {}

  Strided operator()(const char* name, const OptionalTensor& x, int64_t rows, int64_t columns,
                     Holds holds = Holds::kNumbers, uint64_t across = kAll) const {
    Strided m{};
    if (!x) return m;
    const Strides found = strides(name, *x, rows, columns, holds, across);
    m.data = x->data_ptr();
    m.row = found.row;
    m.column = found.column;
    m.dtype = dtype_of(*x);
    int at = 0;
    for (size_t d = 0; d < lead().size(); ++d)
      if (lead()[d] != 1 && at < kMostLead) m.lead[at++] = found.lead[d];
    const int64_t vector = 16 / int64_t(x->element_size());
    m.whole_vectors = rows != kNone && columns != kNone && m.column == 1 && columns % vector == 0 &&
                      m.row % vector == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
    for (int64_t stride : m.lead) m.whole_vectors = m.whole_vectors && stride % vector == 0;
    return m;
  }
};

void describe(const Views& view, const Problem& p, bool transform, Call& call) {
  boltzattn::describe(view, p, call);
  if (transform) check_transform(p, false, 1);
  STD_TORCH_CHECK(
      !transform || (!p.slopes && !p.is_gaussian),
      "boltzattn: the transform of backend 'cuda' takes no slopes and no Gaussian score");
  for (int64_t size : view.lead()) {
    if (size == 1) continue;
    STD_TORCH_CHECK(call.dims < kMostLead, "boltzattn: backend 'cuda' takes at most ", kMostLead,
                    " leading dimensions; flatten some of them");
    call.lead[call.dims++] = size;
  }
}

// Describes the results of forward, new or saved.
void describe_results(const Views& view, const Tensor& out, const Tensor& lse, Call& call) {
  call.out = view("out", out, call.n_q, call.dv);
  view("lse", lse, call.n_q, kNone, Holds::kFloat64);
  STD_TORCH_CHECK(lse.is_contiguous(), "boltzattn: lse must be contiguous");
  call.lse = static_cast<double*>(lse.data_ptr());
}

// Memory for kernels; torch's allocator reuses it in the order of the stream.
Tensor workspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
}

template <void (*run)(Call&, const Tensor&, cudaStream_t), bool transform>
std::tuple<Tensor, Tensor> forward(BOLTZATTN_PROBLEM_PARAMETERS) {
  const Views view("query", query);
  Call call{};
  describe(view, {BOLTZATTN_PROBLEM_ARGUMENTS}, transform, call);
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  Tensor out = view.result({call.n_q, call.dv});
  Tensor lse = view.result({call.n_q}, ScalarType::Double);
  describe_results(view, out, lse, call);
  run(call, query, current_stream(query.get_device_index()));
  return {out, lse};
}

template <void (*run)(Gradient&, const Tensor&, cudaStream_t), bool transform>
Gradients backward(BOLTZATTN_SAVED_PARAMETERS, BOLTZATTN_PROBLEM_PARAMETERS) {
  const Views view("query", query);
  const Problem problem{BOLTZATTN_PROBLEM_ARGUMENTS};
  Gradient g{};
  describe(view, problem, transform, g.call);
  describe_results(view, out, lse, g.call);
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  Tensor grad_query = view.result({g.call.n_q, g.call.rank});
  Tensor grad_key = view.result({g.call.n_k, g.call.rank});
  Tensor grad_value = view.result({g.call.n_k, g.call.dv});
  describe_gradients(view, grad_out, grad_lse, grad_query, grad_key, grad_value, g);
  auto [grad_key_mask, grad_slopes] = new_bias_gradients(view, problem, g);
  run(g, query, current_stream(query.get_device_index()));
  return {grad_query, grad_key, grad_value, grad_key_mask, grad_slopes};
}

void run_direct_forward(Call& call, const Tensor& like, cudaStream_t stream) {
  const Tensor totals = workspace(like, totals_bytes(call, false));
  call.totals = totals.data_ptr();
  check(direct_forward(call, stream));
}

void run_direct_backward(Gradient& g, const Tensor& like, cudaStream_t stream) {
  const Tensor totals = workspace(like, totals_bytes(g.call, true));
  const Tensor norms = workspace(like, row_norms_bytes(g.call));
  const Tensor slope_sums = workspace(like, slope_sums_bytes(g.call));
  g.call.totals = totals.data_ptr();
  g.row_norms = norms.data_ptr();
  g.slope_sums = static_cast<double*>(slope_sums.data_ptr());
  check(direct_backward(g, stream));
}

// One allocation for the transform's workspace, cut into its pieces; the first is the report.
class TransformWorkspace {
 public:
  TransformWorkspace(const Call& call, bool backward, const Tensor& like) {
    int64_t bytes[kMostPieces], total = 0;
    const int count = transform_pieces(call, backward, bytes);
    const auto padded = [](int64_t size) { return (size + 255) / 256 * 256; };
    for (int k = 0; k < count; ++k) total += padded(bytes[k]);
    memory_ = workspace(like, total);
    char* at = static_cast<char*>(memory_->data_ptr());
    for (int k = 0; k < count; at += padded(bytes[k]), ++k) pieces_[k] = at;
  }
  void* const* pieces() const { return pieces_; }

 private:
  OptionalTensor memory_;
  void* pieces_[kMostPieces];
};

void run_transform_forward(Call& call, const Tensor& like, cudaStream_t stream) {
  const TransformWorkspace space(call, false, like);
  check(transform_forward(call, space.pieces(), stream));
}

void run_transform_backward(Gradient& g, const Tensor& like, cudaStream_t stream) {
  const TransformWorkspace space(g.call, true, like);
  check(transform_backward(g, space.pieces(), stream));
}

// (numbers [batch, outputs, n], extents [batch, outputs, 6]) as of cpu_project.
std::tuple<Tensor, Tensor> project(Tensor x, Tensor weight, OptionalTensor bias) {
  const Views view("x", x);
  Projected p{};
  describe_projection(view, x, weight, bias, p);
  p.x.lead[0] = x.stride(0);  // also if there is one batch
  p.chunks = project_chunks(p.n);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor out = view.result({p.outputs, p.n});
  Tensor extents = view.result({p.outputs, kExtentSize}, ScalarType::Double);
  const Tensor parts = workspace(x, p.batch * p.chunks * p.outputs * int64_t(sizeof(Extent)));
  p.out = out.data_ptr();
  p.parts = static_cast<Extent*>(parts.data_ptr());
  p.extents = static_cast<Extent*>(extents.data_ptr());
  check(project_forward(p, current_stream(x.get_device_index())));
  return {out, extents};
}

}  // namespace
}  // namespace boltzattn::cuda

BOLTZATTN_DEFINE(m) {
  m.def("cuda_direct_forward" BOLTZATTN_FORWARD);
  m.def("cuda_direct_backward" BOLTZATTN_BACKWARD);
  m.def("cuda_transform_forward" BOLTZATTN_FORWARD);
  m.def("cuda_transform_backward" BOLTZATTN_BACKWARD);
  m.def("cuda_project" BOLTZATTN_PROJECT);
}

BOLTZATTN_IMPLEMENT(CUDA, m) {
  using namespace boltzattn::cuda;
  m.impl("cuda_direct_forward", TORCH_BOX((&forward<&run_direct_forward, false>)));
  m.impl("cuda_direct_backward", TORCH_BOX((&backward<&run_direct_backward, false>)));
  m.impl("cuda_transform_forward", TORCH_BOX((&forward<&run_transform_forward, true>)));
  m.impl("cuda_transform_backward", TORCH_BOX((&backward<&run_transform_backward, true>)));
  m.impl("cuda_project", TORCH_BOX(&project));
}
