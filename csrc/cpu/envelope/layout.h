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

struct Bin {
  double at, half;      // middle, half width
  double scale, tilt;   // log weight measured from the middle at `tilt`
  double from, to;      // the window of t where it matters
  int64_t first, last;  // sites
  int32_t token;        // of most weight
};
// All bins, as vectors of their numbers.
struct Bins {
  List<double> at, half, scale, from, to;
  List<double> reach_from, reach_to;  // monotone bounds of the windows
  List<int64_t> first, last;
  List<int32_t> token;
};
// A panel, and the sites or bins first .. last - 1 that it was made of.
template <class Panel>
struct Run {
  int64_t first, last;
  Panel panel;
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
    depth_ = envelope_depth(precision, keys.count);
    slack_ = least_of(1, 0.5 * error_.reach(log_error_));
    window_ = least_of(log_n, 6) - log_error_ + slack_;
    largest_rise_ = gauge != 0 ? kLargestRise + keys.most_bias : INFINITY;

    layout_.gauge = gauge;
    layout_.slack = slack_;
    t_min_ = t_[0];
    t_max_ = t_[t_.count - 1];
  }

  // The sites that matter: in one thread, while another may work on something else.
  void find_sites() {
    find_hull();
    keep_sites();
  }
  void make_layout() {
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
  List<double> spot_;  // where the key side is checked
  Buffer<double> spot_log_z_;
  List<int64_t> first_spot_;  // of each query panel, and the end

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

  // Adds sites first .. last - 1 as a bin, or as several where one tilt will not do.
  void add_bin(int64_t first, int64_t last, List<Bin>& bins) const {
    const double s = 0.5 * (s_[first] + s_[last - 1]), half = 0.5 * (s_[last - 1] - s_[first]);
    const int64_t middle = (first + last) / 2;
    const double tilt = star_[middle];
    double scale = c_[first];
    int64_t at = first;
    if (last - first > 1) {
      double top = -INFINITY, sum = 0;
      for (int64_t j = first; j < last; ++j) {
        const double x = rise(tilt, s_[j], s, gauge_) + c_[j];
        if (x > top) top = x, at = j;
      }
      for (int64_t j = first; j < last; ++j)
        sum += ::exp(rise(tilt, s_[j], s, gauge_) + c_[j] - top);
      scale = top + ::log(sum);
    }
    double from, to;
    find_window(s, scale, tilt, &from, &to);
    const double turn = half * larger_of(tilt - from, to - tilt);
    if (last - first > 1 && (turn > slack_ || half * ::fabs(tilt - gauge_ * s) > largest_rise_)) {
      // Windows of parts are about as wide, so it is known how many parts will do.
      int depth = 1;
      while (turn > double(int64_t(4) << depth) * slack_ && last - first > int64_t(1) << depth)
        ++depth;
      return add_parts(first, last, depth, bins);
    }
    bins.push({s, half, scale, tilt, from, to, first, last, token_[at]});
  }
  // The same for 2^depth parts of them.
  void add_parts(int64_t first, int64_t last, int depth, List<Bin>& bins) const {
    if (depth == 0 || last - first == 1) return add_bin(first, last, bins);
    const int64_t middle = (first + last) / 2;
    add_parts(first, middle, depth - 1, bins);
    add_parts(middle, last, depth - 1, bins);
  }

  static constexpr int64_t kFirstBins = 256, kBinTasks = 16;
  void make_bins() {
    const int64_t step = most(1, s_.size / kFirstBins), starts = ceil_div(s_.size, step);
    List<Bin> bins[kBinTasks];
    in_parallel(kBinTasks, [&](int64_t task) {
      const int64_t end = starts * (task + 1) / kBinTasks;
      for (int64_t i = starts * task / kBinTasks; i < end; ++i)
        add_bin(i * step, least((i + 1) * step, s_.size), bins[task]);
    });
    for (const List<Bin>& list : bins)
      for (int64_t i = 0; i < list.size; ++i) {
        const Bin& bin = list[i];
        bins_.at.push(bin.at);
        bins_.half.push(bin.half);
        bins_.scale.push(bin.scale);
        bins_.from.push(bin.from);
        bins_.to.push(bin.to);
        bins_.first.push(bin.first);
        bins_.last.push(bin.last);
        bins_.token.push(bin.token);
      }
    const int64_t count = bin_count();
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

  // The bins that matter between two t, at t.
  struct Totals {
    double log_z, mean;
    int64_t begin, count;  // bins, in whole vectors
  };
  // Logits and weights, one of all bins.
  struct Weighed {
    Buffer<double> logit, weight;
    explicit Weighed(int64_t bins)
        : logit(bins + 2 * kLanes<double>), weight(bins + 2 * kLanes<double>) {}
  };
  // Logits are measured from log Z, weights are over Z.
  BOLTZATTN_INLINED Totals weigh_bins(double t, double low, double high, Weighed& at) const {
    constexpr int L = kLanes<double>;
    Vec<double> tops = splat<double>(-INFINITY), sums{}, means{};
    int64_t begin = 0, count = 0;
    for_bins(low, high, [&](int64_t b, Vec<double> matters) BOLTZATTN_INLINED {
      if (count == 0) begin = b;
      const Vec<double> s = load(bins_.at.data + b), c = load(bins_.scale.data + b);
      const Vec<double> x = c + (gauge_ != 0 ? (t - s) * (t - s) * -0.5 : s * t);
      const Vec<double> logit = matters > 0.0 ? x : splat<double>(-INFINITY);
      tops = larger<double>(tops, logit);
      store(at.logit.data + count, logit);
      count += L;
    });
    const double top = reduce_max<double>(tops);
    for (int64_t i = 0; i < count; i += L) {
      const Vec<double> x = load(at.logit.data + i) - top;
      const Vec<double> w = x > -700.0 ? exp_of(x) : splat(0.0);
      sums += w;
      means += w * load(bins_.at.data + begin + i);
      store(at.weight.data + i, w);
    }
    const double total = reduce_sum<double>(sums), log_z = top + ::log(total);
    for (int64_t i = 0; i < count; i += L) {
      store(at.logit.data + i, load(at.logit.data + i) - log_z);
      store(at.weight.data + i, load(at.weight.data + i) * (1 / total));
    }
    return {log_z, reduce_sum<double>(means) / total, begin, count};
  }
  static BOLTZATTN_INLINED Vec<double> exp_of(Vec<double> x) {
    const Vec<double> bounded = x < 300.0 ? x : splat(300.0);
    return exp2_of(larger<double>(bounded, splat(-700.0)) * kLog2e);
  }

  // A panel of the query sites first .. last - 1; whether it is good enough. `at` is scratch.
  bool try_query_panel(int64_t first, int64_t last, QueryPanel& panel, Weighed& at) const {
    constexpr int L = kLanes<double>;
    panel.low = t_[first];
    panel.high = t_[last - 1];
    panel.middle = 0.5 * (panel.low + panel.high);
    panel.half = 0.5 * (panel.high - panel.low);
    panel.direct = last - first <= most_;
    panel.nodes = panel.direct ? int32_t(last - first) : most_;
    panel.error = 0;
    const Totals bins = weigh_bins(panel.middle, panel.low, panel.high, at);
    panel.mean = bins.mean;
    panel.log_z = bins.log_z;
    if (panel.direct) return true;
    Vec<double> errors{}, up{}, down{};
    const double p = error_.nodes;
    for (int64_t i = 0; i < bins.count; i += L) {
      const Vec<double> w = load(at.weight.data + i);
      const Vec<double> gap = load(bins_.at.data + bins.begin + i) - panel.mean;
      const Vec<double> half = load(bins_.half.data + bins.begin + i);
      const Vec<double> kappa = ((gap < 0.0 ? -gap : gap) + half) * panel.half;
      // The bound of InterpolationError, with (1 - y / 64)^-64 >= exp(y) instead of exp(y).
      const Vec<double> ratio = kappa * (0.5 / (p + 1)), y = kappa * kappa * (0.25 / (p + 1));
      const Vec<double> below = power(1.0 - y * (1.0 / 64), 64) * (1.0 - ratio);
      const Vec<double> fine = w * error_.factor * power(kappa * 0.5, most_) / below;
      // A weight that is nothing at the middle may be all at an end.
      const Vec<double> grown = exp_of(load(at.logit.data + i) + kappa), crude = grown * 4.0;
      const Vec<double> shrunk = w / (1.0 + kappa + kappa * kappa * 0.5);  // at least w exp(-kappa)
      errors += (ratio < 0.9) & (fine < crude) ? fine : crude;
      up += gap > 0.0 ? grown : shrunk;
      down += gap > 0.0 ? shrunk : grown;
    }
    panel.error = reduce_sum<double>(errors);
    const double amplified = larger_of(reduce_sum<double>(up), reduce_sum<double>(down));
    return panel.error <= ::exp(log_error_) && amplified <= ::exp(kMostAmplification);
  }
  static BOLTZATTN_INLINED Vec<double> power(Vec<double> x, int exponent) {
    Vec<double> result = splat(1.0);
    for (; exponent > 0; exponent >>= 1, x *= x)
      if (exponent & 1) result *= x;
    return result;
  }

  // Makes panels of begin .. end - 1 from left to right: accept(first, last, panel) says whether a
  // run may be one; a run of `sure` always is. Steps are powers of two, first growing, then
  // shrinking to one: a site left behind would begin a panel across a gap.
  template <class Panel, class Accept>
  static void make_panels(int64_t begin, int64_t end, int64_t sure, Accept accept,
                          List<Run<Panel>>& runs) {
    for (int64_t first = begin, guess = 1; first < end;) {
      Panel best{}, next{};
      int64_t last = least(first + sure, end), step = guess;
      bool growing = true, known = false;
      while (step > 0 && last < end) {
        const int64_t wanted = least(last + step, end);
        if (accept(first, wanted, next))
          best = next, last = wanted, known = true;
        else
          growing = false;
        step = growing ? 2 * step : step / 2;
      }
      if (!known) accept(first, last, best);
      runs.push({first, last, best});
      for (guess = 1; 4 * guess <= last - first;) guess *= 2;
      first = last;
    }
  }
  // Layouts of many bins are made in several segments side by side. Their number follows from the
  // bins alone: results do not depend on the number of threads.
  static constexpr int64_t kMostSegments = 16, kBinsOfSegment = 256;
  int64_t segments() const { return least(kMostSegments, most(1, bin_count() / kBinsOfSegment)); }
  template <class Body>
  static void in_parallel(int64_t tasks, Body body) {
    tasks > 1 ? parallel(tasks, body) : serial(tasks, body);
  }

  void make_query_panels() {
    List<Run<QueryPanel>> runs[kMostSegments];
    const int64_t tasks = segments();
    in_parallel(tasks, [&](int64_t task) {
      Weighed at(bin_count());
      make_panels(
          t_.count * task / tasks, t_.count * (task + 1) / tasks, most_,
          [&](int64_t first, int64_t last, QueryPanel& panel) {
            return try_query_panel(first, last, panel, at);
          },
          runs[task]);
    });
    for (const List<Run<QueryPanel>>& list : runs)
      for (int64_t i = 0; i < list.size; ++i) add_query_panel(list[i].first, list[i].panel);
    first_spot_.push(spot_.size);
    spot_log_z_.resize(spot_.size);
    in_parallel(tasks, [&](int64_t task) {
      Weighed at(bin_count());
      const int64_t panels = layout_.query.size, end = panels * (task + 1) / tasks;
      for (int64_t p = panels * task / tasks; p < end; ++p) {
        const QueryPanel& panel = layout_.query[p];
        for (int64_t i = first_spot_[p]; i < first_spot_[p + 1]; ++i)
          spot_log_z_.data[i] = spot_[i] == panel.middle
                                    ? panel.log_z
                                    : weigh_bins(spot_[i], panel.low, panel.high, at).log_z;
      }
    });
  }
  void add_query_panel(int64_t first, QueryPanel panel) {
    panel.first_node = layout_.query_node.size;
    first_spot_.push(spot_.size);
    for (int64_t i = 0; i < panel.nodes; ++i) {
      const double t =
          panel.direct ? t_[first + i] : panel.middle + panel.half * chebyshev_node(most_, int(i));
      layout_.query_node.push(t);
      if (panel.direct) spot_.push(t);
    }
    if (!panel.direct)
      for (const double t : {panel.low, panel.middle, panel.high}) spot_.push(t);
    layout_.query.push(panel);
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
      highest = larger_of(highest, score_of(spot_[i], s, gauge_) - spot_log_z_.data[i]);
    double low = INFINITY, high = -INFINITY;
    for (int64_t i = begin; i < end; ++i)
      if (score_of(spot_[i], s, gauge_) - spot_log_z_.data[i] >= highest - 1) {
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
      const double g = score_of(spot_[i], s, gauge_) - spot_log_z_.data[i] + panel.scale;
      const double kappa = ::fabs(spot_[i] - panel.tilt) * panel.half;
      error = larger_of(error, g + error_.log_bound(kappa));
      amplified = larger_of(amplified, g + kappa);
    }
    panel.log_error = error;
    return error <= log_error_ && amplified <= kMostAmplification &&
           panel.half * ::fabs(panel.tilt - gauge_ * s) <= largest_rise_;
  }

  void make_key_panels() {
    List<Run<KeyPanel>> runs[kMostSegments];
    const int64_t tasks = segments(), bins = bin_count();
    in_parallel(tasks, [&](int64_t task) {
      make_panels(
          bins * task / tasks, bins * (task + 1) / tasks, 1,
          [&](int64_t first, int64_t last, KeyPanel& panel) {
            return try_key_panel(first, last, panel);
          },
          runs[task]);
    });
    for (const List<Run<KeyPanel>>& list : runs)
      for (int64_t i = 0; i < list.size; ++i) add_key_panel(list[i]);
  }
  void add_key_panel(const Run<KeyPanel>& run) {
    KeyPanel panel = run.panel;
    const bool seen = panel.scale > -INFINITY;
    for (int64_t b = run.first; b < run.last; ++b)
      panel_of_bin_.push(seen ? int32_t(layout_.key.size) : -1);
    if (!seen) return;
    panel.first_node = layout_.key_node.size;
    const int64_t site = bins_.first[run.first];
    for (int64_t i = 0; i < panel.nodes; ++i) {
      const double s =
          panel.direct ? s_[site + i] : panel.middle + panel.half * chebyshev_node(most_, int(i));
      layout_.key_node.push(s);
      layout_.node_bias.push(
          panel.direct ? c_[site + i] : panel.scale - rise(panel.tilt, s, panel.middle, gauge_));
    }
    layout_.key.push(panel);
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
    }
    double worst[kMostSegments] = {};
    const int64_t tasks = segments();
    in_parallel(tasks, [&](int64_t task) {
      const int64_t panels = layout_.query.size, end = panels * (task + 1) / tasks;
      for (int64_t p = panels * task / tasks; p < end; ++p)
        worst[task] = larger_of(worst[task], key_side_error(p, layout_.query[p]));
    });
    for (const double error : worst) layout_.key_error = larger_of(layout_.key_error, error);
  }
  // The bound of the key-side error on a query panel.
  double key_side_error(int64_t p, const QueryPanel& panel) const {
    double worst = 0;
    for (int64_t i = first_spot_[p]; i < first_spot_[p + 1]; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < panel.blocks; ++k) {
        const KeyPanel& key = layout_.key[layout_.blocks[panel.first_block + k]];
        if (key.direct) continue;
        const double g = key.scale + score_of(spot_[i], key.middle, gauge_) - spot_log_z_.data[i];
        sum += ::exp(g + error_.log_bound(::fabs(spot_[i] - key.tilt) * key.half));
      }
      worst = larger_of(worst, sum);
    }
    return worst;
  }
};
