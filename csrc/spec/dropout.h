// Which attention weights survive dropout: a hash of (seed of the head, query, key), with the same
// bits as dropout_keep of the reference. Host and device; no torch.
#pragma once

#include "spec/types.h"

namespace boltzattn {

BOLTZATTN_HD uint32_t mix32(uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// A weight whose draw is below this is dropped.
BOLTZATTN_HD uint64_t dropout_threshold(double dropout_p) {
  return uint64_t(::rint(dropout_p * 4294967296.0));
}
// What the other weights are multiplied by.
BOLTZATTN_HD double dropout_factor(double dropout_p) {
  return dropout_p < 1 ? 1 / (1 - dropout_p) : 0;
}

BOLTZATTN_HD uint32_t dropout_stream(uint64_t seed) {
  return mix32(uint32_t(seed) ^ mix32(uint32_t(seed >> 32)));
}
BOLTZATTN_HD uint32_t dropout_row(uint32_t stream, int64_t query) {
  return mix32(stream + uint32_t(query) * 0x27d4eb2fu);
}
BOLTZATTN_HD uint32_t dropout_draw(uint32_t row, int64_t key) {
  return mix32(row ^ uint32_t(key) * 0x9e3779b1u);
}

}  // namespace boltzattn
