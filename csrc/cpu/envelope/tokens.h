// The tokens of a head with a bias, in the order of their panels, and their weights on the nodes.
// Included inside an ISA's namespace.

template <class T>
struct Lookup {
  const Attention& call;
  const int64_t h;
  const int64_t dv;
  const int64_t row_size;  // of a row over dv + 1 columns
  const Coordinate query_coordinate, key_coordinate;
  EnvelopeLayout layout{};
  double product = 0;  // the size of logits
  double certificate = 0;

  Buffer<T> key_centre;     // [key panels][row_size]: values are measured from here, unless direct
  Buffer<double> moments;   // [key nodes][row_size]: sums of values and, in column dv, of weights
  Buffer<double> node_out;  // [query nodes][row_size]: N - centre Z, and Z in column dv
  // The same of their derivatives, keys measured from the panel's mean. On direct panels, the
  // derivative of out times Z, and in column dv the mean key.
  Buffer<double> node_slope;
  Buffer<double> node_shift;  // [query nodes]: log of the unit of N and Z
  Buffer<T> query_centre;     // [query panels][row_size]

  Lookup(const Attention& a, int64_t head)
      : call(a),
        h(head),
        dv(a.dv),
        row_size(round_up(dv + 1, kLanes<T>)),
        query_coordinate{a.is_gaussian ? ::sqrt(a.scale) : a.scale,
                         a.is_gaussian ? origin_of(a, head) : 0},

        key_coordinate{a.is_gaussian ? ::sqrt(a.scale) : 1, origin_of(a, head)} {}

  // A key that is not hidden, if it is finite.
  static double origin_of(const Attention& call, int64_t h) {
    for (int64_t first = 0; first < call.n_k; first += kChunk) {
      const int64_t here = least(kChunk, call.n_k - first);
      uint8_t skip[kChunk] = {};
      read_mask(call, h, first, here, skip);
      for (int64_t j = 0; j < here; ++j) {
        if (skip[j]) continue;
        double number;
        read_column(call.key, h, first + j, 1, &number);
        return number * 0 == 0 ? number : 0;
      }
    }
    return 0;
  }
  // What the origin of the keys adds to lse, over t.
  double moved() const { return layout.gauge == 0 ? key_coordinate.origin : 0; }
  const Coordinate& coordinate(bool keys) const { return keys ? key_coordinate : query_coordinate; }

  bool empty() const { return layout.query.size == 0 || layout.key.size == 0; }
  int64_t panels(bool keys) const { return keys ? layout.key.size : layout.query.size; }
  int64_t nodes(bool keys) const { return keys ? layout.key_node.size : layout.query_node.size; }
  int64_t tokens(bool keys) const { return keys ? call.n_k : call.n_q; }

  // log of the unit in which N and Z are interpolated on a panel of nodes.
  double shift_at(const QueryPanel& panel, double t) const {
    const double gap = t - panel.middle;
    return panel.log_z + gap * (panel.mean - layout.gauge * 0.5 * (t + panel.middle));
  }
};

// Finds panels: which one a number lies on.
struct PanelFinder {
  int64_t panels = 0;
  Buffer<double> low, high;
  Buffer<int32_t> hint;  // [slots]: the last panel that starts at or below the slot
  int64_t slots = 0;
  double origin = 0, inverse = 0;

  template <class Panel>
  explicit PanelFinder(const List<Panel>& list)
      : panels(list.size), low(list.size), high(list.size), slots(4 * list.size) {
    for (int64_t p = 0; p < panels; ++p) low.data[p] = list[p].low, high.data[p] = list[p].high;
    hint.resize(slots);
    origin = low.data[0];
    const double extent = high.data[panels - 1] - origin;
    inverse = extent > 0 ? double(slots) / extent : 0;
    if (!(inverse < 1e300)) inverse = 0;
    int64_t p = 0;
    for (int64_t i = 0; i < slots; ++i) {
      const double from = inverse > 0 ? origin + double(i) / inverse : origin;
      while (p + 1 < panels && low.data[p + 1] <= from) ++p;
      hint.data[i] = int32_t(p);
    }
  }
  // `panels` if it is on none.
  int32_t find(double x) const {
    const double f = (x - origin) * inverse;
    int64_t p = hint.data[f > 0 ? f < double(slots - 1) ? int64_t(f) : slots - 1 : 0];
    while (p > 0 && low.data[p] > x) --p;
    while (p + 1 < panels && low.data[p + 1] <= x) ++p;
    return int32_t(x >= low.data[p] && x <= high.data[p] ? p : panels);
  }
};

// Some tokens, ordered by panel. Tokens on no panel come next, then keys that are hidden.
struct TokenOrder {
  int64_t first = 0, count = 0;
  Buffer<double> at, bias;
  Buffer<int32_t> panel, order, start;

