// A scan in stages: see scan/shards.h.
#include <algorithm>
#include <tuple>

#include "cpu/ops/views.h"

namespace boltzattn {
namespace {

#define BOLTZATTN_SHARD "int nodes, int levels, float ratio, Tensor t_most"
#define BOLTZATTN_SHARD_PARAMETERS int64_t nodes, int64_t levels, double ratio, Tensor t_most
#define BOLTZATTN_SHARD_ARGUMENTS nodes, levels, ratio, t_most
#define BOLTZATTN_EARLIER \
  "Tensor ends, Tensor keys, Tensor centres, Tensor table, Tensor slope_table"
#define BOLTZATTN_EARLIER_PARAMETERS \
  Tensor ends, Tensor keys, Tensor centres, Tensor table, Tensor slope_table
#define BOLTZATTN_EARLIER_ARGUMENTS ends, keys, centres, table, slope_table

// The call of one process among several, which has a shard of the sequence.
struct Sharded : Described {
  ScanShard shard{};
  int64_t features;

  Sharded(BOLTZATTN_PROBLEM_PARAMETERS, BOLTZATTN_SHARD_PARAMETERS)
      : Described(Takes::kShards, BOLTZATTN_PROBLEM_ARGUMENTS) {
    check_dot("a shard");
    STD_TORCH_CHECK(call.n_q == call.n_k, "boltzattn: a shard has as many queries as keys");
    check_layout(nodes, levels, ratio);
    shard.nodes = int(nodes);
    shard.levels = int(levels);
    shard.ratio = ratio;
    shard.t_most = numbers("t_most", t_most, {call.heads});
    for (int64_t h = 0; h < call.heads; ++h)
      STD_TORCH_CHECK(shard.t_most[h] >= 0 && shard.t_most[h] < INFINITY,
                      "boltzattn: t_most must be finite and not negative");
    features = (2 * levels + 1) * nodes;
  }

  double* numbers(const char* name, const Tensor& x, const std::vector<int64_t>& shape) const {
    return view.dense<double>(name, x, shape, Holds::kFloat64);
  }
  std::vector<int64_t> table_shape() const { return {call.heads, features, call.dv + 1}; }

