// What stored_float.h converts, by instructions of a GPU that take two numbers at once: the same
// bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "move/stored_float.h"

namespace speedtorch {

// Two float32 numbers in 16 bits each, the first in the lower half.
template <Stored kStored>
__device__ __forceinline__ uint32_t stored_pair(uint32_t low, uint32_t high) {
  const float first = __uint_as_float(low), second = __uint_as_float(high);
  uint32_t pair;
  if constexpr (kStored == Stored::kBFloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    memcpy(&pair, &both, sizeof(pair));
  } else {
    const __half2 both = __floats2half2_rn(first, second);
    memcpy(&pair, &both, sizeof(pair));
  }
  return pair;
}

// The float32 number of the lower 16 bits.
template <Stored kStored>
__device__ __forceinline__ uint32_t float_of_stored(uint32_t bits) {
  if constexpr (kStored == Stored::kBFloat16) return bits << 16;
  const auto stored = static_cast<uint16_t>(bits);
  if ((stored & 0x7FFF) > 0x7C00) return float_of_float16(stored);  // NaN
  return __float_as_uint(__half2float(__ushort_as_half(stored)));
}

}  // namespace speedtorch
