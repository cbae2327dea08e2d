// Prepares a batch's ids for the kernels that move its rows on a GPU. Called by the ops that move
// rows. Checks the ids, and selects the occurrence of each id that moves its row. A plan moves rows
// in address order. A hash table takes less time than a plan's sort (see Costs in cost_model.cpp),
// and moves rows in the order of the ids. Without either, each occurrence moves its row.
#pragma once

#include "move/cost_model.h"
#include "plan/plan.h"

namespace speedtorch {

struct RowIds {
  Tensors keep;  // GPU memory that `view` points into
  RowIdsView view;
};

// Queues this work on `stream`. A batch without ids needs kOrdered.
//   Path::kOrdered   uses the caller's plan, or makes one
//   Path::kDistinct  keeps one occurrence of each id, as `keep` says
//   Path::kDirect    keeps all occurrences; up to kIdsCheckedInBlock ids are checked only by
//                    the kernel that moves their rows (a null status)
RowIds find_row_ids(const char* op, const char* list, const Ids& ids, Path path, const Plan& plan,
                    Keep keep, int64_t rows, void* stream);

}  // namespace speedtorch
