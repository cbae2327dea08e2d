// pinned_gather: out[i] = table[index[i]], the table in host memory (or on the GPU of the ids).
// Checks and the paths; cost_model.h chooses, the CPU loop is in cpu_mover.cpp, the GPU kernels in
// pinned_gather.cu.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "claims.h"
#include "cpu_mover.h"
#include "gpu.h"
#include "host_blocks.h"
#include "paths.h"
#include "pinned_gather_launch.h"
#include "plan.h"
#include "rows.h"
#include "torch_calls.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "pinned_gather";
constexpr const char* kIndex = "index";

using Plan = std::optional<std::vector<Tensor>>;

// One contiguous row per id, whatever the shape of the index.
Rows rows_per_id(const Tensor& out, const Rows& table, const Ids& ids) {
  return {.base = static_cast<char*>(out.mutable_data_ptr()),
          .count = ids.count,
          .row_bytes = table.row_bytes,
          .stride_bytes = table.row_bytes};
}

void gather_staged(const Tensor& table, const Ids& ids, const Plan& plan, const Tensor& out,
                   const CurrentStream& stream) {
  stream.refuse_capture(kOp,
                        "the table is in pageable memory, which takes the host; pin it with "
                        "speedtorch.pin_memory_(table) or keep it in a HostTable");
  const Ids on_cpu = as_ids(kOp, kIndex, copy_to_cpu(kOp, ids.keep));
  const Rows rows = as_rows(kOp, "table", table);
  check_ids_on_cpu(kOp, kIndex, on_cpu, rows.count);
  if (plan) check_plan_on_cpu(kOp, kIndex, *plan, ids.count, rows.count, out);
  const Tensor staging = new_pinned(kOp, shape_of(out), out);
  gather_on_cpu(rows, on_cpu, rows_per_id(staging, rows, on_cpu));
  copy_async(kOp, staging, out);
}

void gather_on_gpu(const Tensor& table, const Rows& rows, Reach reach, const Ids& ids,
                   const Plan& plan, const Tensor& out, const CurrentStream& stream) {
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
      const std::vector<Tensor> made =
          plan ? *plan : make_plan(kOp, ids, rows.count, out, stream.get());
      const PlanView view = view_plan(kOp, kIndex, made, ids.count, rows.count, out);
      check_cuda(launch_gather_ordered(work, view, mover, letter_box(), stream.get()), kOp);
    } else if (path == Path::kDistinct) {
      const Claims claims = make_claims(kOp, ids, Winner::kAny, rows.count, out, stream.get());
      check_cuda(launch_gather_distinct(work, claims.view, mover, letter_box(), stream.get()), kOp);
    } else {
      const Claims checked = ids.count > kIdsCheckedInBlock
                                 ? check_ids_on_gpu(kOp, ids, rows.count, out, stream.get())
                                 : Claims{{}, unclaimed(ids)};
      check_cuda(
          launch_gather_direct(work, checked.view, mover.most_blocks, letter_box(), stream.get()),
          kOp);
    }
  }
  note_use(table, rows, stream.get());
}

void gather(const Tensor& table, const Tensor& index, const Plan& plan, const Tensor& out) {
  const Rows rows = as_rows(kOp, "table", table);
  Ids ids = as_ids(kOp, kIndex, index);
  check_device(kOp, "table", table, "the result", out);
  check_device(kOp, kIndex, index, "the result", out);
  if (ids.on_cpu) check_ids_on_cpu(kOp, kIndex, ids, rows.count);
  if (out.is_cpu()) {
    check_owner(table);
    if (plan) view_plan(kOp, kIndex, *plan, ids.count, rows.count, out);
    if (out.numel() > 0) gather_on_cpu(rows, ids, rows_per_id(out, rows, ids));
    return;
  }
  const CurrentStream stream(kOp, out);
  if (ids.on_cpu) ids = as_ids(kOp, kIndex, ids_to_device(kOp, ids, out, stream));
  const Reach reach = reach_of(kOp, table, rows);
  if (out.numel() > 0 && reach == Reach::kNot) {
    gather_staged(table, ids, plan, out, stream);
  } else if (ids.count > 0) {
    gather_on_gpu(table, rows, reach, ids, plan, out, stream);
  }
}

std::vector<int64_t> result_shape(const Tensor& table, const Tensor& index) {
  as_rows(kOp, "table", table);
  std::vector<int64_t> shape = shape_of(index);
  for (int64_t d = 1; d < table.dim(); ++d) shape.push_back(table.size(d));
  return shape;
}

Tensor gather_new(const Tensor& table, const Tensor& index, const Plan& plan) {
  throw_pending();
  check_device(kOp, "table", table, kIndex, index);
  Tensor out = new_tensor(kOp, result_shape(table, index), table.scalar_type(), index);
  gather(table, index, plan, out);
  return out;
}

void gather_into(const Tensor& table, const Tensor& index, const Plan& plan, const Tensor& out) {
  throw_pending();
  check_shape(kOp, "out", out, result_shape(table, index));
  check_dtype(kOp, "out", out, "table", table);
  check_contiguous(kOp, "out", out);
  if (out.numel() > 0) {
    const Rows written{.base = static_cast<char*>(out.mutable_data_ptr()),
                       .count = 1,
                       .row_bytes = out.numel() * element_bytes(out),
                       .stride_bytes = 0};
    check_disjoint(kOp, "out", written, "table", as_rows(kOp, "table", table));
  }
  mark_written(kOp, out);
  gather(table, index, plan, out);
}

Tensor pinned_gather(const Tensor& table, const Tensor& index) {
  return gather_new(table, index, std::nullopt);
}

void pinned_gather_out(const Tensor& table, const Tensor& index, const Tensor& out) {
  gather_into(table, index, std::nullopt, out);
}

Tensor pinned_gather_planned(const Tensor& table, const Tensor& index,
                             const std::vector<Tensor>& plan) {
  return gather_new(table, index, plan);
}

void pinned_gather_planned_out(const Tensor& table, const Tensor& index,
                               const std::vector<Tensor>& plan, const Tensor& out) {
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
