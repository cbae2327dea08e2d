// Makes and pins host memory; see host_memory.h.

#include "memory/host_memory.h"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/cuda_calls.h"
#include "core/gpu.h"
#include "memory/host_blocks.h"
#include "memory/host_pages.h"
#include "memory/registration.h"

namespace speedtorch {
namespace {

constexpr const char* kMakeBefore = "make and pin tables before the capture begins";

// Throws with how many bytes, why and what to do instead.
void check_managed(int error, const char* step, int64_t bytes) {
  if (error == 0) return;
  cuda_calls().last_error();
  if (is_without_gpu(error)) {
    throw std::runtime_error(std::string("host memory: managed memory needs a GPU") + kWithoutGpu);
  }
  throw std::runtime_error(
      "host memory: " + std::to_string(bytes) + " bytes of managed memory cannot be had, " + step +
      " failed: " + cuda_calls().error_string(error) + " (CUDA error " + std::to_string(error) +
      "); free memory, or use memory='registered' or memory='plain'");
}

void* allocate_managed(int64_t bytes) {
  int devices = 0;
  check_managed(cuda_calls().device_count(&devices), "cudaGetDeviceCount", bytes);
  for (int device = 0; device < devices; ++device) {
    int supported = 0;
    check_managed(cuda_calls().concurrent_managed_access(device, &supported),
                  "cudaDeviceGetAttribute", bytes);
    if (!supported) {
      throw std::runtime_error(
          "host memory: GPU " + std::to_string(device) +
          " has no concurrentManagedAccess, so managed memory cannot serve; use "
          "memory='registered'");
    }
  }
  void* address = nullptr;
  check_managed(cuda_calls().malloc_managed(&address, bytes), "cudaMallocManaged", bytes);
  // The advice must stand before the first touch: it decides where the pages are made and how the
  // GPU maps them.
  int error = cuda_calls().advise_preferred_host(address, bytes);
  for (int device = 0; device < devices && error == 0; ++device) {
    error = cuda_calls().advise_accessed_by(address, bytes, device);
  }
  if (error != 0 && cuda_calls().free_managed(address) != 0) cuda_calls().last_error();
  check_managed(error, "cudaMemAdvise", bytes);
  return address;
}

// First and last byte that the tensor's elements span, whatever its strides.
std::pair<char*, int64_t> span_of(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {static_cast<char*>(tensor.data_ptr()), (last + 1) * element_bytes(tensor)};
}

}  // namespace

Tensor host_empty(int64_t bytes, int64_t kind, bool check_memory) {
  const auto wanted = static_cast<MemoryKind>(kind);
  if (bytes < 0)
    throw_value_error("host memory", "size must not be negative, got " + std::to_string(bytes));
  if (wanted != MemoryKind::kPlain && wanted != MemoryKind::kRegistered &&
      wanted != MemoryKind::kManaged) {
    throw_value_error("host memory", "kind must be 0 (plain), 1 (registered) or 2 (managed), got " +
                                         std::to_string(kind));
  }
  std::array<int64_t, 1> sizes{bytes}, strides{1};
  if (bytes == 0) return torch::stable::empty(sizes, ScalarType::Byte);
  if (wanted != MemoryKind::kPlain) refuse_during_capture("host memory", kMakeBefore);
  if (check_memory) refuse_if_short(bytes);

  auto block = std::make_unique<Block>();
  block->kind = wanted;
  block->bytes = bytes;
  block->base = static_cast<char*>(wanted == MemoryKind::kManaged ? allocate_managed(bytes)
                                                                  : map_pages(bytes));
  overlaps_books(block->base, bytes);  // forgets what lay here, pinned, before its storage left
  fill_with_zeros(block->base, bytes);
  if (wanted == MemoryKind::kRegistered) {
    if (const int error = register_pieces(block->base, bytes, false); error != 0) {
      unmap_pages(block->base, bytes);
      throw std::runtime_error(registration_failure(bytes, error));
    }
  }
  char* base = block->base;
  remember(std::move(block));
  return torch::stable::from_blob(base, sizes, strides, Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Byte,
                                  [](void* data) { tensor_gone(static_cast<char*>(data)); });
}

int64_t host_register(const Tensor& tensor) {
  constexpr const char* kOp = "pin_memory_";
  if (!tensor.is_cpu())
    throw_value_error(kOp, "the tensor must be on the CPU, it is on " + device_text(tensor));
  if (tensor.layout() != torch::headeronly::Layout::Strided) {
    throw_value_error(kOp, "the tensor must be dense (strided)");
  }
  if (tensor.numel() == 0) return 0;
  refuse_during_capture(kOp, kMakeBefore);
  const auto [base, bytes] = span_of(tensor);
  if (overlaps_books(base, bytes)) {
    throw_value_error(
        kOp,
        "the tensor's memory overlaps memory that speedtorch has pinned or allocated already; "
        "unpin_memory_ that tensor first, or make the table with memory='registered'");
  }
  int kind = 0;
  if (cuda_calls().pointer_kind(base, &kind) != 0) {
    cuda_calls().last_error();
  } else if (static_cast<PointerKind>(kind) != PointerKind::kPageable) {
    throw_value_error(kOp, "the tensor's memory is pinned already, by another library");
  }
  auto block = std::make_unique<Block>();
  block->kind = MemoryKind::kRegistered;
  block->in_place = true;
  block->base = base;
  block->bytes = bytes;
  int error = register_pieces(base, bytes, false);
  if (error != 0 && register_pieces(base, bytes, true) == 0) {  // a read-only mapping of a file
    block->read_only = true;
    error = 0;
  }
  if (error != 0) throw std::runtime_error(registration_failure(bytes, error));
  static std::atomic<int64_t> pins{0};
  const int64_t pin = ++pins;
  block->pin = pin;
  block->pinned = tensor;
  remember(std::move(block));
  return pin;
}

void host_unregister(int64_t pin, bool tensor_is_gone) { unpin_in_place(pin, tensor_is_gone); }

int64_t memory_kind(const Tensor& tensor) {
  if (tensor.is_cuda()) return static_cast<int64_t>(MemoryKind::kCuda);
  if (tensor.numel() == 0) return static_cast<int64_t>(MemoryKind::kPlain);
  if (const auto kind = kind_in_books(tensor.data_ptr())) return static_cast<int64_t>(*kind);
  int kind = 0;
  if (cuda_calls().pointer_kind(tensor.data_ptr(), &kind) != 0) {
    cuda_calls().last_error();
    return static_cast<int64_t>(MemoryKind::kPlain);
  }
  const auto found = static_cast<PointerKind>(kind);
  if (found == PointerKind::kManaged) return static_cast<int64_t>(MemoryKind::kManaged);
  return static_cast<int64_t>(found == PointerKind::kHost ? MemoryKind::kPinned
                                                          : MemoryKind::kPlain);
}

}  // namespace speedtorch
