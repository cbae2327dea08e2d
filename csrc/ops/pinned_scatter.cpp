// pinned_scatter: table[index[i]] = src[i] (the last occurrence wins), or += with accumulate, for a
// table in host memory or on the GPU. This file has the checks, the CPU code and the paths.
// cost_model.h chooses the path; the GPU kernels are in pinned_scatter.cu.

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <utility>
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

constexpr const char* kOp = "pinned_scatter";
constexpr const char* kIndex = "index";

using Added = std::optional<NumberKind>;  // how to accumulate; nullopt: the last occurrence wins

// How to add elements of each dtype. Signed and unsigned integers of one width add identically,
// modulo 2^bits. A complex number adds as two numbers.
constexpr std::pair<ScalarType, NumberKind> kNumberKinds[] = {
    {ScalarType::Bool, NumberKind::kBool},        {ScalarType::Char, NumberKind::kInt8},
    {ScalarType::Byte, NumberKind::kInt8},        {ScalarType::Short, NumberKind::kInt16},
    {ScalarType::UInt16, NumberKind::kInt16},     {ScalarType::Int, NumberKind::kInt32},
    {ScalarType::UInt32, NumberKind::kInt32},     {ScalarType::Long, NumberKind::kInt64},
    {ScalarType::UInt64, NumberKind::kInt64},     {ScalarType::Half, NumberKind::kHalf},
    {ScalarType::ComplexHalf, NumberKind::kHalf}, {ScalarType::BFloat16, NumberKind::kBFloat16},
    {ScalarType::Float, NumberKind::kFloat},      {ScalarType::ComplexFloat, NumberKind::kFloat},
    {ScalarType::Double, NumberKind::kDouble},    {ScalarType::ComplexDouble, NumberKind::kDouble}};

// Throws ValueError for dtypes without addition, such as float8.
NumberKind number_kind_of(const Tensor& tensor) {
  for (const auto& [dtype, kind] : kNumberKinds) {
    if (dtype == tensor.scalar_type()) return kind;
  }
  throw_value_error(kOp, "accumulate=True needs a dtype that supports addition, got ",
                    dtype_text(tensor), ". Add in a wider dtype, or use accumulate=False");
}

void scatter_or_add_on_cpu(const Rows& table, const Ids& ids, const Rows& src, const Added& added) {
  if (added) {
    add_on_cpu(table, ids, src, *added);
  } else {
    scatter_on_cpu(table, ids, src);
  }
}

void scatter_staged(const Rows& table, const Ids& ids, const Tensor& src, const Plan& plan,
                    const Added& added, const CurrentStream& stream, const Arguments& all) {
  stream.check_pageable_not_captured(kOp, "the table", "table");
  const Ids on_cpu = check_ids_and_plan_on_cpu(kOp, kIndex, ids, plan, table.count);
  const Tensor rows = torch::stable::reshape(copy_to_cpu(kOp, src), {ids.count, -1});
  all.mark_written();
  scatter_or_add_on_cpu(table, on_cpu, as_rows(kOp, "src", rows), added);
}

void scatter_on_gpu(const Rows& table, Access access, const Ids& ids, const Rows& src,
                    const Plan& plan, const Added& added, const CurrentStream& stream,
                    const Arguments& all) {
  if constexpr (kWithCuda) {
    const Batch batch = batch_of(Direction::kOut, access, table, ids.count, added.has_value());
    const CopyKernel kernel = copy_kernel_for(batch, src, stream);
    const Path path = plan ? Path::kOrdered : path_for(kOp, batch);
    const RowIds found =
        find_row_ids(kOp, kIndex, ids, path, plan, Keep::kLast, table.count, stream.get());
    const Report about{error_record(stream.device()), Op::kScatter, IdList::kIndex, table.count};
    all.mark_written();
    const int add_blocks = access == Access::kOnGpu ? kDeviceBlocks : link_sms(stream);
    check_cuda(added ? launch_scatter_add(table, src, found.view.plan, *added, add_blocks, about,
                                          stream.get())
                     : launch_scatter(table, src, found.view, kernel, about, stream.get()),
               kOp);
  }
}

// Views `src` as one row per id, for any shape of the index. Rows are contiguous inside and numbers
// aligned.
Tensor row_per_id(const Tensor& src, int64_t ids, int64_t index_dims) {
  std::vector<int64_t> shape{ids};
  for (int64_t d = index_dims; d < src.dim(); ++d) shape.push_back(src.size(d));
  const Tensor flat = index_dims == 1 ? src : torch::stable::reshape(src, shape);
  if (src.numel() == 0 || (flat.is_contiguous() && is_aligned(flat))) return flat;
  return flat.is_contiguous() ? torch::stable::clone(flat) : torch::stable::contiguous(flat);
}

// Checks shapes, dtypes and devices.
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
  const Added added = accumulate ? std::make_optional(number_kind_of(table)) : std::nullopt;
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
  const Access access = gpu_access(kOp, table, rows, stream.device());
  Ids ids = as_ids(index);
  if (ids.on_cpu) check_ids_on_cpu(kOp, kIndex, ids, rows.count);
  if (ids.count == 0) return all.mark_written();
  if (ids.on_cpu) ids = as_ids(ids_to_device(kOp, ids, src, stream));
  const Tensor whole = row_per_id(src, ids.count, index.dim());
  if (src.numel() > 0 && access == Access::kNot) {
    scatter_staged(rows, ids, whole, plan, added, stream, all);
  } else {
    const Rows source = as_rows(kOp, "src", whole);
    TableUse use{table, rows, stream.queue()};
    scatter_on_gpu(rows, access, ids, source, plan, added, stream, all);
    use.note();
  }
}

void pinned_scatter(const Tensor& table, const Tensor& index, const Tensor& src, bool accumulate) {
  scatter(table, index, src, std::nullopt, accumulate);
}

void pinned_scatter_planned(const Tensor& table, const Tensor& index, const Tensor& src,
                            const Tensors& plan, bool accumulate) {
  scatter(table, index, src, plan, accumulate);
}

const Ops kOps{
    {"pinned_scatter(Tensor(a!) table, Tensor index, Tensor src, bool accumulate=False) -> ()",
     TORCH_BOX(&pinned_scatter)},
    {"pinned_scatter.planned(Tensor(a!) table, Tensor index, Tensor src, Tensor[] plan, bool "
     "accumulate=False) -> ()",
     TORCH_BOX(&pinned_scatter_planned)},
};

}  // namespace
}  // namespace speedtorch
