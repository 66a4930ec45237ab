// The core of the transform, and the certificate of its results. No torch.
#pragma once

#include "cuda/transform/head.cuh"

namespace boltzattn::cuda {

// E[a][b] = exp(t_a (s_b - reference)) for the nodes of one query panel and one key panel.
template <int P>
__device__ __forceinline__ void kernel_tile(const double* t, const double* s, double reference,
                                            double (*e)[P + 1]) {
  for (int at = threadIdx.x; at < P * P; at += kThreads)
    e[at / P][at % P] = ::exp(t[at / P] * (s[at % P] - reference));
}

// A thread of the core: one node, and 8 columns of a tile.
template <class T>
struct CoreLanes {
  static constexpr int P = kNodes<T>, kEach = 8, kGroups = kThreads / P;
  static constexpr int kColumns = kGroups * kEach;
  static __device__ __forceinline__ int node() { return threadIdx.x / kGroups; }
  static __device__ __forceinline__ int column(int c) {
    return (c / 2 * kGroups + threadIdx.x % kGroups) * 2 + c % 2;
  }
};

// space[k][0] = the largest of the block's numbers space[k][.], NaN if there is one, for the first
// thread.
template <int N>
__device__ __forceinline__ void block_largest(double (&space)[N][kThreads]) {
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (int(threadIdx.x) >= step) continue;
#pragma unroll
    for (int k = 0; k < N; ++k)
      space[k][threadIdx.x] = largest_or_nan(space[k][threadIdx.x], space[k][threadIdx.x + step]);
  }
}

// Node values of F from the moments, for one query panel and a tile of columns; with `Slopes` those
// of F' too. And the bound of the query-side error.
template <class T, bool Slopes>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    transform_core(const __grid_constant__ Work work) {
  using Lanes = CoreLanes<T>;
  constexpr int P = Lanes::P, N = Lanes::kColumns;
  __shared__ double e[P][P + 1];
  __shared__ double moment[P][N];
  __shared__ double count[P];
  __shared__ double space[2][kThreads];  // largest |F|, query-side error
  const Call& call = work.g.call;
  const int64_t tiles = ceil_div(call.dv, N), tile = blockIdx.x % tiles;
  const int64_t panel = blockIdx.x / tiles % work.side[0].panels;
  const int64_t h = blockIdx.x / tiles / work.side[0].panels;
  const HeadLayout& head = work.heads[h];
  if (!head.served || panel >= head.layout.query.panels) return;
  const Layout& layout = head.layout;
  const int end = end_of_query_panel(layout, int(panel)), i = Lanes::node();
  const int64_t a = (h * work.side[0].panels + panel) * P + i, column = tile * N;
  const double* t = work.side[0].node + a - i;
  const double* centre = work.centre + 2 * h * call.dv;
  const double reference = reference_key(layout, int(panel)) - layout.middle;

  double f[Lanes::kEach] = {}, slope[Lanes::kEach] = {};
  double z = 0, z_slope = 0;              // sums over all keys,
  double z_other = 0, z_slope_other = 0;  // and over those measured from the other end
  for (int k = 0; k < layout.key.panels; ++k) {
    const int64_t b0 = (h * work.side[1].panels + k) * P;
    const double* s = work.side[1].node + b0;
    const double* from = work.side[1].sums + b0 * (call.dv + 1);
    kernel_tile<P>(t, s, reference, e);
    for (int at = threadIdx.x; at < P * N; at += kThreads)
      moment[at / N][at % N] =
          column + at % N < call.dv ? from[at / N * (call.dv + 1) + column + at % N] : 0;
    if (threadIdx.x < P) count[threadIdx.x] = from[threadIdx.x * (call.dv + 1) + call.dv];
    __syncthreads();
    const bool other = end_of_key_panel(layout, k) != end;
#pragma unroll 2
    for (int b = 0; b < P; ++b) {
      const double x = e[i][b], y = x * (s[b] - reference);
      z += x * count[b];
      z_other += other ? x * count[b] : 0;
      if (Slopes) z_slope += y * count[b];
      if (Slopes) z_slope_other += other ? y * count[b] : 0;
#pragma unroll
      for (int c = 0; c < Lanes::kEach; ++c) {
        f[c] += x * moment[b][Lanes::column(c)];
        if (Slopes) slope[c] += y * moment[b][Lanes::column(c)];
      }
    }
    __syncthreads();
  }

  // Measured from the value of the reference key, for the moments of both ends.
  const double inverse = 1 / z, mean = z_slope * inverse;
  const bool steep = head.range.s_min < head.range.s_max;  // equal keys: F is constant
  double largest = ::log(z) * 0;                           // NaN if z is not a number
  T* table = static_cast<T*>(work.table);
#pragma unroll
  for (int c = 0; c < Lanes::kEach; ++c) {
    const int64_t at = column + Lanes::column(c);
    double value = 0;
    if (at < call.dv) {
      const double shift = centre[(1 - end) * call.dv + at] - centre[end * call.dv + at];
      value = (f[c] + z_other * shift) * inverse;
      if (Slopes) {
        const double derivative = (slope[c] + z_slope_other * shift) * inverse - value * mean;
        work.node_out[a * call.dv + at] = value;
        table[a * call.dv + at] = T(steep ? derivative : 0);
      } else {
        table[a * call.dv + at] = T(value + centre[end * call.dv + at]);
      }
    }
    largest = largest_or_nan(largest, ::fabs(value));
    moment[i][Lanes::column(c)] = value;
  }
  if (tile == 0 && threadIdx.x % Lanes::kGroups == 0) {
    work.last[a] = Slopes ? (steep ? mean : 0) : ::log(z);
    work.inverse_z[a] = inverse;
  }
  __syncthreads();
  double query_error = 0;
  for (int at = threadIdx.x; at < kLastCoefficients * N; at += kThreads) {
    double coefficient = 0;
    for (int b = 0; b < P; ++b)
      coefficient += work.decay[(h * kLastCoefficients + at / N) * P + b] * moment[b][at % N];
    query_error = largest_or_nan(query_error, ::fabs(coefficient));
  }
  space[0][threadIdx.x] = largest;
  space[1][threadIdx.x] = query_error;
  block_largest(space);
  if (threadIdx.x > 0) return;
  work.bounds[2 * blockIdx.x] = space[0][0];
  work.bounds[2 * blockIdx.x + 1] = space[1][0];
}

