// plan_parts: plans the ids of several lookups as one batch, and queues a copy of the plan's status
// from a GPU to the CPU.

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>

#include "call/host_numbers.h"
#include "call/torch_calls.h"
#include "core/registration.h"
#include "ops/begin_step.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "plan_parts";

}  // namespace

Tensor joined_ids(const char* op, const Tensors& parts) {
  check_fields(op, "parts", parts.size());
  int64_t count = 0;
  ScalarType dtype = ScalarType::Int;
  for (size_t k = 0; k < parts.size(); ++k) {
    const std::string name = item("parts", k);
    check_ids_kind(op, name.c_str(), parts[k]);
    check_same_device(op, name.c_str(), parts[k], "parts[0]", parts[0]);
    count += parts[k].numel();
    if (parts[k].scalar_type() == ScalarType::Long) dtype = ScalarType::Long;
  }
  if (parts.size() == 1) return parts[0];
  const Tensor all = new_tensor(op, {count}, dtype, parts[0]);
  int64_t begin = 0;
  for (const Tensor& part : parts) {
    const int64_t length = part.numel();
    if (length == 0) continue;
    copy(op, view_of_list(as_ids(part).keep, 0, length), view_of_list(all, begin, length),
         /*wait=*/false);
    begin += length;
  }
  return all;
}

namespace {

// Returns the results of plan_batch. For ids on a GPU, `handle` then names a copy of the status
// (-1: no copy).
Tensors plan_parts(const Tensors& parts, int64_t rows, int64_t padding, int64_t handle,
                   const std::optional<Tensor>& held, const std::optional<Tensor>& held_status) {
  const Arguments all(kOp, {read("parts", parts)});
  all.check_memory();
  const Tensors made = plan_batch(joined_ids(kOp, parts), rows, padding, -1, held, held_status);
  const Tensor& status = made[kPlanStatus];
  if (handle >= 0 && !status.is_cpu()) queue_numbers(kOp, status, handle);
  return made;
}

// For speedtorch/plan/planned_batch.py.
const Ops kOps{
    {"plan_parts(Tensor[] parts, int rows, int padding, int handle, Tensor? held=None, Tensor? "
     "held_status=None) -> Tensor[]",
     TORCH_BOX(&plan_parts)},
};

}  // namespace
}  // namespace speedtorch
