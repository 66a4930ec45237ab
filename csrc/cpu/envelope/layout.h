// The layout of a head with a bias per key: panels on both axes under the envelope of the logits,
// and the pairs of panels that matter. Included inside an ISA's namespace. docs/lookup.md derives
// it.
//
// The envelope E(t) is the largest logit at t; a key matters at t if its logit is at least E(t) -
// L. If s < s' both matter at both t < t', then (t' - t)(s' - s) <= 2 L: what matters is a band of
// thin rectangles, and each is a block of few nodes.
//   1. sites of the upper hull, and for every site the t where it comes closest to the envelope;
//   2. bins: runs of sites so narrow that one tilt serves them wherever they matter;
//   3. query panels, from left to right, as wide as the error bound allows;
//   4. key panels, likewise; 5. blocks.
// A panel of few sites keeps the sites themselves as nodes, so nothing is ever refused.

struct KeyPanel {
  double low, high;  // sites
  double middle, half;
  double tilt;   // the t where queries weigh the panel most
  double scale;  // log of the weight of its keys there, measured from `middle`
  int64_t top;   // the token of most weight there: values are measured from its value
  int64_t first_node;
  int32_t nodes;
  bool direct;       // nodes are the sites
  double log_error;  // of the bound
};
struct QueryPanel {
  double low, high;
  double middle, half;
  double mean, log_z;  // at the middle: the mean key, log Z
  int64_t first_node;
  int32_t nodes;
  bool direct;
  int64_t first_block, blocks;
  double error;  // bound of the query-side error, relative to Z
};

struct EnvelopeLayout {
  double gauge = 0;
  double slack = 0;
  List<QueryPanel> query;
  List<KeyPanel> key;
  List<int32_t> blocks;  // key panels, of one query panel after the other
  List<double> query_node, key_node;
  List<double> node_bias;  // of key nodes: a node is a key with this bias
  double key_error = 0;    // bound of the key-side error, relative to Z
};

struct Bins {
  List<double> at, half, scale, tilt;  // middle, half width, log weight measured from it at `tilt`
  List<double> from, to;               // the window of t where they matter
  List<double> reach_from, reach_to;   // monotone bounds of the windows
  List<int64_t> first, last;           // sites
  List<int32_t> token;                 // of most weight
};

class EnvelopeMaker {
 public:
  EnvelopeMaker(const Sites& queries, const Sites& keys, double gauge, EnvelopePrecision precision,
                EnvelopeLayout& layout)
      : t_(queries),
        keys_(keys),
        gauge_(gauge),
        most_(precision.nodes),
        log_error_(::log(precision.error)),
        error_(precision.nodes),
        layout_(layout) {
    const double log_n = ::log(double(keys.count) + 1);
    depth_ = log_n - log_error_;
    slack_ = least_of(1, 0.5 * error_.reach(log_error_));
    window_ = least_of(log_n, 6) - log_error_ + slack_;
    largest_rise_ = gauge != 0 ? kLargestRise + keys.most_bias : INFINITY;

    layout_.gauge = gauge;
    layout_.slack = slack_;
    t_min_ = t_[0];
    t_max_ = t_[t_.count - 1];
  }

  void run() {
    find_hull();
    keep_sites();
    make_bins();
    make_query_panels();
    make_key_panels();
    make_blocks();
  }

 private:
  const Sites &t_, &keys_;
  const double gauge_;
  const int most_;  // nodes of a panel
  const double log_error_;
  const InterpolationError error_;
  EnvelopeLayout& layout_;
  double depth_, slack_, window_, largest_rise_, t_min_, t_max_;

  List<int32_t> hull_;  // sites
  List<double> cut_;    // [hull - 1]: where each hands over to the next
  List<double> edge_;   // [hull + 1]: the same, between t_min and t_max
  // The sites that come within `depth` of the envelope.
  List<double> s_, c_, star_;
  List<int32_t> token_;
  Bins bins_;
  List<int32_t> panel_of_bin_;
  List<double> spot_, spot_log_z_;  // where the key side is checked
  List<int64_t> first_spot_;        // of each query panel, and the end

