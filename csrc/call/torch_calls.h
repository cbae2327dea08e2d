// The calls of ops into torch: new tensors, copies that kernels cannot make, and version counters.
// A failure inside torch throws with the op's name and torch's message, or with torch's message on
// standard error.
#pragma once

#include <vector>

#include "core/gpu.h"
#include "core/tensor_checks.h"

namespace speedtorch {

// Returns an uninitialized tensor on the device of `on`. GPU memory comes from torch's caching
// allocator and is safe during graph capture.
Tensor new_tensor(const char* op, const std::vector<int64_t>& shape, ScalarType dtype,
                  const Tensor& on);
// Returns int64 tensors of these lengths. If they share memory, one allocation serves all: a view
// costs the host less than a small GPU tensor. Results of an op in a graph must not share memory.
std::vector<Tensor> new_lists(const char* op, const std::vector<int64_t>& lengths, const Tensor& on,
                              bool shares_memory);
// Returns entries of a contiguous list, without the dispatcher that torch::stable::narrow() uses.
Tensor view_of_list(const Tensor& list, int64_t begin, int64_t length);
// Returns a pinned CPU tensor of that shape with the dtype of `like`.
Tensor new_pinned(const char* op, const std::vector<int64_t>& shape, const Tensor& like);

// Copies to the CPU. Waits for the GPU if `tensor` is on one.
Tensor copy_to_cpu(const char* op, const Tensor& tensor);
// Copies ids from the CPU to the device of `on`, and throws while a CUDA graph is captured. The
// source may change as soon as this returns, because the driver stages ids in pageable memory and
// this function clones others.
Tensor ids_to_device(const char* op, const Ids& ids, const Tensor& on, const CurrentStream& stream);
// Copies `from` to `to`. Without `wait`, the caller must keep a source from new_pinned unchanged
// until the copy is done.
void copy(const char* op, const Tensor& from, const Tensor& to, bool wait);

// Increments the tensor's version counter, as torch's in-place operations do. A backward pass that
// needs the old contents then raises instead of computing wrong gradients. Throws outside of
// torch.no_grad() for leaves that require grad, so call this before the write.
void mark_written(const char* op, const Tensor& tensor);

}  // namespace speedtorch
