// The transform of all heads of a call; a head that it cannot serve goes to `direct`. Included
// inside an ISA's namespace.

// Fills `range`; false if this head is not for the transform.
template <class T>
static bool find_range(Head<T>& head) {
  const Attention& call = head.call;
  Extent queries, keys;
  if (head.layer && head.layer->extents && !call.key_mask) {
    const int64_t summed = head.layer->summed, at = head.h % summed;
    const Extent* group = head.layer->extents + head.h / summed * 2 * summed;
    queries = group[at];
    keys = group[summed + at];
  } else {
    find_extents(call, head.h, queries, keys);
  }
  const double ends[2] = {queries.low * call.scale, queries.high * call.scale};
  head.range = {call.scale < 0 ? ends[1] : ends[0], call.scale < 0 ? ends[0] : ends[1], keys.low,
                keys.high, int64_t(keys.count)};
  head.end_key[0] = int64_t(keys.at_high);
  head.end_key[1] = int64_t(keys.at_low);
  return queries.regular != 0 && keys.regular != 0;
}

// The largest |v| among the keys that are not masked.
template <class T>
static double largest_value(const Head<T>& head) {
  const Attention& call = head.call;
  const int64_t chunks = ceil_div(call.n_k, kChunk);
  Buffer<double> part(chunks);
  parallel(chunks, [&](int64_t c) {
    Buffer<T> row(head.dv);
    part.data[c] = 0;
    uint8_t skip[kChunk] = {};
    read_mask(call, head.h, c * kChunk, least(kChunk, call.n_k - c * kChunk), skip);
    for (int64_t j = c * kChunk; j < least(call.n_k, (c + 1) * kChunk); ++j) {
      if (skip[j - c * kChunk]) continue;
      read_block(call.value, head.h, j, 0, 1, head.dv, row.data, 0, 1);
      part.data[c] = larger_of(part.data[c], largest_of(row.data, head.dv));
    }
  });
  double largest = 0;
  for (int64_t c = 0; c < chunks; ++c) largest = larger_of(largest, part.data[c]);
  return largest;
}

// Extents, layout, moments and core, refined until the certificate is within tolerance; whether the
// head is served.
template <class T>
static bool build(Head<T>& head, bool slopes) {
  if (!find_range(head)) return false;
  if (head.empty()) return true;
  const double product = largest_product(head.range);
  if (!(product <= kLargestProduct)) return false;
  const Attention& call = head.call;
  Layout& layout = head.layout;
  const DType dtype = call.value.dtype;
  find_centres(head);
  double largest = 0;
  for (int level = 0; level < kLevels; ++level) {
    const double precision = precision_of(dtype, level);
    const bool hopeful = level == 0 && dtype != DType::kFloat64;  // fp64 needs its last digits
    layout = choose_layout(head.range, call.n_q, call.n_k, head.dv, precision,
                           most_key_nodes(dtype), hopeful ? kHope : 1);
    sum_moments(head);
    if (!finite_sums(head)) return false;
    measure_from_ends(head);
    Bounds bounds = run_core(head, slopes);
    if (!(bounds.largest <= kLargestSum)) return false;
    const double share = slopes ? kHopeShareSlopes : kHopeShare;
    // Gradients of values are those of weights, whatever the values: log Z must do, too, where F is
    // smoother than it or constant.
    const double allowed = rounding_of(dtype, product) * share;
    if (hopeful && (bounds.query > allowed * bounds.largest || (slopes && bounds.lse > allowed))) {
      layout.query = make_layout(head.range, layout.query.nodes, layout.key.nodes, precision).query;
      bounds = run_core(head, slopes);
    }
    // |F - centre| <= 2 max|v|, so half of the largest |F - centre| is at most max|v|. The relative
    // error is never understated if it is measured by that half. The values themselves are read
    // only if the result is not good enough.
    if (certify(head, bounds, bounds.largest / 2)) return true;
    if (head.layer) continue;  // a layer has no values to read
    if (largest == 0) largest = largest_value(head);
    if (certify(head, bounds, largest)) return true;
  }
  return false;
}

template <class T>
void transform_forward(const Attention& call) {
  if (call.rank > 1) return tensor_forward<T>(call);
  if (call.is_lookup()) return lookup_forward<T>(call);
  for_heads(call.heads, [&](int64_t h) {
    Head<T> head(call, h);
    build(head, false) ? evaluate(head) : direct_forward_heads<T>(call, h, h + 1);
  });
}

template <class T>
void transform_backward(const AttentionGradient& g) {
  if (g.call.rank > 1) return tensor_backward<T>(g);
  if (g.call.is_lookup()) return lookup_backward<T>(g);
  for_heads(g.call.heads, [&](int64_t h) {
    Head<T> head(g.call, h);
    build(head, true) ? write_gradients(head, g) : direct_backward_heads<T>(g, h, h + 1);
  });
}

// The heads are added up one after the other. Returns whether all were served.
template <class T>
bool layer_forward(const Attention& call, const Layer& layer) {
  for (int64_t h = 0; h < call.heads; ++h) {
    Head<T> head(call, h, &layer);
    if (!build(head, false)) return false;
    evaluate(head);
  }
  return true;
}

template <class T>
bool layer_backward(const AttentionGradient& g, const Layer& layer) {
  for (int64_t h = 0; h < g.call.heads; ++h) {
    Head<T> head(g.call, h, &layer);
    if (!build(head, true)) return false;
    write_gradients(head, g);
  }
  return true;
}

template <class T>
void transform_report(const Attention& call, TransformReport* reports) {
  if (call.rank > 1) return tensor_report<T>(call, reports);
  if (call.is_lookup()) return lookup_report<T>(call, reports);
  for_heads(call.heads, [&](int64_t h) {
    Head<T> head(call, h);
    const bool served = build(head, false);
    const Axis &query = head.layout.query, &key = head.layout.key;
    const double product = head.range.keys > 0 ? largest_product(head.range) : 0;
    reports[h] = {double(served),      head.certificate,   product,          double(query.panels),
                  double(query.nodes), double(key.panels), double(key.nodes)};
  });
}
