// The separable core: sums over the nodes of one side of exp(t . s) times what they hold, at the
// nodes of the other side, axis after axis. Included inside an ISA's namespace.
//
// A panel holds its numbers in units of exp(log of the panel). On one axis the exponent of a pair
// of nodes is that of the pair of panel centres, one number for all columns, plus at most 2 kappa
// and a little, so that nothing overflows at any temperature, in fp32 either.

// exp(t_a s_b - t_A s_B) for all nodes of an axis, where A and B are the centres of their panels.
struct AxisKernel {
  Buffer<double> exponential;  // [target nodes][source nodes]
  Buffer<double> position;     // [source nodes]; zeros if all tokens of the source are there
  int64_t row = 0;

  void fill(const Axis& source, const Axis& target, bool flat) {
    const int64_t columns = int64_t(source.panels) * source.nodes;
    const int64_t rows = int64_t(target.panels) * target.nodes;
    row = round_up(columns, kLanes<double>);
    position.resize(row);
    exponential.resize(rows * row);
    Buffer<double> centre(row);
    for (int64_t b = 0; b < row; ++b) {
      const int64_t node = least(b, columns - 1);
      position.data[b] = tensor_node(source, node);
      centre.data[b] = tensor_centre(source, node / source.nodes);
    }
    for_parts(rows, most(1, kPart / row), [&](int64_t first, int64_t end) {
      for (int64_t a = first; a < end; ++a) {
        const double t = tensor_node(target, a), middle = tensor_centre(target, a / target.nodes);
        double* to = exponential.data + a * row;
        for (int64_t b = 0; b < row; b += kLanes<double>) {
          const Vec<double> s = load(position.data + b), c = load(centre.data + b);
          store(to + b, exp2_of((s * (t - middle) + (s - c) * middle) * kLog2e));
        }
      }
    });
    if (flat) set_zero(position.data, row);
  }
};

// Tables of numbers at nodes: index 0 plain; index 1 + a after a factor s_a, the coordinate of the
// source.
constexpr int kMostTables = 1 + kMostAxes;

template <class C>
struct SeparableCore {
  int rank;
  const Axis *source, *target;
  const bool* flat;         // by axis: all tokens of the source are in the middle
  int64_t size;             // columns, whole vectors
  double skip;              // exponents of panel pairs this far below the largest are left out
  const TensorOrder& seen;  // the target's panels with tokens
  AxisKernel kernel[kMostAxes];

  static int64_t nodes(const Axis& axis) { return int64_t(axis.panels) * axis.nodes; }

  // source_table: [source nodes of all axes][size]; source_log: [source panels]. Fills to[0], and
  // to[1 + a] if slopes, [seen panels][target nodes of a panel][size], and log [seen panels].
  void run(const C* source_table, const double* source_log, bool slopes, Buffer<C>* to,
           Buffer<double>& log) {
    for (int a = 0; a < rank; ++a) kernel[a].fill(source[a], target[a], flat[a]);
    Buffer<C> between[2][kMostTables];
    Buffer<double> logs[2];
    const C* from[kMostTables] = {source_table};
    const double* from_log = source_log;
    for (int a = rank - 1; a >= 0; --a) {
      const bool last = a == 0;
      Buffer<C>* next = last ? to : between[a % 2];
      Buffer<double>& next_log = last ? log : logs[a % 2];
      int64_t rows = 1, panels = 1;
      for (int b = 0; b < rank; ++b) {
        const Axis& axis = b < a ? source[b] : target[b];
        rows *= last ? axis.nodes : nodes(axis);
        panels *= axis.panels;
      }
      if (last) rows *= seen.count, panels = seen.count;
      for (int k = 0; k < kMostTables; ++k)
        if (k == 0 || (slopes && k > a && k <= rank)) next[k].resize(rows * size);
      next_log.resize(panels);
      step(a, from, from_log, slopes, next, next_log.data);
      for (int k = 0; k < kMostTables; ++k) from[k] = next[k].data;
      from_log = next_log.data;
    }
  }

 private:
  // The nodes of some panels of some axes, as offsets in a table in which these axes follow each
  // other and `unit` rows belong to a node of the last one.
  struct Nodes {
    int64_t count = 1;
    Buffer<int64_t> offset;

    Nodes(const Axis* axes, int number, int64_t panel, int64_t unit) {
      for (int b = 0; b < number; ++b) count *= axes[b].nodes;
      offset.resize(count);
      int64_t size = 1;
      offset.data[0] = 0;
      for (int b = number - 1; b >= 0; --b) {
        const int64_t n = axes[b].nodes, first = panel % axes[b].panels * n;
        for (int64_t i = n - 1; i >= 0; --i)
          for (int64_t l = 0; l < size; ++l)
            offset.data[i * size + l] = offset.data[l] + (first + i) * unit;
        panel /= axes[b].panels;
        size *= n;
        unit *= nodes(axes[b]);
      }
    }
  };

