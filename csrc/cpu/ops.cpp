// torch's side of the CPU kernels: operators by the stable ABI.
#include <torch/csrc/stable/library.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <atomic>
#include <chrono>
#include <exception>
#include <list>
#include <tuple>
#include <vector>

#include "cpu/isa.h"
#include "schema.h"
#include "tensors.h"

namespace boltzattn {

int64_t thread_count() {
  return torch::stable::get_num_threads();
}

namespace {

// The tasks of one call of run_tasks, which some threads take one by one.
struct Region {
  const int64_t tasks;
  void (*const body)(void*, int64_t);
  void* const context;
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
  std::exception_ptr failure{};  // of the task that failed first

  void work();
};
thread_local Region* region = nullptr;  // whose tasks this thread runs

// torch hands no exception on from its threads, so the first one is kept.
void Region::work() {
  Region* const outer = region;
  region = this;
  try {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      pause_point();
      body(context, task);
    }
  } catch (...) {
    if (!stop.exchange(true)) failure = std::current_exception();
  }
  region = outer;
  if (!outer) trim_thread_scratch();
}

struct Stopped {};

std::atomic<InterruptCheck> interrupt_check{nullptr};

}  // namespace

void set_interrupt_check(InterruptCheck check) {
  interrupt_check = check;
}

void pause_point() {
  using Clock = std::chrono::steady_clock;
  constexpr auto kBetweenChecks = std::chrono::milliseconds(100);
  if (region && region->stop.load(std::memory_order_relaxed)) throw Stopped();
  const InterruptCheck check = interrupt_check.load(std::memory_order_relaxed);
  if (!check) return;
  thread_local Clock::time_point last;
  const Clock::time_point now = Clock::now();
  if (now - last < kBetweenChecks) return;
  last = now;
  check();
}

void run_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context) {
  const int64_t threads = std::min(tasks, thread_count());
  if (region) {  // inside a task: torch would run these on this thread, too
    for (int64_t task = 0; task < tasks; ++task) body(context, task);
    return;
  }
  Region here{tasks, body, context};
  if (threads <= 1) {
    here.work();
  } else {
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { here.work(); });
  }
  if (here.failure) std::rethrow_exception(here.failure);
}

namespace {

// Keeps the lists of head offsets alive while kernels run.
class Views : public Arguments {
 public:
  Views(const char* name, const Tensor& first) : Arguments(name, first, false) {}
  explicit Views(const Tensor& query) : Views("query", query) {}

  Matrix operator()(const char* name, const OptionalTensor& x, int64_t rows, int64_t columns,
                    Holds holds = Holds::kNumbers, uint64_t across = kAll) {
    if (!x) return {};
    const Strides found = strides(name, *x, rows, columns, holds, across);
    std::vector<int64_t> offset(1, 0);
    for (size_t d = 0; d < lead().size(); ++d) {
      std::vector<int64_t> next;
      next.reserve(offset.size() * size_t(lead()[d]));
      for (int64_t base : offset)
        for (int64_t i = 0; i < lead()[d]; ++i) next.push_back(base + i * found.lead[d]);
      offset.swap(next);
    }
    kept_.push_back(std::move(offset));
    return {x->data_ptr(), dtype_of(*x), kept_.back().data(), found.row, found.column};
  }

 private:
  std::list<std::vector<int64_t>> kept_;
};

// Asks for huge pages for a new tensor. A large tensor is fresh memory, and the first write to it
// spends most of its time in page faults; huge pages need a five-hundredth of them.
Tensor in_huge_pages(Tensor x) {
#ifdef __linux__
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x.data_ptr());
  const uintptr_t end = begin + uintptr_t(x.numel()) * x.element_size();
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = end / kHugePage * kHugePage;
  if (first + 4 * kHugePage <= last)  // advice only: failure changes nothing
    (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return x;
}

// Which problems an operator takes.
enum class Takes { kAll, kTransform, kStages, kScan, kVarlen };

// A problem, checked and described.
struct Described {
  Views view;
  AttentionGradient g{};
  Attention& call = g.call;

  Described(Takes takes, BOLTZATTN_PROBLEM_PARAMETERS) : view(query) {
    const Problem p{BOLTZATTN_PROBLEM_ARGUMENTS};
    describe(view, p, call);
    if (takes == Takes::kTransform) check_transform(p, false, kMostAxes);
    if (takes == Takes::kStages) check_transform(p, false, 1);
    if (takes == Takes::kScan) check_transform(p, true, 1);
    STD_TORCH_CHECK(takes != Takes::kVarlen || (!attn_mask && dropout_p == 0),
                    "boltzattn: varlen takes no attn_mask and no dropout");
    STD_TORCH_CHECK(!slopes || (takes != Takes::kTransform && takes != Takes::kStages),
                    "boltzattn: the transform takes slopes only with is_causal");
  }

