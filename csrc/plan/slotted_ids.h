// Slotted ids: distinct ids in ascending order, each with the place (slot) of its row on the other
// side. They replace a plan without sorting. Used by optimizer_state_swap.placed, .counted and
// .tables.
#pragma once

#include <optional>

#include "core/tensor_checks.h"
#include "plan/plan_launch.h"

namespace speedtorch {

// One list of ids. Messages name its tensors after the list: "evict", "evict_places",
// "evict_count".
struct SlottedList {
  IdList list;
  Tensor ids;
  Tensor places;
  std::optional<Tensor> count;  // number of valid entries; none: all entries are valid
  int64_t side_rows;            // places must be below
};

// Views whose `unique` are the ids and whose `order` are the places; `keep` owns their status.
struct SlottedViews {
  PlanView evict;
  PlanView load;
  Tensor keep;
};

// Throws ValueError unless ids and places are contiguous int64 lists of one length and count has
// one entry, all on the device of `on`.
void check_slotted_kinds(const char* op, const SlottedList& list, const Tensor& on);
// Takes lists that passed check_slotted_kinds. On the CPU: throws if an id is out of range or out
// of order, a place is beyond the side's rows, or a count is out of range; views have the valid
// entries only. On a GPU: a kernel checks the same, writes an error record, and blocks the copy
// kernels; a count out of range means no valid entry, without an error record.
SlottedViews slotted_ids(const char* op, const SlottedList& evict, const SlottedList& load,
                         int64_t table_rows, const Tensor& on, void* stream);
// The same of lists that the library made, without counts: distinct ids, of which the last to load
// may be out of order. On the CPU ids and places are checked. On a GPU the caller's kernel checks
// them and writes the statuses.
SlottedViews planned_slots(const char* op, const SlottedList& evict, const SlottedList& load,
                           int64_t table_rows, const Tensor& on);

}  // namespace speedtorch
