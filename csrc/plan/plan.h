// A batch's ids in address order. One plan serves every op on the same ids.
//
// A plan is a list of tensors on one device: unique [n], inverse [n], order [n], offsets [n + 1],
// status [8], all int64; with u distinct ids the first u of `unique` are valid, ascending, and
// positions order[offsets[k]] up to order[offsets[k + 1]] name unique[k], in index order.
//
// With a padding `unique` is [n + 1]. It is no distinct id: it stands at unique[u], its positions
// from order[offsets[u]] on, and its place is u, whether the batch names it or not. With a capacity
// its place is the capacity.
#pragma once

#include <cstdint>
#include <optional>

#include "call/arguments.h"
#include "plan/plan_launch.h"

namespace speedtorch {

using Plan = std::optional<Tensors>;

// ValueError about a plan whose numbers are none of plan_rows'.
[[noreturn]] void throw_not_made_by_plan_rows(const char* op, const char* list);

// A plan of ids on their own device, without the checks that plan_rows makes of bad ids on the CPU.
Tensors make_plan(const char* op, const Ids& ids, const PlanOf& of, void* stream,
                  int64_t status_fields = kPlanStatusFields, bool shares_memory = true);
// What plan_rows refuses of `index` and `rows` before it reads an id.
void check_plannable(const char* op, const Tensor& index, int64_t rows);
// A plan of an `index` so checked, as plan_rows makes it: bad ids on the CPU are refused.
Tensors plan_index(const char* op, const Tensor& index, const PlanOf& of, void* stream,
                   int64_t status_fields = kPlanStatusFields, bool shares_memory = true);
// Refuses a status of neither length.
void check_status(const char* op, const char* name, const Tensor& status);
// Checks a plan that the user passed: number, shapes, dtypes, devices. Reads no byte of it.
void check_plan(const char* op, const char* list, const Tensors& plan, int64_t count,
                const Tensor& on, bool may_have_padding = false);
// A checked plan; on the CPU its status is checked here. (On a GPU the kernels look at it.)
PlanView view_plan(const char* op, const char* list, const Tensors& plan, int64_t count,
                   int64_t rows);
// On the CPU, of one of view_plan: refuses offsets that do not share out all entries, at least one
// to each distinct id.
void check_offsets(const char* op, const char* list, const PlanView& view);
// The same, and refuses a plan that is not that of these ids.
void check_plan_of(const char* op, const char* list, const PlanView& view, const Ids& ids);

// For paths that work on the CPU although ids and plan lie on a GPU: brings the ids there and
// checks both, which waits for the GPU.
Ids check_ids_and_plan_on_cpu(const char* op, const char* list, const Ids& ids, const Plan& plan,
                              int64_t rows);

}  // namespace speedtorch
