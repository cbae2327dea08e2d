// Which occurrence of each id of a batch moves its row. Cheaper than a plan where rows may move in
// any order.
#pragma once

#include <optional>

#include "plan/plan.h"

namespace speedtorch {

struct Winners {
  std::optional<Tensor> memory;  // what `view` points into, in GPU memory
  WinnersView view;
};

// Queues the work that fills them; `on` is a tensor on the GPU of the ids. At least one id.
Winners find_winners(const char* op, const Ids& ids, Winner winner, int64_t rows, const Tensor& on,
                     void* stream);
// Queues only the search for ids out of range.
Winners check_ids_on_gpu(const char* op, const Ids& ids, int64_t rows, const Tensor& on,
                         void* stream);
// A plan, the user's or a new one, or else winners, and what `view` points into.
struct IdsOnce {
  Tensors plan;
  Winners winners;
  IdsOnceView view;
};
IdsOnce take_ids_once(const char* op, const char* list, const Ids& ids, bool planned,
                      const Plan& plan, Winner winner, int64_t rows, const Tensor& on,
                      void* stream);
// Ids that the moving kernel checks itself.
WinnersView only_ids(const Ids& ids);

}  // namespace speedtorch
