// Tensor cores and asynchronous copies, as PTX for sm_80 and later. No torch.
//
// A tensor core multiplies 16 x 16 by 16 x 8 numbers of 16 bits and adds in fp32. With
// g = lane / 4 and t = lane % 4, a lane holds, two to a register and the lower column first:
//   of the left factor   (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8) and their neighbours;
//   of the right factor  (2t, g), (2t + 8, g) and those below them;
//   of the product       (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
#pragma once

#include "cuda/element.cuh"

namespace boltzattn::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return uint32_t(__cvta_generic_to_shared(at));
}

// Starts to copy 16 bytes from global to shared memory; zeros if there is nothing to copy.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(exists ? 16 : 0)
               : "memory");
}
// Waits for the copies that this thread has started.
__device__ __forceinline__ void copies_arrived() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Four matrices of 8 x 8 numbers of 16 bits: lane 8 i + r says where row r of matrix i lies.
__device__ __forceinline__ void load_matrices(const void* row, uint32_t* to) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_transposed(const void* row, uint32_t* to) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// low += left right, high being the rows from 8 on.
template <class S>
__device__ __forceinline__ void multiply_add(float* low, float* high, const uint32_t* left,
                                             const uint32_t* right) {
  if constexpr (std::is_same<S, __half>::value) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(low[0]), "+f"(low[1]), "+f"(high[0]), "+f"(high[1])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(low[0]), "+f"(low[1]), "+f"(high[0]), "+f"(high[1])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  }
}

// Two numbers in a register, the first in the lower half.
template <class S>
__device__ __forceinline__ uint32_t pack_two(float first, float second) {
  const Pack<S, 2> pair{{narrow<S>(first), narrow<S>(second)}};
  uint32_t word;
  memcpy(&word, &pair, 4);
  return word;
}

}  // namespace boltzattn::cuda