  // Raises unless all that is known of the scores is their dot products.
  void check_dot(const char* what) const {
    STD_TORCH_CHECK(!call.slopes && !call.is_gaussian, "boltzattn: ", what,
                    " takes no slopes and no Gaussian score");
  }

  // Describes the results of forward, new or saved.
  void set_results(const Tensor& out, const Tensor& lse) {
    call.out = view("out", out, call.n_q, call.dv);
    call.lse = view("lse", lse, call.n_q, kNone, Holds::kFloat64);
    STD_TORCH_CHECK(lse.is_contiguous(), "boltzattn: lse must be contiguous");
  }
  std::tuple<Tensor, Tensor> new_results() {
    Tensor out = in_huge_pages(view.result({call.n_q, call.dv}));
    Tensor lse = view.result({call.n_q}, ScalarType::Double);
    set_results(out, lse);
    return {out, lse};
  }
};

template <void (*Kernels::*kernel)(const Attention&), Takes takes>
std::tuple<Tensor, Tensor> forward(BOLTZATTN_PROBLEM_PARAMETERS) {
  Described one(takes, BOLTZATTN_PROBLEM_ARGUMENTS);
  auto results = one.new_results();
  (kernels().*kernel)(one.call);
  return results;
}

template <void (*Kernels::*kernel)(const AttentionGradient&), Takes takes>
Gradients backward(BOLTZATTN_SAVED_PARAMETERS, BOLTZATTN_PROBLEM_PARAMETERS) {
  Described one(takes, BOLTZATTN_PROBLEM_ARGUMENTS);
  one.set_results(out, lse);
  Tensor grad_query = one.view.result({one.call.n_q, one.call.rank});
  Tensor grad_key = one.view.result({one.call.n_k, one.call.rank});
  Tensor grad_value = in_huge_pages(one.view.result({one.call.n_k, one.call.dv}));
  describe_gradients(one.view, grad_out, grad_lse, grad_query, grad_key, grad_value, one.g);
  auto [grad_key_mask, grad_slopes] =
      new_bias_gradients(one.view, Problem{BOLTZATTN_PROBLEM_ARGUMENTS}, one.g);
  (kernels().*kernel)(one.g);
  return {grad_query, grad_key, grad_value, grad_key_mask, grad_slopes};
}

// [heads, 7] in the order of TransformReport.
Tensor transform_report(BOLTZATTN_PROBLEM_PARAMETERS) {
  const Described one(Takes::kTransform, BOLTZATTN_PROBLEM_ARGUMENTS);
  Tensor reports =
      one.view.doubles({one.call.heads, int64_t(sizeof(TransformReport) / sizeof(double))});
  kernels().transform_report(one.call, static_cast<TransformReport*>(reports.data_ptr()));
  return reports;
}

// ---- sequences end to end ----

// The sequences of a call from where they begin, int64 [count + 1] each, and which of them the
// transform serves, bool [count].
std::vector<Sequence> sequences_of(const Described& one, const Tensor& query_starts,
                                   const Tensor& key_starts, const Tensor& by_transform) {
  const int64_t count = by_transform.numel();
  const bool* served = one.view.dense<bool>("by_transform", by_transform, {count}, Holds::kBool);
  const int64_t* query =
      one.view.dense<int64_t>("query_starts", query_starts, {count + 1}, Holds::kInt64);
  const int64_t* key =
      one.view.dense<int64_t>("key_starts", key_starts, {count + 1}, Holds::kInt64);
  STD_TORCH_CHECK(
      query[0] == 0 && query[count] == one.call.n_q && key[0] == 0 && key[count] == one.call.n_k,
      "boltzattn: sequences must cover all rows");
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n_q = query[i + 1] - query[i], n_k = key[i + 1] - key[i];
    STD_TORCH_CHECK(n_q >= 0 && n_k >= 0, "boltzattn: starts of sequences must not decrease");
    STD_TORCH_CHECK(!served[i] || one.call.rank <= (one.call.is_causal ? 1 : kMostAxes),
                    "boltzattn: the transform takes ranks up to ", kMostAxes, ", 1 if causal");
    if (served[i]) one.check_dot("the transform of a sequence");
    sequences.push_back({query[i], n_q, key[i], n_k, served[i]});
  }
  return sequences;
}

