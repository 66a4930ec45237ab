// A CUDA runtime without a GPU: it hands every launch to a callback. Linked with the objects that
// nvcc makes of csrc/cuda/*.cu it lets tests run the launchers as they are shipped, and execute the
// kernels by other means (tests/cuda_launch.py).
#include <cuda_runtime_api.h>

#include <map>
#include <string>
#include <vector>

#include "cuda/launch.h"

namespace {

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
using Callback = void (*)(const char* kernel, unsigned blocks, unsigned threads, size_t shared,
                          void** arguments);

std::vector<Configuration>& configurations() {
  static std::vector<Configuration> stack;
  return stack;
}
std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> of_host_function;
  return of_host_function;
}
Callback callback = nullptr;

}  // namespace

extern "C" {

void set_callback(Callback function) {
  callback = function;
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) {
  return 1;
}
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  names()[host] = device;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations().push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration top = configurations().back();
  configurations().pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *static_cast<cudaStream_t*>(stream) = top.stream;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t) {
  callback(names().at(host).c_str(), grid.x, block.x, shared, arguments);
  return grid.y * grid.z * block.y * block.z == 1 ? cudaSuccess : cudaErrorInvalidConfiguration;
}
// What nvcc 13 calls instead.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = cudaKernel_t(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared,
                          stream);
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  __builtin_memset(to, value, bytes);
  return cudaSuccess;
}

int run_direct_forward(const boltzattn::cuda::Call* call) {
  return boltzattn::cuda::direct_forward(*call, nullptr);
}
int run_direct_backward(const boltzattn::cuda::Gradient* g) {
  return boltzattn::cuda::direct_backward(*g, nullptr);
}
int run_transform_forward(const boltzattn::cuda::Call* call, void* const* pieces) {
  return boltzattn::cuda::transform_forward(*call, pieces, nullptr);
}
int run_transform_backward(const boltzattn::cuda::Gradient* g, void* const* pieces) {
  return boltzattn::cuda::transform_backward(*g, pieces, nullptr);
}
int call_transform_pieces(const boltzattn::cuda::Call* call, int backward, int64_t* bytes) {
  return boltzattn::cuda::transform_pieces(*call, backward, bytes);
}
int run_project(const boltzattn::cuda::Projected* p) {
  return boltzattn::cuda::project_forward(*p, nullptr);
}
int64_t call_project_chunks(int64_t n) {
  return boltzattn::cuda::project_chunks(n);
}
int64_t call_totals_bytes(const boltzattn::cuda::Call* call, int backward) {
  return boltzattn::cuda::totals_bytes(*call, backward);
}
int64_t call_row_norms_bytes(const boltzattn::cuda::Call* call) {
  return boltzattn::cuda::row_norms_bytes(*call);
}
int64_t call_slope_sums_bytes(const boltzattn::cuda::Call* call) {
  return boltzattn::cuda::slope_sums_bytes(*call);
}
}
