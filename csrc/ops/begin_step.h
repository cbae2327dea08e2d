// Functions shared by the ops that begin a step.
#pragma once

#include <optional>

#include "call/arguments.h"

namespace speedtorch {

// Implements exchange_rows for one table. `evict` has the ids of the first rows of `leaving`,
// `load` the ids of the first rows of `arriving`. If `evicts` is false, `leaving` is only the
// source of rows in both lists, and no row is written to the host.
void exchange(const Tensors& host, const Tensors& leaving, const Tensor& evict,
              const Tensors& arriving, const Tensor& load, bool evicts);
// Copies between CPU tensors of one shape and dtype; `to` is contiguous.
void copy_ids(const Tensor& index, const Tensor& to);
// Index of the status in the results of plan_batch.
constexpr size_t kPlanStatus = 4;
// The op plan_batch.
Tensors plan_batch(const Tensor& index, int64_t rows, int64_t padding, int64_t capacity,
                   const std::optional<Tensor>& held, const std::optional<Tensor>& held_status);

}  // namespace speedtorch
