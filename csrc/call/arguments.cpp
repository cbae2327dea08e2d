// Implements the argument checks; see arguments.h.

#include "call/arguments.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "call/torch_calls.h"
#include "core/gpu.h"
#include "memory/host_memory.h"

namespace speedtorch {
namespace {

std::string name_of(const Argument& argument, size_t at) {
  return argument.of_list ? item(argument.name, at) : argument.name;
}

[[noreturn]] void throw_rule(const char* op, const Argument& argument, size_t at,
                             const std::string& rule) {
  throw_value_error(op, name_of(argument, at), " ", rule);
}

void check_kind(const char* op, const Argument& argument, size_t at) {
  const Tensor& tensor = argument.first[at];
  if (!tensor.defined()) throw_rule(op, argument, at, "must be a tensor, got None");
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    throw_rule(op, argument, at, "must be on the CPU or on a CUDA device");
  }
  if (tensor.layout() != torch::headeronly::Layout::Strided) {
    throw_rule(op, argument, at, "must be a dense (strided) tensor; call .to_dense()");
  }
  try {
    tensor.scalar_type();
  } catch (const std::runtime_error&) {
    throw_rule(
        op, argument, at,
        "has an unsupported dtype (quantized, or bits). Pass .int_repr() or .dequantize() of a "
        "quantized tensor, or a .view() of another dtype");
  }
}

// A dimension of more than one element.
struct Dimension {
  int64_t size;
  int64_t stride_bytes;
};

constexpr size_t kMaxDimensions = 64;  // torch's maximum

}  // namespace

std::string Arguments::Extent::name() const { return name_of(*argument, at); }

Arguments::Extent Arguments::extent_of(const Argument& argument, size_t at) const {
  const Tensor& tensor = argument.first[at];
  const int64_t item = element_bytes(tensor);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  std::array<Dimension, kMaxDimensions> dims;  // the first `count` are valid
  size_t count = 0;
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    last += (sizes[d] - 1) * strides[d] * item;
    if (sizes[d] > 1 && count < dims.size()) dims[count++] = {sizes[d], strides[d] * item};
  }
  int64_t storage_bytes = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &storage_bytes));
  const int64_t needed = tensor.storage_offset() * item + last + item;
  if (storage_bytes < needed) {
    throw_rule(
        op_, argument, at,
        "needs " + std::to_string(needed) + " bytes of storage, but its storage has " +
            std::to_string(storage_bytes) +
            ", because untyped_storage().resize_() freed or shrank it. Resize the storage first");
  }
  Extent extent{.argument = &argument,
                .at = at,
                .begin = static_cast<const char*>(tensor.data_ptr()),
                .end = nullptr,
                .run_bytes = item,
                .step_bytes = 0};
  extent.end = extent.begin + last + item;
  // From the smallest stride up, dimensions extend the run while they leave no gap. The others
  // repeat the run at steps.
  std::sort(dims.begin(), dims.begin() + count,
            [](const Dimension& a, const Dimension& b) { return a.stride_bytes < b.stride_bytes; });
  for (size_t d = 0; d < count; ++d) {
    if (extent.step_bytes == 0 && dims[d].stride_bytes <= extent.run_bytes) {
      extent.run_bytes += (dims[d].size - 1) * dims[d].stride_bytes;
    } else {
      extent.step_bytes = std::gcd(extent.step_bytes, dims[d].stride_bytes);
    }
  }
  return extent;
}

// The distance between runs of two tensors is a constant plus multiples of the greatest common
// divisor of their steps. This test is exact for fields of one record and for rows at regular
// distances.
bool Arguments::share_a_byte(const Extent& a, const Extent& b) {
  if (a.begin >= b.end || b.begin >= a.end) return false;
  const int64_t step = std::gcd(a.step_bytes, b.step_bytes);
  if (step == 0) return true;
  const int64_t apart = (((b.begin - a.begin) % step) + step) % step;
  return apart < a.run_bytes || step - apart < b.run_bytes;
}

Arguments::Arguments(const char* op, std::initializer_list<Argument> all, bool throws_pending)
    : op_(op), all_(all) {
  if (throws_pending) speedtorch::throw_pending();
  size_t tensors = 0;
  for (const Argument& argument : all_) tensors += argument.count;
  extents_.reserve(tensors);
  for (const Argument& argument : all_) {
    for (size_t at = 0; at < argument.count; ++at) check_kind(op, argument, at);
  }
  for (const Argument& argument : all_) {
    for (size_t at = 0; at < argument.count; ++at) {
      if (argument.first[at].numel() > 0) extents_.push_back(extent_of(argument, at));
    }
  }
}

void Arguments::check_memory() const {
  for (const Extent& mine : extents_) {
    if (!mine.argument->is_written) continue;
    for (const Extent& other : extents_) {
      // Compares each pair of written tensors once.
      if (other.argument->is_written && &other <= &mine) continue;
      if (!share_a_byte(mine, other)) continue;
      const std::string remedy =
          other.argument->is_written
              ? ", and both are written. Pass tensors without common elements"
              : ". Pass " + other.name() + ".clone()";
      throw_value_error(op_, mine.name(), " and ", other.name(), " overlap in memory", remedy);
    }
  }
  if (!registry_has_rules()) return;
  for (const Extent& extent : extents_) {
    if (!extent.tensor().is_cpu()) continue;
    check_access(op_, [&] { return extent.name(); }, extent.begin, extent.argument->is_written);
  }
}

void Arguments::mark_written() const {
  for (const Argument& argument : all_) {
    if (!argument.is_marked) continue;
    for (size_t at = 0; at < argument.count; ++at)
      speedtorch::mark_written(op_, argument.first[at]);
  }
}

}  // namespace speedtorch
