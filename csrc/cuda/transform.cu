// Launchers of the transform.
#include "cuda/dispatch.cuh"
#include "cuda/launch.h"
#include "cuda/transform/adjoint.cuh"
#include "cuda/transform/core.cuh"
#include "cuda/transform/evaluate.cuh"
#include "cuda/transform/extents.cuh"
#include "cuda/transform/moments.cuh"
#include "cuda/transform/sort.cuh"

namespace boltzattn::cuda {
namespace {

// The largest numbers of panels: enough for every B that the transform accepts, but with at most
// half as many query nodes as queries. Heads that need more go to `direct`.
void set_capacities(Work& work) {
  const Call& call = work.g.call;
  const Range widest{-kLargestProduct, kLargestProduct, 0, 1, call.n_k > 1 ? call.n_k : 1};
  const Layout layout = make_layout(widest, int(work.nodes), int(work.nodes), work.precision);
  const int64_t half = (call.n_q > 2048 ? call.n_q / 2 : 1024) / work.nodes;
  // One more than needed, because host and device differ in the last bits.
  work.side[0].panels = least(layout.query.panels + 1, least(half, kMostPanels));
  work.side[1].panels = least(layout.key.panels + 1, kMostPanels);
}

// Tokens of a head are numbered by 32 bits.
bool too_long(const Call& call) {
  return call.n_q > UINT32_MAX || call.n_k > UINT32_MAX;
}

Work plan(const Gradient& g) {
  Work work{};
  work.g = g;
  const Call& call = g.call;
  const bool wide = call.query.dtype == DType::kFloat64;
  work.nodes = cuda_nodes(call.query.dtype);
  work.precision = cuda_precision_of(call.query.dtype);
  work.extent_chunks = ceil_div(call.n_q > call.n_k ? call.n_q : call.n_k, kExtentChunk);
  if (work.extent_chunks == 0) work.extent_chunks = 1;
  set_capacities(work);
  const int64_t segment = wide ? kSegment<double> : kSegment<float>;
  for (int k = 0; k < 2; ++k) {
    Side& side = work.side[k];
    side.n = k ? call.n_k : call.n_q;
    side.segments = ceil_div(side.n, segment) + side.panels;
    side.chunks = ceil_div(side.n, kSortChunk);
  }
  return work;
}

// Visits the pieces of the workspace: stores their sizes, or assigns their addresses.
struct Pieces {
  void* const* address;
  int64_t* bytes;
  int count;

