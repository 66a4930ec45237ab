// The transform's workspace: what its kernels hand to each other in device memory. No torch.
#pragma once

#include <type_traits>

#include "spec/certificate.h"
#include "cuda/problem.h"

namespace boltzattn::cuda {

constexpr int kMostPanels = 1024;  // of an axis

struct ExtentPart {
  double t_min, t_max, s_min, s_max;
  int64_t keys, at_max, at_min;  // indices of the largest and the smallest key
  int64_t regular;               // all numbers are finite, and the mask is not a bias
};

// A token in the order of panels. The place is rounded to T, like the token's number itself.
template <class T>
struct alignas(2 * sizeof(T)) Placed {  // written and read at once
  T place;                              // in [-1, 1] on the panel
  std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t> token;
};

struct HeadLayout {
  Range range;
  Layout layout;
  int64_t end_key[2];  // the largest and the smallest key
  int64_t served;      // so far; else the head goes to `direct`
};

// One axis, queries or keys. Arrays start with the head; `panels`, `segments` and `chunks` are
// capacities, which depend on the sizes of the call only.
struct Side {
  int64_t n, panels, segments, chunks;
  uint32_t* counts;         // [chunks][panels]: tokens of a chunk on a panel, then where they go
  uint32_t* panel_start;    // [panels + 1]: tokens in the order of panels
  uint32_t* segment_start;  // [panels + 1]: segments in that order
  void* order;              // [n]: Placed<T>
  double* node;             // [panels][nodes]: t, or s - middle
  void* partial;            // [segments][nodes][dv + 1] in T
  double* sums;             // [panels][nodes][dv + 1]
};

struct Work {
  Gradient g;
  int64_t nodes, extent_chunks;
  double precision;
  int64_t keys;  // the side a kernel is to work on: 0 queries, 1 keys
  Side side[2];
  ExtentPart* parts;   // [extent_chunks]
  HeadLayout* heads;   // [1]
  double* basis;       // [2][nodes]: Chebyshev nodes and factors of the Lagrange basis
  double* centre;      // [2][dv]: values of the end keys
  double* extremes;    // [key panels][2][kEllipses]
  double* log_factor;  // [kEllipses]
  double* decay;       // [kLastCoefficients][nodes]
  void* table;         // [query nodes][dv] in T: F, or F' for backward
  double* last;        // [query nodes]: log Z, or the mean key from the reference for backward
  double* inverse_z;   // [query nodes]
  double* key_error;   // [query nodes]
  double* node_out;    // backward: [query nodes][dv], F - centre
  double* pull;        // backward: [2][query nodes]
  void* value_table;   // backward: [key nodes][dv] in T
  void* slope_table;   // backward: [key nodes][dv] in T
  double* slope_last;  // backward: [key nodes]
  double* bounds;      // [query panels][column tiles][2]: largest |F|, query-side error
  double* report;      // [7]: as TransformReport of cpu/isa.h
  int32_t* served;     // [1]
};

}  // namespace boltzattn::cuda
