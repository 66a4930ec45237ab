// Layers: projections, layers whose values are projected at the nodes, layers of few tokens.
#include <tuple>

#include "cpu/ops/views.h"

namespace boltzattn {
namespace {

// (numbers [batch, outputs, n], extents [batch, outputs, 6])
std::tuple<Tensor, Tensor> project(Tensor x, Tensor weight, OptionalTensor bias) {
  Views view("x", x);
  Projection p{};
  describe_projection(view, x, weight, bias, p);
  Tensor out = view.result({p.outputs, p.n});
  Tensor extents = view.result({p.outputs, kExtentSize}, ScalarType::Double);
  p.out = view("out", out, p.outputs, p.n);
  p.extents = static_cast<Extent*>(extents.data_ptr());
  if (p.batch > 0) kernels().project(p);  // without a batch the views have no offsets
  return {out, extents};
}

// A layer whose values are projected at the nodes. query, key: [batch, heads, n, 1];
// value: [batch, n_k, d]; weight: [heads, dv, d]; weight_bias: [heads, dv]; out_bias: [dv];
// key_mask: [batch, n_k]. The results of the heads add up: out is [batch, n_q, dv].
constexpr uint64_t kBatch = 1, kHeads = 2, kNeither = 0;

Layer describe_layer(Views& view, BOLTZATTN_LAYER_PARAMETERS, Attention& call) {
  STD_TORCH_CHECK(query.dim() == 4, "boltzattn: query of a layer must have 4 dimensions");
  Layer layer{};
  call.heads = view.heads();
  call.n_q = query.size(2);
  call.n_k = size_from_last("key", key, 1);
  call.rank = 1;
  call.dv = size_from_last("weight", weight, 1);
  call.scale = scale;
  layer.columns = size_from_last("weight", weight, 0);
  layer.summed = query.size(1);
  STD_TORCH_CHECK(call.dv > 0 && layer.columns > 0, "boltzattn: weight must not be empty");
  call.query = view("query", query, call.n_q, 1);
  call.key = view("key", key, call.n_k, 1);
  call.value = view("value", value, call.n_k, layer.columns, Holds::kNumbers, kBatch);
  call.key_mask = view("key_mask", key_mask, kNone, call.n_k, Holds::kMask, kBatch);
  layer.weight = view("weight", weight, call.dv, layer.columns, Holds::kNumbers, kHeads);
  layer.weight_bias = view("weight_bias", weight_bias, kNone, call.dv, Holds::kNumbers, kHeads);
  layer.out_bias = view("out_bias", out_bias, kNone, call.dv, Holds::kNumbers, kNeither);
  if (extents)
    layer.extents = extents_of(view, call, *extents, {query.size(0), 2 * layer.summed, kExtentSize},
                               layer.summed);
  return layer;
}

// Sums over heads are at least fp32.
ScalarType sum_type(const Tensor& x, int64_t summed) {
  const bool narrow = x.scalar_type() != ScalarType::Double;
  return summed > 1 && narrow ? ScalarType::Float : x.scalar_type();
}

std::tuple<Tensor, bool> layer_forward(BOLTZATTN_LAYER_PARAMETERS) {
  Views view(query);
  Attention call{};
  const Layer layer = describe_layer(view, BOLTZATTN_LAYER_ARGUMENTS, call);
  Tensor out = in_huge_pages(torch::stable::new_empty(value, {query.size(0), call.n_q, call.dv},
                                                      sum_type(value, layer.summed)));
  call.out = view("out", out, call.n_q, call.dv, Holds::kMask, kBatch);
  return {out, kernels().layer_forward(call, layer)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, bool> layer_backward(Tensor grad_out,
                                                                BOLTZATTN_LAYER_PARAMETERS) {
  Views view(query);
  AttentionGradient g{};
  Layer layer = describe_layer(view, BOLTZATTN_LAYER_ARGUMENTS, g.call);
  Tensor grad_query = view.result({g.call.n_q, 1}), grad_key = view.result({g.call.n_k, 1});
  const ScalarType summed = sum_type(value, layer.summed);
  Tensor grad_value = in_huge_pages(torch::stable::new_empty(value, shape_of(value), summed));
  Tensor grad_weight = torch::stable::new_zeros(weight, shape_of(weight),
                                                query.size(0) > 1 ? summed : weight.scalar_type());
  g.grad_out = view("grad_out", grad_out, g.call.n_q, g.call.dv, Holds::kNumbers, kBatch);
  g.grad_query = view("grad_query", grad_query, g.call.n_q, 1);
  g.grad_key = view("grad_key", grad_key, g.call.n_k, 1);
  g.grad_value = view("grad_value", grad_value, g.call.n_k, layer.columns, Holds::kMask, kBatch);
  layer.grad_weight =
      view("grad_weight", grad_weight, g.call.dv, layer.columns, Holds::kMask, kHeads);
  const bool served = kernels().layer_backward(g, layer);
  return {grad_query, grad_key, grad_value, grad_weight, served};
}

// -- of few tokens

// Describes the inputs; `view` has the leading dimensions of x.
SmallLayer describe_small_layer(Views& view, BOLTZATTN_SELF_ATTENTION_PARAMETERS) {
  SmallLayer layer{};
  layer.batch = view.heads();
  layer.n = size_from_last("x", x, 1);
  layer.d = size_from_last("x", x, 0);
  layer.num_heads = num_heads;
  const int64_t numbers = size_from_last("w_q", w_q, 1), width = size_from_last("w_v", w_v, 1);
  STD_TORCH_CHECK(num_heads > 0 && numbers > 0 && width > 0 && layer.d > 0 &&
                      numbers % num_heads == 0 && width % num_heads == 0,
                  "boltzattn: num_heads must divide the rows of w_q and w_v, got ", num_heads);
  layer.rank = numbers / num_heads;
  layer.dv = width / num_heads;
  layer.d_out = w_o ? size_from_last("w_o", *w_o, 1) : width;
  STD_TORCH_CHECK(layer.d_out > 0, "boltzattn: w_o must not be empty");
  layer.scale = scale;
  layer.is_causal = is_causal;
  const auto weight = [&](const char* name, const OptionalTensor& w, int64_t rows,
                          int64_t columns) {
    return view(name, w, rows, columns, Holds::kNumbers, 0);
  };
  layer.x = view("x", x, layer.n, layer.d);
  layer.w_q = weight("w_q", w_q, numbers, layer.d);
  layer.w_k = weight("w_k", w_k, numbers, layer.d);
  layer.w_v = weight("w_v", w_v, width, layer.d);
  layer.w_o = weight("w_o", w_o, layer.d_out, width);
  layer.b_in = weight("b_in", b_in, kNone, 2 * numbers + width);
  layer.b_o = weight("b_o", b_o, kNone, layer.d_out);
  layer.key_mask = view("key_mask", key_mask, kNone, layer.n, Holds::kMask);
  return layer;
}

// (out, query_key, value, heads, lse), all but the first only if they are kept, and heads only if
// they are not out.
std::tuple<Tensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>
small_layer_forward(BOLTZATTN_SELF_ATTENTION_PARAMETERS, bool keep) {
  Views view("x", x);
  SmallLayer layer = describe_small_layer(view, BOLTZATTN_SELF_ATTENTION_ARGUMENTS);
  const int64_t width = layer.num_heads * layer.dv;
  Tensor out = view.result({layer.n, layer.d_out});
  layer.out = view("out", out, layer.n, layer.d_out);
  OptionalTensor query_key, value, heads, lse;
  if (keep) {
    query_key = view.result({layer.n, 2 * layer.num_heads * layer.rank});
    value = view.result({layer.n, width});
    lse = view.result({layer.num_heads, layer.n}, ScalarType::Double);
    if (w_o) heads = view.result({layer.n, width});
    layer.query_key = query_key->data_ptr();
    layer.value = value->data_ptr();
    layer.lse = static_cast<double*>(lse->data_ptr());
    layer.heads = heads ? heads->data_ptr() : nullptr;
  }
  kernels().small_layer_forward(layer);
  return {out, query_key, value, heads, lse};
}

// (grad_x, grad_w_qk, grad_w_v, grad_w_o, grad_b_in, grad_b_o), those that are wanted and exist.
std::tuple<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
           OptionalTensor>
small_layer_backward(Tensor grad_out, Tensor query_key, Tensor value, Tensor heads, Tensor lse,
                     BOLTZATTN_SELF_ATTENTION_PARAMETERS, bool want_x, bool want_weights) {
  Views view("x", x);
  SmallLayerGradient g{};
  SmallLayer& layer = g.layer;
  layer = describe_small_layer(view, BOLTZATTN_SELF_ATTENTION_ARGUMENTS);
  const int64_t numbers = layer.num_heads * layer.rank, width = layer.num_heads * layer.dv;
  const auto shape = [&](int64_t a, int64_t b) {
    std::vector<int64_t> lead = view.lead();
    lead.insert(lead.end(), {a, b});
    return lead;
  };
  layer.query_key =
      view.dense<void>("query_key", query_key, shape(layer.n, 2 * numbers), Holds::kNumbers);
  layer.value = view.dense<void>("value", value, shape(layer.n, width), Holds::kNumbers);
  layer.heads = view.dense<void>("heads", heads, shape(layer.n, width), Holds::kNumbers);
  layer.lse = view.dense<double>("lse", lse, shape(layer.num_heads, layer.n), Holds::kFloat64);
  g.grad_out = view("grad_out", grad_out, layer.n, layer.d_out);
  OptionalTensor grad_x, grad_w_qk, grad_w_v, grad_w_o, grad_b_in, grad_b_o;
  if (want_x) {
    grad_x = view.result({layer.n, layer.d});
    g.grad_x = view("grad_x", grad_x, layer.n, layer.d);
  }
  if (want_weights) {
    const auto gradient = [&](OptionalTensor& grad, int64_t rows, int64_t columns) {
      std::vector<int64_t> sizes;
      if (rows != kNone) sizes.push_back(rows);
      sizes.push_back(columns);
      grad = new_tensor(x, sizes);
      return view("gradient", grad, rows, columns, Holds::kNumbers, 0);
    };
    g.grad_w_qk = gradient(grad_w_qk, 2 * numbers, layer.d);
    g.grad_w_v = gradient(grad_w_v, width, layer.d);
    if (w_o) g.grad_w_o = gradient(grad_w_o, layer.d_out, width);
    if (b_in) g.grad_b_in = gradient(grad_b_in, kNone, 2 * numbers + width);
    if (b_o) g.grad_b_o = gradient(grad_b_o, kNone, layer.d_out);
  }
  kernels().small_layer_backward(g);
  return {grad_x, grad_w_qk, grad_w_v, grad_w_o, grad_b_in, grad_b_o};
}

}  // namespace
}  // namespace boltzattn

BOLTZATTN_DEFINE(m) {
  m.def("cpu_project" BOLTZATTN_PROJECT);
  m.def("cpu_layer_forward(" BOLTZATTN_LAYER ") -> (Tensor, bool)");
  m.def("cpu_layer_backward(Tensor grad_out, " BOLTZATTN_LAYER
        ") -> (Tensor, Tensor, Tensor, Tensor, bool)");
  m.def("cpu_small_layer_forward(" BOLTZATTN_SELF_ATTENTION
        ", bool keep) -> (Tensor, Tensor?, Tensor?, Tensor?, Tensor?)");
  m.def(
      "cpu_small_layer_backward(Tensor grad_out, Tensor query_key, Tensor value, Tensor heads, "
      "Tensor lse, " BOLTZATTN_SELF_ATTENTION
      ", bool want_x, bool want_weights) -> "
      "(Tensor?, Tensor?, Tensor?, Tensor?, Tensor?, Tensor?)");
}

BOLTZATTN_IMPLEMENT(CompositeExplicitAutograd, m) {
  using namespace boltzattn;
  m.impl("cpu_project", TORCH_BOX(&project));
  m.impl("cpu_layer_forward", TORCH_BOX(&layer_forward));
  m.impl("cpu_layer_backward", TORCH_BOX(&layer_backward));
  m.impl("cpu_small_layer_forward", TORCH_BOX(&small_layer_forward));
  m.impl("cpu_small_layer_backward", TORCH_BOX(&small_layer_backward));
}