  // Replaces axis a of the source by that of the target. Tables before:
  // [target axes after a][source axes up to a][size], logs in the order of axes; after:
  // [target axes from a on][source axes before a][size], or by panel if a is the first axis.
  void step(int a, const C* const* from, const double* from_log, bool slopes, Buffer<C>* to,
            double* to_log) const {
    const Axis &of = source[a], &on = target[a];
    const int64_t p = on.nodes, depth = nodes(of);
    int64_t behind = 1, behind_nodes = 1, before_nodes = 1;  // of the other axes
    for (int b = a + 1; b < rank; ++b) behind *= target[b].panels, behind_nodes *= nodes(target[b]);
    for (int b = 0; b < a; ++b) before_nodes *= nodes(source[b]);
    const int64_t later_panels = on.panels * behind;
    int64_t tasks = later_panels;
    for (int b = 0; b < a; ++b) tasks *= source[b].panels;
    if (a == 0) tasks = seen.count;
    Buffer<uint8_t> wanted(later_panels);
    set_zero(wanted.data, later_panels);
    for (int64_t i = 0; i < seen.count; ++i) wanted.data[seen.occupied.data[i] % later_panels] = 1;
    parallel(tasks, [&](int64_t task) {
      // The panel of the target's axes from a on, and that of the source's axes before.
      const int64_t at = a == 0 ? seen.occupied.data[task] : task % later_panels;
      const int64_t earlier = a == 0 ? 0 : task / later_panels;
      const int64_t panel = at / behind, later = at % behind;
      to_log[task] = -INFINITY;
      if (!wanted.data[at]) return;
      pause_point();
      const double middle = tensor_centre(on, panel);
      const auto exponent = [&](int64_t s) {
        return from_log[(earlier * of.panels + s) * behind + later] + middle * tensor_centre(of, s);
      };
      double top = -INFINITY;
      for (int64_t s = 0; s < of.panels; ++s) top = larger_of(top, exponent(s));
      to_log[task] = top;
      const Nodes behind_here(target + a + 1, rank - a - 1, later, 1);
      const Nodes before_here(source, a, earlier, 1);
      // Calls visit(offset of the source, offset of the target) in rows of the tables.
      const auto for_rows = [&](auto visit) {
        for (int64_t x = 0; x < behind_here.count; ++x)
          for (int64_t y = 0; y < before_here.count; ++y) {
            const int64_t b = behind_here.offset.data[x], s = before_here.offset.data[y];
            visit((b * before_nodes + s) * depth,
                  a == 0 ? task * p * behind_here.count + x
                         : (panel * p * behind_nodes + b) * before_nodes + s);
          }
      };
      const int64_t stride = (a == 0 ? behind_here.count : behind_nodes * before_nodes) * size;
      if (top == -INFINITY) {
        if (a == 0) clear(to, slopes, task * p * behind_here.count, p * behind_here.count);
        return;
      }
      Buffer<C> e(p * depth), e_slope(slopes ? p * depth : 0);
      bool begun = false;
      for (int64_t s = 0, end; s < of.panels; s = end) {
        for (end = s; end < of.panels && exponent(end) >= top - skip; ++end)
          weigh(a, panel, end, ::exp(exponent(end) - top), slopes, e.data, e_slope.data);
        if (end == s) {
          ++end;
          continue;
        }
        const int64_t first = s * of.nodes, run = (end - s) * of.nodes;
        const auto add = [&](const C* weights, const C* x, C* y) {
          const Strided<C> left{weights + first, depth, 1};
          const int64_t vectors = size / kLanes<C>;
          begun ? gemm<C, true>(p, vectors, run, left, x + first * size, size, y, stride)
                : gemm<C, false>(p, vectors, run, left, x + first * size, size, y, stride);
        };
        for_rows([&](int64_t in, int64_t out) {
          add(e.data, from[0] + in * size, to[0].data + out * size);
          if (!slopes) return;
          add(e_slope.data, from[0] + in * size, to[1 + a].data + out * size);
          for (int b = a + 1; b < rank; ++b)
            add(e.data, from[1 + b] + in * size, to[1 + b].data + out * size);
        });
        begun = true;
      }
    });
  }

  // e[node][source nodes of panel s] = factor times the local exponentials.
  void weigh(int a, int64_t panel, int64_t s, double factor, bool slopes, C* e, C* e_slope) const {
    const AxisKernel& k = kernel[a];
    const int64_t p = target[a].nodes, q = source[a].nodes, depth = nodes(source[a]);
    for (int64_t i = 0; i < p; ++i) {
      const double* local = k.exponential.data + (panel * p + i) * k.row + s * q;
      for (int64_t b = 0; b < q; ++b) {
        e[i * depth + s * q + b] = C(factor * local[b]);
        if (slopes)
          e_slope[i * depth + s * q + b] = C(factor * local[b] * k.position.data[s * q + b]);
      }
    }
  }

  void clear(Buffer<C>* to, bool slopes, int64_t first, int64_t rows) const {
    for (int k = 0; k <= (slopes ? rank : 0); ++k) set_zero(to[k].data + first * size, rows * size);
  }
};
