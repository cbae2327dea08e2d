// What diff_ids and plan_batch share: the comparison of two lists of ids.
#pragma once

#include <optional>

#include "call/arguments.h"
#include "core/gpu.h"
#include "ops/launchers.h"

namespace speedtorch {

// Refuses what is no such list. How many of the ids count stands in the status of a plan; where
// that is empty, all do.
SortedIds check_sorted_ids(const char* op, const char* name, const Tensor& ids,
                           const char* status_name, const Tensor& status, const char* on_name,
                           const Tensor& on);
// The lists of IdDiff, of checked arguments. `stream`: none where `on` is on the CPU.
Tensors diff(const char* op, const SortedIds& named, const SortedIds& held, int64_t padding,
             const Fitting* fitting, int64_t* counts, const Tensor& on,
             const std::optional<CurrentStream>& stream, const Arguments& all);

}  // namespace speedtorch