// Like `forward`; out has the strides it is given.
Tensor varlen_forward(BOLTZATTN_PROBLEM_PARAMETERS, Tensor query_starts, Tensor key_starts,
                      Tensor by_transform, Tensor out) {
  Described one(Takes::kVarlen, BOLTZATTN_PROBLEM_ARGUMENTS);
  const auto sequences = sequences_of(one, query_starts, key_starts, by_transform);
  Tensor lse = one.view.result({one.call.n_q}, ScalarType::Double);
  one.set_results(out, lse);
  kernels().varlen_forward(one.call, sequences.data(), int64_t(sequences.size()));
  return lse;
}

void varlen_backward(BOLTZATTN_SAVED_PARAMETERS, BOLTZATTN_PROBLEM_PARAMETERS, Tensor query_starts,
                     Tensor key_starts, Tensor by_transform, Tensor grad_query, Tensor grad_key,
                     Tensor grad_value, Tensor grad_key_mask, Tensor grad_slopes) {
  Described one(Takes::kVarlen, BOLTZATTN_PROBLEM_ARGUMENTS);
  const auto sequences = sequences_of(one, query_starts, key_starts, by_transform);
  one.set_results(out, lse);
  describe_gradients(one.view, grad_out, grad_lse, grad_query, grad_key, grad_value, one.g);
  describe_bias_gradients(one.view, Problem{BOLTZATTN_PROBLEM_ARGUMENTS}, grad_key_mask,
                          grad_slopes, one.g);
  kernels().varlen_backward(one.g, sequences.data(), int64_t(sequences.size()));
}

// ---- layers ----

// Reads the extents that the caller passes: `group` rows for queries, `group` rows for keys, and so
// on in turn. Raises unless every extent points at tokens that exist.
const Extent* extents_of(const Views& view, const Attention& call, const Tensor& x,
                         const std::vector<int64_t>& shape, int64_t group) {
  const Extent* extents =
      reinterpret_cast<const Extent*>(view.dense<double>("extents", x, shape, Holds::kFloat64));
  const auto within = [](double at, int64_t n) {
    return at >= 0 && at < double(n);
  };  // false for NaN
  for (int64_t i = 0; i < x.numel() / kExtentSize; ++i) {
    const Extent& e = extents[i];
    const int64_t n = i / group % 2 ? call.n_k : call.n_q;
    STD_TORCH_CHECK(
        within(e.count, n + 1) && (e.count == 0 || (within(e.at_low, n) && within(e.at_high, n))),
        "boltzattn: extents must count tokens and point at them");
  }
  return extents;
}

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

// ---- layers of few tokens ----

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

// ---- streams: see scan/stream.h ----

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

void check_layout(int64_t nodes, int64_t levels, double ratio) {
  STD_TORCH_CHECK(nodes >= kLeastNodes && nodes <= kMostNodes && levels >= 0 &&
                      levels <= kMostLevels && ratio > 1 && ratio <= kWidestRatio,
                  "boltzattn: nodes, levels and ratio must be those of a layout");
}

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

// ---- the transform in stages: see transform/stages.h ----

// The call of one process among several. The processes have agreed on the ranges.
struct Shared : Described {
  const SharedRange* ranges;
  int64_t sizes[2];  // the number of moments, and of query moments

  Shared(BOLTZATTN_PROBLEM_PARAMETERS, const Tensor& agreed)
      : Described(Takes::kStages, BOLTZATTN_PROBLEM_ARGUMENTS) {
    const int64_t size = sizeof(SharedRange) / sizeof(double);
    ranges = reinterpret_cast<const SharedRange*>(
        view.dense<double>("ranges", agreed, {call.heads, size}, Holds::kFloat64));
    for (int64_t h = 0; h < call.heads; ++h) check(ranges[h]);
    kernels().stage_sizes(call, ranges, sizes);
  }

  // Raises unless the transform itself could choose a layout for this range.
  static void check(const SharedRange& r) {
    constexpr double kMost = 1LL << 53;
    const auto counts = [](double x) { return x >= 0 && x <= kMost; };  // false for NaN
    STD_TORCH_CHECK(counts(r.keys) && counts(r.n_q) && counts(r.n_k) && r.level < kLevels,
                    "boltzattn: ranges must have counts of tokens and a level below ", kLevels);
    if (r.level < 0 || r.keys == 0 || r.n_q == 0) return;
    const Range range{r.t_min, r.t_max, r.s_min, r.s_max, int64_t(r.keys)};
    STD_TORCH_CHECK(
        r.t_min <= r.t_max && r.s_min <= r.s_max && largest_product(range) <= kLargestProduct,
        "boltzattn: ranges must be in order, with a product of at most ", kLargestProduct);
  }

