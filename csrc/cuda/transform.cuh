// Rank-1 attention in linear time: moments of the keys, a core without n, evaluation at the
// queries. docs/transform.md derives it; cpu/transform.h does the same for one head after another.
// No torch.
//
// Nothing here waits for the host: layouts are made on the device, memory is laid out for the
// largest one there may be, and a head that the transform cannot serve is flagged for `direct`.
// Tokens are sorted by panel, stably and without atomics, so results are bitwise reproducible.
#pragma once

#include "cuda/tokens.cuh"
#include "cuda/transform.h"

namespace boltzattn {
namespace cuda {

constexpr int64_t kRangeChunk = 4096;  // tokens
constexpr int64_t kSortChunk = 1024;   // tokens of a warp
constexpr unsigned kAllLanes = 0xffffffff;

// 0: measured from the largest key, 1: from the smallest.
__device__ __forceinline__ int end_of_query_panel(const Layout& layout, int panel) {
  return reference_key(layout, panel) == layout.s_max ? 0 : 1;
}
__device__ __forceinline__ int end_of_key_panel(const Layout& layout, int panel) {
  return layout.key.origin + layout.key.half * (2 * panel + 1) >= 0 ? 0 : 1;
}
// A NaN on either side stays.
__device__ __forceinline__ double largest_or_nan(double a, double b) {
  return a != a || a > b ? a : b;
}

// Queries as t, keys as s, of any dtype.
struct Numbers {
  const Strided& m;
  int64_t offset;
  double scale;
  __device__ Numbers(const Call& call, bool keys, int64_t h)
      : m(keys ? call.key : call.query),
        offset(head_offset(call, keys ? call.key : call.query, h)),
        scale(keys ? 1 : call.scale) {}
  __device__ __forceinline__ double at(int64_t i) const {
    return number_at(m, offset + i * m.row) * scale;
  }
};

// 0: masked, 1: kept, -1: the mask is a bias.
__device__ __forceinline__ int key_state(const Call& call, int64_t mask_offset, int64_t j) {
  const Strided& m = call.key_mask;
  if (!m.data) return 1;
  const int64_t at = mask_offset + j * m.column;
  if (m.dtype == DType::kBool) return static_cast<const uint8_t*>(m.data)[at] ? 0 : 1;
  const double bias = number_at(m, at);
  return bias == -INFINITY ? 0 : bias == 0 ? 1 : -1;
}

// ---- range and layout ----

__device__ __forceinline__ void join(RangePart& a, const RangePart& b) {
  a.t_min = b.t_min < a.t_min ? b.t_min : a.t_min;
  a.t_max = b.t_max > a.t_max ? b.t_max : a.t_max;
  // Of equal keys the first: the order of joining must not matter.
  if (b.s_max > a.s_max || (b.s_max == a.s_max && b.at_max < a.at_max)) a.at_max = b.at_max;
  if (b.s_min < a.s_min || (b.s_min == a.s_min && b.at_min < a.at_min)) a.at_min = b.at_min;
  a.s_max = b.s_max > a.s_max ? b.s_max : a.s_max;
  a.s_min = b.s_min < a.s_min ? b.s_min : a.s_min;
  a.keys += b.keys;
  a.regular &= b.regular;
}
__device__ __forceinline__ RangePart nothing() {
  return {INFINITY, -INFINITY, INFINITY, -INFINITY, 0, INT64_MAX, INT64_MAX, 1};
}
// part[0] = all of them joined, for the first thread.
__device__ __forceinline__ void join_block(RangePart* part) {
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < step) join(part[threadIdx.x], part[threadIdx.x + step]);
  }
}

__global__ void __launch_bounds__(kThreads) transform_range(const __grid_constant__ Work work) {
  __shared__ RangePart part[kThreads];
  const Call& call = work.g.call;
  const int64_t h = blockIdx.x / work.range_chunks;
  const int64_t first = blockIdx.x % work.range_chunks * kRangeChunk;
  const Numbers queries(call, false, h), keys(call, true, h);
  const int64_t mask_offset = call.key_mask.data ? head_offset(call, call.key_mask, h) : 0;
  RangePart mine = nothing();
  for (int64_t i = first + threadIdx.x; i < least(first + kRangeChunk, call.n_q); i += kThreads) {
    const double t = queries.at(i);
    mine.t_min = t < mine.t_min ? t : mine.t_min;
    mine.t_max = t > mine.t_max ? t : mine.t_max;
    if (!(::fabs(t) < INFINITY)) mine.regular = 0;
  }
  for (int64_t j = first + threadIdx.x; j < least(first + kRangeChunk, call.n_k); j += kThreads) {
    const int state = key_state(call, mask_offset, j);
    if (state < 0) mine.regular = 0;
    if (state != 1) continue;
    const double s = keys.at(j);
    if (!(::fabs(s) < INFINITY)) mine.regular = 0;
    join(mine, {INFINITY, -INFINITY, s, s, 1, j, j, 1});
  }
  part[threadIdx.x] = mine;
  join_block(part);
  if (threadIdx.x == 0) work.parts[blockIdx.x] = part[0];
}

