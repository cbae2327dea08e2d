// Ids that come in ascending order, each once, with the place (slot) of its row: what a plan would
// say of them, without sorting. Used by optimizer_state_swap.placed, .counted and .tables.
#pragma once

#include <optional>

#include "core/tensor_checks.h"
#include "plan/plan_launch.h"

namespace speedtorch {

// One list of ids. Errors call its tensors by the list's name: "evict", "evict_places",
// "evict_count".
struct SlottedList {
  IdList list;
  Tensor ids;
  Tensor places;
  std::optional<Tensor> count;  // so many entries count; none: all
  int64_t side_rows;            // places are below
};

// Views whose `unique` are the ids and whose `order` are the places; `keep` owns their status.
struct SlottedViews {
  PlanView evict;
  PlanView load;
  Tensor keep;
};

// Refuses anything but contiguous int64 ids and places, equally many, and one count, on the device
// of `on`.
void check_slotted_kinds(const char* op, const SlottedList& list, const Tensor& on);
// Of checked kinds. On the CPU refuses ids out of range or order, places beyond the side's rows and
// a count of more entries than there are, and views have the entries that count; on a GPU a kernel
// finds those, says so in the error record, and the copy kernels leave everything as it was.
// (Without a report: where a count is none, no entry counts.)
SlottedViews slotted_ids(const char* op, const SlottedList& evict, const SlottedList& load,
                         int64_t table_rows, const Tensor& on, void* stream);

}  // namespace speedtorch
