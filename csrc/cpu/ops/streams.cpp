// Streams: see scan/stream.h.
#include <tuple>

#include "cpu/ops/views.h"

namespace boltzattn {
namespace {

#define BOLTZATTN_STREAM_LAYOUT "Tensor positions, float t_most, float ratio, int nodes, int levels"
#define BOLTZATTN_STREAM                                             \
  "Tensor sums, Tensor z, Tensor ends, Tensor keys, Tensor values, " \
  "Tensor waiting, " BOLTZATTN_STREAM_LAYOUT
#define BOLTZATTN_CHANGED_STREAM                                      \
  "Tensor(a!) sums, Tensor(b!) z, Tensor(c!) ends, Tensor(d!) keys, " \
  "Tensor(e!) values, Tensor(f!) waiting, " BOLTZATTN_STREAM_LAYOUT
#define BOLTZATTN_STREAM_PARAMETERS                                               \
  Tensor sums, Tensor z, Tensor ends, Tensor keys, Tensor values, Tensor waiting, \
      Tensor positions, double t_most, double ratio, int64_t nodes, int64_t levels
#define BOLTZATTN_STREAM_ARGUMENTS \
  sums, z, ends, keys, values, waiting, positions, t_most, ratio, nodes, levels

Stream describe_stream(const Views& view, int64_t dv, BOLTZATTN_STREAM_PARAMETERS) {
  check_layout(nodes, levels, ratio);
  STD_TORCH_CHECK(t_most >= 0 && t_most < INFINITY,
                  "boltzattn: t_most must be finite and not negative");
  Stream s{scan_layout_of(t_most, int(nodes), int(levels), ratio)};
  const int64_t heads = view.heads(), features = s.layout.features();
  s.width = (dv + kStreamLanes - 1) / kStreamLanes * kStreamLanes;
  s.sums = view.dense<double>("sums", sums, {heads, features, s.width}, Holds::kFloat64);
  s.z = view.dense<double>("z", z, {heads, features}, Holds::kFloat64);
  s.ends = view.dense<double>("ends", ends, {heads, 2}, Holds::kFloat64);
  s.keys = view.dense<double>("keys", keys, {heads, kStreamRoom}, Holds::kFloat64);
  s.values = view.dense<double>("values", values, {heads, kStreamRoom, s.width}, Holds::kFloat64);
  s.waiting = view.dense<int64_t>("waiting", waiting, {1}, Holds::kInt64);
  STD_TORCH_CHECK(*s.waiting >= 0 && *s.waiting <= kStreamRoom,
                  "boltzattn: waiting must be from 0 to ", kStreamRoom, ", got ", *s.waiting);
  s.positions = view.dense<double>("positions", positions, {features}, Holds::kFloat64);
  return s;
}

void describe_tokens(Views& view, const Tensor& key, const Tensor& value, Attention& call) {
  call.heads = view.heads();
  call.n_k = size_from_last("key", key, 1);
  call.rank = 1;
  call.dv = size_from_last("value", value, 0);
  call.scale = 1;
  call.key = view("key", key, call.n_k, 1);
  call.value = view("value", value, call.n_k, call.dv);
}

// The largest extent of a head's keys, these included; NaN if a number is not finite.
double extent_with(const Attention& call, const Stream& s) {
  bool finite;
  double extent;
  kernels().stream_extent(call, s, &finite, &extent);
  return finite ? extent : NAN;
}

// Adds keys, and those that wait, only if their extent, which it returns, is within `most`.
double stream_append(BOLTZATTN_STREAM_PARAMETERS, Tensor key, Tensor value, double most) {
  Views view("key", key);
  Attention call{};
  describe_tokens(view, key, value, call);
  const Stream s = describe_stream(view, call.dv, BOLTZATTN_STREAM_ARGUMENTS);
  const double extent = extent_with(call, s);
  if (extent <= most) kernels().stream_append(call, s);
  return extent;
}

// Queries and their results; a step has no lse.
struct StreamQueries {
  Attention call{};
  Tensor out;

  StreamQueries(Views& view, const Tensor& query, int64_t head_dim, double scale)
      : out(view.result({size_from_last("query", query, 1), head_dim})) {
    call.heads = view.heads();
    call.n_q = size_from_last("query", query, 1);
    call.rank = 1;
    call.dv = head_dim;
    call.scale = scale;
    call.query = view("query", query, call.n_q, 1);
    call.out = view("out", out, call.n_q, head_dim);
  }
};

// (out, lse, largest |t|); no result if that is above t_most, or NaN.
std::tuple<Tensor, Tensor, double> stream_query(BOLTZATTN_STREAM_PARAMETERS, Tensor query,
                                                int64_t head_dim, double scale) {
  STD_TORCH_CHECK(head_dim > 0, "boltzattn: head_dim must be at least 1");
  Views view(query);
  StreamQueries of(view, query, head_dim, scale);
  Tensor lse = view.result({of.call.n_q}, ScalarType::Double);
  of.call.lse = view("lse", lse, of.call.n_q, kNone, Holds::kFloat64);
  const Stream s = describe_stream(view, head_dim, BOLTZATTN_STREAM_ARGUMENTS);
  const double largest = kernels().stream_largest(of.call);
  if (largest <= t_most) kernels().stream_query(of.call, s);
  return {of.out, lse, largest};
}

// Appends, then queries: (out, largest |t|, extent). Does neither if one of them would not.
std::tuple<Tensor, double, double> stream_step(BOLTZATTN_STREAM_PARAMETERS, Tensor query,
                                               Tensor key, Tensor value, double scale,
                                               double most) {
  Views view(query);
  Attention tokens{};
  describe_tokens(view, key, value, tokens);
  STD_TORCH_CHECK(tokens.dv > 0, "boltzattn: value must not be empty");
  const StreamQueries of(view, query, tokens.dv, scale);
  const Stream s = describe_stream(view, tokens.dv, BOLTZATTN_STREAM_ARGUMENTS);
  const double largest = kernels().stream_largest(of.call), extent = extent_with(tokens, s);
  if (largest <= t_most && extent <= most) kernels().stream_step(tokens, of.call, s);
  return {of.out, largest, extent};
}

}  // namespace
}  // namespace boltzattn

BOLTZATTN_DEFINE(m) {
  m.def("cpu_stream_append(" BOLTZATTN_CHANGED_STREAM
        ", Tensor key, Tensor value, float most) -> float");
  m.def("cpu_stream_query(" BOLTZATTN_STREAM
        ", Tensor query, int head_dim, float scale) -> (Tensor, Tensor, float)");
  m.def("cpu_stream_step(" BOLTZATTN_CHANGED_STREAM
        ", Tensor query, Tensor key, Tensor value, float scale, float most) -> "
        "(Tensor, float, float)");
}

BOLTZATTN_IMPLEMENT(CompositeExplicitAutograd, m) {
  using namespace boltzattn;
  m.impl("cpu_stream_append", TORCH_BOX(&stream_append));
  m.impl("cpu_stream_query", TORCH_BOX(&stream_query));
  m.impl("cpu_stream_step", TORCH_BOX(&stream_step));
}
