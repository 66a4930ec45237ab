// Runs the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.
//
// Tensors are heap blocks of exactly the size that their shape and strides ask for, so a kernel
// that reads or writes one element too far is caught. Whether results are right is the business of
// the Python tests; here finite inputs must give results that are finite and written everywhere,
// and the same for every instruction set. The sizes are on either side of the kernels' tiles and
// chunks; the rest of a call (dtypes, masks, strides, ...) is drawn at random from a fixed seed.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/isa.h"

extern "C" const char* __asan_default_options() {
  return "abort_on_error=1";
}
extern "C" const char* __ubsan_default_options() {
  return "abort_on_error=1:print_stacktrace=1";
}

// -- what cpu/threads.cpp gives the kernels, without torch

namespace boltzattn {

namespace wide {
extern const Kernels kTable;  // wide.cpp
}

static int64_t threads = 1;

int64_t thread_count() {
  return threads;
}

void pause_point() {}

double transform_budget() {
  return 1e9;
}

void run_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t task; (task = next.fetch_add(1)) < tasks;) body(context, task);
  };
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < std::min(threads, tasks); ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace boltzattn

namespace {

using namespace boltzattn;

std::string now_running;  // printed when a sanitizer aborts

void fail(const char* what) {
  std::fprintf(stderr, "%s\n  in: %s\n", what, now_running.c_str());
  std::exit(1);
}

std::mt19937_64 generator(0);

int64_t below(int64_t n) {
  return int64_t(generator() % uint64_t(n));
}
template <class T>
T one_of(std::initializer_list<T> choices) {
  return choices.begin()[below(int64_t(choices.size()))];
}

// -- tensors
// ---------------------------------------------------------------------------------------

enum Strides { kContiguous, kTransposed, kGaps, kHeadsInside, kSharedHead, kSharedRow };

int64_t bytes_of(DType dtype) {
  return dtype == DType::kFloat64   ? 8
         : dtype == DType::kFloat32 ? 4
         : dtype == DType::kBool    ? 1
                                    : 2;
}

// [heads, rows, columns], not one byte larger than its strides need.
struct Tensor {
  DType dtype;
  int64_t size = 0;  // elements
  std::unique_ptr<unsigned char[]> bytes;
  std::vector<int64_t> head;
  int64_t row, column;

  Tensor(int64_t heads, int64_t rows, int64_t columns, DType type, int layout) : dtype(type) {
    int64_t step = rows * columns;
    row = columns;
    column = 1;
    switch (layout) {
      case kTransposed:
        row = 1, column = rows;
        break;
      case kGaps:
        row = 2 * columns + 3, column = 2, step = rows * row + 5;
        break;
      case kHeadsInside:
        row = heads * columns, step = columns;
        break;
      case kSharedHead:
        step = 0;
        break;
      case kSharedRow:
        row = 0, step = columns;
        break;
    }
    for (int64_t h = 0; h < heads; ++h) head.push_back(h * step);
    if (heads * rows * columns > 0)
      size = (heads - 1) * step + (rows - 1) * row + (columns - 1) * column + 1;
    bytes.reset(new unsigned char[size_t(size * bytes_of(dtype))]);
    // NaN in every format: what a kernel leaves unwritten, or has no business to read, shows.
    std::memset(bytes.get(), 0xff, size_t(size * bytes_of(dtype)));
  }

  Matrix matrix() const { return {bytes.get(), dtype, head.data(), row, column}; }

  void set(int64_t i, double x) {
    unsigned char* to = bytes.get() + i * bytes_of(dtype);
    const float single = float(x);
    uint32_t bits;
    std::memcpy(&bits, &single, sizeof bits);
    const auto upper = uint16_t(bits >> 16);
    switch (dtype) {
      case DType::kFloat64:
        std::memcpy(to, &x, 8);
        break;
      case DType::kFloat32:
        std::memcpy(to, &single, 4);
        break;
      case DType::kBFloat16:
        std::memcpy(to, &upper, 2);
        break;
      case DType::kFloat16: {
        // Truncated: nobody looks at the last digits. Exponents outside fp16's become 0 or inf.
        const int exponent = int(bits >> 23 & 255) - 112;
        uint16_t half = uint16_t(bits >> 16 & 0x8000);
        if (exponent >= 31) {
          half = uint16_t(half | 0x7c00 | (std::isnan(single) ? 1 : 0));
        } else if (exponent > 0) {
          half = uint16_t(half | exponent << 10 | (bits >> 13 & 0x3ff));
        }
        std::memcpy(to, &half, 2);
        break;
      }
      case DType::kBool:
        *to = x != 0;
        break;
    }
  }

  // Of fp64 and fp32.
  double get(int64_t i) const {
    return dtype == DType::kFloat64 ? reinterpret_cast<const double*>(bytes.get())[i]
                                    : double(reinterpret_cast<const float*>(bytes.get())[i]);
  }

  bool finite(int64_t i) const {
    const unsigned char* from = bytes.get() + i * bytes_of(dtype);
    double wide;
    float single;
    uint16_t narrow;
    switch (dtype) {
      case DType::kFloat64:
        std::memcpy(&wide, from, 8);
        return std::isfinite(wide);
      case DType::kFloat32:
        std::memcpy(&single, from, 4);
        return std::isfinite(single);
      default:
        std::memcpy(&narrow, from, 2);
        const int exponents = dtype == DType::kBFloat16 ? 0x7f80 : 0x7c00;
        return (narrow & exponents) != exponents;
    }
  }

  void expect_finite(int64_t heads, int64_t rows, int64_t columns) const {
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j)
          if (!finite(head[size_t(h)] + i * row + j * column))
            fail("a result is not finite, or was not written");
  }

  Tensor& normal(double width) {
    std::normal_distribution<double> draw(0, width);
    for (int64_t i = 0; i < size; ++i) set(i, draw(generator));
    return *this;
  }
  Tensor& sometimes(double often, double rarely) {
    for (int64_t i = 0; i < size; ++i) set(i, below(4) ? often : rarely);
    return *this;
  }
  Tensor& spoil() {
    for (int64_t i = below(7); i < size; i += 1 + below(40))
      set(i, one_of<double>({NAN, INFINITY, -INFINITY, 1e308, -3e38, 1e-310, 0.0}));
    return *this;
  }
};

