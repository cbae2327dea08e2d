// Prepares a batch's ids for the kernels that move its rows on a GPU. Called by the ops that move
// rows. Checks the ids, and finds the occurrence of each id that moves its row: with a plan (rows
// in address order), with a hash table (a tenth of a sort's time, rows in any order), or not at all
// (each occurrence moves its row).
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
//   Path::kDirect    keeps all occurrences; at most kIdsCheckedInBlock ids stay unchecked (a null
//                    status), and the kernel that moves their rows checks them
RowIds find_row_ids(const char* op, const char* list, const Ids& ids, Path path, const Plan& plan,
                    Keep keep, int64_t rows, void* stream);

}  // namespace speedtorch