  const double* moments(const Tensor& x) const {
    return view.dense<double>("moments", x, {sizes[0]}, Holds::kFloat64);
  }
};

// The extents of the queries and of the keys, [heads, 2, 6].
Tensor stage_extents(BOLTZATTN_PROBLEM_PARAMETERS) {
  const Described one(Takes::kStages, BOLTZATTN_PROBLEM_ARGUMENTS);
  Tensor extents = one.view.doubles({one.call.heads, 2, kExtentSize});
  kernels().stage_extents(one.call, static_cast<Extent*>(extents.data_ptr()));
  return extents;
}

// The numbers of elements of the moments and of the query moments.
std::tuple<int64_t, int64_t> stage_sizes(BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges) {
  const Shared one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  return {one.sizes[0], one.sizes[1]};
}

Tensor stage_moments(BOLTZATTN_PROBLEM_PARAMETERS, Tensor extents, Tensor ranges) {
  const Shared one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  const Extent* found =
      extents_of(one.view, one.call, extents, {one.call.heads, 2, kExtentSize}, 1);
  Tensor moments = one.view.doubles({one.sizes[0]});
  kernels().stage_moments(one.call, one.ranges, found, static_cast<double*>(moments.data_ptr()));
  return moments;
}

std::tuple<Tensor, Tensor, Tensor> stage_evaluate(BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges,
                                                  Tensor moments) {
  Shared one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  const auto [out, lse] = one.new_results();
  Tensor served = torch::stable::new_empty(query, {one.call.heads}, ScalarType::Bool);
  kernels().stage_evaluate(one.call, one.ranges, one.moments(moments),
                           static_cast<bool*>(served.data_ptr()));
  return {out, lse, served};
}

std::tuple<Tensor, Tensor> stage_query_moments(Tensor grad_out, OptionalTensor grad_lse,
                                               BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges,
                                               Tensor moments) {
  Shared one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  Tensor grad_query = one.view.result({one.call.n_q, 1});
  Tensor query_moments = one.view.doubles({one.sizes[1]});
  one.g.grad_out = one.view("grad_out", grad_out, one.call.n_q, one.call.dv);
  one.g.grad_lse = one.view("grad_lse", grad_lse, one.call.n_q, kNone, Holds::kFloat64);
  one.g.grad_query = one.view("grad_query", grad_query, one.call.n_q, 1);
  kernels().stage_query_moments(one.g, one.ranges, one.moments(moments),
                                static_cast<double*>(query_moments.data_ptr()));
  return {grad_query, query_moments};
}

std::tuple<Tensor, Tensor> stage_adjoint(BOLTZATTN_PROBLEM_PARAMETERS, Tensor ranges,
                                         Tensor moments, Tensor query_moments) {
  Shared one(BOLTZATTN_PROBLEM_ARGUMENTS, ranges);
  Tensor grad_key = one.view.result({one.call.n_k, 1});
  Tensor grad_value = in_huge_pages(one.view.result({one.call.n_k, one.call.dv}));
  one.g.grad_key = one.view("grad_key", grad_key, one.call.n_k, 1);
  one.g.grad_value = one.view("grad_value", grad_value, one.call.n_k, one.call.dv);
  kernels().stage_adjoint(
      one.g, one.ranges, one.moments(moments),
      one.view.dense<double>("query_moments", query_moments, {one.sizes[1]}, Holds::kFloat64));
  return {grad_key, grad_value};
}

