// plan_batch: plans a batch for a step, and compares the plan with held rows if there are any. This
// file has the checks; plan.cpp makes the plan, diff_ids.cpp compares.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "call/torch_calls.h"
#include "core/registration.h"
#include "ops/begin_step.h"
#include "ops/diff_ids.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "plan_batch";

}  // namespace

void copy_ids(const Tensor& index, const Tensor& to) {
  const Ids ids = as_ids(index);
  const size_t bytes = static_cast<size_t>(ids.count) * (ids.wide ? 8 : 4);
  if (bytes > 0) std::memcpy(to.mutable_data_ptr(), ids.data, bytes);
}

// Returns the plan. With held rows, also the lists of IdDiff, and the counts behind the plan's
// status. For ids on the CPU, also a copy that nothing else writes to.
Tensors plan_batch(const Tensor& index, int64_t rows, int64_t padding, int64_t capacity,
                   const std::optional<Tensor>& held, const std::optional<Tensor>& held_status) {
  const Arguments all(kOp,
                      {read("index", index), read("held", held), read("held_status", held_status)});
  check_plannable(kOp, index, rows);
  if (padding < -1 || padding >= std::max<int64_t>(rows, 1)) {
    throw_value_error(kOp, "padding must be -1 or a row of a table of ", rows, " rows, got ",
                      padding);
  }
  if (capacity < -1 || capacity == 0) {
    throw_value_error(kOp, "capacity must be -1 or at least 1, got ", capacity);
  }
  if (held.has_value() != held_status.has_value()) {
    throw_value_error(kOp, "held and held_status must be passed together");
  }
  SortedIds before{};
  if (held) {
    before = check_sorted_ids(kOp, "held", *held, "held_status", *held_status, "index", index);
  }
  all.check_memory();
  std::optional<CurrentStream> stream;
  if (!index.is_cpu()) stream.emplace(kOp, index);
  const int64_t fields = kPlanStatusFields + (held ? kChangeCounts : 0);
  Tensors made =
      plan_index(kOp, index, {rows, padding, capacity}, stream ? stream->get() : nullptr, fields);
  if (held) {
    int64_t* status = data_of(made.back());
    const SortedIds now{.ids = data_of(made[0]),
                        .size = made[0].numel(),
                        .count = &reinterpret_cast<PlanStatus*>(status)->distinct};
    const Tensors lists =
        diff(kOp, now, before, padding, nullptr, status + kPlanStatusFields, index, stream, all);
    made.insert(made.end(), lists.begin(), lists.end());
  }
  if (index.is_cpu()) {
    made.push_back(new_tensor(kOp, shape_of(index), index.scalar_type(), index));
    copy_ids(index, made.back());
  }
  return made;
}

namespace {

// For speedtorch/plan/fixed_size_batch.py, speedtorch/plan/joint_batch.py and speedtorch/step.
const Ops kOps{
    {"plan_batch(Tensor index, int rows, int padding, int capacity, Tensor? held=None, Tensor? "
     "held_status=None) -> Tensor[]",
     TORCH_BOX(&plan_batch)},
};

}  // namespace
}  // namespace speedtorch