// One block per head: the layout, and tables that follow from it alone.
__global__ void __launch_bounds__(kThreads) transform_layout(const __grid_constant__ Work work) {
  __shared__ RangePart part[kThreads];
  __shared__ HeadLayout head;
  const Call& call = work.g.call;
  const int64_t h = blockIdx.x;
  part[threadIdx.x] = nothing();
  for (int64_t c = threadIdx.x; c < work.range_chunks; c += kThreads)
    join(part[threadIdx.x], work.parts[h * work.range_chunks + c]);
  join_block(part);
  if (threadIdx.x == 0) {
    const RangePart& all = part[0];
    head.range = {all.t_min, all.t_max, all.s_min, all.s_max, all.keys};
    head.end_key[0] = all.at_max;
    head.end_key[1] = all.at_min;
    head.usable = 0;
    head.layout = {};
    if (all.regular && all.keys > 0 && largest_product(head.range) <= kLargestProduct) {
      const int nodes = int(work.nodes);
      head.layout = make_layout(head.range, nodes, nodes, work.precision);
      head.usable = head.layout.query.panels <= work.side[0].panels &&
                    head.layout.key.panels <= work.side[1].panels;
    }
    work.heads[h] = head;
  }
  __syncthreads();
  if (!head.usable) return;
  const Layout& layout = head.layout;
  const int nodes = int(work.nodes);
  for (int a = threadIdx.x; a < layout.query.panels * nodes; a += kThreads)
    work.side[0].node[h * work.side[0].panels * nodes + a] =
        query_node(layout, a / nodes, a % nodes);
  for (int b = threadIdx.x; b < layout.key.panels * nodes; b += kThreads)
    work.side[1].node[h * work.side[1].panels * nodes + b] = key_node(layout, b / nodes, b % nodes);
  if (int(threadIdx.x) < nodes) {
    const int a = threadIdx.x;
    double factor = 1;
    for (int b = 0; b < nodes; ++b)
      if (b != a) factor /= chebyshev_node(nodes, a) - chebyshev_node(nodes, b);
    work.basis[(2 * h) * nodes + a] = chebyshev_node(nodes, a);
    work.basis[(2 * h + 1) * nodes + a] = factor;
  }
  for (int e = threadIdx.x; e < layout.key.panels * 2 * kEllipses; e += kThreads)
    work.extremes[h * work.side[1].panels * 2 * kEllipses + e] = ellipse_extreme(
        layout, e / (2 * kEllipses), e % kEllipses, e / kEllipses % 2 == 0 ? 1 : -1);
  if (threadIdx.x < kEllipses)
    work.log_factor[h * kEllipses + threadIdx.x] = ellipse_log_factor(layout.key, threadIdx.x);
  for (int e = threadIdx.x; e < kLastCoefficients * nodes; e += kThreads)
    work.decay[h * kLastCoefficients * nodes + e] =
        decay_weight(layout, e / nodes, e % nodes) * decay_factor(layout);
  const int64_t value = head_offset(call, call.value, h);
  for (int64_t e = threadIdx.x; e < 2 * call.dv; e += kThreads)
    work.centre[2 * h * call.dv + e] =
        number_at(call.value, value + head.end_key[e / call.dv] * call.value.row +
                                  e % call.dv * call.value.column);
}

// ---- sorting by panel ----

struct Spot {
  int panel;
  double place;
};
// What a token's panel depends on. A copy: the layout is read once, not for every token.
struct Locator {
  bool keys;
  double middle, unit;
  Axis axis;
  __device__ Locator(const Layout& layout, bool keys)
      : keys(keys),
        middle(keys ? layout.middle : 0),
        unit(keys ? layout.radius : layout.tau),
        axis(keys ? layout.key : layout.query) {}
  __device__ __forceinline__ Spot locate(double number) const {
    const double x = (number - middle) / unit, u = keys ? ::atanh(x) : ::asinh(x);
    const double f = (u - axis.origin) * (0.5 / axis.half);
    int panel = int(f);
    panel = panel < 0 ? 0 : panel >= axis.panels ? axis.panels - 1 : panel;
    return {panel, 2 * (f - panel) - 1};
  }
};