// Bound of the key-side error of Z at a query node, relative to Z. A thread takes a node.
__global__ void __launch_bounds__(kThreads) transform_key_error(const __grid_constant__ Work work) {
  const int64_t nodes = work.side[0].panels * work.nodes;
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x, h = at / nodes;
  if (h >= work.g.call.heads || !work.heads[h].served) return;
  const Layout& layout = work.heads[h].layout;
  const int panel = int(at % nodes / work.nodes);
  if (panel >= layout.query.panels) return;
  const double reference = reference_key(layout, panel) - layout.middle;
  const double t = work.side[0].node[at];
  const Side& side = work.side[1];
  const uint32_t* start = side.panel_start + h * (side.panels + 1);
  double sum = 0;
  for (int k = 0; k < layout.key.panels; ++k) {
    const double keys = start[k + 1] - start[k];
    const double* extreme =
        work.extremes + ((h * side.panels + k) * 2 + (t >= 0 ? 0 : 1)) * kEllipses;
    sum += keys * ::exp(key_log_error(work.log_factor + h * kEllipses, extreme, t, reference));
  }
  work.key_error[at] = sum * work.inverse_z[at];
}

// One block per head: finds the certificate and decides whether the head is served.
__global__ void __launch_bounds__(kThreads) transform_certify(const __grid_constant__ Work work) {
  __shared__ double space[3][kThreads];
  const Call& call = work.g.call;
  const int64_t h = blockIdx.x;
  const HeadLayout& head = work.heads[h];
  const int64_t tiles = ceil_div(call.dv, kThreads / work.nodes * 8);
  const double* bounds = work.bounds + h * work.side[0].panels * tiles * 2;
  const double* key_errors = work.key_error + h * work.side[0].panels * work.nodes;
  double worst[3] = {0, 0, 0};  // largest |F|, query-side and key-side error
  if (head.served) {
    for (int64_t e = threadIdx.x; e < head.layout.query.panels * tiles; e += kThreads)
      for (int k = 0; k < 2; ++k) worst[k] = largest_or_nan(worst[k], bounds[2 * e + k]);
    for (int64_t a = threadIdx.x; a < head.layout.query.panels * work.nodes; a += kThreads)
      worst[2] = largest_or_nan(worst[2], key_errors[a]);
  }
  for (int k = 0; k < 3; ++k) space[k][threadIdx.x] = worst[k];
  block_largest(space);
  if (threadIdx.x > 0) return;
  for (int k = 0; k < 3; ++k) worst[k] = space[k][0];
  // |F - centre| <= 2 max|v|, so half of its largest can only overstate the relative error.
  const double product = head.served ? largest_product(head.range) : 0;
  const double relative = worst[1] == 0 ? 0 : 2 * worst[1] / worst[0];
  const double certificate =
      certificate_of(relative, worst[2], rounding_of(call.query.dtype, product));
  const bool served =
      head.served && worst[0] <= kLargestSum && certificate <= tolerance_of(call.query.dtype);
  work.served[h] = served;
  double* report = work.report + 7 * h;
  report[0] = served;
  report[1] = head.served ? certificate : 0;
  report[2] = product;
  report[3] = head.served ? head.layout.query.panels : 0;
  report[4] = double(work.nodes);
  report[5] = head.served ? head.layout.key.panels : 0;
  report[6] = double(work.nodes);
}

}  // namespace boltzattn::cuda
