// Functions shared by the ops that begin a step.
#pragma once

#include <optional>
#include <vector>

#include "call/arguments.h"

namespace speedtorch {

// Implements exchange_rows for one table. `evict` has the ids of rows of `leaving`, `load` the ids
// of rows of `arriving`. If `evicts` is false, `leaving` is only the source of rows in both lists,
// and no row is written to the host.
void exchange(const Tensors& host, const Tensors& leaving, const Tensor& evict,
              const std::optional<Tensor>& evict_places, const Tensors& arriving,
              const Tensor& load, const std::optional<Tensor>& load_places, bool evicts);
// The op merge_rows.
Tensors merge_rows(const Tensors& rows, const Tensor& held, const Tensor& more);
// Copies between CPU tensors of one shape and dtype; `to` is contiguous.
void copy_ids(const Tensor& index, const Tensor& to);
// Checks ids of any shapes and concatenates them; int64 if any of them are. Returns a single part
// as it is.
Tensor joined_ids(const char* op, const Tensors& parts);
// Index of the status in the results of plan_batch.
constexpr size_t kPlanStatus = 4;
// Index of the number of ids to load in the counts behind the status.
constexpr size_t kLoadedCount = 2;
// The op plan_batch.
Tensors plan_batch(const Tensor& index, int64_t rows, int64_t padding, int64_t capacity,
                   const std::optional<Tensor>& held, const std::optional<Tensor>& held_status);

// A plan whose ids the host has counted.
struct CountedPlan {
  Tensors made;                  // the plan, then the unique ids without and with the padding
  Tensor more;                   // with held ids: the unique ids that these lack
  std::optional<Tensor> copied;  // a copy of ids on the CPU, which nothing else writes to

  const Tensor& loaded() const { return made[kPlanStatus + 2]; }
  Tensors with_copy() const {
    Tensors all = made;
    if (copied) all.push_back(*copied);
    return all;
  }
};
// Returns the place of each id of a plan on the CPU, for the places of its unique ids.
Tensor positions_on_cpu(const char* op, const CountedPlan& plan,
                        const std::vector<int64_t>& places);
// Plans the concatenated `parts` on the device of `like`, and compares them with the ascending ids
// `held`, if there are any. Waits for a GPU. Throws for ids out of range.
CountedPlan counted_plan(const char* op, const Tensors& parts, const Tensor& like, int64_t rows,
                         int64_t padding, const std::optional<Tensor>& held);

}  // namespace speedtorch
