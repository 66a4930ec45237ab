// The core of a head with a bias: from the key nodes to the query nodes of every block, and back.
// No token appears here, so all of it is fp64. Included inside an ISA's namespace.

constexpr int64_t kMostInRun = 16;  // panels

// Calls visit(first key panel, end) for the runs of neighbouring panels among some blocks.
template <class Visit>
static void for_block_runs(const int32_t* block, int64_t count, Visit visit) {
  for (int64_t i = 0, end; i < count; i = end) {
    for (end = i + 1; end < count && end - i < kMostInRun && block[end] == block[end - 1] + 1;)
      ++end;
    visit(int64_t(block[i]), int64_t(block[end - 1]) + 1);
  }
}

// exp(k(t_a, s_b) + bias_b - shift_a) for the nodes of a query panel and `count` key nodes.
template <class T>
struct BlockKernel {
  const Lookup<T>& head;
  const EnvelopeLayout& layout = head.layout;

  // Exponents, e[node][row]; rows are written in whole vectors.
  void exponents(const QueryPanel& panel, int64_t first, int64_t count, double* e,
                 int64_t row) const {
    constexpr int L = kLanes<double>;
    const double* t = layout.query_node.data + panel.first_node;
    const double* shift = head.node_shift.data + panel.first_node;
    const double* s = layout.key_node.data + first;
    const double* bias = layout.node_bias.data + first;
    const bool gaussian = layout.gauge != 0;
    for (int64_t b = 0; b < count; b += L) {
      const Vec<double> x = load(s + b), c = load(bias + b);
      if (panel.direct) {
        for (int32_t a = 0; a < panel.nodes; ++a) {
          const Vec<double> score = gaussian ? (x - t[a]) * (x - t[a]) * -0.5 : x * t[a];
          store(e + a * row + b, score + c - shift[a]);
        }
        continue;
      }
      // From the middle of the panel, by differences.
      const double t0 = panel.middle;
      const Vec<double> score = gaussian ? (x - t0) * (x - t0) * -0.5 : x * t0;
      const Vec<double> base = score + c - panel.log_z, slope = x - panel.mean;
      for (int32_t a = 0; a < panel.nodes; ++a) store(e + a * row + b, base + slope * (t[a] - t0));
    }
  }
  void weights(const QueryPanel& panel, int64_t first, int64_t count, double* e,
               int64_t row) const {
    constexpr int L = kLanes<double>;
    exponents(panel, first, count, e, row);
    for (int32_t a = 0; a < panel.nodes; ++a)
      for (int64_t b = 0; b < count; b += L) {
        const Vec<double> x = load(e + a * row + b) * kLog2e;
        store(e + a * row + b, exp2_of(x > -100.0 ? x : splat(-1023.0)));
      }
  }
};

BOLTZATTN_INLINE int64_t padded_nodes(int64_t count) {
  return round_up(count, kLanes<double>);
}

template <class T>
static int64_t most_nodes_in_run(const Lookup<T>& head) {
  return kMostInRun * envelope_precision(head.call.value.dtype).nodes;
}