  static double least_of(double a, double b) { return a < b ? a : b; }
  double clip(double t) const { return t < t_min_ ? t_min_ : t > t_max_ ? t_max_ : t; }

  void find_hull() {
    for (int64_t j = 0; j < keys_.count; ++j) {
      const double s = keys_[j], c = keys_.bias.data[j];
      while (hull_.size > 0) {
        const int32_t last = hull_.back();
        const double gap = s - keys_[last];
        const double t =
            0.5 * gauge_ * (keys_[last] + s) - (c - keys_.bias.data[last]) / gap;  // j overtakes
        if (cut_.size == 0 || t > cut_.back()) {
          cut_.push(t);
          break;
        }
        hull_.pop();
        cut_.pop();
      }
      hull_.push(int32_t(j));
    }
    edge_.push(t_min_);
    for (int64_t i = 0; i < cut_.size; ++i) edge_.push(clip(cut_[i]));
    edge_.push(t_max_);
  }

  // What the hull's vertex i exceeds a key of this bias by at t.
  double excess(double t, int64_t i, double s, double c) const {
    return rise(t, keys_[hull_[i]], s, gauge_) + keys_.bias.data[hull_[i]] - c;
  }

  void keep_sites() {
    const int64_t vertices = hull_.size;
    int64_t v = 0, reign = 0;  // the last vertex at or below the site; the vertex that reigns at t*
    for (int64_t j = 0; j < keys_.count; ++j) {
      const double s = keys_[j], c = keys_.bias.data[j];
      while (v + 1 < vertices && keys_[hull_[v + 1]] <= s) ++v;
      double star;
      if (hull_[v] == j)
        star = 0.5 * (edge_[v] + edge_[v + 1]);
      else
        star = edge_[v + 1];  // the edge of the hull above the site
      while (reign + 1 < vertices && cut_[reign] < star) ++reign;
      if (excess(star, reign, s, c) > depth_) continue;
      s_.push(s);
      c_.push(c);
      star_.push(star);
      token_.push(keys_.token.data[j]);
    }
  }

  // The window of t around `centre` where a bin is within `window_` of the envelope, by bisection
  // over the hull: the excess of the envelope is convex.
  void find_window(double s, double scale, double centre, double* from, double* to) const {
    const int64_t last = cut_.size;
    int64_t home = 0;
    for (int64_t low = 0, high = last; low < high;) {
      const int64_t middle = (low + high) / 2;
      cut_[middle] < centre ? low = middle + 1 : high = middle;
      home = low;
    }
    const double bias = scale + window_;
    const auto border = [&](int64_t i, double otherwise) {
      const double top = keys_[hull_[i]], slope = top - s;
      if (otherwise == t_max_ ? !(slope > 0) : !(slope < 0)) return otherwise;
      return clip(0.5 * gauge_ * (top + s) - (keys_.bias.data[hull_[i]] - bias) / slope);
    };
    int64_t near = home, far = 0;
    while (near != far) {
      const int64_t middle = (near + far) / 2;
      excess(edge_[middle + 1], middle, s, bias) <= 0 ? near = middle : far = middle + 1;
    }
    *from = border(near, t_min_);
    near = home;
    far = last;
    while (near != far) {
      const int64_t middle = (near + far + 1) / 2;
      excess(edge_[middle], middle, s, bias) <= 0 ? near = middle : far = middle - 1;
    }
    *to = border(near, t_max_);
  }

