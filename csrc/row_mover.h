// Shape of the launches that move rows: a pure function of widths, alignment and rows. No CUDA, no
// torch here.
#pragma once

#include <algorithm>
#include <cstdint>

namespace speedtorch {

struct MoveShape {
  int vec_bytes;  // bytes of one access: 16, 8, 4, 2 or 1
  int64_t vecs_per_row;
  int lanes_per_row;  // threads that share a row
  int blocks;
};

constexpr int kMoverThreads = 512;
// Rows that a group of lanes has in flight: enough loads to cover the link's latency with few
// groups.
constexpr int kRowsInFlight = 4;
// The link is saturated by 8 to 16 blocks with 16-byte accesses; more blocks open more pages at a
// time and are slower on registered memory. Narrower accesses carry less each, so they need more of
// them in flight.
constexpr int kLinkBlocks = 16;
// On the GPU's own memory everything may run: about eight blocks on each of 132 multiprocessors.
constexpr int kDeviceBlocks = 1056;

// Widest access that base addresses, strides and the row's length allow; `bits` is all of them
// or'ed together.
constexpr int widest_access(uint64_t bits) {
  int bytes = 16;
  while (bits % bytes != 0) bytes /= 2;
  return bytes;
}

constexpr MoveShape move_shape(int64_t row_bytes, uint64_t alignment_bits, int64_t rows,
                               bool crosses_link) {
  MoveShape shape{};
  shape.vec_bytes = widest_access(alignment_bits | static_cast<uint64_t>(row_bytes));
  shape.vecs_per_row = row_bytes / shape.vec_bytes;
  shape.lanes_per_row = static_cast<int>(std::clamp<int64_t>(shape.vecs_per_row, 1, 32));
  const int64_t rows_per_block = kMoverThreads / shape.lanes_per_row;
  const int64_t most =
      crosses_link ? kLinkBlocks * std::min(16 / shape.vec_bytes, 4) : kDeviceBlocks;
  shape.blocks =
      static_cast<int>(std::clamp<int64_t>((rows + rows_per_block - 1) / rows_per_block, 1, most));
  return shape;
}

static_assert(widest_access(512) == 16 && widest_access(12) == 4 && widest_access(0) == 16);

}  // namespace speedtorch
