// Copies through torch for what kernels cannot reach: ids between the CPU and the GPU, rows of
// pageable tables.
#pragma once

#include <vector>

#include "rows.h"

namespace speedtorch {

// Waits for the GPU where `tensor` lies there.
Tensor copy_to_cpu(const Tensor& tensor);
// Does not wait: the source may change as soon as this returns.
Tensor copy_to_device(const Tensor& tensor, const Tensor& on);
// Pinned CPU tensor of that shape, with the dtype of `tensor`.
Tensor pinned_like(const Tensor& tensor, const std::vector<int64_t>& shape);
// Copies without waiting; pinned memory from pinned_like stays until the copy is done.
void copy_async(const Tensor& from, const Tensor& to);

}  // namespace speedtorch
