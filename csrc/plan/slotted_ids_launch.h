// Launcher of slotted_ids.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "core/error_record.h"
#include "plan/plan_launch.h"

namespace speedtorch {

// Ids (`unique`) and places (`order`) in GPU memory; the status is written: its `distinct` and
// `count` are those of the entries that count, or `distinct` is -1 if something is wrong.
struct SlottedCheck {
  PlanView view;
  const int64_t* count;  // so many entries count, none if there are not so many; null: all
  IdList list;
  int64_t side_rows;  // places are below
};

int launch_check_slotted(const SlottedCheck& evict, const SlottedCheck& load, int64_t table_rows,
                         ErrorRecord* record, void* stream);

}  // namespace speedtorch
