// pinned_scatter: table[index[i]] = src[i] (the last occurrence wins), or += with accumulate; the
// table in host memory or on the GPU. Checks, the CPU kernel and the paths; cost_model.h chooses,
// the GPU kernels are in pinned_scatter.cu.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/rows.h"
#include "memory/host_blocks.h"
#include "move/addend.h"
#include "move/cpu_mover.h"
#include "move/paths.h"
#include "ops/pinned_scatter_launch.h"
#include "plan/claims.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "pinned_scatter";
constexpr const char* kIndex = "index";

using Plan = std::optional<Tensors>;
using Added = std::optional<AddendKind>;  // how to accumulate; none: the last occurrence wins

void scatter_or_add_on_cpu(const Rows& table, const Ids& ids, const Rows& src, const Added& added) {
  if (added) {
    add_on_cpu(table, ids, src, *added);
  } else {
    scatter_on_cpu(table, ids, src);
  }
}

void scatter_staged(const Rows& table, const Ids& ids, const Tensor& src, const Plan& plan,
                    const Added& added, const CurrentStream& stream, const Arguments& all) {
  stream.refuse_capture(kOp,
                        "the table is in pageable memory, which takes the host; pin it with "
                        "speedtorch.pin_memory_(table) or keep it in a HostTable");
  const Ids on_cpu = as_ids(copy_to_cpu(kOp, ids.keep));
  check_ids_on_cpu(kOp, kIndex, on_cpu, table.count);
  if (plan) check_plan_on_cpu(kOp, kIndex, *plan, ids.count, table.count);
  const Tensor rows = torch::stable::reshape(copy_to_cpu(kOp, src), {ids.count, -1});
  all.mark_written();
  scatter_or_add_on_cpu(table, on_cpu, as_rows(kOp, "src", rows), added);
}

void scatter_on_gpu(const Rows& rows, Reach reach, const Ids& ids, const Rows& src,
                    const Tensor& on, const Plan& plan, const Added& added,
                    const CurrentStream& stream, const Arguments& all) {
  if constexpr (kWithCuda) {
    const ScatterRows work{.table = rows.base,
                           .table_rows = rows.count,
                           .table_stride_bytes = rows.stride_bytes,
                           .src = src.base,
                           .src_stride_bytes = src.stride_bytes,
                           .row_bytes = rows.row_bytes};
    const Mover mover = mover_for(Direction::kOut, rows, reach, src, ids.count, stream);
    Batch batch = batch_of(Direction::kOut, reach, rows, ids.count);
    batch.accumulate = added.has_value();
    const Path path = plan ? Path::kOrdered : choose_path(kOp, batch, costs()).path;
    if (path == Path::kOrdered) {
      const int add_blocks = reach == Reach::kOnGpu ? kDeviceBlocks : static_cast<int>(num_sms());
      const Tensors made = plan ? *plan : make_plan(kOp, ids, rows.count, on, stream.get());
      const PlanView view = view_plan(kOp, kIndex, made, ids.count, rows.count);
      all.mark_written();
      check_cuda(
          added ? launch_scatter_add(work, view, *added, add_blocks, letter_box(), stream.get())
                : launch_scatter_ordered(work, view, mover, letter_box(), stream.get()),
          kOp);
    } else if (path == Path::kDistinct) {
      const Claims claims = make_claims(kOp, ids, Winner::kLast, rows.count, on, stream.get());
      all.mark_written();
      check_cuda(launch_scatter_distinct(work, claims.view, mover, letter_box(), stream.get()),
                 kOp);
    } else {
      all.mark_written();
      check_cuda(launch_scatter_direct(work, unclaimed(ids), mover.most_blocks, letter_box(),
                                       stream.get()),
                 kOp);
    }
  }
}

// One row per id, whatever the shape of the index; rows contiguous inside, numbers aligned.
Tensor row_per_id(const Tensor& src, int64_t ids, int64_t index_dims) {
  std::vector<int64_t> shape{ids};
  for (int64_t d = index_dims; d < src.dim(); ++d) shape.push_back(src.size(d));
  const Tensor flat = torch::stable::reshape(src, shape);
  if (src.numel() == 0 || (flat.is_contiguous() && is_aligned(flat))) return flat;
  return flat.is_contiguous() ? torch::stable::clone(flat) : torch::stable::contiguous(flat);
}

// Shapes, dtypes and devices.
Rows check_fit(const Tensor& table, const Tensor& index, const Tensor& src, const Plan& plan) {
  const Rows rows = as_writable_rows(kOp, "table", table);
  check_ids_kind(kOp, kIndex, index);
  std::vector<int64_t> expected = shape_of(index);
  for (int64_t d = 1; d < table.dim(); ++d) expected.push_back(table.size(d));
  check_shape(kOp, "src", src, expected);
  check_dtype(kOp, "src", src, "table", table);
  check_device(kOp, "table", table, "src", src);
  check_device(kOp, kIndex, index, "src", src);
  if (plan) check_plan(kOp, kIndex, *plan, index.numel(), src);
  return rows;
}

void scatter(const Tensor& table, const Tensor& index, const Tensor& src, const Plan& plan,
             bool accumulate) {
  const Arguments all(
      kOp, {written("table", table), read(kIndex, index), read("src", src), read("plan", plan)});
  const Rows rows = check_fit(table, index, src, plan);
  const Added added = accumulate ? std::make_optional(addend_of(kOp, table)) : std::nullopt;
  all.check_memory();
  if (src.is_cpu()) {
    const Ids ids = as_ids(index);
    check_ids_on_cpu(kOp, kIndex, ids, rows.count);
    if (plan) view_plan(kOp, kIndex, *plan, ids.count, rows.count);
    all.mark_written();
    if (src.numel() == 0) return;
    const Tensor whole = row_per_id(src, ids.count, index.dim());
    return scatter_or_add_on_cpu(rows, ids, as_rows(kOp, "src", whole), added);
  }
  const CurrentStream stream(kOp, src);
  const Reach reach = reach_of(kOp, table, rows);
  Ids ids = as_ids(index);
  if (ids.on_cpu) check_ids_on_cpu(kOp, kIndex, ids, rows.count);
  if (ids.count == 0) return all.mark_written();
  if (ids.on_cpu) ids = as_ids(ids_to_device(kOp, ids, src, stream));
  const Tensor whole = row_per_id(src, ids.count, index.dim());
  if (src.numel() > 0 && reach == Reach::kNot) {
    scatter_staged(rows, ids, whole, plan, added, stream, all);
  } else {
    const Rows source = as_rows(kOp, "src", whole);
    queue_and_note(table, rows, stream.get(), [&] {
      scatter_on_gpu(rows, reach, ids, source, whole, plan, added, stream, all);
    });
  }
}

void pinned_scatter(const Tensor& table, const Tensor& index, const Tensor& src, bool accumulate) {
  scatter(table, index, src, std::nullopt, accumulate);
}

void pinned_scatter_planned(const Tensor& table, const Tensor& index, const Tensor& src,
                            const Tensors& plan, bool accumulate) {
  scatter(table, index, src, plan, accumulate);
}

}  // namespace
}  // namespace speedtorch

STABLE_TORCH_LIBRARY_IMPL(speedtorch, CompositeExplicitAutograd, m) {
  m.impl("pinned_scatter", TORCH_BOX(&speedtorch::pinned_scatter));
  m.impl("pinned_scatter.planned", TORCH_BOX(&speedtorch::pinned_scatter_planned));
}
