// How an op on a GPU finds the rows that a batch names, each id checked: by a plan, by a hash table
// (cheaper where rows may move in any order), or one row for each id.
#pragma once

#include "move/cost_model.h"
#include "plan/plan.h"

namespace speedtorch {

struct RowIds {
  Tensors keep;  // what `view` points into, in GPU memory
  RowIdsView view;
};

// Queues the work that fills them; `on` is a tensor on the GPU of the ids, of which there is at
// least one. Path::kOrdered takes the user's plan or makes one, kDistinct keeps one occurrence of
// each id, kDirect all of them. Few ids of kDirect stay unchecked (status is null): the kernel that
// moves their rows checks them.
RowIds find_row_ids(const char* op, const char* list, const Ids& ids, Path path, const Plan& plan,
                    Keep keep, int64_t rows, const Tensor& on, void* stream);

}  // namespace speedtorch
