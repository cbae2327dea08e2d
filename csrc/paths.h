// From an op's tensors to the cost model's view of them, and the ops that explain and steer it.
#pragma once

#include "cost_model.h"
#include "gpu.h"
#include "rows.h"

namespace speedtorch {

inline Batch batch_of(Direction direction, Reach reach, const Rows& rows, int64_t ids) {
  return {.direction = direction,
          .reach = reach,
          .ids = ids,
          .row_bytes = rows.row_bytes,
          .table_bytes = rows.count * rows.stride_bytes};
}

// The kernel for rows between a table and memory on the GPU; `other_bits` are the other side's
// address and stride.
inline Mover mover_for(Direction direction, const Rows& table, Reach reach, int64_t moved,
                       uint64_t other_bits, const CurrentStream& stream) {
  if (reach == Reach::kOnGpu) return gpu_mover();
  const uint64_t bits = reinterpret_cast<uint64_t>(table.base) |
                        static_cast<uint64_t>(table.stride_bytes) | other_bits;
  // Measured: over small pages bulk copies in address order are a fifth to a half slower.
  const bool bulk = reach == Reach::kManaged && stream.has_bulk_copies();
  return link_mover(direction, table.row_bytes, bits, moved, bulk, static_cast<int>(num_sms()));
}

}  // namespace speedtorch