// A warp takes a chunk, 32 tokens at a time. `Place`: tokens go where the scan has made room for
// them; else they are counted.
template <class T, bool Place>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    transform_sort(const __grid_constant__ Work work) {
  __shared__ uint32_t table[kWarps][kMostPanels];
  const Call& call = work.g.call;
  const Side& side = work.side[work.keys];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t groups = ceil_div(side.chunks, kWarps), h = blockIdx.x / groups;
  const int64_t chunk = blockIdx.x % groups * kWarps + warp;
  if (chunk >= side.chunks || !work.heads[h].usable) return;
  const bool keys = work.keys;
  const Locator locator(work.heads[h].layout, keys);
  const Numbers numbers(call, keys, h);
  const int64_t mask_offset = call.key_mask.data ? head_offset(call, call.key_mask, h) : 0;
  const int panels = locator.axis.panels;
  Placed<T>* order = static_cast<Placed<T>*>(side.order) + h * side.n;
  uint32_t* counts = side.counts + (h * side.chunks + chunk) * side.panels;
  const uint32_t* start = side.panel_start + h * (side.panels + 1);
  for (int p = lane; p < panels; p += 32) table[warp][p] = Place ? start[p] + counts[p] : 0;
  __syncwarp();
  for (int64_t first = chunk * kSortChunk; first < least(side.n, (chunk + 1) * kSortChunk);
       first += 32) {
    const int64_t i = first + lane;
    const bool here = i < side.n && (!keys || key_state(call, mask_offset, i) == 1);
    const Spot spot = here ? locator.locate(numbers.at(i)) : Spot{-1, 0};
    const unsigned same = __match_any_sync(kAllLanes, spot.panel);
    const unsigned before = same & ((1u << lane) - 1);
    if (Place) {
      if (here) order[table[warp][spot.panel] + __popc(before)] = {T(spot.place), uint32_t(i)};
      __syncwarp();
    }
    if (here && before == 0) table[warp][spot.panel] += __popc(same);
    __syncwarp();
  }
  if (!Place)
    for (int p = lane; p < panels; p += 32) counts[p] = table[warp][p];
}

