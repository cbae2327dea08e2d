// Plans: a batch's ids in address order. Every op on the same ids can use the same plan.
//
// A plan is a list of int64 tensors on one device: unique [n], inverse [n], order [n], offsets
// [n + 1], status [8]. With u distinct ids, the first u entries of `unique` are valid and ascend.
// The positions order[offsets[k]] to order[offsets[k + 1] - 1] name unique[k], in index order.
//
// With a padding, `unique` is [n + 1]. The padding does not count as a distinct id: its id is
// unique[u], and its positions begin at order[offsets[u]]. In the loaded rows,
// the padding's row has index u, or the capacity if there is one, even if no id names the padding.
#pragma once

#include <cstdint>
#include <optional>

#include "call/arguments.h"
#include "plan/plan_launch.h"

namespace speedtorch {

using Plan = std::optional<Tensors>;

// Throws ValueError for a plan that plan_rows cannot have made.
[[noreturn]] void throw_not_made_by_plan_rows(const char* op, const char* list);

// Makes a plan on the device of the ids, without plan_rows' checks of bad ids on the CPU.
Tensors make_plan(const char* op, const Ids& ids, const PlanTable& table, void* stream,
                  int64_t status_fields = kPlanStatusFields, bool shares_memory = true);
// Makes the checks of plan_rows on `index` and `rows` that read no id.
void check_plannable(const char* op, const Tensor& index, int64_t rows);
// Makes a plan of a checked `index`, as plan_rows does: throws for bad ids on the CPU.
Tensors plan_index(const char* op, const Tensor& index, const PlanTable& table, void* stream,
                   int64_t status_fields = kPlanStatusFields, bool shares_memory = true);
// Throws unless the status has one of its two lengths.
void check_status(const char* op, const char* name, const Tensor& status);
// Checks a plan that the user passed: number, shapes, dtypes, devices. Does not read the data.
void check_plan(const char* op, const char* list, const Tensors& plan, int64_t count,
                const Tensor& on, bool may_have_padding = false);
// Views a checked plan. Checks its status on the CPU; on a GPU the kernels check it.
PlanView view_plan(const char* op, const char* list, const Tensors& plan, int64_t count,
                   int64_t rows);
// Throws unless the offsets of a plan on the CPU partition all entries, with at least one for each
// distinct id.
void check_offsets(const char* op, const char* list, const PlanView& view);
// Also throws for a plan of other ids.
void check_plan_of(const char* op, const char* list, const PlanView& view, const Ids& ids);

// For paths on the CPU with ids and plan on a GPU: copies both to the CPU and checks them, which
// waits for the GPU. Returns the ids.
Ids check_ids_and_plan_on_cpu(const char* op, const char* list, const Ids& ids, const Plan& plan,
                              int64_t rows);

}  // namespace speedtorch