// ---- a scan in stages: see scan/shards.h ----

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
      : Described(Takes::kScan, BOLTZATTN_PROBLEM_ARGUMENTS) {
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
  m.def("cpu_direct_forward" BOLTZATTN_FORWARD);
  m.def("cpu_direct_backward" BOLTZATTN_BACKWARD);
  m.def("cpu_transform_forward" BOLTZATTN_FORWARD);
  m.def("cpu_transform_backward" BOLTZATTN_BACKWARD);
  m.def("cpu_transform_report(" BOLTZATTN_PROBLEM ") -> Tensor");
  m.def("cpu_scan_forward" BOLTZATTN_FORWARD);
  m.def("cpu_scan_backward" BOLTZATTN_BACKWARD);
  m.def("cpu_varlen_forward(" BOLTZATTN_PROBLEM
        ", Tensor query_starts, Tensor key_starts, Tensor by_transform, Tensor(a!) out) -> Tensor");
  m.def("cpu_varlen_backward(" BOLTZATTN_SAVED BOLTZATTN_PROBLEM
        ", Tensor query_starts, Tensor key_starts, Tensor by_transform, Tensor(a!) grad_query, "
        "Tensor(b!) grad_key, Tensor(c!) grad_value, Tensor(d!) grad_key_mask, "
        "Tensor(e!) grad_slopes) -> ()");
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
  m.def("cpu_stream_append(" BOLTZATTN_CHANGED_STREAM
        ", Tensor key, Tensor value, float most) -> float");
  m.def("cpu_stream_query(" BOLTZATTN_STREAM
        ", Tensor query, int head_dim, float scale) -> (Tensor, Tensor, float)");
  m.def("cpu_stream_step(" BOLTZATTN_CHANGED_STREAM
        ", Tensor query, Tensor key, Tensor value, float scale, float most) -> "
        "(Tensor, float, float)");
  m.def("cpu_stage_extents(" BOLTZATTN_PROBLEM ") -> Tensor");
  m.def("cpu_stage_sizes(" BOLTZATTN_PROBLEM ", Tensor ranges) -> (int, int)");
  m.def("cpu_stage_moments(" BOLTZATTN_PROBLEM ", Tensor extents, Tensor ranges) -> Tensor");
  m.def("cpu_stage_evaluate(" BOLTZATTN_PROBLEM
        ", Tensor ranges, Tensor moments) -> (Tensor, Tensor, Tensor)");
  m.def("cpu_stage_query_moments(Tensor grad_out, Tensor? grad_lse, " BOLTZATTN_PROBLEM
        ", Tensor ranges, Tensor moments) -> (Tensor, Tensor)");
  m.def("cpu_stage_adjoint(" BOLTZATTN_PROBLEM
        ", Tensor ranges, Tensor moments, Tensor query_moments) -> (Tensor, Tensor)");
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
  m.impl("cpu_direct_forward", TORCH_BOX((&forward<&Kernels::direct_forward, Takes::kAll>)));
  m.impl("cpu_direct_backward", TORCH_BOX((&backward<&Kernels::direct_backward, Takes::kAll>)));
  m.impl("cpu_transform_forward",
         TORCH_BOX((&forward<&Kernels::transform_forward, Takes::kTransform>)));
  m.impl("cpu_transform_backward",
         TORCH_BOX((&backward<&Kernels::transform_backward, Takes::kTransform>)));
  m.impl("cpu_transform_report", TORCH_BOX(&transform_report));
  m.impl("cpu_scan_forward", TORCH_BOX((&forward<&Kernels::scan_forward, Takes::kScan>)));
  m.impl("cpu_scan_backward", TORCH_BOX((&backward<&Kernels::scan_backward, Takes::kScan>)));
  m.impl("cpu_varlen_forward", TORCH_BOX(&varlen_forward));
  m.impl("cpu_varlen_backward", TORCH_BOX(&varlen_backward));
  m.impl("cpu_project", TORCH_BOX(&project));
  m.impl("cpu_layer_forward", TORCH_BOX(&layer_forward));
  m.impl("cpu_layer_backward", TORCH_BOX(&layer_backward));
  m.impl("cpu_small_layer_forward", TORCH_BOX(&small_layer_forward));
  m.impl("cpu_small_layer_backward", TORCH_BOX(&small_layer_backward));
  m.impl("cpu_stream_append", TORCH_BOX(&stream_append));
  m.impl("cpu_stream_query", TORCH_BOX(&stream_query));
  m.impl("cpu_stream_step", TORCH_BOX(&stream_step));
  m.impl("cpu_stage_extents", TORCH_BOX(&stage_extents));
  m.impl("cpu_stage_sizes", TORCH_BOX(&stage_sizes));
  m.impl("cpu_stage_moments", TORCH_BOX(&stage_moments));
  m.impl("cpu_stage_evaluate", TORCH_BOX(&stage_evaluate));
  m.impl("cpu_stage_query_moments", TORCH_BOX(&stage_query_moments));
  m.impl("cpu_stage_adjoint", TORCH_BOX(&stage_adjoint));
  m.impl("cpu_shard_tables", TORCH_BOX(&shard_tables));
  m.impl("cpu_shard_forward", TORCH_BOX(&shard_forward));
  m.impl("cpu_shard_rows", TORCH_BOX(&shard_rows));
  m.impl("cpu_shard_backward", TORCH_BOX(&shard_backward));
}
