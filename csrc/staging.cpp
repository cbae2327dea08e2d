// Copies through torch; see staging.h.

#include "staging.h"

#include <torch/csrc/stable/ops.h>

#include "host_memory.h"

namespace speedtorch {

Tensor copy_to_cpu(const Tensor& tensor) {
  return torch::stable::to(tensor, Device(torch::headeronly::DeviceType::CPU));
}

Tensor copy_to_device(const Tensor& tensor, const Tensor& on) {
  const Tensor there =
      torch::stable::empty(shape_of(tensor), tensor.scalar_type(), std::nullopt, on.device());
  // torch stages pageable memory before it returns and watches over memory that it pinned itself.
  // Memory that we pinned is neither, so there the copy waits.
  const auto kind = static_cast<MemoryKind>(memory_kind(tensor));
  const bool watched = kind == MemoryKind::kPlain || kind == MemoryKind::kPinned;
  Tensor target = there;
  torch::stable::copy_(target, tensor, watched);
  return there;
}

Tensor pinned_like(const Tensor& tensor, const std::vector<int64_t>& shape) {
  return torch::stable::empty(shape, tensor.scalar_type(), torch::headeronly::Layout::Strided,
                              Device(torch::headeronly::DeviceType::CPU), true);
}

void copy_async(const Tensor& from, const Tensor& to) {
  Tensor target = to;
  torch::stable::copy_(target, from, true);
}

}  // namespace speedtorch
