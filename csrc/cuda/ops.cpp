// torch's side of the CUDA kernels: operators by the stable ABI, tensors to plain descriptions.
// Shapes and dtypes have been checked by the Python side; what is checked here again is what would
// make a kernel read outside its memory.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "cuda/launch.h"
#include "schema.h"
#include "tensors.h"

namespace boltzattn {
namespace cuda {
namespace {

// The stream torch works on. It lives in libtorch_cuda, which this library does not link, so that
// it can be built under a CPU torch; whoever has CUDA tensors has loaded it.
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

// Describes the tensors of one call; all have the leading dimensions of `query`.
class Description {
 public:
  explicit Description(const Tensor& query) : device_(query.get_device_index()) {
    for (int64_t d = 0; d + 2 < query.dim(); ++d) {
      lead_.push_back(query.size(d));
      heads_ *= query.size(d);
    }
  }

  void sizes(Call& call) const {
    call.heads = heads_;
    for (size_t d = 0; d < lead_.size(); ++d) {
      if (lead_[d] == 1) continue;
      STD_TORCH_CHECK(call.dims < kMostLead, "boltzattn: backend 'cuda' takes at most ", kMostLead,
                      " leading dimensions; flatten some of them");
      call.lead[call.dims++] = lead_[d];
    }
  }
  Strided matrix(const Tensor& x, int64_t rows, int64_t columns) const {
    Strided m =
        strided(x, {rows, columns}, x.dim() > 1 ? x.stride(x.dim() - 2) : 0, x.stride(x.dim() - 1));
    m.whole_vectors = whole_vectors(x, m, columns);
    return m;
  }
  Strided row_vector(const OptionalTensor& x, int64_t columns) const {
    return x ? strided(*x, {columns}, 0, x->stride(x->dim() - 1)) : Strided{};
  }
  Strided column_vector(const OptionalTensor& x, int64_t rows) const {
    return x ? strided(*x, {rows}, x->stride(x->dim() - 1), 0) : Strided{};
  }
  Strided scalar(const OptionalTensor& x) const { return x ? strided(*x, {}, 0, 0) : Strided{}; }

 private:
  Strided strided(const Tensor& x, const std::vector<int64_t>& inner, int64_t row,
                  int64_t column) const {
    bool same = x.is_cuda() && x.get_device_index() == device_ &&
                x.dim() == int64_t(lead_.size() + inner.size());
    for (size_t d = 0; same && d < lead_.size() + inner.size(); ++d)
      same = x.size(int64_t(d)) == (d < lead_.size() ? lead_[d] : inner[d - lead_.size()]);
    STD_TORCH_CHECK(same, "boltzattn: a tensor has another shape or device");
    Strided m{};
    m.data = x.data_ptr();
    m.row = row;
    m.column = column;
    m.dtype = dtype_of(x);
    int at = 0;
    for (size_t d = 0; d < lead_.size(); ++d)
      if (lead_[d] != 1 && at < kMostLead) m.lead[at++] = x.stride(int64_t(d));
    return m;
  }

  int32_t whole_vectors(const Tensor& x, const Strided& m, int64_t columns) const {
    const int64_t vector = 16 / int64_t(x.element_size());
    bool whole = vector > 0 && m.column == 1 && columns % vector == 0 && m.row % vector == 0 &&
                 reinterpret_cast<uintptr_t>(m.data) % 16 == 0;
    for (int64_t stride : m.lead) whole = whole && stride % vector == 0;
    return whole;
  }