  TokenOrder(const PanelFinder& finder, bool keys, int64_t most_tokens)
      : at(most_tokens),
        bias(keys ? most_tokens : 0),
        panel(most_tokens),
        order(most_tokens + kTile),
        start(finder.panels + 3) {}

  template <class T>
  void read(const Lookup<T>& head, const PanelFinder& finder, bool keys, int64_t from,
            int64_t tokens) {
    first = from;
    count = tokens;
    const Attention& call = head.call;
    const Coordinate& coordinate = head.coordinate(keys);
    const auto locate = [&](int64_t begin, int64_t here) {
      uint8_t skip[kChunk] = {};
      double* x = at.data + begin;
      read_column(keys ? call.key : call.query, head.h, first + begin, here, x);
      for (int64_t i = 0; i < here; ++i) x[i] = coordinate.of(x[i]);
      if (keys) read_bias(call, head.h, first + begin, here, bias.data + begin, skip);
      for (int64_t i = 0; i < here; ++i)
        panel.data[begin + i] = skip[i] ? int32_t(finder.panels + 1) : finder.find(x[i]);
    };
    const int64_t chunks = ceil_div(count, kChunk);
    const auto one = [&](int64_t c) { locate(c * kChunk, least(kChunk, count - c * kChunk)); };
    chunks > 1 ? parallel(chunks, one) : serial(chunks, one);
    int32_t* to = start.data;
    set_zero(to, finder.panels + 3);
    for (int64_t i = 0; i < count; ++i) ++to[panel.data[i]];
    int32_t sum = 0;
    for (int64_t p = 0; p < finder.panels + 3; ++p) sum += to[p], to[p] = sum;
    for (int64_t k = count; k < count + kTile; ++k) order.data[k] = 0;
    for (int64_t i = count - 1; i >= 0; --i) order.data[--to[panel.data[i]]] = int32_t(i);
  }
};

// The weights of a tile's tokens on the nodes of its panel. On a direct panel a token has one node;
// `weight` is not filled then.
template <class T>
struct TileWeights {
  bool direct;
  T* weight;             // [nodes][kTile]
  int32_t node[kTile];   // of all nodes of the axis; -1: a key that matters nowhere
  double factor[kTile];  // the token's weight on it
};

template <class T>
struct NodeWeights {
  const Lookup<T>& head;
  const bool keys;
  const Lagrange<T> basis;

  NodeWeights(const Lookup<T>& of, bool of_keys, int nodes)
      : head(of), keys(of_keys), basis(nodes) {}

  template <class Panel>
  void choose(const TokenOrder& tokens, const Panel& panel, const int32_t* order, int64_t count,
              TileWeights<T>& to) const {
    const List<double>& nodes = keys ? head.layout.key_node : head.layout.query_node;
    const double* node = nodes.data + panel.first_node;
    for (int64_t i = 0; i < count; ++i) {
      const double x = tokens.at.data[order[i]];
      int32_t low = 0, high = panel.nodes - 1;
      while (low < high) {
        const int32_t middle = (low + high) / 2;
        node[middle] < x ? low = middle + 1 : high = middle;
      }
      const int64_t at = panel.first_node + low;
      to.node[i] = node[low] == x ? int32_t(at) : -1;
      to.factor[i] = keys ? ::exp(tokens.bias.data[order[i]] - head.layout.node_bias[at]) : 1.0;
    }
  }

  template <class Panel>
  void interpolate(const TokenOrder& tokens, const Panel& panel, const int32_t* order,
                   int64_t count, double* place, T* weight) const {
    const double inverse = 1 / panel.half;
    for (int64_t i = 0; i < count; ++i)
      place[i] = (tokens.at.data[order[i]] - panel.middle) * inverse;
    const int64_t padded = round_up(count, kLanes<T>);
    for (int64_t i = count; i < padded; ++i) place[i] = 0;
    basis.weigh(place, padded, weight);
  }

  // Multiplies the weights of keys by those that they have at the panel's tilt.
  void tilt(const TokenOrder& tokens, const KeyPanel& panel, const int32_t* order, int64_t count,
            T* weight) const {
    constexpr int L = kLanes<double>;
    alignas(64) double tilt[kTile];
    alignas(64) T factor[kTile];
    for (int64_t i = 0; i < count; ++i) {
      const int32_t token = order[i];
      tilt[i] = rise(panel.tilt, tokens.at.data[token], panel.middle, head.layout.gauge) +
                tokens.bias.data[token] - panel.scale;
    }
    const int64_t padded = round_up(count, kLanes<T>);
    for (int64_t i = count; i < padded; ++i) tilt[i] = 0;
    for (int64_t i = 0; i < padded; i += L) {
      const Vec<double> x = load(tilt + i) * kLog2e;
      store(tilt + i, exp2_of(x > -100.0 ? x : splat(-1023.0)));
    }
    for (int64_t i = 0; i < padded; ++i) factor[i] = T(tilt[i]);
    for (int32_t b = 0; b < panel.nodes; ++b)
      for (int64_t i = 0; i < padded; i += kLanes<T>)
        store(weight + b * kTile + i, load(weight + b * kTile + i) * load(factor + i));
  }

