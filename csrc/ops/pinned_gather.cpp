// pinned_gather: out[i] = table[index[i]], for a table in host memory or on the GPU of the ids.
// This file has the checks and the paths. cost_model.h chooses the path; the CPU loop is in
// cpu_copy.cpp, the GPU kernels are in pinned_gather.cu.

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "memory/host_memory.h"
#include "move/cost_model.h"
#include "move/cpu_copy.h"
#include "ops/launchers.h"
#include "plan/dedup.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "pinned_gather";
constexpr const char* kIndex = "index";

// Views `out` as one contiguous row per id, for any shape of the index.
Rows rows_per_id(const Tensor& out, const Rows& table, const Ids& ids) {
  return {.base = static_cast<char*>(out.mutable_data_ptr()),
          .count = ids.count,
          .row_bytes = table.row_bytes,
          .stride_bytes = table.row_bytes};
}

void gather_staged(const Rows& table, const Ids& ids, const Plan& plan, const Tensor& out,
                   const CurrentStream& stream, const Arguments& all) {
  stream.check_pageable_not_captured(kOp, "the table", "table");
  const Ids on_cpu = check_ids_and_plan_on_cpu(kOp, kIndex, ids, plan, table.count);
  const Tensor staging = new_pinned(kOp, shape_of(out), out);
  gather_on_cpu(table, on_cpu, rows_per_id(staging, table, on_cpu));
  all.mark_written();
  copy(kOp, staging, out, false);
}

void gather(const Tensor& table, const Rows& rows, const Tensor& index, const Plan& plan,
            const Tensor& out, const Arguments& all) {
  Ids ids = as_ids(index);
  if (ids.on_cpu) check_ids_on_cpu(kOp, kIndex, ids, rows.count);
  if (out.is_cpu()) {
    if (plan) view_plan(kOp, kIndex, *plan, ids.count, rows.count);
    all.mark_written();
    if (out.numel() > 0) gather_on_cpu(rows, ids, rows_per_id(out, rows, ids));
    return;
  }
  const CurrentStream stream(kOp, out);
  const Access access = gpu_access(kOp, table, rows, stream.device());
  if (ids.on_cpu) ids = as_ids(ids_to_device(kOp, ids, out, stream));
  if (out.numel() > 0 && access == Access::kNot) {
    return gather_staged(rows, ids, plan, out, stream, all);
  }
  if (ids.count == 0) return all.mark_written();
  if constexpr (kWithCuda) {
    TableUse use{table, rows, stream.queue()};
    const Rows result = rows_per_id(out, rows, ids);
    const Batch batch = batch_of(Direction::kIn, access, rows, ids.count);
    const CopyKernel kernel = copy_kernel_for(batch, result, stream);
    const Path path = plan ? Path::kOrdered : path_for(kOp, batch);
    const RowIds found =
        find_row_ids(kOp, kIndex, ids, path, plan, Keep::kAny, rows.count, stream.get());
    const Report about{error_record(stream.device()), Op::kGather, IdList::kIndex, rows.count};
    all.mark_written();
    check_cuda(launch_gather(rows, result, found.view, kernel, about, stream.get()), kOp);
    use.note();
  }
}

std::vector<int64_t> result_shape(const Tensor& table, const Tensor& index) {
  std::vector<int64_t> shape = shape_of(index);
  for (int64_t d = 1; d < table.dim(); ++d) shape.push_back(table.size(d));
  return shape;
}

// Checks shapes, dtypes and devices for a result on the device of `on`.
Rows check_fit(const Tensor& table, const Tensor& index, const Plan& plan, const char* on_name,
               const Tensor& on) {
  const Rows rows = as_rows(kOp, "table", table);
  check_ids_kind(kOp, kIndex, index);
  check_device(kOp, "table", table, on_name, on);
  check_device(kOp, kIndex, index, on_name, on);
  if (plan) check_plan(kOp, kIndex, *plan, index.numel(), on);
  return rows;
}

// Called with an index, or with an index and its plan.
template <typename... Planned>
Tensor gather_new(const Tensor& table, const Tensor& index, const Planned&... planned) {
  const Plan plan{planned...};
  const Arguments all(kOp, {read("table", table), read(kIndex, index), read("plan", plan)});
  const Rows rows = check_fit(table, index, plan, kIndex, index);
  all.check_memory();
  Tensor out = new_tensor(kOp, result_shape(table, index), table.scalar_type(), index);
  gather(table, rows, index, plan, out, all);
  return out;
}

void gather_into(const Tensor& table, const Tensor& index, const Plan& plan, const Tensor& out) {
  const Arguments all(
      kOp, {read("table", table), read(kIndex, index), read("plan", plan), written("out", out)});
  const Rows rows = check_fit(table, index, plan, "the result", out);
  check_shape(kOp, "out", out, result_shape(table, index));
  check_dtype(kOp, "out", out, "table", table);
  check_contiguous(kOp, "out", out);
  all.check_memory();
  gather(table, rows, index, plan, out, all);
}

void pinned_gather_out(const Tensor& table, const Tensor& index, const Tensor& out) {
  gather_into(table, index, std::nullopt, out);
}

void pinned_gather_planned_out(const Tensor& table, const Tensor& index, const Tensors& plan,
                               const Tensor& out) {
  gather_into(table, index, plan, out);
}

const Ops kOps{
    {"pinned_gather(Tensor table, Tensor index) -> Tensor", TORCH_BOX(&gather_new<>)},
    // The same without the autograd kernel, which costs as much as a small gather.
    {"pinned_gather_detached(Tensor table, Tensor index) -> Tensor", TORCH_BOX(&gather_new<>)},
    {"pinned_gather.out(Tensor table, Tensor index, Tensor(a!) out) -> ()",
     TORCH_BOX(&pinned_gather_out)},
    {"pinned_gather.planned(Tensor table, Tensor index, Tensor[] plan) -> Tensor",
     TORCH_BOX(&gather_new<Tensors>)},
    {"pinned_gather.planned_out(Tensor table, Tensor index, Tensor[] plan, Tensor(a!) out) -> ()",
     TORCH_BOX(&pinned_gather_planned_out)},
};

}  // namespace
}  // namespace speedtorch