// One block per head: counts become positions.
template <class T>
__global__ void __launch_bounds__(kThreads) transform_scan(const __grid_constant__ Work work) {
  __shared__ uint32_t total[kMostPanels];
  const Side& side = work.side[work.keys];
  const int64_t h = blockIdx.x;
  const HeadLayout& head = work.heads[h];
  if (!head.usable) return;
  const int panels = work.keys ? head.layout.key.panels : head.layout.query.panels;
  uint32_t* counts = side.counts + h * side.chunks * side.panels;
  for (int p = threadIdx.x; p < panels; p += kThreads) {
    uint32_t sum = 0;
#pragma unroll 8
    for (int64_t c = 0; c < side.chunks; ++c) {
      const uint32_t count = counts[c * side.panels + p];
      counts[c * side.panels + p] = sum;
      sum += count;
    }
    total[p] = sum;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  uint32_t tokens = 0, segments = 0;
  for (int p = 0; p <= panels; ++p) {
    side.panel_start[h * (side.panels + 1) + p] = tokens;
    side.segment_start[h * (side.panels + 1) + p] = segments;
    if (p == panels) break;
    tokens += total[p];
    segments += (total[p] + kSegment<T> - 1) / kSegment<T>;
  }
}

// ---- passes over the tokens ----

// The segment a block works on; count 0: none.
template <class T>
struct Cut {
  int64_t head, index;
  int panel, count;
  int64_t first;  // in the order of panels, over all heads

  __device__ explicit Cut(const Work& work, const Side& side, bool keys)
      : head(blockIdx.x / side.segments), index(blockIdx.x % side.segments), panel(0), count(0) {
    const HeadLayout& at = work.heads[head];
    if (!at.usable) return;
    const uint32_t* starts = side.segment_start + head * (side.panels + 1);
    const uint32_t* tokens = side.panel_start + head * (side.panels + 1);
    int high = keys ? at.layout.key.panels : at.layout.query.panels;
    if (index >= starts[high]) return;
    while (high - panel > 1) {  // starts[panel] <= index < starts[high]
      const int middle = (panel + high) / 2;
      (starts[middle] <= index ? panel : high) = middle;
    }
    const uint32_t begin = tokens[panel] + uint32_t(index - starts[panel]) * kSegment<T>;
    count = int(least(kSegment<T>, tokens[panel + 1] - begin));
    first = head * side.n + begin;
  }
};

// Weights of the Lagrange basis: prod_{b != a} (x - x_b) / (x_a - x_b). Products from both ends
// keep every factor and need no division. In fp64: the nodes rounded to fp32 would be other nodes
// than those the tables were made for. each(i, token, sum_a weight[a] last[a]) sees every token.
// For other threads all this is there after a barrier.
template <class T, class Each>
__device__ __forceinline__ void weigh(const Work& work, const Side& side, const Cut<T>& cut,
                                      const double* last, Segment<T>& segment, Each each) {
  constexpr int P = kNodes<T>;
  __shared__ double node[P], factor[P], column[P];
  if (threadIdx.x < P) {
    node[threadIdx.x] = work.basis[2 * cut.head * P + threadIdx.x];
    factor[threadIdx.x] = work.basis[(2 * cut.head + 1) * P + threadIdx.x];
    column[threadIdx.x] = last ? last[(cut.head * side.panels + cut.panel) * P + threadIdx.x] : 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kSegment<T>; i += kThreads) {
    if (i >= cut.count) {
#pragma unroll
      for (int a = 0; a < P; ++a) segment.weight[a][i] = 0;
      segment.token[i] = 0;
      continue;
    }
    const Placed<T> placed = static_cast<const Placed<T>*>(side.order)[cut.first + i];
    const double x = placed.place;
    double product = 1, sum = 0;
    // The products from the left wait in registers, or in the table itself where it is fp64.
    double waiting[sizeof(T) == 4 ? P : 1];
#pragma unroll(sizeof(T) == 4 ? P : 2)
    for (int a = 0; a < P; ++a) {
      const double left = product * factor[a];
      if constexpr (sizeof(T) == 4) {
        waiting[a] = left;
      } else {
        segment.weight[a][i] = left;
      }
      product *= x - node[a];
    }
    product = 1;
#pragma unroll(sizeof(T) == 4 ? P : 2)
    for (int a = P - 1; a >= 0; --a) {
      double left;
      if constexpr (sizeof(T) == 4) {
        left = waiting[a];
      } else {
        left = segment.weight[a][i];
      }
      const double weight = left * product;
      segment.weight[a][i] = T(weight);
      sum += weight * column[a];
      product *= x - node[a];
    }
    segment.token[i] = uint32_t(placed.token);
    each(i, segment.token[i], sum);
  }
}

// Sums over the tokens of one column of numbers, number(i): to[a] for node a.
template <class T, class Number>
__device__ __forceinline__ void sum_column(const Segment<T>& segment, int count, T* to,
                                           int64_t stride, double* space, Number number) {
  constexpr int P = kNodes<T>, kParts = kThreads / P, kShare = kSegment<T> / kParts;
  const int a = threadIdx.x % P, part = threadIdx.x / P;
  double sum = 0;
#pragma unroll 4
  for (int i = part * kShare; i < part * kShare + kShare && i < count; ++i)
    sum += double(segment.weight[a][i]) * number(i);
  space[threadIdx.x] = sum;
  __syncthreads();
  if (part == 0) {
    for (int other = 1; other < kParts; ++other) sum += space[other * P + a];
    to[a * stride] = T(sum);
  }
}

// A block's partial table.
template <class T>
__device__ __forceinline__ T* partial_of(const Side& side, const Cut<T>& cut, int64_t columns) {
  return static_cast<T*>(side.partial) +
         (cut.head * side.segments + cut.index) * kNodes<T> * (columns + 1);
}

// Writes what a block has summed for a tile of columns into its partial table.
template <class T, int N>
__device__ __forceinline__ void write_partial(const double (*space)[N], int64_t column,
                                              int64_t columns, T* to) {
  for (int e = threadIdx.x; e < kNodes<T> * N; e += kThreads)
    if (column + e % N < columns)
      to[e / N * (columns + 1) + column + e % N] = T(space[e / N][e % N]);
}

// Columns column .. of what the values of a key panel are measured from, zero past the last.
template <class T, int N>
__device__ __forceinline__ void load_centre(const Work& work, const Cut<T>& cut, int64_t column,
                                            T (&to)[N]) {
  const int64_t at = column + threadIdx.x, dv = work.g.call.dv;
  if (threadIdx.x >= N) return;
  const int end = end_of_key_panel(work.heads[cut.head].layout, cut.panel);
  to[threadIdx.x] = at < dv ? T(work.centre[(2 * cut.head + end) * dv + at]) : T(0);
}

// Moments of the keys. At low temperature the largest key (for t > 0) or the smallest takes all the
// weight, and what gradients are made of, v_j - F, is a small difference. So values are measured
// from the value of the end key on their half of the key axis.
template <class S>
__global__ void __launch_bounds__(kThreads) transform_moments(const __grid_constant__ Work work) {
  using T = Arithmetic<S>;
  constexpr int N = NodeLanes<T, kTensorCores<S>>::kColumns;
  __shared__ __align__(16) Segment<T> segment;
  __shared__ double space[kNodes<T>][N];
  __shared__ T centre[N];
  const Call& call = work.g.call;
  const Side& side = work.side[1];
  const Cut<T> cut(work, side, true);
  if (cut.count == 0) return;
  weigh(work, side, cut, nullptr, segment, [](int, uint32_t, double) {});
  const S* value = head_of<const S>(call, call.value, cut.head);
  T* to = partial_of(side, cut, call.dv);
  __syncthreads();
  sum_column(segment, cut.count, to + call.dv, call.dv + 1, space[0], [](int) { return 1.0; });
  for (int64_t column = 0; column < call.dv; column += N) {
    load_centre(work, cut, column, centre);
    __syncthreads();  // and everyone has done with `space`
    NodeSums<T, kTensorCores<S>> sums;
    sums.clear();
    if constexpr (kTensorCores<S>) {
      sum_rows(segment, cut.count, value, call.value, column, call.dv, centre, sums);
    } else {
      sum_rows(segment, cut.count, value, call.value, column, call.dv, centre, sums,
               [](int, const T*) {});
    }
    sums.join(space);
    write_partial<T>(space, column, call.dv, to);
  }
}

// out and lse.
template <class S>
__global__ void __launch_bounds__(kThreads) transform_evaluate(const __grid_constant__ Work work) {
  using T = Arithmetic<S>;
  using Lanes = TokenLanes<S>;
  __shared__ __align__(16) Segment<T> segment;
  __shared__ __align__(16) NodeTable<S> table;
  const Call& call = work.g.call;
  const Side& side = work.side[0];
  const Cut<T> cut(work, side, false);
  if (cut.count == 0 || !work.served[cut.head]) return;
  const double reference = reference_key(work.heads[cut.head].layout, cut.panel);
  const Numbers queries(call, false, cut.head);
  weigh(work, side, cut, work.last, segment, [&](int, uint32_t token, double log_z) {
    call.lse[cut.head * call.n_q + token] = queries.at(token) * reference + log_z;
  });
  S* out = head_of<S>(call, call.out, cut.head);
  const T* from = static_cast<const T*>(work.table) +
                  (cut.head * side.panels + cut.panel) * kNodes<T> * call.dv;
  const WarpTokens<T> mine(cut.count);
  for (int64_t column = 0; column < call.dv; column += Lanes::kColumns) {
    table.load(from, column, call.dv);
    __syncthreads();
    for (int first = mine.first; first < mine.end; first += Lanes::kTokens) {
      T row[Lanes::kTokensEach][Lanes::kColumnsEach];
      table.spread(segment, first, row);
#pragma unroll
      for (int t = 0; t < Lanes::kTokensEach; ++t) {
        const int i = first + Lanes::token(t);
        if (i >= mine.end) break;
#pragma unroll
        for (int c = 0; c < Lanes::kColumnsEach; c += Lanes::V)
          write_columns<S, Lanes::V>(row[t] + c, out + segment.token[i] * call.out.row, call.out,
                                     column + Lanes::column(c), call.dv);
      }
    }
    __syncthreads();
  }
}

// Adds up the segments of a panel, in order.
template <class T>
__global__ void __launch_bounds__(kThreads) transform_join(const __grid_constant__ Work work) {
  const Side& side = work.side[work.keys];
  const int64_t entries = work.nodes * (work.g.call.dv + 1), tiles = ceil_div(entries, kThreads);
  const int64_t e = blockIdx.x % tiles * kThreads + threadIdx.x;
  const int64_t panel = blockIdx.x / tiles % side.panels, h = blockIdx.x / tiles / side.panels;
  const HeadLayout& head = work.heads[h];
  if (!head.usable || e >= entries) return;
  if (panel >= (work.keys ? head.layout.key.panels : head.layout.query.panels)) return;
  const uint32_t* starts = side.segment_start + h * (side.panels + 1) + panel;
  double sum = 0;
#pragma unroll 8
  for (uint32_t s = starts[0]; s < starts[1]; ++s)
    sum += static_cast<const T*>(side.partial)[(h * side.segments + s) * entries + e];
  side.sums[(h * side.panels + panel) * entries + e] = sum;
}

// ---- core ----

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
  if (!head.usable || panel >= head.layout.query.panels) return;
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

  // Measured from the value of the reference key, whichever end a key's moments had.
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
  if (h >= work.g.call.heads || !work.heads[h].usable) return;
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
    double least_log = INFINITY;
    for (int r = 0; r < kEllipses; ++r) {
      const double bound = work.log_factor[h * kEllipses + r] + t * (extreme[r] - reference);
      least_log = bound < least_log ? bound : least_log;
    }
    sum += keys * ::exp(least_log);
  }
  work.key_error[at] = sum * work.inverse_z[at];
}

