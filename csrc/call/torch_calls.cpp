// Calls into torch; see torch_calls.h.

#include "call/torch_calls.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "memory/host_memory.h"

namespace speedtorch {
namespace {

constexpr auto kCpu = torch::headeronly::DeviceType::CPU;
// speedtorch/ops/functions.py recognizes this prefix and raises torch.OutOfMemoryError.
constexpr const char* kOutOfMemory = "out of memory: ";

// Torch's message about its last failure, if this version of torch exposes it.
std::string torch_message() {
  using GetMessage = const char* (*)();
  static const GetMessage get_message = reinterpret_cast<GetMessage>(
      dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  const char* message = get_message == nullptr ? nullptr : get_message();
  return message == nullptr ? "" : message;
}

// Runs a call into torch. The stable ABI reports only that a call failed. `what()` names the call;
// `unknown` is the message if torch exposes none.
template <typename What, typename Call>
auto call_torch(const char* op, const What& what, const Call& call, const char* unknown = "") {
  try {
    return call();
  } catch (const std::runtime_error&) {
    const std::string message = torch_message();
    const bool is_memory = message.find("out of memory") != std::string::npos;
    throw std::runtime_error(
        text(op, ": ",
             (is_memory         ? kOutOfMemory
              : message.empty() ? unknown
                                : ""),
             "torch failed at ", what(),
             (message.empty() ? ". Torch printed its message to standard error" : ": " + message)));
  }
}

std::string size_text(const std::vector<int64_t>& shape, ScalarType dtype) {
  return "shape " + shape_text(shape) + " and dtype " + torch::headeronly::toString(dtype);
}

// torch::stable::empty takes three times as long as this call, because it uses the dispatcher.
Tensor empty_like_device(const std::vector<int64_t>& shape, ScalarType dtype, const Tensor& on) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(shape[d], 1);
  }
  int32_t device_type = 0, device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(on.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(on.get(), &device_index));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                               static_cast<int32_t>(dtype), device_type, device_index, &made));
  return Tensor(made);
}

}  // namespace

Tensor new_tensor(const char* op, const std::vector<int64_t>& shape, ScalarType dtype,
                  const Tensor& on) {
  return call_torch(
      op,
      [&] {
        return "allocating a tensor of " + size_text(shape, dtype) + " on " + device_text(on);
      },
      [&] { return empty_like_device(shape, dtype, on); }, on.is_cuda() ? kOutOfMemory : "");
}

std::vector<Tensor> new_lists(const char* op, const std::vector<int64_t>& lengths, const Tensor& on,
                              bool shares_memory) {
  std::vector<Tensor> lists;
  if (!shares_memory) {
    for (const int64_t size : lengths) {
      lists.push_back(new_tensor(op, {size}, ScalarType::Long, on));
    }
    return lists;
  }
  const auto aligned = [](int64_t length) { return (length + 31) / 32 * 32; };  // to 256 bytes
  int64_t end = 0;
  for (const int64_t length : lengths) end += aligned(length);
  const Tensor all = new_tensor(op, {end}, ScalarType::Long, on);
  call_torch(
      op, [] { return "making views of a tensor"; },
      [&] {
        int64_t begin = 0;
        for (const int64_t length : lengths) {
          lists.push_back(view_of_list(all, begin, length));
          begin += aligned(length);
        }
      });
  return lists;
}

Tensor view_of_list(const Tensor& list, int64_t begin, int64_t length) {
  constexpr int64_t kStride = 1;
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(list.get(), 1, &length, &kStride, begin, &made));
  return Tensor(made);
}

Tensor new_pinned(const char* op, const std::vector<int64_t>& shape, const Tensor& like) {
  return call_torch(
      op, [&] { return "allocating a pinned tensor of " + size_text(shape, like.scalar_type()); },
      [&] {
        return torch::stable::empty(shape, like.scalar_type(), torch::headeronly::Layout::Strided,
                                    Device(kCpu), true);
      });
}

Tensor copy_to_cpu(const char* op, const Tensor& tensor) {
  return call_torch(
      op, [] { return "copying a tensor to the CPU"; },
      [&] { return torch::stable::to(tensor, Device(kCpu)); });
}

#ifdef SPEEDTORCH_CUDA

Tensor ids_to_device(const char* op, const Ids& ids, const Tensor& on,
                     const CurrentStream& stream) {
  stream.check_not_capturing(
      op,
      "the ids are on the CPU, so replays would repeat the ids of this call. Pass ids on the GPU");
  // The driver stages pageable memory before a copy returns. The GPU reads other host memory after
  // the return, when the caller may have changed the ids, so these are cloned first.
  const bool pageable = static_cast<MemoryKind>(memory_kind(ids.keep)) == MemoryKind::kPlain;
  const Tensor source = pageable ? ids.keep
                                 : call_torch(
                                       op, [] { return "copying ids"; },
                                       [&] { return torch::stable::clone(ids.keep); });
  const Tensor there = new_tensor(op, shape_of(source), source.scalar_type(), on);
  copy(op, source, there, false);
  return there;
}

#endif

void copy(const char* op, const Tensor& from, const Tensor& to, bool wait) {
  Tensor target = to;
  call_torch(
      op, [&] { return "copying between " + device_text(from) + " and " + device_text(to); },
      [&] { return torch::stable::copy_(target, from, !wait); });
}

void mark_written(const char* op, const Tensor& tensor) {
  // An in-place operation without effect increments the version, which views share.
  call_torch(
      op,
      [] {
        return "marking a tensor as written (writes to a leaf that requires grad need "
               "torch.no_grad())";
      },
      [&] {
        StableIValue stack[] = {torch::stable::detail::from(tensor), 0, 0};
        STABLE_TORCH_ERROR_CODE_CHECK(
            torch_call_dispatcher("aten::transpose_", "", stack, TORCH_ABI_VERSION));
        return torch::stable::detail::to<Tensor>(stack[0]);
      });
}

}  // namespace speedtorch
