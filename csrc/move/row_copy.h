// The shapes of launches that move rows: pure functions of widths, alignment and row counts, tested
// without a GPU. Includes no CUDA or torch header.
#pragma once

#include <cstdint>

namespace speedtorch {

// Multiprocessors that kernels over a PCIe 5 x16 link may fill; the user may change this
// (set_num_sms). Measured on an H200: 8 to 16 blocks with 16-byte loads saturate the link, 4 with
// bulk copies.
constexpr int kDefaultSms = 16;
// Within GPU memory all multiprocessors may run: about eight blocks on each of 132.
constexpr int kDeviceBlocks = 1056;

// Each block of the moving kernel checks all ids of a batch up to this size: one launch instead of
// three.
constexpr int64_t kIdsCheckedInBlock = 4096;

// Each block finds the last occurrences of a batch up to this size in shared memory: one launch.
constexpr int64_t kIdsDedupedInBlock = 2048;

// The widest access that base addresses, strides and row length allow; `bits` is the bitwise OR of
// all of them.
constexpr int widest_access(uint64_t bits) {
  int bytes = 16;
  while (bits % bytes != 0) bytes /= 2;
  return bytes;
}

// The number of shares of size `share` for `count` things, in [1, most], such as blocks of a
// launch. This file avoids <algorithm>, which costs every CUDA file half a second of compiling.
constexpr int shares_of(int64_t count, int64_t share, int64_t most) {
  const int64_t shares = (count + share - 1) / share;
  return static_cast<int>(shares < 1 ? 1 : shares < most ? shares : most);
}

// The kernel that moves rows, and how much of the GPU it may fill.
struct CopyKernel {
  bool bulk;  // bulk copies, which need compute capability 9.0
  int max_blocks;
};

// ---- Rows through registers (any GPU).

struct MoveShape {
  int vec_bytes;  // bytes of one access: 16, 8, 4, 2 or 1
  int64_t vecs_per_row;
  int lanes_per_row;  // threads that share a row: a group
  int groups_in_warp;
  int groups;  // a multiple of groups_in_warp
  int blocks;
};

constexpr int kMoverThreads = 512;
// Rows that a group of lanes has in flight: enough loads to cover the link's latency with few
// groups.
constexpr int kRowsInFlight = 4;

constexpr MoveShape move_shape(int64_t row_bytes, uint64_t alignment_bits, int64_t rows,
                               int max_blocks) {
  MoveShape shape{};
  shape.vec_bytes = widest_access(alignment_bits | static_cast<uint64_t>(row_bytes));
  shape.vecs_per_row = row_bytes / shape.vec_bytes;
  shape.lanes_per_row = shares_of(shape.vecs_per_row, 1, 32);
  shape.groups_in_warp = 32 / shape.lanes_per_row;
  shape.blocks = shares_of(rows, kMoverThreads / shape.lanes_per_row, max_blocks);
  shape.groups = shape.blocks * kMoverThreads / shape.lanes_per_row;
  shape.groups -= shape.groups % shape.groups_in_warp;
  return shape;
}

// ---- Rows through shared memory by bulk copies (Hopper and data-centre Blackwell).

struct BulkShape {
  int64_t chunk_bytes;  // maximum bytes of a chunk of a row
  int64_t chunks_per_row;
  int warps;  // per block; a lane has shared memory for one chunk
  int blocks;
  int shared_bytes;  // per block
};

constexpr int kChunksPerWarp = 32;
constexpr int64_t kMaxChunkBytes = 2048;
constexpr int kBulkBarrierBytes = 128;  // 8 per warp; keeps chunks aligned
constexpr int kMaxBulkWarps = 16;
constexpr int kMaxSharedBytes = 200 << 10;  // a block may have 227 KiB

// `row_bytes` is a multiple of 16, not 0.
constexpr BulkShape bulk_shape(int64_t row_bytes, int64_t rows, int max_blocks) {
  BulkShape shape{};
  shape.chunks_per_row = (row_bytes + kMaxChunkBytes - 1) / kMaxChunkBytes;
  shape.chunk_bytes = row_bytes < kMaxChunkBytes ? row_bytes : kMaxChunkBytes;
  const int warp_bytes = static_cast<int>(shape.chunk_bytes) * kChunksPerWarp;
  shape.warps = shares_of((kMaxSharedBytes - kBulkBarrierBytes) / warp_bytes, 1, kMaxBulkWarps);
  shape.shared_bytes = kBulkBarrierBytes + shape.warps * warp_bytes;
  shape.blocks =
      shares_of(rows * shape.chunks_per_row, int64_t{shape.warps} * kChunksPerWarp, max_blocks);
  return shape;
}

static_assert(widest_access(512) == 16 && widest_access(12) == 4 && widest_access(0) == 16);
static_assert(bulk_shape(kMaxChunkBytes, 1, 1).shared_bytes <= kMaxSharedBytes);

}  // namespace speedtorch