// -- calls
// -----------------------------------------------------------------------------------------

enum class Mask { kNone, kAttnBool, kAttnFloat, kKeyBool, kKeyFloat, kKeyBias, kCausal, kNothing };
const char* const kMaskNames[] = {"none",     "attn bool", "attn float", "key bool",
                                  "key -inf", "key bias",  "causal",     "nothing seen"};

struct Case {
  const Kernels* kernels;
  bool transform;
  int64_t heads, n_q, n_k, rank, dv;
  DType dtype;
  Mask mask;
  double scale, dropout_p;
  bool spoiled;
  bool is_gaussian, slopes;
  bool scan;

  std::string describe() const {
    char text[256];
    std::snprintf(text, sizeof text,
                  "%s %s, %d heads, n_q %d, n_k %d, rank %d, dv %d, %d-byte dtype %d, mask %s, "
                  "scale %g, dropout %g, %s%s%s, %d threads",
                  kernels->name,
                  scan        ? "scan"
                  : transform ? "transform"
                              : "direct",
                  int(heads), int(n_q), int(n_k), int(rank), int(dv), int(bytes_of(dtype)),
                  int(dtype), kMaskNames[int(mask)], scale, dropout_p,
                  spoiled ? "NaN and inf" : "finite", is_gaussian ? ", Gaussian" : "",
                  slopes ? ", slopes" : "", int(threads));
    return text;
  }
};

int any_layout() {
  return int(below(6));
}
int writable_layout() {
  return int(below(4));
}

void run(const Case& c) {
  threads = one_of<int64_t>({1, 3});
  now_running = c.describe();
  Tensor query(c.heads, c.n_q, c.rank, c.dtype, any_layout());
  Tensor key(c.heads, c.n_k, c.rank, c.dtype, any_layout());
  Tensor value(c.heads, c.n_k, c.dv, c.dtype, any_layout());
  Tensor grad_out(c.heads, c.n_q, c.dv, c.dtype, any_layout());
  for (Tensor* x : {&query, &key, &value, &grad_out}) {
    x->normal(1);
    if (c.spoiled) x->spoil();
  }
  Tensor out(c.heads, c.n_q, c.dv, c.dtype, writable_layout());
  Tensor lse(c.heads, c.n_q, 1, DType::kFloat64, kContiguous);
  Tensor seed(c.heads, 1, 1, DType::kFloat64, kContiguous);  // 8 bytes of anything

  Attention call{};
  call.heads = c.heads;
  call.n_q = c.n_q;
  call.n_k = c.n_k;
  call.rank = c.rank;
  call.dv = c.dv;
  call.scale = c.scale;
  call.dropout_p = c.dropout_p;
  call.is_causal = c.mask == Mask::kCausal;
  call.is_gaussian = c.is_gaussian;
  Tensor slopes(c.heads, 1, 1, DType::kFloat64, any_layout());
  if (c.slopes) call.slopes = slopes.normal(0.1).matrix();
  call.query = query.matrix();
  call.key = key.matrix();
  call.value = value.matrix();
  if (c.dropout_p > 0) call.seed = seed.normal(1).matrix();
  call.out = out.matrix();
  call.lse = lse.matrix();

  const bool boolean =
      c.mask == Mask::kAttnBool || c.mask == Mask::kKeyBool || c.mask == Mask::kNothing;
  const DType mask_dtype =
      boolean ? DType::kBool : one_of({c.dtype, DType::kFloat32, DType::kFloat64});
  Tensor attn_mask(c.heads, c.n_q, c.n_k, mask_dtype, any_layout());
  Tensor key_mask(c.heads, 1, c.n_k, mask_dtype, any_layout());
  switch (c.mask) {
    case Mask::kAttnBool:
      call.attn_mask = attn_mask.sometimes(1, 0).matrix();
      break;
    case Mask::kAttnFloat:
      call.attn_mask = attn_mask.sometimes(-0.5, -INFINITY).matrix();
      break;
    case Mask::kKeyBool:
      call.key_mask = key_mask.sometimes(0, 1).matrix();
      break;
    case Mask::kKeyFloat:
      call.key_mask = key_mask.sometimes(0, -INFINITY).matrix();
      break;
    case Mask::kKeyBias:
      call.key_mask = key_mask.normal(1).matrix();
      break;
    case Mask::kNothing:
      call.key_mask = key_mask.sometimes(1, 1).matrix();
      break;
    case Mask::kNone:
    case Mask::kCausal:
      break;
  }

  if (c.scan) call.is_causal = true;
  (c.scan        ? c.kernels->scan_forward
   : c.transform ? c.kernels->transform_forward
                 : c.kernels->direct_forward)(call);
  if (c.transform) {
    std::vector<TransformReport> reports(size_t(c.heads));
    c.kernels->transform_report(call, reports.data());
  }

  Tensor grad_query(c.heads, c.n_q, c.rank, c.dtype, writable_layout());
  Tensor grad_key(c.heads, c.n_k, c.rank, c.dtype, writable_layout());
  Tensor grad_value(c.heads, c.n_k, c.dv, c.dtype, writable_layout());
  Tensor grad_lse(c.heads, c.n_q, 1, DType::kFloat64, any_layout());
  AttentionGradient gradient{};
  gradient.call = call;
  gradient.grad_out = grad_out.matrix();
  if (below(2)) gradient.grad_lse = grad_lse.normal(1).matrix();
  gradient.grad_query = grad_query.matrix();
  gradient.grad_key = grad_key.matrix();
  gradient.grad_value = grad_value.matrix();
  const DType sums = c.dtype == DType::kFloat64 ? c.dtype : DType::kFloat32;
  Tensor grad_key_mask(c.heads, 1, c.n_k, sums, writable_layout());
  Tensor grad_slopes(c.heads, 1, 1, DType::kFloat64, writable_layout());
  if (call.key_mask && !boolean) gradient.grad_key_mask = grad_key_mask.matrix();
  if (c.slopes) gradient.grad_slopes = grad_slopes.matrix();
  (c.scan        ? c.kernels->scan_backward
   : c.transform ? c.kernels->transform_backward
                 : c.kernels->direct_backward)(gradient);

  if (c.spoiled || std::fabs(c.scale) > 100) return;  // gradients may overflow
  out.expect_finite(c.heads, c.n_q, c.dv);
  grad_query.expect_finite(c.heads, c.n_q, c.rank);
  grad_key.expect_finite(c.heads, c.n_k, c.rank);
  grad_value.expect_finite(c.heads, c.n_k, c.dv);
  if (gradient.grad_key_mask) grad_key_mask.expect_finite(c.heads, 1, c.n_k);
  if (gradient.grad_slopes) grad_slopes.expect_finite(c.heads, 1, 1);
  for (int64_t i = 0; i < c.heads * c.n_q; ++i)
    if (std::isnan(reinterpret_cast<double*>(lse.bytes.get())[i]))
      fail("lse is NaN, or was not written");
}

