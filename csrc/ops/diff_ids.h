// The comparison of two lists of ids, shared by diff_ids and plan_batch. Defined in diff_ids.cpp.
#pragma once

#include <optional>

#include "call/arguments.h"
#include "core/gpu.h"
#include "ops/launchers.h"

namespace speedtorch {

// Checks and views a list of ids. The plan status `status` holds the number of valid ids; if
// `status` is empty, all are valid.
SortedIds check_sorted_ids(const char* op, const char* name, const Tensor& ids,
                           const char* status_name, const Tensor& status, const char* on_name,
                           const Tensor& on);
// Returns the lists of IdDiff for checked arguments. `stream` is empty if `on` is on the CPU.
Tensors diff(const char* op, const SortedIds& named, const SortedIds& held, int64_t padding,
             const Fitting* fitting, int64_t* counts, const Tensor& on,
             const std::optional<CurrentStream>& stream, const Arguments& all);

}  // namespace speedtorch
