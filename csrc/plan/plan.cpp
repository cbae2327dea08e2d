// plan_rows: sorts ids in address order, on the CPU in this file and on the GPU in plan.cu; see
// plan.h.

#include "plan/plan.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>

#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/registration.h"
#include "core/sort_positions.h"

namespace speedtorch {
namespace {

enum PlanPart : size_t { kUnique, kInverse, kOrder, kOffsets, kStatus, kParts };
constexpr const char* kPartNames[kParts] = {"unique", "inverse", "order", "offsets", "status"};

PlanView view_of(const Tensors& plan, int64_t count) {
  return {.unique = data_of(plan[kUnique]),
          .inverse = data_of(plan[kInverse]),
          .order = data_of(plan[kOrder]),
          .offsets = data_of(plan[kOffsets]),
          .status = reinterpret_cast<PlanStatus*>(data_of(plan[kStatus])),
          .count = count,
          .has_padding = plan[kUnique].numel() > count};
}

void fill_plan_on_cpu(const Ids& ids, const PlanTable& table, const PlanView& plan) {
  const int64_t n = ids.count;
  sort_positions(
      n, table.last_key(), [&](int64_t i) { return table.key_of(ids.at(i)); }, plan.order);
  int64_t distinct = 0, repeat = n, trained = n;  // entries before the padding's
  for (int64_t i = 0; i < n; ++i) {
    const int64_t position = plan.order[i], id = ids.at(position);
    if (table.padding >= 0 && id == table.padding) {
      trained = std::min(trained, i);
      plan.inverse[position] = table.place_of(distinct, true);
      continue;
    }
    if (distinct == 0 || id != plan.unique[distinct - 1]) {
      plan.unique[distinct] = id;
      plan.offsets[distinct++] = i;
    } else {
      repeat = std::min(repeat, position);
    }
    plan.inverse[position] = table.place_of(distinct - 1, false);
  }
  const bool has_padding = table.padding >= 0;
  std::fill(plan.unique + distinct, plan.unique + n + has_padding, -1);
  if (has_padding) plan.unique[distinct] = table.padding;
  plan.offsets[distinct] = trained;
  std::fill(plan.offsets + distinct + 1, plan.offsets + n + 1, n);
  *plan.status = status_of_distinct(n, table.rows);
  plan.status->distinct = distinct;
  plan.status->repeat_position = repeat;
  if (repeat < n) plan.status->repeat_id = ids.at(repeat);
}

}  // namespace

void throw_not_made_by_plan_rows(const char* op, const char* list) {
  throw_value_error(op, "the plan of ", list,
                    " was not made by plan_rows, was changed, or has ids out of range. Make it "
                    "with plan_rows(",
                    list, ", rows)");
}

Tensors make_plan(const char* op, const Ids& ids, const PlanTable& table, void* stream,
                  int64_t status_fields, bool shares_memory) {
  const int64_t n = ids.count;
  Tensors plan = new_lists(op, {n + (table.padding >= 0), n, n, n + 1, status_fields}, ids.keep,
                           shares_memory);
  const PlanView view = view_of(plan, n);
  if (ids.on_cpu) {
    fill_plan_on_cpu(ids, table, view);
    return plan;
  }
  if constexpr (kWithCuda) {
    const int64_t scratch_bytes = plan_scratch_bytes(n, table);
    const Tensor scratch = new_tensor(op, {scratch_bytes}, ScalarType::Byte, ids.keep);
    check_cuda(
        launch_plan(ids.data, ids.wide, table, scratch.data_ptr(), scratch_bytes, view, stream),
        op);
  }
  return plan;
}

void check_plannable(const char* op, const Tensor& index, int64_t rows) {
  if (rows < 0) throw_value_error(op, "rows must not be negative, got ", rows);
  check_ids_kind(op, "index", index);
}

Tensors plan_index(const char* op, const Tensor& index, const PlanTable& table, void* stream,
                   int64_t status_fields, bool shares_memory) {
  const Ids ids = as_ids(index);
  if (ids.on_cpu) check_ids_on_cpu(op, "index", ids, table.rows);
  return make_plan(op, ids, table, stream, status_fields, shares_memory);
}

void check_status(const char* op, const char* name, const Tensor& status) {
  const bool was_compared = status.numel() > kPlanStatusFields;
  check_shape(op, name, status, {kPlanStatusFields + (was_compared ? kChangeCounts : 0)});
}

void check_plan(const char* op, const char* list, const Tensors& plan, int64_t count,
                const Tensor& on, bool may_have_padding) {
  const std::string name = "the plan of " + std::string(list);
  if (plan.size() != kParts) {
    throw_value_error(op, name, " has ", plan.size(),
                      " tensors, expected the 5 that plan_rows returns");
  }
  for (size_t part = 0; part < kParts; ++part) {
    const std::string part_name = name + " (" + kPartNames[part] + ")";
    if (plan[part].scalar_type() != ScalarType::Long || !plan[part].is_contiguous()) {
      throw_value_error(op, part_name,
                        " must be a contiguous int64 tensor, as returned by plan_rows");
    }
    if (part == kStatus) {
      check_status(op, part_name.c_str(), plan[part]);
    } else {
      const bool is_padded = may_have_padding && part == kUnique && plan[part].numel() > count;
      const bool one_more = part == kOffsets || is_padded;
      check_shape(op, part_name.c_str(), plan[part], {count + one_more});
    }
    check_aligned(op, part_name.c_str(), plan[part]);
    check_same_device(op, part_name.c_str(), plan[part], "this op's GPU side", on);
  }
}

PlanView view_plan(const char* op, const char* list, const Tensors& plan, int64_t count,
                   int64_t rows) {
  const PlanView view = view_of(plan, count);
  if (!plan[kStatus].is_cpu()) return view;
  const PlanStatus& status = *view.status;
  if (status.rows != rows) {
    throw_bad_ids(
        {.kind = IdError::kForeignPlan, .op = op, .list = list, .rows = rows, .id = status.rows});
  }
  const bool fits = status.count == count && status.bad_count == 0 && status.distinct >= 0 &&
                    status.distinct <= count;
  if (!fits) throw_not_made_by_plan_rows(op, list);
  return view;
}

void check_offsets(const char* op, const char* list, const PlanView& view) {
  const int64_t distinct = view.status->distinct;
  // The entries after the distinct ids belong to the padding.
  const bool is_padded = view.has_padding && view.offsets[distinct] < view.count;
  bool good = view.offsets[0] == 0 && (is_padded || view.offsets[distinct] == view.count);
  for (int64_t k = 0; good && k < distinct; ++k) good = view.offsets[k] < view.offsets[k + 1];
  if (!good) throw_not_made_by_plan_rows(op, list);
}

void check_plan_of(const char* op, const char* list, const PlanView& view, const Ids& ids) {
  check_offsets(op, list, view);
  // If positions ascend within each distinct id and name it, they are all the positions.
  for (int64_t k = 0; k < view.status->distinct; ++k) {
    const int64_t id = view.unique[k];
    bool good = k == 0 || view.unique[k - 1] < id;
    for (int64_t entry = view.offsets[k], before = -1; good && entry < view.offsets[k + 1];
         ++entry) {
      const int64_t position = view.order[entry];
      good = position > before && position < view.count && ids.at(position) == id;
      before = position;
    }
    if (good) continue;
    throw_value_error(op, "the plan of ", list, " was made for other ids: entry ", k,
                      " of its unique ids is ", id, ". Make it with plan_rows(", list, ", rows)");
  }
}

Ids check_ids_and_plan_on_cpu(const char* op, const char* list, const Ids& ids, const Plan& plan,
                              int64_t rows) {
  const Ids on_cpu = as_ids(copy_to_cpu(op, ids.keep));
  check_ids_on_cpu(op, list, on_cpu, rows);
  if (!plan) return on_cpu;
  Tensors parts;
  for (const Tensor& part : *plan) parts.push_back(copy_to_cpu(op, part));
  view_plan(op, list, parts, ids.count, rows);
  return on_cpu;
}

namespace {

Tensors plan_rows(const Tensor& index, int64_t rows) {
  constexpr const char* kOp = "plan_rows";
  const Arguments all(kOp, {read("index", index)});
  check_plannable(kOp, index, rows);
  all.check_memory();
  std::optional<CurrentStream> stream;
  if (!index.is_cpu()) stream.emplace(kOp, index);
  return plan_index(kOp, index, {rows}, stream ? stream->get() : nullptr, kPlanStatusFields,
                    /*shares_memory=*/false);
}

const Ops kOps{{"plan_rows(Tensor index, int rows) -> Tensor[]", TORCH_BOX(&plan_rows)}};

}  // namespace
}  // namespace speedtorch