  template <class T>
  void take(T*& pointer, int64_t size, int64_t element = sizeof(T)) {
    if (bytes) bytes[count] = size * element;
    if (address) pointer = static_cast<T*>(address[count]);
    ++count;
  }
  void take(void*& pointer, int64_t size, int64_t element) {
    char* typed = nullptr;
    take(typed, size, element);
    if (address) pointer = typed;
  }
};

int lay_out(Work& work, bool backward, Pieces pieces) {
  Call& call = work.g.call;
  const int64_t heads = call.heads, dv = call.dv, nodes = work.nodes;
  const int64_t element = arithmetic_bytes(call.query.dtype);
  const int64_t query_nodes = heads * work.side[0].panels * nodes;
  const int64_t key_nodes = heads * work.side[1].panels * nodes;
  pieces.take(work.report, heads * 7);  // first: it is a result
  pieces.take(work.served, heads);
  pieces.take(work.parts, heads * work.extent_chunks);
  pieces.take(work.heads, heads);
  pieces.take(work.basis, heads * 2 * nodes);
  pieces.take(work.centre, heads * 2 * dv);
  pieces.take(work.extremes, heads * work.side[1].panels * 2 * kEllipses);
  pieces.take(work.log_factor, heads * kEllipses);
  pieces.take(work.decay, heads * kLastCoefficients * nodes);
  pieces.take(work.table, query_nodes * dv, element);
  pieces.take(work.last, query_nodes);
  pieces.take(work.inverse_z, query_nodes);
  pieces.take(work.key_error, query_nodes);
  const int64_t tiles = ceil_div(dv, kThreads / nodes * 8);
  pieces.take(work.bounds, heads * work.side[0].panels * tiles * 2);
  for (int k = 0; k < 2; ++k) {
    Side& side = work.side[k];
    pieces.take(side.counts, heads * side.chunks * side.panels);
    pieces.take(side.panel_start, heads * (side.panels + 1));
    pieces.take(side.segment_start, heads * (side.panels + 1));
    pieces.take(side.order, heads * side.n, 2 * element);
    pieces.take(side.node, heads * side.panels * nodes);
    const bool sums = k == 1 || backward;
    pieces.take(side.partial, sums ? heads * side.segments * nodes * (dv + 1) : 0, element);
    pieces.take(side.sums, sums ? heads * side.panels * nodes * (dv + 1) : 0);
  }
  pieces.take(call.totals, totals_bytes(call, backward), 1);
  pieces.take(work.g.row_norms, backward ? row_norms_bytes(call) : 0, 1);
  pieces.take(work.node_out, backward ? query_nodes * dv : 0);
  pieces.take(work.pull, backward ? 2 * query_nodes : 0);
  pieces.take(work.value_table, backward ? key_nodes * dv : 0, element);
  pieces.take(work.slope_table, backward ? key_nodes * dv : 0, element);
  pieces.take(work.slope_last, backward ? key_nodes : 0);
  call.served = work.served;
  return pieces.count;
}

struct Stages : Sequence<Work> {
  template <class T>
  void sort(int64_t keys) {
    argument.keys = keys;
    const int64_t blocks = argument.g.call.heads * ceil_div(argument.side[keys].chunks, kWarps);
    run(transform_sort<T, false>, blocks);
    run(transform_scan<T>, argument.g.call.heads);
    run(transform_sort<T, true>, blocks);
  }
  template <class T>
  void join(int64_t keys) {
    argument.keys = keys;
    const int64_t tiles = ceil_div(argument.nodes * (argument.g.call.dv + 1), kThreads);
    run(transform_join<T>, argument.g.call.heads * argument.side[keys].panels * tiles);
  }
};

template <class S, bool Slopes>
void build(Stages& stages) {
  using T = Arithmetic<S>;
  const Work& work = stages.argument;
  const int64_t heads = work.g.call.heads;
  stages.run(transform_extents, heads * work.extent_chunks);
  stages.run(transform_layout, heads);
  stages.template sort<T>(0);
  stages.template sort<T>(1);
  stages.run(transform_moments<S>, heads * work.side[1].segments);
  stages.template join<T>(1);
  stages.run(transform_core<T, Slopes>,
             heads * work.side[0].panels * ceil_div(work.g.call.dv, CoreLanes<T>::kColumns));
  stages.run(transform_key_error, ceil_div(heads * work.side[0].panels * work.nodes, kThreads));
  stages.run(transform_certify, heads);
}

}  // namespace

int transform_pieces(const Call& call, bool backward, int64_t* bytes) {
  Gradient g{};
  g.call = call;
  Work work = plan(g);
  return lay_out(work, backward, {nullptr, bytes, 0});
}

cudaError_t transform_forward(const Call& call, void* const* pieces, cudaStream_t stream) {
  if (too_long(call)) return cudaErrorInvalidValue;
  Gradient g{};
  g.call = call;
  Work work = plan(g);
  lay_out(work, false, {pieces, nullptr, 0});
  Stages stages{{work, stream}};
  with_dtype(call.query.dtype, [&](auto zero) {
    using S = decltype(zero);
    build<S, false>(stages);
    stages.run(transform_evaluate<S>, call.heads * work.side[0].segments);
    return cudaSuccess;
  });
  return stages.error == cudaSuccess ? direct_forward(work.g.call, stream) : stages.error;
}

cudaError_t transform_backward(const Gradient& g, void* const* pieces, cudaStream_t stream) {
  if (too_long(g.call)) return cudaErrorInvalidValue;
  Work work = plan(g);
  lay_out(work, true, {pieces, nullptr, 0});
  Stages stages{{work, stream}};
  const Call& call = work.g.call;
  if (call.key_mask.data) {
    // Masked keys are on no panel, so no kernel writes their gradients.
    const int64_t rows = call.heads * call.n_k, element = element_bytes(call.query.dtype);
    if (rows > 0) {
      stages.error = cudaMemsetAsync(g.grad_key.data, 0, rows * element, stream);
      if (stages.error == cudaSuccess)
        stages.error = cudaMemsetAsync(g.grad_value.data, 0, rows * call.dv * element, stream);
    }
  }
  with_dtype(call.query.dtype, [&](auto zero) {
    using S = decltype(zero);
    using T = Arithmetic<S>;
    build<S, true>(stages);
    stages.run(transform_query_moments<S>, call.heads * work.side[0].segments);
    stages.template join<T>(0);
    stages.run(transform_pull, ceil_div(call.heads * work.side[0].panels * work.nodes, kWarps));
    stages.run(transform_adjoint<T>,
               call.heads * work.side[1].panels * ceil_div(call.dv, CoreLanes<T>::kColumns));
    stages.run(transform_evaluate_keys<S>, call.heads * work.side[1].segments);
    return cudaSuccess;
  });
  return stages.error == cudaSuccess ? direct_backward(work.g, stream) : stages.error;
}

}  // namespace boltzattn::cuda
