// Chooses the path of an op by the cost of each path, from measured times per row. The path depends
// only on a batch's shape and on the process's settings (set_costs, force_path), so that explain()
// reports exactly what an op will do, and tests need no GPU. Called by the ops that move rows;
// cost_model.cpp also has the ops with which Python queries and sets the choice.
#pragma once

#include <cstdint>

#include "core/gpu.h"
#include "memory/host_memory.h"
#include "move/row_copy.h"

namespace speedtorch {

// The values are part of the contract with speedtorch/memory/cost_model.py.
enum class Path : int64_t {
  kDirect = 0,    // one launch, in the order of the ids
  kDistinct = 1,  // each distinct row once, in the order of the ids
  kOrdered = 2,   // each distinct row once, in address order
  kStaged = 3,    // on the CPU, through pinned staging memory
  kOnCpu = 4      // on the CPU; no tensor is on a GPU
};

enum class Direction : int64_t { kIn = 0, kOut = 1 };  // to the GPU, from the GPU

struct Batch {
  Direction direction = Direction::kIn;
  Access access = Access::kManaged;
  int64_t ids = 0;
  int64_t row_bytes = 0;
  int64_t table_bytes = 0;
  uint64_t host_bits = 0;  // bitwise OR of the table's address and stride
  bool accumulate = false;
};

inline Batch batch_of(Direction direction, Access access, const Rows& rows, int64_t ids,
                      bool accumulate = false) {
  return {.direction = direction,
          .access = access,
          .ids = ids,
          .row_bytes = rows.row_bytes,
          .table_bytes = rows.count * rows.stride_bytes,
          .host_bits = rows.bits(),
          .accumulate = accumulate};
}

// Returns the cheapest path, or the path forced by force_path. Throws ValueError if a forced path
// is not possible.
Path path_for(const char* op, const Batch& batch);

// The kernel for rows between a table and `other` rows on the GPU.
CopyKernel copy_kernel_for(const Batch& batch, const Rows& other, const CurrentStream& stream);
constexpr CopyKernel gpu_copy_kernel() { return {false, kDeviceBlocks}; }
// The number of multiprocessors of this GPU that kernels over the link may fill. swap_sms: for
// swaps, which move rows in both directions.
int link_sms(const CurrentStream& stream);
int swap_sms(const CurrentStream& stream);

}  // namespace speedtorch
