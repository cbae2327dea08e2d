// pinned_scatter: table[index[i]] = src[i] (the last occurrence wins), or += with accumulate; the
// table in host memory or on the GPU. Checks, the CPU kernel and the choice of path; the GPU
// kernels are in pinned_scatter.cu.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "addend.h"
#include "gpu.h"
#include "host_blocks.h"
#include "pinned_scatter_launch.h"
#include "plan.h"
#include "rows.h"
#include "torch_calls.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "pinned_scatter";
constexpr const char* kIndex = "index";
constexpr int64_t kBytesPerTask = int64_t{64} << 10;  // a thread's share that is worth waking it
constexpr int64_t kRowsPerStripe = 64;  // neighbours stay with one thread, which spares cache lines

using Plan = std::optional<std::vector<Tensor>>;
using Added = std::optional<AddendKind>;  // how to accumulate; none: the last occurrence wins

// Calls move(i) for every id in index order, ids of one row on one thread: each of T threads walks
// all ids and takes those of its own stripes of the table. Deterministic without sorting; walking
// costs far less than moving.
template <typename Move>
void for_each_id(const Ids& ids, int64_t row_bytes, const Move& move) {
  const int64_t worth = ids.count * (row_bytes + 1) / kBytesPerTask;
  const auto tasks = std::clamp<int64_t>(worth, 1, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      for (int64_t i = 0; i < ids.count; ++i) {
        if (tasks == 1 || ids.at(i) / kRowsPerStripe % tasks == task) move(i);
      }
    }
  });
}

void scatter_on_cpu(const Rows& table, const Ids& ids, const Rows& src) {
  for_each_id(ids, src.row_bytes, [&](int64_t i) {
    std::memcpy(table.row(ids.at(i)), src.row(i), static_cast<size_t>(src.row_bytes));
  });
}

void add_on_cpu(const Rows& table, const Ids& ids, const Rows& src, AddendKind kind) {
  with_addend_type<torch::headeronly::Half, torch::headeronly::BFloat16>(kind, [&](auto number) {
    using T = decltype(number);
    const int64_t numbers = src.row_bytes / static_cast<int64_t>(sizeof(T));
    for_each_id(ids, src.row_bytes, [&](int64_t i) {
      T* row = reinterpret_cast<T*>(table.row(ids.at(i)));
      const T* addend = reinterpret_cast<const T*>(src.row(i));
      for (int64_t column = 0; column < numbers; ++column)
        row[column] = add(row[column], addend[column]);
    });
  });
}

void scatter_or_add_on_cpu(const Rows& table, const Ids& ids, const Rows& src, const Added& added) {
  if (added) {
    add_on_cpu(table, ids, src, *added);
  } else {
    scatter_on_cpu(table, ids, src);
  }
}

void scatter_staged(const Rows& table, const Ids& ids, const Tensor& src, const Plan& plan,
                    const Added& added, const CurrentStream& stream) {
  stream.refuse_capture(kOp,
                        "the table is in pageable memory, which takes the host; pin it with "
                        "speedtorch.pin_memory_(table) or keep it in a HostTable");
  const Ids on_cpu = as_ids(kOp, kIndex, copy_to_cpu(kOp, ids.keep));
  check_ids_on_cpu(kOp, kIndex, on_cpu, table.count);
  if (plan) check_plan_on_cpu(kOp, kIndex, *plan, ids.count, table.count, src);
  const Tensor rows = torch::stable::reshape(copy_to_cpu(kOp, src), {ids.count, -1});
  scatter_or_add_on_cpu(table, on_cpu, as_rows(kOp, "src", rows), added);
}

void scatter_on_gpu(const Tensor& table, const Rows& rows, const Ids& ids, const Rows& src,
                    const Tensor& on, const Plan& plan, const Added& added,
                    const CurrentStream& stream) {
  if constexpr (kWithCuda) {
    const std::vector<Tensor> made =
        plan ? *plan : make_plan(kOp, ids, rows.count, on, stream.get());
    const PlanView view = view_plan(kOp, kIndex, made, ids.count, rows.count, on);
    const ScatterRows work{.table = rows.base,
                           .table_rows = rows.count,
                           .table_stride_bytes = rows.stride_bytes,
                           .src = src.base,
                           .src_stride_bytes = src.stride_bytes,
                           .row_bytes = rows.row_bytes,
                           .crosses_link = !table.is_cuda()};
    check_cuda(added ? launch_scatter_add(work, view, *added, letter_box(), stream.get())
                     : launch_scatter(work, view, letter_box(), stream.get()),
               kOp);
  }
  note_use(table, rows, stream.get());
}

void scatter(const Tensor& table, const Tensor& index, const Tensor& src, const Plan& plan,
             bool accumulate) {
  throw_pending();
  const Rows rows = as_writable_rows(kOp, "table", table);
  check_writable(kOp, "table", rows);
  Ids ids = as_ids(kOp, kIndex, index);
  std::vector<int64_t> expected = shape_of(index);
  for (int64_t d = 1; d < table.dim(); ++d) expected.push_back(table.size(d));
  check_shape(kOp, "src", src, expected);
  check_dtype(kOp, "src", src, "table", table);
  check_device(kOp, "table", table, "src", src);
  check_device(kOp, kIndex, index, "src", src);
  const Added added = accumulate ? Added(addend_of(kOp, table)) : std::nullopt;
  if (ids.on_cpu) check_ids_on_cpu(kOp, kIndex, ids, rows.count);
  if (src.is_cpu()) check_owner(table);
  if (src.is_cpu() && plan) view_plan(kOp, kIndex, *plan, ids.count, rows.count, src);
  if (ids.count == 0) return;

  // One row per id, whatever the shape of the index.
  const Tensor flat = torch::stable::reshape(src, [&] {
    std::vector<int64_t> shape{ids.count};
    shape.insert(shape.end(), expected.begin() + index.dim(), expected.end());
    return shape;
  }());
  const Tensor whole =
      src.numel() > 0 && !flat.is_contiguous() ? torch::stable::contiguous(flat) : flat;
  const Rows source = as_rows(kOp, "src", whole);
  check_disjoint(kOp, "src", source, "table", rows);
  if (src.is_cpu()) {
    if (src.numel() > 0) scatter_or_add_on_cpu(rows, ids, source, added);
    return;
  }
  const CurrentStream stream(kOp, src);
  if (ids.on_cpu) ids = as_ids(kOp, kIndex, ids_to_device(kOp, ids, src, stream));
  if (src.numel() > 0 && !is_mapped(kOp, table, rows)) {
    scatter_staged(rows, ids, whole, plan, added, stream);
  } else {
    scatter_on_gpu(table, rows, ids, source, whole, plan, added, stream);
  }
}

void pinned_scatter(const Tensor& table, const Tensor& index, const Tensor& src, bool accumulate) {
  scatter(table, index, src, std::nullopt, accumulate);
  mark_written(kOp, table);
}

void pinned_scatter_planned(const Tensor& table, const Tensor& index, const Tensor& src,
                            const std::vector<Tensor>& plan, bool accumulate) {
  scatter(table, index, src, plan, accumulate);
  mark_written(kOp, table);
}

}  // namespace
}  // namespace speedtorch

STABLE_TORCH_LIBRARY_IMPL(speedtorch, CompositeExplicitAutograd, m) {
  m.impl("pinned_scatter", TORCH_BOX(&speedtorch::pinned_scatter));
  m.impl("pinned_scatter.planned", TORCH_BOX(&speedtorch::pinned_scatter_planned));
}