// How much the certificate allows, and what it adds for rounding: of the token passes and, for
// fp64, of logits of size B. As in cpu/transform.h.
__device__ __forceinline__ double tolerance_of(DType dtype) {
  return dtype == DType::kFloat64    ? 1e-10
         : dtype == DType::kFloat32  ? 5e-6
         : dtype == DType::kBFloat16 ? 4.0 / 256
                                     : 4.0 / 2048;
}
__device__ __forceinline__ double rounding_of(DType dtype, double product) {
  return dtype == DType::kFloat64    ? 8e-15 + 4e-16 * product
         : dtype == DType::kFloat32  ? 3e-6
         : dtype == DType::kBFloat16 ? 1.0 / 256
                                     : 1.0 / 2048;
}

// One block per head: is the transform good enough?
__global__ void __launch_bounds__(kThreads) transform_certify(const __grid_constant__ Work work) {
  __shared__ double space[3][kThreads];
  const Call& call = work.g.call;
  const int64_t h = blockIdx.x;
  const HeadLayout& head = work.heads[h];
  const int64_t tiles = ceil_div(call.dv, kThreads / work.nodes * 8);
  const double* bounds = work.bounds + h * work.side[0].panels * tiles * 2;
  const double* key_errors = work.key_error + h * work.side[0].panels * work.nodes;
  double worst[3] = {0, 0, 0};  // largest |F|, query-side and key-side error
  if (head.usable) {
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
  const double product = head.usable ? largest_product(head.range) : 0;
  const double relative = worst[1] == 0 ? 0 : 2 * worst[1] / worst[0];
  const double key = 2 * worst[2] / (1 - (worst[2] < 0.5 ? worst[2] : 0.5));
  const double certificate = relative + key + rounding_of(call.query.dtype, product);
  const bool served =
      head.usable && worst[0] <= 1e300 && certificate <= tolerance_of(call.query.dtype);
  work.served[h] = served;
  double* report = work.report + 7 * h;
  report[0] = served;
  report[1] = head.usable ? certificate : 0;
  report[2] = product;
  report[3] = head.usable ? head.layout.query.panels : 0;
  report[4] = double(work.nodes);
  report[5] = head.usable ? head.layout.key.panels : 0;
  report[6] = double(work.nodes);
}

// ---- backward ----

// dF at the query nodes (column dv: the gradient of lse), and the gradient of the queries:
// dt_i = dO_i . F'(t_i) + dlse_i E[s].
template <class S>
__global__ void __launch_bounds__(kThreads)
    transform_query_gradient(const __grid_constant__ Work work) {
  using T = Arithmetic<S>;
  using Lanes = NodeLanes<T, false>;
  constexpr int N = Lanes::kColumns;
  __shared__ __align__(16) Segment<T> segment;
  __shared__ double space[kNodes<T>][N];
  __shared__ T grad_lse[kSegment<T>];
  __shared__ T grad_t[kSegment<T>];
  const Gradient& g = work.g;
  const Call& call = g.call;
  const Side& side = work.side[0];
  const Cut<T> cut(work, side, false);
  if (cut.count == 0 || !work.served[cut.head]) return;
  const double reference = reference_key(work.heads[cut.head].layout, cut.panel);
  const double* lse_grads =
      g.grad_lse.data ? head_of<const double>(call, g.grad_lse, cut.head) : nullptr;
  weigh(work, side, cut, work.last, segment, [&](int i, uint32_t token, double mean) {
    const double dlse = lse_grads ? lse_grads[token * g.grad_lse.row] : 0;
    grad_lse[i] = T(dlse);
    grad_t[i] = T(dlse * (reference + mean));
  });
  const S* grad_out = head_of<const S>(call, g.grad_out, cut.head);
  const T* slopes = static_cast<const T*>(work.table) +
                    (cut.head * side.panels + cut.panel) * kNodes<T> * call.dv;
  T* to = partial_of(side, cut, call.dv);
  __syncthreads();
  for (int64_t column = 0; column < call.dv; column += N) {
    T slope[Lanes::kNodesEach][Lanes::kColumnsEach];
#pragma unroll
    for (int a = 0; a < Lanes::kNodesEach; ++a) {
#pragma unroll
      for (int c = 0; c < Lanes::kColumnsEach; ++c) {
        const int64_t at = column + Lanes::column(c);
        slope[a][c] = at < call.dv ? slopes[Lanes::node(a) * call.dv + at] : T(0);
      }
    }
    NodeSums<T, false> sums;
    sums.clear();
    sum_rows(segment, cut.count, grad_out, g.grad_out, column, call.dv, nullptr, sums,
             [&](int i, const T* x) {
               T dot = 0;
#pragma unroll
               for (int a = 0; a < Lanes::kNodesEach; ++a) {
                 T part = 0;
#pragma unroll
                 for (int c = 0; c < Lanes::kColumnsEach; ++c) part += slope[a][c] * x[c];
                 dot += segment.weight[Lanes::node(a)][i] * part;
               }
#pragma unroll
               for (int step = 16; step > 0; step /= 2)
                 dot += __shfl_xor_sync(kAllLanes, dot, step);
               if (threadIdx.x % 32 == 0) grad_t[i] += dot;
             });
    sums.join(space);
    write_partial<T>(space, column, call.dv, to);
    __syncthreads();
  }
  sum_column(segment, cut.count, to + call.dv, call.dv + 1, space[0],
             [&](int i) { return double(grad_lse[i]); });
  S* grad_query = head_of<S>(call, g.grad_query, cut.head);
  for (int i = threadIdx.x; i < cut.count; i += kThreads)
    grad_query[segment.token[i] * g.grad_query.row] = narrow<S>(grad_t[i] * T(call.scale));
}

// pull_a = dlse_a + dF_a . (centre - F_a) from either end: what a key at the centre would feel.
// A warp takes a node.
__global__ void __launch_bounds__(kThreads) transform_pull(const __grid_constant__ Work work) {
  const Call& call = work.g.call;
  const int64_t nodes = work.side[0].panels * work.nodes;
  const int64_t at = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t h = at / nodes, a = at % nodes;
  if (h >= call.heads || !work.served[h]) return;
  const Layout& layout = work.heads[h].layout;
  const int panel = int(a / work.nodes);
  if (panel >= layout.query.panels) return;
  const double* from = work.centre + (2 * h + end_of_query_panel(layout, panel)) * call.dv;
  const double* gradient = work.side[0].sums + at * (call.dv + 1);
  for (int end = 0; end < 2; ++end) {
    const double* own = work.centre + (2 * h + end) * call.dv;
    double sum = 0;
    for (int64_t c = threadIdx.x % 32; c < call.dv; c += 32)
      sum += gradient[c] * ((own[c] - from[c]) - work.node_out[at * call.dv + c]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (threadIdx.x % 32 == 0) work.pull[(2 * h + end) * nodes + a] = sum + gradient[call.dv];
  }
}

// The core read backwards: tables over the key nodes for dv and for ds (to be multiplied by
// v - centre; `slope_last` is added):
// ds_j = sum_a t_a E_aj / Z_a (dF_a . (v_j - F_a) + dlse_a).
template <class T>
__global__ void __launch_bounds__(kThreads)
    transform_key_tables(const __grid_constant__ Work work) {
  using Lanes = CoreLanes<T>;
  constexpr int P = Lanes::P, N = Lanes::kColumns;
  __shared__ double e[P][P + 1];
  __shared__ double gradient[P][N];
  const Call& call = work.g.call;
  const int64_t tiles = ceil_div(call.dv, N), tile = blockIdx.x % tiles;
  const int64_t panel = blockIdx.x / tiles % work.side[1].panels;
  const int64_t h = blockIdx.x / tiles / work.side[1].panels;
  const HeadLayout& head = work.heads[h];
  if (!work.served[h] || panel >= head.layout.key.panels) return;
  const Layout& layout = head.layout;
  const int own = end_of_key_panel(layout, int(panel)), b = Lanes::node();
  const int64_t key = (h * work.side[1].panels + panel) * P + b, column = tile * N;
  const double* s = work.side[1].node + key - b;
  const bool felt = head.range.t_min < 0 || head.range.t_max > 0;  // else every query is 0
  double value[Lanes::kEach] = {}, slope[Lanes::kEach] = {}, rest = 0;
  for (int k = 0; k < layout.query.panels; ++k) {
    const int64_t a0 = (h * work.side[0].panels + k) * P;
    const double* t = work.side[0].node + a0;
    const double* from = work.side[0].sums + a0 * (call.dv + 1);
    const double* pull = work.pull + (2 * h + own) * work.side[0].panels * P + int64_t(k) * P;
    kernel_tile<P>(t, s, reference_key(layout, k) - layout.middle, e);
    for (int at = threadIdx.x; at < P * N; at += kThreads)
      gradient[at / N][at % N] =
          column + at % N < call.dv
              ? from[at / N * (call.dv + 1) + column + at % N] * work.inverse_z[a0 + at / N]
              : 0;
    __syncthreads();
#pragma unroll 2
    for (int a = 0; a < P; ++a) {
      const double x = e[a][b], y = x * t[a];
      rest += y * work.inverse_z[a0 + a] * pull[a];
#pragma unroll
      for (int c = 0; c < Lanes::kEach; ++c) {
        value[c] += x * gradient[a][Lanes::column(c)];
        slope[c] += y * gradient[a][Lanes::column(c)];
      }
    }
    __syncthreads();
  }
  T* values = static_cast<T*>(work.value_table) + key * call.dv;
  T* slopes = static_cast<T*>(work.slope_table) + key * call.dv;
#pragma unroll
  for (int c = 0; c < Lanes::kEach; ++c) {
    const int64_t at = column + Lanes::column(c);
    if (at >= call.dv) continue;
    values[at] = T(value[c]);
    slopes[at] = T(felt ? slope[c] : 0);
  }
  if (tile == 0 && threadIdx.x % Lanes::kGroups == 0) work.slope_last[key] = felt ? rest : 0;
}

// dv and ds.
template <class S>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    transform_key_gradient(const __grid_constant__ Work work) {
  using T = Arithmetic<S>;
  using Lanes = TokenLanes<S>;
  __shared__ __align__(16) Segment<T> segment;
  __shared__ __align__(16) NodeTable<S> table;
  __shared__ T grad_s[kSegment<T>];
  __shared__ T centre[Lanes::kColumns];
  const Gradient& g = work.g;
  const Call& call = g.call;
  const Side& side = work.side[1];
  const Cut<T> cut(work, side, true);
  if (cut.count == 0 || !work.served[cut.head]) return;
  weigh(work, side, cut, work.slope_last, segment,
        [&](int i, uint32_t, double rest) { grad_s[i] = T(rest); });
  const S* value = head_of<const S>(call, call.value, cut.head);
  S* grad_value = head_of<S>(call, g.grad_value, cut.head);
  const int64_t offset = (cut.head * side.panels + cut.panel) * kNodes<T> * call.dv;
  const WarpTokens<T> mine(cut.count);
  for (int64_t column = 0; column < call.dv; column += Lanes::kColumns) {
    load_centre(work, cut, column, centre);
    for (int slopes = 0; slopes < 2; ++slopes) {
      table.load(static_cast<const T*>(slopes ? work.slope_table : work.value_table) + offset,
                 column, call.dv);
      __syncthreads();
      for (int first = mine.first; first < mine.end; first += Lanes::kTokens) {
        T row[Lanes::kTokensEach][Lanes::kColumnsEach];
        table.spread(segment, first, row);
#pragma unroll
        for (int t = 0; t < Lanes::kTokensEach; ++t) {
          const int i = first + Lanes::token(t);
          const bool here = i < mine.end;
          T dot = 0;
#pragma unroll
          for (int c = 0; c < Lanes::kColumnsEach; c += Lanes::V) {
            const int64_t at = column + Lanes::column(c);
            if (!here) continue;
            if (!slopes) {
              write_columns<S, Lanes::V>(row[t] + c,
                                         grad_value + segment.token[i] * g.grad_value.row,
                                         g.grad_value, at, call.dv);
              continue;
            }
            T x[Lanes::V];
            read_columns<S, Lanes::V>(value + segment.token[i] * call.value.row, call.value, at,
                                      call.dv, x);
#pragma unroll
            for (int k = 0; k < Lanes::V; ++k)
              dot += (x[k] - centre[Lanes::column(c) + k]) * row[t][c + k];
          }
          if (!slopes) continue;
#pragma unroll
          for (int step = Lanes::kGroups / 2; step > 0; step /= 2)
            dot += __shfl_xor_sync(kAllLanes, dot, step);
          if (here && Lanes::group() == 0) grad_s[i] += dot;
        }
      }
      __syncthreads();
    }
  }
  S* grad_key = head_of<S>(call, g.grad_key, cut.head);
  for (int i = threadIdx.x; i < cut.count; i += kThreads)
    grad_key[segment.token[i] * g.grad_key.row] = narrow<S>(grad_s[i]);
}

}  // namespace cuda
}  // namespace boltzattn