const DType kDTypes[] = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16};

Case drawn(const Kernels& kernels, bool transform, int64_t n_q, int64_t n_k) {
  Case c{};
  c.kernels = &kernels;
  c.transform = transform;
  c.heads = one_of<int64_t>({1, 1, 3});
  c.n_q = n_q;
  c.n_k = n_k;
  c.dv = one_of<int64_t>({1, 3, 8, 16, 17, 64, 65});
  c.dtype = kDTypes[below(4)];
  c.spoiled = below(5) == 0;
  if (transform) {
    c.rank = 1;
    c.mask = one_of({Mask::kNone, Mask::kKeyBool, Mask::kKeyFloat, Mask::kKeyBias, Mask::kNothing});
    // From one panel to more than the transform takes.
    c.scale = one_of({0.0, 1e-3, -1.0, 1.0, 30.0, 1e3, 1e6, 1e9});
    c.is_gaussian = below(3) == 0;
    c.scan = !below(3);
    c.slopes = c.scan && below(2);
    if (!c.slopes && below(2)) {
      c.rank = one_of<int64_t>({2, 2, 3, 4});
      // Cores of more panels take too long under sanitizers.
      c.scale =
          c.rank == 2 ? one_of({0.0, 1e-3, -1.0, 1.0, 2.0}) : one_of({0.0, 1e-3, -0.05, 0.05});
    }
  } else {
    c.rank = one_of<int64_t>({1, 2, 3, 5, 8, 16, 17, 33});
    c.mask = Mask(below(8));
    c.scale = one_of({0.0, -0.3, 1.0, 40.0});
    c.dropout_p = one_of({0.0, 0.0, 0.3, 1.0});
    c.is_gaussian = below(2);
    c.slopes = below(2);
  }
  return c;
}

// A layer: the heads of a batch share values, and their results add up in one output.
void run_layer(const Kernels& kernels, int64_t n) {
  threads = one_of<int64_t>({1, 3});
  const int64_t batch = 2, heads = 3, d = one_of<int64_t>({1, 7, 64, 70, 300});
  const int64_t d_out = one_of<int64_t>({1, 5, 64, 131});
  const DType dtype = kDTypes[below(4)], sum_dtype = one_of({dtype, DType::kFloat32});
  const DType wide = dtype == DType::kFloat64 ? dtype : sum_dtype;
  now_running = "layer or project";
  Tensor x(batch, n, d, dtype, any_layout()), weight(heads, d_out, d, dtype, any_layout());
  Tensor both(1, 2 * heads, d, dtype, any_layout()), bias(1, 1, 2 * heads, dtype, any_layout());
  Tensor numbers(batch, 2 * heads, n, dtype, kContiguous);
  for (Tensor* t : {&x, &weight, &both, &bias}) t->normal(0.5);
  if (!below(4)) x.spoil();
  std::vector<Extent> extents(size_t(batch * 2 * heads));
  Projection projection{
      batch,         n, d, 2 * heads, x.matrix(), both.matrix(), bias.matrix(), numbers.matrix(),
      extents.data()};
  kernels.project(projection);

  // Offsets of head h of batch b, for tensors that have only one of the two.
  std::vector<std::vector<int64_t>> kept;
  const auto spread = [&](const Matrix& m, bool by_batch, int64_t first, int64_t step) {
    std::vector<int64_t> offset;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        offset.push_back(m.head[by_batch ? b : h] + (first + h) * step);
    kept.push_back(std::move(offset));
    return Matrix{m.data, m.dtype, kept.back().data(), m.row, m.column};
  };
  kept.reserve(16);
  const Matrix lines = numbers.matrix();
  Attention call{};
  call.heads = batch * heads;
  call.n_q = call.n_k = n;
  call.rank = 1;
  call.dv = d_out;
  Layer layer{};
  layer.columns = d;
  layer.summed = heads;
  call.scale = one_of({0.0, 1.0, -20.0});
  call.query = spread(lines, true, 0, lines.row);
  call.key = spread(lines, true, heads, lines.row);
  for (Matrix* m : {&call.query, &call.key}) m->row = lines.column;
  call.value = spread(x.matrix(), true, 0, 0);
  layer.weight = spread(weight.matrix(), false, 0, 0);
  if (below(2)) layer.extents = extents.data();
  Tensor out(batch, n, d_out, wide, writable_layout());
  call.out = spread(out.matrix(), true, 0, 0);
  kernels.layer_forward(call, layer);

  Tensor grad_out(batch, n, d_out, dtype, any_layout()), grad_x(batch, n, d, wide, kContiguous);
  Tensor grad_weight(heads, d_out, d, wide, kContiguous);
  Tensor grad_query(batch * heads, n, 1, dtype, kContiguous);
  Tensor grad_key(batch * heads, n, 1, dtype, kContiguous);
  AttentionGradient gradient{};
  gradient.call = call;
  gradient.grad_out = spread(grad_out.normal(1).matrix(), true, 0, 0);
  gradient.grad_query = grad_query.matrix();
  gradient.grad_key = grad_key.matrix();
  gradient.grad_value = spread(grad_x.matrix(), true, 0, 0);
  layer.grad_weight = spread(grad_weight.normal(0).matrix(), false, 0, 0);
  kernels.layer_backward(gradient, layer);
}