// Node values on the query axis, with derivatives for backward; whether the head is served.
template <class T>
static bool run_lookup_core(Lookup<T>& head, bool slopes) {
  EnvelopeLayout& layout = head.layout;
  const DType dtype = head.call.value.dtype;
  const int64_t size = head.row_size, dv = head.dv, vectors = size / kLanes<double>;
  const int64_t nodes = layout.query_node.size, panels = layout.query.size;
  for (int i = 0; i < kLanes<double>; ++i)  // `exponents` reads whole vectors
    layout.key_node.push(0), layout.node_bias.push(-INFINITY);
  layout.key_node.size -= kLanes<double>;
  layout.node_bias.size -= kLanes<double>;
  head.node_out.resize(nodes * size);
  head.node_shift.resize(nodes);
  head.query_centre.resize(panels * size);
  if (slopes) head.node_slope.resize(nodes * size);
  const BlockKernel<T> kernel{head};
  const int64_t per_task = 4, tasks = ceil_div(panels, per_task);
  Buffer<double> worst(tasks);
  const int64_t row = padded_nodes(most_nodes_in_run(head));
  const double error = envelope_precision(dtype).error;
  parallel(tasks, [&](int64_t task) {
    Buffer<double> e(kMostNodes * row);
    double bound = 0;
    for (int64_t p = task * per_task; p < least(panels, (task + 1) * per_task); ++p) {
      const QueryPanel& panel = layout.query[p];
      const int32_t* block = layout.blocks.data + panel.first_block;
      const double* t = layout.query_node.data + panel.first_node;
      double* shift = head.node_shift.data + panel.first_node;
      double* f = head.node_out.data + panel.first_node * size;
      double* slope = slopes ? head.node_slope.data + panel.first_node * size : nullptr;
      set_zero(f, panel.nodes * size);
      if (slopes) set_zero(slope, panel.nodes * size);
      const auto for_runs = [&](auto visit) {
        for_block_runs(block, panel.blocks, [&](int64_t k, int64_t end) {
          const int64_t first = layout.key[k].first_node;
          visit(first, layout.key[end - 1].first_node + layout.key[end - 1].nodes - first);
        });
      };
      for (int32_t a = 0; a < panel.nodes; ++a)
        shift[a] = panel.direct ? 0 : head.shift_at(panel, t[a]);
      double from[kMostNodes];  // keys are measured from here, for slopes
      for (double& x : from) x = panel.mean;
      if (panel.direct) {  // every row has its own unit, and its own top key
        double top[kMostNodes];
        for (double& x : top) x = -INFINITY;
        for_runs([&](int64_t first, int64_t count) {
          kernel.exponents(panel, first, count, e.data, row);
          for (int32_t a = 0; a < panel.nodes; ++a)
            for (int64_t b = 0; b < count; ++b)
              if (e.data[a * row + b] > top[a])
                top[a] = e.data[a * row + b], from[a] = layout.key_node[first + b];
        });
        for (int32_t a = 0; a < panel.nodes; ++a) shift[a] = top[a];
      }
      for_runs([&](int64_t first, int64_t count) {
        kernel.weights(panel, first, count, e.data, row);
        const Strided<double> left{e.data, row, 1};
        const double* m = head.moments.data + first * size;
        gemm<double, true>(panel.nodes, vectors, count, left, m, size, f, size);
        if (!slopes) return;
        for (int32_t a = 0; a < panel.nodes; ++a)
          for (int64_t b = 0; b < count; ++b)
            e.data[a * row + b] *= layout.key_node[first + b] - from[a];
        gemm<double, true>(panel.nodes, vectors, count, left, m, size, slope, size);
      });
      double least_z = 1, odd = 0;
      for (int32_t a = 0; a < panel.nodes; ++a) {
        odd += (largest_of(f + a * size, dv + 1) <= kLargestSum ? 0 : INFINITY);
        const double z = f[a * size + dv];
        if (!(z >= least_z)) least_z = z;
      }
      if (!(least_z > 0)) odd = INFINITY;
      T* centre = head.query_centre.data + p * size;
      const double* middle = f + (panel.nodes / 2) * size;
      for (int64_t c = 0; c < size; ++c) centre[c] = c < dv ? T(middle[c] / middle[dv]) : T(0);
      for (int32_t a = 0; slopes && panel.direct && a < panel.nodes; ++a) {
        double* derivative = slope + a * size;
        const double* row = f + a * size;
        const double mean = derivative[dv] / row[dv];
        for (int64_t c = 0; c < dv; ++c) derivative[c] -= row[c] * mean;
        derivative[dv] = from[a] + mean;
      }
      for (int32_t a = 0; a < panel.nodes; ++a)
        for (int64_t c = 0; c < dv; ++c) {
          f[a * size + c] -= double(centre[c]) * f[a * size + dv];
          if (slopes && !panel.direct)
            slope[a * size + c] -= double(centre[c]) * slope[a * size + dv];
        }
      const double errors = ::exp(layout.slack) * (panel.error + layout.key_error) + 2 * error;
      bound = larger_of(bound, 2 * errors / least_z + odd);
    }
    worst.data[task] = bound;
  });
  double all = rounding_of(dtype, head.product);
  double bound = 0;
  for (int64_t i = 0; i < tasks; ++i) bound = larger_of(bound, worst.data[i]);
  head.certificate = all + bound;
  return head.certificate <= tolerance_of(dtype);
}