  int32_t device_;
  std::vector<int64_t> lead_;
  int64_t heads_ = 1;
};

Call describe(const Description& d, const Tensor& query, const Tensor& key, const Tensor& value,
              const OptionalTensor& attn_mask, const OptionalTensor& key_mask,
              const OptionalTensor& seed, double scale, double dropout_p, bool is_causal,
              const Tensor& out, const Tensor& lse) {
  Call call{};
  d.sizes(call);
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
  if (dropout_p > 0) call.seed = d.scalar(seed);
  call.out = d.matrix(out, call.n_q, call.dv);
  STD_TORCH_CHECK(lse.is_contiguous() && lse.scalar_type() == ScalarType::Double,
                  "boltzattn: lse must be contiguous float64");
  d.column_vector(lse, call.n_q);  // checks its shape
  call.lse = static_cast<double*>(lse.data_ptr());
  STD_TORCH_CHECK(call.key.dtype == call.query.dtype && call.value.dtype == call.query.dtype &&
                      call.out.dtype == call.query.dtype,
                  "boltzattn: query, key, value and out must have one dtype");
  return call;
}

// Memory for kernels; torch's allocator reuses it in the order of the stream.
Tensor workspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
}

using Forward = void (*)(Call&, const Tensor&, cudaStream_t);
using Backward = void (*)(Gradient&, const Tensor&, cudaStream_t);

template <Forward run>
std::tuple<Tensor, Tensor> forward(BOLTZATTN_PROBLEM_PARAMETERS) {
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  Tensor out = torch::stable::new_empty(query, shape_with(query, value.size(value.dim() - 1)));
  Tensor lse = torch::stable::new_empty(query, rows_of(query), ScalarType::Double);
  const Description d(query);
  Call call = describe(d, BOLTZATTN_PROBLEM_ARGUMENTS, out, lse);
  run(call, query, current_stream(query.get_device_index()));
  return {out, lse};
}

template <Backward run>
std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad_out, OptionalTensor grad_lse, Tensor out,
                                            Tensor lse, BOLTZATTN_PROBLEM_PARAMETERS) {
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  Tensor grad_query = torch::stable::new_empty(query, shape_of(query));
  Tensor grad_key = torch::stable::new_empty(key, shape_of(key));
  Tensor grad_value = torch::stable::new_empty(value, shape_of(value));
  const Description d(query);
  Gradient g{};
  g.call = describe(d, BOLTZATTN_PROBLEM_ARGUMENTS, out, lse);
  g.grad_out = d.matrix(grad_out, g.call.n_q, g.call.dv);
  g.grad_lse = d.column_vector(grad_lse, g.call.n_q);
  g.grad_query = d.matrix(grad_query, g.call.n_q, g.call.rank);
  g.grad_key = d.matrix(grad_key, g.call.n_k, g.call.rank);
  g.grad_value = d.matrix(grad_value, g.call.n_k, g.call.dv);
  STD_TORCH_CHECK(g.grad_out.dtype == g.call.query.dtype &&
                      (!grad_lse || grad_lse->scalar_type() == ScalarType::Double),
                  "boltzattn: grad_out must have query's dtype, grad_lse float64");
  run(g, query, current_stream(query.get_device_index()));
  return {grad_query, grad_key, grad_value};
}

void run_direct_forward(Call& call, const Tensor& like, cudaStream_t stream) {
  const Tensor totals = workspace(like, totals_bytes(call, false));
  call.totals = totals.data_ptr();
  check(direct_forward(call, stream));
}

void run_direct_backward(Gradient& g, const Tensor& like, cudaStream_t stream) {
  const Tensor totals = workspace(like, totals_bytes(g.call, true));
  const Tensor norms = workspace(like, row_norms_bytes(g.call));
  g.call.totals = totals.data_ptr();
  g.row_norms = norms.data_ptr();
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
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  STD_TORCH_CHECK(x.dim() == 3 && weight.dim() == 2, "boltzattn: x must be 3-d, weight 2-d");
  Projected p{};
  p.batch = x.size(0);
  p.n = x.size(1);
  p.columns = x.size(2);
  p.outputs = weight.size(0);
  p.chunks = project_chunks(p.n);
  Tensor out = torch::stable::new_empty(x, {p.batch, p.outputs, p.n});
  Tensor extents = torch::stable::new_empty(
      x, {p.batch, p.outputs, int64_t(sizeof(Extent) / sizeof(double))}, ScalarType::Double);
  const Tensor parts = workspace(x, p.batch * p.chunks * p.outputs * int64_t(sizeof(Extent)));
  p.x = Description(x).matrix(x, p.n, p.columns);
  p.x.lead[0] = x.stride(0);  // also where there is one batch
  p.weight = Description(weight).matrix(weight, p.outputs, p.columns);
  if (bias) p.bias = Description(weight).row_vector(bias, p.outputs);
  STD_TORCH_CHECK(p.weight.dtype == p.x.dtype && (!bias || p.bias.dtype == p.x.dtype) &&
                      weight.get_device_index() == x.get_device_index(),
                  "boltzattn: x, weight and bias must have one dtype and one device");
  p.out = out.data_ptr();
  p.parts = static_cast<Extent*>(parts.data_ptr());
  p.extents = static_cast<Extent*>(extents.data_ptr());
  check(project_forward(p, current_stream(x.get_device_index())));
  return {out, extents};
}

}  // namespace
}  // namespace cuda
}  // namespace boltzattn

STABLE_TORCH_LIBRARY_FRAGMENT(boltzattn, m) {
  m.def("cuda_direct_forward" BOLTZATTN_FORWARD);
  m.def("cuda_direct_backward" BOLTZATTN_BACKWARD);
  m.def("cuda_transform_forward" BOLTZATTN_FORWARD);
  m.def("cuda_transform_backward" BOLTZATTN_BACKWARD);
  m.def("cuda_project" BOLTZATTN_PROJECT);
}

STABLE_TORCH_LIBRARY_IMPL(boltzattn, CUDA, m) {
  using namespace boltzattn::cuda;
  m.impl("cuda_direct_forward", TORCH_BOX(&forward<&run_direct_forward>));
  m.impl("cuda_direct_backward", TORCH_BOX(&backward<&run_direct_backward>));
  m.impl("cuda_transform_forward", TORCH_BOX(&forward<&run_transform_forward>));
  m.impl("cuda_transform_backward", TORCH_BOX(&backward<&run_transform_backward>));
  m.impl("cuda_project", TORCH_BOX(&project));
}