// A layer of few tokens with all its projections.
void run_small_layer(const Kernels& kernels, int64_t n) {
  threads = one_of<int64_t>({1, 3});
  SmallLayerGradient g{};
  SmallLayer& layer = g.layer;
  layer.batch = 2;
  layer.n = n;
  layer.d = one_of<int64_t>({1, 7, 64, 70});
  layer.num_heads = one_of<int64_t>({1, 3});
  layer.rank = one_of<int64_t>({1, 2, 5});
  layer.dv = one_of<int64_t>({1, 5, 33});
  layer.scale = one_of({0.0, 1.0, -20.0});
  layer.is_causal = below(2);
  const int64_t numbers = layer.num_heads * layer.rank, width = layer.num_heads * layer.dv;
  const bool projects_out = below(3), keeps = below(3);
  layer.d_out = projects_out ? one_of<int64_t>({1, 5, 64, 67}) : width;
  const DType dtype = kDTypes[below(4)];
  now_running = "small layer";
  const auto draw = [&](int64_t batch, int64_t rows, int64_t columns) {
    Tensor drawn(batch, rows, columns, dtype, any_layout());
    drawn.normal(0.5);
    return drawn;
  };
  const auto empty = [&](int64_t rows, int64_t columns, int64_t batch) {
    return Tensor(batch, rows, columns, dtype, kContiguous);
  };
  const Tensor x = draw(2, n, layer.d), w_q = draw(1, numbers, layer.d);
  const Tensor w_k = draw(1, numbers, layer.d), w_v = draw(1, width, layer.d);
  const Tensor w_o = draw(1, layer.d_out, width), b_o = draw(1, 1, layer.d_out);
  const Tensor b_in = draw(1, 1, 2 * numbers + width), grad_out = draw(2, n, layer.d_out);
  Tensor mask(2, 1, n, DType::kBool, any_layout());
  layer.x = x.matrix();
  layer.w_q = w_q.matrix(), layer.w_k = w_k.matrix(), layer.w_v = w_v.matrix();
  if (projects_out) layer.w_o = w_o.matrix();
  if (below(2)) layer.b_in = b_in.matrix();
  if (projects_out && below(2)) layer.b_o = b_o.matrix();
  if (below(2)) layer.key_mask = mask.sometimes(0, 1).matrix();
  const Tensor out = empty(n, layer.d_out, 2), query_key = empty(n, 2 * numbers, 2);
  const Tensor value = empty(n, width, 2), heads = empty(n, width, 2);
  const Tensor lse(2, layer.num_heads, n, DType::kFloat64, kContiguous);
  layer.out = out.matrix();
  if (keeps) {
    layer.query_key = query_key.bytes.get();
    layer.value = value.bytes.get();
    if (projects_out) layer.heads = heads.bytes.get();
    layer.lse = reinterpret_cast<double*>(lse.bytes.get());
  }
  kernels.small_layer_forward(layer);
  out.expect_finite(2, n, layer.d_out);
  if (!keeps) return;

  if (!projects_out) layer.heads = out.bytes.get();
  const Tensor grad_x = empty(n, layer.d, 2), grad_w_qk = empty(2 * numbers, layer.d, 1);
  const Tensor grad_w_v = empty(width, layer.d, 1), grad_w_o = empty(layer.d_out, width, 1);
  const Tensor grad_b_in = empty(1, 2 * numbers + width, 1), grad_b_o = empty(1, layer.d_out, 1);
  g.grad_out = grad_out.matrix();
  if (below(2)) g.grad_x = grad_x.matrix();
  g.grad_w_qk = grad_w_qk.matrix(), g.grad_w_v = grad_w_v.matrix();
  if (layer.w_o) g.grad_w_o = grad_w_o.matrix();
  if (layer.b_in) g.grad_b_in = grad_b_in.matrix();
  if (layer.b_o) g.grad_b_o = grad_b_o.matrix();
  kernels.small_layer_backward(g);
  if (g.grad_x) grad_x.expect_finite(2, n, layer.d);
  grad_w_qk.expect_finite(1, 2 * numbers, layer.d);
  grad_w_v.expect_finite(1, width, layer.d);
  if (g.grad_w_o) grad_w_o.expect_finite(1, layer.d_out, width);
  if (g.grad_b_in) grad_b_in.expect_finite(1, 1, 2 * numbers + width);
  if (g.grad_b_o) grad_b_o.expect_finite(1, 1, layer.d_out);
}

