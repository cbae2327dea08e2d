// One launch that plans a batch of some thousand ids, where plan.cu needs a dozen. Pointers are GPU
// memory; the launchers return a cudaError_t as int.
#pragma once

#include "plan/plan_launch.h"

namespace speedtorch {

// Whether the current GPU plans so many ids in one launch, all of whose blocks it can run at once.
bool can_plan_together(int64_t n);
int64_t together_scratch_bytes(int64_t n, const PlanOf& of);
// As launch_plan, with scratch of together_scratch_bytes().
int launch_plan_together(const void* ids, bool wide, const PlanOf& of, void* scratch,
                         const PlanView& out, void* stream);

}  // namespace speedtorch
