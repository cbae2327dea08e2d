// Claims of a batch of ids: which occurrence of each id moves its row. Cheaper than a plan where
// rows may move in any order.
#pragma once

#include <optional>

#include "core/rows.h"
#include "plan/claims_view.h"

namespace speedtorch {

struct Claims {
  std::optional<Tensor> memory;  // what `view` points into, in GPU memory
  ClaimsView view;
};

// Queues the work that fills them; `on` is a tensor on the GPU of the ids. At least one id.
Claims make_claims(const char* op, const Ids& ids, Winner winner, int64_t rows, const Tensor& on,
                   void* stream);
// Queues only the search for ids out of range.
Claims check_ids_on_gpu(const char* op, const Ids& ids, int64_t rows, const Tensor& on,
                        void* stream);
// Ids that the moving kernel checks itself.
ClaimsView unclaimed(const Ids& ids);

}  // namespace speedtorch