// Which query panels see a key panel.
struct Seers {
  Buffer<int64_t> start;
  Buffer<int32_t> panel;

  explicit Seers(const EnvelopeLayout& layout)
      : start(layout.key.size + 2), panel(layout.blocks.size) {
    const int64_t panels = layout.key.size;
    set_zero(start.data, panels + 2);
    for (int64_t i = 0; i < layout.blocks.size; ++i) ++start.data[layout.blocks[i] + 2];
    for (int64_t k = 0; k <= panels; ++k) start.data[k + 1] += start.data[k];
    for (int64_t p = 0; p < layout.query.size; ++p) {
      const QueryPanel& query = layout.query[p];
      for (int64_t i = 0; i < query.blocks; ++i)
        panel.data[start.data[layout.blocks[query.first_block + i] + 1]++] = int32_t(p);
    }
  }
};

// The transpose: tables over the key nodes of the gradients of the moments, and the same times t,
// measured from the panel's tilt, or from the key itself where that is a node of Gaussian scores.
// Column dv goes with values measured from the panel's centre, unless the panel is direct.
template <class T>
static void lookup_adjoint(const Lookup<T>& head, double* query_moments, Buffer<double>& values,
                           Buffer<double>& slopes) {
  const EnvelopeLayout& layout = head.layout;
  const int64_t size = head.row_size, dv = head.dv, vectors = size / kLanes<double>;
  const int64_t nodes = layout.key_node.size;
  values.resize(nodes * size);
  slopes.resize(nodes * size);
  for (int64_t p = 0; p < layout.query.size; ++p) {  // values as they are, not from the centre
    const QueryPanel& panel = layout.query[p];
    const T* centre = head.query_centre.data + p * size;
    for (int32_t a = 0; a < panel.nodes; ++a) {
      double* row = query_moments + (panel.first_node + a) * size;
      for (int64_t c = 0; c < dv; ++c) row[dv] -= row[c] * double(centre[c]);
    }
  }
  const Seers seers(layout);
  const BlockKernel<T> kernel{head};
  const int64_t row = padded_nodes(envelope_precision(head.call.value.dtype).nodes);
  const int64_t per_task = 4;
  parallel(ceil_div(layout.key.size, per_task), [&](int64_t task) {
    Buffer<double> e(kMostNodes * row);
    for (int64_t k = task * per_task; k < least(layout.key.size, (task + 1) * per_task); ++k) {
      const KeyPanel& key = layout.key[k];
      double* value = values.data + key.first_node * size;
      double* slope = slopes.data + key.first_node * size;
      set_zero(value, key.nodes * size);
      set_zero(slope, key.nodes * size);
      for (int64_t i = seers.start.data[k]; i < seers.start.data[k + 1]; ++i) {
        const QueryPanel& panel = layout.query[seers.panel.data[i]];
        const double* from = query_moments + panel.first_node * size;
        kernel.weights(panel, key.first_node, key.nodes, e.data, row);
        const Strided<double> left{e.data, 1, row};
        gemm<double, true>(key.nodes, vectors, panel.nodes, left, from, size, value, size);
        for (int32_t a = 0; a < panel.nodes; ++a) {
          const double t = layout.query_node[panel.first_node + a];
          const double* s = layout.key_node.data + key.first_node;
          for (int64_t b = 0; b < key.nodes; ++b)
            e.data[a * row + b] *= t - (key.direct && layout.gauge != 0 ? s[b] : key.tilt);
        }
        gemm<double, true>(key.nodes, vectors, panel.nodes, left, from, size, slope, size);
      }
      const T* centre = head.key_centre.data + k * size;
      for (double* table : {value, slope})
        for (int64_t b = 0; b < key.nodes && !key.direct; ++b)
          for (int64_t c = 0; c < dv; ++c)
            table[b * size + dv] += table[b * size + c] * double(centre[c]);
    }
  });
}
