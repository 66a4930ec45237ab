// What the units of an instruction set offer to each other and to the table of kernels, in fp64
// (for fp64 tensors) and in fp32. Included inside an ISA's namespace.

// direct.inc.h
template <class T>
void direct_forward(const Attention& call);
template <class T>
void direct_backward(const AttentionGradient& g);
// Only heads `first_head` to `head_end`: other kernels pass on single heads that they cannot serve.
template <class T>
void direct_forward_heads(const Attention& call, int64_t first_head, int64_t head_end);
template <class T>
void direct_backward_heads(const AttentionGradient& g, int64_t first_head, int64_t head_end);
template <class T>
void small_layer_forward(const SmallLayer& layer);
template <class T>
void small_layer_backward(const SmallLayerGradient& g);

// transform.inc.h
template <class T>
void transform_forward(const Attention& call);
template <class T>
void transform_backward(const AttentionGradient& g);
template <class T>
void transform_report(const Attention& call, TransformReport* reports);
template <class T>
bool layer_forward(const Attention& call, const Layer& layer);
template <class T>
bool layer_backward(const AttentionGradient& g, const Layer& layer);
template <class T>
void project(const Projection& p);
template <class T>
void stage_extents(const Attention& call, Extent* extents);
template <class T>
void stage_sizes(const Attention& call, const SharedRange* shared, int64_t* sizes);
template <class T>
void stage_moments(const Attention& call, const SharedRange* shared, const Extent* extents,
                   double* moments);
template <class T>
void stage_evaluate(const Attention& call, const SharedRange* shared, const double* moments,
                    bool* served);
template <class T>
void stage_query_moments(const AttentionGradient& g, const SharedRange* shared,
                         const double* moments, double* query_moments);
template <class T>
void stage_adjoint(const AttentionGradient& g, const SharedRange* shared, const double* moments,
                   const double* query_moments);

// lookup.inc.h
template <class T>
void lookup_forward(const Attention& call);
template <class T>
void lookup_backward(const AttentionGradient& g);
template <class T>
void lookup_report(const Attention& call, TransformReport* reports);

// tensor.inc.h
template <class T>
void tensor_forward(const Attention& call);
template <class T>
void tensor_backward(const AttentionGradient& g);
template <class T>
void tensor_report(const Attention& call, TransformReport* reports);

// scan.inc.h
template <class T>
void scan_forward(const Attention& call);
template <class T>
void scan_backward(const AttentionGradient& g);
void stream_extent(const Attention& call, const Stream& s, bool* finite, double* extent);
void stream_append(const Attention& tokens, const Stream& s);
void stream_query(const Attention& queries, const Stream& s);
void stream_step(const Attention& tokens, const Attention& queries, const Stream& s);
double stream_largest(const Attention& call);
template <class T>
void shard_tables(const Attention& call, const ScanShard& shard, const ShardTables& tables);
template <class T>
void shard_forward(const Attention& call, const ScanShard& shard, double* z);
template <class T>
void shard_rows(const AttentionGradient& g, const ScanShard& shard, const double* z, double* table);
template <class T>
void shard_backward(const AttentionGradient& g, const ScanShard& shard);

// biased_scan.inc.h
template <class T>
void biased_forward(const Attention& call);
template <class T>
void biased_backward(const AttentionGradient& g);

// table.inc.h
template <class T>
void varlen_forward(const Attention& whole, const Sequence* sequences, int64_t count);
template <class T>
void varlen_backward(const AttentionGradient& whole, const Sequence* sequences, int64_t count);

// At the end of a unit, for each function that it offers.
#define BOLTZATTN_OFFER(function)                     \
  template decltype(function<float>) function<float>; \
  template decltype(function<double>) function<double>;