  void set_earlier(BOLTZATTN_EARLIER_PARAMETERS) {
    shard.ends = numbers("ends", ends, {call.heads, 2});
    shard.keys = numbers("keys", keys, {call.heads, 3});
    shard.centres = numbers("centres", centres, {call.heads, 2, call.dv});
    shard.table = numbers("table", table, table_shape());
    const bool none = slope_table.dim() == 3 && slope_table.size(1) == 0;
    if (!none) shard.slopes = numbers("slope_table", slope_table, table_shape());
  }
  Tensor zeros(const std::vector<int64_t>& shape) const {
    Tensor made = view.doubles(shape);
    std::fill_n(static_cast<double*>(made.data_ptr()), made.numel(), 0.0);
    return made;
  }
};

// As ShardTables in python/boltzattn/transform/scan_shards.py.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> shard_tables(BOLTZATTN_PROBLEM_PARAMETERS,
                                                                BOLTZATTN_SHARD_PARAMETERS,
                                                                bool with_slopes) {
  Sharded one(BOLTZATTN_PROBLEM_ARGUMENTS, BOLTZATTN_SHARD_ARGUMENTS);
  const int64_t heads = one.call.heads, width = one.call.dv + 1;
  Tensor ends = one.view.doubles({heads, 2}), keys = one.zeros({heads, 3}),
         centres = one.zeros({heads, 2, width - 1}), table = one.zeros(one.table_shape()),
         slope_table = one.zeros({heads, with_slopes ? one.features : 0, width});
  const auto data = [](Tensor& x) { return static_cast<double*>(x.data_ptr()); };
  for (int64_t h = 0; h < heads; ++h) {
    data(ends)[2 * h] = -INFINITY;
    data(ends)[2 * h + 1] = INFINITY;
  }
  // Without earlier shards: the same as those of no keys.
  Tensor no_ends = one.view.doubles({heads, 2}), no_keys = one.zeros({heads, 3});
  std::copy_n(data(ends), 2 * heads, data(no_ends));
  one.shard.ends = data(no_ends);
  one.shard.keys = data(no_keys);
  one.shard.open = true;
  kernels().shard_tables(one.call, one.shard,
                         {data(ends), data(keys), data(centres), data(table),
                          with_slopes ? data(slope_table) : nullptr});
  return {ends, keys, centres, table, slope_table};
}

// (out, lse, z): z is that of the rows, relative to their top keys.
std::tuple<Tensor, Tensor, Tensor> shard_forward(BOLTZATTN_PROBLEM_PARAMETERS,
                                                 BOLTZATTN_SHARD_PARAMETERS,
                                                 BOLTZATTN_EARLIER_PARAMETERS) {
  Sharded one(BOLTZATTN_PROBLEM_ARGUMENTS, BOLTZATTN_SHARD_ARGUMENTS);
  one.set_earlier(BOLTZATTN_EARLIER_ARGUMENTS);
  const auto [out, lse] = one.new_results();
  Tensor z = one.view.doubles({one.call.heads, one.call.n_q});
  kernels().shard_forward(one.call, one.shard, static_cast<double*>(z.data_ptr()));
  return {out, lse, z};
}

// The table over the rows of the shard.
Tensor shard_rows(BOLTZATTN_SAVED_PARAMETERS, Tensor z, BOLTZATTN_PROBLEM_PARAMETERS,
                  BOLTZATTN_SHARD_PARAMETERS, BOLTZATTN_EARLIER_PARAMETERS) {
  Sharded one(BOLTZATTN_PROBLEM_ARGUMENTS, BOLTZATTN_SHARD_ARGUMENTS);
  one.set_earlier(BOLTZATTN_EARLIER_ARGUMENTS);
  one.set_results(out, lse);
  one.g.grad_out = one.view("grad_out", grad_out, one.call.n_q, one.call.dv);
  one.g.grad_lse = one.view("grad_lse", grad_lse, one.call.n_q, kNone, Holds::kFloat64);
  Tensor rows = one.zeros(one.table_shape());
  kernels().shard_rows(one.g, one.shard, one.numbers("z", z, {one.call.heads, one.call.n_q}),
                       static_cast<double*>(rows.data_ptr()));
  return rows;
}

std::tuple<Tensor, Tensor, Tensor> shard_backward(BOLTZATTN_SAVED_PARAMETERS,
                                                  BOLTZATTN_PROBLEM_PARAMETERS,
                                                  BOLTZATTN_SHARD_PARAMETERS,
                                                  BOLTZATTN_EARLIER_PARAMETERS,
                                                  OptionalTensor later) {
  Sharded one(BOLTZATTN_PROBLEM_ARGUMENTS, BOLTZATTN_SHARD_ARGUMENTS);
  one.set_earlier(BOLTZATTN_EARLIER_ARGUMENTS);
  STD_TORCH_CHECK(one.shard.slopes, "boltzattn: slope_table must be given for gradients");
  if (later) one.shard.later = one.numbers("later", *later, one.table_shape());
  one.shard.open = bool(later);
  one.set_results(out, lse);
  Tensor grad_query = one.view.result({one.call.n_q, 1});
  Tensor grad_key = one.view.result({one.call.n_k, 1});
  Tensor grad_value = in_huge_pages(one.view.result({one.call.n_k, one.call.dv}));
  describe_gradients(one.view, grad_out, grad_lse, grad_query, grad_key, grad_value, one.g);
  kernels().shard_backward(one.g, one.shard);
  return {grad_query, grad_key, grad_value};
}

}  // namespace
}  // namespace boltzattn

BOLTZATTN_DEFINE(m) {
  m.def("cpu_shard_tables(" BOLTZATTN_PROBLEM ", " BOLTZATTN_SHARD
        ", bool with_slopes) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("cpu_shard_forward(" BOLTZATTN_PROBLEM ", " BOLTZATTN_SHARD ", " BOLTZATTN_EARLIER
        ") -> (Tensor, Tensor, Tensor)");
  m.def("cpu_shard_rows(" BOLTZATTN_SAVED "Tensor z, " BOLTZATTN_PROBLEM ", " BOLTZATTN_SHARD
        ", " BOLTZATTN_EARLIER ") -> Tensor");
  m.def("cpu_shard_backward(" BOLTZATTN_SAVED BOLTZATTN_PROBLEM ", " BOLTZATTN_SHARD
        ", " BOLTZATTN_EARLIER ", Tensor? later) -> (Tensor, Tensor, Tensor)");
}

BOLTZATTN_IMPLEMENT(CompositeExplicitAutograd, m) {
  using namespace boltzattn;
  m.impl("cpu_shard_tables", TORCH_BOX(&shard_tables));
  m.impl("cpu_shard_forward", TORCH_BOX(&shard_forward));
  m.impl("cpu_shard_rows", TORCH_BOX(&shard_rows));
  m.impl("cpu_shard_backward", TORCH_BOX(&shard_backward));
}
