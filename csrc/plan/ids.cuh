// Ids on the GPU, as the kernels that check, hash and sort them see them. No torch here.
#pragma once

#include <algorithm>
#include <cstdint>

namespace speedtorch {

constexpr int kIdThreads = 256;
// Enough threads to saturate GPU memory on batches of a million ids, few enough to leave room
// beside them.
constexpr int64_t kMostIdBlocks = 1024;

inline int blocks_for_ids(int64_t n) {
  return static_cast<int>(std::clamp<int64_t>((n + kIdThreads - 1) / kIdThreads, 1, kMostIdBlocks));
}

__device__ inline int64_t id_at(const void* ids, bool wide, int64_t m) {
  return wide ? static_cast<const int64_t*>(ids)[m] : static_cast<const int32_t*>(ids)[m];
}

__device__ inline bool is_outside(int64_t id, int64_t rows) {
  return static_cast<uint64_t>(id) >= static_cast<uint64_t>(rows);
}

// Fibonacci hashing: the upper half of the product depends on all bits of the id.
__device__ inline uint64_t hash_of(int64_t id) {
  return static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull >> 32;
}

}  // namespace speedtorch