  // Adds sites first .. last - 1 as a bin, or as two halves where one tilt will not do.
  void add_bin(int64_t first, int64_t last) {
    const double s = 0.5 * (s_[first] + s_[last - 1]), half = 0.5 * (s_[last - 1] - s_[first]);
    const int64_t middle = (first + last) / 2;
    const double tilt = star_[middle];
    double top = -INFINITY;
    int64_t at = first;
    for (int64_t j = first; j < last; ++j) {
      const double x = rise(tilt, s_[j], s, gauge_) + c_[j];
      if (x > top) top = x, at = j;
    }
    double sum = 0;
    for (int64_t j = first; j < last; ++j) sum += ::exp(rise(tilt, s_[j], s, gauge_) + c_[j] - top);
    const double scale = top + ::log(sum);
    double from, to;
    find_window(s, scale, tilt, &from, &to);
    if (last - first > 1 && (half * larger_of(tilt - from, to - tilt) > slack_ ||
                             half * ::fabs(tilt - gauge_ * s) > largest_rise_)) {
      add_bin(first, middle);
      add_bin(middle, last);
      return;
    }
    bins_.at.push(s);
    bins_.half.push(half);
    bins_.scale.push(scale);
    bins_.tilt.push(tilt);
    bins_.from.push(from);
    bins_.to.push(to);
    bins_.first.push(first);
    bins_.last.push(last);
    bins_.token.push(token_[at]);
  }

  static constexpr int64_t kFirstBins = 256;
  void make_bins() {
    const int64_t step = most(1, s_.size / kFirstBins);
    for (int64_t first = 0; first < s_.size; first += step)
      add_bin(first, least(first + step, s_.size));
    const int64_t count = bins_.at.size;
    for (int64_t b = 0; b < count; ++b) {
      bins_.reach_from.push(bins_.from[b]);
      bins_.reach_to.push(b == 0 ? bins_.to[0] : larger_of(bins_.reach_to[b - 1], bins_.to[b]));
    }
    for (int64_t b = count - 2; b >= 0; --b)
      bins_.reach_from[b] = least_of(bins_.reach_from[b], bins_.reach_from[b + 1]);
    // Vectors are read past the end.
    for (auto* list : {&bins_.at, &bins_.half, &bins_.scale, &bins_.from, &bins_.to})
      for (int i = 0; i < kLanes<double>; ++i) list->push(0);
  }
  int64_t bin_count() const { return bins_.first.size; }

