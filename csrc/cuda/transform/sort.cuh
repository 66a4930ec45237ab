// Tokens in the order of their panels. No torch.
#pragma once

#include "cuda/transform/head.cuh"

namespace boltzattn::cuda {

constexpr int64_t kSortChunk = 1024;  // tokens of a warp

struct Spot {
  int panel;
  double place;
};
// What a token's panel depends on. It is a copy, so that the layout is read once.
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

// A warp takes a chunk, 32 tokens at a time. `Place`: tokens are written where the scan has made
// room for them; otherwise they are counted.
template <class T, bool Place>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    transform_sort(const __grid_constant__ Work work) {
  __shared__ uint32_t table[kWarps][kMostPanels];
  const Call& call = work.g.call;
  const Side& side = work.side[work.keys];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t groups = ceil_div(side.chunks, kWarps), h = blockIdx.x / groups;
  const int64_t chunk = blockIdx.x % groups * kWarps + warp;
  if (chunk >= side.chunks || !work.heads[h].served) return;
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
  if (!head.served) return;
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

}  // namespace boltzattn::cuda
