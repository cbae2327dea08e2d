// split_plan: splits the plan of one batch over several tables, numbered as rows of one, into a
// plan for each table. This file has the checks and the CPU loop; the GPU kernel is in
// split_plan.cu.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "ops/launchers.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "split_plan";
constexpr const char* kIndex = "index";  // the id list of the plan, for messages

void split_on_cpu(const SplitPlan& work) {
  const PlanView& plan = work.plan;
  int64_t* end = plan.unique + plan.status->distinct;
  int64_t begin = 0;
  for (int64_t t = 0; t < work.tables; ++t) {
    const int64_t first_row = work.ranges[2 * t], rows = work.ranges[2 * t + 1];
    const int64_t first = work.offsets[t], count = work.offsets[t + 1] - first;
    const int64_t* bound = std::lower_bound(plan.unique + begin, end, first_row + rows);
    const int64_t distinct = bound - plan.unique - begin;
    work.bounds[t] = begin;
    work.status[t] = status_of_distinct(count, rows);
    work.status[t].distinct = distinct;
    int64_t* begins = work.begins + first + t;
    for (int64_t i = 0; i < count; ++i) {
      const bool is_row = i < distinct;
      work.unique[first + i] = is_row ? plan.unique[begin + i] - first_row : -1;
      work.inverse[first + i] = plan.inverse[first + i] - begin;
      work.order[first + i] = plan.order[first + i] - first;
      begins[i] = is_row ? plan.offsets[begin + i] - first : count;
    }
    begins[count] = count;
    begin += distinct;
  }
  work.bounds[work.tables] = begin;
}

// Throws unless the ids of a plan on the CPU are partitioned among the tables.
void check_shared_out(const SplitPlan& work) {
  const PlanView& plan = work.plan;
  int64_t row = 0;
  for (int64_t t = 0; t < work.tables; ++t) {
    const int64_t first_row = work.ranges[2 * t], rows = work.ranges[2 * t + 1];
    if (first_row != row || rows < 0 || rows > work.table_rows - row) {
      throw_value_error(kOp, "ranges[", t, "] has first row ", first_row, " and ", rows,
                        " rows, expected first row ", row, " and at most ", work.table_rows - row,
                        " rows");
    }
    for (int64_t i = work.offsets[t]; i < work.offsets[t + 1]; ++i) {
      const int64_t place = plan.inverse[i];
      if (place < 0 || place >= plan.status->distinct) throw_not_made_by_plan_rows(kOp, kIndex);
      const int64_t id = plan.unique[place];
      if (id >= row && id < row + rows) continue;
      throw_value_error(kOp, "id ", id, " at position ", i, " is not a row of table ", t);
    }
    row += rows;
  }
}

std::vector<Tensor> split_plan(const Tensors& plan, const Tensor& offsets, const Tensor& ranges,
                               int64_t table_rows) {
  const Arguments all(kOp, {read("plan", plan), read("offsets", offsets), read("ranges", ranges)});
  check_list(kOp, "offsets", offsets, "ranges", ranges);
  const int64_t tables = offsets.numel() - 1;
  if (tables < 1) throw_value_error(kOp, "offsets must have at least two entries");
  check_list(kOp, "ranges", ranges, "ranges", ranges, std::nullopt, 2);
  check_shape(kOp, "ranges", ranges, {tables, 2});
  const int64_t count = plan.empty() ? 0 : plan[0].numel();
  check_plan(kOp, kIndex, plan, count, ranges);
  all.check_memory();
  const PlanView view = view_plan(kOp, kIndex, plan, count, table_rows);
  const auto made_of = [&](std::vector<int64_t> shape) {
    return new_tensor(kOp, shape, ScalarType::Long, ranges);
  };
  const std::vector<Tensor> made{made_of({count}),
                                 made_of({count}),
                                 made_of({count}),
                                 made_of({count + tables}),
                                 made_of({tables, kPlanStatusFields}),
                                 made_of({tables + 1})};
  const SplitPlan work{.plan = view,
                       .table_rows = table_rows,
                       .offsets = data_of(offsets),
                       .ranges = data_of(ranges),
                       .tables = tables,
                       .unique = data_of(made[0]),
                       .inverse = data_of(made[1]),
                       .order = data_of(made[2]),
                       .begins = data_of(made[3]),
                       .status = reinterpret_cast<PlanStatus*>(data_of(made[4])),
                       .bounds = data_of(made[5])};
  if (ranges.is_cpu()) {
    check_offsets(kOp, kIndex, view);
    check_offsets_on_cpu(kOp, "offsets", offsets, count);
    check_shared_out(work);
    split_on_cpu(work);
    return made;
  }
  const CurrentStream stream(kOp, ranges);
  if constexpr (kWithCuda) check_cuda(launch_split_plan(work, stream.get()), kOp);
  return made;
}

// For speedtorch/plan/joint_batch.py.
const Ops kOps{
    {"split_plan(Tensor[] plan, Tensor offsets, Tensor ranges, int table_rows) -> Tensor[]",
     TORCH_BOX(&split_plan)},
};

}  // namespace
}  // namespace speedtorch
