// Launcher of placed_ids.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "core/letter.h"
#include "plan/plan_view.h"

namespace speedtorch {

// Ids and places in GPU memory, and where their status is written; its `distinct` is -1 if
// something is wrong.
struct PlacedCheck {
  const int64_t* ids;
  const int64_t* places;
  int64_t count;
  int64_t side_rows;
  IdList list;
  PlanStatus* status;
};

int launch_check_placed(const PlacedCheck& evict, const PlacedCheck& load, int64_t table_rows,
                        Letter* box, void* stream);

}  // namespace speedtorch