// Sequences of different lengths end to end, some of them empty.
void run_varlen(const Kernels& kernels, bool is_causal) {
  threads = one_of<int64_t>({1, 3});
  const int64_t heads = one_of<int64_t>({1, 3}), dv = one_of<int64_t>({1, 8, 17, 64});
  const DType dtype = kDTypes[below(4)];
  const int64_t rank = below(3) ? 1 : 3;
  now_running = std::string(kernels.name) + (is_causal ? " varlen, causal" : " varlen");
  std::vector<Sequence> sequences;
  int64_t n_q = 0, n_k = 0;
  for (int64_t i = 0; i < 7; ++i) {
    const int64_t queries = one_of<int64_t>({0, 1, 65, 300, 1100});
    const int64_t keys = below(2) ? queries : one_of<int64_t>({0, 1, 65, 300, 1100});
    sequences.push_back({n_q, queries, n_k, keys, rank == 1 && below(2)});
    n_q += queries;
    n_k += keys;
  }
  Tensor query(heads, n_q, rank, dtype, any_layout()), key(heads, n_k, rank, dtype, any_layout());
  Tensor value(heads, n_k, dv, dtype, any_layout()), grad_out(heads, n_q, dv, dtype, any_layout());
  for (Tensor* x : {&query, &key, &value, &grad_out}) x->normal(1);
  Tensor out(heads, n_q, dv, dtype, writable_layout());
  Tensor lse(heads, n_q, 1, DType::kFloat64, kContiguous);
  Attention call{};
  call.heads = heads;
  call.n_q = n_q;
  call.n_k = n_k;
  call.rank = rank;
  call.dv = dv;
  call.scale = one_of({1.0, -30.0});
  call.is_causal = is_causal;
  const bool by_direct =
      std::none_of(sequences.begin(), sequences.end(), [](auto& s) { return s.by_transform; });
  Tensor slopes(heads, 1, 1, DType::kFloat64, any_layout());
  Tensor key_mask(heads, 1, n_k, DType::kFloat32, any_layout());
  if (by_direct) {
    call.is_gaussian = below(2);
    call.slopes = slopes.normal(0.1).matrix();
    if (call.is_gaussian) call.scale = 1;  // logits of large differences are finite
  }
  if (below(2)) call.key_mask = key_mask.normal(1).matrix();
  call.query = query.matrix();
  call.key = key.matrix();
  call.value = value.matrix();
  call.out = out.matrix();
  call.lse = lse.matrix();
  kernels.varlen_forward(call, sequences.data(), int64_t(sequences.size()));
  out.expect_finite(heads, n_q, dv);

  Tensor grad_query(heads, n_q, rank, dtype, writable_layout());
  Tensor grad_key(heads, n_k, rank, dtype, writable_layout());
  Tensor grad_value(heads, n_k, dv, dtype, writable_layout());
  Tensor grad_lse(heads, n_q, 1, DType::kFloat64, any_layout());
  AttentionGradient gradient{};
  gradient.call = call;
  gradient.grad_out = grad_out.matrix();
  if (below(2)) gradient.grad_lse = grad_lse.normal(1).matrix();
  gradient.grad_query = grad_query.matrix();
  gradient.grad_key = grad_key.matrix();
  gradient.grad_value = grad_value.matrix();
  const DType sums = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
  Tensor grad_key_mask(heads, 1, n_k, sums, writable_layout());
  Tensor grad_slopes(heads, 1, 1, DType::kFloat64, writable_layout());
  if (call.key_mask) gradient.grad_key_mask = grad_key_mask.matrix();
  if (call.slopes) gradient.grad_slopes = grad_slopes.matrix();
  kernels.varlen_backward(gradient, sequences.data(), int64_t(sequences.size()));
  grad_query.expect_finite(heads, n_q, rank);
  grad_key.expect_finite(heads, n_k, rank);
  grad_value.expect_finite(heads, n_k, dv);
  if (call.key_mask) grad_key_mask.expect_finite(heads, 1, n_k);
  if (call.slopes) grad_slopes.expect_finite(heads, 1, 1);
}

// A stream that takes in tokens, one and many at a time, and answers queries.
void run_stream(const Kernels& kernels) {
  threads = one_of<int64_t>({1, 3});
  now_running = std::string(kernels.name) + " stream";
  const int64_t heads = one_of<int64_t>({1, 3}), dv = one_of<int64_t>({1, 8, 17});
  const DType dtype = kDTypes[below(4)];
  Stream s{};
  s.layout = scan_layout_of(20, 16, int(below(4)), 2);
  const int64_t features = s.layout.features();
  s.width = (dv + kStreamLanes - 1) / kStreamLanes * kStreamLanes;
  std::vector<double> sums(size_t(heads * features * s.width)), z(size_t(heads * features)), ends,
      positions;
  for (int64_t h = 0; h < heads; ++h) ends.push_back(-INFINITY), ends.push_back(INFINITY);
  for (int p = 0; p < s.layout.panels(); ++p)
    for (int i = 0; i < s.layout.nodes; ++i) positions.push_back(scan_node(s.layout, p, i));
  s.sums = sums.data();
  s.z = z.data();
  s.ends = ends.data();
  std::vector<double> keys(size_t(heads * kStreamRoom)),
      values(size_t(heads * kStreamRoom * s.width));
  int64_t waiting = 0;
  s.keys = keys.data();
  s.values = values.data();
  s.waiting = &waiting;
  s.positions = positions.data();
  for (const int64_t n : {int64_t(0), int64_t(1), int64_t(65), int64_t(1), int64_t(200)}) {
    Tensor key(heads, n, 1, dtype, any_layout()), value(heads, n, dv, dtype, any_layout());
    Tensor query(heads, n, 1, dtype, any_layout()), out(heads, n, dv, dtype, writable_layout());
    Tensor lse(heads, n, 1, DType::kFloat64, kContiguous);
    for (Tensor* x : {&key, &value, &query}) x->normal(1);
    Attention call{};
    call.heads = heads;
    call.n_q = call.n_k = n;
    call.rank = 1;
    call.dv = dv;
    call.scale = 1;
    call.query = query.matrix();
    call.key = key.matrix();
    call.value = value.matrix();
    call.out = out.matrix();
    call.lse = lse.matrix();
    bool finite;
    double extent;
    kernels.stream_extent(call, s, &finite, &extent);
    if (!finite || !(kernels.stream_largest(call) <= 20)) fail("finite numbers were refused");
    kernels.stream_append(call, s);
    if (n == 1)  // fills the room for tokens that wait, and more
      for (int64_t i = 0; i < kStreamRoom + 3; ++i) kernels.stream_step(call, call, s);
    else
      kernels.stream_step(call, call, s);
    kernels.stream_query(call, s);
    out.expect_finite(heads, n, dv);
  }
}

// One of the machines of a call in stages, with its part of the queries and keys.
struct Machine {
  int64_t heads, n_q, n_k, dv;
  Tensor query, key, value, key_mask, grad_out, grad_lse, out, lse, grad_query, grad_key,
      grad_value;
  std::vector<Extent> extents;
  AttentionGradient g{};

