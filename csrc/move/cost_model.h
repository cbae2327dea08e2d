// Which path an op takes: what each would cost, from measured times of moving one row. Pure
// functions of a batch's shape, so that explain() tells exactly what an op will do, and that tests
// need no GPU. cost_model.cpp has the ops with which Python asks for the choice and steers it.
#pragma once

#include <cstdint>

#include "core/gpu.h"
#include "memory/host_memory.h"
#include "move/row_copy.h"

namespace speedtorch {

// Values are part of the contract with speedtorch/memory/cost_model.py.
enum class Path : int64_t {
  kDirect = 0,    // one launch, in the order of the ids
  kDistinct = 1,  // each distinct row once, in the order of the ids
  kOrdered = 2,   // each distinct row once, in address order
  kStaged = 3,    // by the CPU, through pinned staging
  kOnCpu = 4
};

enum class Direction : int64_t { kIn = 0, kOut = 1 };  // to the GPU, from it

struct Batch {
  Direction direction = Direction::kIn;
  Access access = Access::kManaged;
  int64_t ids = 0;
  int64_t row_bytes = 0;
  int64_t table_bytes = 0;
  uint64_t host_bits = 0;  // the table's address and stride, or'ed together
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

// The cheapest path, or the one that tests ask for; throws ValueError if that is not possible.
Path path_for(const char* op, const Batch& batch);

// The kernel for rows between a table and `other` rows, on the GPU.
CopyKernel copy_kernel_for(const Batch& batch, const Rows& other, const CurrentStream& stream);
constexpr CopyKernel gpu_copy_kernel() { return {false, kDeviceBlocks}; }
// How many multiprocessors of this GPU kernels over the link may fill, and blocks of a swap there.
int link_sms(const CurrentStream& stream);
int swap_sms(const CurrentStream& stream);

}  // namespace speedtorch
