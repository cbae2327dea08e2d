// The kernel that moves rows one way, for gather and scatter. `Moves` says which row goes where:
//   bool blocked()         the ids are bad: nothing may move
//   void complain()        leaves word of it; called by one thread
//   int64_t count()        moves to make
//   int64_t from(m), to(m) row numbers; from(m) < 0: no move
#pragma once

#include <cuda_runtime.h>

#include "row_mover.h"

namespace speedtorch {

// Loads and stores that pass through the caches without staying: a row is used once.
template <typename Vec>
__device__ __forceinline__ Vec load_streaming(const char* row, int64_t vec) {
  return __ldcs(reinterpret_cast<const Vec*>(row) + vec);
}
template <typename Vec>
__device__ __forceinline__ void store_streaming(char* row, int64_t vec, Vec value) {
  __stcs(reinterpret_cast<Vec*>(row) + vec, value);
}

struct RowRange {
  char* base;
  int64_t stride_bytes;
};

// A thread owns one vector of every lanes_per_row-th column of a row; a group of lanes_per_row
// threads owns kRowsInFlight rows at a time, so that their loads are under way together. Each row
// crosses the link once. When blocked: nothing moves, and `zero_rows` contiguous rows of `to`
// become zeros (none for a scatter).
template <typename Vec, typename Moves>
__global__ void __launch_bounds__(kMoverThreads)
    move_rows_kernel(Moves moves, RowRange from, RowRange to, int64_t vecs_per_row,
                     int lanes_per_row, int64_t zero_rows) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  if (moves.blocked()) {
    if (thread == 0) moves.complain();
    for (int64_t v = thread; v < zero_rows * vecs_per_row; v += threads)
      store_streaming(to.base, v, Vec{});
    return;
  }
  const int64_t groups = threads / lanes_per_row;
  const int64_t group = thread / lanes_per_row;
  const int lane = static_cast<int>(thread % lanes_per_row);
  if (group >= groups) return;  // the threads left over when lanes do not divide them
  const int64_t count = moves.count();
  for (int64_t first = group; first < count; first += groups * kRowsInFlight) {
    const char* source[kRowsInFlight];
    char* target[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t m = first + u * groups;
      const int64_t row = m < count ? moves.from(m) : -1;
      source[u] = row < 0 ? nullptr : from.base + row * from.stride_bytes;
      target[u] = row < 0 ? nullptr : to.base + moves.to(m) * to.stride_bytes;
    }
    for (int64_t column = lane; column < vecs_per_row; column += lanes_per_row) {
      Vec values[kRowsInFlight];
#pragma unroll
      for (int u = 0; u < kRowsInFlight; ++u) {
        if (source[u] != nullptr) values[u] = load_streaming<Vec>(source[u], column);
      }
#pragma unroll
      for (int u = 0; u < kRowsInFlight; ++u) {
        if (source[u] != nullptr) store_streaming<Vec>(target[u], column, values[u]);
      }
    }
  }
}

// Calls `use` with a value of the type whose size is one access.
template <typename Use>
void with_vec_type(int vec_bytes, Use use) {
  switch (vec_bytes) {
    case 16:
      return use(uint4{});
    case 8:
      return use(uint2{});
    case 4:
      return use(uint32_t{});
    case 2:
      return use(static_cast<unsigned short>(0));
    default:
      return use(static_cast<unsigned char>(0));
  }
}

inline uint64_t alignment_bits(RowRange range) {
  return reinterpret_cast<uint64_t>(range.base) | static_cast<uint64_t>(range.stride_bytes);
}

// `most_rows` bounds moves.count(), which only the GPU knows.
template <typename Moves>
void launch_move_rows(const Moves& moves, RowRange from, RowRange to, int64_t row_bytes,
                      int64_t most_rows, int64_t zero_rows, bool crosses_link,
                      cudaStream_t stream) {
  const MoveShape shape =
      move_shape(row_bytes, alignment_bits(from) | alignment_bits(to), most_rows, crosses_link);
  with_vec_type(shape.vec_bytes, [&](auto vec) {
    move_rows_kernel<decltype(vec), Moves><<<shape.blocks, kMoverThreads, 0, stream>>>(
        moves, from, to, shape.vecs_per_row, shape.lanes_per_row, zero_rows);
  });
}

}  // namespace speedtorch