  Machine(int64_t heads_, int64_t n_q_, int64_t n_k_, int64_t dv_, DType dtype, double scale,
          bool masked, bool spoiled)
      : heads(heads_),
        n_q(n_q_),
        n_k(n_k_),
        dv(dv_),
        query(heads, n_q, 1, dtype, any_layout()),
        key(heads, n_k, 1, dtype, any_layout()),
        value(heads, n_k, dv, dtype, any_layout()),
        key_mask(heads, 1, n_k, DType::kBool, any_layout()),
        grad_out(heads, n_q, dv, dtype, any_layout()),
        grad_lse(heads, n_q, 1, DType::kFloat64, any_layout()),
        out(heads, n_q, dv, dtype, writable_layout()),
        lse(heads, n_q, 1, DType::kFloat64, kContiguous),
        grad_query(heads, n_q, 1, dtype, writable_layout()),
        grad_key(heads, n_k, 1, dtype, writable_layout()),
        grad_value(heads, n_k, dv, dtype, writable_layout()),
        extents(size_t(2 * heads)) {
    for (Tensor* x : {&query, &key, &value, &grad_out, &grad_lse}) x->normal(1);
    if (spoiled) value.spoil();
    Attention& call = g.call;
    call.heads = heads;
    call.n_q = n_q;
    call.n_k = n_k;
    call.rank = 1;
    call.dv = dv;
    call.scale = scale;
    call.query = query.matrix();
    call.key = key.matrix();
    call.value = value.matrix();
    if (masked) call.key_mask = key_mask.sometimes(0, 1).matrix();
    call.out = out.matrix();
    call.lse = lse.matrix();
    g.grad_out = grad_out.matrix();
    if (masked) g.grad_lse = grad_lse.matrix();
    g.grad_query = grad_query.matrix();
    g.grad_key = grad_key.matrix();
    g.grad_value = grad_value.matrix();
  }
};

// Memory of exactly this size, full of NaN.
struct Numbers {
  std::unique_ptr<double[]> data;
  explicit Numbers(int64_t size) : data(new double[size_t(size)]) {
    std::fill_n(data.get(), size, NAN);
  }
};

// The machines agree on ranges, add up their moments, and go on; as boltzattn/distributed.py does.
void run_stages(const Kernels& kernels, int64_t n, double scale) {
  threads = one_of<int64_t>({1, 3});
  const int64_t heads = one_of<int64_t>({1, 3}), dv = one_of<int64_t>({1, 8, 17, 64});
  const DType dtype = kDTypes[below(4)];
  const bool masked = below(2), spoiled = !below(5);
  char text[128];
  std::snprintf(text, sizeof text, "%s in stages, n %d, dv %d, dtype %d, scale %g, %s",
                kernels.name, int(n), int(dv), int(dtype), scale, masked ? "masked" : "no mask");
  now_running = text;
  std::vector<std::unique_ptr<Machine>> machines;
  for (int64_t i = 0; i < 3; ++i)
    machines.emplace_back(new Machine(heads, one_of<int64_t>({0, 1, n}), i == 1 ? 0 : n, dv, dtype,
                                      scale, masked, spoiled));
  std::unique_ptr<SharedRange[]> shared(new SharedRange[size_t(heads)]);
  for (auto& machine : machines) kernels.stage_extents(machine->g.call, machine->extents.data());
  for (int64_t h = 0; h < heads; ++h) {
    Extent queries, keys;
    for (auto& machine : machines) {
      for (Extent* all : {&queries, &keys}) {
        const Extent& own = machine->extents[size_t(2 * h + (all == &keys))];
        all->low = std::min(all->low, own.low);
        all->high = std::max(all->high, own.high);
        all->count += own.count;
      }
    }
    const double ends[2] = {queries.low * scale, queries.high * scale};
    shared[h] = {std::min(ends[0], ends[1]),
                 std::max(ends[0], ends[1]),
                 keys.low,
                 keys.high,
                 keys.count,
                 queries.count,
                 1 << 20,
                 0};
  }
  for (int level = 0, all_served = 0; level < 3 && !all_served; ++level) {
    int64_t sizes[2];
    kernels.stage_sizes(machines[0]->g.call, shared.get(), sizes);
    Numbers moments(sizes[0]), query_moments(sizes[1]);
    std::fill_n(moments.data.get(), sizes[0], 0.0);
    std::fill_n(query_moments.data.get(), sizes[1], 0.0);
    for (auto& machine : machines) {
      int64_t same[2];
      kernels.stage_sizes(machine->g.call, shared.get(), same);
      if (same[0] != sizes[0] || same[1] != sizes[1]) fail("machines differ in their sizes");
      Numbers own(sizes[0]);
      kernels.stage_moments(machine->g.call, shared.get(), machine->extents.data(), own.data.get());
      for (int64_t i = 0; i < sizes[0]; ++i) moments.data[size_t(i)] += own.data[size_t(i)];
    }
    all_served = 1;
    for (auto& machine : machines) {
      std::unique_ptr<bool[]> served(new bool[size_t(heads)]);
      kernels.stage_evaluate(machine->g.call, shared.get(), moments.data.get(), served.get());
      for (int64_t h = 0; h < heads; ++h) {
        all_served &= served[size_t(h)];
        if (machine == machines.back() && !served[size_t(h)]) ++shared[size_t(h)].level;
      }
    }
    if (!all_served) continue;
    for (auto& machine : machines) {
      Numbers own(sizes[1]);
      kernels.stage_query_moments(machine->g, shared.get(), moments.data.get(), own.data.get());
      for (int64_t i = 0; i < sizes[1]; ++i) query_moments.data[size_t(i)] += own.data[size_t(i)];
    }
    for (auto& machine : machines) {
      kernels.stage_adjoint(machine->g, shared.get(), moments.data.get(), query_moments.data.get());
      if (spoiled) continue;
      machine->out.expect_finite(heads, machine->n_q, dv);
      if (std::fabs(scale) > 100) continue;  // gradients may overflow
      machine->grad_query.expect_finite(heads, machine->n_q, 1);
      machine->grad_key.expect_finite(heads, machine->n_k, 1);
      machine->grad_value.expect_finite(heads, machine->n_k, dv);
    }
  }
}

