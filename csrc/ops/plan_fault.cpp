// plan_fault: computes why a block with a capacity cannot hold the rows of a plan. spoil_plan:
// marks the plan as bad if the largest fault of all ranks is larger. Called by
// speedtorch/plan/fixed_size_batch.py. This file has the checks and the CPU code; the GPU kernels
// are in plan_fault.cu.

#include <torch/csrc/stable/library.h>

#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/registration.h"
#include "ops/launchers.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kFault = "plan_fault";
constexpr const char* kSpoil = "spoil_plan";

PlanFault fault_of(const char* op, const Tensor& status, int64_t capacity) {
  check_list(op, "status", status, "status", status);
  check_status(op, "status", status);
  if (capacity < 0) throw_value_error(op, "capacity must not be negative, got ", capacity);
  return {.status = reinterpret_cast<PlanStatus*>(data_of(status)), .capacity = capacity};
}

Tensor plan_fault(const Tensor& status, int64_t capacity) {
  const Arguments all(kFault, {read("status", status)});
  const PlanFault work = fault_of(kFault, status, capacity);
  all.check_memory();
  const Tensor fault = new_tensor(kFault, {1}, ScalarType::Long, status);
  if (status.is_cpu()) {
    *data_of(fault) = work.kind();
    return fault;
  }
  const CurrentStream stream(kFault, status);
  if constexpr (kWithCuda)
    check_cuda(launch_plan_fault(work, data_of(fault), stream.get()), kFault);
  return fault;
}

// `agreed`: the largest fault of all ranks.
void spoil_plan(const Tensor& status, int64_t capacity, const Tensor& agreed) {
  const Arguments all(kSpoil, {written("status", status), read("agreed", agreed)});
  const PlanFault work = fault_of(kSpoil, status, capacity);
  check_list(kSpoil, "agreed", agreed, "status", status, 1);
  all.check_memory();
  if (status.is_cpu()) {
    all.mark_written();
    work.spoil(*data_of(agreed));
    return;
  }
  const CurrentStream stream(kSpoil, status);
  all.mark_written();
  if constexpr (kWithCuda)
    check_cuda(launch_spoil_plan(work, data_of(agreed), stream.get()), kSpoil);
}

const Ops kOps{
    {"plan_fault(Tensor status, int capacity) -> Tensor", TORCH_BOX(&plan_fault)},
    {"spoil_plan(Tensor(a!) status, int capacity, Tensor agreed) -> ()", TORCH_BOX(&spoil_plan)},
};

}  // namespace
}  // namespace speedtorch
