// Ids that come in ascending order, each once, with the place of its row: what a plan would say of
// them, without sorting. Used by optimizer_state_swap.placed.
#pragma once

#include <vector>

#include "plan_view.h"
#include "rows.h"

namespace speedtorch {

// Which ids and places: names for messages.
struct PlacedNames {
  IdList list;
  const char* ids;     // "evict"
  const char* places;  // "evict_rows"
};

// A view whose `unique` are the ids and whose `order` are the places; `keep` owns its status.
struct PlacedIds {
  PlanView view;
  Tensor keep;
};

// Refuses anything but contiguous int64 ids and places, equally many, on the device of `on`. On the
// CPU also ids out of range or order and places beyond `side_rows`; on a GPU a kernel finds those,
// says so in the letter box, and the movers leave everything as it was.
PlacedIds placed_ids(const char* op, const PlacedNames& names, const Tensor& ids,
                     const Tensor& places, int64_t table_rows, int64_t side_rows, const Tensor& on,
                     void* stream);

}  // namespace speedtorch