  void find(const TokenOrder& tokens, int64_t p, const int32_t* order, int64_t count, double* place,
            TileWeights<T>& to) const {
    const auto of_panel = [&](const auto& panel) {
      to.direct = panel.direct;
      panel.direct ? choose(tokens, panel, order, count, to)
                   : interpolate(tokens, panel, order, count, place, to.weight);
    };
    if (!keys) return of_panel(head.layout.query[p]);
    of_panel(head.layout.key[p]);
    if (!to.direct) tilt(tokens, head.layout.key[p], order, count, to.weight);
  }
};

// How a pass divides the work. With few panels, tasks take chunks of tokens in the order of memory;
// with many, chunks would leave few tokens on a panel, and tasks take panels instead. Depends on
// sizes alone.
struct Division {
  bool by_panel;
  int64_t chunk, chunks, tasks;

  Division(int64_t panels, int64_t tokens, int64_t most_tasks)
      : chunk(most(chunk_of(tokens), round_up(32 * panels, 256))) {
    chunks = ceil_div(tokens, chunk);
    by_panel = chunks < 4 && panels >= 4;
    if (by_panel) chunk = tokens, chunks = 1;
    tasks = by_panel ? least(panels, 32) : least(chunks, most_tasks);
  }
};

// Scratch of a task.
template <class T>
struct TileScratch {
  Scratch scratch;
  double* place;
  T* block;
  TileWeights<T> weights;
  TileScratch()
      : scratch(kTile * 8 + (kMostNodes + 2 * kColumns) * kTile * int64_t(sizeof(T)), 3),
        place(scratch.take<double>(kTile)),
        block(scratch.take<T>(2 * kColumns * kTile)) {
    weights.weight = scratch.take<T>(kMostNodes * kTile);
  }
};

// Visits all tokens of an axis in tiles that lie on one panel:
// visit(task, panel, tile, coordinates of the tokens, scratch with the weights). Tokens on no panel
// are visited as tiles of the panel after the last, hidden keys as tiles of the next, without
// weights.
template <class T, class Visit>
static void for_all_tiles(const Lookup<T>& head, bool keys, const Division& division, Visit visit) {
  const int64_t panels = head.panels(keys), n = head.tokens(keys);
  const PanelFinder finder = keys ? PanelFinder(head.layout.key) : PanelFinder(head.layout.query);
  const NodeWeights<T> weights(head, keys, envelope_precision(head.call.value.dtype).nodes);
  const auto visit_panels = [&](int64_t task, const TokenOrder& tokens, int64_t from, int64_t to,
                                TileScratch<T>& scratch) {
    for (int64_t p = from; p < to; ++p)
      for (int64_t i = tokens.start.data[p]; i < tokens.start.data[p + 1]; i += kTile) {
        const int64_t here = least(kTile, tokens.start.data[p + 1] - i);
        const int32_t* order = tokens.order.data + i;
        if (p < panels) weights.find(tokens, p, order, here, scratch.place, scratch.weights);
        visit(task, p, Tile{tokens.first, order, here}, tokens.at.data, scratch);
      }
  };
  if (division.by_panel) {
    TokenOrder tokens(finder, keys, n);
    tokens.read(head, finder, keys, 0, n);
    parallel(division.tasks, [&](int64_t task) {
      TileScratch<T> scratch;
      // Panels whose tokens begin in this task's share of all tokens.
      const auto border = [&](int64_t k) {
        if (k == division.tasks) return panels + 2;
        int64_t low = 0, high = panels + 2;
        const int64_t wanted = n * k / division.tasks;
        while (low < high) {
          const int64_t middle = (low + high) / 2;
          tokens.start.data[middle] < wanted ? low = middle + 1 : high = middle;
        }
        return k == 0 ? int64_t(0) : low;
      };
      visit_panels(task, tokens, border(task), border(task + 1), scratch);
    });
    return;
  }
  const int64_t each = ceil_div(division.chunks, division.tasks);
  parallel(division.tasks, [&](int64_t task) {
    TileScratch<T> scratch;
    TokenOrder tokens(finder, keys, division.chunk);
    for (int64_t c = task * each; c < least(division.chunks, (task + 1) * each); ++c) {
      const int64_t first = c * division.chunk;
      tokens.read(head, finder, keys, first, least(division.chunk, n - first));
      visit_panels(task, tokens, 0, panels + 2, scratch);
    }
    stream_end();
  });
}