  // The first entry of a rising list that is at least x (or above x).
  static int64_t first_at_least(const List<double>& list, double x, int64_t size) {
    int64_t low = 0, high = size;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      list[middle] < x ? low = middle + 1 : high = middle;
    }
    return low;
  }
  static int64_t first_above(const List<double>& list, double x, int64_t size) {
    int64_t low = 0, high = size;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      list[middle] <= x ? low = middle + 1 : high = middle;
    }
    return low;
  }

  // Runs over the bins that matter somewhere between two t, in vectors: visit(first bin, which
  // lanes matter, 1 or 0).
  template <class Visit>
  BOLTZATTN_INLINED void for_bins(double low, double high, Visit visit) const {
    constexpr int L = kLanes<double>;
    const int64_t begin = first_at_least(bins_.reach_to, low, bin_count());
    const int64_t end = first_above(bins_.reach_from, high, bin_count());
    Vec<double> lane;
    for (int i = 0; i < L; ++i) lane[i] = i;
    for (int64_t b = begin; b < end; b += L) {
      const Vec<double> inside = (load(bins_.from.data + b) <= high) ? splat(1.0) : splat(0.0);
      const Vec<double> too = (load(bins_.to.data + b) >= low) ? splat(1.0) : splat(0.0);
      const Vec<double> exists = (lane < double(end - b)) ? splat(1.0) : splat(0.0);
      visit(b, inside * too * exists);
    }
  }
  BOLTZATTN_INLINED Vec<double> logits_of_bins(double t, int64_t b) const {
    const Vec<double> s = load(bins_.at.data + b), c = load(bins_.scale.data + b);
    return c + (gauge_ != 0 ? (t - s) * (t - s) * -0.5 : s * t);
  }
  static BOLTZATTN_INLINED Vec<double> exp_of(Vec<double> x) {
    return exp2_of(larger<double>(x, splat(-700.0)) * kLog2e);
  }

  // log Z at t from the bins that matter between two t.
  double log_z(double t, double low, double high) const {
    Vec<double> tops = splat<double>(-INFINITY), sums{};
    for_bins(low, high, [&](int64_t b, Vec<double> matters) BOLTZATTN_INLINED {
      const Vec<double> x = logits_of_bins(t, b);
      tops = larger<double>(tops, matters > 0.0 ? x : tops);
    });
    const double top = reduce_max<double>(tops);
    for_bins(low, high, [&](int64_t b, Vec<double> matters) BOLTZATTN_INLINED {
      sums += matters * exp_of(least_vector(logits_of_bins(t, b) - top));
    });
    return top + ::log(reduce_sum<double>(sums));
  }
  static BOLTZATTN_INLINED Vec<double> least_vector(Vec<double> x) { return x < 0.0 ? x : x * 0.0; }

  // A panel of the query sites first .. last - 1; whether it is good enough.
  bool try_query_panel(int64_t first, int64_t last, QueryPanel& panel) const {
    panel.low = t_[first];
    panel.high = t_[last - 1];
    panel.middle = 0.5 * (panel.low + panel.high);
    panel.half = 0.5 * (panel.high - panel.low);
    panel.direct = last - first <= most_;
    panel.nodes = panel.direct ? int32_t(last - first) : most_;
    panel.error = 0;
    const double t = panel.middle, low = panel.low, high = panel.high, h = panel.half;
    Vec<double> tops = splat<double>(-INFINITY);
    for_bins(low, high, [&](int64_t b, Vec<double> matters) BOLTZATTN_INLINED {
      tops = larger<double>(tops, matters > 0.0 ? logits_of_bins(t, b) : tops);
    });
    const double top = reduce_max<double>(tops);
    Vec<double> sum{}, mean{};
    for_bins(low, high, [&](int64_t b, Vec<double> matters) BOLTZATTN_INLINED {
      const Vec<double> w = matters * exp_of(least_vector(logits_of_bins(t, b) - top));
      sum += w;
      mean += w * load(bins_.at.data + b);
    });
    const double total = reduce_sum<double>(sum);
    panel.mean = reduce_sum<double>(mean) / total;
    panel.log_z = top + ::log(total);
    if (panel.direct) return true;
    Vec<double> errors{}, up{}, down{};
    const double p = error_.nodes, from = panel.mean;
    for_bins(low, high, [&](int64_t b, Vec<double> matters) BOLTZATTN_INLINED {
      const Vec<double> x = logits_of_bins(t, b) - panel.log_z;
      const Vec<double> gap = load(bins_.at.data + b) - from;
      const Vec<double> kappa = ((gap < 0.0 ? -gap : gap) + load(bins_.half.data + b)) * h + 1e-100;
      const Vec<double> ratio = kappa * (0.5 / (p + 1));
      const Vec<double> crude = kappa + 1.3862943611198906;
      const Vec<double> fine = log_of(kappa * 0.5) * p + error_.constant +
                               kappa * kappa * (0.25 / (p + 1)) + ratio * 4.0;  // > -log(1 - ratio)
      const Vec<double> log_bound = (ratio < 0.9) & (fine < crude) ? fine : crude;
      errors += matters * exp_of(bounded(x + log_bound));
      up += matters * exp_of(bounded(x + gap * h));
      down += matters * exp_of(bounded(x - gap * h));
    });
    panel.error = reduce_sum<double>(errors);
    const double amplified = larger_of(reduce_sum<double>(up), reduce_sum<double>(down));
    return panel.error <= ::exp(log_error_) && amplified <= ::exp(kMostAmplification);
  }
  static BOLTZATTN_INLINED Vec<double> bounded(Vec<double> x) {
    return x < 300.0 ? x : splat(300.0);
  }

  // Makes panels from left to right: accept(first, last, panel) says whether a run may be one; a
  // run of one always is. Steps are powers of two, first growing, then shrinking.
  template <class Panel, class Accept, class Add>
  static void make_panels(int64_t size, Accept accept, Add add) {
    for (int64_t first = 0, guess = 1; first < size;) {
      Panel best{}, next{};
      accept(first, first + 1, best);
      int64_t last = first + 1, step = guess;
      bool growing = true;
      while (step > 0 && last < size) {
        const int64_t wanted = least(last + step, size);
        if (accept(first, wanted, next))
          best = next, last = wanted;
        else
          growing = false;
        step = growing ? 2 * step : step / 2;
      }
      add(first, last, best);
      for (guess = 1; 4 * guess <= last - first;) guess *= 2;
      first = last;
    }
  }

  void make_query_panels() {
    make_panels<QueryPanel>(
        t_.count,
        [&](int64_t first, int64_t last, QueryPanel& panel) {
          return try_query_panel(first, last, panel);
        },
        [&](int64_t first, int64_t last, QueryPanel& panel) {
          panel.first_node = layout_.query_node.size;
          first_spot_.push(spot_.size);
          for (int64_t i = 0; i < panel.nodes; ++i) {
            const double t = panel.direct
                                 ? t_[first + i]
                                 : panel.middle + panel.half * chebyshev_node(most_, int(i));
            layout_.query_node.push(t);
            if (panel.direct) add_spot(t, panel);
          }
          if (!panel.direct)
            for (const double t : {panel.low, panel.middle, panel.high}) add_spot(t, panel);
          layout_.query.push(panel);
          (void)last;
        });
    first_spot_.push(spot_.size);
  }
  void add_spot(double t, const QueryPanel& panel) {
    spot_.push(t);
    spot_log_z_.push(t == panel.middle ? panel.log_z : log_z(t, panel.low, panel.high));
  }

  // A panel of the bins first .. last - 1.
  bool try_key_panel(int64_t first, int64_t last, KeyPanel& panel) const {
    const int64_t sites = bins_.last[last - 1] - bins_.first[first];
    panel.low = s_[bins_.first[first]];
    panel.high = s_[bins_.last[last - 1] - 1];
    panel.middle = 0.5 * (panel.low + panel.high);
    panel.half = 0.5 * (panel.high - panel.low);
    panel.direct = sites <= most_;
    panel.nodes = panel.direct ? int32_t(sites) : most_;
    panel.scale = panel.log_error = -INFINITY;
    panel.tilt = 0;
    panel.top = bins_.token[first];
    double from = INFINITY, to = -INFINITY;
    for (int64_t b = first; b < last; ++b) {
      from = least_of(from, bins_.from[b]);
      to = larger_of(to, bins_.to[b]);
    }
    const int64_t panels = layout_.query.size;
    int64_t x = 0, y = panels;  // query panels that overlap the window
    for (int64_t low = 0, high = panels; low < high; x = low) {
      const int64_t middle = (low + high) / 2;
      layout_.query[middle].high < from ? low = middle + 1 : high = middle;
      x = low;
    }
    for (int64_t low = 0, high = panels; low < high;) {
      const int64_t middle = (low + high) / 2;
      layout_.query[middle].low <= to ? low = middle + 1 : high = middle;
      y = low;
    }
    if (x >= y) return true;  // in a gap between the queries: no query sees it
    const int64_t begin = first_spot_[x], end = first_spot_[y];
    const double s = panel.middle;
    double highest = -INFINITY;
    for (int64_t i = begin; i < end; ++i)
      highest = larger_of(highest, score_of(spot_[i], s, gauge_) - spot_log_z_[i]);
    double low = INFINITY, high = -INFINITY;
    for (int64_t i = begin; i < end; ++i)
      if (score_of(spot_[i], s, gauge_) - spot_log_z_[i] >= highest - 1) {
        low = least_of(low, spot_[i]);
        high = larger_of(high, spot_[i]);
      }
    panel.tilt = 0.5 * (low + high);
    double top = -INFINITY;
    for (int64_t b = first; b < last; ++b) {
      const double at = bins_.scale[b] + rise(panel.tilt, bins_.at[b], s, gauge_);
      if (at > top) top = at, panel.top = bins_.token[b];
    }
    double sum = 0;
    for (int64_t b = first; b < last; ++b)
      sum += ::exp(bins_.scale[b] + rise(panel.tilt, bins_.at[b], s, gauge_) - top);
    panel.scale = top + ::log(sum);
    if (panel.direct) return true;
    double error = -INFINITY, amplified = -INFINITY;
    for (int64_t i = begin; i < end; ++i) {
      const double g = score_of(spot_[i], s, gauge_) - spot_log_z_[i] + panel.scale;
      const double kappa = ::fabs(spot_[i] - panel.tilt) * panel.half;
      error = larger_of(error, g + error_.log_bound(kappa));
      amplified = larger_of(amplified, g + kappa);
    }
    panel.log_error = error;
    return error <= log_error_ && amplified <= kMostAmplification &&
           panel.half * ::fabs(panel.tilt - gauge_ * s) <= largest_rise_;
  }

  void make_key_panels() {
    make_panels<KeyPanel>(
        bin_count(),
        [&](int64_t first, int64_t last, KeyPanel& panel) {
          return try_key_panel(first, last, panel);
        },
        [&](int64_t first, int64_t last, KeyPanel& panel) {
          const bool seen = panel.scale > -INFINITY;
          for (int64_t b = first; b < last; ++b)
            panel_of_bin_.push(seen ? int32_t(layout_.key.size) : -1);
          if (!seen) return;
          panel.first_node = layout_.key_node.size;
          const int64_t site = bins_.first[first];
          for (int64_t i = 0; i < panel.nodes; ++i) {
            const double s = panel.direct
                                 ? s_[site + i]
                                 : panel.middle + panel.half * chebyshev_node(most_, int(i));
            layout_.key_node.push(s);
            layout_.node_bias.push(panel.direct
                                       ? c_[site + i]
                                       : panel.scale - rise(panel.tilt, s, panel.middle, gauge_));
          }
          layout_.key.push(panel);
        });
  }

  void make_blocks() {
    for (int64_t p = 0; p < layout_.query.size; ++p) {
      QueryPanel& panel = layout_.query[p];
      panel.first_block = layout_.blocks.size;
      const int64_t begin = first_at_least(bins_.reach_to, panel.low, bin_count());
      const int64_t end = first_above(bins_.reach_from, panel.high, bin_count());
      int32_t last = -1;
      for (int64_t b = begin; b < end; ++b) {
        const int32_t of_bin = panel_of_bin_[b];
        if (of_bin <= last || bins_.from[b] > panel.high || bins_.to[b] < panel.low) continue;
        layout_.blocks.push(last = of_bin);
      }
      panel.blocks = layout_.blocks.size - panel.first_block;
      check_key_side(p, panel);
    }
  }
  // The bound of the key-side error on a query panel.
  void check_key_side(int64_t p, const QueryPanel& panel) {
    for (int64_t i = first_spot_[p]; i < first_spot_[p + 1]; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < panel.blocks; ++k) {
        const KeyPanel& key = layout_.key[layout_.blocks[panel.first_block + k]];
        if (key.direct) continue;
        const double g = key.scale + score_of(spot_[i], key.middle, gauge_) - spot_log_z_[i];
        sum += ::exp(g + error_.log_bound(::fabs(spot_[i] - key.tilt) * key.half));
      }
      layout_.key_error = larger_of(layout_.key_error, sum);
    }
  }
};
