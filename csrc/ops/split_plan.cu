// Kernel of split_plan. Called by split_plan.cpp. All data is in GPU memory. A thread finds its
// table, and the table's first distinct row, by binary search.

#include <cuda_runtime.h>

#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// A thread owns tables, then entries of the plan, a grid stride apart. A plan with bad ids yields
// arbitrary numbers, and every status then reports bad ids. Offsets that do not ascend yield
// arbitrary numbers, without an access out of bounds.
__global__ void split_plan_kernel(SplitPlan work) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const PlanView& plan = work.plan;
  const PlanStatus all = *plan.status;
  const int64_t distinct = min(all.distinct, plan.count);
  const auto begin_of = [&](int64_t table) {  // begin of the table's distinct rows
    return table == work.tables ? distinct
                                : lower_bound(plan.unique, distinct, work.ranges[2 * table]);
  };
  for (int64_t t = thread; t <= work.tables; t += stride) {
    const int64_t begin = begin_of(t);
    work.bounds[t] = begin;
    if (t == work.tables) break;
    const int64_t count = work.offsets[t + 1] - work.offsets[t];
    PlanStatus status = status_of_distinct(count, work.ranges[2 * t + 1]);
    status.distinct = begin_of(t + 1) - begin;
    if (is_blocked(all, work.table_rows)) {
      status.bad_count = max(all.bad_count, int64_t{1});
      status.bad_position = 0;
    }
    work.status[t] = status;
    work.begins[min(max(work.offsets[t + 1], int64_t{0}), plan.count) + t] = count;
  }
  for (int64_t i = thread; i < plan.count; i += stride) {
    // The entry belongs to the first table whose ids end after the entry.
    const int64_t t = min(lower_bound(work.offsets + 1, work.tables, i + 1), work.tables - 1);
    const int64_t first_entry = work.offsets[t], entry = i - first_entry;
    const int64_t begin = begin_of(t), rows = begin_of(t + 1) - begin;
    const int64_t row = min(max(begin + entry, int64_t{0}), plan.count - 1);
    const bool is_row = entry >= 0 && entry < rows;
    work.unique[i] = is_row ? plan.unique[row] - work.ranges[2 * t] : -1;
    work.inverse[i] = plan.inverse[i] - begin;
    work.order[i] = plan.order[i] - first_entry;
    const int64_t count = work.offsets[t + 1] - first_entry;
    work.begins[i + t] = is_row ? plan.offsets[row] - first_entry : count;
  }
}

}  // namespace

int launch_split_plan(const SplitPlan& work, void* stream) {
  const int64_t entries = work.plan.count > work.tables ? work.plan.count : work.tables + 1;
  split_plan_kernel<<<blocks_for_ids(entries), kIdThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      work);
  return cudaGetLastError();
}

}  // namespace speedtorch
