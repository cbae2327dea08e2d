// pinned_gather: out[i] = table[index[i]], the table in host memory (or on the GPU of the ids).
// Checks and the paths; cost_model.h chooses, the CPU loop is in cpu_mover.cpp, the GPU kernels in
// pinned_gather.cu.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/rows.h"
#include "memory/host_blocks.h"
#include "move/cpu_mover.h"
#include "move/paths.h"
#include "ops/pinned_gather_launch.h"
#include "plan/claims.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "pinned_gather";
constexpr const char* kIndex = "index";

using Plan = std::optional<Tensors>;

// One contiguous row per id, whatever the shape of the index.
Rows rows_per_id(const Tensor& out, const Rows& table, const Ids& ids) {
  return {.base = static_cast<char*>(out.mutable_data_ptr()),
          .count = ids.count,
          .row_bytes = table.row_bytes,
          .stride_bytes = table.row_bytes};
}

void gather_staged(const Rows& table, const Ids& ids, const Plan& plan, const Tensor& out,
                   const CurrentStream& stream, const Arguments& all) {
  stream.refuse_capture(kOp,
                        "the table is in pageable memory, which takes the host; pin it with "
                        "speedtorch.pin_memory_(table) or keep it in a HostTable");
  const Ids on_cpu = as_ids(copy_to_cpu(kOp, ids.keep));
  check_ids_on_cpu(kOp, kIndex, on_cpu, table.count);
  if (plan) check_plan_on_cpu(kOp, kIndex, *plan, ids.count, table.count);
  const Tensor staging = new_pinned(kOp, shape_of(out), out);
  gather_on_cpu(table, on_cpu, rows_per_id(staging, table, on_cpu));
  all.mark_written();
  copy_async(kOp, staging, out);
}

void gather_on_gpu(const Rows& rows, Reach reach, const Ids& ids, const Plan& plan,
                   const Tensor& out, const CurrentStream& stream, const Arguments& all) {
  if constexpr (kWithCuda) {
    const Rows result = rows_per_id(out, rows, ids);
    const GatherRows work{.table = rows.base,
                          .table_rows = rows.count,
                          .table_stride_bytes = rows.stride_bytes,
                          .out = result.base,
                          .row_bytes = rows.row_bytes,
                          .count = ids.count};
    const Mover mover = mover_for(Direction::kIn, rows, reach, result, ids.count, stream);
    const Path path =
        plan ? Path::kOrdered
             : choose_path(kOp, batch_of(Direction::kIn, reach, rows, ids.count), costs()).path;
    if (path == Path::kOrdered) {
      const Tensors made = plan ? *plan : make_plan(kOp, ids, rows.count, out, stream.get());
      const PlanView view = view_plan(kOp, kIndex, made, ids.count, rows.count);
      all.mark_written();
      check_cuda(launch_gather_ordered(work, view, mover, letter_box(), stream.get()), kOp);
    } else if (path == Path::kDistinct) {
      const Claims claims = make_claims(kOp, ids, Winner::kAny, rows.count, out, stream.get());
      all.mark_written();
      check_cuda(launch_gather_distinct(work, claims.view, mover, letter_box(), stream.get()), kOp);
    } else {
      const Claims checked = ids.count > kIdsCheckedInBlock
                                 ? check_ids_on_gpu(kOp, ids, rows.count, out, stream.get())
                                 : Claims{{}, unclaimed(ids)};
      all.mark_written();
      check_cuda(
          launch_gather_direct(work, checked.view, mover.most_blocks, letter_box(), stream.get()),
          kOp);
    }
  }
}

void gather(const Tensor& table, const Rows& rows, const Tensor& index, const Plan& plan,
            const Tensor& out, const Arguments& all) {
  if (out.is_cpu()) {
    const Ids ids = as_ids(index);
    check_ids_on_cpu(kOp, kIndex, ids, rows.count);
    if (plan) view_plan(kOp, kIndex, *plan, ids.count, rows.count);
    all.mark_written();
    if (out.numel() > 0) gather_on_cpu(rows, ids, rows_per_id(out, rows, ids));
    return;
  }
  const CurrentStream stream(kOp, out);
  const Reach reach = reach_of(kOp, table, rows);
  Ids ids = as_ids(index);
  if (ids.on_cpu) {
    check_ids_on_cpu(kOp, kIndex, ids, rows.count);
    ids = as_ids(ids_to_device(kOp, ids, out, stream));
  }
  if (out.numel() > 0 && reach == Reach::kNot) {
    gather_staged(rows, ids, plan, out, stream, all);
  } else if (ids.count > 0) {
    queue_and_note(table, rows, stream.get(),
                   [&] { gather_on_gpu(rows, reach, ids, plan, out, stream, all); });
  } else {
    all.mark_written();
  }
}

std::vector<int64_t> result_shape(const Tensor& table, const Tensor& index) {
  std::vector<int64_t> shape = shape_of(index);
  for (int64_t d = 1; d < table.dim(); ++d) shape.push_back(table.size(d));
  return shape;
}

// Shapes, dtypes and devices, for a result on the device of `on`.
Rows check_fit(const Tensor& table, const Tensor& index, const Plan& plan, const char* on_name,
               const Tensor& on) {
  const Rows rows = as_rows(kOp, "table", table);
  check_ids_kind(kOp, kIndex, index);
  check_device(kOp, "table", table, on_name, on);
  check_device(kOp, kIndex, index, on_name, on);
  if (plan) check_plan(kOp, kIndex, *plan, index.numel(), on);
  return rows;
}

Tensor gather_new(const Tensor& table, const Tensor& index, const Plan& plan) {
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

Tensor pinned_gather(const Tensor& table, const Tensor& index) {
  return gather_new(table, index, std::nullopt);
}

void pinned_gather_out(const Tensor& table, const Tensor& index, const Tensor& out) {
  gather_into(table, index, std::nullopt, out);
}

Tensor pinned_gather_planned(const Tensor& table, const Tensor& index, const Tensors& plan) {
  return gather_new(table, index, plan);
}

void pinned_gather_planned_out(const Tensor& table, const Tensor& index, const Tensors& plan,
                               const Tensor& out) {
  gather_into(table, index, plan, out);
}

}  // namespace
}  // namespace speedtorch

STABLE_TORCH_LIBRARY_IMPL(speedtorch, CompositeExplicitAutograd, m) {
  m.impl("pinned_gather", TORCH_BOX(&speedtorch::pinned_gather));
  m.impl("pinned_gather_detached", TORCH_BOX(&speedtorch::pinned_gather));
  m.impl("pinned_gather.out", TORCH_BOX(&speedtorch::pinned_gather_out));
  m.impl("pinned_gather.planned", TORCH_BOX(&speedtorch::pinned_gather_planned));
  m.impl("pinned_gather.planned_out", TORCH_BOX(&speedtorch::pinned_gather_planned_out));
}