// Shards of one causal sequence after another: tables forwards, then tables over rows backwards. No
// arithmetic of boltzattn/transform/scan_shards.py: each shard starts from the tables of one other.
void run_shards(const Kernels& kernels, int64_t n, double scale) {
  threads = one_of<int64_t>({1, 3});
  const int64_t heads = one_of<int64_t>({1, 3}), dv = one_of<int64_t>({1, 8, 17, 64, 259});
  const DType dtype = kDTypes[below(4)];
  const bool masked = below(2), spoiled = !below(5);
  char text[128];
  std::snprintf(text, sizeof text, "%s in shards, n %d, dv %d, dtype %d, scale %g, %s",
                kernels.name, int(n), int(dv), int(dtype), scale, masked ? "masked" : "no mask");
  now_running = text;
  const int nodes = 12, levels = 20, features = (2 * levels + 1) * nodes;
  const int64_t size = heads * features * (dv + 1);
  std::unique_ptr<double[]> t_most(new double[size_t(heads)]);
  std::fill_n(t_most.get(), heads, 10 * std::fabs(scale));
  Numbers ends(2 * heads), keys(3 * heads), centres(2 * heads * dv), table(size), slopes(size),
      later(size);
  const auto clear = [&](Numbers& x, int64_t count) { std::fill_n(x.data.get(), count, 0.0); };
  const auto forget = [&] {
    for (int64_t h = 0; h < heads; ++h) {
      ends.data[size_t(2 * h)] = -INFINITY;
      ends.data[size_t(2 * h + 1)] = INFINITY;
    }
    clear(keys, 3 * heads);
    clear(centres, 2 * heads * dv);
    for (Numbers* x : {&table, &slopes}) clear(*x, size);
  };
  forget();
  clear(later, size);
  for (const int64_t tokens : {n, int64_t(0), n}) {
    Machine machine(heads, tokens, tokens, dv, dtype, scale, masked, spoiled);
    machine.g.call.is_causal = true;
    Numbers z(heads * tokens), rows(size);
    clear(rows, size);
    ScanShard shard{nodes,
                    levels,
                    2.0,
                    t_most.get(),
                    ends.data.get(),
                    keys.data.get(),
                    centres.data.get(),
                    table.data.get(),
                    slopes.data.get(),
                    later.data.get(),
                    true};
    kernels.shard_forward(machine.g.call, shard, z.data.get());
    kernels.shard_rows(machine.g, shard, z.data.get(), rows.data.get());
    kernels.shard_backward(machine.g, shard);
    if (!spoiled) {
      machine.out.expect_finite(heads, tokens, dv);
      if (std::fabs(scale) <= 100) {
        machine.grad_query.expect_finite(heads, tokens, 1);
        machine.grad_key.expect_finite(heads, tokens, 1);
        machine.grad_value.expect_finite(heads, tokens, dv);
      }
    }
    // Tables are those of this shard alone.
    Numbers no_ends(2 * heads), no_keys(3 * heads);
    forget();
    std::copy_n(ends.data.get(), 2 * heads, no_ends.data.get());
    clear(no_keys, 3 * heads);
    shard.ends = no_ends.data.get();
    shard.keys = no_keys.data.get();
    shard.table = shard.slopes = shard.later = shard.centres = nullptr;
    kernels.shard_tables(machine.g.call, shard,
                         {ends.data.get(), keys.data.get(), centres.data.get(), table.data.get(),
                          below(2) ? slopes.data.get() : nullptr});
    std::swap(later.data, rows.data);
  }
}

void run_kernels(const Kernels& kernels) {
  int calls = 0;
  for (int64_t n : {1, 2, 63, 65, 257, 600})
    for (int repeat = 0; repeat < 3; ++repeat, ++calls) run_layer(kernels, n);
  for (int64_t n : {1, 2, 47, 49, 65, 257})
    for (int repeat = 0; repeat < 8; ++repeat, ++calls) run_small_layer(kernels, n);
  for (int repeat = 0; repeat < 20; ++repeat, ++calls) run_varlen(kernels, repeat % 2);
  for (int repeat = 0; repeat < 20; ++repeat, ++calls) run_stream(kernels);
  for (int64_t n : {1, 2, 65, 600, 4097})
    for (double scale : {0.0, -1.0, 30.0, 1e4}) {
      run_stages(kernels, n, scale);
      ++calls;
    }
  for (int64_t n : {1, 2, 63, 65, 600, 2500})
    for (double scale : {0.0, -1.0, 30.0, 1e4}) {
      run_shards(kernels, n, scale);
      ++calls;
    }
  for (int64_t n_q : {0, 1, 2, 63, 65, 257}) {
    for (int64_t n_k : {0, 1, 2, 63, 65, 257}) {
      for (int repeat = 0; repeat < 5; ++repeat) {
        run(drawn(kernels, false, n_q, n_k));
        run(drawn(kernels, true, n_q, n_k));
        calls += 2;
      }
    }
  }
  // Several chunks of tokens, and several shares of keys in the direct backward.
  for (int64_t n : {4095, 4097, 9001}) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      run(drawn(kernels, true, n, one_of<int64_t>({1, 65, n})));
      run(drawn(kernels, true, one_of<int64_t>({1, 65, n}), n));
      run(drawn(kernels, false, 65, n));
      calls += 3;
    }
  }
  // In fp64 a product of 1e6 misses its tolerance: every refinement is tried, then `direct`.
  for (int64_t n : {65, 4097}) {
    for (Mask mask : {Mask::kNone, Mask::kKeyBool, Mask::kKeyFloat}) {
      Case c = drawn(kernels, true, 65, n);
      c.dtype = DType::kFloat64;
      c.mask = mask;
      c.scale = 1e6;
      c.spoiled = false;
      run(c);
      ++calls;
    }
  }
  std::printf("%s: %d calls, forward and backward\n", kernels.name, calls);
}

