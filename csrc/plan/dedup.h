// Which occurrence of each id of a batch moves its row. Cheaper than a plan where rows may move in
// any order.
#pragma once

#include <optional>

#include "plan/plan.h"

namespace speedtorch {

struct Dedup {
  std::optional<Tensor> memory;  // what `view` points into, in GPU memory
  DedupView view;
};

// Queues the work that fills them; `on` is a tensor on the GPU of the ids. At least one id.
Dedup dedup_ids(const char* op, const Ids& ids, Keep keep, int64_t rows, const Tensor& on,
                void* stream);
// Queues only the search for ids out of range.
Dedup check_ids_on_gpu(const char* op, const Ids& ids, int64_t rows, const Tensor& on,
                       void* stream);
// A plan, the user's or a new one, or else dedup, and what `view` points into.
struct IdsOnce {
  Tensors plan;
  Dedup dedup;
  IdsOnceView view;
};
IdsOnce take_ids_once(const char* op, const char* list, const Ids& ids, bool planned,
                      const Plan& plan, Keep keep, int64_t rows, const Tensor& on, void* stream);
// Ids that the moving kernel checks itself.
DedupView only_ids(const Ids& ids);

}  // namespace speedtorch
