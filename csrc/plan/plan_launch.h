// Launchers of plan.cu. All return a cudaError_t as int; pointers are GPU memory. No torch here.
#pragma once

#include <cstdint>

#include "plan/plan_view.h"

namespace speedtorch {

struct PlanOut {
  int64_t* unique;
  int64_t* inverse;
  int64_t* order;
  int64_t* offsets;
  PlanStatus* status;
};

// Bytes of scratch that launch_plan needs for n ids of a table of `rows` rows.
int64_t plan_scratch_bytes(int64_t n, int64_t rows);
int launch_plan(const void* ids, bool wide, int64_t n, int64_t rows, void* scratch,
                int64_t scratch_bytes, PlanOut out, void* stream);

}  // namespace speedtorch