// Two instruction sets differ by roundings alone: layouts and the order of sums in fp64 are the
// same, and the transform is certified in fp32 to 5e-6 of the largest value.
void check_agreement(const Kernels& kernels) {
  threads = 1;
  for (const DType dtype : {DType::kFloat64, DType::kFloat32}) {
    const bool wide = dtype == DType::kFloat64;
    for (const double scale : {1.0, 30.0, 300.0, 3000.0}) {
      const Kernels* tables[2] = {&kernels, &portable::kTable};
      std::unique_ptr<Machine> found[2];
      for (int side = 0; side < 2; ++side) {
        generator.seed(uint64_t(scale));
        found[side].reset(new Machine(2, 300, 700, 5, dtype, scale, true, false));
        now_running = std::string(kernels.name) + " against portable";
        tables[side]->transform_forward(found[side]->g.call);
        tables[side]->transform_backward(found[side]->g);
      }
      const auto compare = [&](const Tensor& a, const Tensor& b, double tolerance) {
        double largest = 0, difference = 0;
        for (int64_t i = 0; i < a.size; ++i) {
          const double x = a.get(i), y = b.get(i);
          if (std::isnan(x) && std::isnan(y)) continue;  // between the rows
          largest = std::max(largest, std::fabs(y));
          difference = std::isnan(x - y) ? INFINITY : std::max(difference, std::fabs(x - y));
        }
        if (!(difference <= tolerance * largest)) fail("instruction sets disagree");
      };
      compare(found[0]->out, found[1]->out, wide ? 1e-9 : 1e-5);
      compare(found[0]->grad_query, found[1]->grad_query, wide ? 1e-8 : 1e-3);
      compare(found[0]->grad_key, found[1]->grad_key, wide ? 1e-8 : 1e-3);
      compare(found[0]->grad_value, found[1]->grad_value, wide ? 1e-8 : 1e-3);
    }
  }
  generator.seed(0);
}

// -- the headers that host and device share
// ----------------------------------------------------------

void expect(bool holds, const char* what) {
  if (!holds) fail(what);
}

template <class T>
void check_online_softmax() {
  now_running = sizeof(T) == 4 ? "OnlineSoftmax<float>" : "OnlineSoftmax<double>";
  // Sums of at most 100 terms, each off by a few roundings of T.
  const double tolerance = sizeof(T) == 4 ? 1e-5 : 1e-13;
  const OnlineSoftmax<T> empty;
  expect(empty.lse() == -INFINITY && empty.normaliser() == 0 && empty.reference() == 0,
         "a row that has met nothing");
  for (int trial = 0; trial < 1000; ++trial) {
    const int count = int(below(100));
    OnlineSoftmax<T> state;
    std::normal_distribution<double> draw(0, one_of({1.0, 50.0}));
    double sum = 0, scaled = 0;  // what an accumulator of ones has become
    for (int i = 0; i < count; ++i) {
      const T logit = below(5) ? T(draw(generator)) : T(-INFINITY);
      scaled *= double(state.raise(logit));
      const double weight = double(state.power_of_2(logit - state.reference()));
      state.sum += weight;
      scaled += weight;
      sum += std::exp2(double(logit));
    }
    const double lse = state.lse();
    if (sum == 0) {
      expect(lse == -INFINITY && scaled == 0, "a row without a finite logit");
    } else {
      expect(std::fabs(lse - std::log(sum)) <= tolerance * (1 + std::fabs(lse)), "lse");
      expect(std::fabs(scaled * double(state.normaliser()) - 1) <= tolerance, "weights sum to 1");
    }
  }
}

void check_layout() {
  now_running = "choose_layout";
  for (int trial = 0; trial < 2000; ++trial) {
    const double t_size = std::exp(std::uniform_real_distribution<double>(-20, 20)(generator));
    const double s_size = std::exp(std::uniform_real_distribution<double>(-20, 20)(generator));
    double t[2], s[2];
    for (int i = 0; i < 2; ++i) {
      t[i] = t_size * one_of({-1.0, -0.3, 0.0, 0.7, 1.0});
      s[i] = s_size * one_of({-1.0, 0.0, 0.5, 1.0});
    }
    const Range range{std::min(t[0], t[1]), std::max(t[0], t[1]), std::min(s[0], s[1]),
                      std::max(s[0], s[1]), 1 + below(1 << 20)};
    if (largest_product(range) > kLargestProduct) continue;  // such heads go to `direct`
    const ::boltzattn::Layout layout = choose_layout(
        range, 1 + below(1 << 20), range.keys, 1 + below(300), one_of({1e-5, 1e-8, 1e-17, 1e-23}));
    for (const Axis* axis : {&layout.query, &layout.key}) {
      expect(axis->panels >= 1 && axis->panels < 10000, "a sensible number of panels");
      expect(axis->nodes >= kLeastNodes && axis->nodes <= kMostNodes, "nodes within the tables");
      expect(axis->half > 0 && std::isfinite(axis->half), "panels with a width");
    }
    double before = -INFINITY;
    for (int panel = 0; panel < layout.query.panels; ++panel) {
      for (int i = layout.query.nodes - 1; i >= 0; --i) {  // nodes run from right to left
        const double node = query_node(layout, panel, i);
        expect(node > before, "query nodes in order");
        before = node;
      }
    }
    // Of the rounding of sinh and asinh, whose arguments go up to about 20.
    const double slack = 1e-12 * (1 + std::fabs(range.t_max) + std::fabs(range.t_min));
    if (range.t_max > range.t_min) {
      expect(before <= range.t_max + slack, "query nodes within the range");
      expect(query_node(layout, 0, layout.query.nodes - 1) >= range.t_min - slack,
             "query nodes within the range");
    }
    before = -INFINITY;
    for (int panel = 0; panel < layout.key.panels; ++panel) {
      for (int i = layout.key.nodes - 1; i >= 0; --i) {
        const double node = key_node(layout, panel, i);
        expect(node > before && std::fabs(node) <= key_extent(range), "key nodes in order");
        before = node;
      }
    }
  }
}

}  // namespace

int main() {
  std::signal(SIGABRT, [](int) { std::fprintf(stderr, "in: %s\n", now_running.c_str()); });
  check_online_softmax<float>();
  check_online_softmax<double>();
  check_layout();
  // Between their widths of vectors lies that of AVX2, which the Python tests run.
  for (const Kernels* table : {&portable::kTable, &wide::kTable}) {
    check_agreement(*table);
    run_kernels(*table);
  }
  std::puts("no sanitizer has complained");
}
