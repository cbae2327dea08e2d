// What load_rows.cpp takes from other files of ops.
#pragma once

#include <optional>

#include "call/arguments.h"

namespace speedtorch {

// exchange_rows of one table: `evict` are the ids of the first rows of leaving, `load` of arriving.
// If `evicts` is false, `leaving` is the source of rows in both lists, and no row is written to the
// host.
void exchange(const Tensors& host, const Tensors& leaving, const Tensor& evict,
              const Tensors& arriving, const Tensor& load, bool evicts);
// Both on the CPU, of one shape and dtype; `to` is contiguous.
void copy_ids(const Tensor& index, const Tensor& to);
// The op.
Tensors plan_batch(const Tensor& index, int64_t rows, int64_t padding, int64_t capacity,
                   const std::optional<Tensor>& held, const std::optional<Tensor>& held_status);

}  // namespace speedtorch
