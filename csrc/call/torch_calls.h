// What the ops ask of torch itself: new tensors, copies that kernels cannot make, and word that a
// tensor was written. A failure inside torch arrives with the op's name and torch's own words,
// or with those on standard error.
#pragma once

#include <vector>

#include "core/gpu.h"
#include "core/tensor_checks.h"

namespace speedtorch {

// Uninitialised, on the device of `on`. On a GPU this is torch's caching allocator: safe while a
// graph is captured.
Tensor new_tensor(const char* op, const std::vector<int64_t>& shape, ScalarType dtype,
                  const Tensor& on);
// int64 tensors of these lengths. If they share memory, one allocation has all of them: a view
// costs the host less than a small tensor of a GPU. Results of an op in a graph must not.
std::vector<Tensor> new_lists(const char* op, const std::vector<int64_t>& lengths, const Tensor& on,
                              bool shares_memory);
// Pinned CPU tensor of that shape with the dtype of `like`.
Tensor new_pinned(const char* op, const std::vector<int64_t>& shape, const Tensor& like);

// Waits for the GPU where `tensor` lies there.
Tensor copy_to_cpu(const char* op, const Tensor& tensor);
// Ids from the CPU to the device of `on`. Does not wait, and the source may change as soon as this
// returns.
Tensor ids_to_device(const char* op, const Ids& ids, const Tensor& on, const CurrentStream& stream);
// Copies; without waiting, a source from new_pinned stays until the copy is done.
void copy(const char* op, const Tensor& from, const Tensor& to, bool wait);

// Tells autograd that the tensor has new contents, as torch's own in-place operations do: a
// backward pass that needs the old ones then raises instead of giving wrong gradients. Comes before
// the writing, because it refuses leaves that require grad.
void mark_written(const char* op, const Tensor& tensor);

}  // namespace speedtorch
