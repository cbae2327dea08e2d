// The conversions of stored_float.h with GPU instructions on two numbers at once. Called by
// optimizer_state_swap.cu. The results are bitwise identical.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "move/stored_float.h"

namespace speedtorch {

// Converts two float32 numbers to 16 bits each, the first in the lower half.
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

// Converts the lower 16 bits to float32.
template <Stored kStored>
__device__ __forceinline__ uint32_t float_of_stored(uint32_t bits) {
  if constexpr (kStored == Stored::kBFloat16) return bits << 16;
  const auto stored = static_cast<uint16_t>(bits);
  if ((stored & 0x7FFF) > 0x7C00) return float_of_float16(stored);  // NaN
  return __float_as_uint(__half2float(__ushort_as_half(stored)));
}

}  // namespace speedtorch
