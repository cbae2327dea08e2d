// From an op's tensors to the cost model's view of them, and the ops that explain and steer it.
#pragma once

#include "core/gpu.h"
#include "core/rows.h"
#include "move/cost_model.h"

namespace speedtorch {

inline uint64_t bits_of(const Rows& rows) {
  return reinterpret_cast<uint64_t>(rows.base) | static_cast<uint64_t>(rows.stride_bytes);
}

inline Batch batch_of(Direction direction, Reach reach, const Rows& rows, int64_t ids) {
  return {.direction = direction,
          .reach = reach,
          .ids = ids,
          .row_bytes = rows.row_bytes,
          .table_bytes = rows.count * rows.stride_bytes,
          .host_bits = bits_of(rows)};
}

// The kernel for rows between a table and memory on the GPU.
inline Mover mover_for(Direction direction, const Rows& table, Reach reach, const Rows& other,
                       int64_t moved, const CurrentStream& stream) {
  if (reach == Reach::kOnGpu) return gpu_mover();
  // Measured: over small pages bulk copies in address order are a fifth to a half slower.
  const bool bulk = reach == Reach::kManaged && stream.has_bulk_copies();
  return link_mover(direction, table.row_bytes, bits_of(table), bits_of(other), moved, bulk,
                    static_cast<int>(num_sms()));
}

}  // namespace speedtorch
