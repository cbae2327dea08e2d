// Plans a batch of up to 131,072 ids in one launch, where plan.cu needs a dozen. Called by plan.cu.
// Pointers are GPU memory; the launchers return a cudaError_t as int.
#pragma once

#include "plan/plan_launch.h"

namespace speedtorch {

// Whether the current GPU can plan `n` ids in one launch, with all blocks running at once.
bool can_plan_together(int64_t n);
int64_t together_scratch_bytes(int64_t n, const PlanTable& table);
// Does the same as launch_plan, with scratch of together_scratch_bytes().
int launch_plan_together(const void* ids, bool wide, const PlanTable& table, void* scratch,
                         const PlanView& out, void* stream);

}  // namespace speedtorch
