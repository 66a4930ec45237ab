// What the projection kernel is told. No torch.
#pragma once

#include "cuda/problem.h"

namespace boltzattn {
namespace cuda {

struct Projected {
  int64_t batch, n, columns, outputs, chunks;
  Strided x;        // [batch, n, columns]
  Strided weight;   // [outputs, columns]
  Strided bias;     // [1, outputs]; data null: none
  void* out;        // [batch, outputs, n], dense
  Extent* parts;    // workspace: [batch, chunks, outputs]
  Extent* extents;  // [batch, outputs]
};

}  // namespace cuda
}  // namespace boltzattn
